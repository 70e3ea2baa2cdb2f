"""Bulk trace: the path of every id of a table, in one pass over ids and filters (spec P5).

Ids are grouped by a stretch of time, a bucket, and so are the stored records. Ids are packed before that
(`trace_ids`), so that Spark moves a few rows, not one for each. The groups are few enough for the driver to
know them all; whoever places the records is given the list, so records move once. Every filter goes to the
groups of the times it matches: one, or two neighbours when it spans them, since a bucket is a few times as
long as the filters are. A group with very many ids is split, by a salt, and its records copied.

Where the records of all origins of a bucket are more than a task should hold, groups are by the home of the
ids too, the broker in the id, and have the records about it alone. Only filters of what was published, or
came as a repair, go to the groups of every home: whoever claims so is heard, as in the live trace. Ids whose
home does not confirm them, or that another broker claims, need every record of their time. They are few; a
second, smaller pass has groups of all origins for them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile, groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from postroad.errors import UsageError, shorten
from postroad.spark.lake.landing import unlanded_history
from postroad.spark.lake.ledger import landed_until
from postroad.spark.lake.tables import File, Lake, spark_path
from postroad.spark.trace.maps import told_maps
from postroad.spark.trace.packed_ids import NAMED, PACKED, packer, salter
from postroad.spark.trace.paths import ANSWER_COLUMNS, ANSWERS
from postroad.spark.trace.tasks import SHARED, log_splitter, tracer
from postroad.spark.trace.views import FOREVER, BrokerView, NetworkView
from postroad.tracking.attachment import NEIGHBOUR
from postroad.tracking.attachment_log import DISK, SNAPSHOT, Change, widest
from postroad.tracking.keys import LOG, PUBLISH, REPAIR
from postroad.tracking.moments import holds, joined
from postroad.tracking.settings import TrackingConfig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEAST_BUCKET_MS: Final = 10_000
MOST_BUCKET_MS: Final = 3_600_000
BUCKET_SPANS: Final = 4  # a bucket is so many times as long as the average filter
HOT_IDS: Final = 1_000_000  # ids of one group; with more it is split
MAX_BUCKETS: Final = 1_000_000  # that the ids of one job may spread over
MAX_BROADCAST: Final = 1_000_000  # replaced states that all executors are told rather than joined with
WHOLE_BYTES: Final = 64 << 20  # records of one bucket, of all origins, that one task may be given
# Of each broker's records: when the last was stored; bits; those in ranges; and these times milliseconds.
_BITS: Final = "CAST(CASE WHEN m > 0 THEN m ELSE count * 160 END AS DOUBLE)"
_TOTALS: Final = (
    "max(stored_us) AS last",
    f"sum({_BITS}) AS bits",
    f"sum(CASE WHEN hi_ms >= lo_ms THEN {_BITS} END) AS size",
    f"sum(CASE WHEN hi_ms >= lo_ms THEN (hi_ms - lo_ms + 1) * {_BITS} END) AS weighed",
    "count(replaces) AS replaced",
    f"count_if(kind = '{LOG}') AS logs",
)
_GROUP: Final = ("home", "bucket", "salt")
_EXAMPLE: Final = "0000002a-00000007-0193c1d2e3f4-0001"
_SHOWN: Final = 60  # characters of what is no id
ANYWHERE: Final = -1  # the home of groups that have all origins


def read_ids(spark: SparkSession, path: str | Path) -> DataFrame:
    """A column `id` from a text file with one id per line, or from Parquet with such a column."""
    place = Path(path)
    if not place.exists():
        raise UsageError(f"there is no file {place} to read ids from")
    if place.is_dir() or place.suffix == ".parquet":
        table = spark.read.parquet(spark_path(place))
        if "id" not in table.columns:
            raise UsageError(f"{place} has no column `id`; it has {', '.join(table.columns)}")
        ids = table.selectExpr("lower(trim(CAST(id AS STRING))) AS id")
    else:
        ids = spark.read.text(spark_path(place)).selectExpr("lower(trim(value)) AS id")
    return ids.filter("id <> ''")  # nor NULL


def trace(lake: Lake, ids: DataFrame, *, config: TrackingConfig | None = None) -> DataFrame:
    """One row per id: `id`, `publisher`, and the columns of `paths.ANSWERS` but its lists of ids.

    `config` has the brokers' skew, jitter and routing.
    """
    settings = config or TrackingConfig()
    lake.check("filters", "attachments")
    network, totals = read_network(lake, settings)
    records = current(lake, replaced=sum(row.replaced for row in totals))
    logs = any(row.logs for row in totals)
    work = _Work(lake.spark, records, network, _bucket_ms(totals), logs)
    size = sum(row.bits for row in totals) / 8
    packed = work.packed(ids)
    groups = work.groups(packed)
    if not groups.num_rows:
        return _each(lake.spark.createDataFrame([], ANSWER_COLUMNS))
    if size <= WHOLE_BYTES or work.heaviest(groups) <= WHOLE_BYTES:
        return _each(work.answers(packed, groups, complete=True))
    first = work.answers(packed, groups, complete=False).persist()
    answers = first.filter("verdict IS NOT NULL")
    left = work.packed(first.filter("verdict IS NULL").selectExpr("explode(ids) AS id"))
    groups = work.groups(left)
    if groups.num_rows:
        answers = answers.unionByName(work.answers(left, groups, complete=True))
    return _each(answers)


def _each(answers: DataFrame) -> DataFrame:
    """A row per id."""
    others = ANSWERS.names[1:]
    each = answers.selectExpr("explode(ids) AS id", *others)
    return each.selectExpr("id", "substr(id, 1, 8) AS publisher", *others)


def current(
    lake: Lake, files: Sequence[File] | None = None, *, replaced: int = MAX_BROADCAST + 1
) -> DataFrame:
    """The stored records that no later state replaces, of these files or of all.

    `replaced` says how many are, if that is known.
    """
    records = lake.read("filters", files)
    gone = _replaced_names(records)
    if replaced <= MAX_BROADCAST:
        gone = gone.hint("broadcast")
    return records.join(gone, ["broker", "sequence"], "left_anti")


def replaced_records(lake: Lake, files: Sequence[File]) -> DataFrame:
    """The stored records that a later state replaces, of these files."""
    records = lake.read("filters", files)
    return records.join(_replaced_names(records), ["broker", "sequence"], "left_semi")


def _replaced_names(records: DataFrame) -> DataFrame:
    return records.filter("replaces IS NOT NULL").selectExpr("broker", "replaces AS sequence")


def read_network(lake: Lake, config: TrackingConfig) -> tuple[NetworkView, Sequence[Any]]:
    """Who was attached where, from all that brokers said about it; and `_TOTALS` of each."""
    from pyspark.sql.functions import expr

    # Landing may go on meanwhile: how far it is comes first, and links are told after the map.
    landed = landed_until(lake)
    links = lake.read("topology").select("broker", "name", "boot", "at_us", "links").collect()
    links.sort(key=lambda row: (row.broker, row.boot, row.at_us))
    totals = lake.read("filters").groupBy("broker").agg(*(expr(text) for text in _TOTALS)).collect()
    stored = {row.broker: int(row.last) for row in totals}
    gaps = unlanded_history(lake)
    rows = lake.read("attachments").drop("date").collect()
    rows.sort(key=lambda row: (row.broker, row.number, row.position))
    views: dict[int, BrokerView] = {}
    by_broker = {text: list(of_broker) for text, of_broker in groupby(rows, lambda row: row.broker)}
    untracked = _untracked(links, by_broker)
    for text in sorted({*by_broker, *untracked}):
        number = int(text, 16)
        of, since = by_broker.get(text, []), untracked.get(text, [])
        maps, untold = told_maps(of)
        last = maps[-1] if maps else []
        views[number] = BrokerView.of(
            number,
            (since or of)[-1].name,
            [*maps[:-1], [*_set_back(of), *last, *_lost_but_links(since)]],
            config=config,
            stored_us=stored.get(text, 0),
            landed_us=_landed_from(of) or FOREVER,
            told_us=0 if since else landed.get(text, 0),
            unlanded=_unlanded(maps, [*untold, *gaps.get(text, ())]),
        )
    return NetworkView(views, config), totals


def _landed_from(rows: Sequence[Any]) -> int | None:
    """When a broker told its first whole map: it ends with the start of what follows. All that the broker
    stored from then on is in the lake, or will be. None: it has told none, or of the last and what followed a
    bulletin is missing, which may have been about any time."""
    if not rows:
        return None
    last = max((row.number for row in rows if row.whole), default=0)
    numbers = {row.number for row in rows if row.number >= last}
    if len(numbers) <= max(numbers) - last:
        return None
    whole = list(dropwhile(lambda row: not row.whole, rows))
    heads = list(takewhile(lambda row: row.what == "start" and row.number == whole[0].number, whole))
    rest = whole[len(heads) :]
    if rest and rest[0].number == whole[0].number:
        return next((int(row.at_us) for row in rest if row.what == "start" and row.who == SNAPSHOT), None)
    return int(heads[-1].at_us) if heads else None


def _set_back(changes: Sequence[Any]) -> Iterator[Change]:
    """What is lost of a broker that went on from a backup: a process of it told its map after the one had
    stopped that the next knows as the last before it."""
    before_us = 0
    for _, rows in groupby(changes, lambda row: row.number >> 32):
        start = next((row for row in rows if row.what == "start" and row.who == SNAPSHOT), None)
        if start is None:
            continue
        stopped_us = start.noted_us or 0
        if 0 < stopped_us < before_us:
            yield Change(what="lost", kind=DISK, at_us=stopped_us, until_us=start.at_us, noted_us=start.at_us)
        before_us = start.at_us


def _untracked(links: Iterable[Any], by_broker: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """What brokers told of their links in starts without a map, after the last that told one: each start
    tells it before its links, but one that does not track messages has none."""
    boots = {broker: of[-1].number >> 32 for broker, of in by_broker.items()}
    since = (row for row in links if row.boot > boots.get(row.broker, -1))
    return {broker: list(of) for broker, of in groupby(since, lambda row: row.broker)}


def _lost_but_links(links: Sequence[Any]) -> Iterator[Change]:
    """Of a broker that does not track messages, and told these."""
    for row in links[:1]:
        yield Change(what="lost", kind=DISK, at_us=row.at_us, until_us=FOREVER, noted_us=row.at_us)
    for row in links:
        for link in row.links:
            yield Change(what="attach", at_us=row.at_us, kind=NEIGHBOUR, who=str(int(link.broker, 16)))


def _unlanded(maps: Sequence[Sequence[Change]], gaps: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    """When a broker recorded what may be missing by gaps in what it published, or in what it told of its map.
    Who came in one is not known until its map is told anew, and which messages it handled out of their time
    is said there."""
    if not gaps:
        return []
    changes = [change for of in maps for change in of]
    persist_us = widest(changes).persist_us
    maps_us = sorted(change.at_us for change in changes if change.what == "start" and change.who == SNAPSHOT)
    recorded: list[tuple[int, int]] = []
    noted: list[tuple[int, int]] = []
    for start_us, end_us in gaps:
        # It takes an interval until something is stored, and is published soon after that.
        since_us = start_us - 2 * persist_us
        later = bisect_right(maps_us, end_us)
        mapped_us = maps_us[later] if later < len(maps_us) else FOREVER
        recorded.append((since_us, end_us if mapped_us < FOREVER else FOREVER))
        noted.append((since_us - persist_us, mapped_us))
    noted = joined(noted, len(noted))
    recorded += [
        (change.at_us, change.until_us)
        for change in changes
        if change.what == "handled" and holds(noted, change.noted_us)
    ]
    return joined(recorded, len(recorded))


def _bucket_ms(totals: Sequence[Any]) -> int:
    """Long enough that most bits are needed in one bucket only."""
    size = sum(row.size or 0.0 for row in totals)
    span = sum(row.weighed or 0.0 for row in totals) / size if size else 0.0
    return int(min(max(BUCKET_SPANS * span, LEAST_BUCKET_MS), MOST_BUCKET_MS))


class _Work(NamedTuple):
    """What a pass needs beside its ids."""

    spark: SparkSession
    records: DataFrame
    network: NetworkView
    bucket_ms: int
    logs: bool  # whether there are parts of exact logs among the records

    def packed(self, ids: DataFrame) -> DataFrame:
        return ids.mapInArrow(packer(self.bucket_ms), PACKED).persist()

    def groups(self, packed: DataFrame) -> pa.Table:
        """How many ids each home and bucket has; UsageError if one is no id, or its time cannot be."""
        from pyspark.sql.functions import expr

        wrong = f"slice(array_sort(collect_set(wrong)), 1, {NAMED}) AS wrong"
        counted = packed.groupBy("home", "bucket").agg(expr("sum(ids) AS ids"), expr(wrong))
        counts = counted.toArrow()
        _check_sound(counts.filter(pc.is_null(counts["home"])).to_pylist())
        low, high = _span(counts)
        if high - low >= MAX_BUCKETS:
            days = (high - low) * self.bucket_ms // 86_400_000
            raise UsageError(
                f"the ids spread over {days} days: trace them in parts, or leave out times that cannot be"
            )
        return counts.drop_columns("wrong")

    def heaviest(self, groups: pa.Table) -> float:
        """The most bytes that the records of all origins have in one bucket."""
        from pyspark.sql.functions import expr

        placed = self.records.selectExpr(
            f"{_BITS} / 8 AS size", f"explode({self._buckets(groups)}) AS bucket"
        )
        row = placed.groupBy("bucket").agg(expr("sum(size) AS size")).agg(expr("max(size) AS most")).first()
        return 0.0 if row is None or row.most is None else float(row.most)

    def answers(self, packed: DataFrame, groups: pa.Table, *, complete: bool) -> DataFrame:
        """Rows of `ANSWERS`. `complete` groups have the ids and records of all homes, and no id is left over.

        Otherwise those left over have no verdict.
        """
        if complete:
            groups = groups.group_by("bucket").aggregate([("ids", "sum")]).rename_columns(["bucket", "ids"])
            groups = groups.append_column("home", pa.array(np.full(groups.num_rows, ANYWHERE)))
            packed = packed.selectExpr(f"{ANYWHERE}L AS home", "bucket", "salt", "ids", "keys", "wrong")
        salts = pa.array((groups["ids"].to_numpy() // HOT_IDS + 1).astype(np.int32))
        hot = {
            (row["home"], row["bucket"]): row["ids"] // HOT_IDS + 1
            for row in groups.filter(pc.greater(salts, 1)).to_pylist()
        }
        left = packed.mapInArrow(salter(hot), PACKED) if hot else packed
        listed = groups.select(["home", "bucket"]).append_column("salts", salts)
        records = self._placed(groups)
        if complete:
            placed = records.join(self.spark.createDataFrame(listed), "bucket")
        else:
            # By the origin of the records that go there: the home's own, and those for all homes.
            own = listed.append_column("origin", listed["home"])
            shared = listed.append_column("origin", pa.array(np.full(listed.num_rows, SHARED)))
            by_origin = self.spark.createDataFrame(pa.concat_tables([own, shared]))
            placed = records.join(by_origin, ["bucket", "origin"])
        salted = placed.selectExpr(
            *("home", "bucket", "explode(sequence(0, salts - 1)) AS salt", "origin", "broker", "record")
        )
        grouped = left.select(*_GROUP, "keys").groupBy(*_GROUP).cogroup(salted.groupBy(*_GROUP))
        low, high = _span(groups)
        # Not all that a lake of years knows of its brokers goes to every task.
        network = self.network.within(low * self.bucket_ms, (high + 1) * self.bucket_ms - 1)
        return grouped.applyInArrow(tracer(network, complete=complete), ANSWER_COLUMNS)

    def _buckets(self, groups: pa.Table) -> str:
        """The buckets of a record's times, among those of the ids, as an array."""
        low, high = _span(groups)
        first = f"greatest(s.lo_ms DIV {self.bucket_ms}, {low}L)"
        last = f"least(s.hi_ms DIV {self.bucket_ms}, {high}L)"
        spans = "array_append(singles, named_struct('lo_ms', lo_ms, 'hi_ms', hi_ms))"
        within = f"filter({spans}, s -> {first} <= {last})"
        return f"array_distinct(flatten(transform({within}, s -> sequence({first}, {last}))))"

    def _placed(self, groups: pa.Table) -> DataFrame:
        """Records with the buckets of the ids that they may concern, and the origin of those or `SHARED`."""
        broker = "CAST(conv(broker, 16, 10) AS BIGINT) AS broker"
        origin = "CAST(conv(origin, 16, 10) AS BIGINT)"
        filters = self.records.filter(f"kind <> '{LOG}'").selectExpr(
            f"CASE WHEN kind IN ('{PUBLISH}', '{REPAIR}') THEN {SHARED}L ELSE {origin} END AS origin",
            broker,
            "record",
            f"explode({self._buckets(groups)}) AS bucket",
        )
        if not self.logs:
            return filters
        parts = self.records.filter(f"kind = '{LOG}'").selectExpr(broker, "record")
        schema = "origin bigint, broker bigint, record binary, bucket bigint"
        return filters.unionByName(parts.mapInArrow(log_splitter(self.bucket_ms, *_span(groups)), schema))


def _check_sound(wrong: Sequence[Mapping[str, Any]]) -> None:
    """UsageError about texts that are no ids, of which there is a row at most."""
    for row in wrong:
        lines = f"{row['ids']:,} line{'s' if row['ids'] > 1 else ''}"
        named = ", ".join(repr(shorten(text, _SHOWN)) for text in row["wrong"])
        raise UsageError(f"{lines} with no message id such as {_EXAMPLE}: {named}")


def _span(groups: pa.Table) -> tuple[int, int]:
    """The first and the last bucket of the ids."""
    buckets = groups["bucket"].to_numpy()
    return (int(buckets.min()), int(buckets.max())) if len(buckets) else (0, -1)
