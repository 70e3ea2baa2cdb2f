"""Traffic for `bench pipeline`: what tracking stores of it, as a lake; and the same as an exact log.

The brokers are a binary tree, publishers at up to four of them. Every message goes to every broker and at
each of the first `delivering` to one subscriber. The recording is the product's own (`tracking.strategies`),
on a virtual clock. So a message is in one filter of each of these histories:

    published     one per broker with publishers; a trace must ask all of them
    routing       one per other broker
    delivery      one per delivering broker

and the exact log has a row for each of the last two and one for where it was published. `shape` finds the
network in which those filters are as many as asked for. Here and there it is one more: at the end of a filter
the next one of the same history has begun.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from postroad.errors import BugError
from postroad.ids import ID_BYTES
from postroad.seam.tracking import DropFilters, ReplaceAttachments, StoreFilter, TrackingEffect
from postroad.spark.lake import rows
from postroad.spark.lake.tables import Tables
from postroad.tracking.attachment_log import Change, decode_changes
from postroad.tracking.keys import DELIVERED, PUBLISHED, ROUTED
from postroad.tracking.record import decode_meta
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import MILLISECOND_US, SECOND_US

RATE: Final = 5_000  # messages a second in all
HOMES: Final = 4  # brokers with publishers, at most
PUBLISHERS: Final = 50  # of each
STEP_US: Final = 100 * MILLISECOND_US
BEGIN_US: Final = 1_700_000_000 * SECOND_US
SAMPLE: Final = 20_000  # ids of which the answers are compared
_LOG_ROWS: Final = 1 << 20  # rows of the exact log in one file
LOG_SCHEMA: Final = pa.schema(
    [
        *(("id", pa.binary()), ("what", pa.string()), ("origin", pa.string())),
        *(("broker", pa.string()), ("who", pa.string())),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A network in which a trace asks `homes + brokers - 1 + delivering` filters about a message."""

    homes: int
    brokers: int
    delivering: int

    @property
    def filters(self) -> int:
        return self.homes + self.brokers - 1 + self.delivering

    @property
    def happenings(self) -> int:
        """Rows of the exact log for a message."""
        return self.brokers + self.delivering


def shape(filters: int) -> Shape:
    """The network for so many filters per id: about as many deliveries as steps of the route."""
    homes = min(HOMES, 1 + filters // 10)
    brokers = max(homes, 1 + (filters - homes) // 2)
    return Shape(homes=homes, brokers=brokers, delivering=max(0, filters - homes - brokers + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What was made, in a folder."""

    shape: Shape
    messages: int
    ids: Path  # Parquet, text
    sample: Path  # some of them
    lake: Path
    log: Path  # Parquet, the exact log

    @property
    def filter_bytes(self) -> int:
        return folder_bytes(self.lake / "filters")

    @property
    def log_bytes(self) -> int:
        return folder_bytes(self.log)

    def remove(self) -> None:
        shutil.rmtree(self.ids.parent)


def folder_bytes(folder: Path) -> int:
    """Of the Parquet files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*.parquet"))


def make_traffic(folder: Path, wanted: Shape, messages: int, *, log: bool = True) -> Traffic:
    """Record `messages` in a network of this shape; `log`: the exact log of it too."""
    made = Traffic(
        shape=wanted,
        messages=messages,
        ids=folder / "ids",
        sample=folder / "sample",
        lake=folder / "lake",
        log=folder / "log",
    )
    network = _Network(wanted)
    steps: list[npt.NDArray[np.uint8]] = []
    for home, ids in _messages(wanted.homes, messages):
        network.send(home, ids)
        steps.append(ids)
    network.close()
    network.write(made.lake)
    made.ids.mkdir()
    made.sample.mkdir()
    # Whoever has ids to trace has them in no order that would help us.
    every = np.random.default_rng(7).permutation(np.concatenate(steps))
    for number, part in enumerate(np.array_split(every, max(1, messages // 500_000))):
        pq.write_table(pa.table({"id": rows.id_texts(part)}), made.ids / f"{number}.parquet")
    pq.write_table(pa.table({"id": rows.id_texts(every[:SAMPLE])}), made.sample / "0.parquet")
    if log:
        _write_log(made.log, network, steps)
    return made


def _messages(homes: int, messages: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """(broker, ids) step by step, in order of time; who publishes when is random."""
    random = np.random.default_rng(5)
    now_ms, sent = BEGIN_US // MILLISECOND_US, 0
    step_ms = STEP_US // MILLISECOND_US
    while sent < messages:
        count = min(RATE * STEP_US // SECOND_US, messages - sent)
        # Publishers are (home, number); none has two messages in one millisecond, so counters are 0.
        moments = random.choice(homes * PUBLISHERS * step_ms, count, replace=False)
        time_ms, publisher = np.divmod(np.sort(moments), homes * PUBLISHERS)
        number, home = np.divmod(publisher, homes)
        ids = np.empty((count, 2), ">u8")
        ids[:, 0] = (number + 1 << 32) + home + 1
        ids[:, 1] = now_ms + time_ms << 16
        for broker in range(homes):
            mine = ids[home == broker]
            if len(mine):
                yield broker + 1, mine.view(np.uint8).reshape(-1, ID_BYTES)
        sent += count
        now_ms += step_ms


class _Network:
    """Brokers 1 to n, broker i linked to i // 2; each with tracking as it is by default."""

    def __init__(self, wanted: Shape) -> None:
        self.shape = wanted
        self._now_us = BEGIN_US
        config = TrackingConfig()
        self.brokers = range(1, wanted.brokers + 1)
        self._tracking: dict[int, Tracking] = {}
        self._records: dict[int, dict[int, bytes]] = {broker: {} for broker in self.brokers}
        self._changes: dict[int, list[Change]] = {broker: [] for broker in self.brokers}
        self.parents = {home: self._tree(home) for home in range(1, wanted.homes + 1)}
        for broker in self.brokers:
            tracking = make_tracking(config, me=broker, stored=(), changes=(), now_us=BEGIN_US)
            for neighbour in self._neighbours(broker):
                tracking.linked(neighbour, BEGIN_US)
            if broker <= wanted.delivering:
                tracking.attached(subscriber(broker), BEGIN_US)
            self._tracking[broker] = tracking
        self._tick()

    def _neighbours(self, broker: int) -> list[int]:
        return [
            neighbour for neighbour in (broker // 2, 2 * broker, 2 * broker + 1) if neighbour in self.brokers
        ]

    def _tree(self, home: int) -> dict[int, int]:
        """Each broker's parent, as messages from this home come."""
        parents: dict[int, int] = {}
        waiting = deque([home])
        while waiting:
            broker = waiting.popleft()
            for neighbour in self._neighbours(broker):
                if neighbour != home and neighbour not in parents:
                    parents[neighbour] = broker
                    waiting.append(neighbour)
        return parents

    def send(self, home: int, ids: npt.NDArray[np.uint8]) -> None:
        data = ids.tobytes()
        last_us = (int.from_bytes(data[-8:-2], "big") + 1) * MILLISECOND_US
        if last_us > self._now_us:
            self._now_us = last_us
            self._tick()
        self._tracking[home].published(data, self._now_us)
        for broker, parent in self.parents[home].items():
            self._tracking[broker].routed(home, parent, data, self._now_us)
        for broker in range(1, self.shape.delivering + 1):
            self._tracking[broker].delivered(home, (subscriber(broker),), data, self._now_us)

    def _tick(self) -> None:
        for broker, tracking in self._tracking.items():
            self._keep(broker, tracking.tick(self._now_us))

    def close(self) -> None:
        self._now_us += SECOND_US
        for broker, tracking in self._tracking.items():
            self._keep(broker, tracking.close(self._now_us))

    def _keep(self, broker: int, effects: list[TrackingEffect]) -> None:
        records = self._records[broker]
        for effect in effects:
            if isinstance(effect, StoreFilter):
                records[effect.sequence] = effect.record
                if effect.replaces is not None:
                    records.pop(effect.replaces, None)
            elif isinstance(effect, DropFilters):
                raise BugError("the traffic is too short for anything to be forgotten")
            else:
                changes = decode_changes(effect.record)[0]
                whole = isinstance(effect, ReplaceAttachments)
                self._changes[broker] = changes if whole else self._changes[broker] + changes

    def write(self, lake: Path) -> None:
        """The tables `filters` and `attachments`, as landed and compacted."""
        filters = [
            rows.filters(
                broker,
                name(broker),
                [(decode_meta(record), record) for record in self._records[broker].values()],
            )
            for broker in self.brokers
        ]
        attachments = [
            rows.attachments(broker, name(broker), number, changes, whole=number == 1)
            for broker in self.brokers
            for number, changes in enumerate((self._changes[broker][:1], self._changes[broker][1:]), 1)
        ]
        tables = Tables(lake)
        tables.append("filters", pa.concat_tables(filters))
        tables.append("attachments", pa.concat_tables(attachments))


def name(broker: int) -> str:
    return f"b{broker}"


def subscriber(broker: int) -> str:
    return f"subscriber{broker}"


def _write_log(folder: Path, network: _Network, steps: list[npt.NDArray[np.uint8]]) -> None:
    """A row per happening, as brokers would log it: each by itself, in order of time."""
    folder.mkdir()
    every = np.concatenate(steps)
    halves = every.view(">u8").reshape(-1, 2)
    every = every[np.argsort(halves[:, 1], kind="stable")]
    homes = every.view(">u4").reshape(-1, 4)[:, 1].astype(np.int64)
    for broker in network.brokers:
        # What happened to the messages of each home, and with whom; texts as numbers into `texts`.
        parents = [network.parents[home].get(broker) for home in sorted(network.parents)]
        sources = ["" if parent is None else name(parent) for parent in parents]
        whats = [PUBLISHED if parent is None else ROUTED for parent in parents]
        columns = [_taken(whats, homes - 1), _taken(sources, homes - 1)]
        ids, origins = _binary(every), _taken([name(home) for home in sorted(network.parents)], homes - 1)
        if broker <= network.shape.delivering:
            twice = pa.array(np.repeat(np.arange(len(every)), 2))
            first = pa.array(np.tile([True, False], len(every)))
            second = (DELIVERED, subscriber(broker))
            columns = [
                pc.if_else(first, column.take(twice), pa.scalar(text))
                for column, text in zip(columns, second, strict=True)
            ]
            ids, origins = ids.take(twice), origins.take(twice)
        here = pa.repeat(name(broker), len(ids))
        table = pa.table([ids, columns[0], origins, here, columns[1]], schema=LOG_SCHEMA)
        for number, at in enumerate(range(0, len(table), _LOG_ROWS)):
            pq.write_table(table.slice(at, _LOG_ROWS), folder / f"{name(broker)}-{number}.parquet")


def _binary(ids: npt.NDArray[np.uint8]) -> pa.Array:
    offsets = np.arange(len(ids) + 1, dtype=np.int32) * ID_BYTES
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(ids.tobytes())]
    return pa.Array.from_buffers(pa.binary(), len(ids), buffers)


def _taken(texts: list[str], numbers: npt.NDArray[np.int64]) -> pa.Array:
    return pa.array(texts, pa.string()).take(pa.array(numbers))
