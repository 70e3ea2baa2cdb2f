"""Bulk trace: the path of every id of a table, in one pass over ids and filters (spec P5).

Ids are grouped by the broker in the id and a stretch of time, and so are the stored records; each group is
one call of `paths.trace_group`. Every filter of an origin goes to the groups of the times it matches: once,
or to two neighbours when it spans them, since a bucket is a few times as long as the filters are. Filters of
what was published go to the groups of all origins: whoever claims to have published a message is heard, in
the live trace too. A group with very many ids is split, by a salt, and its filters copied.

Ids whose broker does not confirm them, or that another broker claims, need every record of their time. They
are few; a second, smaller pass has groups of all origins for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from postroad.errors import StorageError, UsageError
from postroad.ids import ID_BYTES, MessageId
from postroad.spark.claims import Keys
from postroad.spark.group import Group, Stored
from postroad.spark.lake import Lake
from postroad.spark.paths import ANSWER_COLUMNS, ANSWERS, listed_ids, trace_group
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
HOT_IDS: Final = 250_000  # ids of one group; with more it is split
MAX_BUCKETS: Final = 1_000_000  # that the ids of one job may spread over
ID_PATTERN: Final = "^[0-9a-f]{8}-[0-9a-f]{8}-[0-9a-f]{12}-[0-9a-f]{4}$"
# Of each broker's records: the last that tells of all up to its time; bytes; and bytes times milliseconds.
_TOTALS: Final = (
    f"max(CASE WHEN kind IN ('{PUBLISH}', '{LOG}') THEN stored_us END) AS last",
    "sum(CASE WHEN hi_ms >= lo_ms THEN CAST(length(record) AS DOUBLE) END) AS size",
    "sum(CASE WHEN hi_ms >= lo_ms THEN (hi_ms - lo_ms + 1) * CAST(length(record) AS DOUBLE) END) AS weighed",
)
_GROUP: Final = ("home", "bucket", "salt")
_ANYWHERE: Final = -1  # the home of groups that have the records of all origins


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
    records = current(lake)
    network, bucket_ms = read_network(lake, records, settings)
    first = _pass(_parsed(ids).persist(), records, network, bucket_ms, complete=False).persist()
    left = first.filter("verdict IS NULL").selectExpr("explode(ids) AS id")
    answers = first.filter("verdict IS NOT NULL")
    if not left.isEmpty():
        answers = answers.unionByName(_pass(_parsed(left), records, network, bucket_ms, complete=True))
    others = ANSWERS.names[1:]
    each = answers.selectExpr("explode(ids) AS id", *others)
    return each.selectExpr("id", "substr(id, 1, 8) AS publisher", *others)


def _parsed(ids: DataFrame) -> DataFrame:
    """`id` as bytes, its broker and its time; or in `wrong` what is no id."""
    fields = ids.selectExpr("id", f"coalesce(id RLIKE '{ID_PATTERN}', false) AS sound")
    return fields.selectExpr(
        "CASE WHEN sound THEN unhex(replace(id, '-', '')) END AS key",
        "CASE WHEN sound THEN CAST(conv(substr(id, 10, 8), 16, 10) AS BIGINT) END AS home",
        "CASE WHEN sound THEN CAST(conv(substr(id, 19, 12), 16, 10) AS BIGINT) END AS time_ms",
        "CASE WHEN NOT sound THEN coalesce(id, '') END AS wrong",
    )


def current(lake: Lake) -> DataFrame:
    """The stored records that no later state replaces."""
    records = lake.read("filters")
    gone = records.selectExpr("broker", "replaces AS sequence").filter("sequence IS NOT NULL").distinct()
    return records.join(gone, ["broker", "sequence"], "left_anti")


def read_network(lake: Lake, records: DataFrame, config: TrackingConfig) -> tuple[NetworkView, int]:
    """Who was attached where, from all that brokers said about it; and how long a bucket is, in ms."""
    from pyspark.sql.functions import expr

    rows = lake.read("attachments").orderBy("broker", "number", "position").collect()
    totals = records.groupBy("broker").agg(*(expr(text) for text in _TOTALS)).collect()
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
    return NetworkView(views, config), _bucket_ms(totals)


def _bucket_ms(totals: Sequence[Any]) -> int:
    """Long enough that most bits are needed in one bucket only."""
    size = sum(row.size or 0.0 for row in totals)
    span = sum(row.weighed or 0.0 for row in totals) / size if size else 0.0
    return int(min(max(BUCKET_SPANS * span, LEAST_BUCKET_MS), MOST_BUCKET_MS))


def _pass(
    wanted: DataFrame, records: DataFrame, network: NetworkView, bucket_ms: int, *, complete: bool
) -> DataFrame:
    from pyspark.sql.functions import expr

    home = str(_ANYWHERE) if complete else "home"
    bucket = f"time_ms DIV {bucket_ms} AS bucket"
    keyed = wanted.selectExpr("key", f"CAST({home} AS BIGINT) AS home", bucket, "wrong")
    groups = keyed.groupBy("home", "bucket").agg(
        expr(f"CAST(count(1) DIV {HOT_IDS} AS INT) + 1 AS salts"), expr("min(wrong) AS wrong")
    )
    groups = groups.persist()
    span = groups.selectExpr("min(bucket) AS low", "max(bucket) AS high", "min(wrong) AS wrong").first()
    if span is not None and span.wrong is not None:
        MessageId.parse(span.wrong)  # says what one looks like
    groups = groups.drop("wrong")
    low, high = (0, -1) if span is None or span.low is None else (int(span.low), int(span.high))
    if high - low >= MAX_BUCKETS:
        raise UsageError(
            f"the ids spread over {(high - low) * bucket_ms // 86_400_000} days: trace them in parts, or"
            " remove those with times that cannot be"
        )
    left = keyed.join(groups, ["home", "bucket"]).selectExpr(
        "home", "bucket", "CAST(pmod(hash(key), salts) AS INT) AS salt", "key"
    )
    right = _placed(records, bucket_ms, low, high, complete=complete)
    joint = ["bucket", "home"] if not complete else ["bucket"]
    shared = right.filter("home IS NULL").drop("home").join(groups, "bucket")
    own = right.filter("home IS NOT NULL").join(groups, joint) if not complete else None
    placed = shared if own is None else shared.unionByName(own.select(*shared.columns))
    # Under names of its own: both sides have the groups in their ancestry.
    salted = placed.selectExpr(
        "home AS to_home",
        "bucket AS to_bucket",
        "explode(sequence(0, salts - 1)) AS to_salt",
        "broker",
        "record",
    )
    joined = left.groupBy(*_GROUP).cogroup(salted.groupBy(*(f"to_{name}" for name in _GROUP)))
    return joined.applyInArrow(_tracer(network, complete=complete), ANSWER_COLUMNS)


def _placed(records: DataFrame, bucket_ms: int, low: int, high: int, *, complete: bool) -> DataFrame:
    """Records with the buckets of the ids that they may concern; `home` NULL for those of all homes."""
    shared = "true" if complete else f"kind = '{PUBLISH}'"
    span = "named_struct('lo_ms', lo_ms, 'hi_ms', hi_ms)"
    first, last = f"greatest(s.lo_ms DIV {bucket_ms}, {low}L)", f"least(s.hi_ms DIV {bucket_ms}, {high}L)"
    within = f"filter(array_append(singles, {span}), s -> {first} <= {last})"
    buckets = f"array_distinct(flatten(transform({within}, s -> sequence({first}, {last}))))"
    filters = records.filter(f"kind <> '{LOG}'").selectExpr(
        "CAST(conv(broker, 16, 10) AS BIGINT) AS broker",
        f"CASE WHEN {shared} THEN CAST(NULL AS BIGINT) ELSE CAST(conv(origin, 16, 10) AS BIGINT) END AS home",
        "record",
        f"explode({buckets}) AS bucket",
    )
    logs = records.filter(f"kind = '{LOG}'").selectExpr(
        "CAST(conv(broker, 16, 10) AS BIGINT) AS broker", "record"
    )
    schema = "broker bigint, home bigint, record binary, bucket bigint"
    entries = logs.mapInArrow(_split_log(bucket_ms, low, high), schema)
    if complete:
        entries = entries.selectExpr("broker", "CAST(NULL AS BIGINT) AS home", "record", "bucket")
    return filters.unionByName(entries)


def _split_log(
    bucket_ms: int, low: int, high: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Parts of the exact log as one smaller part for each home and bucket of the ids in it."""

    def split(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows: list[tuple[int, int, bytes, int]] = []
            for broker, record in zip(batch["broker"].to_pylist(), batch["record"].to_pylist(), strict=True):
                meta, body = decoded(broker, record)
                entries = np.frombuffer(body, ENTRY)
                halves = np.ascontiguousarray(entries["id"]).view(">u8").reshape(-1, 2)
                homes = (halves[:, 0] & np.uint64(0xFFFF_FFFF)).astype(np.int64)
                buckets = (halves[:, 1] >> np.uint64(16)).astype(np.int64) // bucket_ms
                for home, bucket in np.unique(np.stack((homes, buckets), axis=1), axis=0).tolist():
                    if low <= bucket <= high:
                        part = entries[(homes == home) & (buckets == bucket)]
                        held = msgspec.structs.replace(meta, count=len(part))
                        rows.append((broker, home, encode_record(held, part.tobytes()), bucket))
            columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
            types = (pa.int64(), pa.int64(), pa.binary(), pa.int64())
            yield pa.RecordBatch.from_arrays(
                [pa.array(one, kind) for one, kind in zip(columns, types, strict=True)],
                names=["broker", "home", "record", "bucket"],
            )

    return split


def _tracer(network: NetworkView, *, complete: bool) -> Callable[[pa.Table, pa.Table], pa.Table]:
    """What runs in executors: a group's ids and records to paths; ids left over have no verdict."""

    def traced(left: pa.Table, right: pa.Table) -> pa.Table:
        if not left.num_rows:
            return ANSWERS.empty_table()
        records = [
            Stored(broker, *decoded(broker, record))
            for broker, record in zip(right["broker"].to_pylist(), right["record"].to_pylist(), strict=True)
        ]
        table, rest = trace_group(Group(_unique_keys(left["key"]), records, network), complete=complete)
        ids, which = listed_ids(rest, np.zeros(len(rest), np.int64), 1)
        missing = {
            name: pa.nulls(len(which), kind) for name, kind in zip(ANSWERS.names, ANSWERS.types, strict=True)
        }
        return pa.concat_tables([table, pa.table(missing | {"ids": ids}, ANSWERS)])

    return traced


def _unique_keys(column: pa.ChunkedArray) -> Keys:
    """The ids of a column of bytes, each once, in order of time."""
    parts = []
    for chunk in column.chunks:
        _, offsets, data = chunk.buffers()
        at = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        parts.append(np.frombuffer(data, np.uint8)[at[0] : at[-1]])
    keys = np.concatenate(parts).reshape(-1, ID_BYTES)
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
