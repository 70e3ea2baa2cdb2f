"""Conditions damaged at random: the error has its character and says what would be right."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from postroad.errors import SelectorError
from postroad.selectors.parse import parse

SOUND = (
    "price > 100 AND currency = 'EUR'",
    "a IN (1, -2.5, 'x', TRUE) OR NOT (b IS NOT NULL)",
    "name LIKE 'ab!%%' ESCAPE '!' AND (n + 1) * -m <= 3 / k",
    "p NOT BETWEEN 1 AND q - 1 OR urgent AND \"content-type\" <> 'it''s'",
    "NOT a NOT IN ((1)) AND a.b NOT LIKE ('%')",
)
TOKENS = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|[\w.]+|<>|<=|>=|\S""")
STRANGE = (
    *("AND", "OR", "NOT", "IN", "LIKE", "ESCAPE", "IS", "NULL", "BETWEEN", "TRUE", "case", "select"),
    *(
        "(",
        ")",
        ",",
        "=",
        "<>",
        "+",
        "-",
        "*",
        "/",
        "'",
        '"',
        "--",
        ";",
        "a",
        "1",
        "1.",
        ".",
        "'t'",
        "\n",
        "é",
        "\0",
    ),
)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    tokens = TOKENS.findall(draw(st.sampled_from(SOUND)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(tokens)))
        match draw(st.sampled_from(("insert", "drop", "replace", "swap", "cut"))):
            case "insert":
                tokens.insert(at, draw(st.sampled_from(STRANGE)))
            case "drop":
                tokens[at : at + 1] = []
            case "replace":
                tokens[at : at + 1] = [draw(st.sampled_from(STRANGE))]
            case "swap":
                tokens[at : at + 2] = tokens[at : at + 2][::-1]
            case "cut":
                tokens = tokens[:at]
    return draw(st.sampled_from((" ", "  "))).join(tokens)


def refusal(where: str) -> SelectorError | None:
    try:
        parse(where)
    except SelectorError as error:
        return error
    return None


@pytest.mark.parametrize("where", SOUND)
def test_what_is_damaged_below_is_sound(where: str) -> None:
    parse(where)


@settings(max_examples=200, deadline=None)
@example("a IN (1/0)")
@example("a IN ((1, 2))")
@example("- (a = 1) = 2")
@given(damaged())
def test_an_error_has_its_character_and_says_what_would_be_right(where: str) -> None:
    error = refusal(where)
    if error is None:
        return
    assert 0 <= error.position <= len(where)
    assert error.message
    assert "\n" not in error.message
    # What the parser behind the grammar says of a text that it cannot read.
    assert error.message != "this does not fit here"
    shown, mark = str(error).split("\n")[1:]
    assert mark == " " * (len(mark) - 1) + "^"
    assert len(mark) <= len(shown) + 1
