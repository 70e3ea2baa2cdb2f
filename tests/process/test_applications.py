"""Applications that send to each other through real brokers (Q2 to Q10), from the client's side."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.worlds.process_clients import cli, linked, run
from tests.worlds.processes import BrokerProcess, Brokers

import postroad
import postroad.sync


@asynccontextmanager
async def clients(*brokers: BrokerProcess) -> AsyncIterator[list[postroad.Client]]:
    """One at each broker, that go on at the others."""
    async with asyncio.TaskGroup() as group:
        opening = [
            group.create_task(_open(",".join(one.address for one in (*brokers[at:], *brokers[:at]))))
            for at in range(len(brokers))
        ]
    found = [task.result() for task in opening]
    try:
        yield found
    finally:
        for client in found:
            await client.close()


async def _open(address: str) -> postroad.Client:
    return await postroad.connect(address, timeout=60)


async def take(inbox: postroad.client.application.ApplicationInbox, count: int) -> list[postroad.Message]:
    return [await anext(inbox) for _ in range(count)]


def test_applications_send_receive_accept_and_reject_through_any_broker(brokers: Brokers) -> None:
    """Q3, Q5, Q6; DESIGN's example."""
    network = brokers.line(3)

    async def test() -> None:
        await linked(*network)
        async with clients(*network) as (first, second, third):
            shop, stock = first.application("shop"), third.application("stock")
            receipt = await shop.send("stock", b"reserve A1", attributes={"n": 3, "who": "ä"}, confirm=True)
            async with stock.inbox() as inbox:
                message = await anext(inbox)
                assert (message.source, message.payload, message.kind) == (
                    "shop",
                    b"reserve A1",
                    "transactional",
                )
                assert (message.attributes, message.attempt) == ({"n": 3, "who": "ä"}, 1)
                assert message.id == receipt.id
                await message.reject(reason="not yet")
                again = await anext(inbox)
                assert (again.id, again.attempt) == (receipt.id, 2)
                await again.accept()
                await receipt.delivered
                with pytest.raises(postroad.UsageError, match="settled"):
                    await again.accept()
                for kind in ("recoverable", "express"):
                    await shop.send("stock", kind, kind=kind)
                    message = await anext(inbox)
                    assert (message.payload.decode(), message.kind) == (kind, kind)
                    await message.accept()
            await _multicast_and_transactions(second)
            await _order_of_many(first, third)

    run(test())


async def _multicast_and_transactions(client: postroad.Client) -> None:
    """Beyond the paper: point to multipoint, and several messages as one transaction."""
    shop = client.application("shop")
    receipt = await shop.send(["billing", "mail"], b"both")
    assert len(set(receipt.ids)) == 2
    async with shop.transaction() as transaction:
        transaction.send("billing", b"debit")
        transaction.send("mail", b"letter")
    assert transaction.receipt is not None
    with contextlib.suppress(ValueError):
        async with shop.transaction() as other:
            other.send("billing", b"never")
            raise ValueError("changed my mind")
    for name, expected in (("billing", {b"both", b"debit"}), ("mail", {b"both", b"letter"})):
        async with client.application(name).inbox() as inbox:
            found = [await anext(inbox) for _ in expected]
            assert {message.payload for message in found} == expected
            for message in found:
                await message.accept()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await anext(inbox)


async def _order_of_many(sender: postroad.Client, receiver: postroad.Client) -> None:
    """Q7: a thousand on their way at once, in order, each once; the window holds back what is not settled."""
    ids = await sender.application("many").send_many([("sink", str(n)) for n in range(1_000)])
    assert ids == sorted(set(ids))
    async with receiver.application("sink").inbox(window=100) as inbox:
        messages = await take(inbox, 100)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await anext(inbox)
        seen = []
        while True:
            seen += [int(message.payload) for message in messages]
            await asyncio.gather(*(message.accept() for message in messages))
            if len(seen) == 1_000:
                break
            messages = await take(inbox, 100)
        assert seen == list(range(1_000))


def test_a_kill_of_the_responsible_broker_under_load_loses_and_doubles_nothing(brokers: Brokers) -> None:
    """Q4.

    Q7, Q9, Q10: four sources, consumers and senders that were at the dead broker go on at another one.
    """
    network = brokers.line(4)
    each = 60

    async def source(client: postroad.Client, name: str) -> None:
        application = client.application(name)
        for number in range(each):
            await application.send("sink", f"{name} {number}")

    async def test() -> None:
        await linked(*network)
        async with clients(*network) as found:
            accepted: dict[str, list[int]] = {}

            async def consume() -> None:
                async with found[0].application("sink").inbox() as inbox:
                    async for message in inbox:
                        try:
                            await message.accept()
                        except postroad.TakenError:
                            continue
                        name, number = message.payload.decode().split()
                        accepted.setdefault(name, []).append(int(number))
                        if sum(map(len, accepted.values())) == each * len(found):
                            return

            consumer = asyncio.create_task(consume())
            sources = [
                asyncio.create_task(source(client, f"source{number}")) for number, client in enumerate(found)
            ]
            while sum(map(len, accepted.values())) < each:  # noqa: ASYNC110 -- other processes
                await asyncio.sleep(0.01)
            while True:  # until one of them can be missed
                (row,) = (await found[1].request("queues"))["queues"]
                if len(row["replicas"]) == 3:
                    break
                await asyncio.sleep(0.05)
            victim = next(broker for broker in network if broker.name == row["responsible"])
            victim.kill()
            await asyncio.gather(*sources)
            await consumer
            assert accepted == {f"source{number}": list(range(each)) for number in range(len(found))}

    run(test())


def test_a_loop_over_an_inbox_that_is_left_leaves_no_consumer_behind(brokers: Brokers) -> None:
    """The message that it has can still be settled; what else its window had comes to the next one."""
    broker = brokers.start("b1")

    async def test() -> None:
        async with clients(broker) as (client,):
            shop, stock = client.application("shop"), client.application("stock")
            await shop.send_many([("stock", str(number)) for number in range(4)])
            found = []
            for _ in range(4):
                async with asyncio.timeout(60):
                    async for message in stock.inbox():
                        found.append((message.payload, message.attempt))
                        break
                await message.accept()
            assert found == [(b"0", 1), (b"1", 1), (b"2", 1), (b"3", 1)]
            async with asyncio.timeout(60):
                while (await client.request("queues"))["queues"][0]["consumers"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            kept = stock.inbox()
            await shop.send("stock", b"4")
            await (await anext(kept)).accept()
            await shop.send("stock", b"5")
            assert (await anext(kept)).payload == b"5", "one that the program holds stays open"

    run(test())


def test_the_same_without_an_event_loop_and_on_the_command_line(brokers: Brokers) -> None:
    broker = brokers.start("b1")
    with postroad.sync.connect(broker.address, timeout=60) as client, client.application("shop") as shop:
        receipt = shop.send("stock", "one", confirm=True)
        assert len(shop.send_many([("stock", "two"), ("stock", "three", {"n": 1})])) == 2
        with shop.transaction() as transaction:
            transaction.send("stock", "four")
        with client.application("stock").inbox(timeout=0.3) as inbox:
            found = list(inbox)
            assert [message.payload for message in found] == [b"one", b"two", b"three", b"four"]
            found[0].accept()
            receipt.wait_delivered(timeout=60)
            found[1].accept()
            found[2].reject(again=False, reason="no such thing")
            found[3].accept()
            with pytest.raises(TimeoutError):
                inbox.get(timeout=0.05)
    row = json.loads(cli(broker.address, "queues", "--json").stdout)["queues"][0]
    assert (row["inbox"], row["depth"], row["responsible"], row["replicas"]) == ("stock", 0, "b1", ["b1"])
    assert "no such thing" in cli(broker.address, "queues", "dead", "stock").stdout
    assert cli(broker.address, "queues", "again", "stock").stdout == "1 dead letter of stock sent again\n"
    sent = cli(broker.address, "send", "stock", "five", "--from", "till", "--attr", "n=5", "--json")
    kept = cli(broker.address, "inbox", "stock", "--keep", "--count", "2", "--timeout", "50")
    assert kept.stdout.splitlines()[1] == "till  five  n=5", kept.stderr
    lines = cli(broker.address, "inbox", "stock", "--count", "2", "--timeout", "50", "--json").stdout
    first, second = (json.loads(line) for line in lines.splitlines())
    assert (first["payload"], second["payload"], second["attempt"]) == ("three", "five", 1)
    assert {"id": second["id"], "to": "stock"} == json.loads(sent.stdout)
    empty = cli(broker.address, "inbox", "stock", "--count", "1", "--timeout", "0.2")
    assert (empty.returncode, "only 0 of 1 messages" in empty.stderr) == (1, True)
