"""Under which names the page is served, and to pages of which sites."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from postroad.page.guard import Guard, Names


@pytest.mark.parametrize(
    ("listen", "host", "allowed"),
    [
        ("127.0.0.1", "127.0.0.1:7480", True),
        ("127.0.0.1", "localhost:7480", True),
        ("127.0.0.1", "[::1]:7480", True),
        ("127.0.0.1", "LOCALHOST", True),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "192.0.2.7:7480", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "evil.example@localhost", False),
        ("127.0.0.1", "", False),
        ("0.0.0.0", "192.0.2.7:7480", True),
        ("0.0.0.0", "localhost", True),
        ("0.0.0.0", "evil.example", False),
        ("0.0.0.0", "page.example.org", True),
        ("192.0.2.7", "192.0.2.7", True),
    ],
)
def test_names_under_which_it_is_served(listen: str, host: str, allowed: bool) -> None:
    assert Names(listen, ("page.example.org",)).allows(host) is allowed


def ask(kind: str, *headers: tuple[bytes, bytes]) -> list[MutableMapping[str, Any]]:
    """What the guard sends; an application behind it answers 200."""
    sent: list[MutableMapping[str, Any]] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    guard = Guard(app, Names("127.0.0.1"))
    asyncio.run(guard({"type": kind, "headers": list(headers)}, receive, send))
    return sent


HOST = (b"host", b"127.0.0.1:7480")


def test_its_own_pages_are_answered_with_headers_that_keep_others_out() -> None:
    for origin in ((), ((b"origin", b"http://127.0.0.1:7480"),)):
        (start,) = ask("http", HOST, *origin)
        assert start["status"] == 200
        headers = dict(start["headers"])
        assert b"frame-ancestors 'none'" in headers[b"content-security-policy"]
        assert headers[b"x-content-type-options"] == b"nosniff"


@pytest.mark.parametrize(
    "headers",
    [
        (HOST, (b"origin", b"http://evil.example")),
        (HOST, (b"origin", b"http://127.0.0.1:9999")),
        (HOST, (b"origin", b"null")),
        (HOST, (b"origin", b"http://[")),
        ((b"host", b"["),),
        (HOST, (b"origin", b"http://127.0.0.1:7480"), (b"origin", b"http://evil.example")),
        (HOST, (b"host", b"evil.example")),
        ((b"host", b"evil.example"),),
        (),
    ],
)
def test_others_are_refused(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    start, body = ask("http", *headers)
    assert start["status"] == 403
    assert body["body"]
    (closed,) = ask("websocket", *headers)
    assert closed["type"] == "websocket.close"
