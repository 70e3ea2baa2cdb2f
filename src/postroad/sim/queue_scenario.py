"""A world of queues from one seed: brokers with disks, sources, consumers, and everything that can go wrong.

Brokers crash one at a time or all at once, loudly or silently, in the midst of a turn; they are cut off from
each other, stalled, join late, and lose their disks (as a new broker then, and never more of them than leaves
a replica). Some worlds are two networks that were founded apart and meet; until then sources go from one to
the other in the midst of what they send. After that everything is healed, and the judge looks at what came of
it.
"""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Final

from postroad.broker.core import Broker
from postroad.config import BrokerConfig
from postroad.ids import Identity
from postroad.links.connection import LinkSettings
from postroad.queues.settings import QueueConfig
from postroad.sim.durable_life import stored_in
from postroad.sim.judge.queues import QueueLedger, check_empty, check_one_responsible, check_whole, cores_of
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.disk import CrashStyle
from postroad.sim.machine.network import Network
from postroad.sim.machine.process import Core, Process
from postroad.sim.machine.world import EPOCH_US, Clock, World
from postroad.sim.people.queue_applications import QueueReceiver, QueueSender
from postroad.sim.people.queue_users import QueueConsumer, QueueSource
from postroad.tracking.strategies import make_tracking
from postroad.units import MIB, MILLISECOND_US, SECOND_US

LOOK_US: Final = 50 * MILLISECOND_US  # between two looks at who is responsible
AFTER_US: Final = 5 * SECOND_US  # for which sources go on once everything is healed
SETTLE_US: Final = 90 * SECOND_US  # without a message accepted, in which every arc is whole
POLL_US: Final = 5 * SECOND_US
LEAST_ELECTORS: Final = 3
WANDER_US: Final = 2 * SECOND_US  # between two moves of sources, on average
APART_EVERY: Final = 7  # seeds: one of them is a world of two networks that meet


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOutcome:
    seed: int
    minutes: float
    brokers: int
    kept: int
    accepted: int
    views: int
    spilled: int  # bytes that were moved to disk, by the brokers that run at the end
    faults: dict[str, int] = field(default_factory=dict)
    rule: str = ""  # "": every rule held
    text: str = ""
    story: tuple[str, ...] = ()


def queue_broker(
    process: Process,
    world: World,
    config: QueueConfig,
    *,
    identity: Identity,
    dial: tuple[str, ...],
) -> Broker:
    """A broker of a simulated process, told of these addresses."""
    settings = BrokerConfig(links=LinkSettings(address=process.address), dial=dial, queues=config)
    now_us = process.clock.now_us()
    filters, changes = process.histories.load()
    tracking = make_tracking(
        settings.tracking, me=identity.number, stored=filters, changes=changes, now_us=now_us
    )
    draw = world.random(f"draws/{identity.name}").randrange
    stored = stored_in(process)
    return Broker(settings, identity, draw=draw, now_us=now_us, tracking=tracking, stored=stored)


class QueueScenario:
    """`wandering`: where there are two networks, sources go from one to the other before these meet.

    `product`: users have the product's client core, and speak no frames of their own; None: the seed says so.
    """

    def __init__(
        self,
        *,
        seed: int,
        seconds: int = 60,
        faults: bool = True,
        wandering: bool = True,
        product: bool | None = None,
    ) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.ledger = QueueLedger()
        self.seconds = seconds
        self._with_faults, self._wandering = faults, wandering
        chance = self._chance = self.world.random("queues")
        self._count = chance.choice((1, 2, 3, 3, 4, 5, 6, 8))
        self.config = QueueConfig(
            arcs=chance.choice((1, 2, 4)),
            replicas=chance.choice((1, 2, 3, 3)),
            electors=chance.choice((3, 5, 7)),
            memory_bytes=self._memory_bytes(),
        )
        self.processes: dict[str, Process] = {}
        self._identities: dict[str, tuple[int, bytes]] = {}
        self._boots: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._harming = True
        self._networks_joined = False
        self._addresses = [f"b{at}:7420" for at in range(self._count)]
        self._last = self._count - 1
        apart = self._count > 1 and seed % APART_EVERY == APART_EVERY // 2
        self._second = self._count - self._count // 2 if apart else 0
        late = chance.randrange(self._count) if chance.random() < 0.4 else 0
        for at in range(self._count):
            process = self._process(at)
            delay_us = chance.randrange(20 * SECOND_US) if at >= self._count - late and at else 0
            self.world.after(delay_us, lambda process=process: self._start(process))  # type: ignore[misc]
        if product is None:
            product = self.world.random("clients").random() < 0.5
        product = product and not self._second  # it does not wander
        inboxes = [f"inbox{at}" for at in range(chance.randint(1, 4))]
        self.sources = [
            (QueueSender if product else QueueSource)(
                self.world,
                self.network,
                f"source{at}",
                self._addresses_of(at),
                inboxes=inboxes,
                pause_us=chance.choice((100, 300, 600)) * MILLISECOND_US,
                ledger=self.ledger,
            )
            for at in range(chance.randint(1, 4))
        ]
        absence = self.world.random("absence")
        self.consumers = [
            (QueueReceiver if product else QueueConsumer)(
                self.world,
                self.network,
                f"{inbox}-{at}",
                self._addresses_of(at),
                inbox=inbox,
                ledger=self.ledger,
                absent_us=absence.choice((0, 0, 5, 15)) * SECOND_US,
            )
            for inbox in inboxes
            for at in range(chance.choice((1, 1, 2, 3)))
        ]

    def _memory_bytes(self) -> int:
        """Most worlds have room for a few messages only: the bodies of others are on disk."""
        return self.world.random("memory").choice((1_000, 4_000, 20_000, 64 * MIB))

    # -- two networks that were founded apart; `_second`: the place of the second founder, 0: there is none

    def _addresses_of(self, user: int) -> list[str]:
        """A user knows brokers of one network, and those that come later."""
        if not self._second:
            return self._addresses
        return self._addresses[: self._second] if user % 2 == 0 else self._addresses[self._second :]

    def _told_of(self, at: int) -> tuple[str, ...]:
        """The brokers that one is told of when it starts."""
        if 0 < self._second <= at < self._count and not self._networks_joined:
            return tuple(self._addresses[self._second : at])
        return tuple(self._addresses[: min(at, self._count)])

    def _meet(self) -> None:
        """The second founder starts anew, and is told of the first network."""
        self._networks_joined = True
        self.faults["meeting"] += 1
        process = self.processes[f"b{self._second}"]
        if process.running:
            process.crash(silently=False, style=CrashStyle())
        self._start(process)

    def _wander(self) -> None:
        """A source goes on in the other network, with what it has not been told of."""
        if self._networks_joined:
            return
        chance = self.world.random("wandering")
        self.faults["move"] += 1
        mover = chance.choice(self.sources)
        assert isinstance(mover, QueueSource)
        mover.go_to(self._addresses_of(chance.randrange(2)))
        self.world.after(chance.randrange(1, 2 * WANDER_US), self._wander)

    # -- brokers

    def _process(self, at: int) -> Process:
        name = f"b{at}"

        def build(process: Process) -> tuple[Core, int]:
            if name not in self._identities:
                drawn = self.world.random(f"identity/{name}")
                self._identities[name] = (drawn.randrange(1, 1 << 31), drawn.randbytes(16))
            number, node = self._identities[name]
            self._boots[name] += 1
            boot = self._boots[name]
            identity = Identity(number=number, node=node, name=name, boot=boot, starts=boot)
            broker = queue_broker(process, self.world, self.config, identity=identity, dial=self._told_of(at))
            return broker, boot

        process = Process(
            self.world,
            self.network,
            name=name,
            address=f"{name}:7420",
            build=build,
            clock=Clock(self.world),
            check_every=20,
        )
        self.processes[name] = process
        return process

    def _start(self, process: Process) -> None:
        if not process.running:
            process.start()

    def brokers(self) -> dict[str, Broker]:
        brokers: dict[str, Broker] = {}
        for name, process in self.processes.items():
            if process.running:
                assert isinstance(process.core, Broker)
                brokers[name] = process.core
        return brokers

    # -- the run

    def run(self) -> QueueOutcome:
        try:
            self._run()
        except Violation as violation:
            return self._outcome(violation.rule, violation.text, self.world.trace.story(violation.tags))
        except Exception:
            return self._outcome("sound", traceback.format_exc().rstrip(), ())
        return self._outcome("", "", ())

    def _run(self) -> None:
        self.world.after(LOOK_US, self._look)
        if self._with_faults:
            self.world.after(self._chance.randrange(5 * SECOND_US), self._harm)
        if self._second:
            self.world.after(self._chance.randrange(self.seconds * SECOND_US), self._meet)
            if self._wandering:
                self.world.after(WANDER_US, self._wander)
        self.world.run(EPOCH_US + self.seconds * SECOND_US)
        self._harming = False
        self.network.heal()
        for process in self.processes.values():
            process.spare()
            process.disk.go_on()
            self._start(process)
        self.world.run(self.world.now_us + AFTER_US)
        for source in self.sources:
            source.stopped = True
        self._settle()

    def _settle(self) -> None:
        """As long as messages go on being accepted, since a slow consumer may have minutes of them before it,
        and for a bounded time without; then it must last."""
        accepted, end_us = -1, 0
        while not self._is_settled():
            if self.ledger.accepted_count > accepted:
                accepted, end_us = self.ledger.accepted_count, self.world.now_us + SETTLE_US
            if self.world.now_us >= end_us:
                break
            self.world.run(self.world.now_us + POLL_US)
        self.world.run(self.world.now_us + POLL_US)
        self._check_settled()

    def _is_settled(self) -> bool:
        try:
            self._check_settled()
        except Violation:
            return False
        return True

    def _check_settled(self) -> None:
        self.ledger.check_all_arrived()
        check_empty(self.brokers(), range(self.config.arcs))
        check_whole(self.brokers(), range(self.config.arcs), self.config.replicas)

    def _look(self) -> None:
        check_one_responsible(self.brokers(), range(self.config.arcs))
        self.world.after(LOOK_US, self._look)

    def _outcome(self, rule: str, text: str, story: tuple[str, ...]) -> QueueOutcome:
        metrics = [broker.metrics() for broker in self.brokers().values()]
        views = sum(int(each["queue_views_total"]) for each in metrics)
        spilled = sum(int(each["queue_spilled_bytes_total"]) for each in metrics)
        return QueueOutcome(
            seed=self.world.seed,
            minutes=self.seconds / 60,
            brokers=self._count,
            kept=self.ledger.kept_count,
            accepted=self.ledger.accepted_count,
            views=views,
            spilled=spilled,
            faults=dict(sorted(self.faults.items())),
            rule=rule,
            text=text,
            story=story,
        )

    # -- harm

    def _harm(self) -> None:
        if not self._harming:
            return
        chance = self._chance
        acts = (self._crash, self._crash, self._crash_all, self._cut_off, self._stall, self._lose_disk)
        act = chance.choices(acts, weights=(5, 3, 1, 3, 2, 1))[0]
        act(chance)
        self.world.after(chance.randrange(SECOND_US, 10 * SECOND_US), self._harm)

    def _up(self) -> list[Process]:
        return [process for process in self.processes.values() if process.running]

    def _crash(self, chance: Random) -> None:
        if not self._up():
            return
        self.faults["crash"] += 1
        process = chance.choice(self._up())
        within = chance.choice((None, 0, 1, 2, 5))
        style = CrashStyle(scattered=chance.random() < 0.5)
        process.crash(silently=chance.random() < 0.3, style=style, within_turn=within)
        self.world.after(chance.randrange(SECOND_US // 5, 12 * SECOND_US), lambda: self._start(process))

    def _crash_all(self, chance: Random) -> None:
        """The power is cut."""
        self.faults["power"] += 1
        for process in self._up():
            process.crash(silently=False, style=CrashStyle(scattered=True))
            delay_us = chance.randrange(SECOND_US // 5, 5 * SECOND_US)
            self.world.after(delay_us, lambda process=process: self._start(process))  # type: ignore[misc]

    def _cut_off(self, chance: Random) -> None:
        """Two sides that do not hear each other."""
        self.faults["partition"] += 1
        names = list(self.processes)
        side = [name for name in names if chance.random() < 0.5]
        until_us = self.world.now_us + chance.randrange(SECOND_US, 15 * SECOND_US)
        for name in side:
            for other in names:
                if other not in side:
                    self.network.block(name, other, until_us)
                    self.network.cut(name, other, (chance.randrange(SECOND_US), chance.randrange(SECOND_US)))

    def _stall(self, chance: Random) -> None:
        """A broker is not heard for a while, and its connections stay."""
        self.faults["stall"] += 1
        name = chance.choice(list(self.processes))
        until_us = self.world.now_us + chance.randrange(SECOND_US // 2, 8 * SECOND_US)
        for other in self.processes:
            if other != name:
                self.network.stall(name, other, until_us)

    def _lose_disk(self, chance: Random) -> None:
        """A broker is gone for good, and another one comes. Only while no replica is missing anywhere."""
        if self._count <= self.config.replicas or self.config.replicas < 2:
            return
        try:
            check_whole(self.brokers(), range(self.config.arcs), self.config.replicas)
        except Violation:
            return
        if not self._has_electors():
            return
        # Never a founder: it was told of nobody, and would found once more.
        name = chance.choice([name for name in self.processes if name not in ("b0", f"b{self._second}")])
        if not self.processes[name].running:
            return
        self.faults["disk"] += 1
        self.processes.pop(name).crash(silently=chance.random() < 0.3, style=CrashStyle())
        self._last += 1
        self._addresses.append(f"b{self._last}:7420")
        process = self._process(self._last)
        self.world.after(chance.randrange(SECOND_US, 12 * SECOND_US), lambda: self._start(process))

    def _has_electors(self) -> bool:
        """Whether a majority of every arc's electors is left without any one of them."""
        for arc in range(self.config.arcs):
            for _, core in cores_of(self.brokers(), arc):
                if core.serving and core.view is not None and len(core.view.electors) < LEAST_ELECTORS:
                    return False
        return True
