"""What a core asks of the log and what it hears back. Pure: cores and both drivers import this.

A log stream (section 4.2 of the durable paper) is an ordered run of records; each record covers ticks
(first, last] and begins where the one before it in its stream ended, or later. What no readable record
covers, up to the stream's last tick, is `missing`: chopped, damaged on disk, or never logged because an
append failed. So a core that knows it lost something leaves a hole and the hole stays honest.

After an `AppendFailed` every `Append` and `Save` that was asked for before the core heard of it fails too,
since it may build on what failed; `Chop` and `Read` are not touched by it. On a full disk a `Save` is not
either, since it may be what releases events: so a core that saves how far a log stream got before it heard
`Appended` must be able to tell, after a restart, that the log is behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from postroad.errors import PostroadError, StorageError

MAX_TICK: Final = (1 << 63) - 1  # Chop(stream, MAX_TICK): the stream is over, nothing of it is kept


class NoRoom(StorageError):
    """The disk is full."""


class StreamKind(IntEnum):
    """What a log stream holds. The numbers are on disk."""

    EVENTS = 1  # of a pubend
    FILTERING = 2  # which events of a pubend were for whom
    QUEUES = 3  # the writes of an arc's replica
    BODIES = 4  # of an arc's messages that memory has no room for


class LogStream(NamedTuple):
    """The name of a log stream. Each kind has ids of its own: a pubend's events and its filtering records are
    two streams of one id. `id` is an unsigned number of 64 bits."""

    kind: StreamKind
    id: int

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.id:016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Append one record to a log stream; answered by Appended or AppendFailed with the same tag."""

    stream: LogStream
    first: int
    last: int
    data: bytes
    tag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chop:
    """Everything of the stream up to and including this tick may be discarded; reads miss it at once."""

    stream: LogStream
    tick: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Records that overlap (start, end], oldest first; the first that fills limit_bytes is the last one."""

    stream: LogStream
    start: int
    end: int
    limit_bytes: int
    tag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Upsert (value) or delete (None) metadata rows. Durable after the Appends asked for before it."""

    table: str
    rows: tuple[tuple[bytes, bytes | None], ...]
    tag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """The record is on disk. In order per stream."""

    tag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendFailed:
    """The record is not in the log and will not be after a restart either."""

    tag: int
    error: PostroadError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDone:
    """`records` are (first, last, data). With `more` the answer ends at the last record's last tick."""

    tag: int
    records: tuple[tuple[int, int, bytes], ...]
    missing: tuple[tuple[int, int], ...]
    more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    tag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    tag: int
    error: PostroadError


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """What a start found of a log stream. `suspect`: its latest records may be among what cannot be read."""

    last: int
    chopped: int
    suspect: bool


Reader = Callable[[bytes, bytes], object]  # decodes a row of metadata, given as key and value


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a start found on disk: tables of metadata, which `load` reads, and the log streams.

    Damaged rows are not among those that `load` returns. A driver that cannot leave them out without losing
    something in silence does not start.
    """

    load: Callable[[str, Reader], Mapping[bytes, bytes]]
    streams: Mapping[LogStream, StreamEnd]


StorageEffect = Append | Chop | Read | Save
StorageInput = Appended | AppendFailed | ReadDone | Saved | SaveFailed
