"""Figures 7 and 8: the SHB crashes for 25 s under 40 subscribers, and all of them catch up at once (5.3).

The process is killed without a word and started again on its data. Subscribers try to connect all the time
and come back with their tokens as soon as it listens; the paper holds them back until the constream has
caught up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from postroad.errors import UnavailableError
from postroad.ids import pubend_text
from postroad.lab.durable_crowd import EACH, Crowd
from postroad.lab.durable_disconnect import Look, apart, look, rates
from postroad.lab.durable_network import Broker, Network, network

SECONDS: Final = 25.0
SUBSCRIBERS: Final = 40
NORMAL_S: Final = 5.0
CATCHUP_S: Final = 180.0
WATCH_S: Final = 0.25
CAUGHT_UP_BAR_S: Final = 5.0
PAPER: Final = {
    "crash_s": 25.0,
    "catchup_mean_s": 116.0,
    "normal_events_per_s": 8_000.0,
    "latest_delivered_times_normal": 5.0,
}
NOTES: Final = (
    "all_caught_up_s counts from the moment at which the broker serves again until the last of the 40 gets an"
    " event that left less than 0.1 s ago; the bar is 5 s. restart_s counts from the start of its process.",
    "In the paper subscribers wait until the constream has what it missed; here they come back at once.",
)

Figures = dict[str, float]


@dataclass(slots=True)
class Story:
    """What happened when, in seconds since the load began."""

    looks: list[Look] = field(default_factory=list)
    received: list[tuple[float, int]] = field(default_factory=list)  # events so far
    idle: list[tuple[float, float, float]] = field(default_factory=list)  # share of a core: PHB, SHB
    crashed_s: float = 0.0
    started_s: float = 0.0
    ready_s: float = 0.0
    caught_up_s: float = 0.0


def _follow(crowd: Crowd, made: Network, story: Story, began: float) -> None:
    """Every quarter of a second: rate, processor time, and what the SHB says of one pubend."""
    shb, pubend = made.shbs[0], pubend_text(crowd.pubends[0])

    def note(answer: dict[str, Any]) -> None:
        seen = look(answer, pubend, time.monotonic() - began)
        if seen is not None and apart(story.looks, seen, WATCH_S):
            story.looks.append(seen)

    def used(broker: Broker, before: float, elapsed: float) -> float:
        return max(0.0, 1 - max(0.0, broker.cpu_s() - before) / elapsed)

    def sample(at: float, phb: float, host: float) -> None:
        now = time.monotonic()
        story.received.append((now - began, crowd.received))
        elapsed = now - at
        story.idle.append((now - began, used(made.phb, phb, elapsed), used(shb, host, elapsed)))
        sampled = (now, made.phb.cpu_s(), shb.cpu_s())
        crowd.after(WATCH_S, lambda: sample(*sampled))

    crowd.watch(shb, "subs", WATCH_S, note)
    start = (time.monotonic(), made.phb.cpu_s(), shb.cpu_s())
    crowd.after(WATCH_S, lambda: sample(*start))


def crash(seconds: float, tell: Callable[[str], None]) -> tuple[Story, Figures]:
    story = Story()
    with network(1) as made:
        crowd, shb = Crowd(made.phb), made.shbs[0]
        try:
            crowd.add(made.hosts, SUBSCRIBERS)
            crowd.resume()
            began = time.monotonic()
            _follow(crowd, made, story, began)
            tell(f"{SUBSCRIBERS} subscribers, all is well")
            crowd.run(NORMAL_S)
            normal = crowd.received / NORMAL_S
            tell(f"the subscriber hosting broker is down for {seconds:.3g} s")
            shb.kill()
            story.crashed_s = time.monotonic() - began
            crowd.run(seconds)
            story.started_s = time.monotonic() - began
            shb.start()
            tell("it is back; everybody catches up")
            crowd.run(CATCHUP_S, until=lambda: shb.ready)
            story.ready_s = time.monotonic() - began
            crowd.run(CATCHUP_S, until=lambda: all(each.caught_up for each in crowd.subscribers))
            if not all(each.caught_up for each in crowd.subscribers):
                raise UnavailableError(f"not everybody caught up within {CATCHUP_S:.0f} s")
            crowd.run(NORMAL_S)
            crowd.drain()
        finally:
            crowd.close()
    took = [each.caught_up[0] for each in crowd.subscribers]
    story.caught_up_s = max(back_ns / 1e9 + each for back_ns, each in took) - began
    advanced = rates([each for each in story.looks if each.at_s >= story.started_s - 1], "latest_delivered")
    busiest = max((after[1] - before[1]) / (after[0] - before[0]) for before, after in _pairs(story))
    return story, {
        "crash_s": story.started_s - story.crashed_s,
        "restart_s": story.ready_s - story.started_s,
        "all_caught_up_s": story.caught_up_s - story.ready_s,
        "catchup_mean_s": statistics.fmean(each for _, each in took),
        "catchup_max_s": max(each for _, each in took),
        "normal_events_per_s": normal,
        "most_events_per_s": busiest,
        "missed_events": (story.ready_s - story.crashed_s) * EACH,
        "latest_delivered_times_normal": max(advanced, default=0.0) / 1000,
        "phb_idle_least_percent": min(phb for at, phb, _ in story.idle if at >= story.ready_s) * 100,
        "shb_idle_least_percent": min(shb for at, _, shb in story.idle if at >= story.ready_s) * 100,
    }


def _pairs(story: Story) -> list[tuple[tuple[float, int], tuple[float, int]]]:
    return list(zip(story.received, story.received[1:], strict=False))


def run(seconds: float, out: Path | None, tell: Callable[[str], None]) -> tuple[Figures, Figures]:
    story, measured = crash(seconds, tell)
    if out is not None:
        from postroad.lab.durable_figures import draw_crash

        draw_crash(story, out)
    return measured, PAPER
