"""The HTTP port: figures are made a few times a second, however often they are asked for."""

from __future__ import annotations

import asyncio
import socket

import pytest

from postroad.net import http
from postroad.net.http import HttpServer


def test_figures_are_made_once_for_all_who_ask_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def figures() -> dict[str, int | float]:
        nonlocal made
        made += 1
        return {"made": made}

    async def get(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    async def test() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            server = HttpServer(figures=figures, delays=list, levels=list, ready=lambda: True, about={})
            await server.start(listener)
            port = listener.getsockname()[1]
            monkeypatch.setattr(http, "FRESH_S", 60.0)
            first = [await get(port) for _ in range(10)]
            assert made == 1
            assert len(set(first)) == 1
            assert b"postroad_made 1.0" in first[0]
            server._rendered_until_s = 0.0  # that time is over
            assert b"postroad_made 2.0" in await get(port)
            server.close()

    asyncio.run(test())
