"""What travels: events, and the batch that is wire frame, log record and delivery in one.

A publisher encodes an event once. From then on brokers pass rows of a batch on as bytes: `select` copies
headers and heap of some rows into a new frame, `with_ticks` gives rows their place in a pubend's stream,
`restamped` exchanges the frame header. Frames that are sent have a checksum; one that is only kept has none,
as the log has its own. Nothing here looks at an event one by one in Python except `event()` and its kin, for
the application at the far end. kernel/layout.py has the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, final

import msgspec
import numpy as np
import numpy.typing as npt

from postroad import kernel
from postroad.errors import BugError, DamagedError, PeerError, PostroadError, TooLargeError, UsageError
from postroad.events.attributes import Value, encode_attributes
from postroad.events.topics import encode_topic
from postroad.ids import MessageId, is_volatile, pubend_text
from postroad.kernel.layout import (
    BATCH_VERSION,
    EVENT_HEADER,
    EVENT_HEADER_BYTES,
    FLAG_DURABLE,
    FLAG_LOST,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    ID_BYTES,
    RULE_TEXT,
    Rule,
)
from postroad.wire.datagrams import DATAGRAM_PREFIX_BYTES, MAX_DATAGRAM_BYTES, SEAL_BYTES
from postroad.wire.frames import Kind, Limits

# Rows of a best-effort frame that fits a datagram: headers, heap, and records in it.
MAX_ROWS_BYTES: Final = MAX_DATAGRAM_BYTES - DATAGRAM_PREFIX_BYTES - SEAL_BYTES - FRAME_HEADER_BYTES
_EXTENT: Final = struct.Struct("=I")
_TICK: Final = struct.Struct("<q")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SHOWN: Final = 64  # bytes of a payload in a representation
_FIRST_TIME_US: Final = 1 << 48  # in 1978: what is less is a number, not a time
_MAX_TIME_MS: Final = 253_402_300_799_999  # the end of the year 9999, beyond which datetime does not go

HEADER_DTYPE: Final = np.dtype(
    [
        ("id", "V16"),
        ("tick", "<i8"),
        ("topic_number", "<u8"),
        ("topic_length", "<u2"),
        ("attributes_length", "<u2"),
        ("payload_length", "<u4"),
        ("flags", "<u2"),
        ("attribute_count", "<u2"),
        ("record_length", "<u4"),
    ]
)


TTL: Final = "$ttl_ms"  # the attribute of an event that expires: milliseconds after it was published


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event as an application sees it. `pubend` and `tick` are those of a durable event, else None."""

    id: MessageId
    topic: str
    attributes: Mapping[str, Value]
    payload: bytes
    pubend: str | None = None
    tick: int | None = None
    attempt: int = 1  # of a shared durable subscription: one more after each that failed
    _answer: Callable[..., Any] | None = None  # set by the subscription of whoever is asked

    def __repr__(self) -> str:
        place = "" if self.tick is None else f", pubend={self.pubend!r}, tick={self.tick}"
        payload = self.payload if len(self.payload) <= _SHOWN else self.payload[:_SHOWN] + b"..."
        return (
            f"Event(id={str(self.id)!r}, topic={self.topic!r}, attributes={dict(self.attributes)!r},"
            f" payload={payload!r}{place})"
        )

    def reply(self, payload: bytes | str = b"", attributes: Mapping[str, Value] | None = None) -> Any:
        """Answer whoever published this with `client.ask`: `await event.reply(...)`. The client without an
        event loop has sent the answer when this returns."""
        if self._answer is None:
            raise UsageError("nobody waits for an answer to this event: `client.ask` did not publish it")
        return self._answer(self, payload, attributes)

    @property
    def publisher(self) -> int:
        return self.id.publisher

    @property
    def expires_at(self) -> datetime | None:
        """When it is not handed out any more, by the publisher's clock; None: never."""
        ttl_ms = self.attributes.get(TTL)
        if type(ttl_ms) is not int or ttl_ms < 0:
            return None
        return _EPOCH + timedelta(milliseconds=min(self.id.time_ms + ttl_ms, _MAX_TIME_MS))

    def expired(self, now_ms: int) -> bool:
        """Its time is over, if it has one."""
        ttl_ms = self.attributes.get(TTL)
        return type(ttl_ms) is int and 0 <= ttl_ms <= now_ms - self.id.time_ms

    @property
    def published_at(self) -> datetime:
        """By the publisher's clock, in UTC; a time that datetime cannot express is its last one."""
        return _EPOCH + timedelta(milliseconds=min(self.id.time_ms, _MAX_TIME_MS))


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Whatever this pubend had in (start, end] is lost to this subscription."""

    pubend: str
    start: int
    end: int

    def __str__(self) -> str:
        """In words: whose events are missing, and from when to when by the clock of their broker."""
        if self.end < _FIRST_TIME_US:
            numbers = f"{self.start + 1} to {self.end}" if self.end > self.start + 1 else f"{self.end}"
            publisher = f"publisher {self.pubend}"
            return f"best-effort events {numbers} of {publisher} are missing: nobody had them any more"
        between = f"between {_moment(self.start)} and {_moment(self.end)}"
        if not self.pubend:
            return f"events published {between} may be missing: this client was not connected to its broker"
        broker = f"broker {self.pubend.partition('-')[0]}"
        if self.start < _FIRST_TIME_US:
            between = f"before {_moment(self.end)}"
        return (
            f"events published at {broker} {between} may be missing: they were lost, or are not kept any more"
        )


class GapError(PostroadError):
    """Some events are missing, and who reads asked for events alone. `gap` says which.

    Decide whether the work may go on without them. If so, catch it inside the block of the subscription, and
    call `only_events()` again: that goes on behind the gap. Uncaught, a durable
    subscription raises it at every start.
    """

    def __init__(self, gap: Gap) -> None:
        super().__init__(str(gap))
        self.gap = gap


def _moment(time_us: int) -> str:
    if time_us // 1000 > _MAX_TIME_MS:
        return "the end of time"
    moment = (_EPOCH + timedelta(microseconds=time_us)).replace(tzinfo=None)
    return f"{moment.isoformat(sep=' ', timespec='milliseconds')} UTC"


def _header(
    *, length: int, kind: int, flags: int, count: int, pubend: int, start: int, end: int, channel: int
) -> bytes:
    return FRAME_HEADER.pack(length, kind, BATCH_VERSION, flags, count, 0, pubend, start, end, channel, 0)


def empty_frame(*, kind: Kind, pubend: int, start: int, end: int, channel: int, lost: bool = False) -> bytes:
    """A frame without events: silence in (start, end], or a gap if it is lost."""
    header = _header(
        length=FRAME_HEADER_BYTES,
        kind=kind,
        flags=FLAG_LOST if lost else 0,
        count=0,
        pubend=pubend,
        start=start,
        end=end,
        channel=channel,
    )
    return kernel.sealed(header)


def frame_pubend(frame: bytes) -> int:
    """The pubend of a batch frame."""
    return int.from_bytes(frame[16:24], "little")


def frame_span(frame: bytes) -> tuple[int, int]:
    """The span (start, end] of a batch frame."""
    *_, start, end, _channel, _reserved = FRAME_HEADER.unpack_from(frame)
    return start, end


def frame_ids(frame: bytes, count: int) -> bytes:
    """The ids of a checked batch frame of `count` rows."""
    return kernel.packed_ids(frame, count)


def encode_row(
    id: bytes, topic: str, attributes: Mapping[str, Value], payload: bytes, limits: Limits, *, tick: int
) -> tuple[bytes, bytes]:
    """One event by itself: its header, and its part of the heap."""
    name, number = encode_topic(topic, limits.topic_bytes, limits.topic_depth)
    encoded = encode_attributes(attributes, limits) if attributes else b""
    header = EVENT_HEADER.pack(id, tick, number, len(name), len(encoded), len(payload), 0, len(attributes), 0)
    return header, b"".join((name, encoded, payload))


def best_effort_frame(rows: Sequence[tuple[bytes, bytes]], *, channel: int) -> bytes:
    """A whole frame of encoded rows."""
    headers, heaps = zip(*rows, strict=True)
    length = FRAME_HEADER_BYTES + sum(map(len, headers)) + sum(map(len, heaps))
    header = _header(
        length=length,
        kind=Kind.BEST_EFFORT,
        flags=0,
        count=len(rows),
        pubend=0,
        start=0,
        end=0,
        channel=channel,
    )
    return b"".join((header, *headers, *heaps))


@final
class EventBatch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """An immutable view of one checked batch frame.

    `data` is the whole frame, `count` its number of rows, and `extents` count + 1 u32 as bytes: where in
    `data` each row's heap begins, and where the last one ends. Kernel functions take `data` and `extents`.
    The constructor trusts its arguments: use `parse` for bytes that came from outside. Streams hold very many
    of these, which are part of no cycle: the garbage collector must not walk them.
    """

    data: bytes
    count: int
    extents: bytes

    @classmethod
    def parse(cls, data: bytes, limits: Limits, *, expect: Kind | None = None) -> EventBatch:
        """Check a whole frame. PeerError names the row and the rule that is broken."""
        rule, row, count, extents = kernel.check_batch(
            data,
            limits.batch_bytes,
            limits.batch_events,
            limits.event_bytes,
            limits.attributes,
            limits.topic_bytes,
            limits.topic_depth,
        )
        if len(data) >= FRAME_HEADER_BYTES and not kernel.intact(data):
            raise DamagedError("batch frame: its checksum is wrong")
        if rule:
            where = "batch frame" if row < 0 else f"event {row} of a batch frame"
            raise PeerError(f"{where}: {RULE_TEXT[Rule(rule)]}")
        if expect is not None and data[4] != expect:
            raise PeerError(f"{Kind(data[4]).name} frame where {expect.name} is expected")
        return cls(data, count, extents)

    # ------------------------------------------------------------ the frame header

    def __len__(self) -> int:
        return self.count

    @property
    def kind(self) -> Kind:
        return Kind(self.data[4])

    @property
    def lost(self) -> bool:
        return bool(self.data[6] & FLAG_LOST)

    @property
    def durable(self) -> bool:
        """A publish frame whose events go to a durable pubend."""
        return bool(self.data[6] & FLAG_DURABLE)

    @property
    def pubend(self) -> int:
        return frame_pubend(self.data)

    @property
    def start(self) -> int:
        return int.from_bytes(self.data[24:32], "little", signed=True)

    @property
    def end(self) -> int:
        return int.from_bytes(self.data[32:40], "little", signed=True)

    @property
    def channel(self) -> int:
        return int.from_bytes(self.data[40:44], "little")

    # ------------------------------------------------------------ rows as arrays

    @property
    def headers(self) -> npt.NDArray[np.void]:
        """All event headers, without a copy."""
        return np.frombuffer(self.data, HEADER_DTYPE, self.count, FRAME_HEADER_BYTES)

    @property
    def offsets(self) -> npt.NDArray[np.uint32]:
        """`extents` as an array, without a copy."""
        return np.frombuffer(self.extents, np.uint32)

    def ids(self, rows: npt.NDArray[np.uint32] | None = None) -> bytes:
        """The ids of these rows, or of all, one after the other, 16 bytes each: what Bloom filters take."""
        if rows is None or len(rows) == self.count:
            return kernel.packed_ids(self.data, self.count)
        if len(rows) == 1:
            return self.id(int(rows[0]))
        return self.headers["id"][rows].tobytes()

    # ------------------------------------------------------------ rows one by one

    def _header_of(self, row: int) -> int:
        if not 0 <= row < self.count:
            raise BugError(f"row {row} of a batch of {self.count}")
        return FRAME_HEADER_BYTES + EVENT_HEADER_BYTES * row

    def _extent(self, row: int) -> int:
        begin: int = _EXTENT.unpack_from(self.extents, 4 * row)[0]
        return begin

    def id(self, row: int) -> bytes:
        at = self._header_of(row)
        return self.data[at : at + ID_BYTES]

    @property
    def last_id(self) -> bytes:
        at = FRAME_HEADER_BYTES + EVENT_HEADER_BYTES * (self.count - 1)
        return self.data[at : at + ID_BYTES]

    def tick(self, row: int) -> int:
        tick: int = _TICK.unpack_from(self.data, self._header_of(row) + ID_BYTES)[0]
        return tick

    def topic(self, row: int) -> str:
        _, _, _, length, *_ = EVENT_HEADER.unpack_from(self.data, self._header_of(row))
        begin = self._extent(row)
        return self.data[begin : begin + length].decode()

    def topics(self) -> list[str]:
        """The distinct topics, by their bytes: topic numbers can be made to collide."""
        if self.count == 1:
            return [self.topic(0)]
        lengths = self.headers["topic_length"].tolist()
        data = self.data
        topics = {data[at : at + size] for at, size in zip(self.offsets.tolist(), lengths, strict=False)}
        return [topic.decode() for topic in sorted(topics)]

    def attributes(self, row: int) -> dict[str, Value]:
        _, _, _, topic_length, _, _, _, count, _ = EVENT_HEADER.unpack_from(self.data, self._header_of(row))
        return kernel.decode_attributes(self.data, self._extent(row) + topic_length, count)

    def payload(self, row: int) -> bytes:
        _, _, _, _, _, length, *_ = EVENT_HEADER.unpack_from(self.data, self._header_of(row))
        end = self._extent(row + 1)
        return self.data[end - length : end]

    def event(self, row: int) -> Event:
        return self._events(row, row + 1)[0]

    def events(self) -> list[Event]:
        return self._events(0, self.count)

    def _events(self, first: int, after: int) -> list[Event]:
        pubend = self.pubend
        streamed = self.data[4] not in (Kind.PUBLISH, Kind.BEST_EFFORT) and not is_volatile(pubend)
        durable = pubend_text(pubend) if streamed else None
        return [
            Event(
                id=MessageId(publisher, broker, time_ms, counter),
                topic=topic,
                attributes=attributes,
                payload=payload,
                pubend=durable,
                tick=None if durable is None else tick,
            )
            for publisher, broker, time_ms, counter, tick, topic, attributes, payload in kernel.unpack_rows(
                self.data, self.extents, first, after
            )
        ]

    # ------------------------------------------------------------ new frames from old

    def select(
        self,
        rows: npt.NDArray[np.uint32] | None,
        *,
        kind: Kind,
        pubend: int,
        start: int,
        end: int,
        channel: int,
    ) -> bytes:
        """A whole frame of these rows, which must increase; None for all of them."""
        if self.data[6] & FLAG_LOST:  # the new frame would call silence what is lost: `restamped` keeps it
            raise BugError("nothing can be selected from a lost span")
        return kernel.gather(self.data, self.extents, rows, kind, pubend, start, end, channel)

    def with_ticks(self, first_tick: int, *, kind: Kind, pubend: int, start: int, channel: int) -> EventBatch:
        """The rows as a stretch of a pubend's stream: consecutive ticks, the last one ends the span."""
        if self.count == 0 or first_tick <= start:
            raise BugError(f"{self.count} rows cannot have ticks from {first_tick} on after {start}")
        data = kernel.with_ticks(self.data, self.extents, first_tick, kind, pubend, start, channel)
        return EventBatch(data, self.count, self.extents)

    def restamped(self, *, kind: Kind, channel: int) -> bytes:
        """The same rows and span, or the same gap, on another channel."""
        header = _header(
            length=len(self.data),
            kind=kind,
            flags=self.data[6],
            count=self.count,
            pubend=self.pubend,
            start=self.start,
            end=self.end,
            channel=channel,
        )
        return kernel.sealed(b"".join((header, memoryview(self.data)[FRAME_HEADER_BYTES:])))

    def slice(self, first: int, last: int) -> EventBatch:
        """The rows from `first` up to, but not including, `last`, as a batch with the same span."""
        return self.part(np.arange(first, last, dtype=np.uint32))

    def part(self, rows: npt.NDArray[np.uint32]) -> EventBatch:
        """A copy of these rows, which must increase, as a batch with the same span."""
        data = self.select(
            rows,
            kind=self.kind,
            pubend=self.pubend,
            start=self.start,
            end=self.end,
            channel=self.channel,
        )
        extents = np.empty(len(rows) + 1, np.uint32)
        extents[0] = FRAME_HEADER_BYTES + EVENT_HEADER_BYTES * len(rows)
        np.cumsum(self.offsets[rows + 1] - self.offsets[rows], out=extents[1:])
        extents[1:] += extents[0]
        return EventBatch(data, len(rows), extents.tobytes())

    @staticmethod
    def concatenate(batches: Sequence[EventBatch]) -> EventBatch:
        """All rows in one batch: publish frames of one turn, or adjoining stretches of one stream."""
        if not batches:
            raise BugError("nothing to concatenate")
        first, last = batches[0], batches[-1]
        if len(batches) == 1:
            return first
        kind, pubend, start, end = first.data[4], first.pubend, first.start, first.start
        for batch in batches:
            if batch.data[4] != kind or batch.pubend != pubend or batch.start != end or batch.lost:
                raise BugError("only frames of one kind and pubend, whose spans adjoin, are concatenated")
            end = batch.end
        data, extents = kernel.concatenate(
            [batch.data for batch in batches],
            [batch.extents for batch in batches],
            kind,
            pubend,
            start,
            end,
            last.channel,
        )
        return EventBatch(data, len(extents) // 4 - 1, extents)


class BatchBuilder:
    """Collects events into one publish frame. After `finish` it is empty and can be used again.

    `add` refuses at once what could never travel, and leaves the builder as it was. An event that does not
    fit beside those already there is refused with TooLargeError too: `finish`, then add it again.
    """

    __slots__ = ("_headers", "_heap", "count", "size")

    count: int
    size: int

    def __init__(self) -> None:
        self._headers: list[bytes] = []
        self._heap: list[bytes] = []
        self.count = 0
        self.size = FRAME_HEADER_BYTES

    def add(
        self, id: bytes, topic: str, attributes: Mapping[str, Value], payload: bytes, limits: Limits
    ) -> None:
        try:
            name, number = encode_topic(topic, limits.topic_bytes, limits.topic_depth)
        except TypeError:  # it cannot be hashed
            raise UsageError(f"a topic is a text, not {type(topic).__name__}") from None
        encoded = encode_attributes(attributes, limits) if attributes else b""
        size = len(name) + len(encoded) + len(payload)
        if len(id) != ID_BYTES or type(payload) is not bytes:
            raise UsageError(
                f"an id has {ID_BYTES} bytes and a payload is bytes, not {type(payload).__name__}"
            )
        if size > limits.event_bytes:
            raise TooLargeError(f"an event of {size} bytes, the limit is {limits.event_bytes}")
        size += self.size + EVENT_HEADER_BYTES
        if size > limits.batch_bytes or self.count >= limits.batch_events:
            raise TooLargeError(f"no room beside {self.count} events in a batch of {self.size} bytes")
        self._headers.append(
            EVENT_HEADER.pack(id, 0, number, len(name), len(encoded), len(payload), 0, len(attributes), 0)
        )
        self._heap += (name, encoded, payload)
        self.count += 1
        self.size = size

    def finish(self, *, kind: Kind = Kind.PUBLISH, channel: int, durable: bool = False) -> bytes:
        """The whole frame, without ticks; `channel` is the publish sequence of the connection."""
        header = _header(
            length=self.size,
            kind=kind,
            flags=FLAG_DURABLE if durable else 0,
            count=self.count,
            pubend=0,
            start=0,
            end=0,
            channel=channel,
        )
        frame = kernel.sealed(b"".join((header, *self._headers, *self._heap)))
        self._headers.clear()
        self._heap.clear()
        self.count, self.size = 0, FRAME_HEADER_BYTES
        return frame
