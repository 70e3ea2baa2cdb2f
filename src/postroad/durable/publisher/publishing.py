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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from postroad.clients.publishing import Receipts, runs_within
from postroad.clients.quotas import Quotas
from postroad.durable.publisher.pubend import (
    PUBLISHERS,
    TABLE,
    DurablePubend,
    Frame,
    PubendPort,
    Settled,
)
from postroad.durable.publisher.pubend_rows import read_facts, read_publisher
from postroad.durable.publisher.refusals import Refusals
from postroad.durable.settings import DurableConfig
from postroad.errors import (
    BugError,
    DeniedError,
    PostroadError,
    StorageError,
    TooLargeError,
    UnavailableError,
    UsageError,
    shorten,
)
from postroad.events.batch import EventBatch
from postroad.ids import HISTORY, is_history
from postroad.links.access import owning
from postroad.links.links import Links
from postroad.seam.peers import Peer
from postroad.seam.replies import reply
from postroad.seam.storage import LogStream, StreamEnd, StreamKind
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.streams.knowledge import Segment
from postroad.streams.routing import Routing
from postroad.tracking.strategies import Tracking
from postroad.units import SECOND_US
from postroad.wire.frames import Limits, Rejected, Request, encode

TICK_US: Final = SECOND_US
STALL_US: Final = 5 * SECOND_US  # the longest that a sync takes
MAX_ASKED: Final = 10_000  # requests that wait for a last id
_NEVER_USED: Final = StreamEnd(last=0, chopped=0, suspect=False)


class DurablePublishing:
    """The durable pubends of one broker and the frames on their way to them.

    `streams`: what a start found of the log; None: there is no disk. `opened` is told of a pubend when others
    are to hear of it.
    """

    def __init__(
        self,
        board: Switchboard,
        *,
        me: int,
        config: DurableConfig,
        limits: Limits,
        streams: Mapping[LogStream, StreamEnd] | None,
        links: Links,
        receipts: Receipts,
        routing: Routing,
        tracking: Tracking | None,
        quotas: Quotas,
        opened: Callable[[DurablePubend, int], None],
        now_us: int,
    ) -> None:
        self._me = me
        self._config = config
        self._limits = limits
        self._links = links
        self._receipts = receipts
        self._routing = routing
        self._tracking = tracking
        self._quotas = quotas
        self._opened = opened
        self._port = PubendPort(
            logged=self._logged,
            failed=self._reject_all,
            reserved=self._reserved,
            read=routing.log_read,
            recovered=self._recovered_more,
        )
        self._pubends: dict[int, DurablePubend] = {}  # by number, those that frames go to and earlier ones
        self._open: dict[int, None] = {}  # numbers of those that others know of, in order of opening
        self._count = config.pubends if streams is not None else 0  # new publishers go to the first so many
        self._coming: list[Frame] = []  # of clients: no pubend is chosen yet
        self._frames: dict[int, list[Frame]] = {}  # by number: not staged yet
        self._refusals: Refusals[Frame] = Refusals()  # with those that wait until one was heard
        self._asked: list[tuple[int, int, bytes]] = []  # who waits for a last id: connection, request, prefix
        self._tick_at = now_us + TICK_US
        self._counters = {"durable_events_total": 0, "durable_failures_total": 0}
        facts, publishers = board.table(TABLE, read_facts), board.table(PUBLISHERS, read_publisher)
        if streams is not None:
            self._recover(facts, publishers, streams, now_us)
        board.start(self._start)
        board.peers("client", down=self._closed)
        board.request("publisher.last", self._ask_last_id)
        board.metrics(self.metrics)
        board.status("durable_pubends", lambda _now_us: self.status())

    # ---- the start

    def _recover(
        self,
        facts: Mapping[bytes, bytes],
        publishers: Mapping[bytes, bytes],
        streams: Mapping[LogStream, StreamEnd],
        now_us: int,
    ) -> None:
        """What is synced, but may not be recorded by tracking, is read again."""
        unrecorded_us = None if self._tracking is None else self._tracking.unrecorded_us
        # Pubends that an earlier configuration had are still asked about.
        earlier = {int.from_bytes(key, "big") for key in facts}
        numbers = {pubend & 0xFFFF_FFFF for pubend in earlier if pubend >> 32 == self._me}
        for number in sorted(numbers.union(range(self._count))):
            pubend = self._make(number, now_us)
            end = streams.get(LogStream(StreamKind.EVENTS, pubend.id), _NEVER_USED)
            pubend.recover(
                facts,
                publishers,
                last=end.last,
                chopped=end.chopped,
                suspect=end.suspect,
                now_us=now_us,
                replay_above=None if unrecorded_us is None or number == HISTORY else unrecorded_us - STALL_US,
            )

    def _make(self, number: int, now_us: int) -> DurablePubend:
        pubend = self._pubends[number] = DurablePubend(
            self._me << 32 | number,
            limits=self._limits,
            cache_bytes=self._config.cache_bytes,
            port=self._port,
            now_us=now_us,
            max_bytes=min(self._config.max_bytes or self._config.pubend_bytes, self._config.pubend_bytes),
        )
        return pubend

    def _start(self, turn: Turn) -> None:
        for pubend in self._pubends.values():
            pubend.read_tail(turn)
            self._reserve(turn, pubend)
        self._note_recovered(turn)

    def _recovered_more(self, turn: Turn, pubend: DurablePubend, batches: list[EventBatch]) -> None:
        """Recovery has read another piece of this pubend's log."""
        if self._tracking is not None:
            for batch in batches:
                self._tracking.published(batch.ids(), turn.now_us)
        self._note_recovered(turn)
        self._reserve(turn, pubend)

    def _note_recovered(self, turn: Turn) -> None:
        if self._recovered and self._tracking is not None:
            self._tracking.recorded_again(turn.now_us)

    @property
    def _recovered(self) -> bool:
        return all(pubend.recovered for pubend in self._pubends.values())

    def _reserve(self, turn: Turn, pubend: DurablePubend) -> None:
        """The first reservation of this start, once all before it is known. The next start begins above it:
        that of history does not reach over times of which something may be owed."""
        if pubend.recovered:
            until_us = min(pubend.last, turn.now_us) if is_history(pubend.id) else turn.now_us
            pubend.reserve(turn, until_us=until_us)

    def _reserved(self, turn: Turn, pubend: DurablePubend, error: PostroadError | None) -> None:
        """The outcome of a reservation."""
        number = pubend.id & 0xFFFF_FFFF
        if number in self._open:
            return
        if error is not None:
            self._reject_all(turn, self._frames.pop(number, []), error)
            return
        self._open[number] = None
        self._opened(pubend, turn.now_us)
        self._routing.open_durable(turn, pubend)

    # ---- frames

    def publish(self, turn: Turn, connection: int, batch: EventBatch) -> None:
        """A checked frame; `stage` at the end of the turn sends it to the log."""
        size = len(batch.data)
        if not self._count:
            error = StorageError("this broker keeps nothing on disk: it takes no durable events")
            self._reject(turn, Frame(batch, size, self._receipts.wait(connection, batch.channel)), error)
            return
        peer = self._links.peer(connection)
        if peer is None:
            raise BugError("a publish frame of nobody")
        prefix = int.from_bytes(batch.id(0)[:8], "big")
        given = prefix == peer.publisher << 32 | self._me
        principal = owning(peer.principal)
        frame = Frame(batch, size, self._receipts.wait(connection, batch.channel), principal, given)
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

    def publish_own(self, turn: Turn, batch: EventBatch, settled: Settled) -> None:
        """What the broker says about itself, on a pubend of its own, which the first such frame opens."""
        if HISTORY not in self._pubends:
            self._reserve(turn, self._make(HISTORY, turn.now_us))
        frame = Frame(batch, len(batch.data), None, settled=settled)
        self._frames.setdefault(HISTORY, []).append(frame)

    def publish_for(self, turn: Turn, batch: EventBatch, settled: Settled) -> None:
        """Events of the broker itself that are for everybody, once `newest` is known."""
        frame = Frame(batch, len(batch.data), None, settled=settled)
        self._frames.setdefault(self._number(batch.id(0)[:8]), []).append(frame)
        self.stage(turn)

    def newest(self, prefix: bytes) -> bytes | None:
        """Time and counter of the last id that begins so, b"" if none is remembered; None while the log is
        not read yet, or there is none."""
        if not self._count or not self._recovered:
            return None
        return self._pubends[self._number(prefix)].newest(prefix)

    @property
    def available(self) -> bool:
        """Whether durable events are kept here at all."""
        return self._count > 0

    def _number(self, prefix: bytes) -> int:
        """Of the pubend for events of this publisher, once all are recovered."""
        number = int.from_bytes(prefix[:4], "big") % self._count
        if self._pubends[number].newest(prefix):
            return number
        others = (
            other for other, pubend in self._pubends.items() if other != HISTORY and pubend.newest(prefix)
        )
        return next(others, number)

    def _closed(self, _turn: Turn, peer: Peer) -> None:
        """What was not staged is not published: its client heard nothing of it, and sends it again."""
        connection = peer.connection
        for frames in (self._coming, *self._frames.values()):
            frames[:] = [frame for frame in frames if frame.connection != connection]
        self._refusals.closed(connection)
        self._asked = [asked for asked in self._asked if asked[0] != connection]

    def stage(self, turn: Turn) -> None:
        """Frames of this turn, and those that waited for room, become records."""
        if self._coming and self._recovered:
            self._distribute(turn)
        for number in self._open if self._frames else ():
            pubend = self._pubends[number]
            frames = self._frames.pop(number, [])
            taken = 0
            for run in runs_within([frame.batch for frame in frames], self._limits):
                if not pubend.has_room(sum(len(batch.data) for batch in run)):
                    break
                self._stage(turn, pubend, frames[taken : taken + len(run)])
                taken += len(run)
            if taken < len(frames):
                self._frames[number] = frames[taken:]
        if self._asked and self._recovered:
            self._tell_last_ids(turn)
        self._refusals.flush(turn)

    def _distribute(self, turn: Turn) -> None:
        """Frames of clients go to their pubends, unless their ids are another principal's, or that has stored
        too much."""
        coming, self._coming = self._coming, []
        behind: dict[int | None, list[Frame]] = {}  # by connection of a frame that is refused
        for frame in coming:
            if frame.connection in behind:
                behind[frame.connection].append(frame)
                continue
            prefix = frame.batch.id(0)[:8]
            number = self._number(prefix)
            try:
                self._quotas.store(frame.principal, frame.size)
                if not self._pubends[number].claim(prefix, frame.principal, given=frame.given):
                    raise DeniedError(
                        "another principal has published under ids that begin so: publish under others"
                    )
            except (DeniedError, TooLargeError) as error:
                behind[frame.connection] = []
                self._reject(turn, frame, error)
            else:
                self._frames.setdefault(number, []).append(frame)
        self._hold_back(behind)

    def _stage(self, turn: Turn, pubend: DurablePubend, frames: Sequence[Frame]) -> None:
        for frame in pubend.stage(turn, frames):
            self._settle(turn, frame, accepted=True)

    def _logged(self, turn: Turn, pubend: DurablePubend, segment: Segment, frames: list[Frame]) -> None:
        """A record is synced."""
        if segment.batch is not None:
            self._counters["durable_events_total"] += segment.batch.count
            if self._tracking is not None and not is_history(pubend.id):
                self._tracking.published(segment.batch.ids(), turn.now_us)
        self._routing.spread(turn, pubend, segment)
        for frame in frames:
            if frame.receipt is not None:
                self._quotas.stored.add(frame.principal, pubend.id, segment.end, frame.size)
            self._settle(turn, frame, accepted=True)

    def _settle(self, turn: Turn, frame: Frame, *, accepted: bool) -> None:
        if frame.settled is not None:
            frame.settled(turn, accepted)
        if frame.receipt is None:
            return
        self._receipts.settle(frame.receipt, accepted=accepted)
        self._links.consumed(turn, frame.receipt.connection, frame.size)

    def _reject(self, turn: Turn, frame: Frame, error: PostroadError) -> None:
        self._counters["durable_failures_total"] += 1
        receipt = frame.receipt
        if receipt is not None and self._links.peer(receipt.connection) is not None:
            message = Rejected(sequence=receipt.sequence, code=error.code, reason=str(error))
            turn.send(receipt.connection, encode(message))
            self._refusals.refused(receipt.connection)
        self._settle(turn, frame, accepted=False)

    def _reject_all(self, turn: Turn, frames: Iterable[Frame], error: PostroadError) -> None:
        """Frames that could not be logged; whatever came after them waits."""
        behind: dict[int | None, list[Frame]] = {}
        for frame in frames:
            self._reject(turn, frame, error)
            if frame.connection is not None:
                behind[frame.connection] = []
        for waiting in (*self._frames.values(), self._coming) if behind else ():
            for frame in waiting:
                if frame.connection in behind:
                    behind[frame.connection].append(frame)
            waiting[:] = [frame for frame in waiting if frame.connection not in behind]
        self._hold_back(behind)
        self._refusals.flush(turn)

    def _hold_back(self, behind: Mapping[int | None, list[Frame]]) -> None:
        for connection, frames in behind.items():
            if connection is not None:
                self._refusals.hold_back(connection, frames)

    # ---- last ids

    def _ask_last_id(self, _turn: Turn, peer: Peer, request: Request) -> None:
        """A client asks for the last id on disk of the publisher whose ids begin with `prefix`. The broker
        replies with the rest of that id, in hexadecimal like the prefix, when its pubend knows it."""
        prefix = request.arguments.get("prefix", "")
        if re.fullmatch("[0-9a-f]{16}", prefix) is None:
            raise UsageError(
                f"ids of a publisher begin with 16 hexadecimal digits, not {shorten(prefix, 40)!r}"
            )
        if not self._count:
            raise UnavailableError("this broker keeps nothing on disk: it takes no durable events")
        if len(self._asked) >= MAX_ASKED:
            raise UnavailableError(f"{MAX_ASKED} wait for last ids that are not known yet: try again")
        self._asked.append((peer.connection, request.number, bytes.fromhex(prefix)))

    def _tell_last_ids(self, turn: Turn) -> None:
        """Reply to the clients whose last id the pubend knows by now."""
        asked, self._asked = self._asked, []
        for connection, number, prefix in asked:
            last = self._pubends[self._number(prefix)].last_id(prefix)
            if last is None:
                self._asked.append((connection, number, prefix))
            else:
                reply(turn, connection, number, {"last": last.hex()})

    # ---- time

    def tick(self, turn: Turn) -> None:
        if not self._pubends or turn.now_us < self._tick_at:
            return
        self._tick_at = turn.now_us + TICK_US
        self._quotas.stored.released({pubend.id: pubend.floor for pubend in self._pubends.values()})
        self._quotas.stored.save(turn)
        for number, pubend in self._pubends.items():
            if number in self._open:
                pubend.checkpoint(turn)
            else:
                self._reserve(turn, pubend)

    def close(self, turn: Turn) -> None:
        """The process ends."""
        self._quotas.stored.save(turn, now=True)
        for pubend in self._pubends.values():
            pubend.close(turn)

    @property
    def untold_us(self) -> int | None:
        """The log has, or may have, events since then of which tracking was not told; None if there are
        none."""
        ticks = [pubend.untold for number, pubend in self._pubends.items() if number != HISTORY]
        return min((tick for tick in ticks if tick is not None), default=None)

    def next_deadline(self) -> int | None:
        return self._tick_at if self._pubends else None

    # ---- inspection

    @property
    def pubends(self) -> list[int]:
        """All of this broker, open or not."""
        return [pubend.id for pubend in self._pubends.values()]

    @property
    def events(self) -> int:
        """So many were synced."""
        return self._counters["durable_events_total"]

    def status(self) -> list[dict[str, int | str]]:
        return [pubend.status() for pubend in self._pubends.values()]

    def metrics(self) -> dict[str, int]:
        return {
            **self._counters,
            "durable_frames_waiting": len(self._coming)
            + len(self._refusals)
            + sum(len(frames) for frames in self._frames.values())
            + sum(pubend.staged_frames for pubend in self._pubends.values()),
            "durable_kept_bytes": sum(pubend.kept_bytes for pubend in self._pubends.values()),
        }

    def check(self) -> None:
        for pubend in self._pubends.values():
            pubend.check()
        self._refusals.check()
        if not set(self._frames) <= set(self._pubends):
            raise BugError("durable frames wait for a pubend that there is not")
