"""When this broker's own pubends say that they are silent, so that those who follow them get on.

The plain one says so every `silence_us`. A durable one pays for silence with a reservation on disk, and those
who follow it with their tokens: if no token has to advance, what is quiet is told with the next event; else
the longer it is quiet, the more rarely that is told. When interest or routes change all of them say so at
once, since subscriptions wait for that.

One that owes events of a time does not say that there were none: to those who read the broker's own history
its ticks are times. It says no more than the next tick, which is enough for subscriptions.
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
        self._unsaid: dict[int, None] = {}  # those that could not say at once what is news
        self._rests: dict[int, tuple[int, int]] = {}  # idle ones: when silence is said next, and again after
        self._news = False  # interest or routes changed
        self.next_deadline = now_us + silence_us

    def news(self) -> None:
        """Interest or routes changed: own pubends say so at once."""
        self._news = True

    def spoke(self, stream: Stream) -> None:
        """An event says it."""
        self._rests.pop(stream.id, None)

    def asked(self, stream: Stream, spans: Sequence[Span]) -> None:
        """Somebody asks for more than an own durable pubend has said: it says what there is."""
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
        """One that cannot, for want of a reservation or because events are on their way to disk, says it with
        those events or as soon as it can."""
        for pubend_id in list(self._unsaid):
            stream, pubend = self._durable[pubend_id]
            owing = self._owing(pubend_id)
            segment = pubend.assert_silence(turn, owing=owing)
            if segment is not None:
                # Else as far as the reservation reached, and the rest once it can.
                if owing or segment.end >= turn.now_us:
                    del self._unsaid[pubend_id]
                self._spread(turn, stream, segment)
