"""Frames between nodes: their kinds, the control messages and the codec.

Every frame starts with the same eight bytes, little-endian: total length u32 (these eight included),
kind u8, layout version u8, flags u16. Batch frames (PUBLISH, DELIVERY, KNOWLEDGE) go on as
`events.batch` says. Control frames carry one MessagePack array: the fields of the message class of that
kind, in order; if CHECKED is among the flags, the CRC-32C of all before follows. The reference for other
languages is docs/reference/protocol.md; a test compares the two.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Final, TypeVar

import google_crc32c
import msgspec

from postroad.errors import BugError, DamagedError, PeerError, UnavailableError

PROTOCOL_VERSION: Final = 1
FRAME_PREFIX_BYTES: Final = 8
CHECKED: Final = 0x8000  # flag of a control frame: its last four bytes are its checksum
CHECKSUM_BYTES: Final = 4
MAX_CONTROL_BYTES: Final = 1 << 20
MAX_BODY_BYTES: Final = MAX_CONTROL_BYTES - 1024  # of a message that carries one
MAX_ADDRESS_BYTES: Final = 261  # HOST:PORT: a name in the DNS has at most 255
MAX_PORT: Final = 65_535
HANDSHAKE_BYTES: Final = 64 << 10  # of the first frame on a connection, whoever sends it
# Fields that a sender may leave out are sent on: they add less than this share to a frame, and these bytes.
_DEFAULTS_BYTES: Final = 64
_DEFAULTS_SHARE: Final = 2
_MAX_MESSAGE_BYTES: Final = MAX_CONTROL_BYTES - FRAME_PREFIX_BYTES - CHECKSUM_BYTES
_RESIDUE: Final = 0x48674BC7  # the CRC-32C of anything that is followed by its own
_PREFIX: Final = struct.Struct("<IB")
_CONTROL_PREFIX: Final = struct.Struct("<IBBH")
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what msgspec raises

_Body = TypeVar("_Body")


class Kind(IntEnum):
    # every connection
    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    PING = 4
    PONG = 5
    CREDIT = 6
    # clients
    PUBLISH = 16  # batch
    ACCEPTED = 17
    REJECTED = 18
    SKEW = 19
    SUBSCRIBE = 20
    SUBSCRIBED = 21
    UNSUBSCRIBE = 22
    DELIVERY = 23  # batch
    ENDED = 24
    ACK = 25
    ACKED = 26
    BEST_EFFORT = 27  # batch
    REQUEST = 28
    REPLY = 29
    ATTEMPTS = 30
    # brokers
    KNOWLEDGE = 32  # batch
    SILENCE = 33
    ATTACH = 34
    DETACH = 35
    NACK = 36
    STAMP = 37
    RELEASE = 38
    TOPOLOGY = 40
    DIGEST = 41
    INTEREST = 42
    INTEREST_PULL = 43
    QUERY = 44
    ANSWER = 45
    DIRECT = 48
    # clients and queues
    SEND = 50
    SENT = 51
    END_SESSION = 52
    RECEIVE = 53
    RECEIVING = 54
    MESSAGES = 55
    SETTLE = 56
    SETTLED = 57
    UNRECEIVE = 58
    # clients and best effort
    REPAIRED = 59
    DISCOVER = 60


BATCH_KINDS: Final = frozenset({Kind.PUBLISH, Kind.DELIVERY, Kind.BEST_EFFORT, Kind.KNOWLEDGE})
CREDITED_KINDS: Final = BATCH_KINDS | {Kind.DIRECT}  # what takes credit of a connection's window


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A control message; the class attribute `kind` is its frame kind."""


class Limits(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one side accepts of the other. The smaller of both sides holds."""

    event_bytes: int
    batch_bytes: int
    batch_events: int
    attributes: int
    topic_bytes: int
    topic_depth: int
    subscriptions: int


DEFAULT_LIMITS: Final = Limits(
    event_bytes=1 << 20,
    batch_bytes=8 << 20,
    batch_events=16_384,
    attributes=64,
    topic_bytes=1 << 10,
    topic_depth=32,
    subscriptions=10_000,
)


class Hello(Message, frozen=True, kw_only=True):
    """The dialling side's first frame. `role` is "client" or "broker"."""

    version: int
    role: str
    name: str
    token: str
    limits: Limits
    window: int  # bytes of batch frames the sender of this message is ready to take
    time_us: int
    broker: int = 0  # role "broker": number, node id, boot, link cost
    node: bytes = b""
    boot: int = 0
    cost: int = 1
    publisher: int = 0  # role "client": the number and key of an earlier connection to go on with
    resume_key: bytes = b""
    datagrams: int = 0  # the sender's UDP port, at the host that this connection comes from; 0: it has none
    address: str = ""  # role "broker": HOST:PORT where others reach it; "" if it does not know
    life: int = 0  # role "broker": another one each time that it no longer knows what it said before


class Welcome(Message, frozen=True, kw_only=True):
    """The accepting side's answer; it is always a broker."""

    version: int
    name: str
    broker: int
    node: bytes
    boot: int
    cost: int
    limits: Limits
    window: int
    time_us: int  # the broker's clock, for the skew adjustment (spec T5)
    publisher: int = 0
    resume_key: bytes = b""
    datagrams: int = 0  # the broker's UDP port, at the host that this connection leads to; 0: it has none
    address: str = ""  # HOST:PORT where others reach it; "" if it does not know
    datagram_key: bytes = b""  # of the datagrams that go with this connection; b"": there are none
    principal: str = ""  # whom the broker takes a client for
    life: int = 0  # another one each time that the broker no longer knows what it said before


class Refuse(Message, frozen=True, kw_only=True):
    """The last frame before the sender closes: why."""

    code: str
    reason: str
    go_to: tuple[str, ...] = ()  # a broker that stops: HOST:PORT of others, the nearest first


class Ping(Message, frozen=True, kw_only=True):
    time_us: int


class Pong(Message, frozen=True, kw_only=True):
    time_us: int  # echoed
    at_us: int  # the answering side's clock


class Credit(Message, frozen=True, kw_only=True):
    """The sender has consumed this many more bytes of batch frames."""

    size: int


class Accepted(Message, frozen=True, kw_only=True):
    """All publish frames of this connection up to `sequence` are in their pubend."""

    sequence: int


class Rejected(Message, frozen=True, kw_only=True):
    """One publish frame was not taken, whole; those before and after are unaffected. With `ids`, these
    best-effort events were not."""

    sequence: int
    code: str
    reason: str
    ids: bytes = b""


class Skew(Message, frozen=True, kw_only=True):
    """The ids of a publisher are too far from the broker's clock: this much is to be added (spec T5)."""

    correction_us: int


class Subscribe(Message, frozen=True, kw_only=True):
    """`number` is chosen by the client and names the subscription on this connection."""

    number: int
    topic: str  # pattern; "" for any
    where: str  # condition; "" for none
    overflow: str = "drop"  # or "disconnect"
    buffer: int = 0  # bytes the broker may keep for it; 0 for the broker's default
    durable: str = ""  # the name of a durable subscription; "" for a plain one
    token: str = ""  # durable: go on after this checkpoint token (JSON); "" where it was left
    ack: str = ""  # durable: "auto", "batch", "manual": the broker keeps the token; "": the subscriber does
    since_us: int = 0  # durable and new: begin with what was published after this time
    shared: bool = False  # durable: consumers under one name divide the events
    key: str = ""  # shared: events with the same value of this attribute are consumed in order
    until: str = ""  # not durable: only durable events after `token` and up to this token, then ENDED
    # Durable, and the broker keeps the token: `token` is what the client remembers of this attachment. It
    # counts only where the broker that keeps it cannot be asked. 0: `token` is where it goes on.
    epoch: int = 0
    max_attempts: int = (
        0  # shared: an event that failed so often is a dead letter; 0: as it was, at first never
    )
    dead_letters: str = ""  # shared: the topic of dead letters; "" as it was


class Subscribed(Message, frozen=True, kw_only=True):
    """From now on every matching event arrives; brokers in `missing` did not confirm in time."""

    number: int
    missing: tuple[str, ...] = ()
    token: str = ""  # durable: the checkpoint token it goes on after
    created: bool = False  # durable: there was none of this name, and it begins now
    born: int = 0  # durable, where the broker keeps the token: which one of this name it is
    epoch: int = 0  # likewise: which attachment; 0: what the client remembers of it counts nowhere


class Unsubscribe(Message, frozen=True, kw_only=True):
    number: int


class Ended(Message, frozen=True, kw_only=True):
    """The broker ended a subscription or refused to begin it; code "" means as asked."""

    number: int
    code: str
    reason: str


class Ack(Message, frozen=True, kw_only=True):
    """The subscriber of a durable subscription has consumed everything up to this checkpoint token.

    A consumer of a shared one says which events instead: a token cannot, since others have those between.
    """

    number: int
    token: str
    # Shared: pubend -> ticks; a gap is named by its first.
    events: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    ticket: int = 0  # ACKED is to say when this is on disk; 0: no answer
    # Shared: events that this consumer has failed at, likewise; they are tried again after `delay_us`.
    rejected: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    delay_us: int = 0


class Acked(Message, frozen=True, kw_only=True):
    """What was acknowledged under this ticket is on disk; with a code it is not, and may be said again."""

    number: int
    ticket: int
    code: str = ""
    reason: str = ""


class Attempts(Message, frozen=True, kw_only=True):
    """Of a shared subscription: these events of a pubend, which follow in a DELIVERY, were tried before."""

    number: int
    pubend: int
    attempts: tuple[tuple[int, int], ...]  # (tick, which attempt this is)


class Request(Message, frozen=True, kw_only=True):
    """A question to the broker, such as "status"."""

    number: int
    what: str
    arguments: dict[str, str] = msgspec.field(default_factory=dict)


class Reply(Message, frozen=True, kw_only=True):
    """`body` is JSON; code is "" when all went well, else an error's code and `body` its text."""

    number: int
    code: str
    body: str


class Silence(Message, frozen=True, kw_only=True):
    """(pubend, start, end, stamp): nothing in (start, end] for you. One message for all idle pubends."""

    spans: tuple[tuple[int, int, int, int], ...]


class Attach(Message, frozen=True, kw_only=True):
    """Send me the streams of `origin`. `known` says per pubend up to where I know it already."""

    origin: int
    known: dict[int, int]


class Detach(Message, frozen=True, kw_only=True):
    origin: int


class Nack(Message, frozen=True, kw_only=True):
    """Curiosity: tell me (start, end] of `pubend`, filtered with at least `need` (owner -> version)."""

    pubend: int
    spans: tuple[tuple[int, int], ...]
    need: dict[int, int]


class Stamp(Message, frozen=True, kw_only=True):
    """Defines a number on this link for a coverage: the owners and interest versions filtered with."""

    number: int
    versions: dict[int, int]


class Release(Message, frozen=True, kw_only=True):
    """(pubend, owner, serial, released, latestDelivered, ended) of brokers with durable subscriptions, on
    their way up the tree of the pubend's origin. Of an owner's reports on a pubend the highest serial counts.
    """

    reports: tuple[tuple[int, int, int, int, int, int], ...]


class Advertisement(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Link state of one broker, newest (boot, sequence) wins."""

    broker: int
    node: bytes
    name: str
    boot: int
    sequence: int
    neighbours: tuple[tuple[int, int], ...]  # (broker, cost), sorted
    pubends: tuple[int, ...]  # pubends it serves, sorted
    address: str = ""  # HOST:PORT where others reach it; "" if it does not know
    life: int = 0  # another one each time that it no longer knows what it said before


class TopologyUpdate(Message, frozen=True, kw_only=True):
    advertisements: tuple[Advertisement, ...]


class Digest(Message, frozen=True, kw_only=True):
    """Interest versions the sender holds, sent when a link comes up: owner -> version."""

    versions: dict[int, int]


class InterestEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    entry: int
    topic: str
    where: str


class InterestClaim(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The owner hosts a durable subscription. Of several owners that with the highest epoch has the name.

    The name belongs to `principal`, "" for nobody in particular; of two principals to that first `born`.
    """

    entry: int
    name: str
    epoch: int
    principal: str = ""
    born: int = 0  # when it was made, at whichever broker
    fingerprint: bytes = b""  # of its topic, condition and sharing; b"" if not known


class InterestUpdate(Message, frozen=True, kw_only=True):
    """`base` 0 replaces the whole table (possibly in `parts`), else it is a change from that version."""

    owner: int
    base: int
    version: int
    added: tuple[InterestEntry, ...]
    removed: tuple[int, ...]
    part: int = 0
    parts: int = 1
    claims: tuple[InterestClaim, ...] = ()  # added, with entry numbers of the same table


class InterestPull(Message, frozen=True, kw_only=True):
    """Send me the table of these owners."""

    owners: tuple[int, ...]


class Query(Message, frozen=True, kw_only=True):
    """A question from one broker to another, passed on towards `target`; `hops` more may pass it on."""

    source: int
    target: int
    number: int
    hops: int
    what: str
    body: bytes


class Answer(Message, frozen=True, kw_only=True):
    """The answer to a QUERY, passed on towards the broker that asked under that number."""

    source: int
    target: int
    number: int
    hops: int
    body: bytes


class Direct(Message, frozen=True, kw_only=True):
    """What a room of one broker says to the same room of another, over a direct connection."""

    room: str
    body: bytes


class Posting(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """One message to one application."""

    inbox: str
    id: int  # increases within the session, over all inboxes
    after: int  # transactional: the id that the session sent to this inbox before; 0: none
    payload: bytes
    attributes: bytes = b""  # encoded as those of an event
    priority: int = 4
    delay_us: int = 0
    expires_us: int = 0  # from now; 0: never
    chain: bytes = b""  # as in the SENT about this id, or about this inbox before; b"": not known


class Send(Message, frozen=True, kw_only=True):
    """Messages of one session of one source. A client sends again under the same ids until it is answered."""

    number: int
    source: str
    session: bytes
    form: str  # "express", "recoverable", "transactional"
    messages: tuple[Posting, ...]
    reliable: bool = True
    together: bool = False  # transactional: all or none of them
    confirm: bool = False  # SENT is to say "delivered" as well


class Sent(Message, frozen=True, kw_only=True):
    """What became of messages of a SEND, by their place in it; () is all of them."""

    number: int
    places: tuple[int, ...]
    state: str  # "kept", "delivered", "gap"; "" with a code
    code: str = ""
    reason: str = ""
    last: int = 0  # of a gap: the last id of the session that the inbox has
    chain: bytes = b""


class EndSession(Message, frozen=True, kw_only=True):
    """The source will send nothing more in this session."""

    source: str
    session: bytes


class Receive(Message, frozen=True, kw_only=True):
    """`number` is chosen by the client and names this use of the inbox on this connection."""

    number: int
    inbox: str
    consumer: bytes  # the same when the same inbox object comes again after its connection was lost
    window: int  # messages that may be with the consumer unsettled


class Receiving(Message, frozen=True, kw_only=True):
    """The consumer has joined; with a code, it has not or no longer."""

    number: int
    code: str = ""
    reason: str = ""


class QueueMessage(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """A message as a consumer gets it; `key` names it in a SETTLE."""

    key: bytes
    source: str
    session: bytes
    id: int
    form: str
    attempt: int
    sent_us: int
    payload: bytes
    attributes: bytes = b""
    priority: int = 4
    principal: str = ""  # who sent it, as brokers know it; "": nobody in particular

    @property
    def sender(self) -> tuple[str, bytes]:
        """The session that it is of. A session is no secret: another principal may use the same."""
        return f"{self.source}\0{self.principal}", self.session


class Messages(Message, frozen=True, kw_only=True):
    """A consumer refuses those whose `place` is below the highest it has seen of this inbox."""

    number: int
    place: bytes
    messages: tuple[QueueMessage, ...]


class Settle(Message, frozen=True, kw_only=True):
    number: int
    ticket: int
    keys: tuple[bytes, ...]
    verdict: str  # "accept", "again", "dead"
    delay_us: int = 0  # again: not before this
    reason: str = ""


class Settled(Message, frozen=True, kw_only=True):
    """An outcome per key; with a code there is none, and the same is to be said again."""

    number: int
    ticket: int
    outcomes: tuple[str, ...]
    code: str = ""
    reason: str = ""


class Unreceive(Message, frozen=True, kw_only=True):
    number: int


class Repaired(Message, frozen=True, kw_only=True):
    """What repair did for a subscription, in all, and the events that it brought since the last time."""

    number: int  # of the subscription
    ids: bytes  # 16 bytes each
    received: int  # events that came as they were first sent
    detected: int  # losses
    requests: int
    recovered: int
    given_up: int
    duplicates: int
    slowest_us: int  # of the latest recoveries, the one that took longest
    recovery_us: int = 0  # all of them together
    repairs: int = 0  # sent to others
    asked: int = 0  # requests of others that came here
    hits: int = 0  # of these, for what the cache had
    cached: int = 0  # events in the cache now


class Discover(Message, frozen=True, kw_only=True):
    """A discovery request on its way through the network: who is to be answered, and what it showed."""

    uuid: bytes
    attempt: int
    host: str  # where the requester has shown that it receives datagrams
    port: int
    offset_us: int  # the receiving broker's clock minus the requester's
    cookie: bytes
    credential: bytes
    key: bytes
    certificate: str  # the name that the requester's certificate was verified to have, or ""
    hops: int


CONTROL: Final[dict[Kind, type[Message]]] = {
    Kind.HELLO: Hello,
    Kind.WELCOME: Welcome,
    Kind.REFUSE: Refuse,
    Kind.PING: Ping,
    Kind.PONG: Pong,
    Kind.CREDIT: Credit,
    Kind.ACCEPTED: Accepted,
    Kind.REJECTED: Rejected,
    Kind.SKEW: Skew,
    Kind.SUBSCRIBE: Subscribe,
    Kind.SUBSCRIBED: Subscribed,
    Kind.UNSUBSCRIBE: Unsubscribe,
    Kind.ENDED: Ended,
    Kind.ACK: Ack,
    Kind.ACKED: Acked,
    Kind.REQUEST: Request,
    Kind.REPLY: Reply,
    Kind.ATTEMPTS: Attempts,
    Kind.SILENCE: Silence,
    Kind.ATTACH: Attach,
    Kind.DETACH: Detach,
    Kind.NACK: Nack,
    Kind.STAMP: Stamp,
    Kind.RELEASE: Release,
    Kind.TOPOLOGY: TopologyUpdate,
    Kind.DIGEST: Digest,
    Kind.INTEREST: InterestUpdate,
    Kind.INTEREST_PULL: InterestPull,
    Kind.QUERY: Query,
    Kind.ANSWER: Answer,
    Kind.DIRECT: Direct,
    Kind.SEND: Send,
    Kind.SENT: Sent,
    Kind.END_SESSION: EndSession,
    Kind.RECEIVE: Receive,
    Kind.RECEIVING: Receiving,
    Kind.MESSAGES: Messages,
    Kind.SETTLE: Settle,
    Kind.SETTLED: Settled,
    Kind.UNRECEIVE: Unreceive,
    Kind.REPAIRED: Repaired,
    Kind.DISCOVER: Discover,
}
_KIND_OF: Final = {message: kind for kind, message in CONTROL.items()}
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODERS: Final = {int(kind): msgspec.msgpack.Decoder(message) for kind, message in CONTROL.items()}


def encode(message: Message) -> bytes:
    """One whole control frame. Whoever makes a message keeps it within MAX_CONTROL_BYTES."""
    body = _ENCODER.encode(message)
    kind = _KIND_OF[type(message)]
    length = FRAME_PREFIX_BYTES + len(body) + CHECKSUM_BYTES
    if length > MAX_CONTROL_BYTES:
        raise BugError(f"a {kind.name} frame of {length} bytes, the limit is {MAX_CONTROL_BYTES}")
    frame = _CONTROL_PREFIX.pack(length, kind, PROTOCOL_VERSION, CHECKED) + body
    return frame + int(google_crc32c.value(frame)).to_bytes(CHECKSUM_BYTES, "little")


def frame_kind(frame: bytes | memoryview) -> int:
    return frame[4]


def decode(frame: bytes | memoryview) -> Message:
    """The message of one whole control frame; PeerError if it is not one."""
    kind, version, flags, end = frame[4], frame[5], frame[6] | frame[7] << 8, len(frame)
    if flags & CHECKED:
        end = max(FRAME_PREFIX_BYTES, end - CHECKSUM_BYTES)
        if google_crc32c.value(frame if type(frame) is bytes else bytes(frame)) != _RESIDUE:
            raise DamagedError(f"a control frame of kind {kind} whose checksum is wrong")
    if version != PROTOCOL_VERSION:
        raise PeerError(f"frame of layout version {version}, this side speaks {PROTOCOL_VERSION}")
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise PeerError(f"unknown frame kind {kind}")
    if flags & ~CHECKED:
        raise PeerError(f"a {Kind(kind).name} frame with flags {flags:#x}, it has none but {CHECKED:#x}")
    try:
        message = decoder.decode(memoryview(frame)[FRAME_PREFIX_BYTES:end])
    except _UNREADABLE as error:
        raise PeerError(f"malformed {Kind(kind).name} frame: {error}") from None
    # Sent on, it has the fields that its sender left out, and must still fit.
    whole = _DEFAULTS_SHARE * len(frame) + _DEFAULTS_BYTES
    if whole > MAX_CONTROL_BYTES and len(_ENCODER.encode(message)) > _MAX_MESSAGE_BYTES:
        raise PeerError(f"a {Kind(kind).name} frame that leaves no room for all of its fields")
    return message


def decode_body(body: bytes, decoder: msgspec.msgpack.Decoder[_Body]) -> _Body:
    """What a QUERY or an ANSWER carries; PeerError if it is not that. Its bearer is not to blame."""
    try:
        return decoder.decode(body)
    except _UNREADABLE as error:
        raise PeerError(f"malformed body: {error}") from None


def check_address(address: str) -> None:
    """PeerError unless it is HOST:PORT or [IPV6]:PORT, or "" for one that is not known: whoever is told it
    reads it with `config.parse_address`, which takes no less."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    plain = address.isascii() and address.isprintable() and " " not in address
    number = int(port) if plain and port.isdigit() and len(port) <= len(str(MAX_PORT)) else 0
    if address and not (host and "/" not in host and 1 <= number <= MAX_PORT):
        raise PeerError(f"an address is HOST:PORT, not {address[:40]!r}")
    if len(address) > MAX_ADDRESS_BYTES:
        raise PeerError(f"an address of {len(address)} bytes, the most is {MAX_ADDRESS_BYTES}")


def json_within_frame(values: Mapping[str, object]) -> str:
    """A JSON object for the body of a control frame. Where it would not fit, the list that takes most loses
    its last rows, and so on: long rows of one list do not cut the others.

    UnavailableError if it does not fit without them either.
    """
    body = msgspec.json.encode(cut_lists(values, MAX_BODY_BYTES))
    if len(body) > MAX_BODY_BYTES:
        raise UnavailableError(f"the answer has {len(body)} bytes, at most {MAX_BODY_BYTES} are possible")
    return body.decode()


def cut_lists(values: Mapping[str, object], most: int) -> dict[str, object]:
    """As many rows of its lists as fit in so many bytes of JSON, the longest list cut first; none if nothing
    helps."""
    cut = dict(values)
    lists = {
        key: (value, len(msgspec.json.encode(value)))
        for key, value in values.items()
        if isinstance(value, list | tuple)
    }
    while len(msgspec.json.encode(cut)) > most:
        largest = max(lists, key=lambda key: lists[key][1], default="")
        if not largest or not cut[largest]:
            return cut
        rows, _ = lists[largest]
        cut[largest] = rows = rows[: len(rows) // 2]
        lists[largest] = rows, len(msgspec.json.encode(rows))
    return cut


# How a TLS handshake and a TLS alert begin. As a frame's length either is far over the handshake's limit.
_TLS_RECORDS: Final = (b"\x16\x03", b"\x15\x03")


class Splitter:
    """Cuts a byte stream into whole frames. Buffers at most one frame, whose length it checks first.

    Every byte is copied a fixed number of times however the stream is cut: an incomplete frame grows in
    place, and a chunk that is exactly one frame is handed on as it is.

    With `handshake` the first frame is a control frame of at most HANDSHAKE_BYTES, so that a stranger cannot
    make us buffer more than that.
    """

    __slots__ = ("_handshake", "_need", "_partial", "max_batch_bytes")

    def __init__(self, max_batch_bytes: int, *, handshake: bool = False) -> None:
        self.max_batch_bytes = max_batch_bytes
        self._handshake = handshake  # the first frame has not begun
        self._partial = bytearray()  # the beginning of a frame that is not complete
        self._need = FRAME_PREFIX_BYTES  # bytes until that frame's length is known, then that length

    @property
    def begun(self) -> bool:
        """Whether the handshake's first frame has begun."""
        return not self._handshake

    @property
    def pending(self) -> int:
        """Bytes of an incomplete frame held."""
        return len(self._partial)

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes. Raises PeerError before buffering an oversized one."""
        frames: list[bytes] = []
        position, end = 0, len(data)
        partial = self._partial
        while partial and position < end:
            taken = min(self._need - len(partial), end - position)
            partial += data[position : position + taken]
            position += taken
            if len(partial) < self._need:
                return frames
            if self._need == FRAME_PREFIX_BYTES:
                self._need = self._length(partial, 0)
            if len(partial) == self._need:
                frames.append(bytes(partial))
                partial.clear()
                self._need = FRAME_PREFIX_BYTES
        while end - position >= FRAME_PREFIX_BYTES:
            length = self._length(data, position)
            if position + length > end:
                self._need = length
                break
            frames.append(data[position : position + length])
            position += length
        if position < end:
            partial += data[position:]
        return frames

    def _length(self, data: bytes | bytearray, position: int) -> int:
        length, kind = _PREFIX.unpack_from(data, position)
        limit = self.max_batch_bytes if kind in BATCH_KINDS else MAX_CONTROL_BYTES
        if self._handshake:
            self._handshake = False
            if data[position : position + 2] in _TLS_RECORDS:
                raise PeerError("the other side speaks TLS and this one does not")
            if kind in BATCH_KINDS:
                raise PeerError(f"a connection begins with a handshake, not with {Kind(kind).name}")
            limit = HANDSHAKE_BYTES
        if length < FRAME_PREFIX_BYTES:
            raise PeerError(f"frame of {length} bytes, its prefix alone has {FRAME_PREFIX_BYTES}")
        if length > limit:
            raise PeerError(f"frame of {length} bytes, the limit is {limit}")
        return int(length)
