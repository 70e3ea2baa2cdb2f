"""A bound on how many datagrams of strangers a node opens in a second: one may cost a signature."""

from __future__ import annotations

from postroad.units import SECOND_US


class Rate:
    def __init__(self, a_second: int) -> None:
        self._a_second = a_second
        self._second = 0
        self._count = 0  # within that second

    def admits(self, now_us: int) -> bool:
        second = now_us // SECOND_US
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        return self._count <= self._a_second
