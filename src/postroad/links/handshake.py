"""The first two messages of a connection: what is said, and what is believed.

The dialling side says HELLO, the accepting side answers WELCOME or REFUSE. Both are checked field by
field before anything is done with them. Limits that hold on a connection are the smaller of both sides.
"""

from __future__ import annotations

from typing import Final

import msgspec

from postroad.errors import PeerError
from postroad.ids import MAX_COST, MAX_NAME, NODE_BYTES, check_name, name_fits
from postroad.seam.peers import Role
from postroad.units import KIB, MIB
from postroad.wire.datagrams import DATAGRAM_KEY_BYTES
from postroad.wire.frames import MAX_PORT, PROTOCOL_VERSION, Hello, Limits, Welcome, check_address

MIN_WINDOW: Final = 64 * KIB
MAX_WINDOW: Final = 64 * MIB  # a driver keeps this much for a peer that does not read, and no more
MAX_TOKEN: Final = 4_096
MAX_KEY_BYTES: Final = 64
MAX_TIME_US: Final = (1 << 62) - 1
_MAX_U32: Final = (1 << 32) - 1

# Less than this is a mistake rather than a wish: nothing useful fits.
MIN_LIMITS: Final = Limits(
    event_bytes=256,
    batch_bytes=KIB,
    batch_events=1,
    attributes=0,
    topic_bytes=16,
    topic_depth=1,
    subscriptions=1,
)


def smaller(limits: Limits, other: Limits) -> Limits:
    return Limits(
        **{name: min(getattr(limits, name), getattr(other, name)) for name in Limits.__struct_fields__}
    )


def _check_common(*, version: int, limits: Limits, window: int, time_us: int, cost: int) -> None:
    if version != PROTOCOL_VERSION:
        raise PeerError(f"the peer speaks protocol version {version}, this side {PROTOCOL_VERSION}")
    for name in Limits.__struct_fields__:
        least = getattr(MIN_LIMITS, name)
        if getattr(limits, name) < least:
            raise PeerError(f"the peer's limit {name} is {getattr(limits, name)}, the least is {least}")
    if not MIN_WINDOW <= window <= MAX_WINDOW:
        raise PeerError(f"a window of {window} bytes; it is between {MIN_WINDOW} and {MAX_WINDOW}")
    if not 0 <= time_us <= MAX_TIME_US:
        raise PeerError(f"the peer's clock says {time_us} us; it is between 0 and {MAX_TIME_US}")
    if not 1 <= cost <= MAX_COST:
        raise PeerError(f"a link cost of {cost}; it is between 1 and {MAX_COST}")


def _check_broker(greeting: Hello | Welcome) -> None:
    check_name(greeting.name)
    if not 0 <= greeting.broker <= _MAX_U32 or len(greeting.node) != NODE_BYTES:
        raise PeerError(
            f"broker number {greeting.broker} with a node id of {len(greeting.node)} bytes; a number is at"
            f" most {_MAX_U32}, and a node id has {NODE_BYTES} bytes"
        )
    if not 1 <= greeting.boot <= _MAX_U32 or not 0 <= greeting.life <= _MAX_U32:
        raise PeerError(
            f"a boot of {greeting.boot} and a life of {greeting.life}; they are at most {_MAX_U32}, and a"
            " boot is at least 1"
        )


def _check_reach(message: Hello | Welcome) -> None:
    if not 0 <= message.datagrams <= MAX_PORT:
        raise PeerError(f"a UDP port of {message.datagrams}; it is between 1 and {MAX_PORT}, or 0 for none")
    check_address(message.address)
    if isinstance(message, Welcome) and len(message.datagram_key) not in (0, DATAGRAM_KEY_BYTES):
        raise PeerError(
            f"a key of {len(message.datagram_key)} bytes for datagrams; it has {DATAGRAM_KEY_BYTES}, or none"
        )


def check_hello(hello: Hello) -> Role:
    """The role; PeerError unless every field is within its bounds."""
    _check_common(
        version=hello.version,
        limits=hello.limits,
        window=hello.window,
        time_us=hello.time_us,
        cost=hello.cost,
    )
    _check_reach(hello)
    if len(hello.token) > MAX_TOKEN:
        raise PeerError(f"a token of {len(hello.token)} characters, the most is {MAX_TOKEN}")
    if hello.role in ("broker", "direct"):
        _check_broker(hello)
        return "broker" if hello.role == "broker" else "direct"
    if hello.role != "client":
        raise PeerError(f"the role is client, broker or direct, not {hello.role[:40]!r}")
    if not name_fits(hello.name):
        raise PeerError(
            f"the client's name {hello.name[:40]!r} has at most {MAX_NAME} bytes and is printable"
        )
    if not 0 <= hello.publisher <= _MAX_U32 or len(hello.resume_key) > MAX_KEY_BYTES:
        raise PeerError(
            f"publisher {hello.publisher} with a key of {len(hello.resume_key)} bytes; a number is at most "
            f"{_MAX_U32}, a key has at most {MAX_KEY_BYTES} bytes"
        )
    return "client"


def check_welcome(welcome: Welcome) -> None:
    """PeerError unless every field is within its bounds."""
    _check_common(
        version=welcome.version,
        limits=welcome.limits,
        window=welcome.window,
        time_us=welcome.time_us,
        cost=welcome.cost,
    )
    _check_reach(welcome)
    _check_broker(welcome)


def printable(text: str, limit: int = 500) -> str:
    """What a peer wrote, fit for one line of our log."""
    return "".join(character if character.isprintable() else "?" for character in text[:limit])


def same_routing_limits(limits: Limits, other: Limits) -> bool:
    """Whether brokers take the same events. If not, an event one of them accepts cannot pass the other."""
    return msgspec.structs.replace(limits, subscriptions=other.subscriptions) == other
