"""The async client against real brokers."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import pytest
from tests.worlds.process_clients import everywhere, linked

import postroad
from postroad.events import EventBatch

if TYPE_CHECKING:
    from tests.worlds.fault_proxies import FaultProxy
    from tests.worlds.processes import Brokers


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(200):
            await work

    asyncio.run(bounded())


async def take(events: postroad.Subscription, count: int) -> list[postroad.Event]:
    found: list[postroad.Event] = []
    async with asyncio.timeout(100):
        while len(found) < count:
            event = await anext(events)
            assert isinstance(event, postroad.Event)
            found.append(event)
    return found


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 -- other processes are awaited
        await asyncio.sleep(0.02)


def test_publish_and_subscribe_with_a_condition(brokers: Brokers) -> None:
    address = brokers.start("b1").address

    async def work() -> None:
        async with postroad.connect(address, name="shop") as client:
            assert client.broker == "b1"
            async with client.subscribe("orders/#", where="price > 100") as events:
                assert events.missing == ()
                receipts = [
                    await client.publish("orders/eu", f"n{price}", attributes={"price": price})
                    for price in (50, 120, 90, 200)
                ]
                found = await take(events, 2)
            assert [event.id for event in found] == [receipts[1].id, receipts[3].id]
            assert found[0].payload == b"n120"
            assert found[0].attributes == {"price": 120}
            assert (found[0].publisher, found[0].pubend) == (receipts[1].id.publisher, None)
            assert (await client.request("status"))["name"] == "b1"

    run(work())


def test_many_events_arrive_once_and_in_order_as_batches(brokers: Brokers) -> None:
    address = brokers.start("b1").address
    total = 50_000

    async def work() -> None:
        async with (
            postroad.connect(address) as reader,
            postroad.connect(address) as writer,
            reader.subscribe("n") as events,
        ):
            sending = asyncio.ensure_future(
                writer.publish_many(("n", str(number)) for number in range(total))
            )
            expected = itertools.count()
            seen = 0
            async for batches in events.batches():
                for batch in batches:
                    assert isinstance(batch, EventBatch)
                    for row in range(batch.count):
                        assert batch.payload(row) == str(next(expected)).encode()
                    seen += batch.count
                if seen == total:
                    break
            assert await sending == total

    run(work())


def test_errors_are_clear(brokers: Brokers) -> None:
    address = brokers.start("b1").address

    async def work() -> None:
        with pytest.raises(postroad.UnavailableError, match=r"no broker at 127\.0\.0\.1:1 .*postroad up"):
            await postroad.connect("127.0.0.1:1")
        async with postroad.connect(address) as client:
            with pytest.raises(postroad.SelectorError) as caught:
                async with client.subscribe("a", where="price >> 3"):
                    pass
            assert caught.value.text == "price >> 3"
            assert "^" in str(caught.value)
            with pytest.raises(postroad.UsageError):
                await client.subscribe("a/#/b")
            with pytest.raises(postroad.UsageError):
                await client.publish("a/+", b"")
            with pytest.raises(postroad.TooLargeError, match=r"of 962 bytes .* the most is 960"):
                await client.publish("a", bytes(961), mode="best-effort")
            with pytest.raises(postroad.UsageError, match="for repair itself"):
                await client.publish("$repair/ask", b"", mode="best-effort")
            with pytest.raises(postroad.UsageError, match="`order` needs `repair`"):
                client.subscribe("a", order=1)
            with pytest.raises(postroad.UsageError, match="loses nothing"):
                client.subscribe("a", durable="d", repair=True)
            with pytest.raises(postroad.UsageError, match="not one of plain"):
                await client.publish("a", b"", mode="loud")
            with pytest.raises(postroad.UsageError):
                await client.request("nonsense")
            with pytest.raises(postroad.TooLargeError):
                await client.publish("a", b"x" * (1 << 21))
            await client.publish("a", b"still fine")
        with pytest.raises(postroad.UsageError):
            await client.publish("a", b"closed")

    run(work())


def test_an_address_of_several_goes_on_at_another_when_one_dies(brokers: Brokers) -> None:
    first = brokers.start("b1")
    second = brokers.start("b2", first.address)

    async def work() -> None:
        await linked(first, second)
        both = f"{first.address},{second.address}"
        async with (
            postroad.connect(both) as client,
            postroad.connect(second.address) as other,
            everywhere(client, "t/#") as mine,
            everywhere(other, "t/#") as theirs,
        ):
            await client.publish("t/1", b"one")
            assert (await take(theirs, 1))[0].payload == b"one"
            assert (await take(mine, 1))[0].payload == b"one"
            await asyncio.to_thread(first.kill)
            await client.publish("t/2", b"two")
            await client.flush()
            assert client.broker == "b2"
            assert (await take(theirs, 1))[0].payload == b"two"
            # What happened between is unknown, and said before anything later is given.
            gap = await anext(mine)
            assert isinstance(gap, postroad.Gap)
            assert gap.pubend == ""
            assert gap.start < gap.end
            await other.publish("t/3", b"three")
            seen = []
            while b"three" not in seen:
                event = await anext(mine)
                seen += [event.payload] if isinstance(event, postroad.Event) else []

    run(work())


def test_broken_connections_neither_lose_nor_repeat_what_is_published(
    brokers: Brokers, proxied: Callable[[str], FaultProxy]
) -> None:
    """T1: retries bear the same ids, so the broker recognises them."""
    broker = brokers.start("b1")
    proxy = proxied(broker.address)
    total = 3000

    async def work() -> None:
        async with (
            postroad.connect(proxy.address) as writer,
            postroad.connect(broker.address) as reader,
            reader.subscribe("n") as events,
        ):

            async def publish() -> None:
                for number in range(total):
                    await writer.publish("n", str(number))
                    if number % 100 == 0:
                        await asyncio.sleep(0.01)
                    if number % 700 == 350:
                        proxy.blip()
                await writer.flush()

            sending = asyncio.ensure_future(publish())
            found = await take(events, total)
            await sending
            assert [event.payload for event in found] == [str(number).encode() for number in range(total)]

    run(work())


def test_a_publisher_waits_for_its_broker_and_gives_up_after_its_timeout(brokers: Brokers) -> None:
    broker = brokers.start("b1")

    async def work() -> None:
        async with postroad.connect(broker.address, timeout=30) as patient:
            hasty = await postroad.connect(broker.address, timeout=5)
            await asyncio.to_thread(broker.kill)
            await until(lambda: not hasty.connected and not patient.connected)
            with pytest.raises(postroad.UnavailableError, match="no broker at"):
                await hasty.publish("a", b"x")
            await hasty.close()
            waiting = asyncio.ensure_future(patient.publish("a", b"x"))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            await asyncio.to_thread(broker.start)
            await waiting
            await patient.flush()

    run(work())


def test_a_reader_that_falls_behind_gets_a_gap_and_bounded_memory(brokers: Brokers) -> None:
    address = brokers.start("b1").address
    payload = b"x" * 10_000
    total = 1000

    async def work() -> None:
        async with (
            postroad.connect(address, window="64 KiB") as reader,
            postroad.connect(address) as writer,
            reader.subscribe("n", buffer="256 KiB") as events,
        ):
            for _ in range(total):
                await writer.publish("n", payload)
            await writer.flush()
            await asyncio.sleep(0.5)
            held = sum(taken for _, taken in events._queue)
            assert held < 1 << 20
            got, gaps = 0, 0
            await writer.publish("n", b"last")
            async for event in events:
                if isinstance(event, postroad.Gap):
                    gaps += 1
                    assert event.start < event.end
                    # The gap may hold the last one too; one published after it surely comes.
                    await writer.publish("n", b"last")
                elif event.payload == b"last":
                    break
                else:
                    got += 1
            assert gaps >= 1
            assert got < total

    run(work())


@pytest.mark.parametrize("unread", [(250,), (600, 600, 600)], ids=["in the window", "more than the window"])
def test_a_reader_with_much_unread_outlives_broken_connections(
    brokers: Brokers, proxied: Callable[[str], FaultProxy], unread: tuple[int, ...]
) -> None:
    """What it holds of an earlier connection gives no credit on the next; it reads on and gets the new."""
    broker = brokers.start("b1")
    proxy = proxied(broker.address)
    payload = b"x" * 10_000

    async def work() -> None:
        async with (
            postroad.connect(proxy.address) as reader,
            postroad.connect(broker.address) as writer,
            reader.subscribe("n", buffer="64 KiB") as events,
        ):
            for count in unread:
                for _ in range(count):
                    await writer.publish("n", payload)
                await writer.flush()
                # Unless it waits for room, all of it comes, or as much as the window takes.
                if not reader._core.inbox.waits:
                    await until(lambda: sum(taken for _, taken in events._queue) >= 2 << 20)
                dials = reader._dialled
                proxy.blip()
                await until(lambda: reader._dialled > dials and reader.connected)  # noqa: B023
            assert 2 << 20 <= sum(taken for _, taken in events._queue) < 10 << 20
            read = 0
            while read < min(unread[0], 300):
                read += isinstance(await anext(events), postroad.Event)

            async def mark() -> None:
                # What is published before it has begun again is in its Gap.
                while True:
                    await writer.publish("n", b"last")
                    await asyncio.sleep(0.1)

            marking = asyncio.ensure_future(mark())
            async with asyncio.timeout(100):
                async for event in events:
                    if isinstance(event, postroad.Event) and event.payload == b"last":
                        break
            marking.cancel()
            # More than the window in all: it has come back. Little at a time: credit may be on its way.
            for _ in range(10):
                for number in range(100):
                    await writer.publish("n", b"%d" % number + payload)
                seen = 0
                while seen < 100:
                    event = await anext(events)
                    assert isinstance(event, postroad.Event)
                    seen += event.payload != b"last"

    run(work())


def test_a_reader_that_asked_for_it_is_disconnected_instead(brokers: Brokers) -> None:
    address = brokers.start("b1").address

    async def work() -> None:
        async with (
            postroad.connect(address, window="64 KiB") as reader,
            postroad.connect(address) as writer,
            reader.subscribe("n", overflow="disconnect", buffer="64 KiB") as events,
        ):
            for _ in range(300):
                await writer.publish("n", b"x" * 10_000)
            await writer.flush()
            with pytest.raises(postroad.SlowConsumerError):
                async for _ in events:
                    pass

    run(work())


def test_a_connection_that_is_reset_before_a_word_is_told_as_one_that_is_closed() -> None:
    """A broker that refuses a certificate after the handshake closes or resets, as the timing has it."""

    async def test() -> None:
        async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            writer.transport.abort()

        server = await asyncio.start_server(reset, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(postroad.UnavailableError, match="without a word; perhaps it serves TLS"):
                await postroad.connect(f"127.0.0.1:{port}", timeout=5)

    run(test())
