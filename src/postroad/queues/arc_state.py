"""What one broker knows of one arc, and how a step of its core is taken (`views` says what it is about).

The core is one machine in four parts, each on top of the one before it: `replica` (what is held here, and its
log), `takeover` (one state on all replicas: reading, installing, writing), `merging` (two chains become one)
and `agreement` (which view follows). What they share is here: the fields, and what one part asks of another
that stands above it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final, Protocol

import msgspec

from postroad.errors import PeerError, UsageError
from postroad.queues.messages import (
    CLOSED,
    MAX_ELECTORS,
    MAX_REACHED,
    MAX_REPLICAS,
    MAX_WRITE_BYTES,
    NEW,
    NO_BALLOT,
    STARTED,
    Ballot,
    Chain,
    Held,
    Know,
    Message,
    Node,
    Output,
    Place,
    Record,
    Row,
    Save,
    Send,
    Tell,
    Told,
    View,
    Vote,
    Write,
)
from postroad.units import KIB, MIB, MILLISECOND_US, SECOND_US

MAX_PENDING: Final = 4_096  # writes that are not kept yet
MAX_PENDING_BYTES: Final = 64 * MIB
MAX_ROUND: Final = 1 << 60


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


def epoch_of(view: View) -> tuple[Chain, int]:
    return view.chain, view.epoch


def with_answer(pairs: tuple[tuple[Node, Any], ...], node: Node, value: Any) -> tuple[tuple[Node, Any], ...]:
    """In the order of the nodes, so that the order of arrival leaves no trace."""
    return tuple(
        sorted([*(pair for pair in pairs if pair[0] != node), (node, value)], key=lambda pair: pair[0])
    )


class ArcState:
    """The fields of an arc's core."""

    __slots__ = (
        *("me", "boot", "settings", "machine", "outputs", "now_us", "unsaved"),
        # what is saved
        *("view", "promised", "vote", "rival", "ended"),
        # what this start of the broker knows of the others
        *(
            "lapsed",
            "candidates",
            "broken",
            "round",
            "proposal",
            "attempts",
            "attempt_at",
        ),
        # what is held here: the state of (chain, epoch) after `applied` writes; chain None: nothing
        *("chain", "epoch", "applied", "synced", "last_durable", "whole", "restarted", "absorbed", "part"),
        *("harmed", "log_bytes", "incoming", "offered", "tail", "tail_start", "tail_size", "drop_at"),
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
        self.broken = False  # the present epoch cannot go on
        self.round = 0
        self.proposal: Proposal | None = None
        self.attempts = 0
        self.attempt_at: int | None = None
        self.chain: Chain | None = None
        self.epoch = self.applied = self.synced = self.last_durable = 0
        self.whole = self.restarted = False
        self.harmed = False  # writes behind what is held may be gone: it is read by a rescue alone
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

    def _tell(self, news: Told) -> None:
        self.outputs.append(Tell(news))

    def _row(self) -> Row:
        return Row(self.view, self.promised, self.vote, self.rival, self.ended)

    # What follows from the fields

    def _is_older(self, view: View) -> bool:
        """Whether what is held here is of an earlier epoch of that chain, or of one that it rescued."""
        if self.chain is None:
            return False
        return self.epoch < view.epoch if view.chain == self.chain else view.chain.replaces(self.chain)

    def _is_filled(self, view: View) -> bool:
        """Whether this broker leads the view and all its replicas have installed the state."""
        return self.installing is not None and len(self.installing.done) == len(view.replicas)

    def _is_lapsed(self, view: View) -> bool:
        return self.lapsed is not None and self.lapsed[0] == view.chain and view.epoch <= self.lapsed[1]

    def _spread(self, view: View, others: Iterable[Node]) -> None:
        for node in sorted({*others, *view.electors, *view.replicas, *view.base.replicas} - {self.me}):
            self._send(node, Know(view))

    def _waits_for_answers(self) -> bool:
        unfilled = self.installing is not None and not self.serving
        return bool(self.reading or unfilled or self.pending or self.rival or self._is_left_over())

    def _is_left_over(self) -> bool:
        """Whether this broker has to ask what came after the newest view that it knows: nobody else says so.

        It holds what is of no use once that view has started; or its chain is closed, and it has not heard
        which one takes it in.
        """
        view = self.view
        if view is None or view.stage == STARTED:
            return False
        if view.stage == CLOSED:
            return self.rival is None
        return self.me not in view.replicas and (view.chain == self.chain or self._is_older(view))

    def _is_full(self) -> bool:
        return len(self.pending) >= MAX_PENDING or self.pending_bytes >= MAX_PENDING_BYTES

    # What a part asks of one above it

    def _follow(self, sender: Node, view: View) -> bool:
        """Whether this is now the newest view known here. If it is not, the sender hears of that one."""
        raise NotImplementedError

    def _adopt(self, view: View) -> None:
        """This is the newest view from now on."""
        raise NotImplementedError

    def _write_import(self, closed: View, state: bytes) -> None:
        """Take another chain's state in."""
        raise NotImplementedError
