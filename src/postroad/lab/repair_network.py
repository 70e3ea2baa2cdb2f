"""Section 4's networks in a light simulation: brokers in a tree, links that delay and lose, real repair
cores.

Brokers only forward, so a message is one walk over the links of its tree that lead to its receivers: each
link takes its time and loses it with a chance. What publishers and receivers do is what the client does:
`PublisherSide`, `Receiver` and `Neighbours` run here on virtual time, and what they say is measured as they
encode it.

The workload follows figures 3 and 4: ten attributes a message; a subscription matches at most 0.1 of the
messages of a publisher, four of five less than 0.08; half of the messages have at most two receivers; rates
that spike.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from postroad.client.repair.messages import Ask, Gone, Repair, Request, Summary, encode
from postroad.client.repair.neighbours import Neighbours
from postroad.client.repair.publisher import Named, PublisherSide
from postroad.client.repair.receiver import Lost, Receiver
from postroad.client.repair.settings import RECORDS, RepairSettings
from postroad.selectors import Selector
from postroad.selectors.tags import event_bits, matched, positions, selector_masks
from postroad.units import MILLISECOND_US, SECOND_US

PAYLOAD_BYTES: Final = 250
ENVELOPE_BYTES: Final = 116 + 16  # headers of a datagram with one event, and a topic
NAME_BYTES: Final = 20  # of an attribute that names a receiver
BIT_BYTES: Final = 7  # of an attribute that names a bit
CLIENTS_PER_BROKER: Final = 5
# Half of the messages are of kinds that many want, each of which has 1 in 40. The other half is of kinds
# that few want.
KINDS: Final = 20
POPULAR: Final = 0.5
RARE_KINDS: Final = 100
# How many kinds a subscription asks for, its match probability being 0.025 for each, and how many do so. The
# others ask for a rare one.
WISHES: Final = ((4, 0.15), (3, 0.45), (2, 0.2))
MAX_DELAYS: Final = 100_000  # of original messages that are remembered
DRAIN_US: Final = 40 * SECOND_US
PAPER: Final = replace(RECORDS, record=10, max_record=0, quiet_us=0, settle_us=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One of the two networks of section 4.1."""

    brokers: int
    diameter: int
    publishers: int
    top_rate: int  # messages a second of one publisher in a spike
    link_loss: float = 0.01


SMALL: Final = Shape(brokers=12, diameter=5, publishers=6, top_rate=500)
LARGE: Final = Shape(brokers=46, diameter=11, publishers=10, top_rate=250)


@dataclass(slots=True)
class Counts:
    """What happened in a run. Bytes and crossings are those of links between brokers."""

    published: int = 0
    deliveries: int = 0  # to applications, repairs included
    lost: int = 0  # deliveries that the network lost
    recovered: int = 0
    false_repairs: int = 0  # repairs of messages that did not match
    duplicates: int = 0  # messages that a receiver had already
    gaps: int = 0
    overhead_bytes: int = 0  # records, summaries, requests, repairs
    crossings: int = 0  # of requests and repairs
    requests: int = 0
    repairs: int = 0
    repeated_requests: int = 0  # for a message that somebody asked for in the 0.5 s before
    repeated_repairs: int = 0
    recovery_us: list[int] = field(default_factory=list)  # from the publication to the delivery
    delays_us: list[int] = field(default_factory=list)
    hits: int = 0
    asked: int = 0
    cache_sizes: list[float] = field(default_factory=list)
    # By what and second: published, lost, recovered (when it was published), requests, repairs, asked, hits.
    by_second: Counter[tuple[str, int]] = field(default_factory=Counter)


class Network:
    """A run from a seed. `settings` of None: no repair at all."""

    def __init__(self, shape: Shape, settings: RepairSettings | None, *, seed: int, dying: int = 0) -> None:
        self.shape = shape
        self.settings = settings
        self._chance = random.Random(seed)
        self._workload = random.Random(seed)
        self.now_us = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._scheduled = 0
        self.links = _tree(shape, random.Random(seed))
        self._delays = [self._workload.randrange(25, 76) * MILLISECOND_US for _ in range(shape.brokers)]
        self._routes = [_rooted(self.links, root) for root in range(shape.brokers)]
        self.counts = Counts()
        self._asked: dict[tuple[bytes, int], int] = {}
        self._repaired: dict[tuple[bytes, int], int] = {}
        self.truth: dict[tuple[bytes, int], tuple[int, frozenset[int], int]] = {}  # when, receivers, bits
        clients = list(range(shape.brokers * CLIENTS_PER_BROKER))
        self._workload.shuffle(clients)
        self.publishers = [Publisher(self, number) for number in sorted(clients[: shape.publishers])]
        self.receivers = {number: Subscriber(self, number) for number in sorted(clients[shape.publishers :])}
        self._by_kind: dict[str, list[int]] = {}
        for number, receiver in self.receivers.items():
            for kind in receiver.kinds:
                self._by_kind.setdefault(kind, []).append(number)
        self.dying = dying

    # -- time

    def at(self, when_us: int, act: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (when_us, self._scheduled, act))

    def run(self, seconds: float) -> Counts:
        end_us = int(seconds * SECOND_US)
        for number, publisher in enumerate(self.publishers):
            until_us = end_us // 2 if number < self.dying else end_us
            publisher.start(until_us, dies=number < self.dying)
        sampled_us = 0
        while self._events and self._events[0][0] <= end_us + DRAIN_US:
            self.now_us, _, act = heapq.heappop(self._events)
            act()
            if self.now_us >= sampled_us:
                sampled_us = self.now_us + SECOND_US
                self._sample()
        for receiver in self.receivers.values():
            if receiver.neighbours is not None and receiver.core is not None:
                receiver.neighbours.check()
                receiver.core.check()
                self.counts.duplicates += receiver.core.duplicates
        return self.counts

    def _sample(self) -> None:
        sizes = [
            receiver.neighbours.cache.size
            for receiver in self.receivers.values()
            if receiver.neighbours is not None
        ]
        if sizes:
            self.counts.cache_sizes += (min(sizes), sum(sizes) / len(sizes), max(sizes))

    # -- sending

    def send(self, source: int, targets: list[int], arrive: Callable[[int], None]) -> tuple[int, set[int]]:
        """From one client to others: how many links it crossed, and who gets it and is told to `arrive`."""
        home = source // CLIENTS_PER_BROKER
        route = self._routes[home]
        wanted: dict[int, list[int]] = {}
        for target in targets:
            wanted.setdefault(target // CLIENTS_PER_BROKER, []).append(target)
        walk: dict[int, None] = {home: None}
        for broker in wanted:
            path = []
            while broker not in walk:
                path.append(broker)
                broker = route[broker]
            for step in reversed(path):
                walk[step] = None
        reached = {home: self.now_us}
        crossed, got = 0, set()
        chance, loss = self._chance, self.shape.link_loss
        for broker in walk:
            if broker != home:
                begun = reached.get(route[broker])
                if begun is None:
                    continue
                crossed += 1
                if chance.random() < loss:
                    continue
                link = broker if self._routes[0][broker] == route[broker] else route[broker]
                jitter = chance.randrange(-5 * MILLISECOND_US, 5 * MILLISECOND_US)
                reached[broker] = begun + self._delays[link] + jitter
            for target in wanted.get(broker, ()):
                got.add(target)
                self.at(reached[broker], partial(arrive, target))
        return crossed, got

    def repair_traffic(self, source: int, targets: list[int], named: Named) -> None:
        """Summaries, requests, asks and repairs."""
        message = named.message
        size = ENVELOPE_BYTES + len(encode(message)) + NAME_BYTES * len(named.receivers)
        if named.bits is not None:
            size += BIT_BYTES * len(positions(named.bits))
        crossed, _ = self.send(source, targets, lambda target: self._arrive(source, target, message))
        self.counts.overhead_bytes += crossed * size
        if isinstance(message, Summary):
            return
        self.counts.crossings += crossed
        self.tally("repairs" if isinstance(message, Repair) else "requests", self.now_us)
        if isinstance(message, Repair):
            self.counts.repairs += 1
            self.counts.repeated_repairs += self._repeats(self._repaired, message.publisher, message.sequence)
        elif isinstance(message, Ask):
            self.counts.requests += 1
            self.counts.repeated_requests += self._repeats(self._asked, message.publisher, message.sequence)
        else:
            self.counts.requests += isinstance(message, Request)

    def tally(self, kind: str, at_us: int, count: int = 1) -> None:
        self.counts.by_second[kind, at_us // SECOND_US] += count

    def _repeats(self, last: dict[tuple[bytes, int], int], publisher: bytes, sequence: int) -> bool:
        before = last.get((publisher, sequence))
        last[publisher, sequence] = self.now_us
        return before is not None and self.now_us - before < SECOND_US // 2

    def note_delay(self, delay_us: int) -> None:
        """Of an original message."""
        if len(self.counts.delays_us) < MAX_DELAYS:
            self.counts.delays_us.append(delay_us)

    def _arrive(self, source: int, target: int, message: Any) -> None:
        receiver = self.receivers.get(target)
        if receiver is not None:
            receiver.heard(source, message)
        else:
            publisher = next(candidate for candidate in self.publishers if candidate.number == target)
            publisher.heard(message)

    def matching(self, kind: str) -> list[int]:
        return self._by_kind.get(kind, [])

    def may_want(self, bits: int) -> list[int]:
        return [number for number, receiver in self.receivers.items() if matched(bits, receiver.masks)]


class Publisher:
    def __init__(self, network: Network, number: int) -> None:
        self.network = network
        self.number = number
        self.key = number.to_bytes(8, "big")
        self._random = random.Random(network._workload.random())
        self.core = None if network.settings is None else PublisherSide(self.key, network.settings)
        self._until_us = 0
        self._dead = False
        self._dies = False
        self._rate = 20.0
        self._rate_until_us = 0
        self._sequence = 0
        self._timer_us: int | None = None

    def start(self, until_us: int, *, dies: bool) -> None:
        self._until_us, self._dies = until_us, dies
        self.network.at(self._random.randrange(SECOND_US), self._publish)

    def _publish(self) -> None:
        network, chance = self.network, self._random
        now = network.now_us
        if now >= self._until_us:
            self._dead = self._dies
            return
        if now >= self._rate_until_us:  # figure 4: spikes of a second or three, quiet in between
            spike = chance.random() < 0.15
            top = network.shape.top_rate
            self._rate = chance.uniform(top / 2, top) if spike else chance.uniform(20, top / 6)
            self._rate_until_us = now + chance.randrange(1, 4) * SECOND_US
        self._send(*_some_message(chance, self.number))
        network.at(now + max(1, int(chance.expovariate(self._rate) * SECOND_US)), self._publish)

    def _send(self, kind: str, bits: int) -> None:
        network = self.network
        self._sequence += 1
        record: tuple[int, ...] = ()
        if self.core is not None:
            record = self.core.publish(bits, bytes(PAYLOAD_BYTES), network.now_us)
        sequence, sent_us = self._sequence, network.now_us
        receivers = network.matching(kind)
        network.counts.published += 1
        record_bytes = 32 * len(record)  # as the paper counts them: filters of 256 bits
        crossed, got = network.send(
            self.number,
            receivers,
            lambda target: network.receivers[target].message(self.key, sequence, sent_us, bits, record),
        )
        network.counts.overhead_bytes += crossed * record_bytes
        network.counts.lost += len(receivers) - len(got)
        network.tally("published", sent_us)
        network.tally("lost", sent_us, len(receivers) - len(got))
        network.truth[self.key, sequence] = (sent_us, frozenset(receivers), bits)
        self._go_on()

    def heard(self, message: Any) -> None:
        if self.core is not None and not self._dead and isinstance(message, Request):
            self.core.request(message, self.network.now_us)
            self._go_on()

    def _go_on(self) -> None:
        core, network = self.core, self.network
        if core is None or self._dead:
            return
        for named in core.tick(network.now_us):
            if named.receivers:
                targets = [int.from_bytes(receiver, "big") for receiver in named.receivers]
            else:
                targets = list(network.receivers)
            network.repair_traffic(self.number, targets, named)
        due = core.next_deadline()
        if due is not None and (self._timer_us is None or due < self._timer_us):
            self._timer_us = max(due, network.now_us + 1)
            network.at(self._timer_us, self._wake)

    def _wake(self) -> None:
        self._timer_us = None
        self._go_on()


class Subscriber:
    def __init__(self, network: Network, number: int) -> None:
        self.network = network
        self.number = number
        self.key = number.to_bytes(8, "big")
        self.kinds = _some_kinds(network._workload)
        where = " OR ".join(f"(kind = '{kind}' AND area = 'a{kind}')" for kind in self.kinds)
        self.masks = selector_masks(Selector.parse("feed/#", where))
        self.core: Receiver | None = None
        self.neighbours: Neighbours | None = None
        self._timer_us: int | None = None
        if network.settings is not None:
            self.core = Receiver(self.key, self.masks, network.settings, 0)
            draw = random.Random(number).randrange
            self.neighbours = Neighbours(self.key, network.settings, draw=draw)

    def message(
        self, publisher: bytes, sequence: int, sent_us: int, bits: int, record: tuple[int, ...]
    ) -> None:
        network, now = self.network, self.network.now_us
        if self.core is None or self.neighbours is None:
            network.counts.deliveries += 1
            network.note_delay(now - sent_us)
            return
        self.neighbours.received(publisher, now - sent_us)
        self.neighbours.cache.put(publisher, sequence, b"", bits)
        self.neighbours.forget(publisher, sequence, now)
        if record:
            self.core.record(publisher, sequence, record, now)
        self._deliver(self.core.message(publisher, sequence, (publisher, sequence), now))
        self._go_on()

    def heard(self, source: int, message: Any) -> None:
        now, core, neighbours = self.network.now_us, self.core, self.neighbours
        if core is None or neighbours is None:
            return
        if isinstance(message, Summary):
            self._deliver(core.summary(source.to_bytes(8, "big"), message, now))
        elif isinstance(message, Gone):
            core.gone(message, now)
        elif isinstance(message, Ask):
            neighbours.heard_ask(message, now)
        elif isinstance(message, Repair):
            neighbours.heard_repair(message.publisher, message.sequence, now)
            _, wanted, bits = self.network.truth[message.publisher, message.sequence]
            if self.number in wanted:
                item = (message.publisher, message.sequence)
                out = core.message(message.publisher, message.sequence, item, now, repair=True)
                neighbours.cache.put(message.publisher, message.sequence, b"", bits)
                self._deliver(out, repair=True)
            else:
                core.false_repair(message.publisher, message.sequence, now)
                self.network.counts.false_repairs += 1
        self._go_on()

    def _deliver(self, items: list[Any], *, repair: bool = False) -> None:
        counts, now = self.network.counts, self.network.now_us
        for item in items:
            if isinstance(item, Lost):
                counts.gaps += item.end - item.start  # the paper has none: its receivers ask on
            elif item is not None:
                counts.deliveries += 1
                sent_us = self.network.truth[item][0]
                if repair:
                    counts.recovered += 1
                    counts.recovery_us.append(now - sent_us)
                    self.network.tally("recovered", sent_us)
                else:
                    self.network.note_delay(now - sent_us)

    def _go_on(self) -> None:
        network, core, neighbours = self.network, self.core, self.neighbours
        if core is None or neighbours is None:
            return
        now = network.now_us
        requests, out = core.tick(now)
        self._deliver(out)
        for publisher, request in requests:
            network.repair_traffic(self.number, [int.from_bytes(publisher, "big")], Named((), request))
        for publisher, sequence, bits in core.take_content():
            neighbours.want(publisher, sequence, bits, now)
        for named in neighbours.tick(now, now):
            targets = [int.from_bytes(receiver, "big") for receiver in named.receivers]
            if named.bits is not None and not targets:
                targets = [target for target in network.may_want(named.bits) if target != self.number]
            if isinstance(named.message, Ask):
                network.counts.asked += 1
                key = (named.message.publisher, named.message.sequence)
                hit = any(
                    (asked := network.receivers[target].neighbours) is not None
                    and asked.cache.get(*key) is not None
                    for target in targets
                )
                network.counts.hits += hit
                network.tally("asked", now)
                network.tally("hits", now, hit)
            network.repair_traffic(self.number, targets, named)
        dues = [due for due in (core.next_deadline(), neighbours.next_deadline()) if due is not None]
        due = min(dues, default=None)
        if due is not None and (self._timer_us is None or due < self._timer_us):
            self._timer_us = max(due, now + 1)
            network.at(self._timer_us, self._wake)

    def _wake(self) -> None:
        self._timer_us = None
        self._go_on()


def _some_kinds(chance: random.Random) -> list[str]:
    at = chance.random()
    for count, share in WISHES:
        at -= share
        if at < 0:
            return chance.sample([f"k{kind}" for kind in range(KINDS)], count)
    return [_rare_kind(chance)]


def _rare_kind(chance: random.Random) -> str:
    return f"r{chance.randrange(RARE_KINDS)}"


def _some_message(chance: random.Random, publisher: int) -> tuple[str, int]:
    """Its kind and its bits: ten attributes, of which seven differ from message to message."""
    kind = f"k{chance.randrange(KINDS)}" if chance.random() < POPULAR else _rare_kind(chance)
    attributes: dict[str, Any] = {"kind": kind, "area": f"a{kind}", "source": publisher}
    for name in ("price", "size", "host", "user", "zone", "code", "unit"):
        attributes[name] = chance.randrange(1_000)
    return kind, event_bits(f"feed/{publisher}", attributes)


def _tree(shape: Shape, chance: random.Random) -> list[list[int]]:
    """A random tree of that diameter, by neighbours."""
    while True:
        links: list[list[int]] = [[] for _ in range(shape.brokers)]
        for broker in range(1, shape.brokers):
            other = chance.randrange(max(0, broker - shape.brokers // 3), broker)
            links[broker].append(other)
            links[other].append(broker)
        far = _distances(links, 0)
        ends = _distances(links, far.index(max(far)))
        if max(ends) == shape.diameter:
            return links


def _distances(links: list[list[int]], start: int) -> list[int]:
    distances = [-1] * len(links)
    distances[start] = 0
    queue = [start]
    for broker in queue:
        for other in links[broker]:
            if distances[other] < 0:
                distances[other] = distances[broker] + 1
                queue.append(other)
    return distances


def _rooted(links: list[list[int]], root: int) -> list[int]:
    """Of each broker the next one towards the root; of the root itself."""
    parents = [-1] * len(links)
    parents[root] = root
    queue = [root]
    for broker in queue:
        for other in links[broker]:
            if parents[other] < 0:
                parents[other] = broker
                queue.append(other)
    return parents
