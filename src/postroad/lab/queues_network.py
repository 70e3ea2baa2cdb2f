"""The sites of the queues paper's section 4, the ring of brokers over them, and MSMQ's routing over the same.

Every pair of sites has a delay of its own, whole milliseconds from 1 to the longest, the same both ways and
without a plane behind it. The ring is made of the product's own cores (`ring/pastry.py`): every broker joins
through one that is there, over a virtual network with these delays. MSMQ's administrator gives each broker
links to its five nearest, usable both ways, and messages take the least-cost path over them (Dijkstra).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from postroad.errors import BugError
from postroad.ring.pastry import Message, Pastry, Send, Settings
from postroad.units import MILLISECOND_US

LINKS: Final = 5  # of each MSMQ broker
LONGEST_MS: Final = 15  # between two sites while the ring is made; proximity is a matter of order alone
TELL_EVERY: Final = 128  # brokers
_MASK: Final = (1 << 64) - 1
_MIXING: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shifts and factors
_SEED: Final = 0x9E3779B97F4A7C15


class Distances:
    """How far every site is from every other: drawn from their numbers, so 10,000 sites need no matrix."""

    def __init__(self, sites: int) -> None:
        self.sites = sites
        self._numbers = np.arange(sites, dtype=np.uint64)

    def share(self, node: int, other: int) -> float:
        """Of the longest distance, in (0, 1]. The order of sites by it is the same for every longest."""
        mixed = min(node, other) * self.sites + max(node, other) + _SEED & _MASK
        for shift, factor in _MIXING:
            mixed = (mixed ^ mixed >> shift) * factor & _MASK
        return ((mixed >> 11) + 1) / (1 << 53)

    def shares(self, site: int) -> npt.NDArray[np.float64]:
        """To each site."""
        own = np.uint64(site)
        low, high = np.minimum(self._numbers, own), np.maximum(self._numbers, own)
        mixed = low * np.uint64(self.sites) + high + np.uint64(_SEED)
        for shift, factor in _MIXING:
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return ((mixed >> np.uint64(11)).astype(np.float64) + 1.0) / float(1 << 53)

    def delay_ms(self, node: int, other: int, longest_ms: int) -> int:
        """One way; nothing within a site."""
        return 0 if node == other else -int(-self.share(node, other) * longest_ms // 1)


class Ring:
    """Brokers that joined one after the other, and the ways of messages between them."""

    def __init__(self, distances: Distances, tell: Callable[[str], None]) -> None:
        self._distances = distances
        self._ids = [hashlib.sha1(f"site-{site}".encode()).digest()[:16] for site in range(distances.sites)]
        self._sites = {node: site for site, node in enumerate(self._ids)}
        self._cores: list[Pastry] = []
        self._mail: list[tuple[int, int, int, int, Message]] = []  # at, number, from, to, message
        self._now_us = 0
        self._sent = 0
        for site, node in enumerate(self._ids):
            core = Pastry(node, Settings())
            self._cores.append(core)
            if site == 0:
                core.begin(self._now_us)
            else:
                core.join(self._ids[site * 7919 % site], self._now_us)
            self._collect(site)
            self._settle()
            if site % TELL_EVERY == 0:
                tell(f"{site} of {distances.sites} brokers have joined")

    def _collect(self, site: int) -> None:
        for output in self._cores[site].take():
            if isinstance(output, Send):
                self._sent += 1
                to = self._sites[output.to]
                delay_us = round(self._distances.share(site, to) * LONGEST_MS * MILLISECOND_US)
                heapq.heappush(self._mail, (self._now_us + delay_us, self._sent, site, to, output.message))

    def _settle(self) -> None:
        while self._mail:
            at_us, _, sender, to, message = heapq.heappop(self._mail)
            self._now_us = max(self._now_us, at_us)
            self._cores[to].receive(self._ids[sender], message, self._now_us)
            self._collect(to)

    def way(self, start: int, goal: int) -> list[int]:
        """The sites that a message passes from a broker to the one responsible for the key of `goal`."""
        key, way = self._ids[goal], [start]
        while (following := self._cores[way[-1]].route(key)) is not None:
            way.append(self._sites[following])
            if len(way) > len(self._ids):
                raise BugError(f"a message from site {start} to {goal} goes in circles")
        if way[-1] != goal:
            raise BugError(f"a message for site {goal} ends at {way[-1]}")
        return way

    def replicas(self, site: int, count: int) -> list[int]:
        """The brokers whose ids are closest to this one's."""
        return [self._sites[node] for node in self._cores[site].closest(self._ids[site], count + 1)[1:]]


class LeastCostPaths:
    """What MSMQ's routing tables say: a spanning tree from each broker."""

    def __init__(self, distances: Distances, longest_ms: int) -> None:
        self._links: list[dict[int, int]] = [{} for _ in range(distances.sites)]
        for site in range(distances.sites):
            shares = distances.shares(site)
            shares[site] = np.inf
            for other in np.argpartition(shares, LINKS)[:LINKS].tolist():
                delay_ms = distances.delay_ms(site, other, longest_ms)
                self._links[site][other] = self._links[other][site] = delay_ms

    def tree(self, start: int) -> list[int]:
        """The site before each on its path from `start`; -1 where there is none."""
        costs, before = [1 << 60] * len(self._links), [-1] * len(self._links)
        costs[start] = 0
        heap = [(0, start)]
        while heap:
            cost, site = heapq.heappop(heap)
            if cost > costs[site]:
                continue
            for other, delay_ms in self._links[site].items():
                if cost + delay_ms < costs[other]:
                    costs[other], before[other] = cost + delay_ms, site
                    heapq.heappush(heap, (cost + delay_ms, other))
        return before


def path(before: list[int], start: int, goal: int) -> list[int]:
    """Through the tree of `start`; empty if no link leads there."""
    way = [goal]
    while way[-1] != start:
        if before[way[-1]] < 0:
            return []
        way.append(before[way[-1]])
    return way[::-1]
