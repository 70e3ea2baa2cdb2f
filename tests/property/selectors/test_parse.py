"""What joins predicates, read here, against sqlglot's own reading of the whole text."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import sqlglot
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlglot import expressions as exp

from postroad.errors import SelectorError
from postroad.selectors import parse as parsing
from postroad.selectors import tree
from postroad.selectors.parse import MAX_NODES, parse
from postroad.selectors.predicate import compile_condition

# Each predicate is true or false of an event that has the numbers a, b and c, which are 0 or 1.
PREDICATES = [
    "a = 1",
    "b > 0",
    "(c) = 1",
    "c BETWEEN 1 AND 2",
    "a NOT BETWEEN b AND 1",
    "b IN (1, 2)",
    "c NOT IN (0, 3)",
    "(a + b) * 2 > c",
    "a IS NOT NULL",
]
TEXTS = st.recursive(
    st.sampled_from(PREDICATES),
    lambda inner: st.one_of(
        st.builds("{} AND {}".format, inner, inner),
        st.builds("{} OR {}".format, inner, inner),
        st.builds("NOT {}".format, inner),
        st.builds("({})".format, inner),
    ),
    max_leaves=8,
)


def evaluate(node: exp.Expr, event: dict[str, int]) -> Any:
    match node:
        case exp.Paren():
            return evaluate(node.this, event)
        case exp.And():
            return evaluate(node.this, event) and evaluate(node.expression, event)
        case exp.Or():
            return evaluate(node.this, event) or evaluate(node.expression, event)
        case exp.Not():
            return not evaluate(node.this, event)
        case exp.Between():
            low, high = evaluate(node.args["low"], event), evaluate(node.args["high"], event)
            return low <= evaluate(node.this, event) <= high
        case exp.In():
            return evaluate(node.this, event) in [evaluate(member, event) for member in node.expressions]
        case exp.EQ():
            return evaluate(node.this, event) == evaluate(node.expression, event)
        case exp.GT():
            return evaluate(node.this, event) > evaluate(node.expression, event)
        case exp.Add():
            return evaluate(node.this, event) + evaluate(node.expression, event)
        case exp.Mul():
            return evaluate(node.this, event) * evaluate(node.expression, event)
        case exp.Is():
            return False
        case exp.Column():
            return event[node.name]
        case exp.Literal():
            return int(node.this)
    raise AssertionError(f"no meaning for {node!r}")


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_conditions_are_joined_as_sqlglot_joins_them(text: str) -> None:
    expected, made = sqlglot.parse_one(text), compile_condition(parse(text))
    for values in product((0, 1), repeat=3):
        event = dict(zip("abc", values, strict=True))
        assert made(event) is bool(evaluate(expected, event)), (text, event)


def test_differently_built_conditions_share_the_templates_of_their_predicates() -> None:
    """sqlglot is asked about a predicate's shape once, whatever it stands beside."""
    parse("a1 = 1 AND b1 > 2 AND c1 IN (1)")
    asked = parsing._template.cache_info().misses
    parse("z9 > 5 OR (y = 'x' OR NOT x IN (1, -2, 'three', TRUE) AND w = 7) AND NOT (v > 3 AND u > 4)")
    assert parsing._template.cache_info().misses <= asked + 1  # `"0" = '0'`


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a IN (1, -2, +3, 'x', TRUE, -1.5)", (1, -2, 3, "x", True, -1.5)),
        ("a IN (1 + 2, 4)", (3, 4)),
        ("a IN ((1), 2)", (1, 2)),
        ("a IN (2 * -3)", (-6,)),
        ("a IN (FALSE)", (False,)),
        ("a IN (-9223372036854775808)", (-(2**63),)),
        ("a IN (1, 1.0, 1)", (1, 1.0)),
    ],
)
def test_members_of_lists(text: str, values: tuple[tree.Value, ...]) -> None:
    assert parse(text) == tree.In(tree.Attribute("a"), tuple(tree.constant(value) for value in values))


def test_calculating_in_a_list_counts() -> None:
    parse("a IN (" + ", ".join(["-1"] * 1000) + ")")
    parse("a IN (" + ", ".join(["1+2"] * 250) + ")")
    with pytest.raises(SelectorError, match=f"at most {MAX_NODES} parts"):
        parse("a IN (" + ", ".join(["1+2"] * 300) + ")")


def test_long_conditions_are_not_kept() -> None:
    """What is kept of them could grow to hundreds of megabytes."""
    long = " AND ".join(f"name{n} = {n}" for n in range(100))
    before = parsing._skeleton.cache_info().currsize
    assert parse(long) == parse(long)
    assert parsing._skeleton.cache_info().currsize == before
