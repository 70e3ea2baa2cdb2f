"""Covering: does every event that one selector matches match another?

Brokers tell each other only the selectors that no other one covers. A wrong yes would lose events, a
wrong no costs a table entry, so the answer is exact where it can be and no otherwise. Topics: patterns are
compared level by level, exactly. Conditions: what is left of the narrow one's boxes after taking away the
wide one's is computed; nothing left means covered. That is exact as long as both are made of constraints
on single attributes. Opaque conditions count as covered only by themselves, and a subtraction that takes
more than its effort is given up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from postroad.selectors.boxes import Box
from postroad.selectors.domains import ANYTHING, Domain, meet, minus, overlap
from postroad.selectors.selector import Selector

MAX_STEPS: Final = 8192  # spans compared in one question


class Effort:
    """What may still be spent on questions, in spans compared (about half a microsecond each)."""

    __slots__ = ("left",)

    def __init__(self, left: int = MAX_STEPS) -> None:
        self.left = left


def covers(wide: Selector, narrow: Selector, effort: Effort | None = None) -> bool:
    """True only if every event that matches `narrow` matches `wide`."""
    if wide == narrow:
        return True
    if not narrow.boxes:
        return True
    if not pattern_covers(wide.topic, narrow.topic):
        return False
    return condition_covers(wide.boxes, narrow.boxes, Effort() if effort is None else effort)


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


def condition_covers(wide: tuple[Box, ...], narrow: tuple[Box, ...], effort: Effort) -> bool:
    # (part of the narrow condition not yet covered, index of the wide box to take away next)
    pending: list[tuple[Mapping[str, Domain], tuple[object, ...], int]] = [
        (box.domains, box.opaque, 0) for box in narrow
    ]
    last = len(wide) - 1
    while pending:
        part, opaque, at = pending.pop()
        while at < last and effort.left > 0 and not _touches(wide[at], part, opaque, effort):
            at += 1
        if at > last or effort.left <= 0:
            return False
        if at < last:
            pending += [(rest, opaque, at + 1) for rest in _remainder(part, wide[at], effort)]
        elif not _within(part, opaque, wide[last], effort):
            return False
    return True


def _touches(box: Box, part: Mapping[str, Domain], opaque: tuple[object, ...], effort: Effort) -> bool:
    """Whether taking `box` away takes something away that we can describe."""
    effort.left -= 1 + len(box.opaque) * len(opaque)
    if not all(item in opaque for item in box.opaque):
        return False
    for name, domain in box.domains.items():
        have = part.get(name)
        if have is not None:
            effort.left -= have.size + domain.size
            if effort.left <= 0 or not overlap(have, domain):
                return False
    return True


def _within(part: Mapping[str, Domain], opaque: tuple[object, ...], box: Box, effort: Effort) -> bool:
    """Whether the box contains all of `part`."""
    effort.left -= 1 + len(box.opaque) * len(opaque)
    if not (box.domains.keys() <= part.keys() and all(item in opaque for item in box.opaque)):
        return False
    for name, domain in box.domains.items():
        have = part[name]
        effort.left -= have.size + domain.size
        if effort.left <= 0 or not minus(have, domain).empty:
            return False
    return True


def _remainder(part: Mapping[str, Domain], box: Box, effort: Effort) -> list[dict[str, Domain]]:
    """`part` without `box`, as disjoint boxes: outside in one attribute, inside in all those before it.

    Cut short when the effort is spent; whoever asks looks at that before anything else.
    """
    parts: list[dict[str, Domain]] = []
    inside = dict(part)
    for name, domain in box.domains.items():
        have = inside.get(name, ANYTHING)
        effort.left -= have.size + domain.size + len(inside)
        if effort.left <= 0:
            break
        outside = minus(have, domain)
        if not outside.empty:
            parts.append(inside | {name: outside})
            inside[name] = meet(have, domain)
    return parts
