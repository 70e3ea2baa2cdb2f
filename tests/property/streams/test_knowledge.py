"""Knowledge streams and spans against twins that hold every tick apart (spec D2)."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.events.batch import BatchBuilder, EventBatch
from postroad.ids import IdSource
from postroad.streams import knowledge
from postroad.streams.knowledge import EVERYTHING, Coverage, KnowledgeStream, Segment
from postroad.streams.plain_pubend import PlainPubend
from postroad.streams.spans import Span, intersect, subtract, union
from postroad.wire.frames import DEFAULT_LIMITS, Kind

LAST = 40
SPAN = st.tuples(st.integers(0, LAST), st.integers(0, LAST)).map(lambda pair: (min(pair), max(pair)))
COVERAGE = st.dictionaries(st.sampled_from([1, 2]), st.integers(1, 3)).map(Coverage) | st.just(EVERYTHING)
NEED = st.dictionaries(st.sampled_from([1, 2]), st.integers(1, 3))


def ticks(spans: list[Span]) -> set[int]:
    return {tick for start, end in spans for tick in range(start + 1, end + 1)}


@given(st.lists(SPAN), st.lists(SPAN), SPAN)
def test_spans_are_sets_of_ticks(some: list[Span], others: list[Span], window: Span) -> None:
    left, right = union(some), union(others)
    assert ticks(left) == ticks(some)
    assert all(a[1] < b[0] for a, b in pairwise(left))
    assert ticks(subtract(left, right)) == ticks(some) - ticks(others)
    assert ticks(intersect(left, *window)) == ticks(some) & ticks([window])


def batch_at(where: list[int]) -> EventBatch | None:
    """Events at these ticks, each with its tick as payload."""
    if not where:
        return None
    source = IdSource(1, 1)
    parts = []
    for tick in where:
        builder = BatchBuilder()
        builder.add(source.next(1), "t", {}, str(tick).encode(), DEFAULT_LIMITS)
        one = EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)
        parts.append(one.with_ticks(tick, kind=Kind.KNOWLEDGE, pubend=7, start=tick - 1, channel=0))
    whole = parts[0]
    for part in parts[1:]:
        bridge = EventBatch(
            part.select(None, kind=Kind.KNOWLEDGE, pubend=7, start=whole.end, end=part.end, channel=0),
            part.count,
            part.extents,
        )
        whole = EventBatch.concatenate([whole, bridge])
    return whole


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    start, end = draw(SPAN)
    if draw(st.integers(0, 5)) == 0:
        return Segment(start, end, Coverage({}), lost=True)
    # An event is at every fifth tick; whether a segment shows it depends on its filter only.
    coverage = draw(COVERAGE)
    shown = [tick for tick in range(start + 1, end + 1) if tick % 5 == 0 and visible(tick, coverage)]
    return Segment(start, end, coverage, batch_at(shown))


def visible(tick: int, coverage: Coverage) -> bool:
    """Owner 1 wants ticks that 10 divides from version 1 on; owner 2 all from version 2 on."""
    versions = coverage.versions
    return coverage.everything or (tick % 10 == 0 and versions.get(1, 0) >= 1) or versions.get(2, 0) >= 2


class Twin:
    """Per tick: its coverage, whether it is an event, whether its pubend forgot it since; L apart."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Coverage, bool, bool] | None] = {}  # None is L

    def accumulate(self, segment: Segment) -> set[int]:
        rows = set() if segment.batch is None else set(segment.batch.headers["tick"].tolist())
        news = set()
        for tick in range(segment.start + 1, segment.end + 1):
            new = None if segment.lost else (segment.coverage, tick in rows, False)
            if tick in self.known:
                held = self.known[tick]
                if segment.lost:
                    if held is None or held[2] or held[0].everything:
                        continue
                    new = (held[0], held[1], True)
                elif held is not None and held[0].at_least(segment.coverage):
                    continue
            self.known[tick] = new
            news.add(tick)
        return news


@settings(max_examples=150, deadline=None)
@given(st.lists(segments(), max_size=8), SPAN, NEED, st.booleans())
def test_a_stream_knows_what_it_was_told(
    told: list[Segment], window: Span, need: dict[int, int], joins: bool
) -> None:
    """D2."""
    stream, twin = KnowledgeStream(joins=joins), Twin()
    for segment in told:
        news = stream.accumulate(segment)
        assert ticks([(part.start, part.end) for part in news]) == twin.accumulate(segment)
        stream.check()
    found, missing = stream.find(*window, need)
    assert ticks([(part.start, part.end) for part in found]) | ticks(missing) == ticks([window])
    assert not ticks([(part.start, part.end) for part in found]) & ticks(missing)
    for tick in ticks(missing):
        if tick in twin.known:
            held = twin.known[tick]
            assert held is not None
            assert not held[2]
            assert not held[0].meets(need)
    for part in found:
        rows = [] if part.batch is None else part.batch.headers["tick"].tolist()
        for tick in range(part.start + 1, part.end + 1):
            held = twin.known[tick]
            assert part.lost == (held is None or not held[0].meets(need))
            assert (tick in rows) == (held is not None and not part.lost and held[1])
        if part.batch is not None:
            assert [event.payload for event in part.batch.events()] == [str(tick).encode() for tick in rows]
    if found:
        some, _ = stream.find(*window, need, 1)
        assert [(part.start, part.end) for part in some] == [(found[0].start, found[0].end)]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.booleans(), st.integers(0, 9)), min_size=1, max_size=40),
    st.integers(2, 6),
    st.integers(300, 900),
    st.integers(0, 10),
)
def test_small_neighbours_become_one_and_say_the_same(
    steps: list[tuple[int, bool, int]], most: int, small: int, forgotten: int
) -> None:
    """A stream that joins says of every span what one that does not join says."""
    plain = KnowledgeStream()
    with patch.multiple(knowledge, JOIN_SEGMENTS=most, SMALL_BYTES=small):
        joining = KnowledgeStream(joins=True)
        at = 0
        for length, events, odd in steps:
            at += odd == 0  # a gap
            rows = [tick for tick in range(at + 1, at + length + 1) if tick % 2] if events else []
            coverage = Coverage({1: 2}) if odd == 1 else EVERYTHING
            segment = Segment(at, at + length, coverage, batch_at(rows), lost=odd == 2)
            if odd == 2:
                segment = Segment(at, at + length, Coverage({}), lost=True)
            for stream in (plain, joining):
                stream.accumulate(segment)
                stream.check()
            at += length
    assert len(joining) <= len(plain)
    for _ in range(min(forgotten, len(joining) - 1)):
        first = joining.forget_first()
        assert first is not None
        while len(plain) and next(iter(plain)).end <= first.end:
            plain.forget_first()
        joining.check()
    for start in range(0, at, 3):
        ours, theirs = (stream.find(start, start + 7, {1: 1}) for stream in (joining, plain))
        assert union(ours[1]) == union(theirs[1])
        for lost in (False, True):
            spans = [union((p.start, p.end) for p in found if p.lost == lost) for found, _ in (ours, theirs)]
            assert spans[0] == spans[1]
        events_of = [
            [event for part in found if part.batch is not None for event in part.batch.events()]
            for found, _ in (ours, theirs)
        ]
        assert events_of[0] == events_of[1]


@settings(max_examples=100, deadline=None)
@given(st.lists(segments(), max_size=8), st.integers(0, 8), st.sets(st.integers(0, 8)), segments())
def test_what_is_forgotten_is_unknown_again(
    told: list[Segment], count: int, newest: set[int], later: Segment
) -> None:
    """D2."""
    stream = KnowledgeStream()
    for segment in told:
        stream.accumulate(segment)
    for number in range(count):
        held = list(stream)
        gone = (held[-1] if number in newest else held[0]) if held else None
        assert (stream.forget_last() if number in newest else stream.forget_first()) == gone
        stream.check()
        if gone is not None:
            assert stream.after(gone.start, {}) is None
    stream.accumulate(later)
    stream.check()


def test_what_adjoins_a_gap_is_forgotten_last() -> None:
    """D2: little memory and a gap: what comes right after the gap is kept, or the stream never gets on."""
    stream = KnowledgeStream()
    for at in (0, 20, 30, 40):
        stream.accumulate(Segment(at, at + 10, EVERYTHING, batch_at([at + 5])))
    gone = [stream.forget(10) for _ in range(5)]
    assert [one and one.start for one in gone] == [0, 40, 30, 20, None]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=30), st.integers(2_000, 8_000))
def test_a_pubends_ticks_only_increase_and_its_memory_is_bounded(
    steps: list[tuple[int, int]], limit: int
) -> None:
    """D1: unique, increasing ticks, also when the clock steps back; what is forgotten is L, never silence."""
    pubend = PlainPubend(7, limit=limit, now_us=1_000)
    source = IdSource(1, 1)
    published: list[int] = []
    now = 1_000
    for count, step in steps:
        now += step - 5  # the clock goes back now and then
        before = pubend.last
        if count:
            builder = BatchBuilder()
            for _ in range(count):
                builder.add(source.next(1), "t", {}, b"x" * 100, DEFAULT_LIMITS)
            segment = pubend.publish([EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)], now)
            assert segment.batch is not None
            published += segment.batch.headers["tick"].tolist()
        else:
            segment = pubend.assert_silence(now)
        assert (segment.start, segment.end) == (before, pubend.last)
        assert before < pubend.last
        pubend.check()
    assert published == sorted(set(published))
    answer = pubend.answer(0, pubend.last + 10, 1 << 30)
    assert [part.start for part in answer[1:]] == [part.end for part in answer[:-1]]
    assert answer[0].start == 0
    assert answer[-1].end == pubend.last
    told = [tick for part in answer if part.batch is not None for tick in part.batch.headers["tick"].tolist()]
    assert told == [tick for tick in published if tick > pubend.floor]
    assert pubend.size <= limit + 3 * 300 + 600
