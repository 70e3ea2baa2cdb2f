"""What the exact and the Bloom strategy share: stored records, the attachment map, retention, the frame of an
answer. A strategy adds what it records and how it looks a message up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Final

from postroad.seam.tracking import (
    DropFilters,
    NotKept,
    ReplaceAttachments,
    StoreAttachments,
    StoreFilter,
    TrackingEffect,
)
from postroad.tracking.attachment import LATE_ROUND_US, NEIGHBOUR, SUBSCRIBER, AttachmentMap
from postroad.tracking.attachment_log import (
    ASSUMED,
    DISK,
    FOREVER_US,
    Change,
    EncodedParts,
    Promise,
    decode_changes,
    encode_changes,
    wider,
)
from postroad.tracking.moments import Spans, Times, joined, runs
from postroad.tracking.query.lookup import Lookup
from postroad.tracking.record import FilterMeta, decode_meta, decode_record, encode_record
from postroad.tracking.settings import GATHER_US, TrackingConfig
from postroad.tracking.shelf import Shelf
from postroad.units import MILLISECOND_US, SECOND_US

SETTLE_US: Final = SECOND_US  # from storing the last filter until that is noted: by then it is on disk
EXPIRE_US: Final = 10 * SECOND_US  # retention is looked after this often
MAX_LATE_SPANS: Final = 4  # times outside the skew bound that one delivery notes
MAX_HANDLED_SPANS: Final = 64  # likewise, that are noted to be handled
SHORT_US: Final = 3 * EXPIRE_US  # from when something was last refused on, the disk counts as full
MAX_OF_GRAIN: Final = 16  # pressing notes on a full disk; further ones are twice as coarse
MAX_GRAIN_US: Final = LATE_ROUND_US << 33  # longer than all times that an id can have
MAX_HOLD_US: Final = SECOND_US  # how long notes wait, or a tenth of the persistence interval
MAX_LOG_BYTES: Final = 4 << 20  # appended to the attachment log, or as much as it had, it is written anew

# What happened to messages: when; their ids. They were published here if there is no pubend and nobody, else
# delivered to these.
MessageNote = tuple[int, bytes, int, Sequence[str]]


class Recorder(Lookup):
    """The frame; `BloomTracking` and `ExactTracking` fill it."""

    max_held: ClassVar[int]  # notes that are recorded at once, and so keep others waiting; some hundred us

    def __init__(
        self,
        config: TrackingConfig,
        *,
        me: int,
        stored: Iterable[FilterMeta],
        sizes: Mapping[int, int] | None,
        changes: Iterable[Change],
        lag_us: int,
        filter_us: int,
        now_us: int,
    ) -> None:
        """`sizes`: as of a `Shelf`; `lag_us`, `filter_us`: those of this strategy's `Promise`."""
        shelf = Shelf(stored, sizes=sizes, cache_bytes=config.cache_bytes)
        own = Promise(
            persist_us=config.persist_us,
            lag_us=lag_us,
            skew_us=config.skew_us,
            jitter_us=config.jitter_us,
            filter_us=filter_us,
        )
        changes = list(changes)
        last = next((change for change in reversed(changes) if change.what == "start"), None)
        theirs = (last.promise if last else None) or wider(ASSUMED, own)
        restored, news = AttachmentMap.restored(
            changes,
            last_stored_us=shelf.last_stored_us(last.sequence if last else 0) - theirs.lag_us,
            now_us=now_us,
            again_us=theirs.persist_us,
            routing=config.routing,
            promise=own,
            sequence=shelf.last_sequence,
        )
        super().__init__(config, me=me, shelf=shelf, attachments=restored)
        self._sequence = self._shelf.last_sequence
        self.noted: list[MessageNote] = []
        self._hold_us = min(MAX_HOLD_US, config.persist_us // 10)
        self._out: list[TrackingEffect] = []
        self._news = news  # of the attachment map, not stored yet
        self._pressing: list[Change] = []  # likewise, what is also for a full disk
        self._pressed = 0  # how many of these there were, at least, since it is full
        self._refused_us: int | None = None  # when something could last not be kept
        self._wake_us = 0  # before this, `tick` has nothing to do: it is asked at every turn
        self._rewrite_us: int | None = None  # then the whole attachment log is written: a part could not be
        self._settle_us: int | None = None  # if nothing is to be stored by then, that is noted
        self._log_bytes = 0  # appended to the attachment log since it was last written anew
        self._whole_bytes = 0  # about as much as was written then
        self._started_us = now_us
        self._expire_us = now_us + EXPIRE_US
        self._undropped: list[DropFilters] = []  # to be tried again when retention is next looked after
        self._stored_bytes = self._stored_filters = 0

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    # ---- what happened

    def published(self, ids: bytes, now_us: int) -> None:
        self.noted.append((now_us, ids, 0, ()))
        self.record()

    def delivered(self, origin: int, subscribers: Sequence[str], ids: bytes, now_us: int) -> None:
        if subscribers:
            self.noted.append((now_us, ids, origin << 32, subscribers))
            self.record()

    def record(self) -> None:
        raise NotImplementedError

    def _flush_before_question(self) -> None:
        self.record()

    # ---- who was there

    def attached(self, subscriber: str, now_us: int) -> None:
        self._changed(self._map.attached(SUBSCRIBER, subscriber, now_us))

    def detached(self, subscriber: str, now_us: int) -> None:
        self._changed(self._map.detached(SUBSCRIBER, subscriber, now_us))

    def linked(self, neighbour: int, now_us: int) -> None:
        self._changed(self._map.attached(NEIGHBOUR, str(neighbour), now_us))

    def unlinked(self, neighbour: int, now_us: int) -> None:
        self._changed(self._map.detached(NEIGHBOUR, str(neighbour), now_us))

    def _stop(self, now_us: int, unrecorded_us: int | None) -> list[TrackingEffect]:
        """The process ends in order: the map says so in a last record, after everything else is stored."""
        if self._rewrite_us is not None:
            self._rewrite_map()
        out = self._collect(now_us)
        stopped = encode_changes(self._map.stopped(now_us, unrecorded_us))
        return [*out, StoreAttachments(record=stopped, last=True)]

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

    def _note_handled(self, times: Times, first_us: int, last_us: int) -> None:
        """The strategy recorded messages at another time than theirs, from first to last. The map notes it,
        so that a trace knows what is missing if the record is lost."""
        if self._timely(times, first_us, last_us):
            return
        again_us = self._config.persist_us
        # Each minute between two that are joined is lost with them; but a full disk takes few notes.
        limit = MAX_LATE_SPANS if self._short(last_us) else MAX_HANDLED_SPANS
        for lo_ms, hi_ms in self._untimely(times, first_us, last_us, limit):
            self._press(self._map.handled(lo_ms, hi_ms, last_us, again_us, self._grain_us(last_us)))

    def _press(self, changes: list[Change]) -> None:
        """What else nobody knows after a crash on a full disk: of other times than that of the crash,
        messages were handled, or lost."""
        if changes:
            self._pressing += changes
            self._pressed += len(changes)
            self._wake_us = 0

    def _grain_us(self, now_us: int) -> int:
        """To what pressing notes are rounded. While the disk is full they become coarser, until one has all
        the times there are: the room that is spared for them is enough, however many messages come."""
        coarser = self._pressed // MAX_OF_GRAIN if self._short(now_us) else 0
        return min(LATE_ROUND_US << coarser, MAX_GRAIN_US)

    def _short(self, now_us: int) -> bool:
        """Whether the disk counts as full. As long as it is, the map is tried again and again."""
        return self._refused_us is not None and now_us < self._refused_us + SHORT_US

    def _untimely(self, times: Times, first_us: int, now_us: int, limit: int) -> list[tuple[int, int]]:
        """The map takes whole minutes."""
        first_ms, after_ms = self._bounds_ms(first_us, now_us)
        all_ms = times.all_ms()
        untimely_ms = all_ms[(all_ms < first_ms) | (all_ms >= after_ms)]
        return joined(runs(untimely_ms, LATE_ROUND_US // MILLISECOND_US), limit)

    # ---- storing

    def _store(self, meta: FilterMeta, body: bytes, *, fill: float = 0.0) -> None:
        record = encode_record(meta, body, compress=self._config.compress, fill=fill)
        self._shelf.put(meta, body, len(record))
        self._wake_us = 0
        self._stored_bytes += len(record)
        self._stored_filters += 1
        self._out.append(
            StoreFilter(
                sequence=meta.sequence,
                record=record,
                replaces=meta.replaces,
                final=meta.final,
            )
        )

    def _deadline_us(self) -> int:
        """When there is next something to do, once everything due now is done."""
        raise NotImplementedError

    def next_deadline(self) -> int:
        noted = self.noted
        if not noted:
            return self._wake_us
        most = self.max_held
        held_us = noted[0][0] + self._hold_us if len(noted) < most else noted[most - 1][0]
        return min(self._wake_us, held_us)

    def _collect(self, now_us: int) -> list[TrackingEffect]:
        """Everything to do in the driver since the last call."""
        if now_us >= self._expire_us:
            self._expire(now_us)
        self._settle(now_us)
        if self._rewrite_us is not None and (now_us >= self._rewrite_us or self._out):
            self._rewrite_map()  # before anything stored makes the last process look alive
        if self._pressing:
            record = encode_changes(self._pressing)
            self._pressing = []
            self._log_bytes += len(record)
            self._out.append(StoreAttachments(record=record, pressing=True))
        if self._news:
            record = encode_changes(self._news)
            self._news = []
            self._log_bytes += len(record)
            self._out.append(StoreAttachments(record=record))
        self._wake_us = min(
            self._deadline_us(), self._rewrite_us or FOREVER_US, self._settle_us or FOREVER_US
        )
        out, self._out = self._out, []
        return out

    def _clean(self) -> bool:
        """Whether all that was recorded is stored, or handed over to be."""
        raise NotImplementedError

    def _settle(self, now_us: int) -> None:
        """A broker that falls silent says so, once it may be believed: then a crash costs nothing older."""
        if any(isinstance(effect, StoreFilter) for effect in self._out):
            self._settle_us = now_us + SETTLE_US if self._clean() else None
        elif self._settle_us is not None and now_us >= self._settle_us:
            self._settle_us = None
            if self._clean():
                self._news += self._map.settled(now_us)

    def _expire(self, now_us: int) -> None:
        self._expire_us = now_us + EXPIRE_US
        config = self._config
        # What is only now to be stored cannot go before it is there.
        fresh = (effect.sequence for effect in self._out if isinstance(effect, StoreFilter))
        gone, ahead = self._shelf.expire(
            now_us,
            keep_us=config.keep_us,
            keep_bytes=config.keep_bytes,
            before=min(fresh, default=self._sequence + 1),
        )
        if gone or self._undropped:
            self._drop(gone, ahead, now_us)
        # A filter that is kept by when it was stored has messages from before that.
        horizon_us = now_us - config.keep_us - self._map.widest.filter_us
        forgot_us = self._map.forgot_us or 0
        if forgot_us <= now_us:  # else it is of a clock that was ahead
            horizon_us = max(horizon_us, forgot_us)
        forgotten = self._forget(horizon_us, now_us)
        # The bound holds whatever the configuration keeps: the older half of the time goes, and again.
        while self._map.crowded and horizon_us < now_us - 1:
            horizon_us = (horizon_us + now_us) // 2
            forgotten += self._forget(horizon_us, now_us)
        if self._log_bytes > max(MAX_LOG_BYTES, self._whole_bytes) or forgotten > len(self._map):
            self._rewrite_map()

    def _drop(self, gone: tuple[int, ...], ahead: Spans, now_us: int) -> None:
        """Ask for these to go, and for those that could not go before."""
        self._map.begin_at((self._shelf.dropped_ms + 1) * MILLISECOND_US)
        lost = [(lo_ms * MILLISECOND_US, (hi_ms + 1) * MILLISECOND_US) for lo_ms, hi_ms in ahead]
        for drop in self._undropped:
            gone += drop.sequences
            said = decode_changes(drop.record)[0]
            lost += [(change.at_us, change.until_us) for change in said if change.what == "lost"]
        self._undropped = []
        # All of it, whether or not it was said before: that may not have been kept.
        changes = [Change(what="begin", at_us=self._map.forgot_us or 0)]
        for at_us, until_us in joined(lost, MAX_LATE_SPANS):
            self._map.lose(at_us, until_us, now_us)
            changes.append(Change(what="lost", kind=DISK, at_us=at_us, until_us=until_us, noted_us=now_us))
        record = encode_changes(changes)
        self._log_bytes += len(record)
        self._out.append(DropFilters(sequences=gone, record=record))

    def _forget(self, horizon_us: int, now_us: int) -> int:
        """What the map knows of before; a filter may yet have a message of then that came late."""
        forgotten = self._map.forget(horizon_us - self._slack_us, now_us)
        if forgotten:
            self._news += self._map.begin_at(horizon_us)
        return forgotten

    def _rewrite_map(self) -> None:
        self._rewrite_us = None
        self._news = []
        self._log_bytes = 0
        self._whole_bytes = self._map.bytes
        # The process goes on: what it recorded before this need not be stored.
        self._out.append(ReplaceAttachments(parts=EncodedParts(self._map.snapshot(self._started_us))))

    def not_kept(self, item: NotKept, now_us: int) -> None:
        self._settle_us = None
        if not self._short(now_us):
            self._pressed = 0
        self._refused_us = now_us
        for effect in item.effects:
            if isinstance(effect, StoreFilter):
                self._stored_bytes -= len(effect.record)
                self._stored_filters -= 1
                meta = decode_meta(effect.record)
                # An earlier state is still there, and has all but the last interval.
                interval_us = self._config.persist_us + GATHER_US
                since_us = meta.opened_us if meta.replaces is None else meta.stored_us - interval_us
                self._changed(self._map.lose(max(since_us, meta.opened_us), meta.stored_us, now_us))
                for lo_ms, hi_ms in joined(meta.singles, MAX_LATE_SPANS):
                    grain_us = self._grain_us(now_us)
                    self._press(self._map.lose_handled(lo_ms, hi_ms, now_us, grain_us))
            elif isinstance(effect, DropFilters):
                self._undropped.append(effect)
            elif isinstance(effect, StoreAttachments) and effect.pressing:
                self._pressing += decode_changes(effect.record)[0]  # with the next, in a while at the latest
            else:
                # At once, and if that was it, after a while.
                again_us = EXPIRE_US if isinstance(effect, ReplaceAttachments) else 0
                self._rewrite_us = now_us + again_us
                self._wake_us = 0

    @property
    def _slack_us(self) -> int:
        return self._config.skew_us + self._config.jitter_us

    def _just_stored(self, sequence: int) -> bytes | None:
        for effect in self._out:
            if isinstance(effect, StoreFilter) and effect.sequence == sequence:
                return decode_record(effect.record)[1]
        return None

    # ---- for the network's own history

    @property
    def last_sequence(self) -> int:
        return self._sequence

    def resume_after(self, sequence: int) -> None:
        self._sequence = max(self._sequence, sequence)

    def stored_after(self, sequence: int) -> list[int]:
        return self._shelf.after(sequence)

    def stored_at(self, sequence: int) -> tuple[FilterMeta, int] | None:
        return self._shelf.get(sequence)

    @property
    def unrecorded_us(self) -> int | None:
        return self._map.unrecorded_us

    def recorded_again(self, now_us: int) -> None:
        self._changed(self._map.recorded(now_us))

    def set_back(self, now_us: int) -> None:
        if self._map.stopped_us is not None:  # else that time is lost already
            self._changed(self._map.lose(self._map.stopped_us, self._started_us, now_us))

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
