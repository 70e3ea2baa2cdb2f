"""Filters, their arithmetic, and their stored form (T2, T3)."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.errors import StorageError, UsageError
from postroad.ids import IdSource
from postroad.tracking.bloom import (
    BloomFilter,
    bits_per_key,
    capacity_for,
    expected_rate,
    false_positive_rate,
    fill_of,
    filter_for,
    filter_rate,
)
from postroad.tracking.keys import DELIVERY, HistoryKey, neighbour_tag, set_tag, subscriber_tag, tagged
from postroad.tracking.moments import Times, holds, joined, runs
from postroad.tracking.record import FilterMeta, decode_meta, decode_record, encode_record, filter_of


def some_ids(count: int, *, publisher: int = 42, start_ms: int = 1_700_000_000_000) -> bytes:
    source = IdSource(publisher, 7)
    return b"".join(source.next(start_ms + i // 5) for i in range(count))


def test_the_papers_example() -> None:
    """Section 5.1: five nines with two filters need 5e-6 each; 26 bits a key and 16 hashes have that."""
    assert filter_rate(0.00001, 2) == pytest.approx(5e-6, rel=1e-5)
    assert false_positive_rate(26 * 1000, 1000, 16) < 5e-6
    assert expected_rate(filter_rate(0.01, 3), 3) == pytest.approx(0.01)


@given(n=st.integers(1, 5000), exponent=st.floats(0.3, 8))
@settings(max_examples=100)
def test_filter_for_is_small_enough_and_large_enough(n: int, exponent: float) -> None:
    fpp = 10**-exponent
    shape = filter_for(n, fpp)
    assert shape.fpp <= fpp * (1 + 1e-9)
    assert shape.m <= max(8, 1.44 * 1.06 * n * math.log2(1 / fpp) + 3 * n + 64)
    back = capacity_for(shape.m, fpp)
    assert back.n >= n
    assert false_positive_rate(back.m, back.n, back.k) <= fpp * (1 + 1e-9)


def test_bits_per_key_is_within_5_percent_of_the_optimum() -> None:
    """No more bits than 1.44 log2(1/fpp) plus 5%."""
    for fpp in (1e-2, 5e-3, 5e-4, 1e-4, 5e-6, 1e-9):
        ratio, k = bits_per_key(fpp)
        assert 1.44 * math.log2(1 / fpp) <= ratio * 1.01 <= 1.44 * math.log2(1 / fpp) * 1.05
        assert abs(k - math.log2(1 / fpp)) <= 1


def test_shapes_that_cannot_be() -> None:
    for m, n, k in ((7, 1, 1), (8, 0, 1), (8, 1, 0), (8, 1, 65), ((1 << 32) + 1, 1, 1)):
        with pytest.raises(UsageError):
            BloomFilter(m, n, k)
    with pytest.raises(UsageError):
        bits_per_key(0)


def test_union_is_the_filter_of_both() -> None:
    """T8: Section 4.3: the union of part-full filters is the filter that had been."""
    left, right, both = (BloomFilter(8192, 600, 7) for _ in range(3))
    one, two = some_ids(200), some_ids(300, publisher=5)
    left.add(one)
    right.add(two)
    both.add(one + two)
    merged = left.union(right)
    assert (merged.bits, merged.count, merged.n) == (both.bits, 500, 600)
    assert merged.contains(one + two) == b"\1" * 500
    with pytest.raises(UsageError):
        left.union(BloomFilter(8192, 600, 6))


def test_count_room_and_fill() -> None:
    one = BloomFilter(1000, 10, 3)
    assert (one.count, one.room, one.full, one.fill, one.fpp) == (0, 10, False, 0.0, 0.0)
    one.add(some_ids(10))
    assert (one.count, one.room, one.full) == (10, 0, True)
    assert 0.02 < one.fill <= 0.03


@given(st.binary(min_size=1, max_size=40))
@settings(max_examples=100)
def test_fill_counts_the_bits(bits: bytes) -> None:
    assert fill_of(bits, 8 * len(bits)) == sum(byte.bit_count() for byte in bits) / (8 * len(bits))


def test_bits_that_were_given_stay_as_they_are() -> None:
    bits = bytes(125)
    one = BloomFilter(1000, 10, 3, bits=bits)
    assert one.bits is bits
    one.add(some_ids(10))
    assert one.contains(some_ids(10)) == b"\1" * 10
    assert bits == bytes(125)


def test_tags_are_part_of_the_format() -> None:
    """Stored for ever, and read by the pipeline: these must not change."""
    assert subscriber_tag("billing").hex() == "62a7e0811b0473cdb0acf1f2d3e072ad"
    assert neighbour_tag(3).hex() == "e8a507c5b09a1d3dd21ce4104bd6106e"
    assert set_tag((3,)) == neighbour_tag(3)
    assert set_tag((3, 5)) == set_tag((5, 3)) != set_tag((3,))
    ids, tags = some_ids(3), subscriber_tag("a") + subscriber_tag("b")
    keys = tagged(ids, tags)
    expected = [
        bytes(x ^ y for x, y in zip(ids[i : i + 16], tags[t : t + 16], strict=True))
        for t in (0, 16)
        for i in (0, 16, 32)
    ]
    assert [keys[at : at + 16] for at in range(0, len(keys), 16)] == expected
    assert tagged(ids[:16], tags[:16]) == expected[0]


@given(st.lists(st.integers(0, (1 << 48) - 1), min_size=1, max_size=30))
@settings(max_examples=100)
def test_times_of_ids(times: list[int]) -> None:
    ids = b"".join(bytes(8) + (time << 16 | 3).to_bytes(8, "big") for time in times)
    found = Times(ids)
    assert (found.lo_ms, found.hi_ms, found.all_ms().tolist()) == (min(times), max(times), times)


@given(st.lists(st.integers(0, 2000), max_size=400), st.integers(1, 20))
@settings(max_examples=100)
def test_singles_never_forget(times: list[int], limit: int) -> None:
    """T9: bounded by joining, which only ever adds times."""
    spans = runs(np.array(times, np.int64))
    assert {t for lo, hi in spans for t in range(lo, hi + 1)} == set(times)
    short = joined(spans, limit)
    assert len(short) <= limit
    assert all(holds(short, time) for time in times)
    assert all(one[1] + 1 < two[0] for one, two in pairwise(short))


def sample(compress: bool = False, count: int = 20) -> tuple[FilterMeta, bytes, bytes]:
    one = BloomFilter(16_000, 1000, 11)
    one.add(some_ids(count))
    meta = FilterMeta(
        key=HistoryKey(DELIVERY, 7, 0, "bücher"),
        sequence=12,
        m=one.m,
        n=one.n,
        k=one.k,
        count=one.count,
        lo_ms=5,
        hi_ms=9,
        singles=((1, 2), (100, 100)),
        opened_us=3,
        stored_us=4,
        replaces=11,
        final=False,
    )
    return meta, one.bits, encode_record(meta, one.bits, compress=compress, fill=one.fill)


@pytest.mark.parametrize("compress", [False, True])
def test_record_round_trip(compress: bool) -> None:
    meta, bits, record = sample(compress)
    assert decode_meta(record) == meta
    assert decode_record(record) == (meta, bits)
    assert (len(record) < len(bits) / 2) == compress
    assert filter_of(meta, bits).contains(some_ids(20)) == b"\1" * 20
    assert [meta.matches(t) for t in (0, 1, 2, 3, 5, 9, 10, 100, 101)] == [0, 1, 1, 0, 1, 1, 0, 1, 0]


def test_a_full_filter_is_not_compressed() -> None:
    _, bits, record = sample(compress=True, count=1000)
    assert len(record) > len(bits)


def test_every_damage_is_seen() -> None:
    """Any byte changed, anything cut off or added."""
    _, _, record = sample(compress=True)
    for at in range(len(record)):
        damaged = record[:at] + bytes([record[at] ^ 0x41]) + record[at + 1 :]
        with pytest.raises(StorageError):
            decode_record(damaged)
    for end in range(len(record)):
        with pytest.raises(StorageError):
            decode_record(record[:end])
    with pytest.raises(StorageError):
        decode_record(record + b"x")
