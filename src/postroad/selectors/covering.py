"""Covering: does every event that one selector matches match another?

Brokers tell each other only the selectors that no other one covers. A wrong yes would lose events, a
wrong no costs a table entry, so the answer is exact where it can be and no otherwise. Topics: patterns are
compared level by level, exactly. Conditions: what is left of the narrow one's boxes after taking away the
wide one's is computed; nothing left means covered. That is exact as long as both are made of constraints
on single attributes. Opaque conditions count as covered only by themselves, and a subtraction that takes
more than MAX_STEPS is given up.
"""

from __future__ import annotations

from typing import Final

from postroad.selectors.boxes import Box
from postroad.selectors.domains import ANYTHING, Domain, meet, minus
from postroad.selectors.selector import Selector

MAX_STEPS: Final = 512  # boxes looked at in one question


def covers(wide: Selector, narrow: Selector) -> bool:
    """True only if every event that matches `narrow` matches `wide`."""
    if wide == narrow:
        return True
    if not narrow.boxes:
        return True
    return pattern_covers(wide.topic, narrow.topic) and condition_covers(wide.boxes, narrow.boxes)


def pattern_covers(wide: str, narrow: str) -> bool:
    """Exact for topics of any depth. "" stands for every topic, "#" for all that do not begin with "$"."""
    if wide in ("", narrow):
        return True
    if not narrow:
        return False
    outer, inner = _levels(wide), _levels(narrow)
    if outer[0] in ("+", "#") and inner[0].startswith("$"):
        return False
    for at, level in enumerate(outer):
        if level == "#":
            return True
        if at == len(inner) or inner[at] == "#" or level not in ("+", inner[at]):
            return False
    return len(inner) == len(outer)


def _levels(pattern: str) -> list[str]:
    # A topic has at least one level, so "#" says the same as "+/#"; with that the rest needs no exception.
    return ["+", "#"] if pattern == "#" else pattern.split("/")


def condition_covers(wide: tuple[Box, ...], narrow: tuple[Box, ...]) -> bool:
    # (part of the narrow condition not yet covered, index of the wide box to take away next)
    pending: list[tuple[dict[str, Domain], tuple[object, ...], int]] = [
        (dict(box.domains), box.opaque, 0) for box in narrow
    ]
    steps = 0
    while pending:
        steps += 1
        if steps > MAX_STEPS:
            return False
        part, opaque, at = pending.pop()
        while at < len(wide) and not _touches(wide[at], part, opaque):
            at += 1
        if at == len(wide):
            return False
        pending += [(rest, opaque, at + 1) for rest in _remainder(part, wide[at])]
    return True


def _touches(box: Box, part: dict[str, Domain], opaque: tuple[object, ...]) -> bool:
    """Whether taking `box` away takes something away that we can describe."""
    return all(item in opaque for item in box.opaque) and all(
        not meet(part.get(name, ANYTHING), domain).empty for name, domain in box.domains.items()
    )


def _remainder(part: dict[str, Domain], box: Box) -> list[dict[str, Domain]]:
    """`part` without `box`, as disjoint boxes: outside in one attribute, inside in all those before it."""
    found: list[dict[str, Domain]] = []
    inside = dict(part)
    for name, domain in box.domains.items():
        have = inside.get(name, ANYTHING)
        outside = minus(have, domain)
        if not outside.empty:
            found.append(inside | {name: outside})
            inside[name] = meet(have, domain)
    return found
