"""Bloom filters and their arithmetic (paper 3.1 and 4.1, spec T2).

A filter of m bits and k hashes that holds n keys answers `contains` with true for a key it does not hold
with probability fpp = (1 - (1 - 1/m)^(kn))^k. A history asks all filters whose time range holds the
message's time, M of them, so the whole answer is wrong with efpp = 1 - (1 - fpp)^M. The positions of a key
are the kernel's and part of the stored format for ever.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from postroad import kernel
from postroad.errors import BugError, UsageError
from postroad.ids import ID_BYTES

MIN_BITS: Final = 8
MAX_BITS: Final = 1 << 32
MAX_HASHES: Final = 64


class Shape(NamedTuple):
    """What a filter is made for: m bits, n keys, k hashes."""

    m: int
    n: int
    k: int

    @property
    def size(self) -> int:
        """Bytes of its bits."""
        return (self.m + 7) // 8

    @property
    def fpp(self) -> float:
        """When it holds exactly n keys."""
        return false_positive_rate(self.m, self.n, self.k)

    def check(self) -> Shape:
        if not (MIN_BITS <= self.m <= MAX_BITS and self.n >= 1 and 1 <= self.k <= MAX_HASHES):
            raise UsageError(
                f"a Bloom filter of {self.m} bits for {self.n} keys with {self.k} hashes cannot be: bits"
                f" {MIN_BITS} to {MAX_BITS}, at least one key, hashes 1 to {MAX_HASHES}"
            )
        return self


def false_positive_rate(m: int, n: int, k: int) -> float:
    """Equation 1."""
    # log1p and expm1 keep the digits that 1 - 1/m loses for large m.
    return (-math.expm1(k * n * math.log1p(-1 / m))) ** k if n else 0.0


def expected_rate(fpp: float, matching: int) -> float:
    """Equation 2: the efpp of a matching set of that size."""
    return -math.expm1(matching * math.log1p(-fpp))


def filter_rate(efpp: float, matching: int) -> float:
    """Equation 2 the other way: the fpp each of `matching` filters may have."""
    return -math.expm1(math.log1p(-efpp) / matching)


def bits_per_key(fpp: float) -> tuple[float, int]:
    """(m / n, k): the least memory that keeps fpp, over all whole k, for large filters."""
    if not 0 < fpp < 1:
        raise UsageError(f"a false positive rate is between 0 and 1, not {fpp}")
    return min((-k / math.log1p(-(fpp ** (1 / k))), k) for k in range(1, MAX_HASHES + 1))


def filter_for(n: int, fpp: float) -> Shape:
    """The smallest filter that holds n keys with at most that false positive rate."""
    ratio, k = bits_per_key(fpp)
    m = max(MIN_BITS, math.ceil(ratio * n))
    # The ratio is that of the limit of large m; a small filter needs a few bits more.
    while m <= MAX_BITS and false_positive_rate(m, n, k) > fpp * (1 + 1e-12):
        m += max(1, m >> 20)
    return Shape(m, n, k).check()


def capacity_for(m: int, fpp: float) -> Shape:
    """The filter of m bits that holds the most keys with at most that false positive rate; n may be 0."""
    ratio, k = bits_per_key(fpp)
    n = int(m / ratio) + 1
    while n > 0 and false_positive_rate(m, n, k) > fpp * (1 + 1e-12):
        n -= 1
    return Shape(m, n, k)


class BloomFilter:
    """One filter. `count` keys were added, some of them perhaps twice."""

    __slots__ = ("_bits", "_rated", "count", "k", "m", "n")

    def __init__(self, m: int, n: int, k: int, *, bits: bytes | None = None, count: int = 0) -> None:
        shape = Shape(m, n, k).check()
        if bits is not None and len(bits) != shape.size:
            raise BugError(f"a Bloom filter of {m} bits has {shape.size} bytes, not {len(bits)}")
        self.m = m
        self.n = n
        self.k = k
        self.count = count
        self._bits: bytes | bytearray = bytearray(shape.size) if bits is None else bits
        self._rated: tuple[int, float] | None = None  # with how many keys it had which `fpp`

    def add(self, keys: bytes) -> None:
        if isinstance(self._bits, bytes):  # others may have them: most filters are only looked into
            self._bits = bytearray(self._bits)
        kernel.bloom_add(self._bits, self.m, self.k, keys)
        self.count += len(keys) // ID_BYTES

    def contains(self, keys: bytes) -> bytes:
        """One byte per key: 1 if it may have been added, 0 if it certainly was not."""
        return kernel.bloom_contains(self._bits, self.m, self.k, keys)

    @property
    def shape(self) -> Shape:
        return Shape(self.m, self.n, self.k)

    @property
    def room(self) -> int:
        """Keys until it is full."""
        return max(0, self.n - self.count)

    @property
    def full(self) -> bool:
        return self.count >= self.n

    @property
    def bits(self) -> bytes:
        return bytes(self._bits)

    @property
    def fill(self) -> float:
        """The share of bits that are set."""
        return fill_of(self._bits, self.m)

    @property
    def fpp(self) -> float:
        """The false positive rate of the bits as they are now, rather than as the formula expects them."""
        if self._rated is None or self._rated[0] != self.count:
            self._rated = (self.count, float(self.fill**self.k))
        return self._rated[1]

    def union(self, other: BloomFilter) -> BloomFilter:
        """The filter that had been, had all keys of both been added to one (paper 4.3)."""
        if (self.m, self.k) != (other.m, other.k):
            raise UsageError(
                "only filters with the same bits and hashes have a union, not"
                f" {self.m} bits with {self.k} hashes and {other.m} with {other.k}"
            )
        bits = np.frombuffer(self._bits, np.uint8) | np.frombuffer(other._bits, np.uint8)
        count = self.count + other.count
        return BloomFilter(self.m, max(self.n, count), self.k, bits=bits.tobytes(), count=count)


def fill_of(bits: bytes | bytearray, m: int) -> float:
    words, rest = divmod(len(bits), 8)
    ones = np.bitwise_count(np.frombuffer(bits, np.uint64, words)).sum(dtype=np.int64)
    return (int(ones) + int.from_bytes(bits[len(bits) - rest :], "little").bit_count()) / m
