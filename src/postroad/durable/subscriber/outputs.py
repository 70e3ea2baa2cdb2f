"""What the hosting core of a broker asks of the room around it; storage it asks of the turn itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from postroad.durable.publisher.release import Report
from postroad.durable.subscriber.compact import Numbers
from postroad.errors import PostroadError
from postroad.events.batch import EventBatch, empty_frame
from postroad.kernel.layout import EVENT_HEADER_BYTES, FRAME_HEADER_BYTES
from postroad.streams.spans import Span
from postroad.wire.frames import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Event messages of section 2: these rows of a batch (None: all) to these subscribers, on (start, end].

    What the rows leave out of the span is silence for them. Without a batch all of it is: a silence message.
    """

    subscribers: tuple[int, ...]
    pubend: int
    start: int
    end: int
    batch: EventBatch | None = None
    rows: npt.NDArray[np.uint32] | None = None

    @property
    def count(self) -> int:
        if self.batch is None:
            return 0
        return self.batch.count if self.rows is None else len(self.rows)

    def ticks(self) -> Numbers | None:
        """Those of the events, in memory of their own; None of a silence message."""
        if self.batch is None:
            return None
        ticks = self.batch.headers["tick"]
        return (ticks if self.rows is None else ticks[self.rows]).astype(np.int64)

    @property
    def size(self) -> int:
        """The size of the delivery frame."""
        if self.batch is None or self.rows is None:
            return FRAME_HEADER_BYTES if self.batch is None else len(self.batch.data)
        offsets = self.batch.offsets
        if len(self.rows) == 1:
            row = int(self.rows[0])
            return FRAME_HEADER_BYTES + EVENT_HEADER_BYTES + int(offsets[row + 1]) - int(offsets[row])
        heap = int((offsets[self.rows + 1] - offsets[self.rows]).sum())
        return FRAME_HEADER_BYTES + EVENT_HEADER_BYTES * len(self.rows) + heap


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverGap:
    """A gap message: (start, end] may have held events for these subscribers and is lost.

    `events`: how many there were, as far as the PFS remembers.
    """

    subscribers: tuple[int, ...]
    pubend: int
    start: int
    end: int
    events: int = 0

    @property
    def size(self) -> int:
        return FRAME_HEADER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """Curiosity of a catchup stream: find these ticks here or upstream, and hand what is found to `answer`,
    once the outputs that came with this one are carried out: what `answer` makes goes behind them.

    `need`: what knowledge must be filtered with, for subscribers to take it. What is found here is for
    `subscriber`, what comes from upstream for all that catch up.
    """

    subscriber: int
    pubend: int
    spans: tuple[Span, ...]
    need: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """What a subscriber acknowledged under this ticket is on disk."""

    subscriber: int
    ticket: int
    error: PostroadError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What this broker reports up the tree of a pubend."""

    pubend: int
    report: Report


Message = Deliver | DeliverGap
Receivers = Sequence[tuple[str, int]]  # the name of a subscription, and the session it is sent in
Output = Deliver | DeliverGap | Wants | Confirmed | Reported


def delivery_frame(message: Message, number: int) -> bytes:
    """As the subscription of that number on its connection gets it."""
    pubend, start, end = message.pubend, message.start, message.end
    if isinstance(message, DeliverGap) or message.batch is None:
        lost = isinstance(message, DeliverGap)
        return empty_frame(kind=Kind.DELIVERY, pubend=pubend, start=start, end=end, channel=number, lost=lost)
    return message.batch.select(
        message.rows, kind=Kind.DELIVERY, pubend=pubend, start=start, end=end, channel=number
    )
