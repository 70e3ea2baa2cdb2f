"""The smallest possible room of a broker: it says back what it is told, however that reaches it.

docs/explanation/architecture.md shows it as the example of how to add a room.
"""

from __future__ import annotations

from typing import Any

from postroad.broker.core import Broker
from postroad.errors import PeerError, UsageError
from postroad.links.direct import DirectPeers
from postroad.overlay.inquiries import Inquiries
from postroad.seam.datagrams import Datagram
from postroad.seam.peers import Peer
from postroad.seam.replies import reply
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.wire.datagrams import DATAGRAM_PREFIX_BYTES, pack
from postroad.wire.frames import Request

ECHO = "echo"
ASK, ANSWER = 250, 251  # kinds of datagrams


class Echo:
    """A client's request is echoed by this broker; with `broker`, by that one, hop by hop; with `direct` as
    well, over a direct connection."""

    def __init__(self, board: Switchboard, *, inquiries: Inquiries, direct: DirectPeers) -> None:
        self._inquiries = inquiries
        self._direct = direct
        self._waiting: dict[int, list[tuple[int, int]]] = {}  # broker -> who asked: connection, number
        board.request(ECHO, self._request)
        board.query(ECHO, self._query)
        board.datagram(ASK, self._datagram)
        board.from_direct(ECHO, self._said_directly, self._unreached)

    def _request(self, turn: Turn, peer: Peer, request: Request) -> None:
        text, broker = request.arguments.get("text", ""), _number(request.arguments.get("broker", "0"))
        connection, number = peer.connection, request.number

        def answered(turn: Turn, body: bytes) -> None:
            reply(turn, connection, number, {"text": body.decode(errors="replace")})

        if not broker:
            answered(turn, text.encode())
        elif "direct" not in request.arguments:
            if not self._inquiries.ask(turn, broker, ECHO, text.encode(), answered):
                reply(turn, connection, number, {"error": "no way"})
        elif self._direct.send(turn, broker, ECHO, b"?" + text.encode()):
            self._waiting.setdefault(broker, []).append((connection, number))
        else:
            reply(turn, connection, number, {"error": "no way"})

    def _query(self, turn: Turn, broker: int, number: int, body: bytes) -> None:
        self._inquiries.respond(turn, broker, number, body)

    def _datagram(self, turn: Turn, datagram: Datagram) -> None:
        turn.send_to(datagram.source, pack(ANSWER, datagram.data[DATAGRAM_PREFIX_BYTES:]))

    def _said_directly(self, turn: Turn, peer: Peer, body: bytes) -> None:
        if body.startswith(b"?"):
            self._direct.send(turn, peer.broker, ECHO, b"!" + body[1:])
            return
        waiting = self._waiting.get(peer.broker)
        if not waiting:
            raise PeerError("an answer that nobody asked for")
        connection, number = waiting.pop(0)
        reply(turn, connection, number, {"text": body[1:].decode(errors="replace")})

    def _unreached(self, turn: Turn, broker: int) -> None:
        for connection, number in self._waiting.pop(broker, ()):
            reply(turn, connection, number, {"error": "unreached"})


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{text[:40]!r} is not the number of a broker")
    return int(text)


class EchoBroker(Broker):
    """A broker with one room more."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Echo(self._board, inquiries=self._rooms.inquiries, direct=self._rooms.direct)
