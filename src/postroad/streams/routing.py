"""The routing core: knowledge flows down a spanning tree per origin, curiosity flows up (spec D2).

Each broker attaches, for every origin, to its parent in that origin's tree, and says how far it knows each
of the origin's streams. The parent feeds it from there on: from its cache first, then live. So a broken
link, a new route and a late joiner are one thing, an attach with a tick; ticks decide, never arrival. An
attach is said again where nothing is heard of the origin, and so is the question about a pubend whose broker
has a newer process.

What a neighbour is fed is filtered with the interest of the brokers behind it. The knowledge says so: its
coverage names each of them and the version of its interest that every hop applied (the minimum over the
hops). A broker takes knowledge into its horizon only if the coverage meets what its own subscriptions
need, and nacks the rest. A new subscription begins, per stream, at the first tick filtered with it.

A gap is nacked at once, and again every `nack_us` while it stays open. Whatever several ask for within that
time is asked for once: an answer is filtered for all who get the stream by way of this broker, as far as the
answering one knows what they want. Should it not, whoever was not served asks again. A nack that the cache
cannot answer well enough goes one hop up; at worst it reaches the pubend, which holds its events unfiltered,
or says L.

A plain pubend ends with its broker's process, and the next one answers for it (`ends`). That is the only way
plain events are lost, besides limits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from postroad.delays import Delays
from postroad.errors import BugError, PeerError
from postroad.events.batch import EventBatch, empty_frame
from postroad.ids import SubscriptionKey, boot_of, is_history, is_volatile, pubend_text, volatile_pubend
from postroad.links.access import RESERVED
from postroad.links.links import Links
from postroad.overlay.interest import Interest
from postroad.overlay.topology import MAX_BROKERS, Topology
from postroad.seam.peers import Peer
from postroad.seam.replies import reply
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.selectors import Group
from postroad.streams.beginnings import Beginnings, Confirmed
from postroad.streams.delivery import Delivery
from postroad.streams.ends import TABLE as ENDS
from postroad.streams.ends import Ends, read_end
from postroad.streams.feeding import Feeder
from postroad.streams.knowledge import MAX_TICK, Segment
from postroad.streams.plain_pubend import PlainPubend
from postroad.streams.settings import StreamConfig
from postroad.streams.silences import Silences
from postroad.streams.spans import Span, overlaps, subtract, union
from postroad.streams.streams import (
    MAX_NACK_SPANS,
    MAX_STREAMS,
    MAX_STREAMS_PER_ORIGIN,
    Asked,
    LoggedPubend,
    Neighbour,
    Stream,
    StreamTable,
    Upstream,
)
from postroad.tracking.strategies import Tracking
from postroad.units import SECOND_US
from postroad.wire.frames import Attach, Detach, Kind, Nack, Request, Silence, Stamp, encode

_MAX_U32: Final = (1 << 32) - 1
ASK_AGAIN_US: Final = 5 * SECOND_US  # an attach, or a pubend that ended, that nothing was heard of
DEAD_STREAM_US: Final = 60 * SECOND_US  # a dead pubend's stream is kept this long for those further behind
MAX_AHEAD_US: Final = 86_400 * SECOND_US  # a tick that is further ahead of our clock is not believed
COMPLAIN_US: Final = 60 * SECOND_US  # between two complaints of such ticks
COUNTERS: Final = ("nacks_received_total", "nacks_sent_total", "lost_spans_total", "ticks_ahead_total")
DELIVERY_DELAY: Final = (
    "From an event's tick, when its broker took it, to local delivery here. Alarm: above what you promise."
)


class Host(Protocol):
    """Whoever has durable subscriptions, to which routing hands what it knows of durable pubends."""

    def added(self, turn: Turn, stream: Stream) -> None:
        """There is a stream."""

    def dropped(self, pubend: int) -> None:
        """Its stream is forgotten."""

    def begin(self, turn: Turn, key: SubscriptionKey, stream: Stream) -> bool:
        """A new subscription is in force on a stream from here on; False: it is to begin later."""

    def learn(self, turn: Turn, stream: Stream, segment: Segment) -> None:
        """The next of a stream, in order."""

    def answer(self, turn: Turn, stream: Stream, segments: list[Segment]) -> None:
        """Whatever else arrived of it."""


class Routing:
    """One broker's part in every stream of the network.

    `tracking` records what comes and, with `records_forwards`, what goes to which neighbour. `confirmed`
    tells a subscriber that its subscription began. `followed(pubend)`: durable subscriptions follow it;
    `owing(pubend)`: it still owes events of the past. `pull_needed` asks a neighbour for the interest tables
    that it named. `gone(broker)`: nobody is to wait for that one. `disk`: something can be saved.
    """

    def __init__(
        self,
        board: Switchboard,
        *,
        me: int,
        boot: int,
        config: StreamConfig,
        topology: Topology,
        interest: Interest,
        delivery: Delivery,
        links: Links,
        tracking: Tracking | None,
        records_forwards: bool,
        confirmed: Confirmed,
        followed: Callable[[int], bool],
        owing: Callable[[int], bool],
        pull_needed: Callable[[Turn, Peer, Mapping[int, int]], None],
        gone: Callable[[int], bool],
        disk: bool,
        now_us: int,
    ) -> None:
        self._me = me
        self._topology = topology
        self._interest = interest
        self._delivery = delivery
        self._links = links
        self._tracking = tracking
        self._pull_needed = pull_needed
        self._gone = gone
        self._disk = disk
        self._nack_us = config.nack_us
        forwarding = tracking if records_forwards else None
        self._feeder = Feeder(me=me, topology=topology, interest=interest, links=links, tracking=forwarding)
        self.pubend = PlainPubend(volatile_pubend(me, boot), limit=config.plain_bytes, now_us=now_us)
        self._ends = Ends(board.table(ENDS, read_end), self.pubend)
        own = Stream(self.pubend.id, start=self.pubend.start, pubend=self.pubend)
        self._table = StreamTable(config.cache_bytes)
        self._table.add(own)
        self._streams = self._table.streams
        self._neighbours: dict[int, Neighbour] = {}  # by broker number
        self._durable: dict[int, tuple[Stream, LoggedPubend]] = {}  # own durable pubends that are open
        self._hosts: list[Host] = []  # durable subscribers; none where there is no disk
        # Parents.
        self._upstream: Upstream = {}  # what this broker is attached to
        self._unanswered: dict[int, int] = {}  # origins of which the parent said nothing yet -> attached when
        self._first_boot: dict[int, int] = {}  # origin -> boot at which this process first saw it
        self._routed_at = -1  # topology generation the attachments were made for
        self._expected_at = -1  # topology generation that children are expected for
        # Curiosity.
        self._curious: dict[int, Stream] = {}  # streams with a gap, those whose nack_at is set
        # Streams heard of in this turn -> where to look for gaps from: one nack for all frames of a turn.
        self._to_look_at: dict[int, int] = {}
        self._complain_at = 0  # no earlier complaint of a tick that is ahead
        self._counters = dict.fromkeys(COUNTERS, 0)
        self.delays = {True: _delays("plain"), False: _delays("durable")}  # by whether it is volatile
        self._silences = Silences(
            own,
            self.pubend,
            durable=self._durable,
            silence_us=config.silence_us,
            followed=followed,
            owing=owing,
            spread=self._spread,
            now_us=now_us,
        )
        self._beginnings = self._make_beginnings(config.subscribe_wait_us, confirmed)
        topology.set_pubends((self.pubend.id,), now_us)
        self._register(board)

    def _make_beginnings(self, wait_us: int, confirmed: Confirmed) -> Beginnings:
        return Beginnings(
            me=self._me,
            wait_us=wait_us,
            topology=self._topology,
            delivery=self._delivery,
            streams=self._streams,
            upstream=self._upstream,
            begin_durable=self._begin_durable,
            confirmed=confirmed,
        )

    def _register(self, board: Switchboard) -> None:
        board.peers("broker", up=self._neighbour_up, down=self._neighbour_down)
        board.from_broker(Attach, self._on_attach)
        board.from_broker(Detach, self._on_detach)
        board.from_broker(Silence, self._on_silence)
        board.from_broker(Stamp, self._on_stamp)
        board.from_broker(Nack, self._on_nack)
        board.request("heads", self._heads)
        board.metrics(self.metrics)
        board.status("streams", lambda _now_us: self.status())

    # ---- own pubends

    def publish(self, turn: Turn, batches: list[EventBatch]) -> None:
        """Give these events their ticks and send them wherever they are wanted."""
        stream = self._streams[self.pubend.id]
        self._spread(turn, stream, self.pubend.publish(batches, turn.now_us))
        for neighbour in self._neighbours.values():
            self._feeder.flush_silences(turn, neighbour)

    def open_durable(self, turn: Turn, pubend: LoggedPubend) -> None:
        """An own durable pubend of which others may hear from now on."""
        stream = Stream(pubend.id, start=pubend.last, pubend=pubend)
        self._table.add(stream)
        self._durable[stream.id] = (stream, pubend)
        self._silences.news()
        self._beginnings.opened(stream)
        for host in self._hosts:
            host.added(turn, stream)
        for neighbour in self._neighbours.values():
            tick = neighbour.up_at.setdefault(stream.id, stream.horizon)
            if self._me in neighbour.attached:
                self._feeder.begin(turn, neighbour, stream, tick)
        self._topology.set_pubends((self.pubend.id, *self._durable), turn.now_us)

    def spread(self, turn: Turn, pubend: LoggedPubend, segment: Segment) -> None:
        """Events of an own durable pubend that are on disk now."""
        self._spread(turn, self._streams[pubend.id], segment)

    def log_read(self, turn: Turn, pubend: LoggedPubend, segments: list[Segment]) -> None:
        """What was read goes to the neighbours that want it, and those with credit get more; then to durable
        subscribers."""
        stream = self._streams[pubend.id]
        for neighbour in self._neighbours.values():
            feed = neighbour.feeds.get(stream.id)
            if feed is not None and feed.wants:
                for segment in segments:
                    self._feeder.satisfy(turn, neighbour, feed, stream, segment)
                if segments:
                    self._feeder.serve(turn, neighbour, feed, stream, pubend)
        for host in self._hosts:
            host.answer(turn, stream, segments)

    # ---- local subscriptions

    def subscribe(self, turn: Turn, key: SubscriptionKey, version: int) -> None:
        """A local subscription that relies on this version of the own interest."""
        self._beginnings.subscribe(turn, key, version)
        self._silences.news()

    def unsubscribe(self, key: SubscriptionKey) -> None:
        self._beginnings.unsubscribe(key)

    # ---- durable subscribers

    def add_host(self, host: Host) -> None:
        self._hosts.append(host)

    def _begin_durable(self, turn: Turn, key: SubscriptionKey, stream: Stream) -> bool:
        return is_volatile(stream.id) or all(host.begin(turn, key, stream) for host in self._hosts)

    def host_subscription(self, key: SubscriptionKey, version: int) -> None:
        """A durable subscription that has begun wherever it begins: all knowledge must serve it."""
        self._beginnings.host_subscription(key, version)

    def durable_streams(self) -> list[int]:
        return [pubend for pubend in self._streams if not is_volatile(pubend)]

    def stream(self, pubend: int) -> Stream | None:
        return self._streams.get(pubend)

    def known_top(self, pubend: int) -> int | None:
        """How far a stream is, None while that is not known."""
        stream = self._streams.get(pubend)
        return stream.top if stream is not None and stream.announced else None

    def away(self, pubend: int) -> str | None:
        """The name of its broker, if that is out of reach."""
        origin = pubend >> 32
        return self._topology.name(origin) if self._topology.distance(origin) is None else None

    def _heads(self, turn: Turn, peer: Peer, request: Request) -> None:
        """How far each durable pubend is known here that may have something for the asker to read, but for
        those of retired brokers."""
        links, asker = self._links, peer.connection
        everything = links.may_admin(asker)
        of_history = everything or links.may_read_some(asker, RESERVED)
        of_others = everything or links.may_read_some(asker, "#")
        heads = {
            pubend: self._streams[pubend].horizon
            for pubend in sorted(self.durable_streams())
            if not self._gone(pubend >> 32) and (of_history if is_history(pubend) else of_others)
        }
        body = {
            "heads": {pubend_text(pubend): tick for pubend, tick in heads.items()},
            "away": [pubend_text(pubend) for pubend in heads if self.away(pubend) is not None],
        }
        reply(turn, peer.connection, request.number, body)

    def follow_from(self, turn: Turn, pubend: int, tick: int) -> None:
        """A pubend that durable subscriptions here knew before a restart."""
        if pubend not in self._streams and self._table.has_room(pubend >> 32):
            self._create_stream(turn, pubend, tick)

    def follow_all(self, turn: Turn) -> None:
        """There is a first durable subscription."""
        for host in self._hosts:
            for pubend in self.durable_streams():
                host.added(turn, self._streams[pubend])

    def activate_waiting(self, turn: Turn, stream: Stream) -> None:
        """Hosting has caught up with a stream: durable subscriptions in force there begin."""
        self._beginnings.activate_waiting(turn, stream)

    def find_for_host(
        self, turn: Turn, pubend: int, spans: Sequence[Span], need: Mapping[int, int]
    ) -> list[Segment]:
        """What is known here of these spans; the rest is asked for."""
        stream = self._streams.get(pubend)
        if stream is None:
            return []
        self._silences.asked(stream, spans)
        # One look at all of it: a subscriber wants many single ticks, which lie in few segments.
        whole, gaps = stream.find(spans[0][0], spans[-1][1], need, beyond=True, whole=True)
        segments = [segment for segment in whole if overlaps(spans, segment.start, segment.end)]
        missing = subtract(spans, subtract([(spans[0][0], spans[-1][1])], gaps))
        self.ask_for_host(turn, stream, missing, need)
        return segments

    def ask_for_host(self, turn: Turn, stream: Stream, spans: list[Span], need: Mapping[int, int]) -> None:
        if stream.log is not None:
            stream.log.read(turn, union(spans))
        elif spans:
            self._ask(turn, stream, spans, {**self._own_need(stream), **need})

    # ---- neighbours and streams

    def _neighbour_up(self, _turn: Turn, peer: Peer) -> None:
        up_at = {stream.id: stream.top for stream in self._streams.values()}
        self._neighbours[peer.broker] = Neighbour(peer.broker, peer.connection, up_at)

    def _neighbour_down(self, _turn: Turn, peer: Peer) -> None:
        del self._neighbours[peer.broker]
        for origin in [origin for origin, (parent, _) in self._upstream.items() if parent == peer.broker]:
            del self._upstream[origin]

    def interest_changed(self) -> None:
        self._feeder.interest_changed()
        self._silences.news()

    def forget_origin(self, turn: Turn, origin: int) -> None:
        """A broker is gone for good: what of its streams never arrived is lost."""
        for stream in list(self._table.of(origin).values()):
            if stream.need:
                end = max(stream.horizon + 1, turn.now_us)
                self._delivery.lost(turn, stream.id, stream.horizon, end)
            self._drop_stream(stream)
        self._upstream.pop(origin, None)
        self._first_boot.pop(origin, None)

    def _create_stream(self, turn: Turn, pubend: int, start: int) -> Stream:
        origin = pubend >> 32
        if not self._table.has_room(origin):
            raise PeerError(
                f"{len(self._table.of(origin))} streams of broker {origin:08x} and {len(self._streams)} of"
                f" all are followed; at most {MAX_STREAMS_PER_ORIGIN} and {MAX_STREAMS} can be"
            )
        former = self._former(pubend)
        stream = Stream(pubend, start=start)
        self._table.add(stream)
        self._beginnings.created(turn, stream, former)
        for neighbour in self._neighbours.values():
            neighbour.up_at[pubend] = start
            if origin in neighbour.attached:
                self._feeder.begin(turn, neighbour, stream, start)
        for host in self._hosts:
            host.added(turn, stream)
        return stream

    def _former(self, pubend: int) -> Stream | None:
        """The stream of the same broker's previous start, if this one follows it from its beginning."""
        if not self._follows(pubend):
            return None
        earlier = [other for other in self._table.of(pubend >> 32) if is_volatile(other) and other < pubend]
        return self._streams[max(earlier)] if earlier else None

    def _drop_stream(self, stream: Stream) -> None:
        self._table.drop(stream)
        self._curious.pop(stream.id, None)
        self._delivery.retire(stream.id)
        for host in self._hosts:
            host.dropped(stream.id)
        for neighbour in self._neighbours.values():
            neighbour.feeds.pop(stream.id, None)
            neighbour.up_at.pop(stream.id, None)

    # ---- parents: from whom a broker has each origin's streams

    def _reroute(self, turn: Turn) -> None:
        """Attach to the parent in every origin's tree, where that or its pubends changed."""
        self.interest_changed()  # what neighbours are fed depends on routes as it does on interest
        self._routed_at = self._topology.generation
        reachable = dict.fromkeys(self._topology.reachable())
        for origin in [origin for origin in self._upstream if origin not in reachable]:
            self._detach(turn, origin)
        for origin in reachable:
            if origin == self._me:
                continue
            pubends = self._topology.own_pubends(origin)
            self._meet(turn, origin, pubends)
            parent = self._topology.parent(origin)
            if parent is None or parent not in self._neighbours:
                self._detach(turn, origin)
            elif self._upstream.get(origin) != (parent, pubends):
                self._attach(turn, origin, parent, pubends)
        self._beginnings.rerouted(turn)

    def _meet(self, turn: Turn, origin: int, pubends: tuple[int, ...]) -> None:
        """Note who is there, and follow what a known broker opened anew."""
        for pubend in pubends:
            if is_volatile(pubend):
                self._first_boot.setdefault(origin, boot_of(pubend))
                new = pubend not in self._streams
                if new and self._follows(pubend) and self._table.has_room(origin):
                    self._create_stream(turn, pubend, 0)

    def _attach(self, turn: Turn, origin: int, parent: int, pubends: tuple[int, ...]) -> None:
        before = self._upstream.get(origin)
        if before is not None and before[0] != parent:
            self._detach(turn, origin)
        self._upstream[origin] = (parent, pubends)
        self._unanswered[origin] = turn.now_us
        streams = self._table.of(origin)
        known = {stream.id: stream.horizon for stream in streams.values() if stream.horizon < MAX_TICK}
        turn.send(self._neighbours[parent].connection, encode(Attach(origin=origin, known=known)))
        for stream in streams.values():
            stream.announced = stream.id not in known
            stream.asked.clear()
            self._nack_gaps(turn, stream)

    def _detach(self, turn: Turn, origin: int) -> None:
        attachment = self._upstream.pop(origin, None)
        self._unanswered.pop(origin, None)
        if attachment is not None and attachment[0] in self._neighbours:
            turn.send(self._neighbours[attachment[0]].connection, encode(Detach(origin=origin)))

    def _hear_parent(self, number: int, pubend: int) -> None:
        """A neighbour says something of a pubend: its parent, if it is that, has taken the attach."""
        origin = pubend >> 32
        if origin in self._unanswered:
            parent, pubends = self._upstream.get(origin, (None, ()))
            if parent == number and pubend in pubends:  # the end of a dead one is told to anyone
                del self._unanswered[origin]

    def _follows(self, pubend: int) -> bool:
        """A new start of a broker known before: all it publishes is for us, from its very beginning."""
        return is_volatile(pubend) and boot_of(pubend) > self._first_boot.get(pubend >> 32, sys.maxsize)

    def _has_ended(self, stream: Stream) -> bool:
        """Its broker has a newer process, as far as link state tells."""
        _, pubends = self._upstream.get(stream.origin, (None, ()))
        return is_volatile(stream.id) and (stream.id,) < pubends[-1:]  # they are sorted

    def _ask_again(self, turn: Turn) -> None:
        """A parent says something every second, and a new process answers for the old one: else ask again."""
        for origin, at_us in list(self._unanswered.items()):
            attachment = self._upstream.get(origin)
            if attachment is None:
                del self._unanswered[origin]
            elif turn.now_us - at_us >= ASK_AGAIN_US:
                self._attach(turn, origin, *attachment)
        for stream in self._streams.values():
            if stream.lost_at is None and stream.horizon < MAX_TICK and self._has_ended(stream):
                stream.ended_at = turn.now_us if stream.ended_at is None else stream.ended_at
                if turn.now_us - stream.ended_at >= ASK_AGAIN_US:
                    stream.top = max(stream.top, stream.horizon + 1, turn.now_us)
                    self._nack_gaps(turn, stream)

    def _adopt(self, turn: Turn, pubend: int, tick: int) -> None:
        """A neighbour asks about a stream that is not followed here: follow it from where that one stands."""
        origin = pubend >> 32
        # If it has none there is no such broker: link state comes before any attach.
        if self._topology.own_pubends(origin):
            self._create_stream(turn, pubend, tick)
            self._upstream.pop(origin, None)  # so that its parent is asked for this stream, too
            self._routed_at = -1

    # ---- children: what neighbours ask for

    def _expect(self) -> None:
        """Note where streams stand when a neighbour becomes a child: its attach may be lost, and come late.

        Once a second, not with every change of routes: by then feeding has had to find the children anyway.
        """
        if self._expected_at == self._topology.generation:
            return
        self._expected_at = self._topology.generation
        for origin in dict.fromkeys(stream.origin for stream in self._streams.values()):
            children = self._topology.children(origin)
            for neighbour in self._neighbours.values():
                if neighbour.number not in children:
                    neighbour.due_at.pop(origin, None)
                elif origin not in neighbour.attached and origin not in neighbour.due_at:
                    neighbour.due_at[origin] = {
                        pubend: stream.top
                        for pubend, stream in self._table.of(origin).items()
                        if stream.announced
                    }

    def _on_attach(self, turn: Turn, peer: Peer, message: Attach) -> None:
        neighbour = self._neighbours[peer.broker]
        origin = message.origin
        neighbour.attached.add(origin)
        if not 0 <= origin <= _MAX_U32:
            raise PeerError(f"attach to broker {origin}; a broker's number is between 0 and {_MAX_U32}")
        if len(neighbour.attached) > MAX_BROKERS:
            raise PeerError(f"attach to {len(neighbour.attached)} brokers; at most {MAX_BROKERS} are allowed")
        due_at = neighbour.due_at.pop(origin, {})
        for pubend, tick in sorted(message.known.items()):
            if pubend >> 32 != origin:
                raise PeerError(f"attach to broker {origin:08x} names pubend {pubend:x}, which is another's")
            if not 0 <= tick <= MAX_TICK:
                raise PeerError(f"attach names tick {tick}; a tick is between 0 and {MAX_TICK}")
            if pubend in self._streams or self._is_ahead(turn, pubend, tick):
                continue
            if origin == self._me and is_volatile(pubend):
                self._answer_for_the_dead(turn, neighbour, pubend, tick)
            elif origin == self._me:
                neighbour.up_at[pubend] = tick  # it is told all after that when the pubend opens
            else:
                self._adopt(turn, pubend, tick)
        for stream in list(self._table.of(origin).values()):
            if stream.id not in message.known and self._has_ended(stream):
                continue  # over for the neighbour, or never known there
            tick = message.known.get(stream.id, neighbour.up_at[stream.id])
            at = due_at.get(stream.id, stream.top) if stream.id in message.known else tick
            self._feeder.begin(turn, neighbour, stream, tick, announce=at)

    def _on_detach(self, _turn: Turn, peer: Peer, message: Detach) -> None:
        neighbour = self._neighbours[peer.broker]
        neighbour.attached.discard(message.origin)
        for pubend in self._table.of(message.origin):
            feed = neighbour.feeds.pop(pubend, None)
            if feed is not None:
                # Should it forget the stream, it is not sent all of it a second time.
                neighbour.up_at[pubend] = feed.sent_to

    def _on_nack(self, turn: Turn, peer: Peer, message: Nack) -> None:
        self._counters["nacks_received_total"] += 1
        if len(message.spans) > MAX_NACK_SPANS or len(message.need) > MAX_BROKERS:
            raise PeerError(
                f"a nack of {len(message.spans)} spans for {len(message.need)} owners; at most"
                f" {MAX_NACK_SPANS} and {MAX_BROKERS} are allowed"
            )
        for start, end in message.spans:
            _check_span(start, end)
        neighbour = self._neighbours[peer.broker]
        stream = self._streams.get(message.pubend)
        if stream is not None:
            self._answer(turn, neighbour, stream, message)
        elif message.spans:
            first = min(message.spans)[0]
            if message.pubend >> 32 == self._me and is_volatile(message.pubend):
                self._answer_for_the_dead(turn, neighbour, message.pubend, first)
            elif message.pubend >> 32 in neighbour.attached and not self._is_ahead(
                turn, message.pubend, first
            ):
                self._adopt(turn, message.pubend, first)
        self._pull_needed(turn, peer, message.need)

    def _answer(self, turn: Turn, neighbour: Neighbour, stream: Stream, nack: Nack) -> None:
        """From what is known here; the rest is asked for upstream, once for all who want it."""
        feed = neighbour.feeds.get(stream.id)
        if feed is None:
            return  # detached meanwhile; it asks its new parent
        applied = self._interest.versions()
        need = {owner: version for owner, version in nack.need.items() if version > 0}
        if any(applied.get(owner, 0) < version for owner, version in need.items()):
            return  # our tables are older than the asker's: it asks again
        self._silences.asked(stream, nack.spans)
        missing = self._feeder.answer(turn, neighbour, feed, stream, nack.spans, need)
        if missing:
            self._ask(turn, stream, missing, {**self._own_need(stream), **need})

    def _answer_for_the_dead(self, turn: Turn, neighbour: Neighbour, pubend: int, tick: int) -> None:
        """An earlier process of this broker held that pubend in memory: what was after `tick` is lost."""
        frames = [
            empty_frame(kind=Kind.KNOWLEDGE, pubend=pubend, start=start, end=end, channel=0, lost=True)
            for start, end in self._ends.lost(pubend, tick)
        ]
        if self._links.spend(neighbour.connection, sum(map(len, frames))):
            for frame in frames:
                turn.send(neighbour.connection, frame)
        elif frames:
            neighbour.silences.append((pubend, MAX_TICK, MAX_TICK, 0))  # so that it finds the gap and asks

    # ---- learning: what neighbours tell

    def knowledge(self, turn: Turn, broker: int, batch: EventBatch) -> None:
        """A KNOWLEDGE frame from a neighbour."""
        neighbour = self._neighbours[broker]
        coverage = neighbour.coverage(batch.channel)
        events = batch if batch.count else None
        segment = Segment(batch.start, batch.end, coverage, events, batch.lost)
        self._learn(turn, neighbour, segment, batch.pubend)

    def _on_silence(self, turn: Turn, peer: Peer, message: Silence) -> None:
        neighbour = self._neighbours[peer.broker]
        for pubend, start, end, stamp in message.spans:
            self._learn(turn, neighbour, Segment(start, end, neighbour.coverage(stamp)), pubend)

    def _on_stamp(self, _turn: Turn, peer: Peer, message: Stamp) -> None:
        self._neighbours[peer.broker].define(message)

    def _learn(self, turn: Turn, sender: Neighbour, segment: Segment, pubend: int) -> None:
        _check_span(segment.start, segment.end)
        stream = self._streams.get(pubend)
        origin = pubend >> 32
        if origin == self._me:
            raise PeerError(f"knowledge of pubend {pubend_text(pubend)}, which is this broker's own")
        # A plain stream may be over; a durable one goes on for ever.
        is_end = segment.end == MAX_TICK and (segment.lost or segment.start == MAX_TICK)
        if not (is_end and is_volatile(pubend)) and self._is_ahead(turn, pubend, segment.end):
            return
        self._hear_parent(sender.number, pubend)
        if stream is None:
            if self._upstream.get(origin, (None,))[0] != sender.number or segment.lost:
                return  # from a former parent, about a stream we do not follow
            stream = self._create_stream(turn, pubend, 0 if self._follows(pubend) else segment.start)
        if not stream.announced:
            stream.announce(segment.end)
            if segment.start == segment.end:
                return  # what is up to there follows
        stream.answered((segment.start, segment.end))
        news = self._table.accumulate(stream, segment)
        top, stream.top = stream.top, max(stream.top, segment.end)
        for part in news:
            self._pass_on(turn, sender, stream, part)
        for host in self._hosts:
            host.answer(turn, stream, [segment])
        horizon = stream.horizon
        self._advance(turn, stream)
        # A gap that stays open must not cost a look at all that came after it with every frame.
        looked = stream.horizon == horizon or not stream.partly_asked
        after = top if looked else 0
        self._to_look_at[pubend] = min(after, self._to_look_at.get(pubend, after))
        self._table.evict()

    def _is_ahead(self, turn: Turn, pubend: int, tick: int) -> bool:
        """Whether the tick is so far ahead that it is nobody's. Ticks are times: whoever believed one of them
        would take all that comes before it for known, for good and across restarts. It stays unknown."""
        if tick <= turn.now_us + MAX_AHEAD_US:
            return False
        self._counters["ticks_ahead_total"] += 1
        if turn.now_us >= self._complain_at:
            self._complain_at = turn.now_us + COMPLAIN_US
            ahead_s, name = (tick - turn.now_us) // SECOND_US, pubend_text(pubend)
            turn.note("warning", f"a tick of pubend {name} is {ahead_s} s ahead: it, or our clock, is wrong")
        return True

    def _pass_on(self, turn: Turn, sender: Neighbour, stream: Stream, part: Segment) -> None:
        """News of a stream, to the other neighbours that are fed it or asked for it."""
        if part.batch is not None and self._tracking is not None and not is_history(stream.id):
            self._tracking.routed(stream.origin, sender.number, part.batch.ids(), turn.now_us)
        groups: list[Group] | None = None
        for neighbour in self._neighbours.values():
            feed = neighbour.feeds.get(stream.id)
            if feed is None or neighbour is sender:
                continue
            if part.end > feed.quiet:  # not our own top: we may have heard of more than we knew
                if groups is None and part.batch is not None:
                    groups = self._interest.match(part.batch)
                self._feeder.feed(turn, neighbour, feed, stream, part, groups)
            if feed.wants:
                self._feeder.satisfy(turn, neighbour, feed, stream, part)

    def _advance(self, turn: Turn, stream: Stream) -> None:
        """Hand over to local delivery all that is known without a break from the horizon on."""
        while (segment := stream.knowledge.after(stream.horizon, self._own_need(stream))) is not None:
            if segment.lost and segment.end == MAX_TICK:  # over; what was lost of it was told before
                stream.lost_at = turn.now_us
                self._delivery.deliver(turn, stream.id, segment.start, segment.end, None)
            elif segment.lost:
                self._counters["lost_spans_total"] += 1
                stream.lost_at = turn.now_us
                self._delivery.lost(turn, stream.id, segment.start, segment.end)
            else:
                stream.version = segment.coverage.versions.get(self._me, 0)
                self._beginnings.in_force(turn, stream, segment.start)
                self._deliver(turn, stream, segment)
            for host in self._hosts:
                host.learn(turn, stream, segment)
            stream.horizon = segment.end

    def _spread(self, turn: Turn, stream: Stream, segment: Segment) -> None:
        """A new segment of an own pubend: to local subscribers, then to the neighbours."""
        stream.top = stream.horizon = segment.end
        if segment.batch is not None:
            self._silences.spoke(stream)
        self._deliver(turn, stream, segment)
        for host in self._hosts:
            host.learn(turn, stream, segment)
        groups: list[Group] | None = None
        for neighbour in self._neighbours.values():
            feed = neighbour.feeds.get(stream.id)
            if feed is None:
                continue
            if groups is None and segment.batch is not None:
                groups = self._interest.match(segment.batch)
            self._feeder.feed(turn, neighbour, feed, stream, segment, groups)

    def _deliver(self, turn: Turn, stream: Stream, segment: Segment) -> None:
        batch = segment.batch
        if batch is not None and batch.count and not is_history(stream.id):
            self.delays[is_volatile(stream.id)].observe(turn.now_us - batch.tick(batch.count - 1))
        self._delivery.deliver(turn, stream.id, segment.start, segment.end, batch)

    # ---- curiosity: what is not known is asked for upstream

    def _own_need(self, stream: Stream) -> dict[int, int]:
        return {self._me: stream.need} if stream.need else {}

    def _nack_gaps(self, turn: Turn, stream: Stream, after: int = 0) -> None:
        """Ask upstream for what is Q between the horizon and the newest tick heard of.

        What is up to `after` was looked at before; it is looked at again when its nack is due again.
        """
        if stream.horizon >= stream.top or stream.pubend is not None:
            stream.nack_at = None
            self._curious.pop(stream.id, None)
            return
        need = self._own_need(stream)
        start = stream.horizon
        if stream.nack_at is None or stream.nack_at <= turn.now_us or after <= start:
            stream.nack_at = turn.now_us + self._nack_us
            self._curious[stream.id] = stream
        else:
            start = after
        _, missing = stream.knowledge.find(start, stream.top, need)
        stream.partly_asked = len(missing) > MAX_NACK_SPANS or (start == after and stream.partly_asked)
        if missing:
            self._ask(turn, stream, missing, need)

    def _ask(self, turn: Turn, stream: Stream, spans: list[Span], need: Mapping[int, int]) -> None:
        attachment = self._upstream.get(stream.origin)
        if attachment is None:
            return
        spans = stream.unasked(union(spans), need, turn.now_us - self._nack_us)
        if spans:
            stream.asked.append(Asked(spans, {**self._served(stream.origin), **need}, turn.now_us))
            self._counters["nacks_sent_total"] += 1
            nack = Nack(pubend=stream.id, spans=tuple(spans), need=dict(need))
            turn.send(self._neighbours[attachment[0]].connection, encode(nack))

    def _served(self, origin: int) -> dict[int, int]:
        """Who gets that broker's streams by way of this one, which is among them, and what is known of their
        interest."""
        versions = self._interest.versions()
        below = self._topology.children(origin).values()
        return {
            owner: versions[owner]
            for owners in (*below, (self._me,))
            for owner in owners
            if owner in versions
        }

    def _look_for_gaps(self, turn: Turn) -> None:
        """In the streams heard of in this turn, and where a nack is due again."""
        heard, self._to_look_at = self._to_look_at, {}
        for pubend, after in heard.items():
            if pubend in self._streams:
                self._nack_gaps(turn, self._streams[pubend], after)
        for stream in list(self._curious.values()):
            if stream.nack_at is not None and stream.nack_at <= turn.now_us:
                self._nack_gaps(turn, stream)

    # ---- credit and time

    def credit(self, turn: Turn, broker: int) -> None:
        """A neighbour took what it was sent: go on with what waits."""
        neighbour = self._neighbours.get(broker)
        if neighbour is None:
            return
        for pubend, feed in neighbour.feeds.items():
            if feed.blocked and self._links.available(neighbour.connection) > 0:
                self._feeder.replay(turn, neighbour, feed, self._streams[pubend])
            if feed.wants and pubend in self._durable:
                self._feeder.serve(turn, neighbour, feed, *self._durable[pubend])

    def tick(self, turn: Turn) -> None:
        """The end of a turn: new routes, due nacks and silences, subscriptions that waited long enough."""
        if self._routed_at != self._topology.generation:
            self._reroute(turn)
        if self._silences.tick(turn):
            self._bury(turn.now_us)
            self._ask_again(turn)
            self._expect()
            for neighbour in self._neighbours.values():
                for pubend, feed in neighbour.feeds.items():
                    if not feed.blocked:
                        self._feeder.tell_quiet(turn, neighbour, feed, self._streams[pubend])
        self._look_for_gaps(turn)
        self._beginnings.tick(turn)
        for neighbour in self._neighbours.values():
            self._feeder.flush_silences(turn, neighbour)

    def _bury(self, now_us: int) -> None:
        """Drop the streams of pubends that ended, once those further behind had time to ask."""
        for stream in list(self._streams.values()):
            if (
                stream.lost_at is not None
                and now_us - stream.lost_at > DEAD_STREAM_US
                and stream.id not in self._topology.pubends(stream.origin)
            ):
                self._drop_stream(stream)

    def close(self, turn: Turn) -> None:
        """The process ends in good order: neighbours hear all there is of its plain pubend, and the next
        process will know where that ended."""
        own = self._streams[self.pubend.id]
        self._silences.say(turn)
        for neighbour in self._neighbours.values():
            feed = neighbour.feeds.get(own.id)
            if feed is not None and not feed.blocked:
                self._feeder.tell_quiet(turn, neighbour, feed, own)
            self._feeder.flush_silences(turn, neighbour)
        if self._disk:
            turn.save(ENDS, self._ends.rows(), then=None)

    @property
    def owes_own(self) -> bool:
        """Whether a neighbour has not been sent all that was published here and that it wants."""
        own = (self.pubend.id, *self._durable)
        feeds = (neighbour.feeds.get(pubend) for neighbour in self._neighbours.values() for pubend in own)
        return any(feed is not None and (feed.blocked or feed.wants) for feed in feeds)

    def next_deadline(self) -> int:
        nacks = [stream.nack_at for stream in self._curious.values() if stream.nack_at is not None]
        unconfirmed_us = self._beginnings.next_deadline()
        waiting = [] if unconfirmed_us is None else [unconfirmed_us]
        return min([self._silences.next_deadline, *nacks, *waiting])

    # ---- inspection

    def status(self) -> list[dict[str, object]]:
        return [
            {
                "pubend": pubend_text(stream.id),
                "broker": self._topology.name(stream.origin),
                "horizon": stream.horizon,
                "unknown": stream.top - stream.horizon,
                "held_bytes": stream.knowledge.size if stream.pubend is None else stream.pubend.size,
            }
            for stream in self._streams.values()
        ]

    def metrics(self) -> dict[str, int | float]:
        return {
            **self._counters,
            "events_forwarded_total": self._feeder.events_forwarded,
            "streams": len(self._streams),
            "streams_with_gaps": len(self._curious),
            "plain_bytes": self.pubend.size,
            "cache_bytes": self._table.cache_size,
            "subscriptions_unconfirmed": len(self._beginnings),
            "feeds_blocked": sum(
                feed.blocked for neighbour in self._neighbours.values() for feed in neighbour.feeds.values()
            ),
        }

    def check(self) -> None:
        self._delivery.check()
        self._table.check()
        for neighbour in self._neighbours.values():
            for pubend in neighbour.feeds:
                if pubend >> 32 not in neighbour.attached or pubend not in self._streams:
                    raise BugError(f"routing: a feed of {pubend_text(pubend)} without stream or attachment")


def _delays(mode: str) -> Delays:
    return Delays("delivery_delay_seconds", DELIVERY_DELAY, mode=mode)


def _check_span(start: int, end: int) -> None:
    if not 0 <= start <= end <= MAX_TICK:
        raise PeerError(f"a span of ticks from {start} to {end}; ticks increase from 0 to {MAX_TICK}")
