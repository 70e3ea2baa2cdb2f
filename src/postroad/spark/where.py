"""A selector as a Spark column over the events table, with the broker's own answers (spec P2).

`selectors/predicate.py` is the meaning of the language. Spark's differs in details that matter: it compares
across types by casting, integers with floats as doubles, raises on overflow, and has an escape character in
every LIKE. So each value is carried as the columns it can have, by type, of which at most one is not NULL,
and each operation says what it does with which types; everything else is NULL, which is SQL's and the
selectors' unknown. The column is made as text: a condition of hundreds of nodes is one call to Spark.

Attributes are a map from the name to a struct of `text`, `integer`, `float` and `boolean` (`lake.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from math import floor, inf, isfinite, nextafter
from typing import TYPE_CHECKING, Final, NamedTuple

from postroad.errors import BugError, UsageError
from postroad.selectors import Selector, tree
from postroad.selectors.predicate import like_parts
from postroad.selectors.tree import Condition, ValueNode
from postroad.spark.session import check_installed

if TYPE_CHECKING:
    from pyspark.sql import Column

NULL: Final = "CAST(NULL AS BOOLEAN)"
_2_63: Final = "9223372036854775808D"
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
_SAFE: Final = re.compile(r"[\w .:/$%+-]*", re.ASCII)  # means itself in a quoted text
_TRY: Final = {"+": "try_add", "-": "try_subtract", "*": "try_multiply"}


def where(
    selector: Selector | str, *, topic: str = "", columns: tuple[str, str] = ("topic", "attributes")
) -> Column:
    """True for the events a subscription with this selector would get, else false.

    `selector` is a condition, or a parsed selector with its topic pattern. `columns` are the names of the
    topic's and the attributes' columns.
    """
    check_installed()
    from pyspark.sql.functions import expr

    if not isinstance(selector, Selector | str):
        raise UsageError(f"a condition is text or a Selector, not {selector!r}")
    chosen = Selector.parse(topic, selector) if isinstance(selector, str) else selector
    return expr(selector_sql(chosen, columns=columns))


def selector_sql(selector: Selector, *, columns: tuple[str, str] = ("topic", "attributes")) -> str:
    """The text of `where`."""
    condition = f"(({condition_sql(selector.condition, columns[1])}) IS TRUE)"
    if not selector.topic:
        return condition
    return f"({topic_sql(selector.topic, columns[0])} AND {condition})"


def topic_sql(pattern: str, column: str = "topic") -> str:
    """Whether a topic matches a checked pattern, as `events.topics.pattern_matches` says."""
    levels = pattern.split("/")
    if not {"+", "#"} & set(levels):
        return f"({column} = {_text(pattern)})"
    body = ""
    for index, level in enumerate(levels):
        if level == "#":
            body += "(?:/.*)?" if index else ".*"
        else:
            body += ("/" if index else "") + ("[^/]*" if level == "+" else _literal(level))
    matched = _regexp(column, body)
    return f"({matched} AND NOT startswith({column}, '$'))" if levels[0] in ("+", "#") else matched


def condition_sql(condition: Condition, attributes: str = "attributes") -> str:
    """The condition with its three truth values: true, false, NULL."""
    return _Writer(attributes).condition(condition)


class _Value(NamedTuple):
    """SQL of a value by type; "" where it cannot be of that type. At most one is not NULL."""

    text: str = ""
    integer: str = ""
    real: str = ""
    boolean: str = ""
    known: int | float | None = None  # the number, if it is a literal


class _Writer:
    def __init__(self, attributes: str) -> None:
        self._attributes = attributes
        self._names = count(1)  # of bound variables

    def condition(self, node: Condition) -> str:
        match node:
            case tree.Constant():
                return str(node.value).lower() if isinstance(node.value, bool) else NULL
            case tree.Attribute():
                return f"{self._entry(node.name)}.boolean"
            case tree.Compare():
                return self._compare(node)
            case tree.In():
                return self._bound([node.operand], lambda values: _contained(values[0], node.values))
            case tree.Like():
                return self._bound([node.operand], lambda values: _like(values[0], node))
            case tree.IsNull():
                return f"({self._entry(node.name)} IS NULL)"
            case tree.Not():
                return f"(NOT {self.condition(node.item)})"
            case tree.And():
                return "(" + " AND ".join(self.condition(item) for item in node.items) + ")"
            case tree.Or():
                return "(" + " OR ".join(self.condition(item) for item in node.items) + ")"
        raise BugError(f"no column for {node!r}")

    def _entry(self, name: str) -> str:
        return f"try_element_at({self._attributes}, {_text(name)})"

    def _compare(self, node: tree.Compare) -> str:
        return self._bound([node.left, node.right], lambda values: _compared(node.operator, *values))

    def _bound(self, nodes: list[ValueNode], make: Callable[[list[_Value]], str]) -> str:
        """What `make` writes about the values of these nodes, each calculated once.

        Arithmetic inside arithmetic would otherwise be written out several times at every level. Spark has
        no `let`; a lambda over an array of one element is one.
        """
        values: list[_Value] = []
        opened: list[tuple[str, str]] = []  # (variable, what it is bound to)
        for node in nodes:
            if isinstance(node, tree.Negate | tree.Arithmetic):
                name = f"v{next(self._names)}"
                opened.append((name, self._number(node)))
                values.append(_Value(integer=f"{name}.i", real=f"{name}.r"))
            else:
                values.append(self._leaf(node))
        body = make(values)
        for name, bound in reversed(opened):
            body = f"element_at(transform(array({bound}), {name} -> {body}), 1)"
        return body

    def _number(self, node: tree.Negate | tree.Arithmetic) -> str:
        """A struct of `i` and `r`, of which at most one is not NULL."""
        if isinstance(node, tree.Negate):
            return self._bound([node.operand], lambda values: _struct(*_negated(values[0])))
        return self._bound(
            [node.left, node.right], lambda values: _struct(*_calculated(node.operator, *values))
        )

    def _leaf(self, node: tree.Constant | tree.Attribute) -> _Value:
        if isinstance(node, tree.Attribute):
            entry = self._entry(node.name)
            return _Value(f"{entry}.text", f"{entry}.integer", f"{entry}.`float`", f"{entry}.boolean")
        match node.kind:
            case "text":
                return _Value(text=_text(str(node.value)))
            case "integer":
                return _Value(integer=_integer(int(node.value or 0)), known=int(node.value or 0))
            case "float":
                return _Value(real=_double(float(node.value or 0.0)), known=float(node.value or 0.0))
            case "boolean":
                return _Value(boolean=str(node.value).lower())
        return _Value()


# ---- literals, in forms that no setting of Spark's parser changes


def _text(text: str) -> str:
    return f"'{text}'" if _SAFE.fullmatch(text) else f"CAST(X'{text.encode().hex()}' AS STRING)"


def _integer(value: int) -> str:
    return f"CAST('{value}' AS BIGINT)" if value == tree.INTEGER_MIN else f"{value}L"


def _double(value: float) -> str:
    if isfinite(value):
        return f"{value!r}D"
    return f"CAST('{'-' if value < 0 else ''}Infinity' AS DOUBLE)"


def _literal(text: str) -> str:
    """A text in a regular expression of Java."""
    return "".join(sign if sign in _PLAIN else rf"\x{{{ord(sign):x}}}" for sign in text)


def _regexp(value: str, body: str) -> str:
    """Whether all of a text matches; `.` is any character."""
    whole = rf"(?s)\A{body}\z"
    return f"regexp_like({value}, {_text(whole)})"


# ---- operations


def _struct(integer: str, real: str) -> str:
    return f"named_struct('i', {integer or 'CAST(NULL AS BIGINT)'}, 'r', {real or 'CAST(NULL AS DOUBLE)'})"


def _negated(value: _Value) -> tuple[str, str]:
    # 0 - x is NULL for the one integer that has no opposite.
    integer = f"try_subtract({_integer(0)}, {value.integer})" if value.integer else ""
    return integer, f"(- {value.real})" if value.real else ""


def _as_double(value: _Value) -> str:
    if not value.integer:
        return value.real
    widened = f"CAST({value.integer} AS DOUBLE)"
    return f"coalesce({value.real}, {widened})" if value.real else widened


def _calculated(operator: tree.ArithmeticOperator, left: _Value, right: _Value) -> tuple[str, str]:
    """`tree.calculate`, as (integer, real)."""
    first, second = _as_double(left), _as_double(right)
    if not first or not second:
        return "", ""
    if operator == "/":
        return "", _not_nan(f"try_divide({first}, {second})")
    real = _not_nan(f"({first} {operator} {second})")
    if not (left.integer and right.integer):
        return "", real
    integer = f"{_TRY[operator]}({left.integer}, {right.integer})"
    floats = " OR ".join(f"{part.real} IS NOT NULL" for part in (left, right) if part.real)
    return integer, f"CASE WHEN {floats} THEN {real} END" if floats else ""


def _not_nan(value: str) -> str:
    return f"nullif({value}, CAST('NaN' AS DOUBLE))"


def _compared(operator: tree.CompareOperator, left: _Value, right: _Value) -> str:
    """`tree.compare`: of the ways to compare, the one that both values are of the types for."""
    ways: list[str] = []
    if left.text and right.text:
        ways.append(f"({left.text} {operator} {right.text})")
    if left.boolean and right.boolean and operator in ("=", "<>"):
        ways.append(f"({left.boolean} {operator} {right.boolean})")
    if left.integer and right.integer:
        ways.append(f"({left.integer} {operator} {right.integer})")
    if left.real and right.real:
        ways.append(f"({left.real} {operator} {right.real})")
    if left.integer and right.real:
        if right.known is not None:
            ways.append(_integer_beside(left.integer, operator, right.known))
        else:
            ways.append(f"({_order(left.integer, right.real)} {operator} 0)")
    if left.real and right.integer:
        if right.known is not None:
            ways.append(_real_beside(left.real, operator, int(right.known)))
        else:
            ways.append(f"({_order(right.integer, left.real)} {tree.MIRRORED[operator]} 0)")
    return _first(ways)


def _integer_beside(value: str, operator: tree.CompareOperator, bound: float) -> str:
    """An integer compared with a literal double, by exact values."""
    if _whole(bound):
        return f"({value} {operator} {_integer(int(bound))})"
    if not tree.INTEGER_MIN <= bound <= tree.INTEGER_MAX:
        return _decided(value, tree.compare(operator, 0, bound))
    return _between_two(value, operator, _integer(floor(bound)))


def _real_beside(value: str, operator: tree.CompareOperator, bound: int) -> str:
    """A double compared with a literal integer, by exact values."""
    near = float(bound)
    if near == bound:
        return f"({value} {operator} {_double(near)})"
    return _between_two(value, operator, _double(near if near < bound else nextafter(near, -inf)))


def _between_two(value: str, operator: tree.CompareOperator, below: str) -> str:
    """Compared with something between the possible values `below` and the next one."""
    if operator in ("=", "<>"):
        return _decided(value, operator == "<>")
    return f"({value} {'<=' if operator in ('<', '<=') else '>'} {below})"


def _decided(value: str, answer: bool | None) -> str:
    return f"CASE WHEN {value} IS NOT NULL THEN {str(answer).lower()} END"


def _first(ways: list[str]) -> str:
    return f"coalesce({', '.join(ways)})" if len(ways) > 1 else ways[0] if ways else NULL


def _order(integer: str, real: str) -> str:
    """-1, 0 or 1 as the integer is below, at or above the double, by their exact values.

    Rounding to a double keeps the order, so it decides unless it comes out equal; then the double is whole,
    and is 2**63, above every integer, or is an integer itself.
    """
    wide, whole = f"CAST({integer} AS DOUBLE)", f"try_cast({real} AS BIGINT)"
    return (
        f"CASE WHEN {wide} < {real} THEN -1 WHEN {wide} > {real} THEN 1"
        f" WHEN {real} >= {_2_63} AND {integer} IS NOT NULL THEN -1"
        f" WHEN {integer} < {whole} THEN -1 WHEN {integer} > {whole} THEN 1"
        f" WHEN {integer} = {whole} THEN 0 END"
    )


def _contained(value: _Value, members: tuple[tree.Constant, ...]) -> str:
    """`tree.contains`. Members of another type make what would be false unknown."""
    texts = [str(member.value) for member in members if member.kind == "text"]
    flags = [bool(member.value) for member in members if member.kind == "boolean"]
    numbers = [
        member.value
        for member in members
        if isinstance(member.value, int | float) and member.kind != "boolean"
    ]
    kinds = sum(bool(some) for some in (texts, flags, numbers))
    integers = sorted({int(number) for number in numbers if _whole(number)})
    reals = sorted({float(number) + 0.0 for number in numbers if float(number) == number})
    ways: list[str] = []
    if value.text and texts:
        ways.append(_among(value.text, [_text(text) for text in sorted(set(texts))], alone=kinds == 1))
    if value.boolean and flags:
        ways.append(
            _among(value.boolean, [str(flag).lower() for flag in sorted(set(flags))], alone=kinds == 1)
        )
    if value.integer and numbers:
        ways.append(_among(value.integer, [_integer(integer) for integer in integers], alone=kinds == 1))
    if value.real and numbers:
        # Spark looks into a long list by hashing, where -0.0 is not 0.0.
        plus_zero = f"({value.real} + {_double(0.0)})"
        ways.append(_among(plus_zero, [_double(real) for real in reals], alone=kinds == 1))
    return _first(ways)


def _whole(value: int | float) -> bool:
    """Whether an integer attribute can equal it."""
    return isfinite(value) and value == int(value) and tree.INTEGER_MIN <= value <= tree.INTEGER_MAX


def _among(value: str, members: list[str], *, alone: bool) -> str:
    if not members:
        return _decided(value, False) if alone else NULL
    among = f"({value} IN ({', '.join(members)}))"
    return among if alone else f"CASE WHEN {among} THEN true END"


def _like(value: _Value, node: tree.Like) -> str:
    """LIKE without backtracking, as `predicate.like_matcher` does it: an atomic group per piece."""
    if not value.text:
        return NULL
    pieces = [""]
    for part in like_parts(node.pattern, node.escape):
        if part == "":
            pieces.append("")
        else:
            pieces[-1] += "." if part is None else _literal(part)
    first, *rest = pieces
    body = first
    if rest:
        body += "".join(f"(?>.*?{piece})" for piece in rest[:-1]) + f".*{rest[-1]}"
    return _regexp(value.text, body)
