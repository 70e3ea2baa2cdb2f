"""Covering against brute force: sound everywhere, exact where every constraint is on one attribute."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.selectors import Selector, covers

# One value of every stretch between the literals used, and each literal.
NUMBERS = [-1, 0, 0.5, 1, 1.5, 2, 2.5]
TEXTS = ["", "w", "x", "x0", "xa", "xaa", "xb", "y", "ya", "z"]
MISSING = object()
POSSIBLE: list[Any] = [MISSING, True, False, *NUMBERS, *TEXTS]
EVENTS: list[dict[str, Any]] = [
    {name: value for name, value in (("a", a), ("b", b)) if value is not MISSING}
    for a, b in product(POSSIBLE, POSSIBLE)
]

NAME = st.sampled_from(["a", "b"])
LITERAL = st.sampled_from(["0", "1", "1.0", "2", "'x'", "'xa'", "'y'", "TRUE", "FALSE"])
LITERALS = st.lists(LITERAL, min_size=1, max_size=3).map(", ".join)
DECIDABLE = st.one_of(
    st.builds("{} {} {}".format, NAME, st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), LITERAL),
    st.builds("{} IN ({})".format, NAME, LITERALS),
    st.builds("{} NOT IN ({})".format, NAME, LITERALS),
    st.builds("{} LIKE '{}%'".format, NAME, st.sampled_from(["x", "xa", "", "y"])),
    st.builds("{} IS NULL".format, NAME),
    NAME,
)
OTHERS = st.one_of(
    st.sampled_from(
        ["a < b", "a + b > 1", "a * 2 = b", "a LIKE '%a'", "a LIKE 'x_'", "b NOT LIKE '%a%'", "-a < 1"]
    )
)


def nested(leaves: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds("({} AND {})".format, inner, inner),
            st.builds("({} OR {})".format, inner, inner),
            st.builds("NOT ({})".format, inner),
        ),
        max_leaves=4,
    )


def really_covers(wide: Selector, narrow: Selector) -> bool:
    return all(wide.matches("t", event) for event in EVENTS if narrow.matches("t", event))


@settings(max_examples=200, deadline=None)
@given(nested(DECIDABLE), nested(DECIDABLE))
def test_exact_for_constraints_on_single_attributes(wide: str, narrow: str) -> None:
    first, second = Selector.parse("", wide), Selector.parse("", narrow)
    assert covers(first, second) is really_covers(first, second)
    assert covers(first, Selector.parse("", f"({wide}) AND ({narrow})"))
    assert covers(Selector.parse("", f"({wide}) OR ({narrow})"), second)


@settings(max_examples=200, deadline=None)
@given(nested(st.one_of(DECIDABLE, OTHERS)), nested(st.one_of(DECIDABLE, OTHERS)))
def test_never_wrongly_yes(wide: str, narrow: str) -> None:
    first, second = Selector.parse("", wide), Selector.parse("", narrow)
    if covers(first, second):
        assert really_covers(first, second)
