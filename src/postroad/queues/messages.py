"""What brokers say to each other about one arc, what they save of it, and what its core asks for.

Everything here is a frozen value: it can be encoded, hashed and compared, so that the core's own code can
be explored. A broker is named by its node id.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from postroad.errors import PeerError
from postroad.ring.pastry import ID_BYTES
from postroad.units import GIB, KIB
from postroad.wire.fields import Number

NEW: Final = 0  # the view is agreed; its responsible broker fills the replicas
STARTED: Final = 1  # the replicas are whole; the responsible broker serves
CLOSED: Final = 2  # the chain is over; another one takes its state in

MAX_REPLICAS: Final = 9
MAX_ELECTORS: Final = 31
MAX_REACHED: Final = 1_024  # brokers that a rescue names
MAX_CHAINS: Final = 64  # other chains that are part of a state, or that a broker left
MAX_JOINED: Final = 64 * MAX_CHAINS  # the same with those that are part of these
MAX_WRITE_BYTES: Final = 960 * KIB  # so that it fits a frame
MAX_STATE_BYTES: Final = 4 * GIB
MAX_RECORDS: Final = 1 << 24  # of a log, in what one broker reads of another
MAX_BODIES_BYTES: Final = 640 * KIB  # of a record of bodies: at least a body, and it fits a frame

Node: TypeAlias = Annotated[bytes, Meta(max_length=ID_BYTES)]
Replicas: TypeAlias = Annotated[tuple[Node, ...], Meta(min_length=1, max_length=MAX_REPLICAS)]
Electors: TypeAlias = Annotated[tuple[Node, ...], Meta(min_length=1, max_length=MAX_ELECTORS)]
Reached: TypeAlias = Annotated[tuple[Node, ...], Meta(max_length=MAX_REACHED)]
Data: TypeAlias = Annotated[bytes, Meta(max_length=MAX_WRITE_BYTES)]
StateData: TypeAlias = Annotated[bytes, Meta(max_length=MAX_STATE_BYTES)]
Ballot: TypeAlias = tuple[Number, Node, Number]  # round, proposer, the proposer's start: never used twice
Place: TypeAlias = tuple[Number, Number]  # an epoch and how many of its writes: one state of a chain
NO_BALLOT: Final[Ballot] = (0, b"", 0)


class Chain(msgspec.Struct, frozen=True, array_like=True, gc=False, cache_hash=True):
    """A chain of views. A rescue begins a chain of the same origin with the next generation."""

    generation: Number
    founder: Node
    origin: Node

    def outranks(self, other: Chain) -> bool:
        """Which of two chains goes on when they meet (spec, responsibility 8 and 9)."""
        return (-self.generation, self.founder, self.origin) < (
            -other.generation,
            other.founder,
            other.origin,
        )

    def replaces(self, other: Chain) -> bool:
        """A rescued chain is left at once: nobody closes it."""
        return self.origin == other.origin and self.generation > other.generation


class Base(msgspec.Struct, frozen=True, array_like=True):
    """The last started view: whoever takes over reads one of its replicas."""

    epoch: Number
    replicas: Reached


class View(msgspec.Struct, frozen=True, array_like=True):
    """One link of the chain. Each was decided by the electors of the one before it.

    `replicas` begins with the responsible broker. A rescued view's base is all brokers that were reached.
    """

    chain: Chain
    epoch: Number
    stage: Number
    replicas: Replicas
    electors: Electors
    base: Base
    rescued: bool = False
    into: Chain | None = None  # of a closed view: the chain that takes the state in

    @property
    def responsible(self) -> Node:
        return self.replicas[0]

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands in its chain."""
        return (self.epoch, self.stage)

    @property
    def majority(self) -> int:
        return len(self.electors) // 2 + 1

    def is_older(self, seen: View) -> bool:
        """Whether a consumer that saw the other view refuses deliveries of this one (responsibility 7)."""
        if self.chain == seen.chain:
            return self.epoch < seen.epoch
        return seen.chain.replaces(self.chain) or seen.chain.outranks(self.chain)

    def last_started(self) -> Base:
        """The base of whatever follows this view."""
        return Base(self.epoch, self.replicas) if self.stage == STARTED else self.base


class Held(msgspec.Struct, frozen=True, array_like=True):
    """What a replica holds: the state of an epoch after so many of its writes. Equal values, equal states."""

    chain: Chain
    epoch: Number
    applied: Number
    whole: bool  # nothing that was only in memory is missing
    boot: Number  # the start of the broker that holds it; a copy is read within one


class Vote(msgspec.Struct, frozen=True, array_like=True):
    ballot: Ballot
    value: View


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Marks a write that carries a piece of another chain's state. The last piece takes all of it in."""

    chain: Chain
    offset: Number
    last: bool


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


# Founding and news


class Ask(_Message, frozen=True, tag=1):
    """Which view of the arc do you know? Who knows none does not answer."""


class Know(_Message, frozen=True, tag=3):
    """The newest view that the sender knows: an answer, a refusal, a redirect or a decision."""

    view: View


class Ended(_Message, frozen=True, tag=4):
    """That chain's state is part of this view's chain: leave it."""

    chain: Chain
    view: View


# Agreement: single-decree Paxos among the electors of `view` on the view that follows it


class Prepare(_Message, frozen=True, tag=5):
    view: View
    ballot: Ballot


class Promise(_Message, frozen=True, tag=6):
    """Also the answer of a broker that is no elector: it can be named."""

    ballot: Ballot
    vote: Vote | None


class Accept(_Message, frozen=True, tag=7):
    view: View
    ballot: Ballot
    value: View


class Accepted(_Message, frozen=True, tag=8):
    ballot: Ballot


class Busy(_Message, frozen=True, tag=9):
    """A higher ballot was promised."""

    ballot: Ballot
    promised: Ballot


# Take-over: seal, read, install


class Seal(_Message, frozen=True, tag=10):
    """Refuse every earlier epoch; say what you hold."""

    view: View


class Sealed(_Message, frozen=True, tag=11):
    chain: Chain
    epoch: Number
    held: Held | None


class Fetch(_Message, frozen=True, tag=12):
    """Send what you hold. `since`: the asker has the state of that place, and what came after it will do."""

    view: View
    held: Held
    offset: Number
    since: Place | None = None


class Piece(_Message, frozen=True, tag=13):
    chain: Chain
    epoch: Number
    held: Held
    offset: Number
    total: Number
    data: Data
    since: Place | None = None  # the data are records since that place; None: a state


class Offer(_Message, frozen=True, tag=14):
    """Install the state that was read: whoever holds exactly this goes on with it, others ask for it."""

    view: View
    held: Held | None  # None: the state is empty


class More(_Message, frozen=True, tag=15):
    chain: Chain
    epoch: Number
    offset: Number
    since: Place | None = None  # as in Fetch


class Load(_Message, frozen=True, tag=16):
    view: View
    whole: bool
    offset: Number
    total: Number
    data: Data
    since: Place | None = None  # as in Piece


class Installed(_Message, frozen=True, tag=17):
    chain: Chain
    epoch: Number


# Writes


class Write(_Message, frozen=True, tag=18):
    chain: Chain
    epoch: Number
    number: Number
    payload: Data
    durable: bool
    part: Part | None


class Ack(_Message, frozen=True, tag=19):
    """Every write up to this number is safe here. `gap`: what follows it did not come; send it again."""

    chain: Chain
    epoch: Number
    number: Number
    gap: bool


class Refused(_Message, frozen=True, tag=20):
    """The sender was started anew in this epoch and takes no further part in it."""

    view: View


class Synced(_Message, frozen=True, tag=21):
    """To oneself, once the log has it."""

    chain: Chain
    epoch: Number
    number: Number


# Bodies on disk, of a state that is being copied


class Want(_Message, frozen=True, tag=22):
    """Send that record of bodies, which your state refers to."""

    tick: Number


class Bodies(_Message, frozen=True, tag=23):
    """A record of bodies; empty: it is not here any more."""

    tick: Number
    data: Annotated[bytes, Meta(max_length=MAX_BODIES_BYTES)]


Message: TypeAlias = (
    Ask | Know | Ended | Prepare | Promise | Accept | Accepted | Busy | Seal | Sealed | Fetch
    | Piece | Offer | More | Load | Installed | Write | Ack | Refused | Synced | Want | Bodies
)  # fmt: skip


# What a broker saves


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Of each arc, replaced as a whole: for as long as the broker's id lives."""

    view: View | None
    promised: Ballot
    vote: Vote | None
    rival: View | None
    ended: tuple[Chain, ...]


class Mark(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Log record: from here on the state is that of an epoch. With a state, nothing before it counts."""

    chain: Chain
    epoch: Number
    applied: Number
    whole: bool
    state: StateData | None


class Entry(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Log record: a write of the epoch of the last mark."""

    number: Number
    payload: Data
    part: Part | None


Record: TypeAlias = Mark | Entry
Records: TypeAlias = Annotated[tuple[Record, ...], Meta(max_length=MAX_RECORDS)]


class State(msgspec.Struct, frozen=True, array_like=True):
    """What is replicated: the state machine's snapshot and which other chains are part of it."""

    absorbed: Annotated[tuple[Chain, ...], Meta(max_length=MAX_JOINED)]
    part: tuple[Chain, StateData] | None
    machine: StateData


# What the core asks for


class Send(msgspec.Struct, frozen=True):
    """To oneself too: the driver hands that back at once."""

    to: Node
    message: Message


class Serving(msgspec.Struct, frozen=True):
    """This broker is responsible and its start is decided: it may write."""

    view: View


class Stopped(msgspec.Struct, frozen=True):
    """It serves no longer. What is not kept by now has an unknown outcome: send again under the same id."""

    view: View


class Kept(msgspec.Struct, frozen=True):
    """Every replica has the write. `answer` is what the state machine returned."""

    epoch: int
    number: int
    answer: object


class Stalled(msgspec.Struct, frozen=True):
    """A write waits for longer than it should; no new ones are taken until it is kept."""

    number: int


class Moved(msgspec.Struct, frozen=True):
    """The newest view known has changed."""

    view: View


Told: TypeAlias = Serving | Stopped | Kept | Stalled | Moved


class Tell(msgspec.Struct, frozen=True):
    told: Told


class Save(msgspec.Struct, frozen=True):
    """Replace the arc's row; `then` goes out once that is durable."""

    row: Row
    then: tuple[Output, ...]


class Append(msgspec.Struct, frozen=True):
    """Append to the replica's log, in order; `then` goes out once all of it is durable.

    `replaces`: what the log had before may be dropped, after these records are durable.
    """

    records: tuple[Record, ...]
    replaces: bool
    then: tuple[Output, ...]


class Gather(msgspec.Struct, frozen=True):
    """That state may refer to bodies on the disk of `source`: have them here, then call `gathered` with the
    state as it is here. Of a view that is closed, the state has all bodies in it then."""

    view: View
    source: Node
    whole: bool
    state: bytes


Output: TypeAlias = Send | Tell | Save | Append | Gather

_ENCODER: Final = msgspec.msgpack.Encoder()
_MESSAGES: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)
_STATES: Final = msgspec.msgpack.Decoder(State)
_RECORDS: Final[msgspec.msgpack.Decoder[tuple[Record, ...]]] = msgspec.msgpack.Decoder(Records)


def encode(value: Message | Row | Record | State | tuple[Record, ...]) -> bytes:
    return _ENCODER.encode(value)


def decode(data: bytes) -> Message:
    """PeerError unless it is a message."""
    try:
        return _MESSAGES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"a message about an arc of {len(data)} bytes cannot be read: {error}") from error


def decode_state(data: bytes) -> State:
    """PeerError unless it is a state."""
    try:
        return _STATES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"the state of an arc of {len(data)} bytes cannot be read: {error}") from error


def decode_records(data: bytes) -> tuple[Record, ...]:
    """PeerError unless they are records of a log."""
    try:
        return _RECORDS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"records of an arc of {len(data)} bytes cannot be read: {error}") from error
