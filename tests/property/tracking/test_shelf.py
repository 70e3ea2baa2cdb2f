"""T3: the index of stored filters finds exactly M(H, t), whatever the ranges, replacements and retention."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.tracking.keys import PUBLISH, ROUTING, HistoryKey
from postroad.tracking.moments import joined
from postroad.tracking.record import FilterMeta
from postroad.tracking.shelf import Shelf

KEYS = (HistoryKey(PUBLISH), HistoryKey(ROUTING, 1, 2))
BUCKET_MS = 1 << 20

times = st.one_of(
    st.integers(0, 40 * BUCKET_MS),
    st.builds(lambda bucket, off: max(0, bucket * BUCKET_MS + off), st.integers(0, 40), st.integers(-2, 2)),
)
spans = st.tuples(times, st.one_of(st.integers(0, 3), st.integers(0, 30 * BUCKET_MS))).map(
    lambda one: (one[0], one[0] + one[1])
)
filters = st.tuples(
    st.sampled_from(KEYS),
    st.one_of(st.none(), spans),
    st.lists(spans, max_size=20),
    st.booleans(),  # whether it replaces the one before
)


@given(st.lists(filters, max_size=12), st.lists(times, min_size=1, max_size=20), st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_the_index_finds_what_a_scan_finds(
    made: list[tuple[HistoryKey, tuple[int, int] | None, list[tuple[int, int]], bool]],
    asked: list[int],
    kept: int,
) -> None:
    """T3."""
    shelf = Shelf(cache_bytes=1 << 20)
    held: dict[int, FilterMeta] = {}
    for sequence, (key, span, singles, replaces) in enumerate(made, 1):
        lo_ms, hi_ms = span or (1 << 60, -1)
        meta = FilterMeta(
            key=key,
            sequence=sequence,
            m=8,
            n=1,
            k=1,
            count=1,
            lo_ms=lo_ms,
            hi_ms=hi_ms,
            singles=tuple(joined(singles)),
            stored_us=sequence,
            replaces=sequence - 1 if replaces else None,
        )
        if replaces:
            held.pop(sequence - 1, None)
        held[sequence] = meta
        shelf.put(meta, b"x", 10)
        shelf.check()
    gone, _ = shelf.expire(len(made) + 1, keep_us=kept, keep_bytes=1 << 30, before=1 << 62)
    for sequence in gone:
        del held[sequence]
    shelf.check()
    again = Shelf(held.values())
    again.check()
    for time_ms in asked:
        for key in KEYS:
            expected = [meta for meta in held.values() if meta.key == key and meta.matches(time_ms)]
            for one in (shelf, again):
                found = one.matching(key, time_ms)
                assert sorted(found, key=lambda meta: meta.sequence) == expected
    assert sorted(shelf.keys(PUBLISH) + shelf.keys(ROUTING)) == sorted({meta.key for meta in held.values()})
