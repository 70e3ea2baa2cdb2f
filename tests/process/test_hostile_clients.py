"""What one client tries against another through queues, requests and answers: real brokers, and clients that
leave the rules of their library."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.process_clients import run

import postroad

PEOPLE = ("alice", "eve", "ops")


def settings(folder: Path, *rules: tuple[str, str, str]) -> tuple[str, ...]:
    """Tokens for everybody, and rules that allow: principal, action, topic."""
    tokens = "".join(f'{name} = "{hashlib.sha256(name.encode()).hexdigest()}"\n' for name in PEOPLE)
    text = f"[auth]\n[auth.tokens]\n{tokens}"
    for principal, action, topic in rules:
        text += f'[[auth.rules]]\nprincipal = "{principal}"\nallow = true\naction = "{action}"\n'
        text += f'topic = "{topic}"\n' if topic else ""
    file = folder / "settings.toml"
    file.write_text(text)
    return "--config", str(file), "--link-token", "brokers only"


async def received(inbox: Any) -> postroad.Message:
    async with asyncio.timeout(30):
        message = await anext(aiter(inbox))
    await message.accept()
    return message


def test_no_request_ends_a_broker(brokers: Any, tmp_path: Path) -> None:
    """Numbers of any length, of a client without rights and of an administrator."""

    async def test() -> None:
        broker = brokers.start("b1", extra=settings(tmp_path, ("ops", "admin", "")))
        for count in ("0" * 9 + "9" * 20, "0" * 9 + "9" * 5_000, "\uff19"):
            async with postroad.connect(broker.address, token="eve") as eve:
                with pytest.raises(postroad.UsageError, match="a number is 0 to"):
                    await eve.request("queues.revive", inbox="x", count=count)
            async with postroad.connect(broker.address, token="ops") as ops:
                with pytest.raises(postroad.UsageError, match="a number is 0 to"):
                    await ops.request("clients.kick", connection=count)
        assert broker.running

    run(test())


def test_nobody_sends_in_the_session_of_another(brokers: Any, tmp_path: Path) -> None:
    """A session is in the ids that receivers see. Under it another principal says what is to come, far ahead:
    the owner's messages are delivered all the same, and receivers see who sent which."""

    async def test() -> None:
        broker = brokers.start("b1", extra=settings(tmp_path))
        async with (
            postroad.connect(broker.address, token="alice") as alice,
            postroad.connect(broker.address, token="eve") as eve,
        ):
            shop, billing, taken = (
                alice.application("shop"),
                alice.application("billing"),
                eve.application("e"),
            )
            async with taken.inbox() as seen, billing.inbox() as inbox:
                await shop.send("e", b"hello", kind="transactional")
                session = (await received(seen))._message.session
                forged = eve.application("shop")
                eve._core.sender.begin_session("shop", session)
                eve._core.sender._sessions[session].last = 1 << 61
                forged._session = session
                await forged.send("billing", b"forged", kind="transactional")
                first = await received(inbox)
                await shop.send("billing", b"real", kind="transactional")
                second = await received(inbox)
                assert [(each.source, each.principal, each.payload) for each in (first, second)] == [
                    ("shop", "eve", b"forged"),
                    ("shop", "alice", b"real"),
                ]

    run(test())


def test_nobody_takes_the_place_of_a_consumer(brokers: Any, tmp_path: Path) -> None:
    """A trace names consumers. Whoever knows one is refused, and its owner goes on."""

    async def test() -> None:
        broker = brokers.start("b1", extra=settings(tmp_path))
        async with (
            postroad.connect(broker.address, token="alice") as alice,
            postroad.connect(broker.address, token="eve") as eve,
        ):
            sender = eve.application("e")
            async with alice.application("billing").inbox() as inbox:
                await sender.send("billing", b"1", kind="transactional")
                assert (await received(inbox)).payload == b"1"
                thief = eve.application("billing").inbox()
                thief._consumer.identity = inbox._consumer.identity
                with pytest.raises(postroad.DeniedError, match="belongs to another principal"):
                    await anext(aiter(thief))
                await sender.send("billing", b"2", kind="transactional")
                assert (await received(inbox)).payload == b"2"

    run(test())


@pytest.mark.parametrize("rules", [(), (("*", "subscribe", "$reply/#"), ("*", "subscribe", "#"))])
def test_nobody_reads_or_gives_the_answers_of_others(
    brokers: Any, tmp_path: Path, rules: tuple[tuple[str, str, str], ...]
) -> None:
    """Neither who subscribes to all answers, nor who got a request of the same client, which names the topic
    of its answers."""

    async def test() -> None:
        broker = brokers.start("b1", extra=settings(tmp_path, *rules))
        async with (
            postroad.connect(broker.address, token="alice") as alice,
            postroad.connect(broker.address, token="ops") as helper,
            postroad.connect(broker.address, token="eve") as eve,
            eve.subscribe("public/echo") as asked,
            helper.subscribe("billing/ask") as requests,
        ):
            with pytest.raises(TimeoutError):
                await alice.ask("public/echo", b"anybody?", timeout=0.5)
            seen = await asked.get(timeout=10)
            assert isinstance(seen, postroad.Event)
            topic, number = str(seen.attributes["reply_to"]), seen.attributes["request"]
            assert isinstance(number, int)
            for pattern in ("$reply/#", "$reply/+/+", topic, topic.rsplit("/", 1)[0] + "/#", ""):
                with pytest.raises(postroad.DeniedError, match="may not subscribe to"):
                    await eve.subscribe(pattern)
            asking = asyncio.create_task(alice.ask("billing/ask", b"?", timeout=20))
            request = await requests.get(timeout=10)
            assert isinstance(request, postroad.Event)
            for near in (number, number + 1, 1, 2):
                await eve.publish(topic, b"forged", {"request": near})
            await eve.flush()
            await request.reply(b"true")
            assert (await asking).payload == b"true"

    run(test())


def test_status_and_queues_show_what_one_may_read(brokers: Any, tmp_path: Path) -> None:
    """Topics, conditions and names of others' subscriptions and inboxes are for administrators; long rows of
    one client leave the other lists whole."""
    rules = (
        ("alice", "subscribe", "orders/#"),
        ("eve", "subscribe", "public/#"),
        ("alice", "receive", "billing"),
        ("alice", "send", "billing"),
        ("eve", "receive", "news"),
        ("eve", "send", "news"),
        ("ops", "admin", ""),
    )

    async def test() -> None:
        broker = brokers.start("b1", extra=settings(tmp_path, *rules))
        async with (
            postroad.connect(broker.address, token="alice", name="the desk of alice") as alice,
            postroad.connect(broker.address, token="eve") as eve,
            postroad.connect(broker.address, token="ops") as ops,
            alice.subscribe("orders/secret", where="price > 7"),
            eve.subscribe("public/news"),
            alice.application("billing").inbox(),
            eve.application("news").inbox(),
        ):

            async def seen(client: postroad.Client) -> tuple[list[str], list[str]]:
                status, queues = await client.request("status"), await client.request("queues")
                topics = [row["topic"] for row in status["subscriptions"]]
                return topics, [row["inbox"] for row in queues["queues"]]

            assert await seen(eve) == (["public/news"], ["news"])
            assert await seen(alice) == (["orders/secret"], ["billing"])
            assert await seen(ops) == (["orders/secret", "public/news"], ["billing", "news"])
            for what in ("status", "queues"):
                text = str(await eve.request(what))
                assert not [secret for secret in ("secret", "price", "desk", "billing") if secret in text]
            for number in range(400):
                await eve.subscribe(f"public/{number}", where=f"a = '{'x' * 4_000}'")
            status = await ops.request("status")
            assert len(status["subscriptions"]) < 402
            assert [row["broker"] for row in status["brokers"]] == ["b1"]

    run(test())
