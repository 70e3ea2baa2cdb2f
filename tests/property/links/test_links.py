"""Links between brokers that dial each other at random, and credit under random delays."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds.links import LinksAlone

from postroad.ids import Identity
from postroad.links.links import LinkSettings
from postroad.seam.effects import Close, Dial, Effect, Send
from postroad.units import KIB, SECOND_US
from postroad.wire.frames import Kind, decode, frame_kind

START_US = 1_000 * SECOND_US


class Net:
    """Brokers and the connections between them; each direction is in order, and what moves next is drawn."""

    def __init__(self, size: int, dials: set[tuple[int, int]], chance: random.Random) -> None:
        self.chance = chance
        self.now_us = START_US
        self.calm = False  # from then on every dial succeeds
        self.brokers = [self.broker(n) for n in range(size)]
        self.ends: dict[int, tuple[int, int]] = {}  # connection -> (dialler, acceptor), while open
        self.queues: dict[
            tuple[int, int], list[bytes | None]
        ] = {}  # (connection, to) -> frames; None: closed
        self.up: list[dict[int, int]] = [{} for _ in range(size)]  # as a user keeps it: peer -> connection
        self.next = 1
        for a, b in sorted(dials):
            for door in range(1 + (a + b) % 2):  # some brokers are known by two addresses
                self.brokers[a].dial(f"{b}:{door}", self.now_us)

    def broker(self, n: int) -> LinksAlone:
        return LinksAlone(
            Identity(number=n, node=bytes(15) + bytes((n,)), name=f"b{n}", boot=1, starts=1),
            draw=self.chance.randrange,
        )

    def perform(self, at: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Dial):
                to = int(effect.address.split(":")[0])
                if not self.calm and self.chance.random() < 0.2:
                    self.brokers[at].dial_failed(effect.address, self.now_us)
                    continue
                connection, self.next = self.next, self.next + 1
                self.ends[connection] = (at, to)
                self.queues[connection, 0], self.queues[connection, 1] = [], []
                accepted = self.brokers[to].opened(
                    connection + 10_000_000, dialled=None, certificate=None, loopback=True, now_us=self.now_us
                )
                assert accepted == []
                hello = self.brokers[at].opened(
                    connection, dialled=effect.address, certificate=None, loopback=True, now_us=self.now_us
                )
                self.perform(at, hello)
            elif isinstance(effect, Send):
                connection, side = self.split(effect.connection)
                if connection in self.ends:
                    self.queues[connection, 1 - side].append(effect.data)
            elif isinstance(effect, Close):
                connection, side = self.split(effect.connection)
                if connection in self.ends:
                    self.queues[connection, 1 - side].append(None)
                self.closed(at, effect.connection)

    @staticmethod
    def split(number: int) -> tuple[int, int]:
        """The shared number of a connection and our side of it: 0 dialled, 1 accepted."""
        return (number - 10_000_000, 1) if number > 10_000_000 else (number, 0)

    def closed(self, at: int, number: int) -> None:
        peer = self.brokers[at].closed(number, self.now_us)
        if peer is not None and self.up[at].get(peer.broker) == number:
            del self.up[at][peer.broker]

    def step(self) -> bool:
        busy = sorted(key for key, queue in self.queues.items() if queue)
        if not busy:
            return False
        connection, side = key = self.chance.choice(busy)
        frame = self.queues[key].pop(0)
        at = self.ends[connection][side]
        number = connection + (10_000_000 if side else 0)
        if frame is None:
            self.closed(at, number)
            del self.ends[connection], self.queues[connection, 0], self.queues[connection, 1]
            return True
        links = self.brokers[at]
        if links.admit(number, frame_kind(frame), len(frame), self.now_us):
            effects, peer, own = links.received(number, decode(frame), self.now_us)
            assert own
            if peer is not None:
                if peer.replaces is not None:
                    assert self.up[at].get(peer.broker) in (peer.replaces, None)
                self.up[at][peer.broker] = number
            self.perform(at, effects)
        links.check()
        return True

    def cut(self) -> None:
        """One connection breaks; both ends notice."""
        if self.ends:
            connection = self.chance.choice(sorted(self.ends))
            dialler, acceptor = self.ends.pop(connection)
            del self.queues[connection, 0], self.queues[connection, 1]
            self.closed(dialler, connection)
            self.closed(acceptor, connection + 10_000_000)

    def tick(self, later_us: int) -> Counter[tuple[int, str]]:
        """Time goes by; who dialled which address how often."""
        self.now_us += later_us
        dialled: Counter[tuple[int, str]] = Counter()
        for at, links in enumerate(self.brokers):
            effects = links.tick(self.now_us)
            dialled.update((at, effect.address) for effect in effects if isinstance(effect, Dial))
            self.perform(at, effects)
        return dialled


@settings(max_examples=120, deadline=None)
@given(
    st.integers(2, 4),
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(0, 2**32),
)
def test_each_pair_ends_with_one_link_that_both_agree_on(
    size: int, dials: set[tuple[int, int]], seed: int
) -> None:
    """Both dial, twice, at once, to themselves, with breaks in between; then it settles and stays so."""
    dials = {(a % size, b % size) for a, b in dials}
    chance = random.Random(seed)
    net = Net(size, dials, chance)
    for _ in range(60):
        net.tick(chance.randrange(SECOND_US))
        for _ in range(chance.randrange(8)):
            net.step()
        if chance.random() < 0.15:
            net.cut()
    net.calm = True
    for _ in range(400):  # undisturbed: 200 seconds
        net.tick(SECOND_US // 2)
        while net.step():
            pass
    settled = [dict(up) for up in net.up]
    dialled: Counter[tuple[int, str]] = Counter()
    for _ in range(240):
        dialled += net.tick(SECOND_US // 2)
        while net.step():
            pass
    assert [dict(up) for up in net.up] == settled, "links change although nothing happens"
    assert all(count <= 3 for count in dialled.values()), "an address is dialled in a tight loop"
    for a in range(size):
        wanted = {b for b in range(size) if b != a and ((a, b) in dials or (b, a) in dials)}
        assert set(net.up[a]) == wanted
        for b, number in net.up[a].items():
            assert Net.split(net.up[b][a])[0] == Net.split(number)[0], "the ends keep different links"
            assert net.brokers[a].is_open(number)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(64 * KIB, 256 * KIB),
    st.lists(st.integers(1, 300 * KIB), min_size=1, max_size=60),
)
def test_credit_never_runs_over_and_never_stalls(seed: int, window: int, sizes: list[int]) -> None:
    chance = random.Random(seed)
    net = Net(2, {(0, 1)}, chance)
    net.brokers = [
        LinksAlone(
            Identity(number=n, node=bytes(15) + bytes((n,)), name=f"b{n}", boot=1, starts=1),
            settings=LinkSettings(broker_window=window),
            draw=chance.randrange,
        )
        for n in range(2)
    ]
    net.brokers[0].dial("1:0", net.now_us)
    while not (net.up[0] and net.up[1]):
        net.tick(SECOND_US)
        while net.step():
            pass
    sender, receiver = net.brokers
    here, there = net.up[0][1], net.up[1][0]
    to_send, travelling, held, credits = list(sizes), [], [], []
    idle = 0
    while to_send or travelling or held:
        move = chance.randrange(4)
        idle += 1
        assert idle < 1_000, "the link is stuck"
        if move == 0 and to_send and sender.spend(here, to_send[0]):
            travelling.append(to_send.pop(0))
        elif move == 1 and travelling:
            size = travelling.pop(0)
            assert receiver.admit(there, Kind.KNOWLEDGE, size, net.now_us)  # never a PeerError
            held.append(size)
        elif move == 2 and held:
            credits += receiver.consumed(there, held.pop(chance.randrange(len(held))))
        elif move == 3 and credits:
            effect = credits.pop(0)
            assert isinstance(effect, Send)
            assert sender.received(here, decode(effect.data), net.now_us) == ([], None, True)
        else:
            continue
        idle = 0
        assert sum(travelling) + sum(held) <= window + max(sizes)
        sender.check()
        receiver.check()
