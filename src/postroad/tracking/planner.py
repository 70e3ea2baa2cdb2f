"""From an administrator's wish to settings, or the reason why there are none (spec T7; paper 4.2).

Given are the accuracy 1 - efpp, the peak rate r of messages in one history, the memory for its filter, the
clock quality Ts and the jitter Tj. For a matching set of w + 1 filters each may have fpp = 1 - (1 - efpp)^
(1/(w+1)), which says how many keys n fit into the memory. A filter then lasts Tn = n / r at the peak, and
Corollary 2 asks for 2 Ts + Tj <= w Tn. The smallest w that meets this is the answer: it costs the fewest
bits per message. Tp is a little longer than Tn, so that filters are full when they are stored (4.2), but no
longer than a crash may cost: a history with few messages stores part-full filters and retains them (4.3).

r is the rate as the history sees it: messages that a slow link held back arrive together. To Tj comes twice
the `GATHER_US` for which a broker collects ids: a filter that ends with some of them may have the time of the
last, one that begins with some that of the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final, NamedTuple

from postroad.errors import BugError, UsageError
from postroad.tracking.bloom import (
    MAX_BITS,
    MAX_HASHES,
    Shape,
    bits_per_key,
    capacity_for,
    expected_rate,
    filter_for,
    filter_rate,
)
from postroad.tracking.settings import GATHER_US
from postroad.units import MILLISECOND_US, SECOND_US

MAX_MATCHING: Final = 16  # filters asked per history: more would make traces slow
MAX_PERSIST_US: Final = 60 * SECOND_US  # what a crash may cost at most, however much memory there is
PERSIST_MARGIN: Final = 1.05  # "slightly larger than Tf"
MAX_FPP: Final = 0.5  # of a full filter, however little accuracy is wished: one with more tells nothing
LEAST_KEYS: Final = 1024  # a filter for fewer is mostly its description
LEAST_SKEW_US: Final = MILLISECOND_US  # ids have whole milliseconds
DAY_S: Final = 86_400
LEAST_RATE: Final = 1e-3  # below this nobody plans
_NEAREST_STEPS: Final = 100
_PAGES_US: Final = 2 * GATHER_US
_NEED: Final = f"2 Ts + Tj + {_PAGES_US // MILLISECOND_US} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    accuracy: float  # 1 - efpp
    rate: float  # messages a second at the peak, in one history
    memory: int  # bytes for the filter in memory of one history
    skew_us: int  # how far a publisher's clock may be from its broker's
    jitter_us: int  # the longest way of a message less the shortest, and the skew between brokers

    def __post_init__(self) -> None:
        if not 0 < 1 - self.accuracy < 1:
            raise UsageError(
                f"accuracy is between 0 and 1, such as 0.999, not {self.accuracy}; only the exact strategy"
                " has 1"
            )
        if math.isinf(self.rate):
            raise UsageError("rate must be finite")
        if not self.rate > 0:
            raise UsageError(f"rate must be more than 0 messages a second, not {self.rate}")
        if self.memory <= 0:
            raise UsageError(f"memory must be more than 0 bytes, not {self.memory}")
        if self.skew_us < 0 or self.jitter_us < 0:
            raise UsageError(f"skew and jitter cannot be negative: {self.skew_us} us and {self.jitter_us} us")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    wish: Wish
    shape: Shape
    w: int
    persist_us: int  # Tp
    lifetime_us: int  # Tn
    skew_us: int  # Ts
    bytes_per_day: int  # of one history at the peak rate

    @property
    def accuracy(self) -> float:
        """What it really has."""
        return 1 - expected_rate(self.shape.fpp, self.w + 1)

    @property
    def skew_limit_us(self) -> int:
        """The worst clocks for which the bound still holds."""
        return (self.w * self.lifetime_us - self.wish.jitter_us - _PAGES_US) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """No setting meets the wish. Each of `nearest` is possible and differs from it in what it names only: in
    one thing, or where one is not enough, in as few as are."""

    wish: Wish
    reason: str
    nearest: tuple[tuple[tuple[str, ...], Wish], ...]


def plan(wish: Wish) -> Plan | Impossible:
    possible = _plan(wish)
    return _explain(wish) if possible is None else possible


def _plan(wish: Wish) -> Plan | None:
    skew_us = max(wish.skew_us, LEAST_SKEW_US)
    need_us = 2 * skew_us + wish.jitter_us + _PAGES_US
    for w in range(1, MAX_MATCHING):
        fpp = _filter_rate(wish, w)
        if fpp <= 2.0**-MAX_HASHES:
            continue
        shape = _largest(wish, fpp)
        lifetime_us = int(min(shape.n / wish.rate * SECOND_US, MAX_PERSIST_US))
        if shape.n >= 1 and need_us <= w * lifetime_us:
            return Plan(
                wish=wish,
                shape=shape,
                w=w,
                persist_us=math.ceil(lifetime_us * PERSIST_MARGIN / MILLISECOND_US) * MILLISECOND_US,
                lifetime_us=lifetime_us,
                skew_us=skew_us,
                bytes_per_day=math.ceil(wish.rate * DAY_S * shape.m / shape.n / 8),
            )
    return None


def _filter_rate(wish: Wish, w: int) -> float:
    return min(filter_rate(1 - wish.accuracy, w + 1), MAX_FPP)


def _largest(wish: Wish, fpp: float) -> Shape:
    """The filter that uses the memory, unless it would take too long to fill."""
    shape = capacity_for(min(wish.memory * 8, MAX_BITS), fpp)
    enough = max(LEAST_KEYS, int(min(wish.rate * (MAX_PERSIST_US // SECOND_US), MAX_BITS)))
    return filter_for(enough, fpp) if enough < shape.n else shape


def _explain(wish: Wish) -> Impossible:
    need_us = 2 * max(wish.skew_us, LEAST_SKEW_US) + wish.jitter_us + _PAGES_US
    longest_us = (MAX_MATCHING - 1) * MAX_PERSIST_US
    if need_us > longest_us:
        reason = (
            f"{_NEED} is {need_us / SECOND_US:g} s, and {MAX_MATCHING - 1} filters that last at most"
            f" {MAX_PERSIST_US // SECOND_US} s each cover {longest_us // SECOND_US} s"
        )
    else:
        w = MAX_MATCHING - 1
        ratio, _ = bits_per_key(max(_filter_rate(wish, w), 2.0**-MAX_HASHES))
        lasts_us = wish.memory * 8 / ratio / wish.rate * SECOND_US
        reason = (
            f"a filter of {wish.memory} bytes holds about {int(wish.memory * 8 / ratio)} messages at that"
            f" accuracy and lasts {lasts_us / SECOND_US:.3g} s at {wish.rate:g} a second, so even"
            f" {w + 1} filters cover less than {_NEED} = {need_us / SECOND_US:g} s"
        )
    return Impossible(wish=wish, reason=reason, nearest=_nearest(wish))


class _Way(NamedTuple):
    """How a wish can give way in one thing: from what is asked to the farthest that makes a difference."""

    asked: float
    farthest: float
    changed: Callable[[Wish, float], Wish]

    def at(self, share: float) -> float:
        """By ratios: what is asked may be off by hundreds of digits."""
        return math.pow(self.asked, 1 - share) * math.pow(self.farthest, share)


def _nearest(wish: Wish) -> tuple[tuple[tuple[str, ...], Wish], ...]:
    """Give way in one thing at a time, or in as many as it takes, just as far as it must be."""
    ways = {
        "memory": _Way(wish.memory, MAX_BITS / 8, lambda to, x: replace(to, memory=math.ceil(x))),
        "rate": _Way(wish.rate, LEAST_RATE, lambda to, x: replace(to, rate=x)),
        "accuracy": _Way(1 - wish.accuracy, 0.5, lambda to, x: replace(to, accuracy=1 - x)),
        "skew": _Way(wish.skew_us, 1, lambda to, x: replace(to, skew_us=int(x))),
        "jitter": _Way(wish.jitter_us, 1, lambda to, x: replace(to, jitter_us=int(x))),
    }
    for count in range(1, len(ways) + 1):
        together = [(names, [ways[name] for name in names]) for names in combinations(ways, count)]
        possible = [(names, some) for names, some in together if _plan(_given_way(wish, some, 1.0))]
        if possible:
            return tuple((names, _just_possible(wish, some)) for names, some in possible)
    raise BugError(f"{wish} is impossible however far it gives way")


def _given_way(wish: Wish, ways: Sequence[_Way], share: float) -> Wish:
    for way in ways:
        wish = way.changed(wish, way.at(share))
    return wish


def _just_possible(wish: Wish, ways: Sequence[_Way]) -> Wish:
    bad, good = 0.0, 1.0
    for _ in range(_NEAREST_STEPS):
        middle = (bad + good) / 2
        if _plan(_given_way(wish, ways, middle)) is None:
            bad = middle
        else:
            good = middle
    nearest = _given_way(wish, ways, good)
    for way in ways:
        nearest = way.changed(nearest, _rounded(nearest, way, way.at(good)))
    return nearest


def _rounded(wish: Wish, way: _Way, good: float) -> float:
    """A number of three digits that is still possible, where there is one."""
    digits = 2 - math.floor(math.log10(good))
    step = 10.0**-digits
    for candidate in (round(good, digits), round(good + step, digits), round(good - step, digits)):
        between = min(good, way.farthest) <= candidate <= max(good, way.farthest)
        if between and _plan(way.changed(wish, candidate)) is not None:
            return candidate
    return good
