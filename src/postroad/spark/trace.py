"""Bulk trace: the path of every id of a table, in one pass over ids and filters (spec P5).

Ids are grouped by the broker in the id, their home, and a stretch of time, and so are the stored records. Ids
are packed before that (`trace_ids`), so that Spark moves a few rows, not one for each. The groups are few
enough for the driver to know them all; whoever places the records is given the list, so records move once.
Every filter of an origin goes to the groups of the times it matches: one, or two neighbours when it spans
them, since a bucket is a few times as long as the filters are. Filters of what was published go to the groups
of all origins: whoever claims to have published a message is heard, in the live trace too. A group with very
many ids is split, by a salt, and its filters copied. A task traces some ids at a time (`paths.trace_group`),
so that its memory does not grow with the group.

Ids whose broker does not confirm them, or that another broker claims, need every record of their time. They
are few; a second, smaller pass has groups of all origins for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from postroad.errors import StorageError, UsageError
from postroad.ids import ID_BYTES, MessageId
from postroad.spark.claims import Keys
from postroad.spark.group import Group, Stored
from postroad.spark.lake import Lake
from postroad.spark.paths import ANSWER_COLUMNS, ANSWERS, listed_ids, trace_group
from postroad.spark.trace_ids import PACKED, Batches, homes_and_times, packer, salter
from postroad.spark.views import FOREVER, BrokerView, NetworkView
from postroad.tracking.attachment import Change
from postroad.tracking.keys import ENTRY, LOG, PUBLISH
from postroad.tracking.record import FilterMeta, decode_record, encode_record
from postroad.tracking.settings import TrackingConfig
from postroad.units import MILLISECOND_US

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEAST_BUCKET_MS: Final = 10_000
MOST_BUCKET_MS: Final = 3_600_000
BUCKET_SPANS: Final = 4  # a bucket is so many times as long as the average filter
HOT_IDS: Final = 1_000_000  # ids of one group; with more it is split
MAX_BUCKETS: Final = 1_000_000  # that the ids of one job may spread over
MAX_BROADCAST: Final = 1_000_000  # replaced states that all executors are told rather than joined with
MOST_AT_ONCE: Final = 65_536  # ids that a task traces at once,
LEAST_AT_ONCE: Final = 2_048
CELLS: Final = 2_000_000  # and fewer in a large network: what each broker says of an id takes some 80 bytes
# Of each broker's records: the last that tells of all up to its time; bits; and bits times milliseconds.
_BITS: Final = "CAST(CASE WHEN m > 0 THEN m ELSE count * 160 END AS DOUBLE)"
_TOTALS: Final = (
    f"max(CASE WHEN kind IN ('{PUBLISH}', '{LOG}') THEN stored_us END) AS last",
    f"sum(CASE WHEN hi_ms >= lo_ms THEN {_BITS} END) AS size",
    f"sum(CASE WHEN hi_ms >= lo_ms THEN (hi_ms - lo_ms + 1) * {_BITS} END) AS weighed",
    "count(replaces) AS replaced",
    f"count_if(kind = '{LOG}') AS logs",
)
_GROUP: Final = ("home", "bucket", "salt")
_SHARED: Final = -2  # in place of the origin of a record: it goes to the groups of every home


def read_ids(spark: SparkSession, path: str | Path) -> DataFrame:
    """A column `id` from a text file with one id per line, or from Parquet with such a column."""
    place = Path(path)
    if not place.exists():
        raise UsageError(f"there is no file {place} to read ids from")
    if place.is_dir() or place.suffix == ".parquet":
        table = spark.read.parquet(str(place))
        if "id" not in table.columns:
            raise UsageError(f"{place} has no column `id`; it has {', '.join(table.columns)}")
        return table.selectExpr("lower(trim(CAST(id AS STRING))) AS id")
    return spark.read.text(str(place)).selectExpr("lower(trim(value)) AS id").filter("id <> ''")


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
    first = work.answers(ids, complete=False)
    if first is None:
        return _each(lake.spark.createDataFrame([], ANSWER_COLUMNS))
    first = first.persist()
    left = first.filter("verdict IS NULL").selectExpr("explode(ids) AS id")
    answers = first.filter("verdict IS NOT NULL")
    second = work.answers(left, complete=True)
    return _each(answers if second is None else answers.unionByName(second))


def _each(answers: DataFrame) -> DataFrame:
    """A row per id."""
    others = ANSWERS.names[1:]
    each = answers.selectExpr("explode(ids) AS id", *others)
    return each.selectExpr("id", "substr(id, 1, 8) AS publisher", *others)


def current(lake: Lake, *, replaced: int = MAX_BROADCAST + 1) -> DataFrame:
    """The stored records that no later state replaces; so many are replaced, if that is known."""
    from pyspark.sql.functions import broadcast

    records = lake.read("filters")
    gone = records.filter("replaces IS NOT NULL").selectExpr("broker", "replaces AS sequence")
    few = broadcast(gone) if replaced <= MAX_BROADCAST else gone
    return records.join(few, ["broker", "sequence"], "left_anti")


def read_network(lake: Lake, config: TrackingConfig) -> tuple[NetworkView, Sequence[Any]]:
    """Who was attached where, from all that brokers said about it; and `_TOTALS` of each."""
    from pyspark.sql.functions import expr

    rows = lake.read("attachments").drop("date", "segment").collect()
    rows.sort(key=lambda row: (row.broker, row.number, row.position))
    totals = lake.read("filters").groupBy("broker").agg(*(expr(text) for text in _TOTALS)).collect()
    stored = {int(row.broker, 16): int(row.last) for row in totals if row.last is not None}
    views: dict[int, BrokerView] = {}
    said: dict[str, list[Change]] = {}
    names: dict[str, str] = {}
    for row in rows:
        if row.whole and row.position == 0:
            said[row.broker] = []
        said.setdefault(row.broker, []).append(
            Change(what=row.what, at_us=row.at_us, kind=row.kind, who=row.who, until_us=row.until_us)
        )
        names[row.broker] = row.name
    for text, changes in sorted(said.items()):
        number = int(text, 16)
        stopped = changes[-1].what == "stop"
        views[number] = BrokerView.of(
            number,
            names[text],
            changes,
            config=config,
            stored_us=FOREVER * MILLISECOND_US if stopped else stored.get(number, 0),
        )
    return NetworkView(views, config), totals


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

    def answers(self, ids: DataFrame, *, complete: bool) -> DataFrame | None:
        """Rows of `ANSWERS` for ids, None if there are none; those left over have no verdict."""
        from pyspark.sql.functions import expr

        packed = ids.mapInArrow(packer(self.bucket_ms, anywhere=complete), PACKED).persist()
        counted = packed.groupBy("home", "bucket").agg(expr("sum(ids) AS ids"), expr("min(wrong) AS wrong"))
        found = counted.toArrow()
        for wrong in sorted(found["wrong"].drop_null().to_pylist())[:1]:
            MessageId.parse(wrong)  # says what one looks like
        if not found.num_rows:
            return None
        low, high = self._span(found["bucket"].to_numpy())
        salts = (found["ids"].to_numpy() // HOT_IDS + 1).astype(np.int32)
        hot = {
            (found["home"][at].as_py(), found["bucket"][at].as_py()): int(salts[at])
            for at in np.flatnonzero(salts > 1).tolist()
        }
        left = packed.mapInArrow(salter(hot), PACKED) if hot else packed
        groups = self.spark.createDataFrame(_listed(found, salts, complete=complete))
        right = _placed(self.records, self.bucket_ms, low, high, complete=complete, logs=self.logs)
        placed = right.join(groups, ["bucket", "origin"])
        salted = placed.selectExpr(
            *("home", "bucket", "explode(sequence(0, salts - 1)) AS salt", "broker", "record")
        )
        joined = left.select(*_GROUP, "keys").groupBy(*_GROUP).cogroup(salted.groupBy(*_GROUP))
        return joined.applyInArrow(_tracer(self.network, complete=complete), ANSWER_COLUMNS)

    def _span(self, buckets: npt.NDArray[np.int64]) -> tuple[int, int]:
        """The first and last bucket of the ids."""
        low, high = int(buckets.min()), int(buckets.max())
        if high - low >= MAX_BUCKETS:
            days = (high - low) * self.bucket_ms // 86_400_000
            raise UsageError(
                f"the ids spread over {days} days: trace them in parts, or leave out times that cannot be"
            )
        return low, high


def _listed(found: pa.Table, salts: npt.NDArray[np.int32], *, complete: bool) -> pa.Table:
    """The groups by the origin of the records that go there: their home's own, and those for all homes."""
    shared = pa.array(np.full(len(salts), _SHARED))
    listed = pa.table({"origin": shared, "home": found["home"], "bucket": found["bucket"], "salts": salts})
    if complete:
        return listed
    return pa.concat_tables([listed, listed.set_column(0, "origin", listed["home"])])


def _placed(
    records: DataFrame, bucket_ms: int, low: int, high: int, *, complete: bool, logs: bool
) -> DataFrame:
    """Records with the buckets of the ids that they may concern, and the origin of those ids or `_SHARED`."""
    shared = "true" if complete else f"kind = '{PUBLISH}'"
    span = "named_struct('lo_ms', lo_ms, 'hi_ms', hi_ms)"
    first, last = f"greatest(s.lo_ms DIV {bucket_ms}, {low}L)", f"least(s.hi_ms DIV {bucket_ms}, {high}L)"
    within = f"filter(array_append(singles, {span}), s -> {first} <= {last})"
    buckets = f"array_distinct(flatten(transform({within}, s -> sequence({first}, {last}))))"
    broker = "CAST(conv(broker, 16, 10) AS BIGINT) AS broker"
    filters = records.filter(f"kind <> '{LOG}'").selectExpr(
        broker,
        f"CASE WHEN {shared} THEN {_SHARED}L ELSE CAST(conv(origin, 16, 10) AS BIGINT) END AS origin",
        "record",
        f"explode({buckets}) AS bucket",
    )
    if not logs:
        return filters
    parts = records.filter(f"kind = '{LOG}'").selectExpr(broker, "record")
    schema = "broker bigint, origin bigint, record binary, bucket bigint"
    return filters.unionByName(parts.mapInArrow(_split_log(bucket_ms, low, high, complete=complete), schema))


def _split_log(bucket_ms: int, low: int, high: int, *, complete: bool) -> Callable[[Batches], Batches]:
    """Parts of the exact log as one smaller part for each home and bucket of the ids in it."""

    def split(batches: Batches) -> Batches:
        for batch in batches:
            rows: list[tuple[int, int, bytes, int]] = []
            for broker, record in zip(batch["broker"].to_pylist(), batch["record"].to_pylist(), strict=True):
                meta, body = decoded(broker, record)
                entries = np.frombuffer(body, ENTRY)
                ids = np.ascontiguousarray(entries["id"]).view(np.uint8).reshape(-1, ID_BYTES)
                homes, times = homes_and_times(ids)
                if complete:
                    homes[:] = _SHARED
                buckets = times // bucket_ms
                for home, bucket in np.unique(np.stack((homes, buckets), axis=1), axis=0).tolist():
                    if low <= bucket <= high:
                        part = entries[(homes == home) & (buckets == bucket)]
                        held = msgspec.structs.replace(meta, count=len(part))
                        rows.append((broker, home, encode_record(held, part.tobytes()), bucket))
            columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
            types = (pa.int64(), pa.int64(), pa.binary(), pa.int64())
            yield pa.RecordBatch.from_arrays(
                [pa.array(one, kind) for one, kind in zip(columns, types, strict=True)],
                names=["broker", "origin", "record", "bucket"],
            )

    return split


def _tracer(network: NetworkView, *, complete: bool) -> Callable[[pa.Table, pa.Table], pa.Table]:
    """What runs in executors: a group's ids and records to paths; ids left over have no verdict."""

    at_once = min(max(CELLS // max(1, len(network.brokers)), LEAST_AT_ONCE), MOST_AT_ONCE)

    def traced(left: pa.Table, right: pa.Table) -> pa.Table:
        if not left.num_rows:
            return ANSWERS.empty_table()
        records = [
            Stored(broker, *decoded(broker, record))
            for broker, record in zip(right["broker"].to_pylist(), right["record"].to_pylist(), strict=True)
        ]
        keys = _unique_keys(left["keys"])
        tables: list[pa.Table] = []
        for at in range(0, len(keys), at_once):
            group = Group(keys[at : at + at_once], records, network)
            table, rest = trace_group(group, complete=complete)
            tables += [table, _left_over(rest)] if len(rest) else [table]
        return pa.concat_tables(tables)

    return traced


def _left_over(keys: Keys) -> pa.Table:
    ids, which = listed_ids(keys, np.zeros(len(keys), np.int64), 1)
    missing = {
        name: pa.nulls(len(which), kind) for name, kind in zip(ANSWERS.names, ANSWERS.types, strict=True)
    }
    return pa.table(missing | {"ids": ids}, ANSWERS)


def _unique_keys(packed: pa.ChunkedArray) -> Keys:
    """The ids of packed rows, each once, in order of time."""
    keys = np.frombuffer(b"".join(packed.to_pylist()), np.uint8).reshape(-1, ID_BYTES)
    halves = keys.view(">u8").astype(np.uint64)
    order = np.lexsort((halves[:, 0], halves[:, 1]))
    halves = halves[order]
    new = np.ones(len(keys), np.bool_)
    new[1:] = (halves[1:] != halves[:-1]).any(axis=1)
    return keys[order[new]]


def decoded(broker: int, record: bytes) -> tuple[FilterMeta, bytes]:
    try:
        return decode_record(record)
    except StorageError as error:
        raise StorageError(
            f"a stored filter of broker {broker:08x} in the lake is damaged: {error}"
        ) from None
