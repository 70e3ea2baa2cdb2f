"""Questions from broker to broker, and their answers, hop by hop along the trees that messages take.

The next hop to a broker is the parent in that broker's tree. Neither a question nor an answer is repeated or
held: whoever asks gives up in time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from postroad.overlay.topology import Topology
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.wire.frames import Answer, Query, encode

MAX_HOPS: Final = 255  # after which a question or an answer is dropped: routes change while it travels
MAX_OPEN: Final = 65_536  # questions without an answer that are remembered, the latest

Answered = Callable[[Turn, bytes], None]  # is given the body


class Inquiries:
    """`link(broker)` is the connection of a neighbour. Rooms that answer say so on the switchboard."""

    def __init__(
        self, board: Switchboard, *, me: int, topology: Topology, link: Callable[[int], int | None]
    ) -> None:
        self._handlers = board.queries
        self._me = me
        self._topology = topology
        self._link = link
        self._open: dict[int, tuple[int, Answered]] = {}  # by number: the broker asked, and who waits
        self._last_number = 0
        board.from_broker(Query, self._query)
        board.from_broker(Answer, self._answer)

    def ask(self, turn: Turn, broker: int, what: str, body: bytes, answered: Answered) -> bool:
        """`answered` is called when the answer comes, if it does. False: there is no way to that broker."""
        connection = self._next_hop(broker)
        if connection is None:
            return False
        self._last_number += 1
        number = self._last_number
        self._open[number] = (broker, answered)
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        query = Query(source=self._me, target=broker, number=number, hops=MAX_HOPS, what=what, body=body)
        turn.send(connection, encode(query))
        return True

    def respond(self, turn: Turn, broker: int, number: int, body: bytes) -> None:
        connection = self._next_hop(broker)
        if connection is not None:
            answer = Answer(source=self._me, target=broker, number=number, hops=MAX_HOPS, body=body)
            turn.send(connection, encode(answer))

    def _query(self, turn: Turn, _peer: Peer, message: Query) -> None:
        """What nobody here knows is of a later version, and is not answered."""
        if message.target != self._me:
            self._pass_on(turn, message)
            return
        handler = self._handlers.get(message.what)
        if handler is not None:
            handler(turn, message.source, message.number, message.body)

    def _answer(self, turn: Turn, _peer: Peer, message: Answer) -> None:
        if message.target != self._me:
            self._pass_on(turn, message)
            return
        broker, answered = self._open.get(message.number, (None, None))
        if answered is not None and broker == message.source:
            del self._open[message.number]
            answered(turn, message.body)

    def _pass_on(self, turn: Turn, message: Query | Answer) -> None:
        connection = self._next_hop(message.target)
        if connection is not None and 0 < message.hops <= MAX_HOPS:
            turn.send(connection, encode(msgspec.structs.replace(message, hops=message.hops - 1)))

    def _next_hop(self, broker: int) -> int | None:
        neighbour = self._topology.parent(broker)
        return None if neighbour is None else self._link(neighbour)
