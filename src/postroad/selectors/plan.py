"""What the matching kernel is told about a selector's boxes: plain tuples, texts as UTF-8.

Each constraint is classified by how it can be found: by one of a few values or by a prefix (hashed), by a
range of numbers (sorted), or by nothing, when it is only checked.
"""

from __future__ import annotations

from typing import Any, Final

from postroad.selectors.boxes import Box
from postroad.selectors.domains import FALSE_BIT, TRUE_BIT, Domain, Spans, prefix_of

POINTS: Final = 0  # ((value, ...), the set they are or None if there is one value)
PREFIX: Final = 1  # bytes
RANGE: Final = 2  # (cut, cut)
SET: Final = 3  # (missing, booleans, numbers, texts)

MAX_POINTS: Final = 16  # values of an IN that are worth a key each

Check = tuple[bytes, int, Any]
Plan = tuple[tuple[tuple[Check, ...], bool], ...]


def to_plan(boxes: tuple[Box, ...]) -> Plan:
    return tuple(
        (tuple([_check(name.encode(), domain) for name, domain in box.domains.items()]), bool(box.opaque))
        for box in boxes
    )


def _check(name: bytes, domain: Domain) -> Check:
    if domain.missing:
        return (name, SET, _as_set(domain))
    if domain.numbers and not domain.booleans and not domain.texts and len(domain.numbers) == 1:
        low, high = domain.numbers[0]
        assert high is not None
        if low[0] == high[0]:
            return (name, POINTS, ((low[0],), None))
        return (name, RANGE, (low, high))
    if domain.texts and not domain.booleans and not domain.numbers:
        prefix = prefix_of(domain.texts)
        # The empty prefix is any text: nothing to hash.
        if prefix:
            return (name, PREFIX, prefix.encode())
    values = _points(domain)
    if values is None:
        return (name, SET, _as_set(domain))
    return (name, POINTS, (values, _as_set(domain) if len(values) > 1 else None))


def _points(domain: Domain) -> tuple[Any, ...] | None:
    """The values of the set if they are few, else None."""
    if len(domain.numbers) + len(domain.texts) > MAX_POINTS:
        return None
    found: list[Any] = [flag for flag, bit in ((False, FALSE_BIT), (True, TRUE_BIT)) if domain.booleans & bit]
    for low, high in (*domain.numbers, *domain.texts):
        if high is None or low[0] != high[0]:
            return None
        found.append(low[0].encode() if isinstance(low[0], str) else low[0])
    return tuple(found)


def _as_set(domain: Domain) -> tuple[bool, int, Spans, Spans]:
    return (domain.missing, domain.booleans, domain.numbers, _encoded(domain.texts))


def _encoded(spans: Spans) -> Spans:
    return tuple(
        ((low[0].encode(), low[1]), None if high is None else (high[0].encode(), high[1]))
        for low, high in spans
    )
