"""Publishing ends: where ticks are assigned (spec D1).

A tick is the pubend's clock in microseconds, made unique and increasing: max(last + 1, now). A pubend that
said "silence up to t" counts t as used, so it can never assign a tick at or below it. A plain pubend keeps
its events in memory, the newest `limit` bytes; older ticks become L. It lives as long as its broker's
process, and the next start opens another one, so its ticks need no memory across crashes.
"""

from __future__ import annotations

from collections.abc import Sequence

from postroad.errors import BugError
from postroad.events.batch import EventBatch
from postroad.streams.knowledge import EVERYTHING, NOTHING, KnowledgeStream, Segment
from postroad.wire.frames import Kind


class PlainPubend:
    """An ordered stream of events kept in memory."""

    __slots__ = ("_limit", "_store", "floor", "id", "last", "start")

    def __init__(self, pubend: int, *, limit: int, now_us: int) -> None:
        self.id = pubend
        self.start = now_us  # nothing was ever published at or before this tick
        self.last = now_us  # the highest tick assigned or asserted silent
        self.floor = now_us  # ticks in (start, floor] are L
        self._limit = limit
        self._store = KnowledgeStream()

    def publish(self, batches: Sequence[EventBatch], now_us: int) -> Segment:
        """Assign ticks to these events, in order; the segment reaches back to the last one."""
        merged = batches[0] if len(batches) == 1 else EventBatch.concatenate(batches)
        first = max(self.last + 1, now_us)
        batch = merged.with_ticks(first, kind=Kind.KNOWLEDGE, pubend=self.id, start=self.last, channel=0)
        return self._append(Segment(self.last, first + batch.count - 1, EVERYTHING, batch))

    def assert_silence(self, now_us: int) -> Segment:
        """Silence since the last tick, up to now; one tick at least, so that there is something to say."""
        return self._append(Segment(self.last, max(self.last + 1, now_us), EVERYTHING))

    def _append(self, segment: Segment) -> Segment:
        self._store.accumulate(segment)
        self.last = segment.end
        while self._store.size > self._limit and len(self._store) > 1:
            forgotten = self._store.forget_first()
            if forgotten is not None:
                self.floor = forgotten.end
        return segment

    def answer(self, start: int, end: int, most: int) -> list[Segment]:
        """All about (start, end], in at most `most` segments: silence before the start, L up to the floor,
        then what was published. Nothing is said about the future: ticks above `last` are left out.
        """
        end = min(end, self.last)
        segments: list[Segment] = []
        if start < min(end, self.start):
            segments.append(Segment(start, min(end, self.start), EVERYTHING))
        lost_from, lost_to = max(start, self.start), min(end, self.floor)
        if lost_from < lost_to:
            segments.append(Segment(lost_from, lost_to, NOTHING, lost=True))
        known, _ = self._store.find(max(start, self.floor), max(end, self.floor), {}, most)
        return segments + known

    @property
    def size(self) -> int:
        return self._store.size

    def check(self) -> None:
        self._store.check()
        if not self.start <= self.floor <= self.last:
            raise BugError("pubend: start <= floor <= last does not hold")
        if self._store.end not in (0, self.last):
            raise BugError("pubend: the store does not reach the last tick")
