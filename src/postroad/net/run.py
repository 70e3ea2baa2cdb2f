"""One broker process, from its configuration to its exit code.

The order matters: what can be refused without a data folder is tried before one is made, the folder is
locked before anything else, and sockets are bound before the core exists, so that status can tell the real
addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from postroad import kernel
from postroad.broker.core import Broker
from postroad.config import (
    DEFAULT_DATA,
    DEFAULT_NODE_PORT,
    DEFAULT_PORT,
    NodeConfig,
    TlsConfig,
    format_address,
    is_loopback,
    parse_address,
)
from postroad.discovery.lengths import check_lengths
from postroad.discovery.sealing import CertificateSealer
from postroad.discovery.settings import MULTICAST_GROUP, DiscoveryConfig
from postroad.durable.publisher.pubend import TABLE as PUBENDS_TABLE
from postroad.durable.publisher.pubend_rows import read_facts, refuse_lower_limits
from postroad.durable.settings import DEFAULT_KEEP_BYTES, DurableConfig
from postroad.errors import UsageError
from postroad.ids import Identity
from postroad.links.access import QuotaConfig
from postroad.links.handshake import MAX_WINDOW
from postroad.links.links import LinkSettings
from postroad.net import log
from postroad.net.clock import Clock
from postroad.net.configure import is_wildcard
from postroad.net.finding import resolve
from postroad.net.historian import Historian
from postroad.net.listen import connection_limit
from postroad.net.log import LOGGER
from postroad.net.mdns import announced
from postroad.net.otel import SpanExporter
from postroad.net.reloading import Reloading
from postroad.net.sealing import load_sealer
from postroad.net.server import Server
from postroad.net.serving import Sockets, open_sockets, serve
from postroad.net.tls import client_context, server_context
from postroad.seam.storage import Reader, Stored, StreamEnd
from postroad.selectors import Selector
from postroad.storage.commit import Storage
from postroad.storage.identity import DataFolder, InUseError
from postroad.storage.tracking_store import TrackingStore
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import SECOND_US

MAX_FOLDERS: Final = 100  # of brokers that are started in one place and find each other
_DEFAULT_DATA: Final = Path(DEFAULT_DATA)
QUOTA_SHARE: Final = 2  # of the disk, for the durable events of one principal
DISK_SHARE: Final = 5  # durable events that nobody needs any more take no more than this part of the disk


def run(read: Callable[[], NodeConfig]) -> int:
    """Serve until told to stop; the process's exit code. `read` makes the configuration, and is called again
    when it is to be reloaded."""
    config = read()
    tls_server, tls_client = server_context(config.tls), client_context(config.tls)
    joins = config.broker.discovery.join
    with (
        open_sockets(config.listen, config.metrics, any_port=joins) as sockets,
        contextlib.ExitStack() as stack,
    ):
        limit = connection_limit(config.max_connections)
        folder = _own_folder() if config.data is None and joins else DataFolder(config.data or _DEFAULT_DATA)
        stack.callback(folder.close)
        identity = folder.start(config.name)
        log.setup(identity.name, config.log, config.log_format)
        if config.data is None and folder.path != _DEFAULT_DATA:
            LOGGER.info("another broker uses %s: this one has %s", _DEFAULT_DATA, folder.path)
        if config.listen is None and parse_address(sockets.address)[1] != DEFAULT_PORT:
            LOGGER.info("port %d is taken: listening on %s", DEFAULT_PORT, sockets.address)
        node = _Node(
            config=config,
            read=read,
            data=folder.path,
            identity=identity,
            sockets=sockets,
            max_connections=limit,
            tls_server=tls_server,
            tls_client=tls_client,
        )
        return uvloop.run(_serve(node))


def _own_folder() -> DataFolder:
    """The default folder, or the next one beside it that no other broker uses: brokers that find each other
    are started in one place with the same command."""
    beside = (_DEFAULT_DATA.with_name(f"{DEFAULT_DATA}-{number}") for number in range(2, MAX_FOLDERS))
    for path in (_DEFAULT_DATA, *beside):
        with contextlib.suppress(InUseError):
            return DataFolder(path)
    return DataFolder(_DEFAULT_DATA.with_name(f"{DEFAULT_DATA}-{MAX_FOLDERS}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """Everything that could be refused has been made; what follows is serving."""

    config: NodeConfig
    read: Callable[[], NodeConfig]
    data: Path
    identity: Identity
    sockets: Sockets
    max_connections: int
    tls_server: ssl.SSLContext | None
    tls_client: ssl.SSLContext | None

    def about(self) -> dict[str, str]:
        """`address` is where others dial."""
        reached = {"address": self.links().address or self.sockets.address}
        return self.sockets.about(self.identity.name) | reached | {"data": str(self.data.resolve())}

    def links(self) -> LinkSettings:
        """With what only the sockets know."""
        port = self.sockets.datagrams.getsockname()[1]
        listening = self.sockets.address
        reachable_at = "" if is_wildcard(parse_address(listening)[0]) else listening
        return replace(
            self.config.broker.links, datagrams=port, address=self.config.advertise or reachable_at
        )

    def details(self) -> str:
        mutual = self.config.tls.require_client_certificate
        tls = "mutual" if mutual else "yes" if self.tls_server else "no"
        identity = self.identity
        return f"data={self.data} broker={identity.number:08x} boot={identity.boot} tls={tls}"


async def _serve(node: _Node) -> int:
    loop = asyncio.get_running_loop()
    config, about, clock = node.config, node.about(), Clock()
    served: list[Server] = []  # the one there is, once there is one

    def woke() -> None:
        for server in served:
            server.storage_woke()

    def wake() -> None:
        loop.call_soon_threadsafe(woke)

    storage = Storage(node.data, wake=wake)
    stored = _stored(storage)
    refuse_lower_limits(stored.load(PUBENDS_TABLE, read_facts), stored.streams, config.broker.limits)
    discovery, sealer = await _discovery(node)
    tracking, historian = _history(node, storage, clock.now_us())
    # Publishers' resume keys are drawn too, so they must not be guessable.
    core = Broker(
        replace(
            config.broker,
            about=tuple(about.items()),
            links=node.links(),
            discovery=discovery,
            durable=_within_the_disk(node),
            quotas=_of_the_disk(node),
        ),
        node.identity,
        draw=secrets.randbelow,
        now_us=clock.now_us(),
        tracking=tracking,
        stored=stored,
        sealer=sealer,
    )
    server = Server(
        core,
        clock=clock,
        max_connections=node.max_connections,
        max_batch_bytes=config.broker.limits.batch_bytes,
        window_bytes=MAX_WINDOW,
        total_bytes=config.broker.delivery.half_bytes,
        tls_server=node.tls_server,
        tls_client=node.tls_client,
        historian=historian,
        spans=SpanExporter(config.otel, node.identity.name) if config.otel else None,
        storage=storage,
    )
    served.append(server)
    reloading = Reloading(
        read=node.read,
        config=config,
        server=server,
        core=core,
        tls_server=node.tls_server,
        tls_client=node.tls_client,
        load_sealer=(lambda tls: _sealer(node, tls)) if discovery.enabled else (lambda _tls: None),
    )
    # The parser takes half a second to import, which the first condition must not cost everybody.
    Selector.parse("", "ready = TRUE")
    _warn(config, node.sockets.address)
    async with contextlib.AsyncExitStack() as stack:
        if discovery.mdns and discovery.enabled:
            place = parse_address(node.sockets.address)
            await stack.enter_async_context(announced(node.identity.name, node.identity.number, place))
        limit_s = config.drain_us / SECOND_US
        drain = partial(server.drain, core, limit_s) if limit_s else None
        code = await serve(server, node.sockets, about, node.details(), reloading, drain)
    await loop.run_in_executor(None, storage.close)  # what was asked for is done before this returns
    LOGGER.info("stopped")
    return code


def _within_the_disk(node: _Node) -> DurableConfig:
    """What is kept although nobody needs it leaves most of the disk to others, unless the file says more."""
    durable = node.config.broker.durable
    share = shutil.disk_usage(node.data).total // DISK_SHARE
    return replace(durable, keep_bytes=durable.keep_bytes or min(DEFAULT_KEEP_BYTES, share))


def _of_the_disk(node: _Node) -> QuotaConfig:
    """No principal fills the disk, whoever else needs what it published."""
    quotas = node.config.broker.quotas
    return replace(
        quotas, stored_bytes=quotas.stored_bytes or shutil.disk_usage(node.data).total // QUOTA_SHARE
    )


async def _discovery(node: _Node) -> tuple[DiscoveryConfig, CertificateSealer | None]:
    """With addresses that need no DNS, and with certificates where every peer is asked for one."""
    config = node.config
    asked = config.broker.discovery
    # A broker on loopback uses the loopback interface only, and that has no multicast for IPv6.
    over_ipv6 = ":" in parse_address(node.sockets.address)[0]
    group = (asked.group or MULTICAST_GROUP) if asked.multicast and not over_ipv6 else ""
    nodes = await resolve(asked.nodes, DEFAULT_NODE_PORT)
    discovery = replace(asked, group=group, nodes=tuple(format_address(*endpoint) for endpoint in nodes))
    if not (asked.enabled or asked.nodes or asked.join):
        return discovery, None
    try:
        return discovery, _sealer(node, config.tls)
    except UsageError as error:
        if asked.nodes or asked.join:
            raise
        LOGGER.warning("this broker is not to be discovered: %s", error)
        return replace(discovery, enabled=False, group=""), None


def _sealer(node: _Node, tls: TlsConfig) -> CertificateSealer | None:
    """UsageError unless all that discovery will say beside the certificate fits into a datagram."""
    sealer = load_sealer(tls) if tls.require_client_certificate else None
    discovery = node.config.broker.discovery
    check_lengths(
        sealer,
        name=node.identity.name,
        address=node.links().address,
        geography=discovery.geography,
        institution=discovery.institution,
    )
    return sealer


def _history(node: _Node, storage: Storage, now_us: int) -> tuple[Tracking | None, Historian | None]:
    """What an earlier process recorded of the paths of messages, and whoever keeps what is recorded now."""
    store, config = TrackingStore(node.data), node.config
    if config.broker.tracking.strategy == "none":
        store.untracked(now_us)
        return None, None
    history = store.load()
    for problem in history.problems:
        LOGGER.warning("history of messages: %s", problem)
    tracking = make_tracking(
        config.broker.tracking,
        me=node.identity.number,
        stored=history.filters,
        sizes=history.sizes,
        changes=history.changes,
        now_us=now_us,
    )
    return tracking, Historian(store, shortage=storage.shortage)


def _stored(storage: Storage) -> Stored:
    """What an earlier process left on disk; damage is told to whoever reads the log."""
    for damage in (*storage.recovered.damage, *storage.recovered.lost):
        LOGGER.warning("log: %s", damage)

    def load(table: str, reader: Reader) -> dict[bytes, bytes]:
        rows = storage.load(table, reader)
        storage.refuse_damaged(table)  # until the room whose table it is makes a Gap of it
        return rows

    return Stored(
        load=load,
        streams={
            stream: StreamEnd(last=end.last, chopped=end.chopped or 0, suspect=end.suspect)
            for stream, end in storage.recovered.streams.items()
        },
    )


def _warn(config: NodeConfig, address: str) -> None:
    if not kernel.COMPILED:
        LOGGER.warning(
            "the kernel is not compiled: the slow reference does its work (pip install with a C compiler)"
        )
    if not config.tls.certificate and not is_loopback(parse_address(address)[0]):
        LOGGER.warning("listening on %s without TLS: tokens and events travel in the clear", address)
