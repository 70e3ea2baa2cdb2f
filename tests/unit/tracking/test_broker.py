"""Tracking inside the broker core: the skew check on the wire, what is recorded of forwarding (T5, T6)."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.worlds.brokers import SECOND_US, Client, Net
from tests.worlds.tracking import trace

from postroad.broker.core import Broker
from postroad.clients.intake import MAX_PUT_OFF
from postroad.config import BrokerConfig
from postroad.events.batch import EventBatch
from postroad.ids import Identity
from postroad.seam.tracking import Keep, StoreFilter
from postroad.tracking.bloom_strategy import BloomTracking
from postroad.tracking.exact_strategy import ExactTracking
from postroad.tracking.query.messages import TraceQuestion
from postroad.tracking.record import decode_meta
from postroad.tracking.recorder import MAX_HOLD_US
from postroad.tracking.settings import PUT_OFF_US, TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import KIB, MIB
from postroad.wire.frames import (
    DEFAULT_LIMITS,
    Credit,
    Kind,
    Query,
    Skew,
    decode,
    encode,
    frame_kind,
)


class Tracked(Net):
    """Brokers that track, without a disk: everything recent is in memory. Counts who is asked about ways."""

    def __init__(self, count: int, links: list[tuple[int, int]], **settings: Any) -> None:
        self.config = TrackingConfig(**settings)
        self.tracking: dict[int, Tracking] = {}
        self.asked: Counter[int] = Counter()
        super().__init__(count, links)

    def start(self, at: int) -> None:
        identity = Identity(number=at + 1, node=bytes([at + 1]) * 16, name=f"b{at}", boot=1, starts=1)
        held = make_tracking(self.config, me=at + 1, stored=(), changes=(), now_us=self.now_us)
        self.tracking[at] = held
        draw = random.Random(at).randrange
        config = BrokerConfig(tracking=self.config)
        self.brokers[at] = Broker(config, identity, draw=draw, now_us=self.now_us, tracking=held)

    def perform(self, at: int, effects: list[Any]) -> None:
        for effect in effects:
            data = getattr(effect, "data", b"")
            if data and frame_kind(data) == Kind.QUERY:
                query = decode(data)
                assert isinstance(query, Query)
                (item,) = msgspec.msgpack.decode(query.body, type=TraceQuestion).items
                about_routes = item.origin != query.target
                if about_routes and self.ends[at, effect.connection][0] == query.target - 1:  # type: ignore[index]
                    self.asked[query.target - 1] += 1
        super().perform(at, effects)


STAR = [(0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize(("routing", "asked"), [("all", {1, 2, 3}), ("neighbours", {1, 2}), ("set", {1, 2})])
def test_a_trace_asks_only_the_neighbours_that_were_recorded(
    strategy: str, routing: str, asked: set[int]
) -> None:
    """T6: both optimisations of 3.3, per-neighbour histories and the routing set in the key."""
    net = Tracked(4, STAR, strategy=strategy, routing=routing)
    readers = [Client(net, at) for at in (1, 2)]
    writer = Client(net, 0)
    for reader in readers:
        reader.subscribe(1, "t")
    net.wait(3)
    writer.publish("t", "x", "y")
    batch = readers[0].batches[0]
    found = trace(writer, batch.id(1))
    assert found["verdict"] == "complete"
    assert [step["broker"] for step in found["route"]] == ["b0", "b1", "b2"]
    assert len(found["receivers"]) == 2
    assert set(net.asked) == asked


def test_the_routing_set_is_one_key_per_message() -> None:
    """T6: H(b,d) needs a key for each neighbour, the set in the key only one."""
    keys = {}
    for routing in ("all", "neighbours", "set"):
        net = Tracked(4, STAR, routing=routing)
        readers = [Client(net, at) for at in (1, 2, 3)]
        writer = Client(net, 0)
        for reader in readers:
            reader.subscribe(1, "t")
        net.wait(3)
        for number in range(10):
            writer.publish("t", str(number))
        net.wait(1)
        keys[routing] = net.tracking[0].metrics()["tracking_keys_total"]
    assert keys == {"all": 10, "neighbours": 40, "set": 20}


def test_a_publisher_out_of_tolerance_is_told_what_to_add() -> None:
    """T5: once a second, for the newest id of its own; retries of an older start say nothing."""
    net = Tracked(1, [])
    writer = Client(net, 0)
    writer.publish("t", "in time")
    assert not writer.has(Skew)
    net.now_us += 3600 * SECOND_US  # of the broker alone: frames below are made with the old time
    ahead = writer.frame("t", "ahead")
    net.now_us -= 3600 * SECOND_US
    writer.send(ahead)
    told = [message for message in writer.messages if isinstance(message, Skew)]
    assert len(told) == 1
    assert abs(told[0].correction_us + 3600 * SECOND_US) < SECOND_US // 100
    writer.publish("t", "ahead still")
    assert sum(isinstance(message, Skew) for message in writer.messages) == 1


def test_without_tracking_nobody_is_corrected() -> None:
    net = Net(1)
    writer = Client(net, 0)
    frame = writer.frame("t", "old")
    net.now_us += 3600 * SECOND_US
    writer.send(frame)
    assert not writer.has(Skew)


# ---- when it is recorded


class Quiet(Client):
    """Takes what comes and says nothing: each credit would make a turn of its own."""

    def take(self, frame: bytes) -> None:
        if frame_kind(frame) == Kind.DELIVERY:
            self.batches.append(EventBatch.parse(frame, DEFAULT_LIMITS))
        else:
            super().take(frame)

    def give_credit(self, size: int) -> None:
        self.send(encode(Credit(size=size)))


def delivering(strategy: str = "bloom") -> tuple[Tracked, Quiet, Client]:
    net = Tracked(1, [], strategy=strategy)
    reader, writer = Quiet(net, 0), Client(net, 0)
    reader.subscribe(1, "t")
    net.wait(1)
    return net, reader, writer


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("how", ["many", "asked", "in time", "at the end"])
def test_a_message_that_comes_alone_is_sent_first_and_recorded_later(strategy: str, how: str) -> None:
    """T11: what is noted and not recorded yet is in every answer, and in what is stored."""
    net, reader, writer = delivering(strategy)
    broker = net.brokers[0]
    assert broker is not None
    writer.publish("t", "x")
    assert reader.got() == ["x"]
    (noted_us, *_), _ = net.tracking[0].noted  # published, delivered
    assert net.tracking[0].next_deadline() == noted_us + MAX_HOLD_US
    match how:
        case "many":
            most = {"bloom": BloomTracking, "exact": ExactTracking}[strategy].max_held
            for _ in range(1, most // 2):
                writer.publish("t", "x")
            assert len(net.tracking[0].noted) == most
            broker.handle([], net.now_us)
        case "asked":
            pass
        case "in time":
            broker.handle([], noted_us + MAX_HOLD_US - 1)
            assert net.tracking[0].noted
            broker.handle([], noted_us + MAX_HOLD_US)
        case "at the end":
            (keep,) = (effect for effect in broker.shutdown(net.now_us) if isinstance(effect, Keep))
            stored = [effect for effect in keep.effects if isinstance(effect, StoreFilter)]
            assert sum(decode_meta(effect.record).count for effect in stored) == 2
    assert bool(net.tracking[0].noted) == (how == "asked")
    if how != "at the end":
        found = trace(writer, reader.batches[0].id(0))
        assert (found["verdict"], len(found["receivers"])) == ("complete", 1)


def test_what_is_noted_does_not_wait_if_it_says_little_or_is_much() -> None:
    """T11.

    Only times that tell when a message was here may wait: if the process dies, they tell what is lost.
    """
    net, reader, writer = delivering()
    noted = net.tracking[0].noted

    def put_off(*frames: bytes) -> bool:
        writer.send(*frames)
        waits = bool(noted)
        noted.clear()
        return waits

    assert put_off(writer.frame("t", "x"))
    assert put_off(*(writer.frame("t", "x") for _ in range(MAX_PUT_OFF)))
    assert not put_off(*(writer.frame("t", "x") for _ in range(MAX_PUT_OFF + 1)))
    assert not put_off(writer.frame("t", "x", "y"))
    old = writer.frame("t", "x")
    net.now_us += SECOND_US
    assert not put_off(old)
    assert reader.got()[-1] == "x"


def test_what_waited_for_credit_is_recorded_at_once() -> None:
    """T11: By then its time may be long past."""
    net, reader, writer = delivering()
    payload = "x" * 8 * KIB
    sent = 0
    while len(reader.batches) == sent:
        writer.publish("t", payload)
        sent += 1
    writer.publish("t", payload)
    net.tracking[0].record()
    assert len(reader.batches) == sent - 1
    reader.give_credit(MIB)
    assert len(reader.batches) == sent + 1
    assert net.tracking[0].noted == []


def test_what_is_due_waits_for_a_turn_without_messages_but_not_for_long() -> None:
    """T11: Filling and storing filters keeps no message waiting."""
    net, _, writer = delivering()
    tracking = net.tracking[0]
    writer.publish("t", "x")
    keys = tracking.metrics()["tracking_keys_total"]
    net.now_us = tracking.noted[0][0] + MAX_HOLD_US
    writer.publish("t", "y")
    assert tracking.metrics()["tracking_keys_total"] == keys
    deadline_us = tracking.next_deadline()
    assert deadline_us is not None
    assert deadline_us <= net.now_us
    net.now_us = deadline_us + PUT_OFF_US
    writer.publish("t", "z")
    assert tracking.metrics()["tracking_keys_total"] == keys + 6
