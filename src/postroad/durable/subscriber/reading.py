"""Readers of the past: a range of ticks, filtered, at any broker, and then over (spec P1).

A reader has no name, no place in the persistent filtering subsystem and holds no storage: it is a catchup
stream per pubend whose plan is to refilter everything between two checkpoint tokens. What is not here is
asked for upstream, like the curiosity of any catchup stream; what was released is a gap. Where a pubend is
another broker's, the reader's selector is part of the own interest while it reads, so that what is asked
for is filtered with it.

Tracking does not record what readers get: that is no delivery to a subscription, and histories would fill
with each pass over the past.

A range may end in the future, by an hour at most: the reader follows the stream until it gets there.

A broker that has what is missing may be out of reach. Who restarts is waited for; a reader that could take
more and gets nowhere for `PATIENCE_US` is told so, and ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Final

from postroad.clients.quotas import Quotas
from postroad.durable.subscriber.catchup import CatchupStream
from postroad.durable.subscriber.outputs import Message, delivery_frame
from postroad.errors import BugError, TooLargeError, UnavailableError, UsageError
from postroad.events.token import CheckpointToken
from postroad.ids import SubscriptionKey, SubscriptionKind, is_volatile, pubend_text
from postroad.links.links import Links
from postroad.overlay.interest import Interest
from postroad.seam.turn import Turn
from postroad.selectors import Selector
from postroad.streams.knowledge import Segment
from postroad.streams.routing import Routing
from postroad.streams.spans import Span
from postroad.streams.streams import Stream
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.frames import Ended, InterestUpdate, Subscribe, Subscribed, encode

MAX_READERS: Final = 1_024
FUTURE_US: Final = 3_600 * SECOND_US  # a range does not end further ahead of this clock
LOOK_US: Final = 50 * MILLISECOND_US  # readers at the end of a stream look for more this often
MAX_LOOKS: Final = 8  # readers that look for more in one turn
CROWD_SHARE: Final = 4  # where there are more than that, so many times as often
PATIENCE_US: Final = 30 * SECOND_US  # with a broker that is out of reach: one that restarts takes less


@dataclass(slots=True)
class _Reader:
    key: SubscriptionKey
    connection: int
    number: int
    give_back: Callable[[], None]  # its part of its principal's quota
    need: Mapping[int, int]  # what knowledge of other brokers' pubends must be filtered with
    ends: Mapping[int, int]
    streams: dict[int, CatchupStream]  # by pubend, those that are not at their end
    stuck: dict[int, tuple[int, int]] = field(default_factory=dict)  # by pubend: at which tick, since when


class Readers:
    """The readers of one broker."""

    def __init__(
        self,
        *,
        me: int,
        links: Links,
        interest: Interest,
        routing: Routing,
        flood: Callable[[Turn, Sequence[InterestUpdate]], None],
        quotas: Quotas,
    ) -> None:
        self._me = me
        self._links = links
        self._interest = interest
        self._routing = routing
        self._flood = flood
        self._quotas = quotas
        # By connection and number; the next to look for more comes first.
        self._readers: dict[tuple[int, int], _Reader] = {}
        self._ids = count(1)
        self._look_at: int | None = None

    def begin(self, turn: Turn, connection: int, message: Subscribe, selector: Selector) -> None:
        """UsageError or UnavailableError if it cannot be."""
        if message.durable:
            raise UsageError("a durable subscription has no end")
        if len(self._readers) >= MAX_READERS:
            raise TooLargeError(f"more than {MAX_READERS} readers at this broker")
        start = CheckpointToken.from_json(message.token) if message.token else CheckpointToken()
        ends = dict(CheckpointToken.from_json(message.until))
        wanted = [
            pubend for pubend, end in ends.items() if start.tick(pubend) < end and selector.concerns(pubend)
        ]
        for pubend in wanted:
            if self._routing.stream(pubend) is None or is_volatile(pubend):
                raise UnavailableError(f"pubend {pubend_text(pubend)} is not known here, or not reachable")
        for pubend, tick in ends.items():
            stream = self._routing.stream(pubend)
            if tick > max(turn.now_us + FUTURE_US, 0 if stream is None else stream.top):
                raise UsageError(
                    f"the range names a tick of {pubend_text(pubend)} in the future,"
                    f" {(tick - turn.now_us) // SECOND_US} s ahead of this broker's clock: {tick}; at most"
                    f" {FUTURE_US // SECOND_US} s are allowed"
                )
        peer = self._links.peer(connection)
        give_back = self._quotas.take(
            "" if peer is None else peer.principal, SubscriptionKind.READER, selector
        )
        key = SubscriptionKey(SubscriptionKind.READER, next(self._ids))
        need: Mapping[int, int] = {}
        if any(pubend >> 32 != self._me for pubend in ends):
            try:
                updates = self._interest.subscribe(key, selector)
            except UsageError:
                give_back()
                raise
            self._flood(turn, updates)
            need = {self._me: self._interest.own_version}
        reader = self._readers[connection, message.number] = _Reader(
            key=key,
            connection=connection,
            number=message.number,
            give_back=give_back,
            need=need,
            ends=ends,
            streams={
                pubend: CatchupStream(
                    subscriber=0, pubend=pubend, position=start.tick(pubend), selector=selector
                )
                for pubend in wanted
            },
        )
        subscribed = Subscribed(number=message.number, token=start.to_json())
        turn.send(connection, encode(subscribed))
        self._pump(turn, reader)

    def has(self, connection: int, number: int) -> bool:
        return (connection, number) in self._readers

    def count(self, connection: int) -> int:
        return sum(its_connection == connection for its_connection, _ in self._readers)

    def end(self, turn: Turn, connection: int, number: int) -> bool:
        """The client wants no more."""
        reader = self._readers.pop((connection, number), None)
        if reader is None:
            return False
        reader.give_back()
        if reader.need:
            self._flood(turn, self._interest.unsubscribe(reader.key))
        return True

    def closed(self, turn: Turn, connection: int) -> None:
        for its_connection, number in list(self._readers):
            if its_connection == connection:
                turn.later(partial(self._end_later, connection, number))

    def _end_later(self, connection: int, number: int, turn: Turn) -> None:
        self.end(turn, connection, number)

    def credit(self, turn: Turn, connection: int) -> None:
        for reader in [reader for reader in self._readers.values() if reader.connection == connection]:
            self._pump(turn, reader)

    def answer(self, turn: Turn, stream: Stream, segments: list[Segment]) -> None:
        """Knowledge that arrived, or was read from the log."""
        for reader in list(self._readers.values()):
            catchup = reader.streams.get(stream.id)
            if catchup is not None and self._learn(reader, catchup, segments):
                if stream.id >> 32 == self._me:
                    catchup.pause()  # a read of the log ends when it is enough: ask for the rest
                self._pump(turn, reader)

    def _learn(self, reader: _Reader, catchup: CatchupStream, segments: list[Segment]) -> bool:
        own = catchup.pubend >> 32 == self._me
        need = {} if own else reader.need
        wanted = [catchup.learn(segment, need) for segment in segments]
        return any(wanted)

    def tick(self, turn: Turn) -> None:
        if self._look_at is not None and turn.now_us >= self._look_at:
            for place in list(islice(self._readers, MAX_LOOKS)):
                reader = self._readers[place] = self._readers.pop(place)  # last in turn from now on
                self._pump(turn, reader)
                self._lose_patience(turn, reader)
            self._look_at = None
        if not self._readers:
            self._look_at = None
        elif self._look_at is None:
            crowded = len(self._readers) > MAX_LOOKS
            self._look_at = turn.now_us + (LOOK_US // CROWD_SHARE if crowded else LOOK_US)

    def _lose_patience(self, turn: Turn, reader: _Reader) -> None:
        """End it if it waits for a broker that stays out of reach, and not for its client to take more."""
        now_us = turn.now_us
        room = self._links.available(reader.connection) > 0
        for pubend, catchup in reader.streams.items():
            position, since = reader.stuck.get(pubend, (-1, now_us))
            broker = self._routing.away(pubend)
            if broker is None or not room or position != catchup.position:
                reader.stuck[pubend] = (catchup.position, now_us)
            elif now_us - since >= PATIENCE_US:
                self._end(
                    turn,
                    reader,
                    UnavailableError.code,
                    f"broker {broker!r} has been out of reach for {PATIENCE_US // SECOND_US} s: what is"
                    f" missing of its pubend {pubend_text(pubend)} can be read when it is back",
                )
                return

    def next_deadline(self) -> int | None:
        return self._look_at

    # ---- going on

    def _pump(self, turn: Turn, reader: _Reader) -> None:
        """Deliver what is here and ask for the next of every stream, until nothing moves."""
        todo = deque(reader.streams.values())
        while todo:
            catchup = todo.popleft()
            if self._go_on(turn, reader, catchup):
                todo.append(catchup)
        if not reader.streams:
            self._end(turn, reader, "", "")

    def _end(self, turn: Turn, reader: _Reader, code: str, reason: str) -> None:
        if self.end(turn, reader.connection, reader.number):
            turn.send(reader.connection, encode(Ended(number=reader.number, code=code, reason=reason)))

    def _go_on(self, turn: Turn, reader: _Reader, catchup: CatchupStream) -> bool:
        """Whether there is more to do for this stream at once."""
        catchup.advance(
            lambda: self._links.available(reader.connection) > 0,
            lambda message: self._send(turn, reader, message),
        )
        end = reader.ends[catchup.pubend]
        if catchup.idle and catchup.position >= end:
            del reader.streams[catchup.pubend]
            return False
        if catchup.idle:
            stream = self._routing.stream(catchup.pubend)
            reach = 0 if stream is None else min(end, stream.horizon)
            if reach <= catchup.position:
                # Nobody may be told of its silence yet: who asks is.
                self._ask(turn, reader, catchup, [(catchup.position, end)])
                return False
            catchup.refilter(reach)
        if self._links.available(reader.connection) <= 0:
            catchup.pause()
            return False
        wants: list[Span] = catchup.wants(turn.now_us)
        if not wants:
            return False
        return self._learn(reader, catchup, self._ask(turn, reader, catchup, wants))

    def _ask(self, turn: Turn, reader: _Reader, catchup: CatchupStream, spans: list[Span]) -> list[Segment]:
        need = {} if catchup.pubend >> 32 == self._me else reader.need
        return self._routing.find_for_host(turn, catchup.pubend, spans, need)

    def _send(self, turn: Turn, reader: _Reader, message: Message) -> None:
        frame = delivery_frame(message, reader.number)
        self._links.spend(reader.connection, len(frame))
        turn.send(reader.connection, frame)

    def check(self) -> None:
        for (connection, number), reader in self._readers.items():
            if (reader.connection, reader.number) != (connection, number) or not reader.streams:
                raise BugError("a reader is held under another's number, or is at its end")
            for catchup in reader.streams.values():
                catchup.check()
