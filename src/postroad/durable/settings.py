"""What a broker is told about durable publishing."""

from __future__ import annotations

from dataclasses import dataclass

from postroad.units import MIB, SECOND_US


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableConfig:
    """Durable publishing, and how long what is published is kept."""

    pubends: int = 1  # durable pubends of this broker; a publisher's events go to one of them
    cache_bytes: int = 32 * MIB  # newest events of each pubend that are answered without the disk
    keep_us: int = 10 * SECOND_US  # events are kept this long although nobody needs them any more
    max_age_us: int = 0  # older ones go although a subscriber that is away needs them; 0: never
    max_bytes: int = 0  # of each pubend: older ones go when there is more; 0: never
