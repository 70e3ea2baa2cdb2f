"""The matching index: which targets want which rows of a batch.

Several keys may share a target, and equal selectors are stored once however many want them. The work is
done by an engine, compiled (`kernel.match`) where there is a compiler, else its plain twin
(`kernel.match_reference`); both take selectors by number and give the same groups in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from postroad import kernel
from postroad.errors import BugError, UsageError
from postroad.events.batch import EventBatch
from postroad.kernel.match_reference import Group
from postroad.selectors.plan import to_plan
from postroad.selectors.selector import Selector

if TYPE_CHECKING or not kernel.wanted("match"):
    from postroad.kernel.match_reference import Index
else:
    from postroad.kernel.match import Index

__all__ = ["Group", "MatchIndex"]

_TARGET_LIMIT: Final = 1 << 63


class MatchIndex:
    """Keys -> (selector, target), and the question which targets want a batch's rows."""

    __slots__ = ("_engine", "_free", "_holds", "_keys", "_numbers", "_repeated", "_selectors")

    def __init__(self) -> None:
        self._engine = Index()
        self._keys: dict[int, tuple[int, int]] = {}  # key -> (selector's number, target)
        self._numbers: dict[Selector, int] = {}  # selector -> number, for those that are used or held
        self._selectors: list[Selector | None] = []  # by number; None where the number is free
        self._free: list[int] = []  # numbers not in use
        self._repeated: dict[tuple[int, int], int] = {}  # (number, target) -> keys beyond the first
        self._holds: dict[int, int] = {}  # number -> how often it is held

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: int, selector: Selector, target: int) -> None:
        if key in self._keys:
            raise UsageError(f"key {key} is in the index already")
        if not -_TARGET_LIMIT <= target < _TARGET_LIMIT:
            raise UsageError(f"target {target} does not fit 64 bits")
        number = self._numbers.get(selector)
        if number is None:
            number = self._insert(selector)
        if not self._engine.attach(number, target):
            self._repeated[number, target] = self._repeated.get((number, target), 0) + 1
        self._keys[key] = (number, target)

    def hold(self, selector: Selector) -> None:
        """Puts a selector into the index for nobody. Adding a key for it is quick from then on."""
        number = self._numbers.get(selector)
        if number is None:
            number = self._insert(selector)
        self._holds[number] = self._holds.get(number, 0) + 1

    def release(self, selector: Selector) -> None:
        """Ends a `hold`."""
        number = self._numbers.get(selector, -1)
        count = self._holds.pop(number, 0)
        if not count:
            raise UsageError(f"{selector} is not held in the index")
        if count > 1:
            self._holds[number] = count - 1
        elif self._engine.targets(number) == 0:
            self._delete(number)

    def _insert(self, selector: Selector) -> int:
        if not self._free:
            self._free.append(len(self._selectors))
            self._selectors.append(None)
        number = self._free[-1]
        self._engine.insert(number, selector.topic, to_plan(selector.boxes), selector)
        self._free.pop()
        self._numbers[selector] = number
        self._selectors[number] = selector
        return number

    def remove(self, key: int) -> None:
        entry = self._keys.pop(key, None)
        if entry is None:
            raise UsageError(f"key {key} is not in the index")
        repeated = self._repeated.get(entry) if self._repeated else None
        if repeated is not None:
            if repeated > 1:
                self._repeated[entry] = repeated - 1
            else:
                del self._repeated[entry]
            return
        number, target = entry
        if self._engine.detach(number, target) == 0 and number not in self._holds:
            self._delete(number)

    def _delete(self, number: int) -> None:
        self._engine.delete(number)
        selector = self._selectors[number]
        assert selector is not None
        del self._numbers[selector]
        self._selectors[number] = None
        self._free.append(number)

    def match(self, batch: EventBatch) -> list[Group]:
        """Rows and who wants them: each target at most once; groups by their rows, targets ascending."""
        return self._engine.match(batch.data, batch.extents)

    def stats(self) -> dict[str, int]:
        return {"keys": len(self._keys), "selectors": len(self._numbers), **self._engine.stats()}

    def check(self) -> None:
        """The invariants that tie keys, selectors and engine together."""
        pairs: dict[tuple[int, int], int] = {}
        for pair in self._keys.values():
            pairs[pair] = pairs.get(pair, 0) + 1
        if self._repeated != {pair: count - 1 for pair, count in pairs.items() if count > 1}:
            raise BugError("the keys that repeat another are miscounted")
        used = {number: selector for number, selector in enumerate(self._selectors) if selector is not None}
        if self._numbers != {selector: number for number, selector in used.items()}:
            raise BugError("selectors and their numbers disagree")
        if sorted({*(number for number, _ in pairs), *self._holds}) != sorted(used):
            raise BugError("a selector that nobody uses or holds, or a key without its selector")
        if sorted([*used, *self._free]) != list(range(len(self._selectors))):
            raise BugError("some selector number is neither used nor free")
        self._engine.check()
