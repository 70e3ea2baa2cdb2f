"""Flooding: link state and interest go to every neighbour but the one they came from.

A new link begins with all advertisements and a digest of the interest tables; each side pulls the tables
that it has in an older version. A table that misses a step in between, or one that a nack shows to be older
than the asker's, is pulled whole, once until it comes. What comes is taken in piece by piece (`waiting`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from postroad.errors import PeerError
from postroad.ids import VOLATILE
from postroad.overlay.interest import Interest
from postroad.overlay.topology import MAX_BROKERS, Topology, topology_frames
from postroad.overlay.waiting import WaitingUpdates
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.wire.frames import (
    Advertisement,
    Digest,
    InterestPull,
    InterestUpdate,
    TopologyUpdate,
    encode,
)

SET_BACK: Final = (
    "others know this broker from a start of which its data folder knows nothing, so that is of a backup:"
    " what it did since then is lost"
)
MAX_BOOT: Final = VOLATILE - 1  # what a plain pubend has room for; forged ones must leave some above them


class Flooding:
    """The neighbours, and what they are told of the network.

    `interest_changed` is called when a table here is another one, `set_back` when others know a later start
    of this broker than its disk does, `gone` when a broker is forgotten; `refuse` ends a connection.
    """

    def __init__(
        self,
        board: Switchboard,
        *,
        topology: Topology,
        interest: Interest,
        interest_changed: Callable[[], None],
        set_back: Callable[[int], None],
        gone: Callable[[Turn, int], None],
        refuse: Callable[[Turn, int, PeerError], None],
        now_us: int,
    ) -> None:
        self._topology = topology
        self._interest = interest
        self._interest_changed = interest_changed
        self._set_back = set_back
        self._gone = gone
        self._refuse = refuse
        self._waiting = WaitingUpdates(interest)
        self._turn_us = now_us  # when the last turn was
        self._neighbours: dict[int, int] = {}  # neighbour broker -> its connection
        self._pulled: dict[int, set[int]] = {}  # by connection: owners of tables asked for, not here yet
        board.peers("broker", up=self._up, down=self._down)
        board.from_broker(TopologyUpdate, self._on_topology)
        board.from_broker(Digest, self._on_digest)
        board.from_broker(InterestUpdate, self._on_interest)
        board.from_broker(InterestPull, self._on_pull)
        board.metrics(self._metrics)
        board.status("brokers", self._brokers)

    def __len__(self) -> int:
        return len(self._neighbours)

    def __contains__(self, broker: int) -> bool:
        return broker in self._neighbours

    def connection(self, broker: int) -> int | None:
        """Of a neighbour."""
        return self._neighbours.get(broker)

    @property
    def neighbours(self) -> Mapping[int, int]:
        """Neighbour brokers, and their connections."""
        return self._neighbours

    def _up(self, turn: Turn, peer: Peer) -> None:
        self._neighbours[peer.broker] = peer.connection
        self._topology.link_up(peer.broker, peer.cost, turn.now_us)
        for frame in topology_frames(self._topology.advertisements()):
            turn.send(peer.connection, frame)
        turn.send(peer.connection, encode(Digest(versions=self._interest.digest())))

    def _down(self, turn: Turn, peer: Peer) -> None:
        del self._neighbours[peer.broker]
        self._pulled.pop(peer.connection, None)
        self._waiting.closed(peer.connection)
        self._topology.link_down(peer.broker, turn.now_us)

    # ---- what neighbours say

    def _on_digest(self, turn: Turn, peer: Peer, message: Digest) -> None:
        wanted = self._interest.wanted(message.versions)
        if wanted:
            turn.send(peer.connection, encode(InterestPull(owners=wanted)))

    def _on_pull(self, turn: Turn, peer: Peer, message: InterestPull) -> None:
        for owner in dict.fromkeys(message.owners):
            for update in self._interest.full(owner):
                turn.send(peer.connection, encode(update))

    def _on_topology(self, turn: Turn, peer: Peer, message: TopologyUpdate) -> None:
        news: list[Advertisement] = []
        try:
            for advertisement in message.advertisements:
                if advertisement.boot > MAX_BOOT:
                    raise PeerError(
                        f"advertisement of broker {advertisement.broker:08x} with boot {advertisement.boot};"
                        f" it is at most {MAX_BOOT}"
                    )
                before = self._topology.name(advertisement.broker)
                if self._topology.accept(advertisement, turn.now_us):
                    news.append(advertisement)
                    if advertisement.name == self._topology.own_name != before:
                        turn.note("warning", _namesake(advertisement))
        finally:
            self._flood_topology(
                turn, news, peer.broker
            )  # what is held here is held by all, whatever came next

    def _on_interest(self, turn: Turn, peer: Peer, message: InterestUpdate) -> None:
        self._waiting.add(peer, message)
        self._take_in(turn)

    def _take_in(self, turn: Turn) -> None:
        while (taken := self._waiting.take()) is not None:
            peer, update = taken.peer, taken.update
            if taken.error is not None:
                self._refuse(turn, peer.connection, taken.error)
                continue
            if taken.news:
                self.interest(turn, [update], peer.broker)
            if taken.missing:
                self._pull(turn, peer, [update.owner])
            elif update.base == 0:
                self._pulled.get(peer.connection, set()).discard(update.owner)

    def pull_needed(self, turn: Turn, peer: Peer, need: Mapping[int, int]) -> None:
        """The peer relies on these versions of tables."""
        version = self._interest.version
        # What waits here may be what is missing; whoever relies on it says so again.
        older = [owner for owner, needed in need.items() if version(owner) < needed]
        self._pull(turn, peer, [owner for owner in older if owner not in self._waiting])

    def _pull(self, turn: Turn, peer: Peer, owners: list[int]) -> None:
        """Ask for tables that the peer knows in a version which is not here, each once until it comes."""
        pulled = self._pulled.setdefault(peer.connection, set())
        wanted = [owner for owner in owners if owner not in pulled]
        if wanted:
            pulled.update(wanted)
            if len(pulled) > MAX_BROKERS:
                raise PeerError(
                    f"{len(pulled)} interest tables were asked for and have not come; at most {MAX_BROKERS}"
                    " may"
                )
            turn.send(peer.connection, encode(InterestPull(owners=tuple(wanted))))

    # ---- what neighbours are told

    def interest(self, turn: Turn, updates: Sequence[InterestUpdate], source: int | None = None) -> None:
        """A table here changed."""
        if updates:
            self._flood(turn, [encode(update) for update in updates], source)
            self._interest_changed()

    def _flood_topology(
        self, turn: Turn, advertisements: Sequence[Advertisement], source: int | None = None
    ) -> None:
        """Link state is news here."""
        if advertisements:
            self._flood(turn, topology_frames(advertisements), source)

    def _flood(self, turn: Turn, frames: list[bytes], source: int | None) -> None:
        for broker, connection in self._neighbours.items():
            if broker != source:
                for frame in frames:
                    turn.send(connection, frame)

    # ---- time

    def tick(self, turn: Turn) -> None:
        """Link state is repeated before it is forgotten, and brokers that were silent for long are gone."""
        self._turn_us = turn.now_us
        self._take_in(turn)
        self._waiting.end_turn()
        for advertisement in self._topology.tick(turn.now_us):
            self._flood_topology(turn, (advertisement,))
        own = self._topology.take_own()
        if own is not None:
            self._flood_topology(turn, (own,))
        if self._topology.take_set_back():
            self._set_back(turn.now_us)
            turn.note("warning", SET_BACK)
        for broker in self._topology.take_gone():
            self._interest.forget(broker)
            self._waiting.forget(broker)
            self._gone(turn, broker)

    def next_deadline(self) -> int | None:
        # Where interest waits, the next turn is due at once: all that came meanwhile is in it, too.
        return self._turn_us if self._waiting else self._topology.next_deadline()

    # ---- inspection

    def _metrics(self) -> dict[str, int]:
        reachable = len(self._topology.reachable())
        return {
            **self._interest.stats(),
            "interest_waiting": len(self._waiting),
            "links": len(self._neighbours),
            "brokers_reachable": reachable,
        }

    def _brokers(self, _now_us: int) -> list[dict[str, object]]:
        topology = self._topology
        return [
            {
                "broker": topology.name(number),
                "number": f"{number:08x}",
                "distance": topology.distance(number),
            }
            for number in topology.reachable()
        ]

    def check(self) -> None:
        self._topology.check()
        self._interest.check()
        self._waiting.check()


def _namesake(other: Advertisement) -> str:
    return (
        f"broker {other.broker:08x} has the name of this one, {other.name!r}: give each a --name of its own, "
        "or people tell them apart by their numbers only"
    )
