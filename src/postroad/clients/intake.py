"""The intake: publish frames are checked and become batches, one turn of the driver at a time.

The frames of a turn become one stretch of the plain stream, whatever connections they came from; durable
ones go to their pubend, which answers once they are synced. Ids and rights are checked here, and the clock
of whoever drew the ids (spec T5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from postroad.clients.publishing import Publishers, Receipts, runs_within
from postroad.clocks import SkewCheck
from postroad.errors import BugError, DeniedError, PeerError, UsageError
from postroad.events.batch import EventBatch
from postroad.links.links import Links
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.streams.routing import Routing
from postroad.tracking.strategies import Tracking
from postroad.wire.frames import Accepted, Limits, Rejected, Skew, encode

MAX_PUT_OFF: Final = 16  # events of a turn that are recorded later, if each comes alone and at its time


class DurablePublishes(Protocol):
    """Where durable frames go, which are answered once they are synced."""

    @property
    def events(self) -> int:
        """How many durable events were synced."""

    def publish(self, turn: Turn, connection: int, batch: EventBatch) -> None:
        """A checked frame."""

    def refused(self, connection: int) -> None:
        """A durable frame was answered with REJECTED."""

    def stage(self, turn: Turn) -> None:
        """The end of a turn: what came goes to the log."""


class Intake:
    """What publishers send.

    `clocks` checks the times in ids, which only tracking reads. It and `tracking` are None where nothing is
    tracked. `refuse` closes a connection that broke the protocol.
    """

    def __init__(
        self,
        board: Switchboard,
        *,
        limits: Limits,
        publishers: Publishers,
        receipts: Receipts,
        links: Links,
        routing: Routing,
        durable: DurablePublishes,
        tracking: Tracking | None,
        clocks: SkewCheck | None,
        refuse: Callable[[Turn, int, PeerError], None],
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
        self._pending: list[tuple[int, EventBatch]] = []  # publish frames of this turn, with their connection
        self._plain_events = 0
        self._counters = {"publish_frames_total": 0, "rejected_publishes_total": 0}
        board.peers("client", down=self._closed)
        board.metrics(self.metrics)

    def add(self, connection: int, batch: EventBatch) -> None:
        """A publish frame."""
        self._counters["publish_frames_total"] += 1
        self._pending.append((connection, batch))

    def flush(self, turn: Turn) -> None:
        """The publish frames that came become one stretch of the stream."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        batches: list[EventBatch] = []
        ids: list[bytes] = []  # in them
        clocks, now_us = self._clocks, turn.now_us
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
                self._refuse(turn, connection, error)
                continue
            except UsageError as error:
                self._reject(turn, connection, batch, error)
            else:
                # What is durable is remembered by its pubend, across restarts.
                durable = batch.durable
                newest = batch.last_id
                fresh = batch if durable else self._publishers.fresh(whose, batch, newest)
                if fresh is not None and clocks is not None:  # spec T5
                    in_time = clocks.early <= newest[8:14] < clocks.late
                    if not in_time:
                        self._correct(turn, peer, clocks.correction_us(peer.publisher, newest, now_us))
                    put_off &= in_time and batch.count == 1
                if durable:
                    self._durable.publish(turn, connection, batch)
                    continue
                if fresh is not None:
                    batches.append(fresh)
                    ids.append(newest if batch.count == 1 else fresh.ids())
                self._receipts.accept(connection, batch.channel)
            self._links.consumed(turn, connection, len(batch.data))
        if batches:
            self._publish(turn, batches, ids, put_off=put_off)

    def _publish(self, turn: Turn, batches: list[EventBatch], ids: list[bytes], *, put_off: bool) -> None:
        """`put_off`: tracking may record them later."""
        self._plain_events += sum(batch.count for batch in batches)
        if self._tracking is not None:
            self._tracking.noted.append((turn.now_us, b"".join(ids), 0, ()))
        for group in runs_within(batches, self._limits):
            self._routing.publish(turn, group)
        if self._tracking is not None and not put_off:
            self._tracking.record()

    def tick(self, turn: Turn) -> None:
        """The end of a turn: all that came is on its way, and what is accepted is answered."""
        self.flush(turn)
        self._durable.stage(turn)
        for connection, sequence in self._receipts.take().items():
            turn.send(connection, encode(Accepted(sequence=sequence)))

    def next_deadline(self) -> int | None:
        return None

    def _closed(self, _turn: Turn, peer: Peer) -> None:
        self._receipts.closed(peer.connection)
        if self._clocks is not None:
            self._clocks.forget(peer.publisher)

    def _reject(self, turn: Turn, connection: int, batch: EventBatch, error: UsageError) -> None:
        self._counters["rejected_publishes_total"] += 1
        rejected = Rejected(sequence=batch.channel, code=error.code, reason=str(error))
        turn.send(connection, encode(rejected))
        if isinstance(error, DeniedError):
            turn.note("warning", f"denied: {error}")
        if batch.durable:
            self._durable.refused(connection)

    def _correct(self, turn: Turn, peer: Peer, correction_us: int | None) -> None:
        if correction_us is not None:
            turn.send(peer.connection, encode(Skew(correction_us=correction_us)))

    def _check_publish(self, peer: Peer, batch: EventBatch) -> bytes:
        """Whose ids its events have."""
        whose = self._publishers.check(peer, batch)
        for topic in batch.topics():
            if not self._links.may_publish(peer.connection, topic):
                raise DeniedError(f"{peer.principal or 'anonymous'} may not publish to {topic}")
        return whose

    def metrics(self) -> dict[str, int | float]:
        return {
            "events_in_total": self._plain_events + self._durable.events,
            **self._counters,
            "duplicate_events_total": self._publishers.repeated,
            "clock_corrections_total": 0 if self._clocks is None else self._clocks.corrections,
            "publishers_remembered": len(self._publishers),
        }

    def check(self) -> None:
        self._receipts.check()
        if self._pending:
            raise BugError("publish frames are left over from a turn")
