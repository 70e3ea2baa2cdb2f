"""What repair says: every message comes back as it was, and no bytes do harm (spec B3 to B9)."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroad.client.repair.messages import (
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
    encode,
    encode_entries,
)
from postroad.errors import PeerError
from postroad.selectors.tags import event_bits

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
    first, entries = draw(st.integers(1, 1 << 40)), draw(ENTRIES)
    fresh = first + draw(st.integers(0, len(entries)))
    return Summary(first=first, fresh=fresh, since_ms=draw(NUMBERS), entries=entries)


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
