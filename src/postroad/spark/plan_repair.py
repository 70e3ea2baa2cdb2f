"""Planner of best effort: record size and cache bounds from the losses that were observed (spec P8, B8, B11).

The record is the shortest with which a receiver finds its losses with the chance that is asked for (equation
1, `client.repair.planning`), where the receiver is the one that matches least and the loss is the worst that
any had. A cache must hold a message until it is asked for: K > lambda Pm [(C1 + C2/2 + 1) d(Z,B) + d(B,A)]
(B8). lambda Pm is what a receiver got a second, and the bracket is at most the time that its slowest
recovery took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from postroad.client.repair.planning import record_for, shared_detection, summary_detection
from postroad.client.repair.settings import MAX_RECORD_ENTRIES, RECORDS
from postroad.spark.audit import as_rows
from postroad.spark.audit_modes import audit_best_effort
from postroad.spark.lake.tables import Lake
from postroad.units import SECOND_US

HEADROOM: Final = 1.5  # peaks to come over the highest seen
DETECTION: Final = 0.99  # share of losses that a record is to show


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What the lake knows of best effort."""

    published: int
    link_loss: float  # the worst link's
    receivers: int
    loss: float  # the worst receiver's share of events that it found lost
    match: float  # the least share of what was published that a receiver got or missed
    detected: int
    recovered: int
    needs: tuple[float, ...]  # per receiver: messages that came while its slowest recovery lasted


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairProposal:
    observed: Losses
    record: int
    detection: float
    cache_min: int
    cache_max: int


def observe_losses(lake: Lake) -> Losses | None:
    """None if no best-effort event was reported."""
    audit = audit_best_effort(lake)
    published = sum(row["published"] for row in as_rows(audit.published))
    if not published:
        return None
    receivers = [row for row in as_rows(audit.receivers) if row["received"] + row["detected"]]
    wanted = [row["received"] + row["detected"] for row in receivers]
    return Losses(
        published=published,
        link_loss=max((row["loss"] for row in as_rows(audit.links)), default=0.0),
        receivers=len(receivers),
        loss=max(
            (row["detected"] / count for row, count in zip(receivers, wanted, strict=True)), default=0.0
        ),
        match=min(1.0, min(wanted, default=0) / published),
        detected=sum(row["detected"] for row in receivers),
        recovered=sum(row["recovered"] for row in receivers),
        needs=tuple(
            row["received"] * row["slowest_us"] / max(row["last_us"] - row["first_us"], SECOND_US)
            for row in receivers
        ),
    )


def propose_repair(observed: Losses) -> RepairProposal:
    loss = max(observed.loss, observed.link_loss)
    record = 0
    if loss and observed.match:
        record = record_for(DETECTION, observed.match, loss, 1, 0.0) or MAX_RECORD_ENTRIES
    record = min(record, MAX_RECORD_ENTRIES)
    least = max(1, math.ceil(min(observed.needs, default=0.0)))
    most = math.ceil(HEADROOM * max(observed.needs, default=0.0))
    return RepairProposal(
        observed=observed,
        record=record,
        detection=shared_detection(observed.match, loss, record, 1, 0.0),
        cache_min=least,
        cache_max=max(most, least, RECORDS.cache_min),
    )


def repair_toml(proposal: RepairProposal) -> str:
    """For clients that repair: the fields of `RepairSettings`, the reason above each."""
    seen = proposal.observed
    loss = max(seen.loss, seen.link_loss)
    lost = (
        f"the worst link lost {seen.link_loss:.3%}, the worst receiver {seen.loss:.3%} of its events;"
        f" {seen.recovered:,} of {seen.detected:,} losses were repaired"
    )
    lines = [
        f"# Proposed for clients that repair, from {seen.published:,} best-effort events and {seen.receivers}"
        " receivers.",
        "[repair]",
        f"# R: {lost}.",
    ]
    if proposal.record:
        lines.append(
            f"# A receiver that matches {seen.match:.3%} of all events finds {proposal.detection:.1%} of its"
            f" losses with a record of {proposal.record}; {DETECTION:.0%} is the aim. Summaries, the"
            f" default, find {summary_detection(loss):.5%}."
        )
    else:
        lines.append("# Nothing was lost: no record is needed.")
    lines += [
        f"record = {proposal.record}",
        f"# Kmin: the receiver that needs least got {min(seen.needs, default=0.0):,.1f} messages while its"
        " slowest recovery lasted.",
        f"cache_min = {proposal.cache_min}",
        f"# Kmax: the one that needs most got {max(seen.needs, default=0.0):,.1f}; {HEADROOM:g} times that,"
        f" and at least {RECORDS.cache_min}.",
        f"cache_max = {proposal.cache_max}",
    ]
    return "\n".join(lines) + "\n"
