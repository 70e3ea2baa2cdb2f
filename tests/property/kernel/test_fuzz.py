"""Hostile frames: the compiled kernel and its reference agree on each, byte for byte, and neither fails.

tests/sanitize.sh runs this file on a kernel built with the address and undefined behaviour sanitizers;
POSTROAD_FUZZ_SECONDS says for how long.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds.hostile_frames import LIMITS, mutate, some_frame

from postroad.errors import BugError, PeerError, PostroadError
from postroad.events import BatchBuilder, EventBatch
from postroad.kernel import reference
from postroad.wire.frames import Limits

check = pytest.importorskip("postroad.kernel.check")
frames = pytest.importorskip("postroad.kernel.frames")

SECONDS = float(os.environ.get("POSTROAD_FUZZ_SECONDS", "3"))


def arguments(limits: Limits) -> tuple[int, ...]:
    return (
        limits.batch_bytes,
        limits.batch_events,
        limits.event_bytes,
        limits.attributes,
        limits.topic_bytes,
        limits.topic_depth,
    )


def outcome(function: object, *given_: object) -> object:
    """What it returned, or which of our errors it raised; anything else fails the test."""
    try:
        return function(*given_)  # type: ignore[operator]
    except PostroadError as error:
        return type(error), str(error)


def agree(data: bytes) -> bool:
    """Whether a frame is accepted, by both kernels or by none, with all that can then be done with it."""
    found = check.check_batch(data, *arguments(LIMITS))
    assert found == reference.check_batch(data, *arguments(LIMITS))
    rule, row, count, extents = found
    if rule:
        assert (count, extents) == (0, b"")
        assert row >= -1
        return False
    rows = np.arange(0, count, 2, dtype=np.uint32)
    for name, *given_ in (
        ("gather", data, extents, rows, 23, 1, 2, 3, 4),
        ("gather", data, extents, None, 23, 1, 2, 3, 4),
        ("with_ticks", data, extents, 5, 23, 1, 2, 3),
        ("concatenate", [data, data], [extents, extents], 23, 1, 2, 3, 4),
        ("packed_ids", data, count),
        ("unpack_rows", data, extents, 0, count),
    ):
        one, two = outcome(getattr(frames, name), *given_), outcome(getattr(reference, name), *given_)
        assert one == two, name
    for _, _, _, _, _, topic, attributes, _ in frames.unpack_rows(data, extents, 0, count):
        assert frames.encode_attributes(attributes) == reference.encode_attributes(attributes)
        assert check.fnv1a64(topic.encode()) == reference.fnv1a64(topic.encode())
    return True


def repair_numbers(data: bytes) -> bytes:
    """Put the right topic numbers in, so that damage behind them is reached."""
    fixed = bytearray(data)
    count = min(struct.unpack_from("<I", data, 8)[0], (len(data) - 48) // 48) if len(data) >= 48 else 0
    position = 48 + 48 * count
    for row in range(count):
        at = 48 + 48 * row
        topic, attributes, payload = struct.unpack_from("<HHI", data, at + 32)
        struct.pack_into("<Q", fixed, at + 24, reference.fnv1a64(data[position : position + topic]))
        position += topic + attributes + payload
    return bytes(fixed)


def test_mutations() -> None:
    """Bit flips, truncations, insertions, edited lengths and counts of frames that were sound."""
    seed = int(os.environ.get("POSTROAD_FUZZ_SEED", "1"))
    chance = random.Random(seed)
    stop = time.monotonic() + SECONDS
    accepted = total = 0
    while time.monotonic() < stop:
        frame = some_frame(chance)
        assert agree(frame)
        for _ in range(20):
            data = mutate(frame, chance)
            if chance.random() < 0.5:
                data = repair_numbers(data)
            try:
                accepted += agree(data)
            except BaseException:
                print(f"seed {seed}, frame {data.hex()}")  # noqa: T201
                raise
            total += 1
    assert total >= 20
    assert 0 < accepted < total


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_noise(data: bytes) -> None:
    agree(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=30), st.integers(0, 4))
def test_noise_as_attributes(data: bytes, count: int) -> None:
    header = struct.pack("<16sqQHHIHHI", bytes(16), 0, reference.fnv1a64(b"a"), 1, len(data), 0, 0, count, 0)
    body = header + b"a" + data
    agree(struct.pack("<IBBHIIQqqII", 48 + len(body), 16, 1, 0, 1, 0, 0, 0, 0, 1, 0) + body)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(min_size=1, max_size=12), st.text(max_size=6).map(str.encode).filter(bool)))
def test_noise_as_topic(topic: bytes) -> None:
    header = struct.pack("<16sqQHHIHHI", bytes(16), 0, reference.fnv1a64(topic), len(topic), 0, 0, 0, 0, 0)
    body = header + topic
    agree(struct.pack("<IBBHIIQqqII", 48 + len(body), 16, 1, 0, 1, 0, 0, 0, 0, 1, 0) + body)


def test_every_sequence_that_may_or_may_not_be_utf8() -> None:
    """All pairs of bytes, and all lead bytes with the continuations at the edges of what is allowed."""
    edges = bytes((0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF))
    sequences = [bytes((a, b)) for a in range(256) for b in range(256)]
    sequences += [
        bytes((a, b, c, d)) for a in range(0xE0, 0x100) for b in edges for c in edges for d in edges
    ]
    for text in sequences:
        attribute = b"\1a\0" + struct.pack("<H", len(text)) + text
        header = struct.pack("<16sqQHHIHHI", bytes(16), 0, 0xAF63DC4C8601EC8C, 1, len(attribute), 0, 0, 1, 0)
        body = header + b"a" + attribute
        data = struct.pack("<IBBHIIQqqII", 48 + len(body), 16, 1, 0, 1, 0, 0, 0, 0, 1, 0) + body
        try:
            text.decode()
            expected = 0
        except UnicodeDecodeError:
            expected = 26
        assert check.check_batch(data, *arguments(LIMITS))[0] == expected, text


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=24), st.lists(st.integers(0, 0xFFFF_FFFF), max_size=4))
def test_extents_that_nobody_checked(data: bytes, extents: bytes, rows: list[int]) -> None:
    """A bug of our own must end in BugError, not in memory that is not ours."""
    chosen = np.array(rows, np.uint32)
    for function, *given_ in (
        (frames.gather, data, extents, chosen, 23, 1, 2, 3, 4),
        (frames.gather, data, extents, None, 23, 1, 2, 3, 4),
        (frames.with_ticks, data, extents, 5, 23, 1, 2, 3),
        (frames.concatenate, [data, data], [extents, extents], 23, 1, 2, 3, 4),
        (frames.unpack_rows, data, extents, 0, len(extents) // 4),
        (frames.packed_ids, data, len(rows)),
    ):
        outcome(function, *given_)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 600), min_size=3, max_size=3))
def test_extents_that_are_wrong_in_between(inner: list[int]) -> None:
    builder = BatchBuilder()
    for number in range(4):
        builder.add(number.to_bytes(16), "a/b", {"x": number}, bytes(20 * number), LIMITS)
    batch = EventBatch.parse(builder.finish(channel=1), LIMITS)
    offsets = batch.offsets.tolist()
    wrong = np.array([offsets[0], *inner, offsets[-1]], np.uint32).tobytes()
    rows = np.arange(4, dtype=np.uint32)
    for chosen in (rows, rows[:1], rows[1:3].copy()):
        outcome(frames.gather, batch.data, wrong, chosen, 23, 1, 2, 3, 4)
    with contextlib.suppress(BugError, UnicodeDecodeError):
        frames.unpack_rows(batch.data, wrong, 0, 4)
    outcome(frames.concatenate, [batch.data], [wrong], 23, 1, 2, 3, 4)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.integers(-3, 50), st.integers(0, 5))
def test_attributes_that_nobody_checked(data: bytes, start: int, count: int) -> None:
    with contextlib.suppress(BugError, UnicodeDecodeError):
        frames.decode_attributes(data, start, count)


def test_error_text_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    damaged = [mutate(some_frame(chance), chance) for _ in range(300)]

    def texts() -> list[str]:
        found = []
        for data in damaged:
            try:
                found.append(str(EventBatch.parse(data, LIMITS).count))
            except PeerError as error:
                found.append(str(error))
        return found

    monkeypatch.setattr("postroad.kernel.check_batch", check.check_batch)
    compiled = texts()
    monkeypatch.setattr("postroad.kernel.check_batch", reference.check_batch)
    assert compiled == texts()
