"""What is saved of a durable pubend and of those who publish there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from postroad.errors import UsageError
from postroad.seam.storage import LogStream, StreamEnd, StreamKind
from postroad.streams.spans import Span
from postroad.wire.frames import Limits

# Those that a record is checked against when it is read.
LIMITS: Final = ("event_bytes", "batch_bytes", "batch_events", "attributes", "topic_bytes", "topic_depth")


class Facts(msgspec.Struct, frozen=True):
    start: int
    reserved: int
    hole: Span = (0, 0)
    limits: dict[str, int] = {}  # the widest under which what is kept was written


class Checkpoint(msgspec.Struct, frozen=True):
    tick: int  # publishers' last ids and sizes are saved as they were up to here
    size: int  # bytes ever logged
    marks: list[tuple[int, int]]  # (tick, bytes ever logged up to it)


def read_facts(_key: bytes, value: bytes) -> Facts:
    return msgspec.msgpack.decode(value, type=Facts)


def widest(limits: Limits, before: Mapping[str, int]) -> dict[str, int]:
    return {name: max(getattr(limits, name), before.get(name, 0)) for name in LIMITS}


def refuse_lower_limits(
    facts: Mapping[bytes, bytes], streams: Mapping[LogStream, StreamEnd], limits: Limits
) -> None:
    """UsageError if events are kept that these limits may not allow: they could be sent to nobody."""
    for key, value in facts.items():
        known = read_facts(key, value)
        end = streams.get(LogStream(StreamKind.EVENTS, int.from_bytes(key, "big")))
        if end is None or end.last <= max(end.chopped, known.start):
            continue
        for name in LIMITS:
            asked, written = getattr(limits, name), known.limits.get(name, 0)
            if asked < written:
                raise UsageError(
                    f"limits.{name} = {asked} is below the {written} under which the durable events on disk"
                    " were written: put it back until they are all acknowledged and released, or begin with"
                    " a new data folder"
                )


def read_checkpoint(value: bytes) -> Checkpoint:
    return msgspec.msgpack.decode(value, type=Checkpoint)


def read_publisher(key: bytes, value: bytes) -> tuple[bytes, str] | Checkpoint:
    """The last id of a publisher and whose ids these are; the checkpoint where the key names none."""
    if len(key) == 8:
        return read_checkpoint(value)
    if len(value) < 8:
        raise ValueError("an id is cut short")
    return value[:8], value[8:].decode()
