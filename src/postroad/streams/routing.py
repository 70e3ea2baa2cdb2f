"""The routing core: knowledge flows down a spanning tree per origin, curiosity flows up (spec D2).

Each broker attaches, for every origin, to its parent in that origin's tree, and says how far it knows each
of the origin's streams. The parent feeds it from there on: from its cache first, then live. So a broken
link, a new route and a late joiner are one thing, an attach with a tick; ticks decide, never arrival.

What a neighbour is fed is filtered with the interest of the brokers behind it. The knowledge says so: its
coverage names each of them and the version of its interest that every hop applied (the minimum over the
hops). A broker takes knowledge into its horizon only if the coverage meets what its own subscriptions
need, and nacks the rest. A new subscription begins, per stream, at the first tick filtered with it.

A nack that the cache cannot answer well enough goes one hop up, once for everyone who asks within
`nack_us`; at worst it reaches the pubend, which holds its events unfiltered, or says L.

A plain pubend ends with its broker's process, and the next one answers for it (`ends`). That is the only way
plain events are lost, besides limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from postroad.config import StreamConfig
from postroad.delays import Delays
from postroad.durable.publisher.pubend import DurablePubend
from postroad.errors import BugError, PeerError
from postroad.events.batch import EventBatch, empty_frame
from postroad.ids import is_history, is_volatile, pubend_text, volatile_pubend
from postroad.links.links import Links
from postroad.overlay.interest import Interest
from postroad.overlay.topology import MAX_BROKERS, Topology
from postroad.seam.effects import Effect, Send
from postroad.seam.storage import ReadDone
from postroad.selectors import Group
from postroad.streams.beginnings import Beginnings
from postroad.streams.curiosity import Curiosity, Upstream
from postroad.streams.delivery import Delivery
from postroad.streams.ends import Ends
from postroad.streams.feeding import Feeder, Forwarded
from postroad.streams.knowledge import MAX_TICK, Segment
from postroad.streams.parents import Parents
from postroad.streams.plain_pubend import PlainPubend
from postroad.streams.silences import Silences
from postroad.streams.spans import Span, overlaps, subtract, union
from postroad.streams.stream_table import StreamTable
from postroad.streams.streams import MAX_NACK_SPANS, Neighbour, Stream
from postroad.tracking.strategies import Tracking
from postroad.units import SECOND_US
from postroad.wire.frames import Attach, Detach, Kind, Nack, Silence, Stamp

if TYPE_CHECKING:
    from postroad.durable.subscriber.following import Following

_MAX_U32: Final = (1 << 32) - 1
DEAD_STREAM_US: Final = 60 * SECOND_US  # a dead pubend's stream is kept this long for those further behind
DELIVERY_DELAY: Final = "From an event's tick, when its broker took it, to local delivery here."


class Routing:
    """One broker's part in every stream of the network."""

    def __init__(
        self,
        *,
        me: int,
        boot: int,
        config: StreamConfig,
        topology: Topology,
        interest: Interest,
        delivery: Delivery,
        links: Links,
        tracking: Tracking,
        forwarded: Forwarded | None,
        confirmed: Callable[[int, tuple[str, ...]], list[Effect]],
        held: Callable[[int], bool],
        owing: Callable[[int], bool],
        ends: Mapping[bytes, bytes],
        now_us: int,
    ) -> None:
        self._me = me
        self._topology = topology
        self._interest = interest
        self._delivery = delivery
        self._links = links
        self._tracking = tracking
        self._out: list[Effect] = []
        self._feeder = Feeder(
            me=me, topology=topology, interest=interest, links=links, out=self._out, forwarded=forwarded
        )
        self.pubend = PlainPubend(volatile_pubend(me, boot), limit=config.plain_bytes, now_us=now_us)
        self.ends = Ends(ends, self.pubend)
        own = Stream(self.pubend.id, start=self.pubend.start, pubend=self.pubend)
        self._table = StreamTable(config.cache_bytes)
        self._table.add(own)
        self._streams = self._table.streams
        self._neighbours: dict[int, Neighbour] = {}  # by broker number
        self._upstream: Upstream = {}
        self._expected_at = -1  # topology generation that children are expected for
        self._durable: dict[int, tuple[Stream, DurablePubend]] = {}  # own durable pubends that are open
        self._silences = Silences(
            own,
            self.pubend,
            durable=self._durable,
            silence_us=config.silence_us,
            held=held,
            owing=owing,
            spread=self._spread,
            out=self._out,
            now_us=now_us,
        )
        self.host: Following | None = None  # durable subscribers, where there is a disk
        self._counters = dict.fromkeys(("nacks_received_total", "lost_spans_total"), 0)
        self._curiosity = Curiosity(
            me=me,
            nack_us=config.nack_us,
            streams=self._streams,
            upstream=self._upstream,
            neighbours=self._neighbours,
            served=self._served,
            out=self._out,
        )
        self._parents = Parents(
            me=me,
            topology=topology,
            table=self._table,
            upstream=self._upstream,
            neighbours=self._neighbours,
            curiosity=self._curiosity,
            create=self._create_stream,
            out=self._out,
        )
        self.delays = {True: _delays("plain"), False: _delays("durable")}  # by whether it is volatile
        self._beginnings = Beginnings(
            me=me,
            wait_us=config.subscribe_wait_us,
            topology=topology,
            delivery=delivery,
            streams=self._streams,
            upstream=self._upstream,
            begin_durable=self._begin_durable,
            confirmed=confirmed,
            out=self._out,
        )

    # ---- publishing and local subscriptions

    def publish(self, batches: list[EventBatch], now_us: int) -> list[Effect]:
        """Give these events their ticks and send them wherever they are wanted."""
        stream = self._streams[self.pubend.id]
        self._spread(stream, self.pubend.publish(batches, now_us), now_us)
        for neighbour in self._neighbours.values():
            self._feeder.flush_silences(neighbour)
        return self._take()

    def open_durable(self, pubend: DurablePubend) -> list[Effect]:
        """An own durable pubend of which others may hear from now on."""
        stream = Stream(pubend.id, start=pubend.last, pubend=pubend)
        self._table.add(stream)
        self._durable[stream.id] = (stream, pubend)
        self._silences.news()
        self._beginnings.opened(stream)
        if self.host is not None:
            self.host.met(stream)
        for neighbour in self._neighbours.values():
            tick = neighbour.up_at.setdefault(stream.id, stream.horizon)
            if self._me in neighbour.attached:
                self._feeder.begin(neighbour, stream, tick)
        return self._take()

    def spread(self, pubend: DurablePubend, segment: Segment, now_us: int) -> list[Effect]:
        """Events of an own durable pubend that are on disk now."""
        self._spread(self._streams[pubend.id], segment, now_us)
        return self._take()

    def log_read(self, pubend: DurablePubend, done: ReadDone) -> list[Effect]:
        """What was read for neighbours goes to those that want it; those with credit get more."""
        stream = self._streams[pubend.id]
        segments, _ = pubend.read_done(done, go_on=False)
        for neighbour in self._neighbours.values():
            feed = neighbour.feeds.get(stream.id)
            if feed is not None and feed.wants:
                for segment in segments:
                    self._feeder.satisfy(neighbour, feed, stream, segment)
                if segments:
                    self._feeder.serve(neighbour, feed, stream, pubend)
        if self.host is not None:
            self.host.answer(stream, segments)
        return self._take()

    # ---- durable subscribers

    def host_subscription(self, key: int, version: int) -> None:
        """A durable subscription that has begun wherever it begins: all knowledge must serve it."""
        self._beginnings.host_subscription(key, version)

    def durable_streams(self) -> list[int]:
        return [pubend for pubend in self._streams if not is_volatile(pubend)]

    def stream(self, pubend: int) -> Stream | None:
        return self._streams.get(pubend)

    def heard(self, pubend: int) -> int | None:
        """How far a stream is, None while that is not known."""
        stream = self._streams.get(pubend)
        return stream.top if stream is not None and stream.announced else None

    def away(self, pubend: int) -> str | None:
        """The name of its broker, if that is out of reach."""
        origin = pubend >> 32
        return self._topology.name(origin) if self._topology.distance(origin) is None else None

    def durable_heads(self) -> dict[int, int]:
        """How far each durable pubend is known here."""
        return {pubend: self._streams[pubend].horizon for pubend in sorted(self.durable_streams())}

    def follow_from(self, pubend: int, tick: int) -> None:
        """A pubend that durable subscriptions here knew before a restart."""
        if pubend not in self._streams and self._table.has_room(pubend >> 32):
            self._create_stream(pubend, tick)

    def follow_all(self) -> None:
        """There is a first durable subscription."""
        if self.host is not None:
            for pubend in self.durable_streams():
                self.host.met(self._streams[pubend])

    def activate_waiting(self, stream: Stream) -> None:
        """Hosting has caught up with a stream: durable subscriptions in force there begin."""
        self._beginnings.activate_waiting(stream)

    def find_for_host(
        self, pubend: int, spans: Sequence[Span], need: Mapping[int, int], now_us: int
    ) -> list[Segment]:
        """What is known here of these spans; the rest is asked for."""
        stream = self._streams.get(pubend)
        if stream is None:
            return []
        self._silences.asked(stream, spans)
        # One look at all of it: a subscriber wants many single ticks, which lie in few segments.
        whole, gaps = stream.find(spans[0][0], spans[-1][1], need, beyond=True, whole=True)
        found = [one for one in whole if overlaps(spans, one.start, one.end)]
        missing = subtract(spans, subtract([(spans[0][0], spans[-1][1])], gaps))
        self.ask_for_host(stream, missing, need, now_us)
        return found

    def ask_for_host(self, stream: Stream, spans: list[Span], need: Mapping[int, int], now_us: int) -> None:
        if isinstance(stream.pubend, DurablePubend):
            self._out += stream.pubend.read(union(spans))
        elif spans:
            self._curiosity.ask(stream, spans, {**self._curiosity.own_need(stream), **need}, now_us)

    def subscribe(self, key: int, version: int, now_us: int) -> list[Effect]:
        """A local subscription that relies on this version of the own interest."""
        self._beginnings.subscribe(key, version, now_us)
        self._silences.news()
        return self._take()

    def unsubscribe(self, key: int) -> None:
        self._beginnings.unsubscribe(key)

    def _begin_durable(self, key: int, stream: Stream) -> bool:
        return self.host is None or is_volatile(stream.id) or self.host.begin(key, stream)

    # ---- neighbours and routes

    def neighbour_up(self, number: int, connection: int) -> None:
        up_at = {stream.id: stream.top for stream in self._streams.values()}
        self._neighbours[number] = Neighbour(number, connection, up_at)

    def neighbour_down(self, number: int) -> None:
        del self._neighbours[number]
        self._parents.lost(number)

    def interest_changed(self) -> None:
        self._feeder.interest_changed()
        self._silences.news()

    def forget_origin(self, origin: int, now_us: int) -> list[Effect]:
        """A broker is gone for good: what of its streams never arrived is lost."""
        for stream in list(self._table.of(origin).values()):
            if stream.need:
                self._out += self._delivery.lost(stream.id, stream.horizon, max(stream.horizon + 1, now_us))
            self._drop_stream(stream)
        self._parents.forget(origin)
        return self._take()

    def _drop_stream(self, stream: Stream) -> None:
        self._table.drop(stream)
        self._curiosity.dropped(stream.id)
        self._delivery.retire(stream.id)
        if self.host is not None:
            self.host.dropped(stream.id)
        for neighbour in self._neighbours.values():
            neighbour.feeds.pop(stream.id, None)
            neighbour.up_at.pop(stream.id, None)

    def _reroute(self, now_us: int) -> None:
        self.interest_changed()  # what neighbours are fed depends on routes as it does on interest
        self._parents.reroute(now_us)
        self._beginnings.rerouted()

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
                        pubend: one.top for pubend, one in self._table.of(origin).items() if one.announced
                    }

    def _create_stream(self, pubend: int, start: int) -> Stream:
        origin = pubend >> 32
        if not self._table.has_room(origin):
            raise PeerError(f"more streams than can be followed, of broker {origin:08x} or of all")
        former = self._former(pubend)
        stream = Stream(pubend, start=start)
        self._table.add(stream)
        self._beginnings.created(stream, former)
        for neighbour in self._neighbours.values():
            neighbour.up_at[pubend] = start
            if origin in neighbour.attached:
                self._feeder.begin(neighbour, stream, start)
        if self.host is not None:
            self.host.met(stream)
        return stream

    def _former(self, pubend: int) -> Stream | None:
        """The stream of the same broker's previous start, if this one follows it from its beginning."""
        if not self._parents.follows(pubend):
            return None
        held = self._table.of(pubend >> 32)
        earlier = [other for other in held if is_volatile(other) and other < pubend]
        return self._streams[max(earlier)] if earlier else None

    # ---- what neighbours say

    def attach(self, number: int, message: Attach) -> list[Effect]:
        neighbour = self._neighbours[number]
        origin = message.origin
        neighbour.attached.add(origin)
        if not 0 <= origin <= _MAX_U32 or len(neighbour.attached) > MAX_BROKERS:
            raise PeerError(f"attach to broker {origin}, which cannot be, or to too many")
        due_at = neighbour.due_at.pop(origin, {})
        for pubend, tick in sorted(message.known.items()):
            if pubend >> 32 != origin or not 0 <= tick <= MAX_TICK:
                raise PeerError("attach names a pubend that is not the origin's, or a tick out of range")
            if pubend in self._streams:
                continue
            if origin == self._me and is_volatile(pubend):
                self._answer_for_the_dead(neighbour, pubend, tick)
            elif origin == self._me:
                neighbour.up_at[pubend] = tick  # it is told all after that when the pubend opens
            else:
                self._adopt(pubend, tick)
        for stream in list(self._table.of(origin).values()):
            if stream.id not in message.known and self._parents.has_ended(stream):
                continue  # over for the neighbour, or never known there
            tick = message.known.get(stream.id, neighbour.up_at[stream.id])
            at = due_at.get(stream.id, stream.top) if stream.id in message.known else tick
            self._feeder.begin(neighbour, stream, tick, announce=at)
        return self._take()

    def _adopt(self, pubend: int, tick: int) -> None:
        """A neighbour asks about a stream that is not followed here: follow it from where that one stands."""
        origin = pubend >> 32
        # If it has none there is no such broker: link state comes before any attach.
        if self._topology.own_pubends(origin):
            self._create_stream(pubend, tick)
            self._parents.reattach(origin)

    def detach(self, number: int, message: Detach) -> None:
        neighbour = self._neighbours[number]
        neighbour.attached.discard(message.origin)
        for pubend in self._table.of(message.origin):
            feed = neighbour.feeds.pop(pubend, None)
            if feed is not None:
                neighbour.up_at[pubend] = feed.told  # should it forget the stream, it is not told all again

    def _answer_for_the_dead(self, neighbour: Neighbour, pubend: int, tick: int) -> None:
        """An earlier process of this broker held that pubend in memory: what was after `tick` is lost."""
        frames = [
            empty_frame(kind=Kind.KNOWLEDGE, pubend=pubend, start=start, end=end, channel=0, lost=True)
            for start, end in self.ends.lost(pubend, tick)
        ]
        if self._links.spend(neighbour.connection, sum(map(len, frames))):
            self._out += [Send(neighbour.connection, frame) for frame in frames]
        elif frames:
            neighbour.silences.append((pubend, MAX_TICK, MAX_TICK, 0))  # so that it finds the gap and asks

    def knowledge(self, number: int, batch: EventBatch, now_us: int) -> list[Effect]:
        """A KNOWLEDGE frame from a neighbour."""
        neighbour = self._neighbours[number]
        coverage = neighbour.coverage(batch.channel)
        events = batch if batch.count else None
        segment = Segment(batch.start, batch.end, coverage, events, batch.lost)
        self._learn(neighbour, segment, batch.pubend, now_us)
        return self._take()

    def silence(self, number: int, message: Silence, now_us: int) -> list[Effect]:
        neighbour = self._neighbours[number]
        for pubend, start, end, stamp in message.spans:
            self._learn(neighbour, Segment(start, end, neighbour.coverage(stamp)), pubend, now_us)
        return self._take()

    def stamp(self, number: int, message: Stamp) -> None:
        self._neighbours[number].define(message)

    def nack(self, number: int, message: Nack, now_us: int) -> list[Effect]:
        """Answer from what is known here; ask upstream for the rest, once for all who want it."""
        self._counters["nacks_received_total"] += 1
        neighbour = self._neighbours[number]
        if len(message.spans) > MAX_NACK_SPANS or len(message.need) > MAX_BROKERS:
            raise PeerError(f"a nack of more than {MAX_NACK_SPANS} spans or {MAX_BROKERS} owners")
        for start, end in message.spans:
            _check_span(start, end)
        stream = self._streams.get(message.pubend)
        if stream is None:
            if message.spans:
                first = min(message.spans)[0]
                if message.pubend >> 32 == self._me and is_volatile(message.pubend):
                    self._answer_for_the_dead(neighbour, message.pubend, first)
                elif message.pubend >> 32 in neighbour.attached:
                    self._adopt(message.pubend, first)
            return self._take()
        feed = neighbour.feeds.get(stream.id)
        if feed is None:
            return self._take()  # detached meanwhile; it asks its new parent
        applied = self._interest.versions()
        need = {owner: version for owner, version in message.need.items() if version > 0}
        if any(applied.get(owner, 0) < version for owner, version in need.items()):
            return self._take()  # our tables are older than the asker's: it asks again
        self._silences.asked(stream, message.spans)
        missing = self._feeder.answer(neighbour, feed, stream, message.spans, need)
        if missing:
            self._curiosity.ask(stream, missing, {**self._curiosity.own_need(stream), **need}, now_us)
        return self._take()

    def _served(self, origin: int) -> dict[int, int]:
        """This broker and those below it in the origin's tree, with the versions known of them."""
        versions = self._interest.versions()
        below = self._topology.children(origin).values()
        return {
            owner: versions[owner]
            for owners in (*below, (self._me,))
            for owner in owners
            if owner in versions
        }

    # ---- learning and spreading

    def _learn(self, sender: Neighbour, segment: Segment, pubend: int, now_us: int) -> None:
        _check_span(segment.start, segment.end)
        stream = self._streams.get(pubend)
        origin = pubend >> 32
        if origin == self._me:
            raise PeerError("a neighbour claims to know our own stream")
        self._parents.heard(sender.number, pubend)
        if stream is None:
            if self._upstream.get(origin, (None,))[0] != sender.number or segment.lost:
                return  # from a former parent, about a stream we do not follow
            stream = self._create_stream(pubend, 0 if self._parents.follows(pubend) else segment.start)
        if not stream.announced:
            stream.announce(segment.end)
            if segment.start == segment.end:
                return  # what is up to there follows
        news = self._table.accumulate(stream, segment)
        top, stream.top = stream.top, max(stream.top, segment.end)
        for part in news:
            if part.batch is not None and not is_history(pubend):
                self._tracking.routed(stream.origin, sender.number, part.batch.ids(), now_us)
            groups: list[Group] | None = None
            for neighbour in self._neighbours.values():
                feed = neighbour.feeds.get(pubend)
                if feed is None or neighbour is sender:
                    continue
                if part.end > feed.quiet:  # not our own top: we may have heard of more than we knew
                    if groups is None and part.batch is not None:
                        groups = self._interest.match(part.batch)
                    self._feeder.feed(neighbour, feed, stream, part, groups)
                if feed.wants:
                    self._feeder.satisfy(neighbour, feed, stream, part)
        if self.host is not None:
            self.host.answer(stream, [segment])
        horizon = stream.horizon
        self._advance(stream, now_us)
        # A gap that stays open must not cost a look at all that came after it with every frame.
        looked = stream.horizon == horizon or not stream.partly_asked
        self._curiosity.heard(pubend, top if looked else 0)
        self._table.evict()

    def _spread(self, stream: Stream, segment: Segment, now_us: int) -> None:
        """A new segment of an own pubend: to local subscribers, then to the neighbours."""
        stream.top = stream.horizon = segment.end
        if segment.batch is not None:
            self._silences.spoke(stream)
        self._deliver(stream, segment, now_us)
        if self.host is not None:
            self.host.learn(stream, segment)
        groups: list[Group] | None = None
        for neighbour in self._neighbours.values():
            feed = neighbour.feeds.get(stream.id)
            if feed is None:
                continue
            if groups is None and segment.batch is not None:
                groups = self._interest.match(segment.batch)
            self._feeder.feed(neighbour, feed, stream, segment, groups)

    def _advance(self, stream: Stream, now_us: int) -> None:
        """Hand over to local delivery all that is known without a break from the horizon on."""
        while (
            segment := stream.knowledge.after(stream.horizon, self._curiosity.own_need(stream))
        ) is not None:
            if segment.lost and segment.end == MAX_TICK:  # over; what was lost of it was told before
                stream.lost_at = now_us
                self._out += self._delivery.deliver(stream.id, segment.start, segment.end, None)
            elif segment.lost:
                self._counters["lost_spans_total"] += 1
                stream.lost_at = now_us
                self._out += self._delivery.lost(stream.id, segment.start, segment.end)
            else:
                stream.version = segment.coverage.versions.get(self._me, 0)
                self._beginnings.in_force(stream, segment.start)
                self._deliver(stream, segment, now_us)
            if self.host is not None:
                self.host.learn(stream, segment)
            stream.horizon = segment.end

    def _deliver(self, stream: Stream, segment: Segment, now_us: int) -> None:
        batch = segment.batch
        if batch is not None and batch.count and not is_history(stream.id):
            self.delays[is_volatile(stream.id)].observe(now_us - batch.tick(batch.count - 1))
        self._out += self._delivery.deliver(stream.id, segment.start, segment.end, batch)

    # ---- time

    def credit(self, number: int) -> list[Effect]:
        """A neighbour took what it was sent: go on with what waits."""
        neighbour = self._neighbours.get(number)
        if neighbour is not None:
            for pubend, feed in neighbour.feeds.items():
                if feed.blocked and self._links.available(neighbour.connection) > 0:
                    self._feeder.replay(neighbour, feed, self._streams[pubend])
                if feed.wants and pubend in self._durable:
                    self._feeder.serve(neighbour, feed, *self._durable[pubend])
        return self._take()

    def settle(self, now_us: int) -> list[Effect]:
        """The end of a turn: new routes, due nacks and silences, subscriptions that waited long enough."""
        if self._parents.stale:
            self._reroute(now_us)
        if self._silences.settle(now_us):
            self._bury(now_us)
            self._parents.ask_again(now_us)
            self._expect()
            for neighbour in self._neighbours.values():
                for pubend, feed in neighbour.feeds.items():
                    if not feed.blocked:
                        self._feeder.tell_quiet(neighbour, feed, self._streams[pubend])
        self._curiosity.settle(now_us)
        self._beginnings.tick(now_us)
        for neighbour in self._neighbours.values():
            self._feeder.flush_silences(neighbour)
        return self._take()

    def close(self, now_us: int) -> list[Effect]:
        """The process ends in good order: neighbours hear all there is of its plain pubend."""
        own = self._streams[self.pubend.id]
        self._silences.say(now_us)
        for neighbour in self._neighbours.values():
            feed = neighbour.feeds.get(own.id)
            if feed is not None and not feed.blocked:
                self._feeder.tell_quiet(neighbour, feed, own)
            self._feeder.flush_silences(neighbour)
        return self._take()

    def _bury(self, now_us: int) -> None:
        """Drop the streams of pubends that ended, once those further behind had time to ask."""
        for stream in list(self._streams.values()):
            if (
                stream.lost_at is not None
                and now_us - stream.lost_at > DEAD_STREAM_US
                and stream.id not in self._topology.pubends(stream.origin)
            ):
                self._drop_stream(stream)

    def next_deadline(self) -> int:
        others = (self._curiosity.next_deadline(), self._beginnings.next_deadline())
        return min([self._silences.next_deadline, *(deadline for deadline in others if deadline is not None)])

    def _take(self) -> list[Effect]:
        out = self._out[:]
        self._out.clear()  # the feeder appends to this very list
        return out if self.host is None else out + self.host.take()

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
            "nacks_sent_total": self._curiosity.nacks_sent,
            "streams_with_gaps": len(self._curiosity),
            "plain_bytes": self.pubend.size,
            "cache_bytes": self._table.cache_size,
            "subscriptions_unconfirmed": len(self._beginnings),
            "feeds_blocked": sum(
                feed.blocked for neighbour in self._neighbours.values() for feed in neighbour.feeds.values()
            ),
        }

    def check(self) -> None:
        self._table.check()
        for neighbour in self._neighbours.values():
            for pubend in neighbour.feeds:
                if pubend >> 32 not in neighbour.attached or pubend not in self._streams:
                    raise BugError(f"routing: a feed of {pubend_text(pubend)} without stream or attachment")


def _delays(mode: str) -> Delays:
    return Delays("delivery_delay_seconds", DELIVERY_DELAY, mode=mode)


def _check_span(start: int, end: int) -> None:
    if not 0 <= start <= end <= MAX_TICK:
        raise PeerError(f"a span of ticks from {start} to {end} is out of range or out of order")
