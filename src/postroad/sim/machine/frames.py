"""Frames seen from outside: enough to put one into words and to find a message in it.

The simulator reads frames on its own, without the product's batch decoder, so that a fault in that
decoder cannot hide itself from the checkers.
"""

from __future__ import annotations

import struct
from typing import Final

from postroad.errors import PeerError
from postroad.ids import MessageId, pubend_text
from postroad.wire.frames import BATCH_KINDS, FRAME_PREFIX_BYTES, Kind, decode

BATCH_HEADER_BYTES: Final = 48
EVENT_HEADER_BYTES: Final = 48
LOST: Final = 1
_BATCH: Final = struct.Struct("<IBBHIIQqqII")
_MAX_WORDS: Final = 200


class BatchView:
    """The frame header of a batch frame and the ids and ticks in its event headers."""

    __slots__ = ("_frame", "channel", "count", "end", "kind", "lost", "pubend", "start")

    def __init__(self, frame: bytes) -> None:
        if len(frame) < BATCH_HEADER_BYTES:
            raise PeerError(f"a batch frame of {len(frame)} bytes")
        length, kind, _, flags, self.count, _, self.pubend, self.start, self.end, self.channel, _ = (
            _BATCH.unpack_from(frame)
        )
        if length != len(frame) or length < BATCH_HEADER_BYTES + self.count * EVENT_HEADER_BYTES:
            raise PeerError(f"a batch frame of {len(frame)} bytes says {length} and {self.count} events")
        self.kind = Kind(kind)
        self.lost = bool(flags & LOST)
        self._frame = frame

    def ids(self) -> list[bytes]:
        first = BATCH_HEADER_BYTES
        return [
            self._frame[at : at + 16]
            for at in range(first, first + self.count * EVENT_HEADER_BYTES, EVENT_HEADER_BYTES)
        ]

    def ticks(self) -> list[int]:
        first = BATCH_HEADER_BYTES + 16
        return [
            int.from_bytes(self._frame[at : at + 8], "little", signed=True)
            for at in range(first, first + self.count * EVENT_HEADER_BYTES, EVENT_HEADER_BYTES)
        ]


def split(data: bytes) -> list[bytes]:
    """The whole frames that one Send carries."""
    frames: list[bytes] = []
    position = 0
    while position < len(data):
        length = int.from_bytes(data[position : position + 4], "little")
        if length < FRAME_PREFIX_BYTES or position + length > len(data):
            raise PeerError(f"a node sent {len(data)} bytes that are not whole frames")
        frames.append(data[position : position + length])
        position += length
    return frames


def frame_text(frame: bytes) -> str:
    """A frame in one line."""
    kind = frame[4]
    try:
        if kind not in BATCH_KINDS:
            return f"{Kind(kind).name} {decode(frame)!r}"[:_MAX_WORDS]
        view = BatchView(frame)
    except (PeerError, ValueError) as error:
        return f"an unreadable frame of {len(frame)} bytes: {error}"
    ids = [f"{MessageId.from_bytes(i)}@{tick}" for i, tick in zip(view.ids(), view.ticks(), strict=True)]
    shown = " ".join(ids[:3]) + (f" … {ids[-1]}" if len(ids) > 3 else "")
    lost = " LOST" if view.lost else ""
    return (
        f"{view.kind.name}{lost} {pubend_text(view.pubend)} ({view.start}, {view.end}] "
        f"channel {view.channel} {view.count} events {shown}"
    )


def frame_mentions(frame: bytes, tags: frozenset[str]) -> bool:
    """Whether a batch frame carries one of these message ids or belongs to one of these pubends."""
    if frame[4] not in BATCH_KINDS:
        return False
    try:
        view = BatchView(frame)
    except PeerError:
        return False
    if pubend_text(view.pubend) in tags:
        return True
    return any(str(MessageId.from_bytes(i)) in tags for i in view.ids())
