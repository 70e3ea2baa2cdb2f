"""The tree of a condition: frozen nodes, checked and folded once, then only read.

A condition has SQL's three truth values. Only `True` matches an event; unknown (a missing attribute, a
comparison across types, an overflow) behaves like SQL's NULL. Three rewrites made while the tree is built
are exact in that logic and keep everything downstream small: BETWEEN becomes two comparisons, a literal
stands on the right of its comparison, and arithmetic on literals is done. What the rest of the package
relies on is that a literal carries its kind, so that 1, 1.0 and TRUE, equal to Python, stay different here.
"""

from __future__ import annotations

import math
import operator as operators
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec

Value = str | int | float | bool
Kind = Literal["text", "integer", "float", "boolean", "unknown"]
CompareOperator = Literal["=", "<>", "<", "<=", ">", ">="]
ArithmeticOperator = Literal["+", "-", "*", "/"]

INTEGER_MIN: Final = -(1 << 63)
INTEGER_MAX: Final = (1 << 63) - 1

NEGATED: Final[Mapping[CompareOperator, CompareOperator]] = {
    "=": "<>",
    "<>": "=",
    "<": ">=",
    "<=": ">",
    ">": "<=",
    ">=": "<",
}
MIRRORED: Final[Mapping[CompareOperator, CompareOperator]] = {
    "=": "=",
    "<>": "<>",
    "<": ">",
    "<=": ">=",
    ">": "<",
    ">=": "<=",
}
_OPERATIONS: Final[Mapping[CompareOperator, Callable[[Any, Any], Any]]] = {
    "=": operators.eq,
    "<>": operators.ne,
    "<": operators.lt,
    "<=": operators.le,
    ">": operators.gt,
    ">=": operators.ge,
}


class Constant(msgspec.Struct, frozen=True):
    """A literal, or the unknown that folding a literal expression gave (`value` None)."""

    kind: Kind
    value: Value | None


class Attribute(msgspec.Struct, frozen=True):
    """The value of an attribute; as a condition, true when it is the boolean TRUE."""

    name: str


class Negate(msgspec.Struct, frozen=True):
    operand: ValueNode


class Arithmetic(msgspec.Struct, frozen=True):
    operator: ArithmeticOperator
    left: ValueNode
    right: ValueNode


class Compare(msgspec.Struct, frozen=True):
    operator: CompareOperator
    left: ValueNode
    right: ValueNode


class In(msgspec.Struct, frozen=True):
    operand: ValueNode
    values: tuple[Constant, ...]  # no repetition, at least one


class Like(msgspec.Struct, frozen=True):
    operand: ValueNode
    pattern: str
    escape: str  # one character, or "" for none


class IsNull(msgspec.Struct, frozen=True):
    name: str


class Not(msgspec.Struct, frozen=True):
    item: Condition


class And(msgspec.Struct, frozen=True):
    items: tuple[Condition, ...]


class Or(msgspec.Struct, frozen=True):
    items: tuple[Condition, ...]


ValueNode = Constant | Attribute | Negate | Arithmetic
Condition = Constant | Attribute | Compare | In | Like | IsNull | Not | And | Or

UNKNOWN: Final = Constant("unknown", None)
TRUE: Final = Constant("boolean", True)


def constant(value: Value | None) -> Constant:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return Constant("boolean", value)
    if isinstance(value, int):
        return Constant("integer", value)
    if isinstance(value, float):
        return Constant("float", value)
    return Constant("text", value)


def calculate(operator: ArithmeticOperator, left: Value | None, right: Value | None) -> int | float | None:
    """Arithmetic as a 64-bit machine and Spark do it; None is unknown.

    Two integers give an integer, unknown outside 64 bits; anything else, and every division, is done in
    doubles. Dividing by zero and a result that is not a number are unknown.
    """
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        return None
    if isinstance(left, bool) or isinstance(right, bool):
        return None
    if operator == "/":
        return None if right == 0 else _number(float(left) / float(right))
    if isinstance(left, int) and isinstance(right, int):
        whole = left + right if operator == "+" else left - right if operator == "-" else left * right
        return whole if INTEGER_MIN <= whole <= INTEGER_MAX else None
    first, second = float(left), float(right)
    if operator == "+":
        return _number(first + second)
    return _number(first - second if operator == "-" else first * second)


def negate(value: Value | None) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if value == INTEGER_MIN and isinstance(value, int) else -value


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def compare(operator: CompareOperator, left: Value | None, right: Value | None) -> bool | None:
    """The three-valued comparison of two values: unknown across types, booleans are not ordered.

    Integers and floats compare by their exact values, also beyond 2**53, which is what Python does. Text
    compares by code points, which is the order of its UTF-8 bytes.
    """
    if isinstance(left, str) and isinstance(right, str):
        return _ordered(operator, left, right)
    if isinstance(left, bool) and isinstance(right, bool):
        return left is right if operator == "=" else left is not right if operator == "<>" else None
    if _is_number(left) and _is_number(right):
        return _ordered(operator, left, right)
    return None


def _is_number(value: Value | None) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ordered(operator: CompareOperator, left: Any, right: Any) -> bool:
    return bool(_OPERATIONS[operator](left, right))


def contains(value: Value | None, members: tuple[Constant, ...]) -> bool | None:
    """IN: the disjunction of equalities, so unknown if nothing equals and some member is of another type."""
    truth: bool | None = False
    for member in members:
        equal = compare("=", value, member.value)
        if equal:
            return True
        if equal is None:
            truth = None
    return truth
