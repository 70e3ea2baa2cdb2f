"""What a client receives as an application, until it is settled (spec Q7, Q10, responsibility 7; paper, 2.4).

A *consumer* is one inbox object. It comes again by itself after every lost connection, under the same
identity, and says every verdict again that was not answered. It refuses what comes from an earlier place than
it has seen: a broker that was replaced. A message that the application has or that is being settled is not
handed out again, though it may come with another key: a consumer that was away for long comes back to a later
attempt. One that it accepted is not either, but accepted again, since the first accept was lost on the way.
For that the last accepted id of each source is remembered, and of messages without order the last ones. What
came behind a transactional message that is being rejected waits here. Once that is confirmed, it is forgotten
here: the broker brings it again behind that one. Work counts only when a verdict is answered; `taken` means
that it counts for somebody else, and what came behind it is forgotten too: it is the other's, or comes again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from postroad.client.effects import Arrived, Effect, InboxEnded, Joined, Verdict
from postroad.errors import BugError, PeerError, PostroadError, UnavailableError, UsageError, from_wire
from postroad.events.attributes import decode_attributes
from postroad.links.handshake import printable
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire import frames as wire

MAX_WINDOW: Final = 4_096  # messages
MAX_KEYS: Final = 256  # of one SETTLE
MAX_KEY_BYTES: Final = 1_024
MAX_SOURCES: Final = 10_000  # sessions whose last accepted id is remembered
MAX_ACCEPTED: Final = 4_096  # messages without order
MAX_INBOXES: Final = 1_000  # of one client
SPARE: Final = 256  # messages over the window that may come while responsibility changes
PAUSE_US: Final = 50 * MILLISECOND_US  # before it asks again, doubled each time
MAX_PAUSE_US: Final = SECOND_US
MAX_REASON: Final = 1_000  # characters
Identity = tuple[str, bytes, int]  # of a message: its sender, its id
OUTCOMES: Final = frozenset({"accepted", "again", "dead", "taken", "early"})
_UNREADABLE: Final = "its attributes cannot be read"


@dataclass(slots=True, eq=False)
class Settlement:
    """A verdict on messages, to be said until it is answered."""

    verdict: str
    delay_us: int
    reason: str
    messages: list[Identity]
    keys: list[bytes]  # of the attempts that it is about
    tickets: list[int]  # the application's, one per key; 0: nobody waits
    since_us: int
    said: bool = False  # on this connection


@dataclass(slots=True, eq=False)
class Consumer:
    receive: wire.Receive
    since_us: int  # it asks since then, without an answer
    asked: bool = False  # on this connection
    joined: bool = False  # likewise
    again_us: int | None = None  # when it asks again, or says verdicts again
    pause_us: int = 0
    place: bytes = b""  # the highest seen
    # With the application, or being settled; each as it came last.
    unsettled: dict[Identity, wire.QueueMessage] = field(default_factory=dict)
    ready: deque[wire.QueueMessage] = field(default_factory=deque)  # of them, those to be handed out
    rejecting: dict[tuple[str, bytes], set[int]] = field(default_factory=dict)  # ids, by session
    settling: dict[int, Settlement] = field(default_factory=dict)  # by ticket on the wire
    fresh: list[Settlement] = field(default_factory=list)  # not said yet
    last: dict[tuple[str, bytes], int] = field(default_factory=dict)  # the last accepted id of a session
    accepted: dict[Identity, None] = field(default_factory=dict)  # messages without order


class Receiver:
    """All inboxes of a client."""

    def __init__(self, patience_us: int) -> None:
        self._patience_us = patience_us
        self._consumers: dict[int, Consumer] = {}
        self._last_number = 0
        self._last_ticket = 0  # on the wire
        self._last_verdict = 0  # ticket of the application
        self.open = False

    def __contains__(self, number: int) -> bool:
        return number in self._consumers

    # --- the connection

    def opened(self, now_us: int) -> list[wire.Message]:
        self.open = True
        for consumer in self._consumers.values():
            consumer.since_us = now_us
        return [self._ask(consumer) for consumer in self._consumers.values()]

    def _ask(self, consumer: Consumer) -> wire.Message:
        consumer.asked, consumer.again_us = True, None
        return consumer.receive

    def closed(self) -> None:
        self.open = False
        for consumer in self._consumers.values():
            consumer.asked = consumer.joined = False
            consumer.again_us = None
            for settlement in consumer.settling.values():
                settlement.said = False

    # --- the application's side

    def add(self, inbox: str, consumer: bytes, window: int, now_us: int) -> tuple[int, list[wire.Message]]:
        """A new consumer's number; Joined or InboxEnded follows."""
        if len(self._consumers) >= MAX_INBOXES:
            raise UsageError(f"more than {MAX_INBOXES} inboxes on one client")
        self._last_number += 1
        receive = wire.Receive(number=self._last_number, inbox=inbox, consumer=consumer, window=window)
        made = self._consumers[self._last_number] = Consumer(receive, since_us=now_us)
        return self._last_number, [self._ask(made)] if self.open else []

    def remove(self, number: int) -> list[wire.Message]:
        """What was not settled goes to somebody else."""
        consumer = self._consumers.pop(number, None)
        if consumer is None or not self.open or not consumer.asked:
            return []
        return [wire.Unreceive(number=number)]

    def settle(
        self,
        number: int,
        message: wire.QueueMessage,
        verdict: str,
        now_us: int,
        *,
        delay_us: int = 0,
        reason: str = "",
    ) -> int:
        """Say it with the next `take`; Verdict follows, under the ticket returned."""
        consumer = self._consumers.get(number)
        latest = None if consumer is None else consumer.unsettled.get(_identity(message))
        if consumer is None or latest is None:
            raise UsageError("this message is settled, or its inbox is closed")
        if verdict == "again" and message.form == "transactional":
            consumer.rejecting.setdefault(message.sender, set()).add(message.id)
        self._last_verdict += 1
        self._settle(consumer, latest, verdict, now_us, self._last_verdict, delay_us, reason)
        return self._last_verdict

    def _settle(
        self,
        consumer: Consumer,
        message: wire.QueueMessage,
        verdict: str,
        now_us: int,
        ticket: int,
        delay_us: int = 0,
        reason: str = "",
    ) -> None:
        last = consumer.fresh[-1] if consumer.fresh else None
        if (
            last is not None
            and (last.verdict, last.delay_us, last.reason) == (verdict, delay_us, reason)
            and len(last.keys) < MAX_KEYS
        ):
            last.messages.append(_identity(message))
            last.keys.append(message.key)
            last.tickets.append(ticket)
        else:
            consumer.fresh.append(
                Settlement(verdict, delay_us, reason, [_identity(message)], [message.key], [ticket], now_us)
            )

    def next(self, number: int) -> wire.QueueMessage | None:
        """The next message for the application, which is its own from then on; None: there is none now."""
        consumer = self._consumers.get(number)
        if consumer is None:
            return None
        for place, message in enumerate(consumer.ready):
            rejecting = consumer.rejecting.get(message.sender, ())
            if message.form == "transactional" and any(number < message.id for number in rejecting):
                continue
            del consumer.ready[place]
            return consumer.unsettled[_identity(message)]
        return None

    def take(self, now_us: int) -> list[wire.Message]:
        """Verdicts that are to be said now."""
        said: list[wire.Message] = []
        for number, consumer in self._consumers.items():
            self._number(consumer)
            if not consumer.joined or (consumer.again_us is not None and consumer.again_us > now_us):
                continue
            consumer.again_us = None
            for ticket, settlement in consumer.settling.items():
                if not settlement.said:
                    settlement.said = True
                    said.append(
                        wire.Settle(
                            number=number,
                            ticket=ticket,
                            keys=tuple(settlement.keys),
                            verdict=settlement.verdict,
                            delay_us=settlement.delay_us,
                            reason=settlement.reason,
                        )
                    )
        return said

    def _number(self, consumer: Consumer) -> None:
        for settlement in consumer.fresh:
            self._last_ticket += 1
            consumer.settling[self._last_ticket] = settlement
        consumer.fresh.clear()

    # --- what the broker says

    def receiving(self, message: wire.Receiving, now_us: int) -> list[Effect]:
        consumer = self._consumers.get(message.number)
        if consumer is None:
            return []
        if not message.code:
            consumer.joined = True
            consumer.pause_us = 0
            consumer.again_us = None
            return [Joined(number=message.number)]
        if consumer.joined:
            consumer.since_us = now_us
        consumer.joined = consumer.asked = False
        for settlement in consumer.settling.values():
            settlement.said = False
        error = from_wire(message.code, printable(message.reason))
        if message.code == "unavailable" and now_us - consumer.since_us < self._patience_us:
            self._pause(consumer, now_us)
            return []
        del self._consumers[message.number]
        return [InboxEnded(number=message.number, error=error)]

    def _pause(self, consumer: Consumer, now_us: int) -> None:
        consumer.pause_us = min(max(2 * consumer.pause_us, PAUSE_US), MAX_PAUSE_US)
        consumer.again_us = now_us + consumer.pause_us

    def messages(self, message: wire.Messages, now_us: int) -> list[Effect]:
        """PeerError if there are too many. What comes for a consumer that left is late, not wrong."""
        consumer = self._consumers.get(message.number)
        if consumer is None or message.place < consumer.place:
            return []
        consumer.place = message.place
        arrived = False
        for each in message.messages:
            if len(each.key) > MAX_KEY_BYTES:
                raise PeerError(f"a key of {len(each.key)} bytes, at most {MAX_KEY_BYTES} are possible")
            if _identity(each) in consumer.unsettled:
                consumer.unsettled[_identity(each)] = each
                continue
            if len(consumer.unsettled) >= 4 * consumer.receive.window + SPARE:
                window = consumer.receive.window
                raise PeerError(f"{len(consumer.unsettled)} messages are not settled, the window is {window}")
            consumer.unsettled[_identity(each)] = each
            if self._was_accepted(consumer, each):
                self._settle(consumer, each, "accept", now_us, 0)
            elif not _readable(each.attributes):
                self._settle(consumer, each, "dead", now_us, 0, reason=_UNREADABLE)
            else:
                _make_ready(consumer, each)
                arrived = True
        return [Arrived(number=message.number)] if arrived else []

    @staticmethod
    def _was_accepted(consumer: Consumer, message: wire.QueueMessage) -> bool:
        if message.form == "transactional":
            return message.id <= consumer.last.get(message.sender, 0)
        return _identity(message) in consumer.accepted

    def settled(self, message: wire.Settled, now_us: int) -> list[Effect]:
        """PeerError if it is about nothing. What was given up may be answered late."""
        if not 1 <= message.ticket <= self._last_ticket:
            raise PeerError(f"SETTLED {message.ticket}, only {self._last_ticket} verdicts were said")
        consumer = self._consumers.get(message.number)
        settlement = None if consumer is None else consumer.settling.get(message.ticket)
        if consumer is None or settlement is None:
            return []
        if message.code:
            error = from_wire(message.code, printable(message.reason))
            settlement.said = False
            if message.code == "unavailable" and now_us - settlement.since_us < self._patience_us:
                self._pause(consumer, now_us)
                return []
            return self._end_settlement(consumer, message.ticket, error=error)
        if len(message.outcomes) != len(settlement.keys) or not OUTCOMES.issuperset(message.outcomes):
            raise PeerError(
                f"SETTLED says {len(message.outcomes)} outcomes of {len(settlement.keys)} messages"
            )
        return self._end_settlement(consumer, message.ticket, outcomes=message.outcomes)

    def _end_settlement(
        self,
        consumer: Consumer,
        ticket: int,
        *,
        outcomes: Iterable[str] = (),
        error: PostroadError | None = None,
    ) -> list[Effect]:
        """With an error the messages stay with the application, which may say something else of them."""
        settlement = consumer.settling.pop(ticket)
        effects: list[Effect] = []
        said = list(outcomes) or [""] * len(settlement.keys)
        for identity, key, waiting, outcome in zip(
            settlement.messages, settlement.keys, settlement.tickets, said, strict=True
        ):
            message = consumer.unsettled.get(identity)
            if message is not None:
                self._end(consumer, message, outcome, later=message.key != key)
            if waiting:
                effects.append(Verdict(ticket=waiting, outcome=outcome, error=error))
        if consumer.ready:
            effects.append(Arrived(number=consumer.receive.number))
        return effects

    def _end(self, consumer: Consumer, message: wire.QueueMessage, outcome: str, *, later: bool) -> None:
        """What was said of a message is answered. `later`: it has come with a later attempt meanwhile."""
        session = message.sender
        rejecting = consumer.rejecting.get(session, set())
        rejecting.discard(message.id)
        if not rejecting:
            consumer.rejecting.pop(session, None)
        if outcome in ("", "early"):
            return
        if outcome == "accepted":
            del consumer.unsettled[_identity(message)]
            self._remember(consumer, message)
            return
        if later:
            _make_ready(consumer, message)
            return
        del consumer.unsettled[_identity(message)]
        if outcome in ("again", "taken"):
            for each in [each for each in consumer.ready if _is_behind(each, message)]:
                consumer.ready.remove(each)
                del consumer.unsettled[_identity(each)]

    @staticmethod
    def _remember(consumer: Consumer, message: wire.QueueMessage) -> None:
        """Oldest first, so that the oldest is forgotten."""
        if message.form == "transactional":
            source = message.sender
            consumer.last[source] = max(message.id, consumer.last.pop(source, 0))
            if len(consumer.last) > MAX_SOURCES:
                del consumer.last[next(iter(consumer.last))]
        else:
            consumer.accepted[_identity(message)] = None
            if len(consumer.accepted) > MAX_ACCEPTED:
                del consumer.accepted[next(iter(consumer.accepted))]

    # --- time

    def next_deadline(self) -> int | None:
        times = [
            settlement.since_us + self._patience_us
            for consumer in self._consumers.values()
            for settlement in [*consumer.settling.values(), *consumer.fresh][:1]
        ]
        if self.open:
            times += [
                consumer.again_us for consumer in self._consumers.values() if consumer.again_us is not None
            ]
        return min(times, default=None)

    def tick(self, now_us: int) -> tuple[list[wire.Message], list[Effect]]:
        """Who asks again; and verdicts that were not answered for too long."""
        asked: list[wire.Message] = []
        effects: list[Effect] = []
        for consumer in self._consumers.values():
            self._number(consumer)
            due = consumer.again_us is not None and consumer.again_us <= now_us
            if self.open and due and not consumer.asked:
                asked.append(self._ask(consumer))
            late = [
                ticket
                for ticket, settlement in consumer.settling.items()
                if settlement.since_us + self._patience_us <= now_us
            ]
            for ticket in late:
                error = UnavailableError("outcome unknown: no broker has confirmed it in time; say it again")
                effects += self._end_settlement(consumer, ticket, error=error)
        return asked, effects

    def check(self) -> None:
        """The invariants."""
        for consumer in self._consumers.values():
            settling = [message for each in consumer.settling.values() for message in each.messages]
            settling += [message for each in consumer.fresh for message in each.messages]
            if not consumer.unsettled.keys() >= set(settling):
                raise BugError("a message is being settled that nobody has")
            if not consumer.unsettled.keys() >= {_identity(message) for message in consumer.ready}:
                raise BugError("a message is ready that is settled")
            if (consumer.joined or consumer.asked) and not self.open:
                raise BugError("a consumer has joined without a connection")


def _identity(message: wire.QueueMessage) -> Identity:
    return (*message.sender, message.id)


def _make_ready(consumer: Consumer, message: wire.QueueMessage) -> None:
    """To be handed out, before all that is behind it in its session: some of that may have been here since
    before this message went to another consumer and came back."""
    place = len(consumer.ready)
    for distance, each in enumerate(reversed(consumer.ready), 1):
        if _is_behind(message, each):
            break
        if _is_behind(each, message):
            place = len(consumer.ready) - distance
    consumer.ready.insert(place, message)


def _is_behind(message: wire.QueueMessage, other: wire.QueueMessage) -> bool:
    """Whether it follows the other one in the order of their session. What is cheap is compared first."""
    return (
        message.session == other.session
        and message.id > other.id
        and message.form == other.form == "transactional"
        and message.sender == other.sender
    )


def _readable(attributes: bytes) -> bool:
    try:
        decode_attributes(attributes)
    except PeerError:
        return False
    return True
