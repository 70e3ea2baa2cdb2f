"""What the queue rooms of two brokers say to each other, over direct peers.

A *task* is what an entry broker wants of whoever is responsible for an arc; it is said again, to another
broker if need be, until it is answered, so every task may be done twice. Everything else is about one arc's
view, or about where somebody is. What is said to one broker in one turn is one list, in one frame.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from postroad.errors import PeerError
from postroad.queues import messages as arcs
from postroad.queues.inbox import (
    MAX_TOGETHER,
    Answers,
    Count,
    Key,
    Message,
    Messages,
    SourceName,
    Transaction,
)
from postroad.queues.messages import Chain, Node, Replicas, View
from postroad.queues.settings import MAX_ARCS
from postroad.units import SECOND_US
from postroad.wire.fields import Broker, Data, Name, Number, Text, Word
from postroad.wire.fields import Key as Place

NO_CHAIN: Final = Chain(0, b"", b"")  # not known before the first broker is asked
MAX_HOPS: Final = 64
MAX_SAID: Final = 65_536  # in one frame
MAX_WINDOW: Final = 4_096
MAX_DELAY_US: Final = 30 * 86_400 * SECOND_US
MAX_KEY_BYTES: Final = 1_024
MAX_DELIVERED: Final = 256  # messages in one frame
MAX_ROWS: Final = 500  # queues in one answer of a broker

ArcIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_ARCS)]
Window: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_WINDOW)]
Delay: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_DELAY_US)]
Moment: TypeAlias = tuple[Place, Number]  # a delivery: where from, and which of those that came from there
GivenKey: TypeAlias = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]  # of a message, for its consumer


class _Said(msgspec.Struct, frozen=True, array_like=True):
    pass


# Tasks


class PutTask(_Said, frozen=True, tag=1):
    """`form`: the kind of the messages; `confirm`: Delivered is wanted as well."""

    messages: Messages
    form: Word
    together: bool
    confirm: bool


class JoinTask(_Said, frozen=True, tag=2):
    inbox: Name
    consumer: Name
    principal: Name
    admin: bool
    window: Window


class LeaveTask(_Said, frozen=True, tag=3):
    """`lost`: it may come back."""

    inbox: Name
    consumer: Name
    lost: bool


class MessageKey(msgspec.Struct, frozen=True, array_like=True):
    """What stands in a key that a consumer gives back: which message, which attempt, and where it is."""

    key: Key
    attempt: Count
    express: bool
    entry: Broker = 0  # of the message


class SettleTask(_Said, frozen=True, tag=4):
    inbox: Name
    consumer: Name
    keys: Annotated[tuple[MessageKey, ...], Meta(min_length=1, max_length=MAX_TOGETHER)]
    verdict: Word
    delay_us: Delay
    reason: Text


class EndTask(_Said, frozen=True, tag=5):
    inbox: Name
    source: SourceName


class DeadTask(_Said, frozen=True, tag=6):
    inbox: Name
    principal: Name
    admin: bool


class ReviveTask(_Said, frozen=True, tag=7):
    inbox: Name
    principal: Name
    admin: bool
    count: Count
    drop: bool


class StageTask(_Said, frozen=True, tag=8):
    transaction: Transaction
    home: Transaction
    messages: Messages


class DecideTask(_Said, frozen=True, tag=9):
    transaction: Transaction
    commit: bool


class ResolveTask(_Said, frozen=True, tag=10):
    transaction: Transaction
    commit: bool


class ForgetTask(_Said, frozen=True, tag=11):
    transaction: Transaction


class ConfirmTask(_Said, frozen=True, tag=12):
    """Delivered is wanted of these messages, which are kept. Another broker is responsible since."""

    messages: Annotated[
        tuple[tuple[Name, Key], ...], Meta(min_length=1, max_length=MAX_TOGETHER)
    ]  # inbox, key


class DeleteTask(_Said, frozen=True, tag=13):
    inbox: Name
    principal: Name
    admin: bool


class OwnTask(_Said, frozen=True, tag=14):
    inbox: Name
    principal: Name
    admin: bool
    owner: Name


Task: TypeAlias = (
    PutTask | JoinTask | LeaveTask | SettleTask | EndTask | DeadTask | ReviveTask | StageTask | DecideTask
    | ResolveTask | ForgetTask | ConfirmTask | DeleteTask | OwnTask
)  # fmt: skip


# What is said


class About(_Said, frozen=True, tag=20):
    """A message of the arc's core."""

    arc: ArcIndex
    message: arcs.Message


class Work(_Said, frozen=True, tag=21):
    number: Number  # of the sender
    arc: ArcIndex
    task: Task


class Done(_Said, frozen=True, tag=22):
    """The answers to a task; with a code it was not done. `after`: of verdicts, the delivery before them."""

    number: Number
    answers: Answers
    code: Word = ""
    reason: Text = ""
    body: Data = b""
    after: Moment = (b"", 0)


class Elsewhere(_Said, frozen=True, tag=23):
    """This broker is not responsible; this is what it knows of the arc."""

    number: Number
    arc: ArcIndex
    view: View | None


class Delivered(_Said, frozen=True, tag=24):
    """A message of that task was accepted by a consumer; or nobody will: it is a dead letter, or dropped."""

    number: Number
    place: Number
    accepted: bool = True


class Handed(msgspec.Struct, frozen=True, array_like=True):
    """A message on its way to a consumer."""

    key: GivenKey
    form: Word
    message: Message


class Deliver(_Said, frozen=True, tag=25):
    arc: ArcIndex
    inbox: Name
    consumer: Name
    place: Place
    messages: Annotated[tuple[Handed, ...], Meta(max_length=MAX_DELIVERED)]
    number: Number = 0  # increases from one delivery of that place to the next


class Removed(_Said, frozen=True, tag=26):
    """The consumer was taken for lost. If it is still there, it joins again."""

    inbox: Name
    consumer: Name


class Locate(_Said, frozen=True, tag=27):
    """Passed on along the ring to whoever is closest to the arc; that one tells `asker` the view."""

    arc: ArcIndex
    asker: Node
    hops: Number


class AskChains(_Said, frozen=True, tag=28):
    """Do you know the chain of any arc?"""


class Chains(_Said, frozen=True, tag=29):
    known: bool


class AskQueues(_Said, frozen=True, tag=30):
    number: Number
    after: Name  # inboxes are told in the order of their names, behind this one


class QueueRow(msgspec.Struct, frozen=True, array_like=True):
    inbox: Name
    arc: ArcIndex
    depth: Number
    bytes: Number
    oldest_us: Number  # when the oldest message was sent; 0: there is none
    consumers: Number
    dead: Number
    owner: Name
    replicas: Replicas
    epoch: Number


class Queues(_Said, frozen=True, tag=31):
    number: Number
    rows: Annotated[tuple[QueueRow, ...], Meta(max_length=MAX_ROWS)]
    more: bool


Said: TypeAlias = (
    About | Work | Done | Elsewhere | Delivered | Deliver | Removed | Locate | AskChains | Chains
    | AskQueues | Queues
)  # fmt: skip
AllSaid: TypeAlias = Annotated[tuple[Said, ...], Meta(max_length=MAX_SAID)]

_ENCODER: Final = msgspec.msgpack.Encoder()
_SAID: Final[msgspec.msgpack.Decoder[tuple[Said, ...]]] = msgspec.msgpack.Decoder(AllSaid)
_KEYS: Final = msgspec.msgpack.Decoder(MessageKey)
_CHAINS: Final = msgspec.msgpack.Decoder(Chain)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode(said: Said | MessageKey | Chain) -> bytes:
    return _ENCODER.encode(said)


def decode(data: bytes) -> tuple[Said, ...]:
    """PeerError unless it is a list of things that a broker says."""
    try:
        return _SAID.decode(data)
    except _UNREADABLE as error:
        raise PeerError(f"what a broker says about queues cannot be read: {error}") from None


def decode_key(data: bytes) -> MessageKey:
    try:
        return _KEYS.decode(data)
    except _UNREADABLE as error:
        raise PeerError(f"a key of {len(data)} bytes is not one that a broker gave out: {error}") from None


def decode_chain(data: bytes) -> Chain:
    try:
        return _CHAINS.decode(data) if data else NO_CHAIN
    except _UNREADABLE as error:
        raise PeerError(f"a chain of {len(data)} bytes is not one that a broker gave out: {error}") from None


def place_of(view: View) -> bytes:
    """Compared as bytes, the place of a later view is higher, and that of a chain which outranks another."""
    chain = view.chain
    low = (1 << 128) - 1
    founder, origin = (low - int.from_bytes(node[:16], "big") for node in (chain.founder, chain.origin))
    return (
        chain.generation.to_bytes(8, "big")
        + founder.to_bytes(16, "big")
        + origin.to_bytes(16, "big")
        + view.epoch.to_bytes(8, "big")
    )
