"""What one task of landing does: a range of one pubend, from a broker into files of the lake (spec P4).

It hands back which files it wrote, and commits nothing: a task that is done twice has written files that
nobody will ever see.

A stored filter may be published in parts, which a batch may separate. A task is given the parts of its broker
that wait for others, and hands back those that still do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from postroad.history.bulletins import FILTERS
from postroad.spark.lake.files import Added, TableWriter
from postroad.spark.lake.history import (
    NONSENSE,
    TABLES,
    Part,
    Unread,
    bulletin_rows,
    part_of,
    values,
    whole_filters,
)
from postroad.spark.lake.rows import SCHEMAS, day
from postroad.spark.lake.store import Store
from postroad.spark.source import GAP_TOPIC, Range, read_range
from postroad.units import MILLISECOND_US

EVENTS: Final = "events"  # all that is published
HISTORY: Final = "history"  # what brokers publish about themselves
LANDED: Final = pa.schema([("landed", pa.binary())])


class Landed(msgspec.Struct, frozen=True):
    """What a task wrote, of so many rows it was given, and what is to be said of it."""

    files: dict[str, list[Added]]  # by table
    rows: int = 0
    waiting: list[Part] = []
    unread: list[Unread] = []


class Intake:
    """Where the rows of a range go."""

    def __init__(self, store: Store, subscription: str) -> None:
        self._store = store
        self._subscription = subscription  # whose gaps are told
        self._writers: dict[str, TableWriter] = {}
        self._unread: list[Unread] = []
        self._rows = 0

    def write(self, table: str, rows: pa.Table) -> None:
        if rows.num_rows:
            if table not in self._writers:
                self._writers[table] = TableWriter(self._store, table)
            self._writers[table].write(rows)

    def events(self, batches: Iterable[pa.RecordBatch]) -> Landed:
        for batch in batches:
            self._rows += batch.num_rows
            self.write("events", self._without_gaps(pa.Table.from_batches([batch])))
        return self._landed([])

    def history(self, batches: Iterable[pa.RecordBatch], waiting: Sequence[Part]) -> Landed:
        """All of one broker; `waiting` are parts that came before."""
        parts = list(waiting)
        for batch in batches:
            self._rows += batch.num_rows
            bulletins = self._without_gaps(pa.Table.from_batches([batch]))
            for table, topic in TABLES.items():
                tables, unread = bulletin_rows(table, bulletins.filter(pc.field("topic") == topic))
                for rows in tables:
                    self.write(table, rows)
                self._unread += unread
            parts = self._filters(bulletins.filter(pc.field("topic") == FILTERS), parts)
        return self._landed(parts)

    def _filters(self, bulletins: pa.Table, waiting: list[Part]) -> list[Part]:
        """Returns the parts whose others may come."""
        for row in bulletins.to_pylist():
            about = values(dict(row["attributes"]))
            try:
                waiting.append(part_of(row["origin"], about, row["payload"], row["tick"], row["time_ms"]))
            except NONSENSE as error:
                self._unread.append(Unread.of(row["pubend"], row["tick"], row["topic"], error))
        tables, rest, unread = whole_filters(waiting)
        for rows in tables:
            self.write("filters", rows)
        self._unread += unread
        return rest

    def _without_gaps(self, rows: pa.Table) -> pa.Table:
        """Gaps are rows of `deliveries`, of the subscription that was told of them."""
        if not rows.column("id").null_count:
            return rows
        for row in rows.filter(pc.field("topic") == GAP_TOPIC).to_pylist():
            start = values(dict(row["attributes"]))["start"]
            self._gap(row["pubend"], start, row["tick"])
        return rows.filter(pc.field("id").is_valid())

    def _gap(self, pubend: str, start_tick: int, tick: int) -> None:
        origin = pubend[:8]
        row = {"what": "gap", "subscriber": self._subscription, "session": 0, "pubend": pubend, "tick": tick}
        row |= {"start_tick": start_tick, "broker": origin, "at_us": tick, "number": 0, "position": 0}
        row |= {"date": day(tick // MILLISECOND_US), "origin": origin}
        self.write("deliveries", pa.Table.from_pylist([row], SCHEMAS["deliveries"]))

    def _landed(self, waiting: list[Part]) -> Landed:
        for bulletin in self._unread:
            self._gap(bulletin.pubend, bulletin.tick - 1, bulletin.tick)
        files = {table: writer.close() for table, writer in self._writers.items()}
        return Landed(files, self._rows, waiting, self._unread)


def task(
    store: Store, feed: str, subscription: str, work: Sequence[tuple[Range, list[Part]]]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For Spark: numbers of pieces of work in, what came of each out."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for at in (at for batch in batches for at in batch.column(0).to_pylist()):
            part, waiting = work[at]
            intake = Intake(store, subscription)
            rows = read_range(part)
            done = intake.events(rows) if feed == EVENTS else intake.history(rows, waiting)
            yield pa.record_batch({"landed": [msgspec.msgpack.encode(done)]}, schema=LANDED)

    return run
