"""Covering: examples, and topic patterns exhaustively."""

from __future__ import annotations

from itertools import product

import pytest

from postroad.errors import UsageError
from postroad.events.topics import check_pattern, pattern_matches
from postroad.selectors import Selector, covers
from postroad.selectors.covering import Effort, pattern_covers
from postroad.wire.frames import DEFAULT_LIMITS


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        ("", "a = 1", True),
        ("a = 1", "", False),
        ("a > 1", "a > 2", True),
        ("a > 1", "a >= 1", False),
        ("a >= 1", "a = 1.0", True),
        ("a > 1", "a > 1 AND b = 2", True),
        ("a > 1 AND b = 2", "a > 1", False),
        ("a BETWEEN 1 AND 9", "a IN (1, 5, 9)", True),
        ("a IN (1, 2, 3)", "a IN (1, 3)", True),
        ("a IN (1, 2)", "a = 2 OR a = 1", True),
        ("a LIKE 'x%'", "a LIKE 'xy%'", True),
        ("a LIKE 'x%'", "a = 'x'", True),
        ("a LIKE 'x%'", "a LIKE 'xy%z_'", True),
        ("a LIKE 'xy%z_'", "a LIKE 'xy%z_' AND b = 1", True),
        ("a LIKE 'xy%z_'", "a = 'xyz1'", False),  # true, but not decided
        ("a IS NOT NULL", "a = 1", True),
        ("a IS NOT NULL", "a < b", True),
        ("a IS NOT NULL", "a + b > 2", True),
        ("a IS NULL", "b = 1", False),
        ("a IS NULL OR a IS NOT NULL", "b = 1", True),
        ("a < 5 OR a >= 5", "a BETWEEN 0 AND 10", True),
        ("a < 5 OR a > 5", "a BETWEEN 0 AND 10", False),
        ("a < 5 AND b = 1 OR a >= 5", "a > 0 AND b = 1", True),
        ("a <> 1", "a = 2", True),
        ("a <> 1", "a = 'x'", False),
        ("NOT (a = 1)", "a > 1", True),
        ("a > 1", "a > 2 AND a < 2", True),  # nothing matches the narrow one
        ("a", "a = TRUE", True),
        ("NOT a", "a = FALSE", True),
        ("a + 1 > 2", "a + 1 > 2 AND b = 1", True),
        ("a * 1 > 2", "a * 1.0 > 2", False),  # they differ where integers overflow
        ("a = TRUE", "a = 1", False),
    ],
)
def test_conditions(wide: str, narrow: str, expected: bool) -> None:
    assert covers(Selector.parse("", wide), Selector.parse("", narrow)) is expected
    assert covers(Selector.parse("t/#", wide), Selector.parse("t/1", narrow)) is expected


def test_topic_and_condition_both_count() -> None:
    assert covers(Selector.parse("a/#", "x > 1"), Selector.parse("a/b", "x > 2"))
    assert not covers(Selector.parse("a/b", "x > 1"), Selector.parse("a/#", "x > 2"))
    assert not covers(Selector.parse("a/#", "x > 2"), Selector.parse("a/b", "x > 1"))
    assert covers(Selector.parse("a/b", ""), Selector.parse("c", "x > 2 AND x < 1"))


def test_a_question_too_hard_is_answered_no() -> None:
    wide = " OR ".join(f"(a{n} > 1 AND b{n} < 5)" for n in range(12))
    narrow = " AND ".join(f"(a{n} > 0 OR b{n} < 6)" for n in range(6))
    assert covers(Selector.parse("", wide), Selector.parse("", narrow)) is False


def test_a_question_spends_no_more_than_its_effort() -> None:
    first = Selector.parse("", "a IN (" + ",".join(str(n) for n in range(1000, 1780)) + ")")
    second = Selector.parse("", "a IN (" + ",".join(str(n) for n in range(1001, 1780)) + ")")
    assert covers(first, second)
    effort = Effort(1000)
    assert covers(first, second, effort) is False
    assert -2 * 800 < effort.left <= 0  # the comparison that was under way was the last one


def test_patterns_exactly() -> None:
    """Against all topics up to one level deeper than the patterns, with a level that no pattern names."""
    topics = [
        "/".join(t)
        for n in range(1, 5)
        for t in product(["a", "b", "$s", "other", ""], repeat=n)
        if any(t) or n > 1
    ]
    patterns = [
        "",
        *("/".join(p) for n in range(1, 4) for p in product(["a", "b", "$s", "+", "#"], repeat=n)),
    ]
    usable = []
    for pattern in patterns:
        try:
            if pattern:
                check_pattern(pattern, DEFAULT_LIMITS)
            usable.append(pattern)
        except UsageError:
            continue
    matched = {
        pattern: sum(
            1 << at for at, topic in enumerate(topics) if not pattern or pattern_matches(pattern, topic)
        )
        for pattern in usable
    }
    for wide in usable:
        for narrow in usable:
            assert pattern_covers(wide, narrow) is (matched[narrow] & ~matched[wide] == 0), (wide, narrow)
