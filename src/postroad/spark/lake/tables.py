"""The lake: Delta tables of events, stored filters, attachments, topology and deliveries (spec P4).

    LAKE/TABLE/_delta_log/...                            what is of the table, version by version
    LAKE/TABLE/date=.../origin=.../part-....parquet      its rows

Whoever adds rows writes files first (`files.py`), which nobody sees, and then commits them: they are there
all at once or not at all. A commit of a batch carries the batch's number as an application transaction, so
that a batch which is committed again changes nothing. Compaction commits files in place of others; two that
replace the same ones exclude each other, and what lands meanwhile stays.

Any engine that reads Delta reads a lake. docs/reference/pipeline.md describes every column.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from postroad.errors import StorageError, UsageError
from postroad.spark.lake import rows as arrow
from postroad.spark.lake.files import PARTITIONS, Added, is_own_name, write_rows
from postroad.spark.lake.store import Store, plain_failures, reason, store_at

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

ATTRIBUTES: Final = "map<string, struct<text: string, integer: bigint, `float`: double, boolean: boolean>>"
SCHEMAS: Final = {
    "events": (
        f"id string, publisher string, broker string, time_ms bigint, topic string, attributes {ATTRIBUTES},"
        " payload binary, pubend string, tick bigint, date date, origin string"
    ),
    "filters": (
        "broker string, name string, sequence bigint, kind string, neighbour string, subscriber string,"
        " m bigint, n bigint, k int, count bigint, lo_ms bigint, hi_ms bigint,"
        " singles array<struct<lo_ms: bigint, hi_ms: bigint>>, opened_us bigint, stored_us bigint,"
        " replaces bigint, final boolean, record binary, date date, origin string"
    ),
    "attachments": (
        "broker string, name string, number bigint, position int, whole boolean, what string, at_us bigint,"
        " kind string, who string, until_us bigint, noted_us bigint, promise struct<persist_us: bigint,"
        " lag_us: bigint, skew_us: bigint, jitter_us: bigint, filter_us: bigint>, date date"
    ),
    "topology": (
        "broker string, name string, number bigint, boot bigint, at_us bigint,"
        " links array<struct<broker: string, cost: bigint>>, skew_us bigint, jitter_us bigint,"
        " routing string, date date"
    ),
    "deliveries": (
        "what string, id string, subscriber string, session bigint, pubend string, tick bigint,"
        " start_tick bigint, broker string, at_us bigint, number bigint, position int, date date,"
        " origin string"
    ),
    "queue_events": (
        "what string, id string, inbox string, who string, form string, at_us bigint, expires_us bigint,"
        " broker string, number bigint, position int, date date"
    ),
    "best_effort_links": (
        "broker string, neighbour string, boot bigint, at_us bigint, sent bigint, received bigint,"
        " number bigint, date date"
    ),
    "repairs": (
        "broker string, subscriber string, boot bigint, at_us bigint, received bigint, detected bigint,"
        " requests bigint, recovered bigint, given_up bigint, duplicates bigint, slowest_us bigint,"
        " number bigint, date date"
    ),
    "subscriptions": "name string, topic string, `where` string, shared boolean, since_us bigint",
    "landing": (
        "feed string, subscription string, batch bigint, start string, until string, files string,"
        " waiting binary, at_us bigint"
    ),
}
LAYOUT: Final = 2  # of tables; 1 was folders of Parquet without a log
LAYOUT_PROPERTY: Final = "postroad.layout"
OLD_SEGMENT: Final = "segment="  # folders of a table of layout 1 begin so
COMPACTED: Final = "compact"  # files that compaction makes begin so
KEEP_HOURS: Final = 168  # versions of tables: a week
KEPT_HOURS: Final = {"landing": 1}  # by table, where it is less: each look at a table lists its log
COMMIT_TRIES: Final = 20  # against others who commit at the same time
_ASIDE: Final = "_aside-"  # written here first; Spark leaves out what begins so


class OvertakenError(StorageError):
    """Somebody else took the place of the same files first."""


class Batch(NamedTuple):
    """Which batch of whom a commit is."""

    by: str
    number: int


class File(NamedTuple):
    """A file of a table, as its log has it."""

    path: str
    size: int
    rows: int
    values: dict[str, str]
    last: dict[str, Any]  # the highest value of columns, where that is known

    @property
    def compacted(self) -> bool:
        return self.path.rpartition("/")[2].startswith(COMPACTED)


class Tables:
    """The tables of one lake, without Spark."""

    def __init__(self, place: str | Path | Store) -> None:
        self.store = place if isinstance(place, Store) else store_at(place)

    def open(self, table: str) -> DeltaTable | None:
        """A table as it is now; None if there is none yet. UsageError if it is not one of ours."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaProtocolError, TableNotFoundError

        check_table(table)
        url = self.store.table(table)
        folder = self.store.folder
        if folder is not None and not (folder / table).is_dir():
            return None
        with plain_failures(f"{url} cannot be read"):
            try:
                opened = DeltaTable(url, storage_options=dict(self.store.options))
            except TableNotFoundError:
                _check_empty(self.store, table)
                return None
            except DeltaProtocolError as error:
                raise UsageError(f"{url} needs a later Postroad or deltalake: {error}") from None
        _check_ours(opened, table, url)
        return opened

    def check_place(self) -> None:
        """UsageError if no lake can be here."""
        folder = self.store.folder
        if folder is not None and folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is no folder: a lake is one")
        surrounding = self.store.surrounding_table()
        if surrounding is not None:
            raise UsageError(
                f"{self.store} cannot be a lake: {surrounding} is a Delta table, whose own clean-up would"
                " remove what is put into it"
            )
        for table in SCHEMAS:
            self.open(table)

    def check(self, *tables: str) -> None:
        """UsageError unless there is a lake with something in these tables."""
        folder = self.store.folder
        if folder is not None and not folder.is_dir():
            raise UsageError(f"there is no lake at {folder}: `postroad pipeline land` makes one")
        for table in tables:
            if not self.files(table):
                raise UsageError(
                    f"the lake at {self.store} has no {table} yet: `postroad pipeline land` adds them"
                )

    def files(self, table: str) -> list[File]:
        """What is of a table now, in order of their names."""
        opened = self.open(table)
        return [] if opened is None else files_in(opened, table)

    def landed(self, table: str, by: str) -> int:
        """The number of the last batch of this one that is in a table; -1 if there is none."""
        opened = self.open(table)
        return -1 if opened is None else _landed(opened, by)

    def append(self, table: str, rows: pa.Table, batch: Batch | None = None) -> bool:
        """Add rows; False if the batch is there already, or there are none."""
        self.open(table)  # before anything is written where something else's files are
        return self.commit(table, write_rows(self.store, table, [rows]), batch)

    def overwrite(self, table: str, rows: pa.Table, batch: Batch | None = None) -> bool:
        """Put rows in the place of all that a table has; False if somebody else committed that batch."""
        replaced = self.files(table)
        return self.commit(table, write_rows(self.store, table, [rows]), batch, replaced)

    def fetch(self, table: str) -> pa.Table:
        """All rows of a small table without partitions."""
        parts: list[pa.Table] = []
        with plain_failures(f"{self.store.table(table)} cannot be read"):
            for file in self.files(table):
                with self.store.open(table, file.path) as opened:
                    parts.append(fitted(pq.read_table(opened), table))
        return pa.concat_tables(parts) if parts else arrow.SCHEMAS[table].empty_table()

    def commit(
        self, table: str, added: Sequence[Added], batch: Batch | None = None, removed: Iterable[File] = ()
    ) -> bool:
        """Make files part of a table, in the place of others; False if there is nothing to do.

        OvertakenError if one of those that it takes the place of is gone.
        """
        from deltalake.exceptions import CommitFailedError

        gone = list(removed)
        if not added and not gone:
            return False
        with plain_failures(f"{self.store.table(table)} cannot be written"):
            for left in reversed(range(COMMIT_TRIES)):
                there = self.open(table)
                if there is not None and batch is not None and _landed(there, batch.by) >= batch.number:
                    return False  # its files may have been put together with others, and removed
                self.check_written(table, added)
                opened = there or self.make(table)
                if gone and not {file.path for file in gone} <= {
                    file.path for file in files_in(opened, table)
                }:
                    raise OvertakenError(f"{self.store.table(table)} has been changed by another process")
                try:
                    before = opened.version()
                    _commit(opened, table, added, batch, gone)
                    opened.update_incremental()
                    self.store.sync_log(table, range(before + 1, opened.version() + 1))
                    return True
                except CommitFailedError as error:
                    if gone:
                        raise OvertakenError(f"{self.store.table(table)}: {reason(error)}") from None
                    if not left:
                        raise
        return False

    def check_written(self, table: str, added: Sequence[Added]) -> None:
        """StorageError if files that are to be of a table are not there: its folder went away, or executors
        on other machines have one of their own under its name."""
        missing = self.store.missing(table, (file.path for file in added))
        if missing is not None:
            raise StorageError(
                f"{self.store.table(table)} has no {missing}, which was written for it: it was removed, or"
                " the place is not the same for this process and for executors"
            )

    def make(self, table: str) -> DeltaTable:
        """A table without rows, or the one there is."""
        from deltalake import DeltaTable

        made = DeltaTable.create(
            self.store.table(table),
            arrow.SCHEMAS[table],
            mode="ignore",  # another one may have made it by now
            partition_by=list(PARTITIONS[table]),
            configuration={LAYOUT_PROPERTY: str(LAYOUT), **_retention(KEPT_HOURS.get(table, KEEP_HOURS))},
            storage_options=dict(self.store.options),
            raise_if_key_not_exists=False,
        )
        _check_ours(made, table, self.store.table(table))
        return made


class Lake(Tables):
    """A lake, through one Spark session."""

    def __init__(self, spark: SparkSession, place: str | Path | Store) -> None:
        super().__init__(place)
        self.spark = spark

    def read(self, table: str, files: Sequence[File] | None = None) -> DataFrame:
        """The table, or these files of it; empty if nothing was landed yet."""
        chosen = self.files(table) if files is None else list(files)
        schema = SCHEMAS[table]
        if not chosen:
            return self.spark.createDataFrame([], schema)
        folder = self.store.folder
        if folder is not None:
            paths = [spark_path(folder / table / file.path) for file in chosen]
            reader = self.spark.read.schema(schema).option("basePath", str(folder / table))
            return reader.parquet(*paths)
        rows = self.spark.range(0, len(chosen), 1, len(chosen))
        return rows.mapInArrow(_reader(self.store, table, chosen), schema)

    def write(self, table: str, rows: DataFrame, kind: str) -> list[Added]:
        """Files with these rows, by executors; they are of the table once they are committed."""
        import msgspec

        store = self.store

        def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            tables = (pa.Table.from_batches([batch]) for batch in batches)
            done = write_rows(store, table, tables, kind)
            yield pa.record_batch({"added": [msgspec.json.encode(file) for file in done]}, schema=_ADDED)

        answers = rows.select(*columns(table)).mapInArrow(write, "added binary").collect()
        return [msgspec.json.decode(row.added, type=Added) for row in answers]


_ADDED: Final = pa.schema([("added", pa.binary())])


def _reader(
    store: Store, table: str, files: list[File]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For files that Spark cannot open itself without more jars."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for at in (at for batch in batches for at in batch.column(0).to_pylist()):
            with plain_failures(f"{store.table(table)} cannot be read"):
                opened = pq.ParquetFile(store.open(table, files[at].path))
                for batch in opened.iter_batches():
                    rows = fitted(pa.Table.from_batches([batch]), table, files[at].values)
                    yield from rows.combine_chunks().to_batches()

    return read


def fitted(rows: pa.Table, table: str, values: dict[str, str] | None = None) -> pa.Table:
    """Rows of a file with all columns of its table: those of its partition, and NULL where it has none."""
    for field in arrow.SCHEMAS[table]:
        if field.name not in rows.column_names:
            given = (values or {}).get(field.name)
            count, kind = rows.num_rows, field.type
            column = pa.nulls(count, kind) if given is None else pa.repeat(given, count).cast(kind)
            rows = rows.append_column(field, column)
    return rows.select(arrow.SCHEMAS[table].names).cast(arrow.SCHEMAS[table])


def files_in(opened: DeltaTable, table: str) -> list[File]:
    highest = "max."
    return sorted(
        File(
            path=action["path"],
            size=action["size_bytes"],
            rows=action["num_records"] or 0,
            values={name: str(action[f"partition.{name}"]) for name in PARTITIONS[table]},
            last={
                name.removeprefix(highest): value
                for name, value in action.items()
                if name.startswith(highest) and value is not None
            },
        )
        for action in pa.table(opened.get_add_actions(flatten=True)).to_pylist()
    )


def keep_versions(opened: DeltaTable, hours: int) -> None:
    """Have versions of a table readable for so long after they were replaced."""
    wanted = _retention(hours)
    there = opened.metadata().configuration
    if any(there.get(name) != value for name, value in wanted.items()):
        opened.alter.set_table_properties(wanted)


def _retention(hours: int) -> dict[str, str]:
    names = ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration")
    return dict.fromkeys(names, f"interval {hours} hours")


def _landed(opened: DeltaTable, by: str) -> int:
    number = opened.transaction_version(by)
    return -1 if number is None else number


def _commit(
    opened: DeltaTable, table: str, added: Sequence[Added], batch: Batch | None, removed: list[File]
) -> None:
    from deltalake import CommitProperties, Transaction
    from deltalake.transaction import AddAction, RemoveAction

    actions: list[AddAction | RemoveAction] = [
        AddAction(file.path, file.size, file.values, file.made_ms, True, file.stats) for file in added
    ]
    now_ms = time.time_ns() // 1_000_000
    actions += [RemoveAction(file.path, True, now_ms, file.size, dict(file.values)) for file in removed]
    transactions = None if batch is None else [Transaction(batch.by, batch.number)]
    opened.create_write_transaction(
        actions,
        "append",
        _evolved(opened, table),
        list(PARTITIONS[table]),
        commit_properties=CommitProperties(app_transactions=transactions),
    )


def _evolved(opened: DeltaTable, table: str) -> Any:
    """The table's schema, after columns were added to it that it lacks: a later Postroad has more."""
    from deltalake import Schema

    there = {field.name for field in opened.schema().fields}
    new = [field for field in Schema.from_arrow(arrow.SCHEMAS[table]).fields if field.name not in there]
    if new:
        opened.alter.add_columns(new)
        opened.update_incremental()
    return opened.schema()


def _check_ours(opened: DeltaTable, table: str, url: str) -> None:
    from deltalake import Schema

    layout = opened.metadata().configuration.get(LAYOUT_PROPERTY)
    if layout is None:
        raise UsageError(f"{url} is a Delta table of something else: a lake has a place of its own")
    if not layout.isdecimal() or int(layout) > LAYOUT:
        raise UsageError(
            f"{url} has layout {layout}, from a later Postroad; this one knows layouts up to {LAYOUT}"
        )
    there = {field.name: json.loads(field.type.to_json()) for field in opened.schema().fields}
    for field in Schema.from_arrow(arrow.SCHEMAS[table]).fields:
        kind = json.loads(field.type.to_json())
        if there.get(field.name, kind) != kind:
            raise UsageError(f"{url} is no table of a lake: its {field.name} is {there[field.name]}")


def _check_empty(store: Store, table: str) -> None:
    """UsageError if files are here that landing did not write: a log made over them would, in time, have
    compaction remove them."""
    strangers = sorted(path for path in store.paths(table) if not is_own_name(path))
    if any(path.startswith(OLD_SEGMENT) for path in strangers):
        raise UsageError(
            f"{store} is a lake of an earlier Postroad: `postroad pipeline migrate` brings it over"
        )
    if strangers:
        raise UsageError(
            f"{store.table(table)} has files of something else, such as {strangers[0]}: a lake has a place of"
            " its own"
        )


def check_table(table: str) -> None:
    if table not in SCHEMAS:
        raise UsageError(f"a lake has no table {table}: it has {', '.join(SCHEMAS)}")


def spark_path(path: Path) -> str:
    """For a reader of Spark, to which some characters are a pattern of names."""
    return re.sub(r"[\\*?\[\]{}]", r"\\\g<0>", str(path))


def columns(table: str) -> list[str]:
    """The names of a table's columns, in order."""
    return list(arrow.SCHEMAS[table].names)


def write_folder(write: Callable[[str], None], target: Path) -> None:
    """Let `write` fill a folder aside, then give it its name: it is there whole or not at all."""
    if target.exists():
        raise UsageError(f"{target} exists already: choose another place, or remove it")
    aside = target.parent / f"{_ASIDE}{target.name}-{uuid.uuid4().hex}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write(str(aside))
        aside.rename(target)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
