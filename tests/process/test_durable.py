"""Durable events and kill -9: what was acknowledged is delivered, exactly once and in order (D1, D12)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.worlds.process_clients import Publisher, everywhere, reachable, run
from tests.worlds.processes import SOURCE

import postroad


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
        async with postroad.connect(two.address) as client, everywhere(client, "t") as events:
            reading = asyncio.ensure_future(read(events, got, gaps))
            publishing = asyncio.ensure_future(publisher.run())
            for _ in range(kills):
                before = len(publisher.acknowledged)
                while len(publisher.acknowledged) < before + 200:
                    assert not publishing.done()
                    await asyncio.sleep(0.02)
                one.kill()
                await asyncio.sleep(0.3)
                await asyncio.to_thread(one.start)
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
        async with postroad.connect(two.address) as client, everywhere(client, "t") as events:
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
            await asyncio.to_thread(one.start)
            while len(got) < 5_000:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            reading.cancel()
        assert got == list(range(5_000))
        assert [gap for gap in gaps if gap.pubend.endswith("00000000")] == []

    run(work())


class Log:
    """What a durable subscriber wrote down, with its token, in one step."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.token = ""
        self.gaps: list[postroad.Gap] = []

    async def read(self, address: str) -> None:
        async with (
            postroad.connect(address) as client,
            client.subscribe("t", durable="reader", token=self.token) as events,
        ):
            self.token = self.token or events.token
            async for event in events:
                if isinstance(event, postroad.Gap):
                    self.gaps.append(event)
                else:
                    self.got.append(int(event.payload))
                self.token = events.token

    async def reach(self, count: int, task: asyncio.Task[None]) -> None:
        while len(self.got) < count:
            if task.done():
                task.result()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("who", ["publishing broker", "subscriber", "subscriber's broker", "moves"])
def test_a_durable_subscriber_gets_each_event_once_whoever_dies(brokers: Any, who: str) -> None:
    """D12, D10: its token and what it got are its own; everything else may go."""
    one, two, three = brokers.line(3)

    async def work() -> None:
        await reachable(three.address, 3)
        log, publisher = Log(), Publisher(one.address)
        reading = asyncio.ensure_future(log.read(three.address))
        while not log.token:
            assert not reading.done(), reading.result()
            await asyncio.sleep(0.05)
        publishing = asyncio.ensure_future(publisher.run())
        await log.reach(100, reading)
        if who == "publishing broker":
            one.kill()
            await asyncio.sleep(0.2)
            await asyncio.to_thread(one.start)
        elif who == "subscriber's broker":
            three.kill()
            await asyncio.sleep(0.5)
            await asyncio.to_thread(three.start)
        else:
            reading.cancel()
            await asyncio.wait([reading])
            await asyncio.sleep(0.5)
            reading = asyncio.ensure_future(log.read((two if who == "moves" else three).address))
        await log.reach(len(publisher.acknowledged) + 100, reading)
        publisher.stopped = True
        await publishing
        await log.reach(len(publisher.acknowledged), reading)
        await asyncio.sleep(0.5)
        reading.cancel()
        assert log.got == publisher.acknowledged
        assert log.gaps == []

    run(work())


def test_the_broker_keeps_the_token(brokers: Any) -> None:
    """D11: ack="auto"; the subscriber, and its broker, die and come back."""
    one, two = brokers.line(2)

    async def take(count: int) -> list[int]:
        found: list[int] = []
        async with (
            postroad.connect(two.address) as client,
            client.subscribe("t", durable="kept") as events,
        ):
            async for event in events:
                assert isinstance(event, postroad.Event)
                found.append(int(event.payload))
                if len(found) == count:
                    await events.ack()  # on disk when it returns: what follows is a kill
                    break
        return found

    async def work() -> None:
        await reachable(two.address, 2)
        async with postroad.connect(two.address) as client, client.subscribe("t", durable="kept"):
            pass
        async with postroad.connect(one.address) as publisher:
            for n in range(100):
                await publisher.publish("t", str(n), mode="durable")
        assert await take(30) == list(range(30))
        two.kill()
        await asyncio.to_thread(two.start)
        assert await take(70) == list(range(30, 100))

    run(work())


@pytest.mark.parametrize("shared", [False, True])
def test_a_broker_that_is_stopped_forgets_no_acknowledgement(brokers: Any, shared: bool) -> None:
    """Acknowledgements that nobody waits for are saved a little later; a stop does not wait for that."""
    (one,) = brokers.line(1)

    async def taken(name: str, seconds: float) -> list[str]:
        found: list[str] = []
        async with (
            postroad.connect(one.address) as client,
            client.subscribe(name, durable=name, shared=shared) as events,
        ):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while len(found) < 5:
                        found.append((await anext(events)).payload.decode())
        return found

    async def work() -> None:
        for name in ("a", "b", "c"):
            assert await taken(name, 0.2) == []
            async with postroad.connect(one.address) as client:
                for number in range(5):
                    await client.publish(name, str(number), mode="durable")
            assert len(await taken(name, 60)) == 5
            assert one.stop() == 0
            one.start()
            assert await taken(name, 1) == []

    run(work())


def test_from_the_command_line(brokers: Any) -> None:
    """pub --durable, sub --durable, subs: what --count leaves unprinted comes the next time."""
    (one,) = brokers.line(1)

    def cli(*arguments: str) -> str:
        found = subprocess.run(
            [sys.executable, "-m", "postroad", *arguments, "--broker", one.address],
            capture_output=True,
            text=True,
            timeout=100,
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
            check=False,
        )
        assert found.returncode == 0, found.stderr
        return found.stdout

    cli("sub", "t", "--durable", "s", "--timeout", "0.2")
    assert len(cli("pub", "t", "x", "--durable", "--count", "5").split()) == 5
    assert "5 events" in cli("subs")
    assert cli("sub", "t", "--durable", "s", "--count", "3") == "t  x\n" * 3
    assert cli("sub", "t", "--durable", "s", "--count", "2") == "t  x\n" * 2
    assert json.loads(cli("subs", "s", "--json"))["name"] == "s"
    assert "acknowledged to" in cli("subs", "s")
    cli("subs", "s", "--delete")
    assert cli("subs") == ""
