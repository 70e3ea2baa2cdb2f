"""Batches as Arrow record batches of the table `events`, without a Python object per event (spec P1)."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from postroad.events import EventBatch
from postroad.ids import pubend_text
from postroad.kernel import wanted
from postroad.kernel.layout import BOOLEAN, FLOAT, ID_BYTES, INTEGER, TEXT

if wanted("columns"):
    from postroad.kernel.columns import columns
else:
    from postroad.kernel.columns_reference import columns

VALUE: Final = pa.struct(
    [("text", pa.string()), ("integer", pa.int64()), ("float", pa.float64()), ("boolean", pa.bool_())]
)
EVENTS: Final = pa.schema(
    [
        *(("id", pa.string()), ("publisher", pa.string()), ("broker", pa.string())),
        *(("time_ms", pa.int64()), ("topic", pa.string()), ("attributes", pa.map_(pa.string(), VALUE))),
        *(("payload", pa.binary()), ("pubend", pa.string()), ("tick", pa.int64())),
        *(("date", pa.date32()), ("origin", pa.string())),
    ]
)
DAY_MS: Final = 86_400_000
MAX_DAY: Final = 2_932_896  # 31 December 9999, the calendar's last: ids can name times beyond it
_ID_TEXT: Final = 35
# Publisher, broker, time and counter: from where to where in the digits, and where in the text.
_FIELDS: Final = ((0, 8, 0), (8, 16, 9), (16, 28, 18), (28, 32, 31))

Bytes = npt.NDArray[np.uint8]


def event_columns(batch: EventBatch) -> pa.RecordBatch:
    """All rows of a batch."""
    rows = batch.count
    parts = columns(batch.data)
    topic_offsets, topics, payload_offsets, payloads, map_offsets, name_offsets, names = parts[:7]
    ids = np.frombuffer(batch.ids(), np.uint8).reshape(rows, ID_BYTES)
    text = id_characters(ids)
    time_ms = (ids[:, 8:].copy().view(">u8").ravel() >> 16).astype(np.int64)
    days = np.minimum(time_ms // DAY_MS, MAX_DAY).astype(np.int32)
    pubend = pubend_text(batch.pubend)
    keys = _texts(len(parts[7]), name_offsets, names)
    attributes = pa.MapArray.from_arrays(
        pa.Array.from_buffers(pa.int32(), rows + 1, [None, pa.py_buffer(map_offsets)]),
        keys,
        _values(*parts[7:]),
        type=EVENTS.field("attributes").type,
    )
    return pa.RecordBatch.from_arrays(
        [
            fixed_texts(text),
            fixed_texts(text[:, :8]),
            fixed_texts(text[:, 9:17]),
            pa.array(time_ms),
            _texts(rows, topic_offsets, topics),
            attributes,
            pa.Array.from_buffers(
                pa.binary(), rows, [None, pa.py_buffer(payload_offsets), pa.py_buffer(payloads)]
            ),
            pa.repeat(pubend, rows),
            pa.array(np.ascontiguousarray(batch.headers["tick"])),
            pa.array(days, pa.date32()),
            pa.repeat(f"{batch.pubend >> 32:08x}", rows),
        ],
        schema=EVENTS,
    )


def id_characters(ids: Bytes) -> Bytes:
    """Ids of 16 bytes each as rows of characters."""
    digits = np.frombuffer(ids.tobytes().hex().encode(), np.uint8).reshape(len(ids), 2 * ID_BYTES)
    text = np.full((len(ids), _ID_TEXT), ord("-"), np.uint8)
    for start, end, at in _FIELDS:
        text[:, at : at + end - start] = digits[:, start:end]
    return text


def fixed_texts(text: Bytes) -> pa.Array:
    """Texts that all have the same length, from rows of characters."""
    rows, width = text.shape
    offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int32)[: rows + 1]
    return _texts(rows, offsets.tobytes(), np.ascontiguousarray(text).tobytes())


def _texts(count: int, offsets: bytes, data: bytes) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _values(kinds: bytes, text_offsets: bytes, texts: bytes, numbers: bytes) -> pa.Array:
    """Attribute values, each in the column of its type."""
    count = len(kinds)
    kind = np.frombuffer(kinds, np.uint8)
    known = {
        number: pa.py_buffer(np.packbits(kind == number, bitorder="little").tobytes()) for number in range(4)
    }
    set_bits = np.packbits(np.frombuffer(numbers, np.int64) != 0, bitorder="little").tobytes()
    values = pa.py_buffer(numbers)
    return pa.StructArray.from_arrays(
        [
            pa.Array.from_buffers(
                pa.string(), count, [known[TEXT], pa.py_buffer(text_offsets), pa.py_buffer(texts)]
            ),
            pa.Array.from_buffers(pa.int64(), count, [known[INTEGER], values]),
            pa.Array.from_buffers(pa.float64(), count, [known[FLOAT], values]),
            pa.Array.from_buffers(pa.bool_(), count, [known[BOOLEAN], pa.py_buffer(set_bits)]),
        ],
        fields=list(VALUE),
    )
