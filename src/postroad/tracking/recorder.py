"""What the exact and the Bloom strategy share: stored records, the attachment map, retention, the frame of an
answer. A strategy adds what it records and how it looks a message up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from postroad.errors import PeerError
from postroad.ids import ID_BYTES, MessageId
from postroad.tracking.attachment import NEIGHBOUR, SUBSCRIBER, AttachmentMap, Change, encode_changes
from postroad.tracking.bloom import BloomFilter
from postroad.tracking.effects import DropFilters, StoreAttachments, StoreFilter, TrackingEffect
from postroad.tracking.messages import (
    MAX_ITEMS,
    MAX_NEIGHBOURS,
    MAX_RECEIVERS,
    MAX_SIGHTINGS,
    Finding,
    Forwarding,
    Receiver,
    Sighting,
    TraceAnswer,
    TraceItem,
    TraceQuestion,
)
from postroad.tracking.moments import Times, joined, runs
from postroad.tracking.record import FilterMeta, decode_record, encode_record
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.shelf import Shelf
from postroad.units import MILLISECOND_US, SECOND_US

EXPIRE_US: Final = 10 * SECOND_US  # retention is looked after this often
MAX_READS: Final = 1024  # stored records read for one question
MAX_AHEAD_US: Final = 3_600 * SECOND_US  # a clock that is further ahead is not believed
MAX_LATE_SPANS: Final = 4  # times outside the skew bound that one delivery notes
MAX_LOG_BYTES: Final = 4 << 20  # changes appended to the attachment log before it is written anew


class Tested(NamedTuple):
    """A filter and its false positive rate as filled now."""

    filter: BloomFilter
    fpp: float


class Look:
    """One message looked up: the records read for it, and whether any could not be."""

    __slots__ = ("id", "opened", "records", "time_ms", "unread")

    def __init__(self, identity: bytes, records: Mapping[int, bytes], opened: dict[int, Tested]) -> None:
        self.id = identity
        self.time_ms = MessageId.from_bytes(identity).time_ms
        self.records = records
        self.opened = opened  # stored filters that this question has looked into, by sequence
        self.unread: set[int] = set()  # stored, matching, and not to be had from `records`


class Recorder:
    """The frame; `BloomTracking` and `ExactTracking` fill it."""

    def __init__(
        self,
        config: TrackingConfig,
        *,
        me: int,
        stored: Iterable[FilterMeta],
        changes: Iterable[Change],
        lag_us: int,
        now_us: int,
    ) -> None:
        """`lag_us`: whatever happened so long before the last store is stored."""
        self._config = config
        self._me = me
        self._shelf = Shelf(stored, cache_bytes=config.cache_bytes)
        self._sequence = self._shelf.last_sequence
        self._out: list[TrackingEffect] = []
        self._news: list[Change] = []  # of the attachment map, not stored yet
        # The newest message time met that was ahead of the clock. By the clock of its publisher, a message
        # went over a link after that was down.
        self._ahead_us = 0
        self._wake_us = 0  # before this, `tick` has nothing to do: it is asked at every turn
        self._log_bytes = 0  # appended to the attachment log since it was last written anew
        self._expire_us = now_us + EXPIRE_US
        self._map, news = AttachmentMap.restored(
            changes,
            last_stored_us=self._shelf.last_stored_us - lag_us,
            now_us=now_us,
            again_us=config.persist_us,
        )
        self._news += news
        self._stored_bytes = self._stored_filters = 0

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    # ---- who was there

    def attached(self, subscriber: str, now_us: int) -> None:
        self._changed(self._map.attached(SUBSCRIBER, subscriber, now_us))

    def detached(self, subscriber: str, now_us: int) -> None:
        self._changed(self._map.detached(SUBSCRIBER, subscriber, now_us))

    def linked(self, neighbour: int, now_us: int) -> None:
        self._changed(self._map.attached(NEIGHBOUR, str(neighbour), now_us))

    def unlinked(self, neighbour: int, now_us: int) -> None:
        self._changed(self._map.detached(NEIGHBOUR, str(neighbour), max(now_us, self._ahead_us)))

    def _stopped(self, now_us: int) -> None:
        """The process ends in order."""
        for kind, who in list(self._map):
            if kind == NEIGHBOUR:
                self.unlinked(int(who), now_us)
        self._changed(self._map.stopped(now_us))

    def _changed(self, changes: list[Change]) -> None:
        if changes:
            self._news += changes
            self._wake_us = 0

    def _bounds_ms(self, first_us: int, now_us: int) -> tuple[int, int]:
        """From which to before which message time the map, read then, names whoever is handed the message
        at any moment from `first_us` to `now_us`."""
        first_ms = (now_us - self._slack_us) // MILLISECOND_US + 1
        return first_ms, (first_us + self._config.skew_us) // MILLISECOND_US

    def _timely(self, times: Times, first_us: int, now_us: int) -> bool:
        first_ms, after_ms = self._bounds_ms(first_us, now_us)
        return first_ms <= times.lo_ms and times.hi_ms < after_ms

    def _note_late(
        self, subscribers: Sequence[str], times: Times, first_us: int, now_us: int, kind: str = SUBSCRIBER
    ) -> None:
        """Deliveries of messages whose time is so wrong that the map, read then, would not name these."""
        if self._timely(times, first_us, now_us):
            return
        spans = self._untimely(times, first_us, now_us)
        for subscriber in subscribers:
            for lo_ms, hi_ms in spans:
                self._news += self._map.late(kind, subscriber, lo_ms, hi_ms)

    def _note_handled(self, times: Times, first_us: int, last_us: int, now_us: int) -> None:
        """Messages of another time than theirs, from first to last, were recorded: should the record die,
        that is known."""
        if self._timely(times, first_us, last_us):
            return
        ahead_us = min(times.hi_ms * MILLISECOND_US, now_us + MAX_AHEAD_US)
        self._ahead_us = max(self._ahead_us, ahead_us)
        for lo_ms, hi_ms in self._untimely(times, first_us, last_us):
            self._changed(self._map.handled(lo_ms, hi_ms, now_us, self._config.persist_us))

    def _untimely(self, times: Times, first_us: int, now_us: int) -> list[tuple[int, int]]:
        first_ms, after_ms = self._bounds_ms(first_us, now_us)
        all_ms = times.all_ms()
        return joined(runs(all_ms[(all_ms < first_ms) | (all_ms >= after_ms)]), MAX_LATE_SPANS)

    # ---- storing

    def _store(self, meta: FilterMeta, body: bytes, *, fill: float = 0.0) -> None:
        record = encode_record(meta, body, compress=self._config.compress, fill=fill)
        self._shelf.put(meta, body, len(record))
        self._wake_us = 0
        self._stored_bytes += len(record)
        self._stored_filters += 1
        self._out.append(
            StoreFilter(
                key=meta.key,
                sequence=meta.sequence,
                record=record,
                replaces=meta.replaces,
                final=meta.final,
            )
        )

    def _deadline_us(self) -> int:
        """When there is next something to do, once everything due now is done."""
        raise NotImplementedError

    def next_deadline(self) -> int | None:
        return self._wake_us

    def _collect(self, now_us: int) -> list[TrackingEffect]:
        """Everything to do in the driver since the last call."""
        if now_us >= self._expire_us:
            self._expire(now_us)
        if self._news:
            record = encode_changes(self._news)
            self._news = []
            self._log_bytes += len(record)
            self._out.append(StoreAttachments(record=record))
        self._wake_us = self._deadline_us()
        out, self._out = self._out, []
        return out

    def _expire(self, now_us: int) -> None:
        self._expire_us = now_us + EXPIRE_US
        config = self._config
        gone = self._shelf.expire(now_us, keep_us=config.keep_us, keep_bytes=config.keep_bytes)
        if gone:
            self._out.append(DropFilters(sequences=gone))
            self._news += self._map.begin_at((self._shelf.dropped_ms + 1) * MILLISECOND_US)
        horizon_us = max(now_us - config.keep_us, self._map.begins_us or 0)
        forgotten = self._map.forget(horizon_us - self._slack_us)
        if self._map.crowded:
            # The bound holds whatever the configuration keeps: the older half of the time goes.
            horizon_us = (horizon_us + now_us) // 2
            self._news += self._map.begin_at(horizon_us)
            forgotten += self._map.forget(horizon_us - self._slack_us)
        if (forgotten and self._log_bytes > MAX_LOG_BYTES) or forgotten > len(self._map):
            self._news = []
            self._log_bytes = 0
            self._out.append(
                StoreAttachments(record=encode_changes(self._map.snapshot(now_us)), replace=True)
            )

    @property
    def _slack_us(self) -> int:
        return self._config.skew_us + self._config.jitter_us

    # ---- looking up

    def _publication(self, look: Look) -> float | None:
        raise NotImplementedError

    def _sightings(self, look: Look, origin: int) -> list[Sighting]:
        raise NotImplementedError

    def _forwardings(
        self, look: Look, origins: list[int], neighbours: list[int]
    ) -> tuple[Forwarding, ...] | None:
        raise NotImplementedError

    def _deliveries(self, look: Look, origins: list[int], candidates: list[str]) -> list[Receiver]:
        raise NotImplementedError

    def _body(self, look: Look, meta: FilterMeta) -> bytes | None:
        """What a stored record holds; None, and noted, if it is not to be had."""
        body = self._shelf.body(meta, look.records)
        if body is None:
            for effect in self._out:  # completed just now: the driver has not seen it yet
                if isinstance(effect, StoreFilter) and effect.sequence == meta.sequence:
                    return decode_record(effect.record)[1]
            look.unread.add(meta.sequence)
        return body

    def _flush_before_question(self, now_us: int) -> None:
        """A chance to make what is in memory searchable."""

    def wanted(self, question: TraceQuestion, records: Mapping[int, bytes], now_us: int) -> tuple[int, ...]:
        self._check(question)
        self._flush_before_question(now_us)
        unread: set[int] = set()
        opened: dict[int, Tested] = {}
        for item in question.items:
            look = Look(item.id, records, opened)
            self._find(look, item)
            unread |= look.unread
        return tuple(sorted(unread - records.keys()))[: max(0, MAX_READS - len(records))]

    def answer(self, question: TraceQuestion, records: Mapping[int, bytes], now_us: int) -> TraceAnswer:
        self._check(question)
        self._flush_before_question(now_us)
        opened: dict[int, Tested] = {}
        return TraceAnswer(
            findings=tuple(self._find(Look(item.id, records, opened), item) for item in question.items)
        )

    def _check(self, question: TraceQuestion) -> None:
        if not 1 <= len(question.items) <= MAX_ITEMS:
            raise PeerError(f"a trace question about {len(question.items)} messages, at most {MAX_ITEMS}")
        if any(len(item.id) != ID_BYTES for item in question.items):
            raise PeerError("a trace question about an id of the wrong length")

    def _find(self, look: Look, item: TraceItem) -> Finding:
        """What is known about one message, from memory and the records read so far."""
        config, time_ms = self._config, look.time_ms
        window = {"skew_us": config.skew_us, "delay_us": config.jitter_us}
        published = self._publication(look)
        routed = self._sightings(look, item.origin)[:MAX_SIGHTINGS]
        # A message may be passed on long after its time, over a link that is new then and gone by now: to a
        # broker that comes back, or is rerouted, and catches up.
        linked = self._map.since(NEIGHBOUR, time_ms, skew_us=config.skew_us)
        neighbours = sorted(map(int, linked))[:MAX_NEIGHBOURS]
        # Routing history first: only who routed it, or took it from the publisher, can have passed it on.
        origins = {sighting.origin for sighting in routed}
        if published is not None:
            origins.add(self._me)
        forwarded: tuple[Forwarding, ...] | None = None
        received: list[Receiver] = []
        candidates: list[str] = []
        if origins:
            ordered = sorted(origins)
            forwarded = self._forwardings(look, ordered, neighbours)
            candidates = self._map.at(SUBSCRIBER, time_ms, **window)
            received = self._deliveries(look, ordered, candidates)
        return Finding(
            published=published,
            routed=tuple(routed),
            forwarded=forwarded,
            delivered=tuple(received[:MAX_RECEIVERS]),
            candidates=max(len(candidates), len(received)),
            more=max(0, len(received) - MAX_RECEIVERS),
            neighbours=tuple(neighbours),
            begins_ms=(self._map.begins_us or 0) // MILLISECOND_US,
            forgotten=time_ms * MILLISECOND_US < (self._map.forgot_us or 0),
            lost=self._why_incomplete(look),
        )

    def _why_incomplete(self, look: Look) -> str:
        if look.unread:
            return f"{len(look.unread)} stored filters could not be read"
        slack = {"skew_us": self._config.skew_us, "delay_us": self._config.jitter_us}
        if self._map.lost_at(look.time_ms, **slack):
            return "the broker died and its last records of that time with it"
        return ""

    # ---- for the network's own history

    @property
    def last_sequence(self) -> int:
        return self._sequence

    def resume_after(self, sequence: int) -> None:
        self._sequence = max(self._sequence, sequence)

    def stored_after(self, sequence: int) -> list[tuple[int, int]]:
        return self._shelf.after(sequence)

    @property
    def unrecorded_us(self) -> int | None:
        return self._map.unrecorded_us

    def attachments(self, now_us: int) -> bytes:
        return encode_changes(self._map.snapshot(now_us))

    # ---- inspection

    def metrics(self) -> dict[str, int | float]:
        return {
            "tracking_stored_bytes_total": self._stored_bytes,
            "tracking_stored_filters_total": self._stored_filters,
            "tracking_kept_bytes": self._shelf.bytes,
            "tracking_kept_filters": len(self._shelf),
            "tracking_attachments": len(self._map),
        }

    def check(self) -> None:
        self._shelf.check()
        self._map.check()
