"""The durable part of a world: who publishes and subscribes durably, and how that is judged at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from postroad.durable.settings import DurableConfig
from postroad.ids import pubend_id, pubend_text
from postroad.seam.storage import Stored, StreamEnd
from postroad.selectors import Selector
from postroad.sim.judge.connectivity import SETTLE_US, Connectivity
from postroad.sim.judge.durable import Reader, Records, Subscribing, Watched
from postroad.sim.judge.ledger import Ledger
from postroad.sim.judge.sharing import Consumer, Group
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.network import Network
from postroad.sim.machine.process import Core, Process
from postroad.sim.machine.world import World
from postroad.sim.people.applications import Application, Clerk, DurablePublisher, DurableSubscriber
from postroad.sim.people.workload import PublishingHabit, random_selector
from postroad.units import KIB, MIB, SECOND_US

SKEW_US: Final = 15 * SECOND_US  # no tick is further from true time
REPORT_US: Final = SECOND_US  # by then a pubend that can be reached has heard of a subscription
BEGIN_AGAIN_US: Final = 2 * SECOND_US  # by then acknowledgements are on disk
LATE_SHARE: Final = 0.25  # of worlds where some come later
BEFORE_US: Final = 20 * SECOND_US  # a past begins at most this long before the world does, or in 1970
WINDOW_BYTES: Final = 64 * KIB  # of a slow subscriber: the smallest there is


class DurableLife:
    """Durable publishers, durable subscribers and the records they are judged by."""

    def __init__(
        self,
        world: World,
        network: Network,
        ledger: Ledger,
        processes: Mapping[str, Process],
        connectivity: Connectivity,
        *,
        addresses: Callable[[Random], tuple[str, ...]],
        publish_pause_us: int,
        latest_us: int,
        shared: bool = False,
        late: bool | None = None,
    ) -> None:
        """`shared`: also subscriptions with several consumers, and early release by size. `late`: some come
        later, by `latest_us`, and most of these ask for a past; None: the seed decides."""
        self._world = world
        self._network = network
        self._processes = processes
        self._connectivity = connectivity
        chance = world.random("durable")
        self.config = DurableConfig(
            pubends=chance.choice((1, 1, 2, 3)),
            keep_us=chance.choice((5, 10, 10)) * SECOND_US,
            max_age_us=chance.choice((0, 0, 0, 15)) * SECOND_US,
        )
        self.records = Records(world, ledger, processes, explains=self._explains, unheard_of=self._unheard_of)
        self._numbers: dict[str, int] = {}  # broker -> its number
        self.publishers: list[DurablePublisher] = []
        self.subscribers: list[DurableSubscriber] = []
        for index in range(chance.randint(1, 3)):
            publisher = DurablePublisher(
                world,
                network,
                ledger,
                name=f"dp{index}",
                addresses=addresses(chance),
                pubend_of=self._pubend_of,
            )
            self.publishers.append(publisher)
        self.habits = [
            PublishingHabit(world, publisher, pause_us=publish_pause_us) for publisher in self.publishers
        ]
        acks = chance.choice((("", "", "auto", "batch"), ("", "", "auto", "batch"), ("auto", "batch")))
        for index in range(chance.randint(1, 6)):
            subscriber = self._subscriber(chance, f"ds{index}", network, addresses, chance.choice(acks))
            self.subscribers.append(subscriber)
        self.groups: list[Group] = []
        if shared:
            self._add_groups(network, addresses)
        chance = world.random("since")
        by_seed = chance.random() < LATE_SHARE
        if by_seed if late is None else late:
            self._come_late(chance, latest_us)
        for application in self.applications:
            application.start()

    @property
    def applications(self) -> list[Application]:
        return [*self.publishers, *self.subscribers, *self._consumers]

    @property
    def _consumers(self) -> list[Consumer]:
        return [consumer for group in self.groups for consumer in group.consumers]

    def _add_groups(self, network: Network, addresses: Callable[[Random], tuple[str, ...]]) -> None:
        """From a chance of its own, so that all else is as in the same world without them."""
        chance = self._world.random("groups")
        self.config = replace(self.config, max_bytes=chance.choice((0, 16, 64)) * KIB)
        for index in range(chance.randint(1, 3)):
            slow = chance.random() < 0.6
            group = Group(
                self._world,
                self.records,
                name=f"dg{index}-shared",
                selector=chance.choice((Selector.parse("#", ""), random_selector(chance))),
                key=chance.choice(("", "region", "price")),
                slow=slow,
            )
            home = addresses(chance)[:1]  # a group is at one broker
            for number in range(chance.randint(1, 4)):
                Consumer(
                    self._world,
                    network,
                    name=f"dg{index}c{number}",
                    addresses=home,
                    group=group,
                    window=WINDOW_BYTES if slow else MIB,
                    consume=chance.choice((2_000, 20_000)) if slow else 0,
                )
            self.groups.append(group)
            self.records.groups.append(group)

    def _come_late(self, chance: Random, latest_us: int) -> None:
        """Each of these comes at a time of its own. Most ask for a past; half leave once more, some
        before they have gone through it."""
        for subscriber in self.subscribers:
            if chance.random() < 0.5:
                subscriber.reader.since_us = self._comes(chance, latest_us, [subscriber])
        for group in self.groups:
            if chance.random() < 0.5:
                group.since_us = self._comes(chance, latest_us, group.consumers)

    def _comes(
        self, chance: Random, latest_us: int, applications: Sequence[DurableSubscriber | Consumer]
    ) -> int:
        """The first of those with one subscription comes, and later the others; perhaps all leave at once,
        having looked only, and come back. The time that it asks for; 0: none."""
        now_us = self._world.now_us
        comes_us = chance.randint(now_us, latest_us)
        for index, application in enumerate(applications):
            application.comes_us = chance.randint(comes_us, latest_us) if index else comes_us
        out_us = comes_us + int(chance.random() ** 3 * (latest_us - comes_us))
        back_us = chance.randint(out_us, latest_us)
        leaves, looks = chance.random() < 0.5, chance.random() < 0.5
        if leaves:
            for application in applications:
                application.looks = looks
                self._world.at(out_us, lambda application=application: application.leave_until(back_us))  # type: ignore[misc]
        past_us = chance.randrange(comes_us - now_us + BEFORE_US)
        return chance.choice((comes_us - past_us, comes_us - past_us, comes_us - past_us, 1, 0))

    def _subscriber(
        self,
        chance: Random,
        name: str,
        network: Network,
        addresses: Callable[[Random], tuple[str, ...]],
        ack: str,
    ) -> DurableSubscriber:
        reader = Reader(self.records, name=f"{name}-durable", selector=random_selector(chance), ack=ack)
        self.records.readers.append(reader)
        slow = reader.slow = chance.random() < 0.3
        return DurableSubscriber(
            self._world,
            network,
            name=name,
            addresses=addresses(chance),
            reader=reader,
            window=WINDOW_BYTES if slow else MIB,
            consume=chance.choice((2_000, 20_000)) if slow else 0,
        )

    # -- brokers

    def built(self, process: Process, number: int, core: Core) -> Core:
        """A broker with this number starts."""
        self._numbers[process.name] = number
        for index in range(self.config.pubends):
            self.records.pubends[pubend_id(number, index)] = process.name
        return Watched(core, self.records)

    def _pubend_of(self, broker: str, id: bytes) -> int:
        return pubend_id(self._numbers[broker], int.from_bytes(id[:4], "big") % self.config.pubends)

    def _explains(self, reader: Subscribing, pubend: int, start: int, end: int) -> bool:
        """Ticks that were released although a subscriber might have wanted them.

        By early release, but never to one that was there when they came and kept up; or because the pubend
        could not hear of the subscription in time, since it was out of reach from its beginning on. Or they
        are of a past that it asked for, and were released before it came; or it was deleted meanwhile.
        """
        del start
        released_us = self.records.released_at(pubend, end)
        if released_us is None:
            return False
        if reader.since_us and released_us <= reader.began_us:
            return True
        if any(since <= released_us <= to for since, to in reader.absent):
            return True
        early = self.config.max_age_us or self.config.max_bytes
        if early and (reader.slow or end <= reader.connected_us + SKEW_US):
            return True
        reported_us = reader.began_us + REPORT_US
        for since_us, to_us in self._connectivity.spells(self.records.pubends[pubend], reader.home):
            attached_us = self._connectivity.attached_since(reader.home, pubend >> 32, since_us)
            if max(attached_us + SETTLE_US, reported_us) <= min(to_us, released_us):
                return False
        return self.records.pubends[pubend] != reader.home

    def _unheard_of(self, reader: Reader, broker: str) -> bool:
        """It was not together with the broker that has it since it is there."""
        former, claimed_us = reader.claim
        if former in ("", broker):
            return False
        spells = self._connectivity.spells(former, broker)
        return not any(to - max(since, claimed_us) >= SETTLE_US for since, to in spells)

    # -- the course of a run

    def heal(self) -> None:
        """Nobody crashes any more, and nobody is slow."""
        for application in self.applications:
            application.stay()
        for subscriber in self.subscribers:
            subscriber.hurry()
        for consumer in self._consumers:
            consumer.hurry()

    def drain(self) -> None:
        for habit in self.habits:
            habit.stop()

    def begin_again(self) -> None:
        """Whoever lets its broker keep the token has acknowledged everything, and gets none of it again."""
        for subscriber in self.subscribers:
            subscriber.finish()
            if subscriber.reader.ack:
                self._world.after(BEGIN_AGAIN_US, lambda which=subscriber: self._begin_again(which))  # type: ignore[misc]
        for consumer in self._consumers:
            consumer.finish()
            self._world.after(BEGIN_AGAIN_US, consumer.restart)

    def _begin_again(self, subscriber: DurableSubscriber) -> None:
        subscriber.reader.strict = True
        subscriber.restart()

    def judge(self, reachable: Callable[[str, str], bool], rest_us: int) -> int:
        for publisher in self.publishers:
            if publisher.waiting:
                text = f"{publisher.name} still waits for {publisher.waiting} receipts"
                raise Violation("accept", text, (publisher.name, publisher.broker))
        for subscriber in self.subscribers:
            if not subscriber.reader.began:
                text = f"{subscriber.reader.name} was never confirmed"
                raise Violation("confirm", text, (subscriber.name,))
        for group in self.groups:
            if not group.began:
                raise Violation("confirm", f"{group.name} was never confirmed", (group.name,))
        return self.records.check(reachable, rest_us)

    @property
    def reclaims(self) -> bool:
        """Nothing holds storage once everybody has everything: all tokens are kept by the brokers where the
        subscriptions always were. (Former brokers hold theirs for a minute.)"""
        return all(
            subscriber.reader.ack and len(subscriber.reader.hosts) == 1 for subscriber in self.subscribers
        )

    def delete_all(self) -> None:
        """Everybody leaves for good, and somebody deletes all names: wherever they are, the others refuse."""
        for application in self.applications:
            application.leave()
        names = [*(reader.name for reader in self.records.readers), *(group.name for group in self.groups)]
        for process in self._processes.values():
            for name in names:
                Clerk(
                    self._world,
                    self._network,
                    name=f"clerk-{process.name}-{name}",
                    addresses=(process.address,),
                    durable=name,
                ).start()

    def judge_deleted(self) -> None:
        for name, process in self._processes.items():
            left = process.core.metrics()["durable_subscriptions"]
            if left:
                raise Violation("deleted", f"{name} has {left} subscriptions that were deleted", (name,))
        self.judge_storage()

    def judge_storage(self) -> None:
        """Everybody has had everything for longer than it is kept."""
        for pubend, broker, last in self.records.kept():
            text = f"{broker} still keeps events of {pubend_text(pubend)} up to {last}, which everybody has"
            raise Violation("reclaimed", text, (broker, pubend_text(pubend)))


def stored_in(process: Process) -> Stored:
    """What a start finds on its disk."""
    storage = process.open_storage()
    return Stored(
        load=storage.load,
        streams={
            stream: StreamEnd(last=end.last, chopped=end.chopped or 0, suspect=end.suspect)
            for stream, end in storage.volume.recovered.streams.items()
        },
    )
