"""The other end of a connection that came up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from postroad.wire.frames import Limits

Role = Literal["client", "broker", "direct"]  # direct: a broker that is not here as a neighbour


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    connection: int
    role: Role
    name: str
    broker: int  # role "broker" or "direct": its number, node id, boot, and the cost both ends give the link
    node: bytes
    boot: int
    cost: int
    publisher: int  # role "client": the number that its message ids bear
    principal: str  # "" for a broker that we dialled
    limits: Limits  # of both sides the smaller
    dialled: str | None  # the address, if we dialled
    resumed: bool = False  # role "client": `publisher` goes on from an earlier connection
    replaces: int | None = None  # the connection whose place this one takes; it is being closed
    host: str = ""  # as an Endpoint writes it; "" if the driver does not know
    datagrams: int = 0  # its UDP port; 0: none that is known
    datagram_key: bytes = b""  # of datagrams to and from it; b"": none are exchanged
    life: int = 0  # role "broker" or "direct": as `Identity` has it
