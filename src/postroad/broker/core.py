"""The broker core: composes the rooms and routes inputs to them; it decides nothing itself.

A driver hands over everything that came in one turn of its loop, in one call. Publish frames of a turn
become one batch, whatever connections they came from: that is how batches form, without a timer. An idle
broker answers at once, a busy one in larger batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Final

from postroad import kernel
from postroad.clients.intake import Intake
from postroad.clients.publishing import FILTERS_PUBLISHER, Publishers, Receipts
from postroad.clients.requests import Requests
from postroad.clients.subscribing import Subscribing
from postroad.clocks import SkewCheck
from postroad.config import BrokerConfig, Identity
from postroad.delays import Delays
from postroad.durable.publisher.pubend import DurablePubend
from postroad.durable.publisher.publishing import DurablePublishing, PubendRoom
from postroad.durable.publisher.release import TABLE as OWNERS
from postroad.durable.publisher.release import RetentionPolicy
from postroad.durable.publisher.releasing import Releasing
from postroad.durable.retiring import TABLE as RETIRED_TABLE
from postroad.durable.retiring import Retiring
from postroad.durable.subscriber.moving import know_nothing
from postroad.durable.subscriber.subscribers import DurableHosting
from postroad.errors import BugError, PeerError, UnavailableError
from postroad.events.batch import EventBatch
from postroad.history.bulletin_writer import Press
from postroad.history.bulletins import Author
from postroad.history.history import TABLE as HISTORY_TABLE
from postroad.history.history import History, Sources
from postroad.ids import is_history, is_volatile
from postroad.links.connection import SHUTTING_DOWN
from postroad.links.links import Links, Peer
from postroad.overlay.flooding import Flooding
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.interest import Interest
from postroad.overlay.topology import MAX_NEIGHBOURS, Topology
from postroad.seam.datagrams import Datagram
from postroad.seam.effects import Effect, Note
from postroad.seam.inputs import Closed, DialFailed, Input, Opened, Received, Sample
from postroad.seam.storage import AppendFailed, Save, SaveFailed, StorageInput, Stored
from postroad.seam.tracking import FiltersRead, NotKept
from postroad.streams.delivery import Delivery
from postroad.streams.ends import TABLE as ENDS_TABLE
from postroad.streams.routing import Routing
from postroad.tracking.strategies import NoTracking, Tracking
from postroad.tracking.tracer import Tracer
from postroad.units import SECOND_US
from postroad.wire.frames import (
    BATCH_KINDS,
    Ack,
    Answer,
    Attach,
    Credit,
    Detach,
    Kind,
    Message,
    Nack,
    Pong,
    Query,
    Release,
    Request,
    Silence,
    Stamp,
    Subscribe,
    Unsubscribe,
    decode,
    frame_kind,
)

__all__ = ["Broker", "Closed", "DialFailed", "Input", "Opened", "Received"]

MAX_STATUS_ROWS: Final = 1_000
SET_BACK: Final = (
    "others know this broker from a start of which its data folder knows nothing, so that is of a backup:"
    " what it did since then is lost"
)
COUNTERS: Final = ("bytes_in_total", "frames_in_total", "refused_frames_total", "turns_total")


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
    ) -> None:
        self._config = config
        self.identity = identity
        self._started_us = now_us
        self._now_us = now_us  # of the turn under way
        self._out: list[Effect] = []  # of that turn; the rooms that write to it hold this very list
        self._peers: dict[int, Peer] = {}  # connections that are up
        self._tags = count(1)  # of what is asked of the storage
        self._counters = dict.fromkeys(COUNTERS, 0)
        # Plain events leave no room anything to do at the end of a turn, but for routing if a neighbour sent
        # them: a turn of nothing else goes without `_upkeep` until its time comes.
        self._stirred = True  # something else happened in the turn under way
        self._learned = False  # a neighbour sent events in the turn under way
        self._upkeep_us = now_us
        me = identity.number
        tables = {} if stored is None else stored.tables
        self._publishers = Publishers(identity)
        self._topology = Topology(
            me=me,
            node=identity.node,
            name=identity.name,
            boot=identity.boot,
            before=identity.before,
            address=config.links.address,
        )
        self._links = self._make_links(draw)
        for address in config.dial:
            self._links.dial(address, now_us)
        self._interest = Interest(me, identity.boot, config.limits)
        self._flooding = Flooding(
            topology=self._topology,
            interest=self._interest,
            interest_changed=lambda: self._routing.interest_changed(),
            out=self._out,
        )
        self._inquiries = Inquiries(me=me, topology=self._topology, link=self._flooding.connection)
        self._tracer = Tracer(
            tracking or NoTracking(), me=me, topology=self._topology, inquiries=self._inquiries
        )
        self._delivery = Delivery(
            config.delivery,
            available=self._links.available,
            spend=self._links.spend,
            note=None if tracking is None else tracking.noted.append,
        )
        self._routing = self._make_routing(tables.get(ENDS_TABLE, {}), tracked=tracking is not None)
        self._topology.set_pubends((self._routing.pubend.id,), now_us)
        receipts = Receipts()
        self._durable = self._make_durable(stored, receipts)
        self._intake = self._make_intake(receipts, tracked=tracking is not None)
        self._releasing = self._make_releasing(tables.get(OWNERS, {}))
        self._history = self._make_history(tables.get(HISTORY_TABLE, {}))
        # Durable subscribers, where there is a disk.
        self._host = None if stored is None else self._make_host(stored, tracked=tracking is not None)
        if self._host is None:
            know_nothing(self._inquiries)
        self._subscribing = Subscribing(
            limits=config.limits,
            links=self._links,
            delivery=self._delivery,
            interest=self._interest,
            flooding=self._flooding,
            routing=self._routing,
            host=self._host,
            tracking=self._tracer.tracking,
            out=self._out,
        )
        self._retiring = Retiring(
            me=me,
            topology=self._topology,
            inquiries=self._inquiries,
            forget=self._retire,
            restored=self._restored,
            rows=tables.get(RETIRED_TABLE, {}),
            new_tag=None if stored is None else self._new_tag,
        )
        self._requests = Requests(
            me=me,
            topology=self._topology,
            inquiries=self._inquiries,
            history=self._history,
            links=self._links,
            routing=self._routing,
            durable=self._durable,
            tracer=self._tracer,
            retiring=self._retiring,
            host=self._host,
            status=self.status,
            out=self._out,
        )

    # ---- the rooms, each made once, in this order

    def _new_tag(self) -> int:
        return next(self._tags)

    def _make_links(self, draw: Callable[[int], int]) -> Links:
        return Links(
            me=self.identity,
            limits=self._config.limits,
            settings=self._config.links,
            auth=self._config.auth,
            new_publisher=self._publishers.new_number,
            new_key=lambda: draw(1 << 128).to_bytes(16, "big"),
            draw=draw,
            conflict=self._topology.conflict,
        )

    def _make_routing(self, ends: Mapping[bytes, bytes], *, tracked: bool) -> Routing:
        return Routing(
            me=self.identity.number,
            boot=self.identity.boot,
            config=self._config.streams,
            topology=self._topology,
            interest=self._interest,
            delivery=self._delivery,
            links=self._links,
            tracking=self._tracer.tracking,
            forwarded=self._forwarded if tracked and self._config.tracking.routing != "all" else None,
            confirmed=lambda key, missing: self._subscribing.confirmed(key, missing),
            held=lambda pubend: self._releasing.held(pubend),
            owing=lambda pubend: is_history(pubend) and self._history.owing,
            ends=ends,
            now_us=self._now_us,
        )

    def _make_durable(self, stored: Stored | None, receipts: Receipts) -> DurablePublishing:
        return DurablePublishing(
            me=self.identity.number,
            pubends=self._config.durable.pubends,
            cache_bytes=self._config.durable.cache_bytes,
            max_bytes=self._config.durable.max_bytes,
            limits=self._config.limits,
            stored=stored,
            links=self._links,
            receipts=receipts,
            room=PubendRoom(
                opened=self._opened_pubend,
                recovered=lambda batch: self._tracer.tracking.published(batch.ids(), self._now_us),
                all_recovered=lambda: self._tracer.tracking.recorded_again(self._now_us),
                spread=lambda pubend, segment: self._intake.spread(pubend, segment, self._now_us),
                answered=self._routing.log_read,
            ),
            again=self._tracer.tracking.unrecorded_us,
            new_tag=self._new_tag,
            now_us=self._now_us,
        )

    def _make_intake(self, receipts: Receipts, *, tracked: bool) -> Intake:
        skew_us = self._config.tracking.skew_us
        return Intake(
            limits=self._config.limits,
            publishers=self._publishers,
            receipts=receipts,
            links=self._links,
            routing=self._routing,
            durable=self._durable,
            tracking=self._tracer.tracking,
            clocks=SkewCheck(skew_us, me=self.identity.number) if tracked else None,
            refuse=self._refuse,
            out=self._out,
        )

    def _make_releasing(self, rows: Mapping[bytes, bytes]) -> Releasing:
        durable = self._config.durable
        return Releasing(
            me=self.identity.number,
            policy=RetentionPolicy(
                max_retain_us=durable.max_age_us, max_bytes=durable.max_bytes, grace_us=durable.keep_us
            ),
            topology=self._topology,
            link=self._flooding.connection,
            mine=self._durable.pubends,
            rows=rows,
            new_tag=self._new_tag,
            now_us=self._now_us,
        )

    def _make_history(self, rows: Mapping[bytes, bytes]) -> History:
        sources = Sources(
            wants=self._interest.wants,
            changes=lambda: self._interest.reserved_changes,
            links=lambda: self._topology.own_links,
            acknowledged=lambda: () if self._host is None else self._host.acknowledged(),
        )
        return History(
            author=Author(broker=self.identity.number, name=self.identity.name),
            boot=self.identity.boot,
            publisher=self._publishers.own_number,
            filters_publisher=FILTERS_PUBLISHER,
            sources=sources,
            tracking=self._tracer.tracking,
            config=self._config.tracking,
            press=Press(self._durable, self._config.limits),
            rows=rows,
            new_tag=self._new_tag,
            now_us=self._now_us,
        )

    def _make_host(self, stored: Stored, *, tracked: bool) -> DurableHosting:
        return DurableHosting(
            me=self.identity.number,
            boot=self.identity.boot,
            stored=stored,
            links=self._links,
            interest=self._interest,
            routing=self._routing,
            flood=self._flooding.interest,
            inquiries=self._inquiries,
            topology=self._topology,
            retired=lambda broker: self._retiring.gone(broker),
            tracking=self._tracer.tracking if tracked else None,
            report=self._releasing.report,
            sent=lambda receivers, message: self._history.sent(receivers, message, self._now_us),
            new_tag=self._new_tag,
            now_us=self._now_us,
        )

    # ---- the driver's side

    def handle(self, inputs: Sequence[Input], now_us: int) -> list[Effect]:
        """Everything that happened since the last call; returns what to do."""
        self._counters["turns_total"] += 1
        self._now_us = self._delivery.now_us = now_us
        if self._host is not None:
            self._host.now_us = now_us
        for item in inputs:
            if type(item) is Received:
                self._received(item.connection, item.frame, now_us)
            elif type(item) is not Datagram and type(item) is not Sample:  # no room takes these yet
                self._stirred = True
                self._happened(item, now_us)
        self._intake.settle(now_us)
        noted = len(self._tracer.tracking.noted)
        awake = self._stirred or now_us >= self._upkeep_us
        if awake:
            self._upkeep(now_us)
        elif self._learned:
            self._out += self._routing.settle(now_us)
            due_us = None if self._host is None else self._host.next_deadline()
            self._upkeep_us = min(self._upkeep_us, self._routing.next_deadline(), due_us or self._upkeep_us)
        if self._stirred or self._learned or len(self._tracer.tracking.noted) > noted:
            self._tracer.tracking.record()  # some of it may be of another time, which must be known soon
        self._learned = False
        busy = bool(inputs) and type(inputs[-1]) is not Sample  # which is the first, or alone
        kept = self._tracer.tick(now_us, busy=busy)
        if awake or kept:
            self._out += kept
            self._out += self._history.tick(kept, now_us)
            self._stirred, self._upkeep_us = False, self._upkeep_deadline()
        out = self._out[:]
        self._out.clear()
        return out

    def _happened(self, item: Input, now_us: int) -> None:
        """Anything but a frame."""
        if type(item) is Opened:
            self._out += self._links.opened(
                item.connection,
                dialled=item.dialled,
                certificate=item.certificate,
                loopback=item.loopback,
                now_us=now_us,
            )
        elif type(item) is Closed:
            lost = self._links.peer(item.connection) is not None  # nobody has said goodbye
            self._links.closed(item.connection, now_us)
            self._down(item.connection, now_us, lost=lost)
        elif type(item) is DialFailed:
            self._links.dial_failed(item.address, now_us)
        elif type(item) is FiltersRead:
            ours = self._history.reads(item.tag)
            self._out += (self._history if ours else self._tracer).read(item, now_us)
        elif type(item) is NotKept:
            self._tracer.tracking.not_kept(item, now_us)
        elif isinstance(item, StorageInput):
            if isinstance(item, AppendFailed | SaveFailed):
                self._out.append(Note("warning", f"nothing is stored: {item.error}"))
            self._out += self._durable.stored(item, now_us)
            self._releasing.stored(item)
            self._history.stored(item, now_us)
            if self._host is not None:
                self._out += self._host.stored(item, now_us)

    def _upkeep(self, now_us: int) -> None:
        """The end of a turn, for the rooms whose state it changed or that have a deadline."""
        self._out += self._links.tick(now_us)
        for advertisement in self._topology.tick(now_us):
            self._flooding.topology((advertisement,))
        own = self._topology.take_own()
        if own is not None:
            self._flooding.topology((own,))
        if self._topology.take_set_back():
            self._tracer.tracking.set_back(now_us)
            self._out.append(Note("warning", SET_BACK))
        for gone in self._topology.take_gone():
            self._interest.forget(gone)
            self._out += self._routing.forget_origin(gone, now_us)
            self._releasing.forget_broker(gone)
        self._out += self._durable.tick(now_us)
        self._out += self._routing.settle(now_us)
        heard = self._interest.take_heard()
        if self._host is not None:
            self._out += self._host.moving.heard(heard, now_us)
            self._out += self._host.tick(now_us)
        self._out += self._releasing.tick(now_us)
        self._out += self._retiring.tick(now_us)

    def _upkeep_deadline(self) -> int:
        deadlines = [self._routing.next_deadline(), self._topology.next_deadline()]
        durable = (self._durable, self._releasing, self._retiring, self._history, self._host)
        optional = [room.next_deadline() for room in (self._links, *durable) if room is not None]
        return min(deadlines + [deadline for deadline in optional if deadline is not None])

    def next_deadline(self) -> int:
        deadline_us = self._tracer.next_deadline()
        return self._upkeep_us if deadline_us is None else min(self._upkeep_us, deadline_us)

    def shutdown(self, now_us: int) -> list[Effect]:
        """Save what waits for it and say goodbye to everyone."""
        out = self.handle([], now_us)
        if self._host is not None:
            out += self._host.close(now_us)
        out += self._releasing.close(now_us)
        out += self._durable.close()
        out += self._routing.close(now_us)
        if self._host is not None:
            out.append(Save(table=ENDS_TABLE, rows=self._routing.ends.rows(), tag=self._new_tag()))
        out += self._tracer.close(now_us, self._durable.untold_us)
        out += self._history.close(now_us)
        for connection in self._peers:
            out += self._links.refuse(connection, UnavailableError(SHUTTING_DOWN))
        return out

    # ---- connections

    def _received(self, connection: int, frame: bytes, now_us: int) -> None:
        self._counters["frames_in_total"] += 1
        self._counters["bytes_in_total"] += len(frame)
        try:
            kind = frame_kind(frame)
            if not self._links.admit(connection, kind, len(frame), now_us):
                return
            if kind in BATCH_KINDS:
                self._on_batch(self._peers[connection], frame, now_us)
            else:
                self._on_message(connection, decode(frame), now_us)
        except PeerError as error:
            self._refuse(connection, error)

    def _on_message(self, connection: int, message: Message, now_us: int) -> None:
        effects, arrived, consumed = self._links.received(connection, message, now_us)
        self._out += effects
        if isinstance(message, Pong):  # who publishes durably shows with it what it has heard
            self._stirred |= self._durable.heard(connection, message.time_us)
        if consumed and arrived is None and not isinstance(message, Credit):
            return  # nobody else needs to know of pings
        self._stirred = True
        if arrived is not None:
            self._up(arrived, now_us)
        elif isinstance(message, Credit):
            self._on_credit(connection)
        else:
            peer = self._peers[connection]
            if peer.role == "broker":
                self._on_broker(peer, message, now_us)
            else:
                self._on_client(peer, message, now_us)

    def _refuse(self, connection: int, error: PeerError) -> None:
        """The peer broke the protocol: it is told why and closed, and nothing else of it counts."""
        self._counters["refused_frames_total"] += 1
        self._out += self._links.refuse(connection, error)

    def _up(self, peer: Peer, now_us: int) -> None:
        if peer.replaces is not None:
            self._down(peer.replaces, now_us)
        if peer.role == "client":
            self._peers[peer.connection] = peer
            return
        if peer.broker in self._flooding:
            # Link state would have said so at the handshake, had the other one been heard of by then.
            self._refuse(peer.connection, PeerError(f"broker number {peer.broker:08x} is linked already"))
            return
        if len(self._flooding) >= MAX_NEIGHBOURS:
            error = UnavailableError(f"a broker has at most {MAX_NEIGHBOURS} links")
            self._out += self._links.refuse(peer.connection, error)
            return
        self._peers[peer.connection] = peer
        self._routing.neighbour_up(peer.broker, peer.connection)
        self._flooding.up(peer, now_us)
        self._tracer.tracking.linked(peer.broker, now_us)

    def _down(self, connection: int, now_us: int, *, lost: bool = False) -> None:
        peer = self._peers.pop(connection, None)
        if peer is None:
            return
        if peer.role == "broker":
            self._flooding.down(peer, now_us)
            self._routing.neighbour_down(peer.broker)
            self._tracer.tracking.unlinked(peer.broker, now_us)
            text = f"the link with broker {peer.name!r} is {'lost' if lost else 'down'}"
            self._out.append(Note("warning" if lost else "info", text))
            return
        self._tracer.closed(peer.connection)
        self._retiring.closed(peer.connection)
        self._intake.closed(peer)
        self._subscribing.closed(peer.connection, now_us)

    def _retire(self, broker: int) -> None:
        """An administrator says that it never comes back."""
        self._releasing.retire(broker)
        if self._host is not None:
            self._host.moving.retire(broker)
        self._out.append(Note("info", f"broker {self._topology.name(broker)!r} is retired"))

    def _restored(self, broker: int) -> list[Effect]:
        """A retired broker is back: what it claims counts again."""
        if self._host is None:
            return []
        return self._host.moving.heard([self._interest.claims_of(broker)], self._now_us)

    def _on_credit(self, connection: int) -> None:
        peer = self._peers.get(connection)
        if peer is not None and peer.role == "broker":
            self._out += self._routing.credit(peer.broker)
        elif peer is not None:
            self._out += self._delivery.credit(connection)
            if self._host is not None:
                self._out += self._host.credit(connection, self._now_us)

    # ---- events

    def _on_batch(self, peer: Peer, frame: bytes, now_us: int) -> None:
        batch = EventBatch.parse(frame, peer.limits)
        if frame_kind(frame) == Kind.PUBLISH:
            self._stirred |= batch.durable
            self._intake.add(peer.connection, batch)
        else:
            self._learned = True
            self._stirred |= not is_volatile(batch.pubend)
            self._out += self._routing.knowledge(peer.broker, batch, now_us)
            self._out += self._links.consumed(peer.connection, len(frame))

    def _opened_pubend(self, pubend: DurablePubend, now_us: int) -> list[Effect]:
        """Others may hear of a durable pubend."""
        self._releasing.open(pubend, now_us)
        effects = self._routing.open_durable(pubend)
        pubends = sorted([self._routing.pubend.id, *self._durable.open])
        self._topology.set_pubends(tuple(pubends), now_us)
        return effects

    # ---- clients

    def _on_client(self, peer: Peer, message: Message, now_us: int) -> None:
        match message:
            case Subscribe():
                self._intake.flush(now_us)  # what came before it in this turn is not for it
                self._subscribing.subscribe(peer, message, now_us)
            case Unsubscribe():
                self._intake.flush(now_us)
                self._subscribing.unsubscribe(peer, message, now_us)
            case Ack():
                if self._host is not None:
                    self._out += self._host.ack(peer.connection, message, now_us)
            case Request():
                self._requests.request(peer.connection, message, now_us)
            case _:
                raise BugError(f"{type(message).__name__} from a client has no handler")

    def _forwarded(self, pubend: int, neighbour: int, ids: bytes) -> None:
        if not is_history(pubend):
            self._tracer.tracking.forwarded(pubend >> 32, (neighbour,), ids, self._now_us)

    # ---- the network

    def _on_broker(self, peer: Peer, message: Message, now_us: int) -> None:
        match message:
            case Silence():
                self._out += self._routing.silence(peer.broker, message, now_us)
            case Stamp():
                self._routing.stamp(peer.broker, message)
            case Nack():
                self._out += self._routing.nack(peer.broker, message, now_us)
                self._flooding.pull_needed(peer, message.need)
            case Release():
                self._releasing.received(message)
            case Attach():
                self._out += self._routing.attach(peer.broker, message)
            case Detach():
                self._routing.detach(peer.broker, message)
            case Query():
                self._out += self._inquiries.query(message, now_us)
            case Answer():
                self._out += self._inquiries.answer(message, now_us)
            case _:
                self._flooding.received(peer, message, now_us)

    # ---- inspection

    def status(self, now_us: int) -> dict[str, object]:
        """What `postroad status` shows; fit for JSON."""
        topology = self._topology
        return {
            **dict(self._config.about),
            "name": self.identity.name,
            "number": f"{self.identity.number:08x}",
            "boot": self.identity.boot,
            "uptime_s": (now_us - self._started_us) // SECOND_US,
            "kernel": "compiled" if kernel.COMPILED else "reference",
            **self._links.status(now_us),
            "brokers": [
                {
                    "broker": topology.name(number),
                    "number": f"{number:08x}",
                    "distance": topology.distance(number),
                }
                for number in topology.reachable()
            ],
            "streams": self._routing.status(),
            "durable_pubends": self._durable.status(),
            "durable_owners": self._releasing.status(),
            "subscriptions": self._delivery.status()[:MAX_STATUS_ROWS],
            "metrics": self.metrics(),
        }

    def metrics(self) -> dict[str, int | float]:
        return {
            **self._counters,
            **self._intake.metrics(),
            **self._delivery.metrics(),
            **self._interest.stats(),
            **self._routing.metrics(),
            **self._tracer.metrics(),
            **self._durable.metrics(),
            **({} if self._host is None else self._host.hosting.metrics()),
            **self._history.metrics(),
            "links": len(self._flooding),
            "clients": len(self._peers) - len(self._flooding),
            "brokers_reachable": len(self._topology.reachable()),
            "uptime_started_seconds": self._started_us / SECOND_US,
            "kernel_compiled": int(kernel.COMPILED),
        }

    def delays(self) -> list[Delays]:
        return [self._links.round_trips, *self._routing.delays.values()]

    def check(self) -> None:
        """BugError unless every room's invariants hold, and those between them."""
        rooms = (self._links, self._topology, self._interest, self._delivery, self._routing, self._tracer)
        for room in (*rooms, self._intake, self._durable, self._releasing, self._history):
            room.check()
        if self._host is not None:
            self._host.check()
        if self._upkeep_us > self._upkeep_deadline():
            raise BugError("a room has a deadline before the one that is kept")
        self._flooding.check(
            {peer.broker: number for number, peer in self._peers.items() if peer.role == "broker"}
        )
