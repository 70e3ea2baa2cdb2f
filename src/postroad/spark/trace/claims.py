"""Which keys which filters claim, for many keys and many filters of one shape at once.

One filter after the other costs a look into memory per key, filter and hash. Many filters of the same m and k
are turned on their side instead: word M[p] has bit p of up to 64 filters, so that the AND of k words says,
for one key, which of the 64 claim it (spec P5). That needs the positions of a key once for all of them, and
pays from about `SLICED_FROM` of them on; fewer are asked one by one by the kernel, which stops at the first
bit that is not set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from postroad import kernel
from postroad.kernel import reference

Keys = npt.NDArray[np.uint8]  # (number of keys, 16)
Rows = npt.NDArray[np.intp]  # indices of keys
NO_ROWS: Final[Rows] = np.zeros(0, np.intp)
SLICED_FROM: Final = 16  # filters that concern a key, on average
WORD: Final = 64
CHUNK: Final = 1 << 15  # keys whose positions are held at once


class Bits(NamedTuple):
    """A filter as it is stored."""

    m: int
    k: int
    bits: bytes

    @property
    def fpp(self) -> float:
        """As `BloomFilter.fpp`."""
        fill = float(np.bitwise_count(np.frombuffer(self.bits, np.uint8)).sum(dtype=np.int64)) / self.m
        return float(fill**self.k)


def contains(bits: Bits, keys: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Keys of 16 bytes, however they are typed."""
    if not len(keys):
        return np.zeros(0, np.bool_)
    return np.frombuffer(kernel.bloom_contains(bits.bits, bits.m, bits.k, keys.tobytes()), np.bool_)


def picked(table: npt.NDArray[Any], rows: Rows) -> npt.NDArray[Any]:
    """These rows, which are in order; without a copy where they follow each other."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return table[rows[0] : rows[-1] + 1]
    return table[rows]


def contained(filters: Sequence[Bits], keys: Keys, rows: Sequence[Rows]) -> list[Rows]:
    """For each filter, which of its rows of `keys` it claims."""
    out: list[Rows] = [NO_ROWS] * len(filters)
    shapes: dict[tuple[int, int], list[int]] = {}
    for at, bits in enumerate(filters):
        shapes.setdefault((bits.m, bits.k), []).append(at)
    for (m, k), members in shapes.items():
        for first in range(0, len(members), WORD):
            some = members[first : first + WORD]
            if sum(len(rows[at]) for at in some) < SLICED_FROM * len(keys):
                for at in some:
                    out[at] = rows[at][contains(filters[at], picked(keys, rows[at]))]
                continue
            words = _words(m, k, [filters[at].bits for at in some], keys)
            for bit, at in enumerate(some):
                mine = rows[at]
                out[at] = mine[(picked(words, mine) >> np.uint64(bit) & np.uint64(1)).astype(np.bool_)]
    return out


def sliced(m: int, bits: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Word p has bit p of every filter, the first filter's lowest."""
    out = np.zeros((m + 7) // 8 * 8, np.uint64)
    for at, filter_bits in enumerate(bits):
        flags = np.unpackbits(np.frombuffer(filter_bits, np.uint8), bitorder="little")
        out |= flags.astype(np.uint64) << np.uint64(at)
    return out[:m]


def _words(m: int, k: int, bits: Sequence[bytes], keys: Keys) -> npt.NDArray[np.uint64]:
    """For each key, a word whose bits say which of the filters claim it."""
    matrix = sliced(m, bits)
    out = np.empty(len(keys), np.uint64)
    for first in range(0, len(keys), CHUNK):
        positions = reference.bloom_positions(keys[first : first + CHUNK].tobytes(), m, k)
        words = matrix[positions[:, 0]]
        for at in range(1, k):
            words &= matrix[positions[:, at]]
        out[first : first + CHUNK] = words
    return out
