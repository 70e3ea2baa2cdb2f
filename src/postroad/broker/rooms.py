"""The rooms of a broker: made once, in this order, each one line away from being there.

A room is given the rooms below it. Where two rooms need each other, the lower one is given one of the methods
at the end of this file, which hands on to the upper one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from postroad.besteffort.forwarding import Forwarding
from postroad.besteffort.ledger import Ledger
from postroad.clients.departing import Departing
from postroad.clients.intake import Intake
from postroad.clients.network import Network
from postroad.clients.publishing import FILTERS_PUBLISHER, Publishers, Receipts
from postroad.clients.quotas import Quotas
from postroad.clients.requests import Requests
from postroad.clients.roster import Roster
from postroad.clients.subscribing import Subscribing
from postroad.clocks import SkewCheck
from postroad.config import BrokerConfig, is_loopback, parse_address
from postroad.discovery.envelopes import Sealer
from postroad.discovery.room import Discovery
from postroad.durable.publisher.pubend import DurablePubend
from postroad.durable.publisher.publishing import DurablePublishing
from postroad.durable.publisher.release import RetentionPolicy
from postroad.durable.publisher.releasing import Releasing
from postroad.durable.retiring import Retiring
from postroad.durable.subscriber.moving import NoDurableSubscribers
from postroad.durable.subscriber.outputs import Deliver, DeliverGap, Receivers
from postroad.durable.subscriber.subscribers import DurableSubscribers
from postroad.errors import PeerError
from postroad.history.bulletin_writer import BulletinWriter
from postroad.history.bulletins import Author
from postroad.history.history import History, Sources
from postroad.ids import Identity, SubscriptionKey, is_history
from postroad.links.direct import DirectPeers
from postroad.links.links import Links
from postroad.overlay.flooding import Flooding
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.interest import Interest
from postroad.overlay.topology import Topology
from postroad.queues.queues import Queues
from postroad.queues.witness import Witness
from postroad.ring.pastry import Settings as RingSettings
from postroad.ring.ring import Ring, ring_id
from postroad.seam.storage import LogStream, StreamEnd
from postroad.seam.switchboard import Room, Switchboard
from postroad.seam.tracking import TrackingEffect
from postroad.seam.turn import Turn
from postroad.streams.delivery import Delivery
from postroad.streams.routing import Routing
from postroad.tracking.strategies import Tracking
from postroad.tracking.tracer import Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a broker starts with. `streams`: the log streams that a start found, None without a disk; `refuse`
    closes a connection whose peer broke the protocol."""

    board: Switchboard
    config: BrokerConfig
    identity: Identity
    draw: Callable[[int], int]
    now_us: int
    tracking: Tracking | None
    streams: Mapping[LogStream, StreamEnd] | None
    refuse: Callable[[Turn, int, PeerError], None]
    sealer: Sealer | None


class Rooms:
    def __init__(self, start: Start) -> None:
        if start.config.queues.memory_only or start.streams is None:
            start = replace(start, identity=replace(start.identity, life=start.identity.boot))
        self.tracking = start.tracking
        self._publishers, self._receipts = Publishers(start.identity), Receipts()
        self._make_graph(start)
        self._make_streams(start)
        self._make_publishing(start)
        self._make_durable_subscribers(start)
        self._make_history(start)
        self._make_subscribing(start)
        self._make_discovery_and_queues(start)
        self.departing = Departing(
            links=self.links,
            receipts=self._receipts,
            delivery=self.delivery,
            routing=self.routing,
            durable=self.subscribers,
            elsewhere=self.discovery.elsewhere,
            here_only=lambda address: is_loopback(parse_address(address)[0]),
        )
        self.network = Network(
            start.board,
            me=start.identity.number,
            links=self.links,
            topology=self.topology,
            inquiries=self.inquiries,
        )
        Requests(start.board, links=self.links, quotas=self.quotas)
        # What has something to do at the end of a turn in which more happened than plain events.
        hosting: Room = self.subscribers or NoDurableSubscribers(
            start.board, interest=self.interest, inquiries=self.inquiries
        )
        self.in_order: tuple[Room, ...] = (
            self.links,
            self.direct,
            self.flooding,
            self.durable,
            self.routing,
            hosting,
            self.releasing,
            self.retiring,
            self.besteffort,
            self.discovery,
            self.ring,
            self.queues,
            self.network,
            self.departing,
        )
        # What may have a new deadline after a turn in which a neighbour sent plain events.
        self.learning: tuple[Room, ...] = (self.routing, hosting)

    def drain(self, turn: Turn) -> None:
        """The process ends soon: nobody is to find it any more, and its clients go on elsewhere."""
        self.discovery.close(turn)
        self.departing.begin(turn)

    def close(self, turn: Turn) -> None:
        """The process ends: everybody saves what waits for it."""
        self.ring.leave(turn)
        self.discovery.close(turn)
        if self.subscribers is not None:
            self.subscribers.close(turn)
        self.releasing.close(turn)
        self.durable.close(turn)
        self.routing.close(turn)
        self.tracer.close(turn, self.durable.untold_us)
        self.history.close(turn)

    # ---- the rooms

    def _make_graph(self, start: Start) -> None:
        board, config, identity = start.board, start.config, start.identity
        me = identity.number
        self.topology = Topology(
            me=me,
            node=identity.node,
            name=identity.name,
            boot=identity.boot,
            before=identity.before,
            life=identity.life,
            address=config.links.address,
        )
        self.links = Links(
            board,
            me=identity,
            limits=config.limits,
            settings=config.links,
            auth=config.auth,
            new_publisher=self._publishers.new_number,
            pubends=config.durable.pubends,
            draw=start.draw,
            conflict=self.topology.conflict,
        )
        self.quotas = Quotas(board, config=config.quotas, links=self.links)
        for address in config.dial:
            self.links.dial(address, start.now_us)
        self.interest = Interest(me, identity.boot, config.limits)
        self.flooding = Flooding(
            board,
            topology=self.topology,
            interest=self.interest,
            interest_changed=self._interest_changed,
            set_back=self._set_back,
            gone=self._gone,
            refuse=start.refuse,
            now_us=start.now_us,
        )
        self.direct = DirectPeers(board, links=self.links, address_of=self.topology.address)
        self.inquiries = Inquiries(board, me=me, topology=self.topology, link=self.flooding.connection)

    def _make_streams(self, start: Start) -> None:
        board, config, tracking = start.board, start.config, start.tracking
        me = start.identity.number
        self.tracer = Tracer(
            board, tracking, me=me, topology=self.topology, inquiries=self.inquiries, kept=self._kept
        )
        self.delivery = Delivery(
            board,
            config=config.delivery,
            available=self.links.available,
            spend=self.links.spend,
            may_read=lambda principal, topic: self.links.access.may_subscribe(principal, topic),
            note=None if tracking is None else tracking.noted.append,
        )
        self.routing = Routing(
            board,
            me=me,
            boot=start.identity.boot,
            config=config.streams,
            topology=self.topology,
            interest=self.interest,
            delivery=self.delivery,
            links=self.links,
            tracking=tracking,
            records_forwards=config.tracking.routing != "all",
            confirmed=self._confirmed,
            followed=self._followed,
            owing=self._owing,
            pull_needed=self.flooding.pull_needed,
            gone=self._retired,
            disk=start.streams is not None,
            now_us=start.now_us,
        )

    def _make_publishing(self, start: Start) -> None:
        board, config, tracking = start.board, start.config, start.tracking
        me = start.identity.number
        self.durable = DurablePublishing(
            board,
            me=me,
            config=config.durable,
            limits=config.limits,
            streams=start.streams,
            links=self.links,
            receipts=self._receipts,
            routing=self.routing,
            tracking=tracking,
            quotas=self.quotas,
            opened=self._opened,
            now_us=start.now_us,
        )
        self.intake = Intake(
            board,
            limits=config.limits,
            publishers=self._publishers,
            receipts=self._receipts,
            links=self.links,
            routing=self.routing,
            durable=self.durable,
            tracking=tracking,
            clocks=None if tracking is None else SkewCheck(config.tracking.skew_us, me=me),
            refuse=start.refuse,
        )
        self.best_effort_ledger = Ledger(board, delivery=self.delivery, tracking=tracking)
        self.besteffort = Forwarding(
            board,
            me=me,
            config=config.besteffort,
            topology=self.topology,
            interest=self.interest,
            delivery=self.delivery,
            links=self.links,
            publishers=self._publishers,
            ledger=self.best_effort_ledger,
            tracking=tracking,
            records_forwards=config.tracking.routing != "all",
        )

    def _make_durable_subscribers(self, start: Start) -> None:
        board, config, me = start.board, start.config, start.identity.number
        self.releasing = Releasing(
            board,
            me=me,
            policy=RetentionPolicy(
                keep_us=config.durable.keep_us,
                keep_bytes=config.durable.pubend_bytes,
                max_retain_us=config.durable.max_age_us,
                max_bytes=config.durable.max_bytes,
            ),
            topology=self.topology,
            link=self.flooding.connection,
            mine=self.durable.pubends,
            now_us=start.now_us,
        )
        self.subscribers = (
            None
            if start.streams is None
            else DurableSubscribers(
                board,
                me=me,
                boot=start.identity.boot,
                streams=start.streams,
                links=self.links,
                interest=self.interest,
                routing=self.routing,
                flood=self.flooding.interest,
                inquiries=self.inquiries,
                topology=self.topology,
                retired=self._retired,
                tracking=start.tracking,
                quotas=self.quotas,
                limits=config.limits,
                publishing=self.durable,
                report=self.releasing.report,
                sent=self._sent,
                now_us=start.now_us,
            )
        )

    def _make_history(self, start: Start) -> None:
        board, config, identity = start.board, start.config, start.identity
        self.history = History(
            board,
            author=Author(broker=identity.number, name=identity.name),
            boot=identity.boot,
            publisher=self._publishers.own_number,
            filters_publisher=FILTERS_PUBLISHER,
            sources=Sources(
                wants=self.interest.wants,
                changes=self._reserved_changes,
                reachable=self.topology.reachable,
                links=self._own_links,
                acknowledged=_nothing if self.subscribers is None else self.subscribers.acknowledged,
                best_effort=self.best_effort_ledger,
            ),
            tracking=start.tracking,
            config=config.tracking,
            writer=BulletinWriter(self.durable, config.limits),
            inquiries=self.inquiries,
            now_us=start.now_us,
        )

    def _make_subscribing(self, start: Start) -> None:
        board = start.board
        self.subscribing = Subscribing(
            board,
            limits=start.config.limits,
            links=self.links,
            intake=self.intake,
            delivery=self.delivery,
            interest=self.interest,
            flooding=self.flooding,
            routing=self.routing,
            durable=self.subscribers,
            tracking=start.tracking,
            quotas=self.quotas,
        )
        self.roster = Roster(board, links=self.links, subscriptions=self.subscribing.count)
        self.retiring = Retiring(
            board,
            me=start.identity.number,
            topology=self.topology,
            inquiries=self.inquiries,
            forget=self._forget,
            restored=self._restored,
        )

    def _make_discovery_and_queues(self, start: Start) -> None:
        board, config, identity, streams = start.board, start.config, start.identity, start.streams
        node = ring_id(identity.node, identity.life)
        self.discovery = Discovery(
            board,
            me=identity,
            config=config.discovery,
            auth=config.auth,
            link_token=config.links.token,
            address=config.links.address,
            endpoint=parse_address,
            links=self.links,
            flooding=self.flooding,
            topology=self.topology,
            draw=start.draw,
            sealer=start.sealer,
            now_us=start.now_us,
        )
        self.ring = Ring(
            board,
            me=node,
            settings=RingSettings(
                heartbeat_us=config.queues.heartbeat_us,
                silent_us=config.queues.silent_us,
            ),
            topology=self.topology,
            direct=self.direct,
            draw=start.draw,
            changed=self._ring_changed,
        )
        self.queues = Queues(
            board,
            me=node,
            boot=identity.boot,
            config=config.queues,
            quotas=config.quotas,
            streams=streams,
            ring=self.ring,
            direct=self.direct,
            topology=self.topology,
            links=self.links,
            told_of_others=bool(config.dial) or config.discovery.join,
            witness=Witness(
                me=identity.number,
                tracking=start.tracking,
                reporting=self.history.wants_queues,
                report=self.history.queued,
            ),
            draw=start.draw,
        )

    # ---- where two rooms need each other

    def _interest_changed(self) -> None:
        self.routing.interest_changed()

    def _set_back(self, now_us: int) -> None:
        if self.tracking is not None:
            self.tracking.set_back(now_us)

    def _gone(self, turn: Turn, broker: int) -> None:
        self.routing.forget_origin(turn, broker)
        self.releasing.forget_broker(broker)

    def _kept(self, turn: Turn, effects: Sequence[TrackingEffect]) -> None:
        self.history.kept(turn, effects)

    def _confirmed(self, turn: Turn, key: SubscriptionKey, missing: tuple[str, ...]) -> None:
        self.subscribing.confirmed(turn, key, missing)

    def _followed(self, pubend: int) -> bool:
        return self.releasing.followed(pubend)

    def _owing(self, pubend: int) -> bool:
        return is_history(pubend) and self.history.owing

    def _retired(self, broker: int) -> bool:
        return self.retiring.gone(broker)

    def _opened(self, pubend: DurablePubend, now_us: int) -> None:
        self.releasing.open(pubend, now_us)

    def _sent(self, receivers: Receivers, message: Deliver | DeliverGap, now_us: int) -> None:
        self.history.sent(receivers, message, now_us)

    def _forget(self, turn: Turn, broker: int) -> None:
        self.releasing.retire(broker)
        if self.subscribers is not None:
            self.subscribers.moving.retire(broker)
        turn.note("info", f"broker {self.topology.name(broker)!r} is retired")

    def _restored(self, turn: Turn, broker: int) -> None:
        if self.subscribers is not None:
            self.subscribers.moving.heard(turn, [self.interest.claims_of(broker)])

    def _ring_changed(self, turn: Turn) -> None:
        self.queues.ring_changed(turn)

    def _reserved_changes(self) -> int:
        return self.interest.reserved_changes

    def _own_links(self) -> tuple[tuple[int, int], ...]:
        return self.topology.own_links


def _nothing() -> tuple[tuple[str, Mapping[int, int]], ...]:
    return ()
