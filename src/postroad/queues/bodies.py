"""Bodies of queue messages that memory has no room for (docs/explanation/architecture.md, "Where bodies of
queue messages are").

All arcs of a broker share one limit of memory. Beyond it the bodies of the newest messages of the largest
arcs are appended to a log stream of their arc, several in one record, and leave memory once that is durable.
A body is known by the number of its record and its place in there; records never change.

A record is chopped only when a mark that does without it is in the log of the replica, since a start goes
back to the last mark. A record that pins much that is dead behind it is read, and what lives of it is in
memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from postroad.errors import PostroadError
from postroad.queues.inbox import Extent, Inboxes, Message
from postroad.queues.messages import MAX_BODIES_BYTES
from postroad.seam.storage import LogStream, ReadDone, StreamEnd, StreamKind
from postroad.seam.turn import Turn
from postroad.units import KIB, MIB, SECOND_US

RECORD_BYTES: Final = 256 * KIB  # of bodies that are written together; a larger body has its own record
SPILL_BYTES: Final = 8 * MIB  # that are on their way to the disk at once
CACHE_BYTES: Final = 8 * MIB  # of the records that were read last
SLACK: Final = 8  # this part of the limit is made room for at once
RETRY_US: Final = SECOND_US  # after which a disk that failed is tried again

Loaded = Callable[[Turn, bytes | None], None]  # the record, unless it cannot be read
Stored = Callable[[Turn, int | None], None]  # its number, unless it is not on disk


class Bodies:
    """`limit`: bytes of messages in memory; `pinned_bytes`: of dead bodies that live ones may keep on disk;
    `woken` is told that the disk has answered."""

    def __init__(
        self,
        *,
        limit: int,
        pinned_bytes: int,
        streams: Mapping[LogStream, StreamEnd],
        woken: Callable[[Turn], None],
    ) -> None:
        self._limit, self._pinned_bytes, self._woken = limit, pinned_bytes, woken
        self._tails = {
            stream.id: max(end.last, end.chopped, 0)
            for stream, end in streams.items()
            if stream.kind == StreamKind.BODIES
        }  # arc -> number of its last record
        self._firsts: dict[int, int] = {}  # arc -> number of its first record that was not chopped
        self._machines: dict[int, Inboxes] = {}
        self._resident: dict[int, int] = {}  # arc -> bytes of its messages that are in memory
        self._total = 0  # of these
        self._above = limit  # nothing is moved out before the total is over this
        self._lengths: dict[int, dict[int, int]] = {}  # arc -> record -> its length, as far as it is known
        self._writing: dict[tuple[int, int], None] = {}  # records that are not durable yet
        self._loading: dict[tuple[int, int], list[Loaded]] = {}  # records that are being read
        self._cache: dict[tuple[int, int], bytes] = {}  # the last ones that were read
        self._cached = 0  # bytes of these
        self._retry_us: int | None = None
        self._moved_total = 0

    # ---- writing

    def note(self, arc: int, machine: Inboxes) -> None:
        """Something may have changed there."""
        resident = machine.bytes - machine.spilled
        self._total += resident - self._resident.get(arc, 0)
        self._resident[arc], self._machines[arc] = resident, machine

    def tick(self, turn: Turn) -> None:
        if self._retry_us is not None:
            if self._retry_us > turn.now_us:
                return
            self._retry_us = None
        if self._total <= self._limit:
            self._above = self._limit
        if self._total > self._above and not self._writing:
            self._move_out(turn)

    def next_deadline(self) -> int | None:
        return self._retry_us

    def _move_out(self, turn: Turn) -> None:
        wanted = min(self._total - self._limit + self._limit // SLACK, SPILL_BYTES)
        expected = self._total
        for arc in sorted(self._resident, key=lambda arc: (-self._resident[arc], arc)):
            if wanted <= 0:
                break
            for part in _records(self._machines[arc].newest(wanted)):
                data = b"".join([message.payload + message.attributes for _, message in part])
                wanted -= len(data)
                expected -= len(data)
                self.write(turn, arc, data, partial(self._moved_out, arc, part))
        # Where there was not enough to move, nobody looks again before there is more.
        self._above = self._limit if wanted <= 0 else max(self._limit, expected) + self._limit // SLACK

    def _moved_out(self, arc: int, part: Sequence[tuple[str, Message]], turn: Turn, tick: int | None) -> None:
        if tick is None:
            self._retry_us, self._above = turn.now_us + RETRY_US, self._limit
            return
        moved: list[tuple[str, Message, Extent]] = []
        offset = 0
        for name, message in part:
            extent = Extent(tick, offset, len(message.payload), len(message.attributes))
            moved.append((name, message, extent))
            offset += extent.size
        self._moved_total += offset
        self._machines[arc].move_out(moved)
        self.note(arc, self._machines[arc])

    def write(self, turn: Turn, arc: int, data: bytes, then: Stored) -> None:
        """Append a record of bodies."""
        tick = self._tails[arc] = self._tails.get(arc, 0) + 1
        self._writing[arc, tick] = None
        appended = partial(self._appended, arc, tick, len(data), then)
        turn.append(LogStream(StreamKind.BODIES, arc), tick - 1, tick, data, then=appended)

    def _appended(
        self, arc: int, tick: int, length: int, then: Stored, turn: Turn, error: PostroadError | None
    ) -> None:
        self._woken(turn)
        del self._writing[arc, tick]
        if error is None:
            self._lengths.setdefault(arc, {})[tick] = length
        then(turn, tick if error is None else None)

    # ---- reading

    def get(self, arc: int, tick: int) -> bytes | None:
        """The record, if it was read lately."""
        return self._cache.get((arc, tick))

    def load(self, turn: Turn, arc: int, tick: int, then: Loaded) -> None:
        """Read a record; when `then` is called, `get` has it."""
        waiting = self._loading.get((arc, tick))
        if waiting is not None:
            waiting.append(then)
            return
        self._loading[arc, tick] = [then]
        stream = LogStream(StreamKind.BODIES, arc)
        turn.read(stream, tick - 1, tick, MAX_BODIES_BYTES, then=partial(self._was_read, arc, tick))

    def _was_read(self, arc: int, tick: int, turn: Turn, done: ReadDone) -> None:
        self._woken(turn)
        record = next((data for _, last, data in done.records if last == tick), None)
        if record is not None and (arc, tick) not in self._cache:
            self._cache[arc, tick] = record
            self._cached += len(record)
            self._lengths.setdefault(arc, {})[tick] = len(record)
        for then in self._loading.pop((arc, tick)):
            then(turn, record)
        while self._cached > CACHE_BYTES:
            oldest = next(iter(self._cache))
            self._cached -= len(self._cache.pop(oldest))

    # ---- what is not needed any more

    def chop(self, turn: Turn, arc: int, oldest: int) -> None:
        """A mark is in the log whose oldest record of bodies is that one; 0: it needs none."""
        machine = self._machines.get(arc)
        needed = [tick for other, tick in self._writing if other == arc]
        needed += [] if machine is None else machine.live
        needed += [oldest] if oldest else []
        first = min(needed, default=self._tails.get(arc, 0) + 1)
        lengths = self._lengths.get(arc, {})
        if first > self._firsts.get(arc, 1):
            self._firsts[arc] = first
            turn.chop(LogStream(StreamKind.BODIES, arc), first - 1)
            for tick in [tick for tick in lengths if tick < first]:
                del lengths[tick]
        self._clean(turn, arc)

    def _clean(self, turn: Turn, arc: int) -> None:
        """A live body keeps everything behind it on disk: where most of that is dead, it comes back."""
        machine = self._machines.get(arc)
        if machine is None or not machine.live:
            return
        oldest = min(machine.live)
        behind = sum(length for tick, length in self._lengths.get(arc, {}).items() if tick >= oldest)
        if behind > 2 * machine.spilled + self._pinned_bytes and (arc, oldest) not in self._loading:
            self.load(turn, arc, oldest, partial(self._bring_back, arc, oldest))

    def _bring_back(self, arc: int, tick: int, turn: Turn, record: bytes | None) -> None:
        if record is not None:
            self._machines[arc].bring_back(tick, record)
            self.note(arc, self._machines[arc])
            self._clean(turn, arc)

    def metrics(self) -> dict[str, int]:
        return {
            "queue_memory_bytes": self._total,
            "queue_spilled_bytes": sum(machine.spilled for machine in self._machines.values()),
            "queue_spilled_bytes_total": self._moved_total,
        }


def _records(chosen: list[tuple[str, Message]]) -> list[list[tuple[str, Message]]]:
    """Parts that make a record each, in the order in which the messages came: they are the newest first."""
    parts: list[list[tuple[str, Message]]] = []
    size = 0
    for name, message in reversed(chosen):
        more = len(message.payload) + len(message.attributes)
        if not parts or size + more > RECORD_BYTES:
            parts.append([])
            size = 0
        parts[-1].append((name, message))
        size += more
    return parts
