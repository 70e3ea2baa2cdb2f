"""Compaction: part-full filters of one history become one, and many small files become few (spec P6, T8).

The union of two filters of the same m and k is the filter that had been, had all keys gone into one (paper
4.3 and 7). Filters of one history are joined one after the other as long as the keys fit the capacity, the
false positives stay within the accuracy asked for, and the whole spans no more than `MAX_SPAN_MS`, so that a
trace does not have to carry it to many groups. Nothing is forgotten by a union: what a filter claimed, its
union claims. States that a later one replaced are dropped. Filters that are not done yet stay as they are,
because their next state names the one it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from postroad.errors import UsageError
from postroad.spark.lake import rows
from postroad.spark.lake.tables import COMPACTED, PARTITIONS, SCHEMAS, Lake, alone, check_lake, columns
from postroad.spark.trace.bulk import current
from postroad.spark.trace.tasks import decoded
from postroad.tracking.bloom import BloomFilter, filter_rate
from postroad.tracking.keys import LOG
from postroad.tracking.moments import MAX_SPANS, joined
from postroad.tracking.record import FilterMeta, encode_record, filter_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MAX_SPAN_MS: Final = 3_600_000
MATCHING: Final = 2  # filters that match one time, as settings plan it
DEFAULT_ACCURACY: Final = 0.999
LOCK: Final = "_compacting"
_HISTORY: Final = ("broker", "kind", "origin", "neighbour", "subscriber", "m", "k", "date")


class Compacted(NamedTuple):
    """What came of one table."""

    table: str
    segments: int  # that became one; 0: nothing to do
    rows_before: int
    rows_after: int
    bytes_before: int
    bytes_after: int


def check_accuracy(accuracy: float) -> None:
    if not 0 < accuracy < 1:
        raise UsageError(f"accuracy is between 0 and 1, such as 0.999, not {accuracy}")


def compact(lake: Lake, table: str, *, accuracy: float = DEFAULT_ACCURACY) -> Compacted:
    """Rewrite a table as one segment; a table of one segment is left alone."""
    check_accuracy(accuracy)
    check_lake(lake.path)
    with alone(lake.path / LOCK, f"compacts {lake.path}"):
        return _compact(lake, table, accuracy)


def _compact(lake: Lake, table: str, accuracy: float) -> Compacted:
    lake.clean(table)  # what a compaction left that was interrupted after it had its result
    segments = lake.segments(table)
    if len(segments) < 2 and not (table == "filters" and segments and not segments[0].startswith(COMPACTED)):
        return Compacted(table, 0, 0, 0, 0, 0)
    before = lake.read(table, segments)
    after = merged(current(lake, segments), accuracy=accuracy) if table == "filters" else before
    place = lake.path / table
    size = sum(_bytes(place / f"segment={name}") for name in segments)
    name = f"{COMPACTED}{_next(segments)}"
    count = before.count()
    lake.replace(table, after.repartition(*PARTITIONS[table]), name, segments)
    kept = lake.read(table, [name]).count()
    return Compacted(table, len(segments), count, kept, size, _bytes(place / f"segment={name}"))


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.parquet"))


def _next(segments: Iterable[str]) -> int:
    used = [int(name.removeprefix(COMPACTED)) for name in segments if name.startswith(COMPACTED)]
    return max(used, default=0) + 1


def merged(records: DataFrame, *, accuracy: float = DEFAULT_ACCURACY) -> DataFrame:
    """The table `filters` with part-full filters joined."""
    stays = f"NOT final OR kind = '{LOG}'"
    parts = records.filter(f"NOT ({stays})").select(*columns("filters"))
    limit = filter_rate(1 - accuracy, MATCHING)
    unions = parts.groupBy(*_HISTORY).applyInArrow(_merger(limit), SCHEMAS["filters"])
    return unions.unionByName(records.filter(stays).select(*columns("filters")))


def _merger(limit: float) -> Callable[[pa.Table], pa.Table]:
    def merge(table: pa.Table) -> pa.Table:
        listed = table.to_pylist()
        broker, name = int(listed[0]["broker"], 16), listed[-1]["name"]
        found = [(*decoded(row["record"]), row["record"]) for row in listed]
        sound = [(meta, filter_of(meta, body)) for meta, body, _ in found if body is not None]
        # Of what is damaged it must stay known which times it was for.
        records = [(meta, record) for meta, body, record in found if body is None]
        for meta, one in join(sound, limit):
            records.append((meta, encode_record(meta, one.bits, compress=True, fill=one.fill)))
        return rows.filters(broker, name, records)

    return merge


def join(filters: list[tuple[FilterMeta, BloomFilter]], limit: float) -> list[tuple[FilterMeta, BloomFilter]]:
    """Filters of one history and shape, joined in order of time while they fit.

    Those without a range stay by themselves, and spans are not joined beyond what is in either: else the
    union would match times that neither has.
    """
    done: list[tuple[FilterMeta, BloomFilter]] = []
    for meta, one in sorted(filters, key=lambda each: (each[0].ranged, each[0].sequence)):
        if done and _alike(done[-1][0], meta):
            union = _union(*done[-1], meta, one)
            if union[1].count <= min(done[-1][0].n, meta.n) and _fits(*union, limit):
                done[-1] = union
                continue
        done.append((meta, one))
    return done


def _alike(first: FilterMeta, second: FilterMeta) -> bool:
    return first.ranged == second.ranged and len(first.singles) + len(second.singles) <= MAX_SPANS


def _fits(meta: FilterMeta, one: BloomFilter, limit: float) -> bool:
    return one.fpp <= limit and meta.hi_ms - meta.lo_ms <= MAX_SPAN_MS


def _union(
    first: FilterMeta, one: BloomFilter, second: FilterMeta, two: BloomFilter
) -> tuple[FilterMeta, BloomFilter]:
    union = one.union(two)
    meta = FilterMeta(
        key=second.key,
        sequence=second.sequence,
        m=second.m,
        n=max(first.n, second.n),
        k=second.k,
        count=union.count,
        lo_ms=min(first.lo_ms, second.lo_ms),
        hi_ms=max(first.hi_ms, second.hi_ms),
        singles=tuple(joined([*first.singles, *second.singles])),
        opened_us=min(first.opened_us, second.opened_us),
        stored_us=max(first.stored_us, second.stored_us),
    )
    return meta, union
