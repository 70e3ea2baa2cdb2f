"""Who is responsible for one arc of the ring, and what its replicas hold (spec/queues, "How responsibility is
agreed"). It knows nothing of messages: what is replicated is a state machine that it is given.

**The chain.** A view names the responsible broker, the replicas, the electors and the base: the last started
view. The view that follows is one decree of Paxos among the present view's electors, and there are three
kinds of it: a new view of the next epoch, this view as started, this view as closed. So a decree is simply
the view that follows, all views of a chain are in one order (epoch, stage), and nobody needs more than the
newest one. A broker saves the newest view it knows together with its promise and its vote about what follows
it; about an older view it only answers with that one. Every message that acts for a view carries the view:
who did not know it, learns it by that.

**Sealing is knowing.** A replica takes writes of exactly the epoch that is the newest it knows. To seal it
for a later epoch is to tell it that epoch's view, which it saves before it answers. A broker that was started
anew takes no part in the epoch it knew before (`lapsed`): what it had in memory is gone, and its number of
writes with it.

**Take-over.** The responsible broker of a new view reads one replica of the base, once; offers that state to
all its replicas; and when all have installed it, has the start decided. It serves only when it knows that. A
replica whose state is exactly the offered one goes on with it, others are sent a copy. The old state stays
until the copy is whole, and what a broker holds is dropped only a while after it learns of a later start that
does without it. A base replica may meanwhile hold the state of a later epoch that never started: that was
read after the base was sealed, so it has everything kept.

**Catching up.** Within a chain a place (epoch, number of its writes) is one state. Every broker remembers the
last writes and epochs that led to its own (`tail`). Who has to read or install a state and holds an earlier
place of the same chain says so, and is sent the records since, where the other's tail has that place and they
are shorter than a copy. A write that was never kept leads to a place that nobody else's tail has.

**Bodies.** A state may refer to what is only on the disk of who sent it (`Gather`): before a copy counts as
whole, the driver has that here as well.

**Whole.** Every write is in the log of every replica in order, and those that must survive a power cut are
synced before they are acknowledged; the others follow. So a replica that was started anew holds a prefix that
has every durable write. It is read only when no replica that kept its memory can answer.

**Rescue and merging.** A rescue begins a chain of the same origin and the next generation, with what the
reached brokers hold; whoever hears of it leaves the old chain. Chains of different origin are rivals: the
losing one's electors close it, the winner's responsible broker reads it like a base and takes it in as one
write, and only then do the losing chain's brokers join the winner (`Ended`). A closed chain names the chain
that may take it in, so that only one does.

**Contract.** Every method that changes something takes the time and leaves what is to be done in `outputs`;
`take()` empties it after each call. What a step says after it changed what is saved goes out only once that
is durable. Messages to oneself come back through `receive`. `draw` is a random number of 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from postroad.errors import BugError
from postroad.queues.agreement import Agreement
from postroad.queues.arc_state import ArcState, Machine
from postroad.queues.messages import (
    CLOSED,
    STARTED,
    Accept,
    Accepted,
    Ack,
    Ask,
    Busy,
    Ended,
    Fetch,
    Installed,
    Know,
    Load,
    Message,
    More,
    Node,
    Offer,
    Output,
    Piece,
    Prepare,
    Promise,
    Refused,
    Seal,
    Sealed,
    Stalled,
    Synced,
    Write,
)


class Arc(Agreement):
    """One broker's part in one arc."""

    __slots__ = ()

    # What the outside calls

    def receive(self, sender: Node, message: Message, now_us: int) -> None:
        """PeerError if the message cannot be true; nothing has changed then."""
        start = self._begin(now_us)
        _HANDLERS[type(message)](self, sender, message)
        self._end(start)

    def tick(self, now_us: int, draw: int) -> None:
        start = self._begin(now_us)
        if self.reading is not None and now_us >= self.reading.until_us:
            self._choose_source(patient=False)
        if self.drop_at is not None and now_us >= self.drop_at:
            self._drop()
        if self.resend_at is not None and now_us >= self.resend_at:
            self._resend()
            self.resend_at = None  # set anew at the end of this step
        proposal = self.proposal
        if proposal is not None and now_us >= proposal.until_us:
            self._conclude(patient=False)
            if self.proposal is proposal:
                self.proposal = None  # no majority answered
        if self.proposal is None and self._has_reason():
            if self.attempt_at is None:
                self.attempt_at = now_us + self._wait_us(draw)
            if now_us >= self.attempt_at:
                self._propose()
        self._end(start)

    def next_deadline(self) -> int | None:
        """When `tick` is due; 0 is at once."""
        times = [self.resend_at, self.drop_at]
        reading = self.reading
        if reading is not None and reading.source is None and reading.until_us > self.now_us:
            times.append(reading.until_us)  # only once: whoever is still awaited then is so for good
        if self.proposal is not None:
            times.append(self.proposal.until_us)
        elif self._has_reason():
            times.append(self.attempt_at or 0)
        return min((time for time in times if time is not None), default=None)

    def take(self) -> list[Output]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def copy(self, machine: Machine) -> Arc:
        """For exploration: `machine` is a copy of ours."""
        twin = type(self).__new__(type(self))
        for name in ArcState.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.machine = machine
        twin.outputs, twin.acks, twin.pending = list(self.outputs), dict(self.acks), dict(self.pending)
        twin.tail = self.tail.copy()
        return twin

    def state(self) -> tuple[object, ...]:
        """Everything but the machine and the outputs, to be compared and hashed."""
        values = [getattr(self, name) for name in ArcState.__slots__[2:] if name not in _APART]
        return (*values, tuple(sorted(self.acks.items())), tuple(self.pending.items()), tuple(self.tail))

    def check(self) -> None:
        """BugError if something that always holds does not."""
        if self.chain is None and (self.epoch or self.applied or self.absorbed):
            raise BugError("an arc that holds nothing has an epoch, writes or chains")
        if not 0 <= self.synced <= self.applied or not 0 <= self.last_durable <= self.applied:
            raise BugError(
                f"synced {self.synced} or durable {self.last_durable} is over applied {self.applied}"
            )
        if self.serving:
            view = self.view
            if view is None or view.stage != STARTED or view.responsible != self.me:
                raise BugError(f"this broker serves without a started view of its own: {view}")
            if (self.chain, self.epoch) != (view.chain, view.epoch) or self._is_lapsed(view):
                raise BugError(f"this broker serves epoch {view.epoch} and holds the state of {self.epoch}")
            if list(self.pending) != list(range(self.kept + 1, self.applied + 1)):
                raise BugError(f"{len(self.pending)} writes wait between {self.kept} and {self.applied}")
        elif self.pending or self.acks or self.importing:
            raise BugError("writes wait though this broker does not serve")
        if self.pending_bytes != sum(len(pending.write.payload) for pending in self.pending.values()):
            raise BugError(f"the bytes of the writes that wait are not {self.pending_bytes}")
        if self.rival and self.view and not self.rival.chain.outranks(self.view.chain):
            raise BugError("the rival does not outrank the chain of this broker")

    # What is said again until it is answered

    def _resend(self) -> None:
        if self.reading is not None and not self.reading.gathering:
            if self.reading.source is not None:
                node, held = self.reading.source
                reading = self.reading
                since = reading.since if reading.data else self._place_in(held.chain, reading.view)
                self._send(node, Fetch(reading.view, held, len(reading.data), since))
            else:
                for node in self.reading.view.base.replicas:
                    self._send(node, Seal(self.reading.view))
        if self.installing is not None and not self.serving:
            offer = Offer(
                self.installing.view, None if self.installing.view.rescued else self.installing.held
            )
            for node in self.installing.view.replicas:
                if node not in self.installing.done:
                    self._send(node, offer)
        if self.view is not None and self._is_left_over():
            # The brokers of a closed chain may all be gone; those that are closest to the arc know the other.
            closest = self.candidates if self.view.stage == CLOSED else ()
            for node in sorted({*self.view.electors, *self.view.replicas, *closest} - {self.me}):
                self._send(node, Ask())
        if self.view is not None and self.rival is not None:
            # Whether it is closed or was taken in long ago, the answer says so.
            self._send(self.rival.responsible, Know(self.view))
        if self.serving and self.pending:
            for node in self.acks:
                if node != self.me:
                    self._write_again(node)
            oldest = next(iter(self.pending.values()))
            if not self.stalled and self.now_us >= oldest.at_us + self.settings.silent_us:
                self.stalled = self.broken = True
                self._tell(Stalled(oldest.write.number))


_APART: Final = {"settings", "machine", "outputs", "now_us", "acks", "pending", "tail"}
_HANDLERS: Final[dict[type, Callable[[Any, Node, Any], None]]] = {
    Ask: Arc._on_ask,
    Know: Arc._on_know,
    Ended: Arc._on_ended,
    Prepare: Arc._on_prepare,
    Promise: Arc._on_promise,
    Accept: Arc._on_accept,
    Accepted: Arc._on_accepted,
    Busy: Arc._on_busy,
    Seal: Arc._on_seal,
    Sealed: Arc._on_sealed,
    Fetch: Arc._on_fetch,
    Piece: Arc._on_piece,
    Offer: Arc._on_offer,
    More: Arc._on_more,
    Load: Arc._on_load,
    Installed: Arc._on_installed,
    Write: Arc._on_write,
    Ack: Arc._on_ack,
    Refused: Arc._on_refused,
    Synced: Arc._on_synced,
}
