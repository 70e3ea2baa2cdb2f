"""The kernel in plain Python: what each compiled function means, its oracle, and its fallback.

Functions here do what `frames.pyx` and `bloom.pyx` do, with the same checks in the same order, so that
both refuse the same frame for the same rule and row. `extents` is an array of count + 1 u32, as bytes:
where each row's heap begins in the frame, and where the last one ends.

Bloom filters (spec T2): two 64-bit mixes h1, h2 of an id, h2 odd, seed k positions:
position i = floor(mix(h1 + i * h2) * m / 2**64). Plain double hashing, (h1 + i * h2) mod m, has only m * m
patterns and cycles wherever h2 and m share a factor, which shows as soon as a small filter is to be right
99.999% of the time; mixing each step again makes the positions independent for every m, as the formula
(1 - (1 - 1/m)**(kn))**k assumes. The constants are part of the format of stored filters: never change them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import google_crc32c
import numpy as np
import numpy.typing as npt

from postroad.errors import BugError, TooLargeError, UsageError
from postroad.kernel.layout import (
    BATCH_VERSION,
    BOOLEAN,
    CHECKSUM_AT,
    EVENT_HEADER,
    EVENT_HEADER_BYTES,
    FLAG_DURABLE,
    FLAG_LOST,
    FLOAT,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    ID_BYTES,
    INTEGER,
    KIND_BEST_EFFORT,
    KIND_DELIVERY,
    KIND_KNOWLEDGE,
    KIND_PUBLISH,
    MAX_FRAME_BYTES,
    MAX_INTEGER,
    MAX_NAME_BYTES,
    MAX_U16,
    MIN_INTEGER,
    TEXT,
    Rule,
    Value,
)

# publisher, broker, time in milliseconds and counter of the id; tick, topic, attributes, payload
Row = tuple[int, int, int, int, int, str, dict[str, Value], bytes]

_FNV_OFFSET: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
_MASK: Final = (1 << 64) - 1
_ID: Final = struct.Struct(">IIQ")
_U16: Final = struct.Struct("<H")
_I64: Final = struct.Struct("<q")
_F64: Final = struct.Struct("<d")
_NO_EXTENTS: Final = b""


def fnv1a64(data: bytes) -> int:
    """The FNV-1a hash of 64 bits, by which topics are numbered."""
    value = _FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * _FNV_PRIME & _MASK
    return value


# ---------------------------------------------------------------- frames


def check_batch(
    data: bytes,
    batch_bytes: int,
    batch_events: int,
    event_bytes: int,
    attributes: int,
    topic_bytes: int,
    topic_depth: int,
) -> tuple[int, int, int, bytes]:
    """(0, -1, count, extents) of a sound frame, or (rule, row, 0, b"") of the first rule it breaks.

    The row is -1 when the rule is about the frame as a whole.
    """
    rule, count = _check_header(data, batch_bytes, batch_events)
    if rule:
        return rule, -1, 0, _NO_EXTENTS
    kind = data[4]
    last, end = FRAME_HEADER.unpack_from(data)[7:9]
    position = FRAME_HEADER_BYTES + count * EVENT_HEADER_BYTES
    extents = [position]
    for row in range(count):
        _, tick, number, topic_length, attributes_length, payload_length, flags, attribute_count, record = (
            EVENT_HEADER.unpack_from(data, FRAME_HEADER_BYTES + row * EVENT_HEADER_BYTES)
        )
        size = topic_length + attributes_length + payload_length
        if flags or record > (payload_length if kind == KIND_BEST_EFFORT else 0):
            rule = Rule.ROW_RESERVED
        elif not _tick_fits(kind, last, tick, end):
            rule = Rule.TICK
        elif topic_length == 0:
            rule = Rule.TOPIC_EMPTY
        elif topic_length > topic_bytes:
            rule = Rule.TOPIC_BYTES
        elif attribute_count > attributes:
            rule = Rule.ATTRIBUTES
        elif size > event_bytes:
            rule = Rule.EVENT_BYTES
        elif position + size > len(data):
            rule = Rule.HEAP_CUT
        else:
            middle = position + topic_length
            rule = _check_topic(data[position:middle], number, topic_depth) or _check_attributes(
                data[middle : middle + attributes_length], attribute_count
            )
        if rule:
            return rule, row, 0, _NO_EXTENTS
        last = tick
        position += size
        extents.append(position)
    if position != len(data):
        return Rule.HEAP_EXTRA, -1, 0, _NO_EXTENTS
    return 0, -1, count, np.array(extents, "<u4").tobytes()


def _tick_fits(kind: int, last: int, tick: int, end: int) -> bool:
    if kind == KIND_PUBLISH:
        return tick == 0
    if kind == KIND_BEST_EFFORT:  # its publisher's own count, and rows may be of several publishers
        return tick >= 1
    return last < tick <= end


def _check_header(data: bytes, batch_bytes: int, batch_events: int) -> tuple[int, int]:
    if len(data) < FRAME_HEADER_BYTES:
        return Rule.HEADER_CUT, 0
    length, kind, version, flags, count, _, _, start, end, _, reserved = FRAME_HEADER.unpack_from(data)
    rule = Rule.NONE
    if length != len(data):
        rule = Rule.LENGTH
    elif kind not in (KIND_PUBLISH, KIND_DELIVERY, KIND_BEST_EFFORT, KIND_KNOWLEDGE):
        rule = Rule.KIND
    elif version != BATCH_VERSION:
        rule = Rule.VERSION
    elif flags & ~(FLAG_LOST | FLAG_DURABLE if kind == KIND_PUBLISH else FLAG_LOST):
        rule = Rule.FLAGS
    elif reserved:
        rule = Rule.RESERVED
    elif len(data) > batch_bytes:
        rule = Rule.BATCH_BYTES
    elif count > batch_events:
        rule = Rule.BATCH_EVENTS
    elif flags & FLAG_LOST and count:
        rule = Rule.LOST_EVENTS
    elif kind in (KIND_PUBLISH, KIND_BEST_EFFORT) and (flags & FLAG_LOST or start or end):
        rule = Rule.PUBLISH_SPAN
    elif start > end:
        rule = Rule.SPAN
    elif FRAME_HEADER_BYTES + count * EVENT_HEADER_BYTES > len(data):
        rule = Rule.ROWS_CUT
    return rule, count


def _check_topic(topic: bytes, number: int, topic_depth: int) -> int:
    try:
        text = topic.decode()
    except UnicodeDecodeError:
        return Rule.TOPIC_UTF8
    if any(character < " " or "\x7f" <= character < "\xa0" or character in "+#" for character in text):
        return Rule.TOPIC_CHARACTER
    if text.count("/") >= topic_depth:
        return Rule.TOPIC_DEPTH
    return Rule.NONE if number == fnv1a64(topic) else Rule.TOPIC_NUMBER


def _check_attributes(data: bytes, count: int) -> int:
    position, previous = 0, b""
    for _ in range(count):
        if position >= len(data):
            return Rule.ATTRIBUTE_CUT
        name_length = data[position]
        if name_length == 0:
            return Rule.ATTRIBUTE_NAME
        name = data[position + 1 : position + 1 + name_length]
        position += 1 + name_length
        if position >= len(data):
            return Rule.ATTRIBUTE_CUT
        if not _is_utf8(name):
            return Rule.ATTRIBUTE_UTF8
        if name <= previous:
            return Rule.ATTRIBUTE_ORDER
        previous = name
        rule, position = _check_value(data, position + 1, data[position])
        if rule:
            return rule
    return Rule.NONE if position == len(data) else Rule.ATTRIBUTE_EXTRA


def _check_value(data: bytes, position: int, kind: int) -> tuple[int, int]:
    if kind > BOOLEAN:
        return Rule.ATTRIBUTE_TYPE, position
    size = {TEXT: 2, INTEGER: 8, FLOAT: 8, BOOLEAN: 1}[kind]
    if position + size > len(data):
        return Rule.ATTRIBUTE_CUT, position
    end = position + size
    if kind == TEXT:
        text = end
        end += _U16.unpack_from(data, position)[0]
        if end > len(data):
            return Rule.ATTRIBUTE_CUT, position
        if not _is_utf8(data[text:end]):
            return Rule.ATTRIBUTE_UTF8, position
    elif kind == FLOAT and math.isnan(_F64.unpack_from(data, position)[0]):
        return Rule.ATTRIBUTE_NAN, position
    elif kind == BOOLEAN and data[position] > 1:
        return Rule.ATTRIBUTE_BOOLEAN, position
    return Rule.NONE, end


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_extents(data: bytes, extents: bytes) -> int:
    """The number of rows that `extents` describes, after making sure that they lie in `data`."""
    offsets = np.frombuffer(extents, "<u4") if len(extents) % 4 == 0 else np.empty(0, "<u4")
    count = len(offsets) - 1
    if (
        count < 0
        or int(offsets[0]) != FRAME_HEADER_BYTES + count * EVENT_HEADER_BYTES
        or int(offsets[-1]) != len(data)
    ):
        raise BugError("the extents are not those of the frame")
    return count


def checksum(frame: bytes) -> int:
    """The CRC-32C of a batch frame, as if the four bytes of its checksum were 0."""
    return int(google_crc32c.value(frame[:CHECKSUM_AT] + bytes(4) + frame[CHECKSUM_AT + 4 :]))


def sealed(frame: bytes) -> bytes:
    """The frame with its checksum. It is new, and nobody else has it: the compiled one writes to it."""
    if len(frame) < FRAME_HEADER_BYTES:
        raise BugError("no batch frame is shorter than its header")
    return frame[:CHECKSUM_AT] + checksum(frame).to_bytes(4, "little") + frame[CHECKSUM_AT + 4 :]


def intact(frame: bytes) -> bool:
    """Whether the frame has the checksum that it says, or says none."""
    if len(frame) < FRAME_HEADER_BYTES:
        raise BugError("no batch frame is shorter than its header")
    return int.from_bytes(frame[CHECKSUM_AT : CHECKSUM_AT + 4], "little") in (0, checksum(frame))


def gather(
    data: bytes,
    extents: bytes,
    rows: npt.NDArray[np.uint32] | None,
    kind: int,
    pubend: int,
    start: int,
    end: int,
    channel: int,
) -> bytes:
    """A new frame of these rows, which must increase (None: all); headers and heap are copied as they are."""
    count = _check_extents(data, extents)
    if rows is None:
        rows = np.arange(count, dtype=np.uint32)
    if rows.itemsize != 4 or not rows.flags.c_contiguous:
        raise BugError("rows are an array of u32")
    chosen = rows.tolist()
    if any(row >= count for row in chosen) or any(a >= b for a, b in pairwise(chosen)):
        raise BugError("rows must increase and exist")
    offsets = np.frombuffer(extents, "<u4").tolist()
    parts = [b""]
    for row in chosen:
        at = FRAME_HEADER_BYTES + row * EVENT_HEADER_BYTES
        parts.append(data[at : at + EVENT_HEADER_BYTES])
    parts += [data[offsets[row] : offsets[row + 1]] for row in chosen]
    length = FRAME_HEADER_BYTES + sum(map(len, parts))
    parts[0] = FRAME_HEADER.pack(
        length, kind, BATCH_VERSION, 0, len(chosen), 0, pubend, start, end, channel, 0
    )
    return sealed(b"".join(parts))


def with_ticks(
    data: bytes, extents: bytes, first_tick: int, kind: int, pubend: int, start: int, channel: int
) -> bytes:
    """The same rows with consecutive ticks from `first_tick`; the span ends at the last one."""
    count = _check_extents(data, extents)
    if first_tick > MAX_INTEGER - count:
        raise BugError(f"no {count} ticks from {first_tick} on")
    frame = bytearray(data)
    end = first_tick + count - 1
    FRAME_HEADER.pack_into(
        frame, 0, len(data), kind, BATCH_VERSION, 0, count, 0, pubend, start, end, channel, 0
    )
    for row in range(count):
        _I64.pack_into(frame, FRAME_HEADER_BYTES + row * EVENT_HEADER_BYTES + ID_BYTES, first_tick + row)
    return bytes(frame)


def concatenate(
    frames: Sequence[bytes],
    extents: Sequence[bytes],
    kind: int,
    pubend: int,
    start: int,
    end: int,
    channel: int,
) -> tuple[bytes, bytes]:
    """One frame of all rows of these frames, and its extents."""
    counts = [_check_extents(data, each) for data, each in zip(frames, extents, strict=True)]
    heaps = [FRAME_HEADER_BYTES + count * EVENT_HEADER_BYTES for count in counts]
    total = sum(counts)
    length = FRAME_HEADER_BYTES + sum(len(data) - FRAME_HEADER_BYTES for data in frames)
    if length > MAX_FRAME_BYTES:
        raise BugError(f"a frame of {length} bytes cannot be")
    header = FRAME_HEADER.pack(length, kind, BATCH_VERSION, 0, total, 0, pubend, start, end, channel, 0)
    joined = np.empty(total + 1, "<u4")
    position, row = FRAME_HEADER_BYTES + total * EVENT_HEADER_BYTES, 0
    for heap, count, each in zip(heaps, counts, extents, strict=True):
        offsets = np.frombuffer(each, "<u4").astype(np.int64) - heap + position
        joined[row : row + count] = offsets[:-1]
        position, row = int(offsets[-1]), row + count
    joined[total] = position
    parts = [header]
    parts += [data[FRAME_HEADER_BYTES:heap] for data, heap in zip(frames, heaps, strict=True)]
    parts += [data[heap:] for data, heap in zip(frames, heaps, strict=True)]
    return b"".join(parts), joined.tobytes()


def packed_ids(data: bytes, count: int) -> bytes:
    """The ids of all rows, one after the other."""
    if not 0 <= count <= (len(data) - FRAME_HEADER_BYTES) // EVENT_HEADER_BYTES:
        raise BugError(f"the frame has no {count} rows")
    end = FRAME_HEADER_BYTES + count * EVENT_HEADER_BYTES
    return b"".join([data[at : at + ID_BYTES] for at in range(FRAME_HEADER_BYTES, end, EVENT_HEADER_BYTES)])


def unpack_rows(data: bytes, extents: bytes, first: int, after: int) -> list[Row]:
    """Rows `first` to before `after` of a checked frame, for the application to see."""
    count = _check_extents(data, extents)
    if not 0 <= first <= after <= count:
        raise BugError(f"rows {first} to {after} of a batch of {count}")
    offsets = np.frombuffer(extents, "<u4").tolist()
    rows: list[Row] = []
    for row in range(first, after):
        at = FRAME_HEADER_BYTES + row * EVENT_HEADER_BYTES
        publisher, broker, time_and_counter = _ID.unpack_from(data, at)
        _, tick, _, topic_length, attributes_length, _, _, attribute_count, _ = EVENT_HEADER.unpack_from(
            data, at
        )
        middle = offsets[row] + topic_length
        rows.append(
            (
                publisher,
                broker,
                time_and_counter >> 16,
                time_and_counter & MAX_U16,
                tick,
                data[offsets[row] : middle].decode(),
                decode_attributes(data, middle, attribute_count),
                data[middle + attributes_length : offsets[row + 1]],
            )
        )
    return rows


# ---------------------------------------------------------------- attributes


def encode_attributes(attributes: Mapping[str, Value]) -> bytes:
    """Sorted by name: name length u8, name, type u8, value. UsageError for what cannot be an attribute."""
    encoded = sorted((_encode_name(name), _encode_value(name, value)) for name, value in attributes.items())
    data = b"".join([bytes((len(name),)) + name + value for name, value in encoded])
    if len(data) > MAX_U16:
        raise TooLargeError(f"the attributes take {len(data)} bytes, the limit is {MAX_U16}")
    return data


def _encode_name(name: Any) -> bytes:
    if not isinstance(name, str):
        raise UsageError(f"an attribute's name is a text, not {name!r}")
    try:
        data = name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the attribute name {name!r} is not UTF-8") from None
    if not 1 <= len(data) <= MAX_NAME_BYTES:
        raise UsageError(f"an attribute's name has 1 to {MAX_NAME_BYTES} bytes, {name!r} has {len(data)}")
    return data


def _encode_value(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        try:
            data = value.encode()
        except UnicodeEncodeError:
            raise UsageError(f"the text of attribute {name!r} is not UTF-8") from None
        if len(data) > MAX_U16:
            raise TooLargeError(f"attribute {name!r} takes {len(data)} bytes, the limit is {MAX_U16}")
        return bytes((TEXT,)) + _U16.pack(len(data)) + data
    if isinstance(value, bool):
        return bytes((BOOLEAN, value))
    if isinstance(value, int):
        if not MIN_INTEGER <= value <= MAX_INTEGER:
            raise UsageError(f"attribute {name!r} does not fit into 64 bits")
        return bytes((INTEGER,)) + _I64.pack(value)
    if isinstance(value, float):
        if math.isnan(value):
            raise UsageError(f"attribute {name!r} is not a number (NaN)")
        return bytes((FLOAT,)) + _F64.pack(value)
    raise UsageError(f"attribute {name!r} is text, integer, float or boolean, not {type(value).__name__}")


def decode_attributes(data: bytes, start: int, count: int) -> dict[str, Value]:
    """The attributes of a checked row, from `start` on."""
    attributes: dict[str, Value] = {}
    position = start
    for _ in range(count):
        end = position + 1 + data[position]
        name = data[position + 1 : end].decode()
        kind, position = data[end], end + 1
        if kind == TEXT:
            end = position + 2 + int(_U16.unpack_from(data, position)[0])
            attributes[name] = data[position + 2 : end].decode()
        elif kind == INTEGER:
            end = position + 8
            attributes[name] = int(_I64.unpack_from(data, position)[0])
        elif kind == FLOAT:
            end = position + 8
            attributes[name] = float(_F64.unpack_from(data, position)[0])
        else:
            end = position + 1
            attributes[name] = data[position] == 1
        position = end
    return attributes


# ---------------------------------------------------------------- Bloom filters

MIN_BLOOM_BITS: Final = 8
MAX_BLOOM_BITS: Final = 1 << 32
MAX_BLOOM_HASHES: Final = 64
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_SILVER: Final = np.uint64(0xD1B54A32D192ED03)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_LOW: Final = np.uint64(0xFFFF_FFFF)
_32: Final = np.uint64(32)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64: every bit of x reaches every bit of the result."""
    x = (x ^ x >> np.uint64(30)) * _MIX_1
    x = (x ^ x >> np.uint64(27)) * _MIX_2
    return x ^ x >> np.uint64(31)


def bloom_positions(ids: bytes, m: int, k: int) -> npt.NDArray[np.uint64]:
    """The k bit positions of each id: an array of shape (number of ids, k)."""
    if len(ids) % ID_BYTES:
        raise BugError(f"ids have {ID_BYTES} bytes each, {len(ids)} is no multiple of that")
    if not (MIN_BLOOM_BITS <= m <= MAX_BLOOM_BITS and 1 <= k <= MAX_BLOOM_HASHES):
        raise BugError(f"a Bloom filter of {m} bits and {k} hashes cannot be")
    words = np.frombuffer(ids, "<u8").reshape(-1, 2)
    a, b = words[:, 0], words[:, 1]
    h1 = _mix(b + _mix(a + _GOLDEN))
    h2 = _mix(a ^ _mix(b + _SILVER)) | np.uint64(1)
    x = _mix(h1[:, None] + np.arange(k, dtype=np.uint64)[None, :] * h2[:, None])
    bits = np.uint64(m)
    # The upper half of the 128-bit product x * m, which 64-bit arithmetic can hold because m <= 2**32.
    return ((x >> _32) * bits + ((x & _LOW) * bits >> _32)) >> _32


def _check_bits(bits: bytes | bytearray, m: int) -> None:
    if len(bits) != (m + 7) // 8:
        raise BugError(f"a Bloom filter of {m} bits has {(m + 7) // 8} bytes, not {len(bits)}")


def bloom_add(bits: bytearray, m: int, k: int, ids: bytes) -> None:
    """Add all ids, 16 bytes each, to the filter of m bits. Bit p is bit p % 8 of byte p // 8."""
    positions = bloom_positions(ids, m, k).ravel()
    _check_bits(bits, m)
    view = np.frombuffer(bits, np.uint8)
    if not view.flags.writeable:  # numpy's `at` does not look
        raise BugError("a Bloom filter to add to must be writable")
    np.bitwise_or.at(
        view, positions >> np.uint64(3), np.left_shift(1, positions & np.uint64(7)).astype(np.uint8)
    )


def bloom_contains(bits: bytes | bytearray, m: int, k: int, ids: bytes) -> bytes:
    """One byte per id: 1 if it may have been added, 0 if it certainly was not."""
    positions = bloom_positions(ids, m, k)
    _check_bits(bits, m)
    view = np.frombuffer(bits, np.uint8)
    bits_set = view[positions >> np.uint64(3)] >> (positions & np.uint64(7)).astype(np.uint8) & 1
    return bytes(bits_set.all(axis=1).astype(np.uint8))
