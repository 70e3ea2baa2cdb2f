"""Shared durable subscriptions: several consumers under one name divide its events.

To the hosting broker the group is one subscriber whose token is kept by the broker. What it is sent comes
here, in tick order per pubend, and every event goes to one consumer: to the one that has the same key in
flight, so that events of one key are consumed in order, else to the one with the least in flight. Events
of a consumer that dies go to others, those of one key still in order. An event that was acknowledged is
never given out again, not even after a crash.

Acknowledgements come in any order. The token is the tick below the oldest event that is not acknowledged;
acknowledged ticks above it are saved as spans, and are left out when the token brings them back.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from postroad.durable.outputs import Deliver, DeliverGap, Message
from postroad.durable.spans import Span, union
from postroad.errors import BugError, UsageError
from postroad.events.attributes import Value
from postroad.events.batch import EventBatch
from postroad.storage.effects import Save, StorageEffect

TABLE: Final = "durable.groups"
MAX_CONSUMERS: Final = 1_024
MAX_IN_FLIGHT: Final = 4_096  # events held of one group, given out or not; then the group takes no more
MAX_WINDOW: Final = 1_024  # events in flight at one consumer


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


@dataclass(slots=True, order=True)
class _Event:
    number: int  # of arrival
    pubend: int = field(compare=False)
    tick: int = field(compare=False)
    batch: EventBatch = field(compare=False)
    row: int = field(compare=False)
    key: Value | None = field(compare=False)


@dataclass(slots=True)
class _Consumer:
    window: int
    in_flight: dict[tuple[int, int], _Event] = field(default_factory=dict)  # by (pubend, tick)


@dataclass(slots=True)
class _Progress:
    """One pubend."""

    told: int  # everything up to here was offered
    open: dict[int, None] = field(default_factory=dict)  # ticks offered and not acknowledged, in order
    acked: list[Span] = field(default_factory=list)  # acknowledged ticks above the token

    @property
    def token(self) -> int:
        return next(iter(self.open)) - 1 if self.open else self.told


class SharedSubscription:
    """The consumers of one group at its hosting broker."""

    def __init__(self, subscriber: int, *, key: str, new_tag: Callable[[], int]) -> None:
        self.subscriber = subscriber
        self._key = key  # attribute that orders; "" for none
        self._new_tag = new_tag
        self._consumers: dict[int, _Consumer] = {}
        self._waiting: list[_Event] = []  # offered and with no consumer, by number
        self._keys: dict[Value, tuple[int, int]] = {}  # key in flight -> (consumer, how many)
        self._progress: dict[int, _Progress] = {}
        self._gaps: deque[DeliverGap] = deque(maxlen=MAX_CONSUMERS)  # while there is no consumer to tell
        self._dirty: dict[int, None] = {}  # pubends whose acknowledged spans are to be saved
        self._saving: dict[int, tuple[int, ...]] = {}  # tag -> pubends on their way
        self._numbers = 0
        self.redelivered = 0

    # ---- consumers

    def join(self, consumer: int, window: int = MAX_WINDOW) -> list[Assign | AssignGap]:
        if consumer in self._consumers or len(self._consumers) >= MAX_CONSUMERS:
            raise UsageError(f"consumer {consumer} cannot join: it is here, or {MAX_CONSUMERS} are")
        if not 1 <= window <= MAX_WINDOW:
            raise UsageError(f"a window of {window} events, 1 to {MAX_WINDOW} are possible")
        self._consumers[consumer] = _Consumer(window)
        gaps, self._gaps = list(self._gaps), deque(maxlen=MAX_CONSUMERS)
        told: list[Assign | AssignGap] = [
            AssignGap(consumer=consumer, pubend=one.pubend, start=one.start, end=one.end) for one in gaps
        ]
        return told + self._assign()

    def leave(self, consumer: int) -> list[Assign | AssignGap]:
        """A consumer is gone: what it did not acknowledge goes to others."""
        held = self._consumers.pop(consumer, None)
        if held is None:
            return []
        self.redelivered += len(held.in_flight)
        for event in held.in_flight.values():
            self._drop_key(event)
            insort(self._waiting, event)
        return self._assign()

    @property
    def consumers(self) -> int:
        return len(self._consumers)

    @property
    def room(self) -> bool:
        """The group can be offered more: `room` of its subscriber for Hosting."""
        return bool(self._consumers) and self._held < MAX_IN_FLIGHT

    @property
    def _held(self) -> int:
        return len(self._waiting) + sum(len(one.in_flight) for one in self._consumers.values())

    def reset(self) -> None:
        """The group's stream begins again at its token: forget what was offered above it."""
        for consumer in self._consumers.values():
            consumer.in_flight.clear()
        self._waiting.clear()
        self._keys.clear()
        for progress in self._progress.values():
            progress.told = progress.token
            progress.open.clear()

    # ---- events

    def offer(self, message: Message) -> list[Assign | AssignGap]:
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
        ticks = batch.headers["tick"].tolist()
        for row in rows:
            tick = ticks[row]
            if any(start < tick <= end for start, end in progress.acked):
                continue
            self._numbers += 1
            key = batch.attributes(row).get(self._key) if self._key else None
            self._waiting.append(_Event(self._numbers, message.pubend, tick, batch, row, key))
            progress.open[tick] = None
        return self._assign()

    def _assign(self) -> list[Assign | AssignGap]:
        """Give out what can be, oldest first."""
        chosen: dict[tuple[int, int], list[_Event]] = {}  # (consumer, batch) -> its events
        left: list[_Event] = []
        blocked: set[Value] = set()
        for at, event in enumerate(self._waiting):
            consumer = None if event.key in blocked else self._choose(event)
            if consumer is None:
                left.append(event)
                if event.key is not None:
                    blocked.add(event.key)
                elif not self._key:
                    left += self._waiting[at + 1 :]  # without keys nobody else has room either
                    break
                continue
            self._consumers[consumer].in_flight[event.pubend, event.tick] = event
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

    def _choose(self, event: _Event) -> int | None:
        if event.key is not None and event.key in self._keys:
            consumer, _ = self._keys[event.key]
            held = self._consumers[consumer]
            return consumer if len(held.in_flight) < held.window else None
        free = [
            (len(one.in_flight), number)
            for number, one in self._consumers.items()
            if len(one.in_flight) < one.window
        ]
        return min(free)[1] if free else None

    def _drop_key(self, event: _Event) -> None:
        if event.key is None:
            return
        consumer, count = self._keys[event.key]
        if count > 1:
            self._keys[event.key] = (consumer, count - 1)
        else:
            del self._keys[event.key]

    def ack(self, consumer: int, pubend: int, ticks: Iterable[int]) -> list[Assign | AssignGap]:
        """A consumer is done with these events. What it does not hold (any more) is ignored."""
        held = self._consumers.get(consumer)
        if held is None:
            return []
        progress = self._progress.get(pubend)
        done: list[int] = []
        for tick in ticks:
            event = held.in_flight.pop((pubend, tick), None)
            if event is not None and progress is not None:
                self._drop_key(event)
                del progress.open[tick]
                done.append(tick)
        if progress is not None and done:
            spans = union([*progress.acked, *((tick - 1, tick) for tick in done)])
            progress.acked = [span for span in spans if span[1] > progress.token]
            self._dirty[pubend] = None
        return self._assign()

    def token(self) -> dict[int, int]:
        """Up to here everything was acknowledged: for `Hosting.ack`, after `flush`."""
        return {pubend: progress.token for pubend, progress in self._progress.items()}

    # ---- durability

    def flush(self) -> list[StorageEffect]:
        """Save the acknowledged ticks above the token."""
        if not self._dirty:
            return []
        tag = self._new_tag()
        rows = tuple((self._row_key(pubend), self._row(pubend)) for pubend in self._dirty)
        self._saving[tag] = tuple(self._dirty)
        self._dirty.clear()
        return [Save(table=TABLE, rows=rows, tag=tag)]

    def _row(self, pubend: int) -> bytes | None:
        acked = self._progress[pubend].acked
        return msgspec.msgpack.encode(acked) if acked else None

    def saved(self, tag: int) -> bool:
        return self._saving.pop(tag, None) is not None

    def save_failed(self, tag: int) -> bool:
        again = self._saving.pop(tag, None)
        if again is None:
            return False
        self._dirty.update(dict.fromkeys(again))
        return True

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
                self._progress[pubend].acked = [span for span in spans if span[1] > token[pubend]]

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
        if [event.number for event in self._waiting] != sorted(event.number for event in self._waiting):
            raise BugError("group: what waits is out of order")
        for one in self._consumers.values():
            if len(one.in_flight) > one.window:
                raise BugError("group: a consumer holds more than its window")
        for key, (consumer, count) in self._keys.items():
            here = sum(event.key == key for event in self._consumers[consumer].in_flight.values())
            if here != count or sum(event.key == key for event in held) != count:
                raise BugError("group: a key is in flight at two consumers, or is miscounted")
