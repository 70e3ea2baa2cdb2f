"""The way of queue messages, over real processes (spec T4, T6; queues among the delivery modes)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

from tests.worlds.process_clients import linked, run
from tests.worlds.processes import Brokers

import postroad


async def shown(address: str, identity: str) -> tuple[int, dict[str, Any]]:
    """The exit code and what `postroad trace --json` prints."""
    command = [sys.executable, "-m", "postroad", "trace", identity, "--json", "--broker", address]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def steps(trail: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(step["broker"], step["from"]) for step in trail["route"]]


def test_a_trace_names_the_way_of_a_queue_message_and_who_accepted_it(brokers: Brokers) -> None:
    """Sent at one broker, kept by a second, accepted at a third; then the second one is killed."""
    first = brokers.start("b1")
    second = brokers.start("b2", first.address)
    network = {one.name: one for one in (first, second, brokers.start("b3", first.address, second.address))}

    async def send(shop: postroad.Application, inboxes: list[str]) -> dict[str, str]:
        return {name: (await shop.send(name, b"reserve A1")).id for name in inboxes}

    async def test() -> None:
        await linked(*network.values())
        async with postroad.connect(first.address, name="seller") as client:
            shop = client.application("shop")
            ids = await send(shop, [f"stock-{n}" for n in range(24)])
            rows = (await client.request("queues"))["queues"]
            responsible = {row["inbox"]: row["responsible"] for row in rows}
            inbox = next(name for name in ids if responsible[name] != "b1")
            keeper = network[responsible[inbox]]
            (consumer,) = (one for one in network.values() if one not in (first, keeper))

            trail = await client.trace(ids[inbox])  # nobody has accepted it yet
            assert [step.broker for step in trail.route] == ["b1", keeper.name]
            assert (trail.receivers, trail.verdict) == ((), "complete")

            async with (
                postroad.connect(consumer.address, name="stock") as taker,
                taker.application(inbox).inbox() as messages,
            ):
                message = await anext(messages)
                assert message.id == ids[inbox]
                await message.accept()
            code, found = await shown(consumer.address, ids[inbox])
            assert (code, found["id"], found["origin"]["broker"]) == (0, ids[inbox], "b1")
            assert steps(found) == [("b1", None), (keeper.name, "b1"), (consumer.name, keeper.name)]
            (receiver,) = found["receivers"]
            assert receiver["subscriber"].startswith(f"{inbox}#")
            assert receiver["broker"] == consumer.name
            assert max([receiver["doubt"], *(step["doubt"] for step in found["route"])]) < 0.01

            (later,) = (await send(shop, [inbox])).values()
            keeper.kill()
            await linked(*(one for one in network.values() if one is not keeper))
            code, found = await shown(consumer.address, ids[inbox])
            assert code == 1
            assert steps(found) == [("b1", None), (consumer.name, keeper.name)]
            assert [one["broker"] for one in found["receivers"]] == [consumer.name]
            missing = found["missing"]
            assert (missing["verdict"], [one["broker"] for one in missing["brokers"]]) == (
                "partial",
                [keeper.name],
            )

            async with postroad.connect(consumer.address, name="stock") as taker:
                async with taker.application(inbox).inbox() as messages:
                    message = await anext(messages)
                    assert message.id == later
                    await message.accept()
                trail = await taker.trace(later)
            assert trail.origin == "b1"
            heir, giver = trail.route[1].broker, trail.route[1].source
            assert giver == keeper.name  # whoever took over has it from the one that was killed
            assert heir in ("b1", consumer.name)
            assert [one.broker for one in trail.receivers] == [consumer.name]

    run(test())
