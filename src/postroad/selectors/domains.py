"""Sets of values that one attribute may have, closed under intersection and difference.

The values of an attribute are: missing, two booleans, numbers in their one order (5 and 5.0 are the same
value) and texts in code point order. A set of them is a `Domain`: a flag, a mask and two lists of spans.
Every constraint on a single attribute is exactly such a set (a prefix is a span of texts), which is what
makes covering decidable and gives the index one kind of check.

A span runs from one cut to another. A cut lies just below (side 0) or just above (side 1) a value, so that
open and closed ends need no cases; None as upper cut of texts means no end. Numbers end at the infinities,
which are values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from postroad.selectors.tree import CompareOperator, Constant

Cut = tuple[Any, int]  # (value, side); values of one list of spans are all numbers or all texts
Span = tuple[Cut, Cut | None]
Spans = tuple[Span, ...]

_LEAST_NUMBER: Final[Cut] = (float("-inf"), 0)
_END_OF_NUMBERS: Final[Cut] = (float("inf"), 1)
_LEAST_TEXT: Final[Cut] = ("", 0)
ALL_NUMBERS: Final[Spans] = ((_LEAST_NUMBER, _END_OF_NUMBERS),)
ALL_TEXTS: Final[Spans] = ((_LEAST_TEXT, None),)
FALSE_BIT: Final = 1
TRUE_BIT: Final = 2
_SURROGATES: Final = range(0xD800, 0xE000)


class Domain(msgspec.Struct, frozen=True):
    """The set: `missing` if the attribute may be absent, the allowed booleans, numbers and texts."""

    missing: bool = False
    booleans: int = 0
    numbers: Spans = ()
    texts: Spans = ()

    @property
    def empty(self) -> bool:
        return not (self.missing or self.booleans or self.numbers or self.texts)

    @property
    def size(self) -> int:
        """What comparing it with another takes, in spans."""
        return 1 + len(self.numbers) + len(self.texts)


ANYTHING: Final = Domain(missing=True, booleans=3, numbers=ALL_NUMBERS, texts=ALL_TEXTS)
PRESENT: Final = Domain(booleans=3, numbers=ALL_NUMBERS, texts=ALL_TEXTS)
MISSING: Final = Domain(missing=True)
NUMBER: Final = Domain(numbers=ALL_NUMBERS)
TEXT: Final = Domain(texts=ALL_TEXTS)
NOTHING: Final = Domain()


def meet(first: Domain, second: Domain) -> Domain:
    return Domain(
        first.missing and second.missing,
        first.booleans & second.booleans,
        _meet(first.numbers, second.numbers),
        _meet(first.texts, second.texts),
    )


def minus(first: Domain, second: Domain) -> Domain:
    return Domain(
        first.missing and not second.missing,
        first.booleans & ~second.booleans,
        _minus(first.numbers, second.numbers),
        _minus(first.texts, second.texts),
    )


def _before(first: Cut | None, second: Cut | None) -> bool:
    return first is not None and (second is None or first < second)


def _meet(first: Spans, second: Spans) -> Spans:
    if first is second or not first or not second:
        return first if second else ()
    common: list[Span] = []
    left = right = 0
    while left < len(first) and right < len(second):
        low = max(first[left][0], second[right][0])
        first_ends = _before(first[left][1], second[right][1])
        high = first[left][1] if first_ends else second[right][1]
        if _before(low, high):
            common.append((low, high))
        if first_ends:
            left += 1
        else:
            right += 1
    return tuple(common)


def _minus(first: Spans, second: Spans) -> Spans:
    rest: list[Span] = []
    at = 0  # of the first span of `second` that may still take something away
    for low, high in first:
        start: Cut | None = low
        while at < len(second) and not _before(start, second[at][1]):
            at += 1
        for place in range(at, len(second)):
            other_low, other_high = second[place]
            if start is None or not _before(other_low, high):
                break
            if start < other_low:
                rest.append((start, other_low))
            start = other_high
            at = place
        if start is not None and _before(start, high):
            rest.append((start, high))
    return tuple(rest)


def overlap(first: Domain, second: Domain) -> bool:
    """Whether some value is in both."""
    return bool(
        (first.missing and second.missing)
        or first.booleans & second.booleans
        or (first.numbers and second.numbers and _overlap(first.numbers, second.numbers))
        or (first.texts and second.texts and _overlap(first.texts, second.texts))
    )


def _overlap(first: Spans, second: Spans) -> bool:
    left = right = 0
    while left < len(first) and right < len(second):
        if not _before(second[right][0], first[left][1]):
            left += 1
        elif not _before(first[left][0], second[right][1]):
            right += 1
        else:
            return True
    return False


def points(values: Iterable[Any]) -> Spans:
    """The spans of single values, which must be all numbers or all texts."""
    return tuple(((value, 0), (value, 1)) for value in sorted(set(values)))


def compared(operator: CompareOperator, literal: Constant) -> Domain:
    """The values for which `attribute operator literal` is true."""
    value = literal.value
    if literal.kind == "boolean":
        bit = TRUE_BIT if value else FALSE_BIT
        if operator == "=":
            return Domain(booleans=bit)
        return Domain(booleans=3 - bit) if operator == "<>" else NOTHING
    if literal.kind == "text":
        return Domain(texts=_ordered(operator, value, _LEAST_TEXT, None))
    if literal.kind == "unknown":
        return NOTHING
    return Domain(numbers=_ordered(operator, value, _LEAST_NUMBER, _END_OF_NUMBERS))


def _ordered(operator: CompareOperator, value: Any, least: Cut, end: Cut | None) -> Spans:
    below: Cut = (value, 0)
    above: Cut = (value, 1)
    span: Span
    match operator:
        case "=":
            span = (below, above)
        case "<":
            span = (least, below)
        case "<=":
            span = (least, above)
        case ">":
            span = (above, end)
        case ">=":
            span = (below, end)
        case _:
            return _ordered("<", value, least, end) + _ordered(">", value, least, end)
    return (span,) if _before(*span) else ()


def listed(members: tuple[Constant, ...], *, negated: bool) -> Domain:
    """IN, NOT IN. A list of several types is never false, only true or unknown, so its NOT is never true."""
    numbers = points(member.value for member in members if member.kind in ("integer", "float"))
    texts = points(member.value for member in members if member.kind == "text")
    booleans = 0
    for member in members:
        if member.kind == "boolean":
            booleans |= TRUE_BIT if member.value else FALSE_BIT
    if not negated:
        return Domain(booleans=booleans, numbers=numbers, texts=texts)
    if bool(numbers) + bool(texts) + bool(booleans) != 1:
        return NOTHING
    if numbers:
        return Domain(numbers=_minus(ALL_NUMBERS, numbers))
    return Domain(texts=_minus(ALL_TEXTS, texts)) if texts else Domain(booleans=3 - booleans)


def prefixed(prefix: str) -> Domain:
    """The texts that begin with `prefix`."""
    end = _after(prefix)
    return Domain(texts=(((prefix, 0), None if end is None else (end, 0)),))


def _after(prefix: str) -> str | None:
    """The least text above all that begin with `prefix`; None if there is none."""
    while prefix:
        following = ord(prefix[-1]) + 1
        if following in _SURROGATES:
            following = _SURROGATES.stop
        if following <= 0x10FFFF:
            return prefix[:-1] + chr(following)
        prefix = prefix[:-1]
    return None


def prefix_of(spans: Spans) -> str | None:
    """The prefix, if these spans are exactly the texts that begin with one."""
    if len(spans) != 1:
        return None
    (low, side), high = spans[0]
    if side or (high is not None and high[1]):
        return None
    return str(low) if _after(low) == (None if high is None else high[0]) else None


def encoded(domain: Domain) -> tuple[bool, int, Spans, Spans]:
    """As the kernel takes it: texts in UTF-8."""
    texts = tuple(
        ((low[0].encode(), low[1]), None if high is None else (high[0].encode(), high[1]))
        for low, high in domain.texts
    )
    return (domain.missing, domain.booleans, domain.numbers, texts)
