"""What the real driver tells a core of the machine, and when."""

from __future__ import annotations

import asyncio
import os
import time

from tests.worlds.echo import ANSWER, EchoNode
from tests.worlds.node_server import Caller, run, serving

from postroad.net.samples import Sampler
from postroad.net.server import SAMPLE_US
from postroad.seam.datagrams import Datagram
from postroad.seam.inputs import Opened, Sample
from postroad.units import SECOND_US
from postroad.wire.datagrams import pack


def test_an_idle_core_is_not_woken_and_the_next_turn_begins_with_a_sample() -> None:
    async def test() -> None:
        core = EchoNode()
        async with serving(core) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await core.saw(Opened)
            turns = len(core.turns)
            await asyncio.sleep(2.5 * SAMPLE_US / SECOND_US)
            assert len(core.turns) == turns
            with Caller() as caller:
                for _ in range(2):
                    caller.send(pack(ANSWER, b"x"), "127.0.0.1", port)
                    await asyncio.sleep(0.1)
            samples = core.of(Sample)
            assert len(samples) == 1
            turn = next(turn for turn in core.turns if Sample in map(type, turn))
            assert [type(one) for one in turn] == [Sample, Datagram]
            assert samples[0].connections == 1
            writer.close()
            del reader

    run(test())


def test_a_busy_core_has_one_sample_a_second() -> None:
    async def test() -> None:
        core = EchoNode()
        async with serving(core) as (_, port):
            began = time.monotonic()
            with Caller() as caller:
                while time.monotonic() - began < 2.3:
                    caller.send(pack(ANSWER, b"x"), "127.0.0.1", port)
                    await asyncio.sleep(0.01)
            most = (time.monotonic() - began) * SECOND_US / SAMPLE_US
            assert 1 <= len(core.of(Sample)) <= most
            assert all(Sample not in map(type, turn[1:]) for turn in core.turns)

    run(test())


def test_a_sample_says_how_busy_the_process_and_the_machine_are() -> None:
    sampler = Sampler()
    until = time.process_time() + 0.3
    began = time.monotonic()
    while time.process_time() < until:
        pass
    took = time.monotonic() - began
    sample = sampler.sample(3)
    assert sample.connections == 3
    assert sample.process_cpu_share * took >= 0.2
    assert 0 < sample.cpu_share <= 1
    assert sample.memory_total_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < sample.memory_free_bytes < sample.memory_total_bytes
    time.sleep(0.5)
    assert sampler.sample(3).process_cpu_share < 0.5
