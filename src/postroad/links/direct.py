"""Direct peers: a connection to any broker whose address is known, beside the links of the overlay.

A connection is dialled when a room first has something to say to that broker, and ends when nobody said
anything over it for IDLE_US. It is never dialled again by itself: whoever has something to say asks again. A
broker that could not be reached is left alone for RETRY_US, so that rooms that ask again do not dial without
pause. Two brokers may have two connections, one dialled from each side; each speaks over the one it has.

A peer that does not read is not buffered for beyond its window and MAX_WAITING_BYTES: then `send` says no.

The address of a broker is in its advertisement of links (`overlay.topology`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from postroad.errors import BugError, RedundantError
from postroad.links.links import Links
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.units import MIB, SECOND_US
from postroad.wire.frames import Direct, encode

IDLE_US: Final = 60 * SECOND_US
RETRY_US: Final = 2 * SECOND_US
MAX_PEERS: Final = 1_024  # that this broker dials at a time
MAX_WAITING_BYTES: Final = MIB  # for one peer while it is dialled or out of credit


@dataclass(slots=True)
class _Peer:
    """A broker that was dialled, or that dialled us."""

    connections: dict[int, Peer] = field(default_factory=dict)  # those that are up, the oldest first
    waiting: deque[bytes] = field(
        default_factory=deque
    )  # frames that the newest connection has no credit for
    waiting_bytes: int = 0
    used_us: int = 0  # when something was last said or heard
    sought: bool = False  # we dialled it, and may be waiting for that

    @property
    def newest(self) -> int | None:
        """The connection to speak over: an older one may lead to a process that is gone."""
        return next(reversed(self.connections), None)


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
        self._dials = self._unknown = 0
        board.peers("direct", up=self._up, down=self._down)
        board.direct[Direct] = self._received
        board.metrics(self._metrics)

    def takes(self, turn: Turn, broker: int, size: int) -> bool:
        """Whether there is a way there now for so many bytes, which a room says later in this turn."""
        peer = self._peers.get(broker) or self._dial(turn, broker)
        return peer is not None and peer.waiting_bytes + size <= MAX_WAITING_BYTES

    def send(self, turn: Turn, broker: int, room: str, body: bytes) -> bool:
        """Say this to the same room of another broker; False if there is no way there now.

        What was accepted may still be lost with the connection: who needs an answer waits for one.
        """
        frame = encode(Direct(room=room, body=body))
        peer = self._peers.get(broker) or self._dial(turn, broker)
        if peer is None:
            return False
        if peer.waiting_bytes + len(frame) > MAX_WAITING_BYTES:
            return False
        peer.used_us = turn.now_us
        peer.waiting.append(frame)
        peer.waiting_bytes += len(frame)
        self._flush(turn, peer)
        return True

    def _flush(self, turn: Turn, peer: _Peer) -> None:
        """What the newest connection has credit for."""
        connection = peer.newest
        while connection is not None and peer.waiting and self._links.spend(connection, len(peer.waiting[0])):
            frame = peer.waiting.popleft()
            peer.waiting_bytes -= len(frame)
            turn.send(connection, frame)

    def credit(self, turn: Turn, broker: int) -> None:
        """The peer takes more."""
        known = self._peers.get(broker)
        if known is not None:
            self._flush(turn, known)

    def _dial(self, turn: Turn, broker: int) -> _Peer | None:
        address = self._address_of(broker)
        if not address or turn.now_us < self._retry_us.get(broker, 0):
            return None
        if sum(peer.sought for peer in self._peers.values()) >= MAX_PEERS:
            return None
        self._dials += 1
        turn.stirs = True  # the links dial
        self._links.dial_directly(turn, broker, address, self._not_reached)
        peer = self._peers[broker] = _Peer(used_us=turn.now_us, sought=True)
        return peer

    def _not_reached(self, turn: Turn, broker: int) -> None:
        self._retry_us[broker] = turn.now_us + RETRY_US
        known = self._peers.get(broker)
        if known is not None and not known.connections:  # it may have dialled us meanwhile
            turn.note("info", f"broker {broker:08x} cannot be reached directly")
            del self._peers[broker]
            self._tell_unreached(turn, broker)

    # ---- connections

    def _up(self, turn: Turn, peer: Peer) -> None:
        known = self._peers.setdefault(peer.broker, _Peer())
        gone = [number for number, older in known.connections.items() if older.boot < peer.boot]
        for connection in gone:
            error = RedundantError(f"broker {peer.name!r} was started anew")
            self._links.refuse(turn, connection, error)
        known.connections[peer.connection] = peer
        known.used_us = turn.now_us
        self._retry_us.pop(peer.broker, None)
        self._flush(turn, known)
        if gone:  # its machine may have failed without a word: nobody hears of that process any more
            self._tell_unreached(turn, peer.broker)

    def _down(self, turn: Turn, peer: Peer) -> None:
        known = self._peers[peer.broker]
        in_use = known.newest == peer.connection
        del known.connections[peer.connection]
        if not known.connections:
            del self._peers[peer.broker]
            self._tell_unreached(turn, peer.broker)
        elif in_use:  # what was said last may be lost
            for interrupted in self._interrupted:
                interrupted(turn, peer.broker)
            self._flush(turn, known)

    def _tell_unreached(self, turn: Turn, broker: int) -> None:
        for unreached in self._cut_off:
            unreached(turn, broker)

    def _received(self, turn: Turn, peer: Peer, message: Direct) -> None:
        self._peers[peer.broker].used_us = turn.now_us
        handler = self._handlers.get(message.room)
        if handler is None:  # a room of a later version; the others go on
            self._unknown += 1
        else:
            handler(turn, peer, message.body)

    # ---- time

    def tick(self, turn: Turn) -> None:
        for broker in [broker for broker, at_us in self._retry_us.items() if at_us <= turn.now_us]:
            del self._retry_us[broker]
        for known in list(self._peers.values()):
            if turn.now_us >= known.used_us + IDLE_US:
                for connection, peer in list(known.connections.items()):
                    if peer.dialled is not None:
                        error = RedundantError(f"nothing was said for {IDLE_US // SECOND_US} s")
                        self._links.refuse(turn, connection, error)

    def next_deadline(self) -> int | None:
        idle = [
            known.used_us + IDLE_US
            for known in self._peers.values()
            if any(peer.dialled is not None for peer in known.connections.values())
        ]
        return min([*idle, *self._retry_us.values()], default=None)

    def _metrics(self) -> dict[str, int]:
        return {
            "direct_peers": len(self._peers),
            "direct_dials_total": self._dials,
            "direct_unknown_rooms_total": self._unknown,
        }

    def check(self) -> None:
        for broker, known in self._peers.items():
            connection = known.newest
            if connection is not None and known.waiting and self._links.available(connection) > 0:
                raise BugError(f"frames wait for broker {broker:08x}, which has credit for them")
            if sum(map(len, known.waiting)) != known.waiting_bytes:
                raise BugError(f"the frames that wait for broker {broker:08x} are miscounted")
