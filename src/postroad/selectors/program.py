"""Tree -> program: what the matching kernel runs for a condition that is not a set of values.

The steps are those of a machine with a stack. They mean what predicate.py means; `match_program.pxi` runs
them. An AND or OR begins with its neutral value on the stack; each item is followed by a step that joins
the two uppermost truths, and goes to the end as soon as the answer is known. Items are asked by increasing
cost, which changes nothing about the answer. Programs are compared: equal ones are run once per event. So
a step says the type of its value, since 1, 1.0 and TRUE are equal to Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from postroad.errors import BugError
from postroad.kernel.layout import BOOLEAN, FLOAT, INTEGER, TEXT
from postroad.selectors import domains, tree
from postroad.selectors.cost import evaluation_steps
from postroad.selectors.predicate import like_parts
from postroad.selectors.tree import Condition, Constant, Kind, ValueNode

UNKNOWN: Final = 4  # beside the types of the wire
PUSH: Final = 0  # type, value
READ: Final = 1  # name
MISSING: Final = 2  # name
TRUTH: Final = 3
NEGATE: Final = 4
COMPARE: Final = 9  # comparison
LISTED: Final = 10  # kinds of members, (missing, booleans, numbers, texts)
LIKE: Final = 11  # signs
NOT: Final = 12
AND: Final = 13  # the step to go to
OR: Final = 14
ARITHMETIC: Final[Mapping[tree.ArithmeticOperator, int]] = {"+": 5, "-": 6, "*": 7, "/": 8}
COMPARISON: Final[Mapping[tree.CompareOperator, int]] = {"=": 0, "<>": 1, "<": 2, "<=": 3, ">": 4, ">=": 5}

ANY_LENGTH: Final = -2  # signs of a pattern that are not characters
ANY_CHARACTER: Final = -1

_TYPES: Final[Mapping[Kind, int]] = {
    "text": TEXT,
    "integer": INTEGER,
    "float": FLOAT,
    "boolean": BOOLEAN,
    "unknown": UNKNOWN,
}
_HAS: Final[Mapping[Kind, int]] = {"integer": 1, "float": 1, "text": 2, "boolean": 4}

Step = tuple[Any, ...]
Program = tuple[Step, ...]


def to_program(condition: Condition) -> Program:
    steps: list[Step] = []
    _condition(condition, steps)
    return tuple(steps)


def _condition(node: Condition, steps: list[Step]) -> None:
    match node:
        case tree.Constant():
            steps.append(_push(node if isinstance(node.value, bool) else tree.UNKNOWN))
        case tree.Attribute():
            steps += [(READ, node.name.encode()), (TRUTH,)]
        case tree.Compare():
            _value(node.left, steps)
            _value(node.right, steps)
            steps.append((COMPARE, COMPARISON[node.operator]))
        case tree.In():
            _value(node.operand, steps)
            steps.append(_listed(node.values))
        case tree.Like():
            _value(node.operand, steps)
            steps.append((LIKE, signs_of(node)))
        case tree.IsNull():
            steps.append((MISSING, node.name.encode()))
        case tree.Not():
            _condition(node.item, steps)
            steps.append((NOT,))
        case tree.And() | tree.Or():
            _joined(node, steps)
        case _:
            raise BugError(f"no program for {node!r}")


def _joined(node: tree.And | tree.Or, steps: list[Step]) -> None:
    join = AND if isinstance(node, tree.And) else OR
    steps.append(_push(tree.constant(join == AND)))
    joins: list[int] = []
    for item in sorted(node.items, key=evaluation_steps):
        _condition(item, steps)
        joins.append(len(steps))
        steps.append((join,))
    for at in joins:
        steps[at] = (join, len(steps))


def _value(node: ValueNode, steps: list[Step]) -> None:
    match node:
        case tree.Constant():
            steps.append(_push(node))
        case tree.Attribute():
            steps.append((READ, node.name.encode()))
        case tree.Negate():
            _value(node.operand, steps)
            steps.append((NEGATE,))
        case tree.Arithmetic():
            _value(node.left, steps)
            _value(node.right, steps)
            steps.append((ARITHMETIC[node.operator],))


def _push(literal: Constant) -> Step:
    value = literal.value
    return (PUSH, _TYPES[literal.kind], value.encode() if isinstance(value, str) else value)


def _listed(members: tuple[Constant, ...]) -> Step:
    has = 0
    for member in members:
        has |= _HAS[member.kind]
    return (LISTED, has, domains.encoded(domains.listed(members, negated=False)))


def signs_of(node: tree.Like) -> tuple[int, ...]:
    """The pattern as code points and the two signs that are none."""
    return tuple(
        ANY_CHARACTER if part is None else ANY_LENGTH if part == "" else ord(part)
        for part in like_parts(node.pattern, node.escape)
    )
