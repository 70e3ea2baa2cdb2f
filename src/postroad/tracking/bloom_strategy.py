"""Strategy bloom: filter histories (paper 3.1 to 3.3; spec T3, T4, T6).

Which histories there are, `keys` says. Only the current filter of each is in memory. Their number is bounded:
the least recently used makes room, its filter stored. A history whose filter is stored and that stayed idle
gives its memory back too.

Messages of another time than that at which they are handled are in filters of their own (`LATE`), which have
no range. So the other filters match the times of Theorem 1 and Corollary 2 only, whatever times publishers
give. Of hundreds of times far apart a late filter remembers wide spans, and may be in M(H, t) for any t.
Therefore such filters are few, and rarely wrong: each lasts for `renew`, or has half as many keys as the
greatest filter, in as many bits. It grows where others end, and is not given up when idle. A late filter of
times near each other, as of a subscriber that lags, is like any other.

Deliveries go by default into one history per origin, whose keys are (id, subscriber): a history per
subscriber leaves hundreds of part-full filters (spec, traps; measured in docs/explanation/tracking.md).

What happens is only noted, which costs little, and added to the filters later: a broker that is not busy
passes on single messages, and a filter takes a hundred ids in hardly more time than one. A page of notes is
added as if at its end, and spans less than `GATHER_US`: that counts as a delay of the messages, in the window
of times. How long pages wait does not. But where a message's time says little about when it was here, `tick`
adds the page soon, since only then it is known what a crash would lose. Before that a message that comes
alone is a line in `noted` only: single calls of code that is not in the processor's caches cost most.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from postroad.errors import BugError
from postroad.ids import ID_BYTES
from postroad.seam.tracking import TrackingEffect
from postroad.tracking.adaptive import Sizing
from postroad.tracking.attachment import GROUP, SUBSCRIBER
from postroad.tracking.attachment_log import AROUND_BYTES, Change
from postroad.tracking.bloom import fill_of
from postroad.tracking.groups import MIN_MEMBERS, Groups, Members, fitting, group_name, worth
from postroad.tracking.history import Filled, FilterHistory, Pace, Window
from postroad.tracking.keys import (
    DATAGRAM,
    DELIVERY,
    FORWARDING,
    PUBLISH,
    REPAIR,
    ROUTING,
    HistoryKey,
    paired,
    set_tag,
    subscriber_tag,
)
from postroad.tracking.moments import Times
from postroad.tracking.query.lookup import MAX_SET_DEGREE, Current
from postroad.tracking.record import FilterMeta
from postroad.tracking.recorder import EXPIRE_US, MAX_LATE_SPANS, Recorder
from postroad.tracking.settings import GATHER_US, PUT_OFF_US, TrackingConfig

IDLE_INTERVALS: Final = 10  # persistence intervals without a key, after which a stored filter leaves memory

MAX_SINGLE_KEYS: Final = 1 << 16  # of one set of receivers at once; beyond that it is named
MAX_NOTED_BYTES: Final = 1 << 20  # of ids noted and not added
MANY_NOTED_BYTES: Final = 1 << 17  # pages do not wait for more

ON_TIME: Final = 0  # of which times a filter has keys: of about when they were added,
LATE: Final = 1  # or of others, also of those to come

_Name = tuple[str, int, int, str]  # a HistoryKey's fields: as a plain tuple it hashes quicker
_Place = tuple[str, int, int, str, int]  # and ON_TIME or LATE


class _Pending:
    """What is to be added to one history: ids, tags beside them where keys have any, and the deliveries."""

    __slots__ = ("calls", "forwards", "ids", "tags")

    def __init__(self) -> None:
        self.ids: list[bytes] = []
        self.tags: list[bytes] = []
        self.calls: list[tuple[str, Sequence[str], bytes]] = []  # kind of receiver, who, ids
        self.forwards: dict[bytes, set[int]] = {}  # ids -> neighbours told of them, to become ids and tags


class _Page:
    """What was noted within `GATHER_US`: ids published, deliveries, all else by history."""

    __slots__ = ("after", "delivered", "early", "ends_us", "first_us", "last_us", "pending", "published")

    def __init__(self, now_us: int, bounds_ms: tuple[int, int]) -> None:
        self.first_us = self.last_us = now_us
        self.ends_us = now_us + GATHER_US
        # From the first to before the other, message times are as they should be; as they are in ids.
        self.early, self.after = (max(0, bound).to_bytes(6, "big") for bound in bounds_ms)
        self.published: list[bytes] = []
        self.delivered: dict[tuple[int, Members], list[bytes]] = {}  # (origin, subscribers) -> ids
        self.pending: dict[_Name, _Pending] = {}

    def pending_of(self, name: _Name) -> _Pending:
        pending = self.pending.get(name)
        if pending is None:
            pending = self.pending[name] = _Pending()
        return pending


class BloomTracking(Recorder):
    max_held = 512

    def __init__(
        self,
        config: TrackingConfig,
        *,
        me: int,
        stored: Iterable[FilterMeta],
        sizes: Mapping[int, int] | None = None,
        changes: Iterable[Change],
        now_us: int,
    ) -> None:
        super().__init__(
            config,
            me=me,
            stored=stored,
            sizes=sizes,
            changes=changes,
            # Filters are stored one by one: what is lost of some is up to an interval older than the last.
            lag_us=config.persist_us + PUT_OFF_US,
            # One that is old enough ends when it is next due, and that is after it was idle.
            filter_us=config.renew_us + (IDLE_INTERVALS + 2) * config.persist_us + EXPIRE_US,
            now_us=now_us,
        )
        behind_us = config.skew_us + GATHER_US
        self._own = Window(ahead_us=config.skew_us, behind_us=behind_us)
        self._others = Window(ahead_us=config.skew_us, behind_us=behind_us + config.jitter_us)
        self._pace = Pace(persist_us=config.persist_us, retain=config.retain, retain_us=config.renew_us)
        self._late_pace = replace(self._pace, retain=True, far_us=config.renew_us)
        # Least recently used first; each that has something to store is in `_due`, then or earlier.
        self._histories: OrderedDict[_Place, FilterHistory] = OrderedDict()
        self._due: list[tuple[int, _Place]] = []  # heap, each once
        self._waiting: set[_Place] = set()  # those in it
        self._singled: set[_Name] = set()  # of single subscribers, among these
        self._tags: dict[str, bytes] = {}  # of the subscribers attached now
        self._sets: dict[tuple[int, ...], bytes] = {}  # tags of neighbour sets seen, bounded
        self._groups = Groups()  # those in use are attached in the map, as GROUP
        self._pages: list[_Page] = []  # noted and not added yet
        self._page: _Page | None = None  # the last of them
        self._noted_bytes = 0  # 0 when nothing is noted
        self._last_ids = b""  # of the last note in this page
        # Deliveries to the same subscribers follow each other: the entry of the last one.
        self._same: list[bytes] = []
        self._same_subscribers: Sequence[str] | None = None
        self._same_origin = 0
        self._keys = 0

    # ---- recording: notes only, each event by event on a broker that is not busy

    def record(self) -> None:
        noted = self.noted[:]
        self.noted.clear()
        last_us, last_ids = -1, b""
        for now_us, ids, pubend, subscribers in noted:
            # A message that comes alone is mostly delivered in the same turn. Calls are what costs.
            if now_us != last_us or ids != last_ids or len(ids) > ID_BYTES:
                last_us, last_ids = now_us, ids
                page = self._page_for(ids, now_us)
            if not subscribers:
                page.published.append(ids)
                continue
            origin = pubend >> 32
            if subscribers != self._same_subscribers or origin != self._same_origin:
                self._same_subscribers, self._same_origin = subscribers, origin
                self._same = page.delivered.setdefault((origin, tuple(subscribers)), [])
            self._same.append(ids)

    def routed(self, origin: int, neighbour: int, ids: bytes, now_us: int) -> None:
        self._page_for(ids, now_us).pending_of((ROUTING, origin, neighbour, "")).ids.append(ids)

    def forwarded(self, origin: int, neighbours: Sequence[int], ids: bytes, now_us: int) -> None:
        """Paper 3.3: H(b,d), or the set of neighbours inside the key."""
        if self._config.routing == "neighbours":
            page = self._page_for(ids, now_us)
            for neighbour in neighbours:
                page.pending_of((FORWARDING, origin, neighbour, "")).ids.append(ids)
        elif self._config.routing == "set":
            # Neighbours are told one after the other, mostly of the same messages: one key for all of them.
            forwards = self._page_for(ids, now_us).pending_of((FORWARDING, origin, 0, "")).forwards
            forwards.setdefault(ids, set()).update(neighbours)

    def sent(self, origin: int, neighbour: int, ids: bytes, now_us: int) -> None:
        self._page_for(ids, now_us).pending_of((DATAGRAM, origin, neighbour, "")).ids.append(ids)

    def repaired(self, subscriber: str, ids: bytes, now_us: int) -> None:
        page = self._page_for(ids, now_us)
        self._add_singly(page.pending_of((REPAIR, 0, 0, "")), (subscriber,), ids)

    def _page_for(self, ids: bytes, now_us: int) -> _Page:
        """Where to note these."""
        if self.noted:
            self.record()  # what came before comes first
        page = self._page
        if page is None or now_us >= page.ends_us or self._noted_bytes >= MAX_NOTED_BYTES:
            page = self._turn_page(now_us)
        page.last_us = now_us
        self._noted_bytes += len(ids)
        if ids != self._last_ids:  # what is published here is often delivered here in the same turn
            self._last_ids = ids
            timely = page.early <= ids[8:14] < page.after
            if timely and len(ids) > ID_BYTES:
                timely = self._timely(Times(ids), page.first_us, page.ends_us)
            if not timely:
                self._wake_us = min(self._wake_us, page.ends_us)
        return page

    def _turn_page(self, now_us: int) -> _Page:
        if self._noted_bytes >= MANY_NOTED_BYTES:
            self._add_pages()
        page = self._page = _Page(now_us, self._bounds_ms(now_us, now_us + GATHER_US))
        self._pages.append(page)
        self._same_subscribers = None
        self._last_ids = b""
        self._wake_us = min(self._wake_us, self._pages[0].first_us + self._hold_us)
        return page

    # ---- from notes to keys

    def _add_pages(self) -> None:
        self.record()
        if not self._pages:
            return
        pages, self._pages, self._page = self._pages, [], None
        self._noted_bytes = self._wake_us = 0
        for page in pages:
            self._add_page(page)

    def _add_page(self, page: _Page) -> None:
        if page.published:
            page.pending_of((PUBLISH, 0, 0, "")).ids = page.published
        self._sort_deliveries(page)
        for name, pending in page.pending.items():
            for ids, neighbours in pending.forwards.items():
                pending.ids.append(ids)
                pending.tags.append(self._set_tag(tuple(sorted(neighbours))) * (len(ids) // ID_BYTES))
            times = Times(b"".join(pending.ids))
            # By when it happened: a process that was held up before it came here makes no message late.
            if not self._timely(times, page.first_us, page.last_us):
                self._note_handled(times, page.first_us, page.last_us)
                for kind, who, ids in pending.calls:
                    names = who if kind == SUBSCRIBER else [group_name(tuple(who))]
                    self._note_late(kind, names, Times(ids), page)
            keys = paired(times.ids, b"".join(pending.tags)) if pending.tags else times.ids
            self._add(name, keys, times, page)

    def _note_late(self, kind: str, names: Sequence[str], times: Times, page: _Page) -> None:
        """Deliveries of messages whose time is so wrong that the map, read then, would not name these."""
        if self._timely(times, page.first_us, page.last_us):
            return
        spans = self._untimely(times, page.first_us, page.last_us, MAX_LATE_SPANS)
        for name in names:
            for lo_ms, hi_ms in spans:
                self._news += self._map.late(kind, name, lo_ms, hi_ms, page.last_us)

    def _sort_deliveries(self, page: _Page) -> None:
        """All deliveries of one origin to the same subscribers are one step."""
        for (origin, subscribers), parts in page.delivered.items():
            if self._config.deliveries == "subscriber":
                ids = b"".join(parts)
                for subscriber in subscribers:
                    pending = page.pending_of(self._delivery_of(origin, subscriber))
                    self._add_singly(pending, (subscriber,), ids)
                continue
            pending = page.pending_of((DELIVERY, origin, 0, ""))
            if len(subscribers) < MIN_MEMBERS:
                self._add_singly(pending, subscribers, b"".join(parts))
                continue
            keys = sum(map(len, parts)) // ID_BYTES * len(subscribers)
            # In place of so many keys, a name is cheaper at once.
            enough = 1 if keys > MAX_SINGLE_KEYS else worth(self._map.group_bytes)
            for members in fitting(subscribers, self.change_bytes - AROUND_BYTES):
                self._add_set(pending, members, parts, page, enough)

    def _add_set(
        self, pending: _Pending, members: Members, parts: list[bytes], page: _Page, enough: int
    ) -> None:
        """One key for all of them, once they have a name, which they get with that many deliveries."""
        if len(members) < MIN_MEMBERS:
            self._add_singly(pending, members, b"".join(parts))
            return
        single = 0  # deliveries before it has one
        while single < len(parts) and (group := self._group(members, page, enough)) is None:
            single += 1
        if single:
            self._add_singly(pending, members, b"".join(parts[:single]))
        if group is not None:
            ids = b"".join(parts[single:])
            pending.ids.append(ids)
            pending.tags.append(group * (len(ids) // ID_BYTES))
            pending.calls.append((GROUP, members, ids))

    def _delivery_of(self, origin: int, subscriber: str) -> _Name:
        """Its own history, or where too many have one, that of all of the origin: more than there is room for
        would end each other's filters, with a key or two in each."""
        name = (DELIVERY, origin, 0, subscriber)
        if name not in self._singled:
            # As many late ones, and others, are in memory.
            if len(self._singled) >= self._config.max_histories // 3:
                return (DELIVERY, origin, 0, "")
            self._singled.add(name)
        return name

    def _add_singly(self, pending: _Pending, subscribers: Members, ids: bytes) -> None:
        """A key for each subscriber and message."""
        count = len(ids) // ID_BYTES
        try:
            pending.tags += [self._tags[subscriber] * count for subscriber in subscribers]
        except KeyError as error:
            raise BugError(f"a delivery to {error}, who is not attached") from None
        pending.ids.append(ids * len(subscribers))
        pending.calls.append((SUBSCRIBER, subscribers, ids))

    def _group(self, members: Members, page: _Page, enough: int) -> bytes | None:
        """The tag of a set of receivers, if it has one; it gets one with that many deliveries."""
        tag = self._groups.tag(members)
        if tag is None:
            begun, ended = self._groups.meet(members, enough)
            if begun:
                self._changed(self._map.attached(GROUP, group_name(members), page.first_us))
                tag = self._groups.tag(members)
            for other in ended:
                self._changed(self._map.detached(GROUP, group_name(other), page.last_us))
        return tag

    def attached(self, subscriber: str, now_us: int) -> None:
        super().attached(subscriber, now_us)
        self._tags[subscriber] = subscriber_tag(subscriber)

    def detached(self, subscriber: str, now_us: int) -> None:
        self._add_pages()  # deliveries to it need its tag
        super().detached(subscriber, now_us)
        self._tags.pop(subscriber, None)

    def unlinked(self, neighbour: int, now_us: int) -> None:
        self._add_pages()  # what went over the link may be ahead of the clock
        super().unlinked(neighbour, now_us)

    def _set_tag(self, neighbours: tuple[int, ...]) -> bytes:
        tag = self._sets.get(neighbours)
        if tag is None:
            if len(self._sets) >= 1 << MAX_SET_DEGREE:
                self._sets.clear()
            tag = self._sets[neighbours] = set_tag(neighbours)
        return tag

    def _add(self, name: _Name, keys: bytes, times: Times, page: _Page) -> None:
        first_ms, after_ms = self._window(name[0]).bounds_ms(page.last_us)
        if first_ms <= times.lo_ms and times.hi_ms < after_ms:
            self._add_to((*name, ON_TIME), keys, times, page)
            return
        all_ms = times.all_ms()
        inside = (all_ms >= first_ms) & (all_ms < after_ms)
        for when, rows in ((ON_TIME, inside), (LATE, ~inside)):
            if rows.any():
                self._add_to((*name, when), _picked(keys, rows), Times(_picked(times.ids, rows)), page)

    def _window(self, kind: str) -> Window:
        return self._own if kind == PUBLISH else self._others

    def _add_to(self, place: _Place, keys: bytes, times: Times, page: _Page) -> None:
        history = self._histories.get(place)
        if history is None:
            history = self._open(place, page.last_us)
        else:
            self._histories.move_to_end(place)
        self._keys += len(keys) // ID_BYTES
        for filled in history.add(keys, times, page.first_us, page.last_us):
            self._keep(filled)
        self._await(place, history)

    def _await(self, place: _Place, history: FilterHistory) -> None:
        if history.due_us is not None and place not in self._waiting:
            self._waiting.add(place)
            heapq.heappush(self._due, (history.due_us, place))

    def _open(self, place: _Place, now_us: int) -> FilterHistory:
        if len(self._histories) >= self._config.max_histories:
            self._end(next(iter(self._histories)), now_us)
        config = self._config
        kind, origin, neighbour, subscriber, when = place
        shape = config.shape
        sizing = Sizing(
            shape._replace(n=max(1, shape.n // 2)) if when == LATE else shape,
            least=config.least_capacity,
            persist_us=config.persist_us,
            adaptive=config.adaptive or when == LATE,
        )
        opened = FilterHistory(
            HistoryKey(kind, origin, neighbour, subscriber),
            sizing=sizing,
            window=self._window(kind),
            pace=self._late_pace if when == LATE else self._pace,
            next_sequence=self.next_sequence,
        )
        self._histories[place] = opened
        return opened

    def _end(self, place: _Place, now_us: int) -> None:
        self._keep(self._histories.pop(place).retire(now_us))
        name = place[:4]
        if not any((*name, when) in self._histories for when in (ON_TIME, LATE)):
            self._singled.discard(name)

    def _keep(self, filled: Filled | None) -> None:
        if filled is not None:
            fill = fill_of(filled.bits, filled.meta.m) if self._config.compress else 0.0
            self._store(filled.meta, filled.bits, fill=fill)

    def _flush_before_question(self) -> None:
        self._add_pages()

    def tick(self, now_us: int) -> list[TrackingEffect]:
        if now_us < self.next_deadline():
            return []
        self._add_pages()  # also what is stored now holds all that happened before
        if now_us >= self._expire_us:
            self._release_idle(now_us)
        while self._due and self._due[0][0] <= now_us:
            _, place = heapq.heappop(self._due)
            self._waiting.discard(place)
            history = self._histories.get(place)
            if history is not None:
                self._keep(history.tick(now_us))
                self._await(place, history)  # it was stored meanwhile, and is due later
        return self._collect(now_us)

    def _release_idle(self, now_us: int) -> None:
        after_us = IDLE_INTERVALS * self._pace.persist_us
        idle = [place for place, history in self._histories.items() if history.idle(now_us, after_us)]
        for place in idle:
            self._end(place, now_us)

    def _clean(self) -> bool:
        waiting = self.noted or self._pages
        return not waiting and all(history.dirty_us is None for history in self._histories.values())

    def _deadline_us(self) -> int:
        deadline_us = min(self._due[0][0], self._expire_us) if self._due else self._expire_us
        return min(deadline_us, self._pages[0].first_us + self._hold_us) if self._pages else deadline_us

    def close(self, now_us: int, unrecorded_us: int | None = None) -> list[TrackingEffect]:
        self._add_pages()
        for history in self._histories.values():
            self._keep(history.flush(now_us))
        self._histories.clear()
        self._singled.clear()
        self._due.clear()
        self._waiting.clear()
        return self._stop(now_us, unrecorded_us)

    # ---- looking up

    def _current(self, key: HistoryKey, time_ms: int) -> list[Current]:
        places = [(key.kind, key.origin, key.neighbour, key.subscriber, when) for when in (ON_TIME, LATE)]
        histories = [self._histories[place] for place in places if place in self._histories]
        return [
            Current(history.matching(time_ms), history.span_ms, history.ranged, history.stored)
            for history in histories
        ]

    def _current_keys(self, kind: str) -> list[HistoryKey]:
        return [
            HistoryKey(kind, origin, neighbour, subscriber)
            for of, origin, neighbour, subscriber, _ in self._histories
            if of == kind
        ]

    def _tag(self, subscriber: str) -> bytes:
        return self._tags.get(subscriber) or subscriber_tag(subscriber)

    # ---- inspection

    def metrics(self) -> dict[str, int | float]:
        return {
            **super().metrics(),
            "tracking_keys_total": self._keys,
            "tracking_histories": len(self._histories),
            "tracking_memory_bytes": sum(history.memory for history in self._histories.values()),
        }

    def check(self) -> None:
        super().check()
        waiting = {place: due_us for due_us, place in self._due}
        if len(waiting) != len(self._due) or waiting.keys() != self._waiting:
            raise BugError("a history waits twice to be stored")
        for place, history in self._histories.items():
            history.check()
            if history.due_us is not None and waiting.get(place, history.due_us + 1) > history.due_us:
                raise BugError(f"history {place} has something to store and no deadline")
        if set(self._tags) != {who for kind, who in self._map if kind == SUBSCRIBER}:
            raise BugError("the tags are not those of the subscribers attached")
        groups = {group_name(members) for members in self._groups.members()}
        if groups != {who for kind, who in self._map if kind == GROUP}:
            raise BugError("the groups in use are not those attached")


def _picked(keys: bytes, rows: npt.NDArray[np.bool_]) -> bytes:
    """Those in these rows."""
    return np.frombuffer(keys, np.uint64).reshape(-1, 2)[rows].tobytes()
