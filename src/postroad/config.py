"""Frozen configuration of a broker, whether it came from flags, a TOML file or a test.

`BrokerConfig` is what the core needs and the simulator varies; `NodeConfig` adds what only a process has:
sockets, files, TLS. `net.configure` makes a NodeConfig from a TOML file and flags.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from postroad.besteffort.settings import BestEffortConfig
from postroad.discovery.settings import DiscoveryConfig
from postroad.durable.settings import DurableConfig
from postroad.errors import UsageError, shorten
from postroad.links.access import AuthConfig, QuotaConfig
from postroad.links.connection import LinkSettings
from postroad.queues.settings import QueueConfig
from postroad.streams.settings import DeliveryConfig, StreamConfig
from postroad.tracking.settings import TrackingConfig
from postroad.units import SECOND_US
from postroad.wire.frames import DEFAULT_LIMITS, Limits

DEFAULT_PORT = 7420
DEFAULT_METRICS_PORT = 7421
DEFAULT_NODE_PORT = 7419  # of discovery nodes
DEFAULT_HOST = "127.0.0.1"
DEFAULT_DATA = "postroad-data"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    limits: Limits = DEFAULT_LIMITS
    streams: StreamConfig = field(default_factory=StreamConfig)
    delivery: DeliveryConfig = field(default_factory=DeliveryConfig)
    durable: DurableConfig = field(default_factory=DurableConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    quotas: QuotaConfig = field(default_factory=QuotaConfig)
    links: LinkSettings = field(default_factory=LinkSettings)
    besteffort: BestEffortConfig = field(default_factory=BestEffortConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    queues: QueueConfig = field(default_factory=QueueConfig)
    hops: bool = False  # tell the driver of events that bear the trace of an application
    dial: tuple[str, ...] = ()  # addresses of brokers to stay linked to
    about: tuple[tuple[str, str], ...] = ()  # what only the driver knows (addresses, version), for status


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Files in PEM form. With a certificate a broker listens and dials with TLS, with only `ca` it dials."""

    certificate: str = ""
    key: str = ""  # "" when the certificate's file holds it
    ca: str = ""  # who signs the peers' certificates; "" for the system's
    require_client_certificate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One broker process."""

    name: str | None = None  # None: as at the last start, or made from the broker's number
    listen: str | None = None  # None: the default address
    advertise: str | None = None  # where others reach it; None: where it listens, unless that is any address
    data: Path | None = None  # None: the default folder
    metrics: str | None = None  # None: the default address, or any free port when it is taken; "off": none
    log: str = "info"
    log_format: str = "text"  # or "json"
    drain_us: int = 10 * SECOND_US  # that clients have to go on elsewhere on SIGTERM; 0: none
    max_connections: int = 0  # 0: what the limit on open files leaves
    tls: TlsConfig = field(default_factory=TlsConfig)
    otel: str = ""  # URL that spans are exported to, OTLP over HTTP; "": none are
    broker: BrokerConfig = field(default_factory=BrokerConfig)


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """(host, port) from `HOST:PORT`, `HOST` or `[IPV6]:PORT`."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or (text.strip().endswith("]") and text.startswith("[")):
        host, port = text.strip(), str(default_port)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host and not set(host) - set("0123456789abcdefABCDEF:."):
        raise UsageError(
            f"{shorten(text, 80)!r} is not an address: write an IPv6 one as [::1]:{default_port}"
        )
    elif set(host) & set(":/"):
        host = ""
    if text.strip().isdigit():
        raise UsageError(
            f"{shorten(text, 80)!r} is a port without a host: write {DEFAULT_HOST}:{text.strip()}"
        )
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"{shorten(text, 80)!r} is not an address such as {DEFAULT_HOST}:{default_port}")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
