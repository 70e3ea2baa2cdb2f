"""Curiosity: what is not known of a stream is asked for upstream (spec D2).

A gap is nacked at once, and again every `nack_us` while it stays open. Whatever several ask for within that
time is asked for once: an answer is filtered for all who get the stream by way of this broker, as far as the
answering one knows what they want. Should it not, whoever was not served asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from postroad.seam.effects import Effect, Send
from postroad.streams.spans import Span, union
from postroad.streams.streams import MAX_NACK_SPANS, Asked, Neighbour, Stream
from postroad.wire.frames import Nack, encode

Upstream = dict[int, tuple[int, tuple[int, ...]]]  # origin -> (parent, its pubends)


class Curiosity:
    """Its effects go to `out`, which it shares with the routing core, as it does the other collections."""

    def __init__(
        self,
        *,
        me: int,
        nack_us: int,
        streams: Mapping[int, Stream],
        upstream: Upstream,
        neighbours: Mapping[int, Neighbour],
        served: Callable[[int], Mapping[int, int]],
        out: list[Effect],
    ) -> None:
        """`served(origin)`: who gets that broker's streams by way of this one, and what is known of them."""
        self._me = me
        self._nack_us = nack_us
        self._streams = streams
        self._upstream = upstream
        self._neighbours = neighbours
        self._served = served
        self._out = out
        self._curious: dict[int, Stream] = {}  # streams with a gap, those whose nack_at is set
        # Streams heard of in this turn -> where to look for gaps from: one nack for all frames of a turn.
        self._to_look_at: dict[int, int] = {}
        self.nacks_sent = 0

    def __len__(self) -> int:
        """Streams with a gap."""
        return len(self._curious)

    def own_need(self, stream: Stream) -> dict[int, int]:
        return {self._me: stream.need} if stream.need else {}

    def heard(self, pubend: int, after: int) -> None:
        """The end of the turn looks for gaps in a stream; what is up to `after` was looked at before."""
        self._to_look_at[pubend] = min(after, self._to_look_at.get(pubend, after))

    def nack_gaps(self, stream: Stream, now_us: int, after: int = 0) -> None:
        """Ask upstream for what is Q between the horizon and the newest tick heard of.

        What is up to `after` was looked at before; it is looked at again when its nack is due again.
        """
        if stream.horizon >= stream.top or stream.pubend is not None:
            stream.nack_at = None
            self._curious.pop(stream.id, None)
            return
        need = self.own_need(stream)
        start = stream.horizon
        if stream.nack_at is None or stream.nack_at <= now_us or after <= start:
            stream.nack_at = now_us + self._nack_us
            self._curious[stream.id] = stream
        else:
            start = after
        _, missing = stream.knowledge.find(start, stream.top, need)
        stream.partly_asked = len(missing) > MAX_NACK_SPANS or (start == after and stream.partly_asked)
        if missing:
            self.ask(stream, missing, need, now_us)

    def ask(self, stream: Stream, spans: list[Span], need: Mapping[int, int], now_us: int) -> None:
        held = self._upstream.get(stream.origin)
        if held is None:
            return
        spans = stream.unasked(union(spans), need, now_us - self._nack_us)
        if spans:
            stream.asked.append(Asked(spans, {**self._served(stream.origin), **need}, now_us))
            self.nacks_sent += 1
            nack = Nack(pubend=stream.id, spans=tuple(spans), need=dict(need))
            self._out.append(Send(self._neighbours[held[0]].connection, encode(nack)))

    def dropped(self, pubend: int) -> None:
        self._curious.pop(pubend, None)

    def settle(self, now_us: int) -> None:
        """The end of a turn: gaps that were found in it, and nacks that are due again."""
        heard, self._to_look_at = self._to_look_at, {}
        for pubend, after in heard.items():
            if pubend in self._streams:
                self.nack_gaps(self._streams[pubend], now_us, after)
        for stream in list(self._curious.values()):
            if stream.nack_at is not None and stream.nack_at <= now_us:
                self.nack_gaps(stream, now_us)

    def next_deadline(self) -> int | None:
        due = (stream.nack_at for stream in self._curious.values() if stream.nack_at is not None)
        return min(due, default=None)
