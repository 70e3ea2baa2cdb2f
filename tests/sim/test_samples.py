"""What simulated processes are told of their machines."""

from __future__ import annotations

from dataclasses import replace

from tests.worlds.echo import ANSWER, EchoNode

from postroad.seam.datagrams import SendTo
from postroad.seam.inputs import Sample
from postroad.sim.machine.network import Network
from postroad.sim.machine.process import IDLE, Core, Process
from postroad.sim.machine.world import Clock, World
from postroad.units import SECOND_US
from postroad.wire.datagrams import pack


def test_a_process_is_told_what_the_test_says_with_its_next_turn_and_no_sooner() -> None:
    world = World(1)
    network = Network(world)

    def build(process: Process) -> tuple[Core, int]:
        return EchoNode(), len(process.boots) + 1

    a, b = (
        Process(world, network, name=name, address=f"{name}:1", build=build, clock=Clock(world))
        for name in ("a", "b")
    )
    for process in (a, b):
        process.start()
    assert a.current is not None
    assert isinstance(b.core, EchoNode)
    node = b.core
    network.dial(a.current, "b:1")
    world.run(world.now_us + 5 * SECOND_US)
    assert node.of(Sample) == []  # the connection came in the first second, nothing since
    b.load = replace(IDLE, cpu_share=0.75, memory_free_bytes=1_000)
    for count in (1, 2):
        a.perform(a.current, [SendTo(("b", 1), pack(ANSWER, b"x"))] * 3)
        world.run(world.now_us + SECOND_US)
        assert len(node.of(Sample)) == count
    assert node.of(Sample)[0] == replace(b.load, connections=1)
    first = [turn[0] for turn in node.turns if Sample in map(type, turn)]
    assert first == node.of(Sample)
