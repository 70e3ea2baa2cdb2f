"""What is saved of a durable pubend and of those who publish there."""

from __future__ import annotations

import msgspec

from postroad.durable.spans import Span


class Facts(msgspec.Struct, frozen=True):
    start: int
    reserved: int
    hole: Span = (0, 0)


class Checkpoint(msgspec.Struct, frozen=True):
    tick: int  # publishers' last ids and sizes are saved as they were up to here
    size: int  # bytes ever logged
    marks: list[tuple[int, int]]  # (tick, bytes ever logged up to it)


def read_facts(_key: bytes, value: bytes) -> Facts:
    return msgspec.msgpack.decode(value, type=Facts)


def read_checkpoint(value: bytes) -> Checkpoint:
    return msgspec.msgpack.decode(value, type=Checkpoint)


def read_publisher(key: bytes, value: bytes) -> tuple[bytes, str] | Checkpoint:
    """The last id of a publisher and whose ids these are; the checkpoint where the key names none."""
    if len(key) == 8:
        return read_checkpoint(value)
    if len(value) < 8:
        raise ValueError("an id is cut short")
    return value[:8], value[8:].decode()
