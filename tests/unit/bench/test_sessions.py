"""The load processes' sessions: packets, and counting deliveries however the stream is cut."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from postroad.bench.amqp import Amqp
from postroad.bench.native import Native
from postroad.bench.sessions import Mqtt, Nats, Resp, Session, payload_of
from postroad.errors import PeerError
from postroad.events.batch import EventBatch
from postroad.wire import frames
from postroad.wire.frames import DEFAULT_LIMITS, Kind

SIZE = 40


def _amqp_frame(body: bytes, channel: int = 0, kind: int = 1) -> bytes:
    return struct.pack(">BHI", kind, channel, len(body)) + body + b"\xce"


def _amqp_greeting() -> bytes:
    return b"".join(
        (
            _amqp_frame(struct.pack(">HHBBII", 10, 10, 0, 9, 0, 0)),
            _amqp_frame(struct.pack(">HHHIH", 10, 30, 2047, 131072, 60)),
            _amqp_frame(struct.pack(">HHB", 10, 41, 0)),
            _amqp_frame(struct.pack(">HHI", 20, 11, 0), 1),
            _amqp_frame(struct.pack(">HH", 40, 11), 1),
        )
    )


def _welcome() -> bytes:
    return frames.encode(
        frames.Welcome(
            version=1,
            name="b1",
            broker=7,
            node=bytes(16),
            boot=1,
            cost=1,
            limits=DEFAULT_LIMITS,
            window=1000,
            time_us=0,
            publisher=42,
        )
    )


GREETINGS: dict[type[Session], Callable[[], bytes]] = {
    Mqtt: lambda: b"\x20\x02\x00\x00",
    Resp: lambda: b"+PONG\r\n",
    Nats: lambda: b"INFO {}\r\nPONG\r\n",
    Amqp: _amqp_greeting,
    Native: _welcome,
}


def _amqp_delivery(topic: str, payload: bytes, tag: int) -> bytes:
    name = topic.encode()
    deliver = struct.pack(">HH", 60, 60) + b"\x01c" + struct.pack(">QB", tag, 0) + b"\x05bench"
    deliver += bytes((len(name),)) + name
    header = struct.pack(">HHQH", 60, 0, len(payload), 0)
    return _amqp_frame(deliver, 1) + _amqp_frame(header, 1, 2) + _amqp_frame(payload, 1, 3)


DELIVERIES: dict[type[Session], Callable[[str, bytes, int], bytes]] = {
    Mqtt: lambda t, p, _: (
        b"\x30" + bytes((2 + len(t) + len(p),)) + struct.pack(">H", len(t)) + t.encode() + p
    ),
    Resp: lambda t, p, _: (
        b"*3\r\n$7\r\nmessage\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(t), t.encode(), len(p), p)
    ),
    Nats: lambda t, p, _: b"MSG %s 1 %d\r\n%s\r\n" % (t.encode(), len(p), p),
    Amqp: _amqp_delivery,
}


@pytest.fixture
def make() -> Iterator[Callable[[type[Session]], Session]]:
    """Sessions whose other end has already said its part of the handshake."""
    opened: list[socket.socket] = []

    def build(kind: type[Session]) -> Session:
        near, far = socket.socketpair()
        opened.extend((near, far))
        far.sendall(GREETINGS[kind]())
        return kind(near)

    yield build
    for one in opened:
        one.close()


def _stamped(number: int) -> bytes:
    return number.to_bytes(8, "little") + payload_of(SIZE)[8:]


def _native_delivery(session: Session, topic: str, stamps: list[int]) -> bytes:
    template = session.template(topic, _stamped(stamps[0]), len(stamps))
    data = bytearray(template.data)
    for position, stamp in enumerate(stamps):
        at = template.payload_at + position * (len(topic) + SIZE)
        data[at : at + 8] = stamp.to_bytes(8, "little")
    data[4] = Kind.DELIVERY
    return bytes(data)


@pytest.mark.parametrize("kind", list(DELIVERIES))
def test_deliveries_are_counted_wherever_the_stream_is_cut(
    kind: type[Session], make: Callable[[type[Session]], Session]
) -> None:
    topic = make(kind).topic(3)
    deliveries = [DELIVERIES[kind](topic, _stamped(number), number) for number in range(5)]
    if kind is Nats:
        deliveries.insert(3, b"PING\r\n")
    stream = b"".join(deliveries)
    for cut in range(len(stream) + 1):
        session, stamper = make(kind), make(kind)
        session.expect(topic, SIZE)
        stamper.expect(topic, SIZE)
        pieces = [memoryview(stream[:cut]), memoryview(stream[cut:])]
        assert sum(session.feed(piece) for piece in pieces) == 5
        stamps: list[int] = []
        for piece in pieces:
            stamper.feed_stamps(piece, stamps)
        assert stamps == list(range(5))
        session.socket.close()
        stamper.socket.close()


def test_native_deliveries_are_counted_wherever_the_stream_is_cut(
    make: Callable[[type[Session]], Session],
) -> None:
    topic = make(Native).topic(0)
    stream = b"".join(
        (
            _native_delivery(make(Native), topic, [0, 1, 2]),
            frames.encode(frames.Accepted(sequence=1)),  # shorter than a delivery's first twelve bytes
            frames.encode(frames.Ping(time_us=5)),
            _native_delivery(make(Native), topic, [3]),
            frames.encode(frames.Accepted(sequence=2)),
        )
    )
    for cut in range(len(stream) + 1):
        session, stamper = make(Native), make(Native)
        session.expect(topic, SIZE)
        stamper.expect(topic, SIZE)
        pieces = [memoryview(stream[:cut]), memoryview(stream[cut:])]
        assert sum(session.feed(piece) for piece in pieces) == 4
        stamps: list[int] = []
        for piece in pieces:
            stamper.feed_stamps(piece, stamps)
        assert stamps == [0, 1, 2, 3]
        for one in (session, stamper):
            pong = frames.decode(bytes(one.reply))
            assert isinstance(pong, frames.Pong)
            assert pong.time_us == 5
            one.socket.close()


@pytest.mark.parametrize("kind", list(DELIVERIES))
def test_bytes_that_are_no_delivery_are_refused(
    kind: type[Session], make: Callable[[type[Session]], Session]
) -> None:
    session = make(kind)
    topic = session.topic(0)
    session.expect(topic, SIZE)
    broken = DELIVERIES[kind](topic, _stamped(0), 1) + b"\xff" * 30
    with pytest.raises(PeerError):
        session.feed(memoryview(broken))


@pytest.mark.parametrize("kind", list(DELIVERIES))
def test_a_burst_is_the_same_packet_again_and_again(
    kind: type[Session], make: Callable[[type[Session]], Session]
) -> None:
    session = make(kind)
    one = session.template(session.topic(1), payload_of(SIZE), 1)
    many = session.template(session.topic(1), payload_of(SIZE), 8)
    assert bytes(many.data) == bytes(one.data) * 8
    one.stamp(77)
    assert bytes(one.data[one.payload_at : one.payload_at + SIZE]) == _stamped(77)


def test_native_publishes_are_valid_batches_with_new_ids_every_time(
    make: Callable[[type[Session]], Session],
) -> None:
    """T1: ids of one publisher only grow; the frame's sequence counts from 1."""
    session = make(Native)
    template = session.template(session.topic(1), payload_of(SIZE), 8)
    ids: list[bytes] = []
    for sequence in (1, 2):
        session.prepare(template)
        batch = EventBatch.parse(bytes(template.data), DEFAULT_LIMITS, expect=Kind.PUBLISH)
        assert batch.channel == sequence
        assert {event.topic for event in batch.events()} == {session.topic(1)}
        assert {event.publisher for event in batch.events()} == {42}
        ids += [bytes(event.id) for event in batch.events()]
    single = session.template(session.topic(1), payload_of(SIZE), 1)
    session.prepare(single)
    ids += [bytes(event.id) for event in EventBatch.parse(bytes(single.data), DEFAULT_LIMITS).events()]
    assert all(a < b for a, b in pairwise(ids))


def test_native_publisher_stops_without_credit(make: Callable[[type[Session]], Session]) -> None:
    session = make(Native)
    template = session.template(session.topic(1), payload_of(250), 4)
    assert session.may_send()
    session.prepare(template)
    assert not session.may_send()
    session.feed(memoryview(frames.encode(frames.Credit(size=len(template.data)))))
    assert session.may_send()


def test_native_rejections_are_errors(make: Callable[[type[Session]], Session]) -> None:
    session = make(Native)
    refused = frames.Rejected(sequence=1, code="protocol", reason="no")
    with pytest.raises(PeerError, match="no"):
        session.feed(memoryview(frames.encode(refused)))
