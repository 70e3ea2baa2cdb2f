"""Traces of real brokers: the path of a message, also after kills and restarts (spec T6, T11, T12)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

import postroad
from postroad.ids import MessageId

from .conftest import Brokers

UNKNOWN = "0000002a-00000007-0193c1d2e3f4-0001"


async def linked(*brokers: Any) -> None:
    for broker in brokers:
        async with asyncio.timeout(20), postroad.connect(broker.address, name="watch") as client:
            while len((await client.request("status"))["brokers"]) != len(brokers):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def send_across(brokers: list[Any], count: int) -> list[MessageId]:
    """Events published at the first broker and received at the last."""
    async with (
        postroad.connect(brokers[-1].address, name="reader") as reader,
        postroad.connect(brokers[0].address, name="writer") as writer,
        reader.subscribe("traced") as events,
    ):
        receipts = [await writer.publish("traced", str(number)) for number in range(count)]
        await writer.flush()
        got = [await anext(aiter(events)) for _ in range(count)]
        assert [event.id for event in got if isinstance(event, postroad.Event)] == [r.id for r in receipts]
    return [receipt.id for receipt in receipts]


def check(trail: Any, brokers: list[str]) -> None:
    assert trail.verdict == "complete"
    assert trail.origin == brokers[0]
    assert [(step.broker, step.source) for step in trail.route] == list(
        zip(brokers, [None, *brokers[:-1]], strict=True)
    )
    assert [(one.subscriber.split("#")[0], one.broker) for one in trail.receivers] == [
        ("reader", brokers[-1])
    ]
    assert all(0 <= step.doubt < 0.01 for step in trail.route)
    assert all(0 <= one.doubt < 0.01 for one in trail.receivers)


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_a_trace_names_origin_route_and_receivers_from_any_broker(brokers: Brokers, strategy: str) -> None:
    extra = ("--tracking", strategy)
    first = brokers.start("b1", extra=extra)
    second = brokers.start("b2", first.address, extra=extra)
    third = brokers.start("b3", second.address, extra=extra)

    async def scenario() -> None:
        await linked(first, second, third)
        ids = await send_across([first, second, third], 20)
        for broker in (first, second, third):
            async with postroad.connect(broker.address) as client:
                check(await client.trace(ids[7]), ["b1", "b2", "b3"])

    asyncio.run(scenario())


def test_the_path_survives_a_clean_restart_of_every_broker(brokers: Brokers) -> None:
    line = brokers.line(3)

    async def before() -> list[MessageId]:
        await linked(*line)
        return await send_across(line, 5)

    ids = asyncio.run(before())
    for broker in line:
        assert broker.stop() == 0
        broker.start()

    async def after() -> None:
        await linked(*line)
        async with postroad.connect(line[1].address) as client:
            check(await client.trace(ids[3]), ["b1", "b2", "b3"])

    asyncio.run(after())


def test_a_broker_that_cannot_be_reached_makes_the_answer_partial(brokers: Brokers) -> None:
    line = brokers.line(3)

    async def before() -> list[MessageId]:
        await linked(*line)
        return await send_across(line, 3)

    ids = asyncio.run(before())
    line[2].kill()

    async def after() -> None:
        await linked(*line[:2])
        async with postroad.connect(line[0].address) as client:
            trail = await client.trace(ids[0])
            assert trail.verdict == "partial"
            assert [step.broker for step in trail.route] == ["b1", "b2"]
            assert "b3" in {name for name, _ in trail.missing}

    asyncio.run(after())


def postroad_trace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "postroad", "trace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_a_tree_json_and_dot_and_says_what_is_wrong(brokers: Brokers) -> None:
    line = brokers.line(2)

    async def before() -> list[MessageId]:
        await linked(*line)
        return await send_across(line, 1)

    identity = str(asyncio.run(before())[0])
    at = ("--broker", line[1].address)
    shown = postroad_trace(identity, *at)
    assert shown.returncode == 0, shown.stderr
    assert "b1" in shown.stdout
    assert "reader" in shown.stdout
    found = json.loads(postroad_trace(identity, "--json", *at).stdout)
    assert found["id"] == identity
    assert found["origin"]["broker"] == "b1"
    assert [step["broker"] for step in found["route"]] == ["b1", "b2"]
    assert postroad_trace(identity, "--dot", *at).stdout.startswith("digraph")

    unknown = postroad_trace(UNKNOWN, *at)
    assert unknown.returncode == 1
    malformed = postroad_trace("not-an-id", *at)
    assert malformed.returncode == 2
    assert "is not a message id" in malformed.stderr
