"""One discovery node process, from its settings to its exit code."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import uvloop

from postroad.config import DEFAULT_NODE_PORT, TlsConfig, format_address, is_loopback, parse_address
from postroad.discovery.node import DiscoveryNode, NodeSettings
from postroad.errors import UsageError
from postroad.links.access import hash_token
from postroad.net import log
from postroad.net.clock import Clock
from postroad.net.configure import SHARED_PRINCIPAL, token_from
from postroad.net.finding import resolve
from postroad.net.listen import connection_limit
from postroad.net.log import LOGGER
from postroad.net.sealing import load_sealer
from postroad.net.server import Server
from postroad.net.serving import Sockets, open_sockets, serve
from postroad.units import KIB

WINDOW_BYTES: Final = 64 * KIB  # a connection here is closed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class BdnConfig:
    listen: str
    settings: NodeSettings
    announce: Sequence[str] = ()  # HOST:PORT of brokers
    metrics: str | None = "off"
    log: str = "info"
    tls: TlsConfig = field(default_factory=TlsConfig)


def bdn_settings(
    *, name: str, token: str | None, token_file: str | None, realms: Sequence[str], regions: Sequence[str]
) -> NodeSettings:
    """As flags say it."""
    secret = token_from(token_file) if token_file else token or ""
    return NodeSettings(
        name=name,
        tokens={hash_token(secret): SHARED_PRINCIPAL} if secret else {},
        token=secret,
        realms=tuple(realms),
        regions=tuple(regions),
    )


def run_bdn(config: BdnConfig) -> int:
    """Serve until told to stop; the process's exit code."""
    settings = config.settings
    host, port = parse_address(config.listen, DEFAULT_NODE_PORT)
    if not is_loopback(host) and not (settings.tokens or config.tls.certificate):
        raise UsageError(
            f"without credentials a discovery node serves loopback only: to listen on {config.listen} give"
            " it --token-file, or --tls-cert, --tls-key and --tls-ca"
        )
    with open_sockets(format_address(host, port), config.metrics) as sockets:
        log.setup(settings.name, config.log)
        return uvloop.run(_serve(config, sockets))


async def _serve(config: BdnConfig, sockets: Sockets) -> int:
    announce = tuple(await resolve(config.announce))
    if announce and not config.settings.tokens:
        raise UsageError("a private discovery node asks for credentials: give it --token-file")
    sealer = load_sealer(config.tls)
    settings = replace(config.settings, announce=announce, certificates=sealer is not None)
    server = Server(
        DiscoveryNode(settings, draw=secrets.randbelow, sealer=sealer),
        clock=Clock(),
        max_connections=min(1_000, connection_limit(0)),
        max_batch_bytes=WINDOW_BYTES,
        window_bytes=WINDOW_BYTES,
    )
    code = await serve(server, sockets, sockets.about(settings.name))
    LOGGER.info("stopped")
    return code
