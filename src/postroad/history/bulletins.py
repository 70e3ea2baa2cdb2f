"""What brokers publish about themselves on `$postroad/...`, as bytes (spec P4; issue 4).

Six topics, each an ordinary durable event; docs/explanation/tracking.md has the layouts.

| topic | payload | attributes besides `broker` and `name` |
|---|---|---|
| `$postroad/tracking/filters` | a stored `record` or part of it | sequence, part, parts, final, replaces |
| `$postroad/tracking/attachments` | changes of the map in `attachment` | number, whole |
| `$postroad/topology` | the broker's own links, JSON | number |
| `$postroad/deliveries` | what durable subscribers were sent | number |
| `$postroad/queues` | what became of queue messages, MessagePack array of `QueueEvents` | number |
| `$postroad/besteffort` | events on links and repairs of receivers, `BestEffort` as JSON | number |

A filter's sequence increases over the life of a broker, also if that goes on from a backup, since it is above
the `running_number` of its start; so (broker, sequence, part) names a bulletin. The others are numbered by
`running_number`: a hole within a start is a bulletin that was dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from postroad.durable.subscriber.outputs import Receivers
from postroad.errors import BugError, PeerError
from postroad.events.attributes import Value
from postroad.ids import ID_BYTES
from postroad.seam.reports import QueueEvents
from postroad.tracking.attachment_log import MAX_CHANGE_BYTES, change_extents
from postroad.tracking.record import decode_meta
from postroad.tracking.settings import TrackingConfig
from postroad.units import KIB

FILTERS: Final = "$postroad/tracking/filters"
ATTACHMENTS: Final = "$postroad/tracking/attachments"
TOPOLOGY: Final = "$postroad/topology"
DELIVERIES: Final = "$postroad/deliveries"
QUEUES: Final = "$postroad/queues"
BEST_EFFORT: Final = "$postroad/besteffort"
TOPICS: Final = (FILTERS, ATTACHMENTS, TOPOLOGY, DELIVERIES, QUEUES, BEST_EFFORT)

MAX_PART_BYTES: Final = MAX_CHANGE_BYTES  # of one payload: a change of the map is never split
MIN_PART_BYTES: Final = 4 * KIB
MAX_ROWS: Final = 1 << 21  # of events and receivers in one report, more than there can be in one part
MAGIC: Final = b"PRdr"
VERSION: Final = 1
EVENTS: Final = 0  # what a sending is: events,
GAP: Final = 1  # a gap message,
ACKNOWLEDGED: Final = 2  # or nothing sent, but all of the subscriber's up to `end` is acknowledged
_EVENT_BYTES: Final = ID_BYTES + 8  # id and tick
_RECEIVER_BYTES: Final = 255 + 5 + 8  # the longest name, and the receiver's entry
_HEAD: Final = struct.Struct("<4sB3xIIII")
_MAX_NUMBER: Final = (1 << 32) - 1

SENDING_DTYPE: Final = np.dtype(
    [
        ("pubend", "<u8"),
        ("at_us", "<i8"),
        ("start", "<i8"),
        ("end", "<i8"),
        ("receivers", "<u4"),
        ("events", "<u4"),
        ("what", "<u4"),
        ("reserved", "<u4"),
    ]
)
RECEIVER_DTYPE: Final = np.dtype([("name", "<u4"), ("session", "<u4")])

Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bulletin:
    """One event that a broker publishes about itself."""

    topic: str
    attributes: dict[str, Value]
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """The broker whose bulletins these are."""

    broker: int
    name: str

    @property
    def attributes(self) -> dict[str, Value]:
        return {"broker": broker_text(self.broker), "name": self.name}


def broker_text(number: int) -> str:
    """A broker's number as attributes and JSON have it."""
    return f"{number:08x}"


def running_number(boot: int, count: int) -> int:
    """The number of the count-th bulletin on its topic since this start of the broker, from 1 on."""
    if not 0 <= count <= _MAX_NUMBER:
        raise BugError(f"{count} bulletins since the start")
    return boot << 32 | count


# ---- filters


def filter_bulletins(author: Author, sequence: int, record: bytes, part_bytes: int) -> list[Bulletin]:
    """A stored record, in as many parts as it takes; StorageError if it is none."""
    meta = decode_meta(record)
    if meta.sequence != sequence:
        raise BugError(f"the stored filter {meta.sequence} in place of {sequence}")
    parts = [record[at : at + part_bytes] for at in range(0, len(record), part_bytes)]
    attributes = {**author.attributes, "sequence": sequence, "parts": len(parts), "final": meta.final}
    if meta.replaces is not None:
        attributes["replaces"] = meta.replaces
    return [
        Bulletin(topic=FILTERS, attributes={**attributes, "part": index}, payload=part)
        for index, part in enumerate(parts)
    ]


def join_parts(payloads: Sequence[bytes]) -> bytes:
    """The stored record whose parts these are, in order of `part`: what `record.decode_record` takes."""
    return b"".join(payloads)


# ---- attachments


def attachment_bulletins(
    author: Author, number: int, record: bytes, part_bytes: int, *, whole: bool = False
) -> list[Bulletin]:
    """Encoded changes, split between changes; the numbers go on from `number`.

    `whole`: they are the whole map, but for what is forgotten; the first bulletin says so.
    """
    out: list[Bulletin] = []
    begin = end = 0
    for extent in [*change_extents(record), None]:
        if begin < end and (extent is None or extent - begin > part_bytes):
            attributes = {**author.attributes, "number": number + len(out), "whole": whole and not out}
            out.append(Bulletin(topic=ATTACHMENTS, attributes=attributes, payload=record[begin:end]))
            begin = end
        end = end if extent is None else extent
    return out


# ---- topology


class Link(msgspec.Struct, frozen=True, kw_only=True):
    broker: str
    cost: int


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """The links of one broker from `at_us` on, by its own clock; it says so when they change.

    The settings are those that its answers to a trace depend on; an older broker does not tell them.
    """

    broker: str
    name: str
    boot: int
    at_us: int
    links: tuple[Link, ...]
    skew_us: int | None = None
    jitter_us: int | None = None
    routing: str | None = None


_LINKS: Final = msgspec.json.Decoder(Links)


def topology_bulletin(
    author: Author,
    number: int,
    *,
    boot: int,
    links: Sequence[tuple[int, int]],
    config: TrackingConfig,
    at_us: int,
) -> Bulletin:
    """`links` are (broker, cost)."""
    state = Links(
        broker=broker_text(author.broker),
        name=author.name,
        boot=boot,
        at_us=at_us,
        links=tuple(Link(broker=broker_text(broker), cost=cost) for broker, cost in links),
        skew_us=config.skew_us,
        jitter_us=config.jitter_us,
        routing=config.routing,
    )
    attributes = {**author.attributes, "number": number}
    return Bulletin(topic=TOPOLOGY, attributes=attributes, payload=msgspec.json.encode(state))


def decode_topology(payload: bytes) -> Links:
    try:
        return _LINKS.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"a topology bulletin that cannot be read: {error}") from None


# ---- deliveries


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries:
    """A decoded report, all columns of equal length: one row per event and receiver, in the order sent.

    `names[subscriber[i]]` was sent the event `ids[i]` (16 bytes a row) with this pubend and tick, in this
    session of its subscription, at `at_us` of the broker's clock.
    """

    names: list[str]
    subscriber: npt.NDArray[np.uint32]
    session: npt.NDArray[np.uint32]
    pubend: npt.NDArray[np.uint64]
    ids: npt.NDArray[np.uint8]
    tick: npt.NDArray[np.int64]
    at_us: npt.NDArray[np.int64]
    gaps: Spans
    acknowledged: Spans

    def __len__(self) -> int:
        return len(self.tick)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """(start, end] of a pubend, per receiver: gaps that were told, or what is acknowledged."""

    subscriber: npt.NDArray[np.uint32]
    session: npt.NDArray[np.uint32]
    pubend: npt.NDArray[np.uint64]
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    at_us: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.end)


class DeliveryReport:
    """Collects what durable subscribers are sent into payloads of at most `part_bytes`.

    That is MIN_PART_BYTES or more, so that half of it is always room enough for what comes in one go.
    """

    __slots__ = ("_done", "_ids", "_names", "_part_bytes", "_receivers", "_sendings", "_size", "_ticks")

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._done: list[bytes] = []  # payloads that are full
        self._clear()

    def _clear(self) -> None:
        self._names: dict[str, int] = {}  # -> its index
        self._size = _HEAD.size + 5  # of the payload so far, rounded up
        self._sendings: list[tuple[int, int, int, int, int, int, int, int]] = []  # as SENDING_DTYPE
        self._receivers: list[tuple[int, int]] = []  # as RECEIVER_DTYPE, sending after sending
        self._ids: list[bytes] = []
        self._ticks: list[bytes] = []  # little-endian i64

    def events(
        self, receivers: Receivers, pubend: int, ids: bytes, ticks: npt.NDArray[np.int64], now_us: int
    ) -> None:
        """Events handed to the connections of these."""
        if len(ids) != len(ticks) * ID_BYTES:
            raise BugError(f"{len(ids)} bytes of ids for {len(ticks)} events")
        most = max(1, self._part_bytes // 4 // _EVENT_BYTES)
        for some in self._split(receivers):
            for at in range(0, len(ticks), most):
                part = ticks[at : at + most]
                self._ids.append(ids[at * ID_BYTES : (at + most) * ID_BYTES])
                self._ticks.append(part.astype("<i8").tobytes())
                self._size += len(part) * _EVENT_BYTES
                self._add(some, (pubend, now_us, int(part[0]) - 1, int(part[-1])), len(part), EVENTS)

    def gap(self, receivers: Receivers, pubend: int, start: int, end: int, now_us: int) -> None:
        for some in self._split(receivers):
            self._add(some, (pubend, now_us, start, end), 0, GAP)

    def acknowledged(self, receivers: Receivers, pubend: int, end: int, now_us: int) -> None:
        for some in self._split(receivers):
            self._add(some, (pubend, now_us, 0, end), 0, ACKNOWLEDGED)

    def _split(self, receivers: Receivers) -> Iterator[Receivers]:
        most = max(1, self._part_bytes // 4 // _RECEIVER_BYTES)
        return (receivers[at : at + most] for at in range(0, len(receivers), most))

    def _add(self, receivers: Receivers, sending: tuple[int, int, int, int], events: int, kind: int) -> None:
        """`sending` is pubend, time, start and end."""
        self._sendings.append((*sending, len(receivers), events, kind, 0))
        self._size += SENDING_DTYPE.itemsize + len(receivers) * RECEIVER_DTYPE.itemsize
        for name, session in receivers:
            index = self._names.get(name)
            if index is None:
                index = self._names[name] = len(self._names)
                self._size += len(name.encode()) + 5
            self._receivers.append((index, session))
        if self._size >= self._part_bytes // 2:
            self._done.append(self._encoded())
            self._clear()

    @property
    def full(self) -> bool:
        """There is a whole payload, or more."""
        return bool(self._done)

    @property
    def size(self) -> int:
        """About how many bytes are collected."""
        return sum(map(len, self._done)) + self._size

    def take(self) -> list[bytes]:
        """The payloads of all that was collected since the last call."""
        done, self._done = self._done, []
        if self._sendings:
            done.append(self._encoded())
            self._clear()
        return done

    def _encoded(self) -> bytes:
        names = msgspec.msgpack.encode(list(self._names))
        events = sum(map(len, self._ids)) // ID_BYTES
        return b"".join(
            (
                _HEAD.pack(MAGIC, VERSION, len(names), len(self._sendings), len(self._receivers), events),
                names,
                np.array(self._sendings, SENDING_DTYPE).tobytes(),
                np.array(self._receivers, RECEIVER_DTYPE).tobytes(),
                *self._ids,
                *self._ticks,
            )
        )


def deliveries_bulletin(author: Author, number: int, payload: bytes) -> Bulletin:
    return Bulletin(topic=DELIVERIES, attributes={**author.attributes, "number": number}, payload=payload)


def decode_deliveries(payload: bytes) -> Deliveries:
    """One report; PeerError if it is none."""
    if len(payload) < _HEAD.size or payload[:4] != MAGIC:
        raise PeerError(
            f"not a report of deliveries: {len(payload)} bytes that begin with {payload[:4].hex()}; it has at"
            f" least {_HEAD.size} and begins with {MAGIC.hex()}"
        )
    _, version, names_bytes, sending_count, receiver_count, event_count = _HEAD.unpack_from(payload)
    if version != VERSION:
        raise PeerError(f"a report of deliveries of version {version}, this Postroad reads {VERSION}")
    at = _HEAD.size + names_bytes
    sizes = (
        sending_count * SENDING_DTYPE.itemsize,
        receiver_count * RECEIVER_DTYPE.itemsize,
        event_count * ID_BYTES,
        event_count * 8,
    )
    if at + sum(sizes) != len(payload):
        raise PeerError(
            f"a report of deliveries of {len(payload)} bytes, where {at + sum(sizes)} are announced"
        )
    try:
        names = msgspec.msgpack.decode(payload[_HEAD.size : at], type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerError(f"the names in a report of deliveries cannot be read: {error}") from None
    sendings = np.frombuffer(payload, SENDING_DTYPE, sending_count, at)
    at += sizes[0]
    receivers = np.frombuffer(payload, RECEIVER_DTYPE, receiver_count, at)
    at += sizes[1]
    ids = np.frombuffer(payload, np.uint8, sizes[2], at).reshape(-1, ID_BYTES)
    ticks = np.frombuffer(payload, "<i8", event_count, at + sizes[2])
    _check(names, sendings, receivers, event_count)
    return _flattened(names, sendings, receivers, ids, ticks)


def _check(
    names: list[str], sendings: npt.NDArray[np.void], receivers: npt.NDArray[np.void], events: int
) -> None:
    for counted, announced, present in (
        ("receivers", int(sendings["receivers"].sum(dtype=np.uint64)), len(receivers)),
        ("events", int(sendings["events"].sum(dtype=np.uint64)), events),
    ):
        if announced != present:
            raise PeerError(
                f"a report of deliveries contradicts itself: its sendings have {announced} {counted}, it has"
                f" {present}"
            )
    rows = int((sendings["receivers"].astype(np.uint64) * sendings["events"]).sum())
    if rows > MAX_ROWS:
        raise PeerError(f"a report of deliveries of {rows} rows; at most {MAX_ROWS} are read")
    sound = bool((receivers["name"] < len(names)).all())
    sound = sound and bool((sendings["what"] <= ACKNOWLEDGED).all())
    sound = sound and not bool(sendings["events"][sendings["what"] != EVENTS].any())
    if not sound:
        raise PeerError(
            f"a report of deliveries contradicts itself: a receiver has none of its {len(names)} names, or a"
            " sending is of no known kind, or one that is not of events has some"
        )


def _flattened(
    names: list[str],
    sendings: npt.NDArray[np.void],
    receivers: npt.NDArray[np.void],
    ids: npt.NDArray[np.uint8],
    ticks: npt.NDArray[np.int64],
) -> Deliveries:
    per_receiver = np.repeat(np.arange(len(sendings)), sendings["receivers"])  # sending of each receiver
    first = np.concatenate(([0], np.cumsum(sendings["events"], dtype=np.int64)[:-1])).astype(np.int64)
    counts = sendings["events"][per_receiver].astype(np.int64)
    receiver = np.repeat(np.arange(len(receivers)), counts)  # receiver of each row
    sending = per_receiver[receiver]
    begins = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.int64)
    row = np.arange(len(receiver)) - begins[receiver] + first[sending]
    return Deliveries(
        names=names,
        subscriber=receivers["name"][receiver],
        session=receivers["session"][receiver],
        pubend=sendings["pubend"][sending],
        ids=ids[row],
        tick=ticks[row],
        at_us=sendings["at_us"][sending],
        gaps=_spans(GAP, sendings, receivers, per_receiver),
        acknowledged=_spans(ACKNOWLEDGED, sendings, receivers, per_receiver),
    )


def _spans(
    kind: int, sendings: npt.NDArray[np.void], receivers: npt.NDArray[np.void], per_receiver: Indices
) -> Spans:
    rows: Indices = np.flatnonzero(sendings["what"][per_receiver] == kind)
    of = sendings[per_receiver[rows]]
    return Spans(
        subscriber=receivers["name"][rows],
        session=receivers["session"][rows],
        pubend=of["pubend"],
        start=of["start"],
        end=of["end"],
        at_us=of["at_us"],
    )


# ---- queues

_QUEUE_EVENTS: Final = msgspec.msgpack.Decoder(list[QueueEvents])
MOST_IDS: Final = 64  # of one `QueueEvents` in a report, so that one always fits
_QUEUE_EVENTS_BYTES: Final = 64  # beside names and ids


class QueueReport:
    """Collects what happens to queue messages into payloads of at most about `part_bytes`."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._events: list[QueueEvents] = []
        self.size = 0

    def add(self, events: Sequence[QueueEvents]) -> None:
        for event in events:
            self._events.append(event)
            self.size += len(event.ids) + _QUEUE_EVENTS_BYTES + len(event.inbox) + len(event.who)

    def take(self) -> list[bytes]:
        parts: list[list[QueueEvents]] = []
        size = 0
        for event in self._events:
            for at in range(0, len(event.ids), MOST_IDS * ID_BYTES):
                piece = msgspec.structs.replace(event, ids=event.ids[at : at + MOST_IDS * ID_BYTES])
                names = len(event.inbox.encode()) + len(event.who.encode())
                more = len(piece.ids) + _QUEUE_EVENTS_BYTES + names
                if not parts or size + more > self._part_bytes // 2:
                    parts.append([])
                    size = 0
                parts[-1].append(piece)
                size += more
        self._events, self.size = [], 0
        return [msgspec.msgpack.encode(part) for part in parts]


def queues_bulletin(author: Author, number: int, payload: bytes) -> Bulletin:
    return Bulletin(topic=QUEUES, attributes={**author.attributes, "number": number}, payload=payload)


def decode_queue_events(payload: bytes) -> list[QueueEvents]:
    """PeerError if it is no report."""
    try:
        reports = _QUEUE_EVENTS.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"a report of queues that cannot be read: {error}") from None
    if any(len(events.ids) % ID_BYTES for events in reports):
        raise PeerError("a report of queues with ids that are cut off")
    return reports


# ---- best effort


class LinkCount(msgspec.Struct, frozen=True, kw_only=True):
    """Best-effort events since the start of the broker that reports."""

    neighbour: str  # or the broker itself: then `sent` is what clients published there, without repair's own
    sent: int  # meant for it
    received: int  # that came from it


class RepairCount(msgspec.Struct, frozen=True, kw_only=True):
    """What repair did for a subscription since that began; the subscriber says so."""

    subscriber: str
    received: int
    detected: int
    requests: int
    recovered: int
    given_up: int
    duplicates: int
    slowest_us: int


class BestEffort(msgspec.Struct, frozen=True, kw_only=True):
    boot: int
    at_us: int
    links: tuple[LinkCount, ...] = ()
    receivers: tuple[RepairCount, ...] = ()


_BEST_EFFORT: Final = msgspec.json.Decoder(BestEffort)
_COUNT_BYTES: Final = 2 * 1_024  # of one of them as JSON, at most: a name may be escaped throughout


def best_effort_states(
    boot: int, at_us: int, links: Sequence[LinkCount], receivers: Sequence[RepairCount], part_bytes: int
) -> list[BestEffort]:
    """In as many bulletins as it takes."""
    most = max(1, part_bytes // _COUNT_BYTES)
    states = [
        BestEffort(boot=boot, at_us=at_us, links=tuple(links[at : at + most]))
        for at in range(0, len(links), most)
    ]
    return states + [
        BestEffort(boot=boot, at_us=at_us, receivers=tuple(receivers[at : at + most]))
        for at in range(0, len(receivers), most)
    ]


def best_effort_bulletin(author: Author, number: int, state: BestEffort) -> Bulletin:
    attributes = {**author.attributes, "number": number}
    return Bulletin(topic=BEST_EFFORT, attributes=attributes, payload=msgspec.json.encode(state))


def decode_best_effort(payload: bytes) -> BestEffort:
    try:
        return _BEST_EFFORT.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"a report of best effort that cannot be read: {error}") from None
