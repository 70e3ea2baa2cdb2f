"""A broker's tracking with its stored filters in memory, and traces asked of brokers in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tests.worlds.brokers import Client

from postroad.ids import MessageId
from postroad.seam.tracking import (
    ReplaceAttachments,
    StoreAttachments,
    StoreFilter,
    TrackingEffect,
)
from postroad.tracking.attachment_log import Change, decode_changes
from postroad.tracking.query.messages import Finding, TraceItem, TraceQuestion
from postroad.tracking.record import FilterMeta, decode_meta
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.frames import (
    Reply,
    Request,
    encode,
)

NOW_US = 1_700_000_000 * SECOND_US
HOUR_US = 3600 * SECOND_US


class Disk:
    """What a broker's tracking has stored."""

    def __init__(self) -> None:
        self.log = b""
        self.records: dict[int, bytes] = {}
        self.written = 0

    def keep(self, effects: Iterable[TrackingEffect]) -> None:
        for effect in effects:
            if isinstance(effect, StoreAttachments):
                self.log += effect.record
                self.written += len(effect.record)
            elif isinstance(effect, ReplaceAttachments):
                self.log = effect.record
                self.written += len(self.log)
            elif isinstance(effect, StoreFilter):
                self.records[effect.sequence] = effect.record
                if effect.replaces is not None:
                    self.records.pop(effect.replaces, None)

    @property
    def changes(self) -> list[Change]:
        return decode_changes(self.log)[0]

    @property
    def metas(self) -> list[FilterMeta]:
        return [decode_meta(record) for record in self.records.values()]

    def start(self, now_us: int, config: TrackingConfig | None = None) -> Tracking:
        made = make_tracking(
            config or TrackingConfig(), me=1, stored=self.metas, changes=self.changes, now_us=now_us
        )
        self.keep(made.tick(now_us))
        return made

    def find(self, tracking: Tracking, identity: bytes, origin: int = 1) -> Finding:
        question = TraceQuestion(items=(TraceItem(id=identity, origin=origin),))
        records: dict[int, bytes] = {}
        while wanted := tracking.answer(question, records)[1]:
            records |= {sequence: self.records[sequence] for sequence in wanted}
        return tracking.answer(question, records)[0].findings[0]


def identity(at_us: int, number: int = 0) -> bytes:
    return bytes(MessageId(9, 1, at_us // MILLISECOND_US, number))


def trace(client: Client, identity: bytes) -> dict[str, Any]:
    arguments = {"id": str(MessageId.from_bytes(identity))}
    client.send(encode(Request(number=len(client.messages), what="trace", arguments=arguments)))
    reply = client.messages[-1]
    assert isinstance(reply, Reply)
    assert reply.code == ""
    found: dict[str, Any] = json.loads(reply.body)
    return found
