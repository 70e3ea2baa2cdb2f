"""Filter histories: the current filter, its range of message time, and when it is stored (spec T3, T8, T9).

A history is a sequence of (B, R, S): a Bloom filter, the range [ts, te] of the message times in it, and the
set of single times outside any sensible range. One filter is current. It ends when it is full. When the
persistence interval Tp passes first, it is stored part-full; then either the next filter begins, as in the
paper's 3.1, or the filter is retained, goes on filling, and each later state replaces the stored one (4.3).

A time enters the range only if it lies in [now - behind, now + ahead) of the broker's clock as the key is
added; else it is a single (which `bloom_strategy` has in filters of their own). Let every filter last at
least Tn. All of B_i was added by the time t' at which B_(i+1) began, so its range ends before t' + ahead.
B_(i+w+1) began at t' + w Tn or later, so its range begins at t' + w Tn - behind or later. Hence, if ahead +
behind <= w Tn, no time is in the ranges of more than w + 1 filters. With ahead = behind = Ts that is Theorem
1; with ahead = Ts and behind = Ts + Tj, Corollary 2, where Tj is the longest way of a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from postroad.errors import BugError
from postroad.ids import ID_BYTES
from postroad.tracking.adaptive import Sizing
from postroad.tracking.bloom import BloomFilter
from postroad.tracking.keys import HistoryKey
from postroad.tracking.moments import Times, covered, holds, joined, runs
from postroad.tracking.record import FilterMeta
from postroad.units import MILLISECOND_US

EMPTY_LO = 1 << 60  # an empty range is [EMPTY_LO, -1]: any time widens it correctly
EMPTY_HI = -1
NEAR_MS: Final = 3_600_000  # singles within this match hardly more times than they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Which message times belong to a range: those in [now - behind, now + ahead)."""

    ahead_us: int
    behind_us: int

    @property
    def length_us(self) -> int:
        return self.ahead_us + self.behind_us

    def bounds_ms(self, now_us: int) -> tuple[int, int]:
        """The first whole millisecond inside, and the first after it."""
        # `ahead` is exclusive and `behind` inclusive: that is what makes the bound hold with equality.
        first_ms = -((self.behind_us - now_us) // MILLISECOND_US)
        return first_ms, -(-(now_us + self.ahead_us) // MILLISECOND_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When filters are stored, and whether they end then."""

    persist_us: int  # Tp
    retain: bool
    retain_us: int  # a retained filter ends at the first store after this age
    far_us: int = 0  # so long one whose times are far apart grows rather than ends (see `adaptive`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A filter to store, as it was at one moment."""

    meta: FilterMeta
    bits: bytes


class Range:
    """[lo, hi] and the singles of one filter, as keys are added."""

    __slots__ = ("hi_ms", "lo_ms", "singles")

    def __init__(self) -> None:
        self.lo_ms = EMPTY_LO
        self.hi_ms = EMPTY_HI
        self.singles: list[tuple[int, int]] = []

    def include(self, times: Times, window: Window, now_us: int) -> None:
        first_ms, after_ms = window.bounds_ms(now_us)
        lo_ms, hi_ms = times.lo_ms, times.hi_ms
        if lo_ms < first_ms or hi_ms >= after_ms:
            all_ms = times.all_ms()
            inside = (all_ms >= first_ms) & (all_ms < after_ms)
            self.singles = joined([*self.singles, *runs(all_ms[~inside])])
            if not inside.any():
                return
            lo_ms, hi_ms = int(all_ms[inside].min()), int(all_ms[inside].max())
        if lo_ms < self.lo_ms:
            self.lo_ms = lo_ms
        if hi_ms > self.hi_ms:
            self.hi_ms = hi_ms

    def merge(self, other: Range) -> None:
        """All that is in the other one."""
        if other.singles:
            self.singles = joined([*self.singles, *other.singles])
        self.lo_ms = min(self.lo_ms, other.lo_ms)
        self.hi_ms = max(self.hi_ms, other.hi_ms)

    @property
    def extent_ms(self) -> int:
        """From the first to the last single."""
        return self.singles[-1][1] - self.singles[0][0] if self.singles else 0

    def matches(self, time_ms: int) -> bool:
        return self.lo_ms <= time_ms <= self.hi_ms or holds(self.singles, time_ms)


class FilterHistory:
    """The filter of one history that is still in memory."""

    __slots__ = (
        "_filter",
        "_next_sequence",
        "_opened_us",
        "_pace",
        "_range",
        "_sizing",
        "_stored",
        "_window",
        "_young",
        "dirty_us",
        "key",
        "used_us",
    )

    def __init__(
        self, key: HistoryKey, *, sizing: Sizing, window: Window, pace: Pace, next_sequence: Callable[[], int]
    ) -> None:
        self.key = key
        self._sizing = sizing
        self._window = window
        self._pace = pace
        self._next_sequence = next_sequence
        self._filter: BloomFilter | None = None
        self._young: list[bytes] | None = None  # its keys, while it may have to grow (see `adaptive`)
        self._range = Range()
        self._opened_us = 0  # when the first key of the current filter was added
        self._stored: int | None = None  # the sequence under which an earlier state of it is stored
        self.dirty_us: int | None = None  # when the first key was noted that is not stored yet
        self.used_us = 0  # when the last key came

    def add(self, keys: bytes, times: Times, noted_us: int, now_us: int) -> list[Filled]:
        """Add keys of messages with these times, noted from then on; returns the filters that this completes.

        Where the keys fill a filter and begin the next, both take the range of all: every time in it was
        added now, which is all that the bound on matching sets rests on.
        """
        done: list[Filled] = []
        position, end = 0, len(keys)
        self.used_us = now_us
        while position < end:
            current = self._filter or self._open(now_us)
            part = current.room * ID_BYTES
            piece = keys if position == 0 and part >= end else keys[position : position + part]
            current.add(piece)
            self._range.include(times, self._window, now_us)
            self._grow_up(now_us)
            if self._young is not None:
                current = self._grown(current, self._young, piece, now_us)
            if self.dirty_us is None:
                self.dirty_us = noted_us
            position += len(piece)
            if current.full:
                done.append(self.end(now_us))
        return done

    def _open(self, now_us: int) -> BloomFilter:
        shape = self._sizing.shape()
        self._filter = opened = BloomFilter(*shape)
        self._young = [] if self._sizing.may_grow(shape) else None
        self._range = Range()
        self._opened_us = now_us
        self._stored = None
        return opened

    def _grow_up(self, now_us: int) -> None:
        if self._young is not None and now_us - self._opened_us >= max(
            self._window.length_us, self._pace.far_us
        ):
            self._young = None

    def _grows(self, now_us: int) -> bool:
        """Whether it grows rather than ends. One of times far apart may match any time between them, so there
        are to be few like it."""
        far = self._range.extent_ms > NEAR_MS
        return now_us - self._opened_us < (self._pace.far_us if far else self._window.length_us)

    def _grown(self, current: BloomFilter, young: list[bytes], piece: bytes, now_us: int) -> BloomFilter:
        """The filter with that piece that goes on: a bigger one if this one is full, or its keys are dear."""
        young.append(piece)
        dear = self._sizing.is_dear(current.count)
        if not current.full and not dear:
            return current
        if not self._grows(now_us):
            self._young = None if dear else young
            return current
        shape = self._sizing.grow(current.count)
        self._filter = grown = BloomFilter(*shape)
        grown.add(b"".join(young))
        if not self._sizing.may_grow(shape):
            self._young = None
        return grown

    @property
    def due_us(self) -> int | None:
        """When the current filter must be stored, full or not."""
        return None if self.dirty_us is None else self.dirty_us + self._pace.persist_us

    def tick(self, now_us: int) -> Filled | None:
        """The current filter, if it is due."""
        if self.dirty_us is None or now_us < self.dirty_us + self._pace.persist_us:
            return None
        self._grow_up(now_us)
        if self._pace.retain and now_us - self._opened_us < self._pace.retain_us:
            return self._snapshot(now_us, final=False)
        return self.end(now_us)

    def flush(self, now_us: int) -> Filled | None:
        """The current filter, if anything in it is not stored; the broker stops."""
        return None if self.dirty_us is None else self.end(now_us)

    def idle(self, now_us: int, after_us: int) -> bool:
        """Whether no key came for so long, and the filter need not be kept for its youth."""
        return now_us - self.used_us > after_us and (self._filter is None or not self._grows(now_us))

    def retire(self, now_us: int) -> Filled | None:
        """The current filter leaves the memory. It is stored for the last time also if that is done but for
        its being the last: states that something may yet replace are kept in files of their own."""
        return None if self._filter is None else self.end(now_us)

    def end(self, now_us: int) -> Filled:
        """Store the current filter for the last time."""
        current = self._filter
        if current is None:
            raise BugError("a history without a current filter has none to end")
        filled = self._snapshot(now_us, final=True)
        self._sizing.observed(current.count, now_us - self._opened_us)
        self._filter = self._young = None
        self._stored = None
        return filled

    def _snapshot(self, now_us: int, *, final: bool) -> Filled:
        current = self._filter
        if current is None:
            raise BugError("a history without a current filter has none to store")
        meta = FilterMeta(
            key=self.key,
            sequence=self._next_sequence(),
            m=current.m,
            n=current.n,
            k=current.k,
            count=current.count,
            lo_ms=self._range.lo_ms,
            hi_ms=self._range.hi_ms,
            singles=tuple(self._range.singles),
            opened_us=self._opened_us,
            stored_us=now_us,
            replaces=self._stored,
            final=final,
        )
        self._stored = meta.sequence
        self.dirty_us = None
        return Filled(meta=meta, bits=current.bits)

    @property
    def span_ms(self) -> int:
        """Of message time in the current filter."""
        return covered(self._range.lo_ms, self._range.hi_ms, self._range.singles)

    @property
    def ranged(self) -> bool:
        return self._range.lo_ms <= self._range.hi_ms

    def matching(self, time_ms: int) -> BloomFilter | None:
        """The current filter, if it is in M(H, t)."""
        return self._filter if self._filter is not None and self._range.matches(time_ms) else None

    @property
    def stored(self) -> int | None:
        """The stored state of the current filter: whoever asks the filter itself need not ask that."""
        return self._stored

    @property
    def memory(self) -> int:
        if self._filter is None:
            return 0
        return self._filter.shape.size + (0 if self._young is None else self._filter.count * ID_BYTES)

    def check(self) -> None:
        if self._filter is None and self.dirty_us is not None:
            raise BugError(f"history {self.key} has no filter and yet something to store")
        if self._filter is not None and (self._filter.full or not self._filter.count):
            raise BugError(f"the current filter of {self.key} is full or empty")
