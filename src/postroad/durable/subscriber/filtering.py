"""The persistent filtering subsystem, PFS: which ticks matched which subscriber (spec D6; paper, 4.2).

One log stream per pubend. The paper writes a record per event; here one record stands for one batch: its
Q ticks, and for each group of subscribers that matched the same rows those rows, the subscribers and where
each one's previous record is. Records adjoin: a record covers from the end of the one before it, so a span
in which nothing matched costs nothing and is still known. What no record covers (an append failed, a record
is damaged, L came from upstream, chopped) is a hole, and in a hole every tick is Q: imprecise, never wrong.

A catchup stream reads a buffer of Q ticks at a time. The read starts at lastIndex(s) and follows the back
pointers; a subscriber that matched nothing since its token costs no read at all. When pointers leave out
little of the log, or there are many, the rest is read forwards in large pieces; so it is from the start where
one piece is enough.

lastIndex and the number of matches per subscriber are saved now and then; what follows the last checkpoint
is read from the log after a restart. The same batch may come again then: what is known already is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from postroad.durable.subscriber.backlog import Backlog
from postroad.durable.subscriber.compact import Numbers, get_set, get_varint, put_set, put_varint
from postroad.errors import BugError, PostroadError, StorageError
from postroad.ids import is_volatile, pubend_text
from postroad.seam.storage import LogStream, ReadDone, StreamKind
from postroad.seam.turn import Turn, Written
from postroad.selectors import Group
from postroad.streams.spans import Span, intersect, union
from postroad.units import KIB, MIB, SECOND_US

TABLE: Final = "durable.filtering"
BUFFER_TICKS: Final = 5_000  # Q ticks that fill a read buffer (paper, 5.3)
READ_BYTES: Final = 256 * KIB  # per forward read
ALIGN_TICKS: Final = SECOND_US  # reads forwards begin at a multiple of this, so that several can be one
HOP_BYTES: Final = 16 * KIB  # a pointer that leaves out less of the log is dense
DENSE_HOPS: Final = 4  # as many dense pointers in a row: read forwards instead
MAX_HOPS: Final = 64  # pointers followed one by one in one read
MAX_PENDING_BYTES: Final = 16 * MIB  # of records on their way to disk; what does not fit is a hole
RECORD_BYTES: Final = 512  # of one of those without its data
CHECKPOINT_BYTES: Final = MIB  # of records between two checkpoints; as much is scanned after a crash
MAX_CACHED_SETS: Final = 4_096
PARSED_BYTES: Final = 16 * MIB  # of records kept parsed, as far as their size can be told
GROUP_BYTES: Final = 256  # of a group without its ticks and members
MEMBER_BYTES: Final = 128

_VERSION: Final = 1
_ALIKE: Final = 0  # all subscribers of a group have the same previous record
_EACH: Final = 1
_META: Final = struct.Struct("<qq")  # checkpoint tick, doubt
_ROW: Final = struct.Struct("<qq")  # lastIndex(s), matches of s so far
_EMPTY: Final[Numbers] = np.empty(0, np.int64)


def filtering_stream(pubend: int) -> LogStream:
    """The log stream of a pubend's records."""
    if is_volatile(pubend):
        raise BugError(f"pubend {pubend_text(pubend)} is not durable")
    return LogStream(StreamKind.FILTERING, pubend)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBuffer:
    """Knowledge of (start, end] for one subscriber: Q at `ticks` and throughout `unknown`, else S."""

    subscriber: int
    start: int
    end: int
    ticks: Numbers
    unknown: tuple[Span, ...]


class _Parsed(NamedTuple):
    """A group of a record: its members, their Q ticks, and where in the data their pointers begin."""

    members: dict[int, int]
    ticks: Numbers
    pointers: int


@dataclass(slots=True)
class _BatchRead:
    """A batch read on its way."""

    subscriber: int
    start: int
    end: int
    low: int  # everything above this is in `newest`; the rest is still to be read
    backwards: bool
    at: int  # forwards: everything up to this is in `oldest`
    begun: bool = False  # forwards: something was read
    hops: int = 0
    dense: int = 0
    newest: list[Numbers] = field(default_factory=list)  # Q ticks found backwards, newest first
    oldest: list[Numbers] = field(default_factory=list)  # and forwards
    count: int = 0  # ticks in `oldest`
    unknown: list[Span] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _LogRead:
    """A read of the log on its way, and the batch reads that wait for it."""

    begin: int
    end: int
    states: list[_BatchRead]


class PersistentFiltering:
    """The PFS of one pubend at one subscriber hosting broker.

    `opened`: `recover` had to read the log, and is through. `ready` is given the buffers of batch reads that
    could not be answered at once.
    """

    def __init__(
        self,
        pubend: int,
        *,
        backlog: Backlog,
        opened: Callable[[Turn], None],
        ready: Callable[[Turn, list[ReadBuffer]], None],
        start: int = 0,
    ) -> None:
        self.pubend = pubend
        self.stream = filtering_stream(pubend)
        self.heard = start  # everything up to here was handed in
        self.last_timestamp = start  # the end of the newest record
        self.doubt = 0  # the end of the newest hole: below it lastIndex proves nothing
        self.chopped = start
        self._backlog = backlog
        self._opened = opened
        self._ready = ready
        self._first = start  # where the next record begins: at the last one's end, or after a hole
        self._last_index: dict[int, int] = {}  # subscriber -> end of its newest record
        self._totals: dict[int, int] = {}  # subscriber -> events it ever matched
        self._dirty: dict[int, None] = {}  # subscribers that changed since the last checkpoint
        self._uncounted: dict[tuple[int, ...], int] = {}  # members of groups -> events not in `_totals` yet
        self._urgent = False  # there is a hole that no checkpoint knows
        self._synced = start  # the end of the newest record on disk
        self._pending: dict[int, int] = {}  # the ends of records on their way -> their sizes
        self._pending_bytes = 0
        self._reads: dict[_LogRead, None] = {}  # on their way
        self._forward: dict[int, _LogRead] = {}  # those that go forwards, by where they begin
        self._unsaved_bytes = 0  # of records since the last checkpoint
        self._weighed_from: int | None = None  # the end of the first record seen by this process
        self._weight = 0  # bytes of those behind it
        self._packed: dict[tuple[int, ...], bytes] = {}  # members of a group, as given -> their set as bytes
        self._unpacked: dict[bytes, dict[int, int]] = {}  # and back: subscriber -> its place in the set
        self._parsed: dict[tuple[int, bytes], list[_Parsed]] = {}  # groups, by first tick and data
        self._parsed_bytes = 0  # of these and of `_unpacked`
        self.recovered = True  # else the tail is being read: there is nothing else to ask of this object
        self.tail = start  # what a restart read from the log begins here
        self._consumed: Mapping[int, int] = {}  # while it does: subscriber -> tick
        self._above: dict[int, int] = {}  # events of the tail above that tick
        self._counters = {
            "filtering_records_total": 0,
            "filtering_bytes_total": 0,
            "filtering_reads_total": 0,
        }

    # ---- writing

    def write(
        self,
        turn: Turn,
        start: int,
        end: int,
        ticks: npt.NDArray[np.int64] | None,
        groups: Sequence[Group],
        *,
        then: Written,
    ) -> bool:
        """The ticks of a batch that knows (start, end], and who matched which rows of it. True: a record is
        on its way, and `then` hears what became of it.

        False if nothing matched: then the span is silence for everybody as soon as what came before it is
        on disk. What was handed in before is left out. Where the disk is too far behind, what matched is a
        hole: to be refiltered, which costs time, but no memory.
        """
        if end <= self.heard:
            return False
        if start > self.heard:
            raise BugError(f"filtering: ({start}, {end}] after {self.heard} leaves a gap")
        if start < self.heard and ticks is not None:
            ticks, groups = _after(ticks, groups, self.heard)
        self.heard = end
        if ticks is None or not groups:
            return False
        fits = self._pending_bytes < MAX_PENDING_BYTES
        data = self._pack(ticks, groups) if fits else b""
        for rows, targets in groups:
            self._last_index.update(dict.fromkeys(targets, end))
            members = tuple(targets)
            self._uncounted[members] = self._uncounted.get(members, 0) + len(rows)
        if len(self._uncounted) > MAX_CACHED_SETS:
            self._count()
        if not fits:
            self.hole(end)
            return False
        turn.append(self.stream, self._first, end, data, then=partial(self._written, end, then))
        self._first = self.last_timestamp = end
        self._pending[end] = RECORD_BYTES + len(data)
        self._pending_bytes += RECORD_BYTES + len(data)
        self._unsaved_bytes += len(data)
        self._weigh(end, len(data))
        self._counters["filtering_records_total"] += 1
        self._counters["filtering_bytes_total"] += len(data)
        return True

    def _count(self) -> None:
        """Groups come again and again: each of their members is counted when somebody asks."""
        for members, count in self._uncounted.items():
            self._dirty.update(dict.fromkeys(members))
            for subscriber in members:
                self._totals[subscriber] = self._totals.get(subscriber, 0) + count
        self._uncounted.clear()

    def _weigh(self, end: int, size: int) -> None:
        if self._weighed_from is None:
            self._weighed_from = end  # it may reach back for ever: only what follows tells how dense they are
        else:
            self._weight += size

    def _bytes_within(self, ticks: int) -> int:
        """About how large the records of so many ticks are; 0 if there is nothing to tell it by."""
        if self._weighed_from is None or self._weighed_from >= self.last_timestamp:
            return 0
        return self._weight * ticks // (self.last_timestamp - self._weighed_from)

    def hole(self, end: int) -> None:
        """Up to `end` it is not known what matched: L came from upstream, records failed or had no room."""
        self.heard = max(self.heard, end)
        self._first = self.doubt = self.heard
        self._urgent = True

    def _written(self, end: int, then: Written, turn: Turn, error: PostroadError | None) -> None:
        """The record that ends there is on disk; if not, it and all that were on their way behind it are not
        in the log: a hole. Those are not pending any more when their own failures come."""
        size = self._pending.pop(end, None)
        if size is not None and error is None:
            self._synced = end
            self._pending_bytes -= size
        elif size is not None:
            self._pending.clear()
            self._pending_bytes = 0
            self.last_timestamp = self._synced
            self.hole(self.heard)
        then(turn, error)

    def _pack(self, ticks: npt.NDArray[np.int64], groups: Sequence[Group]) -> bytes:
        base, doubt, last_index = self._first, self.doubt, self._last_index
        out = bytearray((_VERSION,))
        put_set(out, ticks - base)
        put_varint(out, len(groups))
        for rows, targets in groups:
            ids = self._packed.get(tuple(targets))
            if ids is None:
                ids = _set_bytes(sorted(targets))
                if len(self._packed) >= MAX_CACHED_SETS:
                    self._packed.clear()
                self._packed[tuple(targets)] = ids
            body = bytearray()
            put_set(body, rows)
            previous = {last_index.get(subscriber, 0) for subscriber in targets}
            alike = len(previous) == 1
            body.append(_ALIKE if alike else _EACH)
            for tick in (
                previous if alike else [last_index.get(subscriber, 0) for subscriber in sorted(targets)]
            ):
                tick = max(tick, doubt)
                put_varint(body, base - tick + 1 if tick else 0)
            put_varint(out, len(ids))
            out += ids
            put_varint(out, len(body))
            out += body
        return bytes(out)

    # ---- reading records

    def _members(self, ids: bytes) -> dict[int, int]:
        places = self._unpacked.get(ids)
        if places is None:
            values, _ = get_set(ids, 0)
            places = {value: place for place, value in enumerate(values.tolist())}
            self._make_room(len(ids) + MEMBER_BYTES * len(places))
            self._unpacked[ids] = places
        return places

    def _parse(self, first: int, data: bytes) -> list[_Parsed]:
        """Kept for a while: those who catch up after a crash of this broker all read the same records."""
        remembered = self._parsed.get((first, data))
        if remembered is not None:
            return remembered
        if not data or data[0] != _VERSION:
            raise StorageError(
                f"a filtering record begins with {data[:1].hex() or 'nothing'}; this Postroad reads version"
                f" {_VERSION}"
            )
        ticks, at = get_set(data, 1)
        count, at = get_varint(data, at)
        ticks += first
        groups: list[_Parsed] = []
        for _ in range(count):
            size, at = get_varint(data, at)
            ids = data[at : at + size]
            length, at = get_varint(data, at + size)
            if at + length > len(data):
                raise StorageError(
                    f"a filtering record of {len(data)} bytes ends within a group, which goes to"
                    f" {at + length}"
                )
            rows, pointers = get_set(data, at)
            if len(rows) and int(rows[-1]) >= len(ticks):
                raise StorageError(f"a filtering record of {len(ticks)} rows names row {int(rows[-1])}")
            groups.append(_Parsed(self._members(ids), ticks[rows], pointers))
            at += length
        self._make_room(len(data) + sum(GROUP_BYTES + group.ticks.nbytes for group in groups))
        self._parsed[first, data] = groups
        return groups

    def _make_room(self, size: int) -> None:
        """Both caches are emptied at once, since what is parsed refers to members."""
        if self._parsed_bytes + size > PARSED_BYTES:
            self._parsed.clear()
            self._unpacked.clear()
            self._parsed_bytes = 0
        self._parsed_bytes += size

    def find(self, first: int, data: bytes, subscriber: int) -> tuple[Numbers, int] | None:
        """The ticks of a record that `subscriber` matched, and the end of its previous record, 0 if none."""
        for members, ticks, at in self._parse(first, data):
            place = members.get(subscriber)
            if place is None:
                continue
            form, at = data[at], at + 1
            back = 0
            for _ in range(1 if form == _ALIKE else place + 1):
                back, at = get_varint(data, at)
            return ticks, first + 1 - back if back else 0
        return None

    # ---- batch reads

    def batch_read(self, turn: Turn, subscriber: int, start: int, end: int) -> ReadBuffer | None:
        """Q and S of (start, end] for one subscriber: at once, or (None) later, to `ready`.

        `end` must be on disk, and the subscriber known here since `start`. A later call replaces an earlier
        one of the same subscriber.
        """
        self.cancel(subscriber)
        top = max(self._last_index.get(subscriber, 0), self.doubt)
        at = max(start, min(self.chopped, end))
        chopped = [(start, at)] if start < at else []
        if top <= at or at == end:
            return _buffer(subscriber, start, end, (), chopped)
        whole = self._bytes_within(min(top, end) - at)
        backwards = self.doubt < top <= end and not 0 < whole <= READ_BYTES
        state = _BatchRead(
            subscriber, start, end, low=min(top, end), backwards=backwards, at=at, unknown=chopped
        )
        self._read_on(turn, state)
        return None

    def silent(self, subscriber: int, start: int) -> bool:
        """No record on disk above `start` names the subscriber, which was known here at that tick."""
        return max(self._last_index.get(subscriber, 0), self.doubt, self.chopped) <= start

    def cancel(self, subscriber: int) -> None:
        for read in self._reads:
            read.states[:] = [state for state in read.states if state.subscriber != subscriber]

    def _read_on(self, turn: Turn, state: _BatchRead) -> None:
        """If another's read is on its way that will do, this one waits for it: those who catch up after a
        crash of this broker all read the same records.
        """
        begin, end, limit = state.low - 1, state.low, 1
        if not state.backwards:
            begin, limit = state.at, READ_BYTES
            if not state.begun:
                state.begun = True
                begin -= begin % ALIGN_TICKS
            under_way = self._forward.get(begin)
            if under_way is not None and under_way.end >= state.low:
                under_way.states.append(state)
                return
            end = max(state.low, self._synced)
        read = _LogRead(begin, end, [state])
        self._reads[read] = None
        if not state.backwards:
            self._forward[begin] = read
        self._counters["filtering_reads_total"] += 1
        turn.read(self.stream, begin, end, limit, then=partial(self._was_read, read))

    def _was_read(self, read: _LogRead, turn: Turn, done: ReadDone) -> None:
        """An answer of the log: buffers, and what to read next. Nobody waits for those that are cancelled."""
        del self._reads[read]
        if self._forward.get(read.begin) is read:
            del self._forward[read.begin]
        buffers: list[ReadBuffer] = []
        for state in read.states:
            buffer = self._backwards(state, done) if state.backwards else self._forwards(state, done)
            if buffer is None:
                self._read_on(turn, state)
            else:
                buffers.append(buffer)
        if buffers:
            self._ready(turn, buffers)

    def _backwards(self, state: _BatchRead, done: ReadDone) -> ReadBuffer | None:
        state.backwards = False  # unless the pointer leads on
        if len(done.records) != 1 or done.records[0][1] != state.low:
            return None  # the record is gone: read the rest forwards, where holes are seen
        first, _, data = done.records[0]
        try:
            match = self.find(first, data, state.subscriber)
        except StorageError:
            return None
        if match is None:
            return None
        ticks, previous = match
        state.newest.append(ticks[ticks > state.at])
        state.hops += 1
        dense = previous == first or 0 < self._bytes_within(first - previous) < HOP_BYTES
        state.dense = state.dense + 1 if dense else 0
        state.low = previous
        if previous <= state.at:
            return self._finish(state, state.end)
        count = sum(len(part) for part in state.newest)
        state.backwards = (
            state.dense < DENSE_HOPS
            and state.hops < MAX_HOPS
            and count < BUFFER_TICKS
            and previous > self.doubt
        )
        return None

    def _forwards(self, state: _BatchRead, done: ReadDone) -> ReadBuffer | None:
        state.unknown += intersect(done.missing, state.at, state.low)
        more = done.more and bool(done.records)
        for first, last, data in done.records:
            if last <= state.at:
                continue
            if first >= state.low:
                more = False
                break
            try:
                groups = self._parse(first, data)
            except StorageError:
                state.unknown += intersect([(first, last)], state.at, state.low)
                groups = []
            for members, ticks, _ in groups:
                if state.subscriber not in members:
                    continue
                if first < state.at or last > state.low:
                    ticks = ticks[(ticks > state.at) & (ticks <= state.low)]
                state.oldest.append(ticks)
                state.count += len(ticks)
            state.at = max(state.at, min(last, state.low))
            if state.count >= BUFFER_TICKS and state.at < state.low:
                state.newest.clear()
                return self._finish(state, state.at)
        if more and state.at < state.low:
            return None
        if state.at < state.low:
            state.unknown.append((state.at, state.low))  # a hole behind the last record of the log
        return self._finish(state, state.end)

    @staticmethod
    def _finish(state: _BatchRead, end: int) -> ReadBuffer:
        return _buffer(
            state.subscriber, state.start, end, [*state.oldest, *reversed(state.newest)], state.unknown
        )

    # ---- space, subscribers, checkpoints

    def chop(self, turn: Turn, tick: int) -> None:
        """Everything up to `tick` was released: its records may go."""
        tick = min(tick, self.heard)
        if tick > self.chopped:
            self.chopped = tick
            turn.chop(self.stream, tick)

    def matched(self, subscriber: int) -> int:
        """How many events this subscriber ever matched here."""
        self._count()
        return self._totals.get(subscriber, 0)

    def forget(self, turn: Turn, subscriber: int) -> None:
        """The subscription is deleted."""
        self.cancel(subscriber)
        self._count()
        self._drop(turn, [subscriber] if subscriber in self._totals else [])

    def forget_others(self, turn: Turn, known: Callable[[int], object]) -> None:
        """After a restart: records of the tail name subscriptions that were deleted since."""
        self._count()
        self._drop(turn, [subscriber for subscriber in self._totals if not known(subscriber)])

    def _drop(self, turn: Turn, subscribers: list[int]) -> None:
        for subscriber in subscribers:
            del self._totals[subscriber]
            self._last_index.pop(subscriber, None)
            self._dirty.pop(subscriber, None)
        if subscribers:
            rows = [(self._key(subscriber), None) for subscriber in subscribers]
            turn.save(TABLE, rows, then=partial(self._saved, subscribers))

    def checkpoint(self, turn: Turn) -> None:
        """Save what a restart needs, if enough was written since the last time or there is a new hole.

        Must be asked before latestDelivered is saved: a hole that nobody remembers would be silence.
        """
        if self._unsaved_bytes < CHECKPOINT_BYTES and not self._urgent:
            return
        self._count()
        meta = (self._key(), _META.pack(self.last_timestamp, self.doubt))
        subscribers = list(self._dirty)
        rows = [meta, *((self._key(subscriber), self._row(subscriber)) for subscriber in subscribers)]
        self._dirty.clear()
        self._unsaved_bytes = 0
        self._urgent = False
        turn.save(TABLE, rows, then=self._backlog.counted(partial(self._saved, subscribers)))

    def _row(self, subscriber: int) -> bytes | None:
        total = self._totals.get(subscriber)
        return None if total is None else _ROW.pack(self._last_index.get(subscriber, 0), total)

    def _saved(self, subscribers: Sequence[int], _turn: Turn, error: PostroadError | None) -> None:
        """If they could not be saved, the checkpoint is to be made again, at the next occasion."""
        if error is not None:
            self._dirty.update(dict.fromkeys(subscribers))
            self._urgent = True

    def _key(self, subscriber: int | None = None) -> bytes:
        key = self.pubend.to_bytes(8, "big")
        return key if subscriber is None else key + subscriber.to_bytes(4, "big")

    # ---- restart

    def recover(
        self,
        turn: Turn,
        rows: Mapping[bytes, bytes],
        *,
        last: int,
        chopped: int,
        suspect: bool,
        delivered: int,
        consumed: Mapping[int, int],
    ) -> None:
        """After a restart: the saved rows, where the log stream ends, the saved latestDelivered, and up to
        where each subscriber consumed what is remembered of it.

        What the checkpoint does not know is read from the log: if there is something, `opened` is called once
        `recovered` is true.
        """
        checkpoint = 0
        for key, value in rows.items():
            if key == self._key():
                checkpoint, self.doubt = read_filtering(key, value)
            elif key[:8] == self._key():
                subscriber = int.from_bytes(key[8:], "big")
                self._last_index[subscriber], self._totals[subscriber] = read_filtering(key, value)
        self.chopped = max(chopped, 0)
        self.last_timestamp = self._first = self._synced = max(last, self.chopped)
        self.heard = max(delivered, self.last_timestamp)
        if suspect or max(checkpoint, self.doubt) > self.last_timestamp:
            self.hole(self.heard)
        for subscriber, index in self._last_index.items():
            self._last_index[subscriber] = min(index, self.last_timestamp)  # of records that failed
        self.tail = max(checkpoint, self.chopped)
        self._consumed = consumed
        self._read_tail(turn, self.tail)

    def remaining(self, subscriber: int) -> int:
        """Events of the tail above what the subscriber had consumed before the restart. Totals do not say
        that if records were chopped that no checkpoint had counted."""
        return self._above.get(subscriber, 0)

    def _read_tail(self, turn: Turn, start: int) -> None:
        self.recovered = start >= self.last_timestamp
        if not self.recovered:
            turn.read(self.stream, start, self.last_timestamp, READ_BYTES, then=self._tail_was_read)

    def _tail_was_read(self, turn: Turn, done: ReadDone) -> None:
        """The next piece of the tail after the last checkpoint."""
        if done.missing:
            self.doubt = max(self.doubt, done.missing[-1][1])
        for first, last, data in done.records:
            try:
                for members, ticks, _ in self._parse(first, data):
                    for subscriber in members:
                        self._last_index[subscriber] = last
                        self._totals[subscriber] = self._totals.get(subscriber, 0) + len(ticks)
                        self._dirty[subscriber] = None
                        consumed = self._consumed.get(subscriber, last)
                        if consumed < last:
                            above = int((ticks > consumed).sum())
                            self._above[subscriber] = self._above.get(subscriber, 0) + above
            except StorageError:
                self.doubt = max(self.doubt, last)
            self._unsaved_bytes += len(data)
            self._weigh(last, len(data))
        more = done.more and bool(done.records)
        self._read_tail(turn, done.records[-1][1] if more else self.last_timestamp)
        if self.recovered:
            self._opened(turn)

    # ---- inspection

    def status(self) -> dict[str, int | str]:
        return {
            "pubend": pubend_text(self.pubend),
            "last_timestamp": self.last_timestamp,
            "chopped": self.chopped,
            "subscribers": len(self._last_index),
            **self._counters,
        }

    def check(self) -> None:
        if not self.chopped <= self.heard or not self._first <= self.heard:
            raise BugError("filtering: chopped or written beyond what was heard")
        if any(index > self.heard for index in self._last_index.values()):
            raise BugError("filtering: a lastIndex beyond what was heard")
        counted = set(self._totals).union(*self._uncounted)
        if not set(self._last_index) <= counted:
            raise BugError("filtering: a subscriber with an index has no total")
        if self._pending_bytes != sum(self._pending.values()):
            raise BugError("filtering: records on their way are miscounted")
        ends = list(self._pending)
        if ends != sorted(set(ends)) or (ends and ends[-1] > self.heard):
            raise BugError("filtering: records on their way are out of order")


def read_filtering(key: bytes, value: bytes) -> tuple[int, int]:
    """What is saved of the pubend or, where the key names one, of a subscriber."""
    return (_META if len(key) == 8 else _ROW).unpack(value)


def _set_bytes(values: Sequence[int]) -> bytes:
    out = bytearray()
    put_set(out, values)
    return bytes(out)


def _after(
    ticks: npt.NDArray[np.int64], groups: Sequence[Group], tick: int
) -> tuple[npt.NDArray[np.int64] | None, list[Group]]:
    """The part of a batch behind `tick`, rows counted anew."""
    skip = int(np.searchsorted(ticks, tick, side="right"))
    kept = [Group(rows[rows >= skip] - np.uint32(skip), targets) for rows, targets in groups]
    kept = [group for group in kept if len(group.rows)]
    return (ticks[skip:], kept) if kept else (None, [])


def _buffer(
    subscriber: int, start: int, end: int, parts: Sequence[Numbers] = (), unknown: Sequence[Span] = ()
) -> ReadBuffer:
    ticks = np.concatenate(parts) if parts else _EMPTY
    return ReadBuffer(
        subscriber=subscriber,
        start=start,
        end=end,
        ticks=ticks,
        unknown=tuple(union(intersect(unknown, start, end))),
    )
