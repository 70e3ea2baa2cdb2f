"""One broker process, from its configuration to its exit code.

The order matters: what can be refused without a data folder is tried before one is made, the folder is
locked before anything else, sockets are bound before the core exists (so that status can tell the real
addresses), and `ready NAME HOST:PORT` is printed when connections are accepted, not before. SIGTERM and
SIGINT stop it cleanly; a second one ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import secrets
import signal
import socket
import ssl
from dataclasses import dataclass, replace
from typing import Final

import uvloop

from postroad import __version__, kernel
from postroad.broker.core import Broker
from postroad.config import (
    DEFAULT_HOST,
    DEFAULT_METRICS_PORT,
    DEFAULT_PORT,
    Identity,
    NodeConfig,
    format_address,
    parse_address,
)
from postroad.durable.publisher.pubend import TABLE as PUBENDS_TABLE
from postroad.durable.publisher.pubend_rows import refuse_lower_limits
from postroad.durable.publisher.publishing import TABLES as PUBLISHING_TABLES
from postroad.durable.publisher.releasing import TABLES as RELEASING_TABLES
from postroad.durable.retiring import TABLE as RETIRED_TABLE
from postroad.durable.retiring import read_retired
from postroad.durable.subscriber.hosting import TABLES as HOSTING_TABLES
from postroad.errors import UsageError
from postroad.history.history import TABLE as HISTORY_TABLE
from postroad.history.history import read_row as read_history
from postroad.links.handshake import MAX_WINDOW
from postroad.net import log
from postroad.net.clock import Clock
from postroad.net.configure import is_loopback
from postroad.net.historian import Historian
from postroad.net.http import HttpServer
from postroad.net.log import LOGGER
from postroad.net.server import BACKLOG, Server
from postroad.net.tls import client_context, server_context
from postroad.seam.storage import Reader, Stored, StreamEnd
from postroad.selectors import Selector
from postroad.storage.commit import Storage
from postroad.storage.identity import DataFolder
from postroad.storage.tracking_store import TrackingStore
from postroad.streams.ends import TABLE as ENDS_TABLE
from postroad.streams.ends import read_end
from postroad.tracking.strategies import Tracking, make_tracking

MAX_FILES: Final = 1 << 20  # where the system sets no limit on open files
RESERVED_FILES: Final = 128  # open files that are not connections: listeners, log, database, spare
EXIT_SECOND_SIGNAL: Final = 130


def run(config: NodeConfig) -> int:
    """Serve until told to stop; the process's exit code."""
    tls_server, tls_client = server_context(config.tls), client_context(config.tls)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind_listener(config.listen))
        metrics = bind_metrics(config.metrics)
        if metrics is not None:
            stack.enter_context(metrics)
        limit = connection_limit(config.max_connections)
        folder = DataFolder(config.data)
        stack.callback(folder.close)
        identity = folder.start(config.name)
        log.setup(identity.name, config.log)
        node = _Node(
            config=config,
            identity=identity,
            listener=listener,
            metrics=metrics,
            max_connections=limit,
            tls_server=tls_server,
            tls_client=tls_client,
        )
        return uvloop.run(_serve(node))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """Everything that could be refused has been made; what follows is serving."""

    config: NodeConfig
    identity: Identity
    listener: socket.socket
    metrics: socket.socket | None
    max_connections: int
    tls_server: ssl.SSLContext | None
    tls_client: ssl.SSLContext | None

    def about(self) -> dict[str, str]:
        return {
            "name": self.identity.name,
            "address": _bound_address(self.listener),
            "metrics_address": "off" if self.metrics is None else _bound_address(self.metrics),
            "data": str(self.config.data.resolve()),
            "process": str(os.getpid()),
            "version": __version__,
        }


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
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
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


def _bound_address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return format_address(host, port)


def connection_limit(asked: int) -> int:
    """Connections the limit on open files leaves room for, which is raised as far as it may be."""
    soft, hard = (
        MAX_FILES if one == resource.RLIM_INFINITY else one
        for one in resource.getrlimit(resource.RLIMIT_NOFILE)
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


async def _serve(node: _Node) -> int:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_unhandled)
    config, about, clock = node.config, node.about(), Clock()
    served: list[Server] = []  # the one there is, once there is one

    def woke() -> None:
        for one in served:
            one.storage_woke()

    def wake() -> None:
        loop.call_soon_threadsafe(woke)

    storage = Storage(config.data, wake=wake)
    stored = _stored(storage)
    refuse_lower_limits(stored.tables[PUBENDS_TABLE], stored.streams, config.broker.limits)
    tracking, historian = _history(config, node.identity.number, storage, clock.now_us())
    # Publishers' resume keys are drawn too, so they must not be guessable.
    core = Broker(
        replace(config.broker, about=tuple(about.items())),
        node.identity,
        draw=secrets.randbelow,
        now_us=clock.now_us(),
        tracking=tracking,
        stored=stored,
    )
    server = Server(
        core,
        clock=clock,
        max_connections=node.max_connections,
        max_batch_bytes=config.broker.limits.batch_bytes,
        window_bytes=MAX_WINDOW,
        tls_server=node.tls_server,
        tls_client=node.tls_client,
        historian=historian,
        storage=storage,
    )
    served.append(server)
    http = HttpServer(figures=server.metrics, delays=server.delays, ready=lambda: server.ready, about=about)
    _stop_on_signals(loop, server)
    if node.metrics is not None:
        await http.start(node.metrics)
    # The parser takes half a second to import, which the first condition must not cost everybody.
    Selector.parse("", "ready = TRUE")
    # Modules and what was made so far stay: full collections, which stop the broker, need not walk them.
    gc.collect()
    gc.freeze()
    await server.start(node.listener)
    LOGGER.info(
        "serving address=%s metrics=%s data=%s broker=%08x boot=%d tls=%s",
        about["address"],
        about["metrics_address"],
        config.data,
        node.identity.number,
        node.identity.boot,
        "mutual" if config.tls.require_client_certificate else "yes" if node.tls_server else "no",
    )
    _warn(config, about["address"])
    print(f"ready {node.identity.name} {about['address']}", flush=True)  # noqa: T201 -- scripts wait for it
    code = await server.wait()
    http.close()
    await loop.run_in_executor(None, storage.close)  # what was asked for is done before this returns
    LOGGER.info("stopped")
    return code


def _stop_on_signals(loop: asyncio.AbstractEventLoop, server: Server) -> None:
    stops: list[asyncio.Task[None]] = []

    def on_signal(name: str) -> None:
        if stops:
            LOGGER.warning("%s again: ending at once", name)
            os._exit(EXIT_SECOND_SIGNAL)
        LOGGER.info("%s: stopping", name)
        stops.append(loop.create_task(server.stop()))

    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, on_signal, one.name)


def _history(
    config: NodeConfig, me: int, storage: Storage, now_us: int
) -> tuple[Tracking | None, Historian | None]:
    """What an earlier process recorded of the paths of messages, and whoever keeps what is recorded now."""
    store = TrackingStore(config.data)
    if config.broker.tracking.strategy == "none":
        store.untracked(now_us)
        return None, None
    found = store.load()
    for problem in found.problems:
        LOGGER.warning("history of messages: %s", problem)
    tracking = make_tracking(
        config.broker.tracking,
        me=me,
        stored=found.filters,
        sizes=found.sizes,
        changes=found.changes,
        now_us=now_us,
    )
    return tracking, Historian(store, shortage=storage.shortage)


def _stored(storage: Storage) -> Stored:
    """What an earlier process left on disk; damage is told to whoever reads the log."""
    for damage in (*storage.recovered.damage, *storage.recovered.lost):
        LOGGER.warning("log: %s", damage)
    tables: dict[str, Reader] = {**PUBLISHING_TABLES, **HOSTING_TABLES, **RELEASING_TABLES}
    tables |= {HISTORY_TABLE: read_history, ENDS_TABLE: read_end, RETIRED_TABLE: read_retired}
    loaded = {table: storage.load(table, reader) for table, reader in tables.items()}
    for table in tables:
        storage.refuse_damaged(table)  # until the room whose table it is makes a Gap of it
    return Stored(
        tables=loaded,
        streams={
            stream: StreamEnd(last=found.last, chopped=found.chopped or 0, suspect=found.suspect)
            for stream, found in storage.recovered.streams.items()
        },
        damaged={table: keys for table in tables if (keys := storage.damaged(table))},
    )


def _warn(config: NodeConfig, address: str) -> None:
    if not kernel.COMPILED:
        LOGGER.warning(
            "the kernel is not compiled: the slow reference does its work (pip install with a C compiler)"
        )
    if not config.tls.certificate and not is_loopback(parse_address(address)[0]):
        LOGGER.warning("listening on %s without TLS: tokens and events travel in the clear", address)


def _unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """What no callback caught: failed TLS handshakes, accept() out of descriptors. One line each."""
    error = context.get("exception")
    if isinstance(error, OSError):
        LOGGER.info("%s: %s", context.get("message"), error)
    else:
        LOGGER.error(
            "%s", context.get("message"), exc_info=error if isinstance(error, BaseException) else None
        )
