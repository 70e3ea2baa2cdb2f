"""Pastry as a pure core (spec Q1, Q2; queues paper, section 2.1; Rowstron and Druschel, Middleware 2001).

Node ids and keys are 128-bit numbers on a ring, read as digits of `bits` bits. A node knows
- its *leaf set*: the closest nodes on either side, half of them each;
- a *routing table*: in row r, column c, nodes that share r digits with this one and have c as the next digit;
  one for each part of the keys that such nodes stand among, so that a hop ends near its key;
- a *neighbourhood*: the nodes with the shortest measured delay, of no use for routing but for finding near
  ones.

A message goes to the leaf that is closest to its key if the key is within the leaf set. Otherwise it goes to
a node that shares one more digit with the key, or, where none is known, at least as many and is closer. A key
is the business of the node that is numerically closest to it; of two at the same distance, of the lower one.

**Joining.** A newcomer asks any node to route its own id. Every node on the way shares its row of that
prefix, the last one its leaf set; the newcomer probes all of them, and they answer with their leaves. Two
rings become one in the same way: a node joins through everybody to whom the caller has
a link (a *contact*) and whom it does not know from the ring, or knew and lost, and asks again until the node
closest to it there has answered. So the ring is one where the links make one network; and where they did: of
those that the caller knows of besides (`hear_of`), whoever would have a place is asked.

**Failure.** A node probes its leaves at every heartbeat, all others in turn. Whoever it is told of is probed
and has a place only once it answers: so nobody is believed about the dead. Whoever does not answer in time,
or is said to be gone by its connection, is taken out everywhere. A hole in the leaf set is filled by the
leaves of the others, a hole in the table by asking the rest of that row. Leaf sets are exchanged only when
they have changed, so an idle ring sends empty probes.

Of several nodes for a place in the table, the one with the shortest delay is kept. With a single node for all
of a column (`parts` 1, as published), 7 of 100 ways on a ring of 256 take a hop more than ceil(log16 N).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from postroad.errors import BugError, PeerError, UsageError
from postroad.units import SECOND_US
from postroad.wire.fields import Number

ID_BYTES: Final = 16
ID_BITS: Final = 128
MAX_SHARED: Final = 1_024  # nodes in one message
MAX_ASKED: Final = 1_024  # nodes that were heard of and are probed within a heartbeat
TURN_HEARTBEATS: Final = 30  # in which every node that is known is probed once
MAX_HOPS: Final = 64  # of a request to join
_RING: Final = 1 << ID_BITS
_UNMEASURED: Final = 1 << 62

NodeId: TypeAlias = Annotated[bytes, Meta(max_length=ID_BYTES)]
Nodes: TypeAlias = Annotated[tuple[NodeId, ...], Meta(max_length=MAX_SHARED)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    bits: int = 4  # of a digit: the paper's b
    parts: int = 8  # of the keys of a place in the routing table, each with a node of its own
    leaves: int = 16
    neighbours: int = 16
    heartbeat_us: int = SECOND_US
    silent_us: int = 3 * SECOND_US  # without an answer, a node is gone
    rows_us: int = 20 * SECOND_US  # between two exchanges of a row of the routing table

    def __post_init__(self) -> None:
        if self.bits not in (1, 2, 4, 8):
            raise UsageError(f"a digit has 1, 2, 4 or 8 bits, not {self.bits}")
        if self.parts not in (1, 2, 4, 8, 16):
            raise UsageError(f"a place in the routing table has 1, 2, 4, 8 or 16 parts, not {self.parts}")
        if self.leaves < 2 or self.leaves % 2 or self.leaves > MAX_SHARED:
            raise UsageError(
                f"a leaf set has an even number of nodes from 2 to {MAX_SHARED}, not {self.leaves}"
            )
        if not 0 <= self.neighbours <= MAX_SHARED:
            raise UsageError(f"a neighbourhood has 0 to {MAX_SHARED} nodes, not {self.neighbours}")


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class Join(_Message, frozen=True, tag=1):
    """Route the newcomer's id; everybody on the way shares what it knows with it."""

    newcomer: NodeId
    hops: Number
    through: NodeId  # who was asked first


class Share(_Message, frozen=True, tag=2):
    """Nodes that the sender relies on. `joined`: whom the newcomer asked first, if the sender is the closest
    one to it; otherwise empty."""

    nodes: Nodes
    joined: NodeId = b""


class Probe(_Message, frozen=True, tag=4):
    """`leaves` where they have changed since the receiver heard of them last."""

    sent_us: Number
    leaves: Nodes


class Alive(_Message, frozen=True, tag=5):
    sent_us: Number  # of the probe
    leaves: Nodes


class Leaving(_Message, frozen=True, tag=6):
    """The sender goes for good, and leaves its leaves to each other."""

    leaves: Nodes


class Row(_Message, frozen=True, tag=7):
    """Which nodes do you have in this row?"""

    row: Number


Message: TypeAlias = Join | Share | Probe | Alive | Leaving | Row


class Send(msgspec.Struct, frozen=True):
    to: NodeId
    message: Message


class Changed(msgspec.Struct, frozen=True):
    """The leaf set is another one: `came` and `went` since the last time (the paper's `update`)."""

    came: tuple[NodeId, ...]
    went: tuple[NodeId, ...]


Output: TypeAlias = Send | Changed


class Peer(msgspec.Struct):
    """A node that has a place somewhere here."""

    delay_us: int = _UNMEASURED  # the shortest round trip of late
    asked_us: int | None = None  # the oldest probe that it did not answer
    version: int = 0  # of our leaf set that it was sent last


_MESSAGES: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message:
    """PeerError unless it is a message."""
    try:
        return _MESSAGES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"a message of the ring of {len(data)} bytes cannot be read: {error}") from error


def distance(first: int, second: int) -> int:
    """Round the ring, the shorter way."""
    clockwise = (second - first) % _RING
    return min(clockwise, _RING - clockwise)


def number(node: NodeId) -> int:
    return int.from_bytes(node, "big")


class Pastry:
    """One node's part in the ring."""

    def __init__(self, me: NodeId, settings: Settings) -> None:
        _check_ids((me,))
        self.me, self.settings = me, settings
        self.outputs: list[Output] = []
        self.now_us = 0
        self.contacts: set[NodeId] = set()  # nodes that the caller has a link to
        self.joining: set[NodeId] = set()  # of those, the ones in whose ring this node has yet to find itself
        self.peers: dict[NodeId, Peer] = {}  # everybody in the leaf set, the table or the neighbourhood
        self.clockwise: list[tuple[int, NodeId]] = []  # by distance from us in that direction
        self.counter: list[tuple[int, NodeId]] = []  # the same in the other; few nodes are in both
        self.table: dict[tuple[int, int, int], NodeId] = {}  # (row, column, part)
        self.near: list[tuple[int, NodeId]] = []  # (delay, node)
        self.asked: set[NodeId] = set()  # heard of and probed since the last heartbeat
        self.version = 1  # of the leaf set
        self.announced: frozenset[NodeId] = frozenset()  # the leaf set as of the last Changed
        self.turn = 0  # of all known nodes in order, whose turn it is to be probed
        self.heartbeat_at: int | None = None
        self.rows_at: int | None = None
        self._me = number(me)
        self._leaves: tuple[NodeId, ...] | None = None  # of both sides in order; None: a side has changed
        self._digits = ID_BITS // settings.bits

    # What the outside calls

    def begin(self, now_us: int) -> None:
        """The first node of a ring, until it joins others."""
        self._start(now_us)
        self._end()

    def join(self, contact: NodeId, now_us: int) -> None:
        """The caller has a link to that node. This one joins through it unless the ring knows it already."""
        _check_ids((contact,))
        self.now_us = now_us
        if self.heartbeat_at is None:
            self._start(now_us)
        self.contacts.add(contact)
        if contact not in self.peers:
            self._join_through(contact)
        self._end()

    def hear_of(self, nodes: Iterable[NodeId], now_us: int) -> None:
        """The caller knows of these: those that would have a place are asked."""
        self.now_us = now_us
        self._hear_of(nodes)
        self._end()

    def unlink(self, contact: NodeId) -> None:
        """The link to that node is gone. Whether the node is gone too, the ring finds out."""
        self.contacts.discard(contact)
        self.joining.discard(contact)

    def leave(self, now_us: int) -> None:
        self.now_us = now_us
        for node in sorted(self.peers):
            self._send(node, Leaving(self._leaf_nodes()))

    def failed(self, node: NodeId, now_us: int) -> None:
        """Its connection says so, or nobody answers there."""
        self.now_us = now_us
        self._lose(node)
        self._end()

    def receive(self, sender: NodeId, message: Message, now_us: int) -> None:
        """PeerError if the message cannot be true."""
        self.now_us = now_us
        _check_ids((sender,))
        _HANDLERS[type(message)](self, sender, message)
        self._end()

    def tick(self, now_us: int, draw: int) -> None:
        self.now_us = now_us
        if self.heartbeat_at is not None and now_us >= self.heartbeat_at:
            self.heartbeat_at = now_us + self.settings.heartbeat_us
            self.asked.clear()
            silent = [
                node
                for node, peer in self.peers.items()
                if peer.asked_us is not None and now_us - peer.asked_us >= self.settings.silent_us
            ]
            for node in silent:
                self._lose(node)
            for node in sorted(self.joining):
                self._join_through(node)
            waiting = [node for node, peer in self.peers.items() if peer.asked_us is not None]
            for node in sorted({*self._leaf_nodes(), *waiting, *self._next_in_turn()}):
                self._probe(node)
        if self.rows_at is not None and now_us >= self.rows_at:
            self.rows_at = now_us + self.settings.rows_us
            self._exchange_row(draw)
        self._end()

    def next_deadline(self) -> int | None:
        times = [time for time in (self.heartbeat_at, self.rows_at) if time is not None]
        return min(times, default=None)

    def take(self) -> list[Output]:
        outputs, self.outputs = self.outputs, []
        return outputs

    # Questions

    def route(self, key: NodeId) -> NodeId | None:
        """The next hop; None: the key is our own business."""
        goal = number(key)
        if self._covers(goal):
            closest = min((self.me, *self._leaf_nodes()), key=lambda node: _rank(node, goal))
            return None if closest == self.me else closest
        row = self._shared_digits(goal)
        further = [node for node in self.peers if self._shared(number(node), goal) > row]
        if not further:
            mine = _rank(self.me, goal)
            further = [node for node in self.peers if _rank(node, goal) < mine]
        # Of all that take it further, the closest: it may be the last hop.
        return min(
            further, key=lambda node: (-self._shared(number(node), goal), _rank(node, goal)), default=None
        )

    def closest(self, key: NodeId, count: int) -> list[NodeId]:
        """The closest nodes, closest first. It is the truth near this node, where its leaves are."""
        goal = number(key)
        return sorted((self.me, *self._leaf_nodes()), key=lambda node: _rank(node, goal))[:count]

    def check(self) -> None:
        """BugError if something that always holds does not."""
        placed = {*self._leaf_nodes(), *self.table.values(), *(node for _, node in self.near)}
        if placed != set(self.peers) or self.me in placed:
            raise BugError(f"{len(self.peers)} nodes are known and {len(placed)} have a place")
        if max(len(self.clockwise), len(self.counter)) > self.settings.leaves // 2:
            raise BugError(f"a side of the leaf set has more than {self.settings.leaves // 2} nodes")
        if not self.joining <= self.contacts:
            raise BugError("this node joins through one that it has no link to")
        for slot, node in self.table.items():
            if self._slot(number(node)) != slot:
                raise BugError(f"{node.hex()} stands at {slot} of the routing table")

    # Digits

    def _slot(self, value: int) -> tuple[int, int, int]:
        """The row, the column and the part of the routing table where that node belongs."""
        row, parts = self._shared_digits(value), self.settings.parts
        below = ID_BITS - (row + 1) * self.settings.bits  # bits behind the digit of the column
        rest = value & ((1 << below) - 1)
        return row, value >> below & ((1 << self.settings.bits) - 1), rest * parts >> below

    def _shared_digits(self, value: int) -> int:
        return self._shared(self._me, value)

    def _shared(self, first: int, second: int) -> int:
        different = (first ^ second).bit_length()
        return self._digits if not different else (ID_BITS - different) // self.settings.bits

    # Who has a place

    def _leaf_nodes(self) -> tuple[NodeId, ...]:
        if self._leaves is None:
            self._leaves = tuple(sorted({node for _, node in (*self.clockwise, *self.counter)}))
        return self._leaves

    def _covers(self, goal: int) -> bool:
        """Whether the key is between the outermost leaves, or all nodes are leaves."""
        half = self.settings.leaves // 2
        if len(self.clockwise) < half or len(self.counter) < half:
            return True
        ahead, behind = (goal - self._me) % _RING, (self._me - goal) % _RING
        return ahead <= self.clockwise[-1][0] or behind <= self.counter[-1][0]

    def _learn(self, node: NodeId, delay_us: int | None = None) -> None:
        """It has spoken: give it the places that it deserves."""
        if node == self.me:
            return
        peer = self.peers.get(node)
        known = peer is not None
        peer = peer or Peer()
        peer.asked_us = None
        if delay_us is not None:
            # The shortest of late: a single slow answer says little about the way.
            peer.delay_us = min(delay_us, peer.delay_us * 9 // 8 + 1)
        if (not known or delay_us is not None) and self._place(node, peer) and not known:
            self.peers[node] = peer

    def _hear_of(self, nodes: Iterable[NodeId]) -> None:
        """Whoever would have a place is asked itself."""
        for node in nodes:
            if node in self.peers or node == self.me or node in self.asked or len(self.asked) >= MAX_ASKED:
                continue
            if self._has_place(number(node)):
                self.asked.add(node)
                self._probe(node)

    def _has_place(self, value: int) -> bool:
        """For a node whose delay is not known."""
        half = self.settings.leaves // 2
        ahead, behind = (value - self._me) % _RING, (self._me - value) % _RING
        return (
            len(self.clockwise) < half
            or len(self.counter) < half
            or ahead < self.clockwise[-1][0]
            or behind < self.counter[-1][0]
            or self._slot(value) not in self.table
        )

    def _place(self, node: NodeId, peer: Peer) -> bool:
        value = number(node)
        placed = False
        for side, far in ((self.clockwise, value - self._me), (self.counter, self._me - value)):
            entry = (far % _RING, node)
            if entry not in side and (len(side) < self.settings.leaves // 2 or entry < side[-1]):
                insort(side, entry)
                self._leaves = None
                placed = True
                if len(side) > self.settings.leaves // 2:
                    self._displace(side.pop()[1])
        slot = self._slot(value)
        holder = self.table.get(slot)
        if holder is None or (holder != node and peer.delay_us < self.peers[holder].delay_us):
            self.table[slot] = node
            placed = True
            if holder is not None:
                self._displace(holder)
        return self._place_near(node, peer) or placed

    def _place_near(self, node: NodeId, peer: Peer) -> bool:
        self.near = [entry for entry in self.near if entry[1] != node]
        if peer.delay_us == _UNMEASURED:
            return False
        insort(self.near, (peer.delay_us, node))
        placed = True
        if len(self.near) > self.settings.neighbours:
            far = self.near.pop()[1]
            placed = far != node
            self._displace(far)
        return placed

    def _displace(self, node: NodeId) -> None:
        """It lost one place; without any other it is forgotten."""
        leaves = any(entry[1] == node for entry in (*self.clockwise, *self.counter, *self.near))
        if not leaves and self.table.get(self._slot(number(node))) != node:
            self.peers.pop(node, None)

    def _join_through(self, contact: NodeId) -> None:
        self.joining.add(contact)
        self._send(contact, Join(self.me, 0, contact))

    def _lose(self, node: NodeId) -> None:
        if node in self.contacts:
            self.joining.add(node)  # it may have only been silent, and those behind it with it
        if self.peers.pop(node, None) is None:
            return
        was_leaf = node in self._leaf_nodes()
        self.clockwise = [entry for entry in self.clockwise if entry[1] != node]
        self.counter = [entry for entry in self.counter if entry[1] != node]
        self._leaves = None
        self.near = [entry for entry in self.near if entry[1] != node]
        slot = self._slot(number(node))
        if self.table.get(slot) == node:
            del self.table[slot]
            self._ask_row(slot[0])
        if was_leaf:
            # Those who are left may be leaves on this side now, and their leaves too.
            for other, peer in list(self.peers.items()):
                if self._place(other, peer):
                    self.peers[other] = peer
            for side in (self.clockwise, self.counter):
                if side:
                    self._probe(side[-1][1], fresh=True)

    def _ask_row(self, row: int) -> None:
        others = [node for (at, _, _), node in sorted(self.table.items()) if at >= row]
        for node in others[:2]:
            self._send(node, Row(row))

    def _next_in_turn(self) -> list[NodeId]:
        """Everybody who is no leaf is probed too, a few at each heartbeat."""
        nodes = sorted(self.peers)
        count = -(-len(nodes) // TURN_HEARTBEATS)
        self.turn = 0 if self.turn >= len(nodes) else self.turn
        chosen = nodes[self.turn : self.turn + count]
        self.turn += count
        return chosen

    def _exchange_row(self, draw: int) -> None:
        """One node of the table, another one each time, is asked for the row that it stands in."""
        slots = sorted(self.table)
        if slots:
            slot = slots[draw % len(slots)]
            self._send(self.table[slot], Row(slot[0]))

    # Messages

    def _on_join(self, sender: NodeId, message: Join) -> None:
        del sender
        _check_ids((message.newcomer, message.through))
        if message.newcomer == self.me or not 0 <= message.hops <= MAX_HOPS:
            return
        goal = number(message.newcomer)
        row = self._shared_digits(goal)
        following = self._route_newcomer(message.newcomer)
        nodes = {self.me, *(node for (at, _, _), node in self.table.items() if at <= row)}
        if message.hops == 0:
            nodes |= {node for _, node in self.near}
        if following is None:
            nodes |= set(self._leaf_nodes())
        shared = tuple(sorted(nodes - {message.newcomer}))[:MAX_SHARED]
        self._send(message.newcomer, Share(shared, message.through if following is None else b""))
        if following is not None:
            self._send(following, replace(message, hops=message.hops + 1))

    def _route_newcomer(self, newcomer: NodeId) -> NodeId | None:
        """It may be known here from an earlier time: it is not asked to find itself."""
        following = self.route(newcomer)
        if following != newcomer:
            return following
        goal = number(newcomer)
        others = [node for node in (self.me, *self._leaf_nodes()) if node != newcomer]
        closest = min(others, key=lambda node: _rank(node, goal))
        return None if closest == self.me else closest

    def _on_share(self, sender: NodeId, message: Share) -> None:
        _check_ids(message.nodes)
        self._learn(sender)
        if message.joined in self.joining:
            self.joining.discard(message.joined)
            for node in sorted(self.peers):
                self._probe(node, fresh=True)  # who spoke on the way does not know us yet
        self._hear_of(message.nodes)

    def _on_probe(self, sender: NodeId, message: Probe) -> None:
        _check_ids(message.leaves)
        self._learn(sender)
        self._hear_of(message.leaves)
        # Who asks and has no place here may still want to know whom we rely on.
        self._send(sender, Alive(message.sent_us, self._news_for(sender)))

    def _on_alive(self, sender: NodeId, message: Alive) -> None:
        _check_ids(message.leaves)
        delay_us = self.now_us - message.sent_us
        if delay_us < 0:
            raise PeerError(f"a probe is answered that was sent {-delay_us} us from now")
        self._learn(sender, delay_us)
        self._hear_of(message.leaves)

    def _on_leaving(self, sender: NodeId, message: Leaving) -> None:
        _check_ids(message.leaves)
        self._lose(sender)
        self._hear_of(message.leaves)

    def _on_row(self, sender: NodeId, message: Row) -> None:
        nodes = sorted(node for (at, _, _), node in self.table.items() if at == message.row)
        self._send(sender, Share(tuple(nodes)[:MAX_SHARED]))

    # One step

    def _start(self, now_us: int) -> None:
        self.now_us = now_us
        self.heartbeat_at = now_us + self.settings.heartbeat_us
        self.rows_at = now_us + self.settings.rows_us

    def _send(self, to: NodeId, message: Message) -> None:
        self.outputs.append(Send(to, message))

    def _probe(self, node: NodeId, *, fresh: bool = False) -> None:
        peer = self.peers.get(node)
        if peer is not None:
            if fresh:
                peer.version = 0
            if peer.asked_us is None:
                peer.asked_us = self.now_us
        self._send(node, Probe(self.now_us, self._news_for(node)))

    def _news_for(self, node: NodeId) -> tuple[NodeId, ...]:
        peer = self.peers.get(node)
        if peer is not None:
            if peer.version == self.version:
                return ()
            peer.version = self.version
        return self._leaf_nodes()

    def _end(self) -> None:
        leaves = frozenset(self._leaf_nodes())
        if leaves != self.announced:
            self.version += 1
            came, went = tuple(sorted(leaves - self.announced)), tuple(sorted(self.announced - leaves))
            self.announced = leaves
            self.outputs.append(Changed(came, went))


def _rank(node: NodeId, goal: int) -> tuple[int, NodeId]:
    return (distance(number(node), goal), node)


def _check_ids(nodes: Iterable[NodeId]) -> None:
    count = 0
    for node in nodes:
        count += 1
        if len(node) != ID_BYTES:
            raise PeerError(f"a node id has {ID_BYTES} bytes, not {len(node)}")
    if count > MAX_SHARED:
        raise PeerError(f"{count} nodes in one message, over {MAX_SHARED}")


_HANDLERS: Final[dict[type, Callable[[Any, NodeId, Any], None]]] = {
    Join: Pastry._on_join,
    Share: Pastry._on_share,
    Probe: Pastry._on_probe,
    Alive: Pastry._on_alive,
    Leaving: Pastry._on_leaving,
    Row: Pastry._on_row,
}
