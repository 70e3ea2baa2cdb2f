"""When those of one kind were attached: part of the attachment map.

Every connection leaves an interval, and there may be hundreds of thousands. Those that ended are columns, in
the order in which they were told to have ended: a question, and retention, compares all of them at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import compress
from typing import Final

import numpy as np

from postroad.errors import BugError

INTERVAL_BYTES: Final = 64


class Intervals:
    __slots__ = ("_ends", "_names", "_starts", "attached_bytes", "ended_bytes", "now")

    def __init__(self) -> None:
        self.now: dict[str, int] = {}  # who is attached, since when
        self._names: list[str] = []  # whose interval ended: one place in each column
        self._starts = array("q")
        self._ends = array("q")
        self.attached_bytes = 0  # of those attached now
        self.ended_bytes = 0

    def attach(self, who: str, at_us: int) -> None:
        if who not in self.now:  # else a detachment was damaged
            self.now[who] = at_us
            self.attached_bytes += size(who)

    def detach(self, who: str, at_us: int) -> None:
        start_us = self.now.pop(who, None)
        if start_us is not None:
            self._names.append(who)
            self._starts.append(start_us)
            self._ends.append(max(at_us, start_us))
            self.attached_bytes -= size(who)
            self.ended_bytes += size(who)

    def at(self, first_us: int, last_us: int) -> set[str]:
        """Who was attached at any of these moments."""
        hits = (np.asarray(self._starts) <= last_us) & (np.asarray(self._ends) >= first_us)
        names = {self._names[at] for at in np.flatnonzero(hits).tolist()}
        names.update(who for who, start_us in self.now.items() if start_us <= last_us)
        return names

    def since(self, first_us: int) -> set[str]:
        """Who is attached, or was at that moment or later. A clock that was set back ends an interval before
        an earlier one of the same name, so all of them count."""
        reached = np.flatnonzero(np.asarray(self._ends) >= first_us)
        return {self._names[at] for at in reached.tolist()} | self.now.keys()

    def forget(self, before_us: int) -> None:
        """Drop what ended before."""
        ends = np.asarray(self._ends)
        kept = ends >= before_us
        if kept.all():
            return
        self.ended_bytes -= sum(size(self._names[at]) for at in np.flatnonzero(~kept).tolist())
        begin = int(kept.argmax())
        del self._names[:begin]
        if not kept[begin:].all():  # a clock was set back
            self._names = list(compress(self._names, kept[begin:].tolist()))
        self._starts = array("q", np.asarray(self._starts)[kept].tobytes())
        self._ends = array("q", ends[kept].tobytes())

    def copy(self) -> Intervals:
        made = Intervals()
        made.now = self.now.copy()
        made._names = self._names.copy()
        made._starts, made._ends = self._starts[:], self._ends[:]
        made.attached_bytes, made.ended_bytes = self.attached_bytes, self.ended_bytes
        return made

    def spans(self) -> Iterator[tuple[str, int, int | None]]:
        """(who, from, to or None while it lasts), those of one name in their order"""
        yield from zip(self._names, self._starts, self._ends, strict=True)
        for who, start_us in self.now.items():
            yield who, start_us, None

    def __len__(self) -> int:
        return len(self._names) + len(self.now)

    def check(self) -> None:
        if not len(self._names) == len(self._starts) == len(self._ends):
            raise BugError("the columns of the attachment map differ in length")
        if self.ended_bytes != sum(map(size, self._names)) or self.attached_bytes != sum(map(size, self.now)):
            raise BugError("the attachment map has lost count of its intervals")


def size(who: str) -> int:
    return INTERVAL_BYTES + len(who.encode())
