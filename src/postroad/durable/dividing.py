"""How the events of a shared subscription are divided among its consumers.

An event without a key goes to the consumer with the least in flight. A key that is in flight belongs to the
consumer that has it, and its next events go there too, so that events of one key are consumed in order. With
a backlog no key would ever be free, and who joins would get nothing: when a consumer joins, each of the
others gives up the keys beyond its share. Such a key gets no more events until those in flight are
acknowledged; then it goes to whoever has the least.

The oldest event that somebody may have goes first. What waits is queued by key and found by heaps, so that
an acknowledgement costs what it sets free, not a walk over all that waits.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from postroad.errors import BugError
from postroad.events.attributes import Value
from postroad.events.batch import EventBatch

MAX_WINDOW: Final = 256  # events in flight at one consumer

_ANYBODY: Final = -1  # in the order of what waits: for whoever has the least
_Heads = list[tuple[int, Value]]  # a heap of (number of the first event that waits, its key)


@dataclass(frozen=True, slots=True)
class Event:
    number: int  # of arrival
    pubend: int
    tick: int
    batch: EventBatch
    row: int
    key: Value | None
    size: int


@dataclass(slots=True)
class _Consumer:
    in_flight: dict[tuple[int, int], Event] = field(default_factory=dict)  # by (pubend, tick)
    heads: _Heads = field(default_factory=list)  # keys that are its own; what is out of date is left out


class Division:
    """`available(c)`: bytes that a consumer has room for."""

    def __init__(self, *, available: Callable[[int], int]) -> None:
        self._available = available
        self._consumers: dict[int, _Consumer] = {}
        self._loose: deque[Event] = deque()  # those without a key that wait, by number
        self._queues: dict[Value, deque[Event]] = {}  # those with one, by key
        self._heads: _Heads = []  # keys that are nobody's; what is out of date is left out
        self._owners: dict[Value, tuple[int, int]] = {}  # key in flight -> (consumer, how many)
        self._given_up: set[Value] = set()  # those of them that get no more
        self.waiting = 0  # events
        self.in_flight = 0
        self.held_bytes = 0  # of both

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
        keys = len(self._owners) + sum(key not in self._owners for key in self._queues)
        share = -(-keys // len(self._consumers))
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
                self._queues.setdefault(event.key, deque()).appendleft(event)
        for event in left.in_flight.values():
            self._let_go(event)
        self.waiting += len(left.in_flight)
        self.in_flight -= len(left.in_flight)
        return len(left.in_flight)

    # ---- events

    def add(self, event: Event) -> None:
        self.waiting += 1
        self.held_bytes += event.size
        if event.key is None:
            self._loose.append(event)
            return
        queue = self._queues.setdefault(event.key, deque())
        queue.append(event)
        if len(queue) == 1:
            self._queued(event.key)

    def done(self, consumer: int, pubend: int, tick: int) -> bool:
        """False if it does not hold that event (any more)."""
        held = self._consumers.get(consumer)
        event = None if held is None else held.in_flight.pop((pubend, tick), None)
        if event is None:
            return False
        self.in_flight -= 1
        self.held_bytes -= event.size
        self._let_go(event)
        return True

    def clear(self) -> None:
        """Nothing is held; the consumers stay."""
        self._consumers = {number: _Consumer() for number in self._consumers}
        self._loose.clear()
        self._queues.clear()
        self._heads.clear()
        self._owners.clear()
        self._given_up.clear()
        self.waiting = self.in_flight = self.held_bytes = 0

    def _let_go(self, event: Event) -> None:
        """It is not in flight any more."""
        if event.key is None:
            return
        consumer, count = self._owners[event.key]
        if count > 1:
            self._owners[event.key] = (consumer, count - 1)
            return
        del self._owners[event.key]
        self._given_up.discard(event.key)
        if event.key in self._queues:
            self._queued(event.key)

    def _queued(self, key: Value) -> None:
        """The first event of a key waits for its owner, or for anybody."""
        if key in self._given_up:
            return
        owner = self._owners.get(key)
        heads = self._heads if owner is None else self._consumers[owner[0]].heads
        heapq.heappush(heads, (self._queues[key][0].number, key))

    # ---- giving out

    def assign(self) -> dict[tuple[int, int], list[Event]]:
        """Give out what can be, oldest first: (consumer, batch) -> events."""
        given: dict[tuple[int, int], list[Event]] = {}
        if not self.waiting or not self._consumers:
            return given
        free = _Free(self._consumers, self._available)
        order: list[tuple[int, int]] = []  # heap: (number of the oldest event, of whom or _ANYBODY)
        for source in (_ANYBODY, *self._consumers):
            self._look(source, order)
        while order:
            number, source = heapq.heappop(order)
            consumer = free.least() if source == _ANYBODY else source
            if consumer is None or not free.has_room(consumer):
                continue
            event = self._first(source)
            if event is None:
                continue
            if event.number == number:
                self._give(consumer, event, free)
                given.setdefault((consumer, id(event.batch)), []).append(event)
                if event.key is not None and source == _ANYBODY:
                    self._look(consumer, order)  # the key is its own now
            self._look(source, order)
        return given

    def _look(self, source: int, order: list[tuple[int, int]]) -> None:
        event = self._first(source)
        if event is not None:
            heapq.heappush(order, (event.number, source))

    def _first(self, source: int) -> Event | None:
        """The oldest event that waits for a consumer, or for anybody."""
        heads = self._heads if source == _ANYBODY else self._consumers[source].heads
        first = None
        while heads:
            number, key = heads[0]
            queue, (owner, _) = self._queues.get(key), self._owners.get(key, (_ANYBODY, 0))
            valid = queue is not None and queue[0].number == number and owner == source
            if queue is not None and valid and key not in self._given_up:
                first = queue[0]
                break
            heapq.heappop(heads)
        if source == _ANYBODY and self._loose and (first is None or self._loose[0].number < first.number):
            first = self._loose[0]
        return first

    def _give(self, consumer: int, event: Event, free: _Free) -> None:
        self._consumers[consumer].in_flight[event.pubend, event.tick] = event
        self.waiting -= 1
        self.in_flight += 1
        free.give(consumer, event.size)
        if event.key is None:
            self._loose.popleft()
            return
        _, count = self._owners.get(event.key, (consumer, 0))
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
        held = [event for one in self._consumers.values() for event in one.in_flight.values()]
        return [*held, *self._loose, *(event for queue in self._queues.values() for event in queue)]

    def check(self) -> None:
        events = self.events()
        if self.held_bytes != sum(event.size for event in events):
            raise BugError("group: the bytes held are miscounted")
        flying = [event for one in self._consumers.values() for event in one.in_flight.values()]
        if (self.in_flight, self.waiting) != (len(flying), len(events) - len(flying)):
            raise BugError("group: what waits or is in flight is miscounted")
        for queue in (self._loose, *self._queues.values()):
            numbers = [event.number for event in queue]
            if numbers != sorted(numbers) or (not numbers and queue is not self._loose):
                raise BugError("group: what waits is out of order")
        if any(len(one.in_flight) > MAX_WINDOW for one in self._consumers.values()):
            raise BugError("group: a consumer holds more than its window")
        for key, (consumer, count) in self._owners.items():
            here = sum(event.key == key for event in self._consumers[consumer].in_flight.values())
            if here != count or sum(event.key == key for event in flying) != count:
                raise BugError("group: a key is in flight at two consumers, or is miscounted")
        if not self._given_up <= self._owners.keys():
            raise BugError("group: a key is given up that nobody has")
        for key, queue in self._queues.items():
            owner = self._owners.get(key)
            heads = self._heads if owner is None else self._consumers[owner[0]].heads
            if key not in self._given_up and (queue[0].number, key) not in heads:
                raise BugError("group: events of a key wait that nobody would find")


class _Free:
    """Consumers by how much they have in flight, during one `assign`."""

    __slots__ = ("_consumers", "_left", "_order")

    def __init__(self, consumers: Mapping[int, _Consumer], available: Callable[[int], int]) -> None:
        self._consumers = consumers
        self._left = {number: available(number) for number in consumers}  # bytes
        self._order = [(len(one.in_flight), number) for number, one in consumers.items()]
        heapq.heapify(self._order)  # counts may be out of date: too low, never too high

    def has_room(self, consumer: int) -> bool:
        return len(self._consumers[consumer].in_flight) < MAX_WINDOW and self._left[consumer] > 0

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
