"""The cache of one who repairs for others: of each publisher a ring of messages whose size follows the need
(spec B8, paper 3.4).

A message must stay for as long as its request takes: until the asker hears the next message, waits, and its
request arrives. At the rate at which messages arrive here that gives the least size,

K > lambda Pm [(C1 + C2/2 + 1) d(Z,B) + d(B,A)]

where the asker says (C1 + C2/2) d(Z,B) in its request. Algorithm 1 grows the cache of the closest provider
to that, or by a tenth while too few requests are answered, and shrinks the others by a tenth. Rate, delays
and who is closest are those of one publisher: who is far from one may be close to another.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from postroad.errors import BugError
from postroad.units import SECOND_US

ADJUST_US: Final = SECOND_US // 4
_SMOOTH: Final = 0.2  # weight of the newest measurement
CACHE_BYTES: Final = 64 << 20  # of all rings, whatever their sizes in messages
MAX_RINGS: Final = 1_024  # publishers; then the one that was heard of first is forgotten


def least_size(rate: float, wait_s: float, source_delay_s: float, asker_delay_s: float) -> float:
    """The bound of 3.4: `rate` is lambda Pm, `wait_s` is (C1 + C2/2) d(Z,B), then d(Z,B) and d(B,A)."""
    return rate * (wait_s + source_delay_s + asker_delay_s)


def adjusted(size: float, *, closest: bool, hit_ratio: float, wanted: float, least: float) -> float:
    """Algorithm 1: the size it proposes, `wanted` is H and `least` the bound of 3.4."""
    if not closest:
        return 0.9 * size
    return max(least + 1, 1.1 * size if hit_ratio < wanted else 0.0)


class Ring:
    """What is cached of one publisher."""

    def __init__(self, least: int, most: int, hit_ratio: float) -> None:
        self._least = least
        self._most = most
        self._wanted = hit_ratio
        self.size = float(least)
        self.rows: OrderedDict[int, tuple[bytes, int]] = OrderedDict()  # -> row and bits
        self.bytes = 0
        self._arrived = 0  # since the last adjustment
        self._rate = 0.0  # messages a second that arrive here
        self._wait_s = self._source_s = self._asker_s = 0.0
        self._asked = False  # ever
        self._hit_ratio = 1.0
        self.closest = False  # nobody else is known to repair sooner

    def put(self, sequence: int, row: bytes, bits: int) -> None:
        if sequence not in self.rows:
            self._arrived += 1
            self.rows[sequence] = (row, bits)
            self.bytes += len(row)
            self._trim()

    def _trim(self) -> None:
        while len(self.rows) > int(self.size):
            self.drop()

    def drop(self) -> None:
        _, (row, _) = self.rows.popitem(last=False)
        self.bytes -= len(row)

    def asked(self, *, hit: bool, wait_s: float, source_s: float, asker_s: float) -> None:
        smooth = _SMOOTH if self._asked else 1.0
        self._asked = True
        self.closest |= not hit  # until another one repairs it
        self._hit_ratio += _SMOOTH * (hit - self._hit_ratio)
        self._wait_s += smooth * (wait_s - self._wait_s)
        self._source_s += smooth * (source_s - self._source_s)
        self._asker_s += smooth * (asker_s - self._asker_s)

    def adjust(self, seconds: float) -> None:
        """Algorithm 1."""
        self._rate += _SMOOTH * (self._arrived / seconds - self._rate)
        self._arrived = 0
        proposed = adjusted(
            self.size,
            closest=self.closest,
            hit_ratio=self._hit_ratio,
            wanted=self._wanted,
            least=least_size(self._rate, self._wait_s, self._source_s, self._asker_s),
        )
        self.size = min(float(self._most), max(float(self._least), proposed))
        self._trim()

    def check(self) -> None:
        if not self._least <= self.size <= self._most or len(self.rows) > int(self.size):
            raise BugError(f"a ring of {self.size} messages, between {self._least} and {self._most}")
        if self.bytes != sum(len(row) for row, _ in self.rows.values()):
            raise BugError("a ring miscounts its bytes")


class Cache:
    """`least` and `most` messages of each publisher."""

    def __init__(self, *, least: int, most: int, hit_ratio: float) -> None:
        self._least = least
        self._most = most
        self._hit_ratio = hit_ratio
        self._rings: OrderedDict[bytes, Ring] = OrderedDict()
        self._bytes = 0
        self._adjusted_us: int | None = None
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return sum(len(ring.rows) for ring in self._rings.values())

    @property
    def size(self) -> float:
        """Of all rings together."""
        return sum(ring.size for ring in self._rings.values())

    def put(self, publisher: bytes, sequence: int, row: bytes, bits: int) -> None:
        ring = self._rings.get(publisher)
        if ring is None:
            ring = self._rings[publisher] = Ring(self._least, self._most, self._hit_ratio)
            if len(self._rings) > MAX_RINGS:
                _, oldest = self._rings.popitem(last=False)
                self._bytes -= oldest.bytes
        before = ring.bytes
        ring.put(sequence, row, bits)
        self._bytes += ring.bytes - before
        while self._bytes > CACHE_BYTES:
            largest = max(self._rings.values(), key=lambda ring: ring.bytes)
            before = largest.bytes
            largest.drop()
            self._bytes -= before - largest.bytes

    def get(self, publisher: bytes, sequence: int) -> tuple[bytes, int] | None:
        ring = self._rings.get(publisher)
        return None if ring is None else ring.rows.get(sequence)

    def asked(self, publisher: bytes, *, hit: bool, wait_s: float, source_s: float, asker_s: float) -> None:
        """A request came: what it says of its asker."""
        self.hits += hit
        self.misses += not hit
        ring = self._rings.get(publisher)
        if ring is not None:
            ring.asked(hit=hit, wait_s=wait_s, source_s=source_s, asker_s=asker_s)

    def provided(self, publisher: bytes, *, here: bool) -> None:
        """A repair was sent, from here or by another one who was faster."""
        ring = self._rings.get(publisher)
        if ring is not None:
            ring.closest = here

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
        for ring in self._rings.values():
            ring.adjust(seconds)
        self._bytes = sum(ring.bytes for ring in self._rings.values())

    def check(self) -> None:
        for ring in self._rings.values():
            ring.check()
        if self._bytes != sum(ring.bytes for ring in self._rings.values()) or len(self._rings) > MAX_RINGS:
            raise BugError("the cache miscounts its bytes, or has too many rings")
