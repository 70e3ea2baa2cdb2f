"""Which broker to connect to, of those that answered (paper 6 and 9, spec V7).

The estimated delay and the usage only shortlist: one-way delays are as good as the clocks, and paths are not
symmetric. The round trip of a ping decides. Among those that are as near as makes no difference chance
decides, with the less busy ones more likely: usage is told before a crowd arrives, so if all of it took the
least busy broker, that one would be the busiest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from postroad.discovery.settings import Weights
from postroad.seam.datagrams import Endpoint
from postroad.units import GIB, MILLISECOND_US
from postroad.wire.discovery import Response, Usage

NEAR_SHARE: Final = 0.1  # a round trip that is longer by so much is as good
NEAR_US: Final = MILLISECOND_US // 2  # or by that
_TICKETS: Final = 1 << 20


@dataclass(slots=True)
class Candidate:
    """A broker that answered."""

    response: Response
    endpoint: Endpoint  # of its datagrams
    address: str  # of its connections
    delay_us: int  # estimated, one way; below 0 where clocks are not what they seem
    weight: float
    round_trips_us: list[int] = field(default_factory=list)

    @property
    def round_trip_us(self) -> int | None:
        return min(self.round_trips_us, default=None)


def usage_weight(usage: Usage, weights: Weights) -> float:
    total = usage.memory_total_bytes
    return (
        (usage.memory_free_bytes / total if total else 0.0) * weights.free_memory
        + total / GIB * weights.memory_gib
        + usage.cpu_share * weights.cpu
        + usage.connections * weights.connections
        + usage.links * weights.links
    )


def weigh(usage: Usage, delay_us: int, weights: Weights) -> float:
    return usage_weight(usage, weights) + max(0, delay_us) / MILLISECOND_US * weights.delay_ms


def merit(candidate: Candidate, weights: Weights) -> float:
    """The weight with what a ping measured in place of the estimate."""
    trip_us = candidate.round_trip_us
    return candidate.weight if trip_us is None else weigh(candidate.response.usage, trip_us // 2, weights)


def shortlist(candidates: Sequence[Candidate], size: int) -> list[Candidate]:
    """The target set: the heaviest ones, the nearest of equals first."""
    return sorted(candidates, key=lambda each: (-each.weight, each.delay_us, each.response.broker))[:size]


def _by_round_trip(target: Candidate) -> tuple[bool, int, float]:
    """Those that were measured come first."""
    return target.round_trip_us is None, target.round_trip_us or 0, -target.weight


def choose(targets: Sequence[Candidate], weights: Weights, draw: Callable[[int], int]) -> list[Candidate]:
    """The one to connect to, then the others in the order in which to try them."""
    ranked = sorted(targets, key=_by_round_trip)
    best_us = ranked[0].round_trip_us
    if best_us is None:
        return ranked  # nobody answered a ping: the weight is all there is
    limit_us = near_limit_us(best_us)
    near = [each for each in ranked if each.round_trip_us is not None and each.round_trip_us <= limit_us]
    scores = [usage_weight(target.response.usage, weights) for target in near]
    tickets = [1 + int(_TICKETS * math.exp(max(-50.0, score - max(scores)))) for score in scores]
    drawn, at = draw(sum(tickets)), 0
    while drawn >= tickets[at]:
        drawn -= tickets[at]
        at += 1
    chosen = near[at]
    ranked.remove(chosen)
    return [chosen, *ranked]


def is_near(round_trip_us: int, best_us: int) -> bool:
    return round_trip_us <= near_limit_us(best_us)


def near_limit_us(best_us: int) -> int:
    return max(best_us + NEAR_US, round(best_us * (1 + NEAR_SHARE)))
