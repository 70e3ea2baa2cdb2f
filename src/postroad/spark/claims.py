"""Which keys which filters claim, for many keys and many filters of one shape at once.

One filter after the other costs a look into memory per key, filter and hash. Many filters of the same m and k
are turned on their side instead: word M[p] has bit p of up to 64 filters, so that the AND of k words says,
for one key, which of the 64 claim it (spec P5). That needs the positions of a key once for all of them, and
pays from about `SLICED_FROM` filters on; fewer are asked one by one by the kernel, which stops at the first
bit that is not set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from postroad import kernel
from postroad.ids import ID_BYTES
from postroad.kernel import reference

Keys = npt.NDArray[np.uint8]  # (number of keys, 16)
SLICED_FROM: Final = 16
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


def contains(one: Bits, keys: Keys) -> npt.NDArray[np.bool_]:
    if not len(keys):
        return np.zeros(0, np.bool_)
    return np.frombuffer(kernel.bloom_contains(one.bits, one.m, one.k, keys.tobytes()), np.bool_)


def contained(filters: Sequence[Bits], keys: Keys) -> npt.NDArray[np.bool_]:
    """For each key and filter, whether the filter claims the key: an array of (keys, filters)."""
    out = np.zeros((len(keys), len(filters)), np.bool_)
    shapes: dict[tuple[int, int], list[int]] = {}
    for at, one in enumerate(filters):
        shapes.setdefault((one.m, one.k), []).append(at)
    for (m, k), members in shapes.items():
        for first in range(0, len(members), WORD):
            some = members[first : first + WORD]
            if len(some) < SLICED_FROM:
                for at in some:
                    out[:, at] = contains(filters[at], keys)
            else:
                out[:, some] = _sliced(m, k, [filters[at].bits for at in some], keys)
    return out


def sliced(m: int, bits: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Word p has bit p of every filter, the first filter's lowest."""
    rows = np.zeros((WORD, (m + 7) // 8 * 8), np.uint8)
    for at, one in enumerate(bits):
        rows[at] = np.unpackbits(np.frombuffer(one, np.uint8), bitorder="little")
    return np.packbits(rows.T, axis=1, bitorder="little").view("<u8")[:m, 0]


def _sliced(m: int, k: int, bits: Sequence[bytes], keys: Keys) -> npt.NDArray[np.bool_]:
    matrix = sliced(m, bits)
    out = np.zeros((len(keys), len(bits)), np.bool_)
    for first in range(0, len(keys), CHUNK):
        some = keys[first : first + CHUNK]
        positions = reference.bloom_positions(some.tobytes(), m, k)
        words = matrix[positions[:, 0]]
        for at in range(1, k):
            words &= matrix[positions[:, at]]
        # Most keys are claimed by few: only their words are taken apart.
        rows = np.flatnonzero(words)
        flags = np.unpackbits(words[rows].view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
        out[first + rows] = flags[:, : len(bits)].astype(np.bool_)
    return out


def keys_of(data: bytes) -> Keys:
    return np.frombuffer(data, np.uint8).reshape(-1, ID_BYTES)
