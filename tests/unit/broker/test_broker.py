"""The broker core alone and in small networks, without sockets: frames are carried by hand, in order."""

from __future__ import annotations

from tests.worlds.brokers import SECOND_US, Client, Net, numbers

from postroad.broker.core import Broker
from postroad.config import BrokerConfig
from postroad.errors import PeerError
from postroad.ids import Identity, IdSource
from postroad.seam.datagrams import Datagram, SendTo
from postroad.seam.inputs import Received
from postroad.seam.turn import Turn
from postroad.wire.datagrams import pack
from postroad.wire.frames import (
    Accepted,
    Ping,
    Refuse,
    Subscribed,
    Unsubscribe,
    encode,
)

RING = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]


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
    """D2."""
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
    """D8."""
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
    forged[12:17] = bytes(4) + b"\1"  # without a checksum
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


def test_a_datagram_that_its_room_cannot_read_ends_nothing() -> None:
    """Anybody can send one: it is counted, and nobody is told."""
    net = Net(1)
    broker = net.brokers[0]

    def read(_turn: Turn, _datagram: Datagram) -> None:
        raise PeerError("malformed")

    broker._board.datagram(250, read)
    effects = broker.handle([Datagram(("127.0.0.1", 9), pack(250, b"?"))], net.now_us)
    assert not [effect for effect in effects if isinstance(effect, SendTo)]
    assert broker.metrics()["refused_datagrams_total"] == 1
