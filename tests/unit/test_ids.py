"""Message ids (spec T1) and publishing ends."""

from __future__ import annotations

import pytest

from postroad.errors import UsageError
from postroad.ids import (
    IdSource,
    MessageId,
    is_volatile,
    parse_pubend,
    pubend_broker,
    pubend_id,
    pubend_text,
    volatile_pubend,
)

SAMPLE = MessageId(0x2A, 7, 0x0193C1D2E3F4, 1)


def test_layout() -> None:
    """T1: exactly 16 bytes: publisher u32, broker u32, time 48 bits in milliseconds, counter u16."""
    assert bytes(SAMPLE) == bytes.fromhex("0000002a 00000007 0193c1d2e3f4 0001")
    assert MessageId.from_bytes(bytes(SAMPLE)) == SAMPLE


def test_text() -> None:
    """T1: printable and parseable as text."""
    assert str(SAMPLE) == "0000002a-00000007-0193c1d2e3f4-0001"
    assert MessageId.parse(str(SAMPLE)) == SAMPLE
    assert MessageId.parse(f"  {SAMPLE}\n".upper()) == SAMPLE


@pytest.mark.parametrize(
    "text", ["", "2a-7-1-1", "0000002a-00000007-0193c1d2e3f4-000g", f"{SAMPLE}-0", f"{SAMPLE}0"]
)
def test_bad_text(text: str) -> None:
    with pytest.raises(UsageError, match="is not a message id"):
        MessageId.parse(text)


@pytest.mark.parametrize("size", [0, 15, 17])
def test_bad_bytes(size: int) -> None:
    with pytest.raises(UsageError, match="16 bytes"):
        MessageId.from_bytes(bytes(size))


@pytest.mark.parametrize(
    "fields", [(1 << 32, 0, 0, 0), (0, -1, 0, 0), (0, 0, 1 << 48, 0), (0, 0, 0, 1 << 16)]
)
def test_fields_out_of_range(fields: tuple[int, int, int, int]) -> None:
    with pytest.raises(UsageError, match="out of range"):
        MessageId(*fields)


def test_largest() -> None:
    largest = MessageId((1 << 32) - 1, (1 << 32) - 1, (1 << 48) - 1, (1 << 16) - 1)
    assert bytes(largest) == b"\xff" * 16
    assert MessageId.parse(str(largest)) == largest


def test_ids_are_values() -> None:
    assert hash(SAMPLE) == hash(MessageId.parse(str(SAMPLE)))
    with pytest.raises(AttributeError):
        SAMPLE.counter = 2  # type: ignore[misc]


def test_order_is_the_same_for_objects_bytes_and_text() -> None:
    ids = [
        MessageId(p, b, t, c)
        for p in (0, 1, 256)
        for b in (0, 300)
        for t in (0, 255, 1 << 40)
        for c in (0, 256)
    ]
    ids = sorted(ids, reverse=True)
    assert sorted(ids) == sorted(ids, key=bytes) == sorted(ids, key=str)


def test_source_is_what_message_id_says() -> None:
    assert IdSource(42, 7).next(1000) == bytes(MessageId(42, 7, 1000, 0))


def test_source_counts_within_a_millisecond() -> None:
    source = IdSource(42, 7)
    ids = [MessageId.from_bytes(source.next(now)) for now in (5, 5, 5, 6)]
    assert [(each.time_ms, each.counter) for each in ids] == [(5, 0), (5, 1), (5, 2), (6, 0)]


def test_source_overflows_into_the_next_millisecond() -> None:
    """T1: the counter disambiguates within a millisecond, and its 65,536 values may not be enough."""
    source = IdSource(1, 2)
    ids = [source.next(9) for _ in range(65_538)]
    assert len(set(ids)) == len(ids)
    assert ids == sorted(ids)
    last = MessageId.from_bytes(ids[-1])
    assert (last.time_ms, last.counter) == (10, 1)
    caught_up = MessageId.from_bytes(source.next(11))
    assert (caught_up.time_ms, caught_up.counter) == (11, 0)


def test_source_never_goes_back_with_the_clock() -> None:
    """T1."""
    source = IdSource(1, 2)
    ids = [source.next(now) for now in (100, 40, 40, 99, 100, 101)]
    assert ids == sorted(set(ids))
    assert MessageId.from_bytes(ids[3]).time_ms == 100


@pytest.mark.parametrize(("publisher", "broker"), [(1 << 32, 0), (0, 1 << 32), (-1, 0)])
def test_source_of_nobody(publisher: int, broker: int) -> None:
    with pytest.raises(UsageError, match="out of range"):
        IdSource(publisher, broker)


def test_pubends() -> None:
    durable, plain = pubend_id(7, 3), volatile_pubend(7, 5)
    assert (pubend_broker(durable), pubend_broker(plain)) == (7, 7)
    assert (is_volatile(durable), is_volatile(plain)) == (False, True)
    assert pubend_text(durable) == "00000007-00000003"
    assert parse_pubend(pubend_text(plain)) == plain
    with pytest.raises(UsageError, match="is not a pubend"):
        parse_pubend("7-3")


def test_each_boot_opens_another_plain_pubend() -> None:
    assert len({volatile_pubend(7, boot) for boot in range(10)}) == 10
