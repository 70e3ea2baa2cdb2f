"""A broker's advertised selectors, arranged so that coverers are found without comparing every pair.

Two things narrow the search before `covers` is asked. The topic: patterns stand in a tree by level, and
only patterns that can contain the one in question, or be contained in it, are visited. Equality: a
selector that demands `a = v` covers only selectors that demand it too. So each is filed under the set of
its equalities, where the search for wider ones looks with every subset of its own, and under each of
them, where the search for narrower ones looks.

Both only choose candidates, the search is cut short after so many failures, and one selector covers only so
many. What is overlooked costs a redundant advertisement, never an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final

from postroad.errors import BugError
from postroad.selectors import Selector, covers
from postroad.selectors.covering import Effort
from postroad.selectors.domains import Domain

COMPARISONS: Final = 32  # failed ones per search
STEPS_PER_SEARCH: Final = 256  # spans compared; see covering.Effort
STEPS_PER_CHANGE: Final = 16_384  # in all searches that one change of the table makes
COVERED: Final = 2048  # by one: when it goes, all of them are advertised, and taken in by everybody, at once
IDLE_NODES: Final = 1024  # visited in a row without a candidate
_SUBSETS_OF: Final = 5  # equalities; of more, only the smallest and largest subsets are looked at

_Equality = tuple[str, str, Any]  # attribute name, "number" "text" or "boolean", and the value
_Set = tuple[_Equality, ...]  # by increasing name, each name once
_Held = dict[int, "OwnSelector"]  # by entry number


class OwnSelector:
    """One of the different selectors that local subscriptions have: advertised, or covered by one that is."""

    __slots__ = ("covered", "coverer", "entry", "equalities", "references", "selector")

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.references = 1  # local subscriptions with this very selector
        self.entry = 0  # its number in the advertised table, 0 while covered
        self.coverer: OwnSelector | None = None  # an advertised one, while covered
        self.covered: dict[Selector, OwnSelector] = {}  # those whose coverer this is
        self.equalities = _equalities(selector)


def _equalities(selector: Selector) -> _Set:
    """What every event that matches must equal."""
    common: dict[_Equality, None] | None = None  # in the order of the names
    for box in selector.boxes:
        points = (_point(name, domain) for name, domain in box.domains.items())
        demanded = dict.fromkeys(point for point in points if point is not None)
        common = demanded if common is None else {point: None for point in common if point in demanded}
    return tuple(common or ())


def _point(name: str, domain: Domain) -> _Equality | None:
    """The only value in the domain, if there is just one."""
    if domain.missing or bool(domain.booleans) + len(domain.numbers) + len(domain.texts) != 1:
        return None
    if domain.booleans:
        return None if domain.booleans == 3 else (name, "boolean", domain.booleans)
    low, high = (domain.numbers or domain.texts)[0]
    if high is None or low[0] != high[0]:
        return None
    return name, "number" if domain.numbers else "text", low[0]


def _subsets(demanded: _Set) -> list[_Set]:
    if len(demanded) > _SUBSETS_OF:
        return [(), *((equality,) for equality in demanded), demanded]
    subsets: list[_Set] = [()]
    for equality in demanded:
        subsets += [(*some, equality) for some in subsets]
    return subsets


def _levels(pattern: str) -> list[str]:
    # A topic has at least one level, so "#" says the same as "+/#".
    return ["+", "#"] if pattern == "#" else pattern.split("/")


_NONE: Final[dict[Any, Any]] = {}  # for those that have none, which are most; never written to


class _Node:
    """The advertised selectors of one topic pattern, and the patterns that go on from it."""

    __slots__ = ("by_equality", "by_set", "children")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = _NONE  # by the next level
        self.by_set: dict[_Set, _Held] = _NONE  # by all equalities they demand
        self.by_equality: dict[_Equality, _Held] = _NONE  # by each equality they demand

    def child(self, level: str) -> _Node:
        child = self.children.get(level)
        if child is None:
            if not self.children:
                self.children = {}
            child = self.children[level] = _Node()
        return child

    def add(self, own: OwnSelector) -> None:
        if not self.by_set:
            self.by_set = {}
        self.by_set.setdefault(own.equalities, {})[own.entry] = own
        if own.equalities and not self.by_equality:
            self.by_equality = {}
        for equality in own.equalities:
            self.by_equality.setdefault(equality, {})[own.entry] = own

    def remove(self, own: OwnSelector) -> None:
        del self.by_set[own.equalities][own.entry]
        if not self.by_set[own.equalities]:
            del self.by_set[own.equalities]
        for equality in own.equalities:
            del self.by_equality[equality][own.entry]
            if not self.by_equality[equality]:
                del self.by_equality[equality]

    def demanding(self, demanded: _Set) -> Iterator[OwnSelector]:
        """Those that demand these equalities, and others that demand one of them."""
        if not demanded:
            return chain.from_iterable(selectors.values() for selectors in self.by_set.values())
        return iter(min((self.by_equality.get(equality, _NONE) for equality in demanded), key=len).values())


class Covering:
    """Advertised selectors by pattern."""

    __slots__ = ("_any", "_left", "_root")

    def __init__(self) -> None:
        self._any = _Node()  # selectors without a topic: wider than any pattern, also than "#"
        self._root = _Node()
        self._left = STEPS_PER_CHANGE  # what the change under way may still spend

    def add(self, own: OwnSelector) -> None:
        node = self._any
        if own.selector.topic:
            node = self._root
            for level in _levels(own.selector.topic):
                node = node.child(level)
        node.add(own)

    def remove(self, own: OwnSelector) -> None:
        node, path = self._any, []
        if own.selector.topic:
            node = self._root
            for level in _levels(own.selector.topic):
                path.append((node, level))
                node = node.children[level]
        node.remove(own)
        for parent, level in reversed(path):
            child = parent.children[level]
            if child.children or child.by_set:
                break
            del parent.children[level]

    def begin_change(self) -> None:
        """The searches from here on belong to one change of the table."""
        self._left = STEPS_PER_CHANGE

    def _begin_search(self) -> Effort:
        granted = max(0, min(STEPS_PER_SEARCH, self._left))
        self._left -= granted
        return Effort(granted)

    def _end_search(self, effort: Effort) -> None:
        self._left += effort.left  # less than nothing, if the last comparison took more than was left

    def find_wider(self, own: OwnSelector) -> OwnSelector | None:
        """An advertised selector that covers this one, if the search meets one."""
        effort = self._begin_search()
        wider = self._search_wider(own, effort)
        self._end_search(effort)
        return wider

    def _search_wider(self, own: OwnSelector, effort: Effort) -> OwnSelector | None:
        subsets = _subsets(own.equalities)
        failures = 0
        for node in self._wider_nodes(own.selector.topic):
            for subset in subsets:
                for candidate in node.by_set.get(subset, {}).values():
                    if effort.left <= 0 or failures == COMPARISONS:
                        return None
                    if len(candidate.covered) < COVERED and covers(candidate.selector, own.selector, effort):
                        return candidate
                    failures += 1
        return None

    def find_narrower(self, own: OwnSelector) -> list[OwnSelector]:
        """Advertised selectors that this one covers; those that the search meets."""
        effort = self._begin_search()
        narrower = self._search_narrower(own, effort)
        self._end_search(effort)
        return narrower

    def _search_narrower(self, own: OwnSelector, effort: Effort) -> list[OwnSelector]:
        narrower: list[OwnSelector] = []
        failures = idle = 0
        room = COVERED
        for node in self._narrower_nodes(own.selector.topic):
            idle += 1
            for candidate in node.demanding(own.equalities):
                idle = 0
                if effort.left <= 0 or failures == COMPARISONS:
                    return narrower
                takes, before = 1 + len(candidate.covered), effort.left
                if takes <= room and covers(own.selector, candidate.selector, effort):
                    narrower.append(candidate)
                    room -= takes
                    # The table shrinks by what is found, so only the change as a whole pays for it.
                    refund = max(0, min(before - effort.left, self._left))
                    self._left -= refund
                    effort.left += refund
                    continue
                failures += 1
            if idle == IDLE_NODES:
                break
        return narrower

    def _wider_nodes(self, topic: str) -> Iterator[_Node]:
        """Nodes of patterns that may contain the pattern `topic`."""
        yield self._any
        if not topic:
            return
        levels = _levels(topic)
        stack = [(self._root, 0)]
        while stack:
            node, depth = stack.pop()
            rest = node.children.get("#")
            if rest is not None:
                yield rest
            if depth == len(levels):
                yield node
                continue
            if levels[depth] == "#":
                continue
            for level in dict.fromkeys((levels[depth], "+")):
                child = node.children.get(level)
                if child is not None:
                    stack.append((child, depth + 1))

    def _narrower_nodes(self, topic: str) -> Iterator[_Node]:
        """Nodes of patterns that may be contained in the pattern `topic`."""
        if not topic:
            yield self._any
        levels = _levels(topic) if topic else ["#"]
        stack = [(self._root, 0)]
        while stack:
            node, depth = stack.pop()
            if depth == len(levels):
                yield node
            elif levels[depth] == "#":
                yield node
                stack.extend((child, depth) for child in node.children.values())
            elif levels[depth] == "+":
                # A wildcard in front does not stand for a level that begins with "$".
                stack.extend(
                    (child, depth + 1)
                    for level, child in node.children.items()
                    if level != "#" and (depth or not level.startswith("$"))
                )
            elif levels[depth] in node.children:
                stack.append((node.children[levels[depth]], depth + 1))

    def check(self, advertised: Iterable[OwnSelector]) -> None:
        """BugError unless exactly these are held, each where it belongs."""
        listed: _Held = {}
        for node in self._narrower_nodes(""):
            for own in node.demanding(()):
                listed[own.entry] = own
                places = [
                    node.by_set[own.equalities],
                    *(node.by_equality[equality] for equality in own.equalities),
                ]
                if any(place.get(own.entry) is not own for place in places):
                    raise BugError(f"advertised entry {own.entry} is misfiled")
        if listed != {own.entry: own for own in advertised}:
            raise BugError("the arrangement by pattern does not hold what is advertised")
