"""Local subscribers: from knowledge of a stream to frames on their connections.

Knowledge of each pubend comes here once, in order, as spans (start, end]. A batch is matched once for
all local subscriptions; those that matched the same rows under the same subscription number (clients
number from 1, so numbers coincide) are sent the same bytes object. A delivery frame carries the span of
the batch it was cut from. The span may begin later than the last one ended: silence in between, nothing
missing. What is missing is always said, by a frame with the LOST flag.

A subscription begins at a tick of its own in each pubend (`activate`): before that tick the brokers
upstream did not filter for it, so their silence says nothing about it (spec durable.md, traps).

Slow consumers. A connection without credit is stalled: its frames wait in one queue, in order, bounded
per subscription and per connection. When a frame does not fit, the overflow policy of its subscription
acts: "disconnect", or "drop". A subscription that drops goes on dropping, one span per pubend, until its
own frames in the queue are sent; then the spans go out as LOST frames, before anything later. Memory is
bounded by the buffers and by one span per subscription and pubend.

All queues together have a bound too. Where a frame would pass it, the connections with the longest queues
pay: what waits for them becomes lost spans, or the connection ends, as their policies say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from postroad.errors import BugError, PeerError, SlowConsumerError, UsageError
from postroad.events.batch import EventBatch, empty_frame, frame_ids, frame_pubend, frame_span
from postroad.ids import is_history, pubend_text
from postroad.seam.effects import Send
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.selectors import MatchIndex, Selector
from postroad.streams.settings import DeliveryConfig
from postroad.tracking.recorder import MessageNote
from postroad.wire.frames import Ended, Kind, Subscribe, encode

CONNECTION_BUFFERS: Final = 4  # a connection holds at most this many times `DeliveryConfig.buffer_bytes`
MAX_PUBENDS: Final = 65_536
KEPT_SHARE: Final = 0.875  # of the bound for all queues, once the longest have paid: so that they seldom do
MAX_STATUS_ROWS: Final = 1_000
MAX_STATUS_LOOKED: Final = 10_000  # subscriptions that are looked at for these
_POLICIES: Final = ("drop", "disconnect")


class _Connection:
    """A client connection with at least one subscription."""

    __slots__ = ("by_number", "closed", "ended", "gapped", "number", "queue", "stalled", "waiting_bytes")

    def __init__(self, number: int) -> None:
        self.number = number
        self.by_number: dict[int, _Subscription] = {}  # its subscriptions
        # What waits for credit, in order: whose, the frame, its events (none: a LOST frame).
        self.queue: deque[tuple[_Subscription, bytes, int]] = deque()
        self.waiting_bytes = 0  # of `queue`
        self.gapped: deque[_Subscription] = deque()  # those with lost spans and nothing in `queue`
        self.stalled = False  # something waits in `queue` or `gapped`, or the connection has ended
        self.ended = False  # told to close, or closed: nothing more is sent to it
        self.closed = False


class _Subscription:
    __slots__ = (
        "active",
        "connection",
        "delivered",
        "disconnect",
        "dropped",
        "gaps",
        "id",
        "limit",
        "lost",
        "name",
        "number",
        "selector",
        "waiting",
        "waiting_bytes",
    )

    def __init__(
        self,
        subscription_id: int,
        name: str,
        connection: _Connection,
        asked: Subscribe,
        selector: Selector,
        *,
        limit: int,
    ) -> None:
        self.id = subscription_id
        self.name = name  # by which traces know it
        self.connection = connection
        self.number = asked.number
        self.selector = selector
        self.disconnect = asked.overflow == "disconnect"
        self.limit = limit  # of `waiting_bytes`
        self.active = 0  # the bits of the streams whose events are all for it from now on
        self.waiting = 0  # its frames in the connection's queue
        self.waiting_bytes = 0  # and their bytes
        self.lost: dict[int, tuple[int, int]] = {}  # pubend -> span dropped and not yet reported
        self.delivered = 0  # events sent
        self.dropped = 0  # events that a lost span stands for, those it matched
        self.gaps = 0  # LOST frames sent


class _Stream:
    """A pubend that somebody here subscribes to."""

    __slots__ = ("bit", "end", "late", "tracked")

    def __init__(self, pubend: int, bit: int) -> None:
        self.tracked = not is_history(pubend)
        self.bit = bit  # 1 << n, in `_Subscription.active`
        self.end: int | None = None  # knowledge up to here has been delivered; None before any has
        self.late: dict[int, int] = {}  # subscription -> tick it begins at, where that is after `end`


class _Cut(msgspec.Struct, gc=False):
    """Some rows of a batch, and the frames made of them so far."""

    batch: EventBatch | None  # None: the span is lost
    rows: NDArray[np.uint32] | None
    count: int  # of rows
    pubend: int
    start: int
    end: int
    frames: dict[int, bytes] = {}  # by subscription number; every cut gets its own

    def frame(self, number: int) -> bytes:
        made = self.frames.get(number)
        if made is None:
            if self.batch is None:
                made = _lost_frame(self.pubend, self.start, self.end, number)
            else:
                made = self.batch.select(
                    None if self.count == self.batch.count else self.rows,
                    kind=Kind.DELIVERY,
                    pubend=self.pubend,
                    start=self.start,
                    end=self.end,
                    channel=number,
                )
            self.frames[number] = made
        return made


def _row(subscription: _Subscription) -> dict[str, int | str]:
    return {
        "connection": subscription.connection.number,
        "number": subscription.number,
        "name": subscription.name,
        "topic": subscription.selector.topic,
        "where": subscription.selector.where,
        "overflow": "disconnect" if subscription.disconnect else "drop",
        "delivered": subscription.delivered,
        "dropped": subscription.dropped,
        "gaps": subscription.gaps,
        "buffered_bytes": subscription.waiting_bytes,
    }


class Delivery:
    """The subscriptions of the clients connected here.

    `available` and `spend` are the send credit of a connection; a frame may be sent while some is left.
    `may_read` says whether a principal may read a topic. `note` is told what went to whom.
    """

    __slots__ = (
        "_available",
        "_bits",
        "_buffer_bytes",
        "_connections",
        "_delivered",
        "_disconnects",
        "_dropped",
        "_frames",
        "_gaps",
        "_index",
        "_last_id",
        "_may_read",
        "_note",
        "_shortened",
        "_spend",
        "_streams",
        "_subscriptions",
        "_total_bytes",
        "_waiting_bytes",
    )

    def __init__(
        self,
        board: Switchboard,
        *,
        config: DeliveryConfig,
        available: Callable[[int], int],
        spend: Callable[[int, int], object],
        may_read: Callable[[str, str], bool] = lambda _principal, _topic: True,
        note: Callable[[MessageNote], object] | None = None,
    ) -> None:
        self._buffer_bytes = config.buffer_bytes
        self._total_bytes = config.half_bytes
        self._waiting_bytes = 0  # of all `_connections`
        self._note = note
        self._available = available
        self._spend = spend
        self._may_read = may_read
        self._subscriptions: dict[int, _Subscription] = {}  # by id
        self._connections: dict[int, _Connection] = {}  # those with subscriptions
        self._streams: dict[int, _Stream] = {}  # by pubend
        self._bits = 0  # the bits in use by `_streams`
        self._index = MatchIndex()  # all `_subscriptions`; key and target are the subscription's id
        self._last_id = 0
        self._delivered = self._dropped = self._frames = self._gaps = self._disconnects = self._shortened = 0
        board.metrics(self.metrics)
        board.status_for("subscriptions", lambda _now_us, asker: self._visible(asker))

    # Subscriptions

    def subscribe(self, connection: int, asked: Subscribe, selector: Selector, name: str) -> int:
        """A new subscription, which gets nothing until it is activated. Its id is never used again.

        `selector` is that of `asked`; `name` is by which traces know it.
        """
        if asked.overflow not in _POLICIES:
            raise UsageError(f"overflow policy {asked.overflow!r} is not one of {', '.join(_POLICIES)}")
        if asked.buffer < 0:
            raise UsageError(f"a buffer of {asked.buffer} bytes; it has at least 1, or 0 for the default")
        self.check_free(connection, asked.number)
        home = self._connections.get(connection) or _Connection(connection)
        self._last_id += 1
        subscription_id = self._last_id
        self._index.add(subscription_id, selector, subscription_id)
        limit = min(asked.buffer or self._buffer_bytes, self._connection_bytes)
        subscription = _Subscription(subscription_id, name, home, asked, selector, limit=limit)
        home.by_number[asked.number] = self._subscriptions[subscription_id] = subscription
        self._connections[connection] = home
        return subscription_id

    def check_free(self, connection: int, number: int) -> None:
        """PeerError if the number is in use: an answer would be taken for the end of the one that has it."""
        home = self._connections.get(connection)
        if home is not None and number in home.by_number:
            raise PeerError(f"subscription number {number} is in use on this connection")

    @property
    def _connection_bytes(self) -> int:
        return CONNECTION_BUFFERS * self._buffer_bytes

    def activate(self, subscription_id: int, pubend: int, start: int) -> None:
        """From tick `start` (exclusive) on, events of `pubend` are for this subscription.

        A second call for the same pubend changes nothing; a subscription that has ended is ignored.
        """
        subscription = self._subscriptions.get(subscription_id)
        if subscription is None:
            return
        stream = self._streams.get(pubend)
        if stream is None:
            stream = self._open_stream(pubend)
        if subscription.active & stream.bit or subscription_id in stream.late:
            return
        if stream.end is not None and start <= stream.end:
            subscription.active |= stream.bit
        else:
            stream.late[subscription_id] = start

    def _open_stream(self, pubend: int) -> _Stream:
        if len(self._streams) >= MAX_PUBENDS:
            raise PeerError(f"more than {MAX_PUBENDS} publishing ends at once")
        bit = ~self._bits & (self._bits + 1)  # the lowest that is free
        self._bits |= bit
        stream = self._streams[pubend] = _Stream(pubend, bit)
        return stream

    def retire(self, pubend: int) -> None:
        """No more knowledge of this pubend will come. What waits for credit still goes out."""
        stream = self._streams.pop(pubend, None)
        if stream is not None:
            self._bits &= ~stream.bit
            for subscription in self._subscriptions.values():
                subscription.active &= ~stream.bit

    def unsubscribe(self, connection: int, number: int) -> int | None:
        """End a subscription; its id, None if there is none."""
        home = self._connections.get(connection)
        subscription = None if home is None else home.by_number.pop(number, None)
        if home is None or subscription is None:
            return None
        if subscription.waiting:
            home.queue = deque(item for item in home.queue if item[0] is not subscription)
            home.waiting_bytes -= subscription.waiting_bytes
            self._waiting_bytes -= subscription.waiting_bytes
        elif subscription.lost:
            home.gapped.remove(subscription)
        home.stalled = bool(home.ended or home.queue or home.gapped)
        if not home.by_number and (home.closed or not home.ended):
            del self._connections[connection]
        del self._subscriptions[subscription.id]
        self._index.remove(subscription.id)
        for stream in self._streams.values():
            stream.late.pop(subscription.id, None)
        return subscription.id

    def closed(self, connection: int) -> list[int]:
        """The connection is gone: nothing more is sent to it. The numbers of its subscriptions: each is to be
        ended, and may be later."""
        home = self._connections.get(connection)
        if home is None:
            return []
        home.closed = True
        self._end(home)
        if not home.by_number:
            del self._connections[connection]
        return list(home.by_number)

    def _end(self, home: _Connection) -> None:
        """What waits is dropped, without a Gap: nobody is there to hear of it."""
        home.ended = home.stalled = True
        self._clear_queue(home)
        home.gapped.clear()
        for subscription in home.by_number.values():
            subscription.waiting = subscription.waiting_bytes = 0
            subscription.lost = {}

    def name(self, connection: int, number: int) -> str | None:
        """By which traces know that subscription, if there is one."""
        home = self._connections.get(connection)
        subscription = None if home is None else home.by_number.get(number)
        return None if subscription is None else subscription.name

    def waiting(self, connection: int) -> int:
        """Bytes that wait for credit of this connection."""
        home = self._connections.get(connection)
        return 0 if home is None or home.ended else home.waiting_bytes

    def count(self, connection: int) -> int:
        """Subscriptions of a connection."""
        home = self._connections.get(connection)
        return 0 if home is None else len(home.by_number)

    # Delivering

    def deliver(self, turn: Turn, pubend: int, start: int, end: int, batch: EventBatch | None) -> None:
        """Knowledge of (start, end], in order per pubend; without a batch it is silence."""
        stream = self._streams.get(pubend)
        if stream is None:
            return  # nobody has been activated for it
        self._advance(stream, pubend, start, end)
        if batch is not None and batch.count:
            self._deliver_rows(turn, stream, pubend, start, end, batch)
        if stream.late:
            self._promote(stream, end)

    def _deliver_rows(
        self, turn: Turn, stream: _Stream, pubend: int, start: int, end: int, batch: EventBatch
    ) -> None:
        # Once per subscriber and batch: every name below is local because this loop is the hot path. It does
        # what `turn.send` does, without the call.
        subscriptions, available, spend, bit = self._subscriptions, self._available, self._spend, stream.bit
        emit = turn.effects.append
        frames = events = 0
        note = self._note if stream.tracked else None
        for rows, targets in self._index.match(batch):
            count = len(rows)
            cut = _Cut(batch, rows, count, pubend, start, end)
            names: list[str] = []
            number, frame, size = -1, b"", 0
            for target in targets:
                subscription = subscriptions[target]
                if not subscription.active & bit:
                    self._deliver_late(turn, stream, subscription, cut)
                    continue
                connection = subscription.connection
                if connection.stalled or available(connection.number) <= 0:
                    self._hold(turn, subscription, cut)
                    continue
                if subscription.number != number:
                    number = subscription.number
                    frame = cut.frame(number)
                    size = len(frame)
                spend(connection.number, size)
                emit(Send(connection.number, frame))
                subscription.delivered += count
                frames += 1
                events += count
                names.append(subscription.name)
            if note is not None and names:
                ids = batch.last_id if batch.count == 1 else batch.ids(rows)
                note((turn.now_us, ids, pubend, names))
        self._frames += frames
        self._delivered += events

    def takers(self, batch: EventBatch) -> list[tuple[NDArray[np.uint32], list[tuple[int, int, str]]]]:
        """Who wants which rows of events that are part of no stream: connections, numbers and names."""
        subscriptions = self._subscriptions
        return [
            (
                rows,
                [
                    (target.connection.number, target.number, target.name)
                    for target in map(subscriptions.__getitem__, targets)
                    if not target.connection.ended
                ],
            )
            for rows, targets in self._index.match(batch)
        ]

    def _deliver_late(self, turn: Turn, stream: _Stream, subscription: _Subscription, cut: _Cut) -> None:
        """Deliver to a subscription that may begin inside this span, after it, or never."""
        begin = stream.late.get(subscription.id)
        if begin is None or begin >= cut.end:
            return
        if begin > cut.start:
            rows, count = cut.rows, 0
            if cut.batch is not None and rows is not None:
                rows = rows[cut.batch.headers["tick"][rows] > begin]
                count = len(rows)
                if not count:
                    return
            cut = _Cut(cut.batch, rows, count, cut.pubend, begin, cut.end)
        self._offer(turn, subscription, cut)

    def _offer(self, turn: Turn, subscription: _Subscription, cut: _Cut) -> None:
        """Send if there is credit, else hold."""
        connection = subscription.connection
        if connection.stalled or self._available(connection.number) <= 0:
            self._hold(turn, subscription, cut)
        else:
            self._send(turn, subscription, cut.frame(subscription.number), cut.count)

    def lost(self, turn: Turn, pubend: int, start: int, end: int) -> None:
        """(start, end] is gone for good upstream: a Gap to every subscription that is active there and
        may have missed something."""
        stream = self._streams.get(pubend)
        if stream is None:
            return
        self._advance(stream, pubend, start, end)
        cut = _Cut(None, None, 0, pubend, start, end)
        for subscription in self._subscriptions.values():
            if not subscription.selector.concerns(pubend):
                continue
            if subscription.active & stream.bit:
                self._offer(turn, subscription, cut)
            else:
                self._deliver_late(turn, stream, subscription, cut)
        if stream.late:
            self._promote(stream, end)

    def _advance(self, stream: _Stream, pubend: int, start: int, end: int) -> None:
        if end < start or (stream.end is not None and start < stream.end):
            name = pubend_text(pubend)
            raise BugError(f"knowledge of pubend {name} for ({start}, {end}] after that up to {stream.end}")
        stream.end = end

    def _promote(self, stream: _Stream, end: int) -> None:
        """Those that began at or before `end` need no further look at their first tick."""
        for late, begin in list(stream.late.items()):
            if begin <= end:
                del stream.late[late]
                self._subscriptions[late].active |= stream.bit

    # Slow consumers

    def _hold(self, turn: Turn, subscription: _Subscription, cut: _Cut) -> None:
        """There is no credit: keep the frame, or let the overflow policy act."""
        connection = subscription.connection
        if connection.ended:
            return
        if not subscription.lost:
            frame = cut.frame(subscription.number)
            size = len(frame)
            if (
                subscription.waiting_bytes + size <= subscription.limit
                and connection.waiting_bytes + size <= self._connection_bytes
            ):
                connection.queue.append((subscription, frame, cut.count))
                connection.waiting_bytes += size
                connection.stalled = True
                subscription.waiting += 1
                subscription.waiting_bytes += size
                self._waiting_bytes += size
                if self._waiting_bytes > self._total_bytes:
                    self._shorten(turn)
                return
            if subscription.disconnect:
                self._disconnect(turn, subscription, f"fell more than {subscription.limit} bytes behind")
                return
            if not subscription.waiting:
                connection.gapped.append(subscription)
                connection.stalled = True
        start, _ = subscription.lost.get(cut.pubend, (cut.start, cut.end))
        subscription.lost[cut.pubend] = (start, cut.end)
        subscription.dropped += cut.count
        self._dropped += cut.count

    def _shorten(self, turn: Turn) -> None:
        """All queues together are too long: the longest ones pay."""
        self._shortened += 1
        kept = int(self._total_bytes * KEPT_SHARE)
        for connection in sorted(self._connections.values(), key=lambda home: -home.waiting_bytes):
            if self._waiting_bytes <= kept:
                return
            strict = next((item for item in connection.by_number.values() if item.disconnect), None)
            if strict is None:
                self._drop_queue(connection)
            else:
                why = f"is too far behind for the {self._total_bytes} bytes that all subscriptions share"
                self._disconnect(turn, strict, why)

    def _drop_queue(self, connection: _Connection) -> None:
        """What waits becomes one lost span per subscription and pubend."""
        spans: dict[_Subscription, dict[int, tuple[int, int]]] = {}
        for subscription, frame, count in connection.queue:
            pubend, (start, end) = frame_pubend(frame), frame_span(frame)
            lost = spans.setdefault(subscription, {})
            lost[pubend] = (lost.get(pubend, (start, end))[0], end)
            subscription.dropped += count
            self._dropped += count
        for subscription, lost in spans.items():
            # What it lost before this came after what waited.
            for pubend, (start, end) in subscription.lost.items():
                lost[pubend] = (lost.get(pubend, (start, end))[0], end)
            subscription.lost = lost
            subscription.waiting = subscription.waiting_bytes = 0
            connection.gapped.append(subscription)
        self._clear_queue(connection)

    def _clear_queue(self, connection: _Connection) -> None:
        connection.queue.clear()
        self._waiting_bytes -= connection.waiting_bytes
        connection.waiting_bytes = 0

    def _disconnect(self, turn: Turn, subscription: _Subscription, why: str) -> None:
        connection = subscription.connection
        error = SlowConsumerError(f"subscription {subscription.number} {why}")
        ended = Ended(number=subscription.number, code=error.code, reason=str(error))
        turn.send(connection.number, encode(ended))
        turn.close(connection.number, error)
        turn.note("warning", f"closed a slow consumer, {subscription.name}: {error}")
        self._end(connection)
        self._disconnects += 1

    def credit(self, turn: Turn, connection: int) -> None:
        """The connection has new credit: send what waits, in order, as far as it reaches."""
        home = self._connections.get(connection)
        if home is None or not home.stalled or home.ended:
            return
        while self._available(connection) > 0:
            if home.gapped:
                subscription = home.gapped[0]
                pubend = next(iter(subscription.lost))
                start, end = subscription.lost.pop(pubend)
                self._send(turn, subscription, _lost_frame(pubend, start, end, subscription.number), 0)
                if not subscription.lost:
                    home.gapped.popleft()
            elif home.queue:
                subscription, frame, count = home.queue.popleft()
                home.waiting_bytes -= len(frame)
                self._waiting_bytes -= len(frame)
                subscription.waiting -= 1
                subscription.waiting_bytes -= len(frame)
                self._send(turn, subscription, frame, count)
                if subscription.lost and not subscription.waiting:
                    home.gapped.append(subscription)
            else:
                break
        home.stalled = bool(home.queue or home.gapped)

    def _send(self, turn: Turn, subscription: _Subscription, frame: bytes, count: int) -> None:
        connection = subscription.connection.number
        self._spend(connection, len(frame))
        turn.send(connection, frame)
        self._frames += 1
        if count:
            subscription.delivered += count
            self._delivered += count
            pubend = frame_pubend(frame)
            if self._note is not None and not is_history(pubend):
                self._note((turn.now_us, frame_ids(frame, count), pubend, [subscription.name]))
        else:
            subscription.gaps += 1
            self._gaps += 1

    # Inspection

    def status(self) -> list[dict[str, int | str]]:
        """One row per subscription, in the order they were made."""
        return [_row(subscription) for subscription in self._subscriptions.values()]

    def _visible(self, asker: str | None) -> list[dict[str, int | str]]:
        """Of the first of them, those on topics that this principal may read; None: all."""
        readable: dict[str, bool] = {}

        def is_visible(subscription: _Subscription) -> bool:
            topic = subscription.selector.topic
            if asker is not None and topic not in readable:
                readable[topic] = self._may_read(asker, topic)
            return asker is None or readable[topic]

        looked_at = islice(self._subscriptions.values(), MAX_STATUS_LOOKED)
        return [_row(each) for each in islice(filter(is_visible, looked_at), MAX_STATUS_ROWS)]

    def metrics(self) -> dict[str, int]:
        return {
            "subscriptions": len(self._subscriptions),
            "deliveries_total": self._delivered,
            "delivery_frames_total": self._frames,
            "dropped_deliveries_total": self._dropped,
            "delivery_gaps_total": self._gaps,
            "slow_consumer_disconnects_total": self._disconnects,
            "delivery_buffered_bytes": self._waiting_bytes,
            "delivery_shortened_total": self._shortened,
            "stalled_connections": sum(home.stalled for home in self._connections.values()),
        }

    def check(self) -> None:
        """BugError unless the comments on the collections hold."""
        if len(self._index) != len(self._subscriptions):
            raise BugError("the index does not hold exactly the subscriptions")
        listed = [item for home in self._connections.values() for item in home.by_number.values()]
        if sorted(item.id for item in listed) != sorted(self._subscriptions):
            raise BugError("connections do not hold exactly the subscriptions")
        for home in self._connections.values():
            self._check_connection(home)
        waiting_bytes = sum(home.waiting_bytes for home in self._connections.values())
        if not waiting_bytes == self._waiting_bytes <= self._total_bytes:
            raise BugError(f"{waiting_bytes} bytes wait, not {self._waiting_bytes} of {self._total_bytes}")
        bits = 0
        for pubend, stream in self._streams.items():
            if bits & stream.bit:
                raise BugError(f"pubend {pubend_text(pubend)} shares its bit")
            bits |= stream.bit
            for late, begin in stream.late.items():
                if self._subscriptions[late].active & stream.bit or (stream.end or begin) > begin:
                    raise BugError(f"subscription {late} is late for a tick that is past")
        if bits != self._bits or any(item.active & ~bits for item in listed):
            raise BugError("bits are in use that belong to no stream")

    def _check_connection(self, home: _Connection) -> None:
        if home.waiting_bytes != sum(len(frame) for _, frame, _ in home.queue):
            raise BugError(f"waiting bytes of connection {home.number} are miscounted")
        if home.waiting_bytes > self._connection_bytes:
            raise BugError(f"connection {home.number} holds {home.waiting_bytes} bytes")
        if home.stalled != bool(home.ended or home.queue or home.gapped):
            raise BugError(f"connection {home.number} is not marked as it is")
        gapped = [item for item in home.by_number.values() if item.lost and not item.waiting]
        if sorted(item.id for item in gapped) != sorted(item.id for item in home.gapped):
            raise BugError(f"connection {home.number} does not know whose gaps are due")
        for item in home.by_number.values():
            sizes = [len(frame) for owner, frame, _ in home.queue if owner is item]
            if (len(sizes), sum(sizes)) != (item.waiting, item.waiting_bytes) or sum(sizes) > item.limit:
                raise BugError(f"subscription {item.id} holds {sum(sizes)} bytes of {item.limit}")


def _lost_frame(pubend: int, start: int, end: int, number: int) -> bytes:
    return empty_frame(kind=Kind.DELIVERY, pubend=pubend, start=start, end=end, channel=number, lost=True)
