"""Knowledge about a stream of ticks (spec D2; durable paper, section 3).

A tick of a pubend is Q (unknown), S (silence), D (an event) or L (lost: its pubend has forgotten what was
there). Knowledge comes in segments: everything in (start, end] that is not listed as an event is silence,
so Q is simply what no segment holds. A segment is L as a whole.

Silence is relative to a filter. An event that nobody downstream wanted is silence downstream, and says
nothing to a subscription that came later. So every segment carries its *coverage*: which brokers'
interest, at which version, it was filtered with. A consumer states its need and accepts only segments
whose coverage meets it; for everybody else the ticks are still Q. L is true for everyone.

A stream holds what fits; a forgotten segment is Q again and can be asked for upstream.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace

from postroad.errors import BugError
from postroad.events.batch import EventBatch
from postroad.streams.spans import Span
from postroad.units import KIB
from postroad.wire.frames import Kind

MAX_TICK: Final = (1 << 62) - 1  # so that sums of ticks and what is stored in 64 bits stay in range
SEGMENT_OVERHEAD_BYTES: Final = 256
JOIN_SEGMENTS: Final = 64  # as many small neighbours become one segment
SMALL_BYTES: Final = 8 * KIB


class Coverage:
    """Owners and interest versions that knowledge was filtered with; `everything`: not filtered at all."""

    __slots__ = ("_hash", "everything", "versions")

    def __init__(self, versions: Mapping[int, int], *, everything: bool = False) -> None:
        self.versions = dict(sorted(versions.items()))
        self.everything = everything
        self._hash = hash((everything, tuple(self.versions.items())))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Coverage)
            and self._hash == other._hash
            and self.everything == other.everything
            and self.versions == other.versions
        )

    def __repr__(self) -> str:
        return "Coverage(everything)" if self.everything else f"Coverage({self.versions})"

    def meets(self, need: Mapping[int, int]) -> bool:
        if self.everything:
            return True
        versions = self.versions
        return all(versions.get(owner, 0) >= version for owner, version in need.items())

    def at_least(self, other: Coverage) -> bool:
        return self.everything or (not other.everything and self.meets(other.versions))


EVERYTHING: Final = Coverage({}, everything=True)
NOTHING: Final = Coverage({})


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Knowledge about (start, end]. `batch` holds the D ticks, which increase; None means silence only.

    There are very many in memory, none of them part of a cycle: the garbage collector must not walk them.
    """

    start: int
    end: int
    coverage: Coverage
    batch: EventBatch | None = None
    lost: bool = False
    final: bool = False  # its pubend has forgotten it: whom this does not serve, it is lost for

    @property
    def size(self) -> int:
        return SEGMENT_OVERHEAD_BYTES + (0 if self.batch is None else len(self.batch.data))

    def meets(self, need: Mapping[int, int]) -> bool:
        return self.lost or self.final or self.coverage.meets(need)

    def served(self, need: Mapping[int, int]) -> Segment:
        """What this is to a consumer whose need it `meets`."""
        if self.lost or self.coverage.meets(need):
            return self
        return Segment(self.start, self.end, NOTHING, lost=True)

    def cut(self, start: int, end: int) -> Segment:
        """The same knowledge about the part of it inside (start, end]."""
        start, end = max(self.start, start), min(self.end, end)
        if (start, end) == (self.start, self.end):
            return self
        return replace(self, start=start, end=end, batch=cut_batch(self.batch, start, end))


def cut_batch(batch: EventBatch | None, start: int, end: int) -> EventBatch | None:
    """The rows of `batch` with ticks in (start, end]."""
    if batch is None:
        return None
    ticks = batch.headers["tick"]
    first, last = (int(at) for at in np.searchsorted(ticks, [start, end], side="right"))
    if first >= last:
        return None
    return batch if first == 0 and last == batch.count else batch.slice(first, last)


_FORGOTTEN: Final = Segment(0, 0, NOTHING)


def joined(run: Sequence[Segment]) -> Segment:
    """Adjoining segments of one coverage, nothing of it lost, as one."""
    if len(run) == 1:
        return run[0]
    parts: list[EventBatch] = []
    start = run[0].start
    last = max((at for at, segment in enumerate(run) if segment.batch is not None), default=0)
    for at, segment in enumerate(run):
        batch = segment.batch
        if batch is None:
            continue  # silence: part of the span of what follows
        end = run[-1].end if at == last else segment.end
        if (batch.start, batch.end, batch.data[4]) != (start, end, Kind.KNOWLEDGE):
            data = batch.select(
                None, kind=Kind.KNOWLEDGE, pubend=batch.pubend, start=start, end=end, channel=0
            )
            batch = EventBatch(data, batch.count, batch.extents)
        parts.append(batch)
        start = end
    whole = EventBatch.concatenate(parts) if parts else None
    return Segment(run[0].start, run[-1].end, run[0].coverage, whole)


class KnowledgeStream:
    """Segments of one pubend, sorted and disjoint, in memory.

    With `joins`, small neighbours are joined once there are many: whoever asks for a long stretch later, and
    each subscriber that catches up on it, pays per segment and not per event.
    """

    __slots__ = ("_head", "_joins", "_segments", "_small", "_starts", "size")

    def __init__(self, *, joins: bool = False) -> None:
        self._joins = joins
        self._small = 0  # the last so many segments adjoin, are alike and small
        self._segments: list[Segment] = []  # sorted by start, disjoint; those before _head are forgotten
        self._starts: list[int] = []  # their starts, for bisection
        self._head = 0  # forgetting moves this on; the lists are cut when half of them is behind it
        self.size = 0  # bytes held, the sum of segment sizes

    def __len__(self) -> int:
        return len(self._segments) - self._head

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments[self._head :])

    @property
    def end(self) -> int:
        """The highest tick known, 0 if none."""
        return self._segments[-1].end if len(self) else 0

    def accumulate(self, segment: Segment) -> list[Segment]:
        """Add knowledge; returns the parts that were news, in order.

        Where something is known already the wider coverage stays. L and what its pubend said before it
        forgot are both true; the data stays.
        """
        if segment.start >= segment.end:
            return []
        last = self._segments[-1] if len(self) else None
        if last is None or segment.start >= last.end:
            self._append(segment, last)
            return [segment]
        news: list[Segment] = []
        at = self._first_after(segment.start)
        position = segment.start
        while at < len(self._segments) and self._segments[at].start < segment.end:
            known = self._segments[at]
            if known.start > position:
                news.append(segment.cut(position, known.start))
            if segment.lost and not (known.lost or known.final or known.coverage.everything):
                news.append(replace(known.cut(max(position, known.start), segment.end), final=True))
            elif not self._keeps(known, segment):
                news.append(segment.cut(max(position, known.start), known.end))
            position = max(position, known.end)
            at += 1
        if position < segment.end:
            news.append(segment.cut(position, segment.end))
        for part in news:
            self._replace(part)
        return news

    @staticmethod
    def _keeps(known: Segment, other: Segment) -> bool:
        if other.lost:
            return True
        if known.lost:
            return False
        return known.coverage.at_least(other.coverage)

    def _append(self, segment: Segment, last: Segment | None) -> None:
        if (
            last is not None
            and last.end == segment.start
            and last.batch is None
            and segment.batch is None
            and last.lost == segment.lost
            and last.final == segment.final
            and last.coverage == segment.coverage
            and segment.end < MAX_TICK  # that a stream is over is not part of what is lost of it
        ):
            self._segments[-1] = replace(last, end=segment.end)
            return
        if self._joins:
            self._count_small(segment, last)
        self._segments.append(segment)
        self._starts.append(segment.start)
        self.size += segment.size

    def _count_small(self, segment: Segment, last: Segment | None) -> None:
        """Before `segment` is appended: join what came before it if that is enough by now."""
        like = (
            last is not None
            and last.end == segment.start
            and not (last.lost or last.final or segment.lost or segment.final)
            and last.coverage == segment.coverage
        )
        if self._small >= JOIN_SEGMENTS or not like or segment.size > SMALL_BYTES:
            self._join()
        if segment.size <= SMALL_BYTES and not (segment.lost or segment.final):
            self._small += 1

    def _join(self) -> None:
        count, self._small = min(self._small, len(self)), 0
        if count < 2:
            return
        run = self._segments[-count:]
        whole = joined(run)
        del self._segments[-count:], self._starts[-count:]
        self._segments.append(whole)
        self._starts.append(whole.start)
        self.size += whole.size - sum(segment.size for segment in run)

    def _replace(self, part: Segment) -> None:
        """Put `part` in place of whatever is held of (part.start, part.end]."""
        self._small = 0
        low = self._first_after(part.start)
        high = low
        kept: list[Segment] = []
        while high < len(self._segments) and self._segments[high].start < part.end:
            known = self._segments[high]
            if known.start < part.start:
                kept.append(known.cut(known.start, part.start))
            if known.end > part.end:
                kept.append(known.cut(part.end, known.end))
            self.size -= known.size
            high += 1
        kept.append(part)
        kept.sort(key=lambda segment: segment.start)
        self._segments[low:high] = kept
        self._starts[low:high] = [segment.start for segment in kept]
        self.size += sum(segment.size for segment in kept)

    def _first_after(self, tick: int) -> int:
        """Index of the first segment whose end is above `tick`."""
        at = bisect_right(self._starts, tick, self._head)
        return at - 1 if at > self._head and self._segments[at - 1].end > tick else at

    def after(self, tick: int, need: Mapping[int, int]) -> Segment | None:
        """What is known from `tick` on without a break, up to the end of one segment; None if Q."""
        at = self._first_after(tick)
        if at == len(self._segments):
            return None
        segment = self._segments[at]
        if segment.start > tick or not segment.meets(need):
            return None
        return segment.cut(tick, segment.end).served(need)

    def around(self, tick: int) -> Segment | None:
        """The segment that `tick` is in."""
        at = self._first_after(tick - 1)
        if at == len(self._segments) or self._segments[at].start >= tick:
            return None
        return self._segments[at]

    def find(
        self,
        start: int,
        end: int,
        need: Mapping[int, int],
        most: int = sys.maxsize,
        *,
        beyond: bool = False,
        whole: bool = False,
    ) -> tuple[list[Segment], list[Span]]:
        """What of (start, end] is known well enough for `need`, and the spans that are not.

        After `most` segments it stops, as if the span ended there. With `beyond`, silence and L are told as
        far as they are known, so that nobody has to ask for long ones piece by piece. With `whole`, segments
        are not cut, which would copy their events.
        """
        segments: list[Segment] = []
        missing: list[Span] = []
        position = start
        at = self._first_after(start)
        while at < len(self._segments) and self._segments[at].start < end:
            segment = self._segments[at]
            at += 1
            if not segment.meets(need):
                continue
            if segment.start > position:
                missing.append((position, segment.start))
            quiet = beyond and segment.batch is None
            part = segment if whole else segment.cut(max(position, start), segment.end if quiet else end)
            segments.append(part.served(need))
            position = min(segment.end, end)
            if len(segments) == most:
                return segments, missing
        if position < end:
            missing.append((position, end))
        return segments, missing

    def forget_first(self) -> Segment | None:
        """Drop the oldest segment."""
        if not len(self):
            return None
        segment = self._segments[self._head]
        self._segments[self._head] = _FORGOTTEN
        self._head += 1
        self.size -= segment.size
        if self._head * 2 >= len(self._segments):
            del self._segments[: self._head], self._starts[: self._head]
            self._head = 0
        return segment

    def forget_last(self) -> Segment | None:
        """Drop the newest segment."""
        if not len(self):
            return None
        segment = self._segments.pop()
        self._starts.pop()
        self._small = 0
        self.size -= segment.size
        return segment

    def forget(self, passed: int) -> Segment | None:
        """Drop what is needed least by one who has everything up to `passed`.

        That is the oldest, up to there. Of what lies ahead it is the newest: whatever adjoins the gap that
        holds it up would otherwise be asked for again, and while that is on its way more comes than is kept.
        """
        ahead = len(self) and self._segments[self._head].end > passed
        return self.forget_last() if ahead else self.forget_first()

    def check(self) -> None:
        if self._starts[self._head :] != [segment.start for segment in self]:
            raise BugError("knowledge: starts do not mirror segments")
        for left, right in pairwise(self):
            if left.end > right.start:
                raise BugError(f"knowledge: segments overlap at tick {right.start}")
        if self.size != sum(segment.size for segment in self):
            raise BugError("knowledge: size is not the sum of segments")
