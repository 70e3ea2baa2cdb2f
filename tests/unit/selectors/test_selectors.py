"""The condition language: three-valued logic, types, limits and errors that point at the character."""

from __future__ import annotations

import pickle
import time
from typing import Any

import msgspec
import pytest

from postroad.errors import SelectorError, TooLargeError, UsageError
from postroad.overlay.interest import Interest
from postroad.selectors import Selector, boxes, tree
from postroad.selectors.boxes import MAX_BOXES, MAX_WORK
from postroad.selectors.domains import Domain
from postroad.selectors.index import MatchIndex
from postroad.selectors.parse import MAX_DEPTH, MAX_IN, MAX_LIKE, MAX_TEXT, parse
from postroad.selectors.predicate import like_matcher
from postroad.wire.frames import DEFAULT_LIMITS

EVENT: dict[str, Any] = {
    "price": 120,
    "rate": 1.5,
    "zero": 0,
    "big": 2**53 + 1,
    "max": 2**63 - 1,
    "min": -(2**63),
    "name": "alpha",
    "quote": "it's 100%",
    "yes": True,
    "no": False,
    "a-b": 1,
    "a.b": 2,
    "order": "x",
}


def truth(where: str) -> bool | None:
    return Selector.parse("", where).predicate(EVENT)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("", True),
        ("price > 100", True),
        ("100 < price", True),
        ("price = 120.0", True),
        ("price <> 120", False),
        ("price != 121", True),
        ("price BETWEEN 120 AND 121", True),
        ("price NOT BETWEEN 1 AND 119.5", True),
        ("price IN (1, 120, 'x')", True),
        ("price IN (1, 2)", False),
        ("price NOT IN (1, 2)", True),
        # A list of several types is never false, so its NOT is never true.
        ("price IN (1, 'x')", None),
        ("price NOT IN (1, 'x')", None),
        ("name LIKE 'al%'", True),
        ("name LIKE 'a_pha'", True),
        ("name LIKE '_____'", True),
        ("name LIKE '____'", False),
        ("name NOT LIKE '%z%'", True),
        ("quote LIKE '%100!%' ESCAPE '!'", True),
        ("quote NOT LIKE '%s 100!%' ESCAPE '!'", False),
        ("quote = 'it''s 100%'", True),
        ("price LIKE '1%'", None),
        ("missing IS NULL", True),
        ("price IS NULL", False),
        ("price IS NOT NULL", True),
        ("missing = 1", None),
        ("NOT missing = 1", None),
        ("missing = 1 OR price = 120", True),
        ("missing = 1 AND price = 120", None),
        ("missing = 1 AND price = 1", False),
        ("missing IN (1)", None),
        # Values of different types are neither equal nor ordered; integers and floats are one type.
        ("name = 1", None),
        ("name <> 1", None),
        ("yes = 1", None),
        ("yes > no", None),
        ("yes <> no", True),
        ("price > 'a'", None),
        ("name > 'al'", True),
        # Exact beyond 2**53.
        ("big = 9007199254740993", True),
        ("big = 9007199254740992.0", False),
        ("big > 9007199254740992.0", True),
        ("max < 9223372036854775808.0", True),
        ("min = -9223372036854775808", True),
        ("yes", True),
        ("NOT no", True),
        ("name", None),
        ("yes AND TRUE", True),
        ("yes = TRUE AND no = FALSE", True),
        ("price * 2 + 1 = 241", True),
        ("-price = -120", True),
        ("price - 20 / 4 = 115", True),
        ("(price - 20) / 8 = 12.5", True),
        ("1 / 2 = 0.5", True),
        ("price / zero > 0", None),
        ("max + 1 > 0", None),
        ("max + 1.0 > 0", True),
        ("-min > 0", None),
        ("name + 1 > 0", None),
        ("yes + 1 > 0", None),
        ("1e308 * 10 * 0 = price", None),
        ('"a-b" = 1', True),
        ("a.b = 2", True),
        ("order = 'x'", True),
        ("NOT (price > 100 OR missing)", False),
        ("yes or missing and no", True),
        ("'a' = 1", None),
        ("'a' < 'b'", True),
    ],
)
def test_meaning(where: str, expected: bool | None) -> None:
    assert truth(where) is expected


@pytest.mark.parametrize(
    ("where", "position"),
    [
        ("price >", 7),
        ("price > 10 an b = 1", 11),
        ("a b", 2),
        ("foo(1)", 0),
        ("a = 'x", 4),
        ('"a = 1', 0),
        ("a IN ()", 6),
        ("a = 1 -- x", 6),
        ("a = 1 /* x */", 6),
        ("a LIKE 5", 7),
        ("a LIKE b", 7),
        ("a LIKE 'x' ESCAPE 'ab'", 18),
        ("a LIKE 'x!y' ESCAPE '!'", 7),
        ("a + 'x' > 1", 4),
        ("a = 99999999999999999999", 4),
        ("a = 9223372036854775808", 4),
        ("a = 1e999", 4),
        ("a = 12abc", 4),
        ("a = 1.2.3", 4),
        ("((a = 1)", 0),
        ("a = 1)", 5),
        ("a ; b", 2),
        ("a = ?", 4),
        ("a = NULL", 4),
        ("NULL", 0),
        ("a NOT NULL", 6),
        ("a IS TRUE", 5),
        ("5", 0),
        ("'x'", 0),
        ("a IN (b)", 6),
        ("a IN (1, NULL)", 9),
        ("x = 1 AND a + 1", 10),
        ("a < b < c", 6),
        ("(a, b) = 1", 2),
        ("a = 1 and", 9),
        ("= 1", 0),
        ("a = 1 or or b", 9),
        ("a in 1", 5),
        ("a in (1,)", 8),
        ("a in (1 2)", 8),
        ("a in (not true)", 6),
        ("a between 1", 11),
        ("a between 1 or 2", 12),
        ("a like 'x' escape", 17),
        ("a like 'x' 'y'", 11),
        ("a is", 4),
        ("a is not 1", 9),
        ("1 is null", 0),
        ("b and TRUE is null", 6),
        ("a = 1 and not", 13),
        ("()", 1),
        ("(a = 1) = 2", 8),
        ("a = (b = 1)", 4),
        ("a = not b", 4),
        ("a = -TRUE", 5),
        ("a = -(TRUE)", 6),
        ("a = ('x') + 1", 4),
        ("a = 1 b", 6),
        ("a = 1, 2", 5),
        ("x or (b = 2 OR", 14),
        ("b and CASE when a = 1 then 2 end", 6),
        ("(select 1)", 1),
        ("EXISTS a", 0),
        ("a = *", 4),
        ('"" = 1', 0),
        ("a = '\ud800'", 5),
    ],
)
def test_errors_point_at_the_character(where: str, position: int) -> None:
    with pytest.raises(SelectorError) as caught:
        Selector.parse("", where)
    assert (caught.value.text, caught.value.position) == (where, position)
    assert f"character {position + 1}" in str(caught.value)


def test_the_same_error_when_the_template_is_known() -> None:
    Selector.parse("", "known LIKE 'x' ESCAPE '!' AND other + 1 > 2")
    with pytest.raises(SelectorError) as caught:
        Selector.parse("", "known LIKE 'xx' ESCAPE '!!' AND other + 1 > 2")
    assert caught.value.position == 23
    with pytest.raises(SelectorError) as caught:
        Selector.parse("", "known LIKE 'xx' ESCAPE '!' AND other + 'q' > 2")
    assert caught.value.position == 39


def test_literals_of_a_known_template_are_its_own() -> None:
    for price, name in ((1, "a"), (2.5, "it''s"), (120, "alpha")):
        selector = Selector.parse("", f"price = {price} AND name = '{name}' AND rate > .5")
        event = {"price": price, "name": name.replace("''", "'"), "rate": 1}
        assert selector.predicate(event) is True
        assert selector.predicate({**event, "price": price + 1}) is False


@pytest.mark.parametrize(
    "where",
    [
        "(" * 5000 + "a" + ")" * 5000,
        "(" * (MAX_DEPTH + 1) + "a" + ")" * (MAX_DEPTH + 1),
        "NOT " * 500 + "a",
        "- " * 500 + "1 = a",
        "(" * 2000,
        "NOT (" * 300,
        " + ".join(["1"] * 200) + " = a",
        " AND ".join(["a"] * 600),
        "a IN (" + ", ".join("1" for _ in range(MAX_IN + 1)) + ")",
        "a = " + "9" * 4000,
        "a = 1e" + "9" * 4000,
        "a = '" + "x" * MAX_TEXT + "'",
        "a LIKE '" + "%a" * MAX_LIKE + "'",
        '"' + "n" * 256 + '" = 1',
    ],
)
def test_hostile_text_is_refused_quickly(where: str) -> None:
    start = time.process_time()
    with pytest.raises(SelectorError):
        Selector.parse("", where)
    assert time.process_time() - start < 2


def test_what_the_limits_allow() -> None:
    assert truth("(" * MAX_DEPTH + "yes" + ")" * MAX_DEPTH) is True
    assert truth(" AND ".join(["yes"] * 250)) is True
    assert truth("price IN (" + ", ".join(str(n) for n in range(MAX_IN - 200, MAX_IN)) + ")") is False


def test_a_hostile_pattern_takes_no_exponential_time() -> None:
    matches = like_matcher("%a" * 100 + "%b", "")
    assert matches("a" * 60_000) is False
    assert matches("a" * 60_000 + "b") is True


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("%", "", True),
        ("", "", True),
        ("", "x", False),
        ("a%a", "a", False),
        ("a%a", "aa", True),
        ("%ab%ab", "ab", False),
        ("%ab%ab", "abab", True),
        ("_%_", "x", False),
        ("_%_", "xy", True),
        ("%_b", "ab\nb", True),
        (".*", "anything", False),
    ],
)
def test_like(pattern: str, text: str, expected: bool) -> None:
    assert like_matcher(pattern, "")(text) is expected


def test_topic_and_condition_together() -> None:
    selector = Selector.parse("orders/#", "price > 100")
    assert selector.matches("orders/eu", {"price": 120})
    assert not selector.matches("orders/eu", {"price": 100})
    assert not selector.matches("other", {"price": 120})
    assert Selector.parse("", "").matches("$postroad/x", {})
    assert not Selector.parse("#", "").matches("$postroad/x", {})
    with pytest.raises(UsageError):
        Selector.parse("a/#/b", "")


def test_a_selector_is_a_value() -> None:
    first, second = Selector.parse("a/+", " x = 1 "), Selector("a/+", "x = 1")
    assert first == second
    assert hash(first) == hash(second)
    assert first != Selector.parse("a/+", "x = 2")
    assert pickle.loads(pickle.dumps(first)) == first
    with pytest.raises(AttributeError):
        first.topic = "b"
    first.forget()
    assert first.matches("a/b", {"x": 1})


def test_patterns_keep_to_the_limits_of_whoever_parses_them() -> None:
    wide = msgspec.structs.replace(DEFAULT_LIMITS, topic_bytes=4096, topic_depth=64)
    narrow = msgspec.structs.replace(DEFAULT_LIMITS, topic_bytes=16, topic_depth=2)
    long, deep = "x" * 2000, "a/" * 40 + "#"
    for pattern in (long, deep):
        with pytest.raises(TooLargeError):
            Selector.parse(pattern)
        made = Selector.parse(pattern, "x = 1", wide)
        assert made.topic == pattern
        assert pickle.loads(pickle.dumps(made)) == made
        with pytest.raises(TooLargeError):  # also when it was parsed before
            Selector.parse(pattern, "x = 1")
    assert Selector.parse("a/b/c").topic == "a/b/c"
    with pytest.raises(TooLargeError):
        Selector.parse("a/b/c", limits=narrow)


def test_the_mark_stands_below_its_character_in_texts_of_several_lines() -> None:
    error = SelectorError("no", text="a = 1 AND\n\tb !! 2", position=13)
    assert str(error) == "no at character 14\n  a = 1 AND  b !! 2\n" + " " * 15 + "^"


def test_a_condition_is_parsed_once_per_subscription(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of local delivery and the comparison with other selectors need the same boxes."""
    texts: list[str] = []

    def counting(text: str) -> tree.Condition:
        texts.append(text)
        return parse(text)

    monkeypatch.setattr("postroad.selectors.parse.parse", counting)
    selector = Selector.parse("once/#", "once = 1 AND more > 2")
    MatchIndex().add(1, selector, 1)
    Interest(1, 1, DEFAULT_LIMITS).subscribe(1, selector)
    assert texts == [selector.where]


@pytest.mark.parametrize(
    "where",
    [
        # A long list in each of 60 alternatives.
        "a IN ({}) AND ({})".format(
            ",".join(str(n) for n in range(100, 800)), " OR ".join(f"b = {n}" for n in range(60))
        ),
        # Alternatives of which few are left, made of thousands.
        " AND ".join(["(" + " OR ".join(f"a = {n}" for n in range(31)) + ")"] * 4),
        # More alternatives than may be.
        " AND ".join(f"(a{n} = 1 OR b{n} = 2)" for n in range(10)),
    ],
)
def test_boxes_never_take_more_than_their_bound(where: str) -> None:
    made = Selector.parse("", where).boxes
    assert len(made) <= MAX_BOXES
    assert sum(domain.size for box in made for domain in box.domains.values()) <= MAX_WORK


def test_alternatives_that_come_to_nothing_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    meetings = 0

    def counted(joined: dict[str, Domain], name: str, domain: Domain) -> bool:
        nonlocal meetings
        meetings += 1
        return meet_into(joined, name, domain)

    meet_into = boxes._meet_into
    monkeypatch.setattr(boxes, "_meet_into", counted)
    many = "(" + " OR ".join(f"a = {n}" for n in range(60)) + ")"
    none = "(" + " OR ".join(f"a = {n} + 0.5" for n in range(40)) + ")"
    (box,) = Selector.parse("", f"{many} AND {none} AND b = 1 AND c = 2").boxes
    assert box.opaque  # it was given up
    assert 0 < meetings <= MAX_WORK
