"""A client, and a small broker, written from docs/reference/protocol.md alone, against a real broker process.

Nothing here imports postroad: if the document is wrong or leaves something out, these tests cannot pass.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.worlds.processes import BrokerProcess, Brokers

HELLO, WELCOME, REFUSE, PING, PONG, CREDIT = range(1, 7)
PUBLISH, ACCEPTED, REJECTED = 16, 17, 18
SUBSCRIBE, SUBSCRIBED, UNSUBSCRIBE, DELIVERY, ENDED = 20, 21, 22, 23, 24
REQUEST, REPLY = 28, 29
KNOWLEDGE, SILENCE, ATTACH, DETACH, NACK, STAMP = range(32, 38)
TOPOLOGY, DIGEST, INTEREST, INTEREST_PULL = range(40, 44)
BATCHES = (PUBLISH, DELIVERY, KNOWLEDGE)
LIMITS = [1 << 20, 8 << 20, 16384, 64, 1024, 32, 10_000]
WAIT_S = 10.0
QUIET_S = 0.4

# ---- MessagePack, as much of it as the protocol uses


def pack(value: Any) -> bytes:
    if isinstance(value, int):
        if 0 <= value < 0x80:
            return bytes((value,))
        return struct.pack(">BQ", 0xCF, value) if value >= 0 else struct.pack(">Bq", 0xD3, value)
    if isinstance(value, str):
        data = value.encode()
        return struct.pack(">BI", 0xDB, len(data)) + data
    if isinstance(value, bytes):
        return struct.pack(">BI", 0xC6, len(value)) + value
    if isinstance(value, dict):
        items = [pack(part) for item in value.items() for part in item]
        return struct.pack(">BI", 0xDF, len(value)) + b"".join(items)
    return struct.pack(">BI", 0xDD, len(value)) + b"".join(pack(item) for item in value)


SCALARS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def unpack(data: bytes, at: int) -> tuple[Any, int]:
    """The value at `at`, and where the next one begins."""
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 0x100, at
    if tag in (0xC2, 0xC3):
        return tag == 0xC3, at
    if tag in SCALARS:
        size = struct.calcsize(SCALARS[tag])
        return struct.unpack_from(SCALARS[tag], data, at)[0], at + size
    if tag < 0xC0:
        length, tag = (tag & 0x0F, 0xDE if tag < 0x90 else 0xDC) if tag < 0xA0 else (tag & 0x1F, 0xD9)
    else:
        length = int.from_bytes(data[at : at + LENGTHS[tag]], "big")
        at += LENGTHS[tag]
    if tag <= 0xC6:
        return data[at : at + length], at + length
    if tag <= 0xDB:
        return data[at : at + length].decode(), at + length
    items = []
    for _ in range(length * (2 if tag >= 0xDE else 1)):
        item, at = unpack(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if tag >= 0xDE else items), at


# ---- events


@dataclass(frozen=True)
class Event:
    id: bytes
    topic: str
    attributes: dict[str, Any]
    payload: bytes
    tick: int = 0


@dataclass(frozen=True)
class Batch:
    lost: bool
    pubend: int
    start: int
    end: int
    channel: int
    events: list[Event]


def topic_number(topic: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in topic:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


def pack_attributes(attributes: dict[str, Any]) -> bytes:
    data = b""
    for name, value in sorted((name.encode(), value) for name, value in attributes.items()):
        data += bytes((len(name),)) + name
        if isinstance(value, str):
            data += struct.pack("<BH", 0, len(value.encode())) + value.encode()
        elif isinstance(value, bool):
            data += bytes((3, value))
        elif isinstance(value, int):
            data += struct.pack("<Bq", 1, value)
        else:
            data += struct.pack("<Bd", 2, value)
    return data


def unpack_attributes(data: bytes, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = 0
    for _ in range(count):
        end = at + 1 + data[at]
        name, kind, at = data[at + 1 : end].decode(), data[end], end + 1
        if kind == 0:
            length = struct.unpack_from("<H", data, at)[0]
            found[name] = data[at + 2 : at + 2 + length].decode()
            at += 2 + length
        elif kind == 3:
            found[name] = data[at] == 1
            at += 1
        else:
            found[name] = struct.unpack_from("<q" if kind == 1 else "<d", data, at)[0]
            at += 8
    assert at == len(data)
    return found


def pack_batch(
    kind: int, channel: int, events: list[Event], *, pubend: int = 0, start: int = 0, end: int = 0
) -> bytes:
    headers, heap = b"", b""
    for event in events:
        topic, attributes = event.topic.encode(), pack_attributes(event.attributes)
        headers += event.id + struct.pack(
            "<qQHHIHHI",
            event.tick,
            topic_number(topic),
            len(topic),
            len(attributes),
            len(event.payload),
            0,
            len(event.attributes),
            0,
        )
        heap += topic + attributes + event.payload
    length = 48 + len(headers) + len(heap)
    head = struct.pack("<IBBHIIQqqII", length, kind, 1, 0, len(events), 0, pubend, start, end, channel, 0)
    return head + headers + heap


def unpack_batch(data: bytes) -> Batch:
    length, _, version, flags, count, _, pubend, start, end, channel, _ = struct.unpack_from(
        "<IBBHIIQqqII", data
    )
    assert (length, version) == (len(data), 1)
    events: list[Event] = []
    heap, before = 48 + 48 * count, start
    for row in range(count):
        identity, tick, number, topic_size, attributes_size, payload_size, _, attribute_count, _ = (
            struct.unpack_from("<16sqQHHIHHI", data, 48 + 48 * row)
        )
        middle = heap + topic_size
        topic, attributes = data[heap:middle], data[middle : middle + attributes_size]
        heap = middle + attributes_size + payload_size
        assert before < tick <= end
        assert number == topic_number(topic)
        before = tick
        payload = data[heap - payload_size : heap]
        events.append(
            Event(identity, topic.decode(), unpack_attributes(attributes, attribute_count), payload, tick)
        )
    assert heap == len(data)
    return Batch(bool(flags & 1), pubend, start, end, channel, events)


# ---- connections


class Refused(Exception):
    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


class Connection:
    """Frames over a socket; answers pings and counts credit in both directions."""

    def __init__(self, address: str, hello: list[Any]) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), WAIT_S)
        self.window = hello[5]
        self.owed = 0  # batch bytes received and not given back
        self.kept: list[tuple[int, Any]] = []  # frames that came while waiting for another one
        self.send(HELLO, hello)
        try:
            self.welcome = self.expect(WELCOME)
        except Refused:
            self.close()
            raise
        self.balance = self.welcome[7]

    def close(self) -> None:
        self.socket.close()

    def send(self, kind: int, fields: list[Any]) -> None:
        body = pack(fields)
        self.socket.sendall(struct.pack("<IBBH", 8 + len(body), kind, 1, 0) + body)

    def send_batch(self, frame: bytes) -> None:
        while self.balance <= 0:
            self.kept.append(self.receive())
        self.balance -= len(frame)
        self.socket.sendall(frame)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.socket.recv(size - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    def receive(self) -> tuple[int, Any]:
        """The next frame that is not upkeep."""
        while True:
            prefix = self._read(8)
            length, kind, version, flags = struct.unpack("<IBBH", prefix)
            assert version == 1
            frame = prefix + self._read(length - 8)
            if kind in BATCHES:
                self.owed += length
                assert self.owed < self.window + LIMITS[1]
                return kind, unpack_batch(frame)
            fields, end = unpack(frame, 8)
            assert end == length - (4 if flags & 0x8000 else 0)
            if kind == REFUSE:
                raise Refused(*fields[:2])
            if kind == PING:
                self.send(PONG, [fields[0], time.time_ns() // 1000])
            elif kind == CREDIT:
                self.balance += fields[0]
            elif kind != PONG:
                return kind, fields

    def expect(self, kind: int) -> Any:
        """The next frame of this kind; others are kept."""
        for at, (held, _) in enumerate(self.kept):
            if held == kind:
                return self.kept.pop(at)[1]
        while True:
            found, fields = self.receive()
            if found == kind:
                return fields
            self.kept.append((found, fields))

    def give_back(self) -> None:
        if self.owed:
            self.send(CREDIT, [self.owed])
            self.owed = 0

    def batches(self, kind: int = DELIVERY) -> list[Batch]:
        """Batches until nothing comes for a while; credit is not given back."""
        found = [batch for held, batch in self.kept if held == kind]
        self.kept = [item for item in self.kept if item[0] != kind]
        self.socket.settimeout(QUIET_S)
        try:
            while True:
                held, fields = self.receive()
                if held == kind:
                    found.append(fields)
                else:
                    self.kept.append((held, fields))
        except TimeoutError:
            return found
        finally:
            self.socket.settimeout(WAIT_S)


class Client(Connection):
    def __init__(
        self, address: str, *, window: int = 4 << 20, publisher: int = 0, key: bytes = b"", version: int = 1
    ) -> None:
        clock = time.time_ns() // 1000
        hello = [version, "client", "elsewhere", "", LIMITS, window, clock, 0, b"", 0, 1, publisher, key]
        super().__init__(address, hello)
        self.publisher, self.key = self.welcome[9], self.welcome[10]
        self.sequence = 0
        self.counter = 0

    def event(self, topic: str, payload: bytes = b"", **attributes: Any) -> Event:
        self.counter += 1
        milliseconds = time.time_ns() // 1_000_000 + self.counter  # ahead of the clock, and always increasing
        identity = struct.pack(
            ">IIIHH",
            self.publisher,
            self.welcome[2],
            milliseconds >> 16,
            milliseconds & 0xFFFF,
            0,
        )
        return Event(identity, topic, attributes, payload)

    def publish(self, *events: Event) -> None:
        self.sequence += 1
        self.send_batch(pack_batch(PUBLISH, self.sequence, list(events)))

    def settle(self) -> None:
        """Wait until everything published is accepted."""
        while self.expect(ACCEPTED)[0] < self.sequence:
            pass

    def subscribe(self, number: int, topic: str, where: str = "", *more: Any) -> None:
        self.send(SUBSCRIBE, [number, topic, where, *more])
        assert self.expect(SUBSCRIBED) == [number, [], "", False, 0, 0]


@pytest.fixture
def broker(brokers: Brokers) -> BrokerProcess:
    return brokers.start("b1")


@pytest.fixture
def opened() -> Iterator[list[Connection]]:
    """Connections to be closed when the test ends."""
    found: list[Connection] = []
    yield found
    for one in found:
        one.close()


def payloads(batches: list[Batch]) -> list[bytes]:
    return [event.payload for batch in batches for event in batch.events]


# ---- tests


def test_messagepack_subset() -> None:
    values = [0, 127, 128, 1 << 40, -1, -33, "é" * 40, b"x" * 300, [[], {}], {1: 2, "a": [3]}]
    assert unpack(pack(values), 0) == (values, len(pack(values)))
    assert unpack(bytes.fromhex("93 03 a1 61 81 01 e0"), 0) == ([3, "a", {1: -32}], 7)
    assert unpack(bytes.fromhex("92 c4 01 ff d9 01 62"), 0) == ([b"\xff", "b"], 7)


def test_a_condition_gets_exactly_what_matches(broker: BrokerProcess, opened: list[Connection]) -> None:
    reader, writer = Client(broker.address), Client(broker.address)
    opened += [reader, writer]
    reader.subscribe(7, "orders/+", "price > 100 AND venue = 'XETR'")
    sent = [
        writer.event("orders/eu", b"cheap", price=80, venue="XETR"),
        writer.event("orders/eu", b"dear", price=120, venue="XETR", urgent=True, weight=1.5),
        writer.event("orders/eu", b"text", price="120", venue="XETR"),
        writer.event("orders/eu/north", b"deeper", price=120, venue="XETR"),
        writer.event("else", b"elsewhere", price=120, venue="XETR"),
        writer.event("orders/us", b"float", price=100.5, venue="XETR"),
    ]
    writer.publish(*sent[:2])
    writer.publish(*sent[2:])
    writer.settle()
    found = reader.batches()
    assert payloads(found) == [b"dear", b"float"]
    assert {batch.channel for batch in found} == {7}
    first = found[0].events[0]
    assert (first.id, first.topic) == (sent[1].id, "orders/eu")
    assert first.attributes == {"price": 120, "venue": "XETR", "urgent": True, "weight": 1.5}
    spans = [(batch.start, batch.end) for batch in found]
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    reader.send(UNSUBSCRIBE, [7])
    assert reader.expect(ENDED) == [7, "", ""]
    writer.publish(writer.event("orders/eu", b"late", price=500, venue="XETR"))
    writer.settle()
    assert reader.batches() == []


def test_credit(broker: BrokerProcess, opened: list[Connection]) -> None:
    """Frames come while the balance is positive, whatever their size; then none until credit is given."""
    reader, writer = Client(broker.address, window=65_536), Client(broker.address)
    opened += [reader, writer]
    reader.subscribe(1, "n")
    for number in range(20):
        writer.publish(writer.event("n", b"%d " % number + b"x" * 10_000))
        writer.settle()
    found = reader.batches()
    assert 65_536 <= reader.owed < 65_536 + 11_000  # not above zero any more, by less than one frame
    while len(found) < 20:
        reader.give_back()
        more = reader.batches()
        assert more
        found += more
    assert [int(payload.split()[0]) for payload in payloads(found)] == list(range(20))
    reader.give_back()
    writer.publish(writer.event("n", b"y" * 500_000))  # more than the window, within the limits of WELCOME
    assert [len(payload) for payload in payloads(reader.batches())] == [500_000]
    reader.send(CREDIT, [reader.owed + 1])
    with pytest.raises(Refused, match="protocol: credit"):
        reader.expect(REPLY)


def test_a_publisher_gets_its_credit_back(broker: BrokerProcess, opened: list[Connection]) -> None:
    writer = Client(broker.address)
    opened.append(writer)
    window = writer.welcome[7]
    for _ in range(2 * window // 500_000):
        writer.publish(writer.event("n", bytes(500_000)))
    writer.settle()
    assert 0 < writer.balance <= window


def test_a_slow_reader_is_told_its_gap(broker: BrokerProcess, opened: list[Connection]) -> None:
    reader, writer = Client(broker.address, window=65_536), Client(broker.address)
    opened += [reader, writer]
    reader.subscribe(2, "n", "", "drop", 30_000)
    for number in range(30):
        writer.publish(writer.event("n", b"%d " % number + b"x" * 10_000))
        writer.settle()
    found: list[Batch] = []
    while more := reader.batches():
        found += more
        reader.give_back()
    writer.publish(writer.event("n", b"30 "))
    found += reader.batches()
    assert [batch.lost for batch in found].count(True) == 1
    assert all(one.end <= other.start for one, other in pairwise(found))
    numbers = [int(payload.split()[0]) for payload in payloads(found)]
    lost = next(at for at, batch in enumerate(found) if batch.lost)
    assert numbers == [*range(lost), 30]


def test_sending_again_after_a_reconnect_publishes_once(
    broker: BrokerProcess, opened: list[Connection]
) -> None:
    reader, writer = Client(broker.address), Client(broker.address)
    opened += [reader, writer]
    reader.subscribe(1, "n")
    first, second = writer.event("n", b"first"), writer.event("n", b"second")
    writer.publish(first)
    writer.settle()
    writer.close()
    again = Client(broker.address, publisher=writer.publisher, key=writer.key)
    opened.append(again)
    assert again.publisher == writer.publisher
    again.publish(first, second)
    again.settle()
    assert payloads(reader.batches()) == [b"first", b"second"]
    stranger = Client(broker.address, publisher=writer.publisher, key=b"guessed")
    opened.append(stranger)
    assert stranger.publisher != writer.publisher


def test_what_is_not_allowed_is_answered_and_the_connection_stays(
    broker: BrokerProcess, opened: list[Connection]
) -> None:
    client = Client(broker.address)
    opened.append(client)
    client.send(SUBSCRIBE, [1, "a", "price >"])
    number, code, reason = client.expect(ENDED)
    assert (number, code) == (1, "selector")
    assert "character" in reason
    client.send(SUBSCRIBE, [1, "a/#/b", ""])
    assert client.expect(ENDED)[:2] == [1, "usage"]
    client.publish(client.event("$postroad/x"))
    assert client.expect(REJECTED)[:2] == [1, "denied"]
    client.publish(client.event("a"))
    client.settle()
    client.send(REQUEST, [5, "status"])
    number, code, body = client.expect(REPLY)
    assert (number, code) == (5, "")
    assert '"name":"b1"' in body
    client.send(REQUEST, [6, "weather", {}])
    assert client.expect(REPLY)[:2] == [6, "usage"]
    client.send(PING, [123])
    client.send(UNSUBSCRIBE, [99])
    client.send(REQUEST, [7, "status"])
    assert client.expect(REPLY)[0] == 7


def test_a_broken_frame_is_refused_and_nobody_else_suffers(
    broker: BrokerProcess, opened: list[Connection]
) -> None:
    other = Client(broker.address)
    opened.append(other)
    other.subscribe(1, "#")

    def refusal(frame: bytes) -> Refused:
        client = Client(broker.address)
        opened.append(client)
        client.socket.sendall(frame)
        with pytest.raises(Refused) as caught:
            client.receive()
        with pytest.raises(EOFError):
            client.receive()
        assert caught.value.code == "protocol"
        return caught.value

    maker = Client(broker.address)
    opened.append(maker)
    event = maker.event("a", b"x", price=1)
    wrong = bytearray(pack_batch(PUBLISH, 1, [event]))
    wrong[48 + 24] ^= 1
    assert "the topic number is not the hash of the topic" in refusal(bytes(wrong)).reason
    assert "event 0" in refusal(bytes(wrong)).reason
    wild = pack_batch(PUBLISH, 1, [Event(event.id, "a/+", {}, b"")])
    assert "the topic has a wildcard or a control character" in refusal(wild).reason
    assert "8388608" in refusal(struct.pack("<IBBH", 1 << 30, PUBLISH, 1, 0)).reason
    assert "malformed SUBSCRIBE" in refusal(struct.pack("<IBBH", 9, SUBSCRIBE, 1, 0) + b"\x90").reason
    assert "KNOWLEDGE" in refusal(pack_batch(KNOWLEDGE, 0, [])).reason
    assert "version 9" in refusal(struct.pack("<IBBH", 9, PING, 9, 0) + b"\x90").reason
    assert "99" in refusal(struct.pack("<IBBH", 9, 99, 1, 0) + b"\x90").reason
    with pytest.raises(Refused, match="protocol: the peer speaks protocol version 2"):
        Client(broker.address, version=2)
    other.publish(other.event("fine", b"still here"))
    assert payloads(other.batches()) == [b"still here"]


# ---- the part between brokers


class Peer(Connection):
    """A broker with one subscription and one stream, and no more cleverness than it needs."""

    NUMBER = 0xFFFF_FFF0
    BOOT = 1
    PUBEND = NUMBER << 32 | 0x8000_0000 | BOOT
    NODE = b"\xff" * 16

    def __init__(self, address: str) -> None:
        clock = time.time_ns() // 1000
        hello = [1, "broker", "made-up", "", LIMITS, 8 << 20, clock, self.NUMBER, self.NODE, self.BOOT, 1]
        super().__init__(address, hello)
        self.origin = self.welcome[2]
        self.stream = self.origin << 32 | 0x8000_0000 | self.welcome[4]
        self.stamps: dict[int, dict[int, int]] = {0: {}}

    def advertise(self, sequence: int) -> None:
        links = [[self.origin, 1]]
        own = [self.NUMBER, self.NODE, "made-up", self.BOOT, sequence, links, [self.PUBEND]]
        self.send(TOPOLOGY, [[own]])

    def want(self, topic: str, where: str) -> int:
        """Floods a table of one entry; its version."""
        version = self.BOOT << 32 | 1
        self.send(INTEREST, [self.NUMBER, 0, version, [[1, topic, where]], []])
        return version

    def filtered_silence(self, pubend: int, version: int) -> list[int]:
        """The first silence that is filtered with this version: pubend, start, end, stamp."""
        while True:
            kind, fields = self.receive()
            if kind == STAMP:
                self.stamps[fields[0]] = fields[1]
            elif kind == SILENCE:
                for span in fields[0]:
                    if span[0] == pubend and self.stamps[span[3]].get(self.NUMBER, 0) >= version:
                        return list(span)
            else:
                self.kept.append((kind, fields))


def test_a_broker_from_the_document(broker: BrokerProcess, opened: list[Connection]) -> None:
    """D2: Link, flood interest, attach, be fed what is wanted, ask again, feed a stream of one's own."""
    client = Client(broker.address)
    opened.append(client)
    peer = Peer(broker.address)
    opened.append(peer)
    advertised = peer.expect(TOPOLOGY)[0]
    assert [ad[0] for ad in advertised] == [peer.origin]
    assert peer.expect(DIGEST)[0] == {peer.origin: peer.welcome[4] << 32}
    peer.advertise(1)
    version = peer.want("wanted/#", "n > 1")
    assert peer.expect(ATTACH)[0] == peer.NUMBER
    peer.send(ATTACH, [peer.origin, {}])
    _, _, told, _ = peer.filtered_silence(peer.stream, version)

    events = [client.event("wanted/x", b"%d" % number, n=number) for number in range(4)]
    client.publish(*events, client.event("unwanted", b"", n=9))
    client.settle()
    found = peer.expect(KNOWLEDGE)
    assert (found.pubend, found.lost) == (peer.stream, False)
    assert found.start >= told
    assert [event.payload for event in found.events] == [b"2", b"3"]

    first, last = found.events[0].tick, found.events[1].tick
    peer.send(NACK, [peer.stream, [[first, last]], {peer.NUMBER: version}])
    answer = peer.expect(KNOWLEDGE)
    assert [event.payload for event in answer.events] == [b"3"]
    assert first <= answer.start < last <= answer.end

    # Now a stream of its own: the client subscribes, which the broker floods as a change of its table.
    client.send(SUBSCRIBE, [1, "from/afar", ""])
    owner, base, needed, added, removed, *_ = peer.expect(INTEREST)
    assert (owner, base, removed) == (peer.origin, peer.welcome[4] << 32, [])
    assert [entry[1:] for entry in added] == [["from/afar", ""]]
    now = time.time_ns() // 1000
    peer.send(STAMP, [1, {peer.origin: needed}])
    peer.send(SILENCE, [[[peer.PUBEND, now, now + 10, 1]]])
    assert client.expect(SUBSCRIBED) == [1, [], "", False, 0, 0]
    identity = struct.pack(">IIQ", 5, peer.NUMBER, (now // 1000) << 16)
    far = Event(identity, "from/afar", {"n": 1}, b"hello", now + 20)
    knowledge = pack_batch(KNOWLEDGE, 1, [far], pubend=peer.PUBEND, start=now + 10, end=now + 20)
    peer.send_batch(knowledge)
    delivered = client.expect(DELIVERY)
    assert (delivered.pubend, delivered.events) == (peer.PUBEND, [far])

    # A hole is asked for at once; saying that it is lost reaches the subscriber.
    peer.send(SILENCE, [[[peer.PUBEND, now + 30, now + 40, 1]]])
    pubend, spans, need = peer.expect(NACK)
    assert (pubend, spans) == (peer.PUBEND, [[now + 20, now + 30]])
    assert need == {peer.origin: needed}
    lost = bytearray(pack_batch(KNOWLEDGE, 0, [], pubend=peer.PUBEND, start=now + 20, end=now + 30))
    lost[6] = 1
    peer.send_batch(bytes(lost))
    gap = client.expect(DELIVERY)
    assert (gap.lost, gap.start, gap.end) == (True, now + 20, now + 30)


def test_a_second_link_and_other_limits_are_refused(broker: BrokerProcess, opened: list[Connection]) -> None:
    first = Peer(broker.address)
    opened.append(first)
    time.sleep(0.001)
    opened.append(Peer(broker.address))  # by the same dialler, later: this one stays
    with pytest.raises(Refused, match="redundant"):
        first.expect(REPLY)
    clock = time.time_ns() // 1000
    hello = [1, "broker", "odd", "", [2 << 20, *LIMITS[1:]], 8 << 20, clock, 5, b"\x05" * 16, 1, 1]
    with pytest.raises(Refused, match=r"protocol: .*different limits"):
        Connection(broker.address, hello)
