"""Handling failure with real clients: reject, attempts, dead letters, handlers that raise, kill -9."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from tests.worlds.process_clients import run

import postroad
from postroad.cli import main

POLICY: dict[str, Any] = {
    "durable": "work",
    "shared": True,
    "max_attempts": 2,
    "dead_letters": "failed/orders",
}


async def letters(address: str, count: int) -> list[postroad.Event]:
    """Dead letters since the beginning; a second more for one too many."""
    found: list[postroad.Event] = []
    async with postroad.connect(address) as client:
        begin = postroad_time(0)
        async with client.subscribe("failed/#", durable=f"look{time.monotonic_ns()}", since=begin) as events:
            while True:
                try:
                    item = await events.get(timeout=20 if len(found) < count else 1)
                except TimeoutError:
                    return found
                assert isinstance(item, postroad.Event)
                found.append(item)


def postroad_time(seconds: float) -> Any:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC)


def test_reject_at_once_later_and_for_good(brokers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (b1,) = brokers.line(1)

    async def test() -> None:
        async with postroad.connect(b1.address) as client:
            async with client.subscribe("orders/#", ack="manual", **POLICY) as events:
                await client.publish("orders/eu", b"poison", attributes={"n": 7}, durable=True)
                event = await events.get(timeout=10)
                assert isinstance(event, postroad.Event)
                assert event.attempt == 1
                began = time.monotonic()
                await events.reject(event, delay=0.5)
                again = await events.get(timeout=10)
                assert isinstance(again, postroad.Event)
                assert (again.id, again.attempt) == (event.id, 2)
                assert time.monotonic() - began >= 0.5
                with pytest.raises(postroad.UsageError, match="delay"):
                    await events.reject(again, delay=-1)
                await events.reject(again)
                with pytest.raises(postroad.UnavailableError, match="not with this consumer"):
                    await events.reject(again)
                (letter,) = await letters(b1.address, 1)
                assert (letter.payload, letter.attributes["n"]) == (b"poison", 7)
                assert letter.attributes["dead_id"] == str(event.id)
                assert letter.attributes["dead_attempts"] == 2
            with pytest.raises(postroad.UsageError, match="shared durable"):
                async with client.subscribe("orders/#") as plain:
                    await plain.reject(event)
            for wrong in (
                {"max_attempts": 2},
                {"dead_letters": "x"},
                {"max_attempts": 0, "dead_letters": "x"},
            ):
                with pytest.raises(postroad.UsageError, match="given together"):
                    client.subscribe("orders/#", durable="w", shared=True, **wrong)

    run(test())
    assert main(["subs", "work", "--broker", b1.address, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["lag_events"], row["rejected"], row["dead_letters"]) == (0, 2, 1)


def test_a_handler_that_raises_is_counted(brokers: Any) -> None:
    """In both clients; what it was handed before is acknowledged, and what comes after is not touched."""
    (b1,) = brokers.line(1)

    async def fail() -> None:
        async with (
            postroad.connect(b1.address) as client,
            client.subscribe("orders/#", **POLICY) as events,
        ):
            async for event in events.only_events():
                if event.payload == b"poison":
                    raise RuntimeError(f"attempt {event.attempt}")

    def fail_without_a_loop() -> None:
        with (
            postroad.sync.connect(b1.address) as client,
            client.subscribe("orders/#", **POLICY) as events,
        ):
            for event in events.only_events():
                if event.payload == b"poison":
                    raise RuntimeError(f"attempt {event.attempt}")

    async def rest() -> list[bytes]:
        async with (
            postroad.connect(b1.address) as client,
            client.subscribe("orders/#", **POLICY) as events,
        ):
            await client.publish("orders/eu", b"last", durable=True)
            payloads: list[bytes] = []
            while not payloads or payloads[-1] != b"last":
                event = await events.get(timeout=10)
                assert isinstance(event, postroad.Event)
                payloads.append(event.payload)
            return payloads

    with postroad.sync.connect(b1.address) as client:
        client.subscribe("orders/#", **POLICY).close()
        client.publish_many(
            [("orders/x", "good"), ("orders/x", "poison"), ("orders/x", "after")], durable=True
        )
    with pytest.raises(RuntimeError, match="attempt 1"):
        asyncio.run(asyncio.wait_for(fail(), 20))
    with pytest.raises(RuntimeError, match="attempt 2"):
        fail_without_a_loop()
    assert asyncio.run(rest()) == [b"after", b"last"]
    (letter,) = asyncio.run(letters(b1.address, 1))
    assert letter.payload == b"poison"


def test_kill_9_neither_loses_nor_doubles_a_dead_letter(brokers: Any) -> None:
    """Two consumers, one of a pair of brokers killed three times while every third event is rejected."""
    b1, b2 = brokers.line(2)
    total = 90
    poison = {n for n in range(total) if n % 3 == 0}
    done: set[int] = set()

    async def consume(stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                async with (
                    postroad.connect(b1.address) as client,
                    client.subscribe("orders/#", ack="manual", **POLICY) as events,
                ):
                    while not stop.is_set():
                        try:
                            event = await events.get(timeout=1)
                        except TimeoutError:
                            continue
                        if not isinstance(event, postroad.Event):
                            continue
                        number = int(event.payload)
                        assert event.attempt <= 3
                        if number not in poison:
                            done.add(number)  # before it is confirmed: a kill may take the confirmation alone
                        await (events.reject(event) if number in poison else events.ack(event))
            except postroad.UnavailableError:
                await asyncio.sleep(0.1)

    async def test() -> None:
        stop = asyncio.Event()
        async with postroad.connect(b1.address) as client:
            await (await client.subscribe("orders/#", **POLICY)).close()
        workers = [asyncio.create_task(consume(stop)) for _ in range(2)]
        async with postroad.connect(b2.address) as publisher:
            for number in range(total):
                await publisher.publish("orders/x", str(number), durable=True)
                if number in (20, 45, 70):
                    b1.kill()
                    await asyncio.to_thread(b1.start)
        found = await letters(b1.address, len(poison))
        async with asyncio.timeout(30):
            while len(done) < total - len(poison):  # noqa: ASYNC110 -- another process
                await asyncio.sleep(0.05)
        stop.set()
        await asyncio.gather(*workers)
        assert sorted(int(letter.payload) for letter in found) == sorted(poison)
        assert done == set(range(total)) - poison

    run(test())


def test_a_broker_that_stops_in_good_order_is_no_attempt(brokers: Any) -> None:
    """Its consumers go on; they have not failed at what they are at."""
    (b1,) = brokers.line(1)

    async def test() -> None:
        async with (
            postroad.connect(b1.address) as client,
            client.subscribe("orders/#", ack="manual", **POLICY) as events,
        ):
            await client.publish("orders/eu", b"long work", durable=True)
            event = await events.get(timeout=10)
            for _ in range(2):
                await asyncio.to_thread(b1.stop)
                await asyncio.to_thread(b1.start)
                event = await events.get(timeout=20)
            assert isinstance(event, postroad.Event)
            assert (event.payload, event.attempt) == (b"long work", 1)
            await events.ack(event)

    run(test())
