"""Who sends in `bench queues`: a connection that sends to one queue, and counts what is confirmed.

As elsewhere no client library takes part: packets are made here, and what comes back is counted in bytes and
frames. One at a time or many at once is up to the caller.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import msgspec

from postroad.bench.amqp import NO_TABLE, content, method, short
from postroad.bench.durable_sessions import AmqpDurable, JetStream
from postroad.bench.native import Native
from postroad.bench.sessions import Address
from postroad.errors import PeerError, UnavailableError
from postroad.ids import SESSION_DRAWN_BYTES, first_number, session_from
from postroad.units import MIB
from postroad.wire import frames
from postroad.wire.frames import Posting, Splitter

PAYLOAD: Final = b"x" * 250
READY_S: Final = 60.0  # for a cluster to have elected whom it needs
MAX_TOGETHER: Final = 256
ANSWER_S: Final = 0.25  # then, where a node died, a message is sent again


class Sender(ABC):
    """`socket` is the caller's to read; what it reads goes to `feed`."""

    socket: socket.socket

    @abstractmethod
    def packet(self, count: int) -> bytes:
        """The next so many messages."""

    @abstractmethod
    def feed(self, data: bytes) -> int:
        """How many messages it confirms."""

    @abstractmethod
    def leader(self) -> int:
        """Which node answers for the queue, by its place from 0."""

    @abstractmethod
    def depth(self) -> int:
        """Messages in the queue."""

    def repeat(self) -> bytes:
        """The last message once more, after a node died."""
        return self.packet(1)

    def close(self) -> None:
        self.socket.close()


class PostroadSender(Sender):
    def __init__(self, address: Address, queue: str, *, session: bytes = b"", last: int = 0) -> None:
        native = Native.connect(address)
        self.socket = native.socket
        self.queue = queue
        self.session = session or session_from(secrets.token_bytes(SESSION_DRAWN_BYTES))
        self.last = last or first_number(time.time_ns() // 1_000_000)
        self._before = 0
        self._sent: dict[int, int] = {}  # number -> messages not confirmed
        self._number = 0
        self._splitter = Splitter(MIB, handshake=False)
        self._replies: dict[int, str] = {}
        self._chain = self._ask_chain()

    def _ask_chain(self) -> bytes:
        """Transactional messages name the chain that they are first sent in: one without it is not taken."""
        probe = Posting(inbox=self.queue, id=self.last, after=0, payload=b"")
        send = frames.Send(
            number=1, source="bench", session=self.session, form="transactional", messages=(probe,)
        )
        deadline = time.monotonic() + READY_S
        self.socket.settimeout(READY_S)
        while time.monotonic() < deadline:
            self.socket.sendall(frames.encode(send))
            answer: frames.Sent | None = None
            while answer is None:
                data = self.socket.recv(65536)
                if not data:
                    raise UnavailableError("the broker closed the connection")
                for frame in self._splitter.feed(data):
                    message = frames.decode(frame)
                    answer = message if isinstance(message, frames.Sent) else answer
            if answer.chain:
                return answer.chain
            time.sleep(ANSWER_S)
        raise UnavailableError(f"no broker answers for {self.queue!r}")

    def packet(self, count: int) -> bytes:
        made = b""
        while count:
            some = min(count, MAX_TOGETHER)
            messages = []
            for _ in range(some):
                self.last += 1
                messages.append(self._posting(self._before))
                self._before = self.last
            made += self._frame(tuple(messages))
            count -= some
        return made

    def _frame(self, messages: tuple[Posting, ...]) -> bytes:
        self._number += 1
        self._sent[self._number] = len(messages)
        send = frames.Send(
            number=self._number,
            source="bench",
            session=self.session,
            form="transactional",
            messages=messages,
        )
        return frames.encode(send)

    def repeat(self) -> bytes:
        return self._frame((self._posting(0),))

    def _posting(self, after: int) -> Posting:
        return Posting(inbox=self.queue, id=self.last, after=after, payload=PAYLOAD, chain=self._chain)

    def feed(self, data: bytes) -> int:
        done = 0
        for frame in self._splitter.feed(data):
            message = frames.decode(frame)
            if isinstance(message, frames.Ping):
                pong = frames.Pong(time_us=message.time_us, at_us=time.time_ns() // 1000)
                self.socket.sendall(frames.encode(pong))
            elif isinstance(message, frames.Reply):
                self._replies[message.number] = message.body
            elif isinstance(message, frames.Sent):
                if message.code not in ("", "unavailable"):
                    raise PeerError(f"a message was not kept: {message.code} {message.reason}")
                if message.state == "kept":
                    count = len(message.places) or self._sent[message.number]
                    self._sent[message.number] -= count
                    done += count
        return done

    def ask(self) -> dict[str, Any]:
        """The row of this queue."""
        self._number += 1
        self.socket.settimeout(READY_S)
        self.socket.sendall(frames.encode(frames.Request(number=self._number, what="queues")))
        while self._number not in self._replies:
            data = self.socket.recv(65536)
            if not data:
                raise UnavailableError("the broker closed the connection")
            self.feed(data)
        rows = msgspec.json.decode(self._replies.pop(self._number))["queues"]
        return next((row for row in rows if row["inbox"] == self.queue), {"depth": 0, "replicas": []})

    def leader(self) -> int:
        return int(str(self.ask()["responsible"]).removeprefix("b")) - 1

    def depth(self) -> int:
        return int(self.ask()["depth"])


class JetStreamSender(Sender):
    """A stream of three replicas."""

    nodes: ClassVar[int] = 3

    def __init__(self, address: Address, queue: str) -> None:
        self._session = JetStream.connect(address, f"{queue}-{secrets.token_hex(4)}")
        self.socket = self._session.socket
        self.queue = queue
        self._packet = bytes(self._session.template(f"queue.{queue}", PAYLOAD, 1).data)

    def create(self) -> None:
        config = {
            "name": self.queue,
            "subjects": [f"queue.{self.queue}"],
            "storage": "file",
            "num_replicas": self.nodes,
        }
        deadline = time.monotonic() + READY_S
        while True:
            try:
                self._session.request(f"STREAM.CREATE.{self.queue}", config)
            except (PeerError, TimeoutError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def packet(self, count: int) -> bytes:
        return self._packet * count

    def feed(self, data: bytes) -> int:
        before = self._session.acknowledged
        self._session.feed(memoryview(data))
        if self._session.reply:
            self.socket.sendall(self._session.reply)
            self._session.reply.clear()
        return self._session.acknowledged - before

    def info(self) -> dict[str, Any]:
        self.socket.settimeout(READY_S)
        return self._session.ask(f"STREAM.INFO.{self.queue}")

    def leader(self) -> int:
        return int(str(self.info()["cluster"]["leader"]).removeprefix("n")) - 1

    def depth(self) -> int:
        return int(self.info()["state"]["messages"])


class RabbitSender(Sender):
    """A quorum queue; its leader is at the node where it was declared."""

    def __init__(self, address: Address, queue: str, *, declared_at: int = 0) -> None:
        self._session = AmqpDurable.connect(address, queue)
        self.socket = self._session.socket
        self.queue = queue
        self._declared_at = declared_at
        publish = method(1, 60, 40, b"\x00\x00" + short(b"") + short(queue.encode()) + b"\x00")
        self._packet = publish + content(PAYLOAD, self._session.properties)

    def declare(self, *, passive: bool = False) -> int:
        """Messages in it."""
        kind = short(b"x-queue-type") + b"S" + struct.pack(">I", 6) + b"quorum"
        table = NO_TABLE if passive else struct.pack(">I", len(kind)) + kind
        bits = b"\x03" if passive else b"\x02"
        self.socket.settimeout(READY_S)
        answer = self._session.call(1, 50, 10, b"\x00\x00" + short(self.queue.encode()) + bits + table, 11)
        count: int = struct.unpack_from(">I", answer, 1 + answer[0])[0]
        return count

    def packet(self, count: int) -> bytes:
        return self._packet * count

    def feed(self, data: bytes) -> int:
        before = self._session.acknowledged
        self._session.feed(memoryview(data))
        return self._session.acknowledged - before

    def leader(self) -> int:
        return self._declared_at

    def depth(self) -> int:
        return self.declare(passive=True)
