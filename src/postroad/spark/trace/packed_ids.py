"""Ids to trace, packed: the ids of one home and bucket as one row of bytes (spec P5).

A row per id costs the JVM more than the trace itself: it is parsed, hashed, sorted and copied by itself. So
the texts go to Python as they are read, a column at a time, and what is shuffled is one row for all ids of a
home and bucket that a task has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from postroad.ids import ID_BYTES
from postroad.spark.columns import id_characters
from postroad.spark.trace.claims import Keys

Batches = Iterator[pa.RecordBatch]
PACKED: Final = "home bigint, bucket bigint, salt int, ids bigint, keys binary, wrong string"
_PACKED: Final = pa.schema(
    [
        *(("home", pa.int64()), ("bucket", pa.int64()), ("salt", pa.int32()), ("ids", pa.int64())),
        *(("keys", pa.binary()), ("wrong", pa.string())),
    ]
)
NAMED: Final = 3  # of those that are no ids
_AT_ONCE: Final = 1 << 20  # ids that a task gathers before it packs them
_WIDTH: Final = 35  # characters of an id


def packer(bucket_ms: int) -> Callable[[Batches], Batches]:
    """From batches with a column `id` of text to `PACKED`; the least that are no ids are named in `wrong`,
    in rows whose `ids` add up to how many there are."""

    def pack(batches: Batches) -> Batches:
        waiting: list[Keys] = []
        for batch in batches:
            keys, wrong = parsed(batch["id"])
            if wrong:
                yield _rows_of_wrong(wrong)
            waiting.append(keys)
            if sum(map(len, waiting)) >= _AT_ONCE:
                yield _packed(np.concatenate(waiting), bucket_ms)
                waiting = []
        if waiting:
            yield _packed(np.concatenate(waiting), bucket_ms)

    return pack


def parsed(column: pa.Array) -> tuple[Keys, list[str]]:
    """The 16 bytes of each id; or the texts among them that are no ids, sorted."""
    rows = len(column)
    _, offsets, data = column.buffers()
    at = np.frombuffer(offsets, np.int32, rows + 1, column.offset * 4) if rows else np.zeros(1, np.int32)
    if not column.null_count and (np.diff(at) == _WIDTH).all():
        text = np.frombuffer(data, np.uint8)[at[0] : at[-1]] if rows else np.zeros(0, np.uint8)
        keys = _bytes_of(text.tobytes())
        # Written as text again they are what they were, or something was no id: a dash or a digit elsewhere.
        if len(keys) == rows and np.array_equal(id_characters(keys).ravel(), text):
            return keys, []
    texts = ("" if text is None else text for text in column.to_pylist())
    return np.zeros((0, ID_BYTES), np.uint8), sorted(text for text in texts if not _sound(text))


def _bytes_of(text: bytes) -> Keys:
    try:
        digits = text.translate(None, b"-").decode("ascii")
        return np.frombuffer(bytes.fromhex(digits), np.uint8).reshape(-1, ID_BYTES)
    except ValueError:  # no digits, or not as many as ids have
        return np.zeros((0, ID_BYTES), np.uint8)


def _sound(text: str) -> bool:
    data = text.encode()
    keys = _bytes_of(data)
    return len(data) == _WIDTH and len(keys) == 1 and id_characters(keys).tobytes() == data


def _rows_of_wrong(texts: list[str]) -> pa.RecordBatch:
    named = list(dict.fromkeys(texts))[:NAMED]
    counts = [len(texts), *[0] * (len(named) - 1)]
    rows = [{"ids": count, "wrong": text} for count, text in zip(counts, named, strict=True)]
    return pa.RecordBatch.from_pylist(rows, _PACKED)


def homes_and_times(keys: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    halves = keys.view(">u8")
    homes = (halves[:, 0] & np.uint64(0xFFFF_FFFF)).astype(np.int64)
    return homes, (halves[:, 1] >> np.uint64(16)).astype(np.int64)


def _packed(keys: Keys, bucket_ms: int) -> pa.RecordBatch:
    homes, times = homes_and_times(keys)
    buckets = times // bucket_ms
    order, starts = _runs(homes, buckets)
    first = order[starts[:-1]]
    return _rows(homes[first], buckets[first], np.zeros(len(first), np.int32), keys[order], starts)


def salter(hot: Mapping[tuple[int, int], int]) -> Callable[[Batches], Batches]:
    """Rows of `PACKED` with those of hot groups split, each id into one of so many parts."""

    def salt(batches: Batches) -> Batches:
        for batch in batches:
            columns = (batch[name].to_pylist() for name in ("home", "bucket", "keys"))
            for home, bucket, data in zip(*columns, strict=True):
                keys = np.frombuffer(data, np.uint8).reshape(-1, ID_BYTES)
                salts = _mixed(keys) % np.uint64(hot.get((home, bucket), 1))
                order, starts = _runs(salts.astype(np.int64))
                numbers = salts[order[starts[:-1]]].astype(np.int32)
                homes, buckets = np.full(len(numbers), home), np.full(len(numbers), bucket)
                yield _rows(homes, buckets, numbers, keys[order], starts)

    return salt


def _mixed(keys: Keys) -> npt.NDArray[np.uint64]:
    """A number that depends on every bit of an id, and is the same wherever it is worked out."""
    words = keys.view("<u8")
    mixed: npt.NDArray[np.uint64] = (words[:, 0] ^ words[:, 1]) * np.uint64(0x9E37_79B9_7F4A_7C15)
    return mixed >> np.uint64(32)


def _runs(*columns: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """An order in which equal rows follow each other; where in it each run begins, and the end."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        different, number = np.unique(column, return_inverse=True)
        code = code * len(different) + number
    order = np.argsort(code, kind="stable")
    ordered = code[order]
    new = np.ones(len(code), np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    return order, np.append(np.flatnonzero(new), len(code))


def _rows(
    homes: npt.NDArray[np.int64],
    buckets: npt.NDArray[np.int64],
    salts: npt.NDArray[np.int32],
    keys: Keys,
    starts: npt.NDArray[np.intp],
) -> pa.RecordBatch:
    """A row for each run of keys, which go from one start to before the next."""
    offsets = (starts * ID_BYTES).astype(np.int32)
    data = pa.py_buffer(np.ascontiguousarray(keys).tobytes())
    blobs = pa.Array.from_buffers(pa.binary(), len(homes), [None, pa.py_buffer(offsets.tobytes()), data])
    columns = [
        *(pa.array(homes), pa.array(buckets), pa.array(salts), pa.array(np.diff(starts))),
        *(blobs, pa.nulls(len(homes), pa.string())),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_PACKED)
