"""Landing: from a running network into the lake, exactly once (spec P4).

Two streaming queries, since what brokers publish about themselves takes a subscription of its own: one of all
events, one of `$postroad/#`. Each holds storage under a durable name, and has its checkpoint in the lake, so
that both stay together. A batch is appended under the name of its query and its number; done again after a
crash, it has the same rows and changes nothing.

A stored filter may be published in parts, which a batch may separate. Parts that wait for the rest are saved
beside the checkpoint as they are after each batch, so a batch that is done again begins with the same ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from postroad.client.blocking import connect
from postroad.errors import BugError, PeerError, StorageError
from postroad.spark import register, rows
from postroad.spark.lake import SCHEMAS, Lake
from postroad.spark.source import GAP_TOPIC, SINCE
from postroad.tracking.attachment import decode_changes
from postroad.tracking.bulletins import (
    ATTACHMENTS,
    DELIVERIES,
    FILTERS,
    TOPOLOGY,
    decode_deliveries,
    decode_topology,
    join_parts,
)
from postroad.tracking.record import decode_meta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

NAME: Final = "postroad-landing"  # of its durable subscriptions, with `-history` added for the second
FOLDER: Final = "_landing"
INTERVAL: Final = "10 seconds"
MAX_PARTS: Final = 100_000  # of filters that wait for the rest
_TABLES: Final = {"attachments": ATTACHMENTS, "topology": TOPOLOGY, "deliveries": DELIVERIES}

_Batch = Callable[["DataFrame", int], None]
Told = Callable[[str, int], None]


class _Part(msgspec.Struct, frozen=True):
    """One of the parts of a stored filter."""

    broker: str
    name: str
    sequence: int
    part: int
    parts: int
    payload: bytes


def land(
    lake: Lake,
    brokers: str,
    *,
    once: bool = False,
    name: str = NAME,
    token: str = "",
    interval: str = INTERVAL,
    told: Told | None = None,
) -> None:
    """Bring the lake up to date, and keep it so unless `once`. `told` hears of what is added."""
    register(lake.spark)
    events, history = (
        _Feed(lake, brokers, token, topic, durable, lake.path / FOLDER / kind, told)
        for topic, durable, kind in (("#", name, "events"), ("$postroad/#", f"{name}-history", "history"))
    )
    for feed in (events, history):
        feed.folder.mkdir(parents=True, exist_ok=True)
    # Brokers publish about themselves once somebody wants it: that query comes first.
    jobs: list[tuple[_Feed, _Batch]] = [(history, _History(history)), (events, _Events(events))]
    if once:
        for feed, batch in jobs:
            query = feed.start(batch, {"availableNow": True})
            query.awaitTermination()
            feed.release(query)
        return
    queries = [feed.start(batch, {"processingTime": interval}) for feed, batch in jobs]
    try:
        while all(query.isActive for query in queries):
            queries[0].awaitTermination(1)
        for query in queries:
            if (error := query.exception()) is not None:
                raise error
    finally:
        for query in queries:
            query.stop()


@dataclass(frozen=True, slots=True)
class _Feed:
    """One of the two queries."""

    lake: Lake
    brokers: str
    token: str
    topic: str
    durable: str
    folder: Path
    told: Told | None

    def start(self, batch: _Batch, trigger: dict[str, Any]) -> StreamingQuery:
        options = {"brokers": self.brokers, "topic": self.topic, "durable": self.durable, "onLoss": "gap"}
        if self.token:
            options["token"] = self.token
        source = self.lake.spark.readStream.format("postroad").options(**options).load()
        writer = source.writeStream.foreachBatch(batch)
        return writer.option("checkpointLocation", str(self.folder / "checkpoint")).trigger(**trigger).start()

    def release(self, query: StreamingQuery) -> None:
        """Spark tells a source that a batch is done when it plans the next: of the last one it never does."""
        progress: Any = query.lastProgress
        end = None if progress is None else progress["sources"][0]["endOffset"]
        done = json.loads(end) if isinstance(end, str) else dict(end or {})
        done.pop(SINCE, None)
        if done:
            with (
                connect(self.brokers, name="landing", token=self.token or None) as client,
                client.subscribe(self.topic, durable=self.durable, token="") as held,
            ):
                held.ack(upto=json.dumps(done))

    def segment(self, batch: int) -> str:
        """Batches are numbered anew by a query that has lost its checkpoint: its id tells them apart."""
        place = self.folder / "checkpoint" / "metadata"
        try:
            return f"{json.loads(place.read_text())['id']}-{batch:09d}"
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(f"{place} does not tell the id of a query: {error!r}") from None

    def append(self, table: str, rows: DataFrame, segment: str, batch: int) -> None:
        if not rows.isEmpty() and self.lake.append(table, rows, segment) and self.told is not None:
            self.told(table, batch)

    def gaps(self, batch: DataFrame) -> DataFrame:
        """What was released before it could be landed, as rows of `deliveries`."""
        return batch.filter(f"topic = '{GAP_TOPIC}'").selectExpr(
            *("'gap' AS what", "id", f"'{self.durable}' AS subscriber", "CAST(0 AS BIGINT) AS session"),
            *("pubend", "tick", "attributes['start'].integer AS start_tick", "origin AS broker"),
            *("tick AS at_us", "CAST(0 AS BIGINT) AS number", "date", "origin"),
        )


class _Events:
    """A batch of events; gaps go to `deliveries`, as of one who was told of them."""

    def __init__(self, feed: _Feed) -> None:
        self._feed = feed

    def __call__(self, batch: DataFrame, number: int) -> None:
        segment = self._feed.segment(number)
        batch.persist()
        try:
            self._feed.append("events", batch.filter("id IS NOT NULL"), segment, number)
            self._feed.append("deliveries", self._feed.gaps(batch), segment, number)
        finally:
            batch.unpersist()


class _History:
    """A batch of what brokers publish about themselves."""

    def __init__(self, feed: _Feed) -> None:
        self._feed = feed

    def __call__(self, batch: DataFrame, number: int) -> None:
        segment = self._feed.segment(number)
        batch.persist()
        try:
            for table, topic in _TABLES.items():
                some = batch.filter(f"topic = '{topic}'").select("topic", "attributes", "payload")
                found = some.mapInArrow(_decoder(table), SCHEMAS[table])
                self._feed.append(table, found, segment, number)
            self._filters(batch, number, segment)
            self._feed.append("deliveries", self._feed.gaps(batch), f"{segment}-gaps", number)
        finally:
            batch.unpersist()

    def _filters(self, batch: DataFrame, number: int, segment: str) -> None:
        """Few and small beside what they stand for, so they are joined here."""
        waiting = self._waiting(number)
        for row in batch.filter(f"topic = '{FILTERS}'").orderBy("pubend", "tick").collect():
            about = row.attributes
            waiting.append(
                _Part(
                    about["broker"].text,
                    about["name"].text,
                    about["sequence"].integer,
                    about["part"].integer,
                    about["parts"].integer,
                    bytes(row.payload),
                )
            )
        tables, rest = _whole(waiting)
        self._save(number, rest)
        if tables:
            found = self._feed.lake.spark.createDataFrame(pa.concat_tables(tables), SCHEMAS["filters"])
            self._feed.append("filters", found, segment, number)

    def _place(self, number: int) -> Path:
        return self._feed.folder / f"parts-{number}.msgpack"

    def _waiting(self, number: int) -> list[_Part]:
        """Parts that batches before this one left."""
        place = self._place(number - 1)
        return msgspec.msgpack.decode(place.read_bytes(), type=list[_Part]) if place.exists() else []

    def _save(self, number: int, rest: list[_Part]) -> None:
        aside = self._feed.folder / "parts.new"
        with aside.open("wb") as file:
            file.write(msgspec.msgpack.encode(rest[-MAX_PARTS:]))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._place(number))
        self._place(number - 2).unlink(missing_ok=True)  # batch number - 1 is done, or this one were not


def _whole(parts: list[_Part]) -> tuple[list[pa.Table], list[_Part]]:
    """The rows of filters all of whose parts are there, and the other parts."""
    held: dict[tuple[str, int], dict[int, _Part]] = {}
    for one in parts:
        held.setdefault((one.broker, one.sequence), {})[one.part] = one
    tables: list[pa.Table] = []
    rest: list[_Part] = []
    for (broker, _), found in held.items():
        listed = [found[at] for at in sorted(found)]
        if len(listed) < listed[0].parts:
            rest += listed
            continue
        record = join_parts([one.payload for one in listed])
        tables.append(rows.filters(int(broker, 16), listed[0].name, [(decode_meta(record), record)]))
    return tables, rest


def _decoder(table: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                yield from _decoded(table, dict(row["attributes"]), row["payload"]).to_batches()

    return decode


def _decoded(table: str, about: dict[str, dict[str, Any]], payload: bytes) -> pa.Table:
    broker, number = int(about["broker"]["text"], 16), about["number"]["integer"]
    match table:
        case "attachments":
            changes, size = decode_changes(payload)
            if size != len(payload):
                raise PeerError(f"changes of attachments of broker {broker:08x} that cannot be read")
            whole = bool(about["whole"]["boolean"])
            return rows.attachments(broker, about["name"]["text"], number, changes, whole=whole)
        case "topology":
            return rows.topology(number, decode_topology(payload))
        case "deliveries":
            return rows.deliveries(broker, number, decode_deliveries(payload))
    raise BugError(f"no bulletins are rows of {table}")
