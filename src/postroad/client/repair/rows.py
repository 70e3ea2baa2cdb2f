"""Rows of best-effort events: with their record as they travel, without it as applications and caches have
them (spec B3).

The record is the end of the payload, as the paper has it (4.1), and the event header says how long it is. So
brokers pass it on like any payload.
"""

from __future__ import annotations

import struct
from typing import Final

from postroad.client.repair.messages import decode_record, encode_record
from postroad.errors import PeerError
from postroad.events import EventBatch
from postroad.events.batch import best_effort_frame
from postroad.kernel.layout import EVENT_HEADER_BYTES, FRAME_HEADER_BYTES
from postroad.wire.frames import Limits

Row = tuple[bytes, bytes]  # an event header, and its part of the heap
_PAYLOAD_LENGTH: Final = struct.Struct("<I")
_PAYLOAD_AT: Final = 36
_RECORD_AT: Final = 44


def with_record(row: Row, entries: tuple[int, ...], room: int) -> Row:
    """The row with a record of as many of the entries as the room is for."""
    header, heap = row
    record = encode_record(entries, room)
    if not record:
        return row
    (size,) = _PAYLOAD_LENGTH.unpack_from(header, _PAYLOAD_AT)
    return _header(header, size + len(record), len(record)), heap + record


def without_records(batch: EventBatch, limits: Limits) -> tuple[EventBatch, list[tuple[int, ...] | None]]:
    """The frame as if there had been no records, and what they say: None where one cannot be read."""
    lengths = batch.headers["record_length"].tolist()
    if not any(lengths):
        return batch, [()] * batch.count
    records: list[tuple[int, ...] | None] = []
    for row, length in enumerate(lengths):
        end = int(batch.offsets[row + 1])
        try:
            records.append(decode_record(batch.data[end - length : end]) if length else ())
        except PeerError:
            records.append(None)
    frame = best_effort_frame(
        [_without_record(batch, row) for row in range(batch.count)], channel=batch.channel
    )
    return EventBatch.parse(frame, limits), records


def row_bytes(batch: EventBatch, row: int) -> bytes:
    """Of a batch without records."""
    return b"".join(_row(batch, row))


def _without_record(batch: EventBatch, row: int) -> Row:
    header, heap = _row(batch, row)
    (size,) = _PAYLOAD_LENGTH.unpack_from(header, _PAYLOAD_AT)
    (length,) = _PAYLOAD_LENGTH.unpack_from(header, _RECORD_AT)
    return _header(header, size - length, 0), heap[: len(heap) - length]


def _row(batch: EventBatch, row: int) -> Row:
    at = FRAME_HEADER_BYTES + EVENT_HEADER_BYTES * row
    first, last = batch.offsets[row : row + 2].tolist()
    return batch.data[at : at + EVENT_HEADER_BYTES], batch.data[first:last]


def _header(header: bytes, payload_length: int, record_length: int) -> bytes:
    changed = bytearray(header)
    _PAYLOAD_LENGTH.pack_into(changed, _PAYLOAD_AT, payload_length)
    _PAYLOAD_LENGTH.pack_into(changed, _RECORD_AT, record_length)
    return bytes(changed)
