"""What repair says: every message comes back as it was, and no bytes do harm (spec B3 to B9)."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroad.client.repair.messages import (
    AGE_STEPS,
    MAX_ENTRIES,
    MAX_SEQUENCE,
    MAX_WANTED,
    Ask,
    Gone,
    Message,
    Repair,
    Request,
    Summary,
    decode,
    decode_record,
    encode,
    encode_entries,
    encode_record,
)
from postroad.client.repair.rows import row_bytes, with_record, without_records
from postroad.errors import PeerError
from postroad.events import EventBatch
from postroad.events.batch import MAX_ROWS_BYTES, best_effort_frame, encode_row
from postroad.selectors.tags import event_bits
from postroad.wire.frames import DEFAULT_LIMITS

FILTERS = st.one_of(
    st.just(0),
    st.just((1 << 256) - 1),
    st.sets(st.integers(0, 255)).map(lambda ones: sum(1 << at for at in ones)),
)
ENTRIES = st.lists(FILTERS, max_size=20).map(tuple)
NUMBERS = st.integers(0, MAX_SEQUENCE // 4)
NAMES = st.binary(min_size=8, max_size=8)
INCREASING = st.lists(st.integers(1, 1 << 40), max_size=MAX_WANTED, unique=True).map(
    lambda all: tuple(sorted(all))
)


@st.composite
def summaries(draw: st.DrawFn) -> Summary:
    """With ages so near each other that a step is a millisecond."""
    first, entries = draw(st.integers(1, 1 << 40)), draw(ENTRIES)
    steps = draw(st.lists(st.integers(0, 3), min_size=len(entries), max_size=len(entries)))
    age_ms = draw(st.integers(60, 1 << 40))
    ages = tuple(age_ms - sum(steps[1 : at + 1]) for at in range(max(1, len(entries))))
    return Summary(first=first, entries=entries, ages_ms=ages)


AGES = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=MAX_ENTRIES).map(
    lambda ages: tuple(sorted(ages, reverse=True))
)


@given(ages_ms=AGES)
def test_ages_are_rounded_down_to_steps_and_never_up(ages_ms: tuple[int, ...]) -> None:
    """B4: What was published after a subscription began never seems older than it."""
    entries = (5,) * (len(ages_ms) if len(ages_ms) > 1 else 0)
    encoded = encode(Summary(first=1, entries=entries, ages_ms=ages_ms))
    found = decode(encoded)
    assert isinstance(found, Summary)
    assert found.ages_ms[0] == ages_ms[0]
    step_ms = (ages_ms[0] - ages_ms[-1]) // AGE_STEPS + 1
    assert all(0 <= age - back <= step_ms for age, back in zip(ages_ms, found.ages_ms, strict=True))
    without = encode(Summary(first=1, entries=entries, ages_ms=(0,) * len(ages_ms)))
    assert len(encoded) - len(without) <= AGE_STEPS // 8 + 1 + 12, "a bit for each, and one for each step"


RANGES = st.lists(st.tuples(NUMBERS, st.integers(0, 99)), max_size=8).map(
    lambda all: tuple((first, first + more) for first, more in all)
)
MESSAGES = st.one_of(
    summaries(),
    st.builds(Request, receiver=NAMES, wanted=INCREASING, ranges=RANGES),
    st.builds(
        Ask, receiver=NAMES, publisher=NAMES, sequence=NUMBERS, bits=FILTERS, sent_us=NUMBERS, wait_us=NUMBERS
    ),
    st.builds(Repair, publisher=NAMES, sequence=NUMBERS, row=st.binary(max_size=60)),
    st.builds(Gone, publisher=NAMES, sequences=INCREASING),
)


@given(message=MESSAGES)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message


@given(message=MESSAGES, at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_bytes_are_another_message_or_the_peers_error(
    message: Message, at: int, byte: int, cut: bool
) -> None:
    data = encode(message)
    at %= len(data)
    damaged = data[:at] if cut else data[:at] + bytes((byte,)) + data[at + 1 :]
    with contextlib.suppress(PeerError):
        decode(damaged)  # whatever it is, it is bounded by what was said


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_the_peers_error(data: bytes) -> None:
    found: Message | None = None
    with contextlib.suppress(PeerError):
        found = decode(data)
    assert not isinstance(found, Summary) or len(found.entries) <= MAX_ENTRIES


def test_similar_events_take_fewer_bytes_than_their_filters() -> None:
    """Paper 3.5: temporal locality and compressed filters."""
    kinds = [event_bits("orders/eu", {"kind": "x", "host": "h", "n": number % 4}) for number in range(32)]
    different = [event_bits("orders/eu", {"kind": "x", "host": "h", "n": number}) for number in range(32)]
    assert len(encode_entries(tuple(kinds))) < 32 * 3
    assert len(encode_entries(tuple(different))) < 32 * 8
    with pytest.raises(PeerError, match="parts, the most is 64"):
        decode(bytes((5,)) + bytes(8) + bytes((65,)))


SIMILAR = st.lists(
    st.builds(
        lambda kind, n: event_bits("a/b", {"kind": kind, "n": n}), st.sampled_from("xyz"), st.integers(0, 9)
    ),
    max_size=40,
).map(tuple)


@given(entries=st.one_of(ENTRIES, SIMILAR), room=st.integers(0, 1_000))
def test_merging_and_compression_lose_no_entry(entries: tuple[int, ...], room: int) -> None:
    """Spec B3, paper 3.5: each entry comes back with its ones and no others. What does not fit is the end of
    the record, whole entries."""
    whole = encode_record(entries, 1 << 16)
    assert decode_record(whole) == entries if entries else whole == b""
    cut = encode_record(entries, room)
    assert len(cut) <= room
    assert not cut or decode_record(cut) == entries[: len(decode_record(cut))]


@given(payloads=st.lists(st.binary(max_size=50), min_size=1, max_size=5), record=SIMILAR)
def test_a_row_comes_out_as_it_was_before_its_record(payloads: list[bytes], record: tuple[int, ...]) -> None:
    rows = [
        encode_row(bytes((at,)) * 16, "a/b", {"n": at}, payload, DEFAULT_LIMITS, tick=at)
        for at, payload in enumerate(payloads, 1)
    ]
    sent = [with_record(row, record if at % 2 else (), 400) for at, row in enumerate(rows)]
    batch = EventBatch.parse(best_effort_frame(sent, channel=9), DEFAULT_LIMITS)
    bare, records = without_records(batch, DEFAULT_LIMITS)
    assert [row_bytes(bare, at) for at in range(bare.count)] == [b"".join(row) for row in rows]
    assert bare.channel == 9
    for at, found in enumerate(records):
        assert found == (record[: len(found)] if found and at % 2 else ())


def test_a_record_that_cannot_be_read_costs_its_event_nothing() -> None:
    header, heap = encode_row(bytes(16), "a/b", {}, b"payload", DEFAULT_LIMITS, tick=1)
    lying = header[:44] + (3).to_bytes(4, "little")
    batch = EventBatch.parse(best_effort_frame([(lying, heap)], channel=1), DEFAULT_LIMITS)
    bare, records = without_records(batch, DEFAULT_LIMITS)
    assert (records, bare.payload(0)) == ([None], b"payl")


def test_records_of_ten_fit_beside_the_largest_event() -> None:
    """And similar events take a fraction of the 32 bytes that the paper's entries have."""
    recent = tuple(
        event_bits("site/7/temperature", {"sensor": "s12", "unit": "C", "n": n}) for n in range(10)
    )
    assert len(encode_record(recent, 1 << 16)) < 60
    assert len(decode_record(encode_record(recent, MAX_ROWS_BYTES - 48 - 960))) == 10
    assert len(encode_record(recent[:1] * 10, 1 << 16)) < 25
