"""Filters sized from the observed rate, so that a filter is full when the persistence interval ends.

The paper's filters have one size, and those stored part-full waste what they do not use (5.3). Here m grows
and shrinks with n while k and the false positive rate stay: a key costs the same bits in each.

Accuracy rests on how many filters match one time, and a rate that jumps would fill one small filter after the
other. So a filter that is full while it is young does not end: it grows `GROWTH` times, up to the greatest
capacity c. Young it is for as long as times belong to a range, ahead + behind of `history`; so long
its keys stay in memory, to be put into the bigger filter. They take no more room than the greatest filter
does: beyond that it becomes that one.

Hence whatever ends because it is full has c keys, or has lasted ahead + behind. The filters that match a time
t are some of those in use between t - ahead and t + behind. The first and the last of these aside, each began
and ended within, and so has c keys; and a key more is in the first and in the last. Let at most c keys come
in any Tn, and ahead + behind <= w Tn. Then at most w c keys come within, so that with the first and the last
w + 1 filters match at most: as many as with filters of the greatest size only (Theorem 1, Corollary 2), each
with the same rate.
"""

from __future__ import annotations

from typing import Final

from postroad.ids import ID_BYTES
from postroad.tracking.bloom import Shape
from postroad.units import SECOND_US

GROWTH: Final = 8
AIM: Final = 0.95  # of Tp: full a little before, since a filter stored part-full is stored twice
_SHORTEST_US: Final = 1000  # a filter that filled within one batch


class Sizing:
    """The shape of a history's next filter, and of a young one that grows."""

    __slots__ = ("_greatest", "_least", "_next", "_persist_us")

    def __init__(self, greatest: Shape, *, least: int, persist_us: int, adaptive: bool = True) -> None:
        self._greatest = greatest
        self._persist_us = persist_us
        self._least = min(least, greatest.n) if adaptive else greatest.n
        self._next = self._least

    def shape(self) -> Shape:
        n, most = self._next, self._greatest
        # In proportion, and a bit more: the rate of small filters is a little above that of large ones.
        return most if n >= most.n else Shape(max(8, -(-most.m * n // most.n) + 1), n, most.k)

    def may_grow(self, shape: Shape) -> bool:
        return shape.n < self._greatest.n

    def is_dear(self, count: int) -> bool:
        """Whether so many keys in memory take more than the greatest filter does."""
        return count * ID_BYTES > self._greatest.size

    def grow(self, count: int) -> Shape:
        """For a young filter that has so many keys, and is full or dear."""
        self._next = self._greatest.n if self.is_dear(count) else min(self._next * GROWTH, self._greatest.n)
        return self.shape()

    def observed(self, count: int, lifetime_us: int) -> None:
        """A filter ended after that time with so many keys."""
        rate = count * SECOND_US / max(lifetime_us, _SHORTEST_US)
        wanted = int(rate * self._persist_us / SECOND_US * AIM)
        # Half way down at most: a quiet interval is often followed by a busy one.
        wanted = min(max(wanted, self._next // 2), self._next * GROWTH)
        self._next = min(max(wanted, self._least), self._greatest.n)
