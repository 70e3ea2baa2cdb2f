"""Compact sets of increasing numbers, as bytes: what persistent filtering records are made of (D6, 4.2).

A set is either a list of runs or a bitmap, whichever is smaller: rows of a batch and subscriber ids lie
close together, ticks of one batch mostly follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from postroad.errors import StorageError

Numbers = npt.NDArray[np.int64]

_RUNS: Final = 0
_BITMAP: Final = 1
_MAX_VARINT_BITS: Final = 63
_FEW: Final = 64
MAX_SET_COUNT: Final = 1 << 20  # numbers that a decoded set may have; a record never holds as many


def put_varint(out: bytearray, value: int) -> None:
    """Seven bits to a byte, lowest first, the high bit set on all but the last."""
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def get_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where the next one begins."""
    value = shift = 0
    while at < len(data) and shift < _MAX_VARINT_BITS:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise StorageError(f"a filtering record of {len(data)} bytes ends within a number, at byte {at}")


def put_set(out: bytearray, values: Sequence[int] | npt.NDArray[np.generic]) -> None:
    """Append a set of non-negative numbers, which must increase."""
    count = len(values)
    first, last = (int(values[0]), int(values[-1])) if count else (0, 0)
    if not count or last - first + 1 == count:
        put_varint(out, (1 if count else 0) << 1 | _RUNS)
        if count:
            put_varint(out, first)
            put_varint(out, count - 1)
        return
    starts, ends = _runs_of_few(values) if count <= _FEW else _runs(np.asarray(values, np.int64))
    if 2 * len(starts) <= (last - first) // 8 + 1:
        put_varint(out, len(starts) << 1 | _RUNS)
        before = 0
        for start, end in zip(starts, ends, strict=True):
            put_varint(out, start - before)
            put_varint(out, end - start)
            before = end
        return
    bits = np.zeros(last - first + 1, np.uint8)
    bits[np.asarray(values, np.int64) - first] = 1
    packed = np.packbits(bits, bitorder="little").tobytes()
    put_varint(out, len(packed) << 1 | _BITMAP)
    put_varint(out, first)
    out += packed


def _runs(values: Numbers) -> tuple[list[int], list[int]]:
    """Where runs of consecutive numbers start and end."""
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    starts = values[np.concatenate(([0], breaks))].tolist()
    return starts, values[np.concatenate((breaks - 1, [len(values) - 1]))].tolist()


def _runs_of_few(values: Sequence[int] | npt.NDArray[np.generic]) -> tuple[list[int], list[int]]:
    """The same, faster where numpy's calls cost more than its loops save."""
    numbers = values.tolist() if isinstance(values, np.ndarray) else list(values)
    starts, ends = [numbers[0]], []
    for before, after in pairwise(numbers):
        if after != before + 1:
            ends.append(before)
            starts.append(after)
    ends.append(numbers[-1])
    return starts, ends


def get_set(data: bytes, at: int) -> tuple[Numbers, int]:
    """The set at `at`, and where what follows it begins."""
    head, at = get_varint(data, at)
    size = head >> 1
    if size > MAX_SET_COUNT:
        raise StorageError(f"a filtering record claims a set of size {size}; at most {MAX_SET_COUNT} is read")
    if head & 1 == _BITMAP:
        first, at = get_varint(data, at)
        if at + size > len(data):
            raise StorageError(
                f"a filtering record of {len(data)} bytes ends within a bitmap, which goes to {at + size}"
            )
        bits = np.unpackbits(np.frombuffer(data, np.uint8, size, at), bitorder="little")
        return np.flatnonzero(bits).astype(np.int64) + first, at + size
    if size == 1:
        first, at = get_varint(data, at)
        more, at = get_varint(data, at)
        _bound(more)
        return np.arange(first, first + more + 1, dtype=np.int64), at
    numbers: list[int] = []
    before = 0
    for _ in range(size):
        gap, at = get_varint(data, at)
        more, at = get_varint(data, at)
        _bound(len(numbers) + more)
        start = before + gap
        before = start + more
        numbers.extend(range(start, before + 1))
    return np.array(numbers, np.int64), at


def _bound(count: int) -> None:
    if count >= MAX_SET_COUNT:
        raise StorageError(f"a filtering record claims a set of {count + 1}; at most {MAX_SET_COUNT} is read")
