"""The network ships its own history: what this broker publishes about itself on `$postroad/...` (spec P4).

`history.bulletins` has the topics and their bytes. They are durable events on a pubend of their own, which
is neither tracked nor reported: history has no history, or an idle network would never be quiet. Nothing is
published, nor collected, on a topic that nobody subscribes to. Once wanted, a topic stays so for LINGER_US
after the last subscription was heard of, over restarts: the subscriber's broker may be cut off for a while,
and after a start nobody is heard of yet.

Filters have a room of their own (`filter_shipping`). The other bulletins begin anew with each start, and
after any loss: the whole attachment map, the links, and what durable subscribers have acknowledged, which
tells of deliveries whose report died with the process. Who comes to a topic that others want already asks for
that state to be told again. What the disk does not take is dropped, counted and said, and made good later.

Whoever reads the history takes the tick of a bulletin for a time of which nothing is missing. So bulletins
wait for filters that should be out by then and are not: because the disk is slow or fails, or because they
are many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec

from postroad.durable.subscriber.outputs import Deliver, DeliverGap
from postroad.errors import BugError
from postroad.history.bulletin_writer import Press
from postroad.history.bulletins import (
    ATTACHMENTS,
    DELIVERIES,
    FILTERS,
    MIN_PART_BYTES,
    TOPICS,
    TOPOLOGY,
    Author,
    Bulletin,
    DeliveryReport,
    Receivers,
    attachment_bulletins,
    deliveries_bulletin,
    running_number,
    topology_bulletin,
)
from postroad.history.filter_shipping import ROW, FilterShipping, read_mark
from postroad.ids import IdSource, is_history
from postroad.seam.effects import Effect
from postroad.seam.storage import Save, StorageInput
from postroad.seam.tracking import FiltersRead, Keep, ReplaceAttachments, StoreFilter
from postroad.tracking.attachment_log import decode_changes, encode_changes, tellable
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking
from postroad.units import MIB, MILLISECOND_US, SECOND_US

TABLE: Final = "history"
LINGER_US: Final = 86_400 * SECOND_US
LOOK_US: Final = 3_600 * SECOND_US  # that a topic is still wanted is saved this often
GATHER_US: Final = SECOND_US  # changes and deliveries are collected for this long
RETRY_US: Final = 10 * SECOND_US  # after the disk failed
RESTATE_US: Final = 10 * SECOND_US  # the state is told again this often, however often it is asked for
MAX_PENDING_BYTES: Final = 16 * MIB  # that wait for the disk; then bulletins are dropped
MAX_GATHERED_BYTES: Final = 8 * MIB  # that wait for filters; more do not
MAP_PARTS: Final = 4  # of the whole attachment map, published in one turn: some milliseconds
_WANTED: Final = b"wanted"

Links = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What the broker around knows."""

    wants: Callable[[str], bool]  # whether anybody anywhere subscribes to this topic
    changes: Callable[[], int]  # changes when `wants` may
    links: Callable[[], Links]  # the own: broker, cost
    acknowledged: Callable[[], Iterable[tuple[str, Mapping[int, int]]]]  # by durable subscriber: by pubend


class History:
    """The bulletins of one broker."""

    def __init__(
        self,
        *,
        author: Author,
        boot: int,
        publisher: int,
        filters_publisher: int,
        sources: Sources,
        tracking: Tracking,
        config: TrackingConfig,
        press: Press,
        rows: Mapping[bytes, bytes],
        new_tag: Callable[[], int],
        now_us: int,
    ) -> None:
        self._author = author
        self._boot = boot
        self._ids = IdSource(publisher, author.broker)
        self._sources = sources
        self._tracking = tracking
        if press.enabled:
            tracking.change_bytes = press.part_bytes
        self._config = config
        self._press = press
        self._new_tag = new_tag
        self._filters = FilterShipping(
            table=TABLE,
            author=author,
            boot=boot,
            publisher=filters_publisher,
            press=press,
            tracking=tracking,
            new_tag=new_tag,
            rows=rows,
        )
        self._wanted = _recovered(rows, now_us)  # topic -> when a subscription to it was last heard of
        self._seen = -1  # what `changes` said when `wants` was last asked
        self._look_us = 0
        self._counts = dict.fromkeys(TOPICS, 0)  # bulletins since the start
        self._refused = False  # the disk failed since the last turn
        self._blocked_us = 0  # not 0: until then nothing is tried
        self._behind: int | None = None  # bulletins wait until filters up to this sequence are published
        self._gathered_us: int | None = None  # when to publish what is collected
        self._changed = bytearray()  # changes of the attachment map
        self._whole_map = True  # the next attachments must be the whole map
        self._map: Iterator[bytes] | None = None  # of which these parts are still to be published
        self._told_links: Links | None = None
        self._report = DeliveryReport(max(press.part_bytes, MIN_PART_BYTES))
        self._told_acknowledged = False
        self._restate_us = 0

    # ---- who wants it

    def restate(self, now_us: int) -> None:
        """Somebody new is to know what has to be known first."""
        if now_us >= self._restate_us:
            self._restate_us = now_us + RESTATE_US
            for topic in TOPICS:
                if topic != FILTERS:
                    self._begin(topic)

    def _look(self, now_us: int) -> list[Effect]:
        self._seen = self._sources.changes()
        self._look_us = now_us + LOOK_US
        before = list(self._wanted)
        for topic in TOPICS:
            if self._sources.wants(topic):
                if topic not in self._wanted:
                    self._begin(topic)
                self._wanted[topic] = now_us
            elif topic in self._wanted and self._wanted[topic] + LINGER_US <= now_us:
                del self._wanted[topic]
        if not before and not self._wanted:
            return []
        rows = ((_WANTED, msgspec.msgpack.encode(self._wanted)), self._filters.row)
        return [Save(table=TABLE, rows=rows, tag=self._new_tag())]

    def _begin(self, topic: str) -> None:
        if topic == FILTERS:
            self._filters.begin()
        elif topic == ATTACHMENTS:
            self._whole_map = True
        elif topic == TOPOLOGY:
            self._told_links = None
        else:
            self._told_acknowledged = False

    # ---- what happens

    def sent(self, receivers: Receivers, message: Deliver | DeliverGap, now_us: int) -> None:
        """Durable subscribers were handed this, which is not history itself."""
        if DELIVERIES not in self._wanted:
            return
        if isinstance(message, DeliverGap):
            self._report.gap(receivers, message.pubend, message.start, message.end, now_us)
        elif message.batch is not None:
            ticks, rows = message.batch.headers["tick"], message.rows
            ids = message.batch.ids(rows)
            told = ticks if rows is None else ticks[rows]
            self._report.events(receivers, message.pubend, ids, told, now_us)
        else:
            return
        self._gather(now_us)

    def _gather(self, now_us: int) -> None:
        if self._gathered_us is None:
            self._gathered_us = now_us + GATHER_US

    def _kept(self, effects: Sequence[Effect], now_us: int) -> None:
        for effect in effects:
            for one in effect.effects if isinstance(effect, Keep) else ():
                if isinstance(one, ReplaceAttachments):
                    self._whole_map = True
                elif not isinstance(one, StoreFilter):
                    record, most = one.record, self._press.part_bytes
                    if len(record) > most:
                        record = encode_changes(tellable(decode_changes(record)[0], most))
                    self._changed += record
                    self._gather(now_us)

    def reads(self, tag: int) -> bool:
        """Whether the stored filters of this tag were asked for here."""
        return self._filters.reads(tag)

    def read(self, item: FiltersRead, now_us: int) -> list[Effect]:
        return self._filters.read(item, now_us)

    def stored(self, item: StorageInput, now_us: int) -> None:
        self._filters.stored(item, now_us)

    # ---- time

    def tick(self, kept: Sequence[Effect], now_us: int) -> list[Effect]:
        """The end of a turn; `kept` has what tracking asked to keep in it."""
        if not self._press.enabled:
            return []
        out: list[Effect] = []
        if self._sources.changes() != self._seen or now_us >= self._look_us:
            out += self._look(now_us)
        if not self._wanted:
            return out
        if ATTACHMENTS in self._wanted:
            self._kept(kept, now_us)
        if self._refused:
            self._refused = False
            self._blocked_us = now_us + RETRY_US
            self._make_good()
        waits = self._waits(now_us)
        if now_us >= self._blocked_us:
            self._blocked_us = 0
            if not waits:
                self._publish_state(now_us)
        due = self._gathered_us is not None and (now_us >= self._gathered_us or self._report.full)
        if due and not waits:
            self._publish_gathered(now_us)
        if self._ships:
            out += self._filters.step(now_us)
        return out + self._press.take(now_us)

    def _waits(self, now_us: int) -> bool:
        """Whether bulletins wait, because filters are owed for longer than an interval. They do not for those
        that are stored meanwhile: where filters are always late, they go between them."""
        owed_us = self._filters.owed_us(now_us) if self._ships else None
        if self._behind is not None:
            gathered = len(self._changed) + self._report.size
            if owed_us is None or not self._filters.owes(self._behind) or gathered > MAX_GATHERED_BYTES:
                self._behind = None
        elif owed_us is not None and owed_us + self._config.persist_us < now_us:
            self._behind = self._tracking.last_sequence
        return self._behind is not None

    def close(self, now_us: int) -> list[Effect]:
        """The process ends: what is collected goes out, if the disk takes it."""
        if self._gathered_us is not None:
            self._publish_gathered(now_us)
        return self._press.take(now_us)

    def next_deadline(self) -> int | None:
        if not self._wanted or not self._press.enabled:
            return None
        # What waits for room, or for filters, waits for the disk, which is an event.
        waits = self._behind is not None
        going_on = self._map is not None and not self._blocked_us and self._has_room and not waits
        map_us = 0 if going_on else None
        gathered_us = None if waits else self._gathered_us
        others = (gathered_us, self._blocked_us or None, self._filters.next_deadline(), map_us)
        return min([self._look_us, *(deadline for deadline in others if deadline is not None)])

    # ---- bulletins

    @property
    def owing(self) -> bool:
        """Whether something is to be published that is not on disk. Until it is, the pubend does not say that
        it is silent: who reads the history takes that for all there is of the time (`spark.trace.views`)."""
        if not self._wanted:
            return False
        refused = self._refused or self._blocked_us > 0
        waits = self._press.pending_bytes > 0 or self._gathered_us is not None or self._map is not None
        return refused or waits or (self._ships and self._filters.owing)

    @property
    def _ships(self) -> bool:
        """A process that does not track leaves what another stored to the next one that does."""
        return FILTERS in self._wanted and self._config.strategy != "none"

    @property
    def _has_room(self) -> bool:
        return self._press.pending_bytes <= MAX_PENDING_BYTES // 2

    def _publish_state(self, now_us: int) -> None:
        """What has to be known first, when a topic is wanted anew and after any loss."""
        if not self._has_room:
            return
        if ATTACHMENTS in self._wanted and self._whole_map:
            self._whole_map = False
            self._changed.clear()
            self._map = self._tracking.attachment_parts(now_us)
            self._publish_map(now_us, whole=True)
        elif self._map is not None:
            self._publish_map(now_us)
        links = self._sources.links()
        if TOPOLOGY in self._wanted and links != self._told_links:
            self._told_links = links
            number = self._number(TOPOLOGY)
            state = topology_bulletin(
                self._author, number, boot=self._boot, links=links, config=self._config, at_us=now_us
            )
            self._publish([state], now_us)
        if DELIVERIES in self._wanted and not self._told_acknowledged:
            self._told_acknowledged = True
            for name, ticks in self._sources.acknowledged():
                for pubend, tick in sorted(ticks.items()):
                    if not is_history(pubend):
                        self._report.acknowledged([(name, 0)], pubend, tick, now_us)
                        self._gather(now_us)

    def _publish_map(self, now_us: int, *, whole: bool = False) -> None:
        """The next of it. What changes meanwhile follows when all of it is out."""
        parts = list(islice(self._map or (), MAP_PARTS))
        self._publish_attachments(b"".join(parts), now_us, whole=whole)
        if len(parts) < MAP_PARTS:
            self._map = None
            if self._changed:
                self._gather(now_us)

    def _publish_gathered(self, now_us: int) -> None:
        self._gathered_us = None
        if self._map is None:
            record = bytes(self._changed)
            self._changed.clear()
            if not self._whole_map:  # else it is in the map that is still to be published
                self._publish_attachments(record, now_us)
        for payload in self._report.take():
            self._publish([deliveries_bulletin(self._author, self._number(DELIVERIES), payload)], now_us)

    def _publish_attachments(self, record: bytes, now_us: int, *, whole: bool = False) -> None:
        first = running_number(self._boot, self._counts[ATTACHMENTS] + 1)
        bulletins = attachment_bulletins(self._author, first, record, self._press.part_bytes, whole=whole)
        self._counts[ATTACHMENTS] += len(bulletins)
        self._publish(bulletins, now_us)

    def _number(self, topic: str) -> int:
        self._counts[topic] += 1
        return running_number(self._boot, self._counts[topic])

    def _publish(self, bulletins: Sequence[Bulletin], now_us: int) -> None:
        if not bulletins:
            return
        size = sum(len(bulletin.payload) for bulletin in bulletins)
        if self._press.pending_bytes + size > MAX_PENDING_BYTES or self._blocked_us:
            self._press.dropped(len(bulletins))
            self._make_good()
            return
        now_ms = now_us // MILLISECOND_US
        self._press.publish([(self._ids.next(now_ms), one) for one in bulletins], self._settled, now_us)

    def _settled(self, accepted: bool, count: int) -> None:
        if not accepted:
            self._press.dropped(count)
            self._refused = True

    def _make_good(self) -> None:
        """Something was dropped: what a later bulletin can say again is said again."""
        self._whole_map = True
        self._told_links = None

    # ---- inspection

    def metrics(self) -> dict[str, int]:
        return self._press.metrics()

    def check(self) -> None:
        self._filters.check()
        if not set(self._wanted) <= set(TOPICS) or self._press.pending_bytes < 0:
            raise BugError("history: a topic that is none, or more was settled than published")


def _recovered(rows: Mapping[bytes, bytes], now_us: int) -> dict[str, int]:
    wanted = _read_wanted(rows[_WANTED]) if _WANTED in rows else {}
    return {topic: at for topic, at in wanted.items() if topic in TOPICS and at + LINGER_US > now_us}


def read_row(key: bytes, value: bytes) -> object:
    return read_mark(value) if key == ROW else _read_wanted(value)


def _read_wanted(value: bytes) -> dict[str, int]:
    return msgspec.msgpack.decode(value, type=dict[str, int])
