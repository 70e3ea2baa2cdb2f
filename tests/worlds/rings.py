"""A ring of Pastry cores on one virtual clock, with a delay for every pair."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable

import pytest

from postroad.ring.pastry import Changed, NodeId, Pastry, Send, Settings, decode, encode, number

STABLE_S = 8  # silence is noticed after 3 s, and its repair needs a heartbeat or two
LONG = [pytest.mark.soak, pytest.mark.timeout(3_600)]


def node_id(name: str) -> NodeId:
    return hashlib.sha1(name.encode()).digest()[:16]


class Ring:
    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.nodes: dict[NodeId, Pastry] = {}
        self.now_us = 0
        self.mail: list[tuple[int, int, NodeId, NodeId, bytes]] = []
        self.sent = 0
        self.changes: list[tuple[NodeId, Changed]] = []
        self.is_cut: Callable[[NodeId, NodeId], bool] = lambda _sender, _to: False

    def delay_us(self, one: NodeId, other: NodeId) -> int:
        """From 1 to 15 ms, the same both ways, without a plane behind it (section 4 of the paper)."""
        low, high = sorted((one, other))
        return 1_000 + int.from_bytes(hashlib.blake2b(low + high, digest_size=4).digest(), "big") % 14_000

    def add(self, node: NodeId, seed: NodeId | None = None) -> None:
        pastry = self.nodes[node] = Pastry(node, self.settings)
        if seed is None:
            pastry.begin(self.now_us)
        else:
            pastry.join(seed, self.now_us)
        self._collect(node)

    def kill(self, node: NodeId) -> None:
        del self.nodes[node]

    def leave(self, node: NodeId) -> None:
        self.nodes[node].leave(self.now_us)
        self._collect(node)
        del self.nodes[node]

    def _collect(self, node: NodeId) -> None:
        for output in self.nodes[node].take():
            if isinstance(output, Send):
                self.sent += 1
                at = self.now_us + self.delay_us(node, output.to)
                heapq.heappush(self.mail, (at, self.sent, node, output.to, encode(output.message)))
            else:
                self.changes.append((node, output))

    def settle(self) -> None:
        """Until no message is on its way."""
        while self.mail:
            at, _, sender, to, data = heapq.heappop(self.mail)
            self.now_us = max(self.now_us, at)
            if to in self.nodes and not self.is_cut(sender, to):
                self.nodes[to].receive(sender, decode(data), self.now_us)
                self._collect(to)

    def run(self, seconds: int) -> None:
        end_us = self.now_us + seconds * 1_000_000
        while self.now_us < end_us:
            self.settle()
            self.now_us = max(
                self.now_us, min(node.next_deadline() or end_us for node in self.nodes.values())
            )
            for name, node in list(self.nodes.items()):
                for contact in node.contacts - self.nodes.keys():
                    node.unlink(contact)
                if not node.contacts and not node.peers:
                    self._link_another(name, node)
                deadline = node.next_deadline()
                if deadline is not None and deadline <= self.now_us:
                    node.tick(self.now_us, self.now_us * 7919 + number(name) % 65_537)
                    self._collect(name)
        self.settle()

    def _link_another(self, name: NodeId, node: Pastry) -> None:
        others = [other for other in self.nodes if other != name]
        if others:
            node.join(others[0], self.now_us)

    def truth(self, key: NodeId, count: int = 1) -> list[NodeId]:
        def rank(node: NodeId) -> tuple[int, NodeId]:
            ahead = (number(node) - number(key)) % (1 << 128)
            return min(ahead, (1 << 128) - ahead), node

        return sorted(self.nodes, key=rank)[:count]

    def way(self, start: NodeId, key: NodeId) -> list[NodeId]:
        """The nodes that a message to this key passes, the last one being responsible."""
        way = [start]
        while (following := self.nodes[way[-1]].route(key)) is not None:
            assert following not in way, "a message goes in circles"
            assert following in self.nodes, "a message goes to a node that is gone"
            way.append(following)
        return way


def bound(nodes: int) -> int:
    """ceil(log16(nodes)), without rounding."""
    hops = 0
    while 16**hops < nodes:
        hops += 1
    return hops


def grown(nodes: int) -> Ring:
    draw = random.Random(nodes)
    ring = Ring()
    names = [node_id(f"{nodes}.{at}") for at in range(nodes)]
    ring.add(names[0])
    for at, name in enumerate(names[1:], start=1):
        ring.add(name, names[draw.randrange(at)])
        ring.settle()
    ring.run(2)
    return ring
