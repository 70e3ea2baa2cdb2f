"""What a broker is told about streams and their local subscribers."""

from __future__ import annotations

from dataclasses import dataclass

from postroad.units import MIB, MILLISECOND_US, SECOND_US


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
    # Kept for all peers that do not read, together: half of it here for subscribers, half in their sockets.
    total_bytes: int = 256 * MIB

    @property
    def half_bytes(self) -> int:
        return self.total_bytes // 2
