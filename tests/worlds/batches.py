"""Batches of events that hypothesis draws."""

from __future__ import annotations

from hypothesis import strategies as st

from postroad.events import BatchBuilder, EventBatch
from postroad.events.attributes import Value
from postroad.wire.frames import DEFAULT_LIMITS, Kind

Raw = tuple[bytes, str, dict[str, Value], bytes]
characters = st.characters(codec="utf-8", exclude_categories=("Cc",), exclude_characters="+#/")
topics = st.lists(st.text(characters, max_size=8), min_size=1, max_size=6).map("/".join).filter(bool)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.one_of(texts, st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False), st.booleans())
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=10)
attribute_sets = st.dictionaries(names, values, max_size=6)
events = st.tuples(st.binary(min_size=16, max_size=16), topics, attribute_sets, st.binary(max_size=60))
batches = st.lists(events, max_size=6)


def build(rows: list[Raw]) -> EventBatch:
    builder = BatchBuilder()
    for row in rows:
        builder.add(*row, DEFAULT_LIMITS)
    assert builder.count == len(rows)
    size = builder.size
    frame = builder.finish(channel=1)
    assert len(frame) == size
    return EventBatch.parse(frame, DEFAULT_LIMITS, expect=Kind.PUBLISH)
