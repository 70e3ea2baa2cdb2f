"""The cache of one who repairs for others: a ring of messages whose size follows the need (spec B8, paper
3.4).

A message must stay for as long as its request takes: until the asker hears the next message, waits, and its
request arrives. At the rate at which messages arrive here that gives the least size,

K > lambda Pm [(C1 + C2/2 + 1) d(Z,B) + d(B,A)]

where the asker says (C1 + C2/2) d(Z,B) in its request. Algorithm 1 grows the cache of the closest provider
to that, or by a tenth while too few requests are answered, and shrinks the others by a tenth.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from postroad.errors import BugError
from postroad.units import SECOND_US

ADJUST_US: Final = SECOND_US // 4
_SMOOTH: Final = 0.2  # weight of the newest measurement
CACHE_BYTES: Final = 64 << 20  # whatever the size in messages


def least_size(rate: float, wait_s: float, source_delay_s: float, asker_delay_s: float) -> float:
    """The bound of 3.4: `rate` is lambda Pm, `wait_s` is (C1 + C2/2) d(Z,B), then d(Z,B) and d(B,A)."""
    return rate * (wait_s + source_delay_s + asker_delay_s)


def adjusted(size: float, *, closest: bool, hit_ratio: float, wanted: float, least: float) -> float:
    """Algorithm 1: the size it proposes, `wanted` is H and `least` the bound of 3.4."""
    if not closest:
        return 0.9 * size
    return max(least + 1, 1.1 * size if hit_ratio < wanted else 0.0)


class Cache:
    def __init__(self, *, least: int, most: int, hit_ratio: float) -> None:
        self._least = least
        self._most = most
        self._wanted = hit_ratio
        self.size = float(least)
        self._rows: OrderedDict[tuple[bytes, int], tuple[bytes, int]] = OrderedDict()  # -> row and bits
        self._bytes = 0
        self._arrived = 0  # since the last adjustment
        self._adjusted_us: int | None = None
        self.rate = 0.0  # messages a second that arrive here
        self._wait_s = self._source_s = self._asker_s = 0.0
        self.hits = self.misses = 0
        self.hit_ratio = 1.0
        self._closest = False  # nobody else is known to repair sooner

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, publisher: bytes, sequence: int, row: bytes, bits: int) -> None:
        key = (publisher, sequence)
        if key in self._rows:
            return
        self._arrived += 1
        self._rows[key] = (row, bits)
        self._bytes += len(row)
        while len(self._rows) > int(self.size) or self._bytes > CACHE_BYTES:
            _, (old, _) = self._rows.popitem(last=False)
            self._bytes -= len(old)

    def get(self, publisher: bytes, sequence: int) -> tuple[bytes, int] | None:
        return self._rows.get((publisher, sequence))

    def asked(self, *, hit: bool, wait_s: float, source_s: float, asker_s: float) -> None:
        """A request came: what it says of its asker."""
        if not self.hits and not self.misses:
            self._wait_s, self._source_s, self._asker_s = wait_s, source_s, asker_s
        self._closest |= not hit  # until another one repairs it
        self.hits += hit
        self.misses += not hit
        self.hit_ratio += _SMOOTH * (hit - self.hit_ratio)
        self._wait_s += _SMOOTH * (wait_s - self._wait_s)
        self._source_s += _SMOOTH * (source_s - self._source_s)
        self._asker_s += _SMOOTH * (asker_s - self._asker_s)

    def provided(self) -> None:
        """A repair was sent from here."""
        self._closest = True

    def beaten(self) -> None:
        """Another one repaired first."""
        self._closest = False

    def adjust(self, now_us: int) -> None:
        """Periodically: Algorithm 1. The closest provider is the one whose timer fires first: who sent the
        last repair, or could not and heard nobody else do it."""
        if self._adjusted_us is None:
            self._adjusted_us = now_us
            return
        if now_us - self._adjusted_us < ADJUST_US:
            return
        seconds = (now_us - self._adjusted_us) / SECOND_US
        self._adjusted_us = now_us
        self.rate += _SMOOTH * (self._arrived / seconds - self.rate)
        self._arrived = 0
        proposed = adjusted(
            self.size,
            closest=self._closest,
            hit_ratio=self.hit_ratio,
            wanted=self._wanted,
            least=least_size(self.rate, self._wait_s, self._source_s, self._asker_s),
        )
        self.size = min(float(self._most), max(float(self._least), proposed))
        while len(self._rows) > int(self.size):
            _, (old, _) = self._rows.popitem(last=False)
            self._bytes -= len(old)

    def check(self) -> None:
        if not self._least <= self.size <= self._most or len(self._rows) > int(self.size):
            raise BugError(f"a cache of {self.size} messages, between {self._least} and {self._most}")
        if self._bytes != sum(len(row) for row, _ in self._rows.values()):
            raise BugError("the cache miscounts its bytes")
