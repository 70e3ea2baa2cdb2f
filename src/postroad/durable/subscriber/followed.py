"""One pubend at its subscriber hosting broker: constream, filtering, those who catch up (spec D4, D5).

A subscriber enters when it connects, or when the pubend can be followed, and goes through rounds of its
catchup stream until it switches over to the constream. On the way its cursor is kept exact: what a token is
ahead of is not told here, but it is counted (`cursor`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from postroad.durable.subscriber.catchup import CatchupStream
from postroad.durable.subscriber.constream import Constream
from postroad.durable.subscriber.cursor import Cursor
from postroad.durable.subscriber.filtering import PersistentFiltering, ReadBuffer
from postroad.durable.subscriber.outputs import Message
from postroad.durable.subscriber.subscriptions import Subscription
from postroad.seam.turn import Turn
from postroad.streams.spans import intersect


@dataclass(slots=True)
class Followed:
    constream: Constream
    filtering: PersistentFiltering
    catchups: dict[int, CatchupStream] = field(default_factory=dict)  # by subscriber, connected ones only
    ahead: dict[int, int] = field(default_factory=dict)  # subscriber with more than is learned here -> tick

    def enter(self, subscription: Subscription, tick: int) -> bool:
        """A connected subscriber that has everything up to `tick`. True: it is to catch up."""
        constream, cursor = self.constream, subscription.cursors[self.constream.pubend]
        cursor.count_to(min(tick, cursor.since))
        self.ahead.pop(subscription.id, None)
        if tick < constream.live:
            self.behind(subscription, tick)
            return True
        constream.join(subscription.id, tick)
        if tick > constream.live:
            self.ahead[subscription.id] = tick
        else:
            self._skip(subscription.id, cursor, tick)
        return False

    def behind(self, subscription: Subscription, tick: int) -> None:
        """It has everything up to `tick` and catches up from there."""
        self.catchups[subscription.id] = CatchupStream(
            subscriber=subscription.id,
            pubend=self.constream.pubend,
            position=tick,
            selector=subscription.selector,
        )

    def leave(self, subscriber: int, cursor: Cursor | None) -> None:
        """Its connection is gone; without a cursor the subscription is, too."""
        constream = self.constream
        if cursor is None:
            self.ahead.pop(subscriber, None)
        elif subscriber in constream and subscriber not in self.ahead:
            cursor.count_to(constream.live)
        constream.forget(subscriber)
        if self.catchups.pop(subscriber, None) is not None:
            self.filtering.cancel(subscriber)

    # ---- what a token is ahead of

    def _skip(self, subscriber: int, cursor: Cursor, tick: int) -> None:
        """It has everything up to `tick`, of which what is above `counted` was not told here."""
        later = self.constream.kept(subscriber, tick)
        cursor.skipped(tick, max(0, self.filtering.matched(subscriber) - cursor.matched - later))

    def settle(self, cursor: Callable[[int], Cursor]) -> None:
        """Count the events that subscribers had acknowledged ahead of this broker, once the constream has
        learned them all. The caller does this before it notes whom it sent the new events."""
        live = self.constream.live
        for number, tick in [item for item in self.ahead.items() if item[1] <= live]:
            del self.ahead[number]
            self._skip(number, cursor(number), tick)

    # ---- rounds

    def switch(
        self, subscription: Subscription, room: Callable[[], bool], send: Callable[[Message], None]
    ) -> bool:
        """Go on from memory, and switch over if there is room for all of it. False: it is too far behind."""
        catchup, constream = self.catchups[subscription.id], self.constream
        cursor = subscription.cursors[constream.pubend]
        # What is kept for switchover was not filtered for those who were not known here yet.
        if catchup.position < max(constream.recent_start, cursor.since):
            return False
        if cursor.counted < catchup.position:
            self._skip(subscription.id, cursor, catchup.position)
        catchup.position = catchup.end = constream.switch(subscription.id, catchup.position, room, send)
        cursor.count_to(catchup.position)
        if subscription.id in constream:
            cursor.caught_up(constream.live, self.filtering.matched(subscription.id))
            del self.catchups[subscription.id]
        return True

    def next_round(self, turn: Turn, subscription: Subscription) -> bool:
        """A plan for the next stretch, at once or once it is read. False: nothing to go on with yet."""
        catchup = self.catchups[subscription.id]
        start, end = catchup.position, self.constream.latest_delivered
        cursor = subscription.cursors[catchup.pubend]
        if start < cursor.since:
            catchup.refilter(cursor.since)
            return True
        if start >= end:
            return False
        low = min(start, max(cursor.counted, cursor.since))
        buffer = self.filtering.batch_read(turn, subscription.id, low, end)
        catchup.reading = True
        if buffer is not None:
            self.plan(subscription, buffer)
        return True

    def plan(self, subscription: Subscription, buffer: ReadBuffer) -> None:
        """What the PFS remembers, from where the stream is or from before that."""
        catchup = self.catchups[subscription.id]
        at = catchup.position
        if buffer.start < at:
            end = max(at, buffer.end)
            before = int(np.searchsorted(buffer.ticks, at, side="right"))
            subscription.cursors[catchup.pubend].skipped(min(at, buffer.end), before)
            unknown = tuple(intersect(buffer.unknown, at, end))
            buffer = replace(buffer, start=at, end=end, ticks=buffer.ticks[before:], unknown=unknown)
        catchup.plan(buffer)
