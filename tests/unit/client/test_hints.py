"""Habits of other systems are told, and never refused."""

from __future__ import annotations

import pytest

import postroad
from postroad.client.hints import HabitWarning, hints


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("orders/*", "orders/+"),
        ("orders/>", "orders/#"),
        ("orders/**", "orders/#"),
        ("orders.*", "orders/+"),
        ("orders.eu.>", "orders/eu/#"),
        ("orders/*/late", "orders/+/late"),
        ("orders/**/late", "orders/#"),
        (">", "#"),
        ("*", "+"),
    ],
)
def test_patterns_of_other_systems_are_translated(pattern: str, meant: str) -> None:
    (hint,) = hints(pattern, "")
    assert repr(pattern) in hint
    assert hint.endswith(f"as in {meant!r}")


@pytest.mark.parametrize("pattern", ["", "orders/eu", "orders/+", "#", "a/#/b", "a.b/c", "v1.2", "a*b/c"])
def test_patterns_of_ours_are_not(pattern: str) -> None:
    assert list(hints(pattern, "")) == []


@pytest.mark.parametrize(
    ("where", "word"),
    [
        ('currency = "EUR"', "'EUR'"),
        ("currency IN (\"EUR\", 'USD')", "'EUR'"),
        ('name LIKE "a%"', "'a%'"),
        ("payload LIKE '%x%'", "payload is none"),
        ("price > 1 AND topic = 'orders'", "topic is none"),
    ],
)
def test_conditions_that_can_hardly_match(where: str, word: str) -> None:
    (hint,) = hints("t", where)
    assert word in hint


@pytest.mark.parametrize(
    "where", ["", "currency = 'EUR'", '"my price" > 10', "note = 'the topic'", "topics > 1", '"topic" = 1']
)
def test_conditions_that_may(where: str) -> None:
    assert list(hints("t", where)) == []


def test_a_program_is_warned_at_its_own_line() -> None:
    client = postroad.connect("localhost:1")
    with pytest.warns(HabitWarning, match=r"orders/\+") as told:
        client.subscribe("orders/*")
    assert told[0].filename == __file__
