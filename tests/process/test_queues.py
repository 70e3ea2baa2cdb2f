"""Queues over real processes, sockets and disks (spec Q2 to Q9, Q11)."""

from __future__ import annotations

from tests.worlds.process_clients import linked, run
from tests.worlds.processes import Brokers
from tests.worlds.queue_clients import queue_client


def test_what_is_sent_through_any_broker_is_received_through_any_other(brokers: Brokers) -> None:
    network = brokers.line(3)

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
            got = [await receiver.take() for _ in range(5)]
            assert [each.payload for each in got] == [b"0", b"1", b"2", b"3", b"4"]
            assert {each.source for each in got} == {"shop"}
            settled = await receiver.settle(number, *[each.key for each in got])
            assert settled.outcomes == ("accepted",) * 5

    run(test())
