"""A durable name belongs to the principal that made it, at every broker; others learn little of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.process_clients import run

import postroad

PEOPLE = ("alice", "eve", "ops")


def settings(folder: Path) -> tuple[str, ...]:
    """alice reads orders, eve only what is public, ops administers."""
    tokens = "".join(f'{name} = "{hashlib.sha256(name.encode()).hexdigest()}"\n' for name in PEOPLE)
    rules = (("alice", "subscribe", "orders/#"), ("eve", "subscribe", "public/#"), ("ops", "admin", ""))
    text = f"[auth]\n[auth.tokens]\n{tokens}"
    for principal, action, topic in rules:
        text += f'[[auth.rules]]\nprincipal = "{principal}"\nallow = true\naction = "{action}"\n'
        text += f'topic = "{topic}"\n' if topic else ""
    file = folder / "settings.toml"
    file.write_text(text)
    return "--config", str(file), "--link-token", "brokers only"


async def next_payload(events: Any) -> bytes:
    event = await anext(aiter(events))
    assert isinstance(event, postroad.Event)
    return event.payload


@pytest.mark.parametrize("at", [0, 1], ids=["at its broker", "at another"])
def test_a_durable_name_cannot_be_taken(brokers: Any, tmp_path: Path, at: int) -> None:
    """Neither without a token nor with one made of what `heads` tells; its owner loses nothing, also across a
    restart of its broker."""

    async def test() -> None:
        extra = settings(tmp_path)
        b1 = brokers.start("b1", extra=extra)
        b2 = brokers.start("b2", b1.address, extra=extra)
        address = (b1, b2)[at].address
        async with (
            postroad.connect(b1.address, token="alice") as alice,
            postroad.connect(address, token="eve") as eve,
        ):
            while len((await eve.request("status"))["brokers"]) != 2:  # noqa: ASYNC110 -- another process
                await asyncio.sleep(0.05)
            async with await alice.subscribe("orders/#", durable="billing", ack="manual") as billing:
                await alice.publish("orders/eu", b"first", mode="durable")
                event = await anext(aiter(billing))
                assert isinstance(event, postroad.Event)
                heads = (await eve.request("heads"))["heads"]
                for token in (None, "", json.dumps(heads)):
                    with pytest.raises(postroad.DeniedError, match="belongs to another principal") as told:
                        await eve.subscribe("public/#", durable="billing", token=token)
                    assert "orders" not in str(told.value)
                await billing.ack(event)
                await alice.publish("orders/eu", b"second", mode="durable")
                assert await next_payload(billing) == b"second"
        b1.kill()
        b1.start()
        async with (
            postroad.connect(b1.address, token="eve") as eve,
            postroad.connect(b1.address, token="alice") as alice,
        ):
            with pytest.raises(postroad.DeniedError, match="belongs to another principal"):
                await eve.subscribe("public/#", durable="billing", token=json.dumps(heads))
            async with await alice.subscribe("orders/#", durable="billing", ack="manual") as billing:
                assert await next_payload(billing) == b"second"

    run(test())


def test_its_owner_may_move_it_and_only_as_what_it_is(brokers: Any, tmp_path: Path) -> None:
    """With its token too: another selector is another subscription. An administrator may use it as well."""

    async def test() -> None:
        extra = settings(tmp_path)
        b1 = brokers.start("b1", extra=extra)
        b2 = brokers.start("b2", b1.address, extra=extra)
        async with (
            postroad.connect(b1.address, token="alice") as alice,
            postroad.connect(b2.address, token="alice") as moved,
            postroad.connect(b2.address, token="eve") as eve,
        ):
            while len((await moved.request("status"))["brokers"]) != 2:  # noqa: ASYNC110 -- another process
                await asyncio.sleep(0.05)
            async with await alice.subscribe("orders/#", durable="billing", token="") as billing:
                await alice.publish("orders/eu", b"first", mode="durable")
                assert await next_payload(billing) == b"first"
                token = billing.token
            with pytest.raises(postroad.UsageError, match="another topic, condition or key"):
                await moved.subscribe("orders/us", durable="billing", token=token)
            async with await moved.subscribe("orders/#", durable="billing", token=token) as billing:
                await alice.publish("orders/eu", b"second", mode="durable")
                assert await next_payload(billing) == b"second"
            with pytest.raises(postroad.DeniedError, match="belongs to another principal"):
                await eve.subscribe("public/#", durable="billing", token=token)

    run(test())


def test_lists_show_what_one_may_read(brokers: Any, tmp_path: Path) -> None:
    """`subs` names topics and conditions, `heads` the streams of what brokers say about themselves."""

    async def test() -> None:
        b1 = brokers.start("b1", extra=settings(tmp_path))
        async with (
            postroad.connect(b1.address, token="alice") as alice,
            postroad.connect(b1.address, token="eve") as eve,
            postroad.connect(b1.address, token="brokers only") as ops,
        ):
            async with await alice.subscribe("orders/#", where="price > 7", durable="billing"):
                await alice.publish("orders/eu", b"x", mode="durable")
                await alice.flush()
            async with await eve.subscribe("public/#", durable="news"):
                pass

            async def names(client: postroad.Client, **arguments: str) -> list[str]:
                return [row["name"] for row in (await client.request("subs", **arguments))["subscriptions"]]

            assert await names(eve) == ["news"]
            assert await names(eve, name="billing") == []
            assert await names(alice) == ["billing"]
            assert await names(ops) == ["billing", "news"]
            assert "constreams" not in await eve.request("subs")
            history = {
                pubend for pubend in (await ops.request("heads"))["heads"] if pubend.endswith("7fffffff")
            }
            assert not history & (await eve.request("heads"))["heads"].keys()
            with pytest.raises(postroad.DeniedError) as told:
                await eve.subscribe("orders/#")
            assert "price" not in str(told.value)

    run(test())
