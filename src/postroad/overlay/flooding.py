"""Flooding: link state and interest go to every neighbour but the one they came from.

A new link begins with all advertisements and a digest of the interest tables; each side pulls the tables
that it has in an older version. A table that misses a step in between, or one that a nack shows to be older
than the asker's, is pulled whole, once until it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from postroad.errors import BugError, PeerError
from postroad.ids import VOLATILE
from postroad.links.links import Peer
from postroad.overlay.interest import Interest
from postroad.overlay.topology import MAX_BROKERS, Topology, topology_frames
from postroad.seam.effects import Effect, Note, Send
from postroad.wire.frames import (
    Advertisement,
    Digest,
    InterestPull,
    InterestUpdate,
    Message,
    TopologyUpdate,
    encode,
)

MAX_BOOT: Final = VOLATILE - 1  # what a plain pubend has room for; forged ones must leave some above them


class Flooding:
    """The neighbours, and what they are told of the network. Its effects go to `out`, the broker's.

    `interest_changed` is called when a table here is another one.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        interest: Interest,
        interest_changed: Callable[[], None],
        out: list[Effect],
    ) -> None:
        self._topology = topology
        self._interest = interest
        self._interest_changed = interest_changed
        self._out = out
        self._neighbours: dict[int, int] = {}  # neighbour broker -> its connection
        self._pulled: dict[int, set[int]] = {}  # by connection: owners of tables asked for, not here yet

    def __len__(self) -> int:
        return len(self._neighbours)

    def __contains__(self, broker: int) -> bool:
        return broker in self._neighbours

    def connection(self, broker: int) -> int | None:
        """Of a neighbour."""
        return self._neighbours.get(broker)

    def up(self, peer: Peer, now_us: int) -> None:
        self._neighbours[peer.broker] = peer.connection
        self._topology.link_up(peer.broker, peer.cost, now_us)
        for frame in topology_frames(self._topology.advertisements()):
            self._out.append(Send(peer.connection, frame))
        self._send(peer, Digest(versions=self._interest.digest()))

    def down(self, peer: Peer, now_us: int) -> None:
        del self._neighbours[peer.broker]
        self._pulled.pop(peer.connection, None)
        self._topology.link_down(peer.broker, now_us)

    def received(self, peer: Peer, message: Message, now_us: int) -> None:
        match message:
            case TopologyUpdate():
                self._on_topology(peer, message, now_us)
            case Digest():
                wanted = self._interest.wanted(message.versions)
                if wanted:
                    self._send(peer, InterestPull(owners=wanted))
            case InterestUpdate():
                self._on_interest(peer, message)
            case InterestPull():
                for owner in dict.fromkeys(message.owners):
                    for update in self._interest.full(owner):
                        self._send(peer, update)
            case _:
                raise BugError(f"{type(message).__name__} from a broker has no handler")

    def _on_topology(self, peer: Peer, message: TopologyUpdate, now_us: int) -> None:
        news: list[Advertisement] = []
        try:
            for advertisement in message.advertisements:
                if advertisement.boot > MAX_BOOT:
                    raise PeerError(
                        f"advertisement of broker {advertisement.broker:08x} with a boot too high"
                    )
                before = self._topology.name(advertisement.broker)
                if self._topology.accept(advertisement, now_us):
                    news.append(advertisement)
                    if advertisement.name == self._topology.own_name != before:
                        self._out.append(Note("warning", _namesake(advertisement)))
        finally:
            self.topology(news, peer.broker)  # what is held here is held by all, whatever came next

    def _on_interest(self, peer: Peer, message: InterestUpdate) -> None:
        news, missing = self._interest.accept(message)
        if news:
            self.interest([message], peer.broker)
        if missing:
            self._pull(peer, [message.owner])
        elif message.base == 0:
            self._pulled.get(peer.connection, set()).discard(message.owner)

    def pull_needed(self, peer: Peer, need: Mapping[int, int]) -> None:
        """The peer relies on these versions of tables."""
        version = self._interest.version
        self._pull(peer, [owner for owner, needed in need.items() if version(owner) < needed])

    def _pull(self, peer: Peer, owners: list[int]) -> None:
        """Ask for tables that the peer knows in a version which is not here, each once until it comes."""
        pulled = self._pulled.setdefault(peer.connection, set())
        wanted = [owner for owner in owners if owner not in pulled]
        if wanted:
            pulled.update(wanted)
            if len(pulled) > MAX_BROKERS:
                raise PeerError(f"more than {MAX_BROKERS} tables are asked for that do not come")
            self._send(peer, InterestPull(owners=tuple(wanted)))

    def interest(self, updates: Sequence[InterestUpdate], source: int | None = None) -> None:
        """A table here changed."""
        if updates:
            self._flood([encode(update) for update in updates], source)
            self._interest_changed()

    def topology(self, advertisements: Sequence[Advertisement], source: int | None = None) -> None:
        """Link state is news here."""
        if advertisements:
            self._flood(topology_frames(advertisements), source)

    def _flood(self, frames: list[bytes], source: int | None) -> None:
        for broker, connection in self._neighbours.items():
            if broker != source:
                self._out += [Send(connection, frame) for frame in frames]

    def _send(self, peer: Peer, message: Message) -> None:
        self._out.append(Send(peer.connection, encode(message)))

    def check(self, linked: Mapping[int, int]) -> None:
        """`linked`: the neighbours that are up, and their connections."""
        if linked != self._neighbours:
            raise BugError("the links by number are not those that are up")


def _namesake(other: Advertisement) -> str:
    return (
        f"broker {other.broker:08x} has the name of this one, {other.name!r}: give each a --name of its own, "
        "or people tell them apart by their numbers only"
    )
