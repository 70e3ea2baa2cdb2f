"""What a broker holds about one stream, and about one neighbour that it feeds.

A `Stream` is this broker's view of one pubend: the knowledge it has, how far it is contiguous (the doubt
horizon of the durable paper, section 4.1) and what it has asked upstream. A `Feed` is how far one
neighbour has been told about one stream. A `Neighbour` is a broker linked to this one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from postroad.durable.publisher.pubend import DurablePubend
from postroad.errors import BugError, PeerError
from postroad.ids import is_volatile
from postroad.overlay.topology import MAX_BROKERS
from postroad.streams.knowledge import NOTHING, Coverage, KnowledgeStream, Segment
from postroad.streams.plain_pubend import PlainPubend
from postroad.streams.spans import Span, subtract, union
from postroad.wire.frames import Stamp

MAX_STAMPS: Final = 1_024  # the newest stamps of a link that may still be named
MAX_WANTS: Final = 1_024  # spans one neighbour may wait for in one stream
MAX_NACK_SPANS: Final = 256
DURABLE_KEY: Final = 1 << 48  # keys of durable subscriptions lie above those of plain ones
_MAX_U32: Final = (1 << 32) - 1


@dataclass(slots=True)
class Want:
    """A neighbour's curiosity: ticks it asked for and what they must be filtered with."""

    spans: list[Span]
    need: Mapping[int, int]


@dataclass(slots=True)
class Feed:
    """One stream as told to one neighbour.

    It was told everything up to `told`. (told, quiet] held nothing for it and is not said yet, so that a
    stream which a neighbour does not care for costs it one silence a second, not one a batch.
    """

    told: int
    quiet: int
    coverage: Coverage = NOTHING
    blocked: bool = False  # out of credit since `told`; goes on from the cache when credit comes back
    wants: list[Want] = field(default_factory=list)

    def want(self, spans: list[Span], need: Mapping[int, int]) -> None:
        self.wants = [held for held in self.wants if held.need != need or held.spans]
        for held in self.wants:
            if held.need == need:
                held.spans = union(held.spans + spans)[:MAX_WANTS]
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
            raise PeerError(f"stamp {stamp.number} of {len(stamp.versions)} owners is out of range")
        self._stamps_in[stamp.number] = Coverage(stamp.versions)
        if len(self._stamps_in) > MAX_STAMPS + 1:
            del self._stamps_in[next(number for number in self._stamps_in if number)]

    def coverage(self, number: int) -> Coverage:
        found = self._stamps_in.get(number)
        if found is None:
            raise PeerError(f"knowledge names stamp {number}, which was not defined on this link")
        return found


@dataclass(slots=True)
class Asked:
    spans: list[Span]
    serves: Mapping[int, int]  # owner -> version: whom the answer is expected to serve
    at_us: int


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
        self, pubend_id: int, *, start: int, pubend: PlainPubend | DurablePubend | None = None
    ) -> None:
        self.id = pubend_id
        self.origin = pubend_id >> 32
        self.pubend = pubend
        # Empty for an own pubend, which has its store.
        self.knowledge = KnowledgeStream(joins=not is_volatile(pubend_id))
        self.horizon = start  # everything up to here was handed to local delivery
        self.top = start  # the highest tick heard of
        self.need = 0  # the own interest version that active local subscriptions rely on
        self.version = 0  # the own interest version in force at the horizon
        self.announced = True  # the parent said how far the stream is, since we attached
        # Plain subscription not active here yet -> where the stream was when it was made; None: not known.
        self.floors: dict[int, int | None] = {}
        self.waiting: dict[int, int] = {}  # subscription not active here yet -> version it waits for
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
        if isinstance(self.pubend, DurablePubend):
            return self.pubend.answer(start, end, most, whole=whole)
        if self.pubend is not None:
            return self.pubend.answer(start, end, most), []
        return self.knowledge.find(start, end, need, most, beyond=beyond, whole=whole)

    def unasked(self, spans: list[Span], need: Mapping[int, int], since_us: int) -> list[Span]:
        """Of `spans`, what no nack sent after `since_us` asks for already: nack consolidation (D2)."""
        self.asked = [asked for asked in self.asked if asked.at_us > since_us]
        for asked in self.asked:
            if all(asked.serves.get(owner, 0) >= version for owner, version in need.items()):
                spans = subtract(spans, asked.spans)
        return spans[:MAX_NACK_SPANS]

    def check(self) -> None:
        self.knowledge.check()
        if self.pubend is not None:
            self.pubend.check()
        if self.horizon > self.top:
            raise BugError(f"stream {self.id:016x}: horizon {self.horizon} above top {self.top}")
