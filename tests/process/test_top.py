"""`postroad top` against a real network, driven by Textual's own pilot."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.worlds.process_clients import cli, linked, run
from tests.worlds.processes import Brokers

import postroad
from postroad.cli.contexts import Options
from postroad.cli.top import Source
from postroad.cli.top_rows import VIEWS, in_order

textual = pytest.importorskip("textual")


def cells(app: Any, view: str) -> list[list[str]]:
    table = app.query_one(f"#table-{view}")
    return [[str(cell) for cell in table.get_row_at(number)] for number in range(table.row_count)]


def test_tables_keys_and_a_broker_that_goes_away(brokers: Brokers) -> None:
    from postroad.cli.top_app import Top

    found = brokers.ring(3)

    async def scenario() -> None:
        await linked(*found)
        async with (
            postroad.connect(found[1].address, name="[bold]worker") as client,
            client.subscribe("t/#", durable="billing"),
        ):
            await client.application("shop").send("store", b"1", kind="transactional")
            app = Top(Source(Options(broker=found[0].address)), 0.2)
            async with app.run_test(size=(140, 30)) as pilot:

                async def until(holds: Any) -> None:
                    async with asyncio.timeout(60):
                        while not holds():
                            await pilot.pause(0.05)

                await until(lambda: [row[0] for row in cells(app, "brokers")] == ["b1", "b2", "b3"])
                await until(lambda: len(cells(app, "links")) == 6)
                await until(
                    lambda: ["billing", "b2", "yes"] in [row[:3] for row in cells(app, "subscriptions")]
                )
                await until(lambda: ["store", "1"] in [row[:2] for row in cells(app, "queues")])
                await until(lambda: "[bold]worker" in [row[0] for row in cells(app, "clients")])
                for number, view in enumerate(VIEWS, start=1):
                    await pilot.press(str(number))
                    await until(lambda view=view: app.view == view)
                await pilot.press("1", "r")
                await until(lambda: [row[0] for row in cells(app, "brokers")] == ["b3", "b2", "b1"])
                await client.publish_many([("t/x", b"x") for _ in range(1000)], mode="durable")
                await pilot.press("s")
                found[0].kill()  # the one that is asked
                await until(
                    lambda: {row[0] for row in cells(app, "brokers") if row[1] != "?"} == {"b2", "b3"}
                )
                await pilot.press("q")

    run(scenario())


def test_json_is_one_look_and_a_wrong_interval_is_refused(brokers: Brokers) -> None:
    broker = brokers.start("b1")
    outcome = cli(broker.address, "top", "--json", "--interval", "0.2")
    answer = json.loads(outcome.stdout)
    assert answer["brokers"][0]["broker"] == "b1"
    assert answer.keys() == {*VIEWS, "silent"}
    refused = cli(broker.address, "top", "--interval", "0")
    assert refused.returncode == 2
    assert "between 0.1 and 60" in refused.stderr


def test_rows_are_sorted_numbers_first() -> None:
    rows: list[Any] = [("b", 2), ("a", "?"), ("c", 1)]
    assert in_order(rows, 1, backwards=False) == [("c", 1), ("b", 2), ("a", "?")]
    assert in_order(rows, 0, backwards=True) == [("c", 1), ("b", 2), ("a", "?")]
