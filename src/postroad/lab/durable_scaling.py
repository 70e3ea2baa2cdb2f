"""Figure 4: the peak rate with 1, 2 and 4 subscriber hosting brokers, without and with disconnections (5.1).

Subscribers are added until the network no longer keeps up; each gets 200 events a second, so their number
is the rate. Then every one of them disconnects once in a cycle, for a sixtieth of it as in the paper (5 s
in 300 s), and comes back with its token; if that is too much, some leave and it is tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from postroad.errors import UnavailableError
from postroad.lab.durable_crowd import EACH, RATE, Crowd, Subscriber
from postroad.lab.durable_network import Network, network

SECONDS: Final = 3.0
NETWORKS: Final = {"1_broker": 0, "1_shb": 1, "2_shb": 2, "4_shb": 4}  # name -> SHBs beside the PHB
FIRST: Final = 50  # subscribers at each host to begin with
MOST: Final = 3_200  # in all
CYCLES: Final = 4  # a cycle of disconnections is this many times as long as a measurement
AWAY: Final = 60  # the part of a cycle that a subscriber is away
BEHIND_S: Final = 0.25  # more than this behind, and the network does not keep up
FEWER: Final = 0.88
TRIES: Final = 4
PAPER: Final = {
    "1_shb.events_per_s": 20_000.0,
    "1_shb.subscribers": 100.0,
    "1_shb.phb_idle_percent": 69.0,
    "1_shb.disconnecting_events_per_s": 17_600.0,
    "1_shb.disconnecting_subscribers": 88.0,
    "4_shb.events_per_s": 79_200.0,
    "4_shb.phb_idle_percent": 59.0,
    "4_shb.disconnecting_events_per_s": 69_600.0,
    "4_shb.disconnecting_subscribers": 348.0,
}
NOTES: Final = (
    "The paper has a machine with six processors for each broker; here brokers, publishers and subscribers"
    " share one machine, so rates stop growing where its processors are used up."
    " shb_cpu_us_per_event is what a delivery costs; it falls where brokers have to wait for a processor,"
    " since events that wait are delivered together.",
    "phb_idle_percent is of one core, the paper's of six. Times of disconnections are scaled: a cycle is four"
    " times --seconds, not 300 s, and a subscriber is away for a sixtieth of it, as in the paper.",
)

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured in one stretch of time."""

    events_per_s: float
    sustained: bool
    phb_cores: float
    cpu_us_per_event: float  # of those who host subscribers


def measure(crowd: Crowd, made: Network, seconds: float) -> Sample:
    phb, hosts = made.phb.cpu_s(), sum(host.cpu_s() for host in made.hosts)
    began, received, sent = time.monotonic(), crowd.received, sum(crowd.sent)
    crowd.run(seconds)
    elapsed = time.monotonic() - began
    got = crowd.received - received
    allowed = BEHIND_S * EACH * len(crowd.subscribers)
    in_time = sum(crowd.sent) - sent >= RATE * (elapsed - BEHIND_S)
    return Sample(
        events_per_s=got / elapsed,
        sustained=crowd.backlog() <= allowed and in_time,
        phb_cores=(made.phb.cpu_s() - phb) / elapsed,
        cpu_us_per_event=(sum(host.cpu_s() for host in made.hosts) - hosts) * 1e6 / max(got, 1),
    )


def _settle(crowd: Crowd) -> None:
    """After too many: nobody publishes until those who remain have everything."""
    crowd.drain()
    crowd.resume()


def peak(crowd: Crowd, made: Network, seconds: float) -> tuple[Sample, int]:
    """The most subscribers that are served in time: doubling, then halfway back."""
    best: tuple[Sample, int] | None = None
    count = FIRST * len(made.hosts)
    crowd.resume()
    failed = False
    while count <= MOST:
        crowd.add(made.hosts, count - len(crowd.subscribers))
        crowd.run(1.0)
        sample = measure(crowd, made, seconds)
        if sample.sustained:
            best = (sample, count)
        else:
            crowd.remove(count - (best[1] if best else count // 2))
            _settle(crowd)
            if failed or best is None:
                break
            failed = True
        count = best[1] * 3 // 2 if failed else count * 2
        if failed and best[1] != count * 2 // 3:
            break
    if best is None:
        raise UnavailableError(f"this machine is too busy for {FIRST} subscribers at a broker")
    return best


def disconnecting(crowd: Crowd, made: Network, cycle_s: float) -> Sample:
    """A cycle in which every subscriber is away once."""
    away_s = cycle_s / AWAY
    count = len(crowd.subscribers)

    def leave(subscriber: Subscriber) -> None:
        crowd.leave(subscriber)
        crowd.after(away_s, lambda: crowd.come_back(subscriber))

    for number, subscriber in enumerate(crowd.subscribers):
        crowd.after(cycle_s * (AWAY - 2) / AWAY * number / count, partial(leave, subscriber))
    return measure(crowd, made, cycle_s)


def _single(name: str, shbs: int, seconds: float, tell: Callable[[str], None]) -> Figures:
    with network(shbs) as made:
        crowd = Crowd(made.phb)
        try:
            tell(f"{name}: how many subscribers it can serve")
            sample, count = peak(crowd, made, seconds)
            figures = {
                f"{name}.events_per_s": sample.events_per_s,
                f"{name}.subscribers": float(count),
                f"{name}.phb_idle_percent": max(0.0, 1 - sample.phb_cores) * 100,
                f"{name}.shb_cpu_us_per_event": sample.cpu_us_per_event,
            }
            for _ in range(TRIES):
                tell(f"{name}: {len(crowd.subscribers)} subscribers that disconnect")
                sample = disconnecting(crowd, made, seconds * CYCLES)
                crowd.run(1.0)  # those who left last come back
                if sample.sustained:
                    break
                crowd.remove(len(crowd.subscribers) - int(len(crowd.subscribers) * FEWER))
                _settle(crowd)
            figures[f"{name}.disconnecting_events_per_s"] = sample.events_per_s
            figures[f"{name}.disconnecting_subscribers"] = float(len(crowd.subscribers))
            figures[f"{name}.disconnecting_cpu_us_per_event"] = sample.cpu_us_per_event
            crowd.drain()
        finally:
            crowd.close()
    return figures


def run(seconds: float, out: Path | None, tell: Callable[[str], None]) -> tuple[Figures, Figures]:
    measured: Figures = {}
    for name, shbs in NETWORKS.items():
        measured |= _single(name, shbs, seconds, tell)
    if out is not None:
        from postroad.lab.durable_figures import draw_scaling

        draw_scaling(measured, PAPER, out)
    return measured, PAPER
