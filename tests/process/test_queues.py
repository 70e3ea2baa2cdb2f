"""Queues over real processes, sockets and disks (spec Q2 to Q9, Q11)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.namespaces import Cable, need_namespaces
from tests.worlds.process_clients import linked, run
from tests.worlds.processes import BrokerProcess, Brokers, configured
from tests.worlds.queue_clients import QueueClient, queue_client

import postroad
from postroad.queues.arcs import key_of
from postroad.queues.settings import QueueConfig
from postroad.units import MIB
from postroad.wire import frames
from postroad.wire.frames import Posting

TOKEN = "s3cret"  # where brokers listen on other addresses than loopback


def test_what_is_sent_through_any_broker_is_received_through_any_other(brokers: Brokers) -> None:
    """Q2."""
    network = mesh(brokers, 3)

    async def test() -> None:
        await linked(*network)
        async with (
            queue_client(network[0].address) as sender,
            queue_client(network[2].address) as receiver,
        ):
            shop = sender.source("shop")
            number, joined = await receiver.receive("stock")
            assert joined.code == ""
            for n in range(5):
                assert await shop.send("stock", b"%d" % n) == "kept"
            got = {}  # what is not settled comes again when a third broker joins the replicas meanwhile
            while len(got) < 5:
                message = await receiver.take()
                got[message.id] = message
            assert [each.payload for each in got.values()] == [b"0", b"1", b"2", b"3", b"4"]
            assert {each.source for each in got.values()} == {"shop"}
            settled = await receiver.settle(number, *[each.key for each in got.values()])
            assert settled.outcomes == ("accepted",) * 5

    run(test())


class Load:
    """A source that sends numbers one after the other through any broker that lives, and a consumer that
    accepts what it gets; both go on elsewhere when their broker dies."""

    def __init__(self, addresses: list[str], inbox: str = "stock", token: str = "") -> None:
        self.addresses, self.inbox, self._token = addresses, inbox, token
        self.kept: list[int] = []  # as the sender was told
        self.accepted: list[int] = []  # as the consumer was told
        self.worst_s = 0.0  # between two that were kept
        self.stopped = False
        self._session = secrets.token_bytes(8)
        self._consumer = secrets.token_bytes(8)

    async def _connected(self, act: Callable[[QueueClient], Awaitable[None]]) -> None:
        """Do this over a connection, again over another one if it is lost, until it is done."""
        for address in itertools.cycle(self.addresses):
            try:
                async with queue_client(address, self._token) as client:
                    work = asyncio.ensure_future(act(client))
                    await asyncio.wait({work, client.reading}, return_when=asyncio.FIRST_COMPLETED)
                    if work.done():
                        await work
                        return
                    work.cancel()
            except OSError:
                await asyncio.sleep(0.02)

    async def send(self) -> None:
        pending: list[int] = []

        async def act(client: QueueClient) -> None:
            source = client.source("load", self._session)
            at = time.monotonic()
            while not self.stopped:
                number = pending[0] if pending else (self.kept[-1] + 1 if self.kept else 1)
                pending[:] = [number]
                sent = await source.post(
                    frames.Posting(inbox=self.inbox, id=number, after=number - 1, payload=b"%d" % number)
                )
                if sent.code:
                    assert sent.code in ("unavailable", "full"), sent
                    continue
                assert sent.state == "kept", sent
                self.kept.append(number)
                pending.clear()
                self.worst_s, at = max(self.worst_s, time.monotonic() - at), time.monotonic()

        await self._connected(act)

    async def consume(self) -> None:
        done: set[bytes] = set()
        unanswered: dict[bytes, int] = {}  # what was accepted, as far as nobody answered

        async def accept(client: QueueClient, number: int, key: bytes, payload: int) -> None:
            unanswered[key] = payload
            settled = await client.settle(number, key)
            while settled.code:
                settled = await client.settle(number, key)
            del unanswered[key]
            if settled.outcomes == ("accepted",) and key not in done:
                done.add(key)
                self.accepted.append(payload)

        async def act(client: QueueClient) -> None:
            number, joined = await client.receive(self.inbox, consumer=self._consumer)
            assert joined.code in ("", "unavailable"), joined
            while joined.code:
                number, joined = await client.receive(self.inbox, consumer=self._consumer)
            for key, payload in list(unanswered.items()):
                await accept(client, number, key, payload)
            while not self.stopped or len(self.accepted) < len(self.kept):
                message = await client.take()
                await accept(client, number, message.key, int(message.payload))

        await self._connected(act)

    def check(self) -> None:
        """Exactly once, in order, nothing lost (spec Q3, Q7)."""
        assert self.accepted == self.kept == list(range(1, len(self.kept) + 1))


async def until_replicated(address: str, inbox: str, replicas: int, token: str = "") -> Any:
    """The row of an inbox, once it has so many replicas."""
    async with asyncio.timeout(60), queue_client(address, token) as client:
        while True:
            reply = await client.request("queues")
            for row in reply["queues"]:
                if row["inbox"] == inbox and len(row["replicas"]) == replicas:
                    return row
            await asyncio.sleep(0.1)


async def until_all_elect(network: list[BrokerProcess]) -> None:
    """Until every broker is an elector of every arc: then fewer than half of them may go at once."""
    async with asyncio.timeout(60):
        for broker in network:
            async with queue_client(broker.address) as client:
                arcs = QueueConfig().arcs
                while (await client.request("status"))["queues"]["elector_of"] != arcs:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)


def test_all_replicas_but_one_are_killed_at_once_under_load_and_then_the_responsible_broker(
    brokers: Brokers,
) -> None:
    """Nothing kept is lost, nothing comes twice or out of order; K-1 of K go at once and the rest serves."""
    network = mesh(brokers, 5)

    async def test() -> None:
        await linked(*network)
        load = Load([broker.address for broker in network])
        tasks = [asyncio.ensure_future(load.send()), asyncio.ensure_future(load.consume())]
        await at_least(load, 20)
        for count in (2, 1):
            await until_all_elect(network)
            row = await until_replicated(network[0].address, "stock", 3)
            victims = [broker for broker in network if broker.name in row["replicas"][:count]]
            assert row["responsible"] in [victim.name for victim in victims]
            for victim in victims:
                victim.kill()
            await at_least(load, len(load.kept) + 20)
            for victim in victims:
                victim.start()
            await at_least(load, len(load.kept) + 20)
        await until_replicated(network[0].address, "stock", 3)
        load.stopped = True
        await asyncio.gather(*tasks)
        load.check()

    run(test())


@pytest.fixture
def cable() -> Iterator[Cable]:
    need_namespaces()
    made = Cable()
    try:
        yield made
    finally:
        made.close()


def test_the_smaller_side_of_a_cut_refuses_and_the_larger_one_goes_on(
    cable: Cable, brokers: Brokers, tmp_path: Path
) -> None:
    """Spec, responsibility 6: the error means "outcome unknown", and the same id sent again is kept once."""
    network: list[BrokerProcess] = []
    secrets = ("--token", TOKEN, "--link-token", "brokers only")
    extra = (*configured(tmp_path, '[queues]\nanswer = "2 s"\n'), *secrets)
    program = ("-c", "from postroad.cli import main; raise SystemExit(main())")
    for name, side in (("b1", "left"), ("b2", "left"), ("b3", "right")):
        links = tuple(broker.address for broker in network)
        address = f"{cable.hosts[side]}:0"
        broker = BrokerProcess(name, brokers.folder / name, links, extra, address, program)
        brokers.all.append(broker)
        network.append(cable.at(side, broker.start))
    left, right = [broker.address for broker in network[:2]], network[2].address
    late = Posting(inbox="late", id=1, after=0, payload=b"once")
    chains: dict[str, bytes] = {}

    async def refused() -> None:
        async with queue_client(right, TOKEN) as client:
            source = client.source("shop", bytes(8))
            for _ in range(2):
                assert (await source.post(late)).code == "unavailable"
            chains.update(source.chain)

    async def test() -> None:
        load = Load(left, token=TOKEN)
        tasks = [asyncio.ensure_future(load.send()), asyncio.ensure_future(load.consume())]
        await at_least(load, 20)
        await until_replicated(left[0], "stock", 3, TOKEN)
        await asyncio.to_thread(cable.pull)
        minority = asyncio.to_thread(cable.at, "right", lambda: run(refused()))
        await asyncio.gather(minority, at_least(load, len(load.kept) + 20))
        await asyncio.to_thread(cable.plug_in)
        await until_replicated(left[0], "stock", 3, TOKEN)
        await at_least(load, len(load.kept) + 20)
        load.stopped = True
        await asyncio.gather(*tasks)
        load.check()
        async with queue_client(left[1], TOKEN) as client:
            source = client.source("shop", bytes(8))
            source.chain = chains
            sent = await source.post(late)
            while sent.code == "unavailable":
                await asyncio.sleep(0.1)
                sent = await source.post(late)
            assert sent.state == "kept"
            assert (await until_replicated(left[1], "late", 3, TOKEN))["depth"] == 1

    cable.at("left", lambda: run(test()))


def test_all_brokers_are_killed_at_once_and_what_was_kept_is_there_again(brokers: Brokers) -> None:
    """Q5."""
    network = mesh(brokers, 3)

    async def test() -> None:
        await linked(*network)
        load = Load([broker.address for broker in network])
        sender = asyncio.ensure_future(load.send())
        await at_least(load, 50)
        await until_replicated(network[0].address, "stock", 3)
        await at_least(load, len(load.kept) + 50)
        for broker in network:
            broker.kill()
        for broker in network:
            broker.start()
        await at_least(load, len(load.kept) + 10)
        consumer = asyncio.ensure_future(load.consume())
        load.stopped = True
        await asyncio.gather(sender, consumer)
        load.check()

    run(test())


def test_a_broker_that_falls_silent_is_replaced_and_finds_out_when_it_wakes(brokers: Brokers) -> None:
    """Q10: SIGSTOP: its connections stay open, so heartbeats tell."""
    network = mesh(brokers, 4)

    async def test() -> None:
        await linked(*network)
        load = Load([broker.address for broker in network])
        tasks = [asyncio.ensure_future(load.send()), asyncio.ensure_future(load.consume())]
        await at_least(load, 20)
        row = await until_replicated(network[0].address, "stock", 3)
        victim = next(broker for broker in network if broker.name == row["responsible"])
        load.addresses = [broker.address for broker in network if broker is not victim]
        others = Load(load.addresses, "other")
        victim.pause()
        sending = asyncio.ensure_future(others.send())
        await at_least(others, 20)
        victim.unpause()
        await at_least(load, len(load.kept) + 20)
        await at_least(others, len(others.kept) + 20)
        load.stopped = others.stopped = True
        await asyncio.gather(*tasks, sending, others.consume())
        load.check()
        others.check()

    run(test())


async def closest_brokers(network: list[BrokerProcess], inboxes: list[str]) -> dict[str, str]:
    """Whose node id is closest to the middle of each inbox's arc (spec Q2)."""
    nodes: dict[str, int] = {}
    for broker in network:
        async with queue_client(broker.address) as client:
            nodes[broker.name] = int((await client.request("status"))["ring"]["node"], 16)
    arcs, whole = QueueConfig().arcs, 1 << 128
    closest: dict[str, str] = {}
    for inbox in inboxes:
        arc = int.from_bytes(key_of(inbox), "big") * arcs // whole
        middle = (2 * arc + 1) * whole // (2 * arcs)
        ways = {name: abs(node - middle) for name, node in nodes.items()}
        _, closest[inbox] = min((min(way, whole - way), name) for name, way in ways.items())
    return closest


def test_a_broker_that_joins_takes_its_share(brokers: Brokers) -> None:
    """Spec Q9: replicas move to the new set, and those who left it drop theirs."""
    network = mesh(brokers, 3)

    async def test() -> None:
        await linked(*network)
        async with queue_client(network[0].address) as client:
            shop = client.source("shop")
            for n in range(40):
                assert await shop.send(f"inbox-{n}", b"m") == "kept"
            network.append(brokers.start("b4", network[0].address))
            await linked(*network)
            closest = await closest_brokers(network, [f"inbox-{n}" for n in range(40)])
            async with asyncio.timeout(60):
                while True:
                    rows = (await client.request("queues"))["queues"]
                    complete = len(rows) == 40 and all(len(row["replicas"]) == 3 for row in rows)
                    if complete and {row["inbox"]: row["responsible"] for row in rows} == closest:
                        break
                    await asyncio.sleep(0.1)
            assert all(row["depth"] == 1 for row in rows)

    run(test())


def test_an_administrator_rescues_what_is_left_when_a_majority_is_gone_for_good(brokers: Brokers) -> None:
    """Spec, responsibility 8: it says first what may be lost."""
    network = mesh(brokers, 3)

    async def test() -> None:
        await linked(*network)
        load = Load([broker.address for broker in network])
        sender = asyncio.ensure_future(load.send())
        await at_least(load, 20)
        await until_replicated(network[0].address, "stock", 3)
        await at_least(load, len(load.kept) + 20)
        load.stopped = True
        await sender
        for broker in network[1:]:
            broker.kill()
        async with queue_client(network[0].address) as client:
            async with asyncio.timeout(60):
                while not (said := await client.request("queues.rescue"))["arcs"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert said["done"] is False
            assert {name for row in said["arcs"] for name in row["gone"]} == {"b2", "b3"}
            assert (await client.request("queues.rescue", confirm="yes"))["done"] is True
        await until_replicated(network[0].address, "stock", 1)
        load.addresses = [network[0].address]
        await load.consume()
        load.check()

    run(test())


def test_two_networks_that_are_linked_later_become_one(brokers: Brokers) -> None:
    """Spec, responsibility 9: one chain goes on and takes the other's messages in, once each."""
    one, other = brokers.start("b1"), brokers.start("b2")

    async def test() -> None:
        async with queue_client(one.address) as near, queue_client(other.address) as far:
            for client, text in ((near, b"near"), (far, b"far")):
                source = client.source("shop")
                for n in range(3):
                    assert await source.send("stock", b"%s %d" % (text, n)) == "kept"
        bridge = brokers.start("b3", one.address, other.address)
        await linked(one, other, bridge)
        row = await until_replicated(bridge.address, "stock", 3)
        async with asyncio.timeout(60), queue_client(bridge.address) as client:
            while row["depth"] != 6:
                await asyncio.sleep(0.1)
                row = await until_replicated(bridge.address, "stock", 3)
            number, joined = await client.receive("stock")
            assert joined.code == ""
            got = [await client.take() for _ in range(6)]
            assert (await client.settle(number, *[each.key for each in got])).outcomes == ("accepted",) * 6
            by_session: dict[bytes, list[bytes]] = {}
            for each in got:
                by_session.setdefault(each.session, []).append(each.payload)
            assert sorted(by_session.values()) == [
                [b"far 0", b"far 1", b"far 2"],
                [b"near 0", b"near 1", b"near 2"],
            ]

    run(test())


LITTLE_MEMORY = '[queues]\nmemory_bytes = "2 MiB"\n'
COUNT, BODY_BYTES = 1_000, 50_000  # 50 MB in all
TOGETHER = 10  # messages on their way at once: what is on its way takes memory of its own
MOST_GROWTH = 25 * MIB


def body(number: int) -> bytes:
    return (b"%06d" % number) * (BODY_BYTES // 6)


def test_an_inbox_of_many_times_the_memory_outlives_its_brokers(brokers: Brokers) -> None:
    """Q5.

    50 MB for an absent receiver at brokers with room for 2 MiB: they do not grow with it. The responsible
    one is killed and gets a copy when it is back; the next one is killed in the midst of delivery. All comes
    once and in order."""
    network = mesh(brokers, 3, extra=configured(brokers.folder, LITTLE_MEMORY))
    by_name = {broker.name: broker for broker in network}
    addresses = ",".join(broker.address for broker in network)

    async def restart_responsible() -> None:
        row = await until_replicated(network[0].address, "stock", 3)
        victim = by_name[row["responsible"]]
        victim.kill()
        await until_replicated(next(each.address for each in network if each.running), "stock", 2)
        victim.start()
        await until_replicated(network[0].address, "stock", 3)

    async def test() -> None:
        await linked(*network)
        async with postroad.connect(addresses) as client:
            shop = client.application("shop")
            await shop.send("stock", body(0))
            await until_replicated(network[0].address, "stock", 3)
            before = {broker.name: broker.resident_bytes for broker in network}
            for first in range(1, COUNT, TOGETHER):
                numbers = range(first, min(first + TOGETHER, COUNT))
                await shop.send_many(("stock", body(number)) for number in numbers)
            grown = {broker.name: broker.resident_bytes - before[broker.name] for broker in network}
            assert max(grown.values()) < MOST_GROWTH, grown
            await restart_responsible()
            got: list[int] = []
            killing: asyncio.Future[None] | None = None
            async with client.application("stock").inbox() as inbox:
                while len(got) < COUNT:
                    async with asyncio.timeout(60):
                        message = await anext(inbox)
                        try:
                            await message.accept()
                        except postroad.TakenError:
                            continue
                    number = int(message.payload[:6])
                    assert message.payload == body(number)
                    got.append(number)
                    if len(got) == COUNT // 3:
                        killing = asyncio.ensure_future(restart_responsible())
            assert killing is not None
            await killing
            assert got == list(range(COUNT))

    run(test())


def mesh(brokers: Brokers, count: int, extra: tuple[str, ...] = ()) -> list[BrokerProcess]:
    """Every broker is linked with every other, so that the overlay is whole whoever dies."""
    network: list[BrokerProcess] = []
    for number in range(1, count + 1):
        name = f"b{number}"
        links = tuple(broker.address for broker in network)
        broker = BrokerProcess(name, brokers.folder / name, links, extra, address=free_address())
        brokers.all.append(broker)
        network.append(broker.start())
    return network


def free_address() -> str:
    """With a port that no dialling socket is given, so that a broker which was killed gets it again."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


async def at_least(load: Load, count: int) -> None:
    async with asyncio.timeout(90):
        while len(load.kept) < count:  # noqa: ASYNC110 -- another process
            await asyncio.sleep(0.02)
