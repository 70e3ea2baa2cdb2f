"""Frozen configuration of a broker, whether it came from flags, a TOML file or a test.

`BrokerConfig` is what the core needs and the simulator varies; `NodeConfig` adds what only a process has:
sockets, files, TLS. `net.configure` makes a NodeConfig from a TOML file and flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from postroad.errors import UsageError, shorten
from postroad.links.access import AuthConfig
from postroad.links.links import LinkSettings
from postroad.tracking.settings import TrackingConfig
from postroad.units import KIB, MIB, MILLISECOND_US, SECOND_US
from postroad.wire.frames import Limits

DEFAULT_PORT = 7420
DEFAULT_METRICS_PORT = 7421
DEFAULT_HOST = "127.0.0.1"
DEFAULT_DATA = "postroad-data"

DEFAULT_LIMITS = Limits(
    event_bytes=MIB,
    batch_bytes=8 * MIB,
    batch_events=16_384,
    attributes=64,
    topic_bytes=KIB,
    topic_depth=32,
    subscriptions=10_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a broker is. All of it is kept in its data folder."""

    number: int
    node: bytes
    name: str
    boot: int  # higher at every start, also after one of a folder that was restored from a backup
    starts: int  # how many there were, with this one
    before: int | None = None  # the boot number before this one, 0 at the first start; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """The stream protocol: what is kept in memory, and when things are said again."""

    plain_bytes: int = 64 * MIB  # events a plain pubend keeps for downstream to ask again
    cache_bytes: int = 32 * MIB  # knowledge a broker keeps of all streams that pass through it
    silence_us: int = SECOND_US  # an idle pubend asserts silence this often
    nack_us: int = 500 * MILLISECOND_US  # an unanswered nack is repeated after this
    subscribe_wait_us: int = 5 * SECOND_US  # a new subscription waits at most this long for every broker


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryConfig:
    """Local subscribers."""

    buffer_bytes: int = 8 * MIB  # kept for a subscriber without credit before its overflow policy acts


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableConfig:
    """Durable publishing, and how long what is published is kept."""

    pubends: int = 1  # durable pubends of this broker; a publisher's events go to one of them
    cache_bytes: int = 32 * MIB  # newest events of each pubend that are answered without the disk
    keep_us: int = 10 * SECOND_US  # events are kept this long although nobody needs them any more
    max_age_us: int = 0  # older ones go although a subscriber that is away needs them; 0: never
    max_bytes: int = 0  # of each pubend: older ones go when there is more; 0: never


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    limits: Limits = DEFAULT_LIMITS
    streams: StreamConfig = field(default_factory=StreamConfig)
    delivery: DeliveryConfig = field(default_factory=DeliveryConfig)
    durable: DurableConfig = field(default_factory=DurableConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    links: LinkSettings = field(default_factory=LinkSettings)
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
    data: Path = Path(DEFAULT_DATA)
    metrics: str | None = None  # None: the default address, or any free port when it is taken; "off": none
    log: str = "info"
    max_connections: int = 0  # 0: what the limit on open files leaves
    tls: TlsConfig = field(default_factory=TlsConfig)
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
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"{shorten(text, 80)!r} is not an address such as {DEFAULT_HOST}:{default_port}")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
