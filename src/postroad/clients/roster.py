"""Who is connected: the request `clients`, and `clients.kick`, which closes one connection.

A client sees the connections of its own principal, who may administer sees all.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final

from postroad.errors import UnavailableError, UsageError, shorten
from postroad.links.links import Links
from postroad.seam.peers import Peer
from postroad.seam.replies import reply
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.wire.frames import Request

MAX_ROWS: Final = 1_000  # of one answer


class Roster:
    """`subscriptions(connection)` counts those of a client."""

    def __init__(self, board: Switchboard, *, links: Links, subscriptions: Callable[[int], int]) -> None:
        self._links = links
        self._subscriptions = subscriptions
        board.request("clients", self._list)
        board.request("clients.kick", self._kick, needs="admin")

    def _list(self, turn: Turn, peer: Peer, request: Request) -> None:
        everybody = self._links.may_admin(peer.connection)
        shown = (
            row for row in self._links.clients(turn.now_us) if everybody or row["principal"] == peer.principal
        )
        rows = list(islice(shown, MAX_ROWS + 1))
        for row in rows:
            row["subscriptions"] = self._subscriptions(int(str(row["connection"])))
        body = {"clients": rows[:MAX_ROWS], "more": len(rows) > MAX_ROWS}
        reply(turn, peer.connection, request.number, body)

    def _kick(self, turn: Turn, peer: Peer, request: Request) -> None:
        number = request.arguments.get("connection", "")
        if not number.isdecimal() or self._links.role(int(number)) != "client":
            raise UsageError(f"no client has the connection {shorten(number, 20)!r}")
        error = UnavailableError("an administrator closed this connection")
        self._links.refuse(turn, int(number), error)
        reply(turn, peer.connection, request.number, {"closed": int(number)})
