"""Traces of real brokers: the path of a message, also after kills and restarts (spec T6, T11, T12)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.process_clients import everywhere
from tests.worlds.processes import BrokerProcess, Brokers

import postroad
from postroad.client import aio
from postroad.ids import OWN_IDS, MessageId

NOBODY = 7  # a broker number that no broker has


async def linked(*brokers: Any) -> None:
    for broker in brokers:
        async with asyncio.timeout(60), postroad.connect(broker.address, name="watch") as client:
            while len((await client.request("status"))["brokers"]) != len(brokers):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def send_across(brokers: list[Any], count: int) -> list[MessageId]:
    """Events published at the first broker and received at the last."""
    async with (
        postroad.connect(brokers[-1].address, name="reader") as reader,
        postroad.connect(brokers[0].address, name="writer") as writer,
        everywhere(reader, "traced") as events,
    ):
        receipts = [await writer.publish("traced", str(number)) for number in range(count)]
        await writer.flush()
        got = [await anext(aiter(events)) for _ in range(count)]
        assert [event.id for event in got if isinstance(event, postroad.Event)] == [r.id for r in receipts]
    return [receipt.id for receipt in receipts]


def check(trail: Any, brokers: list[str]) -> None:
    assert trail.verdict == "complete"
    assert trail.origin == brokers[0]
    assert [(step.broker, step.source) for step in trail.route] == list(
        zip(brokers, [None, *brokers[:-1]], strict=True)
    )
    assert [(one.subscriber.split("#")[0], one.broker) for one in trail.receivers] == [
        ("reader", brokers[-1])
    ]
    assert all(0 <= step.doubt < 0.01 for step in trail.route)
    assert all(0 <= one.doubt < 0.01 for one in trail.receivers)


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_a_trace_names_origin_route_and_receivers_from_any_broker(brokers: Brokers, strategy: str) -> None:
    """T4, T11."""
    extra = ("--tracking", strategy)
    first = brokers.start("b1", extra=extra)
    second = brokers.start("b2", first.address, extra=extra)
    third = brokers.start("b3", second.address, extra=extra)

    async def scenario() -> None:
        await linked(first, second, third)
        ids = await send_across([first, second, third], 20)
        for broker in (first, second, third):
            async with postroad.connect(broker.address) as client:
                check(await client.trace(ids[7]), ["b1", "b2", "b3"])

    asyncio.run(scenario())


@pytest.mark.parametrize("routing", ["neighbours", "set"])
def test_both_optimisations_are_configuration(brokers: Brokers, tmp_path: Path, routing: str) -> None:
    """T6: per-neighbour histories H(b,d), and the routing set inside the key; stored and read back."""
    config = tmp_path / "tracking.toml"
    config.write_text(f'[tracking]\nrouting = "{routing}"\npersist = "500 ms"\n')
    extra = ("--config", str(config))
    hub = brokers.start("b1", extra=extra)
    spokes = [brokers.start(f"b{number}", hub.address, extra=extra) for number in (2, 3, 4)]

    async def before() -> list[MessageId]:
        await linked(hub, *spokes)
        return await send_across([hub, spokes[1]], 5)

    ids = asyncio.run(before())
    assert hub.stop() == 0
    hub.start()

    async def after() -> None:
        await linked(hub, *spokes)
        async with postroad.connect(spokes[2].address) as client:
            check(await client.trace(ids[3]), ["b1", "b3"])

    asyncio.run(after())


def test_the_path_survives_a_clean_restart_of_every_broker(brokers: Brokers) -> None:
    """T3."""
    line = brokers.line(3)

    async def before() -> list[MessageId]:
        await linked(*line)
        return await send_across(line, 5)

    ids = asyncio.run(before())
    for broker in line:
        assert broker.stop() == 0
        broker.start()

    async def after() -> None:
        await linked(*line)
        async with postroad.connect(line[1].address) as client:
            check(await client.trace(ids[3]), ["b1", "b2", "b3"])

    asyncio.run(after())


def test_durable_receivers_are_named_also_after_catching_up_and_restarts(brokers: Brokers) -> None:
    """T4: one durable subscriber gets the event at once, one after its broker was restarted."""
    line = brokers.line(3)

    async def take(client: Any, name: str, count: int) -> None:
        async with client.subscribe("traced", durable=name) as events:
            for _ in range(count):
                await anext(aiter(events))

    async def before() -> MessageId:
        await linked(*line)
        async with (
            postroad.connect(line[2].address, name="reader") as reader,
            postroad.connect(line[0].address, name="writer") as writer,
        ):
            await take(reader, "late", 0)
            await take(reader, "prompt", 0)
            receipt = await writer.publish("traced", "x", mode="durable")
            await take(reader, "prompt", 1)
        return receipt.id

    identity = asyncio.run(before())
    assert line[2].stop() == 0
    line[2].start()

    async def after() -> None:
        await linked(*line)
        async with postroad.connect(line[2].address, name="reader") as reader:
            await take(reader, "late", 1)

    asyncio.run(after())
    found = json.loads(postroad_trace(str(identity), "--json", "--broker", line[0].address).stdout)
    assert found["missing"]["verdict"] == "complete"
    assert found["origin"]["broker"] == "b1"
    assert [step["broker"] for step in found["route"]] == ["b1", "b2", "b3"]
    assert [(one["subscriber"], one["broker"]) for one in found["receivers"]] == [
        ("late", "b3"),
        ("prompt", "b3"),
    ]
    assert "late" in postroad_trace(str(identity), "--broker", line[0].address).stdout


def test_a_broker_that_cannot_be_reached_makes_the_answer_partial(brokers: Brokers) -> None:
    line = brokers.line(3)

    async def before() -> list[MessageId]:
        await linked(*line)
        return await send_across(line, 3)

    ids = asyncio.run(before())
    line[2].kill()

    async def after() -> None:
        await linked(*line[:2])
        async with postroad.connect(line[0].address) as client:
            trail = await client.trace(ids[0])
            assert trail.verdict == "partial"
            assert [step.broker for step in trail.route] == ["b1", "b2"]
            assert "b3" in {name for name, _ in trail.missing}

    asyncio.run(after())


def postroad_trace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "postroad", "trace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_a_tree_json_and_dot_and_says_what_is_wrong(brokers: Brokers) -> None:
    line = brokers.line(2)

    async def before() -> list[MessageId]:
        await linked(*line)
        return await send_across(line, 1)

    identity = str(asyncio.run(before())[0])
    at = ("--broker", line[1].address)
    shown = postroad_trace(identity, *at)
    assert shown.returncode == 0, shown.stderr
    assert "b1" in shown.stdout
    assert "reader" in shown.stdout
    found = json.loads(postroad_trace(identity, "--json", *at).stdout)
    assert found["id"] == identity
    assert found["origin"]["broker"] == "b1"
    assert [step["broker"] for step in found["route"]] == ["b1", "b2"]
    assert postroad_trace(identity, "--dot", *at).stdout.startswith("digraph")


def number_of(broker: BrokerProcess) -> int:
    async def ask() -> int:
        async with postroad.connect(broker.address) as client:
            return int((await client.request("status"))["number"], 16)

    return asyncio.run(ask())


def test_an_event_with_an_id_of_the_programs_own_has_a_path(brokers: Brokers) -> None:
    """T6: as those that Spark writes."""
    broker = brokers.start("b1")
    identity = MessageId(42, OWN_IDS | 7, time.time_ns() // 1_000_000, 1)

    async def publish() -> None:
        async with postroad.connect(broker.address) as client, client.subscribe("t") as events:
            await client.publish_many([("t", "x")], mode="durable", ids=[bytes(identity)])
            await anext(aiter(events))

    asyncio.run(publish())
    found = postroad_trace(str(identity), "--json", "--broker", broker.address)
    assert found.returncode == 0, found.stdout
    answer = json.loads(found.stdout)
    assert (answer["origin"]["broker"], len(answer["receivers"])) == ("b1", 1)


def test_each_thing_that_can_be_wrong_has_its_own_answer(brokers: Brokers) -> None:
    """Asked wrongly or too early: unknown id, malformed id, time before the history, unreachable broker."""
    line = brokers.line(2)
    asyncio.run(linked(*line))
    home, now_ms = number_of(line[0]), time.time_ns() // 1_000_000
    at = ("--broker", line[1].address)

    def answer(broker: int, time_ms: int) -> dict[str, Any]:
        identity = str(MessageId(42, broker, time_ms, 1))
        shown = postroad_trace(identity, *at)
        found = postroad_trace(identity, "--json", *at)
        assert (shown.returncode, found.returncode, found.stderr) == (1, 1, "")
        missing: dict[str, Any] = json.loads(found.stdout)["missing"]
        assert missing["text"] in shown.stdout  # people are told the same
        return missing

    unknown = answer(home, now_ms)
    assert (unknown["verdict"], unknown["text"]) == ("unknown", "broker b1 has no record of such a message")
    early = answer(home, now_ms - 3_600_000)
    assert early["verdict"] == "before-history"
    assert early["text"] == "the history of broker b1 does not reach back to that time"
    nobody = answer(NOBODY, now_ms)
    assert nobody["verdict"] == "unreachable"
    assert "broker 00000007, where the message was published, cannot be reached" in nobody["text"]
    line[0].kill()
    gone = answer(home, now_ms)
    assert gone["verdict"] == "unreachable"
    assert "broker b1, where" in gone["text"]

    malformed = postroad_trace("not-an-id", *at)
    assert (malformed.returncode, malformed.stdout) == (2, "")
    assert malformed.stderr.startswith("postroad: 'not-an-id' is not a message id")
    offline = postroad_trace(str(MessageId(42, home, now_ms, 1)), "--broker", line[0].address)
    assert (offline.returncode, offline.stdout) == (1, "")
    assert f"no broker at {line[0].address}" in offline.stderr


def test_a_broker_that_does_not_track_says_so(brokers: Brokers) -> None:
    """T11: strategy none."""
    broker = brokers.start("b1", extra=("--tracking", "none"))
    identity = str(MessageId(42, number_of(broker), time.time_ns() // 1_000_000, 1))
    shown = postroad_trace(identity, "--broker", broker.address)
    assert shown.returncode == 1
    assert "this broker does not track messages" in shown.stdout


def test_a_clock_that_is_wrong_is_corrected(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    """T5: ids of a publisher whose clock jumps ahead come back within the tolerance."""
    broker = brokers.start("b1")

    async def scenario() -> None:
        async with postroad.connect(broker.address, name="jumpy") as client:
            await client.publish("t", "before")
            real = aio.now_us
            monkeypatch.setattr(aio, "now_us", lambda: real() + 3_000_000)
            jumped = await client.publish("t", "ahead")
            await client.flush()
            assert jumped.id.time_ms - time.time_ns() // 1_000_000 > 2_000
            async with asyncio.timeout(10):
                while abs(client._core.skew_us + 3_000_000) > 100_000:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            status = await client.request("status")
            assert status["metrics"]["clock_corrections_total"] == 1

    asyncio.run(scenario())


def test_strategies_change_and_nothing_is_forgotten_or_taken_for_silence(brokers: Brokers) -> None:
    """T11: bloom, then exact, then none, then bloom again, asked with the client without an event loop."""
    broker = brokers.start("b1")

    def published_now() -> MessageId:
        with (
            postroad.sync.connect(broker.address, name="reader") as client,
            client.subscribe("traced") as events,
        ):
            receipt = client.publish("traced", "x")
            event = next(iter(events))
            assert isinstance(event, postroad.Event)
            assert event.id == receipt.id
        return receipt.id

    ids = [published_now()]
    for strategy in ("exact", "none", "bloom"):
        assert broker.stop() == 0
        broker.extra = ("--tracking", strategy)
        broker.start()
        time.sleep(1)  # of messages within skew and jitter of a start nobody knows which process had them
        ids.append(published_now())
        time.sleep(1)
    with postroad.sync.connect(broker.address) as client:
        by_bloom, by_log, by_nobody, by_bloom_again = [client.trace(identity) for identity in ids]
    for trail in (by_bloom, by_log, by_bloom_again):
        check(trail, ["b1"])
    assert by_log.origin_doubt == 0
    assert by_bloom.origin_doubt
    assert by_nobody.verdict == "partial"
    assert "tracked" in by_nobody.explanation


def test_a_broker_killed_when_all_was_stored_has_lost_nothing(brokers: Brokers, tmp_path: Path) -> None:
    """T3: kill -9 after the interval in which the last message was stored, and that it was is noted."""
    config = tmp_path / "tracking.toml"
    config.write_text('[tracking]\npersist = "200 ms"\n')
    broker = brokers.start("b1", extra=("--config", str(config)))
    (identity,) = asyncio.run(send_across([broker], 1))
    log = broker.data / "tracking" / "attachments.log"
    until = time.monotonic() + 60
    while b"settled" not in log.read_bytes():
        assert time.monotonic() < until
        time.sleep(0.05)
    broker.kill()
    broker.start()
    with postroad.sync.connect(broker.address) as client:
        check(client.trace(identity), ["b1"])


def test_a_trace_goes_on_behind_a_broker_that_does_not_track(brokers: Brokers) -> None:
    """T6, T11: who has strategy none knows its neighbours."""
    b1 = brokers.start("b1")
    b2 = brokers.start("b2", b1.address, extra=("--tracking", "none"))
    line = [b1, b2, brokers.start("b3", b2.address)]

    async def work() -> None:
        await linked(*line)
        (identity, *_) = await send_across(line, 3)
        async with postroad.connect(b1.address) as client:
            trail = await client.trace(identity)
        assert [(step.broker, step.source) for step in trail.route] == [("b1", None), ("b3", "b2")]
        assert (trail.verdict, [broker for broker, _ in trail.missing]) == ("partial", ["b2"])

    asyncio.run(work())


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_a_trace_goes_on_behind_a_broker_that_did_not_track_at_first(brokers: Brokers, strategy: str) -> None:
    """T6, T11: its history begins later, and yet it routed the message."""
    b1 = brokers.start("b1")
    b2 = brokers.start("b2", b1.address, extra=("--tracking", "none"))
    line = [b1, b2, brokers.start("b3", b2.address)]

    async def before() -> MessageId:
        await linked(*line)
        return (await send_across(line, 1))[0]

    identity = asyncio.run(before())
    assert b2.stop() == 0
    b2.extra = ("--tracking", strategy)
    b2.start()

    async def after() -> None:
        await linked(*line)
        for broker in line:
            async with postroad.connect(broker.address) as client:
                trail = await client.trace(identity)
            assert [(step.broker, step.source) for step in trail.route] == [("b1", None), ("b3", "b2")]
            assert [one.broker for one in trail.receivers] == ["b3"]
            assert (trail.verdict, [broker for broker, _ in trail.missing]) == ("partial", ["b2"])

    asyncio.run(after())


def test_a_trace_goes_on_behind_a_broker_that_was_killed_before_it_stored(brokers: Brokers) -> None:
    """T6: kill -9 of the broker between; it does not know any more, who delivered the message does."""
    line = brokers.line(3)

    async def before() -> list[MessageId]:
        await linked(*line)
        return await send_across(line, 3)

    ids = asyncio.run(before())
    line[1].kill()
    line[1].start()

    async def after() -> None:
        await linked(*line)
        async with postroad.connect(line[0].address) as client:
            trail = await client.trace(ids[0])
        assert [(step.broker, step.source) for step in trail.route] == [("b1", None), ("b3", "b2")]
        assert [(one.subscriber.split("#")[0], one.broker) for one in trail.receivers] == [("reader", "b3")]
        assert all(step.doubt < 0.01 for step in (*trail.route, *trail.receivers))
        assert (trail.verdict, [broker for broker, _ in trail.missing]) == ("partial", ["b2"])

    asyncio.run(after())
    shown = postroad_trace(str(ids[0]), "--broker", line[0].address).stdout
    assert "b3, from b2" in shown
    assert "partial: b2: its record of that time is not whole" in shown


def test_brokers_of_one_name_are_told_apart(brokers: Brokers, tmp_path: Path) -> None:
    """T12."""
    others = Brokers(tmp_path / "other")
    others.folder.mkdir()
    try:
        first = brokers.start("a")
        middle = brokers.start("b", first.address)
        other = others.start("a", middle.address)

        async def test() -> Any:
            await linked(first, middle, other)
            (identity,) = await send_across([first, middle, other], 1)
            async with postroad.connect(middle.address) as client:
                return await client.trace(str(identity))

        trail = asyncio.run(test())
        origin, (receiver,) = trail.origin, trail.receivers
        assert origin != receiver.broker
        check(trail, [origin, "b", receiver.broker])
        for broker, its, namesake in ((first, origin, receiver.broker), (other, receiver.broker, origin)):
            assert its.startswith("a (")
            number = namesake.removeprefix("a (").removesuffix(")")
            assert broker.log.read_text().count(f"broker {number} has the name of this one, 'a'") == 1
        assert "has the name" not in middle.log.read_text()
    finally:
        others.end()
