"""A selector: a topic pattern and a condition, both optional, parsed and checked."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from postroad.events.topics import RESERVED, check_pattern, pattern_matches
from postroad.ids import is_history
from postroad.selectors import tree
from postroad.selectors.boxes import Box, to_boxes
from postroad.selectors.cost import boxes_steps, taking_in_units
from postroad.selectors.predicate import Predicate, compile_condition
from postroad.wire.frames import DEFAULT_LIMITS, Limits

MAX_CACHED: Final = 128  # selectors kept by their text: up to 20 KiB each
MAX_CACHED_TEXT: Final = 512  # characters of a condition; what follows from a longer one may be very large


class Selector:
    """What somebody wants: events whose topic matches `topic` ("" any) and whose attributes satisfy `where`.

    Two selectors are equal when their texts are. What follows from the texts is derived when first needed
    and may be dropped again: a million selectors are kept as texts only.
    """

    __slots__ = ("_boxes", "_condition", "_predicate", "topic", "where")

    topic: str
    where: str
    _condition: tree.Condition | None
    _predicate: Predicate | None
    _boxes: tuple[Box, ...] | None

    def __init__(self, topic: str, where: str) -> None:
        """Use `parse`, which checks the topic and remembers."""
        put = object.__setattr__
        put(self, "topic", sys.intern(topic))
        put(self, "where", where)
        put(self, "_condition", _condition(where))
        put(self, "_predicate", None)
        put(self, "_boxes", None)

    @classmethod
    def parse(cls, topic: str = "", where: str = "", limits: Limits = DEFAULT_LIMITS) -> Selector:
        """Checked selector; UsageError for the topic, SelectorError (at the character) for the condition."""
        if topic:
            check_pattern(topic, limits)
        where = where.strip()
        return _parsed(topic, where) if len(where) <= MAX_CACHED_TEXT else cls(topic, where)

    def forget(self) -> None:
        """Drops what can be derived again."""
        put = object.__setattr__
        put(self, "_condition", None)
        put(self, "_predicate", None)
        put(self, "_boxes", None)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a selector does not change")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selector) and self.topic == other.topic and self.where == other.where

    def __hash__(self) -> int:
        return hash((self.topic, self.where))

    def __repr__(self) -> str:
        return f"Selector(topic={self.topic!r}, where={self.where!r})"

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (Selector, (self.topic, self.where))

    @property
    def condition(self) -> tree.Condition:
        condition = self._condition
        if condition is None:
            condition = _condition(self.where)
            object.__setattr__(self, "_condition", condition)
        return condition

    @property
    def predicate(self) -> Predicate:
        """The condition over attributes, with three truth values."""
        predicate = self._predicate
        if predicate is None:
            predicate = compile_condition(self.condition)
            object.__setattr__(self, "_predicate", predicate)
        return predicate

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The condition as alternatives of independent constraints on attributes."""
        boxes = self._boxes
        if boxes is None:
            boxes = to_boxes(self.condition)
            object.__setattr__(self, "_boxes", boxes)
            # Whoever compares selectors keeps their boxes; nobody needs the tree besides, and it is as large.
            object.__setattr__(self, "_condition", None)
        return boxes

    @property
    def cost(self) -> int:
        """What it costs every broker to have it, see cost.py."""
        return boxes_steps(self.boxes) + taking_in_units(self.where, self.boxes)

    def matches(self, topic: str, attributes: Mapping[str, tree.Value]) -> bool:
        """Whether this event is wanted: the definition that every faster way must agree with."""
        if self.topic and not pattern_matches(self.topic, topic):
            return False
        return self.predicate(attributes) is True

    def concerns(self, pubend: int) -> bool:
        """Whether this pubend can have something that is wanted: what brokers say about themselves, and
        nothing else, is on one of their own."""
        return not self.topic or is_history(pubend) == (self.topic.split("/", 1)[0] == RESERVED)


def _condition(where: str) -> tree.Condition:
    if not where:
        return tree.TRUE
    # The parser takes longer to import than all the rest; whoever selects by topic alone never needs it.
    from postroad.selectors.parse import parse

    return parse(where)


@lru_cache(maxsize=MAX_CACHED)
def _parsed(topic: str, where: str) -> Selector:
    return Selector(topic, where)
