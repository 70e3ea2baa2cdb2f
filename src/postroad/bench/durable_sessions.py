"""Sessions of `bench durable`: durable subscriptions, confirmed publishing, acknowledged deliveries.

A subscriber has a name under which the system remembers it; it acknowledges cumulatively, every
`ACK_EVENTS` events, where its protocol can. MQTT cannot: it acknowledges every event. A publisher counts
in `acknowledged` what the system has confirmed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from postroad.bench.amqp import CONSUMER, EXCHANGE, NO_TABLE, Amqp, method, short
from postroad.bench.native import Native
from postroad.bench.sessions import Mqtt, Nats, Template, mqtt_packet, mqtt_text
from postroad.errors import PeerError, UnavailableError
from postroad.events.token import CheckpointToken
from postroad.kernel.layout import FLAG_DURABLE
from postroad.wire import frames

ACK_EVENTS: Final = 256
STREAM: Final = "bench"
MAX_UNACKED: Final = 16_384  # events that JetStream sends a consumer ahead of its acknowledgements
_PACKET_IDS: Final = 65_535


class NativeDurable(Native):
    """Postroad; the broker keeps the token."""

    ack = "batch"
    ack_events = ACK_EVENTS

    def _greet(self) -> None:
        super()._greet()
        self._per_frame = self._unsaid = 0

    def _subscribe(self, topics: Sequence[str]) -> None:
        for number, topic in enumerate(topics, self.subscriptions + 1):
            message = frames.Subscribe(number=number, topic=topic, where="", durable=self.name, ack=self.ack)
            self.socket.sendall(frames.encode(message))
            self.wait(frames.Subscribed)

    def _control(self, message: frames.Message) -> None:
        if isinstance(message, frames.Accepted):
            self.acknowledged = message.sequence * self._per_frame
        else:
            super()._control(message)

    def template(self, topic: str, payload: bytes, count: int) -> Template:
        made = super().template(topic, payload, count)
        made.data[6] |= FLAG_DURABLE
        self._per_frame = count
        return made

    def feed(self, data: memoryview) -> int:
        done = super().feed(data)
        self._unsaid += done
        if self._unsaid >= self.ack_events:
            self.finish()
        return done

    def finish(self) -> None:
        if self.consumed:
            self._unsaid = 0
            token = CheckpointToken(self.consumed).to_json()
            self.reply += frames.encode(frames.Ack(number=1, token=token))


class JetStream(Nats):
    """One stream; per subscriber a durable push consumer whose acknowledgements are cumulative."""

    def _greet(self) -> None:
        super()._greet()
        self._received = self._unsaid = 0
        self._reply_to = b""
        self._inbox = f"_INBOX.{self.name}"
        self.socket.sendall(f"SUB {self._inbox} 1\r\n".encode())
        self._round_trip()

    def request(self, subject: str, body: object) -> None:
        self.ask(subject, body)

    def ask(self, subject: str, body: object = None) -> dict[str, Any]:
        data = b"" if body is None else msgspec.json.encode(body)
        self.socket.sendall(b"PUB $JS.API.%s %s %d\r\n" % (subject.encode(), self._inbox.encode(), len(data)))
        self.socket.sendall(data + b"\r\n")
        while (head := self._take_line()) == b"PING\r\n":  # once, soon after the connection was made
            self.socket.sendall(b"PONG\r\n")
        answer = self._take(int(head.split()[-1]) + 2)
        if b'"error"' in answer:
            raise PeerError(f"JetStream says {answer[:200].decode(errors='replace')}")
        reply: dict[str, Any] = msgspec.json.decode(answer)
        return reply

    def create_stream(self) -> None:
        config = {"name": STREAM, "subjects": ["bench.>"], "storage": "file", "retention": "limits"}
        self.request(f"STREAM.CREATE.{STREAM}", config)

    def _subscribe(self, topics: Sequence[str]) -> None:
        (topic,) = topics
        self.resume(topics)
        self._round_trip()
        config = {
            "durable_name": self.name,
            "deliver_subject": f"deliver.{self.name}",
            "filter_subject": topic,
            "deliver_policy": "all",
            "ack_policy": "all",
            "max_ack_pending": MAX_UNACKED,
        }
        subject = f"CONSUMER.DURABLE.CREATE.{STREAM}.{self.name}"
        self.request(subject, {"stream_name": STREAM, "config": config})

    def resume(self, topics: Sequence[str]) -> None:
        del topics  # the consumer knows them
        self.socket.sendall(f"SUB deliver.{self.name} 2\r\n".encode())

    def expect(self, topic: str, size: int) -> None:
        del size  # messages are told apart by their line ends
        self._head = b"MSG %s 2 $JS.ACK." % topic.encode()

    def template(self, topic: str, payload: bytes, count: int) -> Template:
        packet = b"PUB %s %s %d\r\n%s\r\n" % (topic.encode(), self._inbox.encode(), len(payload), payload)
        return Template(bytearray(packet * count), len(packet) - 2 - len(payload), count)

    def feed(self, data: memoryview) -> int:
        """Every message is two lines, a head and a payload without line ends; heads vary in length."""
        buffered = self._carry + bytes(data)
        if b"PING\r\n" in buffered:  # once, soon after the connection was made
            buffered = buffered.replace(b"PING\r\n", b"")
            self.reply += b"PONG\r\n"
        lines = buffered.count(b"\r\n")
        end = buffered.rfind(b"\r\n")
        if lines % 2:
            end = buffered.rfind(b"\r\n", 0, end)
        end += 2 if lines > 1 else -end
        self._carry = buffered[end:]
        done = lines // 2
        if buffered.count(b"MSG ", 0, end) != done:
            raise PeerError(f"JetStream: unexpected bytes between deliveries: {buffered[:80]!r}")
        if not self._head:
            if buffered.count(b'"seq":', 0, end) != done:
                raise PeerError(f"JetStream refused a publish: {buffered[:200]!r}")
            self.acknowledged += done
            return 0
        if done:
            start = buffered.rfind(b"MSG ", 0, end)
            if not buffered.startswith(self._head, start):
                raise PeerError(f"JetStream: unexpected delivery {buffered[start : start + 80]!r}")
            self._reply_to = buffered[start : buffered.index(b"\r\n", start)].split()[3]
            self._unsaid += done
            if self._unsaid >= ACK_EVENTS:
                self.finish()
        return done

    def finish(self) -> None:
        if self._reply_to:
            self.reply += b"PUB %s 0\r\n\r\n" % self._reply_to
            self._unsaid = 0


class MqttDurable(Mqtt):
    """MQTT 3.1.1 at quality of service 1, a session that outlives its connection."""

    def _greet(self) -> None:
        self._packet = 0
        # Protocol level 4, no clean session, keep-alive off.
        head = b"\x00\x04MQTT\x04\x00\x00\x00"
        self.socket.sendall(mqtt_packet(0x10, head + mqtt_text(self.name)))
        answer = self._take(4)
        if answer[:2] != b"\x20\x02" or answer[3]:
            raise PeerError("MQTT connection refused")

    def resume(self, topics: Sequence[str]) -> None:
        """Nothing to ask for: what waited is on its way since the connection was accepted."""

    def _subscribe(self, topics: Sequence[str]) -> None:
        filters = b"".join(mqtt_text(topic) + b"\x01" for topic in topics)
        self.socket.sendall(mqtt_packet(0x82, b"\x00\x01" + filters))
        answer = mqtt_packet(0x90, b"\x00\x01" + b"\x01" * len(topics))
        if self._take(len(answer)) != answer:
            raise PeerError("MQTT subscription refused")

    def template(self, topic: str, payload: bytes, count: int) -> Template:
        packet = mqtt_packet(0x32, mqtt_text(topic) + b"\x00\x00" + payload)
        return Template(bytearray(packet * count), len(packet) - len(payload), count)

    def prepare(self, template: Template) -> None:
        """Packet numbers, which stand before the payloads."""
        size = len(template.data) // template.count
        packets = np.frombuffer(template.data, np.uint8).reshape(template.count, size)
        ids = ((self._packet + np.arange(template.count)) % _PACKET_IDS + 1).astype(">u2")
        at = template.payload_at
        packets[:, at - 2 : at] = ids.view(np.uint8).reshape(template.count, 2)
        self._packet += template.count

    def expect(self, topic: str, size: int) -> None:
        packet = mqtt_packet(0x32, mqtt_text(topic) + b"\x00\x00" + bytes(size))
        self._expect(packet[: -size - 2], len(packet), len(packet) - size)

    def feed(self, data: memoryview) -> int:
        buffered = self._carry + bytes(data)
        size = self._size or 4  # a publisher gets nothing but PUBACK
        done = len(buffered) // size
        self._carry = buffered[done * size :]
        packets = np.frombuffer(buffered, np.uint8, done * size).reshape(done, size)
        head = np.frombuffer(self._head or b"\x40\x02", np.uint8)
        if not (packets[:, : len(head)] == head).all():
            raise PeerError(f"MQTT: unexpected bytes between deliveries: {buffered[:40]!r}")
        if not self._head:
            self.acknowledged += done
            return 0
        replies = np.empty((done, 4), np.uint8)
        replies[:, :2] = (0x40, 0x02)
        replies[:, 2:] = packets[:, len(head) : len(head) + 2]
        self.reply += replies.tobytes()
        return done


class AmqpDurable(Amqp):
    """A durable queue per subscriber, persistent messages, publisher confirms."""

    exchange_bits = b"\x02"  # durable
    properties = b"\x10\x00\x02"  # delivery mode 2: persistent

    def _greet(self) -> None:
        super()._greet()
        self._received = self._said = 0
        self._confirmed: set[int] = set()  # beyond the first that is not confirmed
        self.call(1, 85, 10, b"\x00", 11)

    def _subscribe(self, topics: Sequence[str]) -> None:
        name = short(self.name.encode())
        self.call(1, 50, 10, b"\x00\x00" + name + b"\x02" + NO_TABLE, 11)
        for topic in topics:
            arguments = b"\x00\x00" + name + short(EXCHANGE) + short(topic.encode()) + b"\x00" + NO_TABLE
            self.call(1, 50, 20, arguments, 21)
        self.call(1, 60, 20, b"\x00\x00" + name + short(CONSUMER) + b"\x00" + NO_TABLE, 21)

    def feed(self, data: memoryview) -> int:
        if not self._head:
            self._confirmations(data)
            return 0
        done = super().feed(data)
        self._received += done
        if self._received - self._said >= ACK_EVENTS:
            self.finish()
        return done

    def finish(self) -> None:
        if self._received > self._said:
            self._said = self._received
            self.reply += method(1, 60, 80, struct.pack(">QB", self._said, 1))

    def _say_goodbye(self) -> None:
        """RabbitMQ ends a channel whose connection is gone before it has handled all its acknowledgements."""
        self.call(1, 20, 40, struct.pack(">H", 200) + short(b"") + bytes(4), 41)

    def _confirmations(self, data: memoryview) -> None:
        buffered = self._carry + bytes(data)
        position = 0
        while len(buffered) - position >= _CONFIRMATION.size:
            kind, _, _, group, number, tag, several, _ = _CONFIRMATION.unpack_from(buffered, position)
            if (kind, group, number) == (1, 60, 120):
                raise UnavailableError("RabbitMQ took a message and could not keep it")
            if (kind, group, number) != (1, 60, 80):
                raise PeerError(f"AMQP: expected a confirmation, got {buffered[position : position + 60]!r}")
            position += _CONFIRMATION.size
            if several:
                self.acknowledged = tag
                self._confirmed = {confirmed for confirmed in self._confirmed if confirmed > tag}
            else:
                self._confirmed.add(tag)
            while self.acknowledged + 1 in self._confirmed:
                self.acknowledged += 1
                self._confirmed.remove(self.acknowledged)
        self._carry = buffered[position:]


_CONFIRMATION: Final = struct.Struct(">BHIHHQBB")
