"""Batches as Arrow: every row is the event it was (P1)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from tests.worlds.batches import Raw, batches, build

from postroad.events import BatchBuilder, EventBatch
from postroad.ids import MessageId, pubend_id, pubend_text
from postroad.spark.columns import EVENTS, event_columns
from postroad.wire.frames import DEFAULT_LIMITS, Kind


def typed(value: object) -> dict[str, Any]:
    kind = {bool: "boolean", int: "integer", float: "float", str: "text"}[type(value)]
    return {"text": None, "integer": None, "float": None, "boolean": None, kind: value}


@settings(max_examples=100, deadline=None)
@given(batches)
def test_every_row_is_its_event(rows: list[Raw]) -> None:
    batch = build(rows)
    if rows:
        batch = batch.with_ticks(50, kind=Kind.DELIVERY, pubend=pubend_id(7, 1), start=40, channel=2)
    table = event_columns(batch)
    table.validate(full=True)
    assert table.schema == EVENTS
    found = table.to_pylist()
    assert len(found) == len(rows)
    for row, (one, (raw, topic, attributes, payload)) in enumerate(zip(found, rows, strict=True)):
        identity = MessageId.from_bytes(raw)
        assert one["id"] == str(identity)
        assert one["publisher"] == f"{identity.publisher:08x}"
        assert one["broker"] == f"{identity.broker:08x}"
        assert one["time_ms"] == identity.time_ms
        assert (one["topic"], one["payload"], one["tick"]) == (topic, payload, 50 + row)
        assert dict(one["attributes"]) == {name: typed(value) for name, value in attributes.items()}
        assert (one["pubend"], one["origin"]) == (pubend_text(pubend_id(7, 1)), "00000007")


def test_dates() -> None:
    builder = BatchBuilder()
    times = (0, 86_399_999, 86_400_000, 1_763_164_800_123, (1 << 48) - 1)
    for time_ms in times:
        identity = MessageId(publisher=1, broker=2, time_ms=time_ms, counter=3)
        builder.add(bytes(identity), "t", {}, b"", DEFAULT_LIMITS)
    table = event_columns(EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS))
    days = [datetime.fromtimestamp(time_ms / 1000, UTC).date() for time_ms in times[:-1]]
    assert table.column("date").to_pylist() == [*days, datetime.max.replace(tzinfo=UTC).date()]
    assert table.column("time_ms").to_pylist() == list(times)
