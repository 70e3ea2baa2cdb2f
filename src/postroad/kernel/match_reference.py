"""Matching in plain Python: what `match.pyx` means, and what runs where nothing was compiled.

Selectors come by number, each with its topic pattern and (unused here) its plan. Every
distinct selector is asked about every row whose topic it could match. Groups come in the order of their
rows, targets ascending, so both engines give equal answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from postroad.errors import BugError
from postroad.kernel import decode_attributes


class Conditional(Protocol):
    """What an engine needs of a selector: its condition, for what it cannot decide itself."""

    @property
    def predicate(self) -> Callable[[Mapping[str, Any]], bool | None]: ...


_FRAME_HEADER: Final = 48
_EVENT_HEADER: Final = 48
_TOPIC_LENGTH: Final = 32  # offset in the event header
_ATTRIBUTE_COUNT: Final = 42


class Group(NamedTuple):
    """Exactly these rows matched exactly these targets."""

    rows: npt.NDArray[np.uint32]  # increasing
    targets: list[int]  # increasing


class Index:
    """Selector numbers -> topic pattern, selector and targets."""

    def __init__(self) -> None:
        self._selectors: dict[int, Conditional] = {}
        self._levels: dict[int, list[str]] = {}  # the pattern's levels; [] for any topic
        self._exact: dict[str, dict[int, None]] = {}  # topic without wildcards -> selectors
        self._others: dict[int, None] = {}  # selectors with wildcards or any topic
        self._targets: dict[int, dict[int, None]] = {}  # selector -> targets

    def insert(self, number: int, topic: str, plan: object, selector: Conditional) -> None:
        del plan
        if number in self._selectors:
            raise BugError(f"selector {number} is in the index already")
        self._selectors[number] = selector
        self._levels[number] = topic.split("/") if topic else []
        self._targets[number] = {}
        if _is_exact(self._levels[number]):
            self._exact.setdefault(topic, {})[number] = None
        else:
            self._others[number] = None

    def delete(self, number: int) -> None:
        if self._targets.pop(number):
            raise BugError(f"selector {number} still has targets")
        levels = self._levels.pop(number)
        del self._selectors[number]
        if _is_exact(levels):
            topic = "/".join(levels)
            del self._exact[topic][number]
            if not self._exact[topic]:
                del self._exact[topic]
        else:
            del self._others[number]

    def attach(self, number: int, target: int) -> bool:
        """Gives a selector a target; False if it has it already."""
        targets = self._targets[number]
        if target in targets:
            return False
        targets[target] = None
        return True

    def detach(self, number: int, target: int) -> int:
        """Takes a target from a selector; how many it has left."""
        del self._targets[number][target]
        return len(self._targets[number])

    def targets(self, number: int) -> int:
        """How many targets a selector has."""
        return len(self._targets[number])

    def match(self, data: bytes, extents: bytes) -> list[Group]:
        rows: dict[int, list[int]] = {}  # target -> rows
        for row in range(int.from_bytes(data[8:12], "little")):
            header = _FRAME_HEADER + _EVENT_HEADER * row
            begin = int.from_bytes(extents[4 * row : 4 * row + 4], "little")
            end = begin + int.from_bytes(data[header + _TOPIC_LENGTH : header + _TOPIC_LENGTH + 2], "little")
            count = int.from_bytes(data[header + _ATTRIBUTE_COUNT : header + _ATTRIBUTE_COUNT + 2], "little")
            attributes = decode_attributes(data, end, count) if count else {}
            for target in self._wanted(data[begin:end].decode(), attributes):
                rows.setdefault(target, []).append(row)
        groups: dict[tuple[int, ...], list[int]] = {}
        for target in sorted(rows):
            groups.setdefault(tuple(rows[target]), []).append(target)
        return [Group(np.array(key, np.uint32), groups[key]) for key in sorted(groups)]

    def _wanted(self, topic: str, attributes: Mapping[str, Any]) -> set[int]:
        levels = topic.split("/")
        candidates = [*self._exact.get(topic, ())]
        candidates += [number for number in self._others if _matches(self._levels[number], levels)]
        targets: set[int] = set()
        for number in candidates:
            if self._selectors[number].predicate(attributes) is True:
                targets.update(self._targets[number])
        return targets

    def stats(self) -> dict[str, int]:
        return {"compiled": 0}

    def check(self) -> None:
        exact = [number for numbers in self._exact.values() for number in numbers]
        if sorted([*exact, *self._others]) != sorted(self._selectors) or not all(self._exact.values()):
            raise BugError("a selector is filed twice or not at all")
        if set(self._targets) != set(self._selectors) or set(self._levels) != set(self._selectors):
            raise BugError("a selector lacks its targets or its topic")


def _is_exact(levels: list[str]) -> bool:
    return bool(levels) and "+" not in levels and levels[-1] != "#"


def _matches(wanted: list[str], levels: list[str]) -> bool:
    """The rule of events.topics, on levels that are split already."""
    if not wanted:
        return True
    if wanted[0] in ("+", "#") and levels[0].startswith("$"):
        return False
    depth = len(wanted)
    if wanted[-1] == "#":
        depth -= 1
        if len(levels) < depth:
            return False
    elif len(levels) != depth:
        return False
    return all(wanted[at] in ("+", levels[at]) for at in range(depth))
