"""What a broker is told about durable publishing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from postroad.units import DAY_US, GIB, MIB

DEFAULT_KEEP_BYTES: Final = 10 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableConfig:
    """Durable publishing, and how long what is published is kept."""

    pubends: int = 1  # durable pubends of this broker; a publisher's events go to one of them
    cache_bytes: int = 32 * MIB  # newest events of each pubend that are answered without the disk
    keep_us: int = 7 * DAY_US  # events are kept this long although nobody needs them any more
    keep_bytes: int = 0  # of all pubends: beyond it such events go earlier; 0: DEFAULT_KEEP_BYTES
    max_age_us: int = 0  # older ones go although a subscriber that is away needs them; 0: never
    max_bytes: int = 0  # of each pubend: older ones go when there is more; 0: never

    @property
    def pubend_bytes(self) -> int:
        """What each pubend has of `keep_bytes`."""
        return max(1, (self.keep_bytes or DEFAULT_KEEP_BYTES) // self.pubends)
