"""What a driver tells its broker."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from postroad.seam.datagrams import Datagram
from postroad.seam.storage import StorageInput
from postroad.seam.tracking import FiltersRead, NotKept


@dataclass(frozen=True, slots=True)
class Opened:
    """A connection is open, inbound or dialled by us; `certificate` is the peer's verified name.

    Of two connections the later has the higher number.
    """

    connection: int
    dialled: str | None = None
    certificate: str | None = None
    loopback: bool = True
    host: str = ""  # the peer's, as an Endpoint writes it: its datagrams come from there, and go there


class Received(msgspec.Struct, frozen=True, gc=False):
    """One whole frame came in."""

    connection: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    connection: int


@dataclass(frozen=True, slots=True)
class DialFailed:
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How busy this node is. At most one a second, the first of a turn that takes place anyway, and in turns
    without other inputs one in five seconds: an idle core is not woken for it, and one that is asked how busy
    its node is has the answer of that moment."""

    cpu_share: float  # of all cores of the machine, 0 to 1, since the sample before
    process_cpu_share: float  # of this process, 1 for a whole core
    memory_total_bytes: int  # of the machine
    memory_free_bytes: int  # what programs could still have
    connections: int


Input = Opened | Received | Datagram | Closed | DialFailed | Sample | FiltersRead | NotKept | StorageInput
