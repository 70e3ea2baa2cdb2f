"""Notes of message times that were met at another time: part of the attachment map.

Those of one name are disjoint and in order. Who has one of a time is found by comparing it at once with the
span from the first to the last note of every name.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from postroad.errors import BugError
from postroad.tracking.intervals import size
from postroad.units import SECOND_US

MAX_LATE: Final = 64  # notes of late deliveries of one name
HANDLED_US: Final = 3_600 * SECOND_US  # by then what was noted before is stored


class Noted(msgspec.Struct, frozen=True):
    """Message times that were met at another time: the last, or where they were ahead, the first."""

    start_us: int
    end_us: int
    noted_us: int

    @property
    def lead_us(self) -> int:
        return self.end_us - self.noted_us

    @property
    def kept_until_us(self) -> int:
        """By when it was made, not by its times, as filters are. One that is older is made anew."""
        return self.noted_us + HANDLED_US


class LateNotes:
    """Message times delivered late to those of one kind."""

    __slots__ = ("_columns", "_count", "_due", "_ends", "_names", "_notes", "_places", "_starts", "bytes")

    def __init__(self) -> None:
        self._notes: dict[str, list[Noted]] = {}  # a list in it is replaced, never changed
        self._places: dict[str, int] = {}  # in the columns
        self._names: list[str] = []
        self._starts = array("q")  # of the first note
        self._ends = array("q")  # of the last
        self._due = array("q")  # nothing is to be forgotten before
        self._columns = (self._starts, self._ends, self._due)
        self._count = 0
        self.bytes = 0

    def of(self, who: str) -> list[Noted]:
        return self._notes.get(who, [])

    def add(self, who: str, note: Noted) -> None:
        notes = list(self.of(who))
        add_note(notes, note, MAX_LATE, last_noted)
        due_us = note.kept_until_us
        if who in self._places:
            due_us = min(due_us, self._due[self._places[who]])
        self._put(who, notes, due_us)

    def at(self, first_us: int, last_us: int) -> set[str]:
        """Who has a note of any of these times."""
        hits = (np.asarray(self._starts) <= last_us) & (np.asarray(self._ends) >= first_us)
        names = [self._names[at] for at in np.flatnonzero(hits).tolist()]
        return {
            who
            for who in names
            if any(note.start_us <= last_us and first_us <= note.end_us for note in self._notes[who])
        }

    def forget(self, before_us: int) -> None:
        due = np.flatnonzero(np.asarray(self._due) < before_us).tolist()
        for who in [self._names[at] for at in due]:
            kept = [note for note in self._notes[who] if note.kept_until_us >= before_us]
            self._put(who, kept, min((note.kept_until_us for note in kept), default=0))

    def coarsen(self, limit: int) -> None:
        """Who has more notes than that gets half as many."""
        if self._count == len(self._names):
            return
        for who, notes in self._notes.items():
            if len(notes) > limit:
                halved = [last_noted(notes[at : at + 2]) for at in range(0, len(notes), 2)]
                self._put(who, halved, self._due[self._places[who]])

    def _put(self, who: str, notes: list[Noted], due_us: int) -> None:
        more = len(notes) - len(self.of(who))
        self._count += more
        self.bytes += size(who) * more
        if not notes:
            self._drop(who)
            return
        place = self._places.setdefault(who, len(self._names))
        if place == len(self._names):
            self._names.append(who)
            for column in self._columns:
                column.append(0)
        self._notes[who] = notes
        self._starts[place] = notes[0].start_us
        self._ends[place] = notes[-1].end_us
        self._due[place] = due_us

    def _drop(self, who: str) -> None:
        """The last name takes its place."""
        del self._notes[who]
        place = self._places.pop(who)
        last = self._names.pop()
        values = [column.pop() for column in self._columns]
        if last != who:
            self._names[place] = last
            self._places[last] = place
            for column, value in zip(self._columns, values, strict=True):
                column[place] = value

    def copy(self) -> dict[str, list[Noted]]:
        """The notes of each name, as they are now."""
        return self._notes.copy()

    def items(self) -> Iterator[tuple[str, Noted]]:
        return ((who, note) for who, notes in self._notes.items() for note in notes)

    def __len__(self) -> int:
        return self._count

    def check(self) -> None:
        if self._count != sum(map(len, self._notes.values())) or self.bytes != sum(
            size(who) for who, _ in self.items()
        ):
            raise BugError("the attachment map has lost count of its notes of late deliveries")
        if self._places != {who: at for at, who in enumerate(self._names)} or (
            self._places.keys() != self._notes.keys()
        ):
            raise BugError("the notes of late deliveries are not where they are looked for")
        for who, at in self._places.items():
            notes = self._notes[who]
            if not notes or any(earlier.end_us >= later.start_us for earlier, later in pairwise(notes)):
                raise BugError("notes of late deliveries are not disjoint and in order")
            if (self._starts[at], self._ends[at]) != (notes[0].start_us, notes[-1].end_us) or (
                self._due[at] > min(note.kept_until_us for note in notes)
            ):
                raise BugError("notes of late deliveries are not found by their times")


def last_noted(notes: list[Noted]) -> Noted:
    """All of them as one, of when the last was made."""
    end_us = max([note.end_us for note in notes])
    return Noted(notes[0].start_us, end_us, max([note.noted_us for note in notes]))


def most_ahead(notes: list[Noted]) -> Noted:
    """All of them as one, as much ahead as any."""
    end_us = max([note.end_us for note in notes])
    return Noted(notes[0].start_us, end_us, end_us - max([note.lead_us for note in notes]))


def add_note(notes: list[Noted], note: Noted, limit: int, joint: Callable[[list[Noted]], Noted]) -> None:
    """To notes in order of time: joined with what it touches, and if they are too many, the nearest are."""
    first = bisect_left(notes, note.start_us, key=lambda other: other.end_us)
    after = bisect_right(notes, note.end_us, key=lambda other: other.start_us)
    touching = sorted([note, *notes[first:after]], key=lambda other: other.start_us)
    notes[first:after] = [joint(touching)]
    if len(notes) > limit:
        gaps = [later.start_us - earlier.end_us for earlier, later in pairwise(notes)]
        at = gaps.index(min(gaps))
        notes[at : at + 2] = [joint(notes[at : at + 2])]
