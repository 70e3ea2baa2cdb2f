"""Brokers in memory that publish their own history."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.worlds.brokers import SECOND_US, Client
from tests.worlds.durable_brokers import DurableNet

from postroad.broker.core import Broker
from postroad.config import BrokerConfig
from postroad.events.batch import Event
from postroad.history.bulletins import (
    TOPOLOGY,
    Links,
    decode_topology,
)
from postroad.ids import Identity
from postroad.seam.effects import Effect, Note
from postroad.seam.tracking import (
    DropFilters,
    FiltersRead,
    Keep,
    ReadFilters,
    ReplaceAttachments,
    StoreFilter,
)
from postroad.tracking.attachment_log import decode_changes
from postroad.tracking.record import decode_meta
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.wire.frames import DEFAULT_LIMITS

PERSIST_S = 1


@dataclass
class Folder:
    """A broker's tracking records, and every sequence that was ever among them."""

    records: dict[int, bytes] = field(default_factory=dict)
    changes: bytes = b""
    ever: set[int] = field(default_factory=set)

    def keep(self, keep: Keep) -> None:
        for effect in keep.effects:
            if isinstance(effect, StoreFilter):
                self.records[effect.sequence] = effect.record
                self.ever.add(effect.sequence)
                if effect.replaces is not None:
                    self.records.pop(effect.replaces, None)
            elif isinstance(effect, DropFilters):
                self.changes += effect.record
                for sequence in effect.sequences:
                    self.records.pop(sequence, None)
            else:
                whole = isinstance(effect, ReplaceAttachments)
                self.changes = effect.record if whole else self.changes + effect.record


class HistoryNet(DurableNet):
    def __init__(
        self,
        count: int,
        links: list[tuple[int, int]] = [],  # noqa: B006
        strategy: str = "bloom",
    ) -> None:
        self.tracking = TrackingConfig(strategy=strategy, persist_us=PERSIST_S * SECOND_US)
        self.limits = DEFAULT_LIMITS
        self.folders = [Folder() for _ in range(count)]
        self.recording: dict[int, Tracking] = {}  # of the brokers that track
        self.notes: list[str] = []
        super().__init__(count, links)

    def start(self, at: int) -> None:
        self.boots[at] += 1
        self.disks[at].waiting.clear()
        self.brokers[at] = Broker(
            BrokerConfig(tracking=self.tracking, limits=self.limits),
            Identity(
                number=at + 1,
                node=bytes([at + 1]) * 16,
                name=f"b{at}",
                boot=self.boots[at],
                starts=self.boots[at],
            ),
            draw=random.Random(at).randrange,
            now_us=self.now_us,
            tracking=self._recorded(at),
            stored=self.disks[at].stored(),
        )
        self.give(at, [])

    def _recorded(self, at: int) -> Tracking | None:
        """As its folder has it, with the settings there are now."""
        self.recording.pop(at, None)
        if self.tracking.strategy == "none":
            return None
        folder = self.folders[at]
        self.recording[at] = make_tracking(
            self.tracking,
            me=at + 1,
            stored=[decode_meta(record) for record in folder.records.values()],
            changes=decode_changes(folder.changes)[0],
            now_us=self.now_us,
        )
        return self.recording[at]

    def perform(self, at: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Keep):
                self.folders[at].keep(effect)
            elif isinstance(effect, ReadFilters):
                records = self.folders[at].records
                found = {sequence: records.get(sequence, b"") for sequence in effect.sequences}
                self.queue.append((at, [FiltersRead(tag=effect.tag, records=found)]))
            elif isinstance(effect, Note) and effect.level == "error":
                self.notes.append(effect.text)
        super().perform(at, effects)

    def metric(self, at: int, name: str) -> int | float:
        broker = self.brokers[at]
        assert broker is not None
        return broker.metrics()[name]


def events(reader: Client, topic: str = "", broker: int | None = None) -> list[Event]:
    found = [event for batch in reader.batches for event in batch.events()]
    found = [event for event in found if topic in ("", event.topic)]
    return [event for event in found if broker is None or event.attributes["broker"] == f"{broker + 1:08x}"]


def links(reader: Client, broker: int) -> list[Links]:
    return [decode_topology(event.payload) for event in events(reader, TOPOLOGY, broker)]
