"""The index of stored filters: which match a time, which are still in memory, which are to go (spec T3).

The index holds everything but the bits. Bits of recently stored filters stay in a bounded cache; others are
read by the driver when a trace asks (`wanted`). Retention drops the oldest first, by age and by size, and
remembers up to which message time it dropped: before that, a history says that it does not reach so far.

A history of some weeks has hundreds of thousands of filters. They are found by the bucket of time that a
range or a single falls into; the few whose times fall into many are looked at for every time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

from postroad.errors import BugError, StorageError
from postroad.tracking.keys import HistoryKey
from postroad.tracking.moments import Spans, joined
from postroad.tracking.record import FilterMeta, decode_record
from postroad.units import MILLISECOND_US

MAX_STORED: Final = 1_000_000
LOG_ENTRY_BYTES: Final = 20
BUCKET_BITS: Final = 20  # of message time in ms: about 17 minutes
MAX_BUCKETS: Final = 16  # of one filter
_ANY_TIME: Final = -1  # the bucket of those with more
INDEX_BYTES: Final = 400  # about what a record has on disk around its bits


class Shelf:
    __slots__ = (
        "_by_key",
        "_by_time",
        "_cache",
        "_cache_bytes",
        "_cached",
        "_metas",
        "_sizes",
        "bytes",
        "dropped_ms",
    )

    def __init__(
        self,
        stored: Iterable[FilterMeta] = (),
        *,
        sizes: Mapping[int, int] | None = None,
        cache_bytes: int = 0,
    ) -> None:
        """`sizes`: bytes of their records, by sequence; where one is not told, it is guessed."""
        self._metas: OrderedDict[int, FilterMeta] = OrderedDict()  # by sequence, oldest first
        self._by_key: dict[HistoryKey, int] = {}  # how many there are of each history
        self._by_time: dict[tuple[HistoryKey, int], dict[int, FilterMeta]] = {}  # by history and bucket
        self._sizes: dict[int, int] = {}  # bytes of each record
        self._cache: OrderedDict[int, bytes] = OrderedDict()  # bits by sequence, least recently used first
        self._cache_bytes = cache_bytes
        self._cached = 0  # bytes in `_cache`
        self.bytes = 0  # of all records
        self.dropped_ms = -1  # retention dropped filters with times up to this
        for meta in sorted(stored, key=lambda meta: meta.sequence):
            guess = INDEX_BYTES + ((meta.m + 7) // 8 or meta.count * LOG_ENTRY_BYTES)
            self._index(meta, (sizes or {}).get(meta.sequence, guess))

    def __len__(self) -> int:
        return len(self._metas)

    @property
    def last_sequence(self) -> int:
        return next(reversed(self._metas), 0)

    def last_stored_us(self, after: int) -> int:
        """When the last of the sequences after that one was stored; clocks may be set back, they increase."""
        return max((self._metas[sequence].stored_us for sequence in self.after(after)), default=0)

    def put(self, meta: FilterMeta, bits: bytes, size: int) -> None:
        """A filter was handed to the driver to be stored."""
        if meta.sequence <= self.last_sequence:
            raise BugError("sequences of stored filters must increase")
        self._index(meta, size)
        self._cache[meta.sequence] = bits
        self._cached += len(bits)
        while self._cached > self._cache_bytes and self._cache:
            self._cached -= len(self._cache.popitem(last=False)[1])

    def _index(self, meta: FilterMeta, size: int) -> None:
        if meta.replaces is not None:
            self._remove(meta.replaces)
        self._metas[meta.sequence] = meta
        self._by_key[meta.key] = self._by_key.get(meta.key, 0) + 1
        for bucket in _buckets(meta):
            self._by_time.setdefault((meta.key, bucket), {})[meta.sequence] = meta
        self._sizes[meta.sequence] = size
        self.bytes += size

    def _remove(self, sequence: int) -> None:
        meta = self._metas.pop(sequence, None)
        if meta is None:
            return
        self._by_key[meta.key] -= 1
        if not self._by_key[meta.key]:
            del self._by_key[meta.key]
        for bucket in _buckets(meta):
            place = (meta.key, bucket)
            del self._by_time[place][sequence]
            if not self._by_time[place]:
                del self._by_time[place]
        self.bytes -= self._sizes.pop(sequence)
        self._cached -= len(self._cache.pop(sequence, b""))

    def keys(self, kind: str) -> list[HistoryKey]:
        return [key for key in self._by_key if key.kind == kind]

    def matching(self, key: HistoryKey, time_ms: int) -> list[FilterMeta]:
        """The stored part of M(H, t)."""
        near = self._by_time.get((key, time_ms >> BUCKET_BITS), {})
        wide = self._by_time.get((key, _ANY_TIME), {})
        return [meta for metas in (near, wide) for meta in metas.values() if meta.matches(time_ms)]

    def wide(self, key: HistoryKey) -> int:
        """How many are looked at for every time."""
        return len(self._by_time.get((key, _ANY_TIME), ()))

    def body(self, meta: FilterMeta, records: Mapping[int, bytes]) -> bytes | None:
        """The bits of a filter, from memory or from what the driver read; None if it could not."""
        cached = self._cache.get(meta.sequence)
        if cached is not None:
            self._cache.move_to_end(meta.sequence)
            return cached
        record = records.get(meta.sequence)
        if record is None:
            return None
        try:
            stored, body = decode_record(record)
        except StorageError:
            return None
        return body if stored.sequence == meta.sequence and stored.key == meta.key else None

    def size(self, meta: FilterMeta) -> int:
        """Bytes of its record, or of its bits if they are compressed there: what it takes to look into it."""
        return max(self._sizes[meta.sequence], (meta.m + 7) // 8)

    def get(self, sequence: int) -> tuple[FilterMeta, int] | None:
        """What the record of that sequence is, and its size; None if there is none."""
        meta = self._metas.get(sequence)
        return None if meta is None else (meta, self._sizes[sequence])

    def after(self, sequence: int) -> list[int]:
        """The sequences beyond that one, in order."""
        beyond: list[int] = []
        for other in reversed(self._metas):
            if other <= sequence:
                break
            beyond.append(other)
        beyond.reverse()
        return beyond

    def expire(
        self, now_us: int, *, keep_us: int, keep_bytes: int, before: int
    ) -> tuple[tuple[int, ...], Spans]:
        """Drop what retention does not keep, of the sequences before that one; returns which, and times by
        clocks that were ahead."""
        gone: list[int] = []
        ahead: list[tuple[int, int]] = []
        while self._metas:
            sequence, meta = next(iter(self._metas.items()))
            aged = meta.stored_us < now_us - keep_us
            crowded = self.bytes > keep_bytes or len(self._metas) > MAX_STORED
            if sequence >= before or not (aged or crowded):
                break
            # Clocks that were ahead, of publishers or ours, say nothing about how far back the rest reaches.
            past_ms = min(meta.stored_us, now_us) // MILLISECOND_US
            spans = meta.singles
            if meta.stored_us > now_us:
                spans = (*spans, (meta.lo_ms, meta.hi_ms))
            else:
                self.dropped_ms = max(self.dropped_ms, meta.hi_ms)
            self.dropped_ms = max([self.dropped_ms, *(hi_ms for _, hi_ms in spans if hi_ms <= past_ms)])
            ahead += [span for span in spans if span[1] > past_ms]
            self._remove(sequence)
            gone.append(sequence)
        return tuple(gone), tuple(joined(ahead))

    def check(self) -> None:
        by_key = Counter(meta.key for meta in self._metas.values())
        by_time = {
            (meta.key, bucket, meta.sequence) for meta in self._metas.values() for bucket in _buckets(meta)
        }
        if by_key != self._by_key or by_time != {
            (*place, sequence) for place, sequences in self._by_time.items() for sequence in sequences
        }:
            raise BugError("the stored filters by history are not those by sequence")
        if self.bytes != sum(self._sizes.values()) or set(self._sizes) != set(self._metas):
            raise BugError("the sizes of stored filters do not add up")
        if self._cached != sum(map(len, self._cache.values())) or self._cached > self._cache_bytes:
            raise BugError("the cache of filters is larger than it may be")


def _buckets(meta: FilterMeta) -> list[int]:
    """Where it is looked for: the buckets of all times it matches."""
    spans = [*meta.singles, (meta.lo_ms, meta.hi_ms)] if meta.lo_ms <= meta.hi_ms else meta.singles
    buckets: set[int] = set()
    for lo_ms, hi_ms in spans:
        first, last = lo_ms >> BUCKET_BITS, hi_ms >> BUCKET_BITS
        if last - first >= MAX_BUCKETS:
            return [_ANY_TIME]
        buckets.update(range(first, last + 1))
    return sorted(buckets) if len(buckets) <= MAX_BUCKETS else [_ANY_TIME]
