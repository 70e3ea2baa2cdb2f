"""The virtual world: one clock, one heap of things to come, one seed.

Nothing here happens by itself. An action is scheduled for an instant of virtual time and runs when the
world reaches it; two actions for the same instant run in the order in which they were scheduled. All
chance comes from `World.random(concern)`: each concern (the latency of one link, the draws of one broker,
the fault schedule) has its own stream, so that a change in one leaves the others as they were and a seed
found yesterday still tells its story.

The trace records everything observable that happens. Its digest is the identity of a run: the same seed
must give the same digest, in any process and under any hash seed.
"""

from __future__ import annotations

import hashlib
import heapq
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

from postroad.errors import BugError
from postroad.sim.machine.frames import frame_mentions, frame_text
from postroad.units import SECOND_US

EPOCH_US: Final = 1_767_225_600 * SECOND_US  # virtual time begins with the year 2026
TRACE_RECORDS: Final = 60_000  # what a story can look back on
STORY_LINES: Final = 40
MAX_PENDING: Final = 1_000_000  # a world that schedules more than this runs away


class Timer:
    """One scheduled action; `cancel` makes it do nothing."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


@dataclass(frozen=True, slots=True)
class Record:
    """One thing that happened. A frame is kept as it is and put into words only when a story needs it."""

    time_us: int
    who: str
    what: str
    connection: int
    frame: bytes | None
    tags: tuple[str, ...]

    def mentions(self, tags: frozenset[str]) -> bool:
        if self.who in tags or f"connection {self.connection}" in tags or not tags.isdisjoint(self.tags):
            return True
        return self.frame is not None and frame_mentions(self.frame, tags)

    def __str__(self) -> str:
        seconds, micros = divmod(self.time_us - EPOCH_US, SECOND_US)
        where = f" [{self.connection}]" if self.connection else ""
        frame = f" {frame_text(self.frame)}" if self.frame is not None else ""
        return f"{seconds:5d}.{micros:06d} {self.who:<8}{where} {self.what}{frame}"


class Trace:
    """The running record of a world and its digest."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=TRACE_RECORDS)
        self._hash = hashlib.blake2b(digest_size=16)
        self.count = 0

    def note(
        self,
        time_us: int,
        who: str,
        what: str,
        *,
        connection: int = 0,
        frame: bytes | None = None,
        tags: tuple[str, ...] = (),
    ) -> None:
        content = 0 if frame is None else zlib.crc32(frame)
        self._hash.update(f"{time_us}|{who}|{what}|{connection}|{content}\n".encode())
        self._records.append(Record(time_us, who, what, connection, frame, tags))
        self.count += 1

    def digest(self) -> str:
        return self._hash.hexdigest()

    def story(self, tags: Iterable[str], limit: int = STORY_LINES) -> tuple[str, ...]:
        """The last records that mention any of `tags` (a message id, a pubend, a node, `connection N`)."""
        wanted = frozenset(tags)
        lines: list[str] = []
        for record in reversed(self._records):
            if record.mentions(wanted):
                lines.append(str(record))
                if len(lines) == limit:
                    break
        return tuple(reversed(lines))


class World:
    """Virtual time and everything scheduled in it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_us = EPOCH_US
        self.trace = Trace()
        self._heap: list[tuple[int, int, Timer]] = []
        self._sequence = 0
        self._randoms: dict[str, Random] = {}

    def random(self, concern: str) -> Random:
        """The stream of chance of one concern. A text seed is hashed by content, not by `hash`."""
        random = self._randoms.get(concern)
        if random is None:
            random = self._randoms[concern] = Random(f"{self.seed}/{concern}")
        return random

    def note(
        self,
        who: str,
        what: str,
        *,
        connection: int = 0,
        frame: bytes | None = None,
        tags: tuple[str, ...] = (),
    ) -> None:
        self.trace.note(self.now_us, who, what, connection=connection, frame=frame, tags=tags)

    def at(self, time_us: int, action: Callable[[], None]) -> Timer:
        """Run `action` at `time_us`, or at once if that has passed."""
        if len(self._heap) >= MAX_PENDING:
            raise BugError(f"{MAX_PENDING} things are scheduled: the world runs away")
        timer = Timer(action)
        self._sequence += 1
        heapq.heappush(self._heap, (max(time_us, self.now_us), self._sequence, timer))
        return timer

    def after(self, delay_us: int, action: Callable[[], None]) -> Timer:
        return self.at(self.now_us + delay_us, action)

    def run(self, until_us: int) -> None:
        """Let everything up to and including `until_us` happen."""
        heap = self._heap
        while heap and heap[0][0] <= until_us:
            self.now_us, _, timer = heapq.heappop(heap)
            if timer.action is not None:
                timer.action()
        self.now_us = max(self.now_us, until_us)

    @property
    def elapsed_us(self) -> int:
        return self.now_us - EPOCH_US


class Clock:
    """What one node believes the time to be: skewed, sometimes stepped, and never running backwards.

    The real driver makes its clock non-decreasing within a process, so a step back shows as a clock that
    stands still until true time has caught up; only a restarted process sees an earlier time.
    """

    __slots__ = ("_last_us", "_world", "offset_us")

    def __init__(self, world: World, offset_us: int = 0) -> None:
        self._world = world
        self.offset_us = offset_us
        self._last_us = 0

    def now_us(self) -> int:
        self._last_us = max(self._last_us, self._world.now_us + self.offset_us)
        return self._last_us

    def restart(self) -> None:
        """A new process begins: it has not seen any time yet."""
        self._last_us = 0

    def true_us(self, node_us: int) -> int:
        """The true time at which this clock shows `node_us`."""
        return node_us - self.offset_us
