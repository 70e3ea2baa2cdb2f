"""The matching index against its naive twin: `Selector.matches` asked of every pair."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad import kernel
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.kernel import match_reference
from postroad.selectors import MatchIndex, Selector
from postroad.wire.frames import DEFAULT_LIMITS

ENGINES: list[Callable[[], Any]] = [match_reference.Index]
if kernel.wanted("match"):
    from postroad.kernel import match

    ENGINES.append(match.Index)

NAMES = ["a", "b", "c", "na-me", "d.e"]
TEXTS = ["", "x", "xy", "xyz", "xyzzy plugh", "y", "é", "éa", "\U0010ffff", "\U0010ffffa", "a%b", "a_b", "'"]
NUMBERS = [
    0,
    1,
    -1,
    5,
    5.0,
    5.5,
    -0.0,
    0.1,
    2**53,
    2**53 + 1,
    float(2**53),
    2**63 - 1,
    -(2**63),
    float(2**63),
    1e300,
    float("inf"),
    float("-inf"),
]
TOPICS = ["a", "a/b", "a/b/c", "a//c", "b/b", "$sys/a", "a/", "/", "é/b"]
PATTERNS = [
    "",
    "#",
    "+",
    "a",
    "a/b",
    "a/#",
    "+/b",
    "a/+/c",
    "a/b/#",
    "+/+",
    "$sys/#",
    "$sys/+",
    "+/#",
    "/+",
    "é/+",
]


def topics() -> st.SearchStrategy[str]:
    return st.sampled_from(TOPICS)


def values() -> st.SearchStrategy[Any]:
    return st.one_of(st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.booleans(), st.integers(-3, 3))


def events() -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(topics(), st.dictionaries(st.sampled_from(NAMES), values(), max_size=5))


def literal(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    return "1e308" if value == float("inf") else "-1e308" if value == float("-inf") else repr(value)


def name(text: str) -> str:
    return text if text in ("a", "b", "c", "d.e") else f'"{text}"'


NAME = st.sampled_from(NAMES).map(name)
LITERAL = values().map(literal)
NUMBER = st.sampled_from([0, 1, 5, 5.5, -2, 2**53 + 1]).map(literal)
PLAIN = st.sampled_from(["x", "xy", "é", "", "a!%b", "a!_", "\U0010ffff"])
TOUCHES = st.one_of(
    st.builds("{} {} {}".format, NAME, st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), LITERAL),
    st.builds("{} = {}".format, NAME, LITERAL),
    st.builds("{} BETWEEN {} AND {}".format, NAME, NUMBER, NUMBER),
    st.builds("{} NOT BETWEEN {} AND {}".format, NAME, NUMBER, NUMBER),
    st.builds("{} IN ({})".format, NAME, st.lists(LITERAL, min_size=1, max_size=20).map(", ".join)),
    st.builds("{} NOT IN ({})".format, NAME, st.lists(LITERAL, min_size=1, max_size=3).map(", ".join)),
    st.builds("{} LIKE '{}%' ESCAPE '!'".format, NAME, PLAIN),
    st.builds("{} NOT LIKE '{}%' ESCAPE '!'".format, NAME, PLAIN),
    st.builds("{} LIKE '{}%y_%' ESCAPE '!'".format, NAME, PLAIN),
    st.builds("{} NOT LIKE '%{}' ESCAPE '!'".format, NAME, PLAIN),
    st.builds("{} IS NULL".format, NAME),
    st.builds("{} IS NOT NULL".format, NAME),
    st.builds("{} {} {} > {}".format, NAME, st.sampled_from(["+", "-", "*", "/"]), NAME, NUMBER),
    st.builds("{} < {}".format, NAME, NAME),
    NAME,
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
SELECTORS = st.builds(Selector.parse, st.sampled_from(PATTERNS), st.one_of(st.just(""), CONDITIONS, TOUCHES))


def batch_of(rows: list[tuple[str, dict[str, Any]]]) -> EventBatch:
    builder = BatchBuilder()
    for topic, attributes in rows:
        builder.add(bytes(16), topic, attributes, b"payload", DEFAULT_LIMITS)
    return EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)


def naive(
    subscriptions: dict[int, tuple[Selector, int]], rows: list[tuple[str, dict[str, Any]]]
) -> dict[tuple[int, ...], list[int]]:
    found: dict[int, list[int]] = {}
    for target in {target for _, target in subscriptions.values()}:
        wanted = [selector for selector, other in subscriptions.values() if other == target]
        matched = [
            at
            for at, (topic, attributes) in enumerate(rows)
            if any(s.matches(topic, attributes) for s in wanted)
        ]
        if matched:
            found[target] = matched
    groups: dict[tuple[int, ...], list[int]] = {}
    for target in sorted(found):
        groups.setdefault(tuple(found[target]), []).append(target)
    return groups


def new_index(engine: Callable[[], Any]) -> MatchIndex:
    index = MatchIndex()
    index._engine = engine()
    return index


def compare(index: MatchIndex, subscriptions: dict[int, tuple[Selector, int]], rows: list[Any]) -> None:
    groups = index.match(batch_of(rows))
    expected = naive(subscriptions, rows)
    assert [(tuple(group.rows.tolist()), group.targets) for group in groups] == sorted(expected.items())
    assert all(group.rows.dtype == "uint32" for group in groups)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(SELECTORS, st.integers(0, 6)), max_size=25),
    st.lists(events(), max_size=12),
    st.randoms(use_true_random=False),
)
def test_index_agrees_with_asking_every_selector(
    engine: Callable[[], Any],
    wanted: list[tuple[Selector, int]],
    rows: list[tuple[str, dict[str, Any]]],
    choice: random.Random,
) -> None:
    index = new_index(engine)
    subscriptions: dict[int, tuple[Selector, int]] = {}
    for key, (selector, target) in enumerate(wanted):
        index.add(key, selector, target)
        subscriptions[key] = (selector, target)
    index.check()
    compare(index, subscriptions, rows)
    while subscriptions:
        for key in choice.sample(sorted(subscriptions), (len(subscriptions) + 1) // 2):
            index.remove(key)
            del subscriptions[key]
        index.check()
        compare(index, subscriptions, rows)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(3))
def test_many_selectors_come_and_go(engine: Callable[[], Any], seed: int) -> None:
    """Large buckets, split blocks, grown and shrunk tables; values that are unlikely in small examples."""
    choice = random.Random(seed)

    def selector() -> Selector:
        where = choice.choice(
            [
                f"a = {choice.randrange(3)} AND b > {choice.randrange(1000)}",
                f"b BETWEEN {choice.randrange(500)} AND {choice.randrange(500, 1000)}",
                f"b > {choice.randrange(1000)} AND b < {choice.randrange(1000)}.5",
                f"c LIKE 'p{choice.randrange(30)}%' AND a <> 1",
                f"c IN ('p{choice.randrange(30)}', 'p{choice.randrange(30)}', {choice.randrange(9)})",
                f"n{choice.randrange(100)} = {choice.randrange(2)}",
                "",
            ]
        )
        return Selector.parse(choice.choice(["", "t/1", "t/2", "t/#", f"t/{choice.randrange(40)}"]), where)

    def event() -> tuple[str, dict[str, Any]]:
        attributes: dict[str, Any] = {
            "a": choice.randrange(3),
            "b": choice.choice([choice.randrange(1000), choice.random() * 1000]),
            "c": f"p{choice.randrange(40)}",
            f"n{choice.randrange(100)}": 1,
        }
        return f"t/{choice.randrange(40)}", attributes

    index = new_index(engine)
    subscriptions: dict[int, tuple[Selector, int]] = {}
    for step in range(4):
        for key in range(step * 400, step * 400 + 400):
            subscriptions[key] = (selector(), choice.choice([key, key % 50]))
            index.add(key, *subscriptions[key])
        for key in choice.sample(sorted(subscriptions), 150 if step < 3 else 900):
            index.remove(key)
            del subscriptions[key]
        index.check()
        compare(index, subscriptions, [event() for _ in range(12)])
    for key in sorted(subscriptions):
        index.remove(key)
    index.check()
    assert len(index) == 0


@pytest.mark.skipif(len(ENGINES) < 2, reason="nothing compiled")
def test_removal_frees_and_an_index_leaves_nothing_behind() -> None:
    gc.collect()  # the figure is the process's: what earlier tests left in cycles must not go in between
    before = MatchIndex().stats()["process_bytes"]
    index = MatchIndex()
    empty = index.stats()["process_bytes"]
    for key in range(2000):
        index.add(
            key, Selector.parse(f"t/{key}/+", f"a = {key} AND c LIKE 'x{key}%' AND b IN (1, 2, 3)"), key
        )
    assert index.stats()["process_bytes"] > empty + 2000 * 100
    for key in range(2000):
        index.remove(key)
    index.check()
    # Arrays by number keep the size they grew to; what belongs to a selector is gone.
    assert index.stats()["process_bytes"] < empty + 2000 * 150
    del index
    assert MatchIndex().stats()["process_bytes"] == before
