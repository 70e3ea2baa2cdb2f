"""Events that expire: nobody is handed one whose time is over, and no subscription is held up by it."""

from __future__ import annotations

import asyncio
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.process_clients import linked, run
from tests.worlds.processes import wait_until

import postroad
from postroad.cli import main

TTL_S = 0.3


@pytest.mark.parametrize(
    ("options", "ack"),
    [
        ({}, "auto"),
        *(({"durable": "d"}, ack) for ack in ("auto", "batch", "manual")),
        *(({"durable": "s", "shared": True}, ack) for ack in ("auto", "manual")),
    ],
    ids=str,
)
def test_what_is_read_too_late_is_passed_over(brokers: Any, options: dict[str, Any], ack: str) -> None:
    """Without a Gap, and nothing of it stays behind; what is read in time comes."""
    b1, b2 = brokers.line(2)
    durable = bool(options)

    async def test() -> None:
        await linked(b1, b2)
        async with (
            postroad.connect(b1.address) as publisher,
            postroad.connect(b2.address) as reader,
            reader.subscribe("t", ack=ack, **options) as events,
        ):
            await publisher.publish("t", b"in time", durable=durable, ttl=60)
            event = await events.get(timeout=20)
            assert isinstance(event, postroad.Event)
            assert event.payload == b"in time"
            assert event.expires_at is not None
            assert (event.expires_at - event.published_at).total_seconds() == 60
            if ack == "manual":
                await events.ack(event)
            for payload in (b"old 1", b"old 2"):
                await publisher.publish("t", payload, durable=durable, ttl=TTL_S)
            await publisher.publish("t", b"stays", durable=durable)
            await publisher.publish("t", b"old 3", durable=durable, ttl=TTL_S)
            await publisher.flush()
            await asyncio.sleep(TTL_S + 0.7)
            event = await events.get(timeout=20)
            assert isinstance(event, postroad.Event)
            assert (event.payload, events.expired) == (b"stays", 2)
            if ack == "manual":
                await events.ack(event)
            with pytest.raises(TimeoutError):
                await events.get(timeout=0.5)
            assert events.expired == 3
            for _ in range(100 if durable else 0):
                (row,) = (await reader.request("subs"))["subscriptions"]
                if row["lag_events"] == 0:
                    break
                await asyncio.sleep(0.1)
            else:
                assert not durable, "it holds up the subscription"

    run(test())


def test_best_effort_and_without_an_event_loop(brokers: Any) -> None:
    (b1,) = brokers.line(1)
    with (
        postroad.sync.connect(b1.address) as client,
        client.subscribe("t", timeout=2) as events,
    ):
        client.publish("t", b"old", mode="best-effort", ttl=0.05)
        client.publish("t", b"new", mode="best-effort", ttl=60)
        client.flush()
        wait_until(lambda: len(events._inner._queue) >= 1, "they came")
        import time

        time.sleep(0.3)
        assert [item.payload for item in events if isinstance(item, postroad.Event)] == [b"new"]
        assert events.expired == 1
        for wrong in (0, -1, float("nan"), True, "5"):
            with pytest.raises(postroad.UsageError, match="ttl"):
                client.publish("t", b"x", ttl=wrong)  # type: ignore[arg-type]
        with pytest.raises(postroad.UsageError, match="give one of them"):
            client.publish("t", b"x", {"$ttl_ms": 5}, ttl=1)


def test_history_has_what_expired(brokers: Any) -> None:
    """`client.read` gives what was published, whatever its time."""
    (b1,) = brokers.line(1)

    async def test() -> None:
        async with postroad.connect(b1.address) as client:
            await client.publish("t", b"old", durable=True, ttl=0.01)
            await asyncio.sleep(0.1)
            heads = json.dumps((await client.request("heads"))["heads"])
            async with client.read(heads, topic="t") as events:
                event = await events.get(timeout=10)
            assert isinstance(event, postroad.Event)
            assert event.attributes == {"$ttl_ms": 10}
            assert event.expires_at is not None
            assert event.expires_at < datetime.now(UTC)

    run(test())


def test_on_the_command_line(
    brokers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pub --ttl`, and payloads from a file and from standard input as one event."""
    (b1,) = brokers.line(1)
    at = ("--broker", b1.address)
    file = tmp_path / "order.json"
    file.write_text('{"lines":\n 2}\n')
    assert main(["pub", "t", "old", "--ttl", "10ms", "--durable", *at]) == 0
    assert main(["pub", "t", "--file", str(file), "--ttl", "5m", "--durable", *at]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\nevent\n")))
    assert main(["pub", "t", "--file", "-", "--durable", *at]) == 0
    capsys.readouterr()
    assert main(["sub", "t", "--durable", "d", "--since", "1m", "--count", "2", "--json", *at]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["payload"] for event in shown] == ['{"lines":\n 2}\n', "one\nevent\n"]
    assert main(["pub", "t", "--ttl", "soon", *at]) == 2
    assert main(["pub", "t", "x", "--file", str(file), *at]) == 2
    assert main(["pub", "t", "--file", str(tmp_path / "none"), *at]) == 2
    assert "No such file" in capsys.readouterr().err
