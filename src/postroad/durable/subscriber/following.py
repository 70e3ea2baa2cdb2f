"""Following durable pubends: what routing knows of them is handed to the hosting core, in order.

The hosting core learns every durable pubend from its own position on, which after a restart lies behind what
routing begins with; what is in between is found in the cache, in the own log or upstream, like anything else
that is asked for (`pull`). Nothing is followed before the first durable subscription.

A new subscription begins on a pubend where routing finds it in force. A pubend met later begins at its first
tick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from postroad.durable.subscriber.filtering import filtering_stream
from postroad.durable.subscriber.hosting import MAX_FOLLOWED, Hosting
from postroad.durable.subscriber.outputs import Output
from postroad.ids import is_volatile
from postroad.seam.effects import Effect
from postroad.seam.storage import LogStream, StreamEnd
from postroad.streams.knowledge import Segment
from postroad.streams.streams import DURABLE_KEY, Stream

if TYPE_CHECKING:
    from postroad.streams.routing import Routing

PULL_SEGMENTS: Final = 256
FULL: Final = (
    f"more than {MAX_FOLLOWED} durable pubends were met: durable subscriptions at this broker get nothing of"
    " further ones"
)
_NEVER_USED: Final = StreamEnd(last=0, chopped=0, suspect=False)


class Following:
    """The durable pubends that this broker has durable subscriptions for.

    `streams`: what a start found of the log; `need`: what knowledge must be filtered with; `perform` carries
    out what hosting asks; `answered` sees what arrives out of order, too; `take`: effects made on the way;
    `tell`: what an operator must hear.
    """

    def __init__(
        self,
        *,
        hosting: Hosting,
        routing: Routing,
        streams: Mapping[LogStream, StreamEnd],
        need: Callable[[], Mapping[int, int]],
        perform: Callable[[list[Output]], None],
        answered: Callable[[Stream, list[Segment]], None],
        take: Callable[[], list[Effect]],
        tell: Callable[[str], None],
        now: Callable[[], int],
    ) -> None:
        self._hosting = hosting
        self._routing = routing
        self._streams = streams
        self._need = need
        self._perform = perform
        self._answered = answered
        self.take = take
        self._tell = tell
        self._now = now
        self.active = False  # there are, or were, durable subscriptions
        self._behind: dict[int, Stream] = {}  # streams whose horizon is ahead of what hosting has learned
        self._reached: dict[int, Stream] = {}  # those whose horizon hosting has reached once
        self._said_full = False

    def pubends(self) -> set[int]:
        """Those that are followed, or will be: again after a restart, or with the first subscription."""
        if not self.active:
            return set(self._routing.durable_streams()[:MAX_FOLLOWED])
        return {*self._hosting.followed, *self._hosting.awaited}

    def met(self, stream: Stream) -> None:
        """Routing has a stream of a durable pubend."""
        if is_volatile(stream.id) or stream.id in self._behind:
            return
        if not self.active:
            self._perform(self._hosting.absent(stream.id))
            return
        position = self._hosting.position(stream.id)
        if position is not None and position >= stream.horizon and self._reached.get(stream.id) is stream:
            return
        followed = stream.id in self._hosting.followed
        if not followed and not self._hosting.has_place(stream.id):
            if not self._said_full:
                self._said_full = True
                self._tell(FULL)
            self._perform(self._hosting.absent(stream.id))  # else it may hold everything for this broker
            return
        if not followed:
            end = self._streams.get(filtering_stream(stream.id), _NEVER_USED)
            outputs = self._hosting.follow(
                stream.id,
                start=stream.horizon,
                now_us=self._now(),
                last=end.last,
                chopped=end.chopped,
                suspect=end.suspect,
            )
            self._perform(outputs)
        self._behind[stream.id] = stream
        self._pull(stream)

    def dropped(self, pubend: int) -> None:
        """Routing forgets a stream."""
        self._hosting.dropped(pubend)
        self._behind.pop(pubend, None)
        self._reached.pop(pubend, None)

    def begin(self, key: int, stream: Stream) -> bool:
        """A new subscription is in force on a stream from here on; False: once hosting has caught up."""
        position = self._hosting.position(stream.id)
        if position is None or stream.id in self._behind:
            return False
        self._perform(self._hosting.begin(key - DURABLE_KEY, stream.id, position, self._now()))
        return True

    def learn(self, stream: Stream, segment: Segment) -> None:
        """The next of a stream, in order."""
        if is_volatile(stream.id) or not self.active:
            return
        position = self._hosting.position(stream.id)
        if position is None or segment.start > position:
            self._behind[stream.id] = stream
        elif segment.end > position:
            self._perform(self._hosting.learn(stream.id, segment, self._now()))

    def answer(self, stream: Stream, segments: list[Segment]) -> None:
        """Whatever else arrived of it."""
        self._answered(stream, segments)
        if self._hosting.wanted(stream.id):
            self._perform(self._hosting.answer(stream.id, segments, self._now()))
        if stream.id not in self._behind:
            return
        need = self._need()
        for segment in segments:
            position = self._hosting.position(stream.id)
            if position is not None and segment.start <= position < segment.end and segment.meets(need):
                part = segment.served(need)
                self._perform(self._hosting.learn(stream.id, part, self._now()))

    def _pull(self, stream: Stream) -> None:
        """From where hosting stands to the horizon: from memory, else it is asked for."""
        need = self._need()
        while (position := self._hosting.position(stream.id)) is not None:
            if position >= stream.horizon:
                del self._behind[stream.id]
                self._reached[stream.id] = stream
                self._begin_late(stream)
                self._routing.activate_waiting(stream)
                return
            found, missing = stream.find(position, stream.horizon, need, PULL_SEGMENTS)
            if not found or found[0].start > position:
                self._routing.ask_for_host(stream, missing, need, self._now())
                return
            self._perform(self._hosting.learn(stream.id, found[0], self._now()))

    def _begin_late(self, stream: Stream) -> None:
        """A pubend that nobody here knew of when a subscription was created: it begins then, or at its first
        tick if it came with a token, which does not say when it was."""
        for one in list(self._hosting.subscriptions):
            position = self._hosting.position(stream.id)
            waits = DURABLE_KEY + one.id in stream.waiting
            if position is not None and stream.id not in one.cursors and not waits:
                self._perform(self._hosting.begin(one.id, stream.id, min(one.late, position), self._now()))

    def pull(self) -> None:
        """Go on with the streams that hosting is behind on."""
        for stream in list(self._behind.values()):
            self._pull(stream)
