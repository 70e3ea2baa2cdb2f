"""A listener whose peers speak another protocol, lines of text, translated before a real broker sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator

import pytest
from tests.worlds.echo import EchoNode
from tests.worlds.node_server import run, serving

from postroad.broker.core import Broker
from postroad.config import BrokerConfig
from postroad.errors import PeerError
from postroad.ids import Identity
from postroad.net.clock import Clock
from postroad.net.listen import bind_listener
from postroad.net.server import Server
from postroad.seam.effects import Send
from postroad.seam.inputs import Received
from postroad.units import MIB
from postroad.wire.frames import (
    DEFAULT_LIMITS,
    PROTOCOL_VERSION,
    Hello,
    Message,
    Ping,
    Pong,
    Refuse,
    Reply,
    Request,
    decode,
    encode,
)

MAX_LINE = 100


class Lines:
    """`ping N` and `ask WHAT`, a line each, for one client of the broker; answers are lines, too."""

    def __init__(self, greets: bool = True) -> None:
        self._greets = greets
        self._rest = b""
        self._asked = 0

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            raise PeerError(f"a line of more than {MAX_LINE} bytes")
        messages: list[Message] = [self._hello()] if self._greets else []
        self._greets = False
        return [encode(one) for one in (*messages, *map(self._read, lines))]

    def encode(self, frame: bytes) -> bytes:
        match decode(frame):
            case Ping(time_us=time_us):
                return b"ping %d\n" % time_us
            case Pong(time_us=time_us):
                return b"pong %d\n" % time_us
            case Reply(body=body):
                return body.encode() + b"\n"
            case Refuse(code=code, reason=reason):
                return f"error {code} {reason}\n".encode()
        return b""

    def _read(self, line: bytes) -> Message:
        match line.decode().split():
            case ["ping", number]:
                return Ping(time_us=int(number))
            case ["ask", what]:
                self._asked += 1
                return Request(number=self._asked, what=what)
        raise PeerError(f"no such line: {line.decode()!r}")

    def _hello(self) -> Hello:
        return Hello(
            version=PROTOCOL_VERSION,
            role="client",
            name="lines",
            token="",
            limits=DEFAULT_LIMITS,
            window=MIB,
            time_us=1,
        )


@contextlib.asynccontextmanager
async def broker_with_lines() -> AsyncIterator[tuple[Server, int, int]]:
    """The ports of frames and of lines."""
    clock = Clock()
    identity = Identity(number=1, node=b"b" * 16, name="b1", boot=1, starts=1)
    core = Broker(BrokerConfig(), identity, draw=random.Random(1).randrange, now_us=clock.now_us())
    async with serving(core) as (server, port):
        listener = bind_listener("127.0.0.1:0")
        lines: int = listener.getsockname()[1]
        await server.listen(listener, Lines)
        yield server, port, lines


def test_a_client_that_speaks_lines_talks_to_a_broker() -> None:
    async def test() -> None:
        async with broker_with_lines() as (_, _, lines):
            reader, writer = await asyncio.open_connection("127.0.0.1", lines)
            for part in (b"pi", b"ng 5\nping 6\nask sta", b"tus\n"):
                writer.write(part)
                await asyncio.sleep(0.02)
            assert await reader.readline() == b"pong 5\n"
            assert await reader.readline() == b"pong 6\n"
            status = json.loads(await reader.readline())
            assert (status["name"], status["clients"]) == ("b1", 1)
            writer.close()

    run(test())


def test_a_line_that_breaks_the_protocol_is_answered_in_lines_and_others_go_on() -> None:
    async def test() -> None:
        async with broker_with_lines() as (server, port, lines):
            reader, writer = await asyncio.open_connection("127.0.0.1", lines)
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", lines)
            writer.write(b"sing\n")
            assert await reader.read() == b"error protocol no such line: 'sing'\n"
            other_writer.write(b"ping 7\n")
            assert await other_reader.readline() == b"pong 7\n"
            other_writer.write(b"x" * 1000)
            assert await other_reader.read() == b"error protocol a line of more than 100 bytes\n"
            native_reader, native_writer = await asyncio.open_connection("127.0.0.1", port)
            native_writer.write(b"ping 7\n" * 10)  # frames are spoken there
            assert b"begins with a handshake" in await native_reader.read()
            assert server.metrics()["socket_connections_refused_total"] == 3
            for one in (writer, other_writer, native_writer):
                one.close()

    run(test())


def test_several_frames_of_one_turn_are_translated_one_by_one_and_in_order() -> None:
    class Twice(EchoNode):
        """Sends two frames at a time for each that it gets."""

        def handle(self, inputs, now_us):  # type: ignore[no-untyped-def]
            super().handle(inputs, now_us)
            return [
                Send(one.connection, one.frame + encode(Pong(time_us=0, at_us=0)))
                for one in inputs
                if isinstance(one, Received)
            ]

    async def test() -> None:
        async with serving(Twice()) as (server, _):
            listener = bind_listener("127.0.0.1:0")
            port = listener.getsockname()[1]
            await server.listen(listener, lambda: Lines(greets=False))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"".join(b"ping %d\n" % number for number in range(50)))
            for number in range(50):
                assert await reader.readline() == b"ping %d\n" % number
                assert await reader.readline() == b"pong 0\n"
            before = server.metrics()["socket_bytes_out_total"]
            assert before == sum(len(b"ping %d\npong 0\n" % number) for number in range(50))
            writer.close()

    run(test())


class Mute(Lines):
    """Cannot say anything."""

    def encode(self, frame: bytes) -> bytes:
        raise ValueError(f"no words for {len(frame)} bytes")


def test_a_translator_that_fails_costs_its_own_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Frames of the same turn reach everybody else."""

    class ToAll(EchoNode):
        """Says to everybody what anybody says, to the last who came first."""

        def __init__(self) -> None:
            super().__init__()
            self.numbers: set[int] = set()

        def handle(self, inputs, now_us):  # type: ignore[no-untyped-def]
            super().handle(inputs, now_us)
            self.numbers |= {one.connection for one in inputs if isinstance(one, Received)}
            frames = [one.frame for one in inputs if isinstance(one, Received)]
            return [Send(number, frame) for frame in frames for number in sorted(self.numbers, reverse=True)]

    async def test() -> None:
        async with serving(ToAll()) as (server, _):
            ports = []
            for translator in (Lines, Mute):
                listener = bind_listener("127.0.0.1:0")
                ports.append(listener.getsockname()[1])
                await server.listen(listener, lambda translator=translator: translator(greets=False))
            reader, writer = await asyncio.open_connection("127.0.0.1", ports[0])
            writer.write(b"ping 1\n")
            assert await reader.readline() == b"ping 1\n"
            mute_reader, mute_writer = await asyncio.open_connection("127.0.0.1", ports[1])
            mute_writer.write(b"ping 2\n")
            assert await reader.readline() == b"ping 2\n"
            with contextlib.suppress(ConnectionError):
                assert not await mute_reader.read()
            assert "could not be translated for" in caplog.text
            for one in (writer, mute_writer):
                one.close()

    run(test())
