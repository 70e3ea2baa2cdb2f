"""Brokers in memory whose frames are carried by hand, and their clients."""

from __future__ import annotations

import random
from collections import deque

from postroad.broker.core import Broker
from postroad.config import BrokerConfig
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.ids import Identity, IdSource
from postroad.queues.settings import QueueConfig
from postroad.seam.effects import Close, Effect, Send
from postroad.seam.inputs import Closed, Input, Opened, Received
from postroad.wire.frames import (
    DEFAULT_LIMITS,
    Credit,
    Hello,
    Kind,
    Message,
    Ping,
    Pong,
    Subscribe,
    Welcome,
    decode,
    encode,
    frame_kind,
)

SECOND_US = 1_000_000

# A ring that says nothing but what it takes to join: hours pass quickly.
QUIET = QueueConfig(heartbeat_us=3_600 * SECOND_US, silent_us=7_200 * SECOND_US)


class Client:
    """The other end of a client connection."""

    def __init__(self, net: Net, at: int, token: str = "") -> None:
        self.net, self.at = net, at
        self.connection = net.open(at, self)
        self.messages: list[Message] = []
        self.batches: list[EventBatch] = []
        hello = Hello(
            version=1, role="client", name="c", token=token, limits=DEFAULT_LIMITS, window=1 << 22, time_us=0
        )
        self.send(encode(hello))
        welcome = self.messages[0]
        assert isinstance(welcome, Welcome)
        self.ids = IdSource(welcome.publisher, welcome.broker)
        self.sequence = 0

    def send(self, *frames: bytes) -> None:
        self.net.give(self.at, [Received(self.connection, frame) for frame in frames])

    def take(self, frame: bytes) -> None:
        if frame_kind(frame) == Kind.DELIVERY:
            self.batches.append(EventBatch.parse(frame, DEFAULT_LIMITS))
            self.net.give(self.at, [Received(self.connection, encode(Credit(size=len(frame))))])
            return
        message = decode(frame)
        self.messages.append(message)
        if isinstance(message, Ping):
            pong = Pong(time_us=message.time_us, at_us=self.net.now_us)
            self.net.give(self.at, [Received(self.connection, encode(pong))])

    def frame(self, topic: str, *payloads: str, **attributes: int) -> bytes:
        builder = BatchBuilder()
        for payload in payloads:
            now_ms = self.net.now_us // 1000
            builder.add(self.ids.next(now_ms), topic, attributes, payload.encode(), DEFAULT_LIMITS)
        self.sequence += 1
        return builder.finish(channel=self.sequence)

    def publish(self, topic: str, *payloads: str, **attributes: int) -> None:
        self.send(self.frame(topic, *payloads, **attributes))

    def subscribe(self, number: int, topic: str, where: str = "") -> None:
        self.send(encode(Subscribe(number=number, topic=topic, where=where)))

    def got(self) -> list[str]:
        """Payloads in order of arrival, a gap as "GAP"."""
        found: list[str] = []
        for batch in self.batches:
            found += ["GAP"] if batch.lost else [event.payload.decode() for event in batch.events()]
        return found

    def has(self, kind: type[Message]) -> bool:
        return any(isinstance(message, kind) for message in self.messages)


class Net:
    """Brokers joined by links that carry frames at once and in order."""

    def __init__(self, count: int, links: list[tuple[int, int]] = []) -> None:  # noqa: B006
        self.now_us = 1_700_000_000 * SECOND_US
        self.ahead_us: dict[int, int] = {}  # broker -> by how much its clock is ahead
        self.boots = [0] * count
        self.brokers: list[Broker | None] = [None] * count
        self.ends: dict[
            tuple[int, int], tuple[int, int] | Client
        ] = {}  # (broker, connection) -> the other end
        self.last_connection = 0
        self.queue: deque[tuple[int, list[Input]]] = deque()
        self.running = False
        for at in range(count):
            self.start(at)
        for one, other in links:
            self.link(one, other)

    def start(self, at: int) -> None:
        self.boots[at] += 1
        identity = Identity(
            number=at + 1,
            node=bytes([at + 1]) * 16,
            name=f"b{at}",
            boot=self.boots[at],
            starts=self.boots[at],
        )
        draw = random.Random(at).randrange
        self.brokers[at] = Broker(BrokerConfig(), identity, draw=draw, now_us=self.clock(at))

    def clock(self, at: int) -> int:
        return self.now_us + self.ahead_us.get(at, 0)

    def kill(self, at: int) -> None:
        self.brokers[at] = None
        for end, other in [item for item in self.ends.items() if item[0][0] == at]:
            self.ends.pop(end, None)
            if not isinstance(other, Client):
                self.ends.pop(other, None)
                self.give(other[0], [Closed(other[1])])

    def open(self, at: int, client: Client) -> int:
        self.last_connection += 1
        self.ends[at, self.last_connection] = client
        self.give(at, [Opened(self.last_connection)])
        return self.last_connection

    def link(self, one: int, other: int) -> None:
        near, far = self.last_connection + 1, self.last_connection + 2
        self.last_connection += 2
        self.ends[one, near], self.ends[other, far] = (other, far), (one, near)
        self.give(other, [Opened(far)])
        self.give(one, [Opened(near, dialled=f"b{other}")])

    def cut(self, one: int, other: int) -> None:
        for end, far in list(self.ends.items()):
            if end[0] == one and not isinstance(far, Client) and far[0] == other:
                del self.ends[end], self.ends[far]
                self.give(one, [Closed(end[1])])
                self.give(other, [Closed(far[1])])

    def give(self, at: int, inputs: list[Input]) -> None:
        self.queue.append((at, inputs))
        if self.running:
            return
        self.running = True
        while self.queue:
            at, inputs = self.queue.popleft()
            broker = self.brokers[at]
            if broker is not None:
                self.now_us += 10
                self.perform(at, broker.handle(inputs, self.clock(at)))
                broker.check()
        self.running = False

    def perform(self, at: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                end = self.ends.get((at, effect.connection))
                if isinstance(end, Client):
                    end.take(effect.data)
                elif end is not None:
                    self.queue.append((end[0], [Received(end[1], effect.data)]))
            elif isinstance(effect, Close):
                end = self.ends.pop((at, effect.connection), None)
                self.queue.append((at, [Closed(effect.connection)]))
                if end is not None and not isinstance(end, Client):
                    self.ends.pop(end, None)
                    self.queue.append((end[0], [Closed(end[1])]))

    def wait(self, seconds: float) -> None:
        """Let virtual time pass, in steps of a tenth of a second; as with drivers, brokers sleep until they
        have something to do."""
        for _ in range(round(seconds * 10)):
            self.now_us += SECOND_US // 10
            for at, broker in enumerate(self.brokers):
                if broker is not None and broker.next_deadline() <= self.clock(at):
                    self.give(at, [])


def numbers(first: int, last: int) -> list[str]:
    return [str(number) for number in range(first, last)]
