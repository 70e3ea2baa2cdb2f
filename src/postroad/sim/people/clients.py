"""Clients made of frames: they speak the wire protocol by themselves and write down what they see.

They are deliberately not the product's client, so that a fault there cannot hide one in the broker. A
publisher keeps what was not accepted and sends it again after a reconnect, with the same ids. A subscriber
gives credit back as it consumes; a slow one takes its time. Both come back after a closed connection, to
the same broker or, if they roam, to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from postroad.errors import BugError
from postroad.events import BatchBuilder, Value
from postroad.ids import IdSource, MessageId, volatile_pubend
from postroad.selectors import Selector
from postroad.sim.judge.ledger import Ledger, Published, Subscription
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.network import Network
from postroad.sim.machine.world import Timer, World
from postroad.units import MIB, MILLISECOND_US, SECOND_US
from postroad.wire.frames import (
    BATCH_KINDS,
    DEFAULT_LIMITS,
    PROTOCOL_VERSION,
    Accepted,
    Credit,
    Ended,
    Hello,
    Kind,
    Message,
    Ping,
    Pong,
    Refuse,
    Rejected,
    Skew,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Welcome,
    decode,
    encode,
)

RETRY_US: Final = (200 * MILLISECOND_US, 2 * SECOND_US)  # pause before dialling again, from .. to
MAX_UNACCEPTED: Final = 2_000  # frames a publisher keeps; it pauses when it has that many


class Client:
    """A connection that is kept up, and the handshake."""

    def __init__(
        self,
        world: World,
        network: Network,
        ledger: Ledger,
        *,
        name: str,
        addresses: tuple[str, ...],
        window: int,
    ) -> None:
        self.world = world
        self.network = network
        self.ledger = ledger
        self.name = name
        self.alive = True
        self.connection = 0  # 0: none
        self.welcome: Welcome | None = None  # of the present connection
        self.last_heard_us = 0
        self._addresses = addresses
        self._window = window
        self._resume: tuple[int, bytes] = (0, b"")
        self._retry: Timer | None = None
        self._chance = world.random(f"client/{name}")

    # -- the network's side

    def opened(self, connection: int, dialled: str | None) -> None:
        del dialled
        self.connection = connection
        publisher, key = self._resume
        self._send(
            Hello(
                version=PROTOCOL_VERSION,
                role="client",
                name=self.name,
                token="",
                limits=DEFAULT_LIMITS,
                window=self._window,
                time_us=self.world.now_us,
                publisher=publisher,
                resume_key=key,
            )
        )

    def received(self, connection: int, frame: bytes) -> None:
        if connection != self.connection:
            return
        self.last_heard_us = self.world.now_us
        if frame[4] in BATCH_KINDS:
            self._batch(frame)
            return
        message = decode(frame)
        match message:
            case Welcome():
                self.welcome = message
                self._resume = (message.publisher, message.resume_key)
                self._up(message)
            case Ping():
                self._send(Pong(time_us=message.time_us, at_us=self.world.now_us))
            case Pong():
                pass
            case Refuse():
                self._refused(message)
            case _:
                self._message(message)

    def closed(self, connection: int) -> None:
        if connection != self.connection:
            return
        self._down()
        self.connection, self.welcome = 0, None
        self._dial_later()

    def dial_failed(self, address: str) -> None:
        del address
        self._dial_later()

    # -- what the workload does

    def start(self) -> None:
        self.alive = True
        self.network.dial(self, self._addresses[0])

    def stop(self) -> None:
        """Leave for good."""
        if self._retry is not None:
            self._retry.cancel()
        if self.connection:
            self.network.close(self.connection)
            self.closed(self.connection)
        if self._retry is not None:
            self._retry.cancel()
        self.alive = False

    # -- what subclasses say

    def _up(self, welcome: Welcome) -> None:
        raise NotImplementedError

    def _down(self) -> None:
        raise NotImplementedError

    def _batch(self, frame: bytes) -> None:
        raise Violation("protocol", f"{self.name} got a {Kind(frame[4]).name} frame", self.tags)

    def _message(self, message: Message) -> None:
        raise Violation("protocol", f"{self.name} got {message!r}", self.tags)

    # -- inside

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.name, f"connection {self.connection}", f"connection {self.connection ^ 1}")

    def _refused(self, refuse: Refuse) -> None:
        if refuse.code != "unavailable":  # a broker that shuts down says so
            raise Violation("protocol", f"{self.name} was refused: {refuse.code} {refuse.reason}", self.tags)

    def _dial_later(self) -> None:
        if not self.alive:
            return
        self._addresses = (*self._addresses[1:], self._addresses[0])
        delay = self._chance.randint(*RETRY_US)
        self._retry = self.world.after(delay, lambda: self.network.dial(self, self._addresses[0]))

    def _send(self, message: Message) -> None:
        self.network.send(self, self.connection, encode(message))


class Publisher(Client):
    """Publishes what it is told to, and keeps it until it is accepted."""

    def __init__(
        self, world: World, network: Network, ledger: Ledger, *, name: str, addresses: tuple[str, ...]
    ) -> None:
        super().__init__(world, network, ledger, name=name, addresses=addresses, window=MIB)
        self._ids: IdSource | None = None
        self._number = (0, 0)  # publisher and broker that the ids are made of
        self._unaccepted: deque[list[Published]] = deque()  # frames in order, oldest first
        self._numbers: deque[int] = deque()  # their sequence on this connection, as far as sent
        self._sequence = 0
        self._credit = 0
        self._pubend = 0
        self.offset_us: int | None = None  # of its clock; None: it is right, and needs no adjustment
        self._adjust_us = 0  # of the clock in ids

    @property
    def ready(self) -> bool:
        return self.welcome is not None and len(self._unaccepted) < MAX_UNACCEPTED

    @property
    def addresses(self) -> tuple[str, ...]:
        """The brokers it knows."""
        return self._addresses

    @property
    def waiting(self) -> int:
        return len(self._unaccepted)

    def publish(self, events: list[tuple[str, dict[str, Value], bytes]]) -> None:
        """One frame of events, sent now or as soon as there is credit."""
        if self._ids is None:
            raise BugError(f"{self.name} publishes before it was ever welcome")
        frame: list[Published] = []
        for topic, attributes, payload in events:
            id = self._ids.next((self._now_us() + self._adjust_us) // MILLISECOND_US)
            event = Published(id=id, topic=topic, attributes=attributes, payload=payload, client=self.name)
            self.ledger.publish(event)
            frame.append(event)
        self._unaccepted.append(frame)
        self._flush()

    def _now_us(self) -> int:
        return self.world.now_us + (self.offset_us or 0)

    def _up(self, welcome: Welcome) -> None:
        if self.offset_us is not None:
            self._adjust_us = welcome.time_us - self._now_us()
        number = (welcome.publisher, welcome.broker)
        if self._ids is None or number != self._number:
            self._ids, self._number = IdSource(*number), number
        self._pubend = volatile_pubend(welcome.broker, welcome.boot)
        self._credit = welcome.window
        self._sequence = 0
        self._numbers.clear()
        self._flush()

    def _down(self) -> None:
        self._numbers.clear()

    def _flush(self) -> None:
        while self.welcome is not None and self._credit > 0 and len(self._numbers) < len(self._unaccepted):
            events = self._unaccepted[len(self._numbers)]
            builder = BatchBuilder()
            for event in events:
                builder.add(event.id, event.topic, event.attributes, event.payload, DEFAULT_LIMITS)
                event.sent.setdefault(self._pubend, self.world.now_us)
            self._sequence += 1
            frame = builder.finish(channel=self._sequence)
            self._numbers.append(self._sequence)
            self._credit -= len(frame)
            self.network.send(self, self.connection, frame)

    def _message(self, message: Message) -> None:
        match message:
            case Accepted(sequence=sequence):
                if sequence > self._sequence:
                    raise Violation(
                        "protocol", f"{self.name}: {sequence} accepted before it was sent", self.tags
                    )
                while self._numbers and self._numbers[0] <= sequence:
                    self._numbers.popleft()
                    for event in self._unaccepted.popleft():
                        self.ledger.accept(event, self._pubend, self.world.now_us)
            case Credit(size=size):
                self._credit += size
                self._flush()
            case Skew(correction_us=correction_us):
                self._adjust_us += min(0, correction_us)  # behind may mean that it waited here
            case Rejected():
                ids = tuple(str(MessageId.from_bytes(e.id)) for e in self._unaccepted[0])
                raise Violation("protocol", f"{self.name}: {message!r}", (*self.tags, *ids))
            case _:
                super()._message(message)


class Subscriber(Client):
    """Subscribes to what it is told to, on every connection anew."""

    def __init__(
        self,
        world: World,
        network: Network,
        ledger: Ledger,
        *,
        name: str,
        addresses: tuple[str, ...],
        broker_name: Callable[[int], str],
        window: int = MIB,
        consume: int = 0,
        buffer: int = 0,
    ) -> None:
        """`consume` is the rate in bytes a second at which a slow one works, 0 for at once."""
        super().__init__(world, network, ledger, name=name, addresses=addresses, window=window)
        self._broker_name = broker_name
        self._slow = consume > 0  # and has little room, also when it hurries
        self._consume = consume
        self._buffer = buffer
        self._wanted: dict[int, Selector] = {}  # what it wants, by a number of its own
        self._current: dict[int, Subscription] = {}  # subscriptions of this connection by number
        self._number_of: dict[int, int] = {}  # wanted -> number on this connection
        self._next_number = 1
        self._backlog: deque[int] = deque()  # sizes of frames not consumed yet
        self._working: Timer | None = None

    @property
    def current(self) -> list[Subscription]:
        return list(self._current.values())

    def want(self, key: int, selector: Selector) -> None:
        self._wanted[key] = selector
        if self.welcome is not None:
            self._subscribe(key)

    def unwant(self, key: int) -> None:
        self._wanted.pop(key, None)
        number = self._number_of.pop(key, None)
        if number is not None and self.welcome is not None:
            subscription = self._current.get(number)
            if subscription is not None:
                subscription.ended_us = self.world.now_us
            self._send(Unsubscribe(number=number))

    def hurry(self) -> None:
        """No longer slow."""
        self._consume = 0
        self._work()

    def _up(self, welcome: Welcome) -> None:
        del welcome
        self._next_number = 1
        for key in self._wanted:
            self._subscribe(key)

    def _down(self) -> None:
        for subscription in self._current.values():
            if not subscription.ended_us:
                subscription.ended_us = self.world.now_us
        self._current.clear()
        self._number_of.clear()
        self._backlog.clear()

    def _subscribe(self, key: int) -> None:
        if self.welcome is None:
            raise BugError(f"{self.name} is not connected")
        number, self._next_number = self._next_number, self._next_number + 1
        selector = self._wanted[key]
        subscription = Subscription(
            client=self.name,
            broker=self._broker_name(self.welcome.broker),
            connection=self.connection,
            number=number,
            selector=selector,
            slow=self._slow,
            asked_us=self.world.now_us,
        )
        self._number_of[key] = number
        self._current[number] = subscription
        self.ledger.subscribe(subscription)
        self._send(Subscribe(number=number, topic=selector.topic, where=selector.where, buffer=self._buffer))

    def _message(self, message: Message) -> None:
        match message:
            case Subscribed(number=number, missing=missing):
                subscription = self._current[number]
                subscription.missing = missing
                subscription.subscribed_us = self.world.now_us
                self.world.note(self.name, f"{subscription.name} is subscribed, missing {missing}")
            case Ended(number=number, code=code) if code in ("", "slow-consumer"):
                subscription = self._current.pop(number)
                if not subscription.ended_us:
                    subscription.ended_us = self.world.now_us
            case Credit():
                pass
            case _:
                super()._message(message)

    def _batch(self, frame: bytes) -> None:
        if frame[4] != Kind.DELIVERY:
            super()._batch(frame)
        number = int.from_bytes(frame[40:44], "little")
        subscription = self._current.get(number)
        if subscription is None:
            raise Violation(
                "protocol", f"{self.name} got a delivery for {number}, which it does not have", self.tags
            )
        self.ledger.deliver(subscription, frame)
        self._backlog.append(len(frame))
        self._work()

    def _work(self) -> None:
        """Consume what has come, at once or in its own time, and give the credit back."""
        if self._working is not None:
            if self._consume:
                return
            self._working.cancel()
            self._working = None
        if not self._consume:
            size = sum(self._backlog)
            self._backlog.clear()
            if size and self.connection:
                self._send(Credit(size=size))
        elif self._backlog:
            delay = self._backlog[0] * SECOND_US // self._consume
            connection = self.connection
            self._working = self.world.after(delay, lambda: self._worked(connection))

    def _worked(self, connection: int) -> None:
        self._working = None
        if connection == self.connection and self._backlog:
            self._send(Credit(size=self._backlog.popleft()))
        self._work()
