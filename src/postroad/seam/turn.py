"""One turn of the loop: what time it is, and what is to be done.

A driver hands over everything that came in since the last turn. Each room that it concerns is handed the turn
and adds to it what the driver is to do; no room keeps a turn, and no room returns effects.

What would take a turn too long is put off: `later` is called in one of the next turns, a few of them in each.

What is asked of the disk is answered in a later turn. `then` is called in that one, with what the disk said,
and nobody else hears of it. What was promised to somebody goes out in `then`, never before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from postroad.errors import BugError, PostroadError
from postroad.seam.datagrams import Endpoint, JoinGroup, LeaveGroup, SendTo
from postroad.seam.effects import Close, Dial, Effect, Hop, Note, Send
from postroad.seam.storage import (
    Append,
    Appended,
    Chop,
    LogStream,
    Read,
    ReadDone,
    Save,
    Saved,
    StorageInput,
)
from postroad.seam.tracking import FiltersRead, Keep, ReadFilters, TrackingEffect

if TYPE_CHECKING:
    from postroad.seam.switchboard import Room

LATER_PER_TURN: Final = 32  # of what was put off, each of which takes some 50 us

Written = Callable[["Turn", PostroadError | None], None]  # the error, if it is not on disk
WasRead = Callable[["Turn", ReadDone], None]
FiltersWereRead = Callable[["Turn", FiltersRead], None]


class Unanswered:
    """What the disk was asked for and has not answered yet, and what was put off. The core keeps it from turn
    to turn."""

    __slots__ = ("_filters", "_last_tag", "_reads", "_writes", "later", "tables")

    def __init__(self) -> None:
        self._last_tag = 0
        self.later: deque[Callable[[Turn], None]] = deque()
        self._writes: dict[int, Written] = {}  # by the tag of an Append or Save that somebody waits for
        self._reads: dict[int, WasRead] = {}  # by the tag of a Read
        self._filters: dict[int, FiltersWereRead] = {}  # by the tag of a ReadFilters
        self.tables: set[str] = set()  # those that a start loads: nothing is saved to another

    def __len__(self) -> int:
        return len(self._writes) + len(self._reads) + len(self._filters)

    def write(self, then: Written | None) -> int:
        self._last_tag += 1
        if then is not None:
            self._writes[self._last_tag] = then
        return self._last_tag

    def read(self, then: WasRead) -> int:
        self._last_tag += 1
        self._reads[self._last_tag] = then
        return self._last_tag

    def read_filters(self, then: FiltersWereRead) -> int:
        self._last_tag += 1
        self._filters[self._last_tag] = then
        return self._last_tag

    def answer(self, turn: Turn, item: StorageInput | FiltersRead) -> None:
        """The disk answered: whoever waits for it goes on."""
        if isinstance(item, ReadDone):
            self._reads.pop(item.tag)(turn, item)
        elif isinstance(item, FiltersRead):
            self._filters.pop(item.tag)(turn, item)
        elif isinstance(item, Appended | Saved):
            then = self._writes.pop(item.tag, None)
            if then is not None:
                then(turn, None)
        else:
            turn.note("warning", f"nothing is stored: {item.error}")
            then = self._writes.pop(item.tag, None)
            if then is not None:
                then(turn, item.error)


class Turn:
    """`busy`: something came in with it, so others wait for what it does."""

    __slots__ = ("_unanswered", "busy", "concerns", "effects", "now_us", "stirs")

    def __init__(self, now_us: int, unanswered: Unanswered, *, busy: bool = False) -> None:
        self.now_us = now_us
        self.busy = busy
        self.effects: list[Effect] = []  # what the driver is to do, in order
        # The room that what is being handled concerns, if it leaves no other one anything to do: its handler
        # says so, and only that room has its `tick` then.
        self.concerns: Room | None = None
        self.stirs = False  # something in this turn concerns other rooms all the same
        self._unanswered = unanswered

    def later(self, act: Callable[[Turn], None]) -> None:
        """At the end of this turn or in one after it, in the order of asking; the ticks of rooms follow."""
        self._unanswered.later.append(act)

    def catch_up(self) -> bool:
        """A few of what was put off are done; whether there were any."""
        waiting = self._unanswered.later
        count = min(len(waiting), LATER_PER_TURN)
        for _ in range(count):
            waiting.popleft()(self)
        return count > 0

    # ---- the network

    def send(self, connection: int, frame: bytes) -> None:
        self.effects.append(Send(connection, frame))

    def close(self, connection: int, error: PostroadError | None = None) -> None:
        self.effects.append(Close(connection, error))

    def hop(self, hop: Hop) -> None:
        self.effects.append(hop)

    def dial(self, address: str) -> None:
        self.effects.append(Dial(address))

    def send_to(self, endpoint: Endpoint, datagram: bytes) -> None:
        self.effects.append(SendTo(endpoint, datagram))

    def join_group(self, group: Endpoint) -> None:
        self.effects.append(JoinGroup(group))

    def leave_group(self, group: Endpoint) -> None:
        self.effects.append(LeaveGroup(group))

    def note(self, level: str, text: str) -> None:
        """A line for the log."""
        self.effects.append(Note(level, text))

    # ---- the disk

    def append(self, stream: LogStream, first: int, last: int, data: bytes, *, then: Written) -> None:
        """One record that covers (first, last] of a log stream."""
        tag = self._unanswered.write(then)
        self.effects.append(Append(stream=stream, first=first, last=last, data=data, tag=tag))

    def chop(self, stream: LogStream, tick: int) -> None:
        self.effects.append(Chop(stream=stream, tick=tick))

    def read(self, stream: LogStream, start: int, end: int, limit_bytes: int, *, then: WasRead) -> None:
        tag = self._unanswered.read(then)
        self.effects.append(Read(stream=stream, start=start, end=end, limit_bytes=limit_bytes, tag=tag))

    def save(self, table: str, rows: Sequence[tuple[bytes, bytes | None]], *, then: Written | None) -> None:
        """Rows of a table that was named on the switchboard, so that the next start loads them.

        `then` is None only where nothing that was promised depends on it.
        """
        if table not in self._unanswered.tables:
            raise BugError(f"the next start would not load the table {table!r}: no room named it")
        self.effects.append(Save(table=table, rows=tuple(rows), tag=self._unanswered.write(then)))

    # ---- the tracking store

    def keep(self, effects: Sequence[TrackingEffect]) -> None:
        self.effects.append(Keep(effects=tuple(effects)))

    def read_filters(self, sequences: Sequence[int], *, then: FiltersWereRead) -> None:
        tag = self._unanswered.read_filters(then)
        self.effects.append(ReadFilters(tag=tag, sequences=tuple(sequences)))
