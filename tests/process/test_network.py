"""Brokers as processes: events cross them in order, once each, while brokers and links die and return."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.worlds.process_clients import everywhere, linked, run

import postroad


class Collector:
    """Reads a subscription to its end; events by number, and gaps."""

    def __init__(self, subscription: postroad.Subscription) -> None:
        self.seen: list[tuple[str, int]] = []  # (publisher's name, number) in order of arrival
        self.gaps: list[postroad.Gap] = []
        self.origins: set[int] = set()  # brokers that the publishers of these events are at
        self._task = asyncio.get_running_loop().create_task(self._read(subscription))

    async def _read(self, subscription: postroad.Subscription) -> None:
        async for event in subscription:
            if isinstance(event, postroad.Gap):
                self.gaps.append(event)
            else:
                self.origins.add(event.id.broker)
                self.seen.append((str(event.attributes["by"]), int(event.attributes["n"])))

    async def reach(self, count: int) -> None:
        await self.until(lambda: len(self.seen) >= count)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self._task.done():
                self._task.result()
                raise AssertionError(f"the subscription ended after {len(self.seen)} events")
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)  # one too many would show now

    def check(self, published: dict[str, int]) -> None:
        """Every publisher's events, each once, in order, and no gap in the streams they came by.

        A broker that was killed may have had events of its own that nobody knows of: its stream has a Gap.
        """
        assert [gap for gap in self.gaps if int(gap.pubend[:8], 16) in self.origins] == []
        for by, count in published.items():
            assert [n for name, n in self.seen if name == by] == list(range(count))
        assert len(self.seen) == sum(published.values())

    def stop(self) -> None:
        self._task.cancel()


async def publish(client: postroad.Client, by: str, first: int, end: int, pause_s: float = 0.0) -> None:
    for n in range(first, end):
        await client.publish(f"news/{by}", b"x" * 100, attributes={"by": by, "n": n})
        if pause_s:
            await asyncio.sleep(pause_s)
    await client.flush()


def test_three_in_a_line(brokers: Any) -> None:
    async def test() -> None:
        b1, b2, b3 = brokers.line(3)
        await linked(b1, b2, b3)
        async with (
            postroad.connect(b1.address) as one,
            postroad.connect(b3.address) as three,
            everywhere(three, "news/#") as at_three,
            everywhere(one, "news/#", where="n >= 450 AND by = 'three'") as at_one,
        ):
            everything, some = Collector(at_three), Collector(at_one)
            await asyncio.gather(publish(one, "one", 0, 500), publish(three, "three", 0, 500))
            await everything.reach(1000)
            await some.reach(50)
            everything.check({"one": 500, "three": 500})
            assert some.seen == [("three", n) for n in range(450, 500)]
            everything.stop()
            some.stop()

    run(test())


def test_the_middle_one_dies_and_returns(brokers: Any) -> None:
    """A plain event is lost only with its publishing broker's memory, so none is lost here."""

    async def test() -> None:
        b1, b2, b3 = brokers.line(3)
        await linked(b1, b2, b3)
        async with (
            postroad.connect(b1.address) as one,
            postroad.connect(b3.address) as three,
            everywhere(three, "news/#") as at_three,
        ):
            events = Collector(at_three)
            await publish(one, "one", 0, 200)
            await events.reach(200)
            sending = asyncio.create_task(publish(one, "one", 200, 600, pause_s=0.002))
            await asyncio.sleep(0.2)
            b2.kill()
            await asyncio.sleep(0.5)
            await asyncio.to_thread(b2.start)
            await sending
            await linked(b1, b2, b3)
            await publish(one, "one", 600, 700)
            await events.reach(700)
            events.check({"one": 700})
            events.stop()

    run(test())


def test_a_ring_goes_on_without_one(brokers: Any) -> None:
    async def test() -> None:
        b1, b2, b3 = ring = brokers.ring(3)
        await linked(*ring)
        async with (
            postroad.connect(b1.address) as one,
            postroad.connect(b3.address) as three,
            everywhere(three, "news/#") as at_three,
            everywhere(one, "news/#") as at_one,
        ):
            here, there = Collector(at_one), Collector(at_three)
            sending = asyncio.gather(
                publish(one, "one", 0, 500, pause_s=0.002), publish(three, "three", 0, 500, pause_s=0.002)
            )
            await asyncio.sleep(0.3)
            b2.kill()
            await asyncio.sleep(0.3)
            await asyncio.to_thread(b2.start)
            await sending
            for events in (here, there):
                await events.reach(1000)
                events.check({"one": 500, "three": 500})
                events.stop()

    run(test())


def test_a_cut_link_heals(brokers: Any, proxied: Callable[[str], Any]) -> None:
    async def test() -> None:
        b1 = brokers.start("b1")
        proxy = proxied(b1.address)
        b2 = brokers.start("b2", proxy.address)
        await linked(b1, b2)
        async with (
            postroad.connect(b1.address) as one,
            postroad.connect(b2.address) as two,
            everywhere(two, "news/#") as at_two,
        ):
            events = Collector(at_two)
            sending = asyncio.create_task(publish(one, "one", 0, 1000, pause_s=0.002))
            for _ in range(3):
                await asyncio.sleep(0.3)
                proxy.blip()
            await asyncio.sleep(0.3)
            proxy.cut()
            await asyncio.sleep(1)
            proxy.heal()
            proxy.delay(0.01)
            await sending
            await events.reach(1000)
            events.check({"one": 1000})
            events.stop()

    run(test())


def test_a_stalled_link_is_given_up_and_replaced(brokers: Any, proxied: Callable[[str], Any]) -> None:
    """A half-open connection tells nobody; keepalive finds it, and the way round carries the events."""

    async def test() -> None:
        quick = brokers.folder / "quick.toml"
        quick.write_text('[connections]\nping = "300 ms"\ndead = "1 s"\n')
        extra = ("--config", str(quick))
        b1 = brokers.start("b1", extra=extra)
        proxy = proxied(b1.address)
        b2 = brokers.start("b2", proxy.address, extra=extra)
        b3 = brokers.start("b3", b1.address, b2.address, extra=extra)
        await linked(b1, b2, b3)
        async with (
            postroad.connect(b1.address) as one,
            postroad.connect(b2.address) as two,
            everywhere(two, "news/#") as at_two,
        ):
            events = Collector(at_two)
            await publish(one, "one", 0, 100)
            await events.reach(100)
            proxy.stall()
            await publish(one, "one", 100, 200)
            await events.reach(200)
            proxy.heal()
            await publish(one, "one", 200, 300)
            await events.reach(300)
            events.check({"one": 300})
            events.stop()

    run(test())


def test_the_publishing_broker_dies_and_the_gap_is_told(brokers: Any) -> None:
    """Killed with its memory: what came is in order, what is missing is not silently so. What it had passed
    on without telling the publisher is sent again, and its next process cannot know."""

    async def test() -> None:
        b1, b2 = brokers.line(2)
        await linked(b1, b2)
        async with (
            postroad.connect(b1.address) as one,
            postroad.connect(b2.address) as two,
            everywhere(two, "news/#") as at_two,
        ):
            events = Collector(at_two)
            sending = asyncio.create_task(publish(one, "one", 0, 600, pause_s=0.002))
            await asyncio.sleep(0.5)
            b1.kill()
            await asyncio.sleep(0.2)
            await asyncio.to_thread(b1.start)
            await sending
            await linked(b1, b2)
            await publish(one, "one", 600, 700)
            await events.until(lambda: events.seen[-1:] == [("one", 699)])
            numbers = [n for _, n in events.seen]
            back = [at for at in range(1, len(numbers)) if numbers[at] <= numbers[at - 1]]
            assert len(back) <= 1  # to what was not accepted yet
            assert list(dict.fromkeys(numbers)) == sorted(set(numbers))
            assert numbers[-100:] == list(range(600, 700))
            assert len(set(numbers)) == 700 or events.gaps
            events.stop()

    run(test())


@pytest.mark.parametrize("killed", [False, True])
def test_a_broker_that_is_stopped_and_started_makes_no_gap(brokers: Any, killed: bool) -> None:
    """Its last tick is on disk. Of one that was killed the gap lasts until its next process began."""

    async def test() -> None:
        b1, b2 = brokers.line(2)
        await linked(b1, b2)
        async with postroad.connect(b2.address) as two, everywhere(two, "news/#") as at_two:
            events = Collector(at_two)
            async with postroad.connect(b1.address) as one:
                await publish(one, "one", 0, 100)
            await events.reach(100)
            await asyncio.to_thread(b1.kill if killed else b1.stop)
            stopped_us = time.time_ns() // 1000
            await asyncio.to_thread(b1.start)
            started_us = time.time_ns() // 1000
            await linked(b1, b2)
            async with postroad.connect(b1.address) as one:
                await publish(one, "one", 100, 200)
            await events.reach(200)
            if killed:
                await events.until(lambda: bool(events.gaps))
                (gap,) = events.gaps
                assert gap.start <= stopped_us <= gap.end <= started_us + 10_000_000
            else:
                await asyncio.sleep(7)  # what is over and not heard of is asked for after five seconds
                assert events.gaps == []
            assert [n for _, n in events.seen] == list(range(200))
            events.stop()

    run(test())


def test_status_shows_the_network(brokers: Any) -> None:
    async def test() -> None:
        b1, b2 = brokers.line(2)
        await linked(b1, b2)
        async with postroad.connect(b2.address) as client:
            status = await client.request("status")
        assert status["name"] == "b2"
        assert status["address"] == b2.address
        assert [one["broker"] for one in status["links"]] == ["b1"]
        assert sorted(one["broker"] for one in status["brokers"]) == ["b1", "b2"]

    run(test())


def test_identity_survives_kill_9(brokers: Any) -> None:
    async def status(address: str) -> dict[str, Any]:
        async with postroad.connect(address) as client:
            return await client.request("status")

    b1 = brokers.start("b1")
    before = asyncio.run(status(b1.address))
    b1.kill()
    b1.start()
    after = asyncio.run(status(b1.address))
    assert before["number"] == after["number"]
    assert before["boot"] < after["boot"]
    assert re.fullmatch(r"[0-9a-f]{8}", after["number"])
    assert json.dumps(after)
