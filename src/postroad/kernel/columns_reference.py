"""The rows of a checked frame as columns: what `columns.pyx` means, in plain Python.

Offsets are 32-bit and begin with 0, as Arrow has them. Attributes of all rows follow each other: the map
offsets say which are whose, the kinds (layout.py) which of the columns of values holds one.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import Final

from postroad.errors import BugError
from postroad.kernel.layout import BOOLEAN, EVENT_HEADER, FRAME_HEADER, FRAME_HEADER_BYTES, TEXT

_MAX_BYTES: Final = (1 << 31) - 1

# Offsets and bytes of the topics and of the payloads; offsets of the maps; offsets and bytes of the names;
# kinds; offsets and bytes of the texts; numbers of 8 bytes, an integer, a float, or 0 or 1.
Columns = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]


def columns(data: bytes) -> Columns:
    count = FRAME_HEADER.unpack_from(data)[4] if len(data) >= FRAME_HEADER_BYTES else -1
    if count < 0 or len(data) > _MAX_BYTES or count > len(data) // FRAME_HEADER_BYTES - 1:
        raise BugError("the columns of something that is not a checked frame")
    topics: list[bytes] = []
    payloads: list[bytes] = []
    counts: list[int] = []
    attributes: list[tuple[bytes, int, bytes, bytes]] = []
    at = FRAME_HEADER_BYTES + EVENT_HEADER.size * count
    try:
        for row in range(count):
            header = EVENT_HEADER.unpack_from(data, FRAME_HEADER_BYTES + EVENT_HEADER.size * row)
            _, _, _, topic, size, payload, _, number, _ = header
            topics.append(_cut(data, at, topic))
            row_attributes = _attributes(_cut(data, at + topic, size), number)
            attributes += row_attributes
            counts.append(len(row_attributes))
            payloads.append(_cut(data, at + topic + size, payload))
            at += topic + size + payload
    except (IndexError, struct.error):
        at = -1
    if at != len(data):
        raise BugError("the columns of something that is not a checked frame")
    names, texts = [name for name, _, _, _ in attributes], [text for _, _, text, _ in attributes]
    return (
        *(_offsets(list(map(len, topics))), b"".join(topics)),
        *(_offsets(list(map(len, payloads))), b"".join(payloads)),
        _offsets(counts),
        *(_offsets(list(map(len, names))), b"".join(names)),
        bytes(kind for _, kind, _, _ in attributes),
        *(_offsets(list(map(len, texts))), b"".join(texts)),
        b"".join(number for _, _, _, number in attributes),
    )


def _attributes(data: bytes, count: int) -> list[tuple[bytes, int, bytes, bytes]]:
    """(name, kind, text, number) of each."""
    attributes: list[tuple[bytes, int, bytes, bytes]] = []
    at = 0
    for _ in range(count):
        name = _cut(data, at + 1, data[at])
        at += 1 + len(name)
        kind = data[at]
        text, number = b"", bytes(8)
        if kind == TEXT:
            text = _cut(data, at + 3, int.from_bytes(_cut(data, at + 1, 2), "little"))
            at += 3 + len(text)
        elif kind < BOOLEAN:
            number = _cut(data, at + 1, 8)
            at += 9
        elif kind == BOOLEAN:
            number = _cut(data, at + 1, 1) + bytes(7)
            at += 2
        else:
            raise IndexError(kind)
        attributes.append((name, kind, text, number))
    if at != len(data):
        raise IndexError(at)
    return attributes


def _cut(data: bytes, start: int, size: int) -> bytes:
    if start + size > len(data):
        raise IndexError(start)
    return data[start : start + size]


def _offsets(sizes: list[int]) -> bytes:
    return struct.pack(f"<{len(sizes) + 1}i", *accumulate(sizes, initial=0))
