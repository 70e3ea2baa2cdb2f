"""Shared durable subscriptions: several consumers under one name divide its events.

To the hosting broker the group is one subscriber whose token is kept by the broker. What it is sent comes
here, in tick order per pubend, and every event goes to one consumer: to the one that has the same key in
flight, so that events of one key are consumed in order, else to the one with the least in flight. Events
of a consumer that dies go to others, those of one key still in order. An event whose acknowledgement was
saved is never given out again, not even after a crash.

Acknowledgements come in any order. The token is the tick below the oldest event that is not acknowledged.
What is done above the token that is on disk, all but the open ticks, is saved as spans, and is left out
when the token brings it back.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from postroad.durable.outputs import Deliver, DeliverGap, Message
from postroad.durable.spans import Span, union
from postroad.errors import BugError, UsageError
from postroad.events.attributes import Value
from postroad.events.batch import EventBatch
from postroad.kernel.layout import EVENT_HEADER_BYTES
from postroad.storage.effects import Save, StorageEffect
from postroad.units import MIB

TABLE: Final = "durable.groups"
MAX_CONSUMERS: Final = 1_024
MAX_HELD: Final = 4_096  # events of one group, given out or not; then the group takes no more
MAX_HELD_BYTES: Final = 16 * MIB  # likewise
MAX_WINDOW: Final = 256  # events in flight at one consumer


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """These rows of a batch are for this consumer."""

    consumer: int
    pubend: int
    batch: EventBatch
    rows: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignGap:
    """All consumers are told that something is lost, since nobody knows whose it would have been."""

    consumer: int
    pubend: int
    start: int
    end: int


Assigned = list[Assign | AssignGap]


@dataclass(slots=True, order=True)
class _Event:
    number: int  # of arrival
    pubend: int = field(compare=False)
    tick: int = field(compare=False)
    batch: EventBatch = field(compare=False)
    row: int = field(compare=False)
    key: Value | None = field(compare=False)
    size: int = field(compare=False)


@dataclass(slots=True)
class _Consumer:
    window: int
    in_flight: dict[tuple[int, int], _Event] = field(default_factory=dict)  # by (pubend, tick)


@dataclass(slots=True)
class _Progress:
    """One pubend."""

    told: int  # everything up to here was offered
    open: dict[int, None] = field(default_factory=dict)  # ticks offered and not acknowledged, in order
    done: list[Span] = field(default_factory=list)  # acknowledged earlier, and to be offered again

    @property
    def token(self) -> int:
        return next(iter(self.open)) - 1 if self.open else self.told

    def is_done(self, tick: int) -> bool:
        at = bisect_left(self.done, tick, key=itemgetter(1))
        return at < len(self.done) and self.done[at][0] < tick

    def done_above(self, tick: int) -> list[Span]:
        """What need not be offered again: all of (tick, told] that is not open, and what was done before."""
        spans = [span for span in self.done if span[1] > self.told]
        for one in self.open:
            spans.append((tick, one - 1))
            tick = max(tick, one)
        spans.append((tick, self.told))
        return union(spans)


class SharedSubscription:
    """The consumers of one group at its hosting broker.

    `available(c)`: bytes that a consumer has room for. `saved(p)`: the group's token on disk.
    """

    def __init__(
        self,
        subscriber: int,
        *,
        key: str,
        new_tag: Callable[[], int],
        available: Callable[[int], int],
        saved: Callable[[int], int],
    ) -> None:
        self.subscriber = subscriber
        self._key = key  # attribute that orders; "" for none
        self._new_tag = new_tag
        self._available = available
        self._saved = saved
        self._consumers: dict[int, _Consumer] = {}
        self._waiting: list[_Event] = []  # offered and with no consumer, by number
        self._held_bytes = 0  # of what waits and what is in flight
        self._keys: dict[Value, tuple[int, int]] = {}  # key in flight -> (consumer, how many)
        self._progress: dict[int, _Progress] = {}
        self._gaps: deque[DeliverGap] = deque(maxlen=MAX_CONSUMERS)  # while there is no consumer to tell
        self._dirty: dict[int, None] = {}  # pubends whose row is to be saved
        self._saving: tuple[int, tuple[int, ...]] | None = None  # the save on its way: tag, pubends
        self._numbers = 0
        self.redelivered = 0

    # ---- consumers

    def join(self, consumer: int, window: int = MAX_WINDOW) -> Assigned:
        if consumer in self._consumers or len(self._consumers) >= MAX_CONSUMERS:
            raise UsageError(f"consumer {consumer} cannot join: it is here, or {MAX_CONSUMERS} are")
        if not 1 <= window <= MAX_WINDOW:
            raise UsageError(f"a window of {window} events, 1 to {MAX_WINDOW} are possible")
        self._consumers[consumer] = _Consumer(window)
        gaps, self._gaps = list(self._gaps), deque(maxlen=MAX_CONSUMERS)
        told: Assigned = [
            AssignGap(consumer=consumer, pubend=one.pubend, start=one.start, end=one.end) for one in gaps
        ]
        return told + self.assign()

    def leave(self, consumer: int) -> Assigned:
        """A consumer is gone: what it did not acknowledge goes to others."""
        held = self._consumers.pop(consumer, None)
        if held is None:
            return []
        self.redelivered += len(held.in_flight)
        for event in held.in_flight.values():
            self._drop_key(event)
            insort(self._waiting, event)
        return self.assign()

    @property
    def consumers(self) -> list[int]:
        return list(self._consumers)

    @property
    def room(self) -> bool:
        """The group can be offered more: `room` of its subscriber for Hosting."""
        return bool(self._consumers) and self._held < MAX_HELD and self._held_bytes < MAX_HELD_BYTES

    @property
    def _held(self) -> int:
        return len(self._waiting) + sum(len(one.in_flight) for one in self._consumers.values())

    def reset(self) -> None:
        """The group's stream begins again at its token: forget what was offered above it."""
        for consumer in self._consumers.values():
            consumer.in_flight.clear()
        self._waiting.clear()
        self._keys.clear()
        self._held_bytes = 0
        for progress in self._progress.values():
            token = progress.token
            progress.done = progress.done_above(token)
            progress.told = token
            progress.open.clear()

    # ---- events

    def offer(self, message: Message) -> Assigned:
        """What the group was sent, in order per pubend."""
        progress = self._progress.get(message.pubend)
        if progress is None:
            progress = self._progress[message.pubend] = _Progress(message.start)
        if message.start < progress.told and isinstance(message, Deliver) and message.count:
            raise BugError("group: an event was offered twice")
        progress.told = message.end
        if isinstance(message, DeliverGap):
            if not self._consumers:
                self._gaps.append(message)
            return [
                AssignGap(consumer=one, pubend=message.pubend, start=message.start, end=message.end)
                for one in self._consumers
            ]
        batch = message.batch
        if batch is None:
            return []
        rows = range(batch.count) if message.rows is None else message.rows.tolist()
        ticks, offsets = batch.headers["tick"].tolist(), batch.offsets.tolist()
        for row in rows:
            tick = ticks[row]
            if progress.done and progress.is_done(tick):
                continue
            self._numbers += 1
            key = batch.attributes(row).get(self._key) if self._key else None
            size = EVENT_HEADER_BYTES + offsets[row + 1] - offsets[row]
            self._waiting.append(_Event(self._numbers, message.pubend, tick, batch, row, key, size))
            self._held_bytes += size
            progress.open[tick] = None
        return self.assign()

    def assign(self) -> Assigned:
        """Give out what can be, oldest first; also to be called when a consumer has room again."""
        if not self._waiting or not self._consumers:
            return []
        free = _Free(self._consumers, self._available)
        chosen: dict[tuple[int, int], list[_Event]] = {}  # (consumer, batch) -> its events
        left: list[_Event] = []
        blocked: set[Value] = set()
        for at, event in enumerate(self._waiting):
            consumer = None if event.key in blocked else self._choose(event, free)
            if consumer is None:
                left.append(event)
                if event.key is not None:
                    blocked.add(event.key)
                elif not self._key:
                    left += self._waiting[at + 1 :]  # without keys nobody else has room either
                    break
                continue
            self._consumers[consumer].in_flight[event.pubend, event.tick] = event
            free.give(consumer, event.size)
            if event.key is not None:
                _, count = self._keys.get(event.key, (consumer, 0))
                self._keys[event.key] = (consumer, count + 1)
            chosen.setdefault((consumer, id(event.batch)), []).append(event)
        self._waiting = left
        return [
            Assign(
                consumer=consumer,
                pubend=events[0].pubend,
                batch=events[0].batch,
                rows=np.array(sorted(event.row for event in events), np.uint32),
            )
            for (consumer, _), events in chosen.items()
        ]

    def _choose(self, event: _Event, free: _Free) -> int | None:
        if event.key is not None and event.key in self._keys:
            consumer, _ = self._keys[event.key]
            return consumer if free.has_room(consumer) else None
        return free.least()

    def _drop_key(self, event: _Event) -> None:
        if event.key is None:
            return
        consumer, count = self._keys[event.key]
        if count > 1:
            self._keys[event.key] = (consumer, count - 1)
        else:
            del self._keys[event.key]

    def ack(self, consumer: int, pubend: int, ticks: Iterable[int]) -> None:
        """A consumer is done with these events. What it does not hold (any more) is ignored."""
        held, progress = self._consumers.get(consumer), self._progress.get(pubend)
        if held is None or progress is None:
            return
        for tick in ticks:
            event = held.in_flight.pop((pubend, tick), None)
            if event is not None:
                self._drop_key(event)
                self._held_bytes -= event.size
                del progress.open[tick]
                self._dirty[pubend] = None

    def token(self) -> dict[int, int]:
        """Up to here everything was acknowledged: for `Hosting.ack`."""
        return {pubend: progress.token for pubend, progress in self._progress.items()}

    # ---- durability

    @property
    def dirty(self) -> bool:
        """Something that was acknowledged is not on disk."""
        return bool(self._dirty) or self._saving is not None

    def flush(self) -> list[StorageEffect]:
        """Save what is done above the token, one save at a time: meanwhile the next one gathers."""
        if not self._dirty or self._saving is not None:
            return []
        tag = self._new_tag()
        rows = tuple((self._row_key(pubend), self._row(pubend)) for pubend in self._dirty)
        self._saving = (tag, tuple(self._dirty))
        self._dirty.clear()
        return [Save(table=TABLE, rows=rows, tag=tag)]

    def _row(self, pubend: int) -> bytes | None:
        done = self._progress[pubend].done_above(self._saved(pubend))
        return msgspec.msgpack.encode(done) if done else None

    def saved(self, tag: int) -> bool:
        mine = self._saving is not None and self._saving[0] == tag
        if mine:
            self._saving = None
        return mine

    def save_failed(self, tag: int) -> bool:
        if self._saving is None or self._saving[0] != tag:
            return False
        self._dirty.update(dict.fromkeys(self._saving[1]))
        self._saving = None
        return True

    def delete(self) -> list[StorageEffect]:
        """The group is gone for good: nothing of it is kept."""
        if not self._progress:
            return []
        rows = tuple((self._row_key(pubend), None) for pubend in self._progress)
        return [Save(table=TABLE, rows=rows, tag=self._new_tag())]

    def _row_key(self, pubend: int) -> bytes:
        return self.subscriber.to_bytes(4, "big") + pubend.to_bytes(8, "big")

    def recover(self, rows: Mapping[bytes, bytes], token: Mapping[int, int]) -> None:
        """After a restart: the table, and the token that the broker keeps."""
        for pubend, tick in token.items():
            self._progress[pubend] = _Progress(tick)
        for key, value in sorted(rows.items()):
            pubend = int.from_bytes(key[4:], "big")
            if key[:4] == self.subscriber.to_bytes(4, "big") and pubend in self._progress:
                spans = msgspec.msgpack.decode(value, type=list[tuple[int, int]])
                self._progress[pubend].done = [span for span in spans if span[1] > token[pubend]]

    # ---- inspection

    def status(self) -> dict[str, int]:
        return {
            "consumers": len(self._consumers),
            "waiting": len(self._waiting),
            "in_flight": sum(len(one.in_flight) for one in self._consumers.values()),
            "keys": len(self._keys),
            "redelivered": self.redelivered,
        }

    def check(self) -> None:
        held = [event for one in self._consumers.values() for event in one.in_flight.values()]
        places = sorted((event.pubend, event.tick) for event in [*held, *self._waiting])
        if places != sorted((pubend, tick) for pubend, one in self._progress.items() for tick in one.open):
            raise BugError("group: what is open is not what is held")
        if self._held_bytes != sum(event.size for event in [*held, *self._waiting]):
            raise BugError("group: the bytes held are miscounted")
        if [event.number for event in self._waiting] != sorted(event.number for event in self._waiting):
            raise BugError("group: what waits is out of order")
        for one in self._consumers.values():
            if len(one.in_flight) > one.window:
                raise BugError("group: a consumer holds more than its window")
        for key, (consumer, count) in self._keys.items():
            here = sum(event.key == key for event in self._consumers[consumer].in_flight.values())
            if here != count or sum(event.key == key for event in held) != count:
                raise BugError("group: a key is in flight at two consumers, or is miscounted")


class _Free:
    """Consumers by how much they have in flight, during one `assign`."""

    __slots__ = ("_consumers", "_left", "_order")

    def __init__(self, consumers: Mapping[int, _Consumer], available: Callable[[int], int]) -> None:
        self._consumers = consumers
        self._left = {number: available(number) for number in consumers}  # bytes
        self._order = [(len(one.in_flight), number) for number, one in consumers.items()]
        heapq.heapify(self._order)  # counts may be out of date: too low, never too high

    def has_room(self, consumer: int) -> bool:
        held = self._consumers[consumer]
        return len(held.in_flight) < held.window and self._left[consumer] > 0

    def give(self, consumer: int, size: int) -> None:
        self._left[consumer] -= size

    def least(self) -> int | None:
        """Of those with room the one with the least in flight, the lowest number first."""
        while self._order:
            count, number = self._order[0]
            if not self.has_room(number):
                heapq.heappop(self._order)
            elif count < len(self._consumers[number].in_flight):
                heapq.heapreplace(self._order, (len(self._consumers[number].in_flight), number))
            else:
                return number
        return None
