"""T2, T13: all 21 configurations of the paper's Table 2, with its own n, m and k."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest

from postroad.tracking.adaptive import Sizing
from postroad.tracking.bloom import BloomFilter, Shape, expected_rate, false_positive_rate
from postroad.tracking.history import FilterHistory, Pace, Window
from postroad.tracking.keys import PUBLISH, HistoryKey
from postroad.tracking.moments import Times
from postroad.tracking.query.messages import TraceItem, TraceQuestion
from postroad.tracking.query.untracked import Untracked
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import make_tracking
from postroad.units import MILLISECOND_US, SECOND_US

KIBIT, MIBIT = 1 << 10, 1 << 20
RATE = 5000  # messages a second, section 5.2
NOW_MS = 1_700_000_000_000


class Row(NamedTuple):
    strategy: str
    buffer: int
    accuracy: float
    n: int
    m: int
    k: int
    tp_s: int
    full: bool


TABLE_2 = [
    Row("none", 0, 0, 0, 0, 0, 0, False),
    Row("exact", 10_000, 1, 0, 0, 0, 1, True),
    Row("exact", 135_000, 1, 0, 0, 0, 1, False),
    Row("exact", 135_000, 1, 0, 0, 0, 2, True),
    Row("bloom", 10_000, 0.99999, 2521, 64 * KIBIT, 16, 1, True),
    Row("bloom", 10_000, 0.99, 5461, 64 * KIBIT, 8, 1, False),
    Row("bloom", 10_000, 0.95, 7281, 64 * KIBIT, 8, 1, False),
    Row("bloom", 10_000, 0.99, 5461, 64 * KIBIT, 8, 2, True),
    Row("bloom", 10_000, 0.95, 7281, 64 * KIBIT, 8, 2, True),
    Row("bloom", 135_000, 0.99999, 38836, MIBIT, 12, 1, False),
    Row("bloom", 135_000, 0.99, 87381, MIBIT, 6, 1, False),
    Row("bloom", 135_000, 0.95, 131072, MIBIT, 6, 1, False),
    Row("bloom", 135_000, 0.99999, 38836, MIBIT, 12, 2, False),
    Row("bloom", 135_000, 0.99, 87381, MIBIT, 6, 2, False),
    Row("bloom", 135_000, 0.95, 131072, MIBIT, 6, 2, False),
    Row("bloom", 135_000, 0.99999, 38836, MIBIT, 12, 8, True),
    Row("bloom", 135_000, 0.99, 87381, MIBIT, 6, 8, False),
    Row("bloom", 135_000, 0.95, 131072, MIBIT, 6, 8, False),
    Row("bloom", 135_000, 0.99, 87381, MIBIT, 6, 18, True),
    Row("bloom", 135_000, 0.95, 131072, MIBIT, 6, 18, False),
    Row("bloom", 135_000, 0.95, 131072, MIBIT, 6, 27, True),
]
BLOOM = [row for row in TABLE_2 if row.strategy == "bloom"]
SHAPES = sorted({(row.m, row.n, row.k) for row in BLOOM})


def ids_of(count: int, publishers: int, *, first: int = 0, start_ms: int = NOW_MS, rate: int = RATE) -> bytes:
    """Ids as the paper's publishers make them, at that rate together; a publisher never repeats one."""
    at = np.arange(first, first + count, dtype=np.uint64)
    ids = np.zeros((count, 2), ">u8")
    ids[:, 0] = (at % publishers + np.uint64(1)) << np.uint64(32) | np.uint64(7)
    ids[:, 1] = (np.uint64(start_ms) + at * 1000 // rate) << np.uint64(16) | at // publishers % 50
    return ids.tobytes()


def test_the_table_is_whole() -> None:
    assert len(TABLE_2) == 21


@pytest.mark.parametrize("row", BLOOM, ids=str)
def test_false_positive_rate_is_the_formulas(row: Row) -> None:
    """T13: Equation 1, for every row with a filter, within five standard deviations."""
    one = BloomFilter(row.m, row.n, row.k)
    one.add(ids_of(row.n, 200, first=row.tp_s * 1_000_000))
    assert one.full
    expected = false_positive_rate(row.m, row.n, row.k)
    probes = min(4_000_000, max(400_000, int(200 / expected)))
    others = ids_of(probes, 200, first=500_000_000)
    claimed = one.contains(others).count(1)
    # The rate given these bits is fill^k; the bits themselves vary with the keys, by far less than this.
    allowed = 5 * math.sqrt(probes * expected) + 0.02 * probes * expected + 1
    assert abs(claimed - probes * expected) <= allowed
    assert one.fpp == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("row", BLOOM, ids=str)
def test_accuracy_with_a_matching_set_of_two(row: Row) -> None:
    """Equation 2 and section 5.1: the shapes are chosen for two filters."""
    efpp = expected_rate(false_positive_rate(row.m, row.n, row.k), 2)
    assert efpp <= 1 - row.accuracy


@pytest.mark.parametrize("row", BLOOM, ids=str)
def test_full_buffers(row: Row) -> None:
    """The column "stores full buffers": whether n messages come before Tp ends."""
    sequence = iter(range(1, 1000))
    history = FilterHistory(
        HistoryKey(PUBLISH),
        sizing=Sizing(
            Shape(row.m, row.n, row.k), least=row.n, persist_us=row.tp_s * SECOND_US, adaptive=False
        ),
        window=Window(ahead_us=SECOND_US, behind_us=SECOND_US),
        pace=Pace(persist_us=row.tp_s * SECOND_US, retain=False, retain_us=SECOND_US),
        next_sequence=lambda: next(sequence),
    )
    stored = []
    for step in range(30 * (row.tp_s + 1)):
        now_us = (NOW_MS + step * 40) * MILLISECOND_US
        due = history.tick(now_us)
        stored += [due] if due else []
        ids = ids_of(200, 200, first=step * 200)
        stored += history.add(ids, Times(ids), now_us, now_us)
    assert stored
    assert (stored[0].meta.count == row.n) == row.full


@pytest.mark.parametrize("row", [row for row in TABLE_2 if row.strategy != "bloom"], ids=str)
def test_rows_without_filters(row: Row) -> None:
    """NULL knows nothing; ASYNC is never wrong, and stores a full buffer when it fills before Tp ends."""
    items = [TraceItem(id=ids_of(1, 200, first=first), origin=7) for first in (0, 777, 9_999, 20_000, 90_000)]
    question = TraceQuestion(items=tuple(items))
    if row.strategy == "none":
        answer, wanted = Untracked().answer(question, {})
        assert [finding.published for finding in answer.findings] == [None] * 5
        assert wanted == ()
        return
    config = TrackingConfig(strategy="exact", log_bytes=row.buffer, persist_us=row.tp_s * SECOND_US)
    now_us = NOW_MS * MILLISECOND_US
    tracking = make_tracking(config, me=7, stored=(), changes=(), now_us=now_us)
    stored = 0
    for step in range(300):
        now_us = (NOW_MS + step * 8) * MILLISECOND_US
        tracking.published(ids_of(40, 200, first=step * 40), now_us)
        stored += len(tracking.tick(now_us))
        tracking.check()
    answer, _ = tracking.answer(question, {})
    assert [finding.published for finding in answer.findings] == [0.0, 0.0, 0.0, None, None]
    assert stored
