"""What became of best-effort events here: on each link, and of each subscriber that repairs (spec P7).

Brokers know nothing of repair. What a subscriber says of it is noted under its name, for traces and reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from postroad.errors import PeerError
from postroad.ids import ID_BYTES
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.streams.delivery import Delivery
from postroad.tracking.strategies import Tracking
from postroad.wire.frames import Repaired

MAX_RECEIVERS: Final = 10_000  # whose figures wait to be reported; then the oldest are not


@dataclass(slots=True)
class LinkCount:
    """Events, since this start of the broker."""

    sent: int = 0  # meant for that neighbour
    received: int = 0  # that came from it


class Ledger:
    def __init__(self, board: Switchboard, *, delivery: Delivery, tracking: Tracking | None) -> None:
        self._delivery = delivery
        self._tracking = tracking
        self._links: dict[int, LinkCount] = {}  # by neighbour; by this broker: what clients published here
        self._changed: set[int] = set()  # those that were not taken yet
        self._receivers: dict[str, Repaired] = {}  # likewise, by the name of the subscription
        board.from_client(Repaired, self._repaired)

    def sent(self, neighbour: int, count: int) -> None:
        self._link(neighbour).sent += count

    def received(self, neighbour: int, count: int) -> None:
        self._link(neighbour).received += count

    def _link(self, neighbour: int) -> LinkCount:
        self._changed.add(neighbour)
        return self._links.setdefault(neighbour, LinkCount())

    def _repaired(self, turn: Turn, peer: Peer, message: Repaired) -> None:
        if len(message.ids) % ID_BYTES:
            raise PeerError(f"REPAIRED with {len(message.ids)} bytes of ids, which have {ID_BYTES} each")
        name = self._delivery.name(peer.connection, message.number)
        if name is None:
            return  # it has just ended
        if message.ids and self._tracking is not None:
            self._tracking.repaired(name, message.ids, turn.now_us)
        self._receivers.pop(name, None)
        self._receivers[name] = message
        while len(self._receivers) > MAX_RECEIVERS:
            del self._receivers[next(iter(self._receivers))]

    @property
    def changed(self) -> bool:
        return bool(self._changed or self._receivers)

    def restate(self) -> None:
        """All links count as changed."""
        self._changed.update(self._links)

    def take(self) -> tuple[list[tuple[int, int, int]], list[tuple[str, Repaired]]]:
        """What changed since the last time: of each link the neighbour, and how many went there and came from
        there in all; of each subscriber what it said last."""
        links = [(at, self._links[at].sent, self._links[at].received) for at in sorted(self._changed)]
        receivers = sorted(self._receivers.items(), key=lambda one: one[0])
        self._changed.clear()
        self._receivers.clear()
        return links, receivers
