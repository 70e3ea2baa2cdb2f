"""Best-effort events: forwarded along the origin's tree, dropped where there is no room (spec B1, paper
2.1).

An event comes from a client or from the parent in its origin's tree, and goes to local subscribers and to
each child behind which somebody wants it, by the same interest and the same trees as any other event. There
is no log, no acknowledgement, no order and no second try. Brokers know nothing of repair: its messages are
such events, too.

Events travel as datagrams where these pass in both directions, which greetings find out
(`links.greetings`). Where they do not pass, the same frame goes over the connection while that has credit,
and is dropped when it has none. A client that wants datagrams greets.

What comes in is limited per client, because one datagram may become many. What carries no valid code gets no
answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from postroad.besteffort.ledger import Ledger
from postroad.besteffort.settings import BestEffortConfig
from postroad.clients.publishing import Publishers
from postroad.errors import BugError, DeniedError, PeerError
from postroad.events.batch import MAX_ROWS_BYTES, EventBatch, frame_ids
from postroad.events.carried import REPAIR_TOPICS, carried_topic
from postroad.events.topics import RESERVED
from postroad.kernel.layout import EVENT_HEADER_BYTES, ID_BYTES
from postroad.links.greetings import DatagramPath
from postroad.links.links import Links
from postroad.overlay.interest import Interest
from postroad.overlay.topology import Topology
from postroad.seam.datagrams import Datagram
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.selectors import Group
from postroad.streams.delivery import Delivery
from postroad.streams.feeding import rows_for
from postroad.tracking.strategies import Tracking
from postroad.units import SECOND_US
from postroad.wire.datagrams import (
    BEST_EFFORT,
    GREETING,
    MAX_BEST_EFFORT_BYTES,
    SESSION_BYTES,
    session_of,
)
from postroad.wire.frames import Kind, Rejected, encode

MAX_HOPS: Final = 64  # between brokers, where views of the graph differ for a moment
MAX_NAMED: Final = 100  # peers in the status
MAX_REFUSED: Final = 256  # events that one REJECTED names
COUNTERS: Final = (
    "best_effort_published_total",
    "best_effort_received_total",
    "best_effort_delivered_total",
    "best_effort_forwarded_total",
    "best_effort_dropped_total",
    "best_effort_refused_total",
    "best_effort_limited_total",
)


@dataclass(slots=True)
class _Path:
    """The way to one peer."""

    peer: Peer
    datagrams: DatagramPath
    allowance: float  # clients: bytes it may send now
    allowed_us: int


class Forwarding:
    def __init__(
        self,
        board: Switchboard,
        *,
        me: int,
        config: BestEffortConfig,
        topology: Topology,
        interest: Interest,
        delivery: Delivery,
        links: Links,
        publishers: Publishers,
        ledger: Ledger,
        tracking: Tracking | None,
        records_forwards: bool,
    ) -> None:
        self._me = me
        self._config = config
        self._topology = topology
        self._interest = interest
        self._delivery = delivery
        self._links = links
        self._publishers = publishers
        self._ledger = ledger
        self._tracking = tracking
        self._records_forwards = records_forwards
        self._paths: dict[int, _Path] = {}  # by connection, of clients and neighbours that are up
        self._sessions: dict[bytes, _Path] = {}  # those of them with a key, by its first bytes
        self._neighbours: dict[int, _Path] = {}  # by broker
        self._counters = dict.fromkeys(COUNTERS, 0)
        board.peers("client", up=self._up, down=self._down)
        board.peers("broker", up=self._up, down=self._down)
        board.datagram(BEST_EFFORT, self._on_events)
        board.datagram(GREETING, self._on_greeting)
        board.metrics(self.metrics)
        board.status_for("best_effort", self._status)

    # ---- peers

    def _up(self, turn: Turn, peer: Peer) -> None:
        endpoint = (peer.host, peer.datagrams) if peer.host and peer.datagrams else None
        dialled = peer.dialled is not None
        datagrams = DatagramPath(peer.datagram_key, endpoint, dialled=dialled, now_us=turn.now_us)
        path = _Path(peer, datagrams, float(self._config.client_burst_bytes), turn.now_us)
        self._paths[peer.connection] = path
        if peer.datagram_key:
            self._sessions[peer.datagram_key[:SESSION_BYTES]] = path
        if peer.role == "broker":
            self._neighbours[peer.broker] = path

    def _down(self, _turn: Turn, peer: Peer) -> None:
        path = self._paths.pop(peer.connection, None)
        if path is None:
            return
        if self._sessions.get(peer.datagram_key[:SESSION_BYTES]) is path:
            del self._sessions[peer.datagram_key[:SESSION_BYTES]]
        if self._neighbours.get(peer.broker) is path:
            del self._neighbours[peer.broker]

    # ---- datagrams

    def _opened(self, turn: Turn, datagram: Datagram) -> tuple[_Path, bytes] | None:
        """Whose it is and what is in it; None if it is nobody's. A client's datagrams come from the host that
        its connection comes from: else it could have events sent to whomever it likes."""
        path = self._sessions.get(session_of(datagram.data))
        body = None
        if path is not None and (path.peer.role != "client" or datagram.source[0] == path.peer.host):
            body = path.datagrams.unseal(datagram, turn.now_us)
        if path is None or body is None:
            self._counters["best_effort_refused_total"] += 1
            return None
        return path, body

    def _on_greeting(self, turn: Turn, datagram: Datagram) -> None:
        turn.concerns = self
        opened = self._opened(turn, datagram)
        if opened is not None and opened[0].datagrams.greeted(opened[1]):
            _greet(turn, opened[0].datagrams)

    def _on_events(self, turn: Turn, datagram: Datagram) -> None:
        turn.concerns = self
        opened = self._opened(turn, datagram)
        if opened is None:
            return
        path, body = opened
        try:
            batch = EventBatch.parse(body, path.peer.limits, expect=Kind.BEST_EFFORT)
            self.frame(turn, path.peer, batch)
        except PeerError:
            # A datagram is dropped, not its connection: UDP may have damaged it beyond its own checksum.
            self._counters["best_effort_refused_total"] += 1

    # ---- events

    def frame(self, turn: Turn, peer: Peer, batch: EventBatch) -> None:
        """A checked frame, however it came. PeerError if this peer may not send it."""
        turn.concerns = self
        path = self._paths.get(peer.connection)
        if path is None or not batch.count:
            return
        if peer.role == "client":
            self._publish(turn, path, batch)
        else:
            self._route(turn, path, batch)

    def _publish(self, turn: Turn, path: _Path, batch: EventBatch) -> None:
        peer = path.peer
        if not self._within(path, len(batch.data), turn.now_us):
            self._counters["best_effort_limited_total"] += batch.count
            return
        self._publishers.check(peer, batch)
        _check_sizes(batch)
        refused = self._not_permitted(peer.connection, batch)
        if len(refused):
            self._refuse(turn, peer, batch, refused)
            if len(refused) == batch.count:
                return
            batch = batch.part(np.setdiff1d(np.arange(batch.count, dtype=np.uint32), refused))
        self._counters["best_effort_published_total"] += batch.count
        if _tracked(batch):
            self._ledger.sent(self._me, batch.count)
            if self._tracking is not None:
                self._tracking.noted.append((turn.now_us, batch.ids(), 0, ()))
        self._spread(turn, self._me, batch, MAX_HOPS)

    def _not_permitted(self, connection: int, batch: EventBatch) -> NDArray[np.uint32]:
        """The rows that this client may not publish: by their topic, or by that of the event they carry."""
        allowed = {topic: self._may_publish(connection, topic) for topic in batch.topics()}
        refused: list[int] = []
        if not all(allowed.values()) or any(topic.startswith(REPAIR_TOPICS) for topic in allowed):
            for row in range(batch.count):
                topic = batch.topic(row)
                carried = carried_topic(batch.payload(row)) if topic.startswith(REPAIR_TOPICS) else None
                if not allowed[topic] or not (carried is None or self._may_publish(connection, carried)):
                    refused.append(row)
        return np.array(refused, np.uint32)

    def _may_publish(self, connection: int, topic: str) -> bool:
        return self._links.may_publish(connection, topic) and topic.split("/", 1)[0] != RESERVED

    def _refuse(self, turn: Turn, peer: Peer, batch: EventBatch, rows: NDArray[np.uint32]) -> None:
        """A publisher forgets what was not taken, or repair would bring it all the same. Of repair messages
        nobody is told: who may only read repairs others in vain, which is no wrong."""
        self._counters["best_effort_refused_total"] += len(rows)
        events = np.array([row for row in rows if not batch.topic(row).startswith(REPAIR_TOPICS)], np.uint32)
        if not len(events):
            return
        error = DeniedError(f"{peer.principal or 'anonymous'} may not publish to {batch.topic(events[0])}")
        turn.note("warning", f"denied: {error}")
        ids = batch.ids(events)
        for at in range(0, len(ids), MAX_REFUSED * ID_BYTES):
            part = ids[at : at + MAX_REFUSED * ID_BYTES]
            rejected = Rejected(sequence=0, code=error.code, reason=str(error), ids=part)
            turn.send(peer.connection, encode(rejected))

    def _within(self, path: _Path, size: int, now_us: int) -> bool:
        passed_us = max(0, now_us - path.allowed_us)
        path.allowed_us = now_us
        earned = passed_us * self._config.client_bytes_per_s / SECOND_US
        path.allowance = min(path.allowance + earned, float(self._config.client_burst_bytes))
        if path.allowance < size:
            return False
        path.allowance -= size
        return True

    def _route(self, turn: Turn, path: _Path, batch: EventBatch) -> None:
        """From a neighbour: only from the parent, so that nothing comes twice or runs in circles for long."""
        origin, hops = batch.pubend >> 32, batch.channel
        if self._topology.parent(origin) != path.peer.broker or not 0 < hops <= MAX_HOPS:
            self._counters["best_effort_dropped_total"] += batch.count
            return
        self._counters["best_effort_received_total"] += batch.count
        self._ledger.received(path.peer.broker, batch.count)
        if self._tracking is not None and _tracked(batch):
            self._tracking.routed(origin, path.peer.broker, batch.ids(), turn.now_us)
        self._spread(turn, origin, batch, hops - 1)

    def _spread(self, turn: Turn, origin: int, batch: EventBatch, hops: int) -> None:
        tracked = self._tracking is not None and _tracked(batch)
        for rows, takers in self._delivery.takers(batch):
            names: list[str] = []
            frames: dict[int, list[bytes]] = {}  # by subscription number
            for connection, number, name in takers:
                if number not in frames:
                    frames[number] = list(_frames(batch, rows, origin, number))
                if self._send(turn, self._paths.get(connection), frames[number], len(rows)):
                    self._counters["best_effort_delivered_total"] += len(rows)
                    names.append(name)
            if tracked and names and self._tracking is not None:
                self._tracking.noted.append((turn.now_us, batch.ids(rows), origin << 32, names))
        children = self._topology.children(origin)
        if children and hops > 0:
            self._forward(turn, origin, batch, hops, self._interest.match(batch), tracked=tracked)

    def _forward(
        self, turn: Turn, origin: int, batch: EventBatch, hops: int, groups: list[Group], *, tracked: bool
    ) -> None:
        for child, owners in self._topology.children(origin).items():
            rows = rows_for(groups, owners)
            if rows is None:
                continue
            self._ledger.sent(child, len(rows))
            if tracked and self._tracking is not None:
                self._tracking.sent(origin, child, batch.ids(rows), turn.now_us)
            frames = list(_frames(batch, rows, origin, hops))
            if self._send(turn, self._neighbours.get(child), frames, len(rows)):
                self._counters["best_effort_forwarded_total"] += len(rows)
                if tracked and self._records_forwards and self._tracking is not None:
                    for frame in frames:
                        ids = frame_ids(frame, int.from_bytes(frame[8:12], "little"))
                        self._tracking.forwarded(origin, (child,), ids, turn.now_us)

    def _send(self, turn: Turn, path: _Path | None, frames: list[bytes], count: int) -> bool:
        """Whether it went out."""
        if path is not None and path.datagrams.endpoint is not None and path.datagrams.passes(turn.now_us):
            for frame in frames:
                turn.send_to(path.datagrams.endpoint, path.datagrams.seal(BEST_EFFORT, frame))
            return True
        if path is not None and self._links.available(path.peer.connection) > 0:
            for frame in frames:
                self._links.spend(path.peer.connection, len(frame))
                turn.send(path.peer.connection, frame)
            return True
        self._counters["best_effort_dropped_total"] += count
        return False

    # ---- time and inspection

    def tick(self, turn: Turn) -> None:
        for path in self._neighbours.values():
            due_us = path.datagrams.next_deadline()
            if due_us is not None and turn.now_us >= due_us:
                _greet(turn, path.datagrams)

    def next_deadline(self) -> int | None:
        dues = (path.datagrams.next_deadline() for path in self._neighbours.values())
        return min((due_us for due_us in dues if due_us is not None), default=None)

    def metrics(self) -> dict[str, int | float]:
        paths = sum(path.datagrams.heard for path in self._paths.values())
        return {**self._counters, "best_effort_paths": paths}

    def _status(self, now_us: int, asker: str | None) -> dict[str, object]:
        """A client is told the names of brokers and of its own principal's clients."""
        open_paths = (
            path
            for path in self._paths.values()
            if path.datagrams.passes(now_us)
            and (asker is None or path.peer.role == "broker" or path.peer.principal == asker)
        )
        counts = {
            name.removeprefix("best_effort_").removesuffix("_total"): count
            for name, count in self._counters.items()
        }
        names = sorted(path.peer.name for path in islice(open_paths, MAX_NAMED))
        return {"datagrams_with": names, **counts}

    def check(self) -> None:
        if any(path.peer.connection != number for number, path in self._paths.items()):
            raise BugError("a path is kept under another connection's number")
        known = set(map(id, self._paths.values()))
        if any(id(path) not in known for path in (*self._sessions.values(), *self._neighbours.values())):
            raise BugError("a session or a neighbour is kept that is down")


def _greet(turn: Turn, path: DatagramPath) -> None:
    if path.endpoint is not None:
        turn.send_to(path.endpoint, path.greeting(turn.now_us))


def _check_sizes(batch: EventBatch) -> None:
    """An event fits a repair that carries it, and whatever there is, a datagram. PeerError if not."""
    sizes = batch.offsets[1:] - batch.offsets[:-1]
    bare = sizes - batch.headers["record_length"]
    for row in np.flatnonzero(bare > MAX_BEST_EFFORT_BYTES).tolist():
        if not batch.topic(row).startswith(REPAIR_TOPICS):
            raise PeerError(f"a best-effort event of {bare[row]} bytes, the most is {MAX_BEST_EFFORT_BYTES}")
    longest = int(sizes.max()) + EVENT_HEADER_BYTES
    if longest > MAX_ROWS_BYTES:
        raise PeerError(
            f"a best-effort event of {longest} bytes with its record, the most is {MAX_ROWS_BYTES}"
        )


def _tracked(batch: EventBatch) -> bool:
    """Repair messages are not: what they carry is known by another id."""
    return not batch.topic(0).startswith(REPAIR_TOPICS)


def _frames(batch: EventBatch, rows: NDArray[np.uint32], origin: int, channel: int) -> Iterator[bytes]:
    """Frames of these rows, each of which fits a datagram."""
    offsets = batch.offsets
    sizes = (offsets[rows + 1] - offsets[rows] + EVENT_HEADER_BYTES).tolist()
    first = size = 0
    for at, more in enumerate(sizes):
        if at > first and size + more > MAX_ROWS_BYTES:
            yield _frame(batch, rows[first:at], origin, channel)
            first, size = at, 0
        size += more
    yield _frame(batch, rows[first:], origin, channel)


def _frame(batch: EventBatch, rows: NDArray[np.uint32], origin: int, channel: int) -> bytes:
    whole = None if len(rows) == batch.count else rows
    return batch.select(whole, kind=Kind.BEST_EFFORT, pubend=origin << 32, start=0, end=0, channel=channel)
