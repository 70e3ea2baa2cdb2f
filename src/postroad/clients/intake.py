"""The intake: publish frames are checked and become batches, one turn of the driver at a time.

The frames of a turn become one stretch of the plain stream, whatever connections they came from; durable
ones go to their pubend, which answers once they are synced. Ids and rights are checked here, and the clock
of whoever drew the ids (spec T5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from postroad.clients.publishing import Publishers, Receipts, runs_within
from postroad.clocks import SkewCheck
from postroad.durable.publisher.pubend import DurablePubend
from postroad.durable.publisher.publishing import DurablePublishing
from postroad.errors import BugError, DeniedError, PeerError, UsageError
from postroad.events.batch import EventBatch
from postroad.ids import is_history
from postroad.links.links import Links, Peer
from postroad.seam.effects import Effect, Send
from postroad.streams.knowledge import Segment
from postroad.streams.routing import Routing
from postroad.tracking.strategies import Tracking
from postroad.wire.frames import Accepted, Limits, Message, Rejected, Skew, encode

MAX_PUT_OFF: Final = 16  # events of a turn that are recorded later, if each comes alone and at its time


class Intake:
    """What publishers send. Its effects go to `out`, the broker's.

    `clocks` is None where nothing is tracked, since only tracking reads the times in ids; `refuse` closes a
    connection that broke the protocol.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        publishers: Publishers,
        receipts: Receipts,
        links: Links,
        routing: Routing,
        durable: DurablePublishing,
        tracking: Tracking,
        clocks: SkewCheck | None,
        refuse: Callable[[int, PeerError], None],
        out: list[Effect],
    ) -> None:
        self._limits = limits
        self._publishers = publishers
        self._receipts = receipts
        self._links = links
        self._routing = routing
        self._durable = durable
        self._tracking = tracking
        self._clocks = clocks
        self._refuse = refuse
        self._out = out
        self._pending: list[tuple[int, EventBatch]] = []  # publish frames of this turn, with their connection
        self._counters = {"events_in_total": 0, "publish_frames_total": 0, "rejected_publishes_total": 0}

    def add(self, connection: int, batch: EventBatch) -> None:
        """A publish frame."""
        self._counters["publish_frames_total"] += 1
        self._pending.append((connection, batch))

    def flush(self, now_us: int) -> None:
        """The publish frames that came become one stretch of the stream."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        batches: list[EventBatch] = []
        ids: list[bytes] = []  # in them
        clocks = self._clocks
        put_off = len(pending) <= MAX_PUT_OFF
        if clocks is not None and now_us >= clocks.until_us:
            clocks.bound(now_us)
        for connection, batch in pending:
            peer = self._links.peer(connection)
            if peer is None:
                continue  # it went away, or was sent away, within this turn
            try:
                whose = self._check_publish(peer, batch)
            except PeerError as error:
                self._refuse(connection, error)
                continue
            except UsageError as error:
                self._counters["rejected_publishes_total"] += 1
                self._send(connection, Rejected(sequence=batch.channel, code=error.code, reason=str(error)))
                if batch.durable:
                    self._durable.refused(connection)
            else:
                # What is durable is remembered by its pubend, across restarts.
                durable = batch.durable
                newest = batch.last_id
                fresh = batch if durable else self._publishers.fresh(whose, batch, newest)
                if fresh is not None and clocks is not None:  # spec T5
                    in_time = clocks.early <= newest[8:14] < clocks.late
                    if not in_time:
                        self._correct(peer, clocks.correction_us(peer.publisher, newest, now_us))
                    put_off &= in_time and batch.count == 1
                if durable:
                    self._durable.publish(connection, batch)
                    continue
                if fresh is not None:
                    batches.append(fresh)
                    ids.append(newest if batch.count == 1 else fresh.ids())
                self._receipts.accept(connection, batch.channel)
            self._out += self._links.consumed(connection, len(batch.data))
        if batches:
            self._counters["events_in_total"] += sum(batch.count for batch in batches)
            if clocks is not None:
                self._tracking.noted.append((now_us, b"".join(ids), 0, ()))
            for group in runs_within(batches, self._limits):
                self._out += self._routing.publish(group, now_us)
            if not put_off:
                self._tracking.record()

    def spread(self, pubend: DurablePubend, segment: Segment, now_us: int) -> list[Effect]:
        """Durable events that are synced."""
        if segment.batch is not None:
            self._counters["events_in_total"] += segment.batch.count
            if not is_history(pubend.id):
                self._tracking.published(segment.batch.ids(), now_us)
        return self._routing.spread(pubend, segment, now_us)

    def settle(self, now_us: int) -> None:
        """The end of a turn: all that came is on its way, and what is accepted is answered."""
        self.flush(now_us)
        self._out += self._durable.stage(now_us)
        for connection, sequence in self._receipts.take().items():
            self._send(connection, Accepted(sequence=sequence))

    def closed(self, peer: Peer) -> None:
        self._receipts.closed(peer.connection)
        self._durable.closed(peer.connection)
        if self._clocks is not None:
            self._clocks.forget(peer.publisher)

    def _correct(self, peer: Peer, correction_us: int | None) -> None:
        if correction_us is not None:
            self._send(peer.connection, Skew(correction_us=correction_us))

    def _check_publish(self, peer: Peer, batch: EventBatch) -> bytes:
        """Whose ids its events have."""
        whose = self._publishers.check(peer, batch)
        for topic in batch.topics():
            if not self._links.may_publish(peer.connection, topic):
                raise DeniedError(f"{peer.principal or 'anonymous'} may not publish to {topic}")
        return whose

    def _send(self, connection: int, message: Message) -> None:
        self._out.append(Send(connection, encode(message)))

    def metrics(self) -> dict[str, int | float]:
        return {
            **self._counters,
            "duplicate_events_total": self._publishers.repeated,
            "clock_corrections_total": 0 if self._clocks is None else self._clocks.corrections,
            "publishers_remembered": len(self._publishers),
        }

    def check(self) -> None:
        self._receipts.check()
        if self._pending:
            raise BugError("publish frames are left over from a turn")
