"""How discovery behaves. Times in microseconds, unless the name says otherwise."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Final

from postroad.discovery.memory import REMEMBERED
from postroad.errors import UsageError
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.discovery import MAX_LIFETIME_S, MAX_PLACE_BYTES

MULTICAST_GROUP: Final = "239.255.74.20:7420"  # of the block for use within one organisation
MAX_NODES: Final = 8  # discovery nodes that are asked, or advertised to, at a time
MAX_TARGETS: Final = 100
MAX_RESPONSES: Final = 1_000
MAX_PINGS: Final = 20
MAX_REALMS: Final = 100
MAX_LINKS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What each part of a response counts when brokers are weighed (paper 9). More is better."""

    free_memory: float = 1.0  # of all memory that is free
    memory_gib: float = 0.005  # of each GiB in the machine
    cpu: float = -2.0  # of all cores that are busy
    connections: float = -0.01  # of each one
    links: float = -0.05  # of each one
    delay_ms: float = -0.02  # of each millisecond on the way to us


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """How a requester goes about it (spec V7)."""

    timeout_us: int = 5 * SECOND_US  # after which there is a choice, or there is none
    gather_us: int = 2 * SECOND_US  # responses are waited for, once there is one
    responses: int = 100  # after which no more are waited for
    targets: int = 10  # that are pinged
    pings: int = 3  # to each of them
    retransmit_us: int = 300 * MILLISECOND_US  # after silence, on average
    weights: Weights = field(default_factory=Weights)

    def __post_init__(self) -> None:
        if min(self.timeout_us, self.gather_us, self.retransmit_us) <= 0:
            raise UsageError("times of discovery are positive")
        for name, most in (("responses", MAX_RESPONSES), ("targets", MAX_TARGETS), ("pings", MAX_PINGS)):
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"discovery: {name} = {getattr(self, name)}, it is 1 to {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryConfig:
    """A broker's part in it. Addresses are numeric: nobody asks the DNS for a datagram."""

    enabled: bool = True  # whether anything at all is answered
    nodes: tuple[str, ...] = ()  # HOST:PORT of discovery nodes to advertise to
    multicast: bool = True  # whether the driver is to name a group
    group: str = ""  # HOST:PORT of the multicast group; "": none
    mdns: bool = False  # announce it by mDNS/DNS-SD, too
    token: str = ""  # shown to discovery nodes, and where brokers to link with are looked for
    join: bool = False  # look for brokers to link with
    links: int = 2  # that many, so that one may die
    geography: str = ""
    institution: str = ""
    realms: tuple[str, ...] = ()  # networks such as 10.0.0.0/8 whose requests are answered; none: all
    private_nodes: bool = False  # advertise to private discovery nodes that announce themselves (spec V3)
    remember: int = REMEMBERED  # requests of which a repetition is recognised
    advertise_us: int = 20 * SECOND_US
    lifetime_s: int = 60  # of an advertisement that is not renewed
    search: SearchSettings = field(default_factory=SearchSettings)

    def __post_init__(self) -> None:
        if len(self.nodes) > MAX_NODES:
            raise UsageError(f"{len(self.nodes)} discovery nodes, at most {MAX_NODES} are told")
        if not 1 <= self.links <= MAX_LINKS:
            raise UsageError(f"discovery: links = {self.links}, it is 1 to {MAX_LINKS}")
        if not 0 < self.advertise_us < self.lifetime_s * SECOND_US <= MAX_LIFETIME_S * SECOND_US:
            raise UsageError(f"an advertisement is renewed within its lifetime, at most {MAX_LIFETIME_S} s")
        if max(len(self.geography.encode()), len(self.institution.encode())) > MAX_PLACE_BYTES:
            raise UsageError(f"a geography or an institution has at most {MAX_PLACE_BYTES} bytes")
        check_realms(self.realms)


def check_realms(realms: tuple[str, ...]) -> None:
    if len(realms) > MAX_REALMS:
        raise UsageError(f"{len(realms)} realms, the most is {MAX_REALMS}")
    for realm in realms:
        try:
            ipaddress.ip_network(realm)
        except ValueError:
            raise UsageError(f"{realm!r} is not a network such as 10.0.0.0/8") from None
