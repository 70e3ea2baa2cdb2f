"""Brokers publish their own history, also over kill -9 (P4, issue 4 item 6)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.worlds.processes import Brokers

import postroad
from postroad.history.bulletins import (
    ATTACHMENTS,
    DELIVERIES,
    FILTERS,
    TOPOLOGY,
    decode_deliveries,
    decode_topology,
    join_parts,
)
from postroad.storage.tracking_store import TrackingStore
from postroad.tracking.attachment_log import decode_changes
from postroad.tracking.keys import PUBLISH
from postroad.tracking.record import FilterMeta, decode_record, filter_of

PERSIST = '[tracking]\npersist = "500 ms"\n'


async def collect(events: Any, into: list[postroad.Event]) -> None:
    async for event in events:
        assert isinstance(event, postroad.Event)
        into.append(event)


def stored(data: Path) -> dict[int, FilterMeta]:
    return {meta.sequence: meta for meta in TrackingStore(data).load().filters}


def filters(history: list[postroad.Event], broker: str) -> dict[int, tuple[FilterMeta, bytes]]:
    """The stored filters of one broker; no part may come twice, and none be missing."""
    parts: dict[int, list[postroad.Event]] = {}
    for event in history:
        if event.topic == FILTERS and event.attributes["name"] == broker:
            parts.setdefault(int(event.attributes["sequence"]), []).append(event)
    for held in parts.values():
        assert [event.attributes["part"] for event in held] == list(range(len(held)))
        assert len(held) == held[0].attributes["parts"]
    return {
        sequence: decode_record(join_parts([event.payload for event in held]))
        for sequence, held in parts.items()
    }


def reported(history: list[postroad.Event], name: str) -> list[tuple[int, int, bytes]]:
    """(session, tick, id) of what a durable subscriber was sent, by the reports."""
    found: list[tuple[int, int, bytes]] = []
    for event in history:
        if event.topic != DELIVERIES:
            continue
        one = decode_deliveries(event.payload)
        rows = zip(one.subscriber.tolist(), one.session.tolist(), one.tick.tolist(), one.ids, strict=True)
        found += [(session, tick, id.tobytes()) for who, session, tick, id in rows if one.names[who] == name]
    return found


def test_a_durable_subscriber_gets_the_whole_history_over_kill_9(brokers: Brokers, tmp_path: Path) -> None:
    """P4."""
    config = tmp_path / "postroad.toml"
    config.write_text(PERSIST)
    extra = ("--config", str(config))
    one = brokers.start("b1", extra=extra)
    two = brokers.start("b2", one.address, extra=extra)
    history: list[postroad.Event] = []
    got: list[postroad.Event] = []
    ids: list[bytes] = []
    held: dict[int, FilterMeta] = {}  # what was stored at each end of b1

    def complete() -> bool:
        """What was stored has come, what was published last is in it, and all deliveries are reported."""
        found = filters(history, "b1")
        published = [filter_of(*record) for record in found.values() if record[0].key.kind == PUBLISH]
        known = all(any(one.contains(identity)[0] for one in published) for identity in ids[-20:])
        boots = {
            int(event.attributes["number"]) >> 32
            for event in history
            if (event.topic, event.attributes["name"]) == (TOPOLOGY, "b1")
        }
        reports = [(tick, identity) for _, tick, identity in reported(history, "s")]
        sent = [(event.tick, bytes(event.id)) for event in got]
        return (
            known and held.keys() <= found.keys() and len(boots) == 5 and reports == sent and len(got) == 320
        )

    async def publish(count: int) -> None:
        async with postroad.connect(one.address, name="writer") as writer:
            for number in range(count):
                receipt = await writer.publish("t", str(number), mode="durable")
                ids.append(bytes(receipt.id))
                await asyncio.sleep(0.005)

    async def work() -> None:
        nonlocal held
        async with (
            asyncio.timeout(120),
            postroad.connect(two.address, name="pipeline") as pipeline,
            pipeline.subscribe("$postroad/#", durable="pipeline") as bulletins,
            postroad.connect(two.address, name="reader") as reader,
            reader.subscribe("t", durable="s") as events,
        ):
            reading = [
                asyncio.ensure_future(collect(bulletins, history)),
                asyncio.ensure_future(collect(events, got)),
            ]
            for seconds in (0.0, 0.3, 0.6):
                await publish(100)
                await asyncio.sleep(seconds)  # anything may be on its way to the disk
                one.kill()
                held |= stored(one.data)
                one.start()
            await publish(20)
            assert one.stop() == 0
            held |= stored(one.data)
            one.start()
            while not complete():  # noqa: ASYNC110 -- other processes
                await asyncio.sleep(0.1)
            for task in reading:
                assert not task.done()
                task.cancel()

    asyncio.run(work())
    assert len(got) == len(set(ids)) == 320
    assert len(reported(history, "s")) == 320, "each once, since its broker did not die"
    assert not reported(history, "pipeline")
    attachments = [event for event in history if event.topic == ATTACHMENTS]
    of_two = [event for event in attachments if event.attributes["name"] == "b2"]
    assert of_two[0].attributes["whole"] is True
    changes = [change for event in of_two for change in decode_changes(event.payload)[0]]
    assert {change.who for change in changes if change.kind == "subscriber"} >= {"s", "pipeline"}
    numbers = [int(event.attributes["number"]) for event in attachments if event.attributes["name"] == "b1"]
    assert numbers == sorted(set(numbers))
    boots = {number >> 32 for number in numbers}
    assert len(boots) == 5, "each start begins with the whole map"
    links = [decode_topology(event.payload) for event in history if event.topic == TOPOLOGY]
    mine = [one for one in links if one.name == "b1"]
    assert {one.boot for one in mine} == boots
    assert any([link.broker for link in one.links] for one in mine)
