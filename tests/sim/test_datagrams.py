"""Datagrams of the simulated world: lost, repeated, overtaken, cut off; from the seed, and from it alone."""

from __future__ import annotations

import pytest
from tests.worlds.echo import ANSWER, ASK, EchoNode

from postroad.seam.datagrams import Datagram, Endpoint, JoinGroup, LeaveGroup, SendTo
from postroad.seam.inputs import Opened, Received
from postroad.sim.machine.disk import CrashStyle
from postroad.sim.machine.network import MAX_QUEUED_US, Network, Quality
from postroad.sim.machine.process import Core, Process
from postroad.sim.machine.world import Clock, World
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.datagrams import MAX_DATAGRAM_BYTES, pack
from postroad.wire.frames import Ping, encode

GROUP = ("239.255.74.20", 7420)


class Stage:
    """Processes with an EchoNode each."""

    def __init__(self, *names: str, quality: Quality | None = None, seed: int = 1) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.network.default = quality or Quality()
        self.processes = {name: self._process(name) for name in names}
        for process in self.processes.values():
            process.start()
        self.run(10 * MILLISECOND_US)

    def _process(self, name: str) -> Process:
        def build(process: Process) -> tuple[Core, int]:
            return EchoNode(), len(process.boots) + 1

        clock = Clock(self.world)
        return Process(self.world, self.network, name=name, address=f"{name}:7420", build=build, clock=clock)

    def node(self, name: str) -> EchoNode:
        core = self.processes[name].core
        assert isinstance(core, EchoNode)
        return core

    def do(self, name: str, *effects: SendTo | JoinGroup | LeaveGroup) -> None:
        current = self.processes[name].current
        assert current is not None
        self.processes[name].perform(current, effects)

    def run(self, us: int = SECOND_US) -> None:
        self.world.run(self.world.now_us + us)

    def heard(self, name: str) -> list[Datagram]:
        return self.node(name).of(Datagram)


def numbered(count: int) -> list[bytes]:
    return [pack(ANSWER, number.to_bytes(2, "big")) for number in range(count)]


def to(name: str) -> Endpoint:
    return name, 7420


def test_a_datagram_reaches_its_endpoint_and_the_answer_comes_back() -> None:
    stage = Stage("a", "b")
    data = pack(ASK, b"hello")
    probe = Probe(stage.world)
    stage.network.bind(("probe", 1), probe)
    stage.network.send_datagram(probe, ("probe", 1), to("b"), data)
    stage.run()
    assert stage.heard("b") == [Datagram(("probe", 1), data)]
    assert probe.got == [(to("b"), pack(ANSWER, b"hello"), None)]
    assert stage.heard("a") == []


class Probe:
    """A node that only listens."""

    name = "probe"
    alive = True

    def __init__(self, world: World) -> None:
        self.world = world
        self.got: list[tuple[Endpoint, bytes, Endpoint | None]] = []
        self.times: list[int] = []

    def datagram(self, source: Endpoint, data: bytes, group: Endpoint | None) -> None:
        self.got.append((source, data, group))
        self.times.append(self.world.now_us)

    def opened(self, connection: int, dialled: str | None) -> None: ...
    def received(self, connection: int, frame: bytes) -> None: ...
    def closed(self, connection: int) -> None: ...
    def dial_failed(self, address: str) -> None: ...


def probed(quality: Quality, seed: int = 1) -> tuple[World, Network, Probe]:
    world = World(seed)
    network = Network(world)
    network.default = quality
    probe = Probe(world)
    network.bind(("probe", 1), probe)
    return world, network, probe


def bodies(probe: Probe) -> list[bytes]:
    return [data for _, data, _ in probe.got]


def send(world: World, network: Network, items: list[bytes], every_us: int = 1_000) -> None:
    sender = Probe(world)
    for data in items:
        network.send_datagram(sender, ("sender", 1), ("probe", 1), data)
        world.run(world.now_us + every_us)
    world.run(world.now_us + SECOND_US)


def test_a_good_link_loses_repeats_and_reorders_nothing() -> None:
    world, network, probe = probed(Quality(latency_us=500, jitter_us=0))
    send(world, network, numbered(50))
    assert bodies(probe) == numbered(50)
    assert network.datagrams_lost == 0


def test_a_bad_link_loses_repeats_and_reorders() -> None:
    quality = Quality(lose=0.2, repeat=0.2, overtake=0.2, jitter_us=100)
    world, network, probe = probed(quality)
    sent = numbered(500)
    send(world, network, sent)
    got = bodies(probe)
    assert set(got) < set(sent)
    assert 60 <= len(sent) - len(set(got)) <= 140
    assert 50 <= len(got) - len(set(got)) <= 120
    firsts = [got.index(data) for data in sorted(set(got))]
    assert firsts != sorted(firsts)


def test_jitter_alone_reorders_datagrams() -> None:
    world, network, probe = probed(Quality(latency_us=100, jitter_us=20_000))
    send(world, network, numbered(50))
    assert sorted(bodies(probe)) == numbered(50)
    assert bodies(probe) != numbered(50)


def test_one_longer_than_the_link_takes_is_lost_and_the_longest_allowed_passes() -> None:
    world, network, probe = probed(Quality())
    longest = pack(ANSWER, bytes(MAX_DATAGRAM_BYTES - 4))
    send(world, network, [longest + b"x", longest])
    assert bodies(probe) == [longest]


def test_bandwidth_takes_time_and_what_would_wait_for_too_long_is_lost() -> None:
    world, network, probe = probed(Quality(latency_us=0, jitter_us=0, bandwidth=100_000))
    began_us = world.now_us
    send(world, network, [pack(ANSWER, bytes(948))] * 50, every_us=0)  # 1,000 bytes on the link, 10 ms each
    assert probe.times == [began_us + 10 * MILLISECOND_US * count for count in range(1, len(probe.times) + 1)]
    assert len(probe.times) == MAX_QUEUED_US // (10 * MILLISECOND_US) + 1
    assert network.datagrams_lost == 50 - len(probe.times)


@pytest.mark.parametrize("how", ["block", "stall", "muffle"])
def test_a_partition_loses_datagrams_also_those_under_way_until_it_heals(how: str) -> None:
    stage = Stage("a", "b")
    stage.do("a", SendTo(to("b"), pack(ANSWER, b"under way")))
    getattr(stage.network, how)("a", "b", stage.world.now_us + SECOND_US)
    stage.do("a", SendTo(to("b"), pack(ANSWER, b"into the wall")))
    stage.run()
    assert stage.heard("b") == []
    assert stage.network.datagrams_lost == 2
    stage.do("a", SendTo(to("b"), pack(ANSWER, b"after")))
    stage.run(20 * MILLISECOND_US)
    assert stage.heard("b")[0] == Datagram(to("a"), pack(ANSWER, b"after"))


def test_what_is_not_ours_reaches_no_core() -> None:
    stage = Stage("a", "b")
    turns = len(stage.node("b").turns)
    stage.do("a", SendTo(to("b"), b"GET / HTTP/1.1"), SendTo(to("b"), b""))
    stage.run()
    assert len(stage.node("b").turns) == turns


def test_a_crashed_process_hears_nothing_and_its_next_start_does() -> None:
    stage = Stage("a", "b")
    stage.do("b", JoinGroup(GROUP))
    stage.do("a", SendTo(to("b"), pack(ANSWER, b"1")))
    stage.processes["b"].crash(silently=False, style=CrashStyle())
    stage.do("a", SendTo(to("b"), pack(ANSWER, b"2")))
    stage.run()
    stage.processes["b"].start()
    stage.do("a", SendTo(to("b"), pack(ANSWER, b"3")), SendTo(GROUP, pack(ANSWER, b"4")))
    stage.run(20 * MILLISECOND_US)
    assert [one.data for one in stage.heard("b")] == [pack(ANSWER, b"3")]  # it has not joined the group again


def test_a_group_is_heard_by_its_members_in_the_senders_segment() -> None:
    stage = Stage("a", "b", "c", "d")
    for name in ("a", "b", "c"):
        stage.do(name, JoinGroup(GROUP))
    stage.network.place("c", "elsewhere")
    data = pack(ANSWER, b"anybody?")
    stage.do("a", SendTo(GROUP, data))
    stage.run(20 * MILLISECOND_US)
    came = Datagram(to("a"), data, GROUP)
    assert stage.heard("b") == [came]
    assert came in stage.heard("a")  # a sender that joined hears itself, as on a real machine
    assert stage.heard("c") == stage.heard("d") == []
    stage.do("b", LeaveGroup(GROUP))
    stage.do("a", SendTo(GROUP, data))
    stage.run(20 * MILLISECOND_US)
    assert stage.heard("b") == [came]


def test_the_same_seed_tells_the_same_story_and_datagrams_leave_connections_alone() -> None:
    def story(seed: int, datagrams: int) -> tuple[str, list[object]]:
        stage = Stage(
            "a", "b", quality=Quality(lose=0.3, repeat=0.3, overtake=0.3, jitter_us=5_000), seed=seed
        )
        current = stage.processes["a"].current
        assert current is not None
        stage.network.dial(current, "b:7420")
        stage.run(20 * MILLISECOND_US)
        number = stage.node("a").of(Opened)[0].connection
        for data in numbered(datagrams):
            stage.do("a", SendTo(("nobody", 1), data), SendTo(to("b"), data))
        stage.network.send(current, number, encode(Ping(time_us=1)))
        stage.run()
        return stage.world.trace.digest(), stage.node("b").of(Received)

    assert story(5, 20) == story(5, 20)
    assert story(5, 20)[0] != story(6, 20)[0]
    assert story(5, 20)[1] == story(5, 0)[1]


def test_a_connection_names_the_host_that_datagrams_come_from() -> None:
    stage = Stage("a", "b")
    current = stage.processes["a"].current
    assert current is not None
    stage.network.dial(current, "b:7420")
    stage.run(20 * MILLISECOND_US)
    assert stage.node("a").of(Opened)[0].host == "b"
    assert stage.node("b").of(Opened)[0].host == "a"


def test_a_core_that_is_no_broker_answers_frames_and_datagrams_in_the_simulator() -> None:
    stage = Stage("a", "b")
    current = stage.processes["a"].current
    assert current is not None
    stage.network.dial(current, "b:7420")
    stage.run(20 * MILLISECOND_US)
    (opened,) = stage.node("a").of(Opened)
    frame = encode(Ping(time_us=1))
    # Both nodes answer a frame with itself, so it goes to and fro; one datagram is answered once.
    stage.network.send(current, opened.connection, frame)
    stage.do("a", SendTo(to("b"), pack(ASK, b"hello")))
    stage.run(10 * MILLISECOND_US)
    assert stage.node("a").of(Received)[0] == Received(opened.connection, frame)
    assert stage.heard("a") == [Datagram(to("b"), pack(ANSWER, b"hello"))]
    stage.processes["a"].stop()
    assert not stage.processes["a"].running
