"""Rates, lines and shares from counters, and how they are written."""

from __future__ import annotations

import pytest

from postroad.page.core.figures import (
    BREAK_S,
    MAX_POINTS,
    Counters,
    Line,
    Share,
    doubt,
    duration,
    per_second,
    quantity,
    share,
    volume,
)


def test_a_rate_needs_two_answers_and_a_counter_that_began_anew_has_none() -> None:
    counters = Counters()
    counters.take(10.0, {"events": 100})
    assert counters.rate("events") is None
    counters.take(12.0, {"events": 150})
    assert counters.rate("events") == 25.0
    assert counters.rate("others") is None
    counters.take(14.0, {"events": 3})  # the broker was started again
    assert counters.rate("events") is None
    counters.take(16.0, {"events": 23})
    assert counters.rate("events") == 10.0
    counters.take(16.1, {"events": 23})  # somebody was in a hurry
    assert counters.rate("events") == pytest.approx(20 / 2.1)


def test_a_line_is_bounded_and_broken_where_nothing_was_heard() -> None:
    line = Line()
    for at in range(3 * MAX_POINTS):
        line.add(float(at), 1.0)
    assert len(line.points) == MAX_POINTS
    last = line.points[-1][0]
    line.add(last + 10 * BREAK_S, 2.0)
    assert [value for _, value in list(line.points)[-3:]] == [1.0, None, 2.0]
    assert line.last == 2.0


def test_what_a_link_loses_is_told_over_the_last_seconds() -> None:
    lost = Share()
    assert lost.lost is None
    lost.take(0.0, 1_000, 900)  # what was lost before is not told
    assert lost.lost is None
    lost.take(2.0, 2_000, 1_800)
    assert lost.lost == pytest.approx(0.1)
    for at in range(4, 40, 2):
        lost.take(float(at), 2_000 + at * 100, 1_800 + at * 100)
    assert lost.lost == 0
    lost.take(40.0, 10, 10)  # one end was started again
    assert lost.lost is None


def test_more_received_than_sent_is_no_loss() -> None:
    lost = Share()
    lost.take(0.0, 0, 0)
    lost.take(1.0, 100, 130)
    assert lost.lost == 0


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (quantity(None), "-"),
        (quantity(0), "0"),
        (quantity(950), "950"),
        (quantity(9_500), "9,500"),
        (quantity(12_345), "12.3k"),
        (quantity(3_400_000), "3.4M"),
        (quantity(0.04), "0.04"),
        (per_second(12.34), "12.3/s"),
        (volume(1_536), "1.5 KiB"),
        (volume(12), "12 B"),
        (share(0.0), "0%"),
        (share(0.052), "5.2%"),
        (share(0.5), "50%"),
        (share(0.0001), "<0.1%"),
        (duration(0.005), "5 ms"),
        (duration(5.25), "5.2 s"),
        (duration(600), "10 min"),
        (duration(90_000), "25.0 h"),
        (duration(1_000_000), "12 days"),
        (doubt(0), "certain"),
        (doubt(1e-12), "doubt < 1e-9"),
        (doubt(2e-6), "doubt 2.0e-06"),
        (doubt(0.25), "doubt 25.0%"),
    ],
)
def test_figures_are_short(written: str, read: str) -> None:
    assert written == read
