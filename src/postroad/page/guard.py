"""Who may talk to the page's server: browsers that opened this page, under a name that is its own.

A page of another site may make a browser send requests here. Such a request says in `Origin` where it comes
from, and one that reached this address under a foreign name (DNS rebinding) says that in `Host`. Both are
refused before anything is read of it. What browsers are told not to do is in the headers of every answer.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from postroad.config import is_loopback

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})
# NiceGUI's own scripts are inline and compile templates; nothing at all comes from other hosts.
POLICY: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
HEADERS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Names:
    """Under which this server may be addressed."""

    def __init__(self, listen_host: str, others: tuple[str, ...] = ()) -> None:
        self._names = {listen_host.lower(), *(name.lower() for name in others)}
        self._anywhere = not is_loopback(listen_host)
        if not self._anywhere or listen_host in ("0.0.0.0", "::"):
            self._names |= LOCAL

    def allows(self, host: str) -> bool:
        """`host` as in the header: with or without a port."""
        name = (_parts(f"//{host}").hostname or "").lower() if _is_clean(host) else ""
        if name in self._names:
            return True
        # Nobody can point a name of their own at an address that is written out.
        return self._anywhere and _is_address(name)


def _parts(url: str) -> SplitResult:
    """Empty where it is no URL."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")


def _is_clean(host: str) -> bool:
    return host.isprintable() and not any(letter in host for letter in "/?#@\\ ")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    def __init__(self, app: App, names: Names) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        why = self.refusal(scope)
        if why:
            await _refuse(scope, receive, send, why)
            return

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        await self._app(scope, receive, with_headers)

    def refusal(self, scope: Scope) -> str:
        """Why this request is not answered; "" if it is."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
        if len(hosts) != 1 or not self._names.allows(hosts[0]):
            return "this page is not served under that name; see --name\n"
        if len(origins) > 1 or any(_parts(origin).netloc.lower() != hosts[0].lower() for origin in origins):
            return "pages of other sites may not use this one\n"
        return ""


async def _refuse(scope: Scope, receive: Receive, send: Send, why: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": why.strip()})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *HEADERS]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": why.encode()})
