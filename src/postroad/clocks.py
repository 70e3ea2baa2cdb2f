"""The broker's side of clock skew (spec T5, paper 3.2), and offsets between the clocks of nodes (spec V9).

A publisher adds an adjustment to its clock, set at connect; its ids carry the sum. For every publish frame
the broker checks |tb - (t + delta)| <= Ts for the newest id, and if that fails sends back what to add to the
adjustment. Older ids of a frame may be retransmissions, which say nothing about the clock; nor do ids that a
publisher brought along from another broker. A publisher is corrected at most once per `REPEAT_US`: what it
sent before the correction arrived is no new evidence.

An id ahead of the broker's clock proves a skew. One behind it may have waited at the publisher, for credit or
for a connection, so the publisher measures before it believes that (`client.core`).

Between nodes an offset is measured as NTP does it: a question and its answer, half the round trip taken off.
Whatever waits on one way only falsifies a measurement by half of its wait, so of the last ones that with the
least round trip counts, and its error is at most half of that.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from postroad.units import MILLISECOND_US, SECOND_US

REPEAT_US: Final = SECOND_US
BOUNDS_US: Final = 20 * MILLISECOND_US  # how long the bounds serve that tell most ids from those to look at
MAX_CORRECTED: Final = 10_000  # publishers whose last correction is remembered
OFFSET_SAMPLES: Final = 8


class ClockOffset:
    """How far another node's clock is ahead of ours."""

    __slots__ = ("_guess_us", "_samples")

    def __init__(self) -> None:
        self._guess_us = 0  # the offset, as long as nothing was measured
        self._samples: deque[tuple[int, int]] = deque(maxlen=OFFSET_SAMPLES)  # (round trip, offset)

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self._samples)

    def measured(self, sent_us: int, their_us: int, now_us: int) -> None:
        """We asked at `sent_us`, and heard now that their clock was at `their_us`."""
        self._samples.append((max(0, now_us - sent_us), their_us - (sent_us + now_us) // 2))

    def heard(self, their_us: int, now_us: int) -> None:
        """Their clock was at `their_us` when they sent what we hear now: less the time it took, a guess."""
        self._guess_us = their_us - now_us

    def corrected(self, by_us: int) -> None:
        """What was measured does not hold any more: they say that we are off by so much."""
        self._guess_us = self.offset_us + by_us
        self._samples.clear()

    @property
    def round_trip_us(self) -> int:
        """The least of the last ones."""
        return min(self._samples)[0] if self._samples else 0

    @property
    def offset_us(self) -> int:
        """To be added to our clock; 0 while nothing is known."""
        return min(self._samples)[1] if self._samples else self._guess_us


class SkewCheck:
    __slots__ = ("_corrected", "_me", "_tolerance_us", "corrections", "early", "late", "until_us")

    def __init__(self, tolerance_us: int, *, me: int) -> None:
        self._me = me
        self._tolerance_us = tolerance_us
        self._corrected: OrderedDict[int, int] = OrderedDict()  # publisher -> when, oldest first
        self.corrections = 0
        # Until then, ids with a time from `early` to before `late`, as ids have it, are in the tolerance:
        # whoever has one of these need not call anybody.
        self.until_us = 0
        self.early = self.late = b""

    def correction_us(self, publisher: int, newest: bytes, now_us: int) -> int | None:
        """What the publisher must add to its adjustment, or None while it is within the tolerance.

        `newest` is the last id of a publish frame, whose ids increase.
        """
        # Ids have whole milliseconds, rounded down: the truth is half of one later on average.
        ahead_us = int.from_bytes(newest[8:14], "big") * MILLISECOND_US + MILLISECOND_US // 2 - now_us
        if -self._tolerance_us <= ahead_us <= self._tolerance_us:
            return None
        if int.from_bytes(newest[:8], "big") != publisher << 32 | self._me:
            return None
        last_us = self._corrected.get(publisher)
        if last_us is not None and 0 <= now_us - last_us < REPEAT_US:
            return None
        self._corrected[publisher] = now_us
        self._corrected.move_to_end(publisher)
        if len(self._corrected) > MAX_CORRECTED:
            self._corrected.popitem(last=False)
        self.corrections += 1
        return -ahead_us

    def bound(self, now_us: int) -> None:
        self.until_us = now_us + BOUNDS_US
        early_ms = -((self._tolerance_us - self.until_us) // MILLISECOND_US)
        late_ms = (now_us + self._tolerance_us) // MILLISECOND_US
        self.early, self.late = (max(0, bound).to_bytes(6, "big") for bound in (early_ms, late_ms))

    def forget(self, publisher: int) -> None:
        """It is gone."""
        self._corrected.pop(publisher, None)
