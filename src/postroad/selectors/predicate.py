"""Tree -> predicate: closures over a mapping of attributes, with three truth values (None is unknown).

This is the meaning of the language. The index, the kernel, covering and the Spark column are all tested
against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from postroad.errors import BugError
from postroad.kernel import like_reference
from postroad.selectors import tree
from postroad.selectors.tree import Condition, Value, ValueNode

Attributes = Mapping[str, Value]
Predicate = Callable[[Attributes], bool | None]
_Getter = Callable[[Attributes], Value | None]


def compile_condition(node: Condition) -> Predicate:
    match node:
        case tree.Constant():
            known = node.value if isinstance(node.value, bool) else None
            return lambda _: known
        case tree.Attribute():
            return _truth(node.name)
        case tree.Compare():
            return _comparison(node)
        case tree.In():
            operand, members = _value(node.operand), node.values
            return lambda attributes: tree.contains(operand(attributes), members)
        case tree.Like():
            return _like(node)
        case tree.IsNull():
            missing = node.name
            return lambda attributes: missing not in attributes
        case tree.Not():
            return _negation(compile_condition(node.item))
        case tree.And():
            return _every([compile_condition(item) for item in node.items])
        case tree.Or():
            return _any([compile_condition(item) for item in node.items])
    raise BugError(f"no predicate for {node!r}")


def _truth(name: str) -> Predicate:
    def truth(attributes: Attributes) -> bool | None:
        value = attributes.get(name)
        return value if isinstance(value, bool) else None

    return truth


def _comparison(node: tree.Compare) -> Predicate:
    left, right, operator, compare = _value(node.left), _value(node.right), node.operator, tree.compare
    if isinstance(node.right, tree.Constant):
        fixed = node.right.value
        return lambda attributes: compare(operator, left(attributes), fixed)
    return lambda attributes: compare(operator, left(attributes), right(attributes))


def _negation(inner: Predicate) -> Predicate:
    def negation(attributes: Attributes) -> bool | None:
        truth = inner(attributes)
        return None if truth is None else not truth

    return negation


def _every(items: list[Predicate]) -> Predicate:
    def every(attributes: Attributes) -> bool | None:
        result: bool | None = True
        for item in items:
            truth = item(attributes)
            if truth is False:
                return False
            if truth is None:
                result = None
        return result

    return every


def _any(items: list[Predicate]) -> Predicate:
    def some(attributes: Attributes) -> bool | None:
        result: bool | None = False
        for item in items:
            truth = item(attributes)
            if truth:
                return True
            if truth is None:
                result = None
        return result

    return some


def _value(node: ValueNode) -> _Getter:
    match node:
        case tree.Constant():
            fixed = node.value
            return lambda _: fixed
        case tree.Attribute():
            name = node.name
            return lambda attributes: attributes.get(name)
        case tree.Negate():
            inner = _value(node.operand)
            return lambda attributes: tree.negate(inner(attributes))
        case tree.Arithmetic():
            left, right, operator = _value(node.left), _value(node.right), node.operator
            return lambda attributes: tree.calculate(operator, left(attributes), right(attributes))
    raise BugError(f"no value for {node!r}")


_ANY: Final = "%"
_ONE: Final = "_"


def like_parts(pattern: str, escape: str) -> list[str | None]:
    """A LIKE pattern as single characters, None for `_`, and "" for `%`."""
    parts: list[str | None] = []
    at = 0
    while at < len(pattern):
        sign = pattern[at]
        if escape and sign == escape:
            at += 1
            parts.append(pattern[at])
        else:
            parts.append("" if sign == _ANY else None if sign == _ONE else sign)
        at += 1
    return parts


def _like(node: tree.Like) -> Predicate:
    operand, matches = _value(node.operand), like_matcher(node.pattern, node.escape)

    def like(attributes: Attributes) -> bool | None:
        value = operand(attributes)
        return matches(value) if isinstance(value, str) else None

    return like


def like_matcher(pattern: str, escape: str) -> Callable[[str], bool]:
    return like_reference.like_matcher(like_parts(pattern, escape))
