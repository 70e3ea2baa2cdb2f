"""Request and reply, with both clients, and with many who share the work."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.worlds.process_clients import run

import postroad


def test_who_is_asked_answers_and_only_who_asked_hears_it(brokers: Any) -> None:
    async def test() -> None:
        b1, b2 = brokers.line(2)
        async with (
            postroad.connect(b1.address) as asker,
            postroad.connect(b2.address) as helper,
            helper.subscribe("sum/#") as requests,
            helper.subscribe("#") as everything,
        ):

            async def serve() -> None:
                async for event in requests.only_events():
                    await event.reply(str(sum(map(int, event.payload.split()))), {"by": "helper"})

            serving = asyncio.create_task(serve())
            while True:
                try:
                    first = await asker.ask("sum/ints", "1 2", timeout=0.5)
                    break
                except TimeoutError:
                    continue  # the subscription is not known at the other broker yet
            assert (first.payload, first.attributes["by"]) == (b"3", "helper")
            answers = await asyncio.gather(*(asker.ask("sum/ints", f"{n} {n}") for n in range(50)))
            assert [int(answer.payload) for answer in answers] == [2 * n for n in range(50)]
            with pytest.raises(TimeoutError, match="nobody answered on 'nobody/home' within"):
                await asker.ask("nobody/home", timeout=0.2)
            with pytest.raises(postroad.UsageError, match="of its own"):
                await asker.ask("sum/ints", attributes={"reply_to": "x"})
            with pytest.raises(postroad.UsageError, match="nobody waits for an answer"):
                first.reply("again")
            seen = await everything.get(timeout=5)
            assert isinstance(seen, postroad.Event)
            assert seen.topic == "sum/ints"  # answers are not for who subscribes to everything
            serving.cancel()

    run(test())


def test_helpers_share_durable_requests(brokers: Any) -> None:
    b1 = brokers.start("b1")
    served: list[str] = []

    def serve(name: str, ready: threading.Event) -> None:
        with (
            postroad.sync.connect(b1.address) as client,
            client.subscribe("work", durable="helpers", shared=True, timeout=3) as requests,
        ):
            ready.set()
            for event in requests.only_events():
                served.append(name)
                event.reply(event.payload.upper())

    starts = [threading.Event() for _ in range(2)]
    helpers = [threading.Thread(target=serve, args=(f"h{n}", start)) for n, start in enumerate(starts)]
    for helper, start in zip(helpers, starts, strict=True):
        helper.start()
        assert start.wait(20)

    async def ask() -> None:
        async with postroad.connect(b1.address) as client:
            answers = await asyncio.gather(*(client.ask("work", f"job {n}", durable=True) for n in range(50)))
        assert [answer.payload for answer in answers] == [f"JOB {n}".encode() for n in range(50)]

    run(ask())
    for helper in helpers:
        helper.join()
    assert sorted(set(served)) == ["h0", "h1"]
    assert len(served) == 50


def test_arguments_as_python_people_give_them(brokers: Any) -> None:
    import numpy as np

    async def test() -> None:
        b1 = brokers.start("b1")
        async with postroad.connect(b1.address) as client:
            async with client.subscribe("a", where=None, token=None, key=None, durable="d") as events:
                given = {"i": np.int64(7), "f": np.float32(0.5), "b": np.bool_(True), "t": np.str_("x")}
                receipt = await client.publish("a", "payload", given, durable=True)
                event = await events.get(timeout=5)
                assert isinstance(event, postroad.Event)
                assert event.attributes == {"i": 7, "f": 0.5, "b": True, "t": "x"}
                assert str(receipt.id) in repr(event)
                with pytest.raises(TimeoutError):
                    await events.get(timeout=0.05)
            with pytest.raises(postroad.UsageError, match="not both"):
                await client.publish("a", durable=True, mode="best-effort")
            assert await client.publish_many([("a", "1"), ("a", "2")], durable=True) == 2

    run(test())
