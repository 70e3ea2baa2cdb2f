"""The matching index: which targets want which rows of a batch.

Several keys may share a target, and equal selectors are stored once however many want them. The work is
done by an engine, compiled (`kernel.match`) where there is a compiler, else its plain twin
(`kernel.match_reference`); both take selectors by number and give the same groups in the same order.
"""

from __future__ import annotations

from postroad.errors import BugError, UsageError
from postroad.events.batch import EventBatch
from postroad.kernel.match_reference import Group, Index
from postroad.selectors.selector import Selector

__all__ = ["Group", "MatchIndex"]


class MatchIndex:
    """Keys -> (selector, target), and the question which targets want a batch's rows."""

    __slots__ = ("_engine", "_free", "_keys", "_numbers", "_selectors")

    def __init__(self) -> None:
        self._engine = Index()
        self._keys: dict[int, tuple[int, int]] = {}  # key -> (selector's number, target)
        self._numbers: dict[Selector, int] = {}  # selector -> number, for those that some key uses
        self._selectors: dict[int, tuple[Selector, int]] = {}  # number -> (selector, keys that use it)
        self._free: list[int] = []  # numbers below the highest that are not in use

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: int, selector: Selector, target: int) -> None:
        if key in self._keys:
            raise UsageError(f"key {key} is in the index already")
        number = self._numbers.get(selector)
        if number is None:
            number = self._free.pop() if self._free else len(self._numbers)
            self._engine.insert(number, selector.topic, selector.boxes, selector.predicate)
            self._numbers[selector] = number
            self._selectors[number] = (selector, 0)
        self._selectors[number] = (selector, self._selectors[number][1] + 1)
        self._engine.attach(number, target)
        self._keys[key] = (number, target)

    def remove(self, key: int) -> None:
        found = self._keys.pop(key, None)
        if found is None:
            raise UsageError(f"key {key} is not in the index")
        number, target = found
        self._engine.detach(number, target)
        selector, users = self._selectors[number]
        if users > 1:
            self._selectors[number] = (selector, users - 1)
            return
        self._engine.delete(number)
        del self._selectors[number], self._numbers[selector]
        self._free.append(number)

    def match(self, batch: EventBatch) -> list[Group]:
        """Rows and who wants them: each target at most once; groups by their rows, targets ascending."""
        return self._engine.match(batch.data, batch.extents)

    def stats(self) -> dict[str, int]:
        return {"keys": len(self._keys), "selectors": len(self._numbers), **self._engine.stats()}

    def check(self) -> None:
        """The invariants that tie keys, selectors and engine together."""
        users: dict[int, int] = {}
        for number, _ in self._keys.values():
            users[number] = users.get(number, 0) + 1
        if users != {number: count for number, (_, count) in self._selectors.items()}:
            raise BugError("the users of some selector are miscounted")
        if self._numbers != {selector: number for number, (selector, _) in self._selectors.items()}:
            raise BugError("selectors and their numbers disagree")
        if sorted([*self._selectors, *self._free]) != list(range(len(self._selectors) + len(self._free))):
            raise BugError("some selector number is neither used nor free")
        self._engine.check()
