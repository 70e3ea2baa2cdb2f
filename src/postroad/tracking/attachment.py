"""The attachment map: who was attached when (spec T4, T10; paper 3.2 and 4.3).

It tells a trace which subscribers, and which neighbours, to look for. Changes are appended with the clock of
this broker, while a trace reads with the time of the message; so it is read with the greatest skew on both
sides, and with the longest way of a message after it. Who is attached only later can still get the message
(a durable subscriber that catches up, a retransmission): `late` notes the message times so delivered, in
whole minutes, so that a long catch-up costs few changes. Where such notes are many, the nearest are joined:
that names somebody for more times than it should, never for fewer.

The map starts over with each process: a process that died detached everybody, and from the last thing it
stored until the next process began, nothing is known (`lost`). What it did then with messages of other times
is lost as well; so it says of which times it handles messages (`handled`) before it stores what it recorded.
Of times ahead of its clock that also tells how early such a message may have been passed on.
Where the log is damaged, somebody may have been attached whom it does not name: nothing is known from there
until the next process began.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from msgspec.structs import replace

from postroad.errors import BugError
from postroad.tracking.attachment_log import ASSUMED, BY_THE_CLOCK, DISK, SNAPSHOT, Change, Promise, wider
from postroad.tracking.intervals import Intervals
from postroad.tracking.moments import joined
from postroad.tracking.notes import HANDLED_US, MAX_LATE, LateNotes, Noted, add_note, last_noted, most_ahead
from postroad.tracking.settings import TrackingConfig
from postroad.units import MIB, MILLISECOND_US, SECOND_US

SUBSCRIBER: Final = "subscriber"
NEIGHBOUR: Final = "neighbour"
LOST: Final = (
    "its record of that time is not whole: a process died, or the disk failed, or nothing was tracked,"
    " or it is of a backup"
)
GROUP: Final = "group"  # a set of subscribers that is recorded with one key
AHEAD: Final = "ahead"  # the kind of a `handled` of long ago, of times ahead of the clock
MAX_BYTES: Final = 16 * MIB  # of intervals that ended, each of its name and `INTERVAL_BYTES`
MAX_LATE_BYTES: Final = 8 * MIB  # of notes of late deliveries, likewise
MAX_LOST: Final = 1024
MAX_HANDLED: Final = 256
MAX_AHEAD: Final = 256
MAX_ROUTINGS: Final = 64
LATE_ROUND_US: Final = 60 * SECOND_US
FINER: Final = 16  # parts of a coarser grain in which it ends
LOST_US: Final = 86_400 * SECOND_US  # a loss is noted anew after this, and remembered so much longer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole map of one moment, as changes. They are made when they are gone through, in any thread."""

    head: list[Change]
    intervals: list[tuple[str, Intervals]]  # by kind; nobody else has these
    late: list[tuple[str, dict[str, list[Noted]]]]  # likewise
    tail: list[Change]

    def __iter__(self) -> Iterator[Change]:
        yield from self.head
        # A detachment ends the last span of its name, so each span follows whole: they may overlap.
        for kind, intervals in self.intervals:
            for who, start, end in intervals.spans():
                yield Change(what="attach", at_us=start, kind=kind, who=who)
                if end is not None:
                    yield Change(what="detach", at_us=end, kind=kind, who=who)
        for kind, late in self.late:
            for who, notes in late.items():
                yield from (_change("late", kind, note, who) for note in notes)
        yield from self.tail


class AttachmentMap:
    """Every mutator returns the changes to store, none when nothing changed."""

    __slots__ = (
        "_ahead",
        "_clock_us",
        "_crashes",
        "_damaged_us",
        "_handled",
        "_intervals",
        "_late",
        "_promise",
        "_routings",
        "_sequence",
        "_unwritten",
        "begins_us",
        "forgot_us",
        "recorded_us",
        "settled_us",
        "stopped_us",
        "unrecorded_us",
        "widest",
    )

    def __init__(self) -> None:
        self._intervals: defaultdict[str, Intervals] = defaultdict(Intervals)  # by kind
        self._late: defaultdict[str, LateNotes] = defaultdict(LateNotes)  # likewise
        self._ahead: list[Noted] = []  # message times handled before their time, disjoint
        self._damaged_us: int | None = None  # changes since then are missing, until the next start
        self._handled: list[Change] = []  # noted of late, disjoint, by the message times
        self._routings: list[tuple[int, str]] = []  # since when that setting was in force; the latest
        self._promise: Promise | None = None  # of the last start
        self._sequence = 0  # likewise
        self.widest = Promise()  # of all starts
        self.begins_us: int | None = None  # complete from here on; None before the first start
        self.forgot_us: int | None = None  # retention dropped what is older; None while it has not
        self.settled_us = 0  # all that was recorded until then is stored, since the last start
        self.recorded_us = 0  # when all was recorded that the last start said may not be; 0 until it is
        self._clock_us = 0  # the latest that the clock was seen at
        self._crashes: list[tuple[int, int]] = []  # (from, to] of which nothing is known, the last one last
        self._unwritten: list[Noted] = []  # likewise, of any times: what a disk lost, or was handled late
        # What happened since then, before this process began, may not be recorded; None if all is.
        self.unrecorded_us: int | None = None
        self.stopped_us: int | None = None  # when the process before this one stopped in order, if it did

    @classmethod
    def of(cls, changes: Iterable[Change]) -> AttachmentMap:
        """The map that these changes make, from its beginning or a snapshot on."""
        made = cls()
        for change in changes:
            made._apply(change)
        return made

    # ---- the life of the process

    @classmethod
    def restored(
        cls,
        changes: Iterable[Change],
        *,
        last_stored_us: int,
        now_us: int,
        again_us: int = 0,
        routing: str = "",
        promise: Promise | None = None,
        sequence: int = 0,
    ) -> tuple[AttachmentMap, list[Change]]:
        """The map at the start of a process, from its log; and the changes that the start itself is.

        What the last process recorded before `last_stored_us` is stored; 0 if it stored nothing. `again_us`
        is that of `handled`, `routing` the setting of that name, `promise` and `sequence` those of the start.
        """
        made = cls()
        running_us: int | None = None  # when the last process began, if it has not said goodbye
        unrecorded_us = 0  # what it said of that
        seen_us = 0  # the latest that its clock was seen at
        for change in changes:
            made._apply(change)
            if change.what in ("start", "stop"):
                running_us = change.at_us if change.what == "start" else None
                made.stopped_us = change.at_us if change.what == "stop" else None
                unrecorded_us = change.until_us
            if change.what == "start" and change.who != SNAPSHOT:
                seen_us = change.at_us
            elif change.what in ("start", "attach", "settled", "recorded"):
                seen_us = max(seen_us, change.at_us)
        if running_us is None:
            news = made._end_all(now_us)
            made.unrecorded_us = unrecorded_us or None
        else:
            lost_us = max(running_us, last_stored_us, made.settled_us)
            seen_us = max(seen_us, lost_us)
            # If the clock was set back, it died at some time after the last that is known.
            until_us = now_us if seen_us <= now_us else seen_us + 2 * again_us + LATE_ROUND_US
            made.unrecorded_us = min(lost_us, now_us)
            # What a process had to record again is lost with it, unless it had done so and stored that.
            if unrecorded_us and not 0 < made.recorded_us < lost_us:
                made.unrecorded_us = min(unrecorded_us, made.unrecorded_us)
            news = made._end_all(until_us)
            news.append(made._apply(Change(what="lost", at_us=lost_us, until_us=until_us)))
            for handled in made._handled:
                if handled.noted_us >= lost_us - again_us:
                    news += made.lose(handled.at_us, handled.until_us, now_us)
        started = Change(
            what="start",
            at_us=now_us,
            kind=routing,
            until_us=made.unrecorded_us or 0,
            noted_us=made.stopped_us or 0,
            promise=promise,
            sequence=sequence,
        )
        news.append(made._apply(started))
        return made, news

    def stopped(self, now_us: int, unrecorded_us: int | None = None) -> list[Change]:
        """The process ends in order, with everything stored that is recorded."""
        stop = Change(what="stop", at_us=now_us, until_us=unrecorded_us or 0)
        return [*self._end_all(now_us), self._apply(stop)]

    def _end_all(self, now_us: int) -> list[Change]:
        news: list[Change] = []
        for kind, who in self:
            news += self.detached(kind, who, now_us)
        return news

    # ---- changes

    def attached(self, kind: str, who: str, now_us: int) -> list[Change]:
        if who in self._intervals[kind].now:
            return []
        return [self._apply(Change(what="attach", at_us=now_us, kind=kind, who=who))]

    def detached(self, kind: str, who: str, now_us: int) -> list[Change]:
        if who not in self._intervals[kind].now:
            return []
        return [self._apply(Change(what="detach", at_us=now_us, kind=kind, who=who))]

    def late(self, kind: str, who: str, lo_ms: int, hi_ms: int, now_us: int) -> list[Change]:
        """Messages of these times were handed over although they are older than the skew bound."""
        start, end = _rounded(lo_ms, hi_ms, LATE_ROUND_US, now_us)
        for note in self._late[kind].of(who):
            if note.start_us <= start and end <= note.end_us and note.kept_until_us >= now_us:
                return []
        change = Change(what="late", at_us=start, until_us=end, kind=kind, who=who, noted_us=now_us)
        return [self._apply(change)]

    def handled(
        self, lo_ms: int, hi_ms: int, now_us: int, again_us: int, grain_us: int = LATE_ROUND_US
    ) -> list[Change]:
        """The broker handles messages of these times at another time, `now_us`. The map notes it, and does so
        anew after `again_us`. It notes nothing where those times count as lost anyway, and the map already
        knows that messages are so much ahead."""
        start, end = _rounded(lo_ms, hi_ms, grain_us, now_us)
        said_us = start  # until there it was said
        for change in self._handled[slice(*self._handled_in(start, end))]:
            if change.at_us <= said_us and change.noted_us > now_us - again_us:
                said_us = change.until_us
        if end <= said_us:
            return []
        ahead = any(
            note.start_us <= start and end <= note.end_us and end - now_us <= note.lead_us
            for note in self._ahead
        )
        if (ahead or end <= now_us) and self._lost_whole(start, end, now_us):
            return []
        return [self._apply(Change(what="handled", at_us=start, until_us=end, noted_us=now_us))]

    def _handled_in(self, start_us: int, end_us: int) -> tuple[int, int]:
        """From which to before which of the notes are of any of these times."""
        first = bisect_right(self._handled, start_us, key=lambda change: change.until_us)
        return first, bisect_left(self._handled, end_us, key=lambda change: change.at_us)

    def lose_handled(
        self, lo_ms: int, hi_ms: int, now_us: int, grain_us: int = LATE_ROUND_US
    ) -> list[Change]:
        """The disk did not take messages of these times, which `handled` has noted."""
        return self.lose(*_rounded(lo_ms, hi_ms, grain_us, now_us), now_us)

    def lose(self, start_us: int, end_us: int, now_us: int) -> list[Change]:
        """What was recorded then could not be stored. Times that follow each other are one."""
        start_us, end_us = min(start_us, end_us), max(start_us, end_us)
        if self._lost_whole(start_us, end_us, now_us):
            return []
        lost = Change(what="lost", kind=DISK, at_us=start_us, until_us=end_us, noted_us=now_us)
        return [self._apply(lost)]

    def _lost_whole(self, start_us: int, end_us: int, now_us: int) -> bool:
        """One that was noted long ago is forgotten before what is lost now may be."""
        return any(start <= start_us and end_us <= end for start, end in self._crashes) or any(
            note.start_us <= start_us and end_us <= note.end_us and note.noted_us + LOST_US >= now_us
            for note in self._unwritten
        )

    def settled(self, now_us: int) -> list[Change]:
        """All that was recorded until now is stored."""
        return [self._apply(Change(what="settled", at_us=now_us))]

    def recorded(self, now_us: int) -> list[Change]:
        """What `unrecorded_us` says may not be recorded is, though it may not be stored."""
        if self.unrecorded_us is None:
            return []
        return [self._apply(Change(what="recorded", at_us=now_us))]

    def _apply(self, change: Change) -> Change:
        if change.what in BY_THE_CLOCK:
            self._clock_us = max(change.at_us, self._clock_us)
        match change.what:
            case "attach":
                self._intervals[change.kind].attach(change.who, change.at_us)
            case "detach":
                self._intervals[change.kind].detach(change.who, change.at_us)
            case "late":
                # Its own end is when a note was made that does not say.
                noted = Noted(change.at_us, change.until_us, change.noted_us or change.until_us)
                self._late[change.kind].add(change.who, noted)
            case "lost" if change.kind == DISK:
                # One that does not say was noted after all that comes before it.
                noted_us = change.noted_us or max(change.until_us, self._clock_us)
                self._add_unwritten(Noted(change.at_us, change.until_us, noted_us))
            case "lost":
                if len(self._crashes) >= MAX_LOST:
                    self._crashes = joined(self._crashes, MAX_LOST - 1)
                self._crashes.append((change.at_us, change.until_us))
                self._clock_us = max(change.until_us, self._clock_us)
            case "handled":
                if change.until_us > change.noted_us:
                    early = Noted(change.at_us, change.until_us, change.noted_us)
                    add_note(self._ahead, early, MAX_AHEAD, most_ahead)
                if change.kind != AHEAD:
                    self._add_handled(change)
            case "settled":
                self.settled_us = change.at_us
            case "recorded":
                self.recorded_us = change.at_us
            case "begin":
                self.forgot_us = max(change.at_us, self.forgot_us or 0)
                self.begins_us = max(change.at_us, self.begins_us or 0)
            case "damaged":
                self._routed(change.at_us, "")
                self.widest = wider(self.widest, ASSUMED)
                if self._damaged_us is None:
                    self._damaged_us = change.at_us
            case "start":
                self._routed(change.at_us, change.kind)
                self._promise = change.promise
                self._sequence = change.sequence
                self.widest = wider(self.widest, change.promise or ASSUMED)
                # A clock that was ahead before says nothing about what is recorded from now on.
                first_us = change.at_us if self.begins_us is None else min(change.at_us, self.begins_us)
                self.begins_us = max(first_us, self.forgot_us or 0)
                if change.who != SNAPSHOT:
                    self._begin_anew(change.at_us)
        return change

    def _begin_anew(self, now_us: int) -> None:
        """What the process before has stored, or was lost with it, is settled; times of its clock, which may
        have been ahead, say nothing about this one. Whoever is there is named again."""
        self.settled_us = self.recorded_us = 0
        self._handled = []
        if self._damaged_us is not None:
            self._add_unwritten(Noted(self._damaged_us, now_us, now_us))
            self._damaged_us = None

    def _add_unwritten(self, note: Noted) -> None:
        """A disk that stays full costs one span. What was lost on other days is forgotten on other days."""
        joint, others = [note], []
        for other in self._unwritten:
            near = max(other.start_us, note.start_us) - min(other.end_us, note.end_us) <= LATE_ROUND_US
            within = note.start_us <= other.start_us and other.end_us <= note.end_us
            if (near and abs(other.noted_us - note.noted_us) <= LOST_US) or (
                within and other.noted_us <= note.noted_us
            ):
                joint.append(other)
            else:
                others.append(other)
        self._unwritten = sorted([*others, _merged(joint)], key=lambda other: other.start_us)
        if len(self._unwritten) > MAX_LOST:
            at = _nearest([(other.start_us, other.end_us, other.noted_us) for other in self._unwritten])
            self._unwritten[at : at + 2] = [_merged(self._unwritten[at : at + 2])]

    def _routed(self, at_us: int, routing: str) -> None:
        if not self._routings or self._routings[-1][1] != routing:
            # If the clock was set back, the setting before was in force at later times than that.
            self._routings.append((max(at_us, self._clock_us), routing))
            if len(self._routings) > MAX_ROUTINGS:
                self._routings[:2] = [(self._routings[1][0], "")]

    def _add_handled(self, change: Change) -> None:
        """It takes the place of earlier notes of its times; where there are too many, two are joined."""
        first, after = self._handled_in(change.at_us, change.until_us)
        touching = self._handled[first:after]
        # By a clock that was set back since: both count for as long as either.
        noted_us = max([change.noted_us, *(earlier.noted_us for earlier in touching)])
        before = [
            replace(earlier, until_us=change.at_us) for earlier in touching if earlier.at_us < change.at_us
        ]
        behind = [
            replace(earlier, at_us=change.until_us)
            for earlier in touching
            if earlier.until_us > change.until_us
        ]
        self._handled[first:after] = [*before, replace(change, noted_us=noted_us), *behind]
        if len(self._handled) > MAX_HANDLED:
            self._handled = [earlier for earlier in self._handled if earlier.noted_us > noted_us - HANDLED_US]
        if len(self._handled) > MAX_HANDLED:
            at = _nearest([(earlier.at_us, earlier.until_us, earlier.noted_us) for earlier in self._handled])
            self._handled[at : at + 2] = [_joined(*self._handled[at : at + 2])]

    # ---- reading

    def at(self, kind: str, time_ms: int, *, skew_us: int, delay_us: int = 0) -> list[str]:
        """Who may have been handed a message of that time, sorted.

        It was handed over at some moment of this broker's clock from time - skew to time + skew + delay.
        """
        first = time_ms * MILLISECOND_US - skew_us
        last = time_ms * MILLISECOND_US + MILLISECOND_US - 1 + skew_us + delay_us
        return sorted(self._intervals[kind].at(first, last) | self._late[kind].at(first, last))

    def since(self, kind: str, time_ms: int, *, skew_us: int) -> list[str]:
        """Who was attached at any moment since a message of that time was made, sorted."""
        return sorted(self._intervals[kind].since(self._made_us(time_ms) - skew_us))

    def _made_us(self, time_ms: int) -> int:
        """Not later than that, by this broker's clock, a message of that time was made."""
        time_us = time_ms * MILLISECOND_US
        return time_us - max(
            (lead for first, last, lead in self.leads() if first <= time_us <= last), default=0
        )

    def leads(self) -> Iterator[tuple[int, int, int]]:
        """(from, to, how much) messages of which times were ahead of the clock."""
        return ((note.start_us, note.end_us, note.lead_us) for note in self._ahead)

    def routings_since(self, time_ms: int, *, skew_us: int) -> set[str]:
        """What `routing` was set to at any moment since a message of that time was made; "" if unknown."""
        first = self._made_us(time_ms) - skew_us
        return {routing for routing, last_us in self.routings() if last_us is None or first <= last_us}

    def routings(self) -> Iterator[tuple[str, int | None]]:
        """What `routing` was set to, "" if unknown; and the last moment that it was, None while it is."""
        ends = [at_us - 1 for at_us, _ in self._routings[1:]]
        return zip((routing for _, routing in self._routings), [*ends, None], strict=False)

    def spans(self) -> Iterator[tuple[str, str, int, int | None, bool]]:
        """(kind, who, from, to or None while it lasts, whether it is of times of messages delivered late)"""
        for kind, intervals in sorted(self._intervals.items()):
            yield from ((kind, who, start, end, False) for who, start, end in intervals.spans())
        for kind, notes in sorted(self._late.items()):
            yield from ((kind, who, note.start_us, note.end_us, True) for who, note in notes.items())

    @property
    def lost(self) -> list[tuple[int, int]]:
        """(from, to] of which nothing is known"""
        return [*self._crashes, *((note.start_us, note.end_us) for note in self._unwritten)]

    def lost_at(self, time_ms: int, *, skew_us: int, delay_us: int = 0) -> bool:
        """Whether what happened to a message of that time may have died with a process."""
        first = time_ms * MILLISECOND_US - skew_us
        last = time_ms * MILLISECOND_US + skew_us + delay_us
        return any(start < last and first <= end for start, end in self.lost)

    # ---- retention

    @property
    def crowded(self) -> bool:
        return sum(intervals.ended_bytes for intervals in self._intervals.values()) > MAX_BYTES

    @property
    def group_bytes(self) -> int:
        """Of the intervals of groups."""
        groups = self._intervals[GROUP]
        return groups.attached_bytes + groups.ended_bytes

    def forget(self, before_us: int, now_us: int) -> int:
        """Drop what ended before; returns how much went. `snapshot` is then what to store.

        A loss goes by when it was noted, if its times do not end in between: those of a clock that was behind
        do, while times to come are not lost for longer than any other.
        """
        before = self._count
        for intervals in self._intervals.values():
            intervals.forget(before_us)
        for notes in self._late.values():
            notes.forget(before_us)
        self._coarsen()
        self._ahead = [note for note in self._ahead if note.end_us >= before_us]
        self._crashes = [span for span in self._crashes if span[1] >= before_us]
        self._unwritten = [
            note
            for note in self._unwritten
            if note.noted_us + LOST_US >= before_us or before_us <= note.end_us <= now_us
        ]
        return before - self._count

    @property
    def _count(self) -> int:
        return len(self) + len(self._ahead) + len(self._crashes) + len(self._unwritten)

    def _coarsen(self) -> None:
        """Notes of late deliveries within their bound, and be it one for each name."""
        limit = MAX_LATE
        while limit > 1 and sum(notes.bytes for notes in self._late.values()) > MAX_LATE_BYTES:
            limit //= 2
            for notes in self._late.values():
                notes.coarsen(limit)

    def begin_at(self, at_us: int) -> list[Change]:
        """Retention reached this far."""
        if self.forgot_us is not None and at_us <= self.forgot_us:
            return []
        return [self._apply(Change(what="begin", at_us=at_us))]

    @property
    def bytes(self) -> int:
        """About as many as its snapshot has."""
        late = sum(notes.bytes for notes in self._late.values())
        return late + sum(
            intervals.attached_bytes + 2 * intervals.ended_bytes for intervals in self._intervals.values()
        )

    def snapshot(self, start_us: int) -> Snapshot:
        """The whole map as changes, that end with this start of the process: to replace its log with. This
        takes a copy and no more, some milliseconds for a map that is full."""
        routings = self._routings or [(0, "")]
        head = [
            Change(what="start", at_us=at_us, kind=routing, promise=self.widest)
            for at_us, routing in [(self.begins_us or start_us, routings[0][1]), *routings[1:]]
        ]
        if self.forgot_us is not None:
            head.append(Change(what="begin", at_us=self.forgot_us))
        head += [Change(what="lost", at_us=start, until_us=end) for start, end in self._crashes]
        head += [_change("lost", DISK, note) for note in self._unwritten]
        head += [_change("handled", AHEAD, note) for note in self._ahead]
        head += self._handled
        if self.settled_us:
            head.append(Change(what="settled", at_us=self.settled_us))
        if self.recorded_us:
            head.append(Change(what="recorded", at_us=self.recorded_us))
        # After all starts: it is the time of none of them.
        seen = Change(what="seen", at_us=self._clock_us)
        started = Change(
            what="start",
            at_us=start_us,
            kind=routings[-1][1],
            who=SNAPSHOT,
            until_us=self.unrecorded_us or 0,
            noted_us=self.stopped_us or 0,
            promise=self._promise,
            sequence=self._sequence,
        )
        return Snapshot(
            head=head,
            intervals=[(kind, intervals.copy()) for kind, intervals in sorted(self._intervals.items())],
            late=[(kind, notes.copy()) for kind, notes in sorted(self._late.items())],
            tail=[seen, started],
        )

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """(kind, who) of those attached now."""
        return iter(
            sorted((kind, who) for kind, intervals in self._intervals.items() for who in intervals.now)
        )

    def __len__(self) -> int:
        return sum(map(len, self._intervals.values())) + sum(map(len, self._late.values()))

    def check(self) -> None:
        for intervals in self._intervals.values():
            intervals.check()
        for notes in self._late.values():
            notes.check()
        if any(earlier.until_us > later.at_us for earlier, later in pairwise(self._handled)):
            raise BugError("notes of what was handled are not disjoint and in order")


def read_bounds(config: TrackingConfig, attachments: AttachmentMap) -> tuple[int, int]:
    """The skew and the jitter to read it with: a process before this one may have had wider bounds."""
    widest = attachments.widest
    return max(config.skew_us, widest.skew_us), max(config.jitter_us, widest.jitter_us)


def _joined(earlier: Change, later: Change) -> Change:
    return Change(
        what=earlier.what,
        at_us=min(earlier.at_us, later.at_us),
        until_us=max(earlier.until_us, later.until_us),
        noted_us=max(earlier.noted_us, later.noted_us),
    )


def _change(what: str, kind: str, note: Noted, who: str = "") -> Change:
    return Change(
        what=what, kind=kind, who=who, at_us=note.start_us, until_us=note.end_us, noted_us=note.noted_us
    )


def _merged(notes: list[Noted]) -> Noted:
    return last_noted(sorted(notes, key=lambda note: note.start_us))


def _nearest(spans: list[tuple[int, int, int]]) -> int:
    """Of which two that follow each other the first is nearest to the second, by its times and by when it
    was noted."""
    apart = [
        (max(0, start_us - end_us) + abs(noted_us - before_us), at)
        for at, ((_, end_us, before_us), (start_us, _, noted_us)) in enumerate(pairwise(spans))
    ]
    return min(apart)[1]


def _rounded(lo_ms: int, hi_ms: int, grain_us: int, now_us: int) -> tuple[int, int]:
    """The whole minutes, or whatever the grain is, that these times are in. A coarse one that now is in ends
    soon if all of them are past, and begins now if none is: it is not for what comes in its time."""
    lo_us, hi_us = lo_ms * MILLISECOND_US, hi_ms * MILLISECOND_US
    start_us, end_us = lo_us // grain_us * grain_us, (hi_us // grain_us + 1) * grain_us
    fine_us = max(grain_us // FINER, LATE_ROUND_US)
    if hi_us <= now_us:
        end_us = min(end_us, (now_us // fine_us + 1) * fine_us)
    elif lo_us > now_us:
        start_us = max(start_us, now_us // LATE_ROUND_US * LATE_ROUND_US)
    return start_us, end_us
