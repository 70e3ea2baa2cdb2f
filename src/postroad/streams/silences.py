"""When this broker's own pubends assert silence: that they have no events up to now.

The followers of a pubend advance with that. The plain pubend asserts silence every `silence_us`. For a
durable pubend each assertion costs a reservation on disk here, and a saved token at its followers. So a
durable pubend that no durable subscription follows asserts silence with its next event only. The others wait
longer from one assertion to the next, up to `MAX_REST_US`. When interest or routes change, all pubends assert
silence at once, since new subscriptions wait for that.

The pubend of the broker's own history may owe events of the past. Its ticks are times to its readers, so it
does not assert silence for times whose events it owes. It asserts the next tick only, which is enough for
subscriptions to begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from postroad.seam.turn import Turn
from postroad.streams.knowledge import Segment
from postroad.streams.plain_pubend import PlainPubend
from postroad.streams.spans import Span
from postroad.streams.streams import LoggedPubend, Stream
from postroad.units import SECOND_US

MAX_REST_US: Final = 60 * SECOND_US  # an idle durable pubend says no more rarely than this that it is silent


class Silences:
    """`durable`: the own durable pubends that are open; `followed(pubend)`: durable subscriptions follow it;
    `owing(pubend)`: events of the past are still to come; `spread` takes what there is to be said."""

    def __init__(
        self,
        stream: Stream,
        pubend: PlainPubend,
        *,
        durable: Mapping[int, tuple[Stream, LoggedPubend]],
        silence_us: int,
        followed: Callable[[int], bool],
        owing: Callable[[int], bool],
        spread: Callable[[Turn, Stream, Segment], None],
        now_us: int,
    ) -> None:
        self._stream, self._pubend = stream, pubend
        self._durable = durable
        self._silence_us = silence_us
        self._followed = followed
        self._owing = owing
        self._spread = spread
        self._unsaid: dict[int, None] = {}  # durable pubends that are to assert silence and could not yet
        self._rests: dict[int, tuple[int, int]] = {}  # idle ones: when silence is said next, and again after
        self._news = False  # interest or routes changed
        self.next_deadline = now_us + silence_us

    def news(self) -> None:
        """Interest or routes changed: own pubends say so at once."""
        self._news = True

    def spoke(self, stream: Stream) -> None:
        """A durable pubend sent an event, which asserts the silence before it."""
        self._rests.pop(stream.id, None)

    def asked(self, stream: Stream, spans: Sequence[Span]) -> None:
        """Somebody asks for ticks above what an own durable pubend has asserted: it is to assert silence."""
        if stream.id in self._durable and any(end > stream.horizon for _, end in spans):
            self._unsaid[stream.id] = None

    def say(self, turn: Turn) -> None:
        """The plain pubend is silent up to now."""
        self._spread(turn, self._stream, self._pubend.assert_silence(turn.now_us))

    def tick(self, turn: Turn) -> bool:
        """The end of a turn; whether `silence_us` went by."""
        now_us = turn.now_us
        due = now_us >= self.next_deadline
        if due or self._news:
            self.say(turn)
            if self._news:
                self._rests.clear()
            quiet = [pubend for pubend in self._durable if self._news or self._is_due(pubend, now_us)]
            self._unsaid.update(dict.fromkeys(quiet))
            self._news = False
        if self._unsaid:
            self._say_durable(turn)
        if due:
            self.next_deadline = now_us + self._silence_us
        return due

    def _is_due(self, pubend: int, now_us: int) -> bool:
        """Whether a durable pubend is to say that it is silent."""
        if not self._followed(pubend):
            return False
        at_us, pause_us = self._rests.get(pubend, (now_us, self._silence_us))
        if now_us < at_us:
            return False
        self._rests[pubend] = (now_us + pause_us, min(2 * pause_us, MAX_REST_US))
        return True

    def _say_durable(self, turn: Turn) -> None:
        """A pubend without a reservation, or with events on their way to disk, cannot assert silence now. It
        stays in `_unsaid`, and does so as soon as it can."""
        for pubend_id in list(self._unsaid):
            stream, pubend = self._durable[pubend_id]
            owing = self._owing(pubend_id)
            segment = pubend.assert_silence(turn, owing=owing)
            if segment is not None:
                # Else the reservation ended before now, and the rest is asserted later.
                if owing or segment.end >= turn.now_us:
                    del self._unsaid[pubend_id]
                self._spread(turn, stream, segment)
