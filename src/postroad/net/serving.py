"""Serves a core until it is told to stop: its sockets, HTTP, signals. Any core: a broker's or another's.

SIGINT stops it cleanly. So does SIGTERM, after its clients have gone on elsewhere, where a core can tell them
to. A second signal ends it at once. SIGHUP reloads what can be reloaded, and
never ends it. `ready NAME HOST:PORT` is printed when connections are accepted, not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final

from postroad import __version__
from postroad.net.http import HttpServer
from postroad.net.listen import bind_both, bind_default, bind_metrics, bound_address
from postroad.net.log import LOGGER
from postroad.net.server import Server
from postroad.net.upkeep import Allocator, Upkeep

EXIT_SECOND_SIGNAL: Final = 130
SWITCH_S: Final = 0.0005  # that the loop waits for a thread which commits, at most, and the other way round


@dataclass(frozen=True, slots=True, kw_only=True)
class Sockets:
    """What a process is reached by. All of them are bound."""

    listener: socket.socket
    datagrams: socket.socket
    metrics: socket.socket | None

    @property
    def address(self) -> str:
        return bound_address(self.listener)

    def about(self, name: str) -> dict[str, str]:
        """What only the driver knows, for status and metrics."""
        return {
            "name": name,
            "address": self.address,
            "metrics_address": "off" if self.metrics is None else bound_address(self.metrics),
            "process": str(os.getpid()),
            "version": __version__,
        }


@contextlib.contextmanager
def open_sockets(listen: str | None, metrics: str | None, *, any_port: bool = False) -> Iterator[Sockets]:
    """As asked; None asks for the default addresses, or with `any_port` for another port where that is taken;
    metrics may be "off"."""
    with contextlib.ExitStack() as stack:
        bound = bind_default() if listen is None and any_port else bind_both(listen)
        listener, datagrams = map(stack.enter_context, bound)
        http = bind_metrics(metrics)
        if http is not None:
            stack.enter_context(http)
        yield Sockets(listener=listener, datagrams=datagrams, metrics=http)


def _nothing_to_reload() -> None:
    LOGGER.warning("SIGHUP: nothing here can be reloaded; restart to change settings")


async def serve(
    server: Server,
    sockets: Sockets,
    about: dict[str, str],
    details: str = "",
    reload: Callable[[], None] = _nothing_to_reload,
    drain: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """The exit code, once it has stopped. `about` is of `sockets`, with what the node adds; `details` are
    for the log; `reload` is called on SIGHUP, `drain` on SIGTERM, else it stops."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_unhandled)
    http = HttpServer(
        figures=server.metrics,
        delays=server.delays,
        levels=server.levels,
        ready=lambda: server.ready,
        about=about,
    )
    _stop_on_signals(loop, server, drain)
    loop.add_signal_handler(signal.SIGHUP, reload)
    if sockets.metrics is not None:
        await http.start(sockets.metrics)
    sys.setswitchinterval(SWITCH_S)
    upkeep = Upkeep(lambda: server.inputs_handled, Allocator())
    upkeep.start()
    await server.start(sockets.listener, sockets.datagrams)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    LOGGER.info("serving address=%s metrics=%s %s", sockets.address, about["metrics_address"], details)
    print(f"ready {about['name']} {sockets.address}", flush=True)  # noqa: T201 -- scripts wait for it
    code = await server.wait()
    upkeep.stop()
    http.close()
    return code


def _stop_on_signals(
    loop: asyncio.AbstractEventLoop, server: Server, drain: Callable[[], Awaitable[None]] | None
) -> None:
    stops: list[asyncio.Future[None]] = []

    def on_signal(name: str, stop: Callable[[], Awaitable[None]]) -> None:
        if stops:
            LOGGER.warning("%s again: ending at once", name)
            os._exit(EXIT_SECOND_SIGNAL)
        LOGGER.info("%s: stopping", name)
        stops.append(asyncio.ensure_future(stop()))

    loop.add_signal_handler(signal.SIGTERM, on_signal, "SIGTERM", drain or server.stop)
    loop.add_signal_handler(signal.SIGINT, on_signal, "SIGINT", server.stop)


def _unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """What no callback caught: failed TLS handshakes, accept() out of descriptors. One line each."""
    error = context.get("exception")
    if isinstance(error, OSError):
        LOGGER.info("%s: %s", context.get("message"), error)
    else:
        LOGGER.error(
            "%s", context.get("message"), exc_info=error if isinstance(error, BaseException) else None
        )
