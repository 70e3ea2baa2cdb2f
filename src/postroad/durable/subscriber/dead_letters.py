"""Dead letters: what was tried too often is published once, durably, before it counts as done.

A dead letter is a durable event of this broker on the topic that the subscription names. Its id is saved with
the event it stands for before it is published, and these ids only increase, one bundle after the other. So
after a crash, or when the disk refused one, the last id in the log tells which of them were published: those
are done, and all others get a new id. That is found out for all groups, also those that nobody reads now, and
is on disk before anything else is published: a later id in the log would make all of them look published.
One bundle is under way at a time, of whatever groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from postroad.durable.subscriber.dividing import Event
from postroad.durable.subscriber.groups import SharedSubscription
from postroad.errors import TooLargeError
from postroad.events.attributes import Value
from postroad.events.batch import TTL, BatchBuilder, EventBatch
from postroad.ids import DEAD_LETTERS_PUBLISHER, MessageId
from postroad.seam.turn import Turn
from postroad.units import MIB, MILLISECOND_US, SECOND_US
from postroad.wire.frames import Limits

MAX_BUNDLE: Final = 256  # dead letters under way
BUNDLE_BYTES: Final = MIB  # of their payloads; one may be larger
RETRY_US: Final = SECOND_US  # after the disk refused
# Attributes that a dead letter has beside those of its event.
TOPIC: Final = "dead_topic"
ID: Final = "dead_id"
ATTEMPTS: Final = "dead_attempts"
SUBSCRIPTION: Final = "dead_subscription"
_REST_BYTES: Final = 8  # of an id, behind its publisher and broker


class Publishing(Protocol):
    def newest(self, prefix: bytes) -> bytes | None:
        """Time and counter of the last id that begins so; None while that is not known."""

    def publish_for(self, turn: Turn, batch: EventBatch, settled: Callable[[Turn, bool], None]) -> None: ...


@dataclass(slots=True)
class Grave:
    """A group whose events may be dead letters."""

    name: str
    topic: str
    shared: SharedSubscription


@dataclass(slots=True)
class _Burial:
    subscriber: int
    grave: Grave
    event: Event
    identity: bytes


class DeadLetters:
    """`graves`: all groups. `save(subscriber, then)`: what the group says of its dead letters is to be on
    disk; `buried`: it has changed."""

    def __init__(
        self,
        *,
        me: int,
        limits: Limits,
        publishing: Publishing,
        graves: Mapping[int, Grave],
        save: Callable[[int, Callable[[Turn, bool], None]], None],
        buried: Callable[[Turn, int], None],
    ) -> None:
        self._prefix = bytes(MessageId(DEAD_LETTERS_PUBLISHER, me, 0, 0))[:_REST_BYTES]
        self._limits = limits
        self._publishing = publishing
        self._graves = graves
        self._save = save
        self._buried = buried
        self._doubtful = True  # ids may have been given to what was not published
        self._resolved: dict[int, None] = {}  # groups of which that is known, and is to be on disk
        self._under_way: list[_Burial] = []
        self._unsaved = 0  # groups of either that are not on disk yet
        self._refused = False  # the disk did not take one of them
        self.retry_at = 0  # when the disk is asked again, or the log may have been read

    def tick(self, turn: Turn, subscribers: Iterable[int]) -> None:
        """Begin the next bundle, if something of these groups is set aside and none is under way."""
        if self.busy or turn.now_us < self.retry_at:
            return
        waiting = [
            (subscriber, self._graves[subscriber], event)
            for subscriber in subscribers
            if subscriber in self._graves and self._graves[subscriber].topic
            for event in self._graves[subscriber].shared.aside
        ]
        newest = self._publishing.newest(self._prefix) if waiting else None
        if newest is None:
            self.retry_at = turn.now_us + RETRY_US if waiting else 0
            return
        self._resolve(turn, newest)
        if not self._resolved:
            self._begin(turn, waiting, newest)

    def _resolve(self, turn: Turn, newest: bytes) -> None:
        """Find out which of the ids that were given were published, and save that."""
        for subscriber, grave in self._graves.items() if self._doubtful else ():
            if grave.shared.resolve(self._prefix + newest):
                self._resolved[subscriber] = None
        self._doubtful = False
        self._resolved = {subscriber: None for subscriber in self._resolved if subscriber in self._graves}
        self._unsaved, self._refused = len(self._resolved), False
        for subscriber in self._resolved:
            self._save(subscriber, self._saved_resolved)
            self._buried(turn, subscriber)

    def _saved_resolved(self, turn: Turn, accepted: bool) -> None:
        self._unsaved -= 1
        self._refused |= not accepted
        if self._unsaved:
            return
        if self._refused:
            self.retry_at = turn.now_us + RETRY_US
        else:
            self._resolved.clear()

    def _begin(self, turn: Turn, waiting: Iterable[tuple[int, Grave, Event]], newest: bytes) -> None:
        size, last = 0, int.from_bytes(newest or bytes(_REST_BYTES), "big")
        for subscriber, grave, event in waiting:
            if len(self._under_way) == MAX_BUNDLE or size > BUNDLE_BYTES:
                break
            size += event.size
            last = max(last + 1, turn.now_us // MILLISECOND_US << 16)
            identity = self._prefix + last.to_bytes(_REST_BYTES, "big")
            grave.shared.give_id(event, identity)
            self._under_way.append(_Burial(subscriber, grave, event, identity))
        subscribers = dict.fromkeys(burial.subscriber for burial in self._under_way)
        self._unsaved, self._refused = len(subscribers), False
        for subscriber in subscribers:
            self._save(subscriber, self._saved)

    def _saved(self, turn: Turn, accepted: bool) -> None:
        """The ids of one group are on disk, or not; that of a deleted group counts as saved."""
        self._unsaved -= 1
        self._refused |= not accepted
        if self._unsaved:
            return
        if self._refused:
            self._settled(turn, accepted=False)
            return
        builder = BatchBuilder()
        for burial in self._under_way:
            self._add(builder, burial)
        frame = EventBatch.parse(builder.finish(channel=0, durable=True), self._limits)
        self._publishing.publish_for(
            turn, frame, lambda turn, accepted: self._settled(turn, accepted=accepted)
        )

    def _add(self, builder: BatchBuilder, burial: _Burial) -> None:
        """As much of the event as fits beside what is said of it. Its time to live was for its consumers:
        whoever looks at dead letters comes later."""
        event = burial.event.source.batch.event(burial.event.row)
        own = {name: value for name, value in event.attributes.items() if name != TTL}
        about: dict[str, Value] = {
            TOPIC: event.topic,
            ID: str(event.id),
            ATTEMPTS: burial.event.attempt - 1,
            SUBSCRIPTION: burial.grave.name,
        }
        for attributes, payload in ((own, event.payload), ({}, event.payload), ({}, b"")):
            try:
                builder.add(
                    burial.identity, burial.grave.topic, {**attributes, **about}, payload, self._limits
                )
            except TooLargeError:
                continue
            return
        raise TooLargeError("a dead letter without attributes and payload is too large")

    def _settled(self, turn: Turn, *, accepted: bool) -> None:
        burials, self._under_way = self._under_way, []
        if not accepted:
            self._doubtful = True
            self.retry_at = turn.now_us + RETRY_US
            return
        for burial in burials:
            burial.grave.shared.bury(burial.event.pubend, burial.event.tick)
        for subscriber in dict.fromkeys(burial.subscriber for burial in burials):
            self._buried(turn, subscriber)

    @property
    def busy(self) -> bool:
        """Something is on its way to disk."""
        return bool(self._under_way) or self._unsaved > 0
