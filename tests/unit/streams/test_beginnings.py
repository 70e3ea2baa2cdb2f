"""D2: where subscriptions begin, and when they are confirmed; what earlier processes took with them."""

from __future__ import annotations

from tests.worlds.turns import Turns

from postroad.ids import SubscriptionKey, SubscriptionKind, volatile_pubend
from postroad.overlay.topology import Topology
from postroad.seam.effects import Note
from postroad.seam.turn import Turn
from postroad.selectors import Selector
from postroad.streams.beginnings import Beginnings
from postroad.streams.delivery import Delivery
from postroad.streams.ends import MAX_ENDS, STEP_US, Ends
from postroad.streams.knowledge import MAX_TICK
from postroad.streams.plain_pubend import PlainPubend
from postroad.streams.settings import DeliveryConfig
from postroad.streams.streams import Stream
from postroad.wire.frames import Advertisement, Subscribe

WAIT_US = 5_000_000
FAR, FURTHER = 2, 3  # the brokers behind this one
DURABLE = SubscriptionKey(SubscriptionKind.DURABLE, 1)


class World:
    """Broker 1, linked to 2, which is linked to 3; each of those has one plain pubend."""

    def __init__(self) -> None:
        self.topology = Topology(me=1, node=b"1" * 16, name="b1", boot=1)
        self.topology.link_up(FAR, 1, 0)
        self.advertise(FAR, (1, FURTHER))
        self.advertise(FURTHER, (FAR,))
        self.turns = Turns()
        self.turn = self.turns.turn()
        self.delivery = Delivery(
            self.turns.board, config=DeliveryConfig(), available=lambda _: 1, spend=lambda *_: None
        )
        self.streams: dict[int, Stream] = {}
        self.upstream = {origin: (FAR, (volatile_pubend(origin, 1),)) for origin in (FAR, FURTHER)}
        self.told: list[tuple[SubscriptionKey, tuple[str, ...]]] = []
        self.hosted: list[tuple[SubscriptionKey, int]] = []
        self.ready = True  # the host of durable subscriptions
        self.beginnings = Beginnings(
            me=1,
            wait_us=WAIT_US,
            topology=self.topology,
            delivery=self.delivery,
            streams=self.streams,
            upstream=self.upstream,
            begin_durable=self.begin,
            confirmed=self.confirmed,
        )

    def advertise(self, broker: int, neighbours: tuple[int, ...], sequence: int = 1) -> None:
        self.topology.accept(
            Advertisement(
                broker=broker,
                node=bytes([broker]) * 16,
                name=f"b{broker}",
                boot=1,
                sequence=sequence,
                neighbours=tuple((one, 1) for one in neighbours),
                pubends=(volatile_pubend(broker, 1),),
            ),
            0,
        )

    def begin(self, _turn: Turn, key: SubscriptionKey, stream: Stream) -> bool:
        if self.ready:
            self.hosted.append((key, stream.id))
        return self.ready

    def confirmed(self, turn: Turn, key: SubscriptionKey, missing: tuple[str, ...]) -> None:
        self.told.append((key, missing))
        turn.note("info", "confirmed")

    def stream(self, origin: int, *, start: int = 100, version: int = 0) -> Stream:
        stream = self.streams[volatile_pubend(origin, 1)] = Stream(volatile_pubend(origin, 1), start=start)
        stream.version = version
        return stream

    def subscribe(self, version: int, now_us: int = 0) -> SubscriptionKey:
        asked = Subscribe(number=len(self.delivery.status()) + 1, topic="a", where="")
        plain = self.delivery.subscribe(1, asked, Selector.parse("a", ""), "")
        key = SubscriptionKey(SubscriptionKind.PLAIN, plain)
        self.beginnings.subscribe(self.turns.turn(now_us), key, version)
        return key


def test_it_is_confirmed_once_all_brokers_that_can_be_reached_filter_with_it() -> None:
    world = World()
    near, far = world.stream(FAR), world.stream(FURTHER)
    key = world.subscribe(7)
    assert world.told == []
    assert world.beginnings.next_deadline() == WAIT_US
    near.version = 7
    world.beginnings.in_force(world.turn, near, 100)
    assert (near.need, far.need, len(world.beginnings)) == (7, 0, 1)
    far.version = 6
    world.beginnings.in_force(world.turn, far, 100)
    assert world.told == []  # of a version that has not heard of it
    far.version = 8
    world.beginnings.in_force(world.turn, far, 120)
    assert world.told == [(key, ())]
    assert world.turn.effects == [Note("info", "confirmed")]
    assert world.beginnings.next_deadline() is None


def test_streams_that_filter_with_it_already_and_own_ones_need_no_waiting() -> None:
    world = World()
    world.stream(FAR, version=7)
    world.stream(FURTHER, version=9)
    own = Stream(volatile_pubend(1, 1), start=5, pubend=PlainPubend(volatile_pubend(1, 1), limit=1, now_us=5))
    world.streams[own.id] = own
    key = world.subscribe(7)
    assert world.told == [(key, ())]
    assert own.need == 0  # an own pubend filters nothing in its store


def test_who_does_not_answer_in_time_is_named() -> None:
    world = World()
    world.stream(FAR, version=7)  # of the other one not even a stream is known
    key = world.subscribe(7, now_us=10)
    world.beginnings.tick(world.turns.turn(10 + WAIT_US - 1))
    assert world.told == []
    world.beginnings.tick(world.turns.turn(10 + WAIT_US))
    assert world.told == [(key, ("b3",))]
    assert len(world.beginnings) == 0
    late = world.stream(FURTHER)
    world.beginnings.created(world.turn, late, None)
    late.version = 7
    world.beginnings.in_force(world.turn, late, 100)  # it begins there nevertheless, and nobody is told twice
    assert (late.need, late.waiting, len(world.told)) == (7, {}, 1)


def test_a_broker_that_came_within_reach_meanwhile_is_named_too() -> None:
    world = World()
    world.topology.link_down(FAR, 0)
    key = world.subscribe(7)
    assert world.told == [(key, ())]
    world = World()
    world.advertise(FAR, (1,), sequence=2)
    world.stream(FAR)
    key = world.subscribe(7)
    world.advertise(FAR, (1, FURTHER), sequence=3)
    world.beginnings.rerouted(world.turn)
    world.beginnings.tick(world.turns.turn(WAIT_US))
    assert world.told == [(key, ("b2", "b3"))]


def test_nobody_waits_for_brokers_that_are_gone() -> None:
    world = World()
    world.stream(FAR, version=7)
    world.stream(FURTHER)
    key = world.subscribe(7)
    world.beginnings.rerouted(world.turn)
    assert world.told == []
    world.advertise(FAR, (1,), sequence=2)
    world.beginnings.rerouted(world.turn)
    assert world.told == [(key, ())]


def test_a_new_process_goes_on_with_those_in_force_at_the_last_one() -> None:
    world = World()
    former = world.stream(FAR, version=7)
    world.stream(FURTHER, version=7)
    world.subscribe(7)
    waiting = world.subscribe(8)  # not in force there yet
    later = Stream(volatile_pubend(FAR, 2), start=0)
    world.streams[later.id] = later
    world.beginnings.created(world.turn, later, former)
    assert (later.need, later.waiting) == (7, {waiting: 8})


def test_one_that_ended_waits_for_nothing_and_needs_nothing() -> None:
    world = World()
    near, far = world.stream(FAR, version=7), world.stream(FURTHER)
    key = world.subscribe(7)
    world.beginnings.unsubscribe(key)
    assert (near.need, far.need, far.waiting, far.floors) == (0, 0, {}, {})
    world.beginnings.tick(world.turns.turn(WAIT_US))
    assert world.told == []


def test_a_durable_one_begins_when_its_host_has_caught_up() -> None:
    world = World()
    near, far = world.stream(FAR, version=7), world.stream(FURTHER, version=7)
    world.ready = False
    world.beginnings.subscribe(world.turn, DURABLE, 7)
    assert (world.hosted, world.told, near.waiting) == ([], [], {DURABLE: 7})
    world.ready = True
    for stream in (near, far):
        world.beginnings.activate_waiting(world.turn, stream)
    assert world.hosted == [(DURABLE, near.id), (DURABLE, far.id)]
    assert world.told == [(DURABLE, ())]


def test_what_a_process_that_died_held_is_lost_up_to_where_it_may_have_come() -> None:
    mine = PlainPubend(volatile_pubend(1, 9), limit=1, now_us=1_000)
    ends = Ends({}, mine)
    dead = volatile_pubend(1, 8)
    assert ends.lost(dead, 400) == [(400, 1_000 + STEP_US), (1_000 + STEP_US, MAX_TICK)]
    assert ends.lost(dead, MAX_TICK) == []  # who asks knows that it is over


def test_what_a_process_that_stopped_told_everybody_is_not_lost() -> None:
    before = PlainPubend(volatile_pubend(1, 8), limit=1, now_us=100)
    before.assert_silence(500)
    rows = {key: tick for key, tick in Ends({}, before).rows() if tick is not None}
    ends = Ends(rows, PlainPubend(volatile_pubend(1, 9), limit=1, now_us=1_000))
    assert ends.lost(before.id, 400) == [(400, 500), (500, MAX_TICK)]
    assert ends.lost(before.id, 500) == [(500, MAX_TICK)]


def test_only_the_ends_of_the_last_processes_are_kept() -> None:
    rows: dict[bytes, bytes] = {}
    for boot in range(1, 3 * MAX_ENDS):
        for key, tick in Ends(rows, PlainPubend(volatile_pubend(1, boot), limit=1, now_us=boot)).rows():
            if tick is None:
                del rows[key]
            else:
                rows[key] = tick
    kept = [int.from_bytes(key, "big") for key in rows]
    assert kept == [volatile_pubend(1, boot) for boot in range(2 * MAX_ENDS, 3 * MAX_ENDS)]
