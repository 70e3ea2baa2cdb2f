"""A broker of a few lines on a real socket, which says what a test wants."""

from __future__ import annotations

import asyncio
import time

from postroad.events import EventBatch
from postroad.wire import frames as wire
from postroad.wire.frames import DEFAULT_LIMITS, Kind


class FakeBroker:
    """Welcomes everybody and answers as the test says; by default it accepts and agrees."""

    def __init__(self) -> None:
        self.accepting = True
        self.rejecting = ""  # a topic
        self.refusing_acks = ""  # the code of an error
        self.published: list[EventBatch] = []
        self.acks: list[wire.Ack] = []
        self.connections = 0
        self.subscribed = 0
        self.address = ""
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> FakeBroker:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """At the same address as before."""
        port = int(self.address.split(":")[1]) if self.address else 0
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        self.drop()
        await asyncio.sleep(0.01)

    def drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def say(self, message: wire.Message | bytes) -> None:
        self._writers[-1].write(message if isinstance(message, bytes) else wire.encode(message))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        splitter = wire.Splitter(DEFAULT_LIMITS.batch_bytes)
        try:
            while data := await reader.read(65536):
                for frame in splitter.feed(data):
                    self._answer(writer, frame)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    def _answer(self, writer: asyncio.StreamWriter, frame: bytes) -> None:
        if frame[4] == Kind.PUBLISH:
            batch = EventBatch.parse(frame, DEFAULT_LIMITS)
            self.published.append(batch)
            if self.rejecting and any(event.topic == self.rejecting for event in batch.events()):
                answer: wire.Message = wire.Rejected(sequence=batch.channel, code="denied", reason="no")
            else:
                answer = wire.Accepted(sequence=batch.channel)
            if self.accepting:
                writer.write(wire.encode(answer))
            return
        message = wire.decode(frame)
        if isinstance(message, wire.Hello):
            writer.write(wire.encode(welcome()))
        elif isinstance(message, wire.Subscribe) and self.accepting:
            self.subscribed += 1
            writer.write(wire.encode(wire.Subscribed(number=message.number)))
        elif isinstance(message, wire.Ack):
            self.acks.append(message)
            if message.ticket:
                code = self.refusing_acks
                writer.write(wire.encode(wire.Acked(number=message.number, ticket=message.ticket, code=code)))
        elif isinstance(message, wire.Ping):
            writer.write(wire.encode(wire.Pong(time_us=message.time_us, at_us=message.time_us)))


def welcome() -> wire.Welcome:
    return wire.Welcome(
        version=1,
        name="fake",
        broker=7,
        node=b"n" * 16,
        boot=1,
        cost=1,
        limits=DEFAULT_LIMITS,
        window=1 << 20,
        time_us=time.time_ns() // 1000,
        publisher=42,
    )
