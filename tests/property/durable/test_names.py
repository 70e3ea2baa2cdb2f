"""Names of durable subscriptions under everything that happens to brokers: none is lost, none comes to an end
that nobody asked for (D10). Brokers die, are cut off, and their clocks differ and are set."""

from __future__ import annotations

import random

import pytest
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Reader, names

from postroad.units import SECOND_US
from postroad.wire.frames import Reply, Request, encode

ACTS = (
    *("attach",) * 5,
    *("delete",) * 3,
    *("heal",) * 3,
    *("cut_off",) * 2,
    *("kill", "leave", "set_clock"),
)


class Story:
    """Some brokers around b0, and one name. `deletions` that were, or may have been, carried out."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.count = self.chance.choice([3, 4])
        self.pairs = [(0, other) for other in range(1, self.count)]
        self.net = DurableNet(self.count, self.pairs)
        self.linked = set(self.pairs)
        self.running = set(range(self.count))
        self.deletions = 0
        self.readers: list[tuple[Reader, int, int]] = []  # with its broker, and the deletions before it
        for at in range(self.count):
            self.net.ahead_us[at] = self.chance.choice([0, 0, 30, 60]) * SECOND_US
        self.net.wait(0.5)
        self.ack = self.chance.choice(["", "auto"])

    def attach(self) -> None:
        at = self.chance.choice(sorted(self.running))
        reader = Reader(self.net, at)
        before = [earlier for earlier, *_ in self.readers if earlier.begun]
        if not self.ack and before and self.chance.random() < 0.8:
            reader.begin("s", ack=self.ack, token=before[-1].token())
        else:
            reader.begin("s", ack=self.ack)
        self.net.wait(0.3)
        self.readers.append((reader, at, self.deletions))

    def leave(self) -> None:
        if self.readers:
            reader, at, _ = self.readers[-1]
            if at in self.running and (at, reader.connection) in self.net.ends:
                reader.gone()

    def delete(self) -> None:
        client = DurableClient(self.net, self.chance.choice(sorted(self.running)))
        client.send(encode(Request(number=1, what="subs.delete", arguments={"name": "s"})))
        self.net.wait(0.3)
        replies = [message.code for message in client.messages if isinstance(message, Reply)]
        self.deletions += replies != ["usage"]

    def cut_off(self) -> None:
        at = self.chance.randrange(self.count)
        for pair in sorted(self.linked):
            if at in pair:
                self.net.cut(*pair)
                self.linked.discard(pair)

    def kill(self) -> None:
        if len(self.running) > 1:
            at = self.chance.choice(sorted(self.running))
            self.net.kill(at)
            self.running.discard(at)
            self.linked = {pair for pair in self.linked if at not in pair}

    def heal(self) -> None:
        for at in sorted(set(range(self.count)) - self.running):
            self.net.start(at)
            self.running.add(at)
        for pair in sorted(set(self.pairs) - self.linked):
            self.net.link(*pair)
            self.linked.add(pair)
        self.net.wait(self.chance.choice([0.2, 1.2]))

    def set_clock(self) -> None:
        self.net.ahead_us[self.chance.randrange(self.count)] = self.chance.choice([0, 30, 60]) * SECOND_US

    def check(self) -> None:
        self.heal()
        self.net.wait(3)
        after_all = [
            reader for reader, _, before in self.readers if before == self.deletions and reader.begun
        ]
        assert [reader.ended() for reader in after_all if "deleted" in reader.ended()] == []
        if after_all:
            hosts = [names(self.net, at) for at in range(self.count)]
            assert {"s": False} in hosts, hosts


def tell(seed: int) -> None:
    story = Story(seed)
    for _ in range(story.chance.randrange(5, 14)):
        getattr(story, story.chance.choice(ACTS))()
    story.check()


@pytest.mark.parametrize("seed", range(12))
def test_no_name_is_lost_or_deleted_by_hearsay(seed: int) -> None:
    tell(seed)


@pytest.mark.soak
def test_nor_in_many_stories() -> None:
    for seed in range(1_000):
        tell(seed)
