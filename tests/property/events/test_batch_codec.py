"""The codec and what is made from batches, against naive twins that work on lists of events."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds.batches import (
    Raw,
    attribute_sets,
    batches,
    build,
)

from postroad import kernel
from postroad.events import EventBatch, pattern_matches
from postroad.events.attributes import Value
from postroad.ids import MessageId, pubend_id
from postroad.kernel import reference
from postroad.wire.frames import DEFAULT_LIMITS, Kind

PUBEND = pubend_id(7, 0)


def raw(batch: EventBatch) -> list[Raw]:
    return [(bytes(event.id), event.topic, dict(event.attributes), event.payload) for event in batch.events()]


def types(batch: EventBatch) -> list[list[type]]:
    return [[type(value) for _, value in sorted(event.attributes.items())] for event in batch.events()]


@settings(max_examples=80, deadline=None)
@given(batches)
def test_round_trip(rows: list[Raw]) -> None:
    batch = build(rows)
    assert raw(batch) == rows
    assert types(batch) == [[type(value) for _, value in sorted(row[2].items())] for row in rows]
    assert batch.ids() == b"".join(row[0] for row in rows)
    assert [MessageId.from_bytes(row[0]) for row in rows] == [event.id for event in batch.events()]
    assert [batch.attributes(i) for i in range(len(rows))] == [row[2] for row in rows]
    assert [batch.topic(i) for i in range(len(rows))] == [row[1] for row in rows]


@settings(max_examples=80, deadline=None)
@given(batches, st.data())
def test_selections_of_selections(rows: list[Raw], data: st.DataObject) -> None:
    """What is selected is what was there, however often it is selected, on the way through many brokers."""
    batch = build(rows)
    if rows:
        batch = batch.with_ticks(1000, kind=Kind.KNOWLEDGE, pubend=PUBEND, start=999, channel=1)
    expected = list(enumerate(rows, 1000))
    for _ in range(3):
        chosen = [index for index in range(len(expected)) if data.draw(st.booleans())]
        indices = np.array(chosen, np.uint32)
        frame = batch.select(indices, kind=Kind.KNOWLEDGE, pubend=PUBEND, start=999, end=2000, channel=2)
        part, batch = batch.part(indices), EventBatch.parse(frame, DEFAULT_LIMITS)
        assert raw(part) == raw(batch)
        assert part.extents == batch.extents
        expected = [expected[index] for index in chosen]
    assert raw(batch) == [row for _, row in expected]
    assert batch.headers["tick"].tolist() == [tick for tick, _ in expected]


@settings(max_examples=50, deadline=None)
@given(st.lists(batches, min_size=1, max_size=5))
def test_concatenation(parts: list[list[Raw]]) -> None:
    whole = EventBatch.concatenate([build(part) for part in parts])
    assert raw(whole) == [row for part in parts for row in part]
    assert EventBatch.parse(whole.data, DEFAULT_LIMITS).extents == whole.extents
    together = build([row for part in parts for row in part])  # which has a checksum
    assert kernel.sealed(whole.data) == together.data


@settings(max_examples=200, deadline=None)
@given(attribute_sets)
def test_equal_attributes_are_equal_bytes(attributes: dict[str, Value]) -> None:
    """Whatever order they were given in, and whichever kernel encoded them."""
    backwards = dict(reversed(list(attributes.items())))
    rows: list[Raw] = [(bytes(16), "a", attributes, b""), (bytes(16), "a", backwards, b"")]
    batch = build(rows)
    heaps = [batch.data[a:b] for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)]
    assert heaps[0] == heaps[1] == b"a" + reference.encode_attributes(attributes)


levels = st.sampled_from(["", "a", "b", "$s"])
patterns = st.tuples(st.lists(st.sampled_from(["", "a", "b", "$s", "+"]), max_size=4), st.booleans()).map(
    lambda parts: "/".join([*parts[0], "#"] if parts[1] else parts[0] or ["+"])
)


def naive_matches(pattern: list[str], topic: list[str]) -> bool:
    """By recursion on the levels, one at a time."""
    if not pattern:
        return not topic
    if pattern == ["#"]:
        return True
    return bool(topic) and pattern[0] in ("+", topic[0]) and naive_matches(pattern[1:], topic[1:])


@settings(max_examples=200, deadline=None)
@given(patterns, st.lists(levels, min_size=1, max_size=5))
def test_patterns(pattern: str, topic: list[str]) -> None:
    hidden = topic[0].startswith("$") and pattern[:1] in ("+", "#")
    expected = not hidden and naive_matches(pattern.split("/"), topic)
    assert pattern_matches(pattern, "/".join(topic)) == expected
