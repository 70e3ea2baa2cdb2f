"""Durable publishing at a publisher hosting broker: from a PUBLISH frame with the DURABLE flag to its answer.

A frame goes to one of the broker's durable pubends: that which remembers the publisher its ids name, whatever
number of pubends there was then, so that a retry is recognised; else that which the publisher's number tells.
It is answered when its record is synced, and its bytes are given back as credit only then: a slow disk slows
its publishers down, it does not fill memory.

A pubend opens, which means that others hear of it, once it is recovered and its first reservation is saved:
whatever is said about its ticks from then on holds across a crash. Frames that come earlier wait.

When an append fails, its publishers get the error; nothing was told of those ticks. If not even a reservation
can be saved at the start, frames are refused until one can. Nothing that came after a refused frame on its
connection is logged before the client has heard of that (`refusals`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from postroad.clients.publishing import Receipts, Waiting, runs_within
from postroad.durable.publisher.pubend import PUBLISHERS, TABLE, DurablePubend
from postroad.durable.publisher.pubend_rows import read_facts, read_publisher
from postroad.durable.publisher.refusals import Refusals
from postroad.errors import (
    BugError,
    DeniedError,
    PostroadError,
    StorageError,
    UnavailableError,
    UsageError,
)
from postroad.events.batch import EventBatch
from postroad.ids import HISTORY, is_history
from postroad.links.access import ANONYMOUS
from postroad.links.links import Links
from postroad.seam.effects import Effect, Send
from postroad.seam.storage import (
    Appended,
    AppendFailed,
    LogStream,
    ReadDone,
    Reader,
    Saved,
    SaveFailed,
    StorageInput,
    Stored,
    StreamEnd,
    StreamKind,
)
from postroad.streams.knowledge import Segment
from postroad.units import SECOND_US
from postroad.wire.frames import Limits, Rejected, Reply, encode, json_within_frame

TABLES: Final[Mapping[str, Reader]] = {  # what a start must load
    TABLE: read_facts,
    PUBLISHERS: read_publisher,
}
TICK_US: Final = SECOND_US
STALL_US: Final = 5 * SECOND_US  # the longest that a sync takes
MAX_ASKED: Final = 10_000  # requests that wait for a last id
_NEVER_USED: Final = StreamEnd(last=0, chopped=0, suspect=False)


Settled = Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class _Frame:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PubendRoom:
    """What the broker around does with its durable pubends."""

    opened: Callable[[DurablePubend, int], list[Effect]]
    recovered: Callable[[EventBatch], None]  # by the last process, above `again`
    all_recovered: Callable[[], None]  # there are no more of these
    spread: Callable[[DurablePubend, Segment], list[Effect]]
    answered: Callable[[DurablePubend, ReadDone], list[Effect]]


class DurablePublishing:
    """The durable pubends of one broker and the frames on their way to them."""

    def __init__(
        self,
        *,
        me: int,
        pubends: int,
        cache_bytes: int,
        max_bytes: int,
        limits: Limits,
        stored: Stored | None,
        links: Links,
        receipts: Receipts,
        room: PubendRoom,
        again: int | None,
        new_tag: Callable[[], int],
        now_us: int,
    ) -> None:
        """`again`: events of the last process that were synced after this are told to `room.recovered`."""
        self._me = me
        self._cache_bytes = cache_bytes
        self._max_bytes = max_bytes
        self._new_tag = new_tag
        self._limits = limits
        self._links = links
        self._receipts = receipts
        self._room = room
        self._pubends: dict[int, DurablePubend] = {}  # by number, those that frames go to and earlier ones
        self._open: dict[int, None] = {}  # numbers of those that others know of, in order of opening
        self._count = pubends if stored is not None else 0  # new publishers go to the first so many
        self._coming: list[_Frame] = []  # of clients: no pubend is chosen yet
        self._frames: dict[int, list[_Frame]] = {}  # by number: not staged yet
        self._refusals: Refusals[_Frame] = Refusals()  # with those that wait until one was heard
        self._asked: list[tuple[int, int, bytes]] = []  # who waits for a last id: connection, request, prefix
        self._staged: dict[int, list[_Frame]] = {}  # by tag of their record
        self._out: list[Effect] = []
        self._tick_at = now_us + TICK_US
        self._counters = {"durable_events_total": 0, "durable_failures_total": 0}
        if stored is not None:
            self._recover(stored, again, now_us)
        if self._recovered:
            room.all_recovered()

    def _recover(self, stored: Stored, again: int | None, now_us: int) -> None:
        facts, publishers = (stored.tables.get(table, {}) for table in TABLES)
        # Pubends that an earlier configuration had are still asked about.
        earlier = {int.from_bytes(key, "big") for key in facts}
        numbers = {pubend & 0xFFFF_FFFF for pubend in earlier if pubend >> 32 == self._me}
        for number in sorted(numbers.union(range(self._count))):
            pubend = self._make(number, now_us)
            end = stored.streams.get(LogStream(StreamKind.EVENTS, pubend.id), _NEVER_USED)
            self._out += pubend.recover(
                facts,
                publishers,
                last=end.last,
                chopped=end.chopped,
                suspect=end.suspect,
                now_us=now_us,
                again=None if again is None or number == HISTORY else again - STALL_US,
            )
            self._reserve(pubend, now_us)

    def _make(self, number: int, now_us: int) -> DurablePubend:
        pubend = self._pubends[number] = DurablePubend(
            self._me << 32 | number,
            limits=self._limits,
            cache_bytes=self._cache_bytes,
            new_tag=self._new_tag,
            now_us=now_us,
            max_bytes=self._max_bytes,
        )
        return pubend

    def _reserve(self, pubend: DurablePubend, now_us: int) -> None:
        """The first reservation of this start, once all before it is known. The next start begins above it:
        that of history does not reach over times of which something may be owed."""
        if pubend.recovered:
            until_us = min(pubend.last, now_us) if is_history(pubend.id) else now_us
            self._out += pubend.reserve(now_us, until_us=until_us)

    # ---- frames

    def publish(self, connection: int, batch: EventBatch) -> None:
        """A checked frame; `stage` at the end of the turn sends it to the log."""
        size = len(batch.data)
        if not self._count:
            error = StorageError("this broker keeps nothing on disk: it takes no durable events")
            self._reject(_Frame(batch, size, self._receipts.wait(connection, batch.channel)), error)
            return
        peer = self._links.peer(connection)
        if peer is None:
            raise BugError("a publish frame of nobody")
        prefix = int.from_bytes(batch.id(0)[:8], "big")
        given = prefix == peer.publisher << 32 | self._me
        principal = "" if peer.principal == ANONYMOUS else peer.principal
        frame = _Frame(batch, size, self._receipts.wait(connection, batch.channel), principal, given)
        if not self._refusals.hold(connection, frame):
            self._coming.append(frame)

    def refused(self, connection: int) -> None:
        """A durable frame of it was answered with REJECTED before it came here."""
        self._refusals.refused(connection)

    def heard(self, connection: int, ping: int) -> bool:
        """A client has answered a PING; whether frames waited for that."""
        frames = self._refusals.heard(connection, ping)
        self._coming += frames
        return bool(frames)

    def _number(self, prefix: bytes) -> int:
        """Of the pubend for events of this publisher, once all are recovered."""
        number = int.from_bytes(prefix[:4], "big") % self._count
        if self._pubends[number].newest(prefix):
            return number
        others = (one for one, pubend in self._pubends.items() if one != HISTORY and pubend.newest(prefix))
        return next(others, number)

    @property
    def _recovered(self) -> bool:
        return all(pubend.recovered for pubend in self._pubends.values())

    def ask_last_id(self, connection: int, number: int, prefix: str) -> None:
        """The last id on disk of the publisher whose ids begin so, without that; both hexadecimal. Replied to
        when it is known."""
        if re.fullmatch("[0-9a-f]{16}", prefix) is None:
            raise UsageError("ids of a publisher begin with 16 hexadecimal digits")
        if not self._count:
            raise UnavailableError("this broker keeps nothing on disk: it takes no durable events")
        if len(self._asked) >= MAX_ASKED:
            raise UnavailableError("too many ask for last ids that are not known yet")
        self._asked.append((connection, number, bytes.fromhex(prefix)))

    def _reply(self) -> None:
        """To those who asked for a last id that is known now."""
        asked, self._asked = self._asked, []
        for connection, number, prefix in asked:
            last = self._pubends[self._number(prefix)].last_id(prefix)
            if last is None:
                self._asked.append((connection, number, prefix))
                continue
            reply = Reply(number=number, code="", body=json_within_frame({"last": last.hex()}))
            self._out.append(Send(connection, encode(reply)))

    @property
    def available(self) -> bool:
        """Whether durable events are kept here at all."""
        return self._count > 0

    def publish_own(self, batch: EventBatch, settled: Settled, now_us: int) -> None:
        """What the broker says about itself, on a pubend of its own, which the first such frame opens."""
        if HISTORY not in self._pubends:
            self._reserve(self._make(HISTORY, now_us), now_us)
        frame = _Frame(batch, len(batch.data), None, settled=settled)
        self._frames.setdefault(HISTORY, []).append(frame)

    def closed(self, connection: int) -> None:
        """What was not staged is not published: its client heard nothing of it, and sends it again."""
        for frames in (self._coming, *self._frames.values()):
            frames[:] = [frame for frame in frames if frame.connection != connection]
        self._refusals.closed(connection)
        self._asked = [one for one in self._asked if one[0] != connection]

    def stage(self, now_us: int) -> list[Effect]:
        """Frames of this turn, and those that waited for room, become records."""
        if self._coming and self._recovered:
            self._distribute()
        for number in self._open if self._frames else ():
            pubend = self._pubends[number]
            frames = self._frames.pop(number, [])
            taken = 0
            for run in runs_within([frame.batch for frame in frames], self._limits):
                if not pubend.has_room(sum(len(batch.data) for batch in run)):
                    break
                self._stage(pubend, frames[taken : taken + len(run)], now_us)
                taken += len(run)
            if taken < len(frames):
                self._frames[number] = frames[taken:]
        if self._asked and self._recovered:
            self._reply()
        return self._take()

    def _distribute(self) -> None:
        """Frames of clients go to their pubends, unless their ids are another principal's."""
        coming, self._coming = self._coming, []
        behind: dict[int | None, list[_Frame]] = {}  # by connection of a frame that is refused
        for frame in coming:
            if frame.connection in behind:
                behind[frame.connection].append(frame)
                continue
            prefix = frame.batch.id(0)[:8]
            number = self._number(prefix)
            if self._pubends[number].claim(prefix, frame.principal, given=frame.given):
                self._frames.setdefault(number, []).append(frame)
            else:
                behind[frame.connection] = []
                text = "another principal has published under ids that begin so: publish under others"
                self._reject(frame, DeniedError(text))
        self._hold_back(behind)

    def _stage(self, pubend: DurablePubend, frames: Sequence[_Frame], now_us: int) -> None:
        staged = pubend.stage([frame.batch for frame in frames], now_us)
        self._out += staged.effects
        for frame, tag in zip(frames, staged.tags, strict=True):
            if tag is None:
                self._settle(frame, accepted=True)
            else:
                self._staged.setdefault(tag, []).append(frame)

    def _settle(self, frame: _Frame, *, accepted: bool) -> None:
        if frame.settled is not None:
            frame.settled(accepted)
        if frame.receipt is None:
            return
        self._receipts.settle(frame.receipt, accepted=accepted)
        self._out += self._links.consumed(frame.receipt.connection, frame.size)

    def _reject(self, frame: _Frame, error: PostroadError) -> None:
        self._counters["durable_failures_total"] += 1
        receipt = frame.receipt
        if receipt is not None and self._links.peer(receipt.connection) is not None:
            message = Rejected(sequence=receipt.sequence, code=error.code, reason=str(error))
            self._out.append(Send(receipt.connection, encode(message)))
            self._refusals.refused(receipt.connection)
        self._settle(frame, accepted=False)

    def _reject_all(self, frames: Iterable[_Frame], error: PostroadError) -> None:
        """Frames that could not be logged; whatever came after them waits."""
        behind: dict[int | None, list[_Frame]] = {}
        for frame in frames:
            self._reject(frame, error)
            if frame.connection is not None:
                behind[frame.connection] = []
        for waiting in (*self._frames.values(), self._coming) if behind else ():
            for frame in waiting:
                if frame.connection in behind:
                    behind[frame.connection].append(frame)
            waiting[:] = [frame for frame in waiting if frame.connection not in behind]
        self._hold_back(behind)

    def _hold_back(self, behind: Mapping[int | None, list[_Frame]]) -> None:
        for connection, frames in behind.items():
            if connection is not None:
                self._refusals.hold_back(connection, frames)

    # ---- what storage says

    def stored(self, item: StorageInput, now_us: int) -> list[Effect]:
        """The outcome of a storage effect; not every one is ours."""
        match item:
            case Appended():
                self._appended(item)
            case AppendFailed():
                for pubend in self._pubends.values():
                    tags = pubend.append_failed(item.tag)
                    self._reject_all([one for tag in tags for one in self._staged.pop(tag, [])], item.error)
            case ReadDone():
                self._read(item, now_us)
            case Saved():
                for number, pubend in self._pubends.items():
                    if pubend.saved(item.tag) and number not in self._open:
                        self._open[number] = None
                        self._out += self._room.opened(pubend, now_us)
            case SaveFailed():
                for number, pubend in self._pubends.items():
                    if pubend.save_failed(item.tag) and number not in self._open:
                        self._reject_all(self._frames.pop(number, []), item.error)
        return self._take()

    def _appended(self, item: Appended) -> None:
        for pubend in self._pubends.values():
            segment = pubend.appended(item.tag)
            if segment is None:
                continue
            self._counters["durable_events_total"] += 0 if segment.batch is None else segment.batch.count
            self._out += self._room.spread(pubend, segment)
            for frame in self._staged.pop(item.tag, []):
                self._settle(frame, accepted=True)

    def _read(self, item: ReadDone, now_us: int) -> None:
        for pubend in self._pubends.values():
            if not pubend.reads(item.tag):
                continue
            if pubend.recovered:
                self._out += self._room.answered(pubend, item)
                return
            effects, again = pubend.tail_done(item)
            self._out += effects
            for batch in again:
                self._room.recovered(batch)
            if self._recovered:
                self._room.all_recovered()
            self._reserve(pubend, now_us)

    # ---- time

    def tick(self, now_us: int) -> list[Effect]:
        if not self._pubends or now_us < self._tick_at:
            return []
        self._tick_at = now_us + TICK_US
        for number, pubend in self._pubends.items():
            if number in self._open:
                self._out += pubend.checkpoint()
            else:
                self._reserve(pubend, now_us)
        return self._take()

    def close(self) -> list[Effect]:
        """The process ends."""
        return [effect for pubend in self._pubends.values() for effect in pubend.close()]

    @property
    def untold_us(self) -> int | None:
        """The log has, or may have, events since then of which neither `room.spread` nor `room.recovered` was
        told; None if there are none."""
        found = [pubend.untold for number, pubend in self._pubends.items() if number != HISTORY]
        return min((tick for tick in found if tick is not None), default=None)

    def next_deadline(self) -> int | None:
        return self._tick_at if self._pubends else None

    def _take(self) -> list[Effect]:
        out, self._out = self._out, []
        return out + self._refusals.take()

    # ---- inspection

    @property
    def pubends(self) -> list[int]:
        """All of this broker, open or not."""
        return [pubend.id for pubend in self._pubends.values()]

    @property
    def open(self) -> Iterator[int]:
        """The pubends that others know of."""
        return (self._pubends[number].id for number in self._open)

    def status(self) -> list[dict[str, int | str]]:
        return [pubend.status() for pubend in self._pubends.values()]

    def metrics(self) -> dict[str, int]:
        return {
            **self._counters,
            "durable_frames_waiting": len(self._coming)
            + len(self._refusals)
            + sum(len(frames) for held in (self._frames, self._staged) for frames in held.values()),
            "durable_kept_bytes": sum(pubend.kept_bytes for pubend in self._pubends.values()),
        }

    def check(self) -> None:
        for pubend in self._pubends.values():
            pubend.check()
        self._refusals.check()
        if not set(self._frames) <= set(self._pubends):
            raise BugError("durable frames wait for a pubend that there is not")
