"""The broker core: hands what a driver brings to the rooms; it decides nothing itself.

A driver hands over everything that came in one turn of its loop, in one call. Publish frames of a turn
become one batch, whatever connections they came from: that is how batches form, without a timer. An idle
broker answers at once, a busy one in larger batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from postroad import kernel
from postroad.broker.rooms import Rooms, Start
from postroad.clients.hops import Hops
from postroad.config import BrokerConfig
from postroad.delays import Delays
from postroad.discovery.envelopes import Sealer
from postroad.errors import BugError, PeerError, UnavailableError
from postroad.events.batch import EventBatch
from postroad.ids import Identity, is_volatile
from postroad.links.connection import SHUTTING_DOWN
from postroad.overlay.topology import MAX_NEIGHBOURS
from postroad.seam.datagrams import Datagram
from postroad.seam.effects import Effect
from postroad.seam.inputs import Closed, DialFailed, Input, Opened, Received, Sample
from postroad.seam.levels import Level
from postroad.seam.peers import Peer
from postroad.seam.storage import StorageInput, Stored
from postroad.seam.switchboard import Asking, Room, Switchboard
from postroad.seam.tracking import FiltersRead, NotKept
from postroad.seam.turn import Turn, Unanswered
from postroad.tracking.strategies import Tracking
from postroad.units import SECOND_US
from postroad.wire import bounds
from postroad.wire.datagrams import datagram_kind
from postroad.wire.frames import (
    BATCH_KINDS,
    CREDITED_KINDS,
    Credit,
    Kind,
    Message,
    Pong,
    cut_lists,
    decode,
    frame_kind,
)

COUNTERS: Final = (
    "bytes_in_total",
    "frames_in_total",
    "refused_frames_total",
    "refused_datagrams_total",
    "turns_total",
)


class Broker:
    """One broker, without its sockets and its clock."""

    def __init__(
        self,
        config: BrokerConfig,
        identity: Identity,
        *,
        draw: Callable[[int], int],
        now_us: int,
        tracking: Tracking | None = None,
        stored: Stored | None = None,
        sealer: Sealer | None = None,
    ) -> None:
        self._config = config
        self.identity = identity
        self._started_us = now_us
        self._peers: dict[int, Peer] = {}  # connections that are up
        self._unanswered = Unanswered()
        self._counters = dict.fromkeys(COUNTERS, 0)
        # Plain events leave no room anything to do at the end of a turn, but for routing if a neighbour sent
        # them, and messages of queues only their own room: a turn of nothing else goes without `_upkeep`
        # until its time comes.
        self._stirred = True  # something else happened in the turn under way
        self._concerned: dict[Room, None] = {}  # rooms that something in the turn under way concerns alone
        self._learned = False  # a neighbour sent events in the turn under way
        self._upkeep_us = self._turn_us = now_us
        self._draining = False
        self._hops = Hops() if config.hops else None
        self._board = Switchboard(stored)
        self._rooms = Rooms(
            Start(
                board=self._board,
                config=config,
                identity=identity,
                draw=draw,
                now_us=now_us,
                tracking=tracking,
                streams=None if stored is None else stored.streams,
                refuse=self._refuse,
                sealer=sealer,
            )
        )
        self._unanswered.tables = self._board.named_tables
        self._handlers = {
            "client": self._board.clients,
            "broker": self._board.brokers,
            "direct": self._board.direct,
        }
        self._board.report("status", self._status)
        self._board.metrics(self._metrics)
        if self._hops is not None:
            self._board.metrics(self._hops.metrics)

    @property
    def tracking(self) -> Tracking | None:
        return self._rooms.tracking

    # ---- the driver's side

    def handle(self, inputs: Iterable[Input], now_us: int) -> list[Effect]:
        """Everything that happened since the last call; returns what to do."""
        turn = Turn(now_us, self._unanswered)
        rooms, tracking = self._rooms, self._rooms.tracking
        self._counters["turns_total"] += 1
        self._turn_us = now_us
        while self._board.starting:
            self._board.starting.pop(0)(turn)
        item: Input | None = None
        for item in inputs:
            if type(item) is Received:
                self._received(turn, item.connection, item.frame)
            elif type(item) is Datagram:
                self._on_datagram(turn, item)
            elif type(item) is Sample:
                for sampled in self._board.sampled:
                    sampled(turn, item)
            elif isinstance(item, StorageInput | FiltersRead):
                self._handled(turn, partial(self._unanswered.answer, turn, item))
            else:
                self._stirred = True
                self._happened(turn, item)
        # A sample comes first, or alone: nobody waits for what a turn does with it.
        turn.busy = item is not None and type(item) is not Sample
        rooms.intake.tick(turn)
        self._stirred |= turn.catch_up()
        noted = 0 if tracking is None else len(tracking.noted)
        awake = self._stirred or turn.stirs or now_us >= self._upkeep_us
        if awake:
            for room in rooms.in_order:
                room.tick(turn)
        else:
            if self._learned:
                rooms.routing.tick(turn)
                self._look_at_deadlines(rooms.learning)
            for room in self._concerned:
                room.tick(turn)
            self._look_at_deadlines(self._concerned)
            if turn.stirs:
                self._upkeep_us = self._upkeep_deadline()
        self._concerned.clear()
        if tracking is not None and (self._stirred or self._learned or len(tracking.noted) > noted):
            tracking.record()  # some of it may be of another time, which must be known soon
        self._learned = False
        kept = rooms.tracer.tick(turn)
        if awake or kept:
            rooms.history.tick(turn)
            self._stirred, self._upkeep_us = False, self._upkeep_deadline()
        return turn.effects

    def _handled(self, turn: Turn, handle: Callable[[], None]) -> None:
        handle()
        room, turn.concerns = turn.concerns, None
        if room is None:
            self._stirred = True
        else:
            self._concerned[room] = None

    def _happened(self, turn: Turn, item: Input) -> None:
        """Anything but a frame or an answer of the disk."""
        links = self._rooms.links
        if type(item) is Opened:
            links.opened(
                turn,
                item.connection,
                dialled=item.dialled,
                certificate=item.certificate,
                loopback=item.loopback,
                host=item.host,
            )
        elif type(item) is Closed:
            lost = links.peer(item.connection) is not None  # nobody has said goodbye
            links.closed(turn, item.connection)
            self._down(turn, item.connection, lost=lost)
        elif type(item) is DialFailed:
            links.dial_failed(turn, item.address)
        elif type(item) is NotKept:
            for handler in self._board.losing:
                handler(turn, item)

    def _look_at_deadlines(self, rooms: Iterable[Room]) -> None:
        for room in rooms:
            due_us = room.next_deadline()
            if due_us is not None and due_us < self._upkeep_us:
                self._upkeep_us = due_us

    def _upkeep_deadline(self) -> int:
        deadlines = [room.next_deadline() for room in (*self._rooms.in_order, self._rooms.history)]
        return min(deadline for deadline in deadlines if deadline is not None)

    def next_deadline(self) -> int:
        if self._unanswered.later:
            return self._turn_us
        deadline_us = self._rooms.tracer.next_deadline()
        return self._upkeep_us if deadline_us is None else min(self._upkeep_us, deadline_us)

    def reload(self, config: BrokerConfig, sealer: Sealer | None, now_us: int) -> list[Effect]:
        """Access rules, tokens and certificates hold from now on as `config` and `sealer` say them; nothing
        else of `config` is looked at."""
        turn = Turn(now_us, self._unanswered)
        self._rooms.links.reload(turn, config.auth, config.links.token)
        self._rooms.discovery.reload(config.auth, config.discovery.token, config.links.token, sealer)
        self._stirred = True
        return turn.effects + self.handle([], now_us)

    def drain(self, now_us: int) -> list[Effect]:
        """No client is taken any more, and those that are here go on elsewhere; `drained` says when that is
        done. `shutdown` follows."""
        turn = Turn(now_us, self._unanswered)
        self._rooms.drain(turn)
        self._draining = self._stirred = True
        return turn.effects + self.handle([], now_us)

    def drained(self, now_us: int) -> bool:
        return self._rooms.departing.done(now_us)

    def shutdown(self, now_us: int) -> list[Effect]:
        """Save what waits for it and say goodbye to everyone."""
        effects = self.handle([], now_us)
        turn = Turn(now_us, self._unanswered)
        self._rooms.close(turn)
        for connection, peer in self._peers.items():
            if peer.role == "client":
                self._rooms.departing.send_on(turn, connection)
            else:
                self._rooms.links.refuse(turn, connection, UnavailableError(SHUTTING_DOWN))
        return effects + turn.effects

    # ---- connections

    def _received(self, turn: Turn, connection: int, frame: bytes) -> None:
        self._counters["frames_in_total"] += 1
        self._counters["bytes_in_total"] += len(frame)
        try:
            kind = frame_kind(frame)
            if not self._rooms.links.admit(connection, kind, len(frame), turn.now_us):
                return
            if self._draining and not self._rooms.departing.takes(connection, kind):
                return
            if kind in BATCH_KINDS:
                self._on_batch(turn, self._peers[connection], frame)
            else:
                self._on_message(turn, connection, decode(frame))
                if kind in CREDITED_KINDS:
                    self._rooms.links.consumed(turn, connection, len(frame))
        except PeerError as error:
            self._refuse(turn, connection, error)

    def _on_message(self, turn: Turn, connection: int, message: Message) -> None:
        bounds.check(message)
        arrived, consumed = self._rooms.links.received(turn, connection, message)
        if isinstance(message, Pong):  # who publishes durably shows with it what it has heard
            self._stirred |= self._rooms.durable.heard(connection, message.time_us)
        if consumed and arrived is None and not isinstance(message, Credit):
            return  # nobody else needs to know of pings
        if arrived is not None:
            self._stirred = True
            self._up(turn, arrived)
        elif isinstance(message, Credit):
            self._stirred = True
            self._on_credit(turn, connection)
        else:
            peer = self._peers[connection]
            handler = self._handlers[peer.role].get(type(message))
            if handler is None:
                raise BugError(f"{type(message).__name__} from a {peer.role} has no handler")
            self._handled(turn, partial(handler, turn, peer, message))

    def _refuse(self, turn: Turn, connection: int, error: PeerError) -> None:
        """The peer broke the protocol: it is told why and closed, and nothing else of it counts."""
        self._stirred, turn.concerns = True, None
        self._counters["refused_frames_total"] += 1
        self._rooms.links.refuse(turn, connection, error)

    def _up(self, turn: Turn, peer: Peer) -> None:
        if peer.replaces is not None:
            self._down(turn, peer.replaces)
        if peer.role == "broker":
            flooding = self._rooms.flooding
            if peer.broker in flooding:
                # Link state would have said so at the handshake, had the other one been heard of by then.
                error = PeerError(f"broker number {peer.broker:08x} is linked already")
                self._refuse(turn, peer.connection, error)
                return
            if len(flooding) >= MAX_NEIGHBOURS:
                full = UnavailableError(f"a broker has at most {MAX_NEIGHBOURS} links")
                self._rooms.links.refuse(turn, peer.connection, full)
                return
        self._peers[peer.connection] = peer
        for handler in self._board.came_up[peer.role]:
            handler(turn, peer)

    def _down(self, turn: Turn, connection: int, *, lost: bool = False) -> None:
        peer = self._peers.pop(connection, None)
        if peer is None:
            return
        for handler in self._board.went_down[peer.role]:
            handler(turn, peer)
        if peer.role == "broker":
            text = f"the link with broker {peer.name!r} is {'lost' if lost else 'down'}"
            turn.note("warning" if lost else "info", text)

    def _on_credit(self, turn: Turn, connection: int) -> None:
        peer = self._peers.get(connection)
        if peer is not None and peer.role == "broker":
            self._rooms.routing.credit(turn, peer.broker)
        elif peer is not None and peer.role == "client":
            self._rooms.delivery.credit(turn, connection)
            if self._rooms.subscribers is not None:
                self._rooms.subscribers.credit(turn, connection)
        elif peer is not None:
            self._rooms.direct.credit(turn, peer.broker)

    # ---- events

    def _on_batch(self, turn: Turn, peer: Peer, frame: bytes) -> None:
        batch = EventBatch.parse(frame, peer.limits)
        if self._hops is not None:
            self._hops.frame(turn, peer, batch, published=peer.role == "client")
        if frame_kind(frame) == Kind.PUBLISH:
            self._stirred |= batch.durable
            self._rooms.intake.add(peer.connection, batch)
        elif frame_kind(frame) == Kind.BEST_EFFORT:
            self._handled(turn, partial(self._rooms.besteffort.frame, turn, peer, batch))
            self._rooms.links.consumed(turn, peer.connection, len(frame))
        else:
            self._learned = True
            self._stirred |= not is_volatile(batch.pubend)
            self._rooms.routing.knowledge(turn, peer.broker, batch)
            self._rooms.links.consumed(turn, peer.connection, len(frame))

    def _on_datagram(self, turn: Turn, datagram: Datagram) -> None:
        """Anybody can send one. What no room handles costs no more than this look."""
        handler = self._board.datagrams.get(datagram_kind(datagram.data))
        if handler is None:
            return
        try:
            self._handled(turn, partial(handler, turn, datagram))
        except PeerError:
            self._stirred, turn.concerns = True, None
            # Its source may be forged: nobody is told, and a log that strangers fill helps nobody.
            self._counters["refused_datagrams_total"] += 1

    # ---- inspection

    def _status(self, asking: Asking) -> dict[str, object]:
        asker = None if self._rooms.links.access.may_admin(asking.principal) else asking.principal
        return cut_lists(self.status(asking.now_us, asker), asking.most_bytes)

    def status(self, now_us: int, asker: str | None = None) -> dict[str, object]:
        """What `postroad status` shows; fit for JSON. `asker`: a principal that sees what it may read."""
        return {
            **dict(self._config.about),
            "name": self.identity.name,
            "number": f"{self.identity.number:08x}",
            "boot": self.identity.boot,
            "uptime_s": (now_us - self._started_us) // SECOND_US,
            "kernel": "compiled" if kernel.COMPILED else "reference",
            **{key: fact(now_us, asker) for key, fact in self._board.facts.items()},
            "metrics": self.metrics(),
        }

    def _metrics(self) -> dict[str, int | float]:
        return {
            **self._counters,
            "clients": sum(peer.role == "client" for peer in self._peers.values()),
            "uptime_started_seconds": self._started_us / SECOND_US,
            "kernel_compiled": int(kernel.COMPILED),
        }

    def metrics(self) -> dict[str, int | float]:
        figures: dict[str, int | float] = {}
        for source in self._board.figures:
            figures |= source()
        return figures

    def levels(self, now_us: int) -> list[Level]:
        return [level for source in self._board.levelled for level in source(now_us)]

    def delays(self) -> list[Delays]:
        return [self._rooms.links.round_trips, *self._rooms.routing.delays.values()]

    def check(self) -> None:
        """BugError unless every room's invariants hold, and those between them."""
        rooms = self._rooms
        for room in rooms.in_order:
            room.check()
        for check in (
            rooms.delivery.check,
            rooms.intake.check,
            rooms.quotas.check,
            rooms.tracer.check,
            rooms.history.check,
        ):
            check()
        if self._upkeep_us > self._upkeep_deadline():
            raise BugError("a room has a deadline before the one that is kept")
        linked = {peer.broker: number for number, peer in self._peers.items() if peer.role == "broker"}
        if linked != self._rooms.flooding.neighbours:
            raise BugError("the links by number are not those that are up")
