"""Postroad's own protocol for the load processes: frames packed by hand, not by the product's client."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, TypeVar

import numpy as np

from postroad.bench.sessions import STAMP_BYTES, Session, Template
from postroad.errors import PeerError, from_wire
from postroad.events.topics import topic_number
from postroad.units import MIB
from postroad.wire import frames
from postroad.wire.frames import DEFAULT_LIMITS, Kind

M = TypeVar("M", bound=frames.Message)

WINDOW_BYTES: Final = 16 * MIB
FRAME_HEADER_BYTES: Final = 48
ROW_HEADER_BYTES: Final = 48
_PREFIX: Final = struct.Struct("<IBBH")
_SPAN: Final = struct.Struct("<I4xQ8xq")  # from the count on: count, pubend, end
_CHANNEL_AT: Final = 40
_LOST: Final = 1


class Native(Session):
    """A client connection to a Postroad broker."""

    def __init__(self, connected: socket.socket, name: str = "") -> None:
        self.lost = 0  # deliveries that said "lost here"
        self.consumed: dict[int, int] = {}  # pubend -> the end of the last whole delivery: a checkpoint token
        self._skip = 0  # bytes of the current delivery frame still to come
        self._in_frame = 0  # deliveries in that frame, counted once it is whole
        self._frame_span = (0, 0)  # its pubend and end
        self._carry = b""
        self._unreturned = 0  # consumed bytes not yet given back as credit
        self._credit = 0
        self._sequence = 0
        self._next_id = 0
        self._row_heap = self._payload_at = 0
        super().__init__(connected, name)

    def _greet(self) -> None:
        hello = frames.Hello(
            version=frames.PROTOCOL_VERSION,
            role="client",
            name="bench",
            token="",
            limits=DEFAULT_LIMITS,
            window=WINDOW_BYTES,
            time_us=time.time_ns() // 1000,
        )
        self.socket.sendall(frames.encode(hello))
        welcome = self.wait(frames.Welcome)
        self._credit = welcome.window
        self.publisher, self.broker = welcome.publisher, welcome.broker
        self._id_prefix = struct.pack(">II", welcome.publisher, welcome.broker)

    def wait(self, wanted: type[M]) -> M:
        while True:
            prefix = self._take(frames.FRAME_PREFIX_BYTES)
            frame = prefix + self._take(int.from_bytes(prefix[:4], "little") - len(prefix))
            if frame[4] in frames.BATCH_KINDS:
                self._unreturned += len(frame)
                continue
            message = frames.decode(frame)
            if isinstance(message, wanted):
                return message
            self._control(message)
            self.socket.sendall(self.reply)
            self.reply.clear()

    def _control(self, message: frames.Message) -> None:
        match message:
            case frames.Ping(time_us=sent):
                self.reply += frames.encode(frames.Pong(time_us=sent, at_us=time.time_ns() // 1000))
            case frames.Credit(size=size):
                self._credit += size
            case frames.Refuse() | frames.Rejected() | frames.Ended():
                raise from_wire(message.code, message.reason)
            case _:
                pass

    def _subscribe(self, topics: Sequence[str]) -> None:
        asked = [
            frames.encode(frames.Subscribe(number=number, topic=topic, where=""))
            for number, topic in enumerate(topics, self.subscriptions + 1)
        ]
        self.socket.sendall(b"".join(asked))
        for _ in topics:
            self.wait(frames.Subscribed)

    def expect(self, topic: str, size: int) -> None:
        self._row_heap = len(topic.encode()) + size
        self._payload_at = len(topic.encode())

    def template(self, topic: str, payload: bytes, count: int) -> Template:
        name = topic.encode()
        row = struct.pack("<16xqQHHIHHI", 0, topic_number(name), len(name), 0, len(payload), 0, 0, 0)
        size = FRAME_HEADER_BYTES + count * (len(row) + len(name) + len(payload))
        header = struct.pack("<IBBHIIQqqII", size, Kind.PUBLISH, 1, 0, count, 0, 0, 0, 0, 0, 0)
        data = bytearray(header + row * count + (name + payload) * count)
        return Template(data, FRAME_HEADER_BYTES + count * len(row) + len(name), count)

    def prepare(self, template: Template) -> None:
        """A new sequence number for the frame and new ids for its rows."""
        data, count = template.data, template.count
        self._sequence += 1
        self._credit -= len(data)
        data[_CHANNEL_AT : _CHANNEL_AT + 4] = self._sequence.to_bytes(4, "little")
        # Times as a real client's: ids that fall behind the clock would be an unusual load for tracking.
        first = max(self._next_id, time.time_ns() // 1_000_000 << 16)
        self._next_id = first + count
        if count == 1:
            data[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + 16] = self._id_prefix + first.to_bytes(8, "big")
            return
        rows = np.frombuffer(data, np.uint8, count * ROW_HEADER_BYTES, FRAME_HEADER_BYTES)
        table = rows.reshape(count, ROW_HEADER_BYTES)
        table[:, :8] = np.frombuffer(self._id_prefix, np.uint8)
        ids = np.arange(first, first + count, dtype=np.uint64).astype(">u8")
        table[:, 8:16] = ids.view(np.uint8).reshape(count, 8)

    def may_send(self) -> bool:
        return self._credit > 0

    def feed(self, data: memoryview) -> int:
        if self._carry:
            data, self._carry = memoryview(self._carry + bytes(data)), b""
        done, position, end = 0, self._skip, len(data)
        if position > end:
            self._skip -= end
            return 0
        if self._skip:
            self._whole(self._frame_span)
        done, self._in_frame, self._skip = self._in_frame, 0, 0
        while end - position >= frames.FRAME_PREFIX_BYTES:
            length, kind, _, flags = _PREFIX.unpack_from(data, position)
            if kind == Kind.DELIVERY:
                if position + FRAME_HEADER_BYTES > end:
                    break
                count, pubend, last = _SPAN.unpack_from(data, position + 8)
                self.lost += flags & _LOST
                self._unreturned += length
                position += length
                if position > end:
                    self._in_frame, self._skip, self._frame_span = count, position - end, (pubend, last)
                    break
                self._whole((pubend, last))
                done += count
                continue
            if position + length > end:
                break
            self._control(frames.decode(data[position : position + length]))
            position += length
        self._carry = bytes(data[position:])
        self._return_credit()
        return done

    def _whole(self, span: tuple[int, int]) -> None:
        self.consumed[span[0]] = span[1]

    def _return_credit(self) -> None:
        if self._unreturned >= WINDOW_BYTES // 4:
            self.reply += frames.encode(frames.Credit(size=self._unreturned))
            self._unreturned = 0

    def feed_stamps(self, data: memoryview, stamps: list[int]) -> None:
        buffered = self._carry + bytes(data)
        position, end = 0, len(buffered)
        while end - position >= frames.FRAME_PREFIX_BYTES:
            length, kind, _, flags = _PREFIX.unpack_from(buffered, position)
            if position + length > end:
                break
            if kind == Kind.DELIVERY:
                count = int.from_bytes(buffered[position + 8 : position + 12], "little")
                self.lost += flags & _LOST
                self._unreturned += length
                if length != FRAME_HEADER_BYTES + count * (ROW_HEADER_BYTES + self._row_heap):
                    raise PeerError(f"a delivery of {count} events has {length} bytes")
                at = position + FRAME_HEADER_BYTES + count * ROW_HEADER_BYTES + self._payload_at
                for _ in range(count):
                    stamps.append(int.from_bytes(buffered[at : at + STAMP_BYTES], "little"))
                    at += self._row_heap
            else:
                self._control(frames.decode(buffered[position : position + length]))
            position += length
        self._carry = buffered[position:]
        self._return_credit()
