"""Rings of Pastry cores after joins, departures and failures (spec Q1; queues paper, section 2.1)."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds.rings import STABLE_S, Ring, bound, grown, node_id

from postroad.ring.pastry import ID_BYTES, Settings

steps = st.tuples(st.sampled_from(("join", "join", "kill", "leave", "wait")), st.integers(0, 1_000))


def check_stable(ring: Ring, keys: int, *, hops: bool = True) -> None:
    draw = random.Random(len(ring.nodes))
    names = sorted(ring.nodes)
    for name in names:
        node = ring.nodes[name]
        node.check()
        assert not node.joining
        near = ring.truth(name, 4)
        assert node.closest(name, 4) == near
        assert set(node.peers) <= set(names), "somebody relies on a node that is gone"
    for _ in range(keys):
        key = draw.randbytes(ID_BYTES)
        way = ring.way(draw.choice(names), key)
        assert way[-1] == ring.truth(key)[0]
        assert ring.nodes[way[-1]].closest(key, 3) == ring.truth(key, 3)
        assert not hops or len(way) - 1 <= bound(len(names))


@settings(max_examples=40, deadline=None)
@given(st.lists(steps, min_size=10, max_size=40), st.integers(0, 1_000))
def test_after_joins_departures_and_failures_a_stable_ring_agrees_with_the_truth(
    history: list[tuple[str, int]], salt: int
) -> None:
    """Q1."""
    ring = Ring(Settings(leaves=8))
    ring.add(node_id(f"{salt}.first"))
    killed = 0
    for at, (step, draw) in enumerate(history):
        names = sorted(ring.nodes)
        chosen = names[draw % len(names)]
        if step == "join":
            ring.add(node_id(f"{salt}.{at}"), chosen)
        elif step == "wait" or killed == 2:
            ring.run(STABLE_S)
            killed = 0
        elif len(names) > 1:
            ring.run(3)  # a newcomer that has not joined yet may lose the only node it knows
            (ring.kill if step == "kill" else ring.leave)(chosen)
            killed += 1
    ring.run(40)
    check_stable(ring, keys=30, hops=False)  # with so few leaves, no bound is promised


@pytest.mark.parametrize(
    "nodes",
    [
        *(1, 2, 16, 17, 60, 150),
        *(
            pytest.param(nodes, marks=[pytest.mark.soak, pytest.mark.timeout(3_600)])
            for nodes in (256, 1_024)
        ),
    ],
)
def test_ways_on_a_stable_ring_have_at_most_log16_hops(nodes: int) -> None:
    """Q1."""
    check_stable(grown(nodes), keys=1_000)


def test_a_quarter_of_a_ring_dies_at_once_and_the_rest_finds_itself() -> None:
    ring = grown(48)
    for name in sorted(ring.nodes)[::4]:
        ring.kill(name)
    ring.run(STABLE_S)
    for name, node in ring.nodes.items():
        assert node.closest(name, 9) == ring.truth(name, 9)
    ring.run(40)  # everybody has been probed once
    check_stable(ring, keys=300)


def test_two_sides_of_a_cut_that_links_survived_become_one_ring_again() -> None:
    """Q1: Found by simulator seed 135: both sides had forgotten each other, and nobody told them."""
    ring = grown(48)
    names = sorted(ring.nodes, key=lambda name: name[::-1])
    for near, far in pairwise(names):
        ring.nodes[near].join(far, ring.now_us)
    ring.run(2)
    side = set(names[:20])
    ring.is_cut = lambda sender, to: (sender in side) != (to in side)
    ring.run(40)
    assert all(set(ring.nodes[name].closest(name, 17)) <= side for name in side)
    ring.is_cut = lambda _sender, _to: False
    ring.run(STABLE_S)
    for name, node in ring.nodes.items():
        assert node.closest(name, 9) == ring.truth(name, 9)
    ring.run(40)
    check_stable(ring, keys=300)


def test_an_idle_ring_sends_one_small_probe_to_each_leaf_in_a_second() -> None:
    ring = grown(40)
    ring.run(5)
    before = ring.sent
    ring.run(10)
    probes = 2 * 16 * 40 * 10  # there and back
    others = 2 * 2 * 40 * 10  # in turn
    rows = 2 * 40
    assert ring.sent - before <= probes + others + rows
    assert not ring.mail
