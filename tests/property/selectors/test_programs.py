"""What the kernel runs of a condition against the predicate, which says what it means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad import kernel
from postroad.errors import BugError
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.selectors import MatchIndex, Selector, tree
from postroad.selectors.cost import evaluation_steps
from postroad.selectors.predicate import compile_condition
from postroad.selectors.program import AND, COMPARE, NOT, PUSH, READ, Program, to_program
from postroad.wire.frames import DEFAULT_LIMITS

pytestmark = pytest.mark.skipif(not kernel.wanted("match"), reason="nothing compiled")

NAMES = ["a", "b", "c", "é"]
NUMBERS = [
    *(0, 1, -1, 2, 3, 7, 2**31, 2**32 + 1, 2**53, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 1 - 2**63),
    *(0.0, -0.0, 0.5, -1.5, 3.0, float(2**53), float(2**63), -float(2**63), 1e308, -1e308, 5e-324),
]
ENDLESS = [float("inf"), float("-inf")]
TEXTS = ["", "a", "ab", "b", "é", "ab\0", "\U0010ffff"]
VALUES: Any = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.booleans(), st.integers(-3, 3))
EVENTS = st.lists(
    st.dictionaries(st.sampled_from(NAMES), st.one_of(VALUES, st.sampled_from(ENDLESS)), max_size=4),
    min_size=1,
    max_size=4,
)

NAME = st.sampled_from(NAMES)
LITERAL = st.one_of(VALUES, st.none()).map(tree.constant)
NODES: Any = st.recursive(
    st.one_of(NAME.map(tree.Attribute), LITERAL),
    lambda inner: st.one_of(
        st.builds(tree.Negate, inner),
        st.builds(tree.Arithmetic, st.sampled_from(["+", "-", "*", "/"]), inner, inner),
    ),
    max_leaves=4,
)
MEMBERS: Any = st.lists(VALUES.map(tree.constant), min_size=1, max_size=5).map(
    lambda all: tuple(dict.fromkeys(all))
)
LEAVES: Any = st.one_of(
    st.builds(tree.Compare, st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), NODES, NODES),
    st.builds(tree.In, NODES, MEMBERS),
    st.builds(tree.Like, NODES, st.sampled_from(["a%", "%b", "_", "%_b%", "", "é_%"]), st.just("")),
    st.builds(tree.IsNull, NAME),
    NAME.map(tree.Attribute),
    LITERAL,
)
CONDITIONS: Any = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(tree.Not, inner),
        st.builds(tree.And, st.lists(inner, min_size=1, max_size=3).map(tuple)),
        st.builds(tree.Or, st.lists(inner, min_size=1, max_size=3).map(tuple)),
    ),
    max_leaves=6,
)


def batch_of(events: list[dict[str, Any]]) -> EventBatch:
    builder = BatchBuilder()
    for attributes in events:
        builder.add(bytes(16), "t", attributes, b"", DEFAULT_LIMITS)
    return EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)


def run(programs: list[Program], events: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The rows that each program is true of."""
    from postroad.kernel.match import Index

    engine = Index()
    for number, program in enumerate(programs):
        engine.insert(number, "", (((), ((1, program),)),), Selector.parse("", ""))
        engine.attach(number, number)
    batch = batch_of(events)
    found: dict[int, list[int]] = {number: [] for number in range(len(programs))}
    for group in engine.match(batch.data, batch.extents):
        for target in group.targets:
            found[target] += group.rows.tolist()
    engine.check()
    for number in range(len(programs)):
        engine.detach(number, number)
        engine.delete(number)
    engine.check()
    assert engine.stats()["attributes"] == engine.stats()["programs"] == 0
    return found


@settings(max_examples=600, deadline=None)
@given(st.lists(CONDITIONS, min_size=1, max_size=4), EVENTS)
def test_programs_do_what_predicates_say(
    conditions: list[tree.Condition], events: list[dict[str, Any]]
) -> None:
    found = run([to_program(condition) for condition in conditions], events)
    for number, condition in enumerate(conditions):
        predicate = compile_condition(condition)
        expected = [row for row, attributes in enumerate(events) if predicate(attributes) is True]
        assert sorted(found[number]) == expected, condition


@given(CONDITIONS)
def test_the_cost_is_at_least_the_number_of_steps(condition: tree.Condition) -> None:
    assert len(to_program(condition)) <= 2 * evaluation_steps(condition)


@pytest.mark.parametrize(
    "program",
    [
        ((COMPARE, 0),),
        ((READ, b"a"), (READ, b"b")),
        ((READ, b"a"), (NOT,), (AND, 5)),
        ((PUSH, 3, True), (READ, b"a"), (AND, 0)),
        ((READ, b"a"), (99,)),
        (),
        tuple([(READ, b"a")] * 300) + tuple([(COMPARE, 0)] * 299),
    ],
)
def test_a_program_that_leaves_its_stack_is_refused(program: Program) -> None:
    with pytest.raises(BugError):
        run([program], [{}])


def test_the_deepest_conditions_fit_the_stack() -> None:
    deep = "a + b > 1"
    for level in range(31):
        deep = f"(x{level} < y{level} {'AND' if level % 2 else 'OR'} {deep})"
    sums = "a"
    for _ in range(30):
        sums = f"1 * ({sums})"
    event = (
        {"a": 1, "b": 1} | {f"x{level}": 0 for level in range(31)} | {f"y{level}": 1 for level in range(31)}
    )
    for where in (deep, f"{sums} > 0", "NOT " * 30 + "(a + b > 1)"):
        index = MatchIndex()
        index.add(1, Selector.parse("", where), 1)
        assert len(index.match(batch_of([event]))) == 1


def runs(index: MatchIndex, events: list[dict[str, Any]]) -> int:
    before = index.stats()["programs_run"]
    index.match(batch_of(events))
    return index.stats()["programs_run"] - before


def test_equal_conditions_are_asked_once_per_event() -> None:
    index = MatchIndex()
    for key in range(200):
        index.add(key, Selector.parse("t", f"price * quantity > 5 AND other <> {key}"), key)
    event = {"price": 2, "quantity": 3, "other": 1000}
    assert index.stats()["programs"] == 1
    assert runs(index, [event]) == 1
    assert runs(index, [event, event]) == 2
    assert len(index.match(batch_of([event]))[0].targets) == 200


def test_one_and_one_point_nought_are_different_conditions() -> None:
    index = MatchIndex()
    for key, literal in enumerate(("1", "1.0")):
        index.add(key, Selector.parse("", f"a + {literal} > 0"), key)
    assert index.stats()["programs"] == 2
    (group,) = index.match(batch_of([{"a": 2**63 - 1}]))  # integers overflow, floats do not
    assert group.targets == [1]


def test_only_what_fits_otherwise_is_asked() -> None:
    index = MatchIndex()
    index.add(1, Selector.parse("t", "kind = 'x' AND a + b > 1"), 1)
    index.add(2, Selector.parse("other", "a - b > 1"), 2)
    assert runs(index, [{"kind": "y", "a": 1, "b": 1}]) == 0
    assert runs(index, [{"kind": "x", "a": 1}]) == 0
    assert runs(index, [{"kind": "x", "a": 1, "b": 1}]) == 1


def test_the_cheap_are_asked_first_and_the_rest_only_if_somebody_needs_it() -> None:
    index = MatchIndex()
    index.add(1, Selector.parse("", "name LIKE '%x_y%'"), 7)
    index.add(2, Selector.parse("", "a + b > 1"), 7)
    assert runs(index, [{"name": "nothing", "a": 1, "b": 1}]) == 1
    assert runs(index, [{"name": "nothing", "a": 1, "b": 0}]) == 2
    index.add(3, Selector.parse("", "kind = 'x'"), 7)
    assert runs(index, [{"name": "nothing", "a": 1, "b": 1, "kind": "x"}]) == 0
    index.add(4, Selector.parse("", "name LIKE '%x_y%'"), 8)  # target 8 wants it as well
    assert runs(index, [{"name": "nothing", "a": 1, "b": 1, "kind": "x"}]) == 1


def test_the_items_of_a_condition_are_asked_by_cost() -> None:
    first = to_program(Selector.parse("", "name LIKE '%x_y%' OR a < b").condition)
    second = to_program(Selector.parse("", "a < b OR name LIKE '%x_y%'").condition)
    assert first == second
