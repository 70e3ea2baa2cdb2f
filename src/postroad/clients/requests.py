"""Requests: what clients ask a broker, about itself and the network, and ask it to change.

Rooms say on the switchboard what they answer. A room's handler answers at once, or when others have answered.
"""

from __future__ import annotations

from postroad.clients.quotas import Quotas
from postroad.errors import DeniedError, UnavailableError, UsageError, shorten
from postroad.links.links import Links
from postroad.seam.peers import Peer
from postroad.seam.replies import reply_error
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.wire.frames import Request


class Requests:
    def __init__(self, board: Switchboard, *, links: Links, quotas: Quotas) -> None:
        self._handlers = board.requests
        self._links = links
        self._quotas = quotas
        board.from_client(Request, self._request)

    def _request(self, turn: Turn, peer: Peer, message: Request) -> None:
        try:
            self._quotas.request(peer.principal, turn.now_us)
            handler, needs = self._handlers.get(message.what, (None, ""))
            if handler is None:
                raise UsageError(f"this broker cannot answer {shorten(message.what, 40)!r}")
            if needs == "admin" and not self._links.may_admin(peer.connection):
                raise DeniedError(f"{message.what} needs the right `admin` at this broker")
            handler(turn, peer, message)
        except (UsageError, UnavailableError) as error:
            reply_error(turn, peer.connection, message.number, error)
