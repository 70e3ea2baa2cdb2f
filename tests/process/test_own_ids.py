"""Publishing under ids of one's own, and acknowledging a whole token: what Spark builds on (P1, P3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.processes import configured

import postroad
from postroad.client.blocking import PUBLISH_CHUNK

PREFIX = bytes(range(8))


def test_ids_of_ones_own_are_taken_once(brokers: Any, tmp_path: Path) -> None:
    """P3: the same ids again, also after a kill of the broker, publish only what is missing."""
    broker = brokers.start("b1", extra=configured(tmp_path, '[durable]\nkeep = "1 h"\n'))

    def publish(numbers: range) -> None:
        with postroad.sync.connect(broker.address) as client:
            ids = [PREFIX + (1 << 40 | n).to_bytes(8, "big") for n in numbers]
            client.publish_many([("t", str(n)) for n in numbers], mode="durable", ids=ids)

    def last() -> str:
        with postroad.sync.connect(broker.address) as client:
            return str(client.request("publisher.last", prefix=PREFIX.hex())["last"])

    assert last() == ""
    publish(range(1500))
    assert int(last(), 16) == 1 << 40 | 1499
    broker.kill()
    broker.start()
    assert int(last(), 16) == 1 << 40 | 1499
    publish(range(1000, 2000))
    with postroad.sync.connect(broker.address) as client:
        until = json.dumps(client.request("heads")["heads"])
        with client.read(until) as events:
            assert [int(event.payload) for event in events] == list(range(2000))
        with pytest.raises(postroad.UsageError):
            client.request("publisher.last", prefix="x")


def test_a_token_is_acknowledged(brokers: Any) -> None:
    """P1: what was consumed by other ways is not delivered any more."""
    broker = brokers.start("b1")
    with postroad.sync.connect(broker.address) as client:
        client.subscribe("t", durable="d", token="").close()
        client.publish_many([("t", str(n)) for n in range(10)], mode="durable")
        middle = json.dumps(client.request("heads")["heads"])
        client.publish_many([("t", str(n)) for n in range(10, 20)], mode="durable")
        with client.subscribe("t", durable="d", token="") as events:
            events.ack(upto=middle)
        with client.subscribe("t", durable="d", token="") as events:
            assert [int(events.get(60).payload) for _ in range(10)] == list(range(10, 20))


def test_mistakes_of_a_program_are_its_own(brokers: Any) -> None:
    """Ids that do not increase, a token of the future: a UsageError at once, and the client goes on."""
    broker = brokers.start("b1")
    with (
        postroad.sync.connect(broker.address) as client,
        client.subscribe("t", durable="d", ack="manual") as events,
    ):
        ids = [PREFIX + number.to_bytes(8, "big") for number in (5, 4)]
        for wrong in (ids, ids[:1], [b"short"]):
            with pytest.raises(postroad.UsageError, match="ids"):
                client.publish_many([("t", "1"), ("t", "2")], mode="durable", ids=wrong)
        own = bytes(client.publish("t", "2").id)[:8]
        with pytest.raises(postroad.UsageError, match="this client's own publisher"):
            client.publish_many([("t", "2")], mode="durable", ids=[own + b"\xff" * 8])
        client.publish("t", "3", mode="durable")
        found = events.get(60)
        (pubend,) = client.request("heads")["heads"]
        with pytest.raises(postroad.UsageError, match="future"):
            events.ack(upto=json.dumps({pubend: 1 << 60}))
        with pytest.raises(postroad.UsageError):
            events.ack("x")  # type: ignore[arg-type]
        with pytest.raises(postroad.UsageError):
            client.subscribe("t", durable="e", since=5)  # type: ignore[arg-type]
        events.ack(found)
        assert client.connected


def test_mistakes_in_many_events_are_told_without_an_event_loop(brokers: Any) -> None:
    """They cross to the client's thread in chunks, and `ids` increase from one to the next."""
    broker = brokers.start("b1")
    many = PUBLISH_CHUNK + 1
    ids = [PREFIX + (1000 + number).to_bytes(8, "big") for number in range(many)]
    with postroad.sync.connect(broker.address) as client:
        events = [("t", "x")] * many
        for wrong in ([*ids[1:], ids[0]], iter([*ids, PREFIX + b"\xff" * 8]), iter(ids[1:]), ids[1:], 5):
            with pytest.raises(postroad.UsageError, match="ids"):
                client.publish_many(events, mode="durable", ids=wrong)  # type: ignore[arg-type]
        with pytest.raises(postroad.UsageError, match="`ids` are for mode 'durable'"):
            client.publish_many([], ids=[])
        with pytest.raises(postroad.UsageError, match="not one of plain"):
            client.publish_many([], mode="x")
        with pytest.raises(postroad.UsageError, match="`events` can be iterated over"):
            client.publish_many(5)  # type: ignore[arg-type]
        for timeout in ("5", float("nan")):
            with pytest.raises(postroad.UsageError, match="a timeout is a number of seconds"):
                client.subscribe("t", timeout=timeout)  # type: ignore[arg-type]
        with client.subscribe("t", timeout=0) as found:
            with pytest.raises(postroad.UsageError, match="a timeout is a number of seconds"):
                found.get("5")  # type: ignore[arg-type]
            with pytest.raises(TimeoutError):
                found.get(-1)
        assert client.connected
