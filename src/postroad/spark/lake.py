"""The lake: Parquet folders of events, stored filters, attachments, topology and deliveries (spec P4).

    LAKE/TABLE/segment=NAME/date=.../origin=.../*.parquet
    LAKE/TABLE/_replaced/NAME.json      {"segments": [...]}: those that the segment NAME took the place of

Whatever is added to a table is one segment. It is written aside and appears by one rename, so it is there
whole or not at all, and writing it again under the same name changes nothing: that is what makes landing
exactly once. Compaction writes one segment in place of many. The list of those it replaces becomes valid
together with it: a reader leaves out what a list names once the list's own segment is there. What was
replaced is then deleted; a crash in between costs space, not rows.

The folder must be one that driver and executors share. docs/pipeline.md describes every column.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from postroad.errors import StorageError, UsageError

if TYPE_CHECKING:
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
        " kind string, who string, until_us bigint, date date"
    ),
    "topology": (
        "broker string, name string, number bigint, boot bigint, at_us bigint,"
        " links array<struct<broker: string, cost: bigint>>, date date"
    ),
    "deliveries": (
        "what string, id string, subscriber string, session bigint, pubend string, tick bigint,"
        " start_tick bigint, broker string, at_us bigint, number bigint, position int, date date,"
        " origin string"
    ),
}
PARTITIONS: Final = {
    "events": ("date", "origin"),
    "filters": ("date", "origin"),
    "attachments": ("date",),
    "topology": ("date",),
    "deliveries": ("date", "origin"),
}
_SEGMENT: Final = "segment="
_REPLACED: Final = "_replaced"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}")


class _Replaced(msgspec.Struct, frozen=True):
    segments: tuple[str, ...]


class Lake:
    """One lake's folder, through one Spark session."""

    def __init__(self, spark: SparkSession, path: str | Path) -> None:
        self.spark = spark
        self.path = Path(path)

    def check(self, *tables: str) -> Lake:
        """UsageError unless there is a lake with something in these tables."""
        if not self.path.is_dir():
            raise UsageError(f"there is no lake at {self.path}: `postroad pipeline land` makes one")
        for table in tables:
            if not self.segments(table):
                raise UsageError(f"the lake at {self.path} has no {table} yet")
        return self

    def segments(self, table: str) -> list[str]:
        """The names of the segments that are valid now, sorted."""
        folder = self._folder(table)
        if not folder.is_dir():
            return []
        there = {one.name.removeprefix(_SEGMENT) for one in folder.glob(f"{_SEGMENT}*")}
        for name, replaced in self._lists(table).items():
            if name in there:
                there -= set(replaced.segments)
        return sorted(there)

    def read(self, table: str, segments: Sequence[str] | None = None) -> DataFrame:
        """The table, or these segments of it, with a column `segment`; empty if nothing was landed yet."""
        chosen = self.segments(table) if segments is None else list(segments)
        folder = self._folder(table)
        schema = f"{SCHEMAS[table]}, segment string"
        if not chosen:
            return self.spark.createDataFrame([], schema)
        paths = [str(folder / f"{_SEGMENT}{name}") for name in chosen]
        reader = self.spark.read.schema(schema).option("basePath", str(folder))
        return reader.parquet(*paths)

    def append(self, table: str, rows: DataFrame, segment: str) -> bool:
        """Add rows as a segment; False if a segment of that name is there already."""
        if segment in self.segments(table) or any(
            segment in held.segments for held in self._lists(table).values()
        ):
            return False
        self._write(table, rows, segment)
        return True

    def replace(self, table: str, rows: DataFrame, segment: str, replaced: Iterable[str]) -> None:
        """Put one segment in the place of others."""
        lists = self._folder(table) / _REPLACED
        lists.mkdir(parents=True, exist_ok=True)
        gone = tuple(sorted(replaced))
        # The list says nothing until its segment is there.
        (lists / f"{_checked(segment)}.json").write_bytes(msgspec.json.encode(_Replaced(gone)))
        self._write(table, rows, segment)
        self.clean(table)

    def clean(self, table: str) -> None:
        """Delete what was replaced, and what an interrupted write left behind."""
        folder = self._folder(table)
        for name, held in self._lists(table).items():
            if not (folder / f"{_SEGMENT}{name}").exists():
                continue
            for gone in held.segments:
                shutil.rmtree(folder / f"{_SEGMENT}{gone}", ignore_errors=True)
        # Names of replaced segments are remembered, so that landing them again stays without effect.

    def _write(self, table: str, rows: DataFrame, segment: str) -> None:
        target = self._folder(table) / f"{_SEGMENT}{_checked(segment)}"
        writer = rows.select(*columns(table)).write.partitionBy(*PARTITIONS[table])
        write_folder(writer.parquet, target)

    def _lists(self, table: str) -> dict[str, _Replaced]:
        folder = self._folder(table) / _REPLACED
        found: dict[str, _Replaced] = {}
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            try:
                found[path.stem] = msgspec.json.decode(path.read_bytes(), type=_Replaced)
            except msgspec.DecodeError:
                raise StorageError(f"{path} cannot be read: it lists what a compaction replaced") from None
        return found

    def _folder(self, table: str) -> Path:
        if table not in SCHEMAS:
            raise UsageError(f"a lake has no table {table}: it has {', '.join(SCHEMAS)}")
        return self.path / table


def columns(table: str) -> list[str]:
    """The names of a table's columns, in order."""
    plain = re.sub(r"<[^<>]*>", "", SCHEMAS[table])
    while "<" in plain:
        plain = re.sub(r"<[^<>]*>", "", plain)
    return [field.split()[0] for field in plain.split(",")]


def write_folder(write: Callable[[str], None], target: Path) -> None:
    """Let `write` fill a folder aside, then give it its name: it is there whole or not at all."""
    if target.exists():
        raise UsageError(f"{target} exists already: choose another place, or remove it")
    aside = target.parent / f"_aside-{uuid.uuid4().hex}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write(str(aside))
        aside.rename(target)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _checked(segment: str) -> str:
    if _NAME.fullmatch(segment) is None:
        raise UsageError(f"a segment is named by letters, digits, '.', '_' and '-', not {segment!r}")
    return segment
