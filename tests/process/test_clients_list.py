"""`postroad clients`: who is connected, and closing one; what is denied is in the log, which may be JSON."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from tests.worlds.process_clients import run
from tests.worlds.processes import wait_until

import postroad
from postroad.cli import main

RULES = '[[auth.rules]]\nprincipal = "*"\nallow = false\naction = "{}"\ntopic = "secret/#"\n'
ALLOW = '[[auth.rules]]\nprincipal = "*"\nallow = true\naction = "{}"\n'


def configuration(folder: Path) -> Path:
    file = folder / "b.toml"
    tokens = "\n".join(
        f'{name} = "{hashlib.sha256(name.encode()).hexdigest()}"' for name in ("alice", "root")
    )
    rules = "".join(text.format(action) for action in ("publish", "subscribe") for text in (RULES, ALLOW))
    file.write_text(f'log_format = "json"\nauth.link_principals = ["root"]\n[auth.tokens]\n{tokens}\n{rules}')
    return file


def test_who_is_connected_and_closing_one(
    brokers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b1 = brokers.start("b1", extra=("--config", str(configuration(tmp_path))))

    async def test() -> None:
        async with (
            postroad.connect(b1.address, token="alice", name="worker") as alice,
            alice.subscribe("open/#") as events,
        ):
            await alice.publish("open/x", b"1", durable=True)
            listed = await asyncio.to_thread(cli, "root", "--json")
            (row,) = [row for row in map(json.loads, listed.splitlines()) if row["name"] == "worker"]
            assert (row["principal"], row["subscriptions"], row["host"]) == ("alice", 1, "127.0.0.1")
            assert row["bytes_in"] > 0
            assert "root" not in await asyncio.to_thread(cli, "alice")  # others' are not hers to see
            assert "worker  alice  from 127.0.0.1" in await asyncio.to_thread(cli, "root")
            closed = await asyncio.to_thread(cli, "root", "--kick", str(row["connection"]))
            assert closed == f"connection {row['connection']} is closed\n"
            await alice.publish("open/x", b"2", durable=True)  # it has connected again
            received = [await events.get(timeout=10) for _ in range(3)]
            assert any(isinstance(item, postroad.Gap) for item in received)
            with pytest.raises(postroad.DeniedError):
                await alice.publish("secret/x", b"3", durable=True)
            with pytest.raises(postroad.DeniedError):
                await alice.subscribe("secret/#")

    def cli(token: str, *arguments: str) -> str:
        assert main(["clients", "--broker", b1.address, "--token", token, *arguments]) == 0
        return capsys.readouterr().out

    run(test())
    wait_until(lambda: b1.log.read_text().count("denied") >= 2, "what was denied is in the log")
    lines = [json.loads(line) for line in b1.log.read_text().splitlines()]
    denied = [line["text"] for line in lines if line["level"] == "warning" and "denied" in line["text"]]
    assert any("alice may not publish to secret/x" in text for text in denied)
    assert any("alice may not subscribe to secret/#" in text for text in denied)
    assert all(line["broker"] == "b1" for line in lines)
    assert main(["clients", "--broker", b1.address, "--token", "alice", "--kick", "1"]) == 2
    assert "needs the right `admin`" in capsys.readouterr().err
    assert main(["clients", "--broker", b1.address, "--token", "root", "--kick", "999"]) == 2
    assert "no client has the connection 999" in capsys.readouterr().err


def test_the_metrics_say_how_far_a_subscription_is_behind(brokers: Any) -> None:
    b1 = brokers.start("b1", extra=("--metrics", "127.0.0.1:0"))

    async def test() -> str:
        async with postroad.connect(b1.address) as client:
            async with client.subscribe("orders/#", durable="billing", ack="manual"):
                pass
            await client.publish_many([("orders/x", "1"), ("orders/y", "2"), ("other", "3")], durable=True)
            return str((await client.request("status"))["metrics_address"])

    address = asyncio.run(test())

    def lag() -> dict[str, float]:
        with urlopen(f"http://{address}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        ours = [line.split() for line in lines if line.startswith("postroad_durable_lag")]
        return {name: float(value) for name, value in ours}

    wait_until(lambda: lag().get('postroad_durable_lag_events{subscription="billing"}') == 2, "two are due")
    assert lag()['postroad_durable_lag_seconds{subscription="billing"}'] > 0


def test_the_whole_network_from_one_connection(brokers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`status --network`, `subs` and `clients --network`, asked of one of three brokers; then one dies."""
    b1, b2, b3 = brokers.line(3)

    def cli(*arguments: str) -> str:
        assert main([*arguments, "--broker", b1.address]) == 0
        return capsys.readouterr().out

    with (
        postroad.sync.connect(b3.address, name="worker") as client,
        client.subscribe("orders/#", durable="billing", ack="manual"),
    ):
        client.publish("orders/eu", b"1", durable=True)
        wait_until(lambda: " 1 event," in cli("subs"), "it is behind")
        assert cli("subs").startswith("billing  orders/#  at b3  connected  ack manual  1 event, ")
        (row,) = [json.loads(line) for line in cli("subs", "billing", "--json").splitlines()]
        assert (row["broker"], row["lag_events"]) == ("b3", 1)
        assert "worker  anonymous  from 127.0.0.1  at b3" in cli("clients", "--network")
        rows = map(json.loads, cli("clients", "--network", "--json").splitlines())
        (row,) = [row for row in rows if row["name"] == "worker"]
        assert (row["broker"], row["subscriptions"]) == ("b3", 1)
        assert "worker" not in cli("clients")
    shown = cli("status", "--network").splitlines()
    assert shown[-1] == "3 brokers answer"
    assert sorted(line.split()[0] for line in shown[:-1]) == ["b1", "b2", "b3"]
    answers = json.loads(cli("status", "--network", "--json"))["answers"]
    assert {name: status["address"] for name, status in answers.items()} == {
        "b1": b1.address,
        "b2": b2.address,
        "b3": b3.address,
    }
    b3.pause()
    try:
        assert main(["status", "--network", "--broker", b1.address]) == 0
        captured = capsys.readouterr()
        assert captured.out.splitlines()[-1] == "2 brokers answer"
        assert captured.err == "postroad: no answer from b3\n"
    finally:
        b3.unpause()
