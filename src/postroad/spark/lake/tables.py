"""The lake: Parquet folders of events, stored filters, attachments, topology and deliveries (spec P4).

    LAKE/TABLE/segment=NAME/date=.../origin=.../*.parquet
    LAKE/TABLE/_replaced/NAME.json      {"segments": [...], "landed": [...]}: what NAME took the place of

Whatever is added to a table is one segment. It is written aside and appears by one rename, so it is there
whole or not at all, and writing it again under the same name changes nothing: that is what makes landing
exactly once. Compaction writes one segment in place of many. The list of those it replaces becomes valid
together with it: a reader leaves out what a list names once the list's own segment is there. What was
replaced is then deleted; a crash in between costs space until the next compaction, not rows. One process
lands in a lake at a time, and one compacts it: each has a lock of its own.

A batch may be landed again after its segment was replaced, but only the last batch of a query. So a list also
names the last segment of every query that ever was, and lists of compactions that were replaced are deleted.

The folder must be one that driver and executors share. docs/pipeline.md describes every column.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
}
PARTITIONS: Final = {
    "events": ("date", "origin"),
    "filters": ("date", "origin"),
    "attachments": ("date",),
    "topology": ("date",),
    "deliveries": ("date", "origin"),
}
COMPACTED: Final = "compact-"  # segments that compaction makes begin so
_SEGMENT: Final = "segment="
_REPLACED: Final = "_replaced"
_ASIDE: Final = "_aside-"  # written here first; Spark leaves out what begins so
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}")
_BATCH: Final = re.compile(r"(.*-)([0-9]{9,})(-[a-z]+)?")  # a segment of a batch of a query


class _Replaced(msgspec.Struct, frozen=True):
    segments: tuple[str, ...]
    landed: tuple[str, ...] = ()  # names that compactions before this one replaced, the last of each query

    @property
    def known(self) -> frozenset[str]:
        return frozenset((*self.segments, *self.landed))


class Lake:
    """One lake's folder, through one Spark session."""

    def __init__(self, spark: SparkSession, path: str | Path) -> None:
        self.spark = spark
        self.path = Path(path)

    def check(self, *tables: str) -> Lake:
        """UsageError unless there is a lake with something in these tables."""
        check_lake(self.path, *tables)
        return self

    def segments(self, table: str) -> list[str]:
        """The names of the segments that are valid now, sorted."""
        return segments(self.path, table)

    def read(self, table: str, segments: Sequence[str] | None = None) -> DataFrame:
        """The table, or these segments of it, with a column `segment`; empty if nothing was landed yet."""
        chosen = self.segments(table) if segments is None else list(segments)
        folder = table_folder(self.path, table)
        schema = f"{SCHEMAS[table]}, segment string"
        if not chosen:
            return self.spark.createDataFrame([], schema)
        paths = [spark_path(folder / f"{_SEGMENT}{name}") for name in chosen]
        reader = self.spark.read.schema(schema).option("basePath", str(folder))
        return reader.parquet(*paths)

    def append(self, table: str, rows: DataFrame, segment: str) -> bool:
        """Add rows as a segment; False if a segment of that name is there already."""
        lists = _lists(table_folder(self.path, table))
        if segment in self.segments(table) or any(segment in held.known for held in lists.values()):
            return False
        self._write(table, rows, segment)
        return True

    def replace(self, table: str, rows: DataFrame, segment: str, replaced: Iterable[str]) -> None:
        """Put one segment in the place of others."""
        folder = table_folder(self.path, table)
        landed = _last_batches(name for held in _lists(folder).values() for name in held.known)
        made = _Replaced(tuple(sorted(replaced)), tuple(landed))
        # The list says nothing until its segment is there.
        put(folder / _REPLACED / f"{_checked(segment)}.json", msgspec.json.encode(made))
        self._write(table, rows, segment)
        self.clean(table)

    def clean(self, table: str) -> None:
        """Delete what was replaced, and lists that later ones make superfluous."""
        folder = table_folder(self.path, table)
        lists = _lists(folder)
        for name, held in lists.items():
            if not (folder / f"{_SEGMENT}{name}").exists():
                continue
            for gone in held.segments:
                shutil.rmtree(folder / f"{_SEGMENT}{gone}", ignore_errors=True)
                older = lists.get(gone)
                if older is None or any((folder / f"{_SEGMENT}{one}").exists() for one in older.segments):
                    continue  # without its list they would count again
                (folder / _REPLACED / f"{gone}.json").unlink(missing_ok=True)

    def _write(self, table: str, rows: DataFrame, segment: str) -> None:
        target = table_folder(self.path, table) / f"{_SEGMENT}{_checked(segment)}"
        # Whoever wrote it before was killed: nobody else writes a segment of this name.
        for left in target.parent.glob(f"{_ASIDE}{target.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        writer = rows.select(*columns(table)).write.partitionBy(*PARTITIONS[table])
        write_folder(writer.parquet, target)


def check_lake(path: Path, *tables: str) -> None:
    """UsageError unless there is a lake with something in these tables."""
    if not path.is_dir():
        raise UsageError(f"there is no lake at {path}: `postroad pipeline land` makes one")
    for table in tables:
        if not segments(path, table):
            raise UsageError(f"the lake at {path} has no {table} yet: `postroad pipeline land` adds them")


def segments(path: Path, table: str) -> list[str]:
    """The names of a table's segments that are valid now, sorted."""
    folder = table_folder(path, table)
    there = {one.name.removeprefix(_SEGMENT) for one in folder.glob(f"{_SEGMENT}*")}
    for name, replaced in _lists(folder).items():
        if name in there:
            there -= set(replaced.segments)
    return sorted(there)


def table_folder(path: Path, table: str) -> Path:
    if table not in SCHEMAS:
        raise UsageError(f"a lake has no table {table}: it has {', '.join(SCHEMAS)}")
    return path / table


def spark_path(path: Path) -> str:
    """For a reader of Spark, to which some characters are a pattern of names."""
    return re.sub(r"[\\*?\[\]{}]", r"\\\g<0>", str(path))


def _last_batches(names: Iterable[str]) -> list[str]:
    """Of segments of batches, the last of each query."""
    last: dict[tuple[str, str], tuple[int, str]] = {}
    for name in names:
        found = _BATCH.fullmatch(name)
        if found is not None:
            of = (found[1], found[3] or "")
            last[of] = max(last.get(of, (-1, "")), (int(found[2]), name))
    return sorted(name for _, name in last.values())


def put(file: Path, content: bytes) -> None:
    """The file with this content: whole or as it was, whenever the machine stops."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f"{file.name}.new")
    with aside.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    aside.replace(file)


def _lists(folder: Path) -> dict[str, _Replaced]:
    """What compactions of a table replaced, by the name of the segment that came in its place."""
    found: dict[str, _Replaced] = {}
    for path in sorted((folder / _REPLACED).glob("*.json")):
        try:
            found[path.stem] = msgspec.json.decode(path.read_bytes(), type=_Replaced)
        except FileNotFoundError:  # deleted since it was listed: what it said is in a newer one
            return _lists(folder)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise StorageError(f"{path} cannot be read: it lists what a compaction replaced") from None
    return found


@contextmanager
def alone(file: Path, doing: str) -> Iterator[None]:
    """Hold the lock in this file, or UsageError: one process at a time may do this."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("wb")
    except OSError as error:
        raise StorageError(f"{file.parent} cannot be used: {error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process {doing} already") from None
        yield


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
    aside = target.parent / f"{_ASIDE}{target.name}-{uuid.uuid4().hex}"
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
