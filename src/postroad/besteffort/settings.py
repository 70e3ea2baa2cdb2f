"""Limits of best-effort traffic."""

from __future__ import annotations

from dataclasses import dataclass

from postroad.errors import UsageError
from postroad.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class BestEffortConfig:
    """What one client may send: each datagram may become one for every subscriber."""

    client_bytes_per_s: int = 32 * MIB
    client_burst_bytes: int = 4 * MIB

    def __post_init__(self) -> None:
        if self.client_bytes_per_s < 1 or self.client_burst_bytes < 2_048:
            raise UsageError("a client sends at least 1 byte a second, and bursts of at least 2 KiB")
