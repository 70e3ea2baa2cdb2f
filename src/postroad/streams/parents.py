"""From whom a broker has each origin's streams: its parent in that origin's tree, to which it attaches.

An attach says how far the origin's streams are known; the parent goes on from there. It is said again where
nothing is heard of the origin, and so is the question about a pubend whose broker has a newer process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Final

from postroad.ids import boot_of, is_volatile
from postroad.overlay.topology import Topology
from postroad.seam.effects import Effect, Send
from postroad.streams.curiosity import Curiosity, Upstream
from postroad.streams.knowledge import MAX_TICK
from postroad.streams.stream_table import StreamTable
from postroad.streams.streams import Neighbour, Stream
from postroad.units import SECOND_US
from postroad.wire.frames import Attach, Detach, encode

ASK_AGAIN_US: Final = 5 * SECOND_US  # an attach, or a pubend that ended, that nothing was heard of


class Parents:
    """Its effects go to `out`, which it shares with the routing core, as it does the other collections.

    `create(pubend, start)` makes the stream of a pubend that is followed from its first tick.
    """

    def __init__(
        self,
        *,
        me: int,
        topology: Topology,
        table: StreamTable,
        upstream: Upstream,
        neighbours: Mapping[int, Neighbour],
        curiosity: Curiosity,
        create: Callable[[int, int], Stream],
        out: list[Effect],
    ) -> None:
        self._me = me
        self._topology = topology
        self._table = table
        self._upstream = upstream
        self._neighbours = neighbours
        self._curiosity = curiosity
        self._create = create
        self._out = out
        self._unanswered: dict[int, int] = {}  # origins of which the parent said nothing yet -> attached when
        self._first_boot: dict[int, int] = {}  # origin -> boot at which this process first saw it
        self._routed_at = -1  # topology generation the attachments were made for

    @property
    def stale(self) -> bool:
        """Routes changed since `reroute`."""
        return self._routed_at != self._topology.generation

    def reroute(self, now_us: int) -> None:
        """Attach to the parent in every origin's tree, where that or its pubends changed."""
        self._routed_at = self._topology.generation
        reachable = dict.fromkeys(self._topology.reachable())
        for origin in [origin for origin in self._upstream if origin not in reachable]:
            self._detach(origin)
        for origin in reachable:
            if origin == self._me:
                continue
            pubends = self._topology.own_pubends(origin)
            self._meet(origin, pubends)
            parent = self._topology.parent(origin)
            if parent is None or parent not in self._neighbours:
                self._detach(origin)
            elif self._upstream.get(origin) != (parent, pubends):
                self._attach(origin, parent, pubends, now_us)

    def reattach(self, origin: int) -> None:
        """There is a stream of this origin that its parent has not been asked for."""
        self._upstream.pop(origin, None)
        self._routed_at = -1

    def lost(self, number: int) -> None:
        """A neighbour is gone."""
        for origin in [origin for origin, (parent, _) in self._upstream.items() if parent == number]:
            del self._upstream[origin]

    def forget(self, origin: int) -> None:
        """A broker is gone for good."""
        self._upstream.pop(origin, None)
        self._first_boot.pop(origin, None)

    def heard(self, number: int, pubend: int) -> None:
        """A neighbour says something of a pubend: its parent, if it is that, has taken the attach."""
        origin = pubend >> 32
        if origin in self._unanswered:
            parent, pubends = self._upstream.get(origin, (None, ()))
            if parent == number and pubend in pubends:  # the end of a dead one is told to anyone
                del self._unanswered[origin]

    def follows(self, pubend: int) -> bool:
        """A new start of a broker known before: all it publishes is for us, from its very beginning."""
        return is_volatile(pubend) and boot_of(pubend) > self._first_boot.get(pubend >> 32, sys.maxsize)

    def has_ended(self, stream: Stream) -> bool:
        """Its broker has a newer process, as far as link state tells."""
        held = self._upstream.get(stream.origin)
        return held is not None and is_volatile(stream.id) and (stream.id,) < held[1][-1:]  # they are sorted

    def ask_again(self, now_us: int) -> None:
        """A parent says something every second, and a new process answers for the old one: else ask again."""
        for origin, at_us in list(self._unanswered.items()):
            held = self._upstream.get(origin)
            if held is None:
                del self._unanswered[origin]
            elif now_us - at_us >= ASK_AGAIN_US:
                self._attach(origin, *held, now_us)
        for stream in self._table.streams.values():
            if stream.lost_at is None and stream.horizon < MAX_TICK and self.has_ended(stream):
                stream.ended_at = now_us if stream.ended_at is None else stream.ended_at
                if now_us - stream.ended_at >= ASK_AGAIN_US:
                    stream.top = max(stream.top, stream.horizon + 1, now_us)
                    self._curiosity.nack_gaps(stream, now_us)

    def _meet(self, origin: int, pubends: tuple[int, ...]) -> None:
        """Note who is there, and follow what a known broker opened anew."""
        for pubend in pubends:
            if is_volatile(pubend):
                self._first_boot.setdefault(origin, boot_of(pubend))
                new = pubend not in self._table.streams
                if new and self.follows(pubend) and self._table.has_room(origin):
                    self._create(pubend, 0)

    def _detach(self, origin: int) -> None:
        held = self._upstream.pop(origin, None)
        self._unanswered.pop(origin, None)
        if held is not None and held[0] in self._neighbours:
            neighbour = self._neighbours[held[0]]
            self._out.append(Send(neighbour.connection, encode(Detach(origin=origin))))

    def _attach(self, origin: int, parent: int, pubends: tuple[int, ...], now_us: int) -> None:
        held = self._upstream.get(origin)
        if held is not None and held[0] != parent:
            self._detach(origin)
        self._upstream[origin] = (parent, pubends)
        self._unanswered[origin] = now_us
        streams = self._table.of(origin)
        known = {stream.id: stream.horizon for stream in streams.values() if stream.horizon < MAX_TICK}
        attach = Attach(origin=origin, known=known)
        self._out.append(Send(self._neighbours[parent].connection, encode(attach)))
        for stream in streams.values():
            stream.announced = stream.id not in known
            stream.asked.clear()
            self._curiosity.nack_gaps(stream, now_us)
