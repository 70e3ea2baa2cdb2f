"""Clients of real broker processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from tests.worlds.processes import SOURCE

import postroad


@contextlib.asynccontextmanager
async def everywhere(
    client: postroad.Client, topic: str, where: str = ""
) -> AsyncIterator[postroad.Subscription]:
    """A subscription that every broker has confirmed: on a busy machine the first try may miss some."""
    while True:
        async with client.subscribe(topic, where) as events:
            if not events.missing:
                yield events
                return


def run(test: Coroutine[Any, Any, None], seconds: float = 200.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await test

    asyncio.run(bounded())


async def reachable(address: str, count: int, seconds: float = 60.0) -> None:
    """Until that broker sees `count` brokers, itself included."""
    async with asyncio.timeout(seconds), postroad.connect(address, name="watch") as client:
        while len((await client.request("status"))["brokers"]) != count:  # noqa: ASYNC110 -- another process
            await asyncio.sleep(0.05)


async def linked(*brokers: Any) -> None:
    await asyncio.gather(*(reachable(one.address, len(brokers)) for one in brokers))


class Publisher:
    """Publishes numbers one after the other; `acknowledged` are those that a receipt came for."""

    def __init__(self, address: str) -> None:
        self.acknowledged: list[int] = []
        self.stopped = False
        self._address = address

    async def run(self) -> None:
        async with postroad.connect(self._address, name="publisher", timeout=120) as client:
            number = 0
            while not self.stopped:
                await client.publish("t", str(number), mode="durable")
                self.acknowledged.append(number)
                number += 1
                if number % 50 == 0:
                    await asyncio.sleep(0.01)


async def take(events: Any, count: int) -> list[postroad.Event]:
    found: list[postroad.Event] = []
    while len(found) < count:
        event = await anext(events)
        assert isinstance(event, postroad.Event)
        found.append(event)
    return found


async def publish(address: str, first: int, last: int, **attributes: Any) -> None:
    async with postroad.connect(address) as client:
        await client.publish_many((("t", str(n), attributes) for n in range(first, last)), mode="durable")


def cli(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "postroad", *arguments, "--broker", address],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        check=False,
    )
