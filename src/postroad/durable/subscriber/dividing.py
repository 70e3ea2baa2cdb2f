"""How the events of a shared subscription are divided among its consumers.

An event without a key goes to the consumer with the least in flight. A key that is in flight belongs to the
consumer that has it, and its next events go there too, so that events of one key are consumed in order. With
a backlog no key would ever be free, and who joins would get nothing: when a consumer joins, each of the
others gives up the keys beyond its share. Such a key gets no more events until those in flight are
acknowledged; then it goes to whoever has the least, of those that have fewer keys than their share.

The oldest event that somebody may have goes first. What waits is queued by key and found by heaps, so that
an acknowledgement costs what it sets free, not a walk over all that waits.

An event that a consumer gives back waits again, at once or after a while; meanwhile its key rests, so that
no later event of the key overtakes it. Those of its key that the consumer had been given with it do.
What is to be a dead letter is set aside: nobody gets it, and it is open until it is done.

Events are rows of the batches that they came in, and mostly all of a batch are acknowledged soon. But one
that stays open would hold the whole batch in memory: where that is much more than what is open, `trim` copies
the rows that are.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from postroad.errors import BugError
from postroad.events.attributes import Value
from postroad.events.batch import EventBatch
from postroad.kernel.layout import FRAME_HEADER_BYTES
from postroad.units import MIB

MAX_WINDOW: Final = 256  # events in flight at one consumer
SLACK_BYTES: Final = MIB  # of batches, beside twice what is open of them: so much is held without a copy

_ANYBODY: Final = -1  # in the order of what waits: events without a key
_NOBODY: Final = -2  # and keys that are nobody's
_Heads = list[tuple[int, Value]]  # a heap of (number of the first event that waits, its key)


@dataclass(slots=True, eq=False)
class OpenBatch:
    """A batch, in memory as long as an event in it is open."""

    batch: EventBatch
    open: int = 0  # events


@dataclass(slots=True, eq=False)
class Event:
    number: int  # of arrival
    pubend: int
    tick: int
    source: OpenBatch
    row: int
    key: Value | None
    size: int
    attempt: int = 1


@dataclass(slots=True)
class _Consumer:
    in_flight: dict[tuple[int, int], Event] = field(default_factory=dict)  # by (pubend, tick)
    heads: _Heads = field(default_factory=list)  # keys that are its own; what is out of date is left out
    keys: int = 0  # that are its own


class Division:
    def __init__(self) -> None:
        self._consumers: dict[int, _Consumer] = {}
        self._loose: deque[Event] = deque()  # those without a key that wait, by number
        self._queues: dict[Value, deque[Event]] = {}  # those with one, by key
        self._heads: _Heads = []  # keys that are nobody's; what is out of date is left out
        self._owners: dict[Value, tuple[int, int]] = {}  # key in flight -> (consumer, how many)
        self._given_up: set[Value] = set()  # those of them that get no more
        self._counts: dict[Value, int] = {}  # events that wait or are in flight, by key
        self._resting: dict[Value, int] = {}  # keys whose first event waits until then
        self._resting_loose: list[tuple[int, int, Event]] = []  # heap: until when, number, one without a key
        self.aside: dict[tuple[int, int], Event] = {}  # by (pubend, tick)
        self.waiting = 0  # events, those that rest or are set aside among them
        self.in_flight = 0
        self.batch_bytes = 0  # of the batches that both are in
        self._open_bytes = 0  # of both

    def __contains__(self, consumer: int) -> bool:
        return consumer in self._consumers

    @property
    def consumers(self) -> list[int]:
        return list(self._consumers)

    @property
    def keys(self) -> int:
        """Keys in flight."""
        return len(self._owners)

    # ---- consumers

    def join(self, consumer: int) -> None:
        self._consumers[consumer] = _Consumer()
        share = self._share
        owned: dict[int, int] = {}
        for key, (owner, _) in self._owners.items():
            owned[owner] = owned.get(owner, 0) + (key not in self._given_up)
            if owned[owner] > share:
                self._given_up.add(key)

    def leave(self, consumer: int) -> int:
        """It is gone: how many events it had, which wait for others now."""
        left = self._consumers.pop(consumer)
        loose = [event for event in left.in_flight.values() if event.key is None]
        if loose:
            self._loose = deque(sorted([*loose, *self._loose], key=lambda event: event.number))
        for event in sorted(left.in_flight.values(), key=lambda event: -event.number):
            if event.key is not None:
                insort(self._queues.setdefault(event.key, deque()), event, key=lambda other: other.number)
        for event in left.in_flight.values():
            self._let_go(event)
        self.waiting += len(left.in_flight)
        self.in_flight -= len(left.in_flight)
        return len(left.in_flight)

    def hindrance(self) -> int | None:
        """The consumer with the oldest event, if another has none."""
        having = {number: consumer for number, consumer in self._consumers.items() if consumer.in_flight}
        if len(having) == len(self._consumers):
            return None
        oldest = {
            min(e.number for e in consumer.in_flight.values()): number for number, consumer in having.items()
        }
        return oldest[min(oldest)] if oldest else None

    @property
    def _share(self) -> int:
        """Keys of a consumer, were they divided evenly."""
        return -(-len(self._counts) // len(self._consumers))

    # ---- events

    def add(self, event: Event, *, aside: bool = False) -> None:
        self.waiting += 1
        self._open_bytes += event.size
        self.batch_bytes += 0 if event.source.open else len(event.source.batch.data)
        event.source.open += 1
        if event.key is not None:
            self._counts[event.key] = self._counts.get(event.key, 0) + 1
        if aside:
            self.set_aside(event)
            return
        if event.key is None:
            self._loose.append(event)
            return
        queue = self._queues.setdefault(event.key, deque())
        queue.append(event)
        if len(queue) == 1:
            self._queued(event.key)

    def done(self, consumer: int, pubend: int, tick: int) -> bool:
        """False if it does not hold that event (any more)."""
        holder = self._consumers.get(consumer)
        event = None if holder is None else holder.in_flight.pop((pubend, tick), None)
        if event is None:
            return False
        self.in_flight -= 1
        self._forget(event)
        self._let_go(event)
        return True

    def done_aside(self, pubend: int, tick: int) -> bool:
        """False if that event is not set aside."""
        event = self.aside.pop((pubend, tick), None)
        if event is None:
            return False
        self.waiting -= 1
        self._forget(event)
        return True

    def _forget(self, event: Event) -> None:
        """It is not open any more."""
        self._open_bytes -= event.size
        event.source.open -= 1
        self.batch_bytes -= 0 if event.source.open else len(event.source.batch.data)
        if event.key is not None:
            self._counts[event.key] -= 1
            if not self._counts[event.key]:
                del self._counts[event.key]

    def oldest(self, consumer: int) -> Event | None:
        """Of those that it was given."""
        holder = self._consumers.get(consumer)
        given = () if holder is None else holder.in_flight.values()
        return min(given, key=lambda event: event.number, default=None)

    def take_back(self, consumer: int, pubend: int, tick: int) -> Event | None:
        """A consumer does not have that event any more, which is for `rest` or `set_aside` now."""
        holder = self._consumers.get(consumer)
        event = None if holder is None else holder.in_flight.pop((pubend, tick), None)
        if event is not None:
            self.in_flight -= 1
            self.waiting += 1
            self._let_go(event)
        return event

    def rest(self, event: Event, until_us: int) -> None:
        """It waits again, from then on."""
        if event.key is None:
            heapq.heappush(self._resting_loose, (until_us, event.number, event))
            return
        queue = self._queues.setdefault(event.key, deque())
        insort(queue, event, key=lambda waiting: waiting.number)
        self._resting[event.key] = max(until_us, self._resting.get(event.key, 0))

    def set_aside(self, event: Event) -> None:
        self.aside[event.pubend, event.tick] = event

    def wake(self, now_us: int) -> bool:
        """Whether something has rested long enough."""
        woken = [key for key, until_us in self._resting.items() if until_us <= now_us]
        for key in woken:
            del self._resting[key]
            self._queued(key)
        loose: list[Event] = []
        while self._resting_loose and self._resting_loose[0][0] <= now_us:
            loose.append(heapq.heappop(self._resting_loose)[2])
        for event in loose:
            insort(self._loose, event, key=lambda waiting: waiting.number)
        return bool(woken or loose)

    def next_wake(self) -> int | None:
        first = self._resting_loose[0][0] if self._resting_loose else None
        return min((*self._resting.values(), *(() if first is None else (first,))), default=None)

    def trim(self) -> None:
        """To be called when events were added or are done: rows that hold too much in memory are copied."""
        if self.batch_bytes <= 2 * self._open_bytes + SLACK_BYTES:
            return
        batches: dict[OpenBatch, list[Event]] = {}
        for event in self.events():
            batches.setdefault(event.source, []).append(event)
        for source, events in batches.items():
            if 2 * sum(event.size for event in events) < len(source.batch.data):
                events.sort(key=lambda event: event.row)
                self.batch_bytes -= len(source.batch.data)
                source.batch = source.batch.part(np.array([event.row for event in events], np.uint32))
                self.batch_bytes += len(source.batch.data)
                for row, event in enumerate(events):
                    event.row = row

    def clear(self) -> None:
        """Nothing is held; the consumers stay."""
        self._consumers = {number: _Consumer() for number in self._consumers}
        self._loose.clear()
        self._queues.clear()
        self._heads.clear()
        self._owners.clear()
        self._given_up.clear()
        self._counts.clear()
        self._resting.clear()
        self._resting_loose.clear()
        self.aside.clear()
        self.waiting = self.in_flight = self.batch_bytes = self._open_bytes = 0

    def _let_go(self, event: Event) -> None:
        """It is not in flight any more."""
        if event.key is None:
            return
        consumer, count = self._owners[event.key]
        if count > 1:
            self._owners[event.key] = (consumer, count - 1)
            return
        del self._owners[event.key]
        if consumer in self._consumers:
            self._consumers[consumer].keys -= 1
        self._given_up.discard(event.key)
        if event.key in self._queues:
            self._queued(event.key)

    def _queued(self, key: Value) -> None:
        """The first event of a key waits for its owner, or for anybody."""
        if key in self._given_up or key in self._resting:
            return
        owner = self._owners.get(key)
        heads = self._heads if owner is None else self._consumers[owner[0]].heads
        heapq.heappush(heads, (self._queues[key][0].number, key))

    # ---- giving out

    def assign(self, room: Mapping[int, int]) -> list[tuple[int, list[Event]]]:
        """Give out what can be, oldest first, to consumers with room for so many bytes: for each frame, whose
        it is and its events, which are of one batch. Frames begin while there is room, as credit has it."""
        given: list[tuple[int, list[Event]]] = []
        if not self.waiting or not self._consumers:
            return given
        free = _Free(self._consumers, room, self._share)
        frames: dict[int, list[Event]] = {}  # the last one of each consumer
        order: list[tuple[int, int]] = []  # heap: (number of the oldest event, whose it is)
        for source in (_ANYBODY, _NOBODY, *self._consumers):
            self._look(source, order)
        while order:
            number, source = heapq.heappop(order)
            consumer = source if source >= 0 else free.least(keyed=source == _NOBODY)
            event = self._first(source)
            if consumer is None or event is None or not free.has_room(consumer):
                continue
            if event.number == number:
                frame = frames.get(consumer)
                if frame is None or frame[0].source is not event.source:
                    frame = frames[consumer] = []
                    given.append((consumer, frame))
                    free.give(consumer, FRAME_HEADER_BYTES)
                frame.append(event)
                self._give(consumer, event, free)
                if source == _NOBODY:
                    self._look(consumer, order)  # the key is its own now
            self._look(source, order)
        return given

    def _look(self, source: int, order: list[tuple[int, int]]) -> None:
        event = self._first(source)
        if event is not None:
            heapq.heappush(order, (event.number, source))

    def _first(self, source: int) -> Event | None:
        """The oldest event that waits for a consumer, or for anybody."""
        if source == _ANYBODY:
            return self._loose[0] if self._loose else None
        heads = self._heads if source == _NOBODY else self._consumers[source].heads
        while heads:
            number, key = heads[0]
            queue, (owner, _) = self._queues.get(key), self._owners.get(key, (_NOBODY, 0))
            may = owner == source and key not in self._given_up and key not in self._resting
            if may and queue is not None and queue[0].number == number:
                return queue[0]
            heapq.heappop(heads)
        return None

    def _give(self, consumer: int, event: Event, free: _Free) -> None:
        self._consumers[consumer].in_flight[event.pubend, event.tick] = event
        self.waiting -= 1
        self.in_flight += 1
        free.give(consumer, event.size)
        if event.key is None:
            self._loose.popleft()
            return
        _, count = self._owners.get(event.key, (consumer, 0))
        self._consumers[consumer].keys += not count
        self._owners[event.key] = (consumer, count + 1)
        queue = self._queues[event.key]
        queue.popleft()
        if queue:
            self._queued(event.key)
        else:
            del self._queues[event.key]

    # ---- inspection

    def events(self) -> list[Event]:
        """All that are held."""
        in_flight = [event for consumer in self._consumers.values() for event in consumer.in_flight.values()]
        resting = [event for _, _, event in self._resting_loose]
        queued = [event for queue in self._queues.values() for event in queue]
        return [*in_flight, *self._loose, *resting, *queued, *self.aside.values()]

    def check(self) -> None:
        events = self.events()
        open_counts = Counter(event.source for event in events)
        if self._open_bytes != sum(event.size for event in events):
            raise BugError("group: the bytes of open events are miscounted")
        if self.batch_bytes != sum(len(source.batch.data) for source in open_counts):
            raise BugError("group: the bytes held are miscounted")
        if any(source.open != count for source, count in open_counts.items()):
            raise BugError("group: the open events of a batch are miscounted")
        if self.batch_bytes > 2 * self._open_bytes + SLACK_BYTES:
            raise BugError("group: few open events hold much in memory")
        flying = [event for consumer in self._consumers.values() for event in consumer.in_flight.values()]
        if (self.in_flight, self.waiting) != (len(flying), len(events) - len(flying)):
            raise BugError("group: what waits or is in flight is miscounted")
        for queue in (self._loose, *self._queues.values()):
            numbers = [event.number for event in queue]
            if numbers != sorted(numbers) or (not numbers and queue is not self._loose):
                raise BugError("group: what waits is out of order")
        if any(len(consumer.in_flight) > MAX_WINDOW for consumer in self._consumers.values()):
            raise BugError("group: a consumer holds more than its window")
        for key, (consumer, count) in self._owners.items():
            here = sum(event.key == key for event in self._consumers[consumer].in_flight.values())
            if here != count or sum(event.key == key for event in flying) != count:
                raise BugError("group: a key is in flight at two consumers, or is miscounted")
        if [consumer.keys for consumer in self._consumers.values()] != [
            sum(owner == number for owner, _ in self._owners.values()) for number in self._consumers
        ]:
            raise BugError("group: the keys of a consumer are miscounted")
        if self._counts != Counter(event.key for event in events if event.key is not None):
            raise BugError("group: the events of a key are miscounted")
        if not self._given_up <= self._owners.keys():
            raise BugError("group: a key is given up that nobody has")
        if not self._resting.keys() <= self._queues.keys():
            raise BugError("group: a key rests of which nothing waits")
        for key, queue in self._queues.items():
            owner = self._owners.get(key)
            heads = self._heads if owner is None else self._consumers[owner[0]].heads
            if key not in self._given_up | self._resting.keys() and (queue[0].number, key) not in heads:
                raise BugError("group: events of a key wait that nobody would find")


class _Free:
    """Consumers by how much they have in flight, during one `assign`."""

    __slots__ = ("_consumers", "_keyed", "_left", "_loose", "_share")

    def __init__(self, consumers: Mapping[int, _Consumer], room: Mapping[int, int], share: int) -> None:
        self._consumers = consumers
        self._share = share
        self._left = dict(room)  # bytes
        self._loose = [(len(consumer.in_flight), number) for number, consumer in consumers.items()]
        heapq.heapify(self._loose)  # counts may be out of date: too low, never too high
        self._keyed = self._loose.copy()  # those that may be given another key

    def has_room(self, consumer: int) -> bool:
        return len(self._consumers[consumer].in_flight) < MAX_WINDOW and self._left[consumer] > 0

    def give(self, consumer: int, size: int) -> None:
        self._left[consumer] -= size

    def least(self, *, keyed: bool) -> int | None:
        """Of those with room the one with the least in flight, the lowest number first."""
        order = self._keyed if keyed else self._loose
        while order:
            count, number = order[0]
            consumer = self._consumers[number]
            if not self.has_room(number) or (keyed and consumer.keys >= self._share):
                heapq.heappop(order)
            elif count < len(consumer.in_flight):
                heapq.heapreplace(order, (len(consumer.in_flight), number))
            else:
                return number
        return None
