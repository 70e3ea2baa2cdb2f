"""The ring of brokers in a broker: Pastry (spec Q1; queues paper, section 2.1) over direct peers.

Every broker is in the ring. Its contacts are the neighbours of the overlay: it joins through each of them
that it does not know from the ring. So the ring is one where the overlay is: when two networks are linked, or
a cut is over. Brokers that the overlay has told of and the ring does not know are asked, too: where
the death of one cuts the overlay, those on either side may still reach each other. A node of the ring has its
broker's node id, and another one whenever what it said before is not remembered: at every start where nothing
is on disk, and after its data was restored from a backup (spec, responsibility 2). Where a broker is reached,
the overlay knows. A connection that closes says that a node has failed before any heartbeat does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from postroad.links.direct import DirectPeers
from postroad.overlay.topology import Topology
from postroad.ring.pastry import ID_BYTES, Changed, NodeId, Pastry, Settings, decode, encode
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.units import SECOND_US

ROOM = "ring"
MAX_SPOKE = 4_096  # brokers that are remembered since they spoke; then the oldest is forgotten
SEEK_FIRST_US = SECOND_US  # between two looks at the brokers that the overlay knows of, doubled each time
SEEK_LAST_US = 60 * SECOND_US
_DRAWS = 1 << 32


def ring_id(node: bytes, life: int) -> NodeId:
    """`life`: as `Identity` has it."""
    return hashlib.blake2b(node + life.to_bytes(4, "big"), digest_size=ID_BYTES).digest() if life else node


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
        self._numbers: dict[NodeId, int] = {}  # node -> broker, as the topology had it at `_generation`
        self._generation = 0
        # Node -> broker, of those that spoke to this one: where the overlay is cut, it may not know them.
        self._spoke: dict[NodeId, int] = {}
        self._sought = 0  # the generation of the topology that was looked at for them
        self._seek_us = 0  # when those that the overlay has told of are asked again
        self._pause_us = SEEK_FIRST_US
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
        number = self._nodes().get(node)
        return self._spoke.get(node) if number is None else number

    def _nodes(self) -> dict[NodeId, int]:
        if self._generation != self._topology.generation:
            self._generation = self._topology.generation
            self._numbers = {ring_id(ad.node, ad.life): ad.broker for ad in self._topology.advertisements()}
        return self._numbers

    def node(self, broker: int) -> NodeId | None:
        ad = self._topology.advertised(broker)
        if ad is None:
            return next((node for node, number in self._spoke.items() if number == broker), None)
        return ring_id(ad.node, ad.life)

    def node_of(self, peer: Peer) -> NodeId:
        return ring_id(peer.node, peer.life)

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
        self._core.join(self.node_of(peer), turn.now_us)
        self._perform(turn)

    def _link_down(self, turn: Turn, peer: Peer) -> None:
        del turn
        self._core.unlink(self.node_of(peer))

    def _received(self, turn: Turn, peer: Peer, body: bytes) -> None:
        self._spoke[self.node_of(peer)] = peer.broker
        if len(self._spoke) > MAX_SPOKE:
            del self._spoke[next(iter(self._spoke))]
        self._core.receive(self.node_of(peer), decode(body), turn.now_us)
        self._perform(turn)

    def _unreached(self, turn: Turn, broker: int) -> None:
        node = self.node(broker)
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
            self._seek(turn)
            self._perform(turn)

    def _seek(self, turn: Turn) -> None:
        """Ask whom the overlay has told of and the ring does not know: soon after news of the overlay, then
        ever more rarely, since most of them are dead."""
        if self._sought != self._topology.generation:
            self._sought = self._topology.generation
            self._seek_us, self._pause_us = 0, SEEK_FIRST_US
        if turn.now_us >= self._seek_us:
            self._seek_us = turn.now_us + self._pause_us
            self._pause_us = min(2 * self._pause_us, SEEK_LAST_US)
            self._core.hear_of(sorted(self._nodes()), turn.now_us)

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
            "joining": bool(self._core.joining),
            "leaves": sorted(self.name(node) for node in leaves if node != self.me),
        }
