"""The streams that a broker holds, by pubend and by the broker they come from, and the memory they take."""

from __future__ import annotations

import heapq
from typing import Final

from postroad.errors import BugError
from postroad.streams.delivery import MAX_PUBENDS
from postroad.streams.knowledge import Segment
from postroad.streams.streams import Stream

MAX_STREAMS: Final = MAX_PUBENDS  # so that local delivery takes every stream there is
MAX_STREAMS_PER_ORIGIN: Final = 16_384  # what one attach can name
_EVICT_TO: Final = 0.9  # of the cache limit, so that eviction runs now and then, not at every batch


class StreamTable:
    """`cache_bytes`: how much knowledge of others' streams is kept."""

    def __init__(self, cache_bytes: int) -> None:
        self._cache_bytes = cache_bytes
        self.streams: dict[int, Stream] = {}  # by pubend; changed by `add` and `drop` only
        self._by_origin: dict[int, dict[int, Stream]] = {}  # the same, by broker; none is empty
        self.cache_size = 0  # bytes of knowledge in all streams but the own

    def of(self, origin: int) -> dict[int, Stream]:
        """The streams of one broker, by pubend."""
        return self._by_origin.get(origin, {})

    def has_room(self, origin: int) -> bool:
        return len(self.streams) < MAX_STREAMS and len(self.of(origin)) < MAX_STREAMS_PER_ORIGIN

    def add(self, stream: Stream) -> None:
        self.streams[stream.id] = stream
        self._by_origin.setdefault(stream.origin, {})[stream.id] = stream

    def drop(self, stream: Stream) -> None:
        self.cache_size -= stream.knowledge.size
        del self.streams[stream.id]
        del self._by_origin[stream.origin][stream.id]
        if not self._by_origin[stream.origin]:
            del self._by_origin[stream.origin]

    def accumulate(self, stream: Stream, segment: Segment) -> list[Segment]:
        """What of the segment was not known."""
        before = stream.knowledge.size
        news = stream.knowledge.accumulate(segment)
        self.cache_size += stream.knowledge.size - before
        return news

    def evict(self) -> None:
        """Over the limit, forget what is needed least, from the largest stream, until there is room."""
        if self.cache_size <= self._cache_bytes:
            return
        largest = [(-stream.knowledge.size, stream.id) for stream in self.streams.values()]
        heapq.heapify(largest)
        while self.cache_size > self._cache_bytes * _EVICT_TO:
            stream = self.streams[largest[0][1]]
            forgotten = stream.knowledge.forget(stream.horizon)
            if forgotten is None:
                raise BugError("the cache has a size but no segments")
            self.cache_size -= forgotten.size
            heapq.heapreplace(largest, (-stream.knowledge.size, stream.id))

    def check(self) -> None:
        for stream in self.streams.values():
            stream.check()
        held = sum(stream.knowledge.size for stream in self.streams.values())
        if held != self.cache_size:
            raise BugError(f"streams: cache size {self.cache_size}, they hold {held}")
        if {pubend for held in self._by_origin.values() for pubend in held} != self.streams.keys():
            raise BugError("streams: those by broker are not those by pubend")
