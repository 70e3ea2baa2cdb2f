"""P6, T8: unions of part-full filters, without Spark in between."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.spark.lake.compact import MAX_SPAN_MS, join
from postroad.tracking.bloom import BloomFilter
from postroad.tracking.keys import ROUTING, HistoryKey
from postroad.tracking.moments import Spans
from postroad.tracking.record import FilterMeta

LIMIT = 0.001
KEY = HistoryKey(ROUTING, 1, 2)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_unions_claim_all_that_their_parts_did_and_stay_within_bounds(seed: int) -> None:
    """P6."""
    random = Random(seed)
    parts: list[tuple[FilterMeta, BloomFilter]] = []
    added: list[tuple[int, bytes]] = []  # time, key
    time_ms = 1000
    for sequence in range(1, 30):
        one = BloomFilter(1600, 100, 10)
        time_ms += random.choice((10, 10, 400_000, 4_000_000))
        lo_ms = time_ms
        singles = ()
        for _ in range(random.choice((1, 10, 60))):
            key = random.randbytes(16)
            one.add(key)
            time_ms += 1
            added.append((time_ms, key))
        if random.random() < 0.3:
            key = random.randbytes(16)
            one.add(key)
            added.append((5, key))
            singles = ((5, 5),)
        meta = FilterMeta(
            key=KEY,
            sequence=sequence,
            m=1600,
            n=100,
            k=10,
            count=one.count,
            lo_ms=lo_ms,
            hi_ms=time_ms,
            singles=singles,
        )
        parts.append((meta, one))
    random.shuffle(parts)
    done = join(parts, LIMIT)
    assert len(done) < len(parts)
    assert sum(one.count for _, one in done) == len(added)
    for meta, one in done:
        assert one.count == meta.count <= 100
        assert one.fpp <= LIMIT or meta.sequence in [
            part.sequence for part, held in parts if held.fpp > LIMIT
        ]
        assert meta.hi_ms - meta.lo_ms <= MAX_SPAN_MS
    for moment, key in added:
        assert any(meta.matches(moment) and one.contains(key) == b"\x01" for meta, one in done)
    assert [meta.sequence for meta, _ in done] == sorted(meta.sequence for meta, _ in done)


def test_only_what_fits_is_joined() -> None:
    def part(sequence: int, keys: int, lo_ms: int) -> tuple[FilterMeta, BloomFilter]:
        one = BloomFilter(1600, 100, 10)
        one.add(Random(sequence).randbytes(16 * keys))
        meta = FilterMeta(
            key=KEY,
            sequence=sequence,
            m=1600,
            n=100,
            k=10,
            count=keys,
            lo_ms=lo_ms,
            hi_ms=lo_ms,
        )
        return meta, one

    together = join([part(1, 40, 1), part(2, 40, 2), part(3, 40, 3), part(4, 60, 3 + MAX_SPAN_MS)], LIMIT)
    assert [(meta.sequence, meta.count) for meta, _ in together] == [(2, 80), (4, 100)]
    strict = join([part(1, 40, 1), part(2, 40, 2)], 1e-9)
    assert [meta.count for meta, _ in strict] == [40, 40]
    assert join([], LIMIT) == []


def test_a_union_matches_no_time_between_those_of_its_parts() -> None:
    """T9: filters of messages out of their time have hundreds of spans, which a union must not widen."""

    def part(sequence: int, singles: Spans, lo_ms: int = 1 << 60, hi_ms: int = -1) -> FilterMeta:
        return FilterMeta(
            key=KEY,
            sequence=sequence,
            m=1600,
            n=100,
            k=10,
            count=10,
            lo_ms=lo_ms,
            hi_ms=hi_ms,
            singles=singles,
        )

    day_ms = 86_400_000
    wild = [tuple((at * day_ms, at * day_ms) for at in range(first, 400, 2)) for first in (1, 2)]
    held = [
        part(1, (), 1000, 1010),
        part(2, wild[0]),
        part(3, (), 1011, 1020),
        part(4, wild[1]),
        part(5, ((5, 5),)),
    ]
    done = join([(meta, BloomFilter(1600, 100, 10, count=10)) for meta in held], LIMIT)
    assert sorted((meta.sequence, meta.count) for meta, _ in done) == [(2, 10), (3, 20), (5, 20)]
    for time_ms in (1005, 1015, 5, day_ms, 2 * day_ms, 2 * day_ms + 1, 1021):
        assert any(meta.matches(time_ms) for meta, _ in done) == any(meta.matches(time_ms) for meta in held)
