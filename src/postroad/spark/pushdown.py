"""Filters of a batch query as a selector that brokers apply (spec P2).

The selector lets pass whatever the filters do, and perhaps more: Spark applies the filters again. So each
filter is translated only where a row that passes it has an attribute for which the condition is true. A
column of an attribute has its values of that column's type and is NULL for others, hence no IS NULL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from postroad.errors import UsageError
from postroad.events import pattern_matches
from postroad.events.topics import RESERVED
from postroad.selectors import Selector

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

_COMPARED: Final = {
    "EqualTo": "=",
    "EqualNullSafe": "=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
}
_LIKE: Final = {
    "StringStartsWith": "{}%",
    "StringEndsWith": "%{}",
    "StringContains": "%{}%",
}
_TYPES: Final = {"text": str, "integer": int, "float": float, "boolean": bool}


@dataclass(frozen=True, slots=True)
class Pushed:
    """What brokers filter with, and which pubend is asked, if it is one."""

    topic: str
    where: str
    pubends: frozenset[str] | None = None  # None: all

    def wants(self, pubend: str) -> bool:
        return self.pubends is None or pubend in self.pubends


def pushed(begun: Pushed, filters: Sequence[Filter], columns: dict[str, str]) -> Pushed:
    """With as many of the filters as brokers can apply; `columns` are name -> type of the attribute or ""."""
    pushed_down = begun
    for filter_ in filters:
        pushed_down = _with_topic(pushed_down, filter_)
        condition = _condition(filter_, columns)
        if condition:
            both = f"({pushed_down.where}) AND ({condition})" if pushed_down.where else condition
            try:
                Selector.parse(pushed_down.topic, both)
            except UsageError:  # too long, or too deep
                continue
            pushed_down = replace(pushed_down, where=both)
    return pushed_down


def _with_topic(pushed_down: Pushed, filter_: Any) -> Pushed:
    if (
        type(filter_).__name__ != "EqualTo"
        or len(filter_.attribute) != 1
        or not isinstance(filter_.value, str)
    ):
        return pushed_down
    if filter_.attribute == ("pubend",):
        wanted = frozenset({filter_.value})
        return replace(
            pushed_down, pubends=wanted if pushed_down.pubends is None else pushed_down.pubends & wanted
        )
    # Of `$postroad/...` there are rows that no broker has: gaps.
    if filter_.attribute != ("topic",) or filter_.value.startswith(RESERVED):
        return pushed_down
    try:
        Selector.parse(filter_.value, pushed_down.where)
    except UsageError:
        return pushed_down
    if {"+", "#"} & set(filter_.value.split("/")) or (
        pushed_down.topic and not pattern_matches(pushed_down.topic, filter_.value)
    ):
        return pushed_down
    return replace(pushed_down, topic=filter_.value)


def _condition(filter_: Any, columns: dict[str, str]) -> str:
    """ "" if there is none."""
    kind = type(filter_).__name__
    if kind == "Not":
        # These two pass rows without the attribute when they are negated, and a broker's condition does not.
        if type(filter_.child).__name__ in ("IsNotNull", "EqualNullSafe"):
            return ""
        inner = _condition(filter_.child, columns)
        return inner and f"NOT ({inner})"
    attribute: tuple[str, ...] = getattr(filter_, "attribute", ())
    of = columns.get(attribute[0], "") if len(attribute) == 1 else ""
    if not of:
        return ""
    name = '"' + attribute[0].replace('"', '""') + '"'
    if kind == "IsNotNull":
        return f"{name} IS NOT NULL"
    if kind in _LIKE:
        text = "".join(f"!{sign}" if sign in "!%_" else sign for sign in filter_.value)
        return f"{name} LIKE {_literal(_LIKE[kind].format(text))} ESCAPE '!'"
    if kind == "In":
        return _among(name, filter_.value, of)
    if kind not in _COMPARED or not _fits(filter_.value, of) or (of == "boolean" and _COMPARED[kind] != "="):
        return ""
    return f"{name} {_COMPARED[kind]} {_literal(filter_.value)}"


def _among(name: str, values: Sequence[Any], of: str) -> str:
    if not values or not all(_fits(value, of) for value in values):
        return ""
    return f"{name} IN ({', '.join(_literal(value) for value in values)})"


def _fits(value: Any, of: str) -> bool:
    """A literal of the column's type. Spark orders NaN and -0.0 differently: those stay with it."""
    if type(value) is float:
        return of == "float" and isfinite(value) and value != 0
    return type(value) is _TYPES[of]


def _literal(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return str(value).upper()
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)
