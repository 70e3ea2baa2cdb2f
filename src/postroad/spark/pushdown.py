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
    found = begun
    for one in filters:
        found = _with_topic(found, one)
        condition = _condition(one, columns)
        if condition:
            both = f"({found.where}) AND ({condition})" if found.where else condition
            try:
                Selector.parse(found.topic, both)
            except UsageError:  # too long, or too deep
                continue
            found = replace(found, where=both)
    return found


def _with_topic(found: Pushed, one: Any) -> Pushed:
    if type(one).__name__ != "EqualTo" or len(one.attribute) != 1 or not isinstance(one.value, str):
        return found
    if one.attribute == ("pubend",):
        wanted = frozenset({one.value})
        return replace(found, pubends=wanted if found.pubends is None else found.pubends & wanted)
    # Of `$postroad/...` there are rows that no broker has: gaps.
    if one.attribute != ("topic",) or one.value.startswith(RESERVED):
        return found
    try:
        Selector.parse(one.value, found.where)
    except UsageError:
        return found
    if {"+", "#"} & set(one.value.split("/")) or (
        found.topic and not pattern_matches(found.topic, one.value)
    ):
        return found
    return replace(found, topic=one.value)


def _condition(one: Any, columns: dict[str, str]) -> str:
    """ "" if there is none."""
    kind = type(one).__name__
    if kind == "Not":
        # These two pass rows without the attribute when they are negated, and a broker's condition does not.
        if type(one.child).__name__ in ("IsNotNull", "EqualNullSafe"):
            return ""
        inner = _condition(one.child, columns)
        return inner and f"NOT ({inner})"
    attribute: tuple[str, ...] = getattr(one, "attribute", ())
    of = columns.get(attribute[0], "") if len(attribute) == 1 else ""
    if not of:
        return ""
    name = '"' + attribute[0].replace('"', '""') + '"'
    if kind == "IsNotNull":
        return f"{name} IS NOT NULL"
    if kind in _LIKE:
        text = "".join(f"!{sign}" if sign in "!%_" else sign for sign in one.value)
        return f"{name} LIKE {_literal(_LIKE[kind].format(text))} ESCAPE '!'"
    if kind == "In":
        return _among(name, one.value, of)
    if kind not in _COMPARED or not _fits(one.value, of) or (of == "boolean" and _COMPARED[kind] != "="):
        return ""
    return f"{name} {_COMPARED[kind]} {_literal(one.value)}"


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
