"""Spec B2: whatever a selector matches has a superset of its bits; widths 64, 128 and 256."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroad.errors import UsageError
from postroad.selectors import Selector
from postroad.selectors.tags import (
    WIDTHS,
    check_width,
    event_bits,
    false_match,
    fold,
    matched,
    positions,
    selector_masks,
)

NUMBERS = [0, 1, -1, 5, 5.0, 5.5, -0.0, 2**53, 2**53 + 1, float(2**53), 2**63 - 1, float(2**63), 1e300]
TEXTS = ["", "x", "xy", "é", "5"]
VALUES: Any = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.booleans())
NAMES = st.sampled_from(["a", "b", "c", "d"])
EVENTS = st.tuples(
    st.sampled_from(["a", "a/b", "a/b/c", "a//c", "$sys/a"]), st.dictionaries(NAMES, VALUES, max_size=4)
)


def literal(value: Any) -> str:
    if isinstance(value, str):
        return f"'{value}'"
    return str(value).upper() if isinstance(value, bool) else repr(value)


LITERALS = VALUES.map(literal)
TOUCHES = st.one_of(
    st.builds("{} = {}".format, NAMES, LITERALS),
    st.builds("{} {} {}".format, NAMES, st.sampled_from(["<>", "<", "<=", ">", ">="]), LITERALS),
    st.builds("{} IN ({})".format, NAMES, st.lists(LITERALS, min_size=1, max_size=3).map(", ".join)),
    st.builds("{} LIKE '{}%'".format, NAMES, st.sampled_from(["x", "", "5"])),
    st.builds("{} IS NULL".format, NAMES),
    st.builds("{} IS NOT NULL".format, NAMES),
    st.builds("{} + {} > 5".format, NAMES, NAMES),
    NAMES,
)
CONDITIONS = st.recursive(
    TOUCHES,
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        st.builds("NOT ({})".format, inner),
    ),
    max_leaves=6,
)
PATTERNS = st.sampled_from(["", "#", "+", "a", "a/b", "a/#", "+/b", "a/+/c", "a/b/#", "$sys/#", "$sys/+"])
SELECTORS = st.builds(Selector.parse, PATTERNS, st.one_of(st.just(""), CONDITIONS))


@given(selector=SELECTORS, event=EVENTS, width=st.sampled_from(WIDTHS))
def test_a_match_implies_a_superset_of_bits(
    selector: Selector, event: tuple[str, dict[str, Any]], width: int
) -> None:
    """B2."""
    bits, masks = event_bits(*event, width), selector_masks(selector, width)
    assert bits < 1 << width
    if selector.matches(*event):
        assert matched(bits, masks)
        narrow = fold(bits, width, 32)
        assert any(fold(mask.bits, width, 32) & ~narrow == 0 for mask in masks)


@given(selector=SELECTORS, event=EVENTS)
def test_where_a_conjunction_is_exact_only_chance_lets_an_event_pass_that_does_not_match(
    selector: Selector, event: tuple[str, dict[str, Any]]
) -> None:
    """B2."""
    exact = tuple(mask for mask in selector_masks(selector) if mask.exact)
    passed = matched(event_bits(*event), exact)
    # A filter of 256 bits with at most 12 tags; hypothesis draws from few values, none of which collide.
    assert not passed or selector.matches(*event)


def test_equal_numbers_have_one_tag_and_others_their_own() -> None:
    assert event_bits("t", {"a": 5}) == event_bits("t", {"a": 5.0})
    assert event_bits("t", {"a": 0}) == event_bits("t", {"a": -0.0})
    assert len({event_bits("t", {"a": value}) for value in (1, True, "1", 1.5)}) == 4
    assert selector_masks(Selector.parse("", "a = 5")) == selector_masks(Selector.parse("", "a = 5.0"))


def test_what_cannot_be_encoded_adds_nothing_wrong() -> None:
    """B2."""
    there = selector_masks(Selector.parse("", "a IS NOT NULL"))
    assert there[0].exact
    for condition in ("a > 5", "a LIKE 'x%'", "NOT a = 5", "a BETWEEN 1 AND 3"):
        (mask,) = selector_masks(Selector.parse("", condition))
        assert mask.bits == there[0].bits, "that the attribute is there, and no more"
        assert not mask.exact
    assert [mask.bits for mask in selector_masks(Selector.parse("", "a IS NULL"))] == [0]


def test_each_side_of_a_disjunction_is_encoded_alone() -> None:
    """B2."""
    first, second = (selector_masks(Selector.parse("", text))[0] for text in ("a = 1", "b = 2 AND c = 3"))
    assert set(selector_masks(Selector.parse("", "a = 1 OR (b = 2 AND c = 3)"))) == {first, second}
    assert selector_masks(Selector.parse("", "a = 1 AND a = 2")) == ()


def test_widths_and_chances() -> None:
    with pytest.raises(UsageError, match="a filter of 100 bits; it has 64, 128, 256"):
        check_width(100)
    (mask,) = selector_masks(Selector.parse("", "a = 1"))
    assert positions(mask.bits) == [at for at in range(256) if mask.bits >> at & 1]
    assert false_match(mask, 64) == pytest.approx(0.25 ** mask.bits.bit_count())
