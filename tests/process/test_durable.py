"""Durable events and kill -9: what was acknowledged is delivered, exactly once and in order (D1, D12)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

import postroad


def run(test: Coroutine[Any, Any, None], seconds: float = 90.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await test

    asyncio.run(bounded())


async def reachable(address: str, count: int) -> None:
    async with asyncio.timeout(20), postroad.connect(address, name="watch") as client:
        while len((await client.request("status"))["brokers"]) != count:  # noqa: ASYNC110 -- another process
            await asyncio.sleep(0.05)


class Publisher:
    """Publishes numbers one after the other; `acknowledged` are those that a receipt came for."""

    def __init__(self, address: str) -> None:
        self.acknowledged: list[int] = []
        self.stopped = False
        self._address = address

    async def run(self) -> None:
        async with postroad.connect(self._address, name="publisher") as client:
            number = 0
            while not self.stopped:
                await client.publish("t", str(number), mode="durable")
                self.acknowledged.append(number)
                number += 1
                if number % 50 == 0:
                    await asyncio.sleep(0.01)


async def read(events: Any, into: list[int], gaps: list[postroad.Gap]) -> None:
    async for event in events:
        if isinstance(event, postroad.Gap):
            gaps.append(event)
        else:
            into.append(int(event.payload))


@pytest.mark.parametrize("kills", [2])
def test_kill_9_of_the_publishing_broker_loses_nothing_acknowledged(brokers: Any, kills: int) -> None:
    """The publisher's own retries make no duplicates: its broker remembers its ids on disk."""
    one, two = brokers.line(2)

    async def work() -> None:
        await reachable(two.address, 2)
        publisher = Publisher(one.address)
        got: list[int] = []
        gaps: list[postroad.Gap] = []
        async with postroad.connect(two.address) as client, client.subscribe("t") as events:
            assert events.missing == ()
            reading = asyncio.ensure_future(read(events, got, gaps))
            publishing = asyncio.ensure_future(publisher.run())
            for _ in range(kills):
                before = len(publisher.acknowledged)
                while len(publisher.acknowledged) < before + 200:
                    assert not publishing.done()
                    await asyncio.sleep(0.02)
                one.kill()
                await asyncio.sleep(0.3)
                one.start()
            before = len(publisher.acknowledged)
            while len(publisher.acknowledged) < before + 100:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            publisher.stopped = True
            await publishing
            while len(got) < len(publisher.acknowledged):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            reading.cancel()
        assert got == publisher.acknowledged
        assert [gap for gap in gaps if gap.pubend.endswith("00000000")] == []

    run(work())


def test_what_was_published_while_a_broker_stood_still_comes_out_of_the_log(brokers: Any) -> None:
    """Its subscriber sees a stream that goes on, though the memory that held it is gone."""
    one, two = brokers.line(2)

    async def work() -> None:
        await reachable(two.address, 2)
        got: list[int] = []
        gaps: list[postroad.Gap] = []
        async with postroad.connect(two.address) as client, client.subscribe("t") as events:
            reading = asyncio.ensure_future(read(events, got, gaps))
            async with postroad.connect(one.address) as publisher:
                await publisher.publish("t", "0", mode="durable")
                while not got:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                two.pause()
                sent = (("t", str(n) + " " * 1_000) for n in range(1, 5_000))
                await publisher.publish_many(sent, mode="durable")
            one.kill()
            two.unpause()
            one.start()
            while len(got) < 5_000:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            reading.cancel()
        assert got == list(range(5_000))
        assert [gap for gap in gaps if gap.pubend.endswith("00000000")] == []

    run(work())
