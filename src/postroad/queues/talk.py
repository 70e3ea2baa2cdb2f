"""What the queue rooms of two brokers say to each other, over direct peers.

A *task* is what an entry broker wants of whoever is responsible for an arc; it is said again, to another
broker if need be, until it is answered, so every task may be done twice. Everything else is about one arc's
view, or about where somebody is. What is said to one broker in one turn is one list, in one frame.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from postroad.errors import PeerError
from postroad.queues import messages as arcs
from postroad.queues.inbox import Answer, Key, Message
from postroad.queues.messages import Chain, Node, View

NO_CHAIN: Final = Chain(0, b"", b"")  # not known before the first broker is asked
MAX_HOPS: Final = 64


class _Said(msgspec.Struct, frozen=True, array_like=True):
    pass


# Tasks


class PutTask(_Said, frozen=True, tag=1):
    """`form`: the kind of the messages; `confirm`: Delivered is wanted as well."""

    messages: tuple[Message, ...]
    form: str
    together: bool
    confirm: bool


class JoinTask(_Said, frozen=True, tag=2):
    inbox: str
    consumer: str
    principal: str
    admin: bool
    window: int


class LeaveTask(_Said, frozen=True, tag=3):
    """`lost`: it may come back."""

    inbox: str
    consumer: str
    lost: bool


class MessageKey(msgspec.Struct, frozen=True, array_like=True):
    """What stands in a key that a consumer gives back: which message, which attempt, and where it is."""

    key: Key
    attempt: int
    express: bool
    entry: int = 0  # of the message


class SettleTask(_Said, frozen=True, tag=4):
    inbox: str
    consumer: str
    keys: tuple[MessageKey, ...]
    verdict: str
    delay_us: int
    reason: str


class EndTask(_Said, frozen=True, tag=5):
    inbox: str
    source: str


class DeadTask(_Said, frozen=True, tag=6):
    inbox: str
    principal: str
    admin: bool


class ReviveTask(_Said, frozen=True, tag=7):
    inbox: str
    principal: str
    admin: bool
    count: int
    drop: bool


class StageTask(_Said, frozen=True, tag=8):
    transaction: bytes
    home: bytes
    messages: tuple[Message, ...]


class DecideTask(_Said, frozen=True, tag=9):
    transaction: bytes
    commit: bool


class ResolveTask(_Said, frozen=True, tag=10):
    transaction: bytes
    commit: bool


class ForgetTask(_Said, frozen=True, tag=11):
    transaction: bytes


Task: TypeAlias = (
    PutTask | JoinTask | LeaveTask | SettleTask | EndTask | DeadTask | ReviveTask | StageTask | DecideTask
    | ResolveTask | ForgetTask
)  # fmt: skip


# What is said


class About(_Said, frozen=True, tag=20):
    """A message of the arc's core."""

    arc: int
    message: arcs.Message


class Work(_Said, frozen=True, tag=21):
    number: int  # of the sender
    arc: int
    task: Task


class Done(_Said, frozen=True, tag=22):
    """The answers to a task; with a code it was not done."""

    number: int
    answers: tuple[Answer, ...]
    code: str = ""
    reason: str = ""
    body: bytes = b""


class Elsewhere(_Said, frozen=True, tag=23):
    """This broker is not responsible; this is what it knows of the arc."""

    number: int
    arc: int
    view: View | None


class Delivered(_Said, frozen=True, tag=24):
    """A message of that task was accepted by a consumer."""

    number: int
    place: int


class Handed(msgspec.Struct, frozen=True, array_like=True):
    """A message on its way to a consumer."""

    key: bytes
    form: str
    message: Message


class Deliver(_Said, frozen=True, tag=25):
    arc: int
    inbox: str
    consumer: str
    place: bytes
    messages: tuple[Handed, ...]


class Removed(_Said, frozen=True, tag=26):
    """The consumer was taken for lost. If it is still there, it joins again."""

    inbox: str
    consumer: str


class Locate(_Said, frozen=True, tag=27):
    """Passed on along the ring to whoever is closest to the arc; that one tells `asker` the view."""

    arc: int
    asker: Node
    hops: int


class AskChains(_Said, frozen=True, tag=28):
    """Do you know the chain of any arc?"""


class Chains(_Said, frozen=True, tag=29):
    known: bool


class AskQueues(_Said, frozen=True, tag=30):
    number: int
    after: str  # inboxes are told in the order of their names, behind this one


class QueueRow(msgspec.Struct, frozen=True, array_like=True):
    inbox: str
    arc: int
    depth: int
    bytes: int
    oldest_us: int  # when the oldest message was sent; 0: there is none
    consumers: int
    dead: int
    owner: str
    replicas: tuple[Node, ...]
    epoch: int


class Queues(_Said, frozen=True, tag=31):
    number: int
    rows: tuple[QueueRow, ...]
    more: bool


Said: TypeAlias = (
    About | Work | Done | Elsewhere | Delivered | Deliver | Removed | Locate | AskChains | Chains
    | AskQueues | Queues
)  # fmt: skip


_ENCODER: Final = msgspec.msgpack.Encoder()
_SAID: Final[msgspec.msgpack.Decoder[tuple[Said, ...]]] = msgspec.msgpack.Decoder(tuple[Said, ...])
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
