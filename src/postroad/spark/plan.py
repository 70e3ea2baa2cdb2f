"""Planner: settings for every broker from what the lake has seen of it, each with its reason (spec P8).

Observed are, per broker: the peak rate in its busiest history (keys of a filter over the time they span), how
full filters are when they are done, how far message times are from the broker's clock when they are published
(skew), how late messages come from other brokers (jitter), times outside any sensible range, and crashes.
`tracking.planner` turns that and the wish into m, n, k, Tp and Ts. `plan_repair` proposes record size and
cache bounds of best effort.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from postroad.spark.lake.tables import Lake, write_folder
from postroad.spark.trace.bulk import current
from postroad.tracking.keys import LOG, PUBLISH
from postroad.tracking.planner import Impossible, Plan, Wish, plan
from postroad.tracking.settings import GATHER_US
from postroad.units import KIB, MILLISECOND_US, SECOND_US

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

HEADROOM: Final = 1.5  # peaks to come over the highest seen
LEAST_RATE: Final = 1.0
LEAST_SKEW_US: Final = 10 * MILLISECOND_US
LEAST_JITTER_US: Final = 20 * MILLISECOND_US
ROUND_US: Final = 10 * MILLISECOND_US
LEAST_SPAN_MS: Final = 1000  # shorter filters tell little about a rate
DEFAULT_ACCURACY: Final = 0.999
DEFAULT_MEMORY: Final = 128 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the lake knows of one broker."""

    broker: str
    name: str
    filters: int
    histories: int
    rate: float  # keys a second at the peak of the busiest history
    fill: float | None  # mean share of the capacity used by filters that are done, if any is
    skew_us: int
    jitter_us: int
    wild: int  # filters with times outside any sensible range
    crashes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    observed: Observed
    wish: Wish
    plan: Plan | Impossible


def observe(lake: Lake) -> list[Observed]:
    lake.check("filters", "attachments")
    rows = _statistics(current(lake)).collect()
    crashes = {
        row.broker: row["count"]
        for row in lake.read("attachments").filter("what = 'lost'").groupBy("broker").count().collect()
    }
    return [
        Observed(
            broker=row.broker,
            name=row.name,
            filters=row.filters,
            histories=row.histories,
            rate=float(row.rate or 0.0),
            fill=None if row.fill is None else float(row.fill),
            skew_us=int(row.skew_us or 0),
            jitter_us=int(row.jitter_us or 0),
            wild=int(row.wild),
            crashes=int(crashes.get(row.broker, 0)),
        )
        for row in rows
    ]


def _statistics(records: DataFrame) -> DataFrame:
    from pyspark.sql.functions import expr

    span = f"greatest(hi_ms - lo_ms + 1, {LEAST_SPAN_MS})"
    apart = f"opened_us - lo_ms * {MILLISECOND_US}"
    ranged = "hi_ms >= lo_ms"
    observed = records.filter(f"kind <> '{LOG}'").selectExpr(
        *("broker", "name", "singles"),
        "hash(kind, origin, neighbour, subscriber) AS history",
        f"CASE WHEN {ranged} THEN count * 1000.0D / {span} END AS rate",
        f"CASE WHEN {ranged} AND final THEN count / n END AS fill",
        f"CASE WHEN {ranged} AND kind = '{PUBLISH}' THEN greatest(hi_ms * {MILLISECOND_US} - stored_us,"
        f" {apart} - {GATHER_US}, 0) END AS skew_us",
        f"CASE WHEN {ranged} AND kind <> '{PUBLISH}' THEN greatest({apart} - {GATHER_US}, 0) END"
        " AS jitter_us",
    )
    figures = {
        "name": "max(name)",
        "filters": "count(*)",
        "histories": "count(DISTINCT history)",
        "rate": "max(rate)",
        "fill": "avg(fill)",
        "skew_us": "max(skew_us)",
        "jitter_us": "max(jitter_us)",
        "wild": "count_if(size(singles) > 0)",
    }
    wanted = [expr(text).alias(name) for name, text in figures.items()]
    return observed.groupBy("broker").agg(*wanted).orderBy("broker")


def propose(
    observed: Observed, *, accuracy: float = DEFAULT_ACCURACY, memory: int = DEFAULT_MEMORY
) -> Proposal:
    wish = Wish(
        accuracy=accuracy,
        rate=max(observed.rate * HEADROOM, LEAST_RATE),
        memory=memory,
        skew_us=_rounded(max(observed.skew_us, LEAST_SKEW_US)),
        jitter_us=_rounded(max(observed.jitter_us, LEAST_JITTER_US)),
    )
    return Proposal(observed=observed, wish=wish, plan=plan(wish))


def _rounded(us: int) -> int:
    return math.ceil(us / ROUND_US) * ROUND_US


def as_toml(proposal: Proposal) -> str:
    """A piece of configuration, the reason above each setting."""
    seen, wish, proposed = proposal.observed, proposal.wish, proposal.plan
    lines = [
        f"# Proposed for broker {seen.name} ({seen.broker}) from {seen.filters} stored filters of"
        f" {seen.histories} histories.",
    ]
    if isinstance(proposed, Impossible):
        lines.append(f"# No Bloom filter can meet this: {proposed.reason}.")
        for names, other in proposed.nearest:
            values = " and ".join(f"{getattr(other, _FIELD[name]):g}" for name in names)
            lines.append(f"# With another {' and '.join(names)} it can: {values}.")
        lines += ["[tracking]", "# So everything is logged.", 'strategy = "exact"']
        return "\n".join(lines) + "\n"
    shape = proposed.shape
    full = (
        "of the filters none was done yet"
        if seen.fill is None
        else f"filters were {seen.fill:.0%} full when they were done"
    )
    crashes = f"; it died {seen.crashes} times, each cost what was recorded since" if seen.crashes else ""
    settings: list[tuple[str, object, str]] = [
        ("strategy", "bloom", f"accuracy {wish.accuracy:g} was asked for"),
        (
            "bits",
            shape.m,
            f"m: {shape.m / shape.n:.3g} bits a message; the {proposed.w + 1} filters that can match one"
            f" time are then wrong with {1 - proposed.accuracy:.2g}",
        ),
        (
            "capacity",
            shape.n,
            f"n: the busiest history had {seen.rate:,.1f} keys a second, {HEADROOM:g} times that fill it in"
            f" {proposed.lifetime_us / SECOND_US:.3g} s; {full}",
        ),
        ("hashes", shape.k, "k: the fewest false positives for these bits"),
        ("persist", _duration(proposed.persist_us), f"Tp: a little longer than a filter lasts{crashes}"),
        (
            "skew",
            _duration(proposed.skew_us),
            f"Ts: publishers' clocks were off by up to {seen.skew_us / MILLISECOND_US:,.0f} ms"
            + (f"; {seen.wild} filters had times beyond all bounds" if seen.wild else ""),
        ),
        (
            "jitter",
            _duration(wish.jitter_us),
            f"Tj: messages came up to {seen.jitter_us / MILLISECOND_US:,.0f} ms after their time",
        ),
    ]
    lines.append("[tracking]")
    for name, value, reason in settings:
        lines += [f"# {reason}.", f"{name} = {json.dumps(value)}"]
    return "\n".join(lines) + "\n"


_FIELD: Final = {
    "memory": "memory",
    "rate": "rate",
    "accuracy": "accuracy",
    "skew": "skew_us",
    "jitter": "jitter_us",
}


def _duration(us: int) -> str:
    return f"{us // SECOND_US} s" if us % SECOND_US == 0 else f"{math.ceil(us / MILLISECOND_US)} ms"


def write_plans(proposals: list[Proposal], target: Path, *, repair: str = "") -> None:
    """One file per broker, and one for clients that repair, if there is a text for it; all or none."""

    def write(path: str) -> None:
        folder = Path(path)
        folder.mkdir()
        for proposal in proposals:
            (folder / f"{proposal.observed.broker}.toml").write_text(as_toml(proposal))
        if repair:
            (folder / "repair.toml").write_text(repair)

    write_folder(write, target)
