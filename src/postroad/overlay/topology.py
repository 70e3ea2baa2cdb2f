"""Who is linked to whom, and the shortest-path tree of every origin (link state, pure).

Every broker floods an advertisement of its own links; the newest (boot, sequence) of a broker wins.
Links are reliable and in order, and a new neighbour is sent the whole database, so databases of
connected brokers become equal, and equal databases give equal trees: a link counts only if both ends
advertise it, its cost is the larger of the two, and of several neighbours at equal distance the lowest
number is the parent. The tree of an origin is therefore the same object everywhere, without a word about
trees on the wire, and each broker receives an origin's events from one neighbour only.

`parent` needs distances from our neighbours alone, because links cost the same both ways: the work per
change of the graph is one search per neighbour, not one per origin. `subtree` needs the tree of that
origin and makes it when first asked. Both are kept until `generation` moves.

A broker is forgotten when it was unreachable for `expire_us`. Reachable ones never expire: their
neighbours vouch for them, so a clock that leaps cannot empty the database.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from postroad.errors import BugError, PeerError, UsageError
from postroad.ids import MAX_COST, NODE_BYTES, check_name
from postroad.units import SECOND_US
from postroad.wire.discovery import MAX_MEMBERS
from postroad.wire.frames import (
    FRAME_PREFIX_BYTES,
    MAX_CONTROL_BYTES,
    Advertisement,
    TopologyUpdate,
    check_address,
    encode,
)

MAX_BROKERS: Final = MAX_MEMBERS
MAX_NEIGHBOURS: Final = 1_000
MAX_PUBENDS: Final = 4_096  # per advertisement
MAX_SEQUENCE: Final = (1 << 62) - 1
EXPIRE_US: Final = 3_600 * SECOND_US
_SWEEPS_PER_EXPIRY: Final = 8
_MAX_U32: Final = (1 << 32) - 1
_MAX_U64: Final = (1 << 64) - 1


def _check_sorted(values: Iterable[int], highest: int, what: str) -> None:
    last = -1
    for value in values:
        if not last < value <= highest:
            raise PeerError(
                f"advertisement with {what} {value} after {last}; they increase, and are at most {highest}"
            )
        last = value


def check_advertisement(ad: Advertisement) -> None:
    """PeerError unless every field is within its bounds."""
    if not 0 <= ad.broker <= _MAX_U32 or len(ad.node) != NODE_BYTES:
        raise PeerError(
            f"advertisement with broker number {ad.broker} and a node id of {len(ad.node)} bytes; a number"
            f" has 32 bits, a node id {NODE_BYTES} bytes"
        )
    if not 0 <= ad.boot <= _MAX_U32 or not 0 <= ad.life <= _MAX_U32 or not 0 <= ad.sequence <= MAX_SEQUENCE:
        raise PeerError(
            f"advertisement of broker {ad.broker:08x} with boot {ad.boot}, life {ad.life} and sequence"
            f" {ad.sequence}; they are between 0 and {_MAX_U32}, and 0 and {MAX_SEQUENCE}"
        )
    check_name(ad.name)
    check_address(ad.address)
    if len(ad.neighbours) > MAX_NEIGHBOURS or len(ad.pubends) > MAX_PUBENDS:
        raise PeerError(
            f"advertisement of broker {ad.broker:08x} with {len(ad.neighbours)} neighbours and"
            f" {len(ad.pubends)} pubends; at most {MAX_NEIGHBOURS} and {MAX_PUBENDS} are allowed"
        )
    _check_sorted((number for number, _ in ad.neighbours), _MAX_U32, "neighbour")
    _check_sorted(ad.pubends, _MAX_U64, "pubend")
    for number, cost in ad.neighbours:
        if number == ad.broker or not 1 <= cost <= MAX_COST:
            raise PeerError(
                f"advertisement of broker {ad.broker:08x} with a link to {number:08x} at cost {cost}; a link"
                f" goes to another broker and costs 1 to {MAX_COST}"
            )


def topology_frames(advertisements: Iterable[Advertisement]) -> list[bytes]:
    """These advertisements as whole TOPOLOGY frames, each within MAX_CONTROL_BYTES."""
    room = MAX_CONTROL_BYTES - FRAME_PREFIX_BYTES - 16  # 16: the two MessagePack array headers, and to spare
    frames: list[bytes] = []
    part: list[Advertisement] = []
    used = 0
    for ad in advertisements:
        size = len(msgspec.msgpack.encode(ad))
        if part and used + size > room:
            frames.append(encode(TopologyUpdate(advertisements=tuple(part))))
            part, used = [], 0
        part.append(ad)
        used += size
    if part:
        frames.append(encode(TopologyUpdate(advertisements=tuple(part))))
    return frames


@dataclass(slots=True)
class _Graph:
    """The links that count, by dense index; index order is number order, so ties compare indices."""

    numbers: list[int]  # index -> broker number, increasing
    index: dict[int, int]  # the inverse
    links: list[list[tuple[int, int]]]  # index -> (index, cost), increasing


@dataclass(slots=True)
class _Cache:
    """What was worked out for one generation."""

    graph: _Graph
    reachable: list[int]
    distances: dict[int, list[int]] = field(default_factory=dict)  # me or neighbour -> distance by index
    parents: dict[int, int | None] = field(default_factory=dict)  # origin -> parent(origin)
    subtrees: dict[int, dict[int, frozenset[int]]] = field(default_factory=dict)  # origin -> child -> brokers
    # one object per distinct subtree: at a hub thousands of origins share the same few
    interned: dict[frozenset[int], frozenset[int]] = field(default_factory=dict)


def _search(graph: _Graph, origin: int) -> tuple[list[int], list[int], list[int]]:
    """Dijkstra from an index: distances (-1 unreachable), parents (-1 none), indices nearest first.

    Costs are at least 1, so every candidate parent of a broker is settled before the broker is, and
    comparing indices on a tie yields the lowest-numbered one whatever the order of the search. Brokers
    at one distance share a bucket and the heap holds distances: where costs are alike, and they mostly
    are, there are few of them, and this is as fast as a breadth-first search.
    """
    size = len(graph.numbers)
    far = 1 << 60
    distance, parent = [far] * size, [-1] * size
    distance[origin] = 0
    order: list[int] = []
    buckets = {0: [origin]}  # distance -> indices put there; void once the index is found to be nearer
    heap = [0]  # the keys of buckets
    links = graph.links
    while heap:
        here = heapq.heappop(heap)
        for at in buckets.pop(here):
            if distance[at] != here:
                continue
            order.append(at)
            for other, cost in links[at]:
                candidate = here + cost
                if candidate < distance[other]:
                    distance[other] = candidate
                    parent[other] = at
                    if candidate in buckets:
                        buckets[candidate].append(other)
                    else:
                        buckets[candidate] = [other]
                        heapq.heappush(heap, candidate)
                elif candidate == distance[other] and at < parent[other]:
                    parent[other] = at
    return [value if value < far else -1 for value in distance], parent, order


class Topology:
    """The link-state database of one broker."""

    __slots__ = (
        "_ads",
        "_before",
        "_boot",
        "_cache",
        "_costs",
        "_dirty",
        "_expire_us",
        "_gone",
        "_me",
        "_set_back",
        "_sweep_at_us",
        "_unreachable_since",
        "contested",
        "generation",
    )

    def __init__(
        self,
        *,
        me: int,
        node: bytes,
        name: str,
        boot: int,
        before: int | None = None,
        life: int = 0,
        address: str = "",
        expire_us: int = EXPIRE_US,
    ) -> None:
        """`before`: the last boot that this broker knows of; `address`: where others reach it, if known."""
        own = Advertisement(
            broker=me,
            node=node,
            name=name,
            boot=boot,
            sequence=1,
            neighbours=(),
            pubends=(),
            address=address,
            life=life,
        )
        try:
            check_advertisement(own)
        except PeerError as error:
            raise UsageError(f"this broker cannot advertise itself: {error}") from None
        self._me = me
        self._boot = boot
        self._before = boot if before is None else before
        self._set_back = False  # others know of a boot in between, or above
        # broker -> newest advertisement known, own included; of two node ids under one number the lower
        self._ads: dict[int, Advertisement] = {me: own}
        # broker -> its neighbours and costs: the same as in _ads, for lookup
        self._costs: dict[int, dict[int, int]] = {me: {}}
        # unreachable brokers -> since when, as seen at sweeps. Kept for one more expiry after the
        # advertisement went, so that a copy that comes round again does not start a new life.
        self._unreachable_since: dict[int, int] = {}
        self._gone: list[int] = []  # forgotten since take_gone
        self._dirty = True  # own advertisement is to be flooded
        self._expire_us = expire_us
        self._sweep_at_us = 0
        self._cache: _Cache | None = None
        self.generation = 1
        self.contested: bytes | None = None  # another node id seen under our own number: somebody must go

    # -- own links ---------------------------------------------------------------------------------

    def link_up(self, neighbour: int, cost: int, now_us: int) -> None:  # noqa: ARG002 one shape for all mutators
        if neighbour == self._me or not 0 <= neighbour <= _MAX_U32 or not 1 <= cost <= MAX_COST:
            raise UsageError(
                f"broker {self._me:08x} cannot have a link to broker {neighbour:08x} at cost {cost}; a link"
                f" goes to another broker and costs 1 to {MAX_COST}"
            )
        costs = dict(self._costs[self._me])
        costs[neighbour] = cost
        if len(costs) > MAX_NEIGHBOURS:
            raise UsageError(f"a broker has at most {MAX_NEIGHBOURS} links")
        self._advertise(neighbours=tuple(sorted(costs.items())))

    def link_down(self, neighbour: int, now_us: int) -> None:  # noqa: ARG002
        costs = dict(self._costs[self._me])
        if costs.pop(neighbour, None) is not None:
            self._advertise(neighbours=tuple(sorted(costs.items())))

    def set_pubends(self, pubends: Iterable[int], now_us: int) -> None:  # noqa: ARG002
        self._advertise(pubends=tuple(sorted(set(pubends))))

    def _advertise(
        self, *, neighbours: tuple[tuple[int, int], ...] | None = None, pubends: tuple[int, ...] | None = None
    ) -> None:
        own = self._ads[self._me]
        new = msgspec.structs.replace(
            own,
            neighbours=own.neighbours if neighbours is None else neighbours,
            pubends=own.pubends if pubends is None else pubends,
        )
        if new != own:
            self._store(_above(new, own))
            self._dirty = True

    # -- the database ------------------------------------------------------------------------------

    def accept(self, ad: Advertisement, now_us: int) -> bool:  # noqa: ARG002
        """Take an advertisement; True if it is news, to be flooded to every neighbour but its bringer."""
        check_advertisement(ad)
        known = self._ads.get(ad.broker)
        if ad.broker == self._me:
            self._accept_own(ad)
            return False
        if known is None:
            if len(self._ads) >= MAX_BROKERS:
                raise PeerError(f"more than {MAX_BROKERS} brokers advertised")
        elif known.node != ad.node:
            # Two brokers drew one number. Everybody keeps the lower node id, so databases still agree.
            if known.node < ad.node:
                return False
        elif (ad.boot, ad.sequence) <= (known.boot, known.sequence):
            return False
        self._store(ad)
        return True

    def _accept_own(self, ad: Advertisement) -> None:
        """Our own words come back. If they outrank what we say now (our data went back in time), go above."""
        own = self._ads[self._me]
        if ad.node != own.node:
            self.contested = ad.node
            return
        outranked = (ad.boot, ad.sequence) >= (own.boot, own.sequence) and ad != own
        if outranked:
            self._store(_above(own, ad))
            self._dirty = True
        if outranked or self._before < ad.boot < self._boot:
            self._set_back = True
            self._before = self._boot  # it is known now

    def take_set_back(self) -> bool:
        """Whether it was found since this was last asked that this broker has said things of which it knows
        nothing: its data went back in time."""
        set_back, self._set_back = self._set_back, False
        return set_back

    def _store(self, ad: Advertisement) -> None:
        old = self._ads.get(ad.broker)
        before = self._effective(ad.broker)
        self._ads[ad.broker] = ad
        if old is None or old.neighbours != ad.neighbours:
            self._costs[ad.broker] = dict(ad.neighbours)
        if (
            old is None
            or (old.node, old.boot, old.life, old.pubends) != (ad.node, ad.boot, ad.life, ad.pubends)
            or before != self._effective(ad.broker)
        ):
            self._changed()

    def _changed(self) -> None:
        self.generation += 1
        self._cache = None

    def _effective(self, broker: int) -> list[tuple[int, int]]:
        """The links of a broker that count, (neighbour, cost) in increasing order."""
        ad = self._ads.get(broker)
        if ad is None:
            return []
        edges: list[tuple[int, int]] = []
        for number, cost in ad.neighbours:
            theirs = self._costs.get(number)
            if theirs is not None and broker in theirs:
                edges.append((number, max(cost, theirs[broker])))
        return edges

    def take_own(self) -> Advertisement | None:
        """The own advertisement, if it changed since this was last asked: flood it to all neighbours."""
        if not self._dirty:
            return None
        self._dirty = False
        return self._ads[self._me]

    @property
    def own_links(self) -> tuple[tuple[int, int], ...]:
        """(neighbour, cost) as advertised, sorted."""
        return self._ads[self._me].neighbours

    def advertisements(self) -> list[Advertisement]:
        """The whole database by broker number, for a new neighbour (see topology_frames)."""
        return [self._ads[broker] for broker in sorted(self._ads)]

    def take_gone(self) -> list[int]:
        """Brokers forgotten since this was last asked; others may drop what they hold of them."""
        gone, self._gone = self._gone, []
        return gone

    # -- time --------------------------------------------------------------------------------------

    def next_deadline(self) -> int:
        return self._sweep_at_us

    def tick(self, now_us: int) -> list[Advertisement]:
        """Say the own advertisement again and forget the long unreachable; returns what to flood."""
        if now_us < self._sweep_at_us:
            return []
        if self._sweep_at_us:
            own = self._ads[self._me]
            self._store(_above(own, own))
            self._dirty = True
        self._sweep_at_us = now_us + max(1, self._expire_us // _SWEEPS_PER_EXPIRY)
        self._sweep(now_us)
        own_news = self.take_own()
        return [] if own_news is None else [own_news]

    def _sweep(self, now_us: int) -> None:
        reachable = set(self.reachable())
        for broker in [number for number in self._unreachable_since if number in reachable]:
            del self._unreachable_since[broker]
        for broker in sorted(self._ads):
            if broker in reachable:
                continue
            since = self._unreachable_since.setdefault(broker, now_us)
            if now_us - since >= self._expire_us:
                del self._ads[broker]
                del self._costs[broker]
                self._gone.append(broker)
                self._changed()
        for broker, since in list(self._unreachable_since.items()):
            if broker not in self._ads and now_us - since >= 2 * self._expire_us:
                del self._unreachable_since[broker]

    # -- routes ------------------------------------------------------------------------------------

    def _routes(self) -> _Cache:
        if self._cache is None:
            numbers = sorted(self._ads)
            index = {number: at for at, number in enumerate(numbers)}
            links = [[(index[other], cost) for other, cost in self._effective(number)] for number in numbers]
            graph = _Graph(numbers, index, links)
            distance, _, order = _search(graph, index[self._me])
            reachable = sorted(numbers[at] for at in order)
            self._cache = _Cache(graph, reachable, {self._me: distance})
        return self._cache

    def _distance(self, cache: _Cache, broker: int) -> list[int]:
        distances = cache.distances.get(broker)
        if distances is None:
            distances = cache.distances[broker] = _search(cache.graph, cache.graph.index[broker])[0]
        return distances

    def reachable(self) -> list[int]:
        """Brokers with a path of links that count, increasing, this one included."""
        return list(self._routes().reachable)

    def distance(self, broker: int) -> int | None:
        """The cost of the way to a broker, None if there is none."""
        cache = self._routes()
        at = cache.graph.index.get(broker)
        cost = -1 if at is None else cache.distances[self._me][at]
        return None if cost < 0 else cost

    def neighbours(self) -> list[int]:
        """Brokers at the other end of own links that count, increasing."""
        return [number for number, _ in self._effective(self._me)]

    def parent(self, origin: int) -> int | None:
        """The neighbour that passes the origin's events to this broker; None if there is none."""
        cache = self._routes()
        if origin in cache.parents:
            return cache.parents[origin]
        at = cache.graph.index.get(origin)
        best: int | None = None
        if at is not None and origin != self._me:
            here = cache.distances[self._me][at]
            for neighbour, cost in self._effective(self._me):
                if here > 0 and self._distance(cache, neighbour)[at] + cost == here:
                    best = neighbour
                    break
            cache.parents[origin] = best
        return best

    def subtree(self, origin: int, neighbour: int) -> frozenset[int]:
        """The brokers that get the origin's events from here by way of `neighbour`, it included.

        Empty unless `neighbour` is a child of this broker in the origin's tree.
        """
        return self.children(origin).get(neighbour, frozenset())

    def children(self, origin: int) -> Mapping[int, frozenset[int]]:
        """This broker's children in the origin's tree, in increasing order, each with its subtree."""
        cache = self._routes()
        subtrees = cache.subtrees.get(origin)
        if subtrees is None:
            at = cache.graph.index.get(origin)
            if at is None:
                return {}
            subtrees = cache.subtrees[origin] = self._descend(cache, at)
        return subtrees

    def _descend(self, cache: _Cache, origin: int) -> dict[int, frozenset[int]]:
        graph = cache.graph
        me = graph.index[self._me]
        here = cache.distances[self._me][origin]
        if here < 0 or not any(
            # Distances that are known anyway often tell that no neighbour lies further out than we do.
            self._distance(cache, neighbour)[origin] == here + cost
            for neighbour, cost in self._effective(self._me)
        ):
            return {}
        _, parent, order = _search(graph, origin)
        child = [-1] * len(graph.numbers)  # index -> my child above it in the tree, -1 if none
        members: dict[int, list[int]] = {}
        for at in order:  # a parent comes before its children
            above = parent[at]
            if above < 0:
                continue
            through = at if above == me else child[above]
            if through >= 0:
                child[at] = through
                members.setdefault(through, []).append(graph.numbers[at])
        interned = cache.interned
        neighbours: dict[int, frozenset[int]] = {}
        for through in sorted(members):
            brokers = frozenset(members[through])
            neighbours[graph.numbers[through]] = interned.setdefault(brokers, brokers)
        return neighbours

    # -- facts -------------------------------------------------------------------------------------

    def __contains__(self, broker: int) -> bool:
        """Whether it is known, reachable or not."""
        return broker in self._ads

    def names(self) -> dict[int, str]:
        """The names of all brokers known, reachable or not."""
        return {broker: ad.name for broker, ad in self._ads.items()}

    @property
    def own_name(self) -> str:
        return self._ads[self._me].name

    def name(self, broker: int) -> str:
        """A broker's name, its number in hexadecimal where none is known."""
        ad = self._ads.get(broker)
        return f"{broker:08x}" if ad is None else ad.name

    def address(self, broker: int) -> str:
        """Where a broker's connections are taken, "" where that is not known."""
        ad = self._ads.get(broker)
        return "" if ad is None else ad.address

    def advertised(self, broker: int) -> Advertisement | None:
        """What a broker said of itself last."""
        return self._ads.get(broker)

    def pubends(self, broker: int) -> tuple[int, ...]:
        ad = self._ads.get(broker)
        return () if ad is None else ad.pubends

    def own_pubends(self, broker: int) -> tuple[int, ...]:
        """What a broker advertises, without what is not its own."""
        return tuple(pubend for pubend in self.pubends(broker) if pubend >> 32 == broker)

    def conflict(self, number: int, node: bytes) -> bool:
        """Whether the number belongs to another node id."""
        ad = self._ads.get(number)
        return ad is not None and ad.node != node

    def check(self) -> None:
        """BugError unless the collections are as their comments say."""
        if set(self._ads) != set(self._costs) or self._me not in self._ads or len(self._ads) > MAX_BROKERS:
            raise BugError("the advertisements and the costs are of different brokers")
        for broker, ad in self._ads.items():
            if ad.broker != broker or self._costs[broker] != dict(ad.neighbours):
                raise BugError(f"the costs of broker {broker:08x} are not those advertised")
        if self._me in self._unreachable_since:
            raise BugError("this broker is unreachable from itself")


def _above(ad: Advertisement, other: Advertisement) -> Advertisement:
    """`ad` with the next (boot, sequence) after that of `other`."""
    if other.sequence < MAX_SEQUENCE:
        return msgspec.structs.replace(ad, boot=other.boot, sequence=other.sequence + 1)
    if other.boot < _MAX_U32:
        return msgspec.structs.replace(ad, boot=other.boot + 1, sequence=1)
    raise PeerError(
        f"broker {ad.broker:08x} was advertised with boot {other.boot} and sequence {other.sequence}: nothing"
        " is above those"
    )
