"""The poller and the operators of the page, before a real broker."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from typing import Any

import pytest
from tests.worlds.process_clients import linked
from tests.worlds.processes import configured

import postroad
from postroad.cli import demo, main
from postroad.client.addresses import tls
from postroad.errors import DeniedError, UnavailableError
from postroad.links.access import hash_token
from postroad.page import operators
from postroad.page.core.model import Model
from postroad.page.door import Door
from postroad.page.operators import Operators, Spot
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
        assert poller.polls == 1  # to know the network; nobody looks
        began_s = time.monotonic()
        for viewer in range(10):
            poller.look(f"viewer-{viewer}", frozenset({"status"}))
        await until(lambda: poller.polls == 4)
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
        with pytest.raises(DeniedError, match="is over"):
            await operator.request("clients", address="")
        await sessions.expire()
        monkeypatch.setattr(operators, "MAX_OPERATORS", 1)
        await sessions.sign_in("browser", "brokers-token")
        assert sessions.get("browser") is not None
        assert sessions.get("somebody") is None  # it made room
        await sessions.close()

    asyncio.run(scene())


CERTIFICATES = """[auth]
link_principals = ["b1", "b2"]
"""
TOKENS = f"""[auth.tokens]
ops = "{hash_token("ops-token")}"
"""


def test_what_a_broker_grants_without_a_token_is_nobodys_who_comes_from_elsewhere(brokers: Any) -> None:
    """Whoever is on the page's machine could ask an open broker as well."""
    address = brokers.start("b1").address

    async def scene() -> None:
        here, everywhere = Operators(Door(broker=address)), Operators(Door(broker=address, private=False))
        assert (await here.sign_in("browser", "")).principal == "anonymous"
        for token in ("", "any"):
            with pytest.raises(DeniedError, match="for anonymous: operators need tokens"):
                await everywhere.sign_in("browser", token)
        assert everywhere.get("browser") is None
        await here.close()

    asyncio.run(scene())


def test_the_certificate_of_the_page_signs_nobody_in(brokers: Any, tmp_path: Any) -> None:
    """Also not where brokers know no tokens, and look at none."""
    folder = tmp_path / "certs"
    for arguments in (("authority",), ("broker", "b1"), ("broker", "b2"), ("client", "page")):
        assert main(["certs", *arguments, "--folder", str(folder)]) == 0
    authority = str(folder / "authority.pem")
    context = tls(ca=authority, certificate=str(folder / "page.pem"), key=str(folder / "page.key"))

    def start(name: str, text: str) -> str:
        file = tmp_path / f"{name}.toml"
        file.write_text(text)
        own = ("--tls-cert", str(folder / f"{name}.pem"), "--tls-key", str(folder / f"{name}.key"))
        extra = ("--config", str(file), "--mutual", "--tls-ca", authority, *own)
        return str(brokers.start(name, extra=extra).address)

    async def scene() -> None:
        without = Operators(Door(broker=start("b1", CERTIFICATES), tls=context))
        for token in ("", "any"):
            with pytest.raises(DeniedError, match="for page: operators need tokens"):
                await without.sign_in("browser", token)
        door = Door(broker=start("b2", CERTIFICATES + TOKENS), tls=context, private=False)
        sessions = Operators(door)
        with pytest.raises(DeniedError, match="for page: operators need tokens"):
            await sessions.sign_in("browser", "")
        assert (await sessions.sign_in("browser", "ops-token")).principal == "ops"
        await sessions.close()

    asyncio.run(scene())


def test_who_signed_out_reads_no_more(brokers: Any) -> None:
    address = brokers.start("b1").address

    async def scene() -> None:
        sessions = Operators(Door(broker=address))
        operator = await sessions.sign_in("browser", "")
        assert (await operator.client()).connected
        await sessions.sign_out("browser")
        with pytest.raises(DeniedError, match="is over"):  # as a tail does that rested meanwhile
            await operator.client()
        async with postroad.connect(address) as client:
            names = [row["name"] for row in (await client.request("clients"))["clients"]]
        assert not any(name.startswith("page-operator") for name in names)

    asyncio.run(scene())


def test_what_is_done_at_a_broker_is_done_at_no_other(brokers: Any) -> None:
    first, second = brokers.line(2)

    async def scene() -> None:
        await linked(first, second)
        numbers = {}
        for broker in (first, second):
            async with postroad.connect(broker.address) as client:
                numbers[broker.name] = (await client.request("status"))["number"]
        sessions = Operators(Door(broker=first.address))
        operator = await sessions.sign_in("browser", "")

        async def name_at(address: str, broker: str = "b2") -> str:
            status = await operator.request("status", Spot(broker, numbers[broker], address))
            return str(status["name"])

        assert await name_at(second.address) == "b2"
        # Its client goes on at b1 while it is away, and an address may be that of another.
        assert await asyncio.to_thread(second.stop) == 0
        await asyncio.to_thread(second.start)
        assert await name_at(second.address) == "b2"
        for address in (first.address, ""):
            with pytest.raises(UnavailableError, match=r"b2 is not reached .*: set `advertise`"):
                await name_at(address)
        assert await name_at("127.0.0.1:1", "b1") == "b1"  # the page came another way
        await sessions.close()

    asyncio.run(scene())


def test_when_the_brokers_of_the_page_are_gone_it_goes_on_elsewhere(brokers: Any) -> None:
    """Also where nobody has looked yet, and for operators."""
    first, second = brokers.line(2)

    async def scene() -> None:
        await linked(first, second)
        model = Model()
        door = Door(broker=first.address)
        poller, sessions = Poller(door, model), Operators(door, model.addresses)
        running = asyncio.create_task(poller.run())
        await until(lambda: len(model.brokers) == 2)
        await asyncio.to_thread(first.kill)
        operator = await sessions.sign_in("browser", "")
        assert (await operator.client()).broker == "b2"
        poller.look("viewer", frozenset({"status"}))
        await until(lambda: [broker.name for broker in model.up] == ["b2"])
        running.cancel()
        await asyncio.wait([running])
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
