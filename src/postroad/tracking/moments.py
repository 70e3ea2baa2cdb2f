"""Message times of a batch, and the set S of times outside a filter's range (spec T9, paper 4.3).

A retransmission older than the skew bound, or a clock gone wild, must not widen a range over hours. Its time
goes to a set instead. The set is kept as spans of milliseconds, since a subscriber that catches up brings
whole runs of old times, and is bounded: beyond `MAX_SPANS` the nearest spans are joined. Joining can only
make a filter match for more times than it should, never for fewer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from postroad.errors import BugError
from postroad.ids import ID_BYTES

MAX_SPANS: Final = 256
_FEW: Final = 8 * ID_BYTES  # below this, numpy's fixed cost is more than a loop's
_FIRST: Final = itemgetter(0)

Spans = tuple[tuple[int, int], ...]  # inclusive, disjoint, increasing


class Times:
    """The message times of some ids: the first, the last, and all of them when asked."""

    __slots__ = ("hi_ms", "ids", "lo_ms")

    def __init__(self, ids: bytes) -> None:
        self.ids = ids
        if len(ids) == ID_BYTES:
            self.lo_ms = self.hi_ms = int.from_bytes(ids[8:14], "big")
        elif not ids or len(ids) % ID_BYTES:
            raise BugError(f"{len(ids)} bytes are no ids")
        elif len(ids) <= _FEW:
            moments = [ids[at : at + 6] for at in range(8, len(ids), ID_BYTES)]
            self.lo_ms = int.from_bytes(min(moments), "big")
            self.hi_ms = int.from_bytes(max(moments), "big")
        else:
            halves = np.frombuffer(ids, ">u8")[1::2]
            self.lo_ms, self.hi_ms = int(halves.min()) >> 16, int(halves.max()) >> 16

    def all_ms(self) -> npt.NDArray[np.int64]:
        return (np.frombuffer(self.ids, ">u8")[1::2] >> np.uint64(16)).astype(np.int64)


def holds(spans: Sequence[tuple[int, int]], time_ms: int) -> bool:
    at = bisect_right(spans, time_ms, key=_FIRST)
    return at > 0 and time_ms <= spans[at - 1][1]


def covered(lo_ms: int, hi_ms: int, singles: Iterable[tuple[int, int]]) -> int:
    """Milliseconds of a range, which is empty when lo_ms > hi_ms, and of spans beside it."""
    return max(0, hi_ms - lo_ms + 1) + sum(hi - lo + 1 for lo, hi in singles)


def runs(times_ms: npt.NDArray[np.int64], grain_ms: int = 1) -> list[tuple[int, int]]:
    """The spans of consecutive milliseconds that cover exactly these times; or, of a coarser grain, from the
    first to the last of what lies in consecutive grains."""
    if not len(times_ms):
        return []
    # Not np.unique: its first call imports numpy.ma, which stops a broker for a tenth of a second or more.
    ordered = np.sort(times_ms)
    breaks = np.flatnonzero(np.diff(ordered // grain_ms) > 1)
    starts = ordered[np.concatenate(([0], breaks + 1))]
    ends = ordered[np.concatenate((breaks, [len(ordered) - 1]))]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def joined(spans: Iterable[tuple[int, int]], limit: int = MAX_SPANS) -> list[tuple[int, int]]:
    """The union of spans; where they are too many, those with the least between them become one."""
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(spans):
        if merged and lo <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], hi))
        else:
            merged.append((lo, hi))
    excess = len(merged) - limit
    if excess <= 0:
        return merged
    gaps = sorted(range(1, len(merged)), key=lambda at: (merged[at][0] - merged[at - 1][1], at))
    bridged = set(gaps[:excess])
    short: list[tuple[int, int]] = []
    for at, (lo, hi) in enumerate(merged):
        if at in bridged:
            short[-1] = (short[-1][0], hi)
        else:
            short.append((lo, hi))
    return short
