"""What is known of one connection: its settings, its phase, and which frames a phase takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from postroad.clocks import ClockOffset
from postroad.errors import PostroadError, RedundantError, SameBrokerError, UsageError
from postroad.ids import MAX_COST
from postroad.links.handshake import MAX_WINDOW, MIN_WINDOW
from postroad.seam.peers import Peer
from postroad.seam.turn import Turn
from postroad.units import MIB, MILLISECOND_US, SECOND_US
from postroad.wire.frames import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How connections are kept."""

    cost: int = 1  # of this broker's links; the larger of both ends holds
    token: str = ""  # said when dialling another broker
    datagrams: int = 0  # our UDP port, said to every peer; 0: none
    address: str = ""  # where others reach us, said to every peer; "": not known
    broker_window: int = 8 * MIB  # batch bytes in flight to us
    client_window: int = 4 * MIB
    handshake_us: int = 10 * SECOND_US
    ping_us: int = 5 * SECOND_US  # of silence before asking
    dead_us: int = 15 * SECOND_US  # of silence before giving up
    measure_us: int = 30 * SECOND_US  # a busy link is pinged this often, for its round trip
    redial_first_us: int = 200 * MILLISECOND_US
    redial_last_us: int = 2 * SECOND_US
    redial_rest_us: int = 60 * SECOND_US  # an address that leads to ourselves or to a linked broker

    def __post_init__(self) -> None:
        if not 1 <= self.cost <= MAX_COST:
            raise UsageError(f"a link cost of {self.cost}; it is between 1 and {MAX_COST}")
        for window in (self.broker_window, self.client_window):
            if not MIN_WINDOW <= window <= MAX_WINDOW:
                raise UsageError(f"a window of {window} bytes; it is between {MIN_WINDOW} and {MAX_WINDOW}")
        if not 0 < self.ping_us < self.dead_us or self.handshake_us <= 0 or self.measure_us <= 0:
            raise UsageError(
                f"a link pings after {self.ping_us} us and gives up after {self.dead_us}; it measures every "
                f"{self.measure_us} and waits {self.handshake_us} for a handshake: all are positive, and "
                "a ping comes before giving up"
            )
        if not 0 < self.redial_first_us <= self.redial_last_us or self.redial_rest_us <= 0:
            raise UsageError(
                f"waits of {self.redial_first_us} us first, {self.redial_last_us} at last and "
                f"{self.redial_rest_us} at rest before dialling again: all are positive, and the first "
                "is not above the last"
            )


SHUTTING_DOWN: Final = "the broker is shutting down"


def level_of(error: PostroadError) -> str:
    """How much people need to know of a connection that closes for this reason."""
    if isinstance(error, SameBrokerError):
        return "warning"
    if isinstance(error, RedundantError):
        return "debug"
    return "info" if str(error) == SHUTTING_DOWN else "warning"


class Phase(Enum):
    DIALLED = "dialled"  # we said HELLO, WELCOME is due
    ACCEPTED = "accepted"  # HELLO is due
    CLIENT = "client"
    BROKER = "broker"
    DIRECT = "direct"  # a broker that is no neighbour, or not here as one
    CLOSING = "closing"  # the driver was asked to close it


_UPKEEP: Final = frozenset({Kind.REFUSE, Kind.PING, Kind.PONG, Kind.CREDIT})

# The frames `Links` handles itself; all others are for the rooms.
OWN_KINDS: Final = _UPKEEP | {Kind.HELLO, Kind.WELCOME}

# Phase -> the kinds of frames that the peer may send in it. What is not listed is the peer's error.
TAKES: Final[dict[Phase, frozenset[Kind]]] = {
    Phase.DIALLED: frozenset({Kind.WELCOME, Kind.REFUSE}),
    Phase.ACCEPTED: frozenset({Kind.HELLO}),
    Phase.CLIENT: _UPKEEP
    | {Kind.PUBLISH, Kind.BEST_EFFORT, Kind.SUBSCRIBE, Kind.UNSUBSCRIBE, Kind.ACK, Kind.REQUEST}
    | {Kind.SEND, Kind.END_SESSION, Kind.RECEIVE, Kind.SETTLE, Kind.UNRECEIVE, Kind.REPAIRED},
    Phase.BROKER: _UPKEEP
    | {
        Kind.BEST_EFFORT,
        Kind.KNOWLEDGE,
        Kind.SILENCE,
        Kind.ATTACH,
        Kind.DETACH,
        Kind.NACK,
        Kind.STAMP,
        Kind.RELEASE,
        Kind.TOPOLOGY,
        Kind.DIGEST,
        Kind.INTEREST,
        Kind.INTEREST_PULL,
        Kind.QUERY,
        Kind.ANSWER,
        Kind.DISCOVER,
    },
    Phase.DIRECT: _UPKEEP | {Kind.DIRECT},
    Phase.CLOSING: frozenset(),
}


@dataclass(frozen=True, slots=True)
class DirectDial:
    """A dial beside the links. `failed(turn, broker)` is called if it does not come up."""

    broker: int
    failed: Callable[[Turn, int], None]


@dataclass(slots=True)
class Connection:
    number: int
    dialled: str | None
    certificate: str | None
    loopback: bool
    phase: Phase
    opened_us: int
    heard_us: int
    host: str = ""  # the peer's; "": not known
    token_digest: str = ""  # of the token in its HELLO
    bytes_in: int = 0  # of all its frames
    timer_us: int = 0  # when its entry in the heap of timers is due
    # between brokers: how links to one peer rank, see the theory of links.py; the greatest stays
    rank: tuple[int, bool, int, int] = (0, False, 0, 0)
    hello_us: int = 0  # time_us of the HELLO we sent
    direct: DirectDial | None = None  # that it comes of
    peer: Peer | None = None  # set once up, kept while closing
    superseded: bool = False  # another connection took its place
    redundant: bool = False  # it ended, or will, because another does its work
    up_us: int = 0
    pinged_us: int = 0  # last ping
    asked_us: int | None = None  # first ping since we last heard anything
    rtt_us: int | None = None
    clock: ClockOffset = field(default_factory=ClockOffset)  # between brokers: the peer's
    window_in: int = 0  # what we announced
    credit_in: int = 0  # what the peer may still send; below zero by at most one frame
    unconsumed: int = 0  # received and not yet consumed
    due: int = 0  # consumed and not yet given back: window_in == credit_in + unconsumed + due
    window_out: int = 0
    credit_out: int = 0
