"""Connections as streams of whole frames, and every way in which they fail."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from postroad.errors import BugError, PeerError
from postroad.events import BatchBuilder
from postroad.sim.machine.frames import frame_mentions, frame_text, split
from postroad.sim.machine.network import DIAL_TIMEOUT_US, Network, Quality, Raw
from postroad.sim.machine.world import EPOCH_US, World
from postroad.units import SECOND_US
from postroad.wire.frames import DEFAULT_LIMITS, Credit, Detach, Kind, Ping, decode, encode


@dataclass
class Node:
    name: str
    alive: bool = True
    connection: int = 0
    log: list[tuple[int, str, object]] = field(default_factory=list)
    world: World | None = None

    def _note(self, what: str, value: object) -> None:
        assert self.world is not None
        self.log.append((self.world.elapsed_us, what, value))

    def opened(self, connection: int, dialled: str | None) -> None:
        self.connection = connection
        self._note("opened", dialled)

    def received(self, connection: int, frame: bytes) -> None:
        assert connection == self.connection
        self._note("received", frame)

    def closed(self, connection: int) -> None:
        assert connection == self.connection
        self._note("closed", connection)

    def dial_failed(self, address: str) -> None:
        self._note("failed", address)

    @property
    def frames(self) -> list[bytes]:
        return [value for _, what, value in self.log if what == "received" and isinstance(value, bytes)]

    def times(self, what: str) -> list[int]:
        return [time for time, kind, _ in self.log if kind == what]


@dataclass
class Pair:
    world: World
    network: Network
    a: Node
    b: Node

    def run(self, us: int) -> None:
        self.world.run(self.world.now_us + us)


def pings(*times: int) -> list[bytes]:
    return [encode(Ping(time_us=time)) for time in times]


def connected(quality: Quality | None = None, seed: int = 1) -> Pair:
    world = World(seed)
    network = Network(world)
    a, b = Node("a", world=world), Node("b", world=world)
    network.shape("a", "b", quality or Quality(latency_us=1_000, jitter_us=0))
    network.listen("b:1", b)
    network.dial(a, "b:1")
    world.run(EPOCH_US + 10_000)
    assert a.log == [(2_000, "opened", "b:1")]
    assert b.log == [(2_000, "opened", None)]
    a.log.clear()
    b.log.clear()
    return Pair(world, network, a, b)


def test_frames_arrive_whole_in_order_after_the_latency() -> None:
    pair = connected(Quality(latency_us=1_000, jitter_us=0))
    frames = pings(1, 2, 3)
    pair.network.send(pair.a, pair.a.connection, frames[0] + frames[1])
    pair.network.send(pair.a, pair.a.connection, frames[2])
    pair.run(999)
    assert pair.b.log == []
    pair.run(1)
    assert pair.b.frames == frames
    assert pair.network.connected("b", "a")


def test_jitter_never_reorders() -> None:
    world = World(3)
    network = Network(world)
    network.default = Quality(latency_us=100, jitter_us=5_000)
    a, b = Node("a", world=world), Node("b", world=world)
    network.listen("b:1", b)
    network.dial(a, "b:1")
    world.run(EPOCH_US + SECOND_US)
    frames = pings(*range(50))
    for frame in frames:
        network.send(a, a.connection, frame)
        world.run(world.now_us + 50)
    world.run(world.now_us + SECOND_US)
    assert b.frames == frames


def test_bandwidth_takes_time() -> None:
    world = World(1)
    network = Network(world)
    network.default = Quality(latency_us=1_000, jitter_us=0, bandwidth=1_000)
    a, b = Node("a", world=world), Node("b", world=world)
    network.listen("b:1", b)
    network.dial(a, "b:1")
    world.run(EPOCH_US + SECOND_US)
    frame = encode(Ping(time_us=0))
    network.send(a, a.connection, frame * 2)
    world.run(world.now_us + SECOND_US)
    took = len(frame) * 1_000
    assert b.times("received") == [SECOND_US + 1_000 + took, SECOND_US + 1_000 + 2 * took]


def test_a_closed_connection_delivers_what_was_sent_before() -> None:
    pair = connected()
    frame = pings(1)[0]
    pair.network.send(pair.a, pair.a.connection, frame)
    pair.network.send(pair.b, pair.b.connection, frame)
    pair.network.close(pair.a.connection)
    pair.run(10_000)
    assert [what for _, what, _ in pair.b.log] == ["received", "closed"]
    assert [what for _, what, _ in pair.a.log] == ["closed"]  # it reads no more after it closed
    pair.network.send(pair.b, pair.b.connection, frame)
    pair.run(10_000)
    assert len(pair.a.log) == 1
    assert pair.network.connections() == []


def test_a_cut_loses_what_is_in_flight_and_each_side_learns_in_its_own_time() -> None:
    pair = connected()
    pair.network.send(pair.a, pair.a.connection, pings(1)[0])
    assert pair.network.cut("b", "a", (300, 50_000)) == 1
    assert not pair.network.connected("a", "b")
    pair.run(10_000)
    assert pair.a.times("closed") == [10_300]
    assert pair.b.log == []
    pair.network.send(pair.b, pair.b.connection, pings(2)[0])  # half-open: into the void
    pair.run(100_000)
    assert pair.b.times("closed") == [60_000]
    assert pair.a.frames == []


def test_a_stall_holds_frames_back_and_loses_none() -> None:
    pair = connected()
    pair.network.stall("a", "b", pair.world.now_us + 50_000)
    assert not pair.network.connected("a", "b")
    frames = pings(1, 2)
    for frame in frames:
        pair.network.send(pair.a, pair.a.connection, frame)
    pair.run(49_000)
    assert pair.b.frames == []
    pair.run(2_000)
    assert pair.b.frames == frames
    assert pair.network.connected("a", "b")


def test_one_direction_is_held_back_alone() -> None:
    pair = connected()
    pair.network.muffle("a", "b", pair.world.now_us + 50_000)
    one, other = pings(1, 2)
    pair.network.send(pair.a, pair.a.connection, one)
    pair.network.send(pair.b, pair.b.connection, other)
    pair.run(49_000)
    assert (pair.a.frames, pair.b.frames) == ([other], [])
    pair.run(2_000)
    assert pair.b.frames == [one]


@pytest.mark.parametrize("harm", ["stall", "muffle"])
def test_heal_ends_a_stall_at_once(harm: str) -> None:
    pair = connected()
    getattr(pair.network, harm)("a", "b", pair.world.now_us + SECOND_US)
    pair.network.send(pair.a, pair.a.connection, pings(1)[0])
    pair.run(10_000)
    pair.network.heal()
    pair.run(1)
    assert len(pair.b.frames) == 1


def test_dials_are_refused_blocked_or_find_nobody() -> None:
    pair = connected()
    pair.network.dial(pair.a, "nobody:1")
    pair.network.refuse("b:1", pair.world.now_us + SECOND_US)
    pair.network.dial(pair.a, "b:1")
    pair.run(SECOND_US)
    assert [value for _, what, value in pair.a.log if what == "failed"] == ["nobody:1", "b:1"]
    pair.network.block("b", "a", pair.world.now_us + SECOND_US)
    pair.network.dial(pair.a, "b:1")
    pair.run(DIAL_TIMEOUT_US)
    assert len(pair.a.times("failed")) == 3
    pair.network.dial(pair.a, "b:1")
    pair.run(SECOND_US)
    assert len(pair.a.times("opened")) == 1


def test_a_dead_process_says_farewell_unless_its_machine_died() -> None:
    pair = connected()
    pair.network.send(pair.a, pair.a.connection, pings(1)[0])
    pair.a.alive = False
    pair.network.abandon(pair.a, silently=False)
    pair.run(2_000)
    assert [what for _, what, _ in pair.b.log] == ["received", "closed"]
    pair = connected()
    pair.network.send(pair.a, pair.a.connection, pings(1)[0])
    pair.a.alive = False
    pair.network.abandon(pair.a, silently=True)
    pair.run(SECOND_US // 2)
    assert pair.b.log == []
    pair.run(40 * SECOND_US)
    assert [what for _, what, _ in pair.b.log] == ["closed"]


def test_a_node_can_only_use_its_own_end() -> None:
    pair = connected()
    with pytest.raises(BugError):
        pair.network.send(pair.b, pair.a.connection, pings(1)[0])
    with pytest.raises(PeerError):
        split(b"\x09\0\0\0\x04\x01\0\0")


def publish_frame() -> bytes:
    builder = BatchBuilder()
    builder.add(bytes(15) + b"\x07", "a/b", {}, b"x" * 100, DEFAULT_LIMITS)
    frame = bytearray(builder.finish(channel=1))
    frame[4] = Kind.KNOWLEDGE
    return bytes(frame)


def test_a_raw_link_loses_and_gives_the_credit_back() -> None:
    pair = connected()
    pair.network.make_raw("a", "b", Raw(lose=1.0))
    frame, control = publish_frame(), encode(Detach(origin=1))
    pair.network.send(pair.a, pair.a.connection, frame + control)
    pair.run(10_000)
    assert pair.b.frames == [control]  # other kinds are not touched
    assert [decode(f) for f in pair.a.frames] == [Credit(size=len(frame))]


def test_a_raw_link_repeats_and_takes_the_credit_out() -> None:
    pair = connected()
    pair.network.make_raw("a", "b", Raw(repeat=1.0))
    frame = publish_frame()
    pair.network.send(pair.a, pair.a.connection, frame)
    pair.run(100_000)
    assert pair.b.frames == [frame, frame]
    pair.network.send(pair.b, pair.b.connection, encode(Credit(size=len(frame))))
    pair.network.send(pair.b, pair.b.connection, encode(Credit(size=len(frame) + 5)))
    pair.run(10_000)
    assert [decode(f) for f in pair.a.frames] == [Credit(size=len(frame) + 5)]


def test_a_raw_link_lets_frames_overtake() -> None:
    pair = connected()
    pair.network.make_raw("a", "b", Raw(overtake=0.5, late_us=20_000, kinds=frozenset({Kind.PING})))
    frames = pings(*range(40))
    for frame in frames:
        pair.network.send(pair.a, pair.a.connection, frame)
    pair.run(100_000)
    assert sorted(pair.b.frames) == sorted(frames)
    assert pair.b.frames != frames


def test_a_late_frame_overtakes_nothing_although_its_sender_closes() -> None:
    """Frames on their way waited for the end behind them, and a late one came before the first."""
    pair = connected()
    pair.network.shape("a", "b", Quality(latency_us=50_000, jitter_us=0))
    pair.network.make_raw("a", "b", Raw(overtake=1.0, late_us=5_000, kinds=frozenset({Kind.PING})))
    frames = [encode(Credit(size=7)), *pings(1)]
    for frame in frames:
        pair.network.send(pair.a, pair.a.connection, frame)
    pair.run(40_000)
    pair.network.close(pair.a.connection)
    pair.run(100_000)
    assert pair.b.frames == frames
    assert len(pair.b.times("closed")) == 1


def test_frames_are_put_into_words() -> None:
    frame = publish_frame()
    assert "KNOWLEDGE" in frame_text(frame)
    assert frame_mentions(frame, frozenset({"00000000-00000000-000000000000-0007"}))
    assert not frame_mentions(frame, frozenset({"00000000-00000000-000000000000-0008"}))
    assert "unreadable" in frame_text(frame[:20])
    assert frame_text(encode(Ping(time_us=5))).startswith("PING")
