"""Datagrams of discovery: their kinds, fields and bounds (who sends which: docs/explanation/discovery.md).

After the four bytes that every datagram begins with comes one MessagePack array: the fields of the message
class of that kind, in order. Anybody can send a datagram, so every field has a bound, checked here: a core
that is handed a message need not look at its sizes again.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from postroad.errors import BugError, PeerError
from postroad.wire.datagrams import DATAGRAM_PREFIX_BYTES, MAX_DATAGRAM_BYTES, datagram_kind, pack
from postroad.wire.frames import check_address

UUID_BYTES: Final = 16
KEY_BYTES: Final = 32  # of X25519
COOKIE_BYTES: Final = 24
CREDENTIAL_BYTES: Final = 24
PROOF_BYTES: Final = 16
SECRET_BYTES: Final = 16
MAX_NAME_BYTES: Final = 128
MAX_PLACE_BYTES: Final = 128  # of a geography or an institution
MAX_TRANSPORTS: Final = 8
MAX_TRANSPORT_BYTES: Final = 32
TRANSPORTS: Final = ("tcp", "udp")  # of this version
MAX_HOST_BYTES: Final = 64  # a numeric address, with an interface
MAX_ATTEMPTS: Final = 16  # of one request
MAX_HOPS: Final = 64  # of a request through the network: memory is finite, and a ring has no end
MAX_TIME_US: Final = 1 << 53  # until the year 2255; sums and differences of some such times are encoded
MAX_COUNT: Final = 1 << 32
MAX_MEMBERS: Final = 10_000  # brokers of one network
MAX_BYTES: Final = 1 << 62
MAX_LIFETIME_S: Final = 3_600
# A request is at least this long, so that a cookie, which answers it wherever it seems to come from, is not
# longer.
MIN_REQUEST_BYTES: Final = 120


class Kind(IntEnum):
    REQUEST = 32
    COOKIE = 33
    ACKNOWLEDGE = 34
    INJECT = 35
    RESPONSE = 36
    PING = 37
    PONG = 38
    ADVERTISE = 39
    ADVERTISED = 40
    ANNOUNCE = 41
    SEALED = 42


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One datagram of discovery."""


class Request(Message, frozen=True, kw_only=True):
    """Which brokers are there? (spec V4). Repeated after silence with the next `attempt`."""

    uuid: bytes
    attempt: int
    sent_us: int  # the requester's clock
    offset_us: int = 0  # the clock of the node that is asked, minus the requester's, as a cookie showed it
    cookie: bytes = b""  # of the node that is asked; "" for the first time
    credential: bytes = b""
    transports: tuple[str, ...] = ()  # that the requester could use
    key: bytes = b""  # what answers are encrypted for; "" without certificates, as of all keys
    padding: bytes = b""


class Cookie(Message, frozen=True, kw_only=True):
    """Say that again with this cookie: only who receives at its address can."""

    uuid: bytes
    cookie: bytes
    sent_us: int  # echoed
    time_us: int  # the clock of the node that answers
    key: bytes = b""  # of the node that answers


class Acknowledge(Message, frozen=True, kw_only=True):
    """A discovery node has passed a request on; about so many brokers will hear of it."""

    uuid: bytes
    attempt: int
    brokers: int


class Inject(Message, frozen=True, kw_only=True):
    """A discovery node asks a broker to answer and spread a request (spec V5)."""

    secret: bytes  # of the broker's advertisement: a stranger does not know it
    uuid: bytes
    attempt: int
    host: str  # where the requester has shown that it receives
    port: int
    offset_us: int  # the broker's clock minus the requester's
    cookie: bytes  # what the credential was made with
    credential: bytes
    key: bytes
    name: str  # of the requester's certificate


class Usage(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How busy a broker is (spec V6)."""

    connections: int = 0
    links: int = 0
    cpu_share: float = 0.0  # of all cores, 0 to 1
    memory_total_bytes: int = 0
    memory_free_bytes: int = 0


class Response(Message, frozen=True, kw_only=True):
    """A broker answers a request, straight to the requester (spec V6)."""

    uuid: bytes
    attempt: int
    sent_us: int  # on the requester's clock, as far as that is known
    broker: int
    name: str
    address: str  # HOST:PORT of its connections
    transports: tuple[str, ...]
    ping_key: bytes  # what pings are answered for
    usage: Usage
    network: int  # the least number of the brokers that it reaches: those of one network say the same
    members: int  # of that network
    proof: bytes = b""  # that it knows the token of the request's credential; "" if that showed none
    link_proof: bytes = b""  # then also that it has the token which it shows to brokers that it links with


class Ping(Message, frozen=True, kw_only=True):
    key: bytes
    sent_us: int


class Pong(Message, frozen=True, kw_only=True):
    key: bytes
    sent_us: int  # echoed
    time_us: int  # the answering side's clock


class Advertise(Message, frozen=True, kw_only=True):
    """A broker makes itself known to a discovery node (spec V2). A lifetime of 0 takes it back."""

    uuid: bytes  # of this advertisement
    broker: int
    name: str
    address: str
    transports: tuple[str, ...]
    geography: str
    institution: str
    secret: bytes
    network: int
    members: int
    lifetime_s: int
    sent_us: int
    cookie: bytes = b""
    credential: bytes = b""
    key: bytes = b""
    padding: bytes = b""


class Advertised(Message, frozen=True, kw_only=True):
    uuid: bytes
    time_us: int


class Announce(Message, frozen=True, kw_only=True):
    """A private discovery node makes itself known to a broker, which may advertise itself there (spec V3)."""

    uuid: bytes
    name: str
    sent_us: int
    cookie: bytes = b""
    credential: bytes = b""
    key: bytes = b""
    padding: bytes = b""


class Sealed(Message, frozen=True, kw_only=True):
    """Another datagram, signed by a certificate's key; encrypted, once the receiver's key is known."""

    certificate: bytes
    ephemeral: bytes  # X25519; "": the body is signed only
    signature: bytes
    kind: int
    body: bytes


MESSAGES: Final[dict[Kind, type[Message]]] = {
    Kind.REQUEST: Request,
    Kind.COOKIE: Cookie,
    Kind.ACKNOWLEDGE: Acknowledge,
    Kind.INJECT: Inject,
    Kind.RESPONSE: Response,
    Kind.PING: Ping,
    Kind.PONG: Pong,
    Kind.ADVERTISE: Advertise,
    Kind.ADVERTISED: Advertised,
    Kind.ANNOUNCE: Announce,
    Kind.SEALED: Sealed,
}
_KIND_OF: Final = {message: kind for kind, message in MESSAGES.items()}
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODERS: Final = {int(kind): msgspec.msgpack.Decoder(message) for kind, message in MESSAGES.items()}
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# Field -> the lengths in bytes that it may have, from .. to.
_LENGTHS: Final[dict[str, tuple[int, int]]] = {
    "uuid": (UUID_BYTES, UUID_BYTES),
    "cookie": (0, COOKIE_BYTES),
    "credential": (0, CREDENTIAL_BYTES),
    "proof": (0, PROOF_BYTES),
    "link_proof": (0, PROOF_BYTES),
    "secret": (SECRET_BYTES, SECRET_BYTES),
    "ping_key": (COOKIE_BYTES, COOKIE_BYTES),
    "name": (0, MAX_NAME_BYTES),
    "geography": (0, MAX_PLACE_BYTES),
    "institution": (0, MAX_PLACE_BYTES),
    "host": (1, MAX_HOST_BYTES),
    "ephemeral": (0, KEY_BYTES),
}
# Field -> the numbers that it may be, from .. to.
NUMBERS: Final[dict[str, tuple[int, int]]] = {
    "attempt": (1, MAX_ATTEMPTS),
    "sent_us": (-MAX_TIME_US, MAX_TIME_US),
    "time_us": (-MAX_TIME_US, MAX_TIME_US),
    "offset_us": (-MAX_TIME_US, MAX_TIME_US),
    "port": (1, 65_535),
    "broker": (1, MAX_COUNT - 1),
    "network": (1, MAX_COUNT - 1),
    "members": (1, MAX_MEMBERS),
    "brokers": (0, MAX_COUNT - 1),
    "kind": (0, 255),
    "lifetime_s": (0, MAX_LIFETIME_S),
    "connections": (0, MAX_COUNT - 1),
    "links": (0, MAX_COUNT - 1),
    "memory_total_bytes": (0, MAX_BYTES),
    "memory_free_bytes": (0, MAX_BYTES),
}


def encode_body(message: Message) -> tuple[Kind, bytes]:
    return _KIND_OF[type(message)], _ENCODER.encode(message)


def encode(message: Message) -> bytes:
    """One whole datagram."""
    kind, body = encode_body(message)
    if DATAGRAM_PREFIX_BYTES + len(body) > MAX_DATAGRAM_BYTES:
        raise BugError(
            f"a {kind.name} of {DATAGRAM_PREFIX_BYTES + len(body)} bytes, the most is {MAX_DATAGRAM_BYTES}"
        )
    return pack(kind, body)


def decode(data: bytes) -> Message:
    """Of a datagram that a driver let pass; PeerError if it is none of discovery, or out of bounds."""
    return decode_body(datagram_kind(data), data[DATAGRAM_PREFIX_BYTES:])


def decode_body(kind: int, body: bytes) -> Message:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise PeerError(f"a datagram of kind {kind} is none of discovery")
    try:
        message = decoder.decode(body)
    except _UNREADABLE as error:
        raise PeerError(f"malformed {Kind(kind).name}: {error}") from None
    _check(message)
    return message


def padded(message: Message, least: int) -> Message:
    """A message that a cookie may answer, so that its datagram has at least so many bytes; others as they
    are."""
    if not isinstance(message, Request | Advertise | Announce):
        return message
    short = least - DATAGRAM_PREFIX_BYTES - len(_ENCODER.encode(message))
    return message if short <= 0 else msgspec.structs.replace(message, padding=bytes(short))


def _check(message: msgspec.Struct) -> None:
    for field in message.__struct_fields__:
        value = getattr(message, field)
        if isinstance(value, Usage):
            _check(value)
        elif isinstance(value, bytes | str):
            least, most = _LENGTHS.get(field, (0, MAX_DATAGRAM_BYTES))
            if not least <= len(value.encode() if isinstance(value, str) else value) <= most:
                raise PeerError(f"{field} of {len(value)} bytes, it has {least} to {most}")
            if isinstance(value, str) and not value.isprintable():
                raise PeerError(f"{field} is not printable")
        elif isinstance(value, int):
            least, most = NUMBERS[field]
            if not least <= value <= most:
                raise PeerError(f"{field} = {value}, it is {least} to {most}")
        elif isinstance(value, float):
            if not 0.0 <= value <= 1.0:  # so is no NaN
                raise PeerError(f"{field} = {value}, it is 0 to 1")
        elif len(value) > MAX_TRANSPORTS or any(
            len(transport.encode()) > MAX_TRANSPORT_BYTES for transport in value
        ):
            raise PeerError(
                f"{len(value)} transports, at most {MAX_TRANSPORTS} of {MAX_TRANSPORT_BYTES} bytes"
            )
    address = getattr(message, "address", None)
    if address is not None:
        check_address(address)
    key = getattr(message, "ephemeral" if isinstance(message, Sealed) else "key", b"")
    if not isinstance(message, Ping | Pong) and len(key) not in (0, KEY_BYTES):
        raise PeerError(f"a key of {len(key)} bytes, it has {KEY_BYTES}")
