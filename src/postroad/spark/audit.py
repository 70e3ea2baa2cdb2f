"""Audit: what every durable subscription should have got, against what it was given (spec P7).

An event is *due* to a subscription if the selector matches it (`where`, the broker's own answer) and its tick
lies between the first and the last that the subscription is known to have come to in that pubend: by events,
by gaps it was told, by what it acknowledged. Later events are *pending*: it is away, or they are under way.

| fault | what it is |
|---|---|
| missing | due, and neither delivered nor inside a gap that was told |
| duplicated | given twice in one session |
| reordered | a lower tick of a pubend after a higher one in one session |
| late | given later after its publication than the bound |
| unwanted | given, though the selector does not match it |

Given again in a later session is no fault: the subscriber resumed from an older token (*redelivered*).
Members of a shared subscription get what others did not finish, so order is not asked of those. `audit_modes`
has queues and best effort.

An audit sees what the lake has. Reports that a broker could not write, and what was released before it was
landed, are counted as *unseen*: what seems missing there may have been delivered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from postroad.errors import UsageError
from postroad.selectors import Selector
from postroad.spark.audit_modes import BestEffortAudit, QueueAudit, audit_best_effort, audit_queues
from postroad.spark.lake.tables import Lake, Tables
from postroad.spark.where import selector_sql
from postroad.units import SECOND_US

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KINDS: Final = ("missing", "duplicated", "reordered", "late", "unwanted")
DEFAULT_LATE_US: Final = 10 * SECOND_US
LOSSES: Final = (*KINDS, "gaps", "redelivered")
SELECTORS_PER_SCAN: Final = 50  # a plan with more grows unwieldy
MAX_SUBSCRIPTIONS: Final = 100_000
STEPS: Final = 60  # of the time axis
PERCENTILES: Final = (0.5, 0.95, 0.99)
LANDING: Final = "postroad-landing"  # names of landing's own subscriptions, which hold storage, begin so
_TIME_US: Final = "CAST(conv(substr(id, 19, 12), 16, 10) AS BIGINT) * 1000"  # of a message id
OTHER_MODES: Final = ("queue_events", "best_effort_links", "repairs")  # what else can be audited
_SUMMED: Final = ("due", "delivered", "pending", "gaps", "redelivered", *KINDS)


class Subscribed(msgspec.Struct, frozen=True, kw_only=True):
    """A durable subscription, as a line of `postroad subs --json`; other fields there are left alone."""

    name: str
    topic: str = ""
    where: str = ""
    shared: bool = False
    since_us: int | None = None  # events from this time on are due; None: from the first it was given


def read_subscriptions(path: Path) -> list[Subscribed]:
    """Those that can be audited, from a file of JSON lines."""
    try:
        subscriptions = noted_subscriptions(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}): make it with `postroad subs --json`, or name another"
        ) from None
    return _auditable(subscriptions, str(path))


def landed_subscriptions(tables: Tables) -> list[Subscribed]:
    """Those that landing noted."""
    subscriptions = [msgspec.convert(row, Subscribed) for row in tables.fetch("subscriptions").to_pylist()]
    others = any(not subscription.name.startswith(LANDING) for subscription in subscriptions)
    if not others and any(tables.files(table) for table in OTHER_MODES):
        return []  # there are queues or best-effort events, and nothing else
    if not subscriptions:
        raise UsageError(
            f"the lake at {tables.store} has no subscriptions: name a file of `postroad subs --json`"
        )
    return _auditable(subscriptions, tables.store.table("subscriptions"))


def _auditable(subscriptions: Iterable[Subscribed], place: str) -> list[Subscribed]:
    listed = [subscription for subscription in subscriptions if not subscription.name.startswith(LANDING)]
    if not 1 <= len(listed) <= MAX_SUBSCRIPTIONS:
        raise UsageError(f"{place} has {len(listed)} subscriptions, 1 to {MAX_SUBSCRIPTIONS} can be audited")
    return listed


def noted_subscriptions(path: Path) -> list[Subscribed]:
    """All in a file of JSON lines, the last of each name; UsageError says which line cannot be."""
    by_name: dict[str, Subscribed] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            subscription = msgspec.json.decode(line, type=Subscribed)
            Selector.parse(subscription.topic, subscription.where)
        except (msgspec.DecodeError, UnicodeDecodeError, UsageError) as error:
            raise UsageError(f"line {number} of {path} is no subscription: {error}") from None
        by_name[subscription.name] = subscription
    return list(by_name.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The tables of an audit, not worked out yet."""

    faults: DataFrame  # kind, subscriber, id, pubend, tick, broker, at_us, latency_us
    summary: DataFrame  # per subscriber: how many of everything, latency percentiles
    timeline: DataFrame  # per step of time: deliveries and latency percentiles
    losses: DataFrame  # per step of time: faults by kind, gaps that were told, deliveries made again
    flows: DataFrame  # per origin and delivering broker: deliveries
    unseen: DataFrame  # per broker: what the lake does not have of it
    queues: QueueAudit
    best_effort: BestEffortAudit


def audit(lake: Lake, subscriptions: Iterable[Subscribed], *, late_us: int = DEFAULT_LATE_US) -> Audit:
    from pyspark.sql import functions as F

    subscribed = list(subscriptions)
    if subscribed:
        lake.check("events", "deliveries")
    events = lake.read("events")
    named = lake.spark.createDataFrame(
        [(subscription.name,) for subscription in subscribed], "subscriber string"
    )
    reported = lake.read("deliveries").join(F.broadcast(named), "subscriber", "left_semi")
    given = _given(reported, subscribed).persist()
    wanted = _wanted(lake, events, subscribed)
    bounds = _bounds(reported)
    placed = wanted.join(bounds, ["subscriber", "pubend"], "left")
    after_start = placed.filter("(since_us IS NULL AND tick >= first) OR time_ms * 1000 >= since_us")
    due = after_start.filter("tick <= last").persist()
    pending = after_start.filter("last IS NULL OR tick > last")
    first = given.filter("nth = 1")
    gone = due.join(first.select("subscriber", "id"), ["subscriber", "id"], "left_anti")
    missing = _outside_gaps(gone, reported)
    unwanted = first.join(events.select("id"), "id", "left_semi").join(
        wanted.select("subscriber", "id"), ["subscriber", "id"], "left_anti"
    )
    kinds: dict[str, DataFrame] = {
        "missing": missing.selectExpr(
            "subscriber",
            "id",
            "pubend",
            "tick",
            "CAST(NULL AS STRING) AS broker",
            "CAST(NULL AS BIGINT) AS at_us",
            "CAST(NULL AS BIGINT) AS latency_us",
        ),
        "duplicated": given.filter("nth_in_session > 1"),
        "reordered": given.filter("nth_in_session = 1 AND NOT shared AND tick < highest"),
        "late": first.filter(F.col("latency_us") > late_us),
        "unwanted": unwanted,
    }
    columns = ("subscriber", "id", "pubend", "tick", "broker", "at_us", "latency_us")
    faults = _together(
        frame.select(F.lit(kind).alias("kind"), *columns) for kind, frame in kinds.items()
    ).persist()
    gaps = reported.filter("what = 'gap'")
    redelivered = given.filter("nth > 1 AND nth_in_session = 1")
    counted = {"due": due, "delivered": first, "pending": pending, "gaps": gaps, "redelivered": redelivered}
    low, step_us = _steps(first)
    return Audit(
        faults=faults,
        summary=_summary(lake, subscribed, counted, faults, first),
        timeline=_timeline(first, low, step_us),
        losses=_losses(faults, gaps, redelivered, low, step_us),
        flows=first.groupBy("origin", "broker").count(),
        unseen=_unseen(lake.read("deliveries"), lake.read("queue_events")),
        queues=audit_queues(lake, late_us=late_us),
        best_effort=audit_best_effort(lake),
    )


def _given(reported: DataFrame, subscribed: list[Subscribed]) -> DataFrame:
    """Every event given, with how often before, the highest tick before it in its session, its latency."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    shared = [subscription.name for subscription in subscribed if subscription.shared]
    order = ("at_us", "number", "position")
    events = reported.filter("what = 'event'").withColumn("time_us", F.expr(_TIME_US))
    ever = Window.partitionBy("subscriber", "id").orderBy(*order)
    once = Window.partitionBy("subscriber", "broker", "session", "id").orderBy(*order)
    before = (
        Window.partitionBy("subscriber", "broker", "session", "pubend")
        .orderBy(*order)
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    return events.select(
        "subscriber",
        F.col("subscriber").isin(shared).alias("shared"),
        *("id", "pubend", "tick", "broker", "origin", "at_us", "time_us"),
        (F.col("at_us") - F.col("time_us")).alias("latency_us"),
        F.row_number().over(ever).alias("nth"),
        F.row_number().over(once).alias("nth_in_session"),
        F.max("tick").over(before).alias("highest"),
    )


def _wanted(lake: Lake, events: DataFrame, subscribed: list[Subscribed]) -> DataFrame:
    """(subscriber, id, pubend, tick, time_ms, since_us) of every event and selector that match."""
    from pyspark.sql import functions as F

    by_selector: dict[Selector, int] = {}
    rows: list[tuple[int, str, int | None]] = []
    for subscription in subscribed:
        selector = Selector.parse(subscription.topic, subscription.where)
        rows.append(
            (by_selector.setdefault(selector, len(by_selector)), subscription.name, subscription.since_us)
        )
    names = lake.spark.createDataFrame(rows, "selector int, subscriber string, since_us bigint")
    numbered = list(by_selector.items())
    parts: list[DataFrame] = []
    for at in range(0, len(numbered), SELECTORS_PER_SCAN):
        some = numbered[at : at + SELECTORS_PER_SCAN]
        cases: list[Column] = [
            F.expr(f"CASE WHEN {selector_sql(selector)} THEN {number} END") for selector, number in some
        ]
        matching = F.explode(F.array_compact(F.array(*cases))).alias("selector")
        parts.append(events.select("id", "pubend", "tick", "time_ms", matching))
    if not parts:  # nobody subscribes
        parts = [events.select("id", "pubend", "tick", "time_ms", F.lit(0).alias("selector")).filter("false")]
    return _together(parts).join(F.broadcast(names), "selector").drop("selector")


def _bounds(reported: DataFrame) -> DataFrame:
    """The first and the last tick each subscription is known to have come to, per pubend."""
    return reported.groupBy("subscriber", "pubend").agg(
        *_aggregates(
            first="min(CASE WHEN what = 'event' THEN tick WHEN what = 'gap' THEN start_tick + 1 END)",
            last="max(tick)",
        )
    )


def _outside_gaps(gone: DataFrame, reported: DataFrame) -> DataFrame:
    gaps = reported.filter("what = 'gap'").selectExpr(
        "subscriber AS of", "pubend AS gap_pubend", "start_tick AS after", "tick AS until"
    )
    inside = (gone.subscriber == gaps.of) & (gone.pubend == gaps.gap_pubend)
    inside = inside & (gone.tick > gaps.after) & (gone.tick <= gaps.until)
    return gone.join(gaps, inside, "left_anti")


def _summary(
    lake: Lake,
    subscribed: list[Subscribed],
    counted: Mapping[str, DataFrame],
    faults: DataFrame,
    first: DataFrame,
) -> DataFrame:
    from pyspark.sql import functions as F

    everyone = lake.spark.createDataFrame(
        [(subscription.name, subscription.topic or "#", subscription.where) for subscription in subscribed],
        "subscriber string, topic string, `where` string",
    )
    tallies = [frame.select("subscriber", F.lit(name).alias("what")) for name, frame in counted.items()]
    tallies.append(faults.select("subscriber", F.col("kind").alias("what")))
    table = _together(tallies).groupBy("subscriber").pivot("what", list(_SUMMED)).count().na.fill(0)
    share = ", ".join(map(str, PERCENTILES))
    latency = first.groupBy("subscriber").agg(
        *_aggregates(
            latency_us=f"percentile_approx(latency_us, array({share}), 1000)",
            latency_max_us="max(latency_us)",
        )
    )
    joined = everyone.join(table, "subscriber", "left").join(latency, "subscriber", "left")
    return joined.na.fill(0, list(_SUMMED)).orderBy("subscriber")


def _steps(first: DataFrame) -> tuple[int, int]:
    """Where the time axis begins, and the length of its equal steps."""
    span = first.selectExpr("min(at_us) AS low", "max(at_us) AS high").first()
    low, high = (0, 0) if span is None or span.low is None else (int(span.low), int(span.high))
    return low, max((high - low) // STEPS + 1, 1)


def _step(at_us: str, low: int, step_us: int) -> str:
    """The beginning of the step of a time; whatever is earlier is in the first one."""
    return f"greatest({at_us} - {low}L, 0L) DIV {step_us}L * {step_us}L + {low}L"


def _timeline(first: DataFrame, low: int, step_us: int) -> DataFrame:
    from pyspark.sql import functions as F

    share = ", ".join(map(str, PERCENTILES))
    return (
        first.withColumn("at", F.expr(_step("at_us", low, step_us)))
        .groupBy("at")
        .agg(
            *_aggregates(
                deliveries="count(*)",
                latency_us=f"percentile_approx(latency_us, array({share}), 1000)",
                step_us=f"max({step_us}L)",
            )
        )
        .orderBy("at")
    )


def _losses(faults: DataFrame, gaps: DataFrame, redelivered: DataFrame, low: int, step_us: int) -> DataFrame:
    """A missing event counts at the time it was published, the rest when a broker sent it or told of it."""
    kinds = [
        faults.selectExpr(f"coalesce(at_us, {_TIME_US}) AS at_us", "kind AS what"),
        gaps.selectExpr("at_us", "'gaps' AS what"),
        redelivered.selectExpr("at_us", "'redelivered' AS what"),
    ]
    placed = _together(kinds).selectExpr(f"{_step('at_us', low, step_us)} AS at", "what")
    return placed.groupBy("at").pivot("what", list(LOSSES)).count().na.fill(0).orderBy("at")


def _unseen(reports: DataFrame, queue_events: DataFrame) -> DataFrame:
    """Per broker: holes in the numbers of its reports, spans that were released before landing read them."""
    numbered = _together(
        frame.filter("number > 0").selectExpr(
            "broker", f"'{of}' AS of", "number DIV 4294967296 AS boot", "number"
        )
        for of, frame in (("deliveries", reports), ("queues", queue_events))
    )
    holes = numbered.groupBy("broker", "of", "boot").agg(
        *_aggregates(reports="max(number) - min(number) + 1 - count(DISTINCT number)")
    )
    gone = reports.filter(f"what = 'gap' AND startswith(subscriber, '{LANDING}')").selectExpr(
        "broker", "0L AS reports", "1L AS spans", "tick - start_tick AS ticks"
    )
    parts = [holes.selectExpr("broker", "reports", "0L AS spans", "0L AS ticks"), gone]
    counted = (
        _together(parts)
        .groupBy("broker")
        .agg(*_aggregates(reports="sum(reports)", spans="sum(spans)", seconds="sum(ticks) / 1e6D"))
    )
    return counted.filter("reports > 0 OR spans > 0").orderBy("broker")


def _aggregates(**named: str) -> list[Column]:
    from pyspark.sql import functions as F

    return [F.expr(text).alias(name) for name, text in named.items()]


def _together(frames: Iterable[DataFrame]) -> DataFrame:
    first, *rest = frames
    for other in rest:
        first = first.unionByName(other)
    return first


def as_rows(frame: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in frame.collect()]
