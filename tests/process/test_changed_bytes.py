"""Bytes that change on the way between processes: nobody is handed them, nobody keeps them, nothing stops."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.worlds.process_clients import run

import postroad

EVENTS = 400
EVERY = 20_000  # bytes for each bit that is flipped


def payload(number: int) -> bytes:
    text = f"{number}:".encode() + bytes(400)
    return hashlib.sha256(text).digest() + text


def number_of(event: postroad.Event) -> int:
    digest, text = event.payload[:32], event.payload[32:]
    assert hashlib.sha256(text).digest() == digest, "an event that nobody published"
    assert event.topic == "orders/eu"
    return int(text.split(b":")[0])


async def taken(events: Any) -> AsyncIterator[int]:
    async for event in events:
        assert isinstance(event, postroad.Event), f"{event} though nothing was lost"
        yield number_of(event)


@pytest.mark.parametrize("seed", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_no_flipped_bit_is_delivered_stored_or_stops_a_stream(brokers: Any, proxied: Any, seed: int) -> None:
    """Between brokers, before the publisher's and behind the subscriber's; durable events come once."""

    async def test() -> None:
        b1 = brokers.start("b1")
        link = proxied(b1.address)
        b2 = brokers.start("b2", link.address)
        near, far = proxied(b1.address), proxied(b2.address)
        async with (
            postroad.connect(near.address, timeout=60) as publisher,
            postroad.connect(far.address, timeout=60) as reader,
        ):
            async with asyncio.timeout(30):
                while len((await reader.request("status"))["brokers"]) != 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            async with await reader.subscribe("orders/#", durable="s", token="") as events:
                for number, proxy in enumerate((link, near, far)):
                    proxy.flip(seed * 10 + number, EVERY)

                async def publish() -> None:
                    for number in range(EVENTS):
                        await publisher.publish("orders/eu", payload(number), mode="durable")
                        if number % 20 == 19:
                            await asyncio.sleep(0.02)
                    for proxy in (link, near, far):
                        proxy.heal()
                    await publisher.flush()

                publishing = asyncio.create_task(publish())
                got: list[int] = []
                async for number in taken(events):
                    got.append(number)
                    if len(got) == EVENTS:
                        break
                await publishing
        assert got == list(range(EVENTS))
        assert min(proxy.flipped for proxy in (link, near, far)) > 0
        assert "checksum" in b1.log.read_text() + b2.log.read_text()

    run(test())
