"""Compaction: part-full filters of one history become one, and many small files become few (spec P6, T8).

The union of two filters of the same m and k is the filter that had been, had all keys gone into one (paper
4.3 and 7). Filters of one history are joined one after the other as long as the keys fit the capacity, the
false positives stay within the accuracy asked for, and the whole spans no more than `MAX_SPAN_MS`, so that a
trace does not have to carry it to many groups. Nothing is forgotten by a union: what a filter claimed, its
union claims. States that a later one replaced are dropped. Filters that are not done yet stay as they are,
because their next state names the one it replaces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from postroad.errors import UsageError
from postroad.spark.lake import rows
from postroad.spark.lake.files import OPAQUE, PARTITIONS, SORTED, Added, is_own_name
from postroad.spark.lake.ledger import read_progress, settle
from postroad.spark.lake.store import plain_failures
from postroad.spark.lake.tables import (
    COMPACTED,
    KEEP_HOURS,
    SCHEMAS,
    File,
    Lake,
    Tables,
    columns,
    files_in,
    keep_versions,
)
from postroad.spark.trace.bulk import current, replaced_records
from postroad.spark.trace.tasks import decoded
from postroad.tracking.bloom import BloomFilter, filter_rate
from postroad.tracking.keys import LOG
from postroad.tracking.moments import MAX_SPANS, joined
from postroad.tracking.record import FilterMeta, encode_record, filter_of
from postroad.units import MIB, SECOND_US, duration_us

if TYPE_CHECKING:
    from deltalake import WriterProperties
    from pyspark.sql import DataFrame

MAX_SPAN_MS: Final = 3_600_000
MATCHING: Final = 2  # filters that match one time, as settings plan it
DEFAULT_ACCURACY: Final = 0.999
UNDECIDED_HOURS: Final = 24  # files that are of no version yet: longer than a batch takes
# As `deltalake` names what it puts together; a killed compaction leaves such files.
_MERGED_NAME: Final = re.compile(
    r"(?:.*/)?part-[0-9]{5}-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}-c000\.zstd\.parquet"
)
_HISTORY: Final = ("broker", "kind", "origin", "neighbour", "subscriber", "m", "k", "date")


class Compacted(NamedTuple):
    """What came of one table."""

    table: str
    files_before: int  # that were put together; 0: nothing to do
    files_after: int
    rows_before: int
    rows_after: int
    bytes_before: int
    bytes_after: int
    removed: int  # files of earlier versions, or of writers that were killed, that are no longer kept


def check_accuracy(accuracy: float) -> None:
    if not 0 < accuracy < 1:
        raise UsageError(f"accuracy is between 0 and 1, such as 0.999, not {accuracy}")


def compact(
    lake: Lake, table: str, *, accuracy: float = DEFAULT_ACCURACY, keep_hours: int = KEEP_HOURS
) -> Compacted:
    """Put small files together and join filters; remove what no version of the last `keep_hours` has.

    OvertakenError if another process does so too and is done first.
    """
    check_accuracy(accuracy)
    if keep_hours < 1:
        raise UsageError(f"versions are kept for an hour at least, not {keep_hours}")
    lake.check()
    for progress in read_progress(lake).values():
        settle(lake, progress)  # else its files, which no version has yet, would be removed one day
    if table == "filters":
        old, new = _join_filters(lake, accuracy)
    else:
        old, new = _merge_files(lake, table)
    return Compacted(
        table=table,
        files_before=old.files,
        files_after=new.files,
        rows_before=old.rows,
        rows_after=new.rows,
        bytes_before=old.bytes,
        bytes_after=new.bytes,
        removed=_clean_up(lake, table, keep_hours),
    )


class _Sizes(NamedTuple):
    """Of some files."""

    files: int = 0
    rows: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, files: Sequence[File | Added]) -> _Sizes:
        return cls(len(files), sum(file.rows for file in files), sum(file.size for file in files))


def hours(text: str) -> int:
    """Whole hours of a duration."""
    return duration_us(text) // (3600 * SECOND_US)


def _merge_files(lake: Tables, table: str) -> tuple[_Sizes, _Sizes]:
    """Before and after, of what was put together; its rows are the same."""
    opened = lake.open(table)
    if opened is None:
        return _Sizes(), _Sizes()
    with plain_failures(f"{lake.store.table(table)} cannot be compacted"):
        before = files_in(opened, table)
        done = opened.optimize.compact(writer_properties=_written_as_landed(table))
        opened.update_incremental()
    after = {file.path for file in files_in(opened, table)}
    # What lands meanwhile is in neither; what is overwritten meanwhile was not put together.
    if not done["numFilesRemoved"]:
        return _Sizes(), _Sizes()
    old = _Sizes.of([file for file in before if file.path not in after])
    added = json.loads(done["filesAdded"])
    return old, _Sizes(added["totalFiles"], old.rows, added["totalSize"])


def _written_as_landed(table: str) -> WriterProperties:
    """Else files would become larger by being put together."""
    from deltalake import ColumnProperties, WriterProperties

    made = {
        name: ColumnProperties(dictionary_enabled=False, encoding=SORTED[name])
        if name in SORTED
        else ColumnProperties(dictionary_enabled=False, statistics_enabled="NONE")
        if name in OPAQUE
        else ColumnProperties(dictionary_enabled=True)
        for name in columns(table)
    }
    nested = ColumnProperties(dictionary_enabled=False)  # what is within a column is none of these names
    return WriterProperties(
        compression="ZSTD",
        data_page_size_limit=MIB,
        data_page_row_count_limit=MIB,  # the size ends a page, and not 20,000 rows
        default_column_properties=nested,
        column_properties=made,
    )


def _clean_up(lake: Tables, table: str, keep_hours: int) -> int:
    """Remove files of versions that are no longer kept, and those that no version has and that are named as
    ours: of writers that were killed. Somebody else's stay. Returns how many are gone.

    A file that no version has may be of a batch under way, which is a day old at most.
    """
    opened = lake.open(table)
    if opened is None:
        return 0
    with plain_failures(f"{lake.store.table(table)} cannot be cleaned up"):
        if PARTITIONS[table]:  # landing overwrites the others, which a change of their properties would fail
            keep_versions(opened, keep_hours)
        replaced = opened.vacuum(keep_hours, dry_run=False, enforce_retention_duration=False)
        old_hours = max(keep_hours, UNDECIDED_HOURS)
        listed = opened.vacuum(old_hours, dry_run=True, enforce_retention_duration=False, full=True)
        left = [path for path in listed if is_own_name(path) or _MERGED_NAME.fullmatch(path)]
        lake.store.remove(table, left)
    return len({*replaced, *left})


def _join_filters(lake: Lake, accuracy: float) -> tuple[_Sizes, _Sizes]:
    """Of the days that have files which no compaction made, and of those that have states which were
    replaced: a union does not tell what its parts replaced, so that has to go with it."""
    files = lake.files("filters")
    days = {file.values["date"] for file in files if not file.compacted}
    if not days:
        return _Sizes(), _Sizes()
    days |= {str(row.date) for row in replaced_records(lake, files).select("date").distinct().collect()}
    old = [file for file in files if file.values["date"] in days]
    listed = ", ".join(f"DATE '{day}'" for day in sorted(days))
    records = current(lake, files).filter(f"date IN ({listed})")
    joined = merged(records, accuracy=accuracy).repartition(*PARTITIONS["filters"])
    new = lake.write("filters", joined, COMPACTED)
    lake.commit("filters", new, removed=old)
    return _Sizes.of(old), _Sizes.of(new)


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
        decoded_rows = [(*decoded(row["record"]), row["record"]) for row in listed]
        sound = [(meta, filter_of(meta, body)) for meta, body, _ in decoded_rows if body is not None]
        # Of what is damaged it must stay known which times it was for.
        records = [(meta, record) for meta, body, record in decoded_rows if body is None]
        for meta, bloom in join(sound, limit):
            records.append((meta, encode_record(meta, bloom.bits, compress=True, fill=bloom.fill)))
        return rows.filters(broker, name, records)

    return merge


def join(filters: list[tuple[FilterMeta, BloomFilter]], limit: float) -> list[tuple[FilterMeta, BloomFilter]]:
    """Filters of one history and shape, joined in order of time while they fit.

    Those without a range stay by themselves, and spans are not joined beyond what is in either: else the
    union would match times that neither has.
    """
    done: list[tuple[FilterMeta, BloomFilter]] = []
    for meta, bloom in sorted(filters, key=lambda each: (each[0].ranged, each[0].sequence)):
        if done and _alike(done[-1][0], meta):
            union = _union(*done[-1], meta, bloom)
            if union[1].count <= min(done[-1][0].n, meta.n) and _fits(*union, limit):
                done[-1] = union
                continue
        done.append((meta, bloom))
    return done


def _alike(first: FilterMeta, second: FilterMeta) -> bool:
    return first.ranged == second.ranged and len(first.singles) + len(second.singles) <= MAX_SPANS


def _fits(meta: FilterMeta, bloom: BloomFilter, limit: float) -> bool:
    return bloom.fpp <= limit and meta.hi_ms - meta.lo_ms <= MAX_SPAN_MS


def _union(
    first: FilterMeta, bloom: BloomFilter, second: FilterMeta, other: BloomFilter
) -> tuple[FilterMeta, BloomFilter]:
    union = bloom.union(other)
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
