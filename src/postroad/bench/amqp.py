"""AMQP 0-9-1, as little of it as a fan-out needs: RabbitMQ.

Messages are transient, consumers acknowledge nothing, one direct exchange routes by topic into one
exclusive queue per subscriber: RabbitMQ's cheapest way to hand one message to many.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import ClassVar, Final

from postroad.bench.sessions import FixedSession, Template
from postroad.errors import PeerError

EXCHANGE: Final = b"bench"
CONSUMER: Final = b"c"
_METHOD, _HEADER, _BODY = 1, 2, 3
_END: Final = b"\xce"
NO_TABLE: Final = bytes(4)


def _frame(kind: int, channel: int, body: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(body)) + body + _END


def short(data: bytes) -> bytes:
    return bytes((len(data),)) + data


def method(channel: int, group: int, number: int, arguments: bytes) -> bytes:
    return _frame(_METHOD, channel, struct.pack(">HH", group, number) + arguments)


def content(payload: bytes, properties: bytes) -> bytes:
    header = struct.pack(">HHQ", 60, 0, len(payload)) + properties
    return _frame(_HEADER, 1, header) + _frame(_BODY, 1, payload)


class Amqp(FixedSession):
    level_separator = "."
    exchange_bits: ClassVar[bytes] = b"\x00"
    properties: ClassVar[bytes] = b"\x00\x00"  # of a message: none

    def _greet(self) -> None:
        self.socket.sendall(b"AMQP\x00\x00\x09\x01")
        self._answer(10, 10)
        login = b"\x00guest\x00guest"
        start_ok = NO_TABLE + short(b"PLAIN") + struct.pack(">I", len(login)) + login + short(b"en_US")
        self.socket.sendall(method(0, 10, 11, start_ok))
        tune = self._answer(10, 30)
        channels, frame_max, _ = struct.unpack(">HIH", tune)
        # Heartbeat 0: the stream must hold nothing but deliveries.
        self.socket.sendall(method(0, 10, 31, struct.pack(">HIH", channels, frame_max, 0)))
        self.call(0, 10, 40, short(b"/") + b"\x00\x00", 41)
        self.call(1, 20, 10, b"\x00", 11)
        self.call(
            1, 40, 10, b"\x00\x00" + short(EXCHANGE) + short(b"direct") + self.exchange_bits + NO_TABLE, 11
        )

    def _answer(self, group: int, number: int) -> bytes:
        kind, _, size = struct.unpack(">BHI", self._take(7))
        body = self._take(size + 1)[:-1]
        if kind != _METHOD or struct.unpack_from(">HH", body) != (group, number):
            raise PeerError(f"AMQP: expected method {group}.{number}, got {body[:60]!r}")
        return body[4:]

    def call(self, channel: int, group: int, number: int, arguments: bytes, answer: int) -> bytes:
        self.socket.sendall(method(channel, group, number, arguments))
        return self._answer(group, answer)

    def _subscribe(self, topics: Sequence[str]) -> None:
        if not self.subscriptions:
            # An empty name asks for a new one; bits: exclusive and auto-delete.
            declared = self.call(1, 50, 10, b"\x00\x00" + short(b"") + b"\x0c" + NO_TABLE, 11)
            self._queue = declared[1 : 1 + declared[0]]
            # Bits: no-ack.
            consume = b"\x00\x00" + short(self._queue) + short(CONSUMER) + b"\x02" + NO_TABLE
            self.call(1, 60, 20, consume, 21)
        for position, topic in enumerate(topics):
            last = position == len(topics) - 1
            arguments = (
                b"\x00\x00" + short(self._queue) + short(EXCHANGE) + short(topic.encode())
                + (b"\x00" if last else b"\x01") + NO_TABLE  # no-wait for all but the last
            )  # fmt: skip
            self.socket.sendall(method(1, 50, 20, arguments))
        self._answer(50, 21)

    def template(self, topic: str, payload: bytes, count: int) -> Template:
        publish = method(1, 60, 40, b"\x00\x00" + short(EXCHANGE) + short(topic.encode()) + b"\x00")
        packet = publish + content(payload, self.properties)
        return Template(bytearray(packet * count), len(packet) - 1 - len(payload), count)

    def expect(self, topic: str, size: int) -> None:
        arguments = short(CONSUMER) + bytes(9) + short(EXCHANGE) + short(topic.encode())
        deliver = method(1, 60, 60, arguments)
        packet = deliver + content(bytes(size), self.properties)
        # The delivery tag follows the consumer's; up to there all bytes are the same every time.
        self._expect(deliver[: 7 + 4 + 1 + len(CONSUMER)], len(packet), len(packet) - 1 - size)
