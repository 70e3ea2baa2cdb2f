"""Figures 5 and 6: subscribers that disconnect and come back, at one PHB and one SHB (5.1.1).

88 subscribers; each is away once, for 5 s as in the paper, so that it misses 1,000 events. Figure 5 is how
long each took to catch up. Figure 6 is how fast latestDelivered(p) and released(p) advanced meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from postroad.errors import UnavailableError
from postroad.ids import pubend_text
from postroad.lab.durable_crowd import EACH, SETTLE_S, Crowd, Subscriber
from postroad.lab.durable_network import network

SECONDS: Final = 60.0
SUBSCRIBERS: Final = 88
AWAY_S: Final = 5.0
WATCH_S: Final = 0.5
QUIET: Final = 0.1  # of the time nobody is away: at the beginning and at the end
PAPER_CATCHUP: Final = {"missed_events": 1_000.0, "catchup_p10_s": 5.0, "catchup_p90_s": 6.0}
PAPER_RATES: Final = {
    "latest_delivered_ms_per_s": 1_000.0,
    "latest_delivered_least_ms_per_s": 700.0,
    "released_least_ms_per_s": 0.0,
}
_SCALING: Final = (
    "In the paper a subscriber disconnects every 300 s; here once in --seconds, for 5 s as there (less when"
    " --seconds is under 20), so more are away at a time."
)
NOTES_CATCHUP: Final = (
    f"{_SCALING} A subscriber has caught up when it is less than 0.1 s behind those who were not away."
    " The paper: durations are usually between 5 and 6 s.",
)
NOTES_RATES: Final = (
    f"{_SCALING} Rates are milliseconds of ticks in a second, between two looks half a second apart;"
    " the paper shows its rates as a plot, and the least one is that of its garbage collections.",
)

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Look:
    """What the SHB said of one pubend."""

    at_s: float
    latest_delivered: int
    released: int


@dataclass(frozen=True, slots=True)
class Seen:
    looks: list[Look]
    caught_up: list[tuple[float, float]]  # (when it came back, seconds until it had caught up)
    missed: float  # events, on average


def look(answer: dict[str, Any], pubend: str, at_s: float) -> Look | None:
    """released(p) = min(latestDelivered(p), min released(s, p)), from the answer to "subs"."""
    latest = [entry["latest_delivered"] for entry in answer["constreams"] if entry["pubend"] == pubend]
    if not latest:
        return None
    released = [entry["released"][pubend] for entry in answer["subscriptions"] if pubend in entry["released"]]
    return Look(at_s, latest[0], min([latest[0], *released]))


def apart(looks: list[Look], seen: Look, every_s: float) -> bool:
    """Whether a rate can be told from the last look to this one: a busy broker answers several at once."""
    return not looks or seen.at_s - looks[-1].at_s >= every_s / 2


def rates(looks: list[Look], name: str) -> list[float]:
    """Milliseconds of ticks in a second, between each look and the next."""
    return [
        (getattr(after, name) - getattr(before, name)) / 1000 / (after.at_s - before.at_s)
        for before, after in pairwise(looks)
    ]


def disconnecting(seconds: float, tell: Callable[[str], None]) -> Seen:
    away_s = min(AWAY_S, seconds / 4)
    looks: list[Look] = []
    with network(1) as made:
        crowd = Crowd(made.phb)
        shb, pubend = made.shbs[0], pubend_text(crowd.pubends[0])
        try:
            crowd.add(made.hosts, SUBSCRIBERS)
            crowd.resume()
            crowd.run(1.0)
            began = time.monotonic()

            def note(answer: dict[str, Any]) -> None:
                seen = look(answer, pubend, time.monotonic() - began)
                if seen is not None and apart(looks, seen, WATCH_S):
                    looks.append(seen)

            def leave(subscriber: Subscriber) -> None:
                crowd.leave(subscriber)
                crowd.after(away_s, lambda: crowd.come_back(subscriber))

            crowd.watch(shb, "subs", WATCH_S, note)
            first, last = seconds * QUIET, max(seconds * (1 - QUIET) - away_s, seconds * QUIET)
            for number, subscriber in enumerate(crowd.subscribers):
                at_s = first + (last - first) * number / SUBSCRIBERS
                crowd.after(at_s, lambda subscriber=subscriber: leave(subscriber))  # type: ignore[misc]
            tell(f"{SUBSCRIBERS} subscribers, each away once for {away_s:.3g} s, {seconds:.0f} s in all")
            crowd.run(seconds)
            crowd.run(SETTLE_S, until=lambda: all(subscriber.caught_up for subscriber in crowd.subscribers))
            crowd.drain()
        finally:
            crowd.close()
    caught_up = [
        (back_ns / 1e9 - began, took)
        for subscriber in crowd.subscribers
        for back_ns, took in subscriber.caught_up
    ]
    if len(caught_up) < SUBSCRIBERS:
        raise UnavailableError(
            f"{SUBSCRIBERS - len(caught_up)} subscribers did not catch up within {SETTLE_S:.0f} s"
        )
    return Seen(looks, sorted(caught_up), away_s * EACH)


def run_catchup(seconds: float, out: Path | None, tell: Callable[[str], None]) -> tuple[Figures, Figures]:
    seen = disconnecting(seconds, tell)
    took = [took_s for _, took_s in seen.caught_up]
    p10, p50, p90 = np.percentile(took, (10, 50, 90))
    measured = {
        "catchups": float(len(took)),
        "missed_events": seen.missed,
        "catchup_p10_s": float(p10),
        "catchup_p50_s": float(p50),
        "catchup_p90_s": float(p90),
        "catchup_mean_s": statistics.fmean(took),
        "catchup_max_s": max(took),
    }
    if out is not None:
        from postroad.lab.durable_figures import draw_catchup

        draw_catchup(seen.caught_up, out)
    return measured, PAPER_CATCHUP


def run_rates(seconds: float, out: Path | None, tell: Callable[[str], None]) -> tuple[Figures, Figures]:
    seen = disconnecting(seconds, tell)
    looks = [glance for glance in seen.looks if glance.at_s <= seconds]
    if len(looks) < 3:
        raise UnavailableError("the subscriber hosting broker hardly answered: the machine is too busy")
    measured: Figures = {}
    for name in ("latest_delivered", "released"):
        per_s = rates(looks, name)
        whole = (getattr(looks[-1], name) - getattr(looks[0], name)) / 1000
        measured |= {
            f"{name}_ms_per_s": whole / (looks[-1].at_s - looks[0].at_s),
            f"{name}_least_ms_per_s": min(per_s),
            f"{name}_most_ms_per_s": max(per_s),
            f"{name}_deviation_ms_per_s": statistics.pstdev(per_s),
        }
    if out is not None:
        from postroad.lab.durable_figures import draw_rates

        draw_rates(looks, out)
    return measured, PAPER_RATES
