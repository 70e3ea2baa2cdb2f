"""Following durable pubends: what routing knows of them is handed to the hosting core, in order.

The hosting core learns every durable pubend from its own position on, which after a restart lies behind what
routing begins with; what is in between is found in the cache, in the own log or upstream, like anything else
that is asked for (`pull`). Nothing is followed before the first durable subscription.

A new subscription begins on a pubend where routing finds it in force. On a pubend that routing
hears of later it begins at the first tick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from postroad.durable.subscriber.filtering import filtering_stream
from postroad.durable.subscriber.hosting import MAX_FOLLOWED, Hosting
from postroad.durable.subscriber.subscriptions import durable_key
from postroad.ids import SubscriptionKey, is_volatile
from postroad.seam.storage import LogStream, StreamEnd
from postroad.seam.turn import Turn
from postroad.streams.knowledge import Segment
from postroad.streams.routing import Routing
from postroad.streams.streams import Stream

PULL_SEGMENTS: Final = 256
FULL: Final = (
    f"more than {MAX_FOLLOWED} durable pubends were met: durable subscriptions at this broker get nothing of"
    " further ones"
)
_NEVER_USED: Final = StreamEnd(last=0, chopped=0, suspect=False)


class Following:
    """The durable pubends that this broker has durable subscriptions for.

    `streams`: what a start found of the log; `need`: what knowledge must be filtered with; `answered` sees
    what arrives out of order, too.
    """

    def __init__(
        self,
        *,
        hosting: Hosting,
        routing: Routing,
        streams: Mapping[LogStream, StreamEnd],
        need: Callable[[], Mapping[int, int]],
        answered: Callable[[Turn, Stream, list[Segment]], None],
    ) -> None:
        self._hosting = hosting
        self._routing = routing
        self._streams = streams
        self._need = need
        self._answered = answered
        self.active = False  # there are, or were, durable subscriptions
        self._behind: dict[int, Stream] = {}  # streams whose horizon is ahead of what hosting has learned
        self._reached: dict[int, Stream] = {}  # those whose horizon hosting has reached once
        self._said_full = False

    def pubends(self) -> set[int]:
        """Those that are followed, or will be: again after a restart, or with the first subscription."""
        if not self.active:
            return set(self._routing.durable_streams()[:MAX_FOLLOWED])
        return {*self._hosting.followed, *self._hosting.awaited}

    def added(self, turn: Turn, stream: Stream) -> None:
        """Routing has a stream of a durable pubend."""
        if is_volatile(stream.id) or stream.id in self._behind:
            return
        if not self.active:
            self._hosting.absent(turn, stream.id)
            return
        position = self._hosting.position(stream.id)
        if position is not None and position >= stream.horizon and self._reached.get(stream.id) is stream:
            return
        followed = stream.id in self._hosting.followed
        if not followed and not self._hosting.has_place(stream.id):
            if not self._said_full:
                self._said_full = True
                turn.note("error", FULL)
            self._hosting.absent(turn, stream.id)  # else it may hold everything for this broker
            return
        if not followed:
            end = self._streams.get(filtering_stream(stream.id), _NEVER_USED)
            self._hosting.follow(
                turn,
                stream.id,
                start=stream.horizon,
                last=end.last,
                chopped=end.chopped,
                suspect=end.suspect,
            )
        self._behind[stream.id] = stream
        self._pull(turn, stream)

    def dropped(self, pubend: int) -> None:
        """Routing forgets a stream."""
        self._hosting.dropped(pubend)
        self._behind.pop(pubend, None)
        self._reached.pop(pubend, None)

    def begin(self, turn: Turn, key: SubscriptionKey, stream: Stream) -> bool:
        """A new subscription is in force on a stream from here on; False: once hosting has caught up."""
        position = self._hosting.position(stream.id)
        if position is None or stream.id in self._behind:
            return False
        self._hosting.begin(turn, key.id, stream.id, position)
        return True

    def learn(self, turn: Turn, stream: Stream, segment: Segment) -> None:
        """The next of a stream, in order."""
        if is_volatile(stream.id) or not self.active:
            return
        position = self._hosting.position(stream.id)
        if position is None or segment.start > position:
            self._behind[stream.id] = stream
        elif segment.end > position:
            self._hosting.learn(turn, stream.id, segment)

    def answer(self, turn: Turn, stream: Stream, segments: list[Segment]) -> None:
        """Whatever else arrived of it."""
        self._answered(turn, stream, segments)
        if self._hosting.wanted(stream.id):
            self._hosting.answer(turn, stream.id, segments)
        if stream.id not in self._behind:
            return
        need = self._need()
        for segment in segments:
            position = self._hosting.position(stream.id)
            if position is not None and segment.start <= position < segment.end and segment.meets(need):
                self._hosting.learn(turn, stream.id, segment.served(need))

    def _pull(self, turn: Turn, stream: Stream) -> None:
        """From where hosting stands to the horizon: from memory, else it is asked for."""
        need = self._need()
        while (position := self._hosting.position(stream.id)) is not None:
            if position >= stream.horizon:
                del self._behind[stream.id]
                self._reached[stream.id] = stream
                self._begin_late(turn, stream)
                self._routing.activate_waiting(turn, stream)
                return
            segments, missing = stream.find(position, stream.horizon, need, PULL_SEGMENTS)
            if not segments or segments[0].start > position:
                self._routing.ask_for_host(turn, stream, missing, need)
                return
            self._hosting.learn(turn, stream.id, segments[0])

    def _begin_late(self, turn: Turn, stream: Stream) -> None:
        """A pubend that nobody here knew of when a subscription was created: it begins then, or at its first
        tick if it came with a token, which does not say when it was."""
        for subscription in list(self._hosting.subscriptions):
            position = self._hosting.position(stream.id)
            waits = durable_key(subscription.id) in stream.waiting
            if position is not None and stream.id not in subscription.cursors and not waits:
                self._hosting.begin(turn, subscription.id, stream.id, min(subscription.late, position))

    def pull(self, turn: Turn) -> None:
        """Go on with the streams that hosting is behind on."""
        for stream in list(self._behind.values()):
            self._pull(turn, stream)
