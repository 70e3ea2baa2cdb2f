"""Release on real brokers: disk space comes back, and who was away too long is told what it lost (D7, D8)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.process_clients import Publisher, reachable, run
from tests.worlds.processes import SOURCE, configured

import postroad

MIB = 1 << 20


def log_bytes(data: Path) -> int:
    return sum(one.stat().st_size for one in data.rglob("*.log") if one.is_file())


async def until(done: Callable[[], bool]) -> None:
    while not done():  # noqa: ASYNC110 -- another process
        await asyncio.sleep(0.1)


async def floor(address: str) -> int:
    async with postroad.connect(address, name="watch") as client:
        status = await client.request("status")
        return int(status["durable_pubends"][0]["floor"])


async def released(address: str, name: str) -> int:
    """What a subscription has acknowledged of the only pubend there are events of."""
    async with postroad.connect(address, name="watch") as client:
        rows = (await client.request("subs"))["subscriptions"]
        return max(tick for row in rows if row["name"] == name for tick in row["released"].values())


class Reading:
    """A durable subscriber that writes down what it gets."""

    def __init__(self, address: str, name: str) -> None:
        self.events: list[postroad.Event] = []
        self.gaps: list[postroad.Gap] = []
        self.began = asyncio.Event()
        self.task = asyncio.ensure_future(self._read(address, name))

    async def _read(self, address: str, name: str) -> None:
        async with postroad.connect(address) as client, client.subscribe("t", durable=name) as events:
            self.began.set()
            async for item in events:
                if isinstance(item, postroad.Gap):
                    self.gaps.append(item)
                else:
                    self.events.append(item)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


def test_disk_space_comes_back_when_everybody_has_acknowledged(brokers: Any, tmp_path: Path) -> None:
    """D7: log files of 64 MiB go once all in them is released."""
    extra = configured(tmp_path, '[durable]\nkeep = "2 s"\n')
    one = brokers.start("b1", extra=extra)
    two = brokers.start("b2", one.address, extra=extra)
    count = 150

    async def work() -> None:
        await reachable(two.address, 2)
        reading = Reading(two.address, "s")
        await reading.began.wait()
        async with postroad.connect(one.address) as publisher:
            payload = b"x" * (MIB - 1024)
            await publisher.publish_many((("t", payload) for _ in range(count)), mode="durable")
        await until(lambda: len(reading.events) == count)
        await until(lambda: log_bytes(one.data) < 70 * MIB)
        async with postroad.connect(one.address) as publisher:
            await publisher.publish("t", b"last", mode="durable")
        await until(lambda: len(reading.events) == count + 1)
        await reading.stop()
        assert reading.gaps == []
        assert log_bytes(two.data) < MIB, "events are logged where they are published only"

    run(work())


async def events_alone(address: str, name: str) -> postroad.Gap:
    """A Gap is raised where somebody asks for events alone: at every start, until it is caught."""
    async with postroad.connect(address) as client:
        with pytest.raises(postroad.GapError):
            async with client.subscribe("t", durable=name) as events:
                await anext(aiter(events.only_events()))
        async with client.subscribe("t", durable=name, ack="manual") as events:
            with pytest.raises(postroad.GapError) as raised:
                await anext(aiter(events.only_events()))
            event = await anext(aiter(events.only_events()))
            assert event.payload == b"new"
    return raised.value.gap


def test_early_release_is_one_gap_for_who_was_away_and_none_for_who_was_not(
    brokers: Any, tmp_path: Path
) -> None:
    """D8."""
    extra = configured(tmp_path, '[durable]\nkeep = "2 s"\nmax_age = "4 s"\n')
    one = brokers.start("b1", extra=extra)
    two = brokers.start("b2", one.address, extra=extra)

    async def work() -> None:
        await reachable(two.address, 2)
        here, away = Reading(two.address, "here"), Reading(two.address, "away")
        await here.began.wait()
        await away.began.wait()
        async with postroad.connect(one.address) as publisher:
            await publisher.publish("t", b"both", mode="durable")
            await until(lambda: len(here.events) == len(away.events) == 1)
            while await released(two.address, "away") < (here.events[0].tick or 0):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await away.stop()
            for number in range(10):
                await publisher.publish("t", str(number), mode="durable")
            await until(lambda: len(here.events) == 11)
            ticks = [event.tick or 0 for event in here.events]
            while await floor(one.address) < ticks[-1]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            two.kill()  # or it would still have them in memory
            await asyncio.to_thread(two.start)
            await reachable(two.address, 2)
            await publisher.publish("t", b"new", mode="durable")
            gap = await events_alone(two.address, "away")
            again = Reading(two.address, "away")
            await until(lambda: bool(again.events) and len(here.events) == 12)
        await here.stop()
        await again.stop()
        assert here.gaps == []
        assert [event.payload for event in again.events] == [b"new"]
        assert again.gaps == [gap]
        assert (gap.start + 1, gap.end) == (ticks[1], ticks[-1])

    run(work())


def test_a_broker_that_never_comes_back_is_retired(brokers: Any, tmp_path: Path) -> None:
    extra = configured(tmp_path, '[durable]\nkeep = "2 s"\n')
    one = brokers.start("b1", extra=extra)
    two = brokers.start("b2", one.address, extra=extra)

    async def work() -> None:
        await reachable(two.address, 2)
        reading = Reading(two.address, "s")
        await reading.began.wait()
        async with postroad.connect(one.address) as publisher:
            await publisher.publish("t", b"a", mode="durable")
            await until(lambda: len(reading.events) == 1)
            tick = reading.events[0].tick or 0
            await reading.stop()
            two.kill()
            await publisher.publish("t", b"b", mode="durable")
            await reachable(one.address, 1)
        answer = await asyncio.to_thread(command, "subs", "retire", "b2", "--broker", one.address)
        assert answer == "b2 is retired at b1\n"
        while await floor(one.address) <= tick:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    run(work())


def look(address: str) -> list[bytes | postroad.Gap]:
    """What the subscription `m` has not acknowledged, and does not acknowledge now."""
    with (
        postroad.sync.connect(address) as client,
        client.subscribe("x/#", durable="m", ack="manual", timeout=3) as events,
    ):
        return [item if isinstance(item, postroad.Gap) else item.payload for item in events]


def test_what_moved_to_a_retired_broker_goes_on_at_a_third(brokers: Any) -> None:
    one = brokers.start("b1")
    two = brokers.start("b2", one.address)
    three = brokers.start("b3", one.address)
    sent = [b"%d" % number for number in range(5)]
    for broker in (one, two, three):
        run(reachable(broker.address, 3))
    assert look(one.address) == []
    with postroad.sync.connect(one.address) as publisher:
        for payload in sent:
            publisher.publish("x/1", payload, mode="durable")
    assert look(two.address) == sent
    two.kill()
    for broker in (one, three):
        run(reachable(broker.address, 2))
    assert command("subs", "retire", "b2", "--broker", one.address) == "b2 is retired at b1, b3\n"
    assert look(three.address) == sent
    assert look(one.address) == sent


def test_who_was_at_a_broker_that_is_retired_goes_on_elsewhere(brokers: Any) -> None:
    """D8, D11: the client goes on with what it remembers. If it comes after the name was given up with its
    broker, it begins anew, and is told what it missed."""
    one = brokers.start("b1")
    two = brokers.start("b2", one.address)
    three = brokers.start("b3", one.address)

    async def work() -> None:
        for broker in (one, two, three):
            await reachable(broker.address, 3)
        reading = Reading(f"{two.address},{three.address}", "s")
        await reading.began.wait()
        async with postroad.connect(one.address) as publisher:
            await publisher.publish("t", b"a", mode="durable")
            await until(lambda: len(reading.events) == 1)
            two.kill()
            for broker in (one, three):
                await reachable(broker.address, 2)
            await publisher.publish("t", b"b", mode="durable")
            await asyncio.to_thread(command, "subs", "retire", "b2", "--broker", one.address)
            while not reading.events or reading.events[-1].payload != b"c":
                await publisher.publish("t", b"c", mode="durable")
                await asyncio.sleep(0.1)
        first, second = reading.events[:2]
        assert first.payload == b"a"
        if second.payload == b"b":
            assert reading.gaps == []
        else:
            (gap,) = [gap for gap in reading.gaps if gap.pubend == first.pubend]
            assert (first.tick or 0) <= gap.start < gap.end < (second.tick or 0)
        await reading.stop()

    run(work())


def command(*arguments: str) -> str:
    found = subprocess.run(
        [sys.executable, "-m", "postroad", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_a_subscriber_fails_over_and_back_and_gets_everything_once(brokers: Any) -> None:
    """D10: ack="auto". Its token moves from broker to broker, once the former one is back."""
    one, two, three = brokers.line(3)

    async def work() -> None:
        await reachable(one.address, 3)
        both = f"{three.address},{two.address}"
        reading = Reading(both, "s")
        await reading.began.wait()
        publisher = Publisher(one.address)
        publishing = asyncio.ensure_future(publisher.run())

        async def go_on() -> None:
            wanted = len(publisher.acknowledged) + 50
            while len(reading.events) < wanted:
                assert not reading.task.done(), reading.task.result()
                await asyncio.sleep(0.1)

        for dying in (three, two, three):
            await go_on()
            dying.kill()
            await asyncio.sleep(1)
            await asyncio.to_thread(dying.start)
        await go_on()
        publisher.stopped = True
        await publishing
        await until(lambda: len(reading.events) >= len(publisher.acknowledged))
        await asyncio.sleep(0.5)
        await reading.stop()
        assert [int(event.payload) for event in reading.events] == publisher.acknowledged
        assert reading.gaps == []

    run(work(), seconds=120)


def test_a_gap_of_a_shared_subscription_is_told_until_a_consumer_has_acknowledged_it(
    brokers: Any, tmp_path: Path
) -> None:
    """D8, in every way to acknowledge."""
    one = brokers.start("b1", extra=configured(tmp_path, '[durable]\nkeep = "2 s"\nmax_age = "4 s"\n'))
    names = ("auto", "batch", "event", "all", "none")

    def consume(client: postroad.Client, name: str) -> Any:
        ack = name if name in ("auto", "batch") else "manual"
        return client.subscribe(name, durable=name, shared=True, ack=ack)

    async def work() -> None:
        async with postroad.connect(one.address) as client:
            for name in names:
                await consume(client, name)
        async with postroad.connect(one.address) as client:
            await client.publish_many([(name, "lost") for name in names], mode="durable")
            last = max((await client.request("heads"))["heads"].values())
        while await floor(one.address) < last:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        one.kill()  # or it would still have them in memory
        await asyncio.to_thread(one.start)
        async with postroad.connect(one.address) as client:
            for name in names:
                await client.publish(name, b"new", mode="durable")
                async with consume(client, name) as events:
                    gap, event = await anext(events), await anext(events)
                    assert (type(gap), event.payload) == (postroad.Gap, b"new")
                    if name in ("event", "all"):
                        await events.ack(event if name == "event" else None)
                await client.publish(name, b"newer", mode="durable")
                async with consume(client, name) as events:
                    first = await anext(events)
                    assert first == gap if name == "none" else first.payload == b"newer", name

    run(work())
