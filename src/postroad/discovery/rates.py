"""A bound on how many datagrams of strangers a node opens in a second: a flood costs no more than that.

Each class of datagrams has its own bound. A sealed one costs a signature. One that asks for something costs
little by itself, and what is spread for it. Pings cost least; every search sends many, and were they counted
with the rest, those who are about to choose would take the place of those who still ask.
"""

from __future__ import annotations

from typing import Final

from postroad.units import SECOND_US
from postroad.wire.datagrams import datagram_kind
from postroad.wire.discovery import Kind

SEALED_A_SECOND: Final = 5_000
ASKING_A_SECOND: Final = 10_000  # whatever is neither sealed nor a ping
PINGS_A_SECOND: Final = 20_000  # and pongs


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


class Rates:
    """Of one node."""

    def __init__(self) -> None:
        self._asking = Rate(ASKING_A_SECOND)
        pings = Rate(PINGS_A_SECOND)
        self._others: dict[int, Rate] = {
            Kind.SEALED: Rate(SEALED_A_SECOND),
            Kind.PING: pings,
            Kind.PONG: pings,
        }

    def admits(self, data: bytes, now_us: int) -> bool:
        return self._others.get(datagram_kind(data), self._asking).admits(now_us)
