"""The compiled engine on frames that no check has seen, and on values made to collide."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad import kernel
from postroad.errors import BugError
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.selectors import MatchIndex, Selector
from postroad.wire.frames import DEFAULT_LIMITS

pytestmark = pytest.mark.skipif(not kernel.wanted("match"), reason="nothing compiled")

SELECTORS = [
    ("", ""),
    ("a/#", "x = 1 AND y LIKE 'ab%'"),
    ("a/+", "x > 0 AND z = TRUE"),
    ("", "y > 'a' AND x IN (1, 2.5, 'ab')"),
    ("+/b/#", "missing IS NULL AND y LIKE '%b'"),
    ("", "y LIKE '%é_c%' OR x * 2 > w OR y NOT LIKE '_%b_'"),
]


def frame() -> tuple[bytes, bytes]:
    builder = BatchBuilder()
    for row in range(4):
        attributes = {"x": row, "y": "abc" * row, "z": row % 2 == 0, "w": row / 3}
        builder.add(bytes(16), f"a/b/{row}"[: 3 + 2 * (row % 2)], attributes, b"payload", DEFAULT_LIMITS)
    batch = EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)
    return batch.data, batch.extents


DATA, EXTENTS = frame()


def index() -> MatchIndex:
    made = MatchIndex()
    for key, (topic, where) in enumerate(SELECTORS):
        made.add(key, Selector.parse(topic, where), key)
    return made


INDEX = index()


def match_unchecked(data: bytes, extents: bytes) -> None:
    """Either an answer or a clear refusal; never a read outside the frame (tests/sanitize.sh watches)."""
    try:
        groups = INDEX.match(EventBatch(data, 4, extents))
    except (BugError, UnicodeDecodeError, IndexError, struct.error, ValueError):
        return
    count = int.from_bytes(data[8:12], "little")
    assert all(0 <= row < count for group in groups for row in group.rows.tolist())


EDITS = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=6)


def edited(data: bytes, edits: list[tuple[int, int]]) -> bytes:
    made = bytearray(data)
    for at, value in edits:
        if made:
            made[at % len(made)] = value
    return bytes(made)


@settings(max_examples=200, deadline=None)
@given(EDITS, st.integers(0, len(DATA)))
def test_damaged_frames(edits: list[tuple[int, int]], cut: int) -> None:
    match_unchecked(edited(DATA, edits), EXTENTS)
    match_unchecked(DATA[:cut], EXTENTS)
    match_unchecked(edited(DATA[:cut], edits), EXTENTS)


@settings(max_examples=200, deadline=None)
@given(EDITS, st.integers(0, len(EXTENTS)))
def test_damaged_extents(edits: list[tuple[int, int]], cut: int) -> None:
    match_unchecked(DATA, edited(EXTENTS, edits))
    match_unchecked(DATA, EXTENTS[:cut])


def wanted(where: str, value: int | float) -> bool:
    made = MatchIndex()
    made.add(1, Selector.parse("", where), 1)
    builder = BatchBuilder()
    builder.add(bytes(16), "t", {"x": value}, b"", DEFAULT_LIMITS)
    return bool(made.match(EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)))


@pytest.mark.parametrize("real", [0.1, 1.5, -2.25, 1e-300])
def test_a_collision_is_not_a_match(real: float) -> None:
    """The hash of a number is a permutation of its bits, so a colliding integer is easy to make."""
    bits = struct.unpack("<q", struct.pack("<d", real))[0]
    twin = (bits ^ 0xA24BAED4963EE407 ^ 0x9FB21C651E98DF25) & (1 << 64) - 1
    twin = twin - (1 << 64) if twin >= 1 << 63 else twin
    assert wanted(f"x = {real!r}", real)
    assert wanted(f"x = {twin}", twin)
    assert not wanted(f"x = {real!r}", twin)
    assert not wanted(f"x = {twin}", real)
