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
    """T4: Sent at one broker, kept by a second, accepted at a third; then the second one is killed."""
    first = brokers.start("b1")
    second = brokers.start("b2", first.address)
    network = {one.name: one for one in (first, second, brokers.start("b3", first.address, second.address))}

    async def kept_elsewhere(client: postroad.Client) -> tuple[str, str]:
        """An inbox that another broker than the first has got to answer for, and that broker."""
        async with asyncio.timeout(60):
            while True:
                for row in (await client.request("queues"))["queues"]:
                    if row["responsible"] != "b1" and len(row["replicas"]) == 3:
                        return row["inbox"], row["responsible"]
                await asyncio.sleep(0.1)

    async def test() -> None:
        await linked(*network.values())
        async with postroad.connect(first.address, name="seller") as client:
            shop = client.application("shop")
            for number in range(24):
                await shop.send(f"stock-{number}", b"first")
            inbox, name = await kept_elsewhere(client)
            keeper = network[name]
            (consumer,) = (one for one in network.values() if one not in (first, keeper))
            identity = (await shop.send(inbox, b"reserve A1")).id

            trail = await client.trace(identity)  # nobody has accepted it yet
            assert [step.broker for step in trail.route] == ["b1", keeper.name]
            assert (trail.receivers, trail.verdict) == ((), "complete")

            async with (
                postroad.connect(consumer.address, name="stock") as taker,
                taker.application(inbox).inbox() as messages,
            ):
                await (await anext(messages)).accept()
                message = await anext(messages)
                assert message.id == identity
                await message.accept()
            code, found = await shown(consumer.address, identity)
            assert (code, found["id"], found["origin"]["broker"]) == (0, identity, "b1")
            assert steps(found) == [("b1", None), (keeper.name, "b1"), (consumer.name, keeper.name)]
            (receiver,) = found["receivers"]
            assert receiver["subscriber"].startswith(f"{inbox}#")
            assert receiver["broker"] == consumer.name
            assert max([receiver["doubt"], *(step["doubt"] for step in found["route"])]) < 0.01

            later = (await shop.send(inbox, b"reserve A2")).id
            keeper.kill()
            await linked(*(one for one in network.values() if one is not keeper))
            code, found = await shown(consumer.address, identity)
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
            # Whoever took over has it from the one that was killed, and may be the consumer's entry itself.
            way = {(step.broker, step.source) for step in trail.route}
            inherited, handed_on = {("b1", keeper.name)}, {(consumer.name, "b1")}
            assert way - {("b1", None)} in ({(consumer.name, keeper.name)}, inherited | handed_on)
            assert [one.broker for one in trail.receivers] == [consumer.name]

    run(test())
