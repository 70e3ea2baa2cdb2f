"""What a subscription is owed, on histories made by hand (plain mode loses only with the broker's memory)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from postroad.events import BatchBuilder, EventBatch, empty_frame
from postroad.ids import MessageId, volatile_pubend
from postroad.selectors import Selector
from postroad.sim.judge.checkers import Completeness, Origin
from postroad.sim.judge.connectivity import SETTLE_US, Connectivity
from postroad.sim.judge.ledger import Ledger, Published, Subscription
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.network import Network, Raw
from postroad.sim.machine.world import EPOCH_US, World
from postroad.units import SECOND_US
from postroad.wire.frames import DEFAULT_LIMITS, Attach, Kind, encode

PUBEND = volatile_pubend(7, 1)
LATER = volatile_pubend(7, 2)


@dataclass
class Together:
    """A connectivity that says what it is told."""

    found: list[tuple[int, int]] = field(default_factory=list)
    lost_us: int | None = None  # when b1's attach to b0 was lost, for as long as the first spell was

    def spells(self, a: str, b: str) -> list[tuple[int, int]]:
        assert {a, b} == {"b0", "b1"}
        return self.found

    def attached_until(self, broker: str, origin: int, end_us: int) -> int:
        assert (broker, origin) == ("b1", 7)
        return end_us if self.lost_us is None or end_us > self.found[0][1] else self.lost_us


class History:
    """b0 publishes ten events at ticks 100, 200, ...; a subscriber sits at b1. The world ends at 100 s."""

    def __init__(self) -> None:
        self.world = World(1)
        self.world.run(EPOCH_US + 100 * SECOND_US)
        self.ledger = Ledger(lambda _subscription, _pubend: True)
        self.together = Together([(EPOCH_US, self.world.now_us)])
        self.origins = {PUBEND: Origin("b0", PUBEND, EPOCH_US, 0)}
        self.subscription = Subscription(
            client="s0",
            broker="b1",
            connection=5,
            number=1,
            selector=Selector.parse("a/#", ""),
            slow=False,
            asked_us=EPOCH_US,
            subscribed_us=EPOCH_US + SECOND_US,
        )
        self.ledger.subscribe(self.subscription)
        self.events = [self.publish(count) for count in range(10)]

    def publish(self, count: int) -> Published:
        id = bytes(MessageId(1, 7, 1_000 + count, 0))
        at = EPOCH_US + 20 * SECOND_US + count * SECOND_US
        event = Published(id=id, topic="a/b", attributes={}, payload=b"x", client="p0")
        event.sent[PUBEND] = at
        self.ledger.publish(event)
        self.ledger.accept(event, PUBEND, at)
        return event

    def deliver(self, *counts: int) -> None:
        for count in counts:
            builder = BatchBuilder()
            builder.add(self.events[count].id, "a/b", {}, b"x", DEFAULT_LIMITS)
            tick = 100 * (count + 1)
            batch = EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS).with_ticks(
                tick, kind=Kind.DELIVERY, pubend=PUBEND, start=tick - 1, channel=1
            )
            self.ledger.deliver(self.subscription, batch.data)

    def gap(self, start: int, end: int) -> None:
        frame = empty_frame(kind=Kind.DELIVERY, pubend=PUBEND, start=start, end=end, channel=1, lost=True)
        self.ledger.deliver(self.subscription, frame)

    def crash(self, *, back: bool) -> None:
        self.origins[PUBEND] = Origin("b0", PUBEND, EPOCH_US, EPOCH_US + 40 * SECOND_US)
        if back:
            self.origins[LATER] = Origin("b0", LATER, EPOCH_US + 50 * SECOND_US, 0)
            self.together.found = [
                (EPOCH_US, EPOCH_US + 40 * SECOND_US),
                (EPOCH_US + 51 * SECOND_US, self.world.now_us),
            ]
        else:
            self.together.found = [(EPOCH_US, EPOCH_US + 40 * SECOND_US)]

    def judge(self) -> int:
        completeness = Completeness(self.world, self.ledger, self.together, self.origins)  # type: ignore[arg-type]
        completeness.check()
        return completeness.owed


def test_everything_delivered_is_complete() -> None:
    history = History()
    history.deliver(*range(10))
    assert history.judge() == 10


def test_a_missing_end_is_a_loss_and_a_missing_middle_a_hole() -> None:
    history = History()
    history.deliver(*range(9))
    with pytest.raises(Violation, match=r"^loss"):
        history.judge()
    history = History()
    history.deliver(0, 1, 2, 4, 5, 6, 7, 8, 9)
    with pytest.raises(Violation, match=r"^hole"):
        history.judge()


def test_a_hole_counts_even_when_the_subscription_ended() -> None:
    history = History()
    history.deliver(0, 1, 3)
    history.subscription.ended_us = history.world.now_us
    with pytest.raises(Violation, match=r"^hole"):
        history.judge()
    history = History()
    history.deliver(0, 1, 2)
    history.subscription.ended_us = history.world.now_us
    assert history.judge() == 3


def test_a_reported_gap_excuses_what_may_lie_in_it() -> None:
    """The tick of an event that nobody saw lies between those of its publisher's other events."""
    history = History()
    history.deliver(0, 1, 2)
    history.gap(300, 450)
    history.deliver(*range(4, 10))
    assert history.judge() == 10
    history = History()
    history.deliver(0, 1)
    history.gap(210, 220)
    history.deliver(*range(3, 10))
    assert history.judge() == 10
    history = History()
    history.deliver(0, 1, 2, 4)
    history.gap(500, 550)
    history.deliver(*range(5, 10))
    with pytest.raises(Violation, match=r"^hole"):
        history.judge()


def test_what_died_with_its_broker_must_be_reported_once_it_is_back() -> None:
    history = History()
    history.deliver(*range(5))
    history.crash(back=True)
    with pytest.raises(Violation, match=r"^loss"):
        history.judge()
    history.gap(500, 5_000)
    history.judge()
    history = History()
    history.deliver(*range(5))
    history.crash(back=False)
    assert history.judge() == 5


def test_nothing_is_owed_before_the_brokers_were_together() -> None:
    history = History()
    history.together.found = [(EPOCH_US + 26 * SECOND_US - SETTLE_US, history.world.now_us)]
    history.deliver(*range(6, 10))
    assert history.judge() == 4
    history.together.found = []
    assert history.judge() == 0


def test_a_spell_in_which_no_attach_got_through_promises_nothing_once_it_is_over() -> None:
    """Where the stream stood when the route came up is known to the parent alone, while the link stands."""
    history = History()
    history.deliver(*range(6, 10))
    history.together.found = [
        (EPOCH_US + 10 * SECOND_US, EPOCH_US + 20 * SECOND_US),
        (EPOCH_US + 26 * SECOND_US - SETTLE_US, history.world.now_us),
    ]
    with pytest.raises(Violation, match=r"^hole"):
        history.judge()
    history.together.lost_us = EPOCH_US + 11 * SECOND_US
    assert history.judge() == 4
    history.together.lost_us = EPOCH_US + 16 * SECOND_US  # an attach before it had got through
    with pytest.raises(Violation, match=r"^hole"):
        history.judge()


@dataclass
class Node:
    name: str
    alive: bool = True
    running: bool = True
    connection: int = 0

    def opened(self, connection: int, dialled: str | None) -> None:
        assert dialled in (None, "b2:1")
        self.connection = connection

    def received(self, connection: int, frame: bytes) -> None: ...
    def closed(self, connection: int) -> None: ...
    def dial_failed(self, address: str) -> None: ...


def test_attaches_that_a_raw_link_loses_are_noted_until_one_arrives() -> None:
    world = World(1)
    network = Network(world)
    child, parent = Node("b1"), Node("b2")
    connectivity = Connectivity(world, network, {"b1": child, "b2": parent})  # type: ignore[dict-item]
    network.listen("b2:1", parent)
    network.dial(child, "b2:1")
    world.run(EPOCH_US + SECOND_US)

    def attach(*, lost: bool) -> int:
        network.make_raw("b1", "b2", Raw(lose=1.0) if lost else None)
        now_us = world.now_us
        network.send(child, child.connection, encode(Attach(origin=7, known={})))
        world.run(now_us + SECOND_US)
        return now_us

    def until(end_us: int) -> int:
        return connectivity.attached_until("b1", 7, end_us)

    attach(lost=False)
    assert until(world.now_us) == world.now_us
    first = attach(lost=True)
    attach(lost=True)
    ended = world.now_us
    assert until(ended) == ended  # the spell goes on
    world.run(ended + SECOND_US)
    assert until(first - 1) == first - 1
    assert until(ended) == first
    assert connectivity.attached_until("b1", 8, ended) == ended
    attach(lost=False)
    assert until(world.now_us) == world.now_us
    assert until(ended) == first  # a spell that was over by then
    again = attach(lost=True)
    assert until(world.now_us - 1) == again


def test_a_broker_that_was_missing_gets_time() -> None:
    history = History()
    history.subscription.subscribed_us = EPOCH_US + 22 * SECOND_US
    history.subscription.missing = ("b0",)
    history.deliver(7, 8, 9)
    assert history.judge() == 3
    history.subscription.missing = ()
    with pytest.raises(Violation):
        history.judge()


def test_a_subscription_that_is_never_confirmed_is_noticed() -> None:
    history = History()
    history.subscription.subscribed_us = 0
    with pytest.raises(Violation, match=r"^confirm"):
        history.judge()
