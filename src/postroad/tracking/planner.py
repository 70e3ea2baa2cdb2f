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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from postroad.errors import UsageError
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
            raise UsageError("rate must be more than 0 messages a second")
        if self.memory <= 0:
            raise UsageError("memory must be more than 0 bytes")
        if self.skew_us < 0 or self.jitter_us < 0:
            raise UsageError("skew and jitter cannot be negative")


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
    """No setting meets the wish. Each of `nearest` differs from it in one thing only and is possible."""

    wish: Wish
    reason: str
    nearest: tuple[tuple[str, Wish], ...]


def plan(wish: Wish) -> Plan | Impossible:
    found = _plan(wish)
    return _explain(wish) if found is None else found


def _plan(wish: Wish) -> Plan | None:
    skew_us = max(wish.skew_us, LEAST_SKEW_US)
    need_us = 2 * skew_us + wish.jitter_us + _PAGES_US
    for w in range(1, MAX_MATCHING):
        fpp = filter_rate(1 - wish.accuracy, w + 1)
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
        ratio, _ = bits_per_key(max(filter_rate(1 - wish.accuracy, w + 1), 2.0**-MAX_HASHES))
        lasts_us = wish.memory * 8 / ratio / wish.rate * SECOND_US
        reason = (
            f"a filter of {wish.memory} bytes holds about {int(wish.memory * 8 / ratio)} messages at that"
            f" accuracy and lasts {lasts_us / SECOND_US:.3g} s at {wish.rate:g} a second, so even"
            f" {w + 1} filters cover less than {_NEED} = {need_us / SECOND_US:g} s"
        )
    return Impossible(wish=wish, reason=reason, nearest=_nearest(wish))


def _nearest(wish: Wish) -> tuple[tuple[str, Wish], ...]:
    """Give way in one thing at a time, just as far as it must be."""
    changes: list[tuple[str, Callable[[float], Wish], float, float]] = [
        ("memory", lambda x: replace(wish, memory=math.ceil(x)), wish.memory, MAX_BITS / 8),
        ("rate", lambda x: replace(wish, rate=x), wish.rate, LEAST_RATE),
        ("accuracy", lambda x: replace(wish, accuracy=1 - x), 1 - wish.accuracy, 0.5),
        ("skew", lambda x: replace(wish, skew_us=int(x)), wish.skew_us, 0),
        ("jitter", lambda x: replace(wish, jitter_us=int(x)), wish.jitter_us, 0),
    ]
    found: list[tuple[str, Wish]] = []
    for name, changed, asked, farthest in changes:
        if _plan(changed(farthest)) is None:
            continue
        bad, good = float(asked), float(farthest)
        for _ in range(_NEAREST_STEPS):
            # By ratios where there are any: what is asked may be off by hundreds of digits.
            middle = math.sqrt(bad) * math.sqrt(good) if good else bad / 2 + good / 2
            if _plan(changed(middle)) is None:
                bad = middle
            else:
                good = middle
        found.append((name, changed(_rounded(changed, good, farthest))))
    return tuple(found)


def _rounded(changed: Callable[[float], Wish], good: float, farthest: float) -> float:
    """A number of three digits that is still possible, where there is one."""
    if good <= 0:
        return good
    digits = 2 - math.floor(math.log10(good))
    step = 10.0**-digits
    for candidate in (round(good, digits), round(good + step, digits), round(good - step, digits)):
        between = min(good, farthest) <= candidate <= max(good, farthest)
        if between and _plan(changed(candidate)) is not None:
            return candidate
    return good
