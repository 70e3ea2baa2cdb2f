"""How far landing is: the table `landing`, a row per feed (spec P4).

A batch is decided by one commit of this table. Before it, the batch's files are written and nobody sees them;
with it, the row says up to where the feed is and which files are to be of which tables; after it, the files
are committed to their tables under the batch's number. Whoever is killed in between leaves a decision that
the next process carries out, and a table that has the batch already takes nothing twice.

Each commit carries a number, one more than the last. Two processes that land in one lake have the same next
number, of which Delta lets one pass: the other is told so and ends.
"""

from __future__ import annotations

import json
import time
from typing import Final

import msgspec
import pyarrow as pa

from postroad.errors import StorageError, UsageError
from postroad.spark.lake.files import Added
from postroad.spark.lake.history import Part
from postroad.spark.lake.intake import EVENTS, HISTORY
from postroad.spark.lake.rows import SCHEMAS
from postroad.spark.lake.store import plain_failures
from postroad.spark.lake.tables import KEPT_HOURS, Batch, OvertakenError, Tables, keep_versions
from postroad.spark.source import SINCE

TABLE: Final = "landing"
VACUUM_EVERY: Final = 200  # commits: each leaves a small file behind that nobody needs
_FILES: Final = dict[str, list[Added]]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far one feed is."""

    feed: str
    subscription: str  # the durable one that holds what was not landed
    batch: int = 0
    start: str = ""  # offsets, where the batch begins
    until: str = ""  # and ends; empty before the first
    files: str = "{}"  # of the batch: by table, those that are to be committed
    waiting: bytes = b""  # parts of stored filters whose others may come
    at_us: int = 0

    def pending(self) -> dict[str, list[Added]]:
        return msgspec.json.decode(self.files, type=_FILES)

    def parts(self) -> list[Part]:
        return msgspec.msgpack.decode(self.waiting, type=list[Part]) if self.waiting else []


class Ledger:
    """The rows as one process knows them, which nobody else may change meanwhile."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._number = tables.landed(TABLE, TABLE)
        self.rows = read_progress(tables)

    def check_new(self) -> None:
        """UsageError if rows were landed here before."""
        for table in SCHEMAS:
            if table != TABLE and self._tables.files(table):
                raise UsageError(
                    f"the lake at {self._tables.store} has {table}, but its table {TABLE}, which tells how"
                    " far landing was, is missing or empty: put that back, or land into another place"
                )

    def write(self, *changed: Progress) -> None:
        """UsageError if another process did since this one last looked.

        StorageError if what this one wrote is gone, or files of the batch are: brokers would be told that it
        is landed, and forget it.
        """
        store = self._tables.store
        if self._tables.landed(TABLE, TABLE) < self._number:
            raise StorageError(f"the lake at {store} is gone, or an older one is in its place")
        for progress in changed:
            for table, files in progress.pending().items():
                self._tables.check_written(table, files)
        rows = self.rows | {progress.feed: progress for progress in changed}
        listed = [msgspec.structs.asdict(progress) for progress in rows.values()]
        try:
            passed = self._tables.overwrite(
                TABLE, pa.Table.from_pylist(listed, SCHEMAS[TABLE]), Batch(TABLE, self._number + 1)
            )
        except OvertakenError:
            passed = False
        if not passed:
            raise UsageError(f"another process lands in {store}: one does at a time")
        self._number += 1
        self.rows = rows
        if self._number % VACUUM_EVERY == 0 and (opened := self._tables.open(TABLE)) is not None:
            with plain_failures(f"{store.table(TABLE)} cannot be cleaned up"):
                keep_versions(opened, KEPT_HOURS[TABLE])  # else each look at it lists a week of commits
                opened.vacuum(KEPT_HOURS[TABLE], dry_run=False, enforce_retention_duration=False)


def read_progress(tables: Tables) -> dict[str, Progress]:
    try:
        rows = [msgspec.convert(row, Progress) for row in tables.fetch(TABLE).to_pylist()]
    except msgspec.ValidationError as error:
        raise StorageError(f"{tables.store.table(TABLE)} does not tell how far landing is: {error}") from None
    return {progress.feed: progress for progress in rows}


def settle(tables: Tables, progress: Progress) -> dict[str, int]:
    """Carry out what was decided, if it is not done yet. Returns rows added, by table."""
    batch = Batch(progress.subscription, progress.batch)
    return {
        table: sum(file.rows for file in files)
        for table, files in progress.pending().items()
        if tables.commit(table, files, batch)
    }


def landed_until(tables: Tables) -> dict[str, int]:
    """By broker, until when all that it published about itself is in the lake, by its own clock."""
    progress = read_progress(tables).get(HISTORY)
    if progress is None:
        return {}
    of = progress.subscription
    done = all(tables.landed(table, of) >= progress.batch for table in progress.pending())
    try:
        ticks = json.loads((progress.until if done else progress.start) or "{}")
        heads = [(pubend[:8], int(tick)) for pubend, tick in ticks.items() if pubend != SINCE]
    except (ValueError, AttributeError) as error:
        raise StorageError(
            f"{tables.store.table(TABLE)} does not tell how far landing is: {error!r}"
        ) from None
    return {broker: min(tick for other, tick in heads if other == broker) for broker, _ in heads}


def begin(ledger: Ledger, name: str) -> None:
    """Note the names of a lake's subscriptions before they are made: no other process makes others.

    UsageError if the lake has rows and nothing tells up to where: all would be landed a second time.
    """
    if not ledger.rows:
        ledger.check_new()
        now_us = time.time_ns() // 1000
        ledger.write(
            Progress(feed=HISTORY, subscription=f"{name}-history", at_us=now_us),
            Progress(feed=EVENTS, subscription=name, at_us=now_us),
        )
