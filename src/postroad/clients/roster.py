"""Who is connected: the request `clients`, and `clients.kick`, which closes one connection.

A client sees the connections of its own principal, who may administer sees all: in the order of their
numbers. Where there are `more`, the same request with `after` the last of them gets the next.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final

from postroad.errors import UnavailableError, UsageError
from postroad.links.links import Links
from postroad.seam.peers import Peer
from postroad.seam.replies import reply, whole_number
from postroad.seam.switchboard import Asking, Switchboard
from postroad.seam.turn import Turn
from postroad.wire.frames import Request, cut_lists

MAX_ROWS: Final = 1_000  # of one answer
MAX_CONNECTION: Final = (1 << 63) - 1  # numbers of connections rise as long as a process lives


class Roster:
    """`subscriptions(connection)` counts those of a client."""

    def __init__(self, board: Switchboard, *, links: Links, subscriptions: Callable[[int], int]) -> None:
        self._links = links
        self._subscriptions = subscriptions
        board.report("clients", self._list)
        board.request("clients.kick", self._kick, needs="admin")

    def _list(self, asking: Asking) -> dict[str, object]:
        everybody = self._links.access.may_admin(asking.principal)
        after = whole_number(asking.arguments.get("after", "0"), MAX_CONNECTION)
        shown = (
            row
            for row in self._links.clients(asking.now_us, after)
            if everybody or row["principal"] == asking.principal
        )
        rows = list(islice(shown, MAX_ROWS + 1))
        for row in rows:
            row["subscriptions"] = self._subscriptions(int(str(row["connection"])))
        body = cut_lists({"clients": rows[:MAX_ROWS], "more": True}, asking.most_bytes)
        return {**body, "more": body["clients"] != rows}

    def _kick(self, turn: Turn, peer: Peer, request: Request) -> None:
        number = whole_number(request.arguments.get("connection", ""), MAX_CONNECTION)
        if self._links.role(number) != "client":
            raise UsageError(f"no client has the connection {number}")
        error = UnavailableError("an administrator closed this connection")
        self._links.refuse(turn, number, error)
        reply(turn, peer.connection, request.number, {"closed": number})
