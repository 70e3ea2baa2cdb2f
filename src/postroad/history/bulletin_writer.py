"""Bulletins as durable events of the broker itself: into frames, to the log, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from postroad.durable.publisher.publishing import DurablePublishing
from postroad.errors import TooLargeError
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.history.bulletins import MAX_PART_BYTES, MIN_PART_BYTES, Bulletin
from postroad.seam.turn import Turn
from postroad.units import KIB, MIB, SECOND_US
from postroad.wire.frames import Limits

FRAME_BYTES: Final = MIB
SAY_US: Final = 10 * SECOND_US  # that something was dropped is said this often at most
_OVERHEAD_BYTES: Final = 2 * KIB  # of an event around its payload: topic, attributes
FULL_DISK: Final = "the disk does not take them"

Settled = Callable[[Turn, bool, int], None]  # whether a frame was accepted, and how many events it has


class BulletinWriter:
    def __init__(self, publishing: DurablePublishing, limits: Limits) -> None:
        self._publishing = publishing
        self._limits = limits
        self.part_bytes = min(MAX_PART_BYTES, limits.event_bytes - _OVERHEAD_BYTES)
        self.enabled = publishing.available and self.part_bytes >= MIN_PART_BYTES
        self.pending_bytes = 0  # of frames that wait for the disk
        self._unstaged = False  # something waits to be staged
        self._unsaid = 0  # dropped, and not said yet
        self._why = ""
        self._say_us = 0
        self._counters = {"history_events_total": 0, "history_dropped_total": 0}

    def publish(self, turn: Turn, bulletins: Iterable[tuple[bytes, Bulletin]], settled: Settled) -> int:
        """These, with their ids, in as many frames as it takes, which is returned; each is settled alone."""
        frames = self._frames(bulletins)
        for frame in frames:
            self.pending_bytes += len(frame.data)
            self._publishing.publish_own(turn, frame, partial(self._settle, frame, settled))
        self._unstaged |= bool(frames)
        return len(frames)

    def _settle(self, frame: EventBatch, settled: Settled, turn: Turn, accepted: bool) -> None:
        """The disk has taken the frame, or not."""
        self.pending_bytes -= len(frame.data)
        self._counters["history_events_total"] += frame.count if accepted else 0
        settled(turn, accepted, frame.count)

    def _frames(self, bulletins: Iterable[tuple[bytes, Bulletin]]) -> list[EventBatch]:
        out: list[EventBatch] = []
        builder = BatchBuilder()
        for identity, bulletin in bulletins:
            if builder.count and builder.size + len(bulletin.payload) > FRAME_BYTES:
                out.append(self._finished(builder))
            try:
                builder.add(identity, bulletin.topic, bulletin.attributes, bulletin.payload, self._limits)
            except TooLargeError as error:
                self.dropped(1, str(error))
        return [*out, self._finished(builder)] if builder.count else out

    def _finished(self, builder: BatchBuilder) -> EventBatch:
        return EventBatch.parse(builder.finish(channel=0, durable=True), self._limits)

    def dropped(self, count: int, why: str = FULL_DISK) -> None:
        self._counters["history_dropped_total"] += count
        self._unsaid += count
        self._why = why

    def tick(self, turn: Turn) -> None:
        """Send what was published to the log, and note in the broker's own log how much was dropped."""
        if self._unstaged:
            self._unstaged = False
            self._publishing.stage(turn)
        if self._unsaid and turn.now_us >= self._say_us:
            turn.note("error", f"the broker's own history lacks {self._unsaid} events: {self._why}")
            self._unsaid, self._say_us = 0, turn.now_us + SAY_US

    def metrics(self) -> dict[str, int]:
        return {**self._counters, "history_pending_bytes": self.pending_bytes}
