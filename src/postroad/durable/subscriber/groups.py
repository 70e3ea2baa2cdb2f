"""Shared durable subscriptions: several consumers under one name divide its events.

To the hosting broker the group is one subscriber whose token is kept by the broker. What it is sent comes
here, in tick order per pubend, and every event goes to one consumer (`dividing`). Events of a consumer that
dies go to others, those of one key still in order. An event whose acknowledgement was saved is never given
out again, not even after a crash.

The broker sends a gap to every consumer, since it does not know whose the events were, and to those who join
later, until a consumer has acknowledged it. It leaves out what consumers had acknowledged before: then the
gap comes in parts.

A consumer may reject an event: it is tried again, at once or after a while, and its attempts are counted. So
they are when a consumer is lost, for the oldest event that it had: that is the one it was at. After the last
attempt that the subscription allows, the event is set aside to be a dead letter (`dead_letters`), and is done
when that is on disk. Attempts are saved with what is done, and so is the id that a dead letter is given
before it is published: after a crash that id tells whether it was.

Acknowledgements come in any order. The token is the tick below the oldest event or gap that is open.
What is done above the token that is on disk is saved as spans, each with something acknowledged in it, and
is left out when the token brings it back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from postroad.durable.subscriber.dividing import Division, Event, OpenBatch
from postroad.durable.subscriber.outputs import Deliver, DeliverGap, Message
from postroad.errors import BugError, PostroadError
from postroad.events.batch import EventBatch
from postroad.kernel.layout import EVENT_HEADER_BYTES, FRAME_HEADER_BYTES
from postroad.seam.turn import Turn, Written
from postroad.streams.spans import Span, intersect, subtract, union
from postroad.units import MIB

TABLE: Final = "durable.groups"
MAX_CONSUMERS: Final = 1_024
MAX_HELD: Final = 4_096  # open events and gaps of one group, given out or not; then the group takes no more
MAX_HELD_BYTES: Final = 16 * MIB  # likewise, of the batches that they are in


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """These rows of a batch are for this consumer."""

    consumer: int
    pubend: int
    batch: EventBatch
    rows: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignGap:
    """This consumer is told that something is lost."""

    consumer: int
    pubend: int
    start: int
    end: int


Assigned = list[Assign | AssignGap]


class _Open(NamedTuple):
    """An event or a gap that was offered and not acknowledged."""

    end: int  # its last tick
    before: int  # events offered before it; one that was lost is one
    upto: int  # and with it


@dataclass(slots=True)
class _Progress:
    """One pubend."""

    position: int  # everything up to here was offered
    open: dict[int, _Open] = field(default_factory=dict)  # by their first ticks, in order
    pending: int = 0  # events in those
    done: list[Span] = field(default_factory=list)  # acknowledged earlier, and to be offered again
    left: int = 0  # events in those
    offered: int = 0  # events, those that were done before among them
    newest: int = 0  # the last tick of what is done
    attempts: dict[int, int] = field(default_factory=dict)  # of events that are not done: those that failed
    dead: dict[int, bytes] = field(default_factory=dict)  # of those: the ids of their dead letters

    @property
    def token(self) -> int:
        return next(iter(self.open)) - 1 if self.open else self.position

    @property
    def finished(self) -> int:
        """Events above the token that are acknowledged."""
        before = next(iter(self.open.values())).before if self.open else self.offered
        return self.left + self.offered - before - self.pending

    def offer(self, tick: int) -> bool:
        """An event. False if it is done."""
        at = bisect_left(self.done, tick, key=itemgetter(1))
        if at < len(self.done) and self.done[at][0] < tick:
            self._skip(tick, 1)
            return False
        self._open(tick - 1, tick, 1)
        return True

    def offer_gap(self, start: int, end: int, events: int) -> list[Span]:
        """A gap, in which so many events were lost: the parts of it that are not done, each open by itself.
        They are no more than the spans that were saved, and one."""
        done = intersect(self.done, start, end)
        parts = subtract([(start, end)], done)
        # Which of the events were done is not known: some in each span, and all if no span is beyond.
        left = len(done) if self.done and self.done[-1][1] > end else self.left
        skipped = max(len(done), min(left, events - len(parts))) if done else 0
        lost = max(len(parts), events - skipped)
        for start, end, is_open in sorted(
            [(*span, False) for span in done] + [(*span, True) for span in parts]
        ):
            if is_open:
                self._open(start, end, lost if (start, end) == parts[-1] else 1)
                lost -= 1
            else:
                self._skip(end, skipped if (start, end) == done[-1] else 1)
                skipped -= 1
        return parts

    def _open(self, start: int, end: int, events: int) -> None:
        self.open[start + 1] = _Open(end, self.offered, self.offered + events)
        self.offered += events
        self.pending += events

    def _skip(self, tick: int, events: int) -> None:
        """So many events up to this tick are done."""
        self.offered += events
        self.left = max(0, self.left - events)
        self.newest = tick

    def close(self, first: int) -> None:
        """That which begins with this tick is acknowledged."""
        event = self.open.pop(first)
        self.attempts.pop(first, None)
        self.dead.pop(first, None)
        self.pending -= event.upto - event.before
        self.newest = max(self.newest, event.end)

    def done_above(self, tick: int) -> list[Span]:
        """What need not be offered again: of (tick, position] what is between open ticks, where something was
        acknowledged, and what was done before."""
        spans = [span for span in self.done if span[1] > self.position]
        upto = -1  # events offered with the last open one
        for first, event in self.open.items():
            if event.before > upto:
                spans.append((tick, first - 1))
            tick, upto = max(tick, event.end), event.upto
            if first > self.newest:
                break
        else:
            spans.append((tick, self.position))
        return union(spans)


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """What is saved of a pubend."""

    done: list[Span]
    events: int  # that consumers are done with, of all that were ever matched; 0: not known
    attempts: dict[int, int] = {}
    dead: dict[int, bytes] = {}


class SharedSubscription:
    """The consumers of one group at its hosting broker.

    `available(c)`: bytes that a consumer has room for. `saved(p)`: the group's token on disk. `matched(p)`:
    how many events were matched up to its token, None where that is not known.
    """

    def __init__(
        self,
        subscriber: int,
        *,
        key: str,
        available: Callable[[int], int],
        saved: Callable[[int], int],
        matched: Callable[[int], int | None],
    ) -> None:
        self.subscriber = subscriber
        self._key = key  # attribute that orders; "" for none
        self._available = available
        self._saved = saved
        self._matched = matched
        self._division = Division()
        self._progress: dict[int, _Progress] = {}
        # Open gaps by pubend and first tick, in order, with their numbers and last ticks.
        self._gaps: dict[tuple[int, int], tuple[int, int]] = {}
        self._last_gap: dict[int, int] = {}  # consumer -> number of the last gap it was told of
        self._dirty: dict[int, None] = {}  # pubends whose row is to be saved
        self._saving: tuple[int, ...] | None = None  # pubends whose rows are on their way
        self._numbers = 0
        self.max_attempts = 0  # after which an event is a dead letter; 0: never
        self.redelivered = 0
        self.rejected = 0
        self.buried = 0  # dead letters

    # ---- consumers

    def join(self, consumer: int) -> Assigned:
        if consumer in self._division or self.full:
            raise BugError("group: a consumer joins twice, or there are too many")
        self._division.join(consumer)
        self._last_gap[consumer] = 0
        return self.assign()

    def leave(self, consumer: int, *, lost: bool = False) -> Assigned:
        """A consumer is gone: what it did not acknowledge goes to others. One that is lost has tried the
        oldest of that, and failed."""
        if consumer not in self._division:
            return []
        oldest = self._division.oldest(consumer) if lost else None
        if oldest is not None:
            self.reject(consumer, oldest.pubend, (oldest.tick,), until_us=0, now_us=0)
        self.redelivered += self._division.leave(consumer)
        del self._last_gap[consumer]
        return self.assign()

    @property
    def consumers(self) -> list[int]:
        return self._division.consumers

    @property
    def full(self) -> bool:
        """Nobody may join."""
        return len(self.consumers) >= MAX_CONSUMERS

    def has_room(self, coming: int = 0) -> bool:
        """The group can be offered more, beside so many bytes that are on their way: `room` of its subscriber
        for Hosting."""
        few = self.open_count < MAX_HELD and self._division.batch_bytes + coming < MAX_HELD_BYTES
        return few and bool(self.consumers)

    @property
    def open_count(self) -> int:
        """Open events and gaps."""
        return self._division.waiting + self._division.in_flight + len(self._gaps)

    def held_up_by(self) -> int | None:
        """A consumer that others wait for: they have nothing, and the group takes no more."""
        return None if self.has_room() else self._division.hindrance()

    def reset(self) -> None:
        """The group's stream begins again at its token: forget what was offered above it."""
        self._division.clear()
        self._gaps.clear()
        for progress in self._progress.values():
            token = progress.token
            progress.left = progress.finished
            progress.done = progress.done_above(token)
            progress.position = token
            progress.open.clear()
            progress.pending = 0

    # ---- events

    def offer(self, message: Message) -> Assigned:
        """What the group was sent, in order per pubend."""
        progress = self._progress.get(message.pubend)
        if progress is None:
            progress = self._progress[message.pubend] = _Progress(message.start)
        ticks = message.ticks() if isinstance(message, Deliver) else (message.start + 1,)
        if ticks is not None and ticks[0] <= progress.position:
            raise BugError("group: an event or a gap was offered twice")
        progress.position = max(progress.position, message.end)
        if progress.done and progress.done[-1][1] <= message.start:
            progress.done, progress.left = [], 0
        if isinstance(message, DeliverGap):
            for tick in [tick for tick in progress.attempts if message.start < tick <= message.end]:
                progress.attempts.pop(tick)
                progress.dead.pop(tick, None)
            for start, end in progress.offer_gap(message.start, message.end, max(1, message.events)):
                self._numbers += 1
                self._gaps[message.pubend, start + 1] = (self._numbers, end)
            return self.assign()
        batch = message.batch
        if batch is None:
            return []
        rows = range(batch.count) if message.rows is None else message.rows.tolist()
        source = OpenBatch(batch)
        ticks, offsets = batch.headers["tick"].tolist(), batch.offsets.tolist()
        for row in rows:
            tick = ticks[row]
            if not progress.offer(tick):
                continue
            self._numbers += 1
            key = batch.attributes(row).get(self._key) if self._key else None
            size = EVENT_HEADER_BYTES + offsets[row + 1] - offsets[row]
            attempt = progress.attempts.get(tick, 0) + 1
            event = Event(self._numbers, message.pubend, tick, source, row, key, size, attempt)
            self._division.add(event, aside=self._fails(event))
        self._division.trim()
        return self.assign()

    def assign(self) -> Assigned:
        """Give out what can be, oldest first; also to be called when a consumer has room again."""
        if not self._division.waiting and not self._gaps:
            return []
        room = {consumer: self._available(consumer) for consumer in self._last_gap}
        assigned: Assigned = [gap for consumer in self._last_gap for gap in self._tell_gaps(consumer, room)]
        assigned += (
            Assign(
                consumer=consumer,
                pubend=events[0].pubend,
                batch=events[0].source.batch,
                rows=np.array(sorted(event.row for event in events), np.uint32),
            )
            for consumer, events in self._division.assign(room)
        )
        return assigned

    def _tell_gaps(self, consumer: int, room: dict[int, int]) -> Iterable[AssignGap]:
        """Those that it was not told of, as far as it has room."""
        newest, _ = next(reversed(self._gaps.values()), (0, 0))
        if self._last_gap[consumer] >= newest:
            return
        for (pubend, first), (number, end) in self._gaps.items():
            if room[consumer] <= 0:
                return
            if number > self._last_gap[consumer]:
                self._last_gap[consumer] = number
                room[consumer] -= FRAME_HEADER_BYTES
                yield AssignGap(consumer=consumer, pubend=pubend, start=first - 1, end=end)

    def ack(self, consumer: int, pubend: int, ticks: Iterable[int]) -> None:
        """A consumer is done with these events, and gaps by their first ticks. What it does not hold (any
        more) is ignored."""
        progress = self._progress.get(pubend)
        if progress is None:
            return
        for tick in ticks:
            if self._division.done(consumer, pubend, tick) or self._done_gap(consumer, pubend, tick):
                progress.close(tick)
                self._dirty[pubend] = None
        self._division.trim()

    def reject(self, consumer: int, pubend: int, ticks: Iterable[int], *, until_us: int, now_us: int) -> None:
        """An attempt of this consumer at these events has failed: they are tried again then, or set aside to
        be dead letters. What it does not hold (any more) is ignored."""
        progress = self._progress.get(pubend)
        for tick in () if progress is None else ticks:
            event = self._division.take_back(consumer, pubend, tick)
            if event is None or progress is None:
                continue
            self.rejected += 1
            progress.attempts[tick] = event.attempt
            self._dirty[pubend] = None
            event.attempt += 1
            if self._fails(event):
                self._division.set_aside(event)
            else:
                self._division.rest(event, until_us)
        self._division.wake(now_us)

    def _fails(self, event: Event) -> bool:
        """It is a dead letter, or is to be one."""
        is_dead = event.tick in self._progress[event.pubend].dead
        return is_dead or 0 < self.max_attempts < event.attempt

    def attempts(self, pubend: int, ticks: npt.NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
        """Which of these events are not tried for the first time: tick and attempt."""
        failed = self._progress[pubend].attempts
        return tuple((tick, failed[tick] + 1) for tick in ticks.tolist() if tick in failed) if failed else ()

    def wake(self, now_us: int) -> Assigned:
        """What has rested is given out."""
        return self.assign() if self._division.wake(now_us) else []

    @property
    def uneasy(self) -> bool:
        """Something rests, or is set aside."""
        return bool(self._division.aside) or self._division.next_wake() is not None

    def next_wake(self) -> int | None:
        return self._division.next_wake()

    # ---- dead letters

    @property
    def aside(self) -> list[Event]:
        """Events that are to be dead letters."""
        return list(self._division.aside.values())

    def give_id(self, event: Event, identity: bytes) -> None:
        """Its dead letter is published under this id, once that is saved."""
        self._progress[event.pubend].dead[event.tick] = identity
        self._dirty[event.pubend] = None

    def resolve(self, newest: bytes) -> bool:
        """Dead letters with ids up to this one were published, so their events are done; the others were not,
        and are to be given new ids. Whether there were any."""
        given = [
            (pubend, tick, identity)
            for pubend, progress in self._progress.items()
            for tick, identity in progress.dead.items()
        ]
        for pubend, tick, identity in given:
            if identity <= newest:
                self.bury(pubend, tick)
            else:
                del self._progress[pubend].dead[tick]
                self._dirty[pubend] = None
        return bool(given)

    def bury(self, pubend: int, tick: int) -> None:
        """Its dead letter is on disk: the event is done, also if it was forgotten meanwhile."""
        progress = self._progress[pubend]
        self.buried += 1
        self._dirty[pubend] = None
        if self._division.done_aside(pubend, tick):
            progress.close(tick)
            self._division.trim()
        elif tick > progress.position:
            progress.done = union([*progress.done, (tick - 1, tick)])
            progress.left += 1
            progress.attempts.pop(tick, None)
            progress.dead.pop(tick, None)

    def _done_gap(self, consumer: int, pubend: int, first: int) -> bool:
        number, _ = self._gaps.get((pubend, first), (0, 0))
        was_told = 0 < number <= self._last_gap.get(consumer, 0)
        if was_told:
            del self._gaps[pubend, first]
        return was_told

    def finished(self, pubend: int) -> int:
        """Events above its token that consumers are done with."""
        progress = self._progress.get(pubend)
        return 0 if progress is None else progress.finished

    def rests(self, pubend: int) -> bool:
        """Nothing of this pubend is open."""
        return not self._progress[pubend].open

    def token(self) -> dict[int, int]:
        """Up to here everything was acknowledged: for `Hosting.ack`."""
        return {pubend: progress.token for pubend, progress in self._progress.items()}

    # ---- durability

    @property
    def dirty(self) -> bool:
        """Something that was acknowledged is not on disk."""
        return bool(self._dirty) or self._saving is not None

    def flush(self, turn: Turn, then: Written) -> bool:
        """Save what is done above the token, one save at a time: meanwhile the next one gathers. True: a save
        is on its way, and `then` hears what became of it."""
        if not self._dirty or self._saving is not None:
            return False
        pubends = self._saving = tuple(self._dirty)
        self._dirty.clear()
        rows = [(self._row_key(pubend), self._row(pubend)) for pubend in pubends]
        turn.save(TABLE, rows, then=partial(self._saved_rows, pubends, then))
        return True

    def close(self, turn: Turn, then: Written) -> None:
        """The process ends: save what no save on its way has."""
        self._saving = None
        self.flush(turn, then)

    def _row(self, pubend: int) -> bytes | None:
        progress, matched = self._progress[pubend], self._matched(pubend)
        done = progress.done_above(self._saved(pubend))
        events = 0 if matched is None else matched + progress.finished
        if not (done or progress.attempts):
            return None
        return msgspec.msgpack.encode(_Row(done, events, progress.attempts, progress.dead))

    def _saved_rows(
        self, pubends: tuple[int, ...], then: Written, turn: Turn, error: PostroadError | None
    ) -> None:
        if self._saving is not pubends:
            return  # the process ends, and does not wait for it
        self._saving = None
        if error is not None:
            self._dirty.update(dict.fromkeys(pubends))
        then(turn, error)

    def delete(self, turn: Turn) -> None:
        """The group is gone for good: nothing of it is kept. Rows that stay behind name a subscriber number
        that is never used again."""
        if self._progress:
            turn.save(TABLE, [(self._row_key(pubend), None) for pubend in self._progress], then=None)

    def _row_key(self, pubend: int) -> bytes:
        return self.subscriber.to_bytes(4, "big") + pubend.to_bytes(8, "big")

    def recover(self, rows: Mapping[bytes, bytes], token: Mapping[int, int]) -> None:
        """After a restart: the table, and the token that the broker keeps."""
        for pubend, tick in token.items():
            self._progress[pubend] = _Progress(tick)
        for key, value in sorted(rows.items()):
            pubend = int.from_bytes(key[4:], "big")
            if key[:4] == self.subscriber.to_bytes(4, "big") and pubend in self._progress:
                row, progress = read_done(key, value), self._progress[pubend]
                progress.done = [span for span in row.done if span[1] > token[pubend]]
                progress.attempts = {tick: n for tick, n in row.attempts.items() if tick > token[pubend]}
                progress.dead = {
                    tick: identity for tick, identity in row.dead.items() if tick > token[pubend]
                }
                progress.left = max(0, row.events - (self._matched(pubend) or 0)) if progress.done else 0

    # ---- inspection

    def status(self) -> dict[str, int]:
        return {
            "consumers": len(self.consumers),
            "waiting": self._division.waiting,
            "in_flight": self._division.in_flight,
            "keys": self._division.keys,
            "redelivered": self.redelivered,
            "rejected": self.rejected,
            "dead_letters": self.buried,
        }

    def check(self) -> None:
        self._division.check()
        for progress in self._progress.values():
            if not progress.dead.keys() <= progress.attempts.keys():
                raise BugError("group: a dead letter without an attempt")
        places = [*((event.pubend, event.tick) for event in self._division.events()), *self._gaps]
        if sorted(places) != sorted(
            (pubend, tick) for pubend, progress in self._progress.items() for tick in progress.open
        ):
            raise BugError("group: what is open is not what is held")


def read_done(_key: bytes, value: bytes) -> _Row:
    return msgspec.msgpack.decode(value, type=_Row)
