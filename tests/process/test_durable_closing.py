"""A close in good order loses no acknowledgement (D11; issue 3, part 7)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest
from tests.worlds.certificates import Certificates
from tests.worlds.process_clients import cli, publish, run, take

import postroad
import postroad.sync

MANY = 60


async def behind(address: str, **arguments: Any) -> int:
    """How many durable subscriptions have something to come."""
    async with postroad.connect(address, **arguments) as client:
        rows = (await client.request("subs"))["subscriptions"]
    return sum(row["lag_events"] > 0 for row in rows)


async def close_all(address: str, *, how: str, busy: bool = False, **arguments: Any) -> None:
    """One client reads the only event of many subscriptions, and goes."""
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(postroad.connect(address, **arguments))
        subscriptions = await asyncio.gather(
            *(client.subscribe("t", durable=f"s{n}")._open() for n in range(MANY))
        )
        if busy:
            other = await stack.enter_async_context(postroad.connect(address, **arguments))
            # Somebody reads it: all subscriptions of a client share its window.
            for task in (hear(await client.subscribe("noise")), make_noise(other)):
                stack.callback(asyncio.create_task(task).cancel)
        await client.publish("t", b"0", mode="durable")
        for one in subscriptions:
            await take(one, 1)
        if how == "each":
            for one in subscriptions:
                await one.close()
        await client.close()


async def hear(noise: postroad.Subscription) -> None:
    async for _ in noise:
        pass


async def make_noise(client: postroad.Client) -> None:
    while True:
        await client.publish_many([("noise", bytes(1000))] * 100)
        await asyncio.sleep(0)


@pytest.mark.parametrize("how", ["each", "client"])
@pytest.mark.parametrize("busy", [False, True])
def test_a_client_that_goes_is_heard_to_the_end(brokers: Any, how: str, busy: bool) -> None:
    (one,) = brokers.line(1)

    async def work() -> None:
        for _ in range(3):
            await close_all(one.address, how=how, busy=busy)
            assert await behind(one.address) == 0

    run(work())


def test_with_tls_too(brokers: Any, certificates: Certificates) -> None:
    certificate, key = certificates.issue("b1")
    extra = ("--tls-cert", certificate, "--tls-key", key, "--tls-ca", str(certificates.ca))
    one = brokers.start("b1", extra=extra)
    trusting = postroad.tls(ca=certificates.ca)

    async def work() -> None:
        for how in ("each", "client"):
            await close_all(one.address, how=how, tls=trusting)
            assert await behind(one.address, tls=trusting) == 0

    run(work())


def test_an_exception_leaves_the_event_it_was_at(brokers: Any) -> None:
    """Whether the block of the subscription is left, or only that of the client."""
    (one,) = brokers.line(1)

    async def fail(*, inner: bool) -> None:
        async with postroad.connect(one.address) as client, contextlib.AsyncExitStack() as stack:
            events = client.subscribe("t", durable="s")
            if inner:
                await stack.enter_async_context(events)
            assert [event.payload for event in await take(events, 2)] == [b"0", b"1"]
            raise ZeroDivisionError

    async def work() -> None:
        for inner in (True, False):
            async with postroad.connect(one.address) as client, client.subscribe("t", durable="s"):
                pass
            await publish(one.address, 0, 3)
            with pytest.raises(ZeroDivisionError):
                await fail(inner=inner)
            async with postroad.connect(one.address) as client:
                events = await client.subscribe("t", durable="s")
                assert [event.payload for event in await take(events, 2)] == [b"1", b"2"]

    run(work())


@pytest.mark.parametrize(("end", "least_s", "most_s"), [("pause", 1.0, 6.0), ("kill", 0.0, 0.9)])
def test_who_does_not_answer_is_not_waited_for_long(
    brokers: Any, end: str, least_s: float, most_s: float
) -> None:
    (one,) = brokers.line(1)

    async def work() -> None:
        client = await postroad.connect(one.address)
        events = await client.subscribe("t", durable="s")
        await publish(one.address, 0, 1)
        await take(events, 1)
        getattr(one, end)()
        began = time.monotonic()
        await client.close()
        assert least_s <= time.monotonic() - began < most_s

    run(work())


def test_a_close_that_is_cancelled_closes(brokers: Any) -> None:
    (one,) = brokers.line(1)

    async def work() -> None:
        client = await postroad.connect(one.address)
        events = await client.subscribe("t", durable="s")
        await publish(one.address, 0, 1)
        await take(events, 1)
        one.pause()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.close()
        assert not client.connected
        with pytest.raises(StopAsyncIteration):
            await anext(events)
        one.unpause()
        assert await behind(one.address) == 0, "it was said, though nobody waited for the answer"

    run(work())


def test_without_an_event_loop_and_from_the_command_line(brokers: Any) -> None:
    (one,) = brokers.line(1)
    with postroad.sync.connect(one.address) as client:
        held = [client.subscribe("t", durable=f"s{n}") for n in range(MANY)]
        client.publish("t", b"0", mode="durable")
        for events in held:
            events.get(timeout=30)
    assert asyncio.run(behind(one.address)) == 0
    run(publish(one.address, 1, 3))
    shown = cli(one.address, "sub", "t", "--durable", "s0", "--count", "2", "--timeout", "50")
    assert len(shown.stdout.splitlines()) == 2
    assert asyncio.run(behind(one.address)) == MANY - 1
