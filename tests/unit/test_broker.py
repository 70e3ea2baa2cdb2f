"""The broker core alone and in small networks, without sockets: frames are carried by hand, in order."""

from __future__ import annotations

import random
from collections import deque

from postroad.broker.core import Broker, Closed, Input, Opened, Received
from postroad.config import DEFAULT_LIMITS, BrokerConfig, Identity
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.ids import IdSource
from postroad.seam.effects import Close, Effect, Send
from postroad.wire.frames import (
    Accepted,
    Credit,
    Hello,
    Kind,
    Message,
    Ping,
    Pong,
    Refuse,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Welcome,
    decode,
    encode,
    frame_kind,
)

SECOND_US = 1_000_000


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
        self.brokers[at] = Broker(BrokerConfig(), identity, draw=draw, now_us=self.now_us)

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
                self.perform(at, broker.handle(inputs, self.now_us))
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
        """Let virtual time pass, in steps of a tenth of a second."""
        for _ in range(round(seconds * 10)):
            self.now_us += SECOND_US // 10
            for at in range(len(self.brokers)):
                self.give(at, [])


RING = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]


def numbers(first: int, last: int) -> list[str]:
    return [str(number) for number in range(first, last)]


def test_one_broker_delivers_what_matches() -> None:
    net = Net(1)
    subscriber, publisher = Client(net, 0), Client(net, 0)
    subscriber.subscribe(1, "orders/#", "price > 100")
    assert subscriber.has(Subscribed)
    publisher.publish("orders/eu", "dear", price=120)
    publisher.publish("orders/eu", "cheap", price=80)
    publisher.publish("else", "elsewhere", price=120)
    assert subscriber.got() == ["dear"]
    assert publisher.has(Accepted)


def test_a_repeated_publish_frame_is_accepted_and_delivered_once() -> None:
    net = Net(1)
    subscriber, publisher = Client(net, 0), Client(net, 0)
    subscriber.subscribe(1, "t")
    frame = publisher.frame("t", "a", "b")
    publisher.send(frame, frame)
    publisher.send(frame)
    assert subscriber.got() == ["a", "b"]


def test_events_cross_a_line_of_brokers_in_order() -> None:
    net = Net(5, [(0, 1), (1, 2), (2, 3), (3, 4)])
    subscriber, publisher = Client(net, 4), Client(net, 0)
    subscriber.subscribe(1, "t")
    assert [m.missing for m in subscriber.messages if isinstance(m, Subscribed)] == [()]
    for number in range(50):
        publisher.publish("t", str(number))
    assert subscriber.got() == numbers(0, 50)


def test_in_a_ring_each_event_arrives_once() -> None:
    net = Net(5, RING)
    subscribers = [Client(net, at) for at in range(5)]
    for subscriber in subscribers:
        subscriber.subscribe(1, "t")
    publishers = [Client(net, at) for at in range(5)]
    for number in range(10):
        for at, publisher in enumerate(publishers):
            publisher.publish("t", f"{at}-{number}")
    for subscriber in subscribers:
        got = subscriber.got()
        assert len(got) == 50
        for at in range(5):
            assert [one for one in got if one.startswith(f"{at}-")] == [f"{at}-{n}" for n in range(10)]


def test_events_go_only_where_somebody_wants_them() -> None:
    net = Net(3, [(0, 1), (1, 2)])
    Client(net, 1).subscribe(1, "near")
    publisher = Client(net, 0)
    publisher.publish("far", "nobody")
    publisher.publish("near", "one hop")
    middle, edge = net.brokers[1], net.brokers[2]
    assert middle is not None
    assert edge is not None
    assert middle.metrics()["deliveries_total"] == 1
    assert middle.metrics()["events_forwarded_total"] == 0


def test_a_cut_link_is_routed_around_without_loss_or_repeat() -> None:
    net = Net(5, RING)
    subscriber, publisher = Client(net, 2), Client(net, 0)
    subscriber.subscribe(1, "t")
    publisher.publish("t", *numbers(0, 10))
    net.cut(1, 2)
    publisher.publish("t", *numbers(10, 20))
    net.cut(3, 4)
    publisher.publish("t", *numbers(20, 30))  # nobody can reach it now
    net.wait(3)
    assert subscriber.got() == numbers(0, 20)
    net.link(1, 2)
    net.wait(3)
    assert subscriber.got() == numbers(0, 30)


def test_the_loss_of_a_publishing_brokers_memory_is_reported_as_a_gap() -> None:
    net = Net(3, [(0, 1), (1, 2)])
    subscriber, publisher = Client(net, 2), Client(net, 0)
    subscriber.subscribe(1, "t")
    publisher.publish("t", *numbers(0, 5))
    net.cut(0, 1)
    publisher.publish("t", *numbers(5, 10))
    net.kill(0)
    net.wait(1)
    net.start(0)
    publisher = Client(net, 0)
    publisher.publish("t", *numbers(10, 15))  # before anybody is linked to the new process
    net.link(0, 1)
    net.wait(3)
    got = subscriber.got()
    assert [one for one in got if one != "GAP"] == [*numbers(0, 5), *numbers(10, 15)]
    assert got.count("GAP") == 1


def test_a_middle_broker_that_dies_and_comes_back_loses_nothing() -> None:
    net = Net(3, [(0, 1), (1, 2)])
    subscriber, publisher = Client(net, 2), Client(net, 0)
    subscriber.subscribe(1, "t")
    publisher.publish("t", *numbers(0, 5))
    net.kill(1)
    publisher.publish("t", *numbers(5, 10))
    net.wait(2)
    net.start(1)
    net.link(0, 1)
    publisher.publish("t", *numbers(10, 12))
    net.link(1, 2)
    publisher.publish("t", *numbers(12, 15))
    net.wait(3)
    assert [one for one in subscriber.got() if one != "GAP"] == numbers(0, 15)
    # Only what the dead broker itself may have published is in doubt.
    assert {batch.pubend >> 32 for batch in subscriber.batches if batch.lost} == {2}


def test_a_new_subscription_gets_nothing_from_before_it() -> None:
    net = Net(2, [(0, 1)])
    first, second, publisher = Client(net, 1), Client(net, 1), Client(net, 0)
    first.subscribe(1, "t")
    publisher.publish("t", "before")
    second.subscribe(1, "t")
    publisher.publish("t", "after")
    assert first.got() == ["before", "after"]
    assert second.got() == ["after"]


def test_after_unsubscribing_nothing_crosses_the_link() -> None:
    net = Net(2, [(0, 1)])
    subscriber, publisher = Client(net, 1), Client(net, 0)
    subscriber.subscribe(1, "t")
    publisher.publish("t", "a")
    subscriber.send(encode(Unsubscribe(number=1)))
    publisher.publish("t", "b")
    net.wait(2)
    assert subscriber.got() == ["a"]
    origin = net.brokers[0]
    assert origin is not None
    assert origin.metrics()["events_forwarded_total"] == 1


def test_a_publish_frame_that_names_a_pubend_costs_only_its_sender() -> None:
    net = Net(1)
    subscriber, honest, hostile = Client(net, 0), Client(net, 0), Client(net, 0)
    subscriber.subscribe(1, "t")
    forged = bytearray(hostile.frame("t", "forged"))
    forged[16] = 1
    net.give(
        0,
        [Received(honest.connection, honest.frame("t", "good")), Received(hostile.connection, bytes(forged))],
    )
    assert subscriber.got() == ["good"]
    assert hostile.has(Refuse)
    assert not honest.has(Refuse)


def test_a_restarted_broker_met_through_its_old_advertisement_is_followed_from_its_start() -> None:
    """The old link state may still be held when the new process is linked; its events count all the same."""
    net = Net(2, [(0, 1)])
    subscriber, publisher = Client(net, 1), Client(net, 0)
    subscriber.subscribe(1, "t")
    publisher.publish("t", "old")
    net.kill(0)
    net.start(0)
    publisher = Client(net, 0)
    publisher.publish("t", *numbers(0, 5))
    net.link(1, 0)
    net.wait(2)
    assert [one for one in subscriber.got() if one != "GAP"] == ["old", *numbers(0, 5)]


def test_ids_brought_from_another_broker_are_remembered_for_their_bearer_alone() -> None:
    net = Net(1)
    subscriber, mover, thief = Client(net, 0), Client(net, 0), Client(net, 0)
    subscriber.subscribe(1, "t")
    mover.ids, thief.ids = IdSource(5, 99), IdSource(5, 99)  # both claim publisher 5 of broker 99
    kept = mover.frame("t", "kept")
    net.now_us += SECOND_US
    thief.publish("t", "forged")
    mover.send(kept, kept)
    assert subscriber.got() == ["forged", "kept"]


def test_every_restart_of_a_broker_makes_one_gap_and_its_dead_streams_go() -> None:
    net = Net(2, [(0, 1)])
    subscriber = Client(net, 1)
    subscriber.subscribe(1, "t")
    for restart in range(1, 5):
        Client(net, 0).publish("t", str(restart))
        net.kill(0)
        net.wait(1)
        net.start(0)
        net.link(1, 0)
        net.wait(2)
        assert subscriber.got().count("GAP") == restart
    net.wait(130)
    near = net.brokers[1]
    assert near is not None
    assert near.metrics()["streams"] == 2


def test_a_broker_that_is_never_without_plain_events_keeps_its_deadlines() -> None:
    """Turns of nothing but plain events go without upkeep, not longer than until it is due."""
    net = Net(2, [(0, 1)])
    idle, far, publisher = Client(net, 0), Client(net, 1), Client(net, 0)
    far.subscribe(1, "t")
    for number in range(700):
        net.now_us += SECOND_US // 100
        publisher.publish("t", str(number))
    assert far.got() == numbers(0, 700)
    assert idle.has(Ping), "it said nothing for 7 seconds"
    assert not publisher.has(Ping)


def test_an_idle_broker_has_a_deadline() -> None:
    """Without gaps and without subscriptions that wait, silence is what is due next."""
    now_us = 10 * SECOND_US
    identity = Identity(number=1, node=b"1" * 16, name="b1", boot=1, starts=1)
    broker = Broker(BrokerConfig(), identity, draw=lambda _: 0, now_us=now_us)
    broker.handle([], now_us)
    assert now_us < broker.next_deadline() <= now_us + SECOND_US
