"""Direct peers: a connection to any broker whose address is known, beside the links of the overlay.

A connection is dialled when a room first has something to say to that broker, and ends when nobody said
anything over it for IDLE_US. It is never dialled again by itself: whoever has something to say asks again. A
broker that could not be reached is left alone for RETRY_US, so that rooms that ask again do not dial without
pause. Two brokers may have two connections, one dialled from each side; each speaks over the one it has.

The address of a broker is in its advertisement of links (`overlay.topology`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from postroad.errors import BugError, PeerError, RedundantError
from postroad.links.links import Links
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.units import MIB, SECOND_US
from postroad.wire.frames import Direct, encode

IDLE_US: Final = 60 * SECOND_US
RETRY_US: Final = 2 * SECOND_US
MAX_PEERS: Final = 1_024  # that this broker dials at a time
MAX_WAITING_BYTES: Final = MIB  # for one peer while it is dialled


@dataclass(slots=True)
class _Peer:
    """A broker that was dialled, or that dialled us."""

    connections: dict[int, bool] = field(default_factory=dict)  # those that are up; whether we dialled
    waiting: list[bytes] = field(default_factory=list)  # frames for the first connection
    waiting_bytes: int = 0
    used_us: int = 0  # when something was last said or heard


class DirectPeers:
    """`address_of(broker)` is where it takes connections, "" where that is not known."""

    def __init__(self, board: Switchboard, *, links: Links, address_of: Callable[[int], str]) -> None:
        self._links = links
        self._address_of = address_of
        self._handlers = board.rooms_direct
        self._cut_off = board.cut_off
        self._interrupted = board.interrupted
        self._peers: dict[int, _Peer] = {}  # by broker number: connected, or being dialled
        self._retry_us: dict[int, int] = {}  # brokers that were not reached -> when they may be dialled again
        self._dials = 0
        board.peers("direct", up=self._up, down=self._down)
        board.direct[Direct] = self._received
        board.metrics(self._metrics)

    def send(self, turn: Turn, broker: int, room: str, body: bytes) -> bool:
        """Say this to the same room of another broker; False if there is no way there now.

        What was accepted may still be lost with the connection: who needs an answer waits for one.
        """
        frame = encode(Direct(room=room, body=body))
        peer = self._peers.get(broker) or self._dial(turn, broker)
        if peer is None:
            return False
        peer.used_us = turn.now_us
        for connection in peer.connections:
            turn.send(connection, frame)
            return True
        if peer.waiting_bytes + len(frame) > MAX_WAITING_BYTES:
            return False
        peer.waiting.append(frame)
        peer.waiting_bytes += len(frame)
        return True

    def _dial(self, turn: Turn, broker: int) -> _Peer | None:
        address = self._address_of(broker)
        if not address or len(self._peers) >= MAX_PEERS or turn.now_us < self._retry_us.get(broker, 0):
            return None
        self._dials += 1
        self._links.dial_directly(turn, broker, address)
        peer = self._peers[broker] = _Peer(used_us=turn.now_us)
        return peer

    # ---- connections

    def _up(self, turn: Turn, peer: Peer) -> None:
        known = self._peers.setdefault(peer.broker, _Peer())
        known.connections[peer.connection] = peer.dialled is not None
        known.used_us = turn.now_us
        self._retry_us.pop(peer.broker, None)
        for frame in known.waiting:
            turn.send(peer.connection, frame)
        known.waiting, known.waiting_bytes = [], 0

    def _down(self, turn: Turn, peer: Peer) -> None:
        known = self._peers[peer.broker]
        del known.connections[peer.connection]
        if not known.connections:
            self._forget(turn, peer.broker)
        else:
            for interrupted in self._interrupted:
                interrupted(turn, peer.broker)

    def _forget(self, turn: Turn, broker: int) -> None:
        del self._peers[broker]
        for unreached in self._cut_off:
            unreached(turn, broker)

    def _received(self, turn: Turn, peer: Peer, message: Direct) -> None:
        handler = self._handlers.get(message.room)
        if handler is None:
            raise PeerError(f"this broker has no room {message.room[:40]!r}")
        self._peers[peer.broker].used_us = turn.now_us
        handler(turn, peer, message.body)

    # ---- time

    def tick(self, turn: Turn) -> None:
        for broker in self._links.take_unreached():
            self._retry_us[broker] = turn.now_us + RETRY_US
            known = self._peers.get(broker)
            if known is not None and not known.connections:
                turn.note("info", f"broker {broker:08x} cannot be reached directly")
                self._forget(turn, broker)
        for broker in [broker for broker, at_us in self._retry_us.items() if at_us <= turn.now_us]:
            del self._retry_us[broker]
        for known in list(self._peers.values()):
            if turn.now_us >= known.used_us + IDLE_US:
                for connection, dialled in list(known.connections.items()):
                    if dialled:
                        error = RedundantError(f"nothing was said for {IDLE_US // SECOND_US} s")
                        self._links.refuse(turn, connection, error)

    def next_deadline(self) -> int | None:
        idle = [known.used_us + IDLE_US for known in self._peers.values() if any(known.connections.values())]
        return min([*idle, *self._retry_us.values()], default=None)

    def _metrics(self) -> dict[str, int]:
        return {"direct_peers": len(self._peers), "direct_dials_total": self._dials}

    def check(self) -> None:
        for broker, known in self._peers.items():
            if known.connections and known.waiting:
                raise BugError(f"frames wait for broker {broker:08x}, which is connected directly")
            if sum(map(len, known.waiting)) != known.waiting_bytes:
                raise BugError(f"the frames that wait for broker {broker:08x} are miscounted")
