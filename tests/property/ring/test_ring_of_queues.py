"""Arcs of queues on a ring of many brokers: Pastry cores and view cores, without the rest of a broker (spec
Q1, Q2, Q5, Q9). The ring says who is closest, and the arcs follow it."""

from __future__ import annotations

import random

import pytest
from tests.worlds.arcs import Network, Station
from tests.worlds.rings import LONG, STABLE_S, Ring, bound, grown

from postroad.queues.arc_state import Settings
from postroad.queues.messages import Message, Node

ARCS = 8
K = 3
SETTINGS = Settings(replicas=K, electors=7)
MAX_ROUNDS = 200  # a view moves by half a leaf set at most: the ring is a few dozen of those


class ArcOnRing(Network):
    """One arc; a broker of the ring has a core for it once somebody tells it something."""

    def __init__(self, ring: Ring, key: bytes, founder: Node) -> None:
        super().__init__((founder,), SETTINGS)
        self.ring, self.key = ring, key
        self.do(founder, lambda arc: arc.found(0))

    def deliver(self, sender: Node, to: Node, message: Message) -> None:
        if to in self.ring.nodes and to not in self.stations:
            self.stations[to], self.told[to] = Station(to, SETTINGS), []
            self.look_at_ring(to)
        super().deliver(sender, to, message)

    def look_at_ring(self, name: Node) -> None:
        closest = self.ring.nodes[name].closest(self.key, 2 * SETTINGS.electors)
        self.candidates(closest, name)

    def follow(self) -> None:
        """Until the closest brokers of the ring are the replicas."""
        for _ in range(MAX_ROUNDS):
            for name in [name for name in self.stations if name not in self.ring.nodes]:
                del self.stations[name]
            for name in list(self.stations):
                self.look_at_ring(name)
            self.run(seconds=2)
            serving = self.serving()
            if len(serving) == 1 and list(self.view(serving[0]).replicas) == self.ring.truth(self.key, K):
                return
        raise AssertionError(f"arc {self.key.hex()} is served by {self.serving()}")


@pytest.mark.parametrize("nodes", [48, pytest.param(1_024, marks=LONG)])
def test_arcs_on_a_ring_find_their_brokers_and_survive_the_loss_of_all_replicas_but_one(nodes: int) -> None:
    """Q1."""
    ring = grown(nodes)
    draw = random.Random(nodes)
    founder = draw.choice(sorted(ring.nodes))
    arcs = [
        ArcOnRing(ring, (((2 * at + 1) << 128) // (2 * ARCS)).to_bytes(16, "big"), founder)
        for at in range(ARCS)
    ]
    for at, arc in enumerate(arcs):
        arc.follow()
        for _ in range(50):
            way = ring.way(draw.choice(sorted(ring.nodes)), arc.key)
            assert arc.serving() == [way[-1]], (
                "a message that is routed to the key ends at the responsible one"
            )
            assert len(way) - 1 <= bound(nodes)
        arc.write(arc.serving()[0], b"p1@%d" % at)
    for arc in arcs[:2]:
        for name in arc.view(arc.serving()[0]).replicas[: K - 1]:
            ring.kill(name)
            arc.crash(name)
    ring.run(STABLE_S)
    for at, arc in enumerate(arcs):
        arc.follow()
        (serving,) = arc.serving()
        holders = [name for name, station in arc.stations.items() if station.core.chain is not None]
        assert set(arc.view(serving).replicas) <= set(holders)
        for name in arc.view(serving).replicas:
            assert arc[name].ledger.trail == (b"p1@%d" % at,)
        arc.run(seconds=10)
        holders = [name for name, station in arc.stations.items() if station.core.chain is not None]
        assert sorted(holders) == sorted(arc.view(serving).replicas), "who left the replicas holds nothing"
