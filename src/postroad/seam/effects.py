"""What the cores ask of their driver. Nothing else leaves a core."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from postroad.errors import PostroadError
from postroad.seam.datagrams import JoinGroup, LeaveGroup, SendTo
from postroad.seam.storage import StorageEffect
from postroad.seam.tracking import Keep, ReadFilters


class Send(msgspec.Struct, frozen=True, gc=False):
    """Write these bytes (whole frames) to a connection. There is one per delivery, so it is a cheap one."""

    connection: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection once what was sent to it is flushed; `error` says why, for the log."""

    connection: int
    error: PostroadError | None = None


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a connection to `HOST:PORT`; the driver answers with Opened or DialFailed."""

    address: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log."""

    level: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """An event that bears the trace of an application came to this broker."""

    traceparent: str
    id: bytes
    topic: str
    came_from: str  # the client, or the neighbour
    published: bool  # by that client, here
    at_us: int


Effect = (
    Hop | Send | SendTo | Close | Dial | Note | JoinGroup | LeaveGroup | Keep | ReadFilters | StorageEffect
)
