"""The poller and the operators of the page, before a real broker."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from typing import Any

import pytest
from tests.worlds.processes import configured

import postroad
from postroad.cli import demo
from postroad.errors import DeniedError
from postroad.page import operators
from postroad.page.core.model import Model
from postroad.page.door import Door
from postroad.page.operators import Operators
from postroad.page.poller import Poller


async def until(holds: Any) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 -- another task changes it
            await asyncio.sleep(0.02)


def test_one_poller_asks_for_all_viewers_and_rests_when_nobody_looks(brokers: Any) -> None:
    broker = brokers.start("b1")

    async def scene() -> None:
        model = Model()
        poller = Poller(Door(broker=broker.address), model)
        running = asyncio.create_task(poller.run())
        await asyncio.sleep(0.2)
        assert poller.polls == 0  # nobody looks
        began_s = time.monotonic()
        for viewer in range(10):
            poller.look(f"viewer-{viewer}", frozenset({"status"}))
        await until(lambda: poller.polls == 3)
        assert time.monotonic() - began_s > 3  # not once for each of the ten
        assert [*model.brokers] == ["b1"]
        assert "clients" not in model.answers
        poller.look("viewer-3", frozenset({"status", "clients", "queues"}))
        await until(lambda: "clients" in model.answers and model.queues)
        for viewer in range(10):
            poller.leave(f"viewer-{viewer}")
        await asyncio.sleep(2.5)  # what is under way is done
        polls = poller.polls
        await asyncio.sleep(2.5)
        assert poller.polls == polls
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(scene())


def test_a_session_acts_with_the_rights_of_its_token_and_expires(
    brokers: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '[auth]\nlink_token = "brokers-token"\nanonymous = true\n'
    broker = brokers.start("b1", extra=configured(tmp_path, text))

    async def scene() -> None:
        door = Door(broker=broker.address)
        sessions = Operators(door)
        with pytest.raises(DeniedError):
            await sessions.sign_in("browser", "wrong")
        assert sessions.get("browser") is None
        anonymous = await sessions.sign_in("somebody", "")
        assert anonymous.principal == "anonymous"
        with pytest.raises(DeniedError, match="admin"):
            await anonymous.request("clients.kick", connection="1")
        operator = await sessions.sign_in("browser", "brokers-token")
        assert operator.principal == "brokers"
        async with postroad.connect(broker.address, name="victim"):
            rows = (await operator.request("clients"))["clients"]
            number = next(row["connection"] for row in rows if row["name"] == "victim")
            assert (await operator.request("clients.kick", connection=str(number)))["closed"] == number
        operator.until_s = time.monotonic() - 1
        assert sessions.get("browser") is None
        with pytest.raises(DeniedError, match="expired"):
            await operator.request("clients", address="")
        await sessions.expire()
        monkeypatch.setattr(operators, "MAX_OPERATORS", 1)
        await sessions.sign_in("browser", "brokers-token")
        assert sessions.get("browser") is not None
        assert sessions.get("somebody") is None  # it made room
        await sessions.close()

    asyncio.run(scene())


@pytest.mark.soak
def test_the_demo_serves_the_page_of_its_network(brokers: Any, tmp_path: Any) -> None:
    station = demo.Station(name="b1", links=(), address=brokers.start("b1").address)

    def fetch(url: str) -> tuple[int, bytes]:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read()

    async def scene() -> None:
        site = demo.Site(wanted=True)
        try:
            await demo._serve_page(site, [station], tmp_path)
            await demo._await_page(site)
            assert site.says.startswith("The page: http://127.0.0.1:"), (tmp_path / "page.log").read_text()
            status, body = await asyncio.to_thread(fetch, site.says.removeprefix("The page: "))
            assert status == 200
            assert b"Postroad" in body
        finally:
            assert site.process is not None
            await demo._stop([site.process])
        assert site.process.returncode == 0

    asyncio.run(scene())
