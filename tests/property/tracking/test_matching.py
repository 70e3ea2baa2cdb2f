"""T3, T7, T8, T9: the size of matching sets (Theorem 1, Corollary 2), and what breaks its premise."""

from __future__ import annotations

from collections import deque
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.ids import MessageId
from postroad.seam.tracking import StoreFilter, TrackingEffect
from postroad.tracking.adaptive import Sizing
from postroad.tracking.bloom import Shape
from postroad.tracking.history import Filled, FilterHistory, Pace, Window
from postroad.tracking.keys import ROUTING, HistoryKey
from postroad.tracking.moments import Times
from postroad.tracking.planner import Plan, Wish, plan
from postroad.tracking.record import FilterMeta, decode_meta
from postroad.tracking.settings import GATHER_US, TrackingConfig
from postroad.tracking.strategies import make_tracking
from postroad.units import KIB, MILLISECOND_US, SECOND_US

START_US = 1_700_000_000_000_000
FOREVER_US = 1 << 60


class Run:
    """One history, driven; keeps of every filter its last stored state, as the disk does."""

    def __init__(
        self,
        *,
        capacity: int,
        persist_us: int,
        ahead_us: int,
        behind_us: int,
        retain: bool,
        adaptive: bool = False,
    ) -> None:
        numbers = count(1)
        self.history = FilterHistory(
            HistoryKey(ROUTING, 7, 8),
            sizing=Sizing(Shape(4096, capacity, 5), least=1, persist_us=persist_us, adaptive=adaptive),
            window=Window(ahead_us=ahead_us, behind_us=behind_us),
            pace=Pace(persist_us=persist_us, retain=retain, retain_us=FOREVER_US),
            next_sequence=lambda: next(numbers),
        )
        self.stored: dict[int, FilterMeta] = {}
        self.count = 0

    def _keep(self, filled: Filled | None) -> None:
        if filled is not None:
            if filled.meta.replaces is not None:
                del self.stored[filled.meta.replaces]
            self.stored[filled.meta.sequence] = filled.meta

    def message(self, time_us: int, now_us: int) -> None:
        due_us = self.history.due_us
        if due_us is not None and due_us <= now_us:
            self._keep(self.history.tick(due_us))
        self.count += 1
        number = 1 << 32 | 7
        ids = (number << 64 | time_us // MILLISECOND_US << 16 | self.count % 65536).to_bytes(16, "big")
        for filled in self.history.add(ids, Times(ids), now_us, now_us):
            self._keep(filled)
        self.history.check()

    def finish(self, now_us: int) -> list[FilterMeta]:
        self._keep(self.history.flush(now_us))
        return list(self.stored.values())


def largest(filters: list[FilterMeta]) -> int:
    """The largest matching set by ranges: it is reached where some range begins."""
    ranges = [meta for meta in filters if meta.lo_ms <= meta.hi_ms]
    return max((sum(r.lo_ms <= at.lo_ms <= r.hi_ms for r in ranges) for at in ranges), default=0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, int, list[tuple[int, int, int]]]:
    """(Ts, Tj, capacity, Tn, messages), where a message is (pause after the last, skew, way)."""
    skew_us = draw(st.integers(1, 40)) * 500
    jitter_us = draw(st.integers(0, 40)) * 500
    capacity = draw(st.integers(1, 12))
    lifetime_us = draw(st.integers(1, 60)) * 500
    pause = st.integers(0, 3 * lifetime_us)
    messages = draw(
        st.lists(
            st.tuples(pause, st.integers(-skew_us, skew_us), st.integers(0, jitter_us)),
            min_size=20,
            max_size=80,
        )
    )
    return skew_us, jitter_us, capacity, lifetime_us, messages


@given(cases(), st.integers(0, 3), st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_corollary_2(
    case: tuple[int, int, int, int, list[tuple[int, int, int]]], longer: int, retain: bool, adaptive: bool
) -> None:
    """2 Ts + Tj <= w Tn: never more than w + 1, whatever the skews, the ways and the pauses.

    With Tj = 0 this is Theorem 1. The premise is that no filter lasts less than Tn: at most `capacity`
    messages come in any Tn, and Tp is not shorter; or it is, and filters are retained (section 4.3).
    """
    skew_us, jitter_us, capacity, lifetime_us, messages = case
    persist_us = lifetime_us // 3 + 1 if retain else lifetime_us * (1 + longer)
    run = Run(
        capacity=capacity,
        persist_us=persist_us,
        ahead_us=skew_us,
        behind_us=skew_us + jitter_us,
        retain=retain,
        adaptive=adaptive,
    )
    now_us = START_US
    arrivals: list[int] = []
    for pause, skew, way in messages:
        now_us += pause
        if len(arrivals) >= capacity:
            now_us = max(now_us, arrivals[-capacity] + lifetime_us)
        arrivals.append(now_us)
        run.message(now_us - way + skew, now_us)
    w = -(-(2 * skew_us + jitter_us) // lifetime_us)
    filters = run.finish(now_us)
    assert largest(filters) <= w + 1
    assert sum(meta.count for meta in filters) == len(messages)


@given(cases(), st.lists(st.integers(-(10**12), 10**10), min_size=80, max_size=80))
@settings(max_examples=100, deadline=None)
def test_wild_clocks_do_not_widen_ranges(
    case: tuple[int, int, int, int, list[tuple[int, int, int]]], wild: list[int]
) -> None:
    """T9: whatever the timestamps, ranges stay within the bound; the rest are singles, and found."""
    skew_us, jitter_us, capacity, lifetime_us, messages = case
    run = Run(
        capacity=capacity,
        persist_us=lifetime_us,
        ahead_us=skew_us,
        behind_us=skew_us + jitter_us,
        retain=True,
    )
    now_us = START_US
    times: list[int] = []
    for number, (_, _, _) in enumerate(messages):
        now_us += -(-lifetime_us // capacity)
        times.append((now_us + (wild[number] if number % 3 else 0)) // MILLISECOND_US)
        run.message(times[-1] * MILLISECOND_US, now_us)
    filters = run.finish(now_us)
    w = -(-(2 * skew_us + jitter_us) // lifetime_us)
    assert largest(filters) <= w + 1
    assert all(any(meta.matches(time) for meta in filters) for time in times)


def steady(run: Run, *, messages: int, gap_us: int, skew_us: int) -> list[FilterMeta]:
    """One message every gap, its clock now ahead and now behind by the skew."""
    now_us = START_US
    for number in range(messages):
        now_us += gap_us
        run.message(now_us + (skew_us if number % 2 else -skew_us), now_us)
    return run.finish(now_us)


def test_theorem_1_is_tight_and_needs_its_premise() -> None:
    """Constructed: clocks, rates and intervals that break 2 Ts <= w Tn give more than w + 1."""
    ms = MILLISECOND_US
    calm = {
        "capacity": 10,
        "persist_us": 1000 * ms,
        "ahead_us": 50 * ms,
        "behind_us": 50 * ms,
        "retain": False,
    }
    # Tn = 10 messages * 10 ms = 100 ms, 2 Ts = 100 ms: w = 1.
    assert largest(steady(Run(**calm), messages=200, gap_us=10 * ms, skew_us=49 * ms)) == 2  # type: ignore[arg-type]
    # Ten times the rate: filters last 10 ms only.
    assert largest(steady(Run(**calm), messages=2000, gap_us=ms, skew_us=49 * ms)) > 2  # type: ignore[arg-type]
    # Worse clocks, and a broker that lets them into the range.
    loose = {**calm, "ahead_us": 500 * ms, "behind_us": 500 * ms}
    assert largest(steady(Run(**loose), messages=200, gap_us=10 * ms, skew_us=400 * ms)) > 2  # type: ignore[arg-type]
    # The same clocks at a broker that checks: they become singles and the bound holds.
    assert largest(steady(Run(**calm), messages=200, gap_us=10 * ms, skew_us=400 * ms)) <= 2  # type: ignore[arg-type]


def test_section_4_3_short_intervals_need_retained_filters() -> None:
    """T8: Tp < Tn stores part-full filters too often, unless they are retained and overwritten."""
    ms = MILLISECOND_US
    short = {"capacity": 10, "persist_us": 15 * ms, "ahead_us": 50 * ms, "behind_us": 50 * ms}
    rolled = steady(Run(**short, retain=False), messages=200, gap_us=10 * ms, skew_us=49 * ms)
    retained = steady(Run(**short, retain=True), messages=200, gap_us=10 * ms, skew_us=49 * ms)
    assert largest(rolled) > 2
    assert largest(retained) == 2
    assert len(retained) == 20
    assert all(meta.count == 10 for meta in retained)


@pytest.mark.parametrize("factor", [1, 8, 1000])
def test_adaptive_filters_are_full_when_tp_ends(factor: int) -> None:
    """Beyond the paper: capacity follows the rate, accuracy stays, and a jump costs few extra filters."""
    ms = MILLISECOND_US
    numbers = count(1)
    shape = Shape(1_584_000, 100_000, 11)
    history = FilterHistory(
        HistoryKey(ROUTING, 7, 8),
        sizing=Sizing(shape, least=10, persist_us=1000 * ms),
        window=Window(ahead_us=50 * ms, behind_us=100 * ms),
        pace=Pace(persist_us=1000 * ms, retain=True, retain_us=FOREVER_US),
        next_sequence=lambda: next(numbers),
    )
    stored: dict[int, FilterMeta] = {}
    now_us = START_US
    serial = 0
    for step in range(800):
        now_us += 50 * ms
        per_step = 2 if step < 400 else 2 * factor
        ids = b"".join(
            (1 << 96 | 7 << 64 | now_us // ms << 16 | number).to_bytes(16, "big")
            for number in range(per_step)
        )
        serial += per_step
        made = history.add(ids, Times(ids), now_us, now_us)
        due = history.tick(now_us)
        for filled in [*made, *([due] if due else [])]:
            stored.pop(filled.meta.replaces or 0, None)
            stored[filled.meta.sequence] = filled.meta
    final = [meta for meta in stored.values() if meta.final]
    assert all(meta.count == meta.n for meta in final)
    assert all(meta.m / meta.n < shape.m / shape.n * 1.02 + 1 / meta.n for meta in final)
    settled = [meta for meta in final if meta.opened_us > START_US + 30_000 * ms]
    lifetimes = [meta.stored_us - meta.opened_us for meta in settled]
    assert settled
    assert all(0.9 * 1000 * ms <= lifetime <= 1.5 * 1000 * ms for lifetime in lifetimes)
    during = [meta for meta in final if START_US + 20_000 * ms <= meta.stored_us <= START_US + 21_000 * ms]
    assert len(during) <= 6


def keep(stored: dict[int, FilterMeta], effects: list[TrackingEffect]) -> None:
    for effect in effects:
        if isinstance(effect, StoreFilter):
            stored.pop(effect.replaces or 0, None)
            stored[effect.sequence] = decode_meta(effect.record)


@pytest.mark.parametrize(("gathers", "matching"), [(1, 3), (2, 2)])
def test_collecting_ids_counts_twice(gathers: int, matching: int) -> None:
    """T7: with w = 1, 2 Ts + Tj and twice the span of a page of notes must fit into Tn.

    A filter that ends within a page has the times of all of it, also of what came later; one that begins
    there, also of what came before.
    """
    skew_ms, jitter_ms, gather_ms = 50, 100, GATHER_US // MILLISECOND_US
    lasts_ms = 2 * skew_ms + jitter_ms + gathers * gather_ms
    config = TrackingConfig(
        bits=1000,
        capacity=10,
        hashes=3,
        skew_us=skew_ms * MILLISECOND_US,
        jitter_us=jitter_ms * MILLISECOND_US,
        adaptive=False,
    )
    tracking = make_tracking(config, me=1, stored=(), changes=(), now_us=START_US)
    stored: dict[int, FilterMeta] = {}
    last_ms = gather_ms - 1
    early, late = -skew_ms - jitter_ms, skew_ms - 1
    # (when, how many, message time less that); no more than 10 come in any `lasts_ms`.
    arrivals = [(-lasts_ms, 9, 0), (0, 2, 0), (last_ms, 7, late), (lasts_ms - last_ms, 1, early)]
    serial = 0
    for at_ms, number, about in [*arrivals, (lasts_ms, 2, 0)]:
        now_us = START_US + SECOND_US + at_ms * MILLISECOND_US
        for _ in range(number):
            serial += 1
            ids = bytes(MessageId(7, 2, now_us // MILLISECOND_US + about, serial))
            tracking.routed(2, 3, ids, now_us)
    keep(stored, tracking.close(now_us))
    assert len(stored) == 3
    assert largest(list(stored.values())) == matching


bursts = st.lists(
    st.tuples(st.integers(1, 300), st.sampled_from((0.0, 0.001, 0.03, 0.3, 1.0, 20.0))),
    min_size=2,
    max_size=6,
)


@given(st.sampled_from((1, 2, 8, 40)), st.sampled_from((20, 500)), bursts, st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_a_plans_accuracy_is_kept_whatever_the_rate(
    memory: int, jitter_ms: int, profile: list[tuple[int, float]], seed: int
) -> None:
    """T7, T11: quiet, bursts, and bursts after quiet, as long as no Tn has more than n messages.

    The profile is steps of 10 ms and the share of the peak rate; above 1 all comes that may.
    """
    chance = Random(seed)
    wish = Wish(
        accuracy=0.99, rate=2000, memory=memory * KIB, skew_us=50_000, jitter_us=jitter_ms * MILLISECOND_US
    )
    found = plan(wish)
    assert isinstance(found, Plan)
    config = TrackingConfig(
        bits=found.shape.m,
        capacity=found.shape.n,
        hashes=found.shape.k,
        persist_us=found.persist_us,
        skew_us=found.skew_us,
        jitter_us=wish.jitter_us,
        least_capacity=16,
    )
    now_us = START_US
    tracking = make_tracking(config, me=1, stored=(), changes=(), now_us=now_us)
    stored: dict[int, FilterMeta] = {}
    recent: deque[tuple[int, int]] = deque()  # when how many came, within Tn
    due = total = 0.0
    for steps, share in profile:
        for _ in range(steps):
            now_us += 10 * MILLISECOND_US
            while recent and recent[0][0] <= now_us - found.lifetime_us:
                total -= recent.popleft()[1]
            due = min(due, 1.0) + share * wish.rate / 100
            number = min(int(due), int(found.shape.n - total))
            due -= int(due)
            if number:
                recent.append((now_us, number))
                total += number
                ids = b"".join(
                    bytes(MessageId(7, 2, (now_us + about) // MILLISECOND_US, serial))
                    for serial, about in enumerate(_abouts(chance, number, config))
                )
                tracking.routed(2, 3, ids, now_us)
            keep(stored, tracking.tick(now_us))
    keep(stored, tracking.close(now_us))
    filters = list(stored.values())
    assert largest(filters) <= found.w + 1
    for at in filters:
        right = 1.0
        for meta in filters:
            if meta.matches(at.lo_ms):
                right *= 1 - Shape(meta.m, meta.n, meta.k).fpp
        assert 1 - right <= (1 - wish.accuracy) * (1 + 1e-9)


def _abouts(chance: Random, number: int, config: TrackingConfig) -> list[int]:
    """How far message times are from now: clocks as wrong and ways as long as may be."""
    skew, way = config.skew_us - MILLISECOND_US, config.jitter_us
    return [chance.choice((-skew, 0, skew)) - chance.choice((0, way)) for _ in range(number)]
