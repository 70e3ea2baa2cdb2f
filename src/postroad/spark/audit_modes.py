"""The audit of queues and of best effort (spec P7). `audit` has that of durable subscriptions.

**Queues**, per inbox, from what brokers at both ends reported:

| fault | what it is |
|---|---|
| missing | transactional, kept, and not settled, though a later message of its session was accepted |
| duplicated | accepted by two consumers |
| reordered | transactional, accepted by a consumer after a later one of the same session |
| late | accepted later after it was sent than the bound; one that was delayed on purpose may be |

What is kept and not settled is *pending*, or *expired* where its time was over by the last report.

**Best effort**: how many events went over each link and how many came out of it, and for each subscriber that
repairs how many losses it found and how many of them were repaired. Both ends of a link report once a
second, so that while events are under way the figures are apart by those of a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from postroad.spark.lake.tables import Lake
from postroad.units import MILLISECOND_US

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

QUEUE_KINDS: Final = ("missing", "duplicated", "reordered", "late")
QUEUE_COUNTS: Final = ("kept", "accepted", "rejected", "dead", "pending", "expired")
_SHARES: Final = "array(0.5, 0.95, 0.99)"
_TIME_US: Final = f"CAST(conv(substr(id, 19, 12), 16, 10) AS BIGINT) * {MILLISECOND_US}"  # of an id
_SESSION: Final = "substr(id, 1, 17)"
_NUMBER: Final = "substr(id, 19)"  # within the session; as text it is ordered as it is as a number


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueAudit:
    """Tables that are not worked out yet."""

    inboxes: DataFrame  # per inbox: how many of everything, latency percentiles
    faults: DataFrame  # kind, inbox, id, who, broker, at_us, latency_us


@dataclass(frozen=True, slots=True, kw_only=True)
class BestEffortAudit:
    links: DataFrame  # source, target, sent, received, lost, loss
    published: DataFrame  # broker, published
    receivers: DataFrame  # per subscriber and broker: what repair did for it, share repaired


def audit_queues(lake: Lake, *, late_us: int) -> QueueAudit:
    from pyspark.sql import functions as F

    events = lake.read("queue_events").selectExpr(
        "*", f"{_SESSION} AS session", f"{_NUMBER} AS place", f"at_us - {_TIME_US} AS latency_us"
    )
    last_us = events.agg(F.max("at_us")).alias("end").selectExpr("`max(at_us)` AS last_us")
    sent = events.filter("what = 'kept'")
    kept = sent.groupBy("inbox", "id", "session", "place").agg(
        F.max("form").alias("form"), F.max("expires_us").alias("expires_us"), F.min("at_us").alias("at_us")
    )
    given = _accepted(events, kept).persist()
    first = given.filter("nth = 1")
    ended = events.filter("what IN ('accepted', 'dead')").select("inbox", "id").distinct()
    open_ = kept.join(ended, ["inbox", "id"], "left_anti").crossJoin(F.broadcast(last_us))
    reached = first.groupBy("inbox", "session").agg(F.max("place").alias("reached"))
    left = open_.join(reached, ["inbox", "session"], "left").withColumn(
        "state",
        F.expr(
            "CASE WHEN expires_us IS NOT NULL AND expires_us <= last_us THEN 'expired'"
            " WHEN form = 'transactional' AND place < reached THEN 'missing' ELSE 'pending' END"
        ),
    )
    left = left.persist()
    columns = ("inbox", "id", "who", "broker", "at_us", "latency_us")
    missing = left.filter("state = 'missing'").selectExpr(
        "inbox", "id", "CAST(NULL AS STRING) AS who", "CAST(NULL AS STRING) AS broker", "at_us",
        "CAST(NULL AS BIGINT) AS latency_us",
    )  # fmt: skip
    kinds: dict[str, DataFrame] = {
        "missing": missing,
        "duplicated": given.filter("nth > 1 AND who <> first_who"),
        "reordered": first.filter("form = 'transactional' AND place < highest"),
        "late": first.filter(F.col("latency_us") > late_us),
    }
    faults = _together([frame.select(F.lit(kind).alias("kind"), *columns) for kind, frame in kinds.items()])
    faults = faults.persist()
    counted = {
        "kept": kept,
        "accepted": first,
        "rejected": events.filter("what = 'again'"),
        "dead": events.filter("what = 'dead'"),
        "pending": left.filter("state = 'pending'"),
        "expired": left.filter("state = 'expired'"),
    }
    tallies = [frame.select("inbox", F.lit(name).alias("what")) for name, frame in counted.items()]
    tallies.append(faults.select("inbox", F.col("kind").alias("what")))
    names = (*QUEUE_COUNTS, *QUEUE_KINDS)
    table = _together(tallies).groupBy("inbox").pivot("what", list(names)).count().na.fill(0)
    latency = first.groupBy("inbox").agg(
        F.expr(f"percentile_approx(latency_us, {_SHARES}, 1000)").alias("latency_us"),
        F.max("latency_us").alias("latency_max_us"),
    )
    return QueueAudit(
        inboxes=table.join(latency, "inbox", "left").orderBy("inbox"),
        faults=faults.orderBy("kind", "inbox", "id"),
    )


def _accepted(events: DataFrame, kept: DataFrame) -> DataFrame:
    """Every accept, which one of its message it is, and the last number that its consumer had before it."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    order = ("at_us", "broker", "number", "position")
    ever = Window.partitionBy("inbox", "id").orderBy(*order)
    before = (
        Window.partitionBy("inbox", "who", "broker", "session")
        .orderBy(*order)
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    forms = kept.select("inbox", "id", F.col("form").alias("sent_as"))
    return (
        events.filter("what = 'accepted'")
        .drop("form")
        .join(forms, ["inbox", "id"], "left")
        .withColumnRenamed("sent_as", "form")
        .withColumn("nth", F.row_number().over(ever))
        .withColumn("first_who", F.first("who").over(ever))
        .withColumn("highest", F.max("place").over(before))
    )


def audit_best_effort(lake: Lake) -> BestEffortAudit:
    """Figures count from a broker's start, or a subscription's beginning: the last of each, added up."""
    from pyspark.sql import functions as F

    links = lake.read("best_effort_links")
    whole = links.groupBy("broker", "neighbour", "boot").agg(*_last("sent", "received"))
    went = whole.groupBy(F.col("broker").alias("source"), F.col("neighbour").alias("target")).agg(
        F.sum("sent").alias("sent")
    )
    came = whole.groupBy(F.col("neighbour").alias("source"), F.col("broker").alias("target")).agg(
        F.sum("received").alias("received")
    )
    over = went.join(came, ["source", "target"], "full").na.fill(0, ["sent", "received"])
    lost = over.filter("source <> target AND (sent > 0 OR received > 0)").selectExpr(
        *("source", "target", "sent", "received"),
        "greatest(sent - received, 0L) AS lost",
        "CASE WHEN sent > 0 THEN greatest(sent - received, 0L) / sent ELSE 0.0D END AS loss",
    )
    counts = ("received", "detected", "requests", "recovered", "given_up", "duplicates", "slowest_us")
    repairs = (
        lake.read("repairs")
        .groupBy("subscriber", "broker")
        .agg(*_last(*counts), F.min("at_us").alias("first_us"), F.max("at_us").alias("last_us"))
    )
    return BestEffortAudit(
        links=lost.orderBy(F.desc("loss"), "source", "target"),
        published=went.filter("source = target").selectExpr("source AS broker", "sent AS published"),
        receivers=repairs.selectExpr(
            "*", "CASE WHEN detected > 0 THEN recovered / detected ELSE 1.0D END AS repaired"
        ).orderBy("subscriber", "broker"),
    )


def _last(*names: str) -> list[Column]:
    """Counts only grow."""
    from pyspark.sql import functions as F

    return [F.max(name).alias(name) for name in names]


def _together(frames: list[DataFrame]) -> DataFrame:
    first, *rest = frames
    for other in rest:
        first = first.unionByName(other)
    return first
