"""An inbox that is many times as large as memory: real processes, sockets and disks (spec Q5)."""

from __future__ import annotations

import asyncio

from tests.process.test_queues import free_address, until_replicated
from tests.worlds.process_clients import linked, run
from tests.worlds.processes import BrokerProcess, Brokers, configured

import postroad
from postroad.units import MIB

MEMORY = '[queues]\nmemory_bytes = "2 MiB"\n'
COUNT, BODY_BYTES = 1_000, 50_000  # 50 MB in all
TOGETHER = 10  # messages on their way at once: what is on its way takes memory of its own
MOST_GROWTH = 25 * MIB


def body(number: int) -> bytes:
    return (b"%06d" % number) * (BODY_BYTES // 6)


def trio(brokers: Brokers) -> list[BrokerProcess]:
    extra = configured(brokers.folder, MEMORY)
    network: list[BrokerProcess] = []
    for name in ("b1", "b2", "b3"):
        links = tuple(broker.address for broker in network)
        broker = BrokerProcess(name, brokers.folder / name, links, extra, address=free_address())
        brokers.all.append(broker)
        network.append(broker.start())
    return network


def test_an_inbox_of_many_times_the_memory_outlives_its_brokers(brokers: Brokers) -> None:
    """50 MB for an absent receiver at brokers with room for 2 MiB: they do not grow with it. The responsible
    one is killed and gets a copy when it is back; the next one is killed in the midst of delivery. All comes
    once and in order."""
    network = trio(brokers)
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
