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

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import msgspec
from msgspec.structs import replace

from postroad.errors import BugError, PeerError, UsageError
from postroad.queues.messages import (
    CLOSED,
    MAX_CHAINS,
    MAX_ELECTORS,
    MAX_REACHED,
    MAX_REPLICAS,
    MAX_STATE_BYTES,
    MAX_WRITE_BYTES,
    NEW,
    NO_BALLOT,
    STARTED,
    Accept,
    Accepted,
    Ack,
    Append,
    Ask,
    Ballot,
    Base,
    Busy,
    Chain,
    Ended,
    Entry,
    Fetch,
    Gather,
    Held,
    Installed,
    Kept,
    Know,
    Load,
    Mark,
    Message,
    More,
    Moved,
    Node,
    Offer,
    Output,
    Part,
    Piece,
    Place,
    Prepare,
    Promise,
    Record,
    Refused,
    Row,
    Save,
    Seal,
    Sealed,
    Send,
    Serving,
    Stalled,
    State,
    Stopped,
    Synced,
    Tell,
    Told,
    Unknown,
    View,
    Vote,
    Write,
    decode_records,
    decode_state,
    encode,
)
from postroad.units import KIB, MIB, MILLISECOND_US, SECOND_US

MAX_PENDING: Final = 4_096  # writes that are not kept yet
MAX_PENDING_BYTES: Final = 64 * MIB
MAX_ROUND: Final = 1 << 60
CALM_DOUBLINGS: Final = 5  # of the wait of an elector that would have others in a view that is served
RECORD_BYTES: Final = 64  # that a record takes beside its payload
_DRAWS: Final = 1 << 32


class Machine(Protocol):
    """What is replicated. Equal states and equal payloads give equal states and equal answers."""

    def apply(self, payload: bytes) -> object:
        """The answer is told when the write is kept."""

    def snapshot(self) -> bytes:
        """All of the state."""

    def size(self) -> int:
        """About how many bytes a snapshot has."""

    def install(self, snapshot: bytes) -> None:
        """Replace the state; an empty snapshot is the state at the beginning."""

    def absorb(self, chain: Chain, snapshot: bytes) -> None:
        """Add another chain's state to this one."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    replicas: int = 3  # the paper's K
    electors: int = 7
    answer_us: int = 200 * MILLISECOND_US  # for which a proposer or reader waits for all who were asked
    retry_us: int = 300 * MILLISECOND_US  # before an elector proposes; doubles
    longest_us: int = 60 * SECOND_US  # that the doubling ends at
    resend_us: int = 500 * MILLISECOND_US
    silent_us: int = SECOND_US  # a write that waits for longer says that a replica is silent
    piece_bytes: int = 512 * KIB
    log_bytes: int = 64 * MIB  # since its last mark: then the log begins anew
    tail_bytes: int = 4 * MIB  # of records by which others may catch up
    linger_us: int = 5 * SECOND_US  # for which who left the replicas keeps its state: it may be back soon

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise UsageError(f"an arc has 1 to {MAX_REPLICAS} replicas, not {self.replicas}")
        if not self.replicas <= self.electors <= MAX_ELECTORS:
            raise UsageError(f"an arc has {self.replicas} to {MAX_ELECTORS} electors, not {self.electors}")
        if not 1 <= self.piece_bytes <= MAX_WRITE_BYTES:
            raise UsageError(f"a piece has 1 to {MAX_WRITE_BYTES} bytes, not {self.piece_bytes}")


class Proposal(msgspec.Struct, frozen=True):
    ballot: Ballot
    asked: tuple[Node, ...]
    promises: tuple[tuple[Node, Vote | None], ...]  # by node, in order
    value: View | None  # what the electors are asked to accept
    accepted: tuple[Node, ...]
    until_us: int


class Reading(msgspec.Struct, frozen=True):
    """Of the base of `view`; where `view` is another chain's closed one, to take that chain in."""

    view: View
    answers: tuple[tuple[Node, Held | None], ...]  # by node, in order
    source: tuple[Node, Held] | None
    since: Place | None  # the data are records since that place, which this broker holds; None: a state
    data: bytes
    until_us: int
    gathering: bool = False  # the data is whole, and bodies that it refers to are on their way


class Installing(msgspec.Struct, frozen=True):
    view: View
    held: Held | None
    state: bytes | None  # None: it is what this broker holds
    done: tuple[Node, ...]


class Incoming(msgspec.Struct, frozen=True):
    chain: Chain
    epoch: int
    since: Place | None  # as in Reading
    data: bytes
    gathering: bool = False  # as in Reading


class Importing(msgspec.Struct, frozen=True):
    view: View
    last: int  # number of the write that completes it


class Pending(msgspec.Struct, frozen=True):
    write: Write
    at_us: int
    answer: object


def check_view(view: View) -> None:
    """PeerError unless every field is within its bounds."""
    if not 1 <= len(set(view.replicas)) == len(view.replicas) <= MAX_REPLICAS:
        raise PeerError(
            f"a view with {len(view.replicas)} replicas: 1 to {MAX_REPLICAS} different ones are allowed"
        )
    if not 1 <= len(set(view.electors)) == len(view.electors) <= MAX_ELECTORS:
        raise PeerError(
            f"a view with {len(view.electors)} electors: 1 to {MAX_ELECTORS} different ones are allowed"
        )
    if len(view.base.replicas) > MAX_REACHED:
        raise PeerError(f"a view with {len(view.base.replicas)} brokers in its base, over {MAX_REACHED}")
    if not 1 <= view.epoch < MAX_ROUND or not NEW <= view.stage <= CLOSED:
        raise PeerError(f"a view with epoch {view.epoch} and stage {view.stage}")
    if (view.into is None) == (view.stage == CLOSED):
        raise PeerError("a view names the chain that it goes into if and only if it is closed")


def _with(pairs: tuple[tuple[Node, Any], ...], node: Node, value: Any) -> tuple[tuple[Node, Any], ...]:
    """In the order of the nodes, so that the order of arrival leaves no trace."""
    return tuple(
        sorted([*(pair for pair in pairs if pair[0] != node), (node, value)], key=lambda pair: pair[0])
    )


class Arc:
    """One broker's part in one arc."""

    __slots__ = (
        *("me", "boot", "settings", "machine", "outputs", "now_us", "unsaved"),
        # what is saved
        *("view", "promised", "vote", "rival", "ended"),
        # what this start of the broker knows of the others
        *(
            "lapsed",
            "candidates",
            "told_of",
            "strangers",
            "broken",
            "round",
            "proposal",
            "attempts",
            "attempt_at",
        ),
        # what is held here: the state of (chain, epoch) after `applied` writes; chain None: nothing
        *("chain", "epoch", "applied", "synced", "last_durable", "whole", "restarted", "absorbed", "part"),
        *("log_bytes", "incoming", "offered", "tail", "tail_start", "tail_size", "drop_at"),
        # the responsible broker's work
        *(
            "reading",
            "installing",
            "importing",
            "serving",
            "acks",
            "kept",
            "pending",
            "pending_bytes",
            "stalled",
        ),
        "resend_at",
    )

    def __init__(
        self,
        me: Node,
        boot: int,
        settings: Settings,
        machine: Machine,
        row: Row | None = None,
        records: Iterable[Record] = (),
    ) -> None:
        self.me, self.boot, self.settings, self.machine = me, boot, settings, machine
        self.outputs: list[Output] = []
        self.now_us = 0
        self.unsaved = False  # what is saved has changed in this step
        self.view: View | None = None
        self.promised: Ballot = NO_BALLOT
        self.vote: Vote | None = None
        self.rival: View | None = None  # of a chain that outranks ours
        self.ended: tuple[Chain, ...] = ()  # chains that this broker left, the last MAX_CHAINS
        self.lapsed: tuple[Chain, int] | None = None  # known at the start: no part is taken up to that epoch
        self.candidates: tuple[Node, ...] = ()  # live brokers, closest to the arc first
        self.told_of: tuple[Node, ...] | None = None  # None: this broker may not found
        self.strangers: tuple[Node, ...] = ()  # of those, who answered that they know no view
        self.broken = False  # the present epoch cannot go on
        self.round = 0
        self.proposal: Proposal | None = None
        self.attempts = 0
        self.attempt_at: int | None = None
        self.chain: Chain | None = None
        self.epoch = self.applied = self.synced = self.last_durable = 0
        self.whole = self.restarted = False
        self.absorbed: tuple[Chain, ...] = ()
        self.part: tuple[Chain, bytes] | None = None
        self.log_bytes = 0
        self.incoming: Incoming | None = None
        self.offered: tuple[Held, bytes] | None = None  # a snapshot that somebody reads piece by piece
        self.tail: deque[Record] = deque()  # the records that led from `tail_start` to what is held
        self.tail_start: Place = (0, 0)
        self.tail_size = 0
        self.drop_at: int | None = None  # a later start does without what is held here
        self.reading: Reading | None = None
        self.installing: Installing | None = None
        self.importing: Importing | None = None
        self.serving = False
        self.acks: dict[Node, int] = {}
        self.kept = 0
        self.pending: dict[int, Pending] = {}  # kept + 1 ... applied, in order
        self.pending_bytes = 0
        self.stalled = False
        self.resend_at: int | None = None
        self._restore(row, records)

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

    def set_candidates(self, candidates: Sequence[Node], now_us: int) -> None:
        """Brokers that the ring takes for alive, closest to the arc first, this one among them."""
        start = self._begin(now_us)
        if self.candidates != (new := tuple(candidates[:MAX_ELECTORS])):
            self.candidates = new
            self.attempts, self.attempt_at = 0, None
        self._end(start)

    def begin(self, told_of: Sequence[Node], now_us: int) -> None:
        """Find the arc's chain. Found it if nobody is to be asked or all know nothing (responsibility 9)."""
        start = self._begin(now_us)
        if self.view is None:
            self.told_of = tuple(sorted(set(told_of) - {self.me}))
            for node in self.told_of:
                self._send(node, Ask())
            self._found_if_first()
        self._end(start)

    def found(self, now_us: int) -> None:
        """By hand, or because nobody else can have: a chain that begins with this broker alone."""
        if self.view is not None:
            raise UsageError(f"the arc has a chain already, at epoch {self.view.epoch}")
        start = self._begin(now_us)
        self._found()
        self._end(start)

    def rescue(self, reached: Sequence[Node], now_us: int) -> None:
        """Begin the next generation with what the reached brokers hold, closest to the arc first.

        For an administrator, when a majority of the electors is gone for good. What only others hold is lost.
        """
        if self.view is None:
            raise UsageError("no view of the arc is known: there is nothing to rescue")
        if not 1 <= len(reached) <= MAX_REACHED:
            raise UsageError(f"a rescue needs 1 to {MAX_REACHED} brokers, not {len(reached)}")
        start = self._begin(now_us)
        old = self.view
        view = View(
            chain=Chain(old.chain.generation + 1, self.me, old.chain.origin),
            epoch=old.epoch + 1,
            stage=NEW,
            replicas=tuple(reached[: self.settings.replicas]),
            electors=tuple(reached[: self.settings.electors]),
            base=Base(old.epoch, tuple(reached)),
            rescued=True,
        )
        self._adopt(view)
        self._spread(view, reached)
        self._end(start)

    def refusal(self) -> str:
        """Why a write would be refused now; empty if it is not. Whoever is refused is told `view`."""
        if not self.serving:
            return "moved"
        if self.stalled:
            return "stalled"
        return "full" if self._is_full() else ""

    def submit(self, payload: bytes, now_us: int, *, durable: bool) -> int:
        """Write to all replicas. Kept with the returned number says that all have it."""
        if reason := self.refusal():
            raise BugError(f"a write was submitted though it is to be refused: {reason}")
        if len(payload) > MAX_WRITE_BYTES:
            raise UsageError(f"a write of {len(payload)} bytes is over the limit of {MAX_WRITE_BYTES}")
        start = self._begin(now_us)
        number = self._write(payload, durable, None)
        self._end(start)
        return number

    def gathered(self, gather: Gather, state: bytes | None, now_us: int) -> None:
        """The bodies of a state that came are here, and this is the state; None: its source has them no more,
        so that what is wanted is asked for anew."""
        start = self._begin(now_us)
        if self.awaits(gather):
            reading = self.reading
            if reading is not None and reading.gathering:
                if state is None:
                    self._begin_reading(gather.view)
                else:
                    assert reading.source is not None
                    self._read(reading.source[1], state)
            elif state is None:
                self.incoming = None  # the next offer begins anew
            else:
                self._install(gather.view, gather.source, state, whole=gather.whole)
        self._end(start)

    def awaits(self, gather: Gather) -> bool:
        """Whether that is still wanted."""
        reading, incoming = self.reading, self.incoming
        if reading is not None and reading.gathering:
            return reading.view == gather.view and reading.source is not None
        return (
            incoming is not None
            and incoming.gathering
            and (incoming.chain, incoming.epoch) == _epoch(gather.view)
        )

    def doubt(self, now_us: int) -> None:
        """Something of what is held here cannot be read: another replica is, if there is one."""
        start = self._begin(now_us)
        self.restarted, self.broken = True, self.serving
        self.attempts, self.attempt_at = 0, None
        self._end(start)

    def rewrite(self) -> Append:
        """The log could not be written: all of the state anew, in the place of what it has."""
        if self.chain is None:
            return Append((), True, ())
        mark = Mark(self.chain, self.epoch, self.applied, self.whole, self._snapshot())
        self.log_bytes = 0
        synced = Send(self.me, Synced(self.chain, self.epoch, self.applied))
        return Append((mark,), True, (synced,))

    def knows(self, chain: Chain) -> bool:
        """Whether ids of that chain can be compared here. If not, its state is still to be taken in."""
        return self.view is not None and (chain == self.view.chain or chain in self.absorbed)

    def take(self) -> list[Output]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def copy(self, machine: Machine) -> Arc:
        """For exploration: `machine` is a copy of ours."""
        twin = type(self).__new__(type(self))
        for name in Arc.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.machine = machine
        twin.outputs, twin.acks, twin.pending = list(self.outputs), dict(self.acks), dict(self.pending)
        twin.tail = self.tail.copy()
        return twin

    def state(self) -> tuple[object, ...]:
        """Everything but the machine and the outputs, to be compared and hashed."""
        values = [getattr(self, name) for name in Arc.__slots__[2:] if name not in _APART]
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

    # One step

    def _begin(self, now_us: int) -> int:
        self.now_us = now_us
        return len(self.outputs)

    def _end(self, start: int) -> None:
        if self.unsaved:
            self.unsaved = False
            self.outputs[start:] = [Save(self._row(), tuple(self.outputs[start:]))]
        if not self._waits_for_answers():
            self.resend_at = None
        elif self.resend_at is None:
            self.resend_at = self.now_us + self.settings.resend_us

    def _send(self, to: Node, message: Message) -> None:
        self.outputs.append(Send(to, message))

    def _send_safely(self, to: Node, message: Message) -> None:
        """A promise: also when it is said twice, the row may not be durable yet."""
        self.outputs.append(Save(self._row(), (Send(to, message),)))

    def _tell(self, told: Told) -> None:
        self.outputs.append(Tell(told))

    def _row(self) -> Row:
        return Row(self.view, self.promised, self.vote, self.rival, self.ended)

    def _restore(self, row: Row | None, records: Iterable[Record]) -> None:
        if row is not None:
            self.view, self.promised, self.vote, self.rival, self.ended = msgspec.structs.astuple(row)
            self.round = self.promised[0]
        for record in records:
            self._replay(record)
        self.synced = self.last_durable = self.applied
        self.restarted = self.chain is not None
        self._begin_tail()
        view = self.view
        if view is None:
            return
        if view.stage == STARTED and self.me not in view.replicas and self._is_older(view):
            self.drop_at = 0
        # The log may be ahead of the row.
        self.lapsed = (view.chain, max(view.epoch, self.epoch if self.chain == view.chain else 0))
        if view.responsible == self.me:
            self.broken = view.stage != CLOSED
        elif self.me in view.replicas and view.stage != CLOSED:
            self._send(view.responsible, Refused(view))

    def _replay(self, record: Record) -> None:
        if isinstance(record, Entry):
            self._change(record.number, record.payload, record.part)
            return
        if record.state is not None:
            self._replace_state(record.state)
        self.chain, self.epoch, self.applied, self.whole = (
            record.chain,
            record.epoch,
            record.applied,
            record.whole,
        )

    # News of views

    def _follow(self, sender: Node, view: View) -> bool:
        """Whether this is now the newest view known here. If it is not, the sender hears of that one."""
        check_view(view)
        mine = self.view
        if mine is None or view.chain.replaces(mine.chain):
            self._adopt(view)
        elif view.chain == mine.chain:
            if view.place < mine.place:
                self._send(sender, Know(mine))
                return False
            if view.place > mine.place:
                self._adopt(view)
            elif view != mine:
                raise PeerError(f"two views are said to be decided for epoch {view.epoch}: {view} and {mine}")
        elif view.chain in self.ended:
            self._send(sender, Ended(view.chain, mine))
            return False
        elif mine.chain.replaces(view.chain):
            self._send(sender, Know(mine))
            return False
        else:
            self._meet(sender, mine, view)
            return False
        return True

    def _meet(self, sender: Node, mine: View, view: View) -> None:
        """Two chains of different origin, or two rescues of one (responsibility 9)."""
        if mine.chain.outranks(view.chain):
            if self.serving and view.chain in self.absorbed:
                if self.importing is None:  # else it is here, and not yet on every replica
                    self._send(sender, Ended(view.chain, mine))
            elif self.serving and view.stage == CLOSED:
                self._take_in(view)
            else:
                self._send(sender, Know(mine))
            return
        rival = self.rival
        if view.stage == CLOSED or (
            rival is not None
            and (rival.place >= view.place if rival.chain == view.chain else rival.chain.outranks(view.chain))
        ):
            return
        self.rival, self.unsaved = view, True
        if mine.responsible != self.me:
            self._send(mine.responsible, Know(view))

    def _adopt(self, view: View) -> None:
        old, self.view = self.view, view
        self.promised, self.vote, self.unsaved = NO_BALLOT, None, True
        self.proposal, self.attempts, self.attempt_at = None, 0, None
        self.told_of, self.strangers = None, ()
        if self.rival is not None and not self.rival.chain.outranks(view.chain):
            self.rival = None
        same_epoch = old is not None and (old.chain, old.epoch) == (view.chain, view.epoch)
        self.broken = (self.broken and same_epoch) or (self._is_lapsed(view) and view.responsible == self.me)
        self._tell(Moved(view))
        if self.me in view.replicas:
            self.drop_at = None
        if not same_epoch or view.stage == CLOSED:
            self.reading = self.incoming = self.installing = None
            if self.serving:
                self._stop(view)
        if view.stage == NEW and view.responsible == self.me and not self._is_lapsed(view):
            self._begin_reading(view)
        elif view.stage == STARTED:
            if self._is_filled(view):
                self._serve(view)
            self.installing = self.offered = None
            if self.me not in view.replicas and self._is_older(view):
                self.drop_at = self.now_us + self.settings.linger_us

    def _is_older(self, view: View) -> bool:
        """Whether what is held here is of the same chain or of one that was rescued by that."""
        return self.chain is not None and (view.chain == self.chain or view.chain.replaces(self.chain))

    def _is_filled(self, view: View) -> bool:
        """Whether this broker leads the view and all its replicas have installed the state."""
        return self.installing is not None and len(self.installing.done) == len(view.replicas)

    def _spread(self, view: View, others: Iterable[Node]) -> None:
        for node in sorted({*others, *view.electors, *view.replicas, *view.base.replicas} - {self.me}):
            self._send(node, Know(view))

    def _is_lapsed(self, view: View) -> bool:
        return self.lapsed is not None and self.lapsed[0] == view.chain and view.epoch <= self.lapsed[1]

    def _on_know(self, sender: Node, message: Know) -> None:
        self._follow(sender, message.view)

    def _on_ended(self, sender: Node, message: Ended) -> None:
        del sender
        check_view(message.view)
        if self.view is None or self.view.chain != message.chain or message.view.chain == message.chain:
            return
        self.ended = (*self.ended, message.chain)[-MAX_CHAINS:]
        self._drop()
        self.rival = None
        self._adopt(message.view)

    def _on_refused(self, sender: Node, message: Refused) -> None:
        if (
            self._follow(sender, message.view)
            and self.view is not None
            and self.view.responsible == self.me
            and sender in self.view.replicas
            and not self.broken
        ):
            self.broken, self.attempts, self.attempt_at = True, 0, None

    # Founding

    def _on_ask(self, sender: Node, message: Ask) -> None:
        del message
        self._send(sender, Unknown() if self.view is None else Know(self.view))

    def _on_unknown(self, sender: Node, message: Unknown) -> None:
        del message
        if self.told_of is not None and sender in self.told_of:
            self.strangers = tuple(sorted({*self.strangers, sender}))
            self._found_if_first()

    def _found_if_first(self) -> None:
        if self.told_of == self.strangers and all(self.me < node for node in self.strangers):
            self._found()

    def _found(self) -> None:
        only = (self.me,)
        view = View(Chain(0, self.me, self.me), 1, STARTED, only, only, Base(0, ()))
        self._install(view, None, b"", whole=True)
        self._adopt(view)
        self._serve(view)

    # Agreement on the view that follows

    def _has_reason(self) -> bool:
        """Whether this broker wants another view to follow."""
        view = self.view
        if view is None or view.stage == CLOSED or self.me not in view.electors:
            return False
        if self.broken or self.rival is not None or self.vote is not None:
            return True
        if view.stage == NEW:
            leads = view.responsible == self.me
            return not leads or (
                self.installing is not None and len(self.installing.done) == len(view.replicas)
            )
        return bool(self.candidates) and self._members(self.candidates) != (
            view.responsible,
            frozenset(view.replicas),
            frozenset(view.electors),
        )

    def _members(self, nodes: Sequence[Node]) -> tuple[Node, frozenset[Node], frozenset[Node]]:
        limits = self.settings
        return nodes[0], frozenset(nodes[: limits.replicas]), frozenset(nodes[: limits.electors])

    def _wait_us(self, draw: int) -> int:
        """The responsible broker begins at once, and if it is gone, who would be it; others at random."""
        view = self.view
        assert view is not None
        leads, first = view.responsible == self.me, self.candidates[:1] == (self.me,)
        if self.attempts == 0 and (leads or (first and view.responsible not in self.candidates)):
            return 0
        # A view that took too long to fill is given twice the time when it is tried in the next epoch.
        unfilled = view.epoch - view.base.epoch - 1 if view.stage == NEW else 0
        # Brokers may see different ones alive: who is in the view is first of all for its responsible broker.
        calm = view.stage == STARTED and view.responsible in self.candidates and not leads
        patience = CALM_DOUBLINGS if calm and self.vote is None and self.rival is None else 0
        doublings = min(self.attempts + unfilled + patience, 32)
        wait_us = min(self.settings.retry_us << doublings, self.settings.longest_us)
        return wait_us // 2 + wait_us * (draw % _DRAWS) // (2 * _DRAWS)

    def _propose(self) -> None:
        view = self.view
        assert view is not None
        self.attempts += 1
        self.attempt_at = None
        self.round += 1
        ballot = (self.round, self.me, self.boot)
        asked = tuple(sorted({*view.electors, *self.candidates[: self.settings.electors]}))
        self.proposal = Proposal(ballot, asked, (), None, (), self.now_us + self.settings.answer_us)
        for node in asked:
            self._send(node, Prepare(view, ballot))

    def _on_prepare(self, sender: Node, message: Prepare) -> None:
        self._check_ballot(sender, message.ballot)
        if not self._follow(sender, message.view):
            return
        if self.me not in message.view.electors:
            self._send(sender, Promise(message.ballot, None))
        elif message.ballot < self.promised:
            self._send(sender, Busy(message.ballot, self.promised))
        else:
            self.promised = message.ballot
            self.round = max(self.round, message.ballot[0])
            self._send_safely(sender, Promise(message.ballot, self.vote))

    def _on_promise(self, sender: Node, message: Promise) -> None:
        proposal = self.proposal
        if (
            proposal is None
            or message.ballot != proposal.ballot
            or proposal.value
            or sender not in proposal.asked
        ):
            return
        self.proposal = replace(proposal, promises=_with(proposal.promises, sender, message.vote))
        self._conclude(patient=True)

    def _conclude(self, *, patient: bool) -> None:
        """Ask the electors to accept a value: a majority has promised, and all answered or had their time."""
        proposal, view = self.proposal, self.view
        assert proposal is not None
        assert view is not None
        promised = {node for node, _ in proposal.promises}
        # Nobody waits for those that the ring takes for dead.
        awaited = [node for node in proposal.asked if not self.candidates or node in self.candidates]
        if proposal.value is not None or (patient and not promised.issuperset(awaited)):
            return
        promises = {node: vote for node, vote in proposal.promises if node in view.electors}
        if len(promises) < view.majority:
            return
        votes = [vote for vote in promises.values() if vote is not None]
        if votes:
            value: View | None = max(votes, key=lambda vote: vote.ballot).value
        else:
            value = self._wanted(view, [node for node, _ in proposal.promises])
        if value is None:
            self.proposal = None
            return
        until_us = self.now_us + self.settings.answer_us
        self.proposal = replace(proposal, value=value, until_us=until_us)
        for node in view.electors:
            self._send(node, Accept(view, proposal.ballot, value))

    def _wanted(self, view: View, answered: Sequence[Node]) -> View | None:
        """What this broker proposes itself. It names only brokers that answered it in this ballot."""
        if self.rival is not None:
            return replace(view, stage=CLOSED, base=view.last_started(), into=self.rival.chain)
        if (
            self.installing is not None
            and len(self.installing.done) == len(view.replicas)
            and not self.broken
        ):
            return replace(view, stage=STARTED)
        wished = self.candidates or view.electors
        named = [node for node in wished if node in answered]
        if not named:
            return None
        members = (view.responsible, frozenset(view.replicas), frozenset(view.electors))
        if view.stage == STARTED and not self.broken and self._members(named) == members:
            return None  # nothing would change: those who are missing still do not answer
        return View(
            chain=view.chain,
            epoch=view.epoch + 1,
            stage=NEW,
            replicas=tuple(named[: self.settings.replicas]),
            electors=tuple(named[: self.settings.electors]),
            base=view.last_started(),
            rescued=view.rescued and view.stage == NEW,
        )

    def _on_accept(self, sender: Node, message: Accept) -> None:
        self._check_ballot(sender, message.ballot)
        check_view(message.value)
        if not self._follow(sender, message.view) or self.me not in message.view.electors:
            return
        if message.ballot < self.promised:
            self._send(sender, Busy(message.ballot, self.promised))
            return
        self.promised, self.vote = message.ballot, Vote(message.ballot, message.value)
        self.round = max(self.round, message.ballot[0])
        self._send_safely(sender, Accepted(message.ballot))

    def _on_accepted(self, sender: Node, message: Accepted) -> None:
        proposal, view = self.proposal, self.view
        if proposal is None or view is None or proposal.value is None or message.ballot != proposal.ballot:
            return
        if sender not in view.electors or sender in proposal.accepted:
            return
        self.proposal = replace(proposal, accepted=tuple(sorted((*proposal.accepted, sender))))
        if len(self.proposal.accepted) >= view.majority:
            self._adopt(proposal.value)
            self._spread(proposal.value, proposal.asked)

    def _on_busy(self, sender: Node, message: Busy) -> None:
        del sender
        if not 0 <= message.promised[0] < MAX_ROUND:
            raise PeerError(f"a ballot of round {message.promised[0]}, over {MAX_ROUND}")
        if self.proposal is not None and message.ballot == self.proposal.ballot:
            self.round = max(self.round, message.promised[0])
            self.proposal = None

    @staticmethod
    def _check_ballot(sender: Node, ballot: Ballot) -> None:
        if ballot[1] != sender or not 0 < ballot[0] < MAX_ROUND:
            raise PeerError(f"a ballot of round {ballot[0]} of {ballot[1].hex()} came from {sender.hex()}")

    # Take-over: reading one replica of the base

    def _begin_reading(self, view: View) -> None:
        until_us = self.now_us + self.settings.answer_us
        self.reading = Reading(view, (), None, None, b"", until_us)
        self.installing = None
        held = self._held_for(view)
        if self.me in view.base.replicas and not view.rescued and held is not None and held.whole:
            self._read(held, None)
            return
        for node in view.base.replicas:
            self._send(node, Seal(view))

    def _held_for(self, view: View) -> Held | None:
        """What is held here, as far as it can stand for the base of that view."""
        if self.chain is None:
            return None
        if not view.rescued and (self.chain != view.chain or self.epoch < view.base.epoch):
            return None
        # An install of a later epoch that never started is as whole as what it was read from.
        whole = not self.restarted and (self.whole or self.epoch == view.base.epoch)
        return Held(self.chain, self.epoch, self.applied, whole, self.boot)

    def _on_seal(self, sender: Node, message: Seal) -> None:
        view = message.view
        if not self._follow(sender, view):
            return
        if self._is_lapsed(view) and view.stage != CLOSED:
            self._send(sender, Refused(view))
            return
        self._send_safely(sender, Sealed(view.chain, view.epoch, self._held_for(view)))

    def _on_sealed(self, sender: Node, message: Sealed) -> None:
        reading = self.reading
        if reading is None or (message.chain, message.epoch) != _epoch(reading.view):
            return
        if reading.source is not None:
            if reading.source[0] != sender or reading.source[1] == message.held:
                return
            # It was started anew meanwhile.
            reading = replace(reading, source=None, since=None, data=b"", gathering=False)
        if sender in reading.view.base.replicas:
            self.reading = replace(reading, answers=_with(reading.answers, sender, message.held))
            self._choose_source(patient=True)

    def _choose_source(self, *, patient: bool) -> None:
        reading = self.reading
        assert reading is not None
        if reading.source is not None:
            return
        view = reading.view
        holders = [(node, held) for node, held in reading.answers if held is not None]
        whole = [(node, held) for node, held in holders if held.whole]
        # An elector of this view was alive when it was made. Before it answers, no replica that lost its
        # memory is read, however long that takes. If it is silent for good, the next view does without it.
        answered = {node for node, _ in reading.answers}
        silent = [node for node in view.base.replicas if node not in answered]
        wait = bool(silent) if patient else any(node in view.electors for node in silent)
        if wait and (view.rescued or not whole):
            return
        if not holders:
            if view.rescued and reading.answers:
                self._read(None, encode(State((), None, b"")))
            return
        chosen = (whole if whole and not view.rescued else holders).copy()
        chosen.sort(
            key=lambda pair: (pair[1].chain.generation, pair[1].epoch, pair[1].applied, pair[0] == self.me)
        )
        node, held = chosen[-1]
        if node == self.me and held == self._held_for(view):
            self._read(held, None)
        else:
            self.reading = replace(reading, source=(node, held))
            self._send(node, Fetch(view, held, 0, self._place_in(held.chain, view)))

    def _on_fetch(self, sender: Node, message: Fetch) -> None:
        view = message.view
        if not self._follow(sender, view):
            return
        held = self._held_for(view)
        if held is None or held != message.held:
            self._send_safely(sender, Sealed(view.chain, view.epoch, held))
            return
        since = message.since
        state = self._records_since(since, held)
        if state is None:
            since, state = None, self._offer(held)
        data = state[message.offset : message.offset + self.settings.piece_bytes]
        if message.offset + len(data) >= len(state):
            self.offered = None
        self._send(sender, Piece(view.chain, view.epoch, held, message.offset, len(state), data, since))

    def _on_piece(self, sender: Node, message: Piece) -> None:
        reading = self.reading
        if (
            reading is None
            or reading.source != (sender, message.held)
            or (message.chain, message.epoch) != _epoch(reading.view)
            or message.offset != len(reading.data)
            or message.since not in (None, self._place_in(message.held.chain, reading.view))
            or (reading.data and message.since != reading.since)
        ):
            return
        if not len(reading.data) + len(message.data) <= message.total <= MAX_STATE_BYTES or not message.data:
            raise PeerError(
                f"a piece at {message.offset} of a state of {message.total} bytes does not fit it"
            )
        data = reading.data + message.data
        if len(data) < message.total:
            self.reading = replace(reading, since=message.since, data=data)
            self._send(sender, Fetch(reading.view, message.held, len(data), message.since))
        elif message.since is None:
            self.reading = replace(reading, since=None, data=data, gathering=True)
            self.outputs.append(Gather(reading.view, sender, message.held.whole, data))
        else:
            self._catch_up(message.since, message.held, data)
            self._read(message.held, None)

    def _read(self, held: Held | None, state: bytes | None) -> None:
        """The state of the base is here: that of a view to fill, or of a chain to take in."""
        assert self.reading is not None
        view, self.reading = self.reading.view, None
        if view.stage == CLOSED:
            self._write_import(view, self._snapshot() if state is None else state)
            return
        if view.rescued and held is not None:
            read = decode_state(self._snapshot() if state is None else state)
            state = encode(replace(read, absorbed=_join_chains(read.absorbed, (held.chain,), view.chain)))
        self.installing = Installing(view, held, state, ())
        for node in view.replicas:
            self._send(node, Offer(view, None if view.rescued else held))

    # Take-over: installing on all replicas

    def _on_offer(self, sender: Node, message: Offer) -> None:
        view, held = message.view, message.held
        if not self._may_install(sender, view):
            return
        if held is not None and (self.chain, self.epoch, self.applied) == (
            held.chain,
            held.epoch,
            held.applied,
        ):
            self._install(view, sender, None, whole=held.whole)
        else:
            if self.incoming is None or (self.incoming.chain, self.incoming.epoch) != _epoch(view):
                self.incoming = Incoming(view.chain, view.epoch, None, b"")
            self._ask_more(sender, view, self.incoming)

    def _on_load(self, sender: Node, message: Load) -> None:
        view, incoming = message.view, self.incoming
        if not self._may_install(sender, view):
            return
        if incoming is None or (incoming.chain, incoming.epoch) != _epoch(view):
            return
        fits = (incoming.since,) if incoming.data else (None, self._place_in(view.chain, view))
        if message.offset != len(incoming.data) or message.since not in fits:
            self._ask_more(sender, view, incoming)
            return
        if not message.offset + len(message.data) <= message.total <= MAX_STATE_BYTES or not message.data:
            raise PeerError(
                f"a piece at {message.offset} of a state of {message.total} bytes does not fit it"
            )
        data = incoming.data + message.data
        if len(data) < message.total:
            self.incoming = replace(incoming, since=message.since, data=data)
            self._ask_more(sender, view, self.incoming)
        elif message.since is None:
            self.incoming = replace(incoming, since=None, data=data, gathering=True)
            self.outputs.append(Gather(view, sender, message.whole, data))
        else:
            self._catch_up(message.since, None, data)
            self._install(view, sender, None, whole=message.whole)

    def _ask_more(self, leader: Node, view: View, incoming: Incoming) -> None:
        if incoming.gathering:
            return  # all of it is here
        since = incoming.since if incoming.data else self._place_in(view.chain, view)
        self._send(leader, More(view.chain, view.epoch, len(incoming.data), since))

    def _may_install(self, sender: Node, view: View) -> bool:
        if not self._follow(sender, view):
            return False
        if sender != view.responsible or self.me not in view.replicas:
            raise PeerError(f"{sender.hex()} installs epoch {view.epoch}, which is not for it or not for us")
        if self._is_lapsed(view):
            self._send(sender, Refused(view))
            return False
        if (self.chain, self.epoch) == _epoch(view):
            # Once per epoch. It may not be durable yet: the answer goes behind whatever the log has to do.
            done = Send(sender, Installed(view.chain, view.epoch))
            self.outputs.append(Append((), False, (done,)))
            return False
        return True

    def _install(self, view: View, leader: Node | None, state: bytes | None, *, whole: bool) -> None:
        """Replace the state in one step, or go on with it as it is (`state` None)."""
        if state is not None:
            self._replace_state(state)
        self.chain, self.epoch, self.whole, self.restarted = view.chain, view.epoch, whole, False
        self.applied = self.synced = self.last_durable = 0
        self.incoming = self.offered = self.drop_at = None
        then = () if leader is None else (Send(leader, Installed(view.chain, view.epoch)),)
        mark = Mark(view.chain, view.epoch, 0, whole, state)
        self.outputs.append(Append((mark,), state is not None, then))
        if state is None:
            self._trace(mark)
        else:
            self.log_bytes = 0
            self._begin_tail()

    def _on_more(self, sender: Node, message: More) -> None:
        installing = self.installing
        if installing is None or (message.chain, message.epoch) != _epoch(installing.view):
            return
        held, since, data = installing.held, message.since, installing.state
        if data is not None:
            since = None
        else:
            assert held is not None
            data = self._records_since(since, held)
            if data is None:
                since, data = None, self._offer(held)
        if sender not in installing.view.replicas or not 0 <= message.offset < len(data):
            raise PeerError(
                f"{sender.hex()} asks for a state from {message.offset}, which is not for it or over"
            )
        piece = data[message.offset : message.offset + self.settings.piece_bytes]
        whole = held is None or held.whole
        self._send(sender, Load(installing.view, whole, message.offset, len(data), piece, since))

    def _on_installed(self, sender: Node, message: Installed) -> None:
        installing = self.installing
        if installing is None or (message.chain, message.epoch) != _epoch(installing.view):
            return
        if sender in installing.view.replicas and sender not in installing.done:
            self.installing = replace(installing, done=tuple(sorted((*installing.done, sender))))

    # What is held here

    def _offer(self, held: Held) -> bytes:
        """A copy of the state, taken once for all who read it piece by piece."""
        if self.offered is None or self.offered[0] != held:
            self.offered = (held, self._snapshot())
        return self.offered[1]

    def _snapshot(self) -> bytes:
        return encode(State(self.absorbed, self.part, self.machine.snapshot()))

    def _replace_state(self, data: bytes) -> None:
        state = decode_state(data) if data else State((), None, b"")
        self.machine.install(state.machine)
        self.absorbed, self.part = state.absorbed, state.part

    def _drop(self) -> None:
        """A later start does without this replica."""
        if self.chain is None:
            return
        self._replace_state(b"")
        self.chain, self.epoch, self.applied, self.synced, self.last_durable = None, 0, 0, 0, 0
        self._begin_tail()
        self.whole = self.restarted = False
        self.offered = self.drop_at = None
        self.outputs.append(Append((), True, ()))

    def _change(self, number: int, payload: bytes, part: Part | None) -> object:
        answer = self.machine.apply(payload) if part is None else self._absorb(part, payload)
        self.applied = number
        return answer

    def _apply(self, write: Write) -> object:
        """The next write of the epoch, here; answers None while a chain's state is still coming in pieces."""
        answer = self._change(write.number, write.payload, write.part)
        then: tuple[Output, ...] = ()
        if write.durable:
            self.last_durable = write.number
            then = (Send(self.me, Synced(write.chain, write.epoch, write.number)),)
        entry = Entry(write.number, write.payload, write.part)
        self.outputs.append(Append((entry,), False, then))
        self._trace(entry)
        self.log_bytes += len(write.payload)
        if self.log_bytes > self.settings.log_bytes:
            assert self.chain is not None
            state = self._snapshot()
            mark = Mark(self.chain, self.epoch, self.applied, self.whole, state)
            self.outputs.append(Append((mark,), True, ()))
            # A large state is written anew only after as many bytes of writes.
            self.log_bytes = -len(state)
        return answer

    def _absorb(self, part: Part, data: bytes) -> object:
        if part.offset == 0:
            self.part = (part.chain, data)
        elif self.part is not None and self.part[0] == part.chain and len(self.part[1]) == part.offset:
            self.part = (part.chain, self.part[1] + data)
        if part.last and self.part is not None and self.part[0] == part.chain:
            assert self.chain is not None
            state = decode_state(self.part[1])
            self.part = None
            if part.chain not in self.absorbed:
                self.machine.absorb(part.chain, state.machine)
                self.absorbed = _join_chains(self.absorbed, (part.chain, *state.absorbed), self.chain)
        return None

    def _safe_number(self) -> int:
        """Every write up to here is as safe as it has to be."""
        return self.applied if self.synced >= self.last_durable else self.synced

    def _on_write(self, sender: Node, message: Write) -> None:
        view = self.view
        if view is None or (message.chain, message.epoch) != _epoch(view) or view.stage == CLOSED:
            if view is not None:
                self._send(sender, Know(view))
            return
        if sender != view.responsible or self.me not in view.replicas:
            raise PeerError(f"{sender.hex()} writes in epoch {view.epoch}, for which it is not responsible")
        if (self.chain, self.epoch) != _epoch(view) or self._is_lapsed(view):
            self._send(sender, Refused(view))
            return
        gap = message.number > self.applied + 1
        if message.number == self.applied + 1:
            self._apply(message)
        if gap or self.synced >= self.last_durable:
            self._send(sender, Ack(message.chain, message.epoch, self._safe_number(), gap))

    def _on_synced(self, sender: Node, message: Synced) -> None:
        if sender != self.me:
            raise PeerError(f"{sender.hex()} says what the log of this broker has")
        view = self.view
        if (self.chain, self.epoch) != (message.chain, message.epoch) or message.number <= self.synced:
            return
        self.synced = message.number
        if self.serving:
            self._count(self.me, self._safe_number())
        elif (
            view is not None and _epoch(view) == (message.chain, message.epoch) and not self._is_lapsed(view)
        ):
            self._send(view.responsible, Ack(message.chain, message.epoch, self._safe_number(), gap=False))

    # Catching up

    def _begin_tail(self) -> None:
        self.tail.clear()
        self.tail_start, self.tail_size = (self.epoch, self.applied), 0

    def _trace(self, record: Record) -> None:
        """Others may need it to come to the state that is held here."""
        self.tail.append(record)
        self.tail_size += _record_bytes(record)
        while self.tail_size > self.settings.tail_bytes:
            first = self.tail.popleft()
            self.tail_size -= _record_bytes(first)
            self.tail_start = _place_after(self.tail_start, first)

    def _place_in(self, chain: Chain, view: View) -> Place | None:
        """The place of what is held here, for whoever may have the records since."""
        return (self.epoch, self.applied) if self.chain == chain and not view.rescued else None

    def _records_since(self, since: Place | None, held: Held) -> bytes | None:
        """From that place to what is held; None if the tail does not have it or a copy is shorter."""
        place, end = self.tail_start, (held.epoch, held.applied)
        records: list[Record] = []
        found = place == since
        for record in self.tail:
            if found and place == end:
                break
            place = _place_after(place, record)
            if found:
                records.append(record)
            found = found or place == since
        if not records or place != end or sum(map(_record_bytes, records)) >= self.machine.size():
            return None
        return encode(tuple(records))

    def _catch_up(self, since: Place, held: Held | None, data: bytes) -> None:
        """Come from that place to what the sender holds. PeerError if the records do not lead there."""
        records = decode_records(data)
        place = since
        for record in records:
            expected = (place[0], place[1] + 1) if isinstance(record, Entry) else (record.epoch, 0)
            after = _place_after(place, record)
            if after != expected or after <= place or (isinstance(record, Mark) and record.state is not None):
                raise PeerError(f"a record that leads to {after} does not follow {place}")
            place = after
        if since != (self.epoch, self.applied) or (held is not None and place != (held.epoch, held.applied)):
            raise PeerError(
                f"records from {since} to {place}: this broker holds {self.epoch}, {self.applied}"
            )
        for record in records:
            self._replay(record)
            self._trace(record)
        self.synced = self.last_durable = self.applied
        if held is not None:
            self.whole, self.restarted = held.whole, False
        self.offered = None
        self.outputs.append(Append(records, False, ()))
        self.log_bytes += len(data)

    # Serving

    def _serve(self, view: View) -> None:
        self.serving, self.stalled, self.kept = True, False, 0
        self.acks = dict.fromkeys(view.replicas, 0)
        self._tell(Serving(view))

    def _stop(self, view: View) -> None:
        self.serving, self.stalled, self.importing = False, False, None
        self.acks, self.pending, self.pending_bytes, self.kept = {}, {}, 0, 0
        self._tell(Stopped(view))

    def _is_full(self) -> bool:
        return len(self.pending) >= MAX_PENDING or self.pending_bytes >= MAX_PENDING_BYTES

    def _write(self, payload: bytes, durable: bool, part: Part | None) -> int:
        view = self.view
        assert view is not None
        write = Write(view.chain, view.epoch, self.applied + 1, payload, durable, part)
        answer = self._apply(write)
        self.pending[write.number] = Pending(write, self.now_us, answer)
        self.pending_bytes += len(payload)
        for node in view.replicas[1:]:
            self._send(node, write)
        self._count(self.me, self._safe_number())
        return write.number

    def _on_ack(self, sender: Node, message: Ack) -> None:
        view = self.view
        if not self.serving or view is None or (message.chain, message.epoch) != _epoch(view):
            return
        if sender not in self.acks or not 0 <= message.number <= self.applied:
            raise PeerError(f"{sender.hex()} acknowledges write {message.number} of {self.applied}")
        self._count(sender, message.number)
        if message.gap:
            self._write_again(sender)

    def _count(self, node: Node, number: int) -> None:
        if number <= self.acks[node]:
            return
        self.acks[node] = number
        everywhere = min(self.acks.values())
        while self.kept < everywhere:
            self.kept += 1
            pending = self.pending.pop(self.kept)
            self.pending_bytes -= len(pending.write.payload)
            self.stalled = False
            self._tell(Kept(pending.write.epoch, self.kept, pending.answer))
        if self.importing is not None and self.kept >= self.importing.last:
            closed, self.importing = self.importing.view, None
            assert self.view is not None
            for other in sorted({*closed.electors, *closed.replicas, *closed.base.replicas} - {self.me}):
                self._send(other, Ended(closed.chain, self.view))

    def _write_again(self, node: Node) -> None:
        for number in range(self.acks[node] + 1, self.applied + 1):
            if number in self.pending:
                self._send(node, self.pending[number].write)

    # Taking another chain in

    def _take_in(self, closed: View) -> None:
        assert self.view is not None
        if self.reading is not None or self.importing is not None or len(self.absorbed) >= MAX_CHAINS:
            return
        if closed.into != self.view.chain and closed.into not in self.absorbed:
            return  # the chain that it goes into comes first: it may have it already
        self.reading = Reading(closed, (), None, None, b"", self.now_us + self.settings.answer_us)
        for node in closed.base.replicas:
            self._send(node, Seal(closed))

    def _write_import(self, closed: View, state: bytes) -> None:
        size = self.settings.piece_bytes
        number = 0
        for offset in range(0, len(state), size):
            last = offset + size >= len(state)
            number = self._write(state[offset : offset + size], True, Part(closed.chain, offset, last))
        self.importing = Importing(
            closed, number
        )  # its writes are durable, so none is kept before a later step

    # What is said again until it is answered

    def _waits_for_answers(self) -> bool:
        asks = self.told_of is not None
        unfilled = self.installing is not None and not self.serving
        return bool(self.reading or unfilled or self.pending or asks or self.rival or self._is_left_over())

    def _is_left_over(self) -> bool:
        """Whether what is held here is of no use once the newest view has started; nobody else says so."""
        view = self.view
        return (
            view is not None and view.stage == NEW and self.me not in view.replicas and self._is_older(view)
        )

    def _resend(self) -> None:
        if self.told_of is not None:
            for node in self.told_of:
                self._send(node, Ask())
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
            for node in sorted({*self.view.electors, *self.view.replicas} - {self.me}):
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


def _epoch(view: View) -> tuple[Chain, int]:
    return view.chain, view.epoch


def _place_after(place: Place, record: Record) -> Place:
    return (place[0], record.number) if isinstance(record, Entry) else (record.epoch, record.applied)


def _record_bytes(record: Record) -> int:
    return RECORD_BYTES + (len(record.payload) if isinstance(record, Entry) else 0)


def _join_chains(chains: tuple[Chain, ...], more: Iterable[Chain], own: Chain) -> tuple[Chain, ...]:
    joined = {*chains, *more} - {own}
    return tuple(sorted(joined, key=lambda chain: (chain.generation, chain.founder, chain.origin)))


_APART: Final = {"settings", "machine", "outputs", "now_us", "acks", "pending", "tail"}
_HANDLERS: Final[dict[type, Callable[[Any, Node, Any], None]]] = {
    Ask: Arc._on_ask,
    Unknown: Arc._on_unknown,
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
