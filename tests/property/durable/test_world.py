"""Exactly once, in order, gaps only where something was released: two brokers through anything (D12)."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds.durable_pair import SMALL, TOPICS, Client, World, wanted

from postroad.durable.publisher.release import RetentionPolicy
from postroad.streams.spans import union
from postroad.units import SECOND_US


def step(world: World, random: Random) -> None:
    client = random.choice(world.clients)
    roll = random.randrange(100)
    world.now += random.choice([0, 1, 50, 5_000, 300_000, 1_000_000])
    if roll < 28:
        world.publish([random.choice(TOPICS) for _ in range(random.randint(1, 6))])
    elif roll < 40:
        world.sync_publisher(world.p_disk.sync)
    elif roll < 52:
        world.receive(random.randint(1, 4), lose=random.random() < 0.2)
    elif roll < 56:
        world.curious()
    elif roll < 60:
        world.silence()
    elif roll < 68:
        world.sync_host(world.h_disk.sync)
    elif roll < 72:
        world.tick_host()
    elif roll < 80:
        world.consume(client, random.randint(1, 5))
    elif roll < 85:
        world.connect(client) if client.session is None else world.disconnect(client)
    elif roll < 88:
        world.release()
    elif roll < 91:
        world.cache.forget_first()
    elif roll < 93:
        world.sync_publisher(world.p_disk.fail)
    elif roll < 95:
        world.sync_host(world.h_disk.fail)
    elif roll < 97:
        world.crash_publisher()
    elif roll < 99:
        world.crash_host()
    else:
        world.sync_host(world.h_disk.read)
        world.sync_publisher(world.p_disk.read)


def run(seed: int, policy: RetentionPolicy, steps: int) -> World:
    """A schedule made of a seed. Even seeds have tiny limits, so that every limit is met."""
    with ExitStack() as limits:
        for module, values in SMALL.items():
            if seed % 2 == 0:
                limits.enter_context(patch.multiple(module, **values))
        return run_within(seed, policy, steps)


def run_within(seed: int, policy: RetentionPolicy, steps: int) -> World:
    random = Random(seed)
    clients = [
        Client("one", "a", ""),
        Client("two", "#", "", window=300),
        Client("three", "c/#", "manual"),
        Client("four", "b", "auto", window=600),
    ]
    world = World(random, policy, clients)
    for client in clients[::2]:
        world.connect(client)
    for at in range(steps):
        step(world, random)
        if at % 4 == 0:
            world.check()
    world.settle()
    return world


def judge(world: World, *, early: bool) -> None:
    for client in world.clients:
        assert client.started is not None
        expected = [t for t in sorted(world.truth) if t > client.started and wanted(client, world.truth[t])]
        got = client.got
        if not client.ack:
            assert got == sorted(set(got)), "repeated or out of order"
        lost = [tick for tick in expected if tick not in set(got)]
        assert set(got) <= set(expected)
        gaps = union(client.gaps)
        assert all(any(start < tick <= end for start, end in gaps) for tick in lost), "silently lost"
        if not early:
            assert not client.gaps, "a gap although nothing was released early"
        assert client.number not in world.host._pubends[7 << 32].catchups


EARLY = RetentionPolicy(keep_us=0, max_retain_us=SECOND_US, max_bytes=2_000)


@settings(max_examples=130, deadline=None)
@given(st.integers(0, 2**32))
def test_exactly_once_in_order_without_gaps(seed: int) -> None:
    """D4, D9.

    D12: whatever crashes, fails, is lost or slow, each subscriber has every event once and in order.
    """
    judge(run(seed, RetentionPolicy(keep_us=0), 90), early=False)


@settings(max_examples=70, deadline=None)
@given(st.integers(0, 2**32))
def test_early_release_is_told(seed: int) -> None:
    """D8: what early release took is covered by gap messages, never silence."""
    judge(run(seed, EARLY, 90), early=True)
