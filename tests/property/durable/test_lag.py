"""D11: the lag that `postroad subs` shows is the number of events not acknowledged, whatever happens."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds.durable_pair import PUBEND, SMALL, TOPICS, Client, World, wanted

from postroad.durable.publisher.release import RetentionPolicy
from postroad.durable.subscriber import cursor, filtering
from postroad.units import MIB


def step(world: World, random: Random) -> None:
    """No disk fails and nothing is lost, so that who matched what is known."""
    client = random.choice(world.clients)
    roll = random.randrange(100)
    world.now += random.choice([0, 1, 50, 5_000, 300_000])
    if roll < 30:
        world.publish([random.choice(TOPICS) for _ in range(random.randint(1, 6))])
    elif roll < 44:
        world.sync_publisher(world.p_disk.sync)
    elif roll < 56:
        world.receive(random.randint(1, 4))
    elif roll < 60:
        world.curious()
    elif roll < 66:
        world.sync_host(world.h_disk.sync)
    elif roll < 70:
        world.tick_host()
    elif roll < 80:
        world.consume(client, random.randint(1, 5))
    elif roll < 84:
        acknowledge_some(world, client, random)
    elif roll < 92:
        world.connect(client) if client.session is None else world.disconnect(client)
    elif roll < 95:
        world.cache.forget_first()
    elif roll < 97:
        world.crash_host()
    else:
        world.sync_host(world.h_disk.read)
        world.sync_publisher(world.p_disk.read)


def acknowledge_some(world: World, client: Client, random: Random) -> None:
    """In the middle of what it got on this connection, as an application does that acknowledges events."""
    got = [tick for tick in client.got if tick > client.began]
    if client.session is not None and got:
        world.host.ack(client.session, {PUBEND: random.choice(got)})


def expected(world: World, client: Client) -> int | None:
    """Events above what is acknowledged; None while more was acknowledged than was told since."""
    one = world.host.subscriptions.by_id(client.number)
    held = one.cursors[PUBEND]
    if held.released > held.counted:
        return None
    ticks = [tick for tick, topic in world.truth.items() if wanted(client, topic)]
    return sum(held.released < tick <= world.position for tick in ticks)


def compare(world: World) -> int:
    compared = 0
    for client in world.clients:
        if client.number and world.host.subscriptions.find(client.number) is not None:
            truth = expected(world, client)
            one = world.host.subscriptions.by_id(client.number)
            shown, _ = world.host.lag(one, world.now)
            if truth is not None:
                compared += 1
                assert shown == truth, f"{client.name}: {shown} shown, {truth} are there"
    return compared


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_the_lag_is_the_number_of_events_not_acknowledged(seed: int) -> None:
    """D11: against a count of all events, through detaching, acknowledging within a frame and crashes."""
    random = Random(seed)
    clients = [
        Client("one", "a", ""),
        Client("two", "#", "", window=300),
        Client("three", "c/#", "manual", window=500),
        Client("four", "b", "auto", window=600),
    ]
    with ExitStack() as limits:
        if seed % 2 == 0:
            for module, values in SMALL.items():
                limits.enter_context(patch.multiple(module, **values))
            limits.enter_context(patch.multiple(cursor, MAX_PARTS=2, MAX_UNACKED=1_000))
            limits.enter_context(patch.multiple(filtering, MAX_PENDING_BYTES=MIB))  # no hole
        world = World(random, RetentionPolicy(keep_us=0), clients)
        for client in clients[::2]:
            world.connect(client)
        compared = 0
        for _ in range(90):
            step(world, random)
            compared += compare(world)
        world.settle()
        assert compared
        assert compare(world) == len(clients)
