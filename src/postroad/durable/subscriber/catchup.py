"""A catchup stream: one subscriber that is behind on one pubend (spec D4, D5, D9, D10; paper, 4.1).

It works in rounds. A round begins with a plan for (position, end]: at which ticks an event matched (Q), as
the persistent filtering subsystem remembers, or spans of which this broker knows nothing for the subscriber,
because it came from elsewhere or the memory has a hole: those are refiltered. All else is silence. Then the
Q ticks are asked for, a window at a time, and delivered in order as they come. What its pubend released is
a gap, as narrow as the plan allows. At the end of the plan comes the next round, or the switchover.

Nothing is asked for while the subscriber has no room, and at most `HELD_BYTES` wait to be delivered. What
comes beyond that is dropped, and the window is cut to what came before it: so it is asked for again as soon
as that is delivered, and no more at a time than fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from postroad.durable.subscriber.compact import Numbers
from postroad.durable.subscriber.filtering import ReadBuffer
from postroad.durable.subscriber.outputs import Deliver, DeliverGap, Message
from postroad.errors import BugError
from postroad.selectors import MatchIndex, Selector
from postroad.streams.knowledge import KnowledgeStream, Segment
from postroad.streams.spans import Span, intersect, overlaps, subtract, union
from postroad.units import MIB, MILLISECOND_US, SECOND_US

WINDOW_TICKS: Final = 4_096  # Q ticks asked for at a time
WINDOW_SPANS: Final = 128  # and the spans they may be asked in
NEAR_TICKS: Final = 8  # Q ticks no further apart are asked for together, with what lies between
REFILTER_US: Final = SECOND_US  # of a span to be refiltered, asked for at a time, at first
MAX_REFILTER_US: Final = 3_600 * SECOND_US
HELD_BYTES: Final = 4 * MIB  # knowledge that waits for what comes before it
ASK_AGAIN_US: Final = 500 * MILLISECOND_US

_NONE: Final[Numbers] = np.empty(0, np.int64)


class CatchupStream:
    """(s, p) in catchup mode."""

    __slots__ = (
        "_arrived",
        "_asked",
        "_asked_at",
        "_cut",
        "_gap",
        "_goal",
        "_index",
        "_lost",
        "_most",
        "_next",
        "_overflowed",
        "_selector",
        "_size",
        "_stride",
        "_ticks",
        "_unknown",
        "_until",
        "end",
        "position",
        "pubend",
        "reading",
        "subscriber",
    )

    def __init__(self, *, subscriber: int, pubend: int, position: int, selector: Selector) -> None:
        self.subscriber = subscriber
        self.pubend = pubend
        self.position = position  # the doubt horizon: everything up to here was delivered
        self.end = position  # where the plan ends; equal to `position` when there is none
        self.reading = False  # a batch read of the PFS is on its way
        self._selector = selector
        self._index: MatchIndex | None = None  # for refiltering, made when it is first needed
        self._ticks = _NONE  # Q ticks of the plan above `position`
        self._unknown: list[Span] = []  # spans of the plan above `position` that are refiltered
        self._arrived = KnowledgeStream()  # what came in and is not delivered yet
        self._asked: list[Span] = []  # asked for since `_asked_at`
        self._asked_at = 0
        self._stride = REFILTER_US
        self._until = 0  # the end of what is refiltered at this time
        self._most = WINDOW_TICKS  # Q ticks in the next window, at most
        self._goal = 0  # the last Q tick of the window
        self._size = 0  # Q ticks that the window had at first
        self._cut = False  # that was more than could be held
        self._next: list[Span] | None = None  # the window as spans; None: to be found anew
        self._gap: Span | None = None  # lost just before the position, to be told before anything else
        self._lost = 0  # events in that gap, as far as they are remembered
        self._overflowed = False  # more came of what is refiltered than could be held: ask for less next time

    @property
    def idle(self) -> bool:
        """There is no plan: the next round may begin."""
        return self.position == self.end and not self.reading and self._gap is None

    @property
    def sent_to(self) -> int:
        """Up to here the subscriber was told all there was: less than the position before a gap is told."""
        return self.position if self._gap is None else self._gap[0]

    # ---- plans

    def plan(self, buffer: ReadBuffer) -> None:
        """The PFS remembers (position, buffer.end]."""
        if not self.reading or buffer.start != self.position or buffer.subscriber != self.subscriber:
            raise BugError("catchup: a read buffer that was not asked for")
        self.reading = False
        self.end = buffer.end
        self._next = None
        self._goal = self._size = 0
        self._ticks = buffer.ticks
        self._unknown = list(buffer.unknown)

    def refilter(self, end: int) -> None:
        """Nothing is remembered of (position, end]: take it whole."""
        if not self.idle:
            raise BugError("catchup: a plan is under way")
        self.end = end
        self._next = None
        self._ticks, self._unknown = _NONE, [(self.position, end)] if end > self.position else []

    # ---- curiosity

    def wants(self, now_us: int) -> list[Span]:
        """What to ask for now: the next window that is not here yet, unless it was asked for just now."""
        if self.idle or self.reading:
            return []
        if self._unknown and self._unknown[0][0] >= self._until:
            self._adapt()
        self._widen()
        window = self._window()
        missing = window
        if len(self._arrived):
            missing = [
                gap for start, end in window for gap in self._arrived.find(start, end, {}, whole=True)[1]
            ]
        if now_us - self._asked_at < ASK_AGAIN_US:
            missing = subtract(missing, self._asked)
            self._asked = union(self._asked + missing)
        else:
            self._asked = missing
        if missing:
            self._asked_at = now_us
        return missing

    def _adapt(self) -> None:
        """How much to refilter at a time: twice as much as last time, or what fitted then. The stretch stays
        where it is until all of it came: what moved on with every answer would be asked for in slivers."""
        if not self._overflowed:
            self._stride = min(self._stride * 2, MAX_REFILTER_US)
        self._until = self._unknown[0][0] + self._stride
        self._overflowed = False
        self._next = None

    def _widen(self) -> None:
        """Once half of the window's Q ticks are delivered, others join: twice as many as last time, or as
        many as fitted then. One by one they would be asked for in slivers."""
        left = int(np.searchsorted(self._ticks, self._goal, side="right"))
        if 2 * left > self._size or left == len(self._ticks):
            return
        self._most = max(1, self._size) if self._cut else min(2 * self._most, WINDOW_TICKS)
        ticks = self._ticks[: self._most]
        breaks = np.flatnonzero(np.diff(ticks) > NEAR_TICKS)
        if len(breaks) >= WINDOW_SPANS:
            ticks = ticks[: int(breaks[WINDOW_SPANS - 1]) + 1]
        self._goal, self._size, self._cut = int(ticks[-1]), len(ticks), False
        self._next = None

    def _cut_window(self, tick: int) -> None:
        """What came from there on cannot be held: only what is before it is wanted for now."""
        ahead = int(np.searchsorted(self._ticks, tick, side="right"))
        if self._goal > tick:
            self._goal, self._size, self._cut = tick, ahead, True
        if self._unknown and self._until > tick:
            self._stride, self._until, self._overflowed = max(1, tick - self._unknown[0][0]), tick, True
        self._asked = intersect(self._asked, 0, tick)
        self._next = None

    def _window(self) -> list[Span]:
        """What may be asked for: the next Q ticks and the next stretch to be refiltered."""
        if self._next is None:
            self._next = self._find_window()
        return self._next

    def _find_window(self) -> list[Span]:
        ticks = self._ticks[: int(np.searchsorted(self._ticks, self._goal, side="right"))]
        spans: list[Span] = []
        if len(ticks):
            breaks = np.flatnonzero(np.diff(ticks) > NEAR_TICKS) + 1
            firsts = ticks[np.concatenate(([0], breaks))].tolist()
            lasts = ticks[np.concatenate((breaks - 1, [len(ticks) - 1]))].tolist()
            spans = [(first - 1, last) for first, last in zip(firsts, lasts, strict=True)]
        spans += intersect(self._unknown, 0, self._until)
        return union(spans)[:WINDOW_SPANS]

    def pause(self) -> None:
        """There is no room: nothing is due until there is, and then all that is missing is asked for anew."""
        self._asked = []

    def next_deadline(self) -> int | None:
        return self._asked_at + ASK_AGAIN_US if self._asked and not self.idle else None

    def learn(self, segment: Segment, need: Mapping[int, int]) -> bool:
        """Knowledge from here or upstream. True if some of it was wanted."""
        if self.idle or self.reading or not segment.meets(need):
            return False
        window = self._window()
        if not overlaps(window, segment.start, segment.end):
            return False
        if self._arrived.size > HELD_BYTES and segment.start >= (self._next_q() or 0):
            self._cut_window(segment.start)
            return False
        return bool(self._arrived.accumulate(segment))

    # ---- delivery

    def advance(self, room: Callable[[], bool], send: Callable[[Message], None]) -> None:
        """Send in tick order what is here, while there is room. What is lost without an event in between, or
        the end of the plan, is one gap."""
        while not self.reading and self.position < self.end:
            at = self._next_q()
            if at is None:
                self.position = self.end
                break
            segment = self._arrived.around(at)
            if segment is None or not room():
                self.position = max(self.position, at - 1)  # silence: told with what comes next
                break
            message = self._take(segment)
            if message is not None:
                self._tell_gap(send)
                send(message)
            self._forget()
        if self.position == self.end and room():
            self._tell_gap(send)
        self._asked = intersect(self._asked, self.position, self.end)

    def _next_q(self) -> int | None:
        """The first tick above the position that is Q."""
        first = int(self._ticks[0]) if len(self._ticks) else None
        if self._unknown and (first is None or self._unknown[0][0] + 1 < first):
            first = self._unknown[0][0] + 1
        return first

    def _take(self, segment: Segment) -> Deliver | None:
        """Everything of the plan inside `segment`, which holds the next Q tick.

        The message reaches on to the tick before the next Q: in between is silence.
        """
        end = min(segment.end, self.end)
        self._next = None
        count = int(np.searchsorted(self._ticks, end, side="right"))
        ticks, self._ticks = self._ticks[:count], self._ticks[count:]
        spans = intersect(self._unknown, segment.start, end)
        self._unknown = intersect(self._unknown, end, self.end)
        following = self._next_q()
        before, self.position = self.position, self.end if following is None else following - 1
        if segment.lost:
            lost = union([*spans, *((tick - 1, tick) for tick in ticks.tolist())])
            self._gap = (lost[0][0] if self._gap is None else self._gap[0], lost[-1][1])
            self._lost += len(ticks)
            return None
        if segment.batch is None:
            return None
        rows = self._rows(segment, ticks, spans)
        if not len(rows):
            return None
        return Deliver(
            subscribers=(self.subscriber,),
            pubend=self.pubend,
            start=before,
            end=self.position,
            batch=segment.batch,
            rows=rows.astype(np.uint32),
        )

    def _tell_gap(self, send: Callable[[Message], None]) -> None:
        if self._gap is not None:
            (start, end), self._gap = self._gap, None
            events, self._lost = self._lost, 0
            send(
                DeliverGap(
                    subscribers=(self.subscriber,), pubend=self.pubend, start=start, end=end, events=events
                )
            )

    def _rows(self, segment: Segment, ticks: Numbers, spans: list[Span]) -> Numbers:
        """The rows of a segment that are for this subscriber."""
        batch = segment.batch
        if batch is None:
            return _NONE
        batch_ticks = batch.headers["tick"]
        at = np.searchsorted(batch_ticks, ticks)
        at = at[at < len(batch_ticks)]
        chosen_rows: Numbers = at[batch_ticks[at] == ticks[: len(at)]]
        if spans:
            chosen = np.zeros(len(batch_ticks), bool)
            chosen[chosen_rows] = True
            if self._index is None:
                self._index = MatchIndex()
                self._index.add(0, self._selector, 0)
            matched = np.zeros(len(batch_ticks), bool)
            for rows, _ in self._index.match(batch):
                matched[rows] = True
            inside = np.zeros(len(batch_ticks), bool)
            for start, end in spans:
                inside |= (batch_ticks > start) & (batch_ticks <= end)
            chosen |= matched & inside
            chosen_rows = np.flatnonzero(chosen)
        return chosen_rows

    def _forget(self) -> None:
        """Drop what lies below the position."""
        while len(self._arrived) and next(iter(self._arrived)).end <= self.position:
            self._arrived.forget_first()

    def check(self) -> None:
        self._arrived.check()
        if self.position > self.end:
            raise BugError("catchup: the position is beyond the plan")
        if self._next is not None and self._next != self._find_window():
            raise BugError("catchup: the window is that of another plan")
        if len(self._ticks) and not self.position < int(self._ticks[0]) <= int(self._ticks[-1]) <= self.end:
            raise BugError("catchup: Q ticks outside the plan")
        if self._unknown and not self.position <= self._unknown[0][0] < self._unknown[-1][1] <= self.end:
            raise BugError("catchup: spans to refilter outside the plan")
