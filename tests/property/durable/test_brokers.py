"""Durable publishing and a durable subscriber in a line of brokers that die and part at random (D10, D12)."""

from __future__ import annotations

import json
from random import Random

import pytest
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Reader

from postroad.ids import is_volatile, pubend_text
from postroad.wire.frames import Ack, Subscribed, encode

LINKS = ((0, 1), (1, 2))
OPERATIONS = ("publish",) * 3 + ("wait", "kill", "start", "cut", "link", "leave", "return", "ack")


class World:
    """The subscriber keeps its token with what it got, so it can say what it must get next."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.net = DurableNet(3, list(LINKS))
        self.links, self.alive = set(LINKS), {0, 1, 2}
        self.home = self.random.choice([0, 1, 2])
        self.publisher = DurableClient(self.net, 0)
        self.reader: Reader | None = Reader(self.net, self.home)
        self.reader.begin("s")
        self.net.wait(3)
        self.token: dict[str, int] = self.reader.start
        self.got: list[int] = []
        self.acknowledged: list[int] = []
        self.published = 0
        assert self.token

    def drain(self) -> None:
        for batch in [] if self.reader is None else self.reader.batches:
            name = pubend_text(batch.pubend)
            assert not batch.lost or is_volatile(batch.pubend)
            assert batch.start >= self.token.get(name, 0) or not batch.count
            self.got += [int(event.payload) for event in batch.events()]
            self.token[name] = max(self.token.get(name, 0), batch.end)
        if self.reader is not None:
            self.reader.batches.clear()

    def leave(self) -> None:
        if self.reader is not None:
            self.drain()
            self.reader.gone()
            self.reader = None

    def come_back(self) -> None:
        if self.reader is None and self.home in self.alive:
            self.reader = Reader(self.net, self.home)
            self.reader.begin("s", token=json.dumps(self.token))

    def start(self, at: int) -> None:
        self.net.start(at)
        self.alive.add(at)
        if at == 0:
            self.publisher = DurableClient(self.net, 0)

    def link(self) -> None:
        for link in LINKS:
            if link not in self.links and set(link) <= self.alive:
                self.net.link(*link)
                self.links.add(link)
                return

    def step(self) -> None:
        match self.random.choice(OPERATIONS):
            case "publish" if 0 in self.alive:
                before = len(self.publisher.accepted())
                self.publisher.send(self.publisher.durable("t", str(self.published)))
                if len(self.publisher.accepted()) > before:
                    self.acknowledged.append(self.published)
                self.published += 1
            case "wait":
                self.net.wait(self.random.choice([0.2, 1, 3]))
            case "kill" if len(self.alive) == 3:
                at = self.random.choice([0, 1, 2])
                self.drain()
                if self.reader is not None and self.reader.at == at:
                    self.reader = None
                self.net.kill(at)
                self.alive.discard(at)
                self.links = {link for link in self.links if at not in link}
            case "start" if len(self.alive) < 3:
                self.start(next(iter({0, 1, 2} - self.alive)))
            case "cut" if self.links:
                link = self.random.choice(sorted(self.links))
                self.net.cut(*link)
                self.links.discard(link)
            case "link":
                self.link()
            case "leave":
                self.leave()
            case "return":
                self.come_back()
            case "ack" if self.reader is not None and self.reader.has(Subscribed):
                self.drain()
                self.reader.send(encode(Ack(number=1, token=json.dumps(self.token))))
        self.drain()

    def heal(self) -> None:
        """All are there again; the subscriber may be at another broker."""
        for at in sorted({0, 1, 2} - self.alive):
            self.start(at)
        self.link()
        self.link()
        self.net.wait(3)
        if self.random.random() < 0.5:
            self.leave()
        if self.reader is None:
            self.home = self.random.choice([0, 1, 2])
            self.come_back()
        self.net.wait(8)
        self.drain()


@pytest.mark.parametrize("seed", range(12))
def test_every_acknowledged_event_once_and_in_order(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        world.step()
    world.heal()
    assert world.got == sorted(set(world.got))
    assert set(world.acknowledged) <= set(world.got)
