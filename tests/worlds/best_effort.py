"""Best effort in the simulated world: brokers, publishers, receivers and caches, and what must hold of them
whatever the network does (spec B1, B4, B7, B8 and the traps)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

from postroad.broker.core import Broker
from postroad.client import effects as fx
from postroad.client.repair.settings import RepairSettings, settings_for
from postroad.client.settings import ClientSettings
from postroad.config import BrokerConfig
from postroad.events import Gap
from postroad.ids import Identity
from postroad.links.connection import LinkSettings
from postroad.sim.machine.network import Network, Quality
from postroad.sim.machine.process import Core, Process
from postroad.sim.machine.world import Clock, World
from postroad.sim.people.applications import Life
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.frames import Subscribe

LOSSY = Quality(latency_us=20 * MILLISECOND_US, jitter_us=5_000, lose=0.03, repeat=0.03, overtake=0.1)


class Stage:
    """Brokers, each linked to an earlier one, and clients. `parents` are the numbers of those that b2, b3 and
    so on dial, `skews_us` how far the brokers' clocks are off."""

    def __init__(self, seed: int, parents: tuple[int, ...] = (1, 2), skews_us: tuple[int, ...] = ()) -> None:
        self.world = World(seed)
        self._skews_us = skews_us or (0,) * (1 + len(parents))
        self.network = Network(self.world)
        self.network.default = LOSSY
        self.got: dict[str, list[bytes]] = {}
        self.heard: dict[str, list[int | Gap]] = {}  # by client, in its order: numbers of events, and gaps
        self.gaps: list[Gap] = []  # of all
        self.gaps_of: dict[str, list[Gap]] = {}
        self.began_us: dict[str, int] = {}  # by client: when its first subscription was in force
        self.lives: dict[str, Life] = {}
        self.processes = [self._process(number, parent) for number, parent in enumerate((0, *parents), 1)]
        for process in self.processes:
            process.start()
        self.run(5)

    def _process(self, number: int, parent: int) -> Process:
        def build(process: Process) -> tuple[Core, int]:
            boot = len(process.boots) + 1
            identity = Identity(
                number=number, node=bytes((number,)) * 16, name=process.name, boot=boot, starts=boot
            )
            config = BrokerConfig(
                links=LinkSettings(address=process.address, datagrams=7420),
                dial=(f"b{parent}:7420",) if parent else (),
            )
            draw = self.world.random(process.name).randrange
            return Broker(config, identity, draw=draw, now_us=process.clock.now_us()), boot

        name, clock = f"b{number}", Clock(self.world, self._skews_us[number - 1])
        return Process(self.world, self.network, name=name, address=f"{name}:7420", build=build, clock=clock)

    def run(self, seconds: float) -> None:
        self.world.run(self.world.now_us + int(seconds * SECOND_US))

    def client(self, name: str, broker: str) -> Life:
        got = self.got.setdefault(name, [])
        heard = self.heard.setdefault(name, [])

        def hear(effect: fx.Effect) -> None:
            if isinstance(effect, fx.Delivered):
                payloads = [event.payload for event in effect.batch.events()]
                got.extend(payloads)
                heard.extend(map(int, payloads))
            elif isinstance(effect, fx.Missed) and effect.gap.pubend:
                self.gaps.append(effect.gap)
                self.gaps_of.setdefault(name, []).append(effect.gap)
                heard.append(effect.gap)
            elif isinstance(effect, fx.Began):
                self.began_us.setdefault(name, self.world.now_us)

        settings = ClientSettings(addresses=(f"{broker}:7420",), name=name)
        life = self.lives[name] = Life(self.world, self.network, settings, hear)
        life.start()
        self.run(1)
        return life

    def subscribe(self, name: str, broker: str, where: str, settings: RepairSettings | None = None) -> Life:
        life = self.client(name, broker)
        self.begin(life, where, settings or RepairSettings())
        return life

    def begin(self, life: Life, where: str, settings: RepairSettings) -> None:
        """A subscription of a client that is connected."""
        life.core.effort.choose(replace(settings, order_us=0))
        _, effects = life.core.subscribe(
            Subscribe(number=0, topic="a/#", where=where), repair=settings, now_us=self.world.now_us
        )
        life.perform(effects)

    def publish(self, life: Life, first: int, count: int) -> None:
        for number in range(first, first + count):
            kind = "x" if number % 2 else "y"
            life.core.publish_best_effort("a/b", str(number).encode(), {"kind": kind}, self.world.now_us)
            life.perform(life.core.flush(self.world.now_us))
            self.run(0.01)

    def check(self) -> None:
        for life in self.lives.values():
            life.core.check()

    def numbers(self, name: str) -> list[int]:
        return sorted(map(int, self.got[name]))


# --- random worlds

EPISODES: Final = 8
EPISODE_S: Final = 2.0
STEP_S: Final = 0.05
CONDITIONS: Final = ("", "kind = 'x'", "kind = 'y'")
CALM: Final = Quality(latency_us=20 * MILLISECOND_US, jitter_us=5_000, lose=0.01)


@dataclass(frozen=True, slots=True)
class Sent:
    """A published event."""

    publisher: str  # as Gaps name it
    sequence: int  # its own count
    kind: str
    at_us: int


class Campaign:
    """A world from a seed: bursts of loss, cut links, clients that lose their connection, clocks that are
    seconds apart, caches that come and go, publishers that start anew, subscriptions that begin anywhere,
    while events are published; then calm, until all that is missing is repaired or given up."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        brokers = chance.randrange(2, 5)
        self.parents = tuple(chance.randrange(1, number) for number in range(2, brokers + 1))
        skews_us = tuple(chance.randrange(-5, 6) * SECOND_US for _ in range(brokers))
        self.stage = Stage(seed, self.parents, skews_us)
        self.brokers = [f"b{number}" for number in range(1, brokers + 1)]
        self.way = chance.choice(("summaries", "summaries", "records"))
        self.settings = settings_for(self.way, "")
        self.sent: dict[int, Sent] = {}  # by the number in its payload
        self.conditions: dict[str, str] = {}  # of receivers
        self.ordered: set[str] = set()  # of these
        self.caches: list[Life] = []
        self.publishers: list[Life] = []
        self.brokers_of: dict[str, str] = {}  # by client
        self.story: list[str] = [f"{self.way}, links {self.parents}, clocks {skews_us}"]
        self._clients = 0

    def run(self) -> list[str]:
        """What does not hold; nothing if all is well."""
        for _ in range(self.chance.randrange(1, 4)):
            self._begin(*self._receiver())
        for _ in range(self.chance.randrange(3)):
            self._cache()
        self.publishers = [self._publisher() for _ in range(self.chance.randrange(1, 3))]
        self.stage.run(8)
        for _ in range(EPISODES):
            self._episode()
        self.stage.network.default = CALM
        self.stage.network.heal()
        self.stage.run(110)
        self.stage.check()
        for process in self.stage.processes:
            if process.core is not None:
                process.core.check()
        return [fault for name in self.conditions for fault in self._faults(name)]

    # -- who is there

    def _name(self, role: str) -> tuple[str, str]:
        self._clients += 1
        name, broker = f"{role}{self._clients}", self.chance.choice(self.brokers)
        self.brokers_of[name] = broker
        return name, broker

    def _receiver(self) -> tuple[Life, RepairSettings]:
        """One that is connected, and does not subscribe yet."""
        name, broker = self._name("receiver")
        order_us = self.chance.choice((0, 3 * SECOND_US))
        self.conditions[name] = self.chance.choice(CONDITIONS)
        if order_us:
            self.ordered.add(name)
        self.story.append(f"{name} at {broker} where {self.conditions[name]!r}, order {order_us}")
        return self.stage.client(name, broker), replace(self.settings, order_us=order_us)

    def _begin(self, life: Life, settings: RepairSettings) -> None:
        self.stage.begin(life, self.conditions[life.name], settings)
        self.story.append(f"{self.stage.world.now_us / SECOND_US:.2f} s: {life.name} subscribes")

    def _cache(self) -> None:
        name, broker = self._name("cache")
        most = self.chance.choice((20, 2_000))
        settings = replace(self.settings, cache_min=most // 4, cache_max=most)
        self.caches.append(self.stage.subscribe(name, broker, "", settings))
        self.story.append(f"{name} at {broker}, {most} messages")

    def _publisher(self) -> Life:
        name, broker = self._name("publisher")
        life = self.stage.client(name, broker)
        life.core.effort.choose(self.settings)
        self.story.append(f"{name} at {broker}")
        return life

    # -- what happens

    def _episode(self) -> None:
        chance, network = self.chance, self.stage.network
        network.default = LOSSY
        event = chance.choice(("calm", "burst", "mute", "partition", "reconnect", "caches", "restart"))
        newcomer = self._receiver() if chance.random() < 0.4 else None
        self.story.append(f"{self.stage.world.now_us / SECOND_US:.1f} s: {event}")
        if event == "burst":
            network.default = replace(LOSSY, lose=chance.uniform(0.2, 0.9))
        elif event == "mute":
            network.default = Quality(lose=1.0)
        elif event == "partition":
            broker = chance.randrange(2, len(self.brokers) + 1)
            ends = (f"b{broker}", f"b{self.parents[broker - 2]}")
            network.cut(*ends, (0, 0))
            network.block(*ends, self.stage.world.now_us + chance.randrange(1, 12) * SECOND_US)
        elif event == "reconnect":
            name = chance.choice([life.name for life in self.stage.lives.values() if life.alive])
            cut = network.cut(name, self.brokers_of[name], (0, 0))
            self.story.append(f"{name} loses {cut} connection")
        elif event == "caches":
            if self.caches and chance.random() < 0.7:
                self.caches.pop(0).end(silently=chance.random() < 0.5)
            if chance.random() < 0.7:
                self._cache()
        elif event == "restart":
            at = chance.randrange(len(self.publishers))
            self.publishers[at].end(silently=chance.random() < 0.5)
            self.publishers[at] = self._publisher()
        steps = round(EPISODE_S / STEP_S)
        begins = chance.randrange(steps)
        for step in range(steps):
            if newcomer is not None and step == begins:
                self._begin(*newcomer)
            for life in self.publishers:
                if chance.random() < 0.8:
                    self._publish(life, chance.randrange(1, 4))
            self.stage.run(STEP_S)

    def _publish(self, life: Life, count: int) -> None:
        effort, now_us = life.core.effort, self.stage.world.now_us
        for _ in range(count):
            number, kind = len(self.sent), self.chance.choice("xyz")
            identity = life.core.publish_best_effort("a/b", str(number).encode(), {"kind": kind}, now_us)
            side = effort._publisher()
            publisher = f"{identity[:4].hex()}-{identity[4:8].hex()}"
            self.sent[number] = Sent(publisher, side.sequence, kind, now_us)
        life.perform(life.core.flush(now_us))

    # -- what must hold

    def _faults(self, name: str) -> list[str]:
        heard, condition = self.stage.heard[name], self.conditions[name]
        got = [item for item in heard if isinstance(item, int)]
        gaps = [item for item in heard if isinstance(item, Gap)]
        faults = [f"{name} got {number} twice" for number in set(got) if got.count(number) > 1]
        wanted = {at for at, sent in self.sent.items() if condition in ("", f"kind = '{sent.kind}'")}
        faults += [f"{name} got {number}, which it does not want" for number in set(got) - wanted]
        gaps_of = {number: [gap for gap in gaps if self._is_in(number, gap)] for number in wanted}
        for number, its_gaps in gaps_of.items():
            if len(its_gaps) > 1 or (its_gaps and number in got):
                how = "did not get" if number not in got else "got"
                faults.append(f"{name} {how} {number} ({self.sent[number]}), which is in {its_gaps}")
        if name in self.ordered:
            faults += self._disorder(name, got)
        silent = wanted - set(got) - {number for number, its_gaps in gaps_of.items() if its_gaps}
        receiver = self.stage.lives[name].core.effort._repaired[1].receiver
        covered = {publisher: source.covered for publisher, source in receiver._sources.items()}
        began_us = self.stage.began_us.get(name, self.stage.world.now_us)
        for number in sorted(silent):
            sent = self.sent[number]
            if sent.at_us < began_us:
                continue
            if self.way == "summaries" and sent.sequence <= covered.get(_prefix(sent.publisher), 0):
                faults.append(f"{name} lost {number} in silence ({sent})")
        if self.way == "summaries":
            faults += self._uncovered(name, covered)
        if receiver.missing:
            faults.append(f"{name} still waits for {receiver.missing}")
        return faults

    def _is_in(self, number: int, gap: Gap) -> bool:
        sent = self.sent[number]
        return gap.pubend == sent.publisher and gap.start < sent.sequence <= gap.end

    def _disorder(self, name: str, got: list[int]) -> list[str]:
        last: dict[str, int] = {}
        faults: list[str] = []
        for number in got:
            sent = self.sent[number]
            if sent.sequence < last.get(sent.publisher, 0):
                faults.append(f"{name} got {number} ({sent}) after {last[sent.publisher]}")
            last[sent.publisher] = sent.sequence
        return faults

    def _uncovered(self, name: str, covered: dict[bytes, int]) -> list[str]:
        """Of a publisher that lives all is known."""
        faults: list[str] = []
        for life in self.publishers:
            sides = (published.side for published in life.core.effort._published.values())
            faults += [
                f"{name} knows {covered.get(side.me)} of {life.name}, which is at {side.sequence}"
                for side in sides
                if covered.get(side.me, 0) < side.sequence
            ]
        return faults


def _prefix(publisher: str) -> bytes:
    return bytes.fromhex(publisher.replace("-", ""))
