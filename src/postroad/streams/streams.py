"""What a broker holds about one stream, and about one neighbour that it feeds.

A `Stream` is this broker's view of one pubend: the knowledge it has, how far it is contiguous (the doubt
horizon of the durable paper, section 4.1) and what it has asked upstream. `StreamTable` has all of them, and
the memory they take. A `Feed` is how far one neighbour has been told about one stream. A `Neighbour` is a
broker linked to this one.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from postroad.errors import BugError, PeerError
from postroad.ids import SubscriptionKey, is_volatile
from postroad.overlay.topology import MAX_BROKERS
from postroad.seam.turn import Turn
from postroad.streams.delivery import MAX_PUBENDS
from postroad.streams.knowledge import NOTHING, Coverage, KnowledgeStream, Segment
from postroad.streams.plain_pubend import PlainPubend
from postroad.streams.spans import Span, subtract, union
from postroad.wire.frames import Stamp

MAX_STAMPS: Final = 1_024  # the newest stamps of a link that may still be named
MAX_WANTS: Final = 1_024  # spans one neighbour may wait for in one stream
MAX_NACK_SPANS: Final = 256
MAX_STREAMS: Final = MAX_PUBENDS  # so that local delivery takes every stream there is
MAX_STREAMS_PER_ORIGIN: Final = 16_384  # what one attach can name
_EVICT_TO: Final = 0.9  # of the cache limit, so that eviction runs now and then, not at every batch
_MAX_U32: Final = (1 << 32) - 1

Upstream = dict[int, tuple[int, tuple[int, ...]]]  # origin -> (parent, its pubends)


@dataclass(slots=True)
class Want:
    """A neighbour's curiosity: ticks it asked for and what they must be filtered with."""

    spans: list[Span]
    need: Mapping[int, int]


@dataclass(slots=True)
class Feed:
    """One stream as told to one neighbour.

    It was told everything up to `sent_to`. (sent_to, quiet] had nothing for it and is not said yet, so that a
    stream which a neighbour does not care for costs it one silence a second, not one a batch.
    """

    sent_to: int
    quiet: int
    coverage: Coverage = NOTHING
    blocked: bool = False  # out of credit since `sent_to`; goes on from the cache when credit comes back
    wants: list[Want] = field(default_factory=list)

    def want(self, spans: list[Span], need: Mapping[int, int]) -> None:
        self.wants = [want for want in self.wants if want.need != need or want.spans]
        for want in self.wants:
            if want.need == need:
                want.spans = union(want.spans + spans)[:MAX_WANTS]
                return
        if len(self.wants) < MAX_WANTS:
            self.wants.append(Want(union(spans)[:MAX_WANTS], dict(need)))


class Neighbour:
    """A broker at the other end of a link."""

    __slots__ = (
        "_next_stamp",
        "_stamps_in",
        "_stamps_out",
        "attached",
        "connection",
        "due_at",
        "feeds",
        "number",
        "silences",
        "up_at",
    )

    def __init__(self, number: int, connection: int, up_at: dict[int, int]) -> None:
        self.number = number
        self.connection = connection
        # Where each stream stood when the link came up, began if that was later, or was told to at a detach.
        self.up_at = up_at
        self.attached: set[int] = set()  # origins whose streams it gets from us
        # Origins that it is to attach to here, as routes are, and has not -> where their streams stood then.
        self.due_at: dict[int, dict[int, int]] = {}
        self.feeds: dict[int, Feed] = {}  # by pubend; only of attached origins
        self.silences: list[tuple[int, int, int, int]] = []  # to go out in one frame at the end of the turn
        self._stamps_out: dict[Coverage, int] = {}  # newest MAX_STAMPS, in order of definition
        self._stamps_in: dict[int, Coverage] = {0: NOTHING}
        self._next_stamp = 1

    def stamp(self, coverage: Coverage) -> tuple[int, Stamp | None]:
        """The number of `coverage` on this link, and its definition if the other side must be told first."""
        if coverage == NOTHING:
            return 0, None
        number = self._stamps_out.get(coverage)
        if number is not None:
            return number, None
        number, self._next_stamp = self._next_stamp, self._next_stamp % _MAX_U32 + 1
        self._stamps_out[coverage] = number
        if len(self._stamps_out) > MAX_STAMPS:
            del self._stamps_out[next(iter(self._stamps_out))]
        return number, Stamp(number=number, versions=coverage.versions)

    @property
    def stamps_full(self) -> bool:
        """The next definition makes the other side forget the oldest one."""
        return len(self._stamps_out) >= MAX_STAMPS

    def define(self, stamp: Stamp) -> None:
        if not 1 <= stamp.number <= _MAX_U32 or len(stamp.versions) > MAX_BROKERS:
            raise PeerError(
                f"stamp {stamp.number} of {len(stamp.versions)} owners; a number is between 1 and {_MAX_U32},"
                f" and there are at most {MAX_BROKERS} owners"
            )
        self._stamps_in[stamp.number] = Coverage(stamp.versions)
        if len(self._stamps_in) > MAX_STAMPS + 1:
            del self._stamps_in[next(number for number in self._stamps_in if number)]

    def coverage(self, number: int) -> Coverage:
        coverage = self._stamps_in.get(number)
        if coverage is None:
            raise PeerError(f"knowledge names stamp {number}, which was not defined on this link")
        return coverage


@dataclass(slots=True)
class Asked:
    spans: list[Span]
    serves: Mapping[int, int]  # owner -> version: whom the answer is expected to serve
    at_us: int


class LoggedPubend(Protocol):
    """An own durable pubend: what memory lacks of it is in the log."""

    id: int
    last: int  # the highest tick told

    @property
    def size(self) -> int:
        """Bytes in memory."""

    def answer(
        self, start: int, end: int, most: int, *, whole: bool = False
    ) -> tuple[list[Segment], list[Span]]:
        """What memory knows of (start, end], and what must be read from the log."""

    def read(self, turn: Turn, spans: Sequence[Span]) -> None:
        """What the log says of these comes to `Routing.log_read`."""

    def assert_silence(self, turn: Turn, *, owing: bool = False) -> Segment | None:
        """Silence since the last tick told; None: nothing can be said now."""

    def check(self) -> None: ...


class Stream:
    """This broker's view of one pubend; its own pubend when `pubend` is given."""

    __slots__ = (
        "announced",
        "asked",
        "ended_at",
        "floors",
        "horizon",
        "id",
        "knowledge",
        "log",
        "lost_at",
        "nack_at",
        "need",
        "origin",
        "partly_asked",
        "pubend",
        "top",
        "version",
        "waiting",
    )

    def __init__(
        self, pubend_id: int, *, start: int, pubend: PlainPubend | LoggedPubend | None = None
    ) -> None:
        self.id = pubend_id
        self.origin = pubend_id >> 32
        self.pubend = pubend
        self.log = None if isinstance(pubend, PlainPubend) else pubend  # the own pubend, if that is durable
        # Empty for an own pubend, which has its store.
        self.knowledge = KnowledgeStream(joins=not is_volatile(pubend_id))
        self.horizon = start  # everything up to here was handed to local delivery
        self.top = start  # the highest tick heard of
        self.need = 0  # the own interest version that active local subscriptions rely on
        self.version = 0  # the own interest version in force at the horizon
        self.announced = True  # the parent said how far the stream is, since we attached
        # Plain subscription not active here yet -> where the stream was when it was made; None: not known.
        self.floors: dict[SubscriptionKey, int | None] = {}
        self.waiting: dict[
            SubscriptionKey, int
        ] = {}  # subscription not active here yet -> version it waits for
        self.asked: list[Asked] = []  # nacks sent upstream and not yet timed out
        self.nack_at: int | None = None  # when to look at the gaps again
        self.partly_asked = False  # there were more gaps than one nack asks for
        self.ended_at: int | None = None  # when its broker was seen to have a newer process
        self.lost_at: int | None = None  # when the horizon last passed an L; of a dead pubend, its end

    def announce(self, top: int) -> None:
        """The parent says how far the stream is: subscriptions made meanwhile get nothing from before."""
        self.announced = True
        for key in [key for key, floor in self.floors.items() if floor is None]:
            self.floors[key] = max(top, self.top)

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
        if isinstance(self.pubend, PlainPubend):
            return self.pubend.answer(start, end, most), []
        if self.log is not None:
            return self.log.answer(start, end, most, whole=whole)
        return self.knowledge.find(start, end, need, most, beyond=beyond, whole=whole)

    def unasked(self, spans: list[Span], need: Mapping[int, int], since_us: int) -> list[Span]:
        """Of `spans`, what no nack sent after `since_us` asks for already: nack consolidation (D2)."""
        self.asked = [asked for asked in self.asked if asked.at_us > since_us]
        for asked in self.asked:
            if all(asked.serves.get(owner, 0) >= version for owner, version in need.items()):
                spans = subtract(spans, asked.spans)
        return spans[:MAX_NACK_SPANS]

    def answered(self, span: Span) -> None:
        """What came is no longer asked for: whoever could not keep it may ask again at once."""
        for asked in self.asked:
            asked.spans = subtract(asked.spans, [span])
        self.asked = [asked for asked in self.asked if asked.spans]

    def check(self) -> None:
        self.knowledge.check()
        if self.pubend is not None:
            self.pubend.check()
        if self.horizon > self.top:
            raise BugError(f"stream {self.id:016x}: horizon {self.horizon} above top {self.top}")


class StreamTable:
    """The streams that a broker holds, by pubend and by the broker they come from.

    `cache_bytes`: how much knowledge of others' streams is kept.
    """

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
        size = sum(stream.knowledge.size for stream in self.streams.values())
        if size != self.cache_size:
            raise BugError(f"streams: cache size {self.cache_size}, they have {size}")
        if {pubend for streams in self._by_origin.values() for pubend in streams} != self.streams.keys():
            raise BugError("streams: those by broker are not those by pubend")
