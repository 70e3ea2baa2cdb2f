"""The ring of brokers in a broker: Pastry (spec Q1; queues paper, section 2.1) over direct peers.

Every broker is in the ring. It joins through a neighbour of the overlay, and through each new one that it
does not know from the ring yet: so two networks that are linked become one ring. A node of the ring is a
broker's node id; where it is reached, the overlay knows. A connection that closes says that a node has failed
before any heartbeat does.
"""

from __future__ import annotations

from collections.abc import Callable

from postroad.links.direct import DirectPeers
from postroad.overlay.topology import Topology
from postroad.ring.pastry import Changed, NodeId, Pastry, Settings, decode, encode
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn

ROOM = "ring"
_DRAWS = 1 << 32


class Ring:
    """`changed` is told when the closest nodes are others; `draw` is random."""

    def __init__(
        self,
        board: Switchboard,
        *,
        me: NodeId,
        settings: Settings,
        topology: Topology,
        direct: DirectPeers,
        draw: Callable[[int], int],
        changed: Callable[[Turn], None],
    ) -> None:
        self.me = me
        self._topology = topology
        self._direct = direct
        self._draw = draw
        self._changed = changed
        self._core = Pastry(me, settings)
        self._linked: dict[NodeId, int] = {}  # neighbours of the overlay -> how many links, one or none
        self._numbers: dict[NodeId, int] = {}  # node -> broker, as the topology had it at `_generation`
        self._generation = 0
        self._sent = 0
        board.start(self._start)
        board.peers("broker", up=self._link_up, down=self._link_down)
        board.from_direct(ROOM, self._received, self._unreached)
        board.metrics(self._metrics)
        board.status("ring", self._status)

    # ---- questions

    def closest(self, key: NodeId, count: int) -> list[NodeId]:
        return self._core.closest(key, count)

    def route(self, key: NodeId) -> NodeId | None:
        """The next hop towards the broker that is closest to the key; None: that is this one."""
        return self._core.route(key)

    def number(self, node: NodeId) -> int | None:
        """The broker with that node id."""
        if self._generation != self._topology.generation:
            self._generation = self._topology.generation
            self._numbers = {ad.node: ad.broker for ad in self._topology.advertisements()}
        return self._numbers.get(node)

    def node(self, broker: int) -> NodeId | None:
        return self._topology.node(broker)

    def node_of(self, peer: Peer) -> NodeId:
        return peer.node

    def name(self, node: NodeId) -> str:
        """Of the broker, for people."""
        number = self.number(node)
        return node.hex()[:8] if number is None else self._topology.name(number)

    @property
    def known(self) -> list[NodeId]:
        """The nodes that have a place somewhere here: they answered of late."""
        return sorted(self._core.peers)

    # ---- what happens

    def _start(self, turn: Turn) -> None:
        self._core.begin(turn.now_us)
        self._perform(turn)

    def _link_up(self, turn: Turn, peer: Peer) -> None:
        self._linked[peer.node] = peer.broker
        if peer.node not in self._core.peers:
            self._core.join(peer.node, turn.now_us)
            self._perform(turn)

    def _link_down(self, turn: Turn, peer: Peer) -> None:
        self._linked.pop(peer.node, None)
        if self._core.joining == peer.node:
            self._join_elsewhere(turn)

    def _join_elsewhere(self, turn: Turn) -> None:
        """The broker that this one joined through has gone before the ring answered."""
        if self._linked:
            self._core.join(min(self._linked), turn.now_us)
        else:
            self._core.begin(turn.now_us)
        self._perform(turn)

    def _received(self, turn: Turn, peer: Peer, body: bytes) -> None:
        self._core.receive(peer.node, decode(body), turn.now_us)
        self._perform(turn)

    def _unreached(self, turn: Turn, broker: int) -> None:
        node = self._topology.node(broker)
        if node is not None and node in self._core.peers:
            self._core.failed(node, turn.now_us)
            self._perform(turn)

    def leave(self, turn: Turn) -> None:
        """The process ends in good order."""
        self._core.leave(turn.now_us)
        self._perform(turn)

    def _perform(self, turn: Turn) -> None:
        for output in self._core.take():
            if isinstance(output, Changed):
                self._changed(turn)
                continue
            number = self.number(output.to)
            if number is not None:
                self._sent += 1
                self._direct.send(turn, number, ROOM, encode(output.message))

    # ---- time

    def tick(self, turn: Turn) -> None:
        deadline = self._core.next_deadline()
        if deadline is not None and turn.now_us >= deadline:
            self._core.tick(turn.now_us, self._draw(_DRAWS))
            self._perform(turn)

    def next_deadline(self) -> int | None:
        return self._core.next_deadline()

    def check(self) -> None:
        self._core.check()

    # ---- inspection

    def _metrics(self) -> dict[str, int]:
        return {
            "ring_nodes": len(self._core.peers) + 1,
            "ring_leaves": len(self._core.closest(self.me, self._core.settings.leaves + 1)) - 1,
            "ring_messages_total": self._sent,
        }

    def _status(self, now_us: int) -> dict[str, object]:
        del now_us
        leaves = self._core.closest(self.me, self._core.settings.leaves + 1)
        return {
            "node": self.me.hex(),
            "joining": self._core.joining is not None,
            "leaves": sorted(self.name(node) for node in leaves if node != self.me),
        }
