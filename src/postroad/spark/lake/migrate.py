"""From layout 1, folders of Parquet, to Delta tables, in place (spec P4).

    LAKE/TABLE/segment=NAME/date=.../origin=.../*.parquet      what was added at once
    LAKE/TABLE/_replaced/NAME.json                             what the segment NAME took the place of
    LAKE/_landing/...                                          how far landing was: its name, its checkpoints
    LAKE/subscriptions.jsonl

Files stay where they are and are committed to the log of their table, one commit a table. A batch that
landing had begun and not ended is left out: landing reads it again. `_landing` goes last, so a migration
that was interrupted is finished by doing it again.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from postroad.errors import StorageError, UsageError
from postroad.spark.audit import LANDING, noted_subscriptions
from postroad.spark.lake.files import PARTITIONS, Added, statistics
from postroad.spark.lake.history import Part
from postroad.spark.lake.intake import EVENTS, HISTORY
from postroad.spark.lake.ledger import Ledger, Progress
from postroad.spark.lake.rows import SCHEMAS
from postroad.spark.lake.store import plain_failures
from postroad.spark.lake.tables import OLD_SEGMENT, Batch, Tables

FOLDER: Final = "_landing"
REPLACED: Final = "_replaced"
SUBSCRIPTIONS: Final = "subscriptions.jsonl"
_TABLES: Final = ("events", "filters", "attachments", "topology", "deliveries")
_BATCH: Final = Batch("migrate", 0)
_SEGMENT: Final = re.compile(r"(.*)-([0-9]{9,})(?:-[a-z]+)?")  # the id of a query, the number of a batch


class _Old(NamedTuple):
    """How far a query of landing was."""

    query: str
    batch: int  # the last that was done; -1 if none was
    until: str
    waiting: bytes


def migrate(tables: Tables) -> dict[str, int]:
    """Rows brought over, by table; UsageError if there is nothing of the earlier layout."""
    folder = tables.store.folder
    if folder is None:
        raise UsageError(f"{tables.store} is of no earlier layout: those were folders")
    place = folder / FOLDER
    # A lake that somebody copied may lack what landing kept beside it.
    left = [
        table
        for table in _TABLES
        if any((folder / table).glob(f"{OLD_SEGMENT}*")) and not _logged(folder, table)
    ]
    if not place.is_dir() and not left:
        raise UsageError(f"{folder} has nothing of an earlier layout")
    with plain_failures(f"{folder} cannot be brought over"):
        _check_alone(place)
        feeds = {kind: _old_feed(place / kind) for kind in (HISTORY, EVENTS)}
        moved = {table: _adopt(tables, folder, table, list(feeds.values())) for table in _TABLES}
        _note_landing(tables, place, feeds)
        _note_subscriptions(tables, folder / SUBSCRIPTIONS)
        for table in _TABLES:
            shutil.rmtree(folder / table / REPLACED, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
    return {table: rows for table, rows in moved.items() if rows}


def _logged(folder: Path, table: str) -> bool:
    return (folder / table / "_delta_log").is_dir()


def _check_alone(place: Path) -> None:
    lock = place / "lock"
    if lock.exists():
        with lock.open("rb") as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"an earlier Postroad lands in {place.parent}: stop it first") from None


def _old_feed(place: Path) -> _Old:
    checkpoint = place / "checkpoint"
    done = [int(file.name) for file in (checkpoint / "commits").glob("[0-9]*")]
    try:
        metadata = checkpoint / "metadata"
        query = json.loads(metadata.read_text())["id"] if metadata.exists() else ""
        if not done:
            return _Old(query, -1, "", b"")
        last = max(done)
        until = json.dumps(json.loads((checkpoint / "offsets" / str(last)).read_text().splitlines()[-1]))
        parts = place / f"parts-{last}.msgpack"
        waiting = parts.read_bytes() if parts.exists() else b""
        msgspec.msgpack.decode(waiting or msgspec.msgpack.encode([]), type=list[Part])
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise StorageError(f"{checkpoint} does not tell how far landing was: {error!r}") from None
    return _Old(query, last, until, waiting)


def _segments(place: Path, feeds: list[_Old]) -> list[str]:
    """Those that count: replaced by none, and of batches that were done."""
    there = {file.name.removeprefix(OLD_SEGMENT) for file in place.glob(f"{OLD_SEGMENT}*")}
    for file in (place / REPLACED).glob("*.json"):
        if file.stem in there:
            there -= set(json.loads(file.read_text())["segments"])
    for feed in feeds:
        matches = {name: _SEGMENT.fullmatch(name) for name in there}
        there -= {
            name
            for name, match in matches.items()
            if match is not None and match[1] == feed.query and int(match[2]) > feed.batch
        }
    return sorted(there)


def _adopt(tables: Tables, folder: Path, table: str, feeds: list[_Old]) -> int:
    """Commit the files of a table; how many rows they have."""
    place = folder / table
    files = [
        _added(place, file, PARTITIONS[table])
        for name in _segments(place, feeds)
        for file in sorted((place / f"{OLD_SEGMENT}{name}").rglob("*.parquet"))
    ]
    if files:
        tables.make(table)
        tables.commit(table, files, _BATCH)
    return sum(file.rows for file in files)


def _added(place: Path, file: Path, partitions: tuple[str, ...]) -> Added:
    path = file.relative_to(place)
    named = dict(part.split("=", 1) for part in path.parts[:-1])
    about = pq.read_metadata(file)
    return Added(
        path=str(path),
        size=file.stat().st_size,
        rows=about.num_rows,
        values={name: named[name] for name in partitions},
        stats=statistics(about),
        made_ms=file.stat().st_mtime_ns // 1_000_000,
    )


def _note_landing(tables: Tables, place: Path, feeds: dict[str, _Old]) -> None:
    ledger = Ledger(tables)
    name = place / "name"
    if ledger.rows or not name.exists():
        return
    text = name.read_text(errors="replace")
    if not text.startswith(LANDING):
        raise StorageError(f"{name} does not have the name of this lake's subscriptions but {text[:40]!r}")
    names = {HISTORY: f"{text}-history", EVENTS: text}
    ledger.write(
        *(
            Progress(feed=kind, subscription=names[kind], until=old.until, waiting=old.waiting)
            for kind, old in feeds.items()
        )
    )


def _note_subscriptions(tables: Tables, file: Path) -> None:
    if file.exists():
        listed = [msgspec.structs.asdict(subscription) for subscription in noted_subscriptions(file)]
        tables.overwrite("subscriptions", pa.Table.from_pylist(listed, SCHEMAS["subscriptions"]))
        file.unlink()
