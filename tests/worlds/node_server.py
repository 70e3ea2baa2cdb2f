"""A real server with real sockets around a core, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import uvloop

from postroad.net.clock import Clock
from postroad.net.listen import bind_both
from postroad.net.server import Core, Server
from postroad.units import MIB


@contextlib.asynccontextmanager
async def serving(
    core: Core, address: str = "127.0.0.1:0", **settings: Any
) -> AsyncIterator[tuple[Server, int]]:
    """The server, and the port of its TCP and UDP sockets."""
    listener, datagrams = bind_both(address)
    port: int = listener.getsockname()[1]
    sizes = {"max_connections": 100, "max_batch_bytes": MIB, "window_bytes": MIB} | settings
    server = Server(core, clock=Clock(), **sizes)
    await server.start(listener, datagrams)
    try:
        yield server, port
    finally:
        await server.stop()
        assert await server.wait() == 0


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100):
            await test

    uvloop.run(bounded())


async def until(done: Callable[[], bool]) -> None:
    for _ in range(6000):
        if done():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass")


class Caller:
    """A plain UDP socket, without any of our code."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self.sock.bind((host, 0))
        self.sock.setblocking(False)
        self.endpoint: tuple[str, int] = self.sock.getsockname()[:2]

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes, host: str, port: int) -> None:
        self.sock.sendto(data, (host, port))

    async def receive(self) -> tuple[bytes, tuple[str, int]]:
        async with asyncio.timeout(30):
            while True:
                try:
                    data, source = self.sock.recvfrom(2048)
                    return data, source[:2]
                except BlockingIOError:
                    await asyncio.sleep(0.005)
