"""What one subscription knows of the streams that feed it.

A delivery tells (start, end] of one pubend: the rows in it, and silence elsewhere, also between the end of
the delivery before and this start (the broker shares frames between subscribers and does not say silence
to each). That holds within one connection. After a reconnect it does not: a broker begins a plain
subscription anew, and what was published in between is unknown. So each pubend known before is torn until
its next delivery shows where it goes on, and the ticks in between are a Gap; a delivery that begins at or
before what was known leaves no Gap, and its rows that were delivered already are taken out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from postroad.errors import BugError
from postroad.events import EventBatch, Gap
from postroad.ids import pubend_text
from postroad.wire.frames import Kind, Limits

MAX_PUBENDS: Final = 10_000


class Streams:
    """Knowledge of one subscription, per pubend."""

    __slots__ = ("_known", "_torn")

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # pubend -> everything up to this tick was delivered or reported
        self._torn: set[int] = set()  # pubends of _known without a delivery since the last reconnect

    def go_on(self, token: Mapping[int, int]) -> None:
        """A durable subscription has everything up to these ticks."""
        for pubend, tick in token.items():
            self._known[pubend] = max(tick, self._known.get(pubend, 0))

    def begin_anew(self, left: Mapping[int, int], token: Mapping[int, int]) -> list[Gap]:
        """A durable subscription that was left there, and is there no more, begins after the token. Streams
        that are not in it show with their next delivery where they go on."""
        self._torn |= left.keys() & self._known.keys() - token.keys()
        self.go_on(token)
        return [
            Gap(pubend=pubend_text(pubend), start=left[pubend], end=tick)
            for pubend, tick in token.items()
            if left.get(pubend, tick) < tick
        ]

    @property
    def known(self) -> Mapping[int, int]:
        return self._known

    def tear(self) -> None:
        """The connection was lost."""
        self._torn = set(self._known)

    def take(self, batch: EventBatch, limits: Limits) -> tuple[Gap | None, EventBatch | None]:
        """What the application is to see of a delivery: first the Gap, then the rows."""
        pubend, start, end = batch.pubend, batch.start, batch.end
        known = self._known.get(pubend)
        if known is None:
            if len(self._known) >= MAX_PUBENDS:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._torn.discard(oldest)
            known = start
        torn = pubend in self._torn
        self._torn.discard(pubend)
        if end <= known and batch.count:
            return None, None
        self._known[pubend] = max(known, end)
        if batch.lost:
            # A loss reported after a tear reaches back to what was known: one Gap tells both.
            begin = known if torn else max(known, start)
            return (Gap(pubend=pubend_text(pubend), start=begin, end=end) if end > begin else None), None
        gap = Gap(pubend=pubend_text(pubend), start=known, end=start) if torn and start > known else None
        if not batch.count:
            return gap, None
        if start < known:
            return gap, _after(batch, known, limits)
        return gap, batch

    def check(self) -> None:
        if not self._torn <= self._known.keys() or len(self._known) > MAX_PUBENDS:
            raise BugError("a subscription's streams are out of bounds")


def _after(batch: EventBatch, tick: int, limits: Limits) -> EventBatch | None:
    """The rows after `tick`."""
    rows = np.flatnonzero(batch.headers["tick"] > tick).astype(np.uint32)
    if not len(rows):
        return None
    if len(rows) == batch.count:
        return batch
    frame = batch.select(
        rows, kind=Kind.DELIVERY, pubend=batch.pubend, start=tick, end=batch.end, channel=batch.channel
    )
    return EventBatch.parse(frame, limits, expect=Kind.DELIVERY)
