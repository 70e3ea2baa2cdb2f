"""(s, p): how far a durable subscription is on a pubend, and how many events that leaves (spec D11).

The lag in events is counted, not estimated. The persistent filtering subsystem knows how many events a
subscription ever matched here; a cursor knows how many of those lie at or below `counted`, and which of the
events it was told, on whatever connection, are not acknowledged. The difference and those are the lag. Events
that were matched before the subscription came to this broker are counted once they are told.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from postroad.durable.compact import Numbers

MAX_UNACKED: Final = 16_384  # events told apart until they are acknowledged; more are taken together
MAX_PARTS: Final = 256  # and the arrays that they are in


@dataclass(slots=True)
class Cursor:
    released: int  # released(s, p): acknowledged up to here
    saved: int  # the same, on disk
    since: int  # the PFS of this broker knows the subscription from here on
    matched: int  # events at or below `counted` that the PFS counted
    told: int  # the newest tick it was told of on this connection
    counted: int  # the newest tick up to which it was told everything that matched, on any connection
    # Nothing in (quiet, released] was for it: who comes back with a token from there on has all of it.
    quiet: int
    begun: int  # where this connection went on
    last_event: int = 0  # the newest event or gap it was sent on this connection
    held: int = 0  # events in `_unacked`
    _known: int = 0  # those of them that the PFS counted
    # Ticks above `released`, how many events they stand for, and how many of those the PFS counted. A part
    # that stands for more events than it has ticks is released as a whole, with its last tick.
    _unacked: deque[tuple[Numbers, int, int]] = field(default_factory=deque)

    def sent(self, end: int, ticks: Numbers) -> None:
        """The subscriber was told everything up to `end`; the events are at `ticks`, one at least."""
        first, count = int(ticks[0]), len(ticks)
        if first > self.since and first > self.counted and first > self.released:
            self.matched += count
            self._hold(ticks, count, count)
        else:
            fresh = ticks[ticks > self.counted]
            self.matched += int((fresh > self.since).sum())
            fresh = fresh[fresh > self.released]
            if len(fresh):
                self._hold(fresh, len(fresh), int((fresh > self.since).sum()))
        self.heard(end)

    def skipped(self, tick: int, events: int) -> None:
        """Up to `tick`, beyond what is counted, there were so many events that it is not told here: it came
        with a token that is ahead, or they are lost."""
        if tick > self.counted:
            self.matched += events
            self.counted = tick
            if events and tick > self.released:
                self._hold(np.array([tick], np.int64), events, events)

    def heard(self, end: int) -> None:
        """It was told everything up to `end`."""
        self.told = max(self.told, end)
        self.counted = max(self.counted, end)

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
            ticks, count, known = self._unacked[0]
            if ticks[-1] > tick:
                if ticks[0] <= tick and len(ticks) == count:
                    left = ticks[np.searchsorted(ticks, tick, side="right") :]
                    kept = min(known, len(left))  # the PFS knows the newest of them
                    self._unacked[0] = (left, len(left), kept)
                    self.held -= count - len(left)
                    self._known -= known - kept
                return
            self._unacked.popleft()
            self.held -= count
            self._known -= known

    def _hold(self, ticks: Numbers, count: int, known: int) -> None:
        self.held += count
        self._known += known
        if self._unacked and (len(self._unacked) >= MAX_PARTS or self.held > MAX_UNACKED):
            last, before, known_before = self._unacked.pop()
            exact = self.held <= MAX_UNACKED and (len(last), len(ticks)) == (before, count)
            ticks = np.concatenate((last, ticks)) if exact else ticks[-1:]
            count += before
            known += known_before
        self._unacked.append((ticks, count, known))

    @property
    def consumed(self) -> int:
        """Events at or below `released` that the PFS counted: `matched` as it is after a restart."""
        return self.matched - self._known

    def unacked(self) -> list[Numbers]:
        """The ticks of events that it was told and has not acknowledged, as far as they are told apart."""
        return [ticks for ticks, _, _ in self._unacked]

    @property
    def oldest(self) -> int:
        """All that is not acknowledged is at this tick or above."""
        return int(self._unacked[0][0][0]) if self._unacked else max(self.released, self.counted)

    def lag(self, total: int) -> int:
        """Events that are not acknowledged, if the PFS counted `total`."""
        return self.held + max(0, total - self.matched)
