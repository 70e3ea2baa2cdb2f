"""Brokers with disks in memory, and clients that publish durably."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.worlds.brokers import QUIET, Client, Net

from postroad.broker.core import Broker
from postroad.config import BrokerConfig
from postroad.durable.settings import DurableConfig
from postroad.errors import StorageError
from postroad.events.batch import BatchBuilder
from postroad.ids import Identity
from postroad.seam.effects import Effect
from postroad.seam.inputs import Input
from postroad.seam.storage import (
    Append,
    Appended,
    AppendFailed,
    Chop,
    LogStream,
    NoRoom,
    Read,
    ReadDone,
    Reader,
    Save,
    Saved,
    SaveFailed,
    StorageEffect,
    Stored,
    StreamEnd,
    StreamKind,
)
from postroad.streams.spans import subtract
from postroad.units import SECOND_US
from postroad.wire.frames import DEFAULT_LIMITS, Accepted, Rejected


def short_name(stream: LogStream) -> int | LogStream:
    """In `MemoryDisk` the events of a pubend stand under its number."""
    return stream.id if stream.kind is StreamKind.EVENTS else stream


@dataclass
class MemoryDisk:
    """What is synced, and what waits for it."""

    tables: dict[str, dict[bytes, bytes]] = field(default_factory=dict)
    records: dict[int | LogStream, list[tuple[int, int, bytes]]] = field(default_factory=dict)
    chopped: dict[int | LogStream, int] = field(default_factory=dict)
    waiting: list[StorageEffect] = field(default_factory=list)
    reads: int = 0
    saves: int = 0
    full: bool = False
    short: bool = False  # of room: events are refused, rows are taken, as by `storage.commit`

    def kept(self, stream: int | LogStream) -> int:
        """Records of a stream that are not released."""
        return sum(last > self.chopped.get(stream, 0) for _, last, _ in self.records.get(stream, ()))

    def sync(self) -> list[Input]:
        waiting, self.waiting = self.waiting, []
        return [outcome for effect in waiting for outcome in self._do(effect)]

    def _do(self, effect: StorageEffect) -> list[Input]:
        match effect:
            case Append() if self.full or self.short:
                return [AppendFailed(tag=effect.tag, error=NoRoom("no space left"))]
            case Save() if self.full:
                return [SaveFailed(tag=effect.tag, error=StorageError("no space left"))]
            case Append():
                records = self.records.setdefault(short_name(effect.stream), [])
                assert not records or records[-1][1] <= effect.first
                records.append((effect.first, effect.last, effect.data))
                return [Appended(tag=effect.tag)]
            case Save():
                self.saves += 1
                table = self.tables.setdefault(effect.table, {})
                for key, value in effect.rows:
                    if value is None:
                        table.pop(key, None)
                    else:
                        table[key] = value
                return [Saved(tag=effect.tag)]
            case Read():
                return [self._read(effect)]
            case Chop():
                name = short_name(effect.stream)
                self.chopped[name] = max(effect.tick, self.chopped.get(name, 0))
        return []

    def _read(self, read: Read) -> ReadDone:
        self.reads += 1
        name = short_name(read.stream)
        floor = self.chopped.get(name, 0)
        held = [one for one in self.records.get(name, []) if one[1] > floor]
        found = [one for one in held if one[1] > read.start and one[0] < read.end]
        size, taken = 0, 0
        while taken < len(found) and size < read.limit_bytes:
            size += len(found[taken][2])
            taken += 1
        more = taken < len(found)
        reach = min(read.end, found[taken - 1][1] if more else held[-1][1] if held else floor)
        missing = subtract([(read.start, reach)], [(first, last) for first, last, _ in found[:taken]])
        return ReadDone(tag=read.tag, records=tuple(found[:taken]), missing=tuple(missing), more=more)

    def stored(self) -> Stored:
        streams = {
            LogStream(StreamKind.EVENTS, name) if isinstance(name, int) else name: StreamEnd(
                last=records[-1][1], chopped=self.chopped.get(name, 0), suspect=False
            )
            for name, records in self.records.items()
        }
        return Stored(load=self._load, streams=streams)

    def _load(self, table: str, reader: Reader) -> dict[bytes, bytes]:
        rows = dict(self.tables.get(table, {}))
        for key, value in rows.items():
            reader(key, value)
        return rows


class DurableNet(Net):
    def __init__(
        self,
        count: int,
        links: list[tuple[int, int]] = [],  # noqa: B006
        pubends: int = 1,
        keep_us: int = 10 * SECOND_US,
        **durable: int,
    ) -> None:
        self.disks = [MemoryDisk() for _ in range(count)]
        self.slow: set[int] = set()  # disks that sync only when told
        self.config = BrokerConfig(
            durable=DurableConfig(pubends=pubends, keep_us=keep_us, **durable), queues=QUIET
        )
        super().__init__(count, links)

    def start(self, at: int) -> None:
        self.boots[at] += 1
        self.disks[at].waiting.clear()
        identity = Identity(
            number=at + 1,
            node=bytes([at + 1]) * 16,
            name=f"b{at}",
            boot=self.boots[at],
            starts=self.boots[at],
        )
        draw = random.Random(at).randrange
        self.brokers[at] = Broker(
            self.config, identity, draw=draw, now_us=self.clock(at), stored=self.disks[at].stored()
        )
        self.give(at, [])

    def perform(self, at: int, effects: list[Effect]) -> None:
        disk = self.disks[at]
        for effect in effects:
            if isinstance(effect, Append | Chop | Read | Save):
                disk.waiting.append(effect)
        super().perform(at, effects)
        if at not in self.slow and disk.waiting:
            self.queue.append((at, disk.sync()))

    def sync(self, at: int) -> None:
        self.give(at, self.disks[at].sync())


class DurableClient(Client):
    def durable(self, topic: str, *payloads: str, **attributes: int) -> bytes:
        builder = BatchBuilder()
        for payload in payloads:
            builder.add(
                self.ids.next(self.net.now_us // 1000), topic, attributes, payload.encode(), DEFAULT_LIMITS
            )
        self.sequence += 1
        return builder.finish(channel=self.sequence, durable=True)

    def accepted(self) -> list[int]:
        return [message.sequence for message in self.messages if isinstance(message, Accepted)]

    def rejected(self) -> list[tuple[int, str]]:
        return [(m.sequence, m.code) for m in self.messages if isinstance(m, Rejected)]
