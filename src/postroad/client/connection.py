"""One connection of the async client: a socket that cuts frames, and why there is none."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Final, cast

from postroad.client.settings import CLIENT_LIMITS
from postroad.config import parse_address
from postroad.errors import PeerError, PostroadError, UnavailableError
from postroad.net.datagrams import to_endpoint
from postroad.net.tls import reason as tls_reason
from postroad.net.tls import unheard as tls_unheard
from postroad.wire.frames import Splitter

DIAL_S: Final = 5.0


class Connection(asyncio.Protocol):
    """`received` is handed its frames; `lost` is told that it broke, and why if that is known.

    `known`: the program has had a connection before, so a broker that says nothing is no matter of TLS.
    """

    def __init__(
        self,
        number: int,
        *,
        tls: ssl.SSLContext | None,
        known: bool,
        received: Callable[[Connection, list[bytes]], None],
        lost: Callable[[Connection, PostroadError | None], None],
    ) -> None:
        self.number = number
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tls = tls
        self._known = known
        self._received = received
        self._lost = lost
        self._splitter = Splitter(CLIENT_LIMITS.batch_bytes, handshake=True)
        self._transport: asyncio.Transport | None = None

    async def open(self, address: str) -> str:
        """Why there is no connection to that address; "" if there is one."""
        host, port = parse_address(address)
        try:
            async with asyncio.timeout(DIAL_S):
                await asyncio.get_running_loop().create_connection(lambda: self, host, port, ssl=self._tls)
        except TimeoutError:
            return "no answer"
        except UnicodeError:  # of names that the system is not even asked for
            return "this is not a name that a host can have"
        except OSError as error:
            return _reason(error)
        return "closed at once" if self.over.done() else ""

    @property
    def host(self) -> str:
        """The broker's, as an Endpoint writes it; "" if it is gone already."""
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return to_endpoint(peer)[0] if peer else ""

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """What was written is sent first."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- what asyncio tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._splitter.feed(data)
        except PeerError as error:
            self._lost(self, error)
            return
        if frames:
            self._received(self, frames)

    def connection_lost(self, exc: Exception | None) -> None:
        error = UnavailableError(f"the connection broke: {exc}") if exc is not None else None
        if not self._splitter.begun and (exc is None or isinstance(exc, ConnectionError)):  # closed, or reset
            error = UnavailableError(tls_unheard(self._tls, known=self._known))
        self._lost(self, error)
        if not self.over.done():
            self.over.set_result(None)


def _reason(error: OSError) -> str:
    text = str(error)
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in text:
        return "connection refused"
    if isinstance(error, ssl.SSLError):
        return tls_reason(error)
    return error.strerror or text
