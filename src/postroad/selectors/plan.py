"""What the matching kernel is told about a selector's boxes: plain tuples, texts as UTF-8.

Each constraint is classified by how it can be found: by one of a few values or by a prefix (hashed), by a
range of numbers (sorted), or by nothing, when it is only checked. What is not a constraint on one attribute
comes as programs, to be run when all else fits.
"""

from __future__ import annotations

from typing import Any, Final

from postroad.selectors.boxes import Box
from postroad.selectors.cost import evaluation_steps
from postroad.selectors.domains import FALSE_BIT, TRUE_BIT, Domain, encoded, prefix_of
from postroad.selectors.program import Program, to_program
from postroad.selectors.tree import Condition

POINTS: Final = 0  # ((value, ...), the set they are or None if there is one value)
PREFIX: Final = 1  # bytes
RANGE: Final = 2  # (cut, cut)
SET: Final = 3  # (missing, booleans, numbers, texts)

MAX_POINTS: Final = 16  # values of an IN that are worth a key each

Check = tuple[bytes, int, Any]
Residue = tuple[int, Program]  # what a condition costs, and its program
Plan = tuple[tuple[tuple[Check, ...], tuple[Residue, ...]], ...]


def to_plan(boxes: tuple[Box, ...]) -> Plan:
    programs: dict[Condition, Residue] = {}  # boxes of one selector share their opaque conditions
    return tuple(
        [
            (
                tuple([_check(name.encode(), domain) for name, domain in box.domains.items()]),
                _residue(box.opaque, programs) if box.opaque else (),
            )
            for box in boxes
        ]
    )


def _residue(opaque: tuple[Condition, ...], programs: dict[Condition, Residue]) -> tuple[Residue, ...]:
    """The programs of what is left to ask, by increasing cost."""
    for condition in opaque:
        if condition not in programs:
            programs[condition] = (evaluation_steps(condition), to_program(condition))
    return tuple(sorted([programs[condition] for condition in opaque], key=lambda residue: residue[0]))


def _check(name: bytes, domain: Domain) -> Check:
    if domain.missing:
        return (name, SET, encoded(domain))
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
        return (name, SET, encoded(domain))
    return (name, POINTS, (values, encoded(domain) if len(values) > 1 else None))


def _points(domain: Domain) -> tuple[Any, ...] | None:
    """The values of the set if they are few, else None."""
    if len(domain.numbers) + len(domain.texts) > MAX_POINTS:
        return None
    points: list[Any] = [
        flag for flag, bit in ((False, FALSE_BIT), (True, TRUE_BIT)) if domain.booleans & bit
    ]
    for low, high in (*domain.numbers, *domain.texts):
        if high is None or low[0] != high[0]:
            return None
        points.append(low[0].encode() if isinstance(low[0], str) else low[0])
    return tuple(points)
