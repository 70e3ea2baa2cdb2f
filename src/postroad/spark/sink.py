"""The sink `postroad`: rows become durable events, each once (spec P3).

A task publishes its rows under ids that it makes itself, and makes again when it is run again: a durable
pubend takes an id only if it is above the last one it has of that publisher, also after a restart. The
publisher of an id, its first eight bytes, is a hash of query, batch, partition and stretch of `STRETCH` rows;
time and counter are a time T, of which the lowest bits are left out, plus the row. T is the driver's when it
plans the batch. A driver that was killed in the batch plans it again at another time, so a task asks first
what the pubend has last of this publisher: from that follow T and the rows that are there.

So a partition always goes to the same broker of the list. What was published cannot be taken back: a batch
whose task fails for good leaves what it has published.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from postroad.client.blocking import Client
from postroad.errors import BugError, UnavailableError, UsageError
from postroad.events import Value
from postroad.events.topics import RESERVED
from postroad.ids import OWN_IDS
from postroad.spark.columns import EVENTS
from postroad.spark.options import WriteOptions, write_options
from postroad.spark.source import GAP_TOPIC

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

ROW_BITS: Final = 24
STRETCH: Final = 1 << ROW_BITS
COUNTER_BITS: Final = 16
RETRY_S: Final = 0.1
_PLAIN: Final = ("string", "bigint", "int", "smallint", "tinyint", "double", "float", "boolean")
_VALUE: Final = "struct<text:string,integer:bigint,float:double,boolean:boolean>"


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What one task did."""

    rows: int
    repeated: int  # that had been published before


@dataclass(frozen=True, slots=True)
class Job:
    """What a task needs to know; made at the driver, the same for every task and attempt."""

    options: WriteOptions
    columns: tuple[str, ...]  # that become attributes
    name: str  # of a batch write; of a stream Spark tells each task
    time_ms: int


def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> BatchWriter:
    return BatchWriter(_job(options, schema, uuid.uuid4().hex, overwrite=overwrite))


def stream_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> StreamWriter:
    return StreamWriter(_job(options, schema, "", overwrite=overwrite))


def _job(options: Mapping[str, str], schema: StructType, name: str, *, overwrite: bool) -> Job:
    if overwrite:
        raise UsageError("events that were published cannot be overwritten: use mode append")
    chosen = write_options(options)
    _check_topic(chosen.topic)
    kinds = {field.name: field.dataType.simpleString() for field in schema.fields}
    if "topic" not in kinds and not chosen.topic:
        raise UsageError("rows have a column `topic`, or the option `topic` names one for all")
    for name_, wanted in {
        "topic": ("string",),
        "payload": ("binary", "string"),
        "attributes": (f"map<string,{_VALUE}>", "map<string,string>"),
    }.items():
        if kinds.get(name_, wanted[0]) not in wanted:
            raise UsageError(f"the column {name_} is {' or '.join(wanted)}, not {kinds[name_]}")
    others = tuple(column for column in kinds if column not in EVENTS.names)
    for column in others:
        if kinds[column] not in _PLAIN:
            raise UsageError(
                f"column {column}: an attribute is text, a number or boolean, not {kinds[column]}"
            )
    return Job(chosen, others, name, time.time_ns() // 1_000_000)


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, job: Job) -> None:
        self._job = job

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return publish(self._job, self._job.name, iterator)


class StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, job: Job) -> None:
        self._job = job

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        task = _task()
        query = task.getLocalProperty("sql.streaming.queryId")
        batch = task.getLocalProperty("streaming.sql.batchId")
        if not query or not batch:
            raise BugError("Spark does not tell which batch of which query this is")
        return publish(self._job, f"{query} {batch}", iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Everything is in brokers' logs when the tasks are done."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """What was published is recognised when the batch is run again."""


def _task() -> Any:
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is None:
        raise BugError("a writer outside of a task")
    return task


def publish(job: Job, name: str, batches: Iterator[pa.RecordBatch]) -> Written:
    """Publish the rows of this task's partition."""
    partition = _task().partitionId()
    brokers = job.options.brokers
    address = brokers[int.from_bytes(_hash(f"{partition}")) % len(brokers)]
    rows = repeated = 0
    with job.options.access.connect(address) as client:
        for batch in batches:
            events = list(_events(batch, job))
            while events:
                stretch, first = divmod(rows, STRETCH)
                if first == 0:
                    prefix = _publisher(f"{name} {partition} {stretch}")
                    base, there = _begin(client, prefix, job)
                some, events = events[: STRETCH - first], events[STRETCH - first :]
                skipped = min(len(some), max(0, there - first))
                ids = (
                    prefix + (base + row).to_bytes(8, "big")
                    for row in range(first + skipped, first + len(some))
                )
                client.publish_many(some[skipped:], mode="durable", ids=ids)
                rows, repeated = rows + len(some), repeated + skipped
    return Written(rows, repeated)


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8, person=b"postroad sink").digest()


def _publisher(text: str) -> bytes:
    """The first half of ids of its own."""
    return (int.from_bytes(_hash(text), "big") | OWN_IDS).to_bytes(8, "big")


def _begin(client: Client, prefix: bytes, job: Job) -> tuple[int, int]:
    """The id, without the prefix, of the first row of this publisher; and how many rows are there already."""
    give_up = time.monotonic() + job.options.access.timeout_s
    while True:
        try:
            last = bytes.fromhex(client.request("publisher.last", prefix=prefix.hex())["last"])
            break
        except UnavailableError:
            if time.monotonic() > give_up:
                raise
            time.sleep(RETRY_S)
    if not last:
        return (job.time_ms << COUNTER_BITS) >> ROW_BITS << ROW_BITS, 0
    number = int.from_bytes(last, "big")
    return number >> ROW_BITS << ROW_BITS, number % STRETCH + 1


def _events(batch: pa.RecordBatch, job: Job) -> Iterator[tuple[str, bytes, dict[str, Value]]]:
    names = set(batch.schema.names)
    count = batch.num_rows
    topics = batch.column("topic").to_pylist() if "topic" in names else [None] * count
    payloads = batch.column("payload").to_pylist() if "payload" in names else [b""] * count
    maps = batch.column("attributes").to_pylist() if "attributes" in names else [None] * count
    others = [(name, batch.column(name).to_pylist()) for name in job.columns]
    for row in range(count):
        topic = topics[row] or job.options.topic
        if not topic:
            raise UsageError("a row without a topic")
        if topic == GAP_TOPIC:
            continue
        _check_topic(topic)
        attributes: dict[str, Value] = {}
        for name, value in maps[row] or ():
            chosen = value if not isinstance(value, dict) else next(_known(value), None)
            if chosen is not None:
                attributes[name] = chosen
        attributes |= {name: values[row] for name, values in others if values[row] is not None}
        payload = payloads[row] or b""
        yield topic, payload.encode() if isinstance(payload, str) else payload, attributes


def _check_topic(topic: str) -> None:
    if topic.split("/")[0] == RESERVED:
        raise UsageError(f"only brokers publish to {topic}: leave out topics that begin with {RESERVED}")


def _known(value: dict[str, Value | None]) -> Iterator[Value]:
    return (member for member in value.values() if member is not None)
