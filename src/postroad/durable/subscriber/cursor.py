"""(s, p): how far a durable subscription is on a pubend, and how many events that leaves (spec D11).

The lag in events is counted, not estimated. The persistent filtering subsystem knows how many events a
subscription ever matched here; a cursor knows how many of those lie at or below `counted`, and which of the
events it was told, on whatever connection, are not acknowledged. The difference and those are the lag. Events
that were matched before the subscription came to this broker are counted once they are told.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from postroad.durable.subscriber.compact import Numbers

MAX_UNACKED: Final = 16_384  # events told apart until they are acknowledged; more are taken together
MAX_PARTS: Final = 256  # and the arrays that they are in


class SentEvents(NamedTuple):
    """Events that a subscriber was sent."""

    ticks: Numbers  # one for each; one for all of them: they are acknowledged together
    first: int
    last: int
    events: int
    known: int  # the PFS counted so many, the newest ones

    @classmethod
    def at(cls, ticks: Numbers) -> SentEvents:
        return cls(ticks, int(ticks[0]), int(ticks[-1]), len(ticks), len(ticks))

    @classmethod
    def until(cls, tick: int, count: int, known: int) -> SentEvents:
        return cls(np.array([tick], np.int64), tick, tick, count, known)


@dataclass(slots=True)
class Cursor:
    released: int  # released(s, p): acknowledged up to here
    saved: int  # the same, on disk
    since: int  # the PFS of this broker knows the subscription from here on
    matched: int  # events at or below `counted` that the PFS counted
    sent_to: int  # the newest tick it was told of on this connection
    counted: int  # the newest tick up to which it was told everything that matched, on any connection
    # Nothing in (quiet, released] was for it: who comes back with a token from there on has all of it.
    quiet: int
    begun: int  # where this connection went on
    firm: bool = True  # a restart would find the same beginning: until then nothing is told
    last_event: int = 0  # the newest event or gap it was sent on this connection
    last_gap: int = 0  # the newest gap it was sent on any
    unacked_events: int = 0  # in `_unacked`
    _known: int = 0  # those of them that the PFS counted
    _unacked: deque[SentEvents] = field(default_factory=deque)  # above `released`

    def sent(self, end: int, events: SentEvents) -> None:
        """The subscriber was told everything up to `end`, these events among it."""
        first = events.first
        if first > self.since and first > self.counted and first > self.released:
            self.matched += events.events
            self._hold(events)
        else:
            fresh = events.ticks[events.ticks > self.counted]
            self.matched += int((fresh > self.since).sum())
            fresh = fresh[fresh > self.released]
            if len(fresh):
                self._hold(SentEvents.at(fresh)._replace(known=int((fresh > self.since).sum())))
        self.mark_sent(end)

    def skipped(self, tick: int, events: int) -> None:
        """Up to `tick`, beyond what is counted, there were so many events that it is not told here: it came
        with a token that is ahead, or they are lost."""
        if tick > self.counted:
            self.matched += events
            self.counted = tick
            if events and tick > self.released:
                self._hold(SentEvents.until(tick, events, events))

    def mark_sent(self, end: int) -> None:
        """It was told everything up to `end`."""
        if end > self.sent_to:
            self.sent_to = end
        if end > self.counted:
            self.counted = end

    def count_to(self, tick: int) -> None:
        """It was told everything that matched up to `tick`; silence may follow the last message."""
        self.counted = max(self.counted, tick)

    def caught_up(self, live: int, total: int) -> None:
        """The same up to the present, of `total` events in all."""
        self.count_to(live)
        self.matched = total

    def release(self, tick: int) -> None:
        self.released = tick
        while self._unacked:
            part = self._unacked[0]
            if part.last > tick:
                if part.first <= tick and len(part.ticks) == part.events:
                    left = SentEvents.at(part.ticks[np.searchsorted(part.ticks, tick, side="right") :])
                    left = left._replace(known=min(part.known, left.events))
                    self._unacked[0] = left
                    self.unacked_events -= part.events - left.events
                    self._known -= part.known - left.known
                return
            self._unacked.popleft()
            self.unacked_events -= part.events
            self._known -= part.known

    def _hold(self, part: SentEvents) -> None:
        self.unacked_events += part.events
        self._known += part.known
        if self._unacked and (len(self._unacked) >= MAX_PARTS or self.unacked_events > MAX_UNACKED):
            part = self._join(self._unacked.pop(), part)
        self._unacked.append(part)

    def _join(self, earlier: SentEvents, later: SentEvents) -> SentEvents:
        count, known = earlier.events + later.events, earlier.known + later.known
        if self.unacked_events > MAX_UNACKED or len(earlier.ticks) + len(later.ticks) < count:
            return SentEvents.until(later.last, count, known)
        return SentEvents(
            np.concatenate((earlier.ticks, later.ticks)), earlier.first, later.last, count, known
        )

    @property
    def consumed(self) -> int:
        """Events at or below `released` that the PFS counted: `matched` as it is after a restart."""
        return self.matched - self._known

    @property
    def settled(self) -> int:
        """It acknowledged all that there was for it up to here."""
        if self._unacked or self.last_gap > self.released:
            return self.released
        return max(self.released, self.counted)

    @property
    def whole(self) -> bool:
        """All of its past was filtered for it, here or for a message to it: the lag is known."""
        return max(self.released, self.counted) >= self.since

    @property
    def oldest(self) -> int:
        """All that is not acknowledged is at this tick or above."""
        return self._unacked[0].first if self._unacked else max(self.released, self.counted)

    def lag(self, total: int) -> int:
        """Events that are not acknowledged, if the PFS counted `total`."""
        return self.unacked_events + max(0, total - self.matched)
