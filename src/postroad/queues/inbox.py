"""The replicated state machine of an arc's inboxes (spec Q3, Q5 to Q8; queues paper, sections 2.2 to 2.6).

The responsible broker writes operations, every replica applies them; equal states and equal operations give
equal states and equal answers. So nothing here reads a clock: an operation carries its time. Express messages
are not here: they live in the memory of the responsible broker.

**Sources.** A source is a session of an application: `source_of` puts the session in front of the name and
the principal behind it, and nothing else in here looks into it. A session is no secret, since it is in the
ids of messages: what another principal sends under it is of another source. Of each (chain of first sending,
source) an inbox remembers the last transactional id that was kept or rejected; that outlives the messages and
takes the place of Fig. 3 at brokers. Nothing may pass an earlier message: a put names the id its source sent
before it (`after`), and is answered `gap` while that one is not here. What is `full` leaves no trace, so that
it can be sent again under its id. Where another chain was taken in, its sources go on under it, also with a
message that was sent before anybody told the source which chain that is: a session is one source, whatever
the chain. A session that ended in good order is forgotten a minute after its last message is gone, one that
vanished after a day. So a put comes after nothing (`after` is 0) when all that its source sent before is
kept. An inbox that nobody owns is forgotten with its last source, if nothing is in it and nobody receives
from it; one with an owner stays until it is deleted, since the name is its owner's.

**Consumers.** A source sticks to one consumer of an inbox for as long as that one stays, so several consumers
keep the order per source. An accept is given to one consumer, and to the same one again however often it
asks; anybody else gets `taken`. Transactional messages of a source are accepted in their order; one that is
delayed or was rejected holds up those behind it. Priority counts between sources. Recoverable messages have
no order; one is a duplicate only while its first copy is here.

**Transactions over several arcs.** One arc is the home of the transaction: its record of the decision is the
truth. (1) Each arc is written `Stage`: the messages are checked, have their room and are invisible; their
sources' later messages wait behind them. (2) When all arcs have kept that, the home is written `Decide`
commit; the first decision written there stands, whoever asks. (3) Each arc is written `Resolve` with it: the
messages appear, or nothing of them is left, and they may be sent again. A broker whose arc holds a staged
transaction for too long asks the home to `Decide` abort, and resolves by the answer; so a source that dies
in between blocks nobody for longer than that. (4) When every arc has resolved, the home is written `Forget`.
A participant that was not reached keeps the decision alive, never the other way round.

**Bounds.** Messages and bytes of an inbox and of the arc, sources, consumers, dead letters, staged
transactions and decisions have limits; what would go over is answered `full`, and whoever sent it slows down.

**Bodies.** The body of a message, its payload and attributes, may be on the disk of its replica: the message
is a `Stored` one then, with the extent of its body. Nothing that is replicated depends on where a body is,
and no operation looks into one; which bodies leave memory is each replica's own affair (`bodies`).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from postroad.errors import BugError, PeerError, UsageError
from postroad.ids import MAX_PRINCIPAL, SESSION_BYTES
from postroad.links.access import owning
from postroad.queues.messages import MAX_STATE_BYTES, Chain
from postroad.units import GIB, KIB, SECOND_US
from postroad.wire.fields import Broker, Name, Number, Text, Word

MAX_NAME_BYTES: Final = 255
MAX_PAYLOAD_BYTES: Final = 512 * KIB
MAX_TOGETHER: Final = 256  # messages of one put or of one arc's part of a transaction
MAX_INBOXES: Final = 100_000
MAX_SOURCES: Final = 200_000  # of an inbox, per chain of first sending
MAX_CONSUMERS: Final = 1_000
MAX_REJECTED: Final = 64  # ids per source whose rejection can be repeated
MAX_ACCEPTS: Final = (
    1_024  # of an inbox, that can be repeated to their consumer; then only the last per source
)
MAX_STAGED: Final = 1_024
MAX_DECISIONS: Final = 65_536
MAX_PRIORITY: Final = 9
MAX_ATTEMPTS: Final = 1 << 30  # that are counted: a snapshot says no more
MESSAGE_OVERHEAD_BYTES: Final = 256
MIN_BODY_BYTES: Final = 128  # a smaller body takes no less memory when it is on disk
RECORD_BYTES: Final = 128  # of a source or an accept in a snapshot
FORGET_US: Final = 86_400 * SECOND_US  # a source that was silent for so long and has nothing here
ENDED_US: Final = 60 * SECOND_US  # the same of one that ended: copies of what it sent may still be under way
_SESSION_DIGITS: Final = 2 * SESSION_BYTES
_BEHIND_NAME: Final = "\0"  # in a source, before its principal: no name has it
MAX_ATTRIBUTES_BYTES: Final = 65_535
MAX_OPERATIONS: Final = 65_536  # of one write
MAX_ROWS: Final = MAX_STATE_BYTES // MESSAGE_OVERHEAD_BYTES  # of one table in a snapshot

Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
RecordNumber: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 62)]  # of bodies
Attempts: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_ATTEMPTS)]
Priority: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_PRIORITY)]
SourceName: TypeAlias = Annotated[str, Meta(max_length=_SESSION_DIGITS + MAX_NAME_BYTES + 1 + MAX_PRINCIPAL)]
Payload: TypeAlias = Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)]
Attributes: TypeAlias = Annotated[bytes, Meta(max_length=MAX_ATTRIBUTES_BYTES)]
Transaction: TypeAlias = Annotated[bytes, Meta(max_length=64)]  # its name
_ROWS: Final = Meta(max_length=MAX_ROWS)
Numbers: TypeAlias = Annotated[list[Number], _ROWS]


class Kind(msgspec.Struct, frozen=True):
    """A row of the paper's table 1."""

    replicated: bool
    acknowledged: bool
    ordered: bool
    durable: bool  # synced on every replica before it counts as kept


KINDS: Final = {
    ("express", True): Kind(False, True, False, False),
    ("express", False): Kind(False, False, False, False),
    ("recoverable", True): Kind(True, True, False, False),
    ("recoverable", False): Kind(True, False, False, False),
    ("transactional", True): Kind(True, True, True, True),
}


def kind_of(name: str, *, reliable: bool) -> Kind:
    kind = KINDS.get((name, reliable))
    if kind is None:
        raise UsageError(f"there is no {'reliable' if reliable else 'unreliable'} kind of message {name!r}")
    return kind


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the configuration of the network: replicas with other limits would come to other states."""

    inbox_messages: int = 100_000
    inbox_bytes: int = GIB
    arc_bytes: int = 4 * GIB
    dead_letters: int = 10_000
    attempts: int = 5  # then a rejected message is a dead letter


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    inbox: Name
    chain: Chain
    source: SourceName
    id: Number
    ordered: bool  # transactional
    payload: Payload
    after: Number = 0  # the id of the source's transactional message before this one, 0 if there is none
    priority: Priority = 4
    not_before_us: Number = 0
    expires_us: Number = 0  # 0: never
    attempts: Attempts = 0
    reason: Text = ""  # of a dead letter
    attributes: Attributes = b""
    sent_us: Number = 0
    entry: Broker = 0  # the broker that took it from its sender; 0: a version before did

    @property
    def size(self) -> int:
        return len(self.payload) + len(self.attributes) + MESSAGE_OVERHEAD_BYTES


class Extent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a body is on disk: which record of bodies, where in it, and how long its two parts are."""

    tick: RecordNumber
    offset: Count
    payload: Count
    attributes: Count

    @property
    def size(self) -> int:
        return self.payload + self.attributes


class Stored(Message, frozen=True, array_like=True, gc=False):
    """A message whose payload and attributes are on disk, and empty here. In a snapshot, any message."""

    extent: Extent | None = None

    @property
    def size(self) -> int:
        body = len(self.payload) + len(self.attributes) if self.extent is None else self.extent.size
        return body + MESSAGE_OVERHEAD_BYTES


Messages: TypeAlias = Annotated[tuple[Message, ...], Meta(min_length=1, max_length=MAX_TOGETHER)]
Key: TypeAlias = tuple[Chain, SourceName, Number]  # chain of first sending, source, id
Keys: TypeAlias = Annotated[tuple[Key, ...], Meta(max_length=MAX_TOGETHER)]


class _Operation(msgspec.Struct, frozen=True, array_like=True):
    pass


class Put(_Operation, frozen=True, tag=1):
    """Messages for one inbox or several. `together`: all of them or none; else each has its own outcome."""

    messages: Messages
    now_us: Number
    together: bool = True


class Accept(_Operation, frozen=True, tag=2):
    inbox: Name
    key: Key
    consumer: Name
    now_us: Number


class Reject(_Operation, frozen=True, tag=3):
    """The consumer does not take it: again at `not_before_us`, or `dead` at once.

    `attempt`: which one it was, so that a rejection that is said twice counts once; 0: whichever.
    """

    inbox: Name
    key: Key
    consumer: Name
    reason: Text
    dead: bool
    not_before_us: Number
    now_us: Number
    attempt: Count = 0


class Refuse(_Operation, frozen=True, tag=4):
    """The broker does not take a message, for good: its id counts as sent."""

    inbox: Name
    key: Key
    now_us: Number


class Join(_Operation, frozen=True, tag=5):
    inbox: Name
    consumer: Name
    principal: Name
    admin: bool
    now_us: Number


class Leave(_Operation, frozen=True, tag=6):
    """`delivered`: what the consumer may have worked on when it was lost was tried once more."""

    inbox: Name
    consumer: Name
    delivered: Keys
    now_us: Number


class Sweep(_Operation, frozen=True, tag=7):
    """What has expired by now becomes a dead letter; sources that were silent for long are forgotten."""

    now_us: Number


class Revive(_Operation, frozen=True, tag=8):
    """Dead letters of an inbox are sent again, oldest first, or dropped."""

    inbox: Name
    count: Number
    drop: bool
    now_us: Number


class Stage(_Operation, frozen=True, tag=9):
    transaction: Transaction
    home: Transaction  # a key in the arc whose record decides
    messages: Messages
    now_us: Number


class Decide(_Operation, frozen=True, tag=10):
    transaction: Transaction
    commit: bool
    now_us: Number


class Resolve(_Operation, frozen=True, tag=11):
    transaction: Transaction
    commit: bool
    now_us: Number


class Forget(_Operation, frozen=True, tag=12):
    transaction: Transaction


class End(_Operation, frozen=True, tag=13):
    """The source sends nothing more to this inbox."""

    inbox: Name
    source: SourceName
    now_us: Number


class AcceptEach(_Operation, frozen=True, tag=14):
    """As an Accept of each, in turn."""

    inbox: Name
    keys: Keys
    consumer: Name
    now_us: Number


class Delete(_Operation, frozen=True, tag=15):
    """The inbox is no more, with all that is in it."""

    inbox: Name
    now_us: Number


class Own(_Operation, frozen=True, tag=16):
    """The name is that principal's from now on."""

    inbox: Name
    owner: Name
    now_us: Number


Operation: TypeAlias = (
    Put | Accept | Reject | Refuse | Join | Leave | Sweep | Revive | Stage | Decide | Resolve | Forget | End
    | AcceptEach | Delete | Own
)  # fmt: skip
Operations: TypeAlias = Annotated[tuple[Operation, ...], Meta(max_length=MAX_OPERATIONS)]


class Answer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`outcome` is one that the operation's method names; `last`: of a gap, the last id that is here."""

    outcome: Word
    last: Number = 0
    each: Answers = ()  # where there are several, unless all have the same outcome


Answers: TypeAlias = Annotated[tuple[Answer, ...], Meta(max_length=MAX_TOGETHER)]
KEPT: Final = Answer("kept")
ACCEPTED: Final = Answer("accepted")


class Source(msgspec.Struct):
    """What outlives the messages of one source in one inbox."""

    last: Number = 0  # transactional id that was kept or rejected
    accepted: Number = 0  # the last one that was settled, and by whom
    accepted_by: Name = ""
    consumer: Name = ""  # that the source sticks to
    touched_us: Number = 0
    rejected: Numbers = msgspec.field(default_factory=list)
    waiting: Numbers = msgspec.field(default_factory=list)  # numbers of its transactional messages here
    others: Number = 0  # recoverable messages here
    staged: Number = 0  # messages of undecided transactions; nothing may pass them
    ended: bool = False  # it sends nothing more


class Inbox(msgspec.Struct):
    owner: str = ""  # the principal that first received under this name
    messages: dict[int, Message] = msgspec.field(default_factory=dict)  # by number of arrival, increasing
    numbers: dict[Key, int] = msgspec.field(default_factory=dict)  # the inverse
    sources: dict[tuple[Chain, str], Source] = msgspec.field(default_factory=dict)
    consumers: dict[str, int] = msgspec.field(default_factory=dict)  # how many sources stick to each
    accepts: dict[Key, str] = msgspec.field(default_factory=dict)  # the last MAX_ACCEPTS, oldest first
    dead: list[Message] = msgspec.field(default_factory=list)
    # Numbers by the consumer that their sources stick to ("": to nobody) and by priority, increasing.
    lanes: dict[str, dict[int, dict[int, None]]] = msgspec.field(default_factory=dict)
    next_number: int = 1
    bytes: int = 0
    counts_for: str = (
        ""  # the principal: its owner; before it has one, who sent to it first, as far as is known
    )


class Snapshot(msgspec.Struct, array_like=True):
    """Dictionaries as lists, in their order: what depends on it goes on alike on every replica."""

    inboxes: Annotated[list[tuple[Name, _InboxSnapshot]], _ROWS]
    staged: Annotated[list[tuple[Transaction, Stage]], _ROWS]
    decisions: Annotated[list[tuple[Transaction, tuple[bool, Number]]], _ROWS]
    chains: Annotated[list[Chain], _ROWS] = []
    oldest: Number = 0  # record of bodies that it refers to; 0: to none


class _InboxSnapshot(msgspec.Struct, array_like=True):
    owner: Name
    messages: Annotated[list[tuple[Number, Stored]], _ROWS]
    sources: Annotated[list[tuple[Chain, SourceName, Source]], _ROWS]
    consumers: Annotated[list[Name], _ROWS]
    accepts: Annotated[list[tuple[Key, Name]], _ROWS]
    dead: Annotated[list[Stored], _ROWS]
    next_number: Number


class _Oldest(msgspec.Struct, array_like=True):
    """A snapshot of which only the last field is looked at."""

    inboxes: msgspec.Raw
    staged: msgspec.Raw
    decisions: msgspec.Raw
    chains: msgspec.Raw = msgspec.Raw()
    oldest: Number = 0


_ENCODER: Final = msgspec.msgpack.Encoder()
_LIST: Final = 0xDD  # of MessagePack: a list with a length of four bytes
_LIST_HEAD: Final = struct.Struct(">BI")
_OPERATIONS: Final[msgspec.msgpack.Decoder[tuple[Operation, ...]]] = msgspec.msgpack.Decoder(Operations)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_SNAPSHOT: Final = msgspec.msgpack.Decoder(Snapshot)
_OLDEST: Final = msgspec.msgpack.Decoder(_Oldest)


def encode(*operations: Operation) -> bytes:
    """What is written at once: the operations are performed in their order."""
    return join(len(operations), [encode_each(operations)])


def encode_each(operations: Iterable[Operation]) -> bytes:
    """A part of what is written at once."""
    return b"".join(map(_ENCODER.encode, operations))


def join(count: int, parts: Iterable[bytes]) -> bytes:
    """Parts with so many operations in all, as one write: the head of a list, and what is in it."""
    return _LIST_HEAD.pack(_LIST, count) + b"".join(parts)


def source_of(session: bytes, name: str, principal: str) -> str:
    """`principal`: whose it is, "" for nobody in particular."""
    return f"{session.hex()}{name}{_BEHIND_NAME}{principal}" if principal else session.hex() + name


def name_of(source: str) -> str:
    return source[_SESSION_DIGITS:].partition(_BEHIND_NAME)[0]


def principal_of(source: str) -> str:
    """Who sent it, "" if nobody in particular did."""
    return source.partition(_BEHIND_NAME)[2]


def session_of(source: str) -> bytes:
    """Empty if the source does not begin with one: whoever sent a key or a message may have made it up."""
    try:
        return bytes.fromhex(source[:_SESSION_DIGITS])
    except ValueError:
        return b""


def check_message(message: Message) -> None:
    """UsageError unless every field is within its bounds."""
    for what, name in (("inbox", message.inbox), ("source", name_of(message.source))):
        size = len(name.encode())
        if not 1 <= size <= MAX_NAME_BYTES:
            raise UsageError(f"the name of an {what} has 1 to {MAX_NAME_BYTES} bytes, not {size}")
    size = len(message.payload) + len(message.attributes)
    if size > MAX_PAYLOAD_BYTES:
        raise UsageError(f"a message of {size} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
    if not 0 <= message.priority <= MAX_PRIORITY:
        raise UsageError(f"a priority is from 0 to {MAX_PRIORITY}, not {message.priority}")
    if not 0 <= message.after < message.id:
        raise UsageError(f"ids of a source increase from 1: {message.id} cannot come after {message.after}")


class Inboxes:
    """All inboxes of one arc, on one replica. The one method that changes them is `apply`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.inboxes: dict[str, Inbox] = {}
        self.staged: dict[bytes, Stage] = {}
        self.decisions: dict[bytes, tuple[bool, int]] = {}  # whether it commits, and since when
        self.chains: list[Chain] = []  # that were taken in
        self.bytes = 0  # of all messages, dead letters and staged ones among them
        self.stored: dict[str, int] = {}  # of that, by the principal that sent it; of nobody's nothing is
        self.names: dict[str, int] = {}  # how many inboxes count for each principal
        self.spilled = 0  # of that, bodies that are on disk
        self.freed = 0  # bodies on disk that nobody needs any more, since somebody last looked
        self.live: dict[int, int] = {}  # records of bodies on disk -> how many bytes of them are needed
        self._expected: tuple[bytes, Sequence[Operation]] | None = None

    # The interface of a replicated machine

    def expect(self, payload: bytes, operations: Sequence[Operation]) -> None:
        """This is applied next, and was made of these: it need not be decoded."""
        self._expected = (payload, operations)

    def apply(self, payload: bytes) -> tuple[Answer, ...]:
        """An answer for each operation; PeerError, and nothing is changed, if these are none."""
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] is payload:
            return tuple([self.perform(operation) for operation in expected[1]])
        return tuple([self.perform(operation) for operation in decode_operations(payload)])

    def perform(self, operation: Operation) -> Answer:
        match operation:
            case Put():
                return self._put(operation)
            case Accept():
                return self._accept(operation)
            case Reject():
                return self._reject(operation)
            case Refuse():
                return self._refuse(operation)
            case Join():
                return self._join(operation)
            case Leave():
                return self._leave(operation)
            case Sweep():
                return self._sweep(operation)
            case Revive():
                return self._revive(operation)
            case Stage():
                return self._stage(operation)
            case Decide():
                return self._decide(operation)
            case Resolve():
                return self._resolve(operation)
            case Forget():
                self.decisions.pop(operation.transaction, None)
                return Answer("done")
            case End():
                return self._end(operation)
            case AcceptEach():
                return self._accept_each(operation)
            case Delete():
                return self._delete(operation)
            case Own():
                return self._own(operation)

    def snapshot(self) -> bytes:
        inboxes = [
            (
                name,
                _InboxSnapshot(
                    inbox.owner,
                    list(inbox.messages.items()),  # type: ignore[arg-type]  # a Message reads as a Stored one
                    [(chain, source, record) for (chain, source), record in inbox.sources.items()],
                    list(inbox.consumers),
                    list(inbox.accepts.items()),
                    inbox.dead,  # type: ignore[arg-type]
                    inbox.next_number,
                ),
            )
            for name, inbox in self.inboxes.items()
        ]
        oldest = min(self.live, default=0)
        staged, decisions = list(self.staged.items()), list(self.decisions.items())
        return _ENCODER.encode(Snapshot(inboxes, staged, decisions, self.chains, oldest))

    def size(self) -> int:
        records = sum(len(inbox.sources) + len(inbox.accepts) for inbox in self.inboxes.values())
        return self.bytes + records * RECORD_BYTES

    def install(self, snapshot: bytes) -> None:
        read = decode_snapshot(snapshot) if snapshot else Snapshot([], [], [], [])
        if next(iter(extents_of(read)), 0) != read.oldest:
            raise PeerError("a snapshot of inboxes refers to other bodies on disk than it says")
        self.inboxes, self.bytes, self.spilled, self.live = {}, 0, 0, {}
        self.stored, self.names = {}, {}
        self.staged, self.decisions, self.chains = dict(read.staged), dict(read.decisions), read.chains
        for name, saved in read.inboxes:
            messages = {number: _settled(message) for number, message in saved.messages}
            inbox = self.inboxes[name] = Inbox(saved.owner, messages)
            inbox.dead = [_settled(message) for message in saved.dead]
            for message in (*messages.values(), *inbox.dead):
                self._hold(message)
            inbox.numbers = {_key(message): number for number, message in saved.messages}
            inbox.sources = {(chain, source): record for chain, source, record in saved.sources}
            for number, message in saved.messages:
                source = inbox.sources[message.chain, message.source]
                _lane(inbox, source, message.priority)[number] = None
            inbox.consumers = dict.fromkeys(saved.consumers, 0)
            for record in inbox.sources.values():
                if record.consumer:
                    inbox.consumers[record.consumer] += 1
            inbox.accepts, inbox.next_number = dict(saved.accepts), saved.next_number
            for message in (*inbox.messages.values(), *inbox.dead):
                inbox.bytes += message.size
                self._count(message.source, message.size)
            self._assign(inbox)
        for stage in self.staged.values():
            for message in stage.messages:
                self._count(message.source, message.size)

    def absorb(self, chain: Chain, snapshot: bytes) -> None:
        """Another chain's inboxes, as one write; its consumers join anew.

        Ids are compared per chain of first sending. Both have a table of one chain only if both took it in.
        """
        read = decode_snapshot(snapshot) if snapshot else Snapshot([], [], [], [])
        if extents_of(read):
            raise PeerError("a chain is to be taken in whose bodies are on another broker's disk")
        self.chains.append(chain)
        self.chains += [each for each in read.chains if each not in self.chains]
        for name, saved in read.inboxes:
            inbox = self.inboxes.setdefault(name, Inbox())
            inbox.owner = inbox.owner or saved.owner
            for first_chain, source, record in saved.sources:
                mine = inbox.sources.setdefault((first_chain, source), Source())
                if record.accepted > mine.accepted:
                    mine.accepted, mine.accepted_by = record.accepted, record.accepted_by
                mine.last, mine.touched_us = (
                    max(mine.last, record.last),
                    max(mine.touched_us, record.touched_us),
                )
                mine.rejected = (mine.rejected + record.rejected)[-MAX_REJECTED:]
                mine.staged += record.staged
                mine.ended |= record.ended
            for _, message in saved.messages:
                if _key(message) not in inbox.numbers:
                    self._insert(inbox, _settled(message), inbox.sources[message.chain, message.source])
            for key, consumer in saved.accepts:
                _remember(inbox, key, consumer)
            inbox.dead += [_settled(message) for message in saved.dead]
            for letter in saved.dead:
                inbox.bytes += letter.size
                self._count(letter.source, letter.size)
            self._assign(inbox)
        for transaction, stage in read.staged:
            self.staged[transaction] = stage
            for part in stage.messages:
                self._count(part.source, part.size)
        self.decisions |= dict(read.decisions)

    # Reading

    def ready(
        self,
        name: str,
        consumer: str,
        now_us: int,
        limit: int,
        *,
        held: Container[Key] = (),
        end: int = 1 << 62,
    ) -> list[Message]:
        """What this consumer may be given now, in the order of delivery: nothing that it has (`held`), and
        nothing that arrived under the number `end` or a later one."""
        inbox = self.inboxes.get(name)
        if inbox is None or consumer not in inbox.consumers:
            return []
        chosen: list[Message] = []
        behind: dict[tuple[Chain, str], int] = {}  # how many of a source's transactional ones are chosen
        lanes = inbox.lanes.get(consumer, {})
        for number in (number for priority in sorted(lanes, reverse=True) for number in lanes[priority]):
            message = inbox.messages[number]
            owner = (message.chain, message.source)
            source = inbox.sources[owner]
            if message.not_before_us > now_us or _is_expired(message, now_us):
                continue
            if message.ordered:
                before = behind.get(owner, 0)
                if source.waiting[before] != number:
                    continue
                behind[owner] = before + 1
            if number >= end or _key(message) in held:
                continue
            chosen.append(message)
            if len(chosen) == limit:
                break
        return chosen

    def knows(self, message: Message) -> bool:
        """Whether it was kept or rejected before."""
        message = self._home(message)
        return self._outcome(self.inboxes.get(message.inbox), message).outcome in ("known", "rejected")

    def fate(self, name: str, key: Key) -> str:
        """What became of a message that was kept: `waits`, `accepted`, or `gone` without that."""
        inbox = self.inboxes.get(name)
        if inbox is None:
            return "gone"
        if key in inbox.numbers:
            return "waits"
        if key in inbox.accepts:
            return "accepted" if inbox.accepts[key] else "gone"
        source = inbox.sources.get((key[0], key[1]))
        if source is None or key[2] > source.accepted or any(_key(dead) == key for dead in inbox.dead):
            return "gone"
        return "accepted"

    def behind(self, name: str, key: Key) -> list[Key]:
        """The transactional messages of its source that wait behind this one."""
        inbox = self.inboxes.get(name)
        source = None if inbox is None else inbox.sources.get((key[0], key[1]))
        if inbox is None or source is None:
            return []
        waiting = [_key(inbox.messages[number]) for number in source.waiting]
        return [each for each in waiting if each[2] > key[2]]

    # What principals have

    def _count(self, source: str, size: int) -> None:
        """So many bytes of that source more are here, or fewer."""
        self.bytes += size
        if _BEHIND_NAME in source:
            principal = principal_of(source)
            self.stored[principal] = self.stored.get(principal, 0) + size
            if not self.stored[principal]:
                del self.stored[principal]

    def _assign(self, inbox: Inbox) -> None:
        """It counts for its owner, or for whoever sent to it first."""
        first = next(iter(inbox.sources), None)
        maker = inbox.owner or inbox.counts_for or ("" if first is None else principal_of(first[1]))
        if maker != inbox.counts_for:
            self._count_name(inbox.counts_for, -1)
            self._count_name(maker, 1)
            inbox.counts_for = maker

    def _count_name(self, principal: str, more: int) -> None:
        """Names of nobody in particular are not counted."""
        if principal:
            self.names[principal] = self.names.get(principal, 0) + more
            if not self.names[principal]:
                del self.names[principal]

    def _open(self, name: str, source: str) -> Inbox:
        """The inbox, made if there is none."""
        inbox = self.inboxes.get(name)
        if inbox is None:
            inbox = self.inboxes[name] = Inbox()
            inbox.counts_for = principal_of(source)
            self._count_name(inbox.counts_for, 1)
        return inbox

    # Bodies on disk

    def _hold(self, message: Message) -> None:
        if isinstance(message, Stored) and message.extent is not None:
            tick, size = message.extent.tick, message.extent.size
            self.live[tick] = self.live.get(tick, 0) + size
            self.spilled += size

    def _release(self, message: Message) -> None:
        if isinstance(message, Stored) and message.extent is not None:
            tick, size = message.extent.tick, message.extent.size
            self.live[tick] -= size
            if not self.live[tick]:
                del self.live[tick]
            self.spilled -= size
            self.freed += size

    def newest(self, wanted: int) -> list[tuple[str, Message]]:
        """Messages with so many bytes of bodies in memory, or all there are: the newest ones of the
        largest inboxes, then their dead letters."""
        chosen: list[tuple[str, Message]] = []
        for name, inbox in sorted(self.inboxes.items(), key=lambda each: -each[1].bytes):
            for message in itertools.chain(reversed(inbox.messages.values()), reversed(inbox.dead)):
                if wanted <= 0:
                    return chosen
                size = len(message.payload) + len(message.attributes)
                if size >= MIN_BODY_BYTES:
                    chosen.append((name, message))
                    wanted -= size
        return chosen

    def move_out(self, moved: Iterable[tuple[str, Message, Extent]]) -> None:
        """These bodies are on disk now. Of a message that has changed meanwhile the body stays in memory."""
        dead: dict[str, dict[int, Message]] = {}  # of an inbox, what became of its dead letters
        for name, message, extent in moved:
            inbox = self.inboxes.get(name)
            if inbox is None:
                continue
            stored = _at_rest(message, extent)
            number = inbox.numbers.get(_key(message))
            if number is not None and inbox.messages[number] is message:
                inbox.messages[number] = stored
                self._hold(stored)
            else:
                dead.setdefault(name, {})[id(message)] = stored
        for name, stored_by_id in dead.items():
            inbox = self.inboxes[name]
            for place, message in enumerate(inbox.dead):
                letter = stored_by_id.get(id(message))
                if letter is not None:
                    inbox.dead[place] = letter
                    self._hold(letter)

    def bring_back(self, tick: int, record: bytes) -> None:
        """Of that record of bodies whatever is needed is in memory again."""
        for inbox in self.inboxes.values():
            for number, message in inbox.messages.items():
                if _extent(message, tick) is not None:
                    self._release(message)
                    inbox.messages[number] = with_body(message, record)
            for place, message in enumerate(inbox.dead):
                if _extent(message, tick) is not None:
                    self._release(message)
                    inbox.dead[place] = with_body(message, record)

    def depth(self, name: str) -> int:
        inbox = self.inboxes.get(name)
        return 0 if inbox is None else len(inbox.messages)

    def undecided(self, before_us: int) -> list[Stage]:
        """Transactions that were staged before that time: their home is to be asked."""
        return [stage for stage in self.staged.values() if stage.now_us < before_us]

    # Sending

    def _put(self, operation: Put) -> Answer:
        """`kept`, `known` (it was kept before), `rejected` (it was refused before), `gap`, `full`; `each`."""
        if not operation.together:
            return self._put_each(operation.messages, operation.now_us)
        messages = tuple(map(self._home, operation.messages))
        answer = self._admit(messages)
        if answer.outcome != "kept":
            return answer
        for message in messages:
            inbox = self._open(message.inbox, message.source)
            if self._outcome(inbox, message).outcome == "kept":
                self._keep(inbox, message, operation.now_us)
        return answer

    def _home(self, message: Message) -> Message:
        """Under the chain that its source is known by here."""
        inbox = self.inboxes.get(message.inbox)
        if self.chains and inbox is not None and (message.chain, message.source) not in inbox.sources:
            for chain in self.chains:
                if (chain, message.source) in inbox.sources:
                    return replace(message, chain=chain)
        return message

    def _put_each(self, messages: tuple[Message, ...], now_us: int) -> Answer:
        """Most messages follow one of the same source: they are put as a run."""
        answers: list[Answer] = []
        position = 0
        while position < len(messages):
            count = self._put_run(messages, position, now_us)
            if count:
                answers += [KEPT] * count
            else:
                answers.append(self._put_one(messages[position], now_us))
                count = 1
            position += count
        if answers.count(KEPT) == len(answers):
            return KEPT
        return Answer("each", 0, tuple(answers))

    def _put_run(self, messages: tuple[Message, ...], start: int, now_us: int) -> int:
        """Put as many messages of one source as are the next ones of it, and have room; how many it were."""
        first = messages[start]
        name, source_name, priority = first.inbox, first.source, first.priority
        inbox = self.inboxes.get(name)
        source = None if inbox is None else inbox.sources.get((first.chain, source_name))
        if inbox is None or source is None or source.staged or not first.ordered:
            return 0
        chain, last, number, limits = first.chain, source.last, inbox.next_number, self.limits
        room = min(limits.inbox_bytes - inbox.bytes, limits.arc_bytes - self.bytes)
        most = max(0, limits.inbox_messages - len(inbox.messages))
        kept, numbers, lane = inbox.messages, inbox.numbers, None
        size = count = 0
        for message in messages[start : start + most]:
            more = len(message.payload) + len(message.attributes) + MESSAGE_OVERHEAD_BYTES
            if (
                not message.after <= last < message.id
                or size + more > room
                or message.source != source_name
                or message.inbox != name
                or message.priority != priority
                or not message.ordered
                or message.chain != chain
            ):
                break
            if lane is None:
                _stick(inbox, source)
                lane = _lane(inbox, source, priority)
            last = message.id
            kept[number] = message
            numbers[chain, source_name, last] = number
            lane[number] = None
            size += more
            number += 1
            count += 1
        if count:
            source.waiting.extend(range(inbox.next_number, number))
            source.touched_us, source.ended, source.last = now_us, False, last
            inbox.next_number = number
            inbox.bytes += size
            self._count(source_name, size)
        return count

    def _put_one(self, message: Message, now_us: int) -> Answer:
        if self.chains:
            message = self._home(message)
        inbox = self.inboxes.get(message.inbox)
        owner = (message.chain, message.source)
        answer = self._outcome(inbox, message)
        if answer.outcome != "kept":
            return answer
        new = {message.inbox: {owner}} if inbox is None or owner not in inbox.sources else {}
        if self._is_full({message.inbox: (1, message.size)}, new):
            return Answer("full")
        self._keep(self._open(message.inbox, message.source), message, now_us)
        return answer

    def _admit(self, messages: tuple[Message, ...]) -> Answer:
        """What becomes of all of them. Those before a message in the same put count as kept."""
        if not 1 <= len(messages) <= MAX_TOGETHER:
            raise BugError(f"{len(messages)} messages are put at once; 1 to {MAX_TOGETHER} are allowed")
        outcomes: list[Answer] = []
        lasts: dict[tuple[str, Chain, str], int] = {}
        room: dict[str, tuple[int, int]] = {}  # messages and bytes that are added to an inbox
        new_sources: dict[str, set[tuple[Chain, str]]] = {}
        for message in messages:
            inbox = self.inboxes.get(message.inbox)
            answer = self._outcome(inbox, message, lasts.get((message.inbox, message.chain, message.source)))
            outcomes.append(answer)
            if answer.outcome != "kept":
                continue
            if message.ordered:
                lasts[message.inbox, message.chain, message.source] = message.id
            count, size = room.get(message.inbox, (0, 0))
            room[message.inbox] = (count + 1, size + message.size)
            if inbox is None or (message.chain, message.source) not in inbox.sources:
                new_sources.setdefault(message.inbox, set()).add((message.chain, message.source))
        for answer in outcomes:
            if answer.outcome == "gap":
                return answer
        if room and self._is_full(room, new_sources):
            return Answer("full")
        kinds = {answer.outcome for answer in outcomes}
        return Answer("kept" if "kept" in kinds else "rejected" if "rejected" in kinds else "known")

    def _outcome(self, inbox: Inbox | None, message: Message, last: int | None = None) -> Answer:
        source = inbox.sources.get((message.chain, message.source)) if inbox is not None else None
        if not message.ordered:
            here = inbox is not None and _key(message) in inbox.numbers
            return Answer("known" if here else "kept")
        known = last if last is not None else source.last if source is not None else 0
        if message.id <= known:
            return Answer("rejected" if source is not None and message.id in source.rejected else "known")
        if message.after > known or (source is not None and source.staged):
            return Answer("gap", known)
        return Answer("kept")

    def _is_full(
        self, room: dict[str, tuple[int, int]], new_sources: dict[str, set[tuple[Chain, str]]]
    ) -> bool:
        limits = self.limits
        if self.bytes + sum(size for _, size in room.values()) > limits.arc_bytes:
            return True
        if len(self.inboxes) + sum(name not in self.inboxes for name in room) > MAX_INBOXES:
            return True
        for name, (count, size) in room.items():
            inbox = self.inboxes.get(name) or Inbox()
            if len(inbox.messages) + count > limits.inbox_messages or inbox.bytes + size > limits.inbox_bytes:
                return True
            if len(inbox.sources) + len(new_sources.get(name, ())) > MAX_SOURCES:
                return True
        return False

    def _keep(self, inbox: Inbox, message: Message, now_us: int) -> None:
        source = inbox.sources.setdefault((message.chain, message.source), Source())
        source.touched_us = now_us
        source.ended = False
        if message.ordered:
            source.last = message.id
        self._insert(inbox, message, source)

    def _insert(self, inbox: Inbox, message: Message, source: Source) -> None:
        number, size = inbox.next_number, message.size
        inbox.next_number = number + 1
        inbox.messages[number] = message
        inbox.numbers[message.chain, message.source, message.id] = number
        _stick(inbox, source)
        _lane(inbox, source, message.priority)[number] = None
        inbox.bytes += size
        self._count(message.source, size)
        self._hold(message)
        if message.ordered:
            source.waiting.append(number)
        else:
            source.others += 1

    def _remove(self, inbox: Inbox, key: Key) -> Message:
        number = inbox.numbers.pop(key)
        message = inbox.messages.pop(number)
        source = inbox.sources[key[0], key[1]]
        del inbox.lanes[source.consumer][message.priority][number]
        inbox.bytes -= message.size
        self._count(message.source, -message.size)
        self._release(message)
        if message.ordered:
            source.waiting.remove(number)
        else:
            source.others -= 1
        return message

    def _refuse(self, operation: Refuse) -> Answer:
        """`rejected`; `known` if it was kept before."""
        chain, name, number = operation.key
        inbox = self._open(operation.inbox, name)
        source = inbox.sources.setdefault((chain, name), Source())
        source.touched_us = operation.now_us
        if number <= source.last and number not in source.rejected:
            return Answer("known")
        if number > source.last:
            source.last = number
            source.rejected = [*source.rejected, number][-MAX_REJECTED:]
        return Answer("rejected")

    # Receiving

    def _accept(self, operation: Accept) -> Answer:
        """`accepted`; `taken` by another one or gone; `early`: an older one of its source comes first;
        `absent`: the consumer was given up, and has not joined again."""
        inbox = self.inboxes.get(operation.inbox)
        if inbox is None:
            return Answer("taken")
        key = operation.key
        number = inbox.numbers.get(key)
        source = inbox.sources.get((key[0], key[1]))
        if number is None or source is None:
            return Answer("accepted" if _accepted_by(inbox, source, key, operation.consumer) else "taken")
        message = inbox.messages[number]
        if source.consumer != operation.consumer:
            return _not_yours(inbox, operation.consumer)
        if message.ordered and source.waiting[0] != number:
            return Answer("early")
        self._settle(inbox, source, key, operation.consumer, operation.now_us)
        return Answer("accepted")

    def _accept_each(self, operation: AcceptEach) -> Answer:
        """As `_accept`; `each`."""
        inbox, keys = self.inboxes.get(operation.inbox), operation.keys
        consumer, now_us = operation.consumer, operation.now_us
        answers: list[Answer] = []
        position = 0
        while position < len(keys):
            count = (
                0 if inbox is None else self._accept_run(inbox, keys, position, consumer, operation.now_us)
            )
            if count:
                answers += [ACCEPTED] * count
            else:
                answers.append(self._accept(Accept(operation.inbox, keys[position], consumer, now_us)))
                count = 1
            position += count
        if answers.count(ACCEPTED) == len(answers):
            return ACCEPTED
        return Answer("each", 0, tuple(answers))

    def _accept_run(self, inbox: Inbox, keys: tuple[Key, ...], start: int, consumer: str, now_us: int) -> int:
        """Accept as many transactional messages as are the first ones of one source; how many it were."""
        chain, name, _ = keys[start]
        source = inbox.sources.get((chain, name))
        if source is None or source.consumer != consumer:
            return 0
        lanes = inbox.lanes.get(consumer, {})
        size = count = 0
        for number, key in zip(source.waiting, keys[start:], strict=False):
            message = inbox.messages[number]
            if key[2] != message.id or key[1] != name or key[0] != chain:
                break
            del inbox.messages[number], inbox.numbers[key], lanes[message.priority][number]
            _remember(inbox, key, consumer)
            if message.__class__ is Message:
                size += len(message.payload) + len(message.attributes) + MESSAGE_OVERHEAD_BYTES
            else:
                size += message.size
                self._release(message)
            count += 1
        if count:
            del source.waiting[:count]
            source.touched_us, source.accepted, source.accepted_by = (
                now_us,
                keys[start + count - 1][2],
                consumer,
            )
            inbox.bytes -= size
            self._count(name, -size)
        return count

    def _settle(self, inbox: Inbox, source: Source, key: Key, consumer: str, now_us: int) -> Message:
        message = self._remove(inbox, key)
        source.touched_us = now_us
        if message.ordered:
            source.accepted, source.accepted_by = key[2], consumer
        _remember(inbox, key, consumer)
        return message

    def _reject(self, operation: Reject) -> Answer:
        """`again`, `dead`, `taken`, `absent`; `full`: there is no room for the dead letter, and the message
        stays."""
        inbox = self.inboxes.get(operation.inbox)
        key = operation.key
        number = None if inbox is None else inbox.numbers.get(key)
        if inbox is None or number is None:
            return Answer("taken")
        source = inbox.sources[key[0], key[1]]
        if source.consumer != operation.consumer:
            return _not_yours(inbox, operation.consumer)
        message = inbox.messages[number]
        if operation.attempt and message.attempts >= operation.attempt:
            return Answer("again")  # it was rejected before
        tried = replace(_tried(message), not_before_us=operation.not_before_us)
        if not operation.dead and tried.attempts < self.limits.attempts:
            inbox.messages[number] = tried
            return Answer("again")
        if len(inbox.dead) >= self.limits.dead_letters:
            return Answer("full")
        self._settle(inbox, source, key, "", operation.now_us)
        self._bury(inbox, tried, operation.reason)
        return Answer("dead")

    def _bury(self, inbox: Inbox, message: Message, reason: str) -> None:
        inbox.dead.append(replace(message, reason=reason))
        inbox.bytes += message.size
        self._count(message.source, message.size)
        self._hold(message)

    def _join(self, operation: Join) -> Answer:
        """`joined`, `denied` (the name is another principal's), `full`."""
        inbox = self.inboxes.get(operation.inbox)
        if inbox is None:
            if len(self.inboxes) >= MAX_INBOXES:
                return Answer("full")
            inbox = self.inboxes[operation.inbox] = Inbox()
        if inbox.owner and inbox.owner != operation.principal and not operation.admin:
            return Answer("denied")
        if operation.consumer not in inbox.consumers:
            if len(inbox.consumers) >= MAX_CONSUMERS:
                return Answer("full")
            inbox.consumers[operation.consumer] = 0
        if not inbox.owner:
            inbox.owner = operation.principal
            self._assign(inbox)
        _stick_all(inbox, "")
        return Answer("joined")

    def _leave(self, operation: Leave) -> Answer:
        """`left`. Its sources stick to others now. What was tried too often is a dead letter."""
        inbox = self.inboxes.get(operation.inbox)
        if inbox is None or operation.consumer not in inbox.consumers:
            return Answer("left")
        for key in operation.delivered:
            number = inbox.numbers.get(key)
            source = inbox.sources.get((key[0], key[1]))
            if number is None or source is None or source.consumer != operation.consumer:
                continue
            tried = _tried(inbox.messages[number])
            if tried.attempts < self.limits.attempts or len(inbox.dead) >= self.limits.dead_letters:
                inbox.messages[number] = tried
            else:
                self._settle(inbox, source, key, "", operation.now_us)
                self._bury(inbox, tried, "its consumers were lost")
        del inbox.consumers[operation.consumer]
        _stick_all(inbox, operation.consumer)
        return Answer("left")

    # Upkeep

    def _sweep(self, operation: Sweep) -> Answer:
        """`done`. Where there is no room for a dead letter, what has expired is dropped."""
        now_us = operation.now_us
        for transaction, (_, since_us) in list(self.decisions.items()):
            if since_us <= now_us - FORGET_US:
                del self.decisions[transaction]
        for name, inbox in list(self.inboxes.items()):
            for message in [each for each in inbox.messages.values() if _is_expired(each, now_us)]:
                source = inbox.sources[message.chain, message.source]
                self._settle(inbox, source, _key(message), "", now_us)
                if len(inbox.dead) < self.limits.dead_letters:
                    self._bury(inbox, message, "expired")
            for owner, source in list(inbox.sources.items()):
                if is_forgotten(source, now_us):
                    _unstick(inbox, source)
                    del inbox.sources[owner]
            if is_unused(inbox):
                self._drop(name)
        return Answer("done")

    def _drop(self, name: str) -> None:
        inbox = self.inboxes.pop(name)
        for message in (*inbox.messages.values(), *inbox.dead):
            self._count(message.source, -message.size)
            self._release(message)
        self._count_name(inbox.counts_for, -1)

    def _delete(self, operation: Delete) -> Answer:
        """`deleted` with the number of messages and dead letters in `last`; `none` is there; `busy`: it has a
        consumer, or a transaction for it is not decided."""
        inbox = self.inboxes.get(operation.inbox)
        if inbox is None:
            return Answer("none")
        if inbox.consumers or any(source.staged for source in inbox.sources.values()):
            return Answer("busy")
        self._drop(operation.inbox)
        return Answer("deleted", len(inbox.messages) + len(inbox.dead))

    def _own(self, operation: Own) -> Answer:
        """`owned`; `none` is there."""
        inbox = self.inboxes.get(operation.inbox)
        if inbox is None:
            return Answer("none")
        inbox.owner = operation.owner
        self._assign(inbox)
        return Answer("owned")

    def _end(self, operation: End) -> Answer:
        """`done`."""
        inbox = self.inboxes.get(operation.inbox)
        for (_, name), source in () if inbox is None else inbox.sources.items():
            if name == operation.source:
                source.ended, source.touched_us = True, operation.now_us
        return Answer("done")

    def _revive(self, operation: Revive) -> Answer:
        """`revived` with the number of them in `last`, or `full`. They have no order any more."""
        inbox = self.inboxes.get(operation.inbox)
        if inbox is None:
            return Answer("revived", 0)
        chosen = inbox.dead[: operation.count]
        added = 0 if operation.drop else len(chosen)
        if len(inbox.messages) + added > self.limits.inbox_messages:
            return Answer("full")
        inbox.dead = inbox.dead[operation.count :]
        for message in chosen:
            inbox.bytes -= message.size
            self._count(message.source, -message.size)
            self._release(message)
        if not operation.drop:
            for message in chosen:
                if _key(message) in inbox.numbers:
                    continue  # its source sent it again meanwhile
                source = inbox.sources.setdefault((message.chain, message.source), Source())
                fresh = replace(message, ordered=False, attempts=0, expires_us=0, not_before_us=0, reason="")
                self._insert(inbox, fresh, source)
        return Answer("revived", len(chosen))

    # Transactions over several arcs

    def _stage(self, operation: Stage) -> Answer:
        """`staged`, `known` (all was kept before), `rejected`, `gap`, `full`."""
        if operation.transaction in self.staged:
            return Answer("staged")
        operation = replace(operation, messages=tuple(map(self._home, operation.messages)))
        answer = self._admit(operation.messages)
        if answer.outcome != "kept":
            return answer
        if len(self.staged) >= MAX_STAGED:
            return Answer("full")
        self.staged[operation.transaction] = operation
        for message in operation.messages:
            inbox = self._open(message.inbox, message.source)
            source = inbox.sources.setdefault((message.chain, message.source), Source())
            source.staged += 1
            source.touched_us = operation.now_us
            self._count(message.source, message.size)
        return Answer("staged")

    def _decide(self, operation: Decide) -> Answer:
        """`committed` or `aborted`: the first decision stands. `full`: no decision can be taken now."""
        decided = self.decisions.get(operation.transaction)
        if decided is None:
            if len(self.decisions) >= MAX_DECISIONS:
                return Answer("full")
            decided = self.decisions[operation.transaction] = (operation.commit, operation.now_us)
        return Answer("committed" if decided[0] else "aborted")

    def _resolve(self, operation: Resolve) -> Answer:
        """`done`, again and again."""
        stage = self.staged.pop(operation.transaction, None)
        if stage is None:
            return Answer("done")
        for message in stage.messages:
            inbox = self.inboxes[message.inbox]
            source = inbox.sources[message.chain, message.source]
            source.staged -= 1
            self._count(message.source, -message.size)
        for message in stage.messages:
            inbox = self.inboxes[message.inbox]
            if operation.commit and self._outcome(inbox, message).outcome == "kept":
                self._keep(inbox, message, operation.now_us)
        return Answer("done")

    def check(self) -> None:
        """BugError if something that always holds does not."""
        total = sum(message.size for stage in self.staged.values() for message in stage.messages)
        for name, inbox in self.inboxes.items():
            size = sum(message.size for message in (*inbox.messages.values(), *inbox.dead))
            total += size
            if size != inbox.bytes:
                raise BugError(f"inbox {name!r} has {size} bytes and counts {inbox.bytes}")
            if {number: _key(message) for number, message in inbox.messages.items()} != {
                number: key for key, number in inbox.numbers.items()
            }:
                raise BugError(f"the numbers of inbox {name!r} are not those of its messages")
            lanes: dict[tuple[str, int], list[int]] = {}
            for number, message in inbox.messages.items():
                consumer = inbox.sources[message.chain, message.source].consumer
                lanes.setdefault((consumer, message.priority), []).append(number)
            if lanes != {
                (consumer, priority): list(lane)
                for consumer, by_priority in inbox.lanes.items()
                for priority, lane in by_priority.items()
                if lane
            }:
                raise BugError(f"the lanes of inbox {name!r} are not those of its messages")
            stuck = dict.fromkeys(inbox.consumers, 0)
            for owner, source in inbox.sources.items():
                if source.consumer:
                    stuck[source.consumer] += 1
                if source.waiting != sorted(source.waiting):
                    raise BugError(f"messages of {owner[1]!r} in inbox {name!r} wait out of order")
                if inbox.consumers and not source.consumer and (source.waiting or source.others):
                    raise BugError(f"messages of {owner[1]!r} in inbox {name!r} wait for nobody")
            if stuck != inbox.consumers:
                raise BugError(f"inbox {name!r} counts {inbox.consumers} sources per consumer, not {stuck}")
        if total != self.bytes:
            raise BugError(f"the inboxes have {total} bytes and count {self.bytes}")
        if sum(self.stored.values()) > self.bytes or min(self.stored.values(), default=1) <= 0:
            raise BugError(f"principals have {self.stored} bytes of {self.bytes}")
        live: dict[int, int] = {}
        for inbox in self.inboxes.values():
            for message in (*inbox.messages.values(), *inbox.dead):
                if isinstance(message, Stored) and message.extent is not None:
                    live[message.extent.tick] = live.get(message.extent.tick, 0) + message.extent.size
        if live != self.live or sum(live.values()) != self.spilled:
            raise BugError(f"{sum(live.values())} bytes of bodies are on disk, counted as {self.spilled}")


def is_forgotten(source: Source, now_us: int) -> bool:
    """Whether it was silent for so long that nobody needs its ids."""
    idle = not source.waiting and not source.others and not source.staged
    return idle and source.touched_us <= now_us - (ENDED_US if source.ended else FORGET_US)


def is_unused(inbox: Inbox) -> bool:
    """Whether nobody would miss it. What anonymous clients made belongs to nobody in particular."""
    owner = owning(inbox.owner)
    return not (owner or inbox.messages or inbox.dead or inbox.consumers or inbox.sources)


def decode_operations(payload: bytes) -> tuple[Operation, ...]:
    """PeerError unless they are operations."""
    try:
        return _OPERATIONS.decode(payload)
    except _UNREADABLE as error:
        raise PeerError(f"a write of {len(payload)} bytes is no list of operations: {error}") from error


def decode_snapshot(snapshot: bytes) -> Snapshot:
    try:
        return _SNAPSHOT.decode(snapshot)
    except _UNREADABLE as error:
        raise PeerError(f"a snapshot of inboxes of {len(snapshot)} bytes cannot be read: {error}") from error


def oldest_of(snapshot: bytes) -> int:
    """The oldest record of bodies that a snapshot refers to; 0: it refers to none."""
    if not snapshot:
        return 0
    try:
        return _OLDEST.decode(snapshot).oldest
    except _UNREADABLE as error:
        raise PeerError(f"a snapshot of inboxes of {len(snapshot)} bytes cannot be read: {error}") from error


def extents_of(snapshot: Snapshot) -> dict[int, int]:
    """The records of bodies that a snapshot refers to, in order, and how long each is at least."""
    lengths: dict[int, int] = {}
    for _, inbox in snapshot.inboxes:
        for message in (*(message for _, message in inbox.messages), *inbox.dead):
            extent = message.extent
            if extent is not None:
                lengths[extent.tick] = max(lengths.get(extent.tick, 0), extent.offset + extent.size)
    return dict(sorted(lengths.items()))


def relocate(snapshot: Snapshot, change: Callable[[Stored], Stored]) -> bytes:
    """The snapshot with other places of its bodies, or with the bodies themselves."""
    oldest = 0
    for _, inbox in snapshot.inboxes:
        inbox.messages = [(number, change(message)) for number, message in inbox.messages]
        inbox.dead = [change(message) for message in inbox.dead]
        for message in (*(message for _, message in inbox.messages), *inbox.dead):
            if message.extent is not None:
                oldest = min(oldest or message.extent.tick, message.extent.tick)
    snapshot.oldest = oldest
    return _ENCODER.encode(snapshot)


def extent_of(message: Message) -> Extent | None:
    """Where its body is, if it is not in memory."""
    return message.extent if isinstance(message, Stored) else None


def with_body(message: Message, record: bytes) -> Message:
    """The message with its body, which is in that record unless the message has it."""
    fields = msgspec.structs.asdict(message)
    extent = fields.pop("extent", None)
    if extent is not None:
        middle, end = extent.offset + extent.payload, extent.offset + extent.size
        fields |= {"payload": record[extent.offset : middle], "attributes": record[middle:end]}
    return Message(**fields)


def _extent(message: Message, tick: int) -> Extent | None:
    extent = extent_of(message)
    return extent if extent is not None and extent.tick == tick else None


def _settled(message: Stored) -> Message:
    """As a replica has it: a Stored one only if its body is on disk."""
    return message if message.extent is not None else with_body(message, b"")


def _at_rest(message: Message, extent: Extent) -> Stored:
    fields = msgspec.structs.asdict(message)
    return Stored(**{**fields, "payload": b"", "attributes": b"", "extent": extent})


def _key(message: Message) -> Key:
    return (message.chain, message.source, message.id)


def _tried(message: Message) -> Message:
    """Once more."""
    return replace(message, attempts=min(message.attempts + 1, MAX_ATTEMPTS))


def _is_expired(message: Message, now_us: int) -> bool:
    return 0 < message.expires_us <= now_us


def _stick(inbox: Inbox, source: Source) -> None:
    """A source with something to deliver sticks to the consumer that has the fewest."""
    if source.consumer or not inbox.consumers:
        return
    consumer = min(inbox.consumers, key=lambda name: (inbox.consumers[name], name))
    source.consumer = consumer
    inbox.consumers[consumer] += 1


def _stick_all(inbox: Inbox, consumer: str) -> None:
    """That consumer is gone ("": there was none): its sources stick to others, and so do their messages."""
    for source in inbox.sources.values():
        if source.consumer == consumer:
            source.consumer = ""
            if source.waiting or source.others:
                _stick(inbox, source)
    left = inbox.lanes.pop(consumer, {})
    grown: dict[tuple[str, int], None] = {}
    for priority, lane in left.items():
        for number in lane:
            message = inbox.messages[number]
            source = inbox.sources[message.chain, message.source]
            _lane(inbox, source, priority)[number] = None
            grown[source.consumer, priority] = None
    for name, priority in grown:
        inbox.lanes[name][priority] = dict.fromkeys(sorted(inbox.lanes[name][priority]))


def _lane(inbox: Inbox, source: Source, priority: int) -> dict[int, None]:
    return inbox.lanes.setdefault(source.consumer, {}).setdefault(priority, {})


def _unstick(inbox: Inbox, source: Source) -> None:
    if source.consumer:
        inbox.consumers[source.consumer] -= 1
        source.consumer = ""


def _remember(inbox: Inbox, key: Key, consumer: str) -> None:
    inbox.accepts.pop(key, None)
    inbox.accepts[key] = consumer
    while len(inbox.accepts) > MAX_ACCEPTS:
        del inbox.accepts[next(iter(inbox.accepts))]


def _not_yours(inbox: Inbox, consumer: str) -> Answer:
    """Of a message that waits, to a consumer that its source does not stick to. One that was given up may
    come back, and get that message again: only one that is here can be told that another has it."""
    return Answer("taken" if consumer in inbox.consumers else "absent")


def _accepted_by(inbox: Inbox, source: Source | None, key: Key, consumer: str) -> bool:
    """Whether this consumer accepted it. An accept that left the table counts for the last consumer."""
    if key in inbox.accepts:
        return inbox.accepts[key] == consumer
    return source is not None and 0 < key[2] <= source.accepted and source.accepted_by == consumer
