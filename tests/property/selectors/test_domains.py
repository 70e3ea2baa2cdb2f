"""Sets of values against membership, value by value; and that no operation compares every pair of spans."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroad.selectors import domains
from postroad.selectors.domains import Domain, Spans

NUMBERS = [float("-inf"), *range(13), float("inf")]


def spans_of(bits: list[bool]) -> Spans:
    """The set of those numbers of 0 to 12 whose bit is set, neighbours joined."""
    found: list[Any] = []
    for value, wanted in enumerate(bits):
        if wanted and found and found[-1][1] == (value - 1, 1) and value % 3:
            found[-1] = (found[-1][0], (value, 1))
        elif wanted:
            found.append(((value, 0), (value, 1)))
    return tuple(found)


def members(domain: Domain) -> set[float]:
    return {
        value
        for value in NUMBERS
        if any(low <= (value, 0) and high is not None and (value, 1) <= high for low, high in domain.numbers)
    }


SETS = st.lists(st.booleans(), min_size=13, max_size=13).map(lambda bits: Domain(numbers=spans_of(bits)))


@given(SETS, SETS)
def test_meet_minus_and_overlap_agree_with_membership(first: Domain, second: Domain) -> None:
    assert members(domains.meet(first, second)) == members(first) & members(second)
    assert members(domains.minus(first, second)) == members(first) - members(second)
    assert domains.overlap(first, second) is bool(members(first) & members(second))


@pytest.mark.parametrize("operation", [domains.meet, domains.minus, domains.overlap])
def test_long_lists_are_compared_in_one_pass(operation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    before = domains._before

    def counted(first: Any, second: Any) -> bool:
        nonlocal calls
        calls += 1
        return before(first, second)

    monkeypatch.setattr(domains, "_before", counted)
    even = Domain(numbers=domains.points(range(0, 2000, 2)))
    odd = Domain(numbers=domains.points(range(1, 2000, 2)))
    operation(even, odd)
    assert calls < 5 * 2000
