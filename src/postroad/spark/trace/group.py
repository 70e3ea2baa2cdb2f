"""What the records of a group say about its ids: whom each broker claims to have had which message from.

A group is the ids of one origin and stretch of time, and every stored record that can concern them. The
questions are those a broker asks itself in a live trace (`tracking/bloom_strategy.py`, `exact_strategy.py`),
put for all ids at once: ids are sorted by time; times between which nothing changes, no filter begins or ends
to match and nobody comes or goes, are one *class*; what depends on time alone is found once per class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, repeat
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from postroad.ids import ID_BYTES
from postroad.spark.trace.claims import NO_ROWS, Bits, Keys, Rows, contained, contains, picked
from postroad.spark.trace.views import BrokerView, Flags, NetworkView, Times
from postroad.tracking.groups import Members, group_members
from postroad.tracking.keys import (
    DATAGRAM,
    DELIVERED,
    DELIVERY,
    ENTRY,
    FORWARDED,
    FORWARDING,
    LOG,
    PUBLISH,
    PUBLISHED,
    REPAIR,
    REPAIRED,
    ROUTED,
    ROUTING,
    SENT,
    HistoryKey,
    group_tag,
    set_tag,
    subscriber_tag,
)
from postroad.tracking.query.lookup import MAX_SET_DEGREE
from postroad.tracking.query.messages import MAX_CANDIDATES
from postroad.tracking.record import FilterMeta

Rates = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
_NO_RATE: Final = np.zeros(0, np.float64)


@dataclass(frozen=True, slots=True)
class Stored:
    """One record of the lake."""

    broker: int
    meta: FilterMeta
    body: bytes | None  # None: it cannot be read


@dataclass(slots=True)
class History:
    """The filters of one history of one broker that match some time of the group, in order."""

    key: HistoryKey
    members: list[int] = field(default_factory=list)  # indices into the group's filters
    claimed: Flags | None = None  # per id; of histories whose keys are plain ids
    rate: Rates = field(default_factory=lambda: _NO_RATE)  # per class


class _Look(NamedTuple):
    """Ids that a filter is asked about."""

    filter: Bits
    rows: Rows
    words: npt.NDArray[np.uint64]  # of those ids, (number, 2)


@dataclass(slots=True)
class Received:
    """Who got which messages at one broker: a row per message and receiver, sorted by both."""

    names: tuple[str, ...]  # sorted
    row: Rows
    who: Numbers
    rate: Rates
    keys: Numbers  # that claim it
    hits: Numbers  # per id: keys that claim receivers of it, a set being one
    tried: Numbers  # per id: keys that were looked for
    wanted: Rates  # per id: keys of deliveries for each message here


class _Least:
    """By neighbour which ids went there, and the least rate at which anything claims so."""

    def __init__(self, ids: int) -> None:
        self._ids = ids
        self.claims: dict[int, tuple[Flags, Rates]] = {}

    def claim(self, neighbour: int, flags: Flags, rates: Rates) -> None:
        nothing = np.zeros(self._ids, np.bool_), np.ones(self._ids, np.float64)
        had, least = self.claims.get(neighbour, nothing)
        self.claims[neighbour] = had | flags, np.where(flags, np.minimum(least, rates), least)


class Group:
    def __init__(self, ids: Keys, records: Sequence[Stored], network: NetworkView) -> None:
        """`ids` are unique."""
        halves = np.ascontiguousarray(ids).view(">u8").reshape(-1, 2)
        order = np.argsort(halves[:, 1], kind="stable")
        self.keys: Keys = np.ascontiguousarray(ids[order])
        self.words = self.keys.view(np.uint64)
        halves = halves[order]
        self.times: Times = (halves[:, 1] >> np.uint64(16)).astype(np.int64)
        self.homes: Numbers = (halves[:, 0] & np.uint64(0xFFFF_FFFF)).astype(np.int64)
        self.network = network
        first, last = int(self.times[0]), int(self.times[-1])
        self.views: dict[int, BrokerView] = {
            number: network.brokers[number].within(first, last) for number in sorted(network.brokers)
        }
        filters: list[Stored] = []
        bits: list[Bits] = []
        self._logs: list[tuple[Stored, bytes]] = []  # and their entries
        for record in sorted(
            records, key=lambda record: (record.broker, record.meta.key, record.meta.sequence)
        ):
            if record.body is None:
                if record.broker in self.views:
                    self.views[record.broker] = self.views[record.broker].without(record.meta)
            elif record.meta.key.kind == LOG:
                self._logs.append((record, record.body))
            elif _reaches(record.meta, first, last):
                filters.append(record)
                bits.append(Bits(record.meta.m, record.meta.k, record.body))
        self._classify(filters)
        self._filters = bits
        self._fpp = np.array([bits_of.fpp for bits_of in self._filters], np.float64)
        self._counts = np.array([stored.meta.count for stored in filters], np.float64)
        self._spans_ms = np.array([stored.meta.span_ms for stored in filters], np.float64)
        self._ranged = np.array([stored.meta.ranged for stored in filters], np.bool_)
        self.histories: dict[int, dict[HistoryKey, History]] = {number: {} for number in self.views}
        for at, stored in enumerate(filters):
            of = self.histories.setdefault(stored.broker, {})
            of.setdefault(stored.meta.key, History(stored.meta.key)).members.append(at)
        self._claim()
        self._read_logs()

    # ---- time

    def _classify(self, filters: Sequence[Stored]) -> None:
        parts = [view.edges() for view in self.views.values()]
        for stored in filters:
            meta = stored.meta
            spans = [(meta.lo_ms, meta.hi_ms), *meta.singles]
            parts.append(np.array([edge for lo, hi in spans for edge in (lo, hi + 1)], np.int64))
        edges = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
        intervals = np.searchsorted(edges, self.times, side="right")
        _, first, inverse = np.unique(intervals, return_index=True, return_inverse=True)
        self.classes: Numbers = inverse.astype(np.int64)  # of each id
        self.firsts: Numbers = first.astype(np.int64)  # the first id of each class; the others follow it
        self.moments: Times = self.times[first]  # a time of each class
        self._matching = np.zeros((len(self.moments), len(filters)), np.bool_)
        for at, stored in enumerate(filters):
            for lo, hi in ((stored.meta.lo_ms, stored.meta.hi_ms), *stored.meta.singles):
                self._matching[:, at] |= (lo <= self.moments) & (self.moments <= hi)

    def __len__(self) -> int:
        return len(self.times)

    def _matched(self, at: int) -> Rows:
        """The ids whose time a filter matches: mostly those from one to another."""
        classes = np.flatnonzero(self._matching[:, at])
        if not len(classes):
            return NO_ROWS
        if classes[-1] - classes[0] + 1 != len(classes):
            return np.flatnonzero(self._matching[self.classes, at])
        after = int(classes[-1]) + 1
        end = int(self.firsts[after]) if after < len(self.firsts) else len(self)
        return np.arange(int(self.firsts[classes[0]]), end)

    # ---- histories of plain ids

    def _claim(self) -> None:
        """Ask every filter whose keys are ids about those whose time it matches."""
        plain: list[tuple[int, History]] = []
        for of in self.histories.values():
            for history in of.values():
                history.rate = self._rate(history.members)
                key = history.key
                if key.kind in (DELIVERY, REPAIR) or (key.kind == FORWARDING and not key.neighbour):
                    continue
                history.claimed = np.zeros(len(self), np.bool_)
                plain += [(at, history) for at in history.members]
        rows = [self._matched(at) for at, _ in plain]
        claimed = contained([self._filters[at] for at, _ in plain], self.keys, rows)
        for (_, history), hits in zip(plain, claimed, strict=True):
            if history.claimed is not None:
                history.claimed[hits] = True

    def _rate(self, members: Sequence[int]) -> Rates:
        """The rate at which, per class, some filter that matches claims what it never saw."""
        rate = np.zeros(len(self.moments), np.float64)
        for at in members:
            rate += np.where(self._matching[:, at], self._fpp[at], 0.0) * (1 - rate)
        return rate

    # ---- the exact log

    def _read_logs(self) -> None:
        """Entries about ids of this group: (what, origin, who) -> rows, per broker."""
        self.logged: dict[int, dict[tuple[str, int, str], Rows]] = {}
        if not self._logs:
            return
        texts = self.keys.view("S16").ravel()
        order = np.argsort(texts, kind="stable")
        ordered = texts[order]
        for log, body in self._logs:
            entries = np.frombuffer(body, ENTRY)
            wanted = np.ascontiguousarray(entries["id"]).view("S16")
            at = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
            hit = ordered[at] == wanted
            rows, whats = order[at[hit]], entries["what"][hit]
            of = self.logged.setdefault(log.broker, {})
            for number in np.unique(whats).tolist():
                if number >= len(log.meta.names):
                    continue
                what, origin, who = log.meta.names[number].split(" ", 2)
                name = (what, int(origin), who)
                mine = np.unique(rows[whats == number])
                of[name] = np.union1d(of[name], mine) if name in of else mine

    def _flags(self, rows: Rows) -> Flags:
        out = np.zeros(len(self), np.bool_)
        out[rows] = True
        return out

    # ---- the questions of a trace

    def published(self, broker: int) -> tuple[Flags, Rates]:
        """Per id whether it was published here; per id the rate at which that is claimed falsely."""
        history = self.histories.get(broker, {}).get(HistoryKey(PUBLISH))
        flags, rates = np.zeros(len(self), np.bool_), np.zeros(len(self), np.float64)
        if history is not None and history.claimed is not None:
            flags |= history.claimed
            rates = history.rate[self.classes]
        for (what, _, _), rows in self.logged.get(broker, {}).items():
            if what == PUBLISHED:
                flags[rows] = True
                rates[rows] = 0.0
        return flags, rates

    def sightings(self, broker: int, *, limited: bool) -> list[tuple[int, int, Flags, Rates]]:
        """(origin, neighbour, per id whether it came from there, rate); `limited` to the origin in the id."""
        seen: list[tuple[int, int, Flags, Rates]] = []
        for key, history in self.histories.get(broker, {}).items():
            if key.kind == ROUTING and history.claimed is not None:
                seen.append((key.origin, key.neighbour, history.claimed, history.rate[self.classes]))
        for (what, origin, who), rows in self.logged.get(broker, {}).items():
            if what == ROUTED:
                seen.append((origin, int(who), self._flags(rows), np.zeros(len(self), np.float64)))
        if limited:
            seen = [
                (origin, neighbour, flags & (self.homes == origin), rates)
                for origin, neighbour, flags, rates in seen
            ]
        return sorted(
            (sighting for sighting in seen if sighting[2].any()),
            key=lambda sighting: (sighting[0], sighting[1]),
        )

    def forwardings(
        self, broker: int, origins: dict[int, Flags], neighbours: Flags, names: Sequence[int]
    ) -> tuple[Flags, dict[int, tuple[Flags, Rates]]]:
        """Per id whether it is recorded at all where it went; by neighbour whether there, and the rate."""
        mode = self.network.config.routing
        if mode == "all":
            return np.zeros(len(self), np.bool_), {}
        # Where it was not recorded in this way ever since, nobody knows whom the record leaves out.
        routings = self.views[broker].routings
        since = routings.at(self.moments)
        wanted = np.array([name == mode for name in routings.names], np.bool_)
        only = since.any(axis=1) & (since == wanted).all(axis=1)
        recorded = only[self.classes]
        if mode == "set":
            recorded &= neighbours.sum(axis=1)[self.classes] <= MAX_SET_DEGREE
        least = _Least(len(self))

        for origin, at_origin in sorted(origins.items()):
            for (what, of, who), rows in self.logged.get(broker, {}).items():
                if what == FORWARDED and of == origin:
                    least.claim(int(who), self._flags(rows) & at_origin, np.zeros(len(self), np.float64))
            if mode == "set":
                self._sets(broker, origin, at_origin & recorded, neighbours, names, least)
                continue
            for key, history in self.histories.get(broker, {}).items():
                recorded_of = history.claimed if key.kind == FORWARDING and key.origin == origin else None
                if key.neighbour and recorded_of is not None:
                    least.claim(key.neighbour, recorded_of & at_origin, history.rate[self.classes])
        return recorded, least.claims

    def _sets(
        self,
        broker: int,
        origin: int,
        wanted: Flags,
        neighbours: Flags,
        names: Sequence[int],
        least: _Least,
    ) -> None:
        """The set of neighbours inside the key: all sets of those there were at the time are tried."""
        history = self.histories.get(broker, {}).get(HistoryKey(FORWARDING, origin))
        if history is None:
            return
        for there in np.unique(neighbours, axis=0):
            classes = (neighbours == there).all(axis=1)
            rows = np.flatnonzero(wanted & classes[self.classes])
            present = [names[at] for at in np.flatnonzero(there).tolist()]
            sets = [chosen for size in range(1, len(present) + 1) for chosen in combinations(present, size)]
            rates = np.minimum(1.0, history.rate * len(sets))[self.classes]
            looks = self._looks(history, rows)
            for chosen in sets:
                hits = self._tagged(looks, set_tag(chosen))
                for neighbour in chosen if len(hits) else ():
                    least.claim(neighbour, self._flags(hits), rates)

    def _looks(self, history: History, rows: Rows) -> list[_Look]:
        """These ids, as far as each filter of a history matches their times."""
        looks: list[_Look] = []
        for at in history.members:
            mine = (
                self._matched(at) if len(rows) == len(self) else rows[self._matching[self.classes[rows], at]]
            )
            if len(mine):
                looks.append(_Look(self._filters[at], mine, picked(self.words, mine)))
        return looks

    def _tagged(self, looks: Sequence[_Look], tag: bytes, present: Flags | None = None) -> Rows:
        """Which of these ids some filter claims with the tag; only in classes where `present`."""
        mark = np.frombuffer(tag, np.uint64)
        claimed: list[Rows] = []
        for look in looks:
            rows, words = look.rows, look.words
            if present is not None and not present.all():
                there = present[self.classes[rows]]
                rows, words = rows[there], words[there]
            claimed.append(rows[contains(look.filter, words ^ mark)])
        if len(claimed) > 1:
            return np.flatnonzero(self._flags(np.concatenate(claimed)))
        return claimed[0] if claimed else NO_ROWS

    def deliveries(self, broker: int, origins: dict[int, Flags]) -> Received:
        """Who got what of these origins here."""
        view = self.views[broker]
        there = view.subscribers.at(self.moments)
        groups_there = view.groups.at(self.moments)
        # Whom each key stands for, its tag, and where it is tried.
        keys: list[tuple[Members, bytes, Flags]] = [
            ((name,), subscriber_tag(name), there[:, at]) for at, name in enumerate(view.subscribers.names)
        ]
        keys += [
            (group_members(name), group_tag(name), groups_there[:, at])
            for at, name in enumerate(view.groups.names)
        ]
        count = there.sum(axis=1) + groups_there.sum(axis=1)  # of keys, per class
        hits, tried = np.zeros(len(self), np.int64), np.zeros(len(self), np.int64)
        receipts: list[tuple[str, Rows, Rates]] = []
        for origin, at_origin in sorted(origins.items()):
            rows = np.flatnonzero(at_origin)
            if not len(rows):
                continue
            history = self.histories.get(broker, {}).get(HistoryKey(DELIVERY, origin))
            if history is not None:
                rates = history.rate[self.classes]
                looks = self._looks(history, rows)
                for members, tag, present in keys:
                    claimed = self._tagged(looks, tag, present)
                    hits[claimed] += 1
                    if len(claimed):
                        receipts += zip(members, repeat(claimed), repeat(rates[claimed]), strict=False)
                tried[rows] += np.where(history.rate > 0, count, 0)[self.classes[rows]]
            for key, own in self.histories.get(broker, {}).items():
                if key.kind == DELIVERY and key.origin == origin and key.subscriber in view.subscribers.names:
                    present = there[:, view.subscribers.names.index(key.subscriber)]
                    claimed = self._tagged(self._looks(own, rows), subscriber_tag(key.subscriber), present)
                    hits[claimed] += 1
                    tried[rows] += (present & (own.rate > 0))[self.classes[rows]]
                    receipts.append((key.subscriber, claimed, own.rate[self.classes[claimed]]))
            for (what, of, who), logged in self.logged.get(broker, {}).items():
                if what == DELIVERED and of == origin:
                    certain = logged[at_origin[logged]]
                    receipts.append((who, certain, np.zeros(len(certain), np.float64)))
        tried = np.clip(tried, hits, MAX_CANDIDATES)
        return _received(receipts, hits=hits, tried=tried, wanted=self._wanted(broker, origins))

    def meant_for(self, broker: int, origins: dict[int, Flags]) -> dict[int, tuple[Flags, Rates]]:
        """By neighbour which best-effort events were to go there, and the rate."""
        least = _Least(len(self))
        for origin, at_origin in sorted(origins.items()):
            for key, history in self.histories.get(broker, {}).items():
                if (key.kind, key.origin) == (DATAGRAM, origin) and history.claimed is not None:
                    least.claim(key.neighbour, history.claimed & at_origin, history.rate[self.classes])
            for (what, of, who), rows in self.logged.get(broker, {}).items():
                if (what, of) == (SENT, origin):
                    least.claim(int(who), self._flags(rows) & at_origin, np.zeros(len(self), np.float64))
        return least.claims

    def repairs(self, broker: int) -> Received:
        """Who got what as a repair; it need not have come to this broker."""
        view, nothing = self.views[broker], np.zeros(len(self), np.int64)
        receipts: list[tuple[str, Rows, Rates]] = []
        history = self.histories.get(broker, {}).get(HistoryKey(REPAIR))
        if history is not None:
            there, rates = view.subscribers.at(self.moments), history.rate[self.classes]
            looks = self._looks(history, np.arange(len(self)))
            for at, name in enumerate(view.subscribers.names):
                claimed = self._tagged(looks, subscriber_tag(name), there[:, at])
                receipts.append((name, claimed, rates[claimed]))
        for (what, _, who), rows in self.logged.get(broker, {}).items():
            if what == REPAIRED:
                receipts.append((who, rows, np.zeros(len(rows), np.float64)))
        return _received(receipts, hits=nothing, tried=nothing, wanted=nothing.astype(np.float64))

    def _wanted(self, broker: int, origins: dict[int, Flags]) -> Rates:
        """As `Lookup._wanted`."""
        came, got = np.zeros(len(self), np.float64), np.zeros(len(self), np.float64)
        for origin, at_origin in sorted(origins.items()):
            for key, history in self.histories.get(broker, {}).items():
                own = (key.kind, key.origin)
                coming = key.kind == PUBLISH if origin == broker else own == (ROUTING, origin)
                if coming or own == (DELIVERY, origin):
                    (came if coming else got)[at_origin] += self._density(history)[self.classes[at_origin]]
        return np.where(came > 0, np.minimum(MAX_CANDIDATES, got / np.where(came > 0, came, 1.0)), 0.5)

    def _density(self, history: History) -> Rates:
        """Per class, keys for a millisecond of message time in the filters that match."""
        matching = self._matching[:, history.members]
        spans, counts = self._spans_ms[history.members], self._counts[history.members]
        ranged = self._ranged[history.members]
        beside = np.where(ranged, 0.0, counts / np.maximum(spans, 1.0))
        rate: Rates = matching @ (counts * ranged) / np.maximum(matching @ (spans * ranged), 1.0)
        return rate + matching @ beside


def _reaches(meta: FilterMeta, first_ms: int, last_ms: int) -> bool:
    """Whether a filter may match some of these times."""
    return any(lo <= last_ms and first_ms <= hi for lo, hi in ((meta.lo_ms, meta.hi_ms), *meta.singles))


def _received(
    receipts: Iterable[tuple[str, Rows, Rates]], *, hits: Numbers, tried: Numbers, wanted: Rates
) -> Received:
    """Each message and receiver once, with the least of its rates. What the log has is no key."""
    parts = [receipt for receipt in receipts if len(receipt[1])]
    names = tuple(sorted({name for name, _, _ in parts}))
    number = {name: at for at, name in enumerate(names)}
    row = np.concatenate([NO_ROWS, *(rows for _, rows, _ in parts)])
    who = np.concatenate(
        [np.zeros(0, np.int64), *(np.full(len(rows), number[name], np.int64) for name, rows, _ in parts)]
    )
    rate = np.concatenate([_NO_RATE, *(rates for _, _, rates in parts)])
    order = np.lexsort((rate, who, row))
    row, who, rate = row[order], who[order], rate[order]
    new = np.ones(len(row), np.bool_)
    new[1:] = (row[1:] != row[:-1]) | (who[1:] != who[:-1])
    first = np.flatnonzero(new)
    keys = np.add.reduceat((rate > 0).astype(np.int64), first) if len(first) else np.zeros(0, np.int64)
    return Received(
        names, row[first], who[first], rate[first], np.maximum(keys, 1), hits=hits, tried=tried, wanted=wanted
    )


def keys_from(ids: Iterable[bytes]) -> Keys:
    return np.frombuffer(b"".join(ids), np.uint8).reshape(-1, ID_BYTES)
