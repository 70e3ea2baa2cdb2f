"""Frozen configuration of a broker, whether it came from flags, a TOML file or a test."""

from __future__ import annotations

from dataclasses import dataclass, field

from postroad.units import KIB, MIB, MILLISECOND_US, SECOND_US
from postroad.wire.frames import Limits

DEFAULT_PORT = 7420
DEFAULT_METRICS_PORT = 7421

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
    """Who a broker is. Number, node id and boot are kept in its data folder."""

    number: int
    node: bytes
    name: str
    boot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """The stream protocol: what is kept in memory, and when things are said again."""

    plain_bytes: int = 64 * MIB  # events a plain pubend keeps for downstream to ask again
    cache_bytes: int = 32 * MIB  # knowledge a broker keeps of all streams that pass through it
    silence_us: int = SECOND_US  # an idle pubend asserts silence this often
    nack_us: int = 500 * MILLISECOND_US  # an unanswered nack is repeated after this
    subscribe_wait_us: int = 2 * SECOND_US  # a new subscription waits at most this long for every broker


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryConfig:
    """Local subscribers."""

    buffer_bytes: int = 8 * MIB  # kept for a subscriber without credit before its overflow policy acts


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    limits: Limits = DEFAULT_LIMITS
    streams: StreamConfig = field(default_factory=StreamConfig)
    delivery: DeliveryConfig = field(default_factory=DeliveryConfig)
