"""Frames, and what damage makes of them."""

from __future__ import annotations

import random
import struct

import msgspec

from postroad.events import BatchBuilder, EventBatch
from postroad.events.attributes import Value
from postroad.wire.frames import DEFAULT_LIMITS, Kind

LIMITS = msgspec.structs.replace(
    DEFAULT_LIMITS,
    batch_bytes=4096,
    batch_events=20,
    event_bytes=700,
    attributes=8,
    topic_bytes=40,
    topic_depth=5,
)
INTERESTING = [
    0,
    1,
    2,
    3,
    4,
    0x1F,
    0x20,
    0x23,
    0x2B,
    0x2F,
    0x7F,
    0x80,
    0xA0,
    0xC2,
    0xE0,
    0xED,
    0xF0,
    0xF4,
    0xFF,
]
LENGTH_FIELDS = [32, 34, 36, 42]  # of an event header: topic, attributes, payload, number of attributes


def some_frame(chance: random.Random) -> bytes:
    builder = BatchBuilder()
    samples: list[Value] = ["", "x", "größe", "日本語", 0, -1, 1 << 40, 1.5, float("-inf"), True, False]
    for number in range(chance.randrange(6)):
        levels = [
            chance.choice(["a", "b", "größe", "", "orders", "€uro"]) for _ in range(chance.randrange(1, 5))
        ]
        attributes = {
            chance.choice("abcdé") * chance.randrange(1, 4): chance.choice(samples)
            for _ in range(chance.randrange(5))
        }
        payload = chance.randbytes(chance.randrange(40))
        builder.add(number.to_bytes(16), "/".join(levels) or "t", attributes, payload, LIMITS)
    frame = builder.finish(channel=1)
    if frame[8] and chance.random() < 0.5:
        batch = EventBatch.parse(frame, LIMITS)
        return batch.with_ticks(50, kind=Kind.KNOWLEDGE, pubend=9, start=40, channel=2).data
    return frame


def mutate(frame: bytes, chance: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(data)) if data else 0
        match chance.randrange(8):
            case 0 if data:
                data[at] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[at] = chance.choice(INTERESTING)
            case 2:
                del data[at:]
            case 3:
                data[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 4:
                del data[at : at + chance.randrange(1, 9)]
            case 5 if len(data) >= 96:
                row = chance.randrange((len(data) - 48) // 48)
                field = 48 + 48 * row + chance.choice(LENGTH_FIELDS)
                value = chance.choice((0, 1, 255, 0xFFFF, data[field] + 1, max(data[field] - 1, 0)))
                struct.pack_into("<H", data, field, value & 0xFFFF)
            case 6 if len(data) >= 48:
                struct.pack_into(
                    "<I", data, 8, chance.choice((0, 1, 2, data[8] + 1, 19, 0xFFFF_FFFF, 0x0555_5555))
                )
            case _ if len(data) >= 48:
                struct.pack_into(
                    "<q", data, chance.choice((24, 32)), chance.choice((0, -1, 49, 1 << 62, -(1 << 63)))
                )
    if chance.random() < 0.8 and len(data) >= 4:
        struct.pack_into("<I", data, 0, len(data))  # else nearly all would fall at the first check
        if len(data) >= 48:
            data[12:16] = bytes(4)  # and at the checksum
    return bytes(data)
