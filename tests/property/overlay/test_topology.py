"""Topology against naive twins: trees on random graphs, and databases that converge by flooding."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.overlay.topology import Topology
from postroad.wire.frames import Advertisement

Graph = dict[int, dict[int, int]]


def node(number: int) -> bytes:
    return number.to_bytes(16, "big")


@st.composite
def graphs(draw: st.DrawFn, *, connected: bool) -> Graph:
    """Random graphs with costs from few values, so that there are many ties; numbers are not dense."""
    size = draw(st.integers(1, 10))
    numbers = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size, unique=True))
    graph: Graph = {number: {} for number in numbers}

    def link(a: int, b: int) -> None:
        graph[a][b] = draw(st.integers(1, 3))
        graph[b][a] = draw(st.integers(1, 3))

    if connected:
        for at in range(1, size):
            link(numbers[at], numbers[draw(st.integers(0, at - 1))])
    for _ in range(draw(st.integers(0, 2 * size))):
        a, b = draw(st.sampled_from(numbers)), draw(st.sampled_from(numbers))
        if a != b:
            link(a, b)
    return graph


def build(graph: Graph, one_sided: Graph | None = None) -> dict[int, Topology]:
    """A broker per number, each with every advertisement."""
    brokers = {number: Topology(me=number, node=node(number), name=f"b{number}", boot=1) for number in graph}
    for number, broker in brokers.items():
        for neighbour, cost in graph[number].items():
            broker.link_up(neighbour, cost, 0)
        for neighbour, cost in ((one_sided or {}).get(number) or {}).items():
            broker.link_up(neighbour, cost, 0)
    ads = [ad for broker in brokers.values() for ad in broker.advertisements()]
    for broker in brokers.values():
        for ad in ads:
            broker.accept(ad, 0)
        broker.check()
    return brokers


def naive_distances(graph: Graph, origin: int) -> dict[int, int]:
    """Bellman and Ford, to a fixed point."""
    distance = {origin: 0}
    changed = True
    while changed:
        changed = False
        for a in list(distance):
            for b, cost in graph[a].items():
                far = distance[a] + max(cost, graph[b][a])
                if b not in distance or far < distance[b]:
                    distance[b] = far
                    changed = True
    return distance


def naive_parent(graph: Graph, origin: int, broker: int) -> int | None:
    distance = naive_distances(graph, origin)
    if broker == origin or broker not in distance:
        return None
    return min(
        near
        for near, cost in graph[broker].items()
        if distance[near] + max(cost, graph[near][broker]) == distance[broker]
    )


@settings(max_examples=200, deadline=None)
@given(graphs(connected=False))
def test_parents_and_reach_agree_with_a_naive_twin(graph: Graph) -> None:
    brokers = build(graph)
    for number, broker in brokers.items():
        distance = naive_distances(graph, number)
        assert broker.reachable() == sorted(distance)
        for origin in graph:
            assert broker.parent(origin) == naive_parent(graph, origin, number)
            assert broker.distance(origin) == distance.get(origin)


@settings(max_examples=150, deadline=None)
@given(graphs(connected=True))
def test_parents_form_one_tree_and_subtrees_partition_the_rest(graph: Graph) -> None:
    """Every broker gets an origin's events once: from its parent, which counts it in exactly one subtree."""
    brokers = build(graph)
    for origin in graph:
        below: dict[int, set[int]] = {number: set() for number in graph}
        for number in graph:
            at, steps = number, 0
            while (above := brokers[at].parent(origin)) is not None:
                below[above].add(number)
                at, steps = above, steps + 1
                assert steps < len(graph), "the parents run in a circle"
            assert at == origin
        for number, broker in brokers.items():
            children = {other for other in graph if brokers[other].parent(origin) == number}
            assert list(broker.children(origin)) == sorted(children)
            seen: set[int] = set()
            for neighbour in graph[number]:
                subtree = broker.subtree(origin, neighbour)
                assert bool(subtree) == (neighbour in children)
                assert not subtree & seen
                if subtree:
                    assert subtree == below[neighbour] | {neighbour}
                seen |= subtree
            assert seen == below[number]
        assert below[origin] == set(graph) - {origin}


@settings(max_examples=100, deadline=None)
@given(graphs(connected=True), st.data())
def test_a_link_that_one_end_advertises_does_not_count(graph: Graph, data: st.DataObject) -> None:
    numbers = sorted(graph)
    one_sided: Graph = {}
    for _ in range(data.draw(st.integers(0, 4))):
        a, b = data.draw(st.sampled_from(numbers)), data.draw(st.sampled_from(numbers))
        if a != b and b not in graph[a] and a not in one_sided.get(b, {}):
            one_sided.setdefault(a, {})[b] = 1
    for number, broker in build(graph, one_sided).items():
        assert broker.neighbours() == sorted(graph[number])
        for origin in graph:
            assert broker.parent(origin) == naive_parent(graph, origin, number)


class Flood:
    """Brokers, and links that carry messages in order; which moves next is drawn, some come twice."""

    def __init__(self, size: int, chance: random.Random) -> None:
        self.chance = chance
        self.brokers = [Topology(me=n, node=node(n), name=f"b{n}", boot=1) for n in range(size)]
        self.queues: dict[tuple[int, int], list[Advertisement]] = {}  # (from, to), while the link is up

    def send(self, source: int, ads: list[Advertisement], *, but: int | None = None) -> None:
        for (a, b), queue in self.queues.items():
            if a == source and b != but:
                queue += ads

    def publish(self, source: int) -> None:
        own = self.brokers[source].take_own()
        if own is not None:
            self.send(source, [own])

    def toggle(self, a: int, b: int) -> None:
        if (a, b) in self.queues:
            del self.queues[a, b], self.queues[b, a]  # what was on its way is lost
            self.brokers[a].link_down(b, 0)
            self.brokers[b].link_down(a, 0)
        else:
            self.queues[a, b], self.queues[b, a] = [], []
            self.brokers[a].link_up(b, 1, 0)
            self.brokers[b].link_up(a, 1, 0)
            self.queues[a, b] += self.brokers[a].advertisements()
            self.queues[b, a] += self.brokers[b].advertisements()
        self.publish(a)
        self.publish(b)

    def step(self) -> bool:
        busy = sorted(link for link, queue in self.queues.items() if queue)
        if not busy:
            return False
        a, b = self.chance.choice(busy)
        queue = self.queues[a, b]
        ad = queue[0] if self.chance.random() < 0.1 else queue.pop(0)
        if self.brokers[b].accept(ad, 0):
            self.send(b, [ad], but=a)
        self.publish(b)
        self.brokers[b].check()
        return True


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.integers(0, 2**32), st.integers(1, 25))
def test_flooding_converges(size: int, seed: int, changes: int) -> None:
    """Random links come and go while messages are under way; connected brokers end with equal databases."""
    chance = random.Random(seed)
    flood = Flood(size, chance)
    for _ in range(changes):
        a, b = chance.sample(range(size), 2)
        flood.toggle(a, b)
        for _ in range(chance.randrange(12)):
            flood.step()
    steps = 0
    while flood.step():
        steps += 1
        assert steps < 50_000
    graph: Graph = {n: {b: 1 for a, b in flood.queues if a == n} for n in range(size)}
    for n, broker in enumerate(flood.brokers):
        component = sorted(naive_distances(graph, n))
        assert broker.reachable() == component
        for other in component:
            own = next(ad for ad in flood.brokers[other].advertisements() if ad.broker == other)
            assert own in broker.advertisements()
            assert broker.parent(other) == naive_parent(graph, other, n)


@settings(max_examples=60, deadline=None)
@given(graphs(connected=True), st.randoms(use_true_random=False))
def test_the_order_and_repetition_of_advertisements_does_not_matter(
    graph: Graph, chance: random.Random
) -> None:
    ads = [ad for broker in build(graph).values() for ad in broker.advertisements()]
    stale = [broker.advertisements() for broker in build({n: {} for n in graph}).values()]
    ads += [ad for database in stale for ad in database]
    first = min(graph)
    results = []
    for _ in range(3):
        chance.shuffle(ads)
        broker = Topology(me=first, node=node(first), name=f"b{first}", boot=1)
        for neighbour, cost in graph[first].items():
            broker.link_up(neighbour, cost, 0)
        for ad in ads:
            broker.accept(ad, 0)
        results.append([ad for ad in broker.advertisements() if ad.broker != first])
    assert results[0] == results[1] == results[2]
