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
from typing import Final, Protocol

import msgspec

from postroad.durable.subscriber.outputs import Deliver, DeliverGap, Receivers
from postroad.errors import BugError
from postroad.history.bulletin_writer import BulletinWriter
from postroad.history.bulletins import (
    ATTACHMENTS,
    BEST_EFFORT,
    DELIVERIES,
    FILTERS,
    MIN_PART_BYTES,
    QUEUES,
    TOPICS,
    TOPOLOGY,
    Author,
    Bulletin,
    DeliveryReport,
    LinkCount,
    QueueReport,
    RepairCount,
    attachment_bulletins,
    best_effort_bulletin,
    best_effort_states,
    broker_text,
    deliveries_bulletin,
    queues_bulletin,
    running_number,
    topology_bulletin,
)
from postroad.history.filter_shipping import ROW, FilterShipping, read_mark
from postroad.ids import IdSource, is_history
from postroad.overlay.inquiries import Inquiries
from postroad.seam.peers import Peer
from postroad.seam.replies import reply
from postroad.seam.reports import QueueEvents
from postroad.seam.switchboard import Switchboard
from postroad.seam.tracking import ReplaceAttachments, StoreFilter, TrackingEffect
from postroad.seam.turn import Turn
from postroad.tracking.attachment_log import decode_changes, encode_changes, tellable
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking
from postroad.units import MIB, MILLISECOND_US, SECOND_US
from postroad.wire.frames import Repaired, Request

TABLE: Final = "history"
LINGER_US: Final = 86_400 * SECOND_US
LOOK_US: Final = 3_600 * SECOND_US  # that a topic is still wanted is saved this often
GATHER_US: Final = SECOND_US  # changes and deliveries are collected for this long
RETRY_US: Final = 10 * SECOND_US  # after the disk failed
RESTATE_US: Final = 10 * SECOND_US  # the state is told again this often, however often it is asked for
MAX_PENDING_BYTES: Final = 16 * MIB  # that wait for the disk; then bulletins are dropped
MAX_GATHERED_BYTES: Final = 8 * MIB  # that wait for filters; more do not
MAP_PARTS: Final = 4  # of the whole attachment map, published in one turn: some milliseconds
RESTATE: Final = "restate"  # the question, between brokers
_WANTED: Final = b"wanted"

Links = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What the broker around knows."""

    wants: Callable[[str], bool]  # whether anybody anywhere subscribes to this topic
    changes: Callable[[], int]  # changes when `wants` may
    reachable: Callable[[], Sequence[int]]  # brokers, this one among them
    links: Callable[[], Links]  # the own: broker, cost
    acknowledged: Callable[[], Iterable[tuple[str, Mapping[int, int]]]]  # by durable subscriber: by pubend
    best_effort: BestEffortSource


class BestEffortSource(Protocol):
    """What became of best-effort events (`besteffort.ledger`)."""

    @property
    def changed(self) -> bool: ...

    def restate(self) -> None:
        """All links count as changed."""

    def take(self) -> tuple[list[tuple[int, int, int]], list[tuple[str, Repaired]]]:
        """What changed: (neighbour, sent, received), and what subscribers said."""


class History:
    """The bulletins of one broker. `tracking`: None where nothing is recorded; then no filters are published,
    and no map."""

    def __init__(
        self,
        board: Switchboard,
        *,
        author: Author,
        boot: int,
        publisher: int,
        filters_publisher: int,
        sources: Sources,
        tracking: Tracking | None,
        config: TrackingConfig,
        writer: BulletinWriter,
        inquiries: Inquiries,
        now_us: int,
    ) -> None:
        rows = board.table(TABLE, read_row)
        self._author = author
        self._boot = boot
        self._ids = IdSource(publisher, author.broker)
        self._sources = sources
        self._config = config
        self._writer = writer
        self._inquiries = inquiries
        self._filters: FilterShipping | None = None
        self._map_parts: Callable[[int], Iterator[bytes]] = _no_map
        if tracking is not None:
            if writer.enabled:
                tracking.change_bytes = writer.part_bytes
            self._map_parts = tracking.attachment_parts
            self._filters = FilterShipping(
                table=TABLE,
                author=author,
                boot=boot,
                publisher=filters_publisher,
                writer=writer,
                tracking=tracking,
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
        self._report = DeliveryReport(max(writer.part_bytes, MIN_PART_BYTES))
        self._queued = QueueReport(max(writer.part_bytes, MIN_PART_BYTES))
        self._told_acknowledged = False
        self._restate_us = 0
        self._ask_us = 0  # when others are asked to restate again: they do not more often either
        self._asked: list[int] = []  # the last time
        board.request("history.restate", self._restate_all)
        board.query(RESTATE, self._asked_to_restate)
        board.metrics(writer.metrics)

    # ---- who wants it

    def _restate_all(self, turn: Turn, peer: Peer, request: Request) -> None:
        """Every broker that can be reached tells its state again; nobody waits for them."""
        if turn.now_us >= self._ask_us:
            self._ask_us = turn.now_us + RESTATE_US
            me, ask = self._author.broker, self._inquiries.ask
            others = [number for number in self._sources.reachable() if number != me]
            asked = [number for number in others if ask(turn, number, RESTATE, b"", _restated)]
            self._asked = sorted([me, *asked])
        self._restate(turn.now_us)
        body = {"asked": [f"{number:08x}" for number in self._asked]}
        reply(turn, peer.connection, request.number, body)

    def _asked_to_restate(self, turn: Turn, broker: int, number: int, _body: bytes) -> None:
        self._restate(turn.now_us)
        self._inquiries.respond(turn, broker, number, b"")

    def _restate(self, now_us: int) -> None:
        """Somebody new is to know what has to be known first."""
        if now_us >= self._restate_us:
            self._restate_us = now_us + RESTATE_US
            for topic in TOPICS:
                if topic != FILTERS:
                    self._begin(topic)

    def _look(self, turn: Turn) -> None:
        now_us = turn.now_us
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
        if before or self._wanted:
            rows = [(_WANTED, msgspec.msgpack.encode(self._wanted))]
            if self._filters is not None:
                rows.append(self._filters.row)
            turn.save(TABLE, rows, then=None)

    def _begin(self, topic: str) -> None:
        if topic == FILTERS:
            if self._filters is not None:
                self._filters.begin()
        elif topic == ATTACHMENTS:
            self._whole_map = True
        elif topic == TOPOLOGY:
            self._told_links = None
        elif topic == BEST_EFFORT:
            self._sources.best_effort.restate()
        elif topic == DELIVERIES:
            self._told_acknowledged = False

    # ---- what happens

    def wants_queues(self) -> bool:
        return QUEUES in self._wanted

    def queued(self, events: Sequence[QueueEvents], now_us: int) -> None:
        """These happened to queue messages."""
        if events and QUEUES in self._wanted:
            self._queued.add(events)
            self._gather(now_us)

    def sent(self, receivers: Receivers, message: Deliver | DeliverGap, now_us: int) -> None:
        """Durable subscribers were handed this, which is not history itself."""
        if DELIVERIES not in self._wanted:
            return
        if isinstance(message, DeliverGap):
            self._report.gap(receivers, message.pubend, message.start, message.end, now_us)
        elif message.batch is not None:
            ticks, rows = message.batch.headers["tick"], message.rows
            ids = message.batch.ids(rows)
            sent = ticks if rows is None else ticks[rows]
            self._report.events(receivers, message.pubend, ids, sent, now_us)
        else:
            return
        self._gather(now_us)

    def _gather(self, now_us: int) -> None:
        if self._gathered_us is None:
            self._gathered_us = now_us + GATHER_US

    def kept(self, turn: Turn, effects: Sequence[TrackingEffect]) -> None:
        """Tracking has these kept. A topic that is wanted only after that begins with the whole map."""
        if ATTACHMENTS not in self._wanted or not self._writer.enabled:
            return
        for effect in effects:
            if isinstance(effect, ReplaceAttachments):
                self._whole_map = True
            elif not isinstance(effect, StoreFilter):
                record, most = effect.record, self._writer.part_bytes
                if len(record) > most:
                    record = encode_changes(tellable(decode_changes(record)[0], most))
                self._changed += record
                self._gather(turn.now_us)

    # ---- time

    def tick(self, turn: Turn) -> None:
        """The end of a turn, after `kept`."""
        if not self._writer.enabled:
            return
        now_us = turn.now_us
        if self._sources.changes() != self._seen or now_us >= self._look_us:
            self._look(turn)
        if not self._wanted:
            return
        if self._refused:
            self._refused = False
            self._blocked_us = now_us + RETRY_US
            self._make_good()
        if BEST_EFFORT in self._wanted and self._sources.best_effort.changed:
            self._gather(now_us)
        waits = self._waits(now_us)
        if now_us >= self._blocked_us:
            self._blocked_us = 0
            if not waits:
                self._publish_state(turn)
        due = self._gathered_us is not None and (now_us >= self._gathered_us or self._report.full)
        if due and not waits:
            self._publish_gathered(turn)
        filters = self._wanted_filters
        if filters is not None:
            filters.tick(turn)
        self._writer.tick(turn)

    def _waits(self, now_us: int) -> bool:
        """Whether bulletins wait, because filters are owed for longer than an interval. They do not for those
        that are stored meanwhile: where filters are always late, they go between them."""
        filters = self._wanted_filters
        owed_us = None if filters is None else filters.owed_us(now_us)
        if filters is None or owed_us is None:
            self._behind = None
        elif self._behind is not None:
            gathered = len(self._changed) + self._report.size + self._queued.size
            if not filters.owes(self._behind) or gathered > MAX_GATHERED_BYTES:
                self._behind = None
        elif owed_us + self._config.persist_us < now_us:
            self._behind = filters.last_sequence
        return self._behind is not None

    def close(self, turn: Turn) -> None:
        """The process ends: what is collected goes out, if the disk takes it."""
        if self._gathered_us is not None:
            self._publish_gathered(turn)
        self._writer.tick(turn)

    def next_deadline(self) -> int | None:
        if not self._wanted or not self._writer.enabled:
            return None
        # What waits for room, or for filters, waits for the disk, which is an event.
        waits = self._behind is not None
        going_on = self._map is not None and not self._blocked_us and self._has_room and not waits
        map_us = 0 if going_on else None
        gathered_us = None if waits else self._gathered_us
        filters = self._wanted_filters
        filters_us = None if filters is None else filters.next_deadline()
        others = (gathered_us, self._blocked_us or None, filters_us, map_us)
        return min([self._look_us, *(deadline for deadline in others if deadline is not None)])

    # ---- bulletins

    @property
    def owing(self) -> bool:
        """Whether something is to be published that is not on disk. Until it is, the pubend does not say that
        it is silent: who reads the history takes that for all there is of the time (`spark.trace.views`)."""
        if not self._wanted:
            return False
        refused = self._refused or self._blocked_us > 0
        waits = self._writer.pending_bytes > 0 or self._gathered_us is not None or self._map is not None
        filters = self._wanted_filters
        return refused or waits or (filters is not None and filters.owing)

    @property
    def _wanted_filters(self) -> FilterShipping | None:
        """A process that does not track leaves what another stored to the next one that does."""
        return self._filters if FILTERS in self._wanted else None

    @property
    def _has_room(self) -> bool:
        return self._writer.pending_bytes <= MAX_PENDING_BYTES // 2

    def _publish_state(self, turn: Turn) -> None:
        """What has to be known first, when a topic is wanted anew and after any loss."""
        if not self._has_room:
            return
        now_us = turn.now_us
        if ATTACHMENTS in self._wanted and self._whole_map:
            self._whole_map = False
            self._changed.clear()
            self._map = self._map_parts(now_us)
            self._publish_map(turn, whole=True)
        elif self._map is not None:
            self._publish_map(turn)
        links = self._sources.links()
        if TOPOLOGY in self._wanted and links != self._told_links:
            self._told_links = links
            number = self._number(TOPOLOGY)
            state = topology_bulletin(
                self._author, number, boot=self._boot, links=links, config=self._config, at_us=now_us
            )
            self._publish(turn, [state])
        if DELIVERIES in self._wanted and not self._told_acknowledged:
            self._told_acknowledged = True
            for name, ticks in self._sources.acknowledged():
                for pubend, tick in sorted(ticks.items()):
                    if not is_history(pubend):
                        self._report.acknowledged([(name, 0)], pubend, tick, now_us)
                        self._gather(now_us)

    def _publish_map(self, turn: Turn, *, whole: bool = False) -> None:
        """The next of it. What changes meanwhile follows when all of it is out."""
        parts = list(islice(self._map or (), MAP_PARTS))
        self._publish_attachments(turn, b"".join(parts), whole=whole)
        if len(parts) < MAP_PARTS:
            self._map = None
            if self._changed:
                self._gather(turn.now_us)

    def _publish_gathered(self, turn: Turn) -> None:
        self._gathered_us = None
        if self._map is None:
            record = bytes(self._changed)
            self._changed.clear()
            if not self._whole_map:  # else it is in the map that is still to be published
                self._publish_attachments(turn, record)
        for payload in self._report.take():
            self._publish(turn, [deliveries_bulletin(self._author, self._number(DELIVERIES), payload)])
        for payload in self._queued.take():
            self._publish(turn, [queues_bulletin(self._author, self._number(QUEUES), payload)])
        if BEST_EFFORT in self._wanted:
            self._publish_best_effort(turn)

    def _publish_best_effort(self, turn: Turn) -> None:
        links, receivers = self._sources.best_effort.take()
        states = best_effort_states(
            self._boot,
            turn.now_us,
            [LinkCount(neighbour=broker_text(at), sent=sent, received=came) for at, sent, came in links],
            [_repair_count(name, said) for name, said in receivers],
            self._writer.part_bytes,
        )
        for state in states:
            self._publish(turn, [best_effort_bulletin(self._author, self._number(BEST_EFFORT), state)])

    def _publish_attachments(self, turn: Turn, record: bytes, *, whole: bool = False) -> None:
        first = running_number(self._boot, self._counts[ATTACHMENTS] + 1)
        bulletins = attachment_bulletins(self._author, first, record, self._writer.part_bytes, whole=whole)
        self._counts[ATTACHMENTS] += len(bulletins)
        self._publish(turn, bulletins)

    def _number(self, topic: str) -> int:
        self._counts[topic] += 1
        return running_number(self._boot, self._counts[topic])

    def _publish(self, turn: Turn, bulletins: Sequence[Bulletin]) -> None:
        if not bulletins:
            return
        size = sum(len(bulletin.payload) for bulletin in bulletins)
        if self._writer.pending_bytes + size > MAX_PENDING_BYTES or self._blocked_us:
            self._writer.dropped(len(bulletins))
            self._make_good()
            return
        now_ms = turn.now_us // MILLISECOND_US
        identified = [(self._ids.next(now_ms), bulletin) for bulletin in bulletins]
        self._writer.publish(turn, identified, self._settled)

    def _settled(self, _turn: Turn, accepted: bool, count: int) -> None:
        if not accepted:
            self._writer.dropped(count)
            self._refused = True

    def _make_good(self) -> None:
        """The writer dropped bulletins: state everything anew that a later bulletin can repeat."""
        self._whole_map = True
        self._told_links = None
        self._sources.best_effort.restate()

    # ---- inspection

    def check(self) -> None:
        if self._filters is not None:
            self._filters.check()
        if not set(self._wanted) <= set(TOPICS) or self._writer.pending_bytes < 0:
            raise BugError("history: a topic that is none, or more was settled than published")


def _repair_count(name: str, said: Repaired) -> RepairCount:
    return RepairCount(
        subscriber=name,
        received=said.received,
        detected=said.detected,
        requests=said.requests,
        recovered=said.recovered,
        given_up=said.given_up,
        duplicates=said.duplicates,
        slowest_us=said.slowest_us,
    )


def _no_map(_now_us: int) -> Iterator[bytes]:
    return iter(())


def _restated(turn: Turn, body: bytes) -> None:
    """Another broker has told its state again, as it was asked to."""


def _recovered(rows: Mapping[bytes, bytes], now_us: int) -> dict[str, int]:
    wanted = _read_wanted(rows[_WANTED]) if _WANTED in rows else {}
    return {topic: at for topic, at in wanted.items() if topic in TOPICS and at + LINGER_US > now_us}


def read_row(key: bytes, value: bytes) -> object:
    return read_mark(value) if key == ROW else _read_wanted(value)


def _read_wanted(value: bytes) -> dict[str, int]:
    return msgspec.msgpack.decode(value, type=dict[str, int])
