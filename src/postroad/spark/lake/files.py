"""Parquet files of a table, as executors write them; the driver commits them later (spec P4).

A file has the rows of one value of each partition column, which are in its path and not in it. What is
known of its columns goes along with it (`Added`), so that readers can leave out files without opening them.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import IO, Any, Final, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from postroad.spark.lake.rows import SCHEMAS
from postroad.spark.lake.store import Store, plain_failures
from postroad.units import MIB

PARTITIONS: Final = {
    "events": ("date", "origin"),
    "filters": ("date", "origin"),
    "attachments": ("date",),
    "topology": ("date",),
    "deliveries": ("date", "origin"),
    "queue_events": ("date",),
    "best_effort_links": ("date",),
    "repairs": ("date",),
    "subscriptions": (),
    "landing": (),
}
MAX_OPEN: Final = 32  # files of one writer; ids can name any date
PENDING_BYTES: Final = 64 * MIB  # of rows that are not in a file yet: a row group has about as much
FILE_BYTES: Final = 256 * MIB
_MAX_TEXT: Final = 64  # characters: a longer text is no bound worth keeping
_OWN_NAME: Final = re.compile(r"(?:.*/)?[a-z]+-[0-9a-f]{32}\.parquet", re.DOTALL)
SORTED: Final[dict[str, Literal["DELTA_BYTE_ARRAY", "DELTA_BINARY_PACKED"]]] = {
    "id": "DELTA_BYTE_ARRAY",
    "tick": "DELTA_BINARY_PACKED",
    "time_ms": "DELTA_BINARY_PACKED",
}
OPAQUE: Final = ("payload", "record")  # nothing repeats in them, and nobody compares them


class Added(msgspec.Struct, frozen=True):
    """A file that was written, and is of a table once it is committed."""

    path: str
    size: int
    rows: int
    values: dict[str, str]  # of the partition columns
    stats: str  # as Delta has them
    made_ms: int


class _File:
    """One that is being written."""

    def __init__(self, store: Store, table: str, values: Mapping[str, str], kind: str) -> None:
        self.values = dict(values)
        folders = "".join(f"{name}={value}/" for name, value in values.items())
        self.path = f"{folders}{kind}-{uuid.uuid4().hex}.parquet"
        self.pending: list[pa.Table] = []
        self.pending_bytes = 0
        self._schema = schema = pa.schema([field for field in SCHEMAS[table] if field.name not in values])
        self._described: list[Any] = []
        plain = [name for name in schema.names if name not in OPAQUE and name not in SORTED]
        self._store = store
        self._out: IO[bytes] = store.create(table, self.path)
        self._writer = pq.ParquetWriter(
            self._out,
            schema,
            compression="zstd",
            use_dictionary=plain,
            column_encoding={name: how for name, how in SORTED.items() if name in schema.names},
            write_statistics=[name for name in schema.names if name not in OPAQUE],
            metadata_collector=self._described,
        )

    def add(self, rows: pa.Table) -> None:
        self.pending.append(rows.select(self._schema.names))
        self.pending_bytes += rows.nbytes

    def flush(self) -> None:
        if self.pending:
            self._writer.write_table(pa.concat_tables(self.pending).combine_chunks())
            self.pending, self.pending_bytes = [], 0

    @property
    def size(self) -> int:
        return self._out.tell()

    def close(self) -> Added:
        self.flush()
        self._writer.close()
        size = self.size
        self._store.close(self._out)
        (about,) = self._described
        return Added(
            path=self.path,
            size=size,
            rows=about.num_rows,
            values=self.values,
            stats=statistics(about),
            made_ms=time.time_ns() // 1_000_000,
        )


class TableWriter:
    """Rows of one table, into as many files as they need."""

    def __init__(self, store: Store, table: str, kind: str = "part") -> None:
        self._store = store
        self._table = table
        self._kind = kind  # what names of its files begin with
        self._open: dict[tuple[str, ...], _File] = {}
        self._done: list[Added] = []

    def write(self, rows: pa.Table) -> None:
        schema = SCHEMAS[self._table]
        rows = rows.select(schema.names).cast(schema)
        with plain_failures(f"{self._store.table(self._table)} cannot be written"):
            for values, some in _parts(rows, PARTITIONS[self._table]):
                self._file(values).add(some)
            if sum(file.pending_bytes for file in self._open.values()) >= PENDING_BYTES:
                for values, file in list(self._open.items()):
                    file.flush()
                    if file.size >= FILE_BYTES:
                        self._done.append(self._open.pop(values).close())

    def _file(self, values: tuple[str, ...]) -> _File:
        if values not in self._open:
            if len(self._open) >= MAX_OPEN:
                self._done.append(self._open.pop(next(iter(self._open))).close())
            named = dict(zip(PARTITIONS[self._table], values, strict=True))
            self._open[values] = _File(self._store, self._table, named, self._kind)
        return self._open[values]

    def close(self) -> list[Added]:
        """What was written, all of it."""
        with plain_failures(f"{self._store.table(self._table)} cannot be written"):
            self._done += [file.close() for file in self._open.values()]
        self._open = {}
        return self._done


def is_own_name(path: str) -> bool:
    """Whether a file is named as those that are written here; a killed writer may have left it."""
    return _OWN_NAME.fullmatch(path) is not None


def write_rows(store: Store, table: str, rows: Iterable[pa.Table], kind: str = "part") -> list[Added]:
    writer = TableWriter(store, table, kind)
    for some in rows:
        if some.num_rows:
            writer.write(some)
    return writer.close()


def _parts(rows: pa.Table, names: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], pa.Table]]:
    """Rows by the values of these columns."""
    if not names:
        yield (), rows
        return
    partitions = rows.select(names).group_by(list(names)).aggregate([]).to_pylist()
    for values in partitions:
        mask = None
        for name, value in values.items():
            same = pc.equal(rows.column(name), pa.scalar(value, rows.schema.field(name).type))
            mask = same if mask is None else pc.and_(mask, same)
        some = rows if len(partitions) == 1 else rows.filter(mask)
        yield tuple(str(values[name]) for name in names), some


def statistics(about: Any) -> str:
    """Of a file's metadata, as Delta has it: rows, and of plain columns the bounds and how many are NULL."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    unknown: set[str] = set()
    for group in range(about.num_row_groups):
        for at in range(about.num_columns):
            column = about.row_group(group).column(at)
            name, column_stats = column.path_in_schema, column.statistics
            if "." in name or name in OPAQUE:
                continue
            if column_stats is None or not column_stats.has_null_count:
                unknown.add(name)
                continue
            nulls[name] = nulls.get(name, 0) + column_stats.null_count
            if not column_stats.has_min_max:
                if column_stats.null_count < column.num_values:
                    unknown.add(name)
                continue
            low[name] = min(low.get(name, column_stats.min), column_stats.min)
            high[name] = max(high.get(name, column_stats.max), column_stats.max)
    unknown |= {name for name in low if not _bound(low[name]) or not _bound(high[name])}
    bounds = [{name: bound for name, bound in of.items() if name not in unknown} for of in (low, high)]
    counted = {name: count for name, count in nulls.items() if name not in unknown}
    stats = {"numRecords": about.num_rows, "minValues": bounds[0], "maxValues": bounds[1]}
    return json.dumps(stats | {"nullCount": counted})


def _bound(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    return isinstance(value, int) and not isinstance(value, bool)
