"""`bench durable`: packets, confirmations, acknowledgements of each system, and a real broker under it."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from postroad.bench.durable_load import DurableFanout
from postroad.bench.durable_sessions import ACK_EVENTS, AmqpDurable, JetStream, MqttDurable, NativeDurable
from postroad.bench.durable_systems import DURABLE_SYSTEMS
from postroad.bench.load import Task
from postroad.bench.sessions import Session, payload_of
from postroad.bench.systems import serving
from postroad.errors import PeerError
from postroad.events.batch import EventBatch
from postroad.wire import frames
from postroad.wire.frames import DEFAULT_LIMITS, Kind

SIZE = 40
PUBEND = 7 << 32


def _amqp(body: bytes, channel: int = 0, kind: int = 1) -> bytes:
    return struct.pack(">BHI", kind, channel, len(body)) + body + b"\xce"


def _amqp_greeting() -> bytes:
    return b"".join(
        (
            _amqp(struct.pack(">HHBBII", 10, 10, 0, 9, 0, 0)),
            _amqp(struct.pack(">HHHIH", 10, 30, 2047, 131072, 60)),
            _amqp(struct.pack(">HHB", 10, 41, 0)),
            _amqp(struct.pack(">HHI", 20, 11, 0), 1),
            _amqp(struct.pack(">HH", 40, 11), 1),
            _amqp(struct.pack(">HH", 85, 11), 1),
        )
    )


def _amqp_delivery(topic: str, tag: int) -> bytes:
    name, payload = topic.encode(), payload_of(SIZE)
    deliver = struct.pack(">HH", 60, 60) + b"\x01c" + struct.pack(">QB", tag, 0) + b"\x05bench"
    deliver += bytes((len(name),)) + name
    header = struct.pack(">HHQHB", 60, 0, len(payload), 0x1000, 2)
    return _amqp(deliver, 1) + _amqp(header, 1, 2) + _amqp(payload, 1, 3)


def _native_delivery(topic: str, end: int) -> bytes:
    name, payload = topic.encode(), payload_of(SIZE)
    row = struct.pack("<16xqQHHIHHI", end, 1, len(name), 0, len(payload), 0, 0, 0)
    size = 48 + len(row) + len(name) + len(payload)
    header = struct.pack("<IBBHIIQqqII", size, Kind.DELIVERY, 1, 0, 1, 0, PUBEND, end - 1, end, 1, 0)
    return header + row + name + payload


def _welcome() -> bytes:
    welcome = frames.Welcome(
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
    return frames.encode(welcome)


GREETINGS: dict[type[Session], Callable[[], bytes]] = {
    NativeDurable: _welcome,
    JetStream: lambda: b"INFO {}\r\nPONG\r\nPONG\r\n",
    MqttDurable: lambda: b"\x20\x02\x01\x00",
    AmqpDurable: _amqp_greeting,
}
DELIVERIES: dict[type[Session], Callable[[str, int], bytes]] = {
    NativeDurable: _native_delivery,
    JetStream: lambda t, n: (
        b"MSG %s 2 $JS.ACK.bench.s1.1.%d.%d.1.0 %d\r\n%s\r\n" % (t.encode(), n, n, SIZE, payload_of(SIZE))
    ),
    MqttDurable: lambda t, n: (
        b"\x32"
        + bytes((4 + len(t) + SIZE,))
        + struct.pack(">H", len(t))
        + t.encode()
        + struct.pack(">H", n)
        + payload_of(SIZE)
    ),
    AmqpDurable: _amqp_delivery,
}


def _acked(kind: type[Session], reply: bytes, count: int) -> bool:
    """Whether `reply` ends with the acknowledgement of delivery `count` and all before it."""
    if kind is MqttDurable:
        return reply == b"".join(b"\x40\x02" + struct.pack(">H", n) for n in range(1, count + 1))
    if kind is JetStream:
        return reply.endswith(b"PUB $JS.ACK.bench.s1.1.%d.%d.1.0 0\r\n\r\n" % (count, count))
    if kind is AmqpDurable:
        return reply == _amqp(struct.pack(">HHQB", 60, 80, count, 1), 1)
    ack = frames.decode(reply)
    return isinstance(ack, frames.Ack) and list(json.loads(ack.token).values()) == [count]


@pytest.fixture
def make() -> Iterator[Callable[[type[Session]], Session]]:
    opened: list[socket.socket] = []

    def build(kind: type[Session]) -> Session:
        near, far = socket.socketpair()
        opened.extend((near, far))
        far.sendall(GREETINGS[kind]())
        return kind(near, "s1")

    yield build
    for one in opened:
        one.close()


@pytest.mark.parametrize("kind", list(DELIVERIES))
def test_deliveries_are_counted_and_acknowledged_wherever_the_stream_is_cut(
    kind: type[Session], make: Callable[[type[Session]], Session]
) -> None:
    topic = make(kind).topic(3)
    parts = [DELIVERIES[kind](topic, number) for number in range(1, 6)]
    if kind is JetStream:
        parts.insert(2, b"PING\r\n")
    stream = b"".join(parts)
    for cut in range(len(stream) + 1):
        session = make(kind)
        session.expect(topic, SIZE)
        pieces = [memoryview(stream[:cut]), memoryview(stream[cut:])]
        assert sum(session.feed(piece) for piece in pieces) == 5
        session.finish()
        assert _acked(kind, bytes(session.reply), 5)
        session.socket.close()


@pytest.mark.parametrize("kind", [JetStream, AmqpDurable, NativeDurable])
def test_acknowledgements_are_cumulative(
    kind: type[Session], make: Callable[[type[Session]], Session]
) -> None:
    session = make(kind)
    topic = session.topic(0)
    session.expect(topic, SIZE)
    for number in range(1, ACK_EVENTS):
        session.feed(memoryview(DELIVERIES[kind](topic, number)))
    assert not session.reply
    session.feed(memoryview(DELIVERIES[kind](topic, ACK_EVENTS)))
    assert _acked(kind, bytes(session.reply), ACK_EVENTS)


CONFIRMATIONS: dict[type[Session], bytes] = {
    # Frame 2 of four events each.
    NativeDurable: frames.encode(frames.Accepted(sequence=2)),
    JetStream: b'MSG _INBOX.s1 1 26\r\n{"stream":"bench","seq":9}\r\n' * 8,
    MqttDurable: b"".join(b"\x40\x02" + struct.pack(">H", n) for n in range(8)),
    # 2 and 4 before 1, then all up to 6, then 8 before 7.
    AmqpDurable: b"".join(
        _amqp(struct.pack(">HHQB", 60, 80, tag, several), 1)
        for tag, several in ((2, 0), (4, 0), (1, 0), (6, 1), (8, 0), (7, 0))
    ),
}


@pytest.mark.parametrize("kind", list(CONFIRMATIONS))
def test_confirmed_publishes_are_counted_wherever_the_stream_is_cut(
    kind: type[Session], make: Callable[[type[Session]], Session]
) -> None:
    stream = CONFIRMATIONS[kind]
    for cut in range(len(stream) + 1):
        session = make(kind)
        session.template(session.topic(0), payload_of(SIZE), 4)
        assert session.feed(memoryview(stream[:cut])) == session.feed(memoryview(stream[cut:])) == 0
        assert session.acknowledged == 8
        session.socket.close()


def test_a_publish_that_jetstream_refuses_is_an_error(make: Callable[[type[Session]], Session]) -> None:
    refusal = b'{"error":{"code":429}}'
    with pytest.raises(PeerError, match="refused"):
        make(JetStream).feed(memoryview(b"MSG _INBOX.s1 1 %d\r\n%s\r\n" % (len(refusal), refusal)))


def test_mqtt_packets_in_flight_have_numbers_of_their_own(make: Callable[[type[Session]], Session]) -> None:
    session = make(MqttDurable)
    template = session.template(session.topic(1), payload_of(SIZE), 4)
    size = len(template.data) // 4
    seen = []
    for _ in range(2):
        session.prepare(template)
        at = template.payload_at - 2
        seen += [int.from_bytes(template.data[n * size + at : n * size + at + 2], "big") for n in range(4)]
    assert seen == list(range(1, 9))


def test_native_publishes_are_durable(make: Callable[[type[Session]], Session]) -> None:
    """D1: the flag that asks for the log."""
    session = make(NativeDurable)
    template = session.template(session.topic(1), payload_of(SIZE), 8)
    session.prepare(template)
    assert EventBatch.parse(bytes(template.data), DEFAULT_LIMITS, expect=Kind.PUBLISH).durable


def test_a_broker_under_the_durable_load_gives_all_figures() -> None:
    """D9, D11, D12: everything arrives, is confirmed, and those who were away catch up."""
    system = DURABLE_SYSTEMS["postroad"]
    with serving(system) as running:
        task = Task(
            what="fanout",
            system="postroad",
            address=running.addresses[0],
            publishers=2,
            subscribers=6,
            topics=2,
            payload=250,
            burst=16,
            in_flight=256,
            warm_s=0.2,
            seconds=0.3,
            pids=tuple(running.pids()),
            folder=str(running.logs[0].parent),
            missed=1024,
        )
        load = DurableFanout(task, system.session)
        try:
            figures = load.run()
        finally:
            for connection in load.subscribers + load.publishers:
                connection.session.close()
            load.poll.close()
    assert figures["deliveries_per_s"] > 0
    assert {"catchup_1_s", "catchup_25_s", "catchup_25_events_per_s"} <= set(figures)
    assert 250 < figures["disk_bytes_per_event"] < 2_000
