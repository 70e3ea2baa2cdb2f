"""The asyncio driver with a stand-in core: turns, the rules it promises the core, and its limits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

import pytest
import uvloop

from postroad.delays import Delays
from postroad.net.clock import Clock
from postroad.net.http import HttpServer
from postroad.net.listen import bind_listener, bind_metrics
from postroad.net.server import EXIT_BUG, Server
from postroad.seam.effects import Close, Dial, Effect, Note, Send
from postroad.seam.inputs import Closed, DialFailed, Input, Opened, Received
from postroad.seam.levels import Level
from postroad.units import MIB
from postroad.wire.frames import Kind, Ping, Pong, Refuse, Splitter, decode, encode

PING = encode(Ping(time_us=7))


class StandIn:
    """Records every turn and does what the test tells it."""

    def __init__(self, act: Callable[[Input], list[Effect]] = lambda _: []) -> None:
        self.act = act
        self.turns: list[list[Input]] = []
        self.deadline: int | None = None
        self.woken: list[int] = []
        self.goodbye: list[Effect] = []

    def handle(self, inputs: Iterable[Input], now_us: int) -> list[Effect]:
        if self.deadline is not None and now_us >= self.deadline:
            self.deadline = None
            self.woken.append(now_us)
        self.turns.append(list(inputs))
        return [effect for one in self.turns[-1] for effect in self.act(one)]

    def next_deadline(self) -> int | None:
        return self.deadline

    def metrics(self) -> dict[str, int | float]:
        return {}

    def delays(self) -> list[Delays]:
        return []

    def shutdown(self, now_us: int) -> list[Effect]:  # noqa: ARG002
        return self.goodbye

    @property
    def inputs(self) -> list[Input]:
        return [one for turn in self.turns for one in turn]

    async def saw(self, kind: type, count: int = 1) -> list[Any]:
        for _ in range(5000):
            found = [one for one in self.inputs if isinstance(one, kind)]
            if len(found) >= count:
                await asyncio.sleep(0.02)  # one too many would show now
                assert sum(isinstance(one, kind) for one in self.inputs) == count
                return found
            await asyncio.sleep(0.01)
        raise AssertionError(f"no {count} {kind.__name__} in {self.inputs}")


@contextlib.asynccontextmanager
async def serving(core: StandIn, **settings: int) -> AsyncIterator[tuple[Server, str, int]]:
    listener = bind_listener("127.0.0.1:0")
    host, port = listener.getsockname()
    sizes = {"max_connections": 100, "max_batch_bytes": MIB, "window_bytes": MIB} | settings
    server = Server(core, clock=Clock(), **sizes)
    await server.start(listener)
    try:
        yield server, host, port
    finally:
        await server.stop()


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100):
            await test

    uvloop.run(bounded())


async def frames_until_end(reader: asyncio.StreamReader) -> list[Any]:
    return [decode(frame) for frame in Splitter(MIB).feed(await reader.read(-1))]


def test_frames_of_one_turn_arrive_together_and_in_order() -> None:
    async def test() -> None:
        core = StandIn(lambda one: [Send(one.connection, one.frame)] if isinstance(one, Received) else [])
        async with serving(core) as (_, host, port):
            reader, writer = await asyncio.open_connection(host, port)
            frames = [encode(Ping(time_us=number)) for number in range(100)]
            writer.write(b"".join(frames))
            assert await reader.readexactly(sum(map(len, frames))) == b"".join(frames)
            writer.close()
            assert [one.frame for one in await core.saw(Received, 100)] == frames
            assert sum(any(isinstance(one, Received) for one in turn) for turn in core.turns) <= 3
            await core.saw(Closed)
        (opened,) = await core.saw(Opened)
        assert opened == Opened(connection=1, dialled=None, certificate=None, loopback=True, host="127.0.0.1")

    run(test())


def test_a_close_flushes_first_and_is_answered_by_closed() -> None:
    async def test() -> None:
        bulk = encode(Refuse(code="x", reason="y" * 500_000))

        def act(one: Input) -> list[Effect]:
            if not isinstance(one, Received):
                return []
            number = one.connection
            return [Send(number, bulk), Send(number, PING), Close(number), Send(number, PING), Close(number)]

        core = StandIn(act)
        async with serving(core) as (_, host, port):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(PING + PING)
            assert [type(one) for one in await frames_until_end(reader)] == [Refuse, Ping]
            await core.saw(Closed)
            writer.close()

    run(test())


def test_a_broken_frame_is_refused_and_nobody_else_notices() -> None:
    async def test() -> None:
        core = StandIn(lambda one: [Send(one.connection, one.frame)] if isinstance(one, Received) else [])
        async with serving(core) as (server, host, port):
            good_reader, good_writer = await asyncio.open_connection(host, port)
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            (refuse,) = await frames_until_end(reader)
            assert refuse.code == "protocol"
            assert await core.saw(Closed) == [Closed(2)]
            good_writer.write(PING)
            assert await good_reader.readexactly(len(PING)) == PING
            assert server.metrics()["socket_connections_refused_total"] == 1
            for one in (writer, good_writer):
                one.close()

    run(test())


def test_a_stranger_cannot_begin_with_a_batch() -> None:
    async def test() -> None:
        core = StandIn()
        async with serving(core) as (_, host, port):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write((1000).to_bytes(4, "little") + bytes((Kind.PUBLISH, 1, 0, 0)))
            (refuse,) = await frames_until_end(reader)
            assert "begins with a handshake, not with PUBLISH" in refuse.reason
            writer.close()

    run(test())


def test_a_stranger_cannot_make_us_buffer_more_than_a_handshake() -> None:
    async def test() -> None:
        core = StandIn()
        async with serving(core) as (_, host, port):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write((100_000).to_bytes(4, "little") + bytes((Kind.HELLO, 1, 0, 0)))
            (refuse,) = await frames_until_end(reader)
            assert "the limit is 65536" in refuse.reason
            writer.close()

    run(test())


def test_what_follows_a_handshake_at_once_may_be_a_batch() -> None:
    """An acceptor's WELCOME and its first batches can come in one piece."""

    async def test() -> None:
        core = StandIn()
        async with serving(core) as (_, host, port):
            _, writer = await asyncio.open_connection(host, port)
            batch = (MIB).to_bytes(4, "little") + bytes((Kind.KNOWLEDGE, 1, 0, 0)) + bytes(MIB - 8)
            writer.write(PING + batch)
            assert [one.frame for one in await core.saw(Received, 2)] == [PING, batch]
            writer.close()

    run(test())


def test_large_frames_come_whole() -> None:
    async def test() -> None:
        core = StandIn()
        async with serving(core, max_batch_bytes=8 * MIB) as (_, host, port):
            _, writer = await asyncio.open_connection(host, port)
            batch = (8 * MIB).to_bytes(4, "little") + bytes((Kind.PUBLISH, 1, 0, 0)) + bytes(8 * MIB - 8)
            writer.write(PING)
            await core.saw(Received)
            writer.write(batch * 3)
            received = await core.saw(Received, 4)
            assert all(one.frame == batch for one in received[1:])
            writer.close()

    run(test())


def test_too_many_connections_are_told_so() -> None:
    async def test() -> None:
        core = StandIn()
        async with serving(core, max_connections=2) as (_, host, port):
            kept = [await asyncio.open_connection(host, port) for _ in range(2)]
            for _, one in kept:
                one.write(PING)
            await core.saw(Received, 2)
            reader, writer = await asyncio.open_connection(host, port)
            (refuse,) = await frames_until_end(reader)
            assert (refuse.code, refuse.reason) == ("unavailable", "this broker serves at most 2 connections")
            writer.close()
            kept[0][1].close()
            await core.saw(Closed)
            _, again = await asyncio.open_connection(host, port)
            await core.saw(Opened, 3)
            for one in (again, kept[1][1]):
                one.close()

    run(test())


def test_who_says_nothing_makes_room() -> None:
    async def test() -> None:
        core = StandIn()
        async with serving(core, max_connections=2) as (_, host, port):
            silent, closed = await asyncio.open_connection(host, port)
            _, heard = await asyncio.open_connection(host, port)
            heard.write(PING)
            await core.saw(Received)
            _, third = await asyncio.open_connection(host, port)
            await core.saw(Opened, 3)
            assert await silent.read() == b""
            for one in (closed, heard, third):
                one.close()

    run(test())


def test_a_peer_that_does_not_read_is_cut_off() -> None:
    async def test() -> None:
        flood = [Send(1, bytes(MIB)) for _ in range(40)]
        core = StandIn(lambda one: list(flood) if isinstance(one, Received) else [])
        async with serving(core) as (server, host, port):
            with socket.create_connection((host, port)) as stuck:
                stuck.sendall(PING)
                await core.saw(Closed)
                assert server.metrics()["socket_connections_overflowed_total"] == 1
                while server.metrics()["socket_connections"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    run(test())


def test_dialling() -> None:
    async def test() -> None:
        core, far = StandIn(), StandIn()
        with socket.create_server(("127.0.0.1", 0)) as closed:
            dead = "127.0.0.1:{}".format(closed.getsockname()[1])  # noqa: UP032
        async with serving(far) as (_, host, port), serving(core) as (_, own_host, own_port):
            address = f"{host}:{port}"
            dials = [Dial(address), Dial(dead), Dial("not an address"), Dial("no.such.host.invalid:1")]
            core.act = lambda one: (
                [*dials, Note("info", "dialling")]
                if isinstance(one, Received)
                else [Send(one.connection, PING)]
                if isinstance(one, Opened) and one.dialled
                else []
            )
            _, writer = await asyncio.open_connection(own_host, own_port)
            writer.write(PING)
            assert {one.address for one in await core.saw(DialFailed, 3)} == {
                one.address for one in dials[1:]
            }
            opened = await core.saw(Opened, 2)
            assert opened[1].dialled == address
            await far.saw(Received)
            writer.close()

    run(test())


def test_deadlines_wake_the_core_once_and_not_before() -> None:
    async def test() -> None:
        clock = Clock()
        core = StandIn()
        async with serving(core) as (server, host, port):
            _, writer = await asyncio.open_connection(host, port)
            due = core.deadline = clock.now_us() + 50_000
            writer.write(PING)
            while not core.woken:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (woken,) = core.woken
            assert woken >= due
            turns = len(core.turns)
            await asyncio.sleep(0.05)
            assert len(core.turns) == turns  # nothing to do, nothing done
            writer.close()
            del server

    run(test())


@pytest.mark.parametrize("where", ["handle", "next_deadline"])
def test_a_bug_in_the_core_ends_the_process(where: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        core = StandIn()

        def fail(*_: object) -> Any:
            raise KeyError("our invariant")

        async with serving(core) as (server, host, port):
            reader, writer = await asyncio.open_connection(host, port)
            await core.saw(Opened)
            setattr(core, where, fail)
            writer.write(PING)
            assert await server.wait() == EXIT_BUG
            assert not server.ready
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()

    run(test())
    assert "bug in the broker core" in caplog.text
    assert "our invariant" in caplog.text
    assert "127.0.0.1:" in caplog.text


def test_stopping_says_goodbye_and_flushes() -> None:
    async def test() -> None:
        core = StandIn()
        core.goodbye = [Send(1, encode(Pong(time_us=1, at_us=2))), Close(1)]
        async with serving(core) as (server, host, port):
            reader, writer = await asyncio.open_connection(host, port)
            await core.saw(Opened)
            await server.stop()
            assert await server.wait() == 0
            assert [type(one) for one in await frames_until_end(reader)] == [Pong]
            with pytest.raises(OSError, match=r"."):
                await asyncio.open_connection(host, port)
            writer.close()

    run(test())


def test_the_clock_never_runs_back_nor_stands_still() -> None:
    wall, monotonic = [10_000_000], [500_000]
    clock = Clock(lambda: wall[0], lambda: monotonic[0])
    assert clock.now_us() == 10_000
    wall[0], monotonic[0] = 4_000_000, 700_000  # stepped back: goes on by the monotonic clock
    assert clock.now_us() == 10_200
    wall[0], monotonic[0] = 90_000_000, 800_000  # stepped forward: follows
    assert clock.now_us() == 90_000


def test_http_says_when_it_is_not_ready_and_bounds_what_it_reads() -> None:
    async def ask(port: int, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async def test() -> None:
        ready = [True]
        turns = Delays("turn_seconds", "Turns.", kind="all")
        for delay_us in (-1, 100, 101, 2_000_000, 90_000_000):
            turns.observe(delay_us)
        http = HttpServer(
            figures=lambda: {"events_in_total": 3, "links": 2},
            delays=lambda: [turns],
            levels=lambda: [Level("lag", "How far.", {"subscription": "a"}, 2.0)],
            ready=lambda: ready[0],
            about={"name": "b1"},
        )
        listener = bind_metrics("127.0.0.1:0")
        assert listener is not None
        port = listener.getsockname()[1]
        await http.start(listener)
        assert (await ask(port, b"GET /ready HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        ready[0] = False
        assert (await ask(port, b"GET /ready HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        assert (await ask(port, b"GET /health HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\nalive\n")
        assert (await ask(port, b"HEAD /health HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\n")
        assert await ask(port, b"GET /" + b"x" * 100_000) == b""
        metrics = (await ask(port, b"GET /metrics?x HTTP/1.1\r\n\r\n")).decode()
        assert "# TYPE postroad_events_in_total counter\npostroad_events_in_total 3.0\n" in metrics
        assert "# TYPE postroad_links gauge\npostroad_links 2.0\n" in metrics
        assert 'postroad_turn_seconds_bucket{kind="all",le="0.0001"} 2.0\n' in metrics
        assert 'postroad_turn_seconds_bucket{kind="all",le="0.0003"} 3.0\n' in metrics
        assert 'postroad_turn_seconds_bucket{kind="all",le="3"} 4.0\n' in metrics
        assert 'postroad_turn_seconds_count{kind="all"} 5.0\n' in metrics
        assert 'postroad_turn_seconds_sum{kind="all"} 92.000201\n' in metrics
        assert "# HELP postroad_lag How far.\n# TYPE postroad_lag gauge\n" in metrics
        assert 'postroad_lag{subscription="a"} 2.0\n' in metrics
        http.close()

    run(test())


def test_metrics_of_several_brokers_never_clash() -> None:
    sockets = [bind_metrics(None) for _ in range(3)]
    ports = {one.getsockname()[1] for one in sockets if one is not None}
    assert len(ports) == 3
    for one in sockets:
        assert one is not None
        one.close()
    assert bind_metrics("off") is None
