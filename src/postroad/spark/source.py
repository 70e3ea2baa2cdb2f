"""The data source `postroad`: durable events as rows, batch and streaming (spec P1, P2).

An offset is a checkpoint token, pubend -> tick, and under `since` the tick at which pubends begin that it
does not name. Offsets grow by the maximum of each component. A partition is a tick range of one pubend, which
an executor reads straight from a broker, if it can from the one that has it on disk.

Whatever moves offsets runs in one process at the driver. Brokers keep events for the durable subscription
named by `durable`, whose token moves when Spark says that a batch is done. It is never read from: it holds
storage, and says where a query begins that has no batch behind it yet, so that a query killed in its first
batch begins at the same place again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:
    from postroad.spark.session import check_installed

    check_installed()
    raise

from postroad.client.blocking import Client, Subscription
from postroad.errors import PostroadError, StorageError, UnavailableError, UsageError
from postroad.events import EventBatch, Gap
from postroad.events.token import CheckpointToken
from postroad.ids import is_history, parse_pubend, pubend_text
from postroad.spark.columns import EVENTS, event_columns
from postroad.spark.lake.rows import day
from postroad.spark.lake.tables import SCHEMAS
from postroad.spark.options import OLDEST, Access, ReadOptions, read_options
from postroad.spark.pushdown import Pushed, pushed
from postroad.units import KIB, MIB, MILLISECOND_US, SECOND_US

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter, Filter
    from pyspark.sql.types import StructType

SINCE: Final = "since"
GAP_TOPIC: Final = "$postroad/gap"
PACE_S: Final = 0.25  # an idle query looks for events this often
QUIET_S: Final = 5.0  # and moves on this often where there are none for it: released ticks lie behind
WINDOW: Final = 256 * KIB  # of what the driver looks at; executors have the client's own
KNOCK_S: Final = 5.0  # for a broker that is one of several
BATCH_ROWS: Final = 10_000  # of a record batch, about
BATCH_BYTES: Final = 4 * MIB
_OWN: Final = {field.name: from_arrow_type(field.type).simpleString() for field in EVENTS}
_KINDS: Final = {"string": "text", "bigint": "integer", "double": "float", "boolean": "boolean"}

Offset = dict[str, int]


class PostroadSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "postroad"

    def schema(self) -> str:
        return SCHEMAS["events"]

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(read_options(self.options, stream=False), _columns(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(read_options(self.options, stream=True), _columns(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from postroad.spark.sink import batch_writer

        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from postroad.spark.sink import stream_writer

        return stream_writer(self.options, schema, overwrite=overwrite)


class PushingSource(PostroadSource):
    """The same with filters pushed down, which Spark must be told to allow (`register`)."""

    def reader(self, schema: StructType) -> DataSourceReader:
        return PushingReader(read_options(self.options, stream=False), _columns(schema))


def _columns(schema: StructType) -> dict[str, str]:
    """The columns asked for: name -> "" for one of the event's own, else the type of the attribute."""
    kinds: dict[str, str] = {}
    for field in schema.fields:
        kind = field.dataType.simpleString()
        small = field.name.lower()
        own = _OWN.get(small)
        if own is not None and field.name != small:
            raise UsageError(
                f"column {field.name}: an event's own is written {small}; an attribute of that name is in the"
                " column attributes"
            )
        if own is not None and kind != own:
            raise UsageError(f"column {field.name} is {own}, not {kind}")
        if own is not None:
            kinds[field.name] = ""
        elif kind in _KINDS:
            kinds[field.name] = _KINDS[kind]
        else:
            raise UsageError(
                f"column {field.name}: an attribute is string, bigint, double or boolean, not {kind}"
            )
    return kinds


@dataclass(frozen=True)
class Range(InputPartition):
    """The ticks (after, until] of one pubend; `address` lists the brokers to read them from."""

    address: str
    pubend: int
    after: int
    until: int
    topic: str
    where: str
    columns: tuple[tuple[str, str], ...]
    on_loss: str
    access: Access


def read_range(part: InputPartition) -> Iterator[pa.RecordBatch]:
    """The events of a range, in an executor."""
    if not isinstance(part, Range):  # Spark's own, for a plan without partitions
        return
    first = True
    with (
        part.access.connect(part.address) as client,
        closing(
            _steadily(
                client,
                after={part.pubend: part.after},
                until={part.pubend: part.until},
                topic=part.topic,
                where=part.where,
                patience_s=part.access.timeout_s,
            )
        ) as batches,
    ):
        for item in _together(chain.from_iterable(batches)):
            if not isinstance(item, Gap):
                yield _chosen(event_columns(item), part.columns)
            elif first and part.after <= OLDEST:
                pass  # it begins with the oldest that is kept
            elif part.on_loss == "gap":
                yield _chosen(_gap_row(item), part.columns)
            else:
                raise StorageError(
                    f"events of pubend {item.pubend} in the ticks ({item.start}, {item.end}] were"
                    " released before they were read: a durable name holds them; with onLoss=gap it"
                    " goes on without them"
                )
            first = False


def _steadily(
    client: Client,
    *,
    after: Mapping[int, int],
    until: Mapping[int, int],
    topic: str,
    where: str,
    patience_s: float,
) -> Generator[list[EventBatch | Gap], None, None]:
    """What lies between; UnavailableError when nothing came for so long because a broker that has it is away.

    A broker that has just started does not know every pubend yet, and one that waits for another gives up
    before a patient query does: then it goes on after what came.
    """
    reached = CheckpointToken(after)
    give_up = time.monotonic() + patience_s
    while True:
        try:
            with client.read(
                CheckpointToken(until).to_json(), after=reached.to_json(), topic=topic, where=where
            ) as events:
                for items in _waiting(client, events, until, patience_s):
                    reached = reached.maximum(_ends(items))
                    yield items
                    give_up = time.monotonic() + patience_s
            return
        except UnavailableError:
            if time.monotonic() > give_up:
                raise
            time.sleep(PACE_S)


def _ends(items: Iterable[EventBatch | Gap]) -> CheckpointToken:
    return CheckpointToken(
        {parse_pubend(item.pubend) if isinstance(item, Gap) else item.pubend: item.end for item in items}
    )


def _waiting(
    client: Client, events: Subscription, pubends: Collection[int], patience_s: float
) -> Iterator[list[EventBatch | Gap]]:
    """What comes, however long it takes while the brokers that have it are there."""
    while True:
        try:
            yield from events.batches(patience_s)
            return
        except TimeoutError:
            away = sorted({*client.request("heads")["away"]} & {pubend_text(pubend) for pubend in pubends})
        if away:
            raise UnavailableError(f"the broker of pubend {away[0]} is away: its events cannot be read now")


def _together(items: Iterable[EventBatch | Gap]) -> Iterator[EventBatch | Gap]:
    """Batches that adjoin as one: Spark and Arrow take their time for each batch, however small it is."""
    adjoining: list[EventBatch] = []
    rows = size = 0
    for item in items:
        alone = isinstance(item, Gap) or item.lost
        if adjoining and (
            alone or item.start != adjoining[-1].end or rows >= BATCH_ROWS or size >= BATCH_BYTES
        ):
            yield EventBatch.concatenate(adjoining)
            adjoining, rows, size = [], 0, 0
        if isinstance(item, Gap) or item.lost:
            yield item
        else:
            adjoining.append(item)
            rows, size = rows + item.count, size + len(item.data)
    if adjoining:
        yield EventBatch.concatenate(adjoining)


def _gap_row(gap: Gap) -> pa.RecordBatch:
    values = [
        (name, {"text": None, "integer": tick, "float": None, "boolean": None})
        for name, tick in (("start", gap.start), ("end", gap.end))
    ]
    row = {
        **dict.fromkeys(EVENTS.names),
        "topic": GAP_TOPIC,
        "attributes": values,
        "pubend": gap.pubend,
        "tick": gap.end,
        "date": day(gap.end // MILLISECOND_US),
        "origin": gap.pubend[:8],
    }
    return pa.RecordBatch.from_pylist([row], EVENTS)


def _chosen(batch: pa.RecordBatch, columns: Sequence[tuple[str, str]]) -> pa.RecordBatch:
    arrays = []
    for name, kind in columns:
        if kind:
            entry = pc.map_lookup(batch.column("attributes"), pa.scalar(name), "first")
            arrays.append(pc.struct_field(entry, kind))
        else:
            arrays.append(batch.column(name))
    return pa.RecordBatch.from_arrays(arrays, names=[name for name, _ in columns])


class Planner:
    """What batch and streaming have in common, at the driver."""

    def __init__(self, options: ReadOptions, columns: dict[str, str]) -> None:
        self.options = options
        self.columns = columns
        self._homes: dict[int, str] | None = None  # broker number -> address

    def client(self) -> Client:
        return self.options.access.connect(",".join(self.options.brokers), window=WINDOW)

    def heads(self, clients: Iterable[Client]) -> tuple[Offset, Offset]:
        """How far pubends are; and how far those were known whose brokers are away."""
        ticks: Offset = {}
        away: Offset = {}
        for client in clients:
            answer = client.request("heads")
            for pubend, tick in answer["heads"].items():
                if tick > 0 and self.concerned(parse_pubend(pubend)):
                    which = away if pubend in answer["away"] else ticks
                    which[pubend] = max(tick, which.get(pubend, 0))
        return ticks, {pubend: tick for pubend, tick in away.items() if pubend not in ticks}

    def concerned(self, pubend: int) -> bool:
        """Whether this pubend can have events of the topic."""
        topic = self.options.topic
        return not topic or is_history(pubend) == topic.startswith("$postroad")

    def everywhere(self, *, whole: bool = False) -> dict[str, Client]:
        """Clients of all brokers that answer, by address; `whole`: UnavailableError if one does not."""
        clients: dict[str, Client] = {}
        failed: PostroadError | None = None
        access = self.options.access
        patience = access.timeout_s if whole or len(self.options.brokers) == 1 else KNOCK_S
        for address in self.options.brokers:
            try:
                clients[address] = access.connect(address, timeout_s=patience)
            except UnavailableError as error:
                failed = error
                if whole:
                    break
        if failed is not None and (whole or not clients):
            for client in clients.values():
                client.close()
            raise failed
        return clients

    def homes(self) -> dict[int, str]:
        if self._homes is None:
            clients = self.everywhere()
            try:
                self._homes = {
                    int(client.request("status")["number"], 16): address
                    for address, client in clients.items()
                }
            finally:
                for client in clients.values():
                    client.close()
        return self._homes

    def ranges(self, start: Offset, end: Offset, pushed: Pushed) -> list[InputPartition]:
        out: list[InputPartition] = []
        options = self.options
        for name, until in sorted(end.items()):
            after = start.get(name, start.get(SINCE, OLDEST))
            if name == SINCE or after >= until or not pushed.wants(name):
                continue
            pubend = parse_pubend(name)
            home = self.homes().get(pubend >> 32)
            brokers = sorted(options.brokers, key=lambda address, home=home: address != home)  # type: ignore[misc]
            pieces = options.partitions if after > OLDEST else 1
            marks = sorted({after + (until - after) * at // pieces for at in range(pieces + 1)})
            out += [
                Range(
                    address=",".join(brokers),
                    pubend=pubend,
                    after=low,
                    until=high,
                    topic=pushed.topic,
                    where=pushed.where,
                    columns=tuple(self.columns.items()),
                    on_loss=options.on_loss,
                    access=options.access,
                )
                for low, high in pairwise(marks)
            ]
        return out

    def start(self) -> Offset:
        options = self.options
        return {SINCE: options.since_us} if options.token is None else _offset({**options.token})


def _offset(token: dict[int, int], since: int = OLDEST) -> Offset:
    return dict(
        sorted({SINCE: since, **{pubend_text(pubend): tick for pubend, tick in token.items()}}.items())
    )


def _token(offset: Offset) -> CheckpointToken:
    return CheckpointToken({parse_pubend(name): tick for name, tick in offset.items() if name != SINCE})


def _maximum(first: Offset, second: Offset) -> Offset:
    names = sorted({*first, *second})
    return {name: max(first.get(name, 0), second.get(name, 0)) for name in names}


class BatchReader(Planner, DataSourceReader):
    """`spark.read.format("postroad")`: everything between two places."""

    def __init__(self, options: ReadOptions, columns: dict[str, str]) -> None:
        super().__init__(options, columns)
        self._pushed = Pushed(topic=options.topic, where=options.where)

    def partitions(self) -> list[InputPartition]:
        options = self.options
        # A broker that is silent may have what nobody else knows of.
        clients = self.everywhere(whole=options.until is None)
        try:
            there, away = self.heads(clients.values())
        finally:
            for client in clients.values():
                client.close()
        end = there | away  # what a broker has that is away is waited for: it may not be left out
        if options.until is not None:
            end = {pubend_text(pubend): tick for pubend, tick in options.until.items()}
        elif options.until_us is not None:
            # A tick is a time of its broker's clock.
            end = dict.fromkeys(end, min(options.until_us, time.time_ns() // 1000))
        return self.ranges(self.start(), end, self._pushed)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(partition)


class PushingReader(BatchReader):
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """All of them stay with Spark too: a broker's selector may let more pass, never less."""
        self._pushed = pushed(self._pushed, filters, self.columns)
        return filters


class StreamReader(Planner, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("postroad")`."""

    def __init__(self, options: ReadOptions, columns: dict[str, str]) -> None:
        super().__init__(options, columns)
        self._client: Client | None = None
        self._target: Offset | None = None  # Trigger.AvailableNow: no further than this
        self._quiet: tuple[Offset, Offset] = ({}, {})  # after the first, nothing up to the second
        self._moved = self._looked = 0.0

    def initialOffset(self) -> Offset:
        if not self.options.durable:
            return self.start()
        token = CheckpointToken.from_json(self._with_subscription(""))
        ticks = {pubend: tick for pubend, tick in token.items() if self.concerned(pubend)}
        # It may have gone on from where the option says, and holds what comes before that too if it is new.
        return _maximum(self.start(), _offset(ticks))

    def _with_subscription(self, upto: str) -> str:
        """Acknowledge `upto`, if it is something; the token after which the durable subscription goes on.

        It is attached for this moment only, and made if it is new. So this can be done any number of times.
        Its token is ours: one that the broker keeps moves on over silence, and what is released below it
        would look lost to a query that has not moved yet.
        """
        options = self.options
        since = datetime.fromtimestamp(options.since_us / SECOND_US, UTC)
        with self._connected().subscribe(
            options.topic, options.where, durable=options.durable, token="", since=since
        ) as subscription:
            begun = subscription.token
            if upto:
                subscription.ack(upto=upto)
            return begun

    def _connected(self) -> Client:
        if self._client is None:
            self._client = self.client()
        return self._client

    def getDefaultReadLimit(self) -> ReadLimit:
        rows = self.options.max_rows
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:
        clients = self.everywhere()
        try:
            self._target = self.heads(clients.values())[0]
        finally:
            for client in clients.values():
                client.close()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if self._target is not None:
            end = _maximum(start, self._target)
            return end if most is None else self._reach(start, start, end, most)[0]
        time.sleep(max(0.0, self._looked + PACE_S - time.monotonic()))
        self._looked = time.monotonic()
        end = _maximum(start, self.heads([self._connected()])[0])
        passed = self._quiet[1] if self._quiet[0] == start else start
        if end == passed:
            return start
        reached, rows = self._reach(start, passed, end, most or 1)
        if rows or self._looked - self._moved >= QUIET_S:
            self._moved, self._quiet = self._looked, ({}, {})
            return end if most is None else reached
        self._quiet = (start, end)
        return start

    def _reach(self, start: Offset, passed: Offset, end: Offset, most: int) -> tuple[Offset, int]:
        """How far `most` rows reach from `passed`, and how many they are if there are fewer."""
        rows = 0
        since = start.get(SINCE, OLDEST)
        reached = dict(passed)
        options = self.options
        steadily = _steadily(
            self._connected(),
            after={parse_pubend(name): passed.get(name, since) for name in end if name != SINCE},
            until=_token(end),
            topic=options.topic,
            where=options.where,
            patience_s=options.access.timeout_s,
        )
        with closing(steadily) as batches:
            for item in chain.from_iterable(batches):
                if isinstance(item, Gap):
                    rows += 1 if item.start > OLDEST else 0
                    reached[item.pubend] = max(item.end, reached.get(item.pubend, 0))
                else:
                    ticks = item.headers["tick"]
                    take = min(most - rows, item.count)
                    name = pubend_text(item.pubend)
                    whole = take == item.count
                    reached[name] = max(int(ticks[take - 1]), item.end if whole else 0, reached.get(name, 0))
                    rows += take
                if rows >= most:
                    return _maximum(start, reached), rows
        return end, rows

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        return self.ranges(start, end, Pushed(topic=self.options.topic, where=self.options.where))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(partition)

    def commit(self, end: Offset) -> None:
        """The batch up to here is done. What cannot be said now is said with the next."""
        if self.options.durable:
            with suppress(UnavailableError):
                self._with_subscription(_token(end).to_json())

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
