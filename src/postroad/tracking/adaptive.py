"""Filters sized from the observed rate, so that a filter is full when the persistence interval ends.

The paper's filters have one size, and those stored part-full waste what they do not use (5.3). Here m grows
and shrinks with n while m / n and k stay, so every filter keeps its false positive rate and costs the same
bits per key. A rate that jumps fills a few small filters quickly; capacities grow by up to `GROWTH` each
time, so a jump of any size costs at most log(greatest / least) / log(GROWTH) filters of extra matching set,
and every answer's doubt is computed from the filters that were really asked.
"""

from __future__ import annotations

from typing import Final

from postroad.tracking.bloom import Shape
from postroad.units import SECOND_US

GROWTH: Final = 8
AIM: Final = 0.95  # of Tp: full a little before, since a filter stored part-full is stored twice
_SHORTEST_US: Final = 1000  # a filter that filled within one batch


class Sizing:
    """The shape of a history's next filter."""

    __slots__ = ("_greatest", "_least", "_next", "_persist_us")

    def __init__(self, greatest: Shape, *, least: int, persist_us: int, adaptive: bool = True) -> None:
        self._greatest = greatest
        self._persist_us = persist_us
        self._least = min(least, greatest.n) if adaptive else greatest.n
        self._next = self._least

    def shape(self) -> Shape:
        n, most = self._next, self._greatest
        return most if n >= most.n else Shape(max(8, -(-most.m * n // most.n)), n, most.k)

    def observed(self, count: int, lifetime_us: int) -> None:
        """A filter ended after that time with so many keys."""
        rate = count * SECOND_US / max(lifetime_us, _SHORTEST_US)
        wanted = int(rate * self._persist_us / SECOND_US * AIM)
        # Half way down at most: a quiet interval is often followed by a busy one.
        wanted = min(max(wanted, self._next // 2), self._next * GROWTH)
        self._next = min(max(wanted, self._least), self._greatest.n)
