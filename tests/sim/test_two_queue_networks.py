"""Two networks of queues that were founded apart, and a source that goes from one to the other before they
meet (spec, responsibility 9; case (n))."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace
from tests.worlds.queue_networks import QueueNetwork, address_of

from postroad.ids import first_number
from postroad.sim.judge.queues import QueueLedger
from postroad.sim.machine.network import Connection
from postroad.sim.people.queue_users import QueueConsumer, QueueSource, body_of
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.frames import Message, Posting, Send, Sent, decode


class TransactionSource(QueueSource):
    """Sends a message to each of its inboxes, all of them or none."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._parts: tuple[Posting, ...] = ()  # of the one transaction that it sends

    def send(self) -> None:
        first = first_number(self.world.now_us // MILLISECOND_US)
        self._parts = tuple(
            Posting(inbox=inbox, id=first + place, after=0, payload=body_of(first + place))
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


class TwoNetworks(QueueNetwork):
    """A network of one broker here and of one there, with consumers of the inboxes in each, and a source."""

    def __init__(self, kind: type[QueueSource], inboxes: list[str]) -> None:
        super().__init__({"a": (), "b": ()}, arcs=2)
        self.ledger = QueueLedger()
        self.start("a", "b")
        for inbox, broker in product(inboxes, ("a", "b")):
            addresses = [address_of(broker)]
            name = f"{inbox} at {broker}"
            QueueConsumer(self.world, self.network, name, addresses, inbox=inbox, ledger=self.ledger)
        self.source = kind(
            self.world,
            self.network,
            "shop",
            [address_of("a")],
            inboxes=inboxes,
            pause_us=3_600 * SECOND_US,
            ledger=self.ledger,
        )
        self.run(2 * SECOND_US)

    def accepted_at(self, name: str) -> int:
        return int(self.broker(name).metrics()["queue_accepted_total"])

    def meet(self) -> None:
        """The second broker starts anew, and is told of the first."""
        self.told_of["b"] = ("a",)
        self.crash("b")
        self.start("b")


ONE = (QueueSource, ["stock"])
TOGETHER = (TransactionSource, ["stock", "mail"])  # of two arcs


@pytest.mark.parametrize(("kind", "inboxes"), [ONE, TOGETHER], ids=["a message", "a transaction"])
@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("lost", ["gap", "kept"])
def test_n_a_source_that_hears_no_answer_and_goes_to_the_other_network_doubles_nothing(
    first: str, lost: str, kind: type[QueueSource], inboxes: list[str]
) -> None:
    """`a` has the lower id, so its chain goes on. The answer that is lost is the one that names the chain,
    or the one that says `kept`."""
    second = "b" if first == "a" else "a"
    world = TwoNetworks(kind, inboxes)
    world.source.go_to([address_of(first)])
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
    world.source.go_to([address_of(second)])
    world.run(20 * SECOND_US)
    assert world.accepted_at(second) == (not was_kept) * count
    assert len(world.source.waiting) == int(was_kept), "who does not know the chain refuses it"
    world.meet()
    world.run(30 * SECOND_US)
    world.ledger.check_all_arrived()
    assert world.ledger.accepted_count == count
