"""One run of the world: a network drawn from the seed, a time of harm, a time of rest, a judgement.

The run has four parts. In *harm* links and brokers come and go, clients publish, subscribe and change
their minds, and faults strike. Then everything is healed and the network has time to *settle*. In *rest*
clients go on and the strict rules about paths hold. In the *drain* nobody publishes and what is under way
arrives. Then the judgement: `checkers` says what the rules are.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import msgspec

from postroad.broker.core import Broker
from postroad.config import BrokerConfig
from postroad.durable.settings import DurableConfig
from postroad.errors import UsageError
from postroad.ids import OWN_IDS, Identity, is_volatile, volatile_pubend
from postroad.sim.durable_life import DurableLife, stored_in
from postroad.sim.faults import Faults
from postroad.sim.judge.checkers import Completeness, Origin, Paths, check_agreement, check_memory
from postroad.sim.judge.connectivity import Connectivity
from postroad.sim.judge.ledger import Ledger, Subscription
from postroad.sim.judge.tracking import AskingHabit, Inquirer, Trails
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.disk import Disk
from postroad.sim.machine.network import Network, Quality
from postroad.sim.machine.process import Core, Process
from postroad.sim.machine.world import EPOCH_US, Clock, World
from postroad.sim.people.clients import Publisher, Subscriber
from postroad.sim.people.workload import PublishingHabit, SubscribingHabit
from postroad.streams.settings import DeliveryConfig, StreamConfig
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import KIB, MIB, MILLISECOND_US, SECOND_US

MAX_BROKERS: Final = 8
SETTLE_US: Final = 45 * SECOND_US  # longer than any half-open connection stays undiscovered
CALM_SETTLE_US: Final = 10 * SECOND_US  # when there was nothing to heal
REST_US: Final = 10 * SECOND_US
DRAIN_US: Final = 8 * SECOND_US
LEAST_HARM_US: Final = 5 * SECOND_US
BEGIN_AGAIN_US: Final = 6 * SECOND_US
RECLAIM_US: Final = 8 * SECOND_US  # reports come every second, and are saved
DURABLE_SHARE: Final = 0.6  # of all seeds
MEMORY_EVERY_US: Final = 5 * SECOND_US
_IDENTITY: Final = "identity"

Wrap = Callable[[Core, str], Core]


@dataclass(frozen=True, slots=True, kw_only=True)
class Character:
    """What kind of world a seed makes."""

    brokers: int
    links: tuple[tuple[int, int], ...]  # the first dials the second
    publishers: int
    subscribers: int
    fault_pause_us: int  # 0: no faults
    publish_pause_us: int
    raw: bool
    skew_us: int
    slow: bool
    tight: bool  # so little memory that gaps are to be expected
    latecomers: int

    @classmethod
    def draw(cls, chance: Random, brokers: int | None, *, faults: bool) -> Character:
        count = brokers or chance.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8))
        links = [(b, chance.randrange(b)) for b in range(1, count)]
        for _ in range(chance.randrange(count)):
            a, b = sorted((chance.randrange(count), chance.randrange(count)))
            if a != b and (b, a) not in links and (a, b) not in links:
                links.append(chance.choice(((a, b), (b, a))))
        if links and chance.random() < 0.3:
            a, b = chance.choice(links)  # both ends dial each other
            links.append((b, a))
        return cls(
            brokers=count,
            links=tuple(links),
            publishers=chance.randint(1, 4),
            subscribers=chance.randint(2, 8),
            fault_pause_us=chance.choice((1, 3, 3, 8, 20)) * SECOND_US if faults else 0,
            publish_pause_us=chance.choice((80, 200, 600)) * MILLISECOND_US,
            raw=chance.random() < 0.4,
            skew_us=chance.choice((0, 50 * MILLISECOND_US, 5 * SECOND_US)),
            slow=chance.random() < 0.4,
            tight=chance.random() < 0.15,
            latecomers=chance.randrange(1, count) if count > 1 and chance.random() < 0.3 else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run."""

    seed: int
    minutes: float
    kind: str  # "plain"; "durable": with disks, and durable clients; "shared": also shared subscriptions
    brokers: int
    pinned: bool  # the number of brokers was asked for, not drawn
    digest: str
    published: int
    accepted: int
    deliveries: int
    durable_deliveries: int  # events handed to durable subscribers
    owed: int
    gaps: int
    subscriptions: int
    frames: int
    faults: dict[str, int] = field(default_factory=dict)
    rule: str = ""  # "": every rule held
    text: str = ""
    story: tuple[str, ...] = ()


class Scenario:
    """A world and its inhabitants, from one seed."""

    def __init__(
        self,
        *,
        seed: int,
        minutes: float,
        brokers: int | None = None,
        faults: bool = True,
        wrap: Wrap | None = None,
        tracking: TrackingConfig | None = None,
        durable: bool | None = None,
        shared: bool = False,
        late: bool | None = None,
        skew_us: int = 0,
    ) -> None:
        """With `tracking` brokers record paths and clients ask for them; clocks are then wrong by up to
        `skew_us`, and those of brokers step if that is more than tracking is told to expect.

        With `durable` brokers have disks and some clients publish and subscribe durably; None: the seed
        decides. With `shared`, which the seed never decides, some of them share their subscriptions. With
        `late` some of them come later and ask for a past; None: the seed decides.
        """
        if brokers is not None and not 1 <= brokers <= MAX_BROKERS:
            raise UsageError(f"between 1 and {MAX_BROKERS} brokers, not {brokers}")
        if minutes <= 0:
            raise UsageError("a run takes some time")
        self.minutes = minutes
        self._pinned = brokers is not None
        self.world = World(seed)
        self.network = Network(self.world)
        self.ledger = Ledger(self._explains)
        self.processes: dict[str, Process] = {}
        self._wrap = wrap or (lambda core, _: core)
        self._tracking = tracking
        self._character = Character.draw(self.world.random("character"), brokers, faults=faults)
        if tracking is not None:
            self._character = replace(self._character, skew_us=skew_us)
        self.connectivity = Connectivity(self.world, self.network, self.processes)
        self._paths = Paths(
            self.world,
            self.ledger,
            self.processes,
            self.network.connections,
            lambda event, behind: self.durable is not None and self.durable.records.wanted(event, behind),
        )
        self.network.observers.append(self._paths.observe)
        self._origins: dict[int, Origin] = {}
        self._publishers: list[Publisher] = []
        self._subscribers: list[Subscriber] = []
        self._habits: list[PublishingHabit] = []
        self._minds: list[SubscribingHabit] = []
        self._faults: Faults | None = None
        self._owed = 0
        self._resting = False  # everything is healed, and has been for long enough
        self._rest_us = 0  # since when
        self.trails: Trails | None = None
        self.durable: DurableLife | None = None
        by_seed = self.world.random("kind").random() < DURABLE_SHARE
        if shared or (by_seed if durable is None else durable):
            self._add_durable_life(shared=shared, late=late)
        self._add_brokers()
        self._add_clients()
        if tracking is not None:
            self._add_inquirers(tracking)
            self._skew_publishers()

    def _add_durable_life(self, *, shared: bool, late: bool | None) -> None:
        pause_us = 8 * self._character.publish_pause_us  # disks and catching up take their time too
        self._character = replace(self._character, publish_pause_us=pause_us)
        self.durable = DurableLife(
            self.world,
            self.network,
            self.ledger,
            self.processes,
            self.connectivity,
            addresses=self._addresses,
            publish_pause_us=pause_us,
            latest_us=EPOCH_US + self._harm_us + self._settle_us * 2 // 3,
            shared=shared,
            late=late,
        )

    # -- the run

    def run(self) -> Outcome:
        """All of it; the outcome names the first rule that did not hold."""
        try:
            self._run()
        except Violation as violation:
            story = self.world.trace.story(violation.tags)
            return self._outcome(violation.rule, violation.text, story)
        except Exception:
            story = self.world.trace.story(("fault", "world", *self.processes))
            return self._outcome("sound", traceback.format_exc().rstrip(), story)
        return self._outcome("", "", ())

    def _run(self) -> None:
        world, character = self.world, self._character
        self._watch_memory()
        if character.fault_pause_us:
            self._faults = Faults(
                world,
                self.network,
                processes=list(self.processes.values()),
                clients=[*self._publishers, *self._subscribers],
                links=[(f"b{a}", f"b{b}") for a, b in character.links],
                pause_us=character.fault_pause_us,
                raw=character.raw,
                steps=character.skew_us > (0 if self._tracking is None else self._tracking.skew_us),
                applications=() if self.durable is None else self.durable.applications,
            )
        world.run(EPOCH_US + self._harm_us)
        world.note("world", "heals")
        if self._faults is not None:
            self._faults.stop()
        for mind in self._minds:
            mind.stop()
        for subscriber in self._subscribers:
            subscriber.hurry()
        if self.durable is not None:
            self.durable.heal()
        world.run(world.now_us + self._settle_us)
        world.note("world", "rests")
        self._rest_us = world.now_us
        check_agreement(self.connectivity, self.processes)
        self._paths.begin()
        self._resting = True
        world.run(world.now_us + REST_US)
        for habit in self._habits:
            habit.stop()
        if self.durable is not None:
            self.durable.records.check_logs()  # the latest is not released yet
            self.durable.drain()
        world.note("world", "drains")
        world.run(world.now_us + DRAIN_US)
        self._paths.end()
        if self.durable is not None:
            self.durable.begin_again()
            world.run(world.now_us + BEGIN_AGAIN_US)
        self._judge()
        # A log that could not be synced takes nothing more until a restart, no release either.
        sound = not any(
            process.storage is not None and process.storage.group.broken
            for process in self.processes.values()
        )
        if self.durable is not None and self.durable.reclaims and sound:
            world.run(world.now_us + self.durable.config.keep_us + RECLAIM_US)
            self.durable.judge_storage()
        if (
            self.durable is not None
            and self._faults is not None
            and self._faults.counts["deletion"]
            and sound
        ):
            self.durable.delete_all()
            world.run(world.now_us + self.durable.config.keep_us + RECLAIM_US)
            self.durable.judge_deleted()

    def _judge(self) -> None:
        for publisher in self._publishers:
            running = {process.address for process in self.processes.values() if process.running}
            if publisher.waiting and not running.isdisjoint(publisher.addresses):
                text = f"{publisher.name} still waits for {publisher.waiting} publishes to be accepted"
                raise Violation("accept", text, publisher.tags)
        completeness = Completeness(self.world, self.ledger, self.connectivity, self._all_origins())
        completeness.check()
        self._owed = completeness.owed
        if self.durable is not None:
            self._owed += self.durable.judge(self._joined, self._rest_us)
        check_agreement(self.connectivity, self.processes)

    @property
    def _settle_us(self) -> int:
        return SETTLE_US if self._character.fault_pause_us else CALM_SETTLE_US

    @property
    def _harm_us(self) -> int:
        rest_us = self._settle_us + REST_US + DRAIN_US
        return max(LEAST_HARM_US, int(self.minutes * 60 * SECOND_US) - rest_us)

    def _watch_memory(self) -> None:
        durable = 0 if self.durable is None else len(self.durable.records.pubends)
        check_memory(self.processes, self._config(0), len(self._origins) + durable)
        self.world.after(MEMORY_EVERY_US, self._watch_memory)

    @property
    def _kind(self) -> str:
        if self.durable is None:
            return "plain"
        return "shared" if self.durable.groups else "durable"

    def _outcome(self, rule: str, text: str, story: tuple[str, ...]) -> Outcome:
        return Outcome(
            seed=self.world.seed,
            minutes=self.minutes,
            kind=self._kind,
            brokers=self._character.brokers,
            pinned=self._pinned,
            digest=self.world.trace.digest(),
            published=len(self.ledger.events),
            accepted=self.ledger.accepted,
            deliveries=self.ledger.deliveries,
            durable_deliveries=0 if self.durable is None else self.durable.records.handed,
            owed=self._owed,
            gaps=self.ledger.gaps + (0 if self.durable is None else self.durable.records.gaps),
            subscriptions=len(self.ledger.subscriptions),
            frames=self.network.frames,
            faults=dict(sorted(self._faults.counts.items())) if self._faults is not None else {},
            rule=rule,
            text=text,
            story=story,
        )

    # -- inhabitants

    def _add_brokers(self) -> None:
        character, chance = self._character, self.world.random("brokers")
        for index in range(character.brokers):
            name = f"b{index}"
            skew = chance.randint(-character.skew_us, character.skew_us)
            self.processes[name] = Process(
                self.world,
                self.network,
                name=name,
                address=_address(index),
                build=self._build,
                clock=Clock(self.world, skew),
            )
        for a, b in character.links:
            quality = Quality(
                latency_us=chance.choice((100, 1_000, 20_000, 80_000)),
                jitter_us=chance.choice((0, 500, 20_000)),
                bandwidth=chance.choice((0, 0, 0, MIB)),
            )
            self.network.shape(f"b{a}", f"b{b}", quality)
        for index, process in enumerate(self.processes.values()):
            if index < character.brokers - character.latecomers:
                process.start()
            else:
                self.world.after(chance.randrange(40 * SECOND_US), lambda process=process: _start(process))  # type: ignore[misc]

    def _add_clients(self) -> None:
        character, chance = self._character, self.world.random("clients")
        for index in range(character.publishers):
            publisher = Publisher(
                self.world, self.network, self.ledger, name=f"p{index}", addresses=self._addresses(chance)
            )
            self._publishers.append(publisher)
            publisher.start()
            self._habits.append(PublishingHabit(self.world, publisher, pause_us=character.publish_pause_us))
        for index in range(character.subscribers):
            slow = character.slow and chance.random() < 0.4
            subscriber = Subscriber(
                self.world,
                self.network,
                self.ledger,
                name=f"s{index}",
                addresses=self._addresses(chance),
                broker_name=self._broker_name,
                window=64 * KIB if slow else MIB,
                consume=chance.choice((500, 5_000)) if slow else 0,
                buffer=chance.choice((0, 16 * KIB)) if slow else 0,
            )
            self._subscribers.append(subscriber)
            mind = SubscribingHabit(
                self.world,
                subscriber,
                pause_us=chance.choice((2, 10)) * SECOND_US,
                restless=chance.random() < 0.6,
            )
            self._minds.append(mind)
            subscriber.start()

    def _add_inquirers(self, config: TrackingConfig) -> None:
        self.trails = trails = Trails(
            self.world,
            self.ledger,
            config,
            deaths=lambda name: self.processes[name].crashes,
            joined=self._joined,
        )
        self.network.observers.append(trails.observe)
        chance = self.world.random("inquirers")
        for index in range(2):
            inquirer = Inquirer(
                self.world,
                self.network,
                self.ledger,
                name=f"i{index}",
                addresses=self._addresses(chance),
                answered=trails.judge,
            )
            inquirer.start()
            AskingHabit(self.world, inquirer, self.ledger, pause_us=500 * MILLISECOND_US)

    def _skew_publishers(self) -> None:
        """Their clocks are wrong, and now and then wrong in another way."""
        skew_us, chance = self._character.skew_us, self.world.random("publishers' clocks")
        if not skew_us:
            return

        def step(publisher: Publisher) -> None:
            publisher.offset_us = chance.randint(-skew_us, skew_us)
            self.world.after(chance.randint(SECOND_US, 20 * SECOND_US), lambda: step(publisher))

        for publisher in self._publishers:
            step(publisher)

    def _joined(self, first: str, second: str) -> bool:
        """Certainly so only once nothing is harmed any more."""
        return self._resting and any(
            first in group and second in group for group in self.connectivity.components()
        )

    def _addresses(self, chance: Random) -> tuple[str, ...]:
        """A client keeps to one broker, or roams."""
        home = chance.randrange(self._character.brokers)
        if chance.random() < 0.6:
            return (_address(home),)
        rest = [_address(b) for b in range(self._character.brokers) if b != home]
        chance.shuffle(rest)
        return (_address(home), *rest)

    # -- brokers from their disks

    def _build(self, process: Process) -> tuple[Core, int]:
        identity = self._identity(process.disk, process.name)
        index = int(process.name[1:])
        draw = self.world.random(f"draws/{process.name}").randrange
        now_us = process.clock.now_us()
        tracking = self._tracking_of(process, identity.number, now_us)
        stored = None if self.durable is None else stored_in(process)
        core: Core = Broker(
            self._config(index), identity, draw=draw, now_us=now_us, tracking=tracking, stored=stored
        )
        if self.durable is not None:
            core = self.durable.built(process, identity.number, core)
        pubend = volatile_pubend(identity.number, identity.boot)
        self._origins[pubend] = Origin(process.name, pubend, self.world.now_us, 0)
        if self.durable is not None:
            for logged in self.durable.records.pubends:
                if logged >> 32 == identity.number and logged not in self._origins:
                    self._origins[logged] = Origin(process.name, logged, self.world.now_us, 0)
        return self._wrap(core, process.name), identity.boot

    def _tracking_of(self, process: Process, number: int, now_us: int) -> Tracking | None:
        if self._tracking is None:
            return None
        stored, changes = process.histories.load()
        return make_tracking(self._tracking, me=number, stored=stored, changes=changes, now_us=now_us)

    def _identity(self, disk: Disk, name: str) -> Identity:
        """What the disk remembers, with the next boot; made up at the first start."""
        remembered = disk.read(_IDENTITY)
        if remembered is None:
            chance = self.world.random(f"identity/{name}")
            number, node, boot = chance.randrange(2, 2 * OWN_IDS) >> 1, chance.randbytes(16), 0
        else:
            number, node, boot = msgspec.msgpack.decode(remembered, type=tuple[int, bytes, int])
        boot += 1
        disk.save(_IDENTITY, msgspec.msgpack.encode((number, node, boot)))
        return Identity(number=number, node=node, name=name, boot=boot, starts=boot)

    def _config(self, index: int) -> BrokerConfig:
        dial = tuple(_address(b) for a, b in self._character.links if a == index)
        durable = DurableConfig() if self.durable is None else self.durable.config
        config = BrokerConfig(dial=dial, tracking=self._tracking or TrackingConfig(), durable=durable)
        if not self._character.tight:
            return config
        return replace(
            config,
            streams=StreamConfig(plain_bytes=64 * KIB, cache_bytes=64 * KIB),
            delivery=DeliveryConfig(buffer_bytes=64 * KIB),
            durable=replace(durable, cache_bytes=16 * KIB),
        )

    def _broker_name(self, number: int) -> str:
        for pubend, origin in self._origins.items():
            if pubend >> 32 == number:
                return origin.broker
        raise Violation("known", f"a broker introduced itself as {number:08x}, which does not exist")

    # -- what the world knows

    def _all_origins(self) -> dict[int, Origin]:
        """Every start of every broker, with its end."""
        origins: dict[int, Origin] = {}
        for pubend, origin in self._origins.items():
            if not is_volatile(pubend):
                origins[pubend] = origin
                continue
            boots = self.processes[origin.broker].boots
            ended = next(end for boot, _, end in boots if boot == pubend & 0x7FFF_FFFF)
            origins[pubend] = Origin(origin.broker, pubend, origin.started_us, ended)
        return origins

    def _explains(self, subscription: Subscription, pubend: int) -> bool:
        """Whether there is a reason for a gap: a slow subscriber, little memory, or the end of a process.

        What is durable is kept for durable subscriptions, not for plain ones.
        """
        if subscription.slow or self._character.tight or pubend not in self._origins:
            return True
        if not is_volatile(pubend):
            return True
        process = self.processes[self._origins[pubend].broker]
        return any(end for boot, _, end in process.boots if boot == pubend & 0x7FFF_FFFF)


def _address(index: int) -> str:
    return f"10.0.0.{index + 1}:7420"


def _start(process: Process) -> None:
    if not process.running:
        process.start()
