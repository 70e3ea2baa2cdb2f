"""The attachment map: who was attached when (spec T4, T10; paper 3.2 and 4.3).

It tells a trace which subscribers, and which neighbours, to look for. Changes are appended with the clock of
this broker, while a trace reads with the time of the message; so it is read with the greatest skew on both
sides, and with the longest way of a message after it. Who is attached only later can still get the message
(a durable subscriber that catches up, a retransmission): `late` notes the message times so delivered, in
whole minutes, so that a long catch-up costs few changes.

The map starts over with each process: a process that died detached everybody, and from the last thing it
stored until the next process began, nothing is known (`lost`). What it did then with messages of other times
is lost as well; so it says of which times it handles messages (`handled`) before it stores what it recorded.
Where the log is damaged, somebody may have been attached whom it does not name: nothing is known from there
until the next process began.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from typing import Final

import google_crc32c
import msgspec

from postroad.errors import BugError
from postroad.units import MILLISECOND_US, SECOND_US

SUBSCRIBER: Final = "subscriber"
NEIGHBOUR: Final = "neighbour"
LOST: Final = (
    "its record of that time is not whole: a process died, or the disk failed, or nothing was tracked"
)
GROUP: Final = "group"  # a set of subscribers that is recorded with one key
DISK: Final = "disk"  # the kind of a `lost` that is no crash
MAX_INTERVALS: Final = 200_000
MAX_LOST: Final = 1024
MAX_HANDLED: Final = 256
MAX_ROUTINGS: Final = 64
HANDLED_US: Final = 3_600 * SECOND_US  # by then what was noted before is stored
LATE_ROUND_US: Final = 60 * SECOND_US
_FRAME: Final = struct.Struct("<II")  # length and crc32c of a change
_BY_THE_CLOCK: Final = (
    "start",
    "stop",
    "attach",
    "detach",
    "damaged",
    "settled",
)  # `at_us` is when it happened


class Change(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One line of the map's log.

    what: attach or detach (who, at), late (who, message times from at to until), start and stop of the
    process (at; of a start, `kind` is the setting `routing`), lost (from at to until nothing is known), begin
    (nothing older than at is kept), handled (message times from at to until, out of their time, noted then),
    damaged (changes from at on are missing), settled (all that was recorded before at is stored).
    """

    what: str
    at_us: int
    kind: str = ""
    who: str = ""
    until_us: int = 0
    noted_us: int = 0


class _Interval(msgspec.Struct):
    start_us: int
    end_us: int | None  # None while attached


_CHANGES: Final = msgspec.msgpack.Decoder(Change)
_ENCODER: Final = msgspec.msgpack.Encoder()
# How an encoded change begins: an array of some fields, of which the first is one of these words.
_BODY: Final = re.compile(
    rb"[\x92-\x9f][\xa4-\xa8](?:attach|detach|late|start|stop|lost|begin|handled|damaged|settled)"
)


def encode_changes(changes: Iterable[Change]) -> bytes:
    out: list[bytes] = []
    for change in changes:
        body = _ENCODER.encode(change)
        out += (_FRAME.pack(len(body), int(google_crc32c.value(body))), body)
    return b"".join(out)


def decode_changes(data: bytes) -> tuple[list[Change], int]:
    """The changes of a log up to its end or the first that is torn; and how many bytes were whole."""
    changes: list[Change] = []
    position = 0
    while (found := _change_at(data, position)) is not None:
        change, position = found
        changes.append(change)
    return changes, position


def _change_at(data: bytes, position: int) -> tuple[Change, int] | None:
    """The change that begins there, and where it ends."""
    if position + _FRAME.size > len(data):
        return None
    length, crc = _FRAME.unpack_from(data, position)
    body = data[position + _FRAME.size : position + _FRAME.size + length]
    if len(body) < length or int(google_crc32c.value(body)) != crc:
        return None
    try:
        return _CHANGES.decode(body), position + _FRAME.size + length
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def salvaged_changes(data: bytes) -> tuple[list[Change], list[str]]:
    """All changes of a log that are whole, with `damaged` in place of others; and what was wrong, if so.

    A process that dies tears the last change. That is no damage: its death is known by the missing `stop`.
    """
    changes, position = decode_changes(data)
    problems: list[str] = []
    while position < len(data):
        for body in _BODY.finditer(data, position + _FRAME.size):
            begin = body.start() - _FRAME.size
            if _change_at(data, begin) is not None:
                break
        else:
            problems.append(f"torn at byte {position} of {len(data)}; the rest is cut off")
            return changes, problems
        problems.append(f"damaged at byte {position}; skipped {begin - position} bytes")
        before = (change.at_us for change in reversed(changes) if change.what in _BY_THE_CLOCK)
        changes.append(Change(what="damaged", at_us=next(before, 0)))
        more, whole = decode_changes(data[begin:])
        changes += more
        position = begin + whole
    return changes, problems


def change_extents(data: bytes) -> list[int]:
    """Where each encoded change ends, so that they can be split."""
    ends: list[int] = []
    position = 0
    while position < len(data):
        position += _FRAME.size + int.from_bytes(data[position : position + 4], "little")
        ends.append(position)
    return ends


class AttachmentMap:
    """Every mutator returns the changes to store, none when nothing changed."""

    __slots__ = (
        "_count",
        "_damaged_us",
        "_handled",
        "_intervals",
        "_late",
        "_routings",
        "_settled_us",
        "_unwritten",
        "begins_us",
        "forgot_us",
        "lost",
        "unrecorded_us",
    )

    def __init__(self) -> None:
        self._intervals: dict[tuple[str, str], list[_Interval]] = {}  # (kind, who) -> in order of time
        self._late: dict[tuple[str, str], list[_Interval]] = {}  # message times delivered late, closed
        self._count = 0  # intervals in both
        self._damaged_us: int | None = None  # changes since then are missing, until the next start
        self._handled: list[Change] = []  # noted of late, disjoint, by the message times
        self._routings: list[tuple[int, str]] = []  # since when that setting was in force; the latest
        self.begins_us: int | None = None  # complete from here on; None before the first start
        self.forgot_us: int | None = None  # retention dropped what is older; None while it has not
        self.lost: list[tuple[int, int]] = []  # (from, to] of which nothing is known
        self._settled_us = 0  # all that was recorded until then is stored
        self._unwritten: list[tuple[int, int]] = []  # those of them that a disk lost
        # What the process before this one recorded since then may have died with it; None if nothing did.
        self.unrecorded_us: int | None = None

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
    ) -> tuple[AttachmentMap, list[Change]]:
        """The map at the start of a process, from its log; and the changes that the start itself is.

        What the last process recorded before `last_stored_us` is stored. `again_us` is that of `handled`,
        `routing` the setting of that name.
        """
        made = cls()
        running_us: int | None = None  # when the last process began, if it has not said goodbye
        for change in changes:
            made._apply(change)
            if change.what in ("start", "stop"):
                running_us = change.at_us if change.what == "start" else None
        news = made._end_all(now_us)
        if running_us is not None:
            stored_us = max(running_us, last_stored_us, made._settled_us)
            lost_us = made.unrecorded_us = min(stored_us, now_us)
            # What a process recorded again at its start is lost with it if it stored nothing after that.
            crashes = {until_us: from_us for from_us, until_us in made.lost}
            while crashes.get(made.unrecorded_us, made.unrecorded_us) < made.unrecorded_us:
                made.unrecorded_us = crashes[made.unrecorded_us]
            news.append(made._apply(Change(what="lost", at_us=lost_us, until_us=now_us)))
            for one in made._handled:
                if one.noted_us >= lost_us - again_us:
                    news.append(made._apply(Change(what="lost", at_us=one.at_us, until_us=one.until_us)))
        news.append(made._apply(Change(what="start", at_us=now_us, kind=routing)))
        return made, news

    def stopped(self, now_us: int) -> list[Change]:
        """The process ends in order, with everything stored."""
        return [*self._end_all(now_us), Change(what="stop", at_us=now_us)]

    def _end_all(self, now_us: int) -> list[Change]:
        attached = [name for name, spans in sorted(self._intervals.items()) if spans[-1].end_us is None]
        news: list[Change] = []
        for kind, who in attached:
            news += self.detached(kind, who, now_us)
        return news

    # ---- changes

    def attached(self, kind: str, who: str, now_us: int) -> list[Change]:
        spans = self._intervals.get((kind, who))
        if spans and spans[-1].end_us is None:
            return []
        return [self._apply(Change(what="attach", at_us=now_us, kind=kind, who=who))]

    def detached(self, kind: str, who: str, now_us: int) -> list[Change]:
        spans = self._intervals.get((kind, who))
        if not spans or spans[-1].end_us is not None:
            return []
        return [self._apply(Change(what="detach", at_us=now_us, kind=kind, who=who))]

    def late(self, kind: str, who: str, lo_ms: int, hi_ms: int) -> list[Change]:
        """Messages of these times were handed over although they are older than the skew bound."""
        start = lo_ms * MILLISECOND_US // LATE_ROUND_US * LATE_ROUND_US
        end = (hi_ms * MILLISECOND_US // LATE_ROUND_US + 1) * LATE_ROUND_US
        if any(
            span.start_us <= start and end <= (span.end_us or 0) for span in self._late.get((kind, who), ())
        ):
            return []
        return [self._apply(Change(what="late", at_us=start, until_us=end, kind=kind, who=who))]

    def handled(self, lo_ms: int, hi_ms: int, now_us: int, again_us: int) -> list[Change]:
        """Messages of these times are handled at this other time; said again after `again_us`."""
        start = lo_ms * MILLISECOND_US // LATE_ROUND_US * LATE_ROUND_US
        end = (hi_ms * MILLISECOND_US // LATE_ROUND_US + 1) * LATE_ROUND_US
        for one in self._handled:
            if one.at_us <= start and end <= one.until_us and one.noted_us > now_us - again_us:
                return []
        return [self._apply(Change(what="handled", at_us=start, until_us=end, noted_us=now_us))]

    def lose(self, start_us: int, end_us: int) -> list[Change]:
        """What was recorded then could not be stored. Times that follow each other are one."""
        start_us, end_us = min(start_us, end_us), max(start_us, end_us)
        if any(start <= start_us and end_us <= end for start, end in self.lost):
            return []
        return [self._apply(Change(what="lost", kind=DISK, at_us=start_us, until_us=end_us))]

    def settled(self, now_us: int) -> list[Change]:
        """All that was recorded until now is stored."""
        return [self._apply(Change(what="settled", at_us=now_us))]

    def _apply(self, change: Change) -> Change:
        name = (change.kind, change.who)
        match change.what:
            case "attach":
                self._intervals.setdefault(name, []).append(_Interval(change.at_us, None))
                self._count += 1
            case "detach":
                spans = self._intervals.get(name)
                if spans and spans[-1].end_us is None:
                    spans[-1].end_us = max(change.at_us, spans[-1].start_us)
            case "late":
                self._add_late(name, change.at_us, change.until_us)
            case "lost":
                self._add_lost(change)
            case "handled":
                self._add_handled(change)
            case "settled":
                self._settled_us = change.at_us
            case "begin":
                self.forgot_us = max(change.at_us, self.forgot_us or 0)
                self.begins_us = max(change.at_us, self.begins_us or 0)
            case "damaged":
                self._routed(change.at_us, "")
                if self._damaged_us is None:
                    self._damaged_us = change.at_us
            case "start":
                self._routed(change.at_us, change.kind)
                if self.begins_us is None:
                    self.begins_us = change.at_us
                if self._damaged_us is not None:  # whoever is there is named again
                    self.lost = [*self.lost, (self._damaged_us, change.at_us)][-MAX_LOST:]
                    self._damaged_us = None
        return change

    def _add_lost(self, change: Change) -> None:
        span = (change.at_us, change.until_us)
        if change.kind == DISK:
            # A disk that stays full costs one span. Crashes are told apart, by their ends (`restored`).
            first, last = span[0] - LATE_ROUND_US, span[1] + LATE_ROUND_US
            touching = [held for held in self._unwritten if held[0] <= last and first <= held[1]]
            span = (min([span, *touching])[0], max(end for _, end in [span, *touching]))
            self._unwritten = [*(held for held in self._unwritten if held not in touching), span][-MAX_LOST:]
            self.lost = [held for held in self.lost if held not in touching]
        self.lost = [*self.lost, span][-MAX_LOST:]

    def _routed(self, at_us: int, routing: str) -> None:
        if not self._routings or self._routings[-1][1] != routing:
            self._routings.append((at_us, routing))
            if len(self._routings) > MAX_ROUTINGS:
                self._routings[:2] = [(self._routings[1][0], "")]

    def _add_handled(self, change: Change) -> None:
        """Joined with what it touches, and where there are too many, the nearest two are joined."""
        recent = [one for one in self._handled if one.noted_us > change.noted_us - HANDLED_US]
        held: list[Change] = []
        for one in sorted([*recent, change], key=lambda one: one.at_us):
            if held and one.at_us <= held[-1].until_us:
                held[-1] = _joined(held[-1], one)
            else:
                held.append(one)
        if len(held) > MAX_HANDLED:
            at = min(range(1, len(held)), key=lambda at: held[at].at_us - held[at - 1].until_us)
            held[at - 1 : at + 1] = [_joined(held[at - 1], held[at])]
        self._handled = held

    def _add_late(self, name: tuple[str, str], start: int, end: int) -> None:
        held = self._late.get(name, [])
        apart = [span for span in held if (span.end_us or 0) < start or span.start_us > end]
        touching = [span for span in held if not ((span.end_us or 0) < start or span.start_us > end)]
        merged = _Interval(
            min([start, *(span.start_us for span in touching)]),
            max([end, *(span.end_us or 0 for span in touching)]),
        )
        self._late[name] = sorted([*apart, merged], key=lambda span: span.start_us)
        self._count += len(self._late[name]) - len(held)

    # ---- reading

    def at(self, kind: str, time_ms: int, *, skew_us: int, delay_us: int = 0) -> list[str]:
        """Who may have been handed a message of that time, sorted.

        It was handed over at some moment of this broker's clock from time - skew to time + skew + delay.
        """
        first = time_ms * MILLISECOND_US - skew_us
        last = time_ms * MILLISECOND_US + MILLISECOND_US - 1 + skew_us + delay_us
        found = {
            who
            for (of_kind, who), spans in self._intervals.items()
            if of_kind == kind and _overlaps(spans, first, last)
        }
        found |= {
            who
            for (of_kind, who), spans in self._late.items()
            if of_kind == kind and _overlaps(spans, first, last)
        }
        return sorted(found)

    def since(self, kind: str, time_ms: int, *, skew_us: int) -> list[str]:
        """Who was attached at any moment since a message of that time was made, sorted."""
        first = time_ms * MILLISECOND_US - skew_us
        return sorted(
            who
            for (of_kind, who), spans in self._intervals.items()
            if of_kind == kind and (spans[-1].end_us is None or first <= spans[-1].end_us)
        )

    def routings_since(self, time_ms: int, *, skew_us: int) -> set[str]:
        """What `routing` was set to at any moment since a message of that time was made; "" if unknown."""
        first = time_ms * MILLISECOND_US - skew_us
        found: set[str] = set()
        for at_us, routing in reversed(self._routings):
            found.add(routing)
            if at_us <= first:
                break
        return found

    def spans(self) -> Iterator[tuple[str, str, int, int | None, bool]]:
        """(kind, who, from, to or None while it lasts, whether it is of times of messages delivered late)"""
        for late, table in ((False, self._intervals), (True, self._late)):
            for (kind, who), spans in sorted(table.items()):
                for span in spans:
                    yield kind, who, span.start_us, span.end_us, late

    def lost_at(self, time_ms: int, *, skew_us: int, delay_us: int = 0) -> bool:
        """Whether what happened to a message of that time may have died with a process."""
        first = time_ms * MILLISECOND_US - skew_us
        last = time_ms * MILLISECOND_US + skew_us + delay_us
        return any(start < last and first <= end for start, end in self.lost)

    # ---- retention

    @property
    def crowded(self) -> bool:
        return self._count > MAX_INTERVALS

    def forget(self, before_us: int) -> int:
        """Drop what ended before; returns how many intervals went. `snapshot` is then what to store."""
        dropped = 0
        for table in (self._intervals, self._late):
            for name in sorted(table):
                kept = [span for span in table[name] if span.end_us is None or span.end_us >= before_us]
                dropped += len(table[name]) - len(kept)
                if kept:
                    table[name] = kept
                else:
                    del table[name]
        self._count -= dropped
        self.lost = [span for span in self.lost if span[1] >= before_us]
        self._unwritten = [span for span in self._unwritten if span[1] >= before_us]
        return dropped

    def begin_at(self, at_us: int) -> list[Change]:
        """Retention reached this far."""
        if self.forgot_us is not None and at_us <= self.forgot_us:
            return []
        return [self._apply(Change(what="begin", at_us=at_us))]

    def snapshot(self, now_us: int) -> list[Change]:
        """The whole map as changes, to replace its log with."""
        changes: list[Change] = []
        # A detachment ends the last span of its name, so each span follows whole: they may overlap.
        for (kind, who), spans in sorted(self._intervals.items()):
            for span in spans:
                changes.append(Change(what="attach", at_us=span.start_us, kind=kind, who=who))
                if span.end_us is not None:
                    changes.append(Change(what="detach", at_us=span.end_us, kind=kind, who=who))
        for (kind, who), spans in sorted(self._late.items()):
            changes += [
                Change(what="late", at_us=span.start_us, until_us=span.end_us or 0, kind=kind, who=who)
                for span in spans
            ]
        routings = self._routings or [(0, "")]
        head = [Change(what="start", at_us=self.begins_us or now_us, kind=routings[0][1])]
        head += [Change(what="start", at_us=at_us, kind=routing) for at_us, routing in routings[1:]]
        if self.forgot_us is not None:
            head.append(Change(what="begin", at_us=self.forgot_us))
        for lost in self.lost:
            why = DISK if lost in self._unwritten else ""
            head.append(Change(what="lost", kind=why, at_us=lost[0], until_us=lost[1]))
        head += self._handled
        if self._settled_us:
            head.append(Change(what="settled", at_us=self._settled_us))
        return [*head, *changes, Change(what="start", at_us=now_us, kind=routings[-1][1])]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """(kind, who) of those attached now."""
        return (name for name, spans in sorted(self._intervals.items()) if spans[-1].end_us is None)

    def __len__(self) -> int:
        return self._count

    def check(self) -> None:
        tables = (self._intervals, self._late)
        if self._count != sum(len(spans) for table in tables for spans in table.values()):
            raise BugError("the attachment map has lost count of its intervals")
        for spans in self._intervals.values():
            if not spans or any(span.end_us is None for span in spans[:-1]):
                raise BugError("somebody is attached twice at once")


def _joined(one: Change, other: Change) -> Change:
    return Change(
        what=one.what,
        at_us=min(one.at_us, other.at_us),
        until_us=max(one.until_us, other.until_us),
        noted_us=max(one.noted_us, other.noted_us),
    )


def _overlaps(spans: list[_Interval], first: int, last: int) -> bool:
    return any(span.start_us <= last and (span.end_us is None or first <= span.end_us) for span in spans)
