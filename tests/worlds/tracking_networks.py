"""Networks of nothing but tracking, with random traffic."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Final

from postroad.ids import MessageId
from postroad.tracking.query.trace import Ask, Trace
from postroad.tracking.query.verdict import TraceResult
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import MILLISECOND_US

START_US: Final = 1_700_000_000_000_000


class Network:
    """Brokers 1..n linked in a random graph, messages along the shortest-path tree of their origin."""

    def __init__(self, seed: int, config: TrackingConfig, brokers: int, extra: int) -> None:
        self.random = Random(seed)
        self.now_us = START_US
        self.brokers = list(range(1, brokers + 1))
        self.links: dict[int, set[int]] = {broker: set() for broker in self.brokers}
        self.tracking: dict[int, Tracking] = {
            broker: make_tracking(config, me=broker, stored=(), changes=(), now_us=self.now_us)
            for broker in self.brokers
        }
        for broker in self.brokers[1:]:
            self.link(broker, self.random.randrange(1, broker))
        for _ in range(extra if brokers > 2 else 0):
            self.link(*self.random.sample(self.brokers, 2))
        self.serial = 0
        self.down: set[int] = set()
        self.questions = [0, 0]  # about routes, and whether a message was published by whoever is asked
        for broker in self.brokers:
            for name in self.subscribers(broker):
                self.tracking[broker].attached(name, self.now_us)

    @staticmethod
    def subscribers(broker: int) -> list[str]:
        return [f"s{broker}.{number}" for number in range(3)]

    def link(self, one: int, two: int) -> None:
        self.links[one].add(two)
        self.links[two].add(one)
        self.tracking[one].linked(two, self.now_us)
        self.tracking[two].linked(one, self.now_us)

    def unlink(self, one: int, two: int) -> None:
        self.links[one].discard(two)
        self.links[two].discard(one)
        self.tracking[one].unlinked(two, self.now_us)
        self.tracking[two].unlinked(one, self.now_us)

    def parents(self, origin: int) -> dict[int, int]:
        found: dict[int, int] = {}
        queue = deque([origin])
        while queue:
            here = queue.popleft()
            for neighbour in sorted(self.links[here]):
                if neighbour != origin and neighbour not in found:
                    found[neighbour] = here
                    queue.append(neighbour)
        return found

    def publish(
        self,
        origin: int,
        wanting: list[int],
        broker_in_id: int | None = None,
        again: bytes | None = None,
    ) -> tuple[bytes, set[tuple[int, int]]]:
        """One message, or one `again`, to all subscribers of the wanting brokers; its id and its route."""
        self.now_us += 3 * MILLISECOND_US
        self.serial += 1
        time_ms = self.now_us // MILLISECOND_US + self.random.randrange(-20, 20)
        identity = again or bytes(MessageId(5, broker_in_id or origin, time_ms, self.serial % 65536))
        parents = self.parents(origin)
        edges: set[tuple[int, int]] = set()
        for target in wanting:
            here = target
            while here != origin:
                edges.add((here, parents[here]))
                here = parents[here]
        self.tracking[origin].published(identity, self.now_us)
        for broker in {origin} | {broker for broker, _ in edges}:
            onward = sorted(child for child, parent in edges if parent == broker)
            if onward:
                self.tracking[broker].forwarded(origin, onward, identity, self.now_us)
        for broker, source in sorted(edges):
            self.tracking[broker].routed(origin, source, identity, self.now_us)
        for broker in wanting:
            self.tracking[broker].delivered(origin, self.subscribers(broker), identity, self.now_us)
        return identity, edges

    def trace(self, *ids: bytes, reachable: list[int] | None = None) -> list[TraceResult]:
        trace = Trace(
            ids,
            reachable=self.brokers if reachable is None else reachable,
            known=self.brokers,
            now_us=self.now_us,
        )
        asks: deque[Ask] = deque(trace.start(self.now_us))
        while not trace.done:
            if not asks:
                deadline = trace.next_deadline()
                assert deadline is not None
                self.now_us = max(self.now_us, deadline)
                asks.extend(trace.tick(self.now_us))
                continue
            ask = asks.popleft()
            self.questions[ask.question.items[0].origin == ask.broker] += 1
            if ask.broker in self.down:
                continue
            answer = self.tracking[ask.broker].answer(ask.question, {})[0]
            asks.extend(trace.answered(ask.broker, answer, self.now_us))
        return trace.results({broker: f"b{broker}" for broker in self.brokers})
