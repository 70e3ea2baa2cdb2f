"""Questions from broker to broker, and their answers, hop by hop along the trees that messages take.

The next hop to a broker is the parent in that broker's tree. Neither a question nor an answer is repeated or
held: whoever asks gives up in time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from postroad.overlay.topology import Topology
from postroad.seam.effects import Effect, Send
from postroad.wire.frames import Answer, Query, encode

MAX_HOPS: Final = 255  # after which a question or an answer is dropped: routes change while it travels
MAX_OPEN: Final = 65_536  # questions without an answer that are remembered, the latest

Answered = Callable[[bytes, int], list[Effect]]  # body, now_us
Asked = Callable[[int, int, bytes, int], list[Effect]]  # the asking broker, its number, body, now_us


class Inquiries:
    """`link(broker)` is the connection of a neighbour."""

    def __init__(self, *, me: int, topology: Topology, link: Callable[[int], int | None]) -> None:
        self._me = me
        self._topology = topology
        self._link = link
        self._handlers: dict[str, Asked] = {}  # by `what`
        self._open: dict[int, tuple[int, Answered]] = {}  # by number: the broker asked, and who waits
        self._last = 0

    def serve(self, what: str, handler: Asked) -> None:
        """Questions of this kind are put to `handler`, which calls `respond`, at once or later."""
        self._handlers[what] = handler

    def ask(self, broker: int, what: str, body: bytes, answered: Answered) -> list[Effect] | None:
        """`answered` is called when the answer comes, if it does. None: there is no way to that broker."""
        connection = self._next_hop(broker)
        if connection is None:
            return None
        self._last += 1
        self._open[self._last] = (broker, answered)
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        query = Query(source=self._me, target=broker, number=self._last, hops=MAX_HOPS, what=what, body=body)
        return [Send(connection, encode(query))]

    def respond(self, broker: int, number: int, body: bytes) -> list[Effect]:
        connection = self._next_hop(broker)
        if connection is None:
            return []
        answer = Answer(source=self._me, target=broker, number=number, hops=MAX_HOPS, body=body)
        return [Send(connection, encode(answer))]

    def query(self, message: Query, now_us: int) -> list[Effect]:
        """From a neighbour. What nobody here knows is of a later version, and is not answered."""
        if message.target != self._me:
            return self._pass_on(message)
        handler = self._handlers.get(message.what)
        return [] if handler is None else handler(message.source, message.number, message.body, now_us)

    def answer(self, message: Answer, now_us: int) -> list[Effect]:
        if message.target != self._me:
            return self._pass_on(message)
        broker, answered = self._open.get(message.number, (None, None))
        if answered is None or broker != message.source:
            return []
        del self._open[message.number]
        return answered(message.body, now_us)

    def _pass_on(self, message: Query | Answer) -> list[Effect]:
        connection = self._next_hop(message.target)
        if connection is None or not 0 < message.hops <= MAX_HOPS:
            return []
        passed = msgspec.structs.replace(message, hops=message.hops - 1)
        return [Send(connection, encode(passed))]

    def _next_hop(self, broker: int) -> int | None:
        neighbour = self._topology.parent(broker)
        return None if neighbour is None else self._link(neighbour)
