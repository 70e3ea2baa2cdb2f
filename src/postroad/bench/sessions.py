"""One connection to one system, spoken by packets made beforehand: the common part and three peers.

A `Session` does its handshake and its subscriptions blocking; from then on the load process owns the
socket and asks the session three things only: the bytes of the next publish (`Template`, `prepare`), how
many deliveries a piece of the received stream completed (`feed`), or the send times they carry
(`feed_stamps`). Deliveries of the peers have one fixed size per topic, so they are counted by bytes; the
first bytes of the last message in every piece are compared with what they must be, and anything else in
the stream (a NATS PING) makes the piece be walked message by message.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from postroad.errors import PeerError, UnavailableError

TIMEOUT_S: Final = 30.0
STAMP_BYTES: Final = 8
SUBSCRIBE_CHUNK: Final = 500  # topics asked for in one packet when there are many

Address = tuple[str, int]


def payload_of(size: int) -> bytes:
    """The payload all systems carry: room for a stamp, then letters that resemble no packet's head."""
    return bytes(STAMP_BYTES) + b"x" * (size - STAMP_BYTES)


@dataclass(slots=True)
class Template:
    """The bytes of `count` publishes in a row; the first one's payload begins at `payload_at`."""

    data: bytearray
    payload_at: int
    count: int

    def stamp(self, time_ns: int) -> None:
        self.data[self.payload_at : self.payload_at + STAMP_BYTES] = time_ns.to_bytes(STAMP_BYTES, "little")


class Session(ABC):
    """A handshaken connection. `reply` collects what the load process must write back on it."""

    level_separator: ClassVar[str] = "/"

    def __init__(self, connected: socket.socket, name: str = "") -> None:
        self.socket = connected
        self.name = name  # of a durable subscriber
        self.acknowledged = 0  # published events that the system has confirmed, where it does
        self.reply = bytearray()
        self.subscriptions = 0  # asked for on this connection so far
        self._greet()

    @classmethod
    def connect(cls, address: Address, name: str = "") -> Self:
        try:
            connected = socket.create_connection(address, timeout=TIMEOUT_S)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return cls(connected, name)
        except OSError as error:
            raise UnavailableError(f"{cls.__name__} at {address[0]}:{address[1]}: {error}") from error

    def close(self) -> None:
        self.socket.close()

    def topic(self, number: int) -> str:
        """Names of one length, so that packets of different topics have one size."""
        return f"bench{self.level_separator}t{number:06d}"

    @abstractmethod
    def _greet(self) -> None: ...

    @abstractmethod
    def _subscribe(self, topics: Sequence[str]) -> None: ...

    def subscribe(self, topics: Sequence[str]) -> None:
        """Returns once the system said that the subscriptions are in force."""
        for start in range(0, len(topics), SUBSCRIBE_CHUNK):
            chunk = topics[start : start + SUBSCRIBE_CHUNK]
            self._subscribe(chunk)
            self.subscriptions += len(chunk)

    def resume(self, topics: Sequence[str]) -> None:
        """A durable subscriber is back."""
        self._subscribe(topics)

    def attend(self) -> None:
        """Reads what has come on an idle connection and answers what must be answered."""
        if self.feed(memoryview(self.socket.recv(65536))):
            raise PeerError("a delivery on an idle connection")
        if self.reply:
            self.socket.sendall(self.reply)
            self.reply.clear()

    @abstractmethod
    def expect(self, topic: str, size: int) -> None:
        """What the deliveries will look like: called once before `feed` by a subscriber of one topic."""

    @abstractmethod
    def template(self, topic: str, payload: bytes, count: int) -> Template: ...

    def prepare(self, template: Template) -> None:
        """Called before every send of a template: numbers that must differ each time go in here."""
        del template

    def may_send(self) -> bool:
        """Whether the system's own flow control lets another packet go."""
        return True

    def finish(self) -> None:
        """Puts into `reply` the acknowledgement of what was received and not acknowledged yet."""
        return

    def leave(self) -> None:
        """Acknowledges what is left and closes the connection."""
        self.finish()
        self.socket.setblocking(True)
        self.socket.sendall(self.reply)
        self.reply.clear()
        self._say_goodbye()
        self.close()

    def _say_goodbye(self) -> None:
        """Where a system might not read what was sent just before a connection is closed."""
        return

    @abstractmethod
    def feed(self, data: memoryview) -> int:
        """Deliveries that this piece of the stream completes."""

    @abstractmethod
    def feed_stamps(self, data: memoryview, stamps: list[int]) -> None:
        """The same, appending the send time carried in each."""

    def _take(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(size)
            if not part:
                raise UnavailableError("the connection was closed during its setup")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _take_line(self) -> bytes:
        """Up to a line end, and not a byte more."""
        line = b""
        while not line.endswith(b"\r\n"):
            ahead = self.socket.recv(65536, socket.MSG_PEEK)
            if not ahead:
                raise UnavailableError("the connection was closed during its setup")
            end = ahead.find(b"\n") + 1
            line += self._take(end or len(ahead))
        return line


class FixedSession(Session):
    """A system whose deliveries on one subscription all have one size."""

    def __init__(self, connected: socket.socket, name: str = "") -> None:
        self._head = b""  # the first bytes of every delivery; empty on a connection that only publishes
        self._size = 0
        self._payload_at = 0
        self._need = 0  # bytes still to come of the delivery that has begun
        self._carry = b""
        super().__init__(connected, name)

    def _expect(self, head: bytes, size: int, payload_at: int) -> None:
        self._head, self._size, self._payload_at = head, size, payload_at

    def _noise(self, data: bytes) -> int:
        """Length of what stands at the start of `data` and is no delivery; 0 if more bytes are needed."""
        raise PeerError(f"{type(self).__name__}: unexpected bytes between deliveries: {data[:40]!r}")

    def feed(self, data: memoryview) -> int:
        if not self._head:
            return 0
        if self._carry:
            data, self._carry = memoryview(self._carry + bytes(data)), b""
        end, position, done = len(data), self._need, 0
        if end < position:
            self._need -= end
            return 0
        if position:
            done = 1
        self._need = 0
        whole, rest = divmod(end - position, self._size)
        if whole or rest:
            last = end - rest if rest else end - self._size
            if data[last : last + len(self._head)] != self._head[: end - last]:
                return done + self._walk(data, position)
            if rest:
                self._need = self._size - rest
        return done + whole

    def _walk(self, data: memoryview, position: int) -> int:
        done, end, head = 0, len(data), self._head
        while position < end:
            ahead = bytes(data[position : position + len(head)])
            if head.startswith(ahead):
                position += self._size
                done += position <= end
                continue
            length = self._noise(bytes(data[position : position + 4096]))
            if not length:
                self._carry = bytes(data[position:])
                return done
            position += length
        self._need = position - end
        return done

    def feed_stamps(self, data: memoryview, stamps: list[int]) -> None:
        buffered = self._carry + bytes(data)
        position, size, at = 0, self._size, self._payload_at
        while len(buffered) - position >= len(self._head):
            if not buffered.startswith(self._head, position):
                length = self._noise(buffered[position : position + 4096])
                if not length:
                    break
                position += length
            elif len(buffered) - position < size:
                break
            else:
                stamp_at = position + at
                stamps.append(int.from_bytes(buffered[stamp_at : stamp_at + STAMP_BYTES], "little"))
                position += size
        self._carry = buffered[position:]


def _repeat(packet: bytes, payload_size: int, tail: int, count: int) -> Template:
    """`count` equal packets in a row; each ends with the payload and `tail` more bytes."""
    return Template(bytearray(packet * count), len(packet) - tail - payload_size, count)


class Mqtt(FixedSession):
    """MQTT 3.1.1 at quality of service 0: Mosquitto. A delivery is the very packet that was published."""

    def _greet(self) -> None:
        # Protocol level 4, clean session, keep-alive off, an empty client id (the server makes one).
        self.socket.sendall(mqtt_packet(0x10, b"\x00\x04MQTT\x04\x02\x00\x00\x00\x00"))
        if self._take(4) != b"\x20\x02\x00\x00":
            raise PeerError("MQTT connection refused")

    def _subscribe(self, topics: Sequence[str]) -> None:
        filters = b"".join(mqtt_text(topic) + b"\x00" for topic in topics)
        self.socket.sendall(mqtt_packet(0x82, b"\x00\x01" + filters))
        answer = mqtt_packet(0x90, b"\x00\x01" + bytes(len(topics)))
        if self._take(len(answer)) != answer:
            raise PeerError("MQTT subscription refused")

    def template(self, topic: str, payload: bytes, count: int) -> Template:
        return _repeat(mqtt_packet(0x30, mqtt_text(topic) + payload), len(payload), 0, count)

    def expect(self, topic: str, size: int) -> None:
        packet = mqtt_packet(0x30, mqtt_text(topic) + bytes(size))
        self._expect(packet[:-size], len(packet), len(packet) - size)


def mqtt_text(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(2, "big") + data


def mqtt_packet(first: int, body: bytes) -> bytes:
    length, left = bytearray(), len(body)
    while True:
        left, low = left >> 7, left & 0x7F
        length.append(low | (0x80 if left else 0))
        if not left:
            return bytes((first,)) + bytes(length) + body


class Resp(FixedSession):
    """RESP 2: Redis publish/subscribe."""

    def _greet(self) -> None:
        self.socket.sendall(b"PING\r\n")
        if self._take_line() != b"+PONG\r\n":
            raise PeerError("this is no Redis server")

    def _subscribe(self, topics: Sequence[str]) -> None:
        self.socket.sendall(_resp("SUBSCRIBE", *topics))
        answer = b"".join(
            _resp("subscribe", topic).replace(b"*2", b"*3") + b":%d\r\n" % (self.subscriptions + number)
            for number, topic in enumerate(topics, 1)
        )
        if self._take(len(answer)) != answer:
            raise PeerError("Redis subscription refused")

    def template(self, topic: str, payload: bytes, count: int) -> Template:
        packet = _resp("PUBLISH", topic, payload)
        return _repeat(packet, len(payload), 2, count)

    def expect(self, topic: str, size: int) -> None:
        packet = _resp("message", topic, bytes(size))
        self._expect(packet[: -size - 2], len(packet), len(packet) - size - 2)


def _resp(*words: str | bytes) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word.encode() if isinstance(word, str) else word
        parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
    return b"".join(parts)


class Nats(FixedSession):
    """The NATS text protocol, core NATS."""

    level_separator = "."

    def _greet(self) -> None:
        if not self._take_line().startswith(b"INFO "):
            raise PeerError("this is no NATS server")
        self.socket.sendall(b'CONNECT {"verbose":false,"pedantic":false,"echo":true}\r\n')
        self._round_trip()

    def _round_trip(self) -> None:
        self.socket.sendall(b"PING\r\n")
        while (line := self._take_line()) != b"PONG\r\n":
            if line.startswith(b"-ERR"):
                raise PeerError(f"NATS says {line.decode().strip()}")

    def _subscribe(self, topics: Sequence[str]) -> None:
        lines = [f"SUB {topic} {number}\r\n" for number, topic in enumerate(topics, self.subscriptions + 1)]
        self.socket.sendall("".join(lines).encode())
        self._round_trip()

    def template(self, topic: str, payload: bytes, count: int) -> Template:
        packet = b"PUB %s %d\r\n%s\r\n" % (topic.encode(), len(payload), payload)
        return _repeat(packet, len(payload), 2, count)

    def expect(self, topic: str, size: int) -> None:
        head = b"MSG %s 1 %d\r\n" % (topic.encode(), size)
        self._expect(head, len(head) + size + 2, len(head))

    def _noise(self, data: bytes) -> int:
        if data.startswith(b"-ERR"):
            raise PeerError(f"NATS says {data[:80].decode(errors='replace').strip()}")
        if not data.startswith((b"PING"[: len(data)], b"INFO"[: len(data)], b"PONG"[: len(data)])):
            return super()._noise(data)
        return data.find(b"\n") + 1
