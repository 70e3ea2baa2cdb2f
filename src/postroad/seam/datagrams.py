"""What a core asks of UDP and what it hears: single datagrams, which may be lost, repeated and overtaken.

A datagram is for the endpoint named, or for all who joined a group. Nobody is told that one was lost: not
by the network, nor by a driver whose socket is full, nor for an address that leads nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from postroad.errors import BugError
from postroad.wire.datagrams import MAX_DATAGRAM_BYTES

# Host and port. The host is a numeric address, IPv4 ("192.0.2.1"), or IPv6 ("2001:db8::1"), with the name or
# number of an interface where the address needs it ("fe80::1%eth0"): nobody asks the DNS for a datagram.
Endpoint = tuple[str, int]


class SendTo(msgspec.Struct, frozen=True, gc=False):
    """Send one datagram to an endpoint or a group. There may be one per event, so it is a cheap one."""

    endpoint: Endpoint
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) > MAX_DATAGRAM_BYTES:
            raise BugError(
                f"a datagram of {len(self.data)} bytes for {self.endpoint}, the most is {MAX_DATAGRAM_BYTES}"
            )


class Datagram(msgspec.Struct, frozen=True, gc=False):
    """One datagram came in; by a group that this node joined, if one is named."""

    source: Endpoint
    data: bytes
    group: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Hear what is sent to this multicast address and port. Said again, it is tried again if it failed."""

    group: Endpoint


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    group: Endpoint
