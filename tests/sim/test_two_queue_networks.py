"""Two networks of queues that were founded apart, and a source that goes from one to the other before they
meet (spec, responsibility 9; case (n))."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from postroad.broker.core import Broker
from postroad.ids import Identity, first_number
from postroad.queues.settings import QueueConfig
from postroad.sim.judge.queues import QueueLedger
from postroad.sim.machine.disk import CrashStyle
from postroad.sim.machine.network import Connection, Network
from postroad.sim.machine.process import Core, Process
from postroad.sim.machine.world import Clock, World
from postroad.sim.people.queue_users import QueueConsumer, QueueSource
from postroad.sim.queue_scenario import queue_broker
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.frames import Message, Posting, Send, Sent, decode

NEAR, FAR = "near:7420", "far:7420"
NODES = {"near": bytes([1] * 16), "far": bytes([2] * 16)}


class TransactionSource(QueueSource):
    """Sends a message to each of its inboxes, all of them or none."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._parts: tuple[Posting, ...] = ()  # of the one transaction that it sends

    def send(self) -> None:
        first = first_number(self.world.now_us // MILLISECOND_US)
        self._parts = tuple(
            Posting(inbox=inbox, id=first + place, after=0, payload=b"")
            for place, inbox in enumerate(self._inboxes)
        )
        self.waiting[first] = self._parts[0]
        for part in self._parts:
            self._ledger.sent(self.name, part.inbox, part.id)
        self._post(self._parts[0])

    def _post(self, posting: Posting) -> None:
        parts = tuple(replace(part, chain=self._chains.get(part.inbox, b"")) for part in self._parts)
        self.say(
            Send(
                number=posting.id,
                source=self.name,
                session=self.session,
                form="transactional",
                messages=parts,
                together=True,
            )
        )

    def heard(self, message: Message) -> None:
        if not isinstance(message, Sent) or message.number not in self.waiting:
            return
        if message.state == "kept":
            del self.waiting[message.number]
            for part in self._parts:
                self._ledger.kept(self.name, part.inbox, part.id)
        elif message.chain:
            for place in message.places:
                self._chains.setdefault(self._parts[place].inbox, message.chain)
            if len(self._chains) == len(self._parts):
                self._post(self._parts[0])
        else:
            self.later(lambda: self._post(self._parts[0]))


class TwoNetworks:
    """A network of one broker here and of one there, with consumers of both inboxes in each, and a source."""

    def __init__(self, source: type[QueueSource], inboxes: list[str]) -> None:
        self.world = World(1)
        self.network = Network(self.world)
        self.ledger = QueueLedger()
        self.config = QueueConfig(arcs=2, replicas=2, electors=3)
        self.told_of: dict[str, tuple[str, ...]] = {"near": (), "far": ()}
        self.boots = {"near": 0, "far": 0}
        self.processes = {name: self._process(name) for name in NODES}
        for process in self.processes.values():
            process.start()
        for inbox, address in product(inboxes, (NEAR, FAR)):
            name = f"{inbox} at {address}"
            QueueConsumer(self.world, self.network, name, [address], inbox=inbox, ledger=self.ledger)
        self.source = source(
            self.world,
            self.network,
            "shop",
            [NEAR],
            inboxes=inboxes,
            pause_us=3_600 * SECOND_US,
            ledger=self.ledger,
        )
        self.run(2 * SECOND_US)

    def _process(self, name: str) -> Process:
        def build(process: Process) -> tuple[Core, int]:
            self.boots[name] += 1
            boot = self.boots[name]
            number = 1 + list(NODES).index(name)
            identity = Identity(number=number, node=NODES[name], name=name, boot=boot, starts=boot)
            told_of = self.told_of[name]
            return queue_broker(process, self.world, self.config, identity=identity, dial=told_of), boot

        return Process(
            self.world,
            self.network,
            name=name,
            address=f"{name}:7420",
            build=build,
            clock=Clock(self.world),
            check_every=1,
        )

    def run(self, for_us: int) -> None:
        self.world.run(self.world.now_us + for_us)

    def accepted_at(self, name: str) -> int:
        core = self.processes[name].core
        assert isinstance(core, Broker)
        return int(core.metrics()["queue_accepted_total"])

    def meet(self) -> None:
        """The far broker starts anew, and is told of the near one."""
        self.told_of["far"] = (NEAR,)
        self.processes["far"].crash(silently=False, style=CrashStyle())
        self.processes["far"].start()


ONE = (QueueSource, ["stock"])
TOGETHER = (TransactionSource, ["stock", "mail"])  # of two arcs


@pytest.mark.parametrize(("kind", "inboxes"), [ONE, TOGETHER], ids=["a message", "a transaction"])
@pytest.mark.parametrize("first", ["near", "far"])
@pytest.mark.parametrize("lost", ["gap", "kept"])
def test_n_a_source_that_hears_no_answer_and_goes_to_the_other_network_doubles_nothing(
    first: str, lost: str, kind: type[QueueSource], inboxes: list[str]
) -> None:
    """`near` has the lower id, so its chain goes on. The answer that is lost is the one that names the chain,
    or the one that says `kept`."""
    second = "far" if first == "near" else "near"
    world = TwoNetworks(kind, inboxes)
    world.source.go_to([f"{first}:7420"])
    world.run(SECOND_US)
    answers: list[str] = []

    def lose(connection: Connection, side: int, frame: bytes) -> None:
        message = decode(frame) if connection.ends[1 - side] is world.source else None
        if isinstance(message, Sent):
            answers.append(message.state)
            if message.state == lost:
                world.network.muffle(first, "shop", world.world.now_us + 3_600 * SECOND_US)

    world.network.observers.append(lose)
    world.source.send()
    world.run(SECOND_US)
    assert answers[-1] == lost
    was_kept, count = lost == "kept", len(inboxes)
    assert world.accepted_at(first) == was_kept * count
    world.source.go_to([f"{second}:7420"])
    world.run(20 * SECOND_US)
    assert world.accepted_at(second) == (not was_kept) * count
    assert len(world.source.waiting) == int(was_kept), "who does not know the chain refuses it"
    world.meet()
    world.run(30 * SECOND_US)
    world.ledger.check_all_arrived()
    assert world.ledger.accepted_count == count
