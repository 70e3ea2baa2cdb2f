"""What clients saw: the ground truth against which the network is judged.

Publishers write down every event before they send it and when it was accepted; subscribers write down
every frame they get. The rules that need no waiting are checked as frames arrive:

- `known`      nobody gets an event that nobody published, or one whose content has changed
- `match`      nobody gets an event that its selector does not match
- `once`       no subscription gets an event twice
- `order`      ticks of a pubend, and ids of a publisher within a pubend, only increase; spans never go back
- `tick`       an event has the same tick in its pubend for everybody
- `gap`        a gap is reported only where something explains it, and nothing inside it arrives later

Plain mode keeps events in the publishing broker's memory. A publisher whose broker died before it answered
sends the event again to another start of a broker, which cannot know whether it was spread before, so such
an event may arrive once from each of the pubends it was sent to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from postroad.events import Event, EventBatch, Value
from postroad.ids import MessageId, pubend_text
from postroad.selectors import Selector
from postroad.sim.judge.violation import Violation
from postroad.wire.frames import DEFAULT_LIMITS, Kind

NEVER: Final = 1 << 62


@dataclass(slots=True, kw_only=True)
class Published:
    """One event as its publisher knows it."""

    id: bytes
    topic: str
    attributes: dict[str, Value]
    payload: bytes
    client: str
    sent: dict[int, int] = field(default_factory=dict)  # pubend it was sent to -> when first
    accepted: int = 0  # pubend that accepted it
    rejected: bool = False  # its publisher was told that it is not kept
    accepted_us: int = 0

    @property
    def text(self) -> str:
        return str(MessageId.from_bytes(self.id))


@dataclass(slots=True)
class Seen:
    """What one subscription saw of one pubend."""

    end: int = -NEVER
    ticks: dict[bytes, int] = field(default_factory=dict)  # event -> tick, in order of arrival
    gaps: list[tuple[int, int]] = field(default_factory=list)
    last_id: dict[bytes, bytes] = field(default_factory=dict)  # publisher -> its last id

    def in_gap(self, low: int, high: int) -> bool:
        """Whether a reported gap (start, end] has a tick in [low, high]."""
        return any(start < high and low <= end for start, end in self.gaps)


@dataclass(slots=True, kw_only=True)
class Subscription:
    """One subscription on one connection, from SUBSCRIBE to its end."""

    client: str
    broker: str
    connection: int
    number: int
    selector: Selector
    slow: bool
    asked_us: int
    subscribed_us: int = 0  # 0: not confirmed yet
    missing: tuple[str, ...] = ()
    ended_us: int = 0  # 0: still going on
    count: int = 0
    seen: dict[int, Seen] = field(default_factory=dict)  # by pubend

    @property
    def name(self) -> str:
        return f"{self.client}#{self.number}@{self.broker}[{self.connection}]"

    @property
    def tags(self) -> tuple[str, ...]:
        return (f"connection {self.connection}", self.client)

    def got(self, id: bytes) -> bool:
        return any(id in seen.ticks for seen in self.seen.values())


class Ledger:
    """Everything that clients sent and saw."""

    def __init__(self, explained: Callable[[Subscription, int], bool]) -> None:
        """`explained(subscription, pubend)`: the world knows a reason for a gap there."""
        self.events: dict[bytes, Published] = {}
        self.subscriptions: list[Subscription] = []
        self.ticks: dict[tuple[int, bytes], int] = {}  # (pubend, event) -> tick
        self.accepted = 0
        self.deliveries = 0
        self.gaps = 0
        self._explained = explained

    def publish(self, event: Published) -> None:
        self.events[event.id] = event

    def accept(self, event: Published, pubend: int, now_us: int) -> None:
        if not event.accepted:
            self.accepted += 1
            event.accepted, event.accepted_us = pubend, now_us

    def subscribe(self, subscription: Subscription) -> None:
        self.subscriptions.append(subscription)

    def deliver(self, subscription: Subscription, frame: bytes) -> None:
        """A DELIVERY frame arrived at its subscriber."""
        batch = EventBatch.parse(frame, DEFAULT_LIMITS, expect=Kind.DELIVERY)
        pubend = batch.pubend
        seen = subscription.seen.setdefault(pubend, Seen())
        tags = (*subscription.tags, pubend_text(pubend))
        if batch.lost:
            self._gap(subscription, seen, batch, tags)
        ticks = batch.headers["tick"].tolist()
        for event, tick in zip(batch.events(), ticks, strict=True):
            self._event(subscription, seen, pubend, event, tick, tags)
        span = f"({batch.start}, {batch.end}] of {pubend_text(pubend)}"
        if batch.end < batch.start or (seen.end > batch.start and not batch.lost):
            text = f"{subscription.name} knew everything up to {seen.end}, then got {span}"
            raise Violation("order", text, tags)
        if ticks and not (batch.start < ticks[0] and ticks[-1] <= batch.end):
            raise Violation("order", f"{subscription.name} got ticks {ticks} in a frame about {span}", tags)
        seen.end = max(seen.end, batch.end)

    def _gap(self, subscription: Subscription, seen: Seen, batch: EventBatch, tags: tuple[str, ...]) -> None:
        self.gaps += 1
        text = f"{subscription.name} was told of a gap ({batch.start}, {batch.end}]"
        if any(batch.start < tick <= batch.end for tick in seen.ticks.values()):
            raise Violation("gap", f"{text} with events in it that it already has", tags)
        if not self._explained(subscription, batch.pubend):
            raise Violation("gap", f"{text} of {pubend_text(batch.pubend)} that nothing explains", tags)
        seen.gaps.append((batch.start, batch.end))

    def _event(
        self,
        subscription: Subscription,
        seen: Seen,
        pubend: int,
        event: Event,
        tick: int,
        tags: tuple[str, ...],
    ) -> None:
        id = bytes(event.id)
        tags = (str(event.id), *tags)
        known = self.events.get(id)
        if known is None:
            raise Violation("known", f"{subscription.name} got {event.id}, which nobody published", tags)
        if (known.topic, known.attributes, known.payload) != (
            event.topic,
            dict(event.attributes),
            event.payload,
        ):
            raise Violation("known", f"{subscription.name} got {event.id} with other content", tags)
        if pubend not in known.sent:
            text = f"{subscription.name} got {event.id} from {pubend_text(pubend)}, where it was not sent"
            raise Violation("known", text, tags)
        if not subscription.selector.matches(event.topic, event.attributes):
            text = f"{subscription.name} got {event.id}, which {subscription.selector} does not match"
            raise Violation("match", text, tags)
        if id in seen.ticks or (subscription.got(id) and len(known.sent) == 1):
            raise Violation("once", f"{subscription.name} got {event.id} twice", tags)
        last = next(reversed(seen.ticks.values()), -NEVER)
        if tick <= last:
            text = f"{subscription.name} got {event.id} at tick {tick} after tick {last}"
            raise Violation("order", text, tags)
        publisher = id[:8]
        if id <= seen.last_id.get(publisher, b""):
            before = MessageId.from_bytes(seen.last_id[publisher])
            raise Violation(
                "order", f"{subscription.name} got {event.id} after {before}", (str(before), *tags)
            )
        if seen.in_gap(tick, tick):
            raise Violation(
                "gap", f"{subscription.name} got {event.id} at tick {tick} inside a reported gap", tags
            )
        if self.ticks.setdefault((pubend, id), tick) != tick:
            other = self.ticks[pubend, id]
            raise Violation("tick", f"{event.id} has tick {tick} for one and {other} for another", tags)
        seen.ticks[id] = tick
        seen.last_id[publisher] = id
        subscription.count += 1
        self.deliveries += 1
