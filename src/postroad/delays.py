"""How long things take: a histogram with fixed buckets, cheap enough to be fed once per batch."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from postroad.units import MILLISECOND_US, SECOND_US

# Upper bounds, in microseconds, about three to a decade; what takes longer is counted behind the last.
BOUNDS_US: Final = (
    *(100, 300),
    *(MILLISECOND_US, 3 * MILLISECOND_US, 10 * MILLISECOND_US, 30 * MILLISECOND_US),
    *(100 * MILLISECOND_US, 300 * MILLISECOND_US),
    *(SECOND_US, 3 * SECOND_US, 10 * SECOND_US, 60 * SECOND_US),
)


class Delays:
    """`name` is a metric's, in seconds; `about` says in one line what is measured; `labels` tell kinds."""

    __slots__ = ("about", "counts", "labels", "name", "total_us")

    def __init__(self, name: str, about: str, **labels: str) -> None:
        self.name = name
        self.about = about
        self.labels = labels
        self.counts = [0] * (len(BOUNDS_US) + 1)  # per bucket
        self.total_us = 0

    def observe(self, delay_us: int) -> None:
        """A negative one, between two clocks that differ, counts as none."""
        delay_us = max(0, delay_us)
        self.counts[bisect_left(BOUNDS_US, delay_us)] += 1
        self.total_us += delay_us
