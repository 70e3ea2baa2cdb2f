"""What the bulk trace does in executors: a group's ids and records to answers (spec P5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from postroad.errors import StorageError
from postroad.ids import ID_BYTES
from postroad.spark.trace.claims import Keys
from postroad.spark.trace.group import Group, Stored
from postroad.spark.trace.packed_ids import Batches, homes_and_times
from postroad.spark.trace.paths import ANSWERS, listed_ids, trace_group
from postroad.spark.trace.views import NetworkView
from postroad.tracking.keys import ENTRY
from postroad.tracking.record import FilterMeta, decode_meta, decode_record, encode_record

SHARED: Final = -2  # in place of the origin of a record: it concerns the ids of every home
MOST_AT_ONCE: Final = 65_536  # ids that are traced at once,
LEAST_AT_ONCE: Final = 2_048
CELLS: Final = 2_000_000  # and fewer in a large network: what each broker says of an id takes some 80 bytes


def tracer(network: NetworkView, *, complete: bool) -> Callable[[pa.Table, pa.Table], pa.Table]:
    """Of a group's packed ids (`keys`) and records (origin, broker, record) the answers.

    Each id is traced with the records of its home first. What its home does not confirm, or another broker
    claims, needs the others too: a `complete` group has them. Else those ids are left without a verdict.
    """
    at_once = min(max(CELLS // max(1, len(network.brokers)), LEAST_AT_ONCE), MOST_AT_ONCE)

    def traced(left: pa.Table, right: pa.Table) -> pa.Table:
        if not left.num_rows:
            return ANSWERS.empty_table()
        keys = _unique_keys(left["keys"])
        columns = (right[name].to_pylist() for name in ("origin", "broker", "record"))
        records = [
            (origin, Stored(broker, *decoded(record)))
            for origin, broker, record in zip(*columns, strict=True)
        ]
        homes, _ = homes_and_times(keys)
        tables = [ANSWERS.empty_table()]
        # Nobody is there to confirm those of which no broker is the home: each would be left over.
        known = np.isin(homes, list(network.brokers))
        left_over: list[Keys] = [keys[~known]]
        for home in np.unique(homes[known]).tolist():
            own = [record for origin, record in records if origin in (home, SHARED)]
            for some in _parts(keys[homes == home], at_once):
                table, rest = trace_group(Group(some, own, network), complete=False)
                tables.append(table)
                left_over.append(rest)
        rest = np.concatenate(left_over)
        if not complete:
            return pa.concat_tables([*tables, _unjudged(rest)])
        every = [record for _, record in records]
        groups = (Group(some, every, network) for some in _parts(rest, at_once))
        return pa.concat_tables([*tables, *(trace_group(group, complete=True)[0] for group in groups)])

    return traced


def _parts(keys: Keys, most: int) -> Iterator[Keys]:
    return (keys[at : at + most] for at in range(0, len(keys), most))


def _unjudged(keys: Keys) -> pa.Table:
    ids, which = listed_ids(keys, np.zeros(len(keys), np.int64), 1)
    missing = {
        name: pa.nulls(len(which), kind) for name, kind in zip(ANSWERS.names, ANSWERS.types, strict=True)
    }
    return pa.table(missing | {"ids": ids}, ANSWERS)


def _unique_keys(packed: pa.ChunkedArray) -> Keys:
    """The ids of packed rows, each once, in order of time."""
    keys = np.frombuffer(b"".join(packed.to_pylist()), np.uint8).reshape(-1, ID_BYTES)
    halves = keys.view(">u8").astype(np.uint64)
    order = np.lexsort((halves[:, 0], halves[:, 1]))
    halves = halves[order]
    new = np.ones(len(keys), np.bool_)
    new[1:] = (halves[1:] != halves[:-1]).any(axis=1)
    return keys[order[new]]


def log_splitter(bucket_ms: int, low: int, high: int) -> Callable[[Batches], Batches]:
    """Parts of the exact log as one smaller part for each home and bucket of the ids in it."""

    def split(batches: Batches) -> Batches:
        for batch in batches:
            rows: list[tuple[int, int, bytes, int]] = []
            for broker, record in zip(batch["broker"].to_pylist(), batch["record"].to_pylist(), strict=True):
                rows += _split(broker, record, bucket_ms, low, high)
            yield _as_batch(rows)

    return split


def _split(
    broker: int, record: bytes, bucket_ms: int, low: int, high: int
) -> Iterator[tuple[int, int, bytes, int]]:
    meta, body = decoded(record)
    if body is None:
        spans = ((max(lo // bucket_ms, low), min(hi // bucket_ms, high)) for lo, hi in meta.spans)
        for bucket in sorted({bucket for first, last in spans for bucket in range(first, last + 1)}):
            yield SHARED, broker, record, bucket
        return
    entries = np.frombuffer(body, ENTRY)
    ids = np.ascontiguousarray(entries["id"]).view(np.uint8).reshape(-1, ID_BYTES)
    homes, times = homes_and_times(ids)
    buckets = times // bucket_ms
    for home, bucket in np.unique(np.stack((homes, buckets), axis=1), axis=0).tolist():
        if low <= bucket <= high:
            part = entries[(homes == home) & (buckets == bucket)]
            part_meta = msgspec.structs.replace(meta, count=len(part))
            yield home, broker, encode_record(part_meta, part.tobytes()), bucket


def _as_batch(rows: Sequence[tuple[int, int, bytes, int]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    types = (pa.int64(), pa.int64(), pa.binary(), pa.int64())
    return pa.RecordBatch.from_arrays(
        [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)],
        names=["origin", "broker", "record", "bucket"],
    )


def decoded(record: bytes) -> tuple[FilterMeta, bytes | None]:
    """What it is about, and its body; None if that was damaged on its broker's disk before it came here."""
    try:
        return decode_record(record)
    except StorageError:
        return decode_meta(record), None
