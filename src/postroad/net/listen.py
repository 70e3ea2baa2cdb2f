"""The sockets that a process listens on, bound before anything else is done, and how many it may open."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from typing import Final

from postroad.config import DEFAULT_HOST, DEFAULT_METRICS_PORT, DEFAULT_PORT, format_address, parse_address
from postroad.errors import UsageError
from postroad.net.log import complain

BACKLOG: Final = 1024
ACCEPTED_AT_ONCE: Final = 16  # connections: who has to make room for them takes a few turns to be gone
REST_S: Final = 1.0  # after a connection could not be accepted
PORT_TRIES: Final = 50  # of free TCP ports, until one is free for UDP as well
MAX_FILES: Final = 1 << 20  # where the system sets no limit on open files
RESERVED_FILES: Final = 128  # open files that are not connections: listeners, log, database, spare


def bind_default() -> tuple[socket.socket, socket.socket]:
    """The default address; where that is taken, any free port. For who is found wherever it listens."""
    try:
        return bind_both(None)
    except UsageError:
        return bind_both(format_address(DEFAULT_HOST, 0))


def bind_both(address: str | None) -> tuple[socket.socket, socket.socket]:
    """The listening socket and one for datagrams, on the same port; None asks for the default address."""
    _, asked = parse_address(address or format_address(DEFAULT_HOST, DEFAULT_PORT))
    tries = PORT_TRIES if asked == 0 else 1
    while True:
        listener = bind_listener(address)
        try:
            return listener, _bind_datagrams(listener)
        except OSError as error:
            tries -= 1
            shown = bound_address(listener)
            listener.close()
            if not tries:
                raise UsageError(
                    f"cannot take datagrams (UDP) on {shown}: {error.strerror or error};"
                    " choose another address with --listen (port 0 takes any free one)"
                ) from None


def _bind_datagrams(listener: socket.socket) -> socket.socket:
    sock = socket.socket(listener.family, socket.SOCK_DGRAM)
    try:
        sock.bind(listener.getsockname())
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def bind_listener(address: str | None) -> socket.socket:
    """The listening socket; None asks for the default address."""
    host, port = parse_address(address or format_address(DEFAULT_HOST, DEFAULT_PORT))
    try:
        return _bind(host, port)
    except OSError as error:
        shown = format_address(host, port)
        if address is None:
            raise UsageError(
                f"{shown} is taken, probably by another broker:"
                " stop it, or choose another address with --listen (port 0 takes any free one)"
            ) from None
        raise UsageError(
            f"cannot listen on {shown}: {error.strerror or error};"
            " choose another address with --listen (port 0 takes any free one)"
        ) from None


def bind_metrics(address: str | None) -> socket.socket | None:
    """As asked, or the default address, or any free port where that is taken: brokers never clash over it."""
    if address == "off":
        return None
    if address is None:
        try:
            return _bind(DEFAULT_HOST, DEFAULT_METRICS_PORT)
        except OSError:
            return _bind(DEFAULT_HOST, 0)
    host, port = parse_address(address, DEFAULT_METRICS_PORT)
    try:
        return _bind(host, port)
    except OSError as error:
        raise UsageError(
            f"cannot serve metrics on {format_address(host, port)}: {error.strerror or error};"
            " choose another address with --metrics, or --metrics off"
        ) from None


def _bind(host: str, port: int) -> socket.socket:
    choices = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = min(choices, key=lambda choice: choice[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def bound_address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return format_address(host, port)


def connection_limit(asked: int) -> int:
    """Connections the limit on open files leaves room for, which is raised as far as it may be."""
    soft, hard = (
        MAX_FILES if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    room = soft - RESERVED_FILES
    if asked > room:
        raise UsageError(
            f"max_connections = {asked} needs {asked + RESERVED_FILES} open files, the limit is {soft}"
        )
    if room < 1:
        raise UsageError(
            f"the limit of {soft} open files leaves no room for connections: raise it (ulimit -n)"
        )
    return asked or room


class Door:
    """Accepts connections on a listening socket, a few at a time, and hands each on as it comes."""

    def __init__(self, listener: socket.socket, knocked: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._knocked = knocked
        self._loop = asyncio.get_running_loop()
        self._rest: asyncio.TimerHandle | None = None  # while nothing is accepted
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._open()

    def _open(self) -> None:
        self._rest = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # there is no file left; whoever waits can wait a little
                complain("warning", f"no connection can be accepted: {error.strerror or error}")
                self._loop.remove_reader(self._listener)
                self._rest = self._loop.call_later(REST_S, self._open)
                return
            sock.setblocking(False)
            self._knocked(sock)

    def close(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
