"""Durable publishing ends: an ordered stream of events in the log (spec D1; durable paper, section 2).

A tick is max(last + 1, now), as for a plain pubend. Events are staged: they have their ticks and are on
their way to disk. Nothing is told about a tick, not even that it is silence, before its record is synced,
so a failed append leaves nothing to take back: its ticks were never used, its publishers get an error.

A pubend that told others "silence up to t" must never assign a tick at or below t, even after a crash. So
it asserts silence only below a reservation that was saved before; a restart resumes above it.

Retries of a publisher are recognised by its last message id, which is saved now and then together with the
tick up to which that is so; a restart reads the rest from the log. The log is not chopped beyond it. Ids
belong to the principal that came with them first, as far as that is known: it is saved with the last id.

Released ticks become L: (start, floor]. Records that the log can no longer read are L as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from postroad.clients.publishing import Waiting
from postroad.durable.publisher.pubend_rows import Checkpoint, Facts, read_checkpoint, read_facts, widest
from postroad.errors import BugError, PeerError, PostroadError, StorageError
from postroad.events.batch import EventBatch
from postroad.ids import pubend_text
from postroad.seam.storage import LogStream, NoRoom, ReadDone, StreamKind
from postroad.seam.turn import Turn
from postroad.streams.knowledge import EVERYTHING, NOTHING, KnowledgeStream, Segment, joined
from postroad.streams.spans import Span, intersect, subtract, union
from postroad.units import KIB, MIB, SECOND_US
from postroad.wire.frames import Kind, Limits

TABLE: Final = "durable.pubends"
PUBLISHERS: Final = "durable.publishers"
RESERVE_US: Final = 4 * SECOND_US  # silence is reserved this far ahead of where it is to end
AHEAD_US: Final = SECOND_US // 10  # or this far ahead of the last tick: less than a start takes
RESERVE_RETRY_US: Final = SECOND_US // 2
MAX_STAGED_BYTES: Final = 64 * MIB  # on their way to disk; then publishers are refused
MAX_PUBLISHERS: Final = 100_000  # whose last id is remembered
MAX_READS: Final = 64  # spans being read from the log at a time
READ_BYTES: Final = 4 * MIB
NEAR_BYTES: Final = 64 * KIB  # spans with no more than this between them are read in one go
JOIN_BYTES: Final = 256 * KIB  # records read from the log are joined up to this
CHECKPOINT_BYTES: Final = 16 * MIB  # of records between two checkpoints; as much is scanned after a crash
MARK_BYTES: Final = 4 * MIB  # sizes are remembered this finely, at first
MARKS_WITHIN: Final = 16  # and at least as finely as this part of what early release by size keeps
MAX_MARKS: Final = 1_024


Settled = Callable[[Turn, bool], None]  # whether the frame was accepted


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A publish frame that is not answered yet."""

    batch: EventBatch
    size: int  # of the frame as it came, which is given back as credit
    receipt: Waiting | None  # None: the broker's own
    principal: str = ""  # "" for anonymous ones
    given: bool = False  # its ids are those that this broker gave to its connection
    settled: Settled | None = None  # who is told of the broker's own

    @property
    def connection(self) -> int | None:
        return None if self.receipt is None else self.receipt.connection


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    """Events on their way to the log."""

    end: int  # the last of their ticks
    batch: EventBatch
    prefixes: dict[bytes, bytes]  # publisher -> its last id in this record
    frames: list[Frame]  # that are answered when it is on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class PubendPort:
    """Who hears what became of what a pubend asked of the disk."""

    logged: Callable[[Turn, DurablePubend, Segment, list[Frame]], None]  # what to spread, whom to answer
    failed: Callable[[Turn, list[Frame], PostroadError], None]  # these are in no log
    reserved: Callable[[Turn, DurablePubend, PostroadError | None], None]  # whether silence may be asserted
    read: Callable[[Turn, DurablePubend, list[Segment]], None]  # what the log says of spans that were asked
    # The next piece of what recovery reads: the events above `replay_above`.
    recovered: Callable[[Turn, DurablePubend, list[EventBatch]], None]


class DurablePubend:
    """One durable pubend at its publisher hosting broker."""

    def __init__(
        self,
        pubend: int,
        *,
        limits: Limits,
        cache_bytes: int,
        port: PubendPort,
        now_us: int,
        max_bytes: int = 0,
    ) -> None:
        """`max_bytes`: what `floor_for_size` will be asked for; 0 if it will not be."""
        self.id = pubend
        self._stream = LogStream(StreamKind.EVENTS, pubend)
        self.start = now_us  # nothing was ever published at or before this tick
        self.last = now_us  # the highest tick told: an event on disk, or asserted silence
        self.floor = now_us  # ticks in (start, floor] are L
        self.short = False  # the last record found no room on the disk
        self._limits = limits
        self._cache_bytes = cache_bytes
        self._port = port
        self._assigned = now_us  # the highest tick given to an event or asserted silent
        self._logged = 0  # the end of the last record asked for that has not failed
        self._synced = 0  # the end of the last record on disk; the first one reaches back to 0
        self._cache = KnowledgeStream(joins=True)  # the newest knowledge, contiguous up to `last`
        self._hole: Span = (0, 0)  # behind the last readable record lay a damaged one: L
        self._staged: deque[_Record] = deque()  # on their way to disk, in order of ticks
        self._staged_bytes = 0
        self._reserved = now_us  # saved: silence may be asserted up to here
        self._reserving: list[int] = []  # reservations on their way to disk
        self._reserve_us = 0  # not before this is another one asked for
        self._publishers: OrderedDict[bytes, bytes] = OrderedDict()  # prefix -> last id on disk, oldest first
        self._owners: dict[bytes, str] = {}  # prefix -> whose ids these are, the longest known first
        # Of what is staged, by prefix: the last ids, and their records, in order.
        self._coming: dict[bytes, deque[tuple[bytes, _Record]]] = {}
        self._dirty: dict[bytes, None] = {}  # prefixes that changed since the last checkpoint
        self._saving = 0  # checkpoints on their way to disk
        self._checkpoint = now_us  # saved: what a restart need not read again
        self._size = self._saved_size = 0  # bytes ever logged, and at the last checkpoint asked for
        self._marks: deque[tuple[int, int]] = deque()  # (tick, bytes ever logged up to it)
        self._mark_bytes = min(MARK_BYTES, max(KIB, max_bytes // MARKS_WITHIN)) if max_bytes else MARK_BYTES
        self._reads: list[Span] = []  # what is being read
        self._tail: int | None = None  # recovery has read the log up to here; None: it need not, or has done
        self._replay_above: int | None = None  # recovery also hands out the events above this tick
        self._fresh = True  # `start` is not saved yet
        self._widest = widest(limits, {})  # under which what is kept was written
        self._counters = {"duplicate_events_total": 0, "failed_appends_total": 0, "log_reads_total": 0}

    # ---- publishing

    def stage(self, turn: Turn, frames: Sequence[Frame]) -> list[Frame]:
        """Give these events, which fit one frame together, their ticks and send them to the log.

        Returns the frames of which all was durable before; the others are answered by way of the port.
        """
        size = self._staged_bytes + sum(len(frame.batch.data) for frame in frames)
        if size > MAX_STAGED_BYTES:
            raise StorageError(
                f"{self._staged_bytes} bytes wait for the disk; with these it would be {size}, and the most"
                f" is {MAX_STAGED_BYTES}"
            )
        if self._fresh:
            self.reserve(turn)
        durable: list[Frame] = []
        waiting: list[Frame] = []  # for the record of this turn
        fresh: list[EventBatch] = []
        prefixes: dict[bytes, bytes] = {}
        for frame in frames:
            prefix, last = frame.batch.last_id[:8], frame.batch.last_id[8:]
            kept = self._without_repeats(frame.batch, prefix, prefixes)
            if kept is not None:
                fresh.append(kept)
                prefixes[prefix] = last
                waiting.append(frame)
            elif last <= self._publishers.get(prefix, b""):
                durable.append(frame)
            else:  # a repetition waits for the record that has the original
                coming = self._coming.get(prefix, ())
                others = (record.frames for newest, record in coming if last <= newest)
                next(others, waiting).append(frame)
        if fresh:
            self._log(turn, fresh, prefixes, waiting)
            if self._hole[1] > self._synced:  # the log notes with it that there is a record behind the hole
                self._save_facts(turn, turn.now_us)
        return durable

    def claim(self, prefix: bytes, principal: str, *, given: bool = False) -> bool:
        """Whether ids that begin so are this principal's: it was given them by this broker, or came with them
        first. Else one could use up the ids of another, whose events would be taken for repetitions. Those of
        nobody ("") are anybody's.
        """
        if given or not self._owners.get(prefix):
            if prefix not in self._owners and len(self._owners) >= MAX_PUBLISHERS:
                del self._owners[next(iter(self._owners))]
            self._owners[prefix] = principal
        return self._owners[prefix] == principal

    def has_room(self, size: int) -> bool:
        """Whether that much may be staged now."""
        return self._staged_bytes + size <= MAX_STAGED_BYTES

    def _without_repeats(
        self, batch: EventBatch, prefix: bytes, newer: Mapping[bytes, bytes]
    ) -> EventBatch | None:
        """A publisher's ids only increase: what is not above the last one came before. `newer`: the last ids
        of this turn."""
        last = newer.get(prefix) or self.newest(prefix)
        if batch.id(0)[8:] > last:
            return batch
        repeats = sum(batch.id(row)[8:] <= last for row in range(batch.count))
        self._counters["duplicate_events_total"] += repeats
        return None if repeats == batch.count else batch.slice(repeats, batch.count)

    def _log(
        self, turn: Turn, batches: list[EventBatch], prefixes: dict[bytes, bytes], frames: list[Frame]
    ) -> None:
        merged = batches[0] if len(batches) == 1 else EventBatch.concatenate(batches)
        first = max(self._assigned + 1, turn.now_us)
        batch = merged.with_ticks(first, kind=Kind.KNOWLEDGE, pubend=self.id, start=self._assigned, channel=0)
        end = first + batch.count - 1
        record = _Record(end, batch, prefixes, frames)
        turn.append(self._stream, self._logged, end, batch.data, then=partial(self._appended, record))
        self._staged.append(record)
        self._staged_bytes += len(batch.data)
        for prefix, last in prefixes.items():
            self._coming.setdefault(prefix, deque()).append((last, record))
        self._assigned = self._logged = end

    def _appended(self, record: _Record, turn: Turn, error: PostroadError | None) -> None:
        """The record is on disk: it is spread, and then its publishers may be told."""
        if error is not None:
            self._append_failed(record, turn, error)
            return
        if not self._staged or self._staged.popleft() is not record:
            raise BugError(f"pubend {pubend_text(self.id)}: records became durable out of order")
        self._staged_bytes -= len(record.batch.data)
        self._synced = record.end
        self.short = False
        self._remember(record.prefixes)
        for prefix in record.prefixes:
            coming = self._coming[prefix]
            coming.popleft()
            if not coming:
                del self._coming[prefix]
        self._grow(record.end, len(record.batch.data))
        segment = self._tell(Segment(self.last, record.end, EVERYTHING, record.batch))
        self._port.logged(turn, self, segment, record.frames)

    def _append_failed(self, record: _Record, turn: Turn, error: PostroadError) -> None:
        """The record is not in the log, nor is any staged after it: all their publishers must be told."""
        if record not in self._staged:
            return  # it failed with an earlier one
        self.short = isinstance(error, NoRoom)
        self._counters["failed_appends_total"] += 1
        frames = [frame for staged in self._staged for frame in staged.frames]
        self._staged.clear()
        self._coming.clear()
        self._staged_bytes = 0
        self._logged = max(self._synced, self._hole[1])
        self._port.failed(turn, frames, error)

    def newest(self, prefix: bytes) -> bytes:
        """Time and counter of the last id of this publisher, on disk or not; b"" if none is remembered."""
        coming = self._coming.get(prefix)
        return coming[-1][0] if coming else self._publishers.get(prefix, b"")

    def last_id(self, prefix: bytes) -> bytes | None:
        """The same on disk; None while more of it is on its way there."""
        return None if prefix in self._coming else self._publishers.get(prefix, b"")

    def _remember(self, prefixes: Mapping[bytes, bytes]) -> None:
        for prefix, last in prefixes.items():
            if last > self._publishers.get(prefix, b""):
                self._publishers[prefix] = last
                self._publishers.move_to_end(prefix)
                self._dirty[prefix] = None
        while len(self._publishers) > MAX_PUBLISHERS:
            gone, _ = self._publishers.popitem(last=False)
            self._dirty[gone] = None  # its row goes with the next checkpoint

    def _tell(self, segment: Segment) -> Segment:
        self._cache.accumulate(segment)
        self.last = segment.end
        while self._cache.size > self._cache_bytes and len(self._cache) > 1:
            self._cache.forget_first()
        return segment

    # ---- silence

    def assert_silence(self, turn: Turn, *, owing: bool = False) -> Segment | None:
        """Silence since the last tick told, as far as the reservation reaches; None: nothing can be said.

        `owing`: events of that time are still to come. One tick is silent then, for those who wait to hear
        with which interest it was filtered.
        """
        until_us = min(self.last + 1, turn.now_us) if owing else turn.now_us
        self.reserve(turn, until_us=until_us)
        end = min(max(self.last + 1, until_us), self._reserved)
        if self._staged or end <= self.last:
            return None
        self._assigned = max(self._assigned, end)  # which an append that failed may have left above
        return self._tell(Segment(self.last, end, EVERYTHING))

    def reserve(self, turn: Turn, *, until_us: int | None = None) -> None:
        """Save a later bound for silence, up to now or until then, when half of the last one is used up."""
        until_us = turn.now_us if until_us is None else until_us
        used = max(until_us + RESERVE_US // 2, self.last + AHEAD_US // 2)
        if (self._reserving or self._reserved >= used) and not self._fresh:
            return
        if turn.now_us >= self._reserve_us:  # a disk that fails is not asked with every turn
            self._save_facts(turn, until_us)

    def _save_facts(self, turn: Turn, until_us: int) -> None:
        self._reserve_us = turn.now_us + RESERVE_RETRY_US
        self._fresh = False
        bound = max(self._reserved, *self._reserving, until_us + RESERVE_US, self.last + AHEAD_US)
        self._reserving.append(bound)
        row = msgspec.msgpack.encode(Facts(self.start, bound, self._hole, self._widest))
        turn.save(TABLE, ((self._key, row),), then=partial(self._facts_saved, bound))

    def _facts_saved(self, bound: int, turn: Turn, error: PostroadError | None) -> None:
        self._reserving.remove(bound)
        if error is None:
            self._reserved = max(self._reserved, bound)
        else:
            self._fresh = self._fresh or self._reserved == self.start
        self._port.reserved(turn, self, error)

    # ---- answering

    def answer(
        self, start: int, end: int, most: int, *, whole: bool = False
    ) -> tuple[list[Segment], list[Span]]:
        """What memory knows of (start, end], in at most `most` segments, and what must be read from the log.

        Silence before the start and L up to the floor are told whole, so that nobody has to ask for them
        piece by piece. Nothing is said about ticks above `last`.
        """
        end = min(end, self.last)
        segments: list[Segment] = []
        if start < min(end, self.start):
            segments.append(Segment(start, self.start, EVERYTHING))
        lost_from = max(start, self.start)
        if lost_from < min(end, self.floor):
            segments.append(Segment(lost_from, self.floor, NOTHING, lost=True))
        start = max(start, self.floor, self.start)
        if start >= end:
            return segments, []
        known, missing = self._cache.find(start, end, {}, most, whole=whole)
        if whole:  # but what was released is L, though memory may have it still
            known = [
                segment.cut(self.floor, segment.end) if segment.start < self.floor else segment
                for segment in known
            ]
        for gap_start, gap_end in intersect([self._hole], start, end):
            segments.append(Segment(gap_start, gap_end, NOTHING, lost=True))
        missing = subtract(missing, [self._hole])
        # Above the last record there is nothing to read: it was asserted silent, or skipped by a restart.
        above = [span for gap in missing for span in intersect([gap], self._synced, end)]
        segments += [Segment(*span, EVERYTHING) for span in above]
        segments = sorted(segments + known, key=lambda segment: segment.start)
        return segments, subtract(missing, [(self._synced, end)] if self._synced < end else [])

    def read(self, turn: Turn, spans: Sequence[Span]) -> None:
        """Read these spans from the log, but for what is being read already. Spans that lie close together
        are one read, since a subscriber that catches up wants many single ticks.

        The port hears what the log says. Whoever wants more than fits one read asks again.
        """
        wanted = subtract(self._near(union(spans)), union(self._reads))
        for span in wanted[: max(0, MAX_READS - len(self._reads))]:
            self._counters["log_reads_total"] += 1
            self._reads.append(span)
            turn.read(self._stream, *span, READ_BYTES, then=partial(self._was_read, span))

    def _near(self, spans: list[Span]) -> list[Span]:
        """Joined where little of the log lies between them, into pieces of at most half a read."""
        together: list[Span] = []
        for start, end in spans:
            if together:
                first, last = together[-1]
                if self._bytes(last, start) <= NEAR_BYTES and self._bytes(first, end) <= READ_BYTES // 2:
                    together[-1] = (first, end)
                    continue
            together.append((start, end))
        return together

    def _bytes(self, start: int, end: int) -> int:
        """About how many bytes of the log lie in (start, end]."""
        return self._size_at(end) - self._size_at(start)

    def _size_at(self, tick: int) -> int:
        """About how many bytes were ever logged up to there: between two marks as many with every tick."""
        at = bisect_right(self._marks, tick, key=lambda mark: mark[0])
        low = self._marks[at - 1] if at else (self.start, 0)
        high = self._marks[at] if at < len(self._marks) else (max(self._synced, low[0] + 1), self._size)
        part = min(max(tick - low[0], 0) / max(high[0] - low[0], 1), 1.0)
        return low[1] + int(part * (high[1] - low[1]))

    def _was_read(self, span: Span, turn: Turn, done: ReadDone) -> None:
        """Records as segments, what the log no longer has as L."""
        self._reads.remove(span)
        start, end = span
        segments = [Segment(*gap, NOTHING, lost=True) for gap in intersect(done.missing, start, end)]
        for first, last, data in done.records:
            segments.append(self._segment(first, last, data).cut(start, end))
        segments = [segment for segment in segments if segment.start < segment.end]
        segments.sort(key=lambda segment: segment.start)
        self._port.read(turn, self, self._join(segments))

    def _join(self, segments: list[Segment]) -> list[Segment]:
        """Small neighbours as one: whoever catches up pays per segment and subscriber, not per event."""
        together: list[Segment] = []
        run: list[Segment] = []
        size = count = 0
        for segment in segments:
            batch = segment.batch
            events, length = (0, 0) if batch is None else (batch.count, len(batch.data))
            fits = size + length <= JOIN_BYTES and count + events <= self._limits.batch_events
            if batch is None or not fits or (run and run[-1].end != segment.start):
                together += [joined(run)] if run else []
                run, size, count = [], 0, 0
            if batch is None:
                together.append(segment)
            else:
                run.append(segment)
                size, count = size + length, count + events
        return together + ([joined(run)] if run else [])

    def _segment(self, first: int, last: int, data: bytes) -> Segment:
        try:
            batch = EventBatch.parse(data, self._limits)
        except PeerError:  # written by a bug: the checksum of the log was right
            return Segment(first, last, NOTHING, lost=True)
        return Segment(first, last, EVERYTHING, batch)

    # ---- release

    def release(self, turn: Turn, tick: int) -> None:
        """Everything up to `tick` may become L. The floor moves as far as the last checkpoint allows; not
        over the silence before the first record, since who asks for that has lost nothing."""
        tick = min(tick, self._synced)
        if tick > self._checkpoint and not self._saving:
            self._save_checkpoint(turn)
        tick = min(tick, self._checkpoint)
        if tick > self.floor and self._marks and tick >= self._marks[0][0]:
            self.floor = tick
            while len(self._marks) > 1 and self._marks[1][0] <= tick:
                self._marks.popleft()
            turn.chop(self._stream, tick)

    def floor_for_size(self, limit: int) -> int:
        """The lowest tick above which at most `limit` bytes are kept, as finely as sizes are remembered."""
        excess = self._size - limit
        floor = 0
        for tick, size in self._marks:
            if size > excess:
                break
            floor = tick
        return floor

    @property
    def kept_bytes(self) -> int:
        """Bytes of records not released, at most one mark too many; 0 if all are."""
        if self.floor >= self._logged:
            return 0
        below = [size for tick, size in self._marks if tick <= self.floor]
        return self._size - (below[-1] if below else 0)

    def _grow(self, tick: int, size: int) -> None:
        self._size += size
        if not self._marks or self._size - self._marks[-1][1] >= self._mark_bytes:
            self._marks.append((tick, self._size))
        if len(self._marks) > MAX_MARKS:
            self._marks = deque(list(self._marks)[1::2])
            self._mark_bytes *= 2

    # ---- checkpoints

    def checkpoint(self, turn: Turn) -> None:
        """Save publishers' ids and sizes, if enough was logged since the last time."""
        if self._size - self._saved_size >= CHECKPOINT_BYTES and not self._saving:
            self._save_checkpoint(turn)

    def close(self, turn: Turn) -> None:
        """The process ends: the log does not tell whose the ids in it are."""
        if self._dirty and self.recovered:
            self._save_checkpoint(turn)

    def _save_checkpoint(self, turn: Turn) -> None:
        facts = Checkpoint(self._synced, self._size, list(self._marks))
        prefixes = tuple(self._dirty)
        ids = ((self._key + prefix, self._row(prefix)) for prefix in prefixes)
        rows = ((self._key, msgspec.msgpack.encode(facts)), *ids)
        self._dirty.clear()
        self._saved_size = self._size
        self._saving += 1
        turn.save(PUBLISHERS, rows, then=partial(self._checkpoint_saved, self._synced, prefixes))

    def _row(self, prefix: bytes) -> bytes | None:
        last = self._publishers.get(prefix)
        return None if last is None else last + self._owners.get(prefix, "").encode()

    def _checkpoint_saved(
        self, tick: int, prefixes: tuple[bytes, ...], _turn: Turn, error: PostroadError | None
    ) -> None:
        self._saving -= 1
        if error is None:
            self._checkpoint = max(self._checkpoint, tick)
        else:
            self._dirty.update(dict.fromkeys(prefixes))

    @property
    def _key(self) -> bytes:
        return self.id.to_bytes(8, "big")

    # ---- restart

    def recover(
        self,
        facts: Mapping[bytes, bytes],
        publishers: Mapping[bytes, bytes],
        *,
        last: int,
        chopped: int,
        suspect: bool,
        now_us: int,
        replay_above: int | None = None,
    ) -> None:
        """After a restart: both tables, and where the log stream begins and ends.

        `replay_above`: the port is to hear the events above that tick. What the checkpoint does not know is
        to be read (`read_tail`); until `recovered` nothing may be staged.
        """
        row = facts.get(self._key)
        if row is None and last <= 0:
            return  # it never asserted anything, and nothing of it was acknowledged
        self._fresh = row is None  # the save failed where the append behind it did not
        known = Facts(0, 0) if row is None else read_facts(self._key, row)
        self.start = known.start
        self._synced = self._logged = max(last, chopped, 0)
        self.floor = max(chopped, known.start)
        if self.floor < self._synced:
            self._widest = widest(self._limits, known.limits)
        self._reserved = max(known.reserved, self._synced, self.start)
        self.last = self._assigned = self._reserved
        # Acknowledged ticks may lie in what cannot be read: they are L, and are not assigned again. A hole
        # that an earlier start found is the same as long as no record lies behind it.
        if known.hole[1] > self._synced:
            self._hole = (self._synced, known.hole[1])
        elif suspect:
            self._hole = (self._synced, max(self.last, now_us))
        if self._hole[1]:
            self.last = self._assigned = max(self.last, self._hole[1])
            self._logged = self._hole[1]
        self._checkpoint = self.start
        saved = publishers.get(self._key)
        if saved is not None:
            checkpoint = read_checkpoint(saved)
            self._checkpoint = checkpoint.tick
            self._size = self._saved_size = checkpoint.size
            self._marks = deque(checkpoint.marks)
        ids = sorted((v, k) for k, v in publishers.items() if k[:8] == self._key and len(k) == 16)
        self._publishers = OrderedDict((key[8:], value[:8]) for value, key in ids)
        self._owners = {key[8:]: value[8:].decode() for value, key in ids if len(value) > 8}
        self._replay_above = replay_above
        begin = self._checkpoint if replay_above is None else min(self._checkpoint, replay_above)
        begin = max(begin, self.floor)
        self._tail = begin if begin < self._synced else None

    def read_tail(self, turn: Turn) -> None:
        """The next piece of what recovery has to read, if there is more."""
        if self._tail is not None:
            self._counters["log_reads_total"] += 1
            turn.read(self._stream, self._tail, self._synced, READ_BYTES, then=self._tail_read)

    def _tail_read(self, turn: Turn, done: ReadDone) -> None:
        replayed: list[EventBatch] = []
        for first, last, data in done.records:
            batch = self._segment(first, last, data).batch
            if batch is not None and self._replay_above is not None and last > self._replay_above:
                replayed.append(batch)
            if last <= self._checkpoint:
                continue
            self._grow(last, len(data))
            if batch is not None:
                self._remember(_last_ids(batch))
        reached = done.records[-1][1] if done.more and done.records else self._synced
        self._tail = reached if reached < self._synced else None
        self.read_tail(turn)
        self._port.recovered(turn, self, replayed)

    @property
    def recovered(self) -> bool:
        return self._tail is None

    @property
    def untold(self) -> int | None:
        """Events above this tick are on disk, or may come there, and were not handed out; None: all were."""
        if not self.recovered:
            return self._replay_above
        return int(self._staged[0].batch.headers["tick"][0]) - 1 if self._staged else None

    # ---- inspection

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return self._cache.size + self._staged_bytes

    @property
    def staged_frames(self) -> int:
        """Frames that are answered when what they wait for is on disk."""
        return sum(len(record.frames) for record in self._staged)

    def status(self) -> dict[str, int | str]:
        return {
            "pubend": pubend_text(self.id),
            "last": self.last,
            "floor": self.floor,
            "kept_bytes": self.kept_bytes,
            "staged_bytes": self._staged_bytes,
            "publishers": len(self._publishers),
            **self._counters,
        }

    def check(self) -> None:
        self._cache.check()
        if not self.start <= self.floor <= max(self._synced, self.start) <= self._assigned:
            raise BugError("pubend: start <= floor <= synced <= assigned does not hold")
        if self.last > self._assigned or self._cache.end not in (0, self.last):
            raise BugError("pubend: more was told than was assigned")
        staged = [record.end for record in self._staged]
        if staged != sorted(staged) or any(end <= self.last for end in staged):
            raise BugError("pubend: a staged tick was told already")
        if self._staged_bytes != sum(len(record.batch.data) for record in self._staged):
            raise BugError("pubend: staged bytes are miscounted")


def _last_ids(batch: EventBatch) -> dict[bytes, bytes]:
    """The last id of every publisher in a batch."""
    ids = batch.ids()
    return {ids[at : at + 8]: ids[at + 8 : at + 16] for at in range(0, len(ids), 16)}
