"""A range of durable ticks, read from any broker, with both clients, through a broken connection (P1)."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.processes import IMPATIENT, configured

import postroad
from postroad.events import EventBatch, Gap


def heads(*clients: Any) -> str:
    """How far the pubends are, each by the broker that knows it best."""
    found: dict[str, int] = {}
    for client in clients:
        for pubend, tick in client.request("heads")["heads"].items():
            found[pubend] = max(tick, found.get(pubend, 0))
    return json.dumps(found)


def test_a_range_at_every_broker(brokers: Any, tmp_path: Path) -> None:
    extra = configured(tmp_path, '[durable]\nkeep = "1 h"\n')
    b1 = brokers.start("b1", extra=extra)
    b2 = brokers.start("b2", b1.address, extra=extra)
    with postroad.sync.connect(b1.address) as one, postroad.sync.connect(b2.address) as two:
        while len(one.request("heads")["heads"]) < 2 or len(two.request("heads")["heads"]) < 2:
            time.sleep(0.05)
        one.publish_many([("t", f"{n}", {"n": n}) for n in range(100)], mode="durable")
        middle = heads(one)
        two.publish_many([("u", f"{n}", {"n": n}) for n in range(50)], mode="durable")
        one.publish_many([("t", f"{n}", {"n": n}) for n in range(100, 200)], mode="durable")
        until = heads(one, two)
        for client in (one, two):
            with client.read(until, after=middle, topic="t", where="n < 150") as events:
                assert [event.attributes["n"] for event in events] == list(range(100, 150))
            with client.read(until) as events:
                assert sorted(int(event.payload) for event in events) == sorted([*range(200), *range(50)])
            found: list[EventBatch | Gap] = []
            with client.read(until, topic="u") as events:
                for items in events.batches():
                    found += items
            assert sum(one.count for one in found if isinstance(one, EventBatch)) == 50
        with pytest.raises(postroad.UsageError):
            one.read("")


def test_a_reader_goes_on_after_its_broker_came_back(brokers: Any, tmp_path: Path) -> None:
    b1 = brokers.start("b1", extra=configured(tmp_path, '[durable]\nkeep = "1 h"\n'))

    async def test() -> None:
        async with postroad.connect(b1.address, window="256 KiB") as client:
            await client.publish_many([("t", b"x" * 1000, {"n": n}) for n in range(5_000)], mode="durable")
            until = json.dumps((await client.request("heads"))["heads"])
            seen: list[int] = []
            async with client.read(until) as events:
                async for event in events:
                    assert isinstance(event, postroad.Event)
                    seen.append(int(event.attributes["n"]))
                    if len(seen) == 1_000:
                        b1.kill()
                        b1.start()
            assert seen == list(range(5_000))

    async def bounded() -> None:
        async with asyncio.timeout(90):
            await test()

    asyncio.run(bounded())


def test_a_range_of_a_broker_that_is_gone_is_unavailable(brokers: Any, tmp_path: Path) -> None:
    """P1: Nobody waits for ever; what can be read is read, and what is missing when it is back."""
    extra = configured(tmp_path, '[durable]\nkeep = "1 h"\n')
    b1 = brokers.start("b1", extra=extra)
    b2 = brokers.start("b2", b1.address, extra=extra, program=IMPATIENT)
    with postroad.sync.connect(b1.address) as one, postroad.sync.connect(b2.address) as two:
        while len(one.request("heads")["heads"]) < 2 or len(two.request("heads")["heads"]) < 2:
            time.sleep(0.05)
        one.publish_many([("t", f"{n}", {"n": n}) for n in range(100)], mode="durable")
        two.publish_many([("t", f"{n}", {"n": n}) for n in range(100, 150)], mode="durable")
        until = heads(one, two)
    b1.kill()
    with postroad.sync.connect(b2.address) as two:
        seen: list[int] = []
        with two.read(until) as events:
            with pytest.raises(postroad.UnavailableError, match=r"^broker 'b1' has been out of reach"):
                seen.extend(event.attributes["n"] for event in events)
            assert seen == list(range(100, 150))
        b1.start()
        while two.request("heads")["away"]:
            time.sleep(0.05)
        with two.read(until) as events:
            assert sorted(event.attributes["n"] for event in events) == list(range(150))
