"""The event batch: codec, limits, new frames from old. Every test runs on both kernels."""

from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import google_crc32c
import msgspec
import numpy as np
import pytest

from postroad import kernel
from postroad.errors import BugError, PeerError, TooLargeError, UsageError
from postroad.events import BatchBuilder, Event, EventBatch, Gap, empty_frame, topic_number
from postroad.events.batch import HEADER_DTYPE
from postroad.ids import MessageId, pubend_id, volatile_pubend
from postroad.kernel import layout, reference
from postroad.kernel.layout import RULE_TEXT, Rule
from postroad.streams.knowledge import NOTHING, Segment
from postroad.wire.frames import BATCH_KINDS, DEFAULT_LIMITS, Kind, Limits

PUBEND = pubend_id(7, 3)
FUNCTIONS = [name for name in kernel.__all__ if hasattr(reference, name)]


@pytest.fixture(autouse=True, params=["chosen", "reference"])
def both_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "reference":
        for name in FUNCTIONS:
            monkeypatch.setattr(kernel, name, getattr(reference, name))


def identity(number: int) -> bytes:
    return bytes(MessageId(42, 7, 1_700_000_000_000 + number, number))


def limits(**changes: int) -> Limits:
    return msgspec.structs.replace(DEFAULT_LIMITS, **changes)


def published(count: int, channel: int = 1) -> bytes:
    builder = BatchBuilder()
    for number in range(count):
        builder.add(
            identity(number),
            f"orders/{number % 3}",
            {"price": number, "region": "eü", "weight": number / 2, "rush": number % 2 == 0},
            bytes([number % 256]) * number,
            DEFAULT_LIMITS,
        )
    return builder.finish(channel=channel)


def streamed(count: int, start: int = 10, first: int = 100) -> EventBatch:
    return EventBatch.parse(published(count), DEFAULT_LIMITS).with_ticks(
        first, kind=Kind.KNOWLEDGE, pubend=PUBEND, start=start, channel=5
    )


GOLDEN = bytes.fromhex(
    "87000000 10 01 0000 01000000 a59f254f"  # length 135, PUBLISH, version 1, no flags, one event
    "0000000000000000 0000000000000000 0000000000000000"  # pubend, start, end
    "09000000 00000000"  # channel: the ninth publish of this connection; reserved
    "0000002a 00000007 0193c1d2e3f4 0001"  # id
    "0000000000000000 61cf680419c320e6"  # tick, topic number
    "0300 2100 03000000 0000 0400 00000000"  # bytes of topic, attributes, payload; flags, count, reserved
    "612f62"  # a/b
    "01 62 03 01"  # b = true
    "01 66 02 000000000000f83f"  # f = 1.5
    "01 6e 01 feffffffffffffff"  # n = -2
    "01 74 00 0200 c3a9"  # t = 'é'
    "686579"  # hey
)


def test_golden_frame() -> None:
    """The layout, byte by byte: other languages rely on it."""
    message_id = MessageId.parse("0000002a-00000007-0193c1d2e3f4-0001")
    attributes = {"t": "é", "n": -2, "f": 1.5, "b": True}
    builder = BatchBuilder()
    builder.add(bytes(message_id), "a/b", attributes, b"hey", DEFAULT_LIMITS)
    assert builder.size == len(GOLDEN)
    assert builder.finish(channel=9) == GOLDEN
    batch = EventBatch.parse(GOLDEN, DEFAULT_LIMITS, expect=Kind.PUBLISH)
    assert (batch.kind, batch.channel, batch.count, len(batch), batch.lost) == (Kind.PUBLISH, 9, 1, 1, False)
    assert batch.events() == [
        Event(id=message_id, topic="a/b", attributes=attributes, payload=b"hey", pubend=None, tick=None)
    ]
    found = batch.event(0)
    assert list(found.attributes) == ["b", "f", "n", "t"]
    assert found.attributes["b"] is True
    assert found.publisher == 42
    assert found.published_at == datetime(2024, 12, 13, 21, 0, 43, 892000, UTC)


def test_layout_is_said_once() -> None:
    assert layout.FRAME_HEADER.size == layout.FRAME_HEADER_BYTES
    assert layout.EVENT_HEADER.size == layout.EVENT_HEADER_BYTES == HEADER_DTYPE.itemsize
    kinds = {layout.KIND_PUBLISH, layout.KIND_DELIVERY, layout.KIND_BEST_EFFORT, layout.KIND_KNOWLEDGE}
    assert kinds == BATCH_KINDS
    assert set(RULE_TEXT) == set(Rule) - {Rule.NONE}


def test_a_builder_can_be_used_again() -> None:
    builder = BatchBuilder()
    builder.add(identity(1), "a", {}, b"x", DEFAULT_LIMITS)
    first = builder.finish(channel=1)
    assert (builder.count, builder.size) == (0, 48)
    builder.add(identity(1), "a", {}, b"x", DEFAULT_LIMITS)
    assert builder.finish(channel=1) == first
    assert EventBatch.parse(builder.finish(channel=2), DEFAULT_LIMITS).count == 0


def test_rows() -> None:
    batch = streamed(5)
    assert [batch.topic(row) for row in range(5)] == [
        "orders/0",
        "orders/1",
        "orders/2",
        "orders/0",
        "orders/1",
    ]
    assert batch.attributes(3) == {"price": 3, "region": "eü", "rush": False, "weight": 1.5}
    assert batch.payload(4) == b"\4" * 4
    assert batch.id(2) == identity(2)
    assert batch.ids() == b"".join(map(identity, range(5)))
    assert batch.headers["tick"].tolist() == [100, 101, 102, 103, 104]
    assert batch.headers["topic_number"][1] == topic_number(b"orders/1")
    assert batch.headers["id"][1].tobytes() == identity(1)
    assert batch.offsets.tolist()[0] == 48 * 6
    assert batch.offsets.tolist()[-1] == len(batch.data)
    assert [batch.event(row) for row in range(5)] == batch.events()
    for row in (-1, 5):
        for view in (batch.topic, batch.attributes, batch.payload, batch.id, batch.event):
            with pytest.raises(BugError):
                view(row)


def test_durable_events_have_pubend_and_tick_and_plain_ones_have_not() -> None:
    durable = streamed(1).event(0)
    assert (durable.pubend, durable.tick) == ("00000007-00000003", 100)
    plain = EventBatch.parse(published(1), DEFAULT_LIMITS).with_ticks(
        1, kind=Kind.DELIVERY, pubend=volatile_pubend(7, 3), start=0, channel=1
    )
    assert (plain.event(0).pubend, plain.event(0).tick) == (None, None)


def test_an_id_from_beyond_the_calendar() -> None:
    event = Event(id=MessageId(1, 1, (1 << 48) - 1, 0), topic="a", attributes={}, payload=b"")
    assert event.published_at.year == 9999


# ---------------------------------------------------------------- new frames from old


def test_select() -> None:
    batch = streamed(6)
    for rows in ([], [0], [5], [1, 2, 4], [0, 1, 2, 3, 4, 5]):
        frame = batch.select(
            np.array(rows, np.uint32), kind=Kind.DELIVERY, pubend=PUBEND, start=10, end=200, channel=77
        )
        chosen = EventBatch.parse(frame, DEFAULT_LIMITS, expect=Kind.DELIVERY)
        assert chosen.events() == [batch.event(row) for row in rows]
        assert (chosen.pubend, chosen.start, chosen.end, chosen.channel) == (PUBEND, 10, 200, 77)


def test_select_all() -> None:
    batch = streamed(6)
    every = batch.select(None, kind=Kind.DELIVERY, pubend=PUBEND, start=10, end=105, channel=1)
    rows = np.arange(6, dtype=np.uint32)
    assert every == batch.select(rows, kind=Kind.DELIVERY, pubend=PUBEND, start=10, end=105, channel=1)
    assert every == batch.restamped(kind=Kind.DELIVERY, channel=1)


@pytest.mark.parametrize(
    "rows",
    [
        np.array([6], np.uint32),
        np.array([1, 1], np.uint32),
        np.array([2, 1], np.uint32),
        np.array([0xFFFF_FFFF], np.uint32),
        np.array([1], np.int64),
        np.arange(6, dtype=np.uint32)[::2],
    ],
    ids=["beyond", "twice", "backwards", "far beyond", "wrong type", "not contiguous"],
)
def test_select_refuses_rows_it_cannot_copy(rows: np.ndarray) -> None:
    with pytest.raises(BugError, match="rows"):
        streamed(6).select(rows, kind=Kind.DELIVERY, pubend=PUBEND, start=10, end=200, channel=1)


def test_ticks() -> None:
    before = EventBatch.parse(published(4), DEFAULT_LIMITS)
    after = before.with_ticks(1000, kind=Kind.KNOWLEDGE, pubend=PUBEND, start=900, channel=3)
    assert EventBatch.parse(after.data, DEFAULT_LIMITS, expect=Kind.KNOWLEDGE).extents == after.extents
    assert (after.pubend, after.start, after.end, after.channel, after.count) == (PUBEND, 900, 1003, 3, 4)
    assert [event.tick for event in after.events()] == [1000, 1001, 1002, 1003]
    assert [event.payload for event in after.events()] == [event.payload for event in before.events()]
    assert before.headers["tick"].tolist() == [0] * 4


@pytest.mark.parametrize(("count", "first", "start"), [(0, 5, 4), (1, 5, 5), (2, (1 << 63) - 1, 0)])
def test_ticks_that_cannot_be(count: int, first: int, start: int) -> None:
    batch = EventBatch.parse(published(count), DEFAULT_LIMITS)
    with pytest.raises(BugError):
        batch.with_ticks(first, kind=Kind.KNOWLEDGE, pubend=PUBEND, start=start, channel=1)


def test_silence_and_gap() -> None:
    for lost in (False, True):
        frame = empty_frame(kind=Kind.KNOWLEDGE, pubend=PUBEND, start=5, end=9, channel=2, lost=lost)
        batch = EventBatch.parse(frame, DEFAULT_LIMITS)
        assert (batch.lost, batch.count, batch.events(), batch.ids()) == (lost, 0, [], b"")
        assert (batch.pubend, batch.start, batch.end, batch.channel) == (PUBEND, 5, 9, 2)
        moved = EventBatch.parse(batch.restamped(kind=Kind.DELIVERY, channel=8), DEFAULT_LIMITS)
        assert (moved.kind, moved.lost, moved.start, moved.end, moved.channel) == (
            Kind.DELIVERY,
            lost,
            5,
            9,
            8,
        )
    with pytest.raises(BugError, match="lost span"):
        batch.select(None, kind=Kind.DELIVERY, pubend=PUBEND, start=5, end=9, channel=1)
    assert Gap(pubend="00000007-00000003", start=5, end=9).end == 9


def test_concatenate_publish_frames() -> None:
    batches = [EventBatch.parse(published(count, channel=count), DEFAULT_LIMITS) for count in (3, 0, 1, 4)]
    whole = EventBatch.concatenate(batches)
    again = EventBatch.parse(whole.data, DEFAULT_LIMITS, expect=Kind.PUBLISH)
    assert (again.count, again.extents, again.channel) == (8, whole.extents, 4)
    assert whole.events() == [event for batch in batches for event in batch.events()]
    assert EventBatch.concatenate(batches[:1]) is batches[0]


def test_concatenate_a_stream() -> None:
    first, second = streamed(3, start=10, first=100), streamed(2, start=102, first=150)
    whole = EventBatch.concatenate([first, second])
    assert (whole.start, whole.end, whole.count) == (10, 151, 5)
    assert EventBatch.parse(whole.data, DEFAULT_LIMITS).events() == first.events() + second.events()


def test_only_what_adjoins_is_concatenated() -> None:
    first = streamed(3, start=10, first=100)
    gap = EventBatch.parse(
        empty_frame(kind=Kind.KNOWLEDGE, pubend=PUBEND, start=102, end=110, channel=1, lost=True),
        DEFAULT_LIMITS,
    )
    for others in ([], [first, streamed(1, start=103, first=150)], [first, gap]):
        with pytest.raises(BugError):
            EventBatch.concatenate(others)
    with pytest.raises(BugError):
        EventBatch.concatenate([EventBatch.parse(published(1), DEFAULT_LIMITS), first])


def test_extents_of_another_frame_are_noticed() -> None:
    batch, other = streamed(3), streamed(4)
    for extents in (other.extents, b"", b"123", bytes(4)):
        wrong = EventBatch(batch.data, batch.count, extents)
        with pytest.raises(BugError):
            wrong.select(np.array([0], np.uint32), kind=Kind.DELIVERY, pubend=1, start=0, end=999, channel=1)
        with pytest.raises(BugError):
            wrong.events()


# ---------------------------------------------------------------- what a publisher may not do


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({"": 1}, "1 to 255 bytes"),
        ({"n" * 256: 1}, "1 to 255 bytes"),
        ({1: 1}, "name is a text"),
        ({"\ud800": 1}, "not UTF-8"),
        ({"a": "\ud800"}, "not UTF-8"),
        ({"a": float("nan")}, "NaN"),
        ({"a": 1 << 63}, "64 bits"),
        ({"a": -(1 << 63) - 1}, "64 bits"),
        ({"a": None}, "not NoneType"),
        ({"a": b"x"}, "not bytes"),
        ({"a": [1]}, "not list"),
    ],
)
def test_bad_attributes(attributes: dict[str, int], why: str) -> None:
    builder = BatchBuilder()
    with pytest.raises(UsageError, match=why):
        builder.add(identity(1), "a", attributes, b"", DEFAULT_LIMITS)
    assert builder.count == 0


def test_extreme_attributes_travel() -> None:
    attributes = {
        "n" * 255: -(1 << 63),
        "max": (1 << 63) - 1,
        "inf": float("inf"),
        "zero": -0.0,
        "empty": "",
        "nul": "\0",
        "long": "é" * 20_000,
        "日本": False,
    }
    builder = BatchBuilder()
    builder.add(identity(1), "a", attributes, b"", DEFAULT_LIMITS)
    found = EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS).attributes(0)
    assert found == attributes
    assert list(found) == sorted(attributes, key=str.encode)
    assert str(found["zero"]) == "-0.0"


def test_many_attributes() -> None:
    attributes = {f"name{number}": number for number in range(500)}
    builder = BatchBuilder()
    builder.add(identity(1), "a", attributes, b"", limits(attributes=500))
    assert EventBatch.parse(builder.finish(channel=1), limits(attributes=500)).attributes(0) == attributes


@pytest.mark.parametrize(
    ("topic", "attributes", "payload", "changes"),
    [
        ("a" * 11, {}, b"", {"topic_bytes": 10}),
        ("a/b/c", {}, b"", {"topic_depth": 2}),
        ("a", {"a": 1, "b": 2}, b"", {"attributes": 1}),
        ("a", {"a": 1}, bytes(9), {"event_bytes": 20}),
        ("a", {}, bytes(10), {"batch_bytes": 106}),
        ("a", {}, b"", {"batch_events": 0}),
        ("a", {"a": "x" * 65_536}, b"", {}),
        ("a", {"a": "x" * 40_000, "b": "x" * 40_000}, b"", {}),
    ],
)
def test_too_large(
    topic: str, attributes: dict[str, str | int], payload: bytes, changes: dict[str, int]
) -> None:
    builder = BatchBuilder()
    with pytest.raises(TooLargeError):
        builder.add(identity(1), topic, attributes, payload, limits(**changes))
    assert (builder.count, builder.size) == (0, 48)


def test_a_full_builder_goes_on_after_finish() -> None:
    builder, two = BatchBuilder(), limits(batch_events=2)
    for number in range(2):
        builder.add(identity(number), "a", {}, b"", two)
    with pytest.raises(TooLargeError, match="no room"):
        builder.add(identity(2), "a", {}, b"", two)
    assert EventBatch.parse(builder.finish(channel=1), two).count == 2
    builder.add(identity(2), "a", {}, b"", two)


@pytest.mark.parametrize(
    ("message_id", "payload"), [(b"short", b""), (bytes(16), "text"), (bytes(16), bytearray(1))]
)
def test_wrong_types(message_id: bytes, payload: bytes) -> None:
    with pytest.raises(UsageError):
        BatchBuilder().add(message_id, "a", {}, payload, DEFAULT_LIMITS)


# ---------------------------------------------------------------- what a peer may not do


def row(topic: bytes = b"a", attributes: bytes = b"", count: int = 0, **fields: int) -> tuple[bytes, bytes]:
    """An event header and its heap, with whatever is wrong about them."""
    header = struct.pack(
        "<16sqQHHIHHI",
        bytes(16),
        fields.get("tick", 0),
        fields.get("number", topic_number(topic)),
        len(topic),
        len(attributes),
        fields.get("payload", 0),
        fields.get("flags", 0),
        count,
        fields.get("record", 0),
    )
    return header, topic + attributes


def framed(*rows: tuple[bytes, bytes], extra: bytes = b"", **fields: int) -> bytes:
    body = b"".join(header for header, _ in rows) + b"".join(heap for _, heap in rows) + extra
    return (
        struct.pack(
            "<IBBHIIQqqII",
            fields.get("length", 48 + len(body)),
            fields.get("kind", Kind.PUBLISH),
            fields.get("version", 1),
            fields.get("flags", 0),
            fields.get("count", len(rows)),
            0,
            0,
            fields.get("start", 0),
            fields.get("end", 0),
            1,
            fields.get("reserved", 0),
        )
        + body
    )


KNOWN = {"kind": Kind.KNOWLEDGE, "start": 10, "end": 20}
BROKEN = {
    Rule.HEADER_CUT: [b"", framed()[:47]],
    Rule.LENGTH: [framed(length=47), framed() + b"x", framed(row())[:-1]],
    Rule.KIND: [framed(kind=Kind.PING)],
    Rule.VERSION: [framed(version=0), framed(version=2)],
    Rule.FLAGS: [framed(flags=4), framed(flags=0x8002), framed(flags=2, **KNOWN)],
    Rule.RESERVED: [framed(reserved=1)],
    Rule.BATCH_BYTES: [framed(extra=bytes(2000))],
    Rule.BATCH_EVENTS: [framed(*[row()] * 11), framed(count=0xFFFF_FFFF)],
    Rule.LOST_EVENTS: [framed(row(tick=11), flags=1, **KNOWN)],
    Rule.PUBLISH_SPAN: [framed(flags=1), framed(flags=3), framed(start=1), framed(end=1)],
    Rule.SPAN: [framed(kind=Kind.DELIVERY, start=2, end=1)],
    Rule.ROWS_CUT: [framed(count=1), framed(row(), count=3)],
    Rule.ROW_RESERVED: [
        framed(row(flags=1)),
        framed(row(record=1)),
        framed(row(tick=1, record=1), kind=Kind.BEST_EFFORT),
    ],
    Rule.TICK: [
        framed(row(tick=1)),
        framed(row(tick=10), **KNOWN),
        framed(row(tick=21), **KNOWN),
        framed(row(tick=11), row(tick=11), **KNOWN),
        framed(row(tick=12), row(tick=11), **KNOWN),
    ],
    Rule.TOPIC_EMPTY: [framed(row(b""))],
    Rule.TOPIC_BYTES: [framed(row(b"a" * 101))],
    Rule.ATTRIBUTES: [framed(row(count=4))],
    Rule.EVENT_BYTES: [framed(row(payload=500)), framed(row(payload=0xFFFF_FFFF))],
    Rule.HEAP_CUT: [framed(row(payload=1)), framed(row(), row(payload=1))],
    Rule.TOPIC_UTF8: [
        framed(row(topic))
        for topic in (
            b"\xff",
            b"\x80",
            b"a\xc3",
            b"\xc0\xaf",
            b"\xe0\x80\xaf",
            b"\xed\xa0\x80",
            b"\xf0\x80\x80\xaf",
            b"\xf4\x90\x80\x80",
            b"\xf5\x80\x80\x80",
            b"\xe2\x82",
            b"\xf0\x9f\x98",
            b"12345678\xc3",
        )
    ],
    Rule.TOPIC_CHARACTER: [
        framed(row(topic)) for topic in (b"a/+", b"#", b"\0", b"a\n", b"\x7f", "\x85".encode())
    ],
    Rule.TOPIC_DEPTH: [framed(row(b"a/b/c/d/e"))],
    Rule.TOPIC_NUMBER: [framed(row(number=1)), framed(row(), row(b"b", number=topic_number(b"a")))],
    Rule.ATTRIBUTE_CUT: [
        framed(row(attributes=attributes, count=1))
        for attributes in (b"", b"\2a", b"\1a", b"\1a\1" + bytes(7), b"\1a\0\1", b"\1a\0\2\0x", b"\1a\3")
    ],
    Rule.ATTRIBUTE_NAME: [framed(row(attributes=b"\0\3\1", count=1))],
    Rule.ATTRIBUTE_UTF8: [
        framed(row(attributes=text, count=1)) for text in (b"\1\xff\3\1", b"\1a\0\1\0\xff")
    ],
    Rule.ATTRIBUTE_ORDER: [
        framed(row(attributes=b"\1b\3\1\1a\3\1", count=2)),
        framed(row(attributes=b"\1a\3\1\1a\3\1", count=2)),
        framed(row(attributes=b"\2aa\3\1\1a\3\1", count=2)),
    ],
    Rule.ATTRIBUTE_TYPE: [framed(row(attributes=b"\1a\4\1", count=1))],
    Rule.ATTRIBUTE_NAN: [framed(row(attributes=b"\1a\2" + struct.pack("<d", float("nan")), count=1))],
    Rule.ATTRIBUTE_BOOLEAN: [framed(row(attributes=b"\1a\3\2", count=1))],
    Rule.ATTRIBUTE_EXTRA: [framed(row(attributes=b"\1a\3\1x", count=1)), framed(row(attributes=b"x"))],
    Rule.HEAP_EXTRA: [framed(extra=b"x"), framed(row(), extra=b"x")],
}
SMALL = limits(
    batch_bytes=1528, batch_events=10, event_bytes=400, attributes=3, topic_bytes=100, topic_depth=4
)


@pytest.mark.parametrize("rule", sorted(set(Rule) - {Rule.NONE}), ids=lambda rule: rule.name.lower())
def test_every_rule(rule: Rule) -> None:
    for frame in BROKEN[rule]:
        with pytest.raises(PeerError) as caught:
            EventBatch.parse(frame, SMALL)
        assert str(caught.value).endswith(RULE_TEXT[rule])


def test_the_row_is_named() -> None:
    with pytest.raises(PeerError, match=r"^event 2 of a batch frame: the topic is empty$"):
        EventBatch.parse(framed(row(), row(b"b"), row(b"")), SMALL)


def test_what_the_limits_just_allow() -> None:
    EventBatch.parse(framed(*[row(b"x" * 100)] * 10), SMALL)
    EventBatch.parse(
        framed(row(b"a/b/c/\xf4\x8f\xbf\xbf\xed\x9f\xbf\xc2\xa0", payload=385), extra=bytes(385)), SMALL
    )
    EventBatch.parse(framed(row(attributes=b"\1a\3\1\2aa\3\0\1b\3\1", count=3)), SMALL)
    EventBatch.parse(framed(row(tick=11), row(tick=20), **KNOWN), SMALL)


def test_a_kind_out_of_place() -> None:
    with pytest.raises(PeerError, match="PUBLISH frame where DELIVERY is expected"):
        EventBatch.parse(published(1), DEFAULT_LIMITS, expect=Kind.DELIVERY)


@pytest.mark.parametrize("of", [kernel, reference])
def test_a_checksum_covers_every_byte_of_a_frame(of: Any) -> None:
    """Whichever bit changes on the way, also one of the header (CRC-32C, as google-crc32c has it)."""
    frame = of.sealed(bytes(bytearray(streamed(3).data)))
    given = int.from_bytes(frame[12:16], "little")
    assert given == google_crc32c.value(frame[:12] + bytes(4) + frame[16:])
    assert of.intact(frame)
    assert of.intact(streamed(3).data), "none is given"
    for at in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[at // 8] ^= 1 << at % 8
        assert not of.intact(bytes(damaged)), f"bit {at}"
    with pytest.raises(PeerError, match="checksum"):
        EventBatch.parse(frame[:-1] + bytes((frame[-1] ^ 1,)), DEFAULT_LIMITS)
    with pytest.raises(BugError):
        of.intact(frame[:47])


def test_frames_that_are_sent_have_a_checksum_of_their_own() -> None:
    batch = EventBatch.parse(published(3), DEFAULT_LIMITS)
    kept = batch.with_ticks(5, kind=Kind.KNOWLEDGE, pubend=1, start=0, channel=1)
    assert kept.data[12:16] == bytes(4)
    sent = [
        batch.data,
        kept.select(None, kind=Kind.DELIVERY, pubend=1, start=0, end=999, channel=1),
        kept.select(np.array([0, 2], np.uint32), kind=Kind.DELIVERY, pubend=1, start=0, end=999, channel=1),
        kept.restamped(kind=Kind.DELIVERY, channel=1),
        empty_frame(kind=Kind.DELIVERY, pubend=1, start=0, end=9, channel=1, lost=True),
    ]
    for data in sent:
        assert data[12:16] != bytes(4)
        assert reference.intact(data)
    assert len({data[12:16] for data in sent}) == len(sent)


# ---------------------------------------------------------------- the choice of the kernel


@pytest.mark.parametrize("forced", ["", "reference"])
def test_the_environment_forces_the_reference(forced: str) -> None:
    program = (
        "from postroad import kernel; from postroad.kernel import reference; "
        "assert (kernel.gather is reference.gather) == (not kernel.wanted('frames')); "
        "assert not (kernel.FORCED_REFERENCE and (kernel.COMPILED or kernel.wanted('frames')))"
    )
    environment = os.environ | {"POSTROAD_KERNEL": forced}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


def test_a_publish_frame_may_ask_to_be_durable() -> None:
    """D1: the flag belongs to the frame and is kept when it is sent again on another connection."""
    builder = BatchBuilder()
    builder.add(bytes(16), "t", {}, b"x", DEFAULT_LIMITS)
    batch = EventBatch.parse(builder.finish(channel=1, durable=True), DEFAULT_LIMITS)
    assert batch.durable
    assert EventBatch.parse(batch.restamped(kind=Kind.PUBLISH, channel=2), DEFAULT_LIMITS).durable
    stamped = batch.with_ticks(5, kind=Kind.KNOWLEDGE, pubend=1, start=4, channel=0)
    assert not EventBatch.parse(stamped.data, DEFAULT_LIMITS).durable


def test_the_garbage_collector_does_not_walk_what_streams_hold() -> None:
    """A hundred thousand single events held in memory must not stop a broker for a full collection."""
    batch = EventBatch.parse(published(3), DEFAULT_LIMITS)
    stamped = batch.with_ticks(5, kind=Kind.KNOWLEDGE, pubend=1, start=4, channel=0)
    assert [stamped.tick(row) for row in range(3)] == stamped.headers["tick"].tolist() == [5, 6, 7]
    assert not gc.is_tracked(stamped)
    assert not gc.is_tracked(Segment(4, 7, NOTHING, stamped))
