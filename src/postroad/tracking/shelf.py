"""The index of stored filters: which match a time, which are still in memory, which are to go (spec T3).

The index holds everything but the bits. Bits of recently stored filters stay in a bounded cache; others are
read by the driver when a trace asks (`wanted`). Retention drops the oldest first, by age and by size, and
remembers up to which message time it dropped: before that, a history says that it does not reach so far.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

from postroad.errors import BugError, StorageError
from postroad.tracking.keys import HistoryKey
from postroad.tracking.record import FilterMeta, decode_record
from postroad.units import MILLISECOND_US

MAX_STORED: Final = 1_000_000
LOG_ENTRY_BYTES: Final = 20
INDEX_BYTES: Final = 400  # about what one entry takes in memory and around its bits on disk


class Shelf:
    __slots__ = ("_by_key", "_cache", "_cache_bytes", "_cached", "_metas", "_sizes", "bytes", "dropped_ms")

    def __init__(self, stored: Iterable[FilterMeta] = (), *, cache_bytes: int = 0) -> None:
        self._metas: OrderedDict[int, FilterMeta] = OrderedDict()  # by sequence, oldest first
        self._by_key: dict[HistoryKey, dict[int, FilterMeta]] = {}  # the same, by history
        self._sizes: dict[int, int] = {}  # bytes of each record
        self._cache: OrderedDict[int, bytes] = OrderedDict()  # bits by sequence, least recently used first
        self._cache_bytes = cache_bytes
        self._cached = 0  # bytes in `_cache`
        self.bytes = 0  # of all records
        self.dropped_ms = -1  # retention dropped filters with times up to this
        for meta in sorted(stored, key=lambda meta: meta.sequence):
            self._index(meta, INDEX_BYTES + ((meta.m + 7) // 8 or meta.count * LOG_ENTRY_BYTES))

    def __len__(self) -> int:
        return len(self._metas)

    @property
    def last_sequence(self) -> int:
        return next(reversed(self._metas), 0)

    @property
    def last_stored_us(self) -> int:
        return max((meta.stored_us for meta in self._metas.values()), default=0)

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
        self._by_key.setdefault(meta.key, {})[meta.sequence] = meta
        self._sizes[meta.sequence] = size
        self.bytes += size

    def _remove(self, sequence: int) -> None:
        meta = self._metas.pop(sequence, None)
        if meta is None:
            return
        of_key = self._by_key[meta.key]
        del of_key[sequence]
        if not of_key:
            del self._by_key[meta.key]
        self.bytes -= self._sizes.pop(sequence)
        self._cached -= len(self._cache.pop(sequence, b""))

    def keys(self, kind: str) -> list[HistoryKey]:
        return [key for key in self._by_key if key.kind == kind]

    def matching(self, key: HistoryKey, time_ms: int) -> list[FilterMeta]:
        """The stored part of M(H, t)."""
        return [meta for meta in self._by_key.get(key, {}).values() if meta.matches(time_ms)]

    def body(self, meta: FilterMeta, records: Mapping[int, bytes]) -> bytes | None:
        """The bits of a filter, from memory or from what the driver read; None if it could not."""
        held = self._cache.get(meta.sequence)
        if held is not None:
            self._cache.move_to_end(meta.sequence)
            return held
        record = records.get(meta.sequence)
        if record is None:
            return None
        try:
            found, body = decode_record(record)
        except StorageError:
            return None
        return body if found.sequence == meta.sequence and found.key == meta.key else None

    def after(self, sequence: int) -> list[tuple[int, int]]:
        """(sequence, size) of the records beyond that one, by sequence."""
        found: list[tuple[int, int]] = []
        for one in reversed(self._metas):
            if one <= sequence:
                break
            found.append((one, self._sizes[one]))
        found.reverse()
        return found

    def cached(self, sequence: int) -> bool:
        return sequence in self._cache

    def expire(self, now_us: int, *, keep_us: int, keep_bytes: int) -> tuple[int, ...]:
        """Drop what retention does not keep; returns the sequences."""
        gone: list[int] = []
        while self._metas:
            sequence, meta = next(iter(self._metas.items()))
            aged = meta.stored_us < now_us - keep_us
            if not (aged or self.bytes > keep_bytes or len(self._metas) > MAX_STORED):
                break
            # Singles of a clock that is ahead say nothing about how far back the rest reaches.
            stored_ms = meta.stored_us // MILLISECOND_US
            times_ms = [meta.hi_ms, *(hi_ms for _, hi_ms in meta.singles if hi_ms <= stored_ms)]
            self.dropped_ms = max(self.dropped_ms, *times_ms)
            self._remove(sequence)
            gone.append(sequence)
        return tuple(gone)

    def check(self) -> None:
        if sum(len(of_key) for of_key in self._by_key.values()) != len(self._metas):
            raise BugError("the stored filters by history are not those by sequence")
        if self.bytes != sum(self._sizes.values()) or set(self._sizes) != set(self._metas):
            raise BugError("the sizes of stored filters do not add up")
        if self._cached != sum(map(len, self._cache.values())) or self._cached > self._cache_bytes:
            raise BugError("the cache of filters is larger than it may be")
