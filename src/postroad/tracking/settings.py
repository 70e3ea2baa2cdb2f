"""What a broker is told about tracking (spec T3, T7, T11; docs/explanation/tracking.md explains each).

The defaults are those of `postroad plan tracking --accuracy 0.999 --skew 250ms --jitter 500ms` for any rate
up to 800,000 events a second: filters grow and shrink with the observed rate (`adaptive`), so `capacity`
is only the greatest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from postroad.errors import UsageError
from postroad.tracking.bloom import Shape, filter_for, filter_rate
from postroad.units import DAY_US, GIB, KIB, MIB, MILLISECOND_US, SECOND_US

GATHER_US: Final = 100 * MILLISECOND_US  # ids are collected for this long before they go into filters
PUT_OFF_US: Final = 50 * MILLISECOND_US  # what to keep waits at most so long for a turn without messages
MAX_PART_BYTES: Final = 16 * MIB  # of the exact log; a part that is stored has less than twice as much
STRATEGIES: Final = ("none", "exact", "bloom")
ROUTING: Final = ("all", "neighbours", "set")
DELIVERIES: Final = ("origin", "subscriber")
_DEFAULT: Final = filter_for(1_000_000, filter_rate(0.001, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig:
    strategy: str = "bloom"
    bits: int = _DEFAULT.m  # m of a filter
    capacity: int = _DEFAULT.n  # n
    hashes: int = _DEFAULT.k  # k
    persist_us: int = 10 * SECOND_US  # Tp
    skew_us: int = 250 * MILLISECOND_US  # Ts
    jitter_us: int = 500 * MILLISECOND_US  # Tj: the longest way of a message, and the skew between brokers
    adaptive: bool = True  # filters sized by the rate; else all of `bits` and `capacity`
    least_capacity: int = 1024  # of an adaptive filter, or `capacity` if that is less
    retain: bool = True  # a part-full filter stays in memory when stored and is overwritten (T8)
    renew_us: int = 3600 * SECOND_US  # but no longer than this
    routing: str = "all"  # which neighbours a trace asks: all, or those recorded in H(b,d), or in the key
    deliveries: str = "origin"  # one delivery history per origin, or one per origin and subscriber
    compress: bool = False  # zlib for stored filters that are far from full
    log_bytes: int = 128 * KIB  # the exact log is stored when it has grown by this
    keep_us: int = 30 * DAY_US
    keep_bytes: int = GIB
    cache_bytes: int = 32 * MIB  # stored filters kept in memory for traces
    max_histories: int = 4096

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("strategy", self.strategy, STRATEGIES),
            ("routing", self.routing, ROUTING),
            ("deliveries", self.deliveries, DELIVERIES),
        ):
            if value not in allowed:
                raise UsageError(f"tracking: {name} is one of {', '.join(allowed)}, not {value!r}")
        for name in ("persist_us", "skew_us", "renew_us", "log_bytes", "keep_us", "keep_bytes"):
            if getattr(self, name) <= 0:
                raise UsageError(
                    f"tracking: {name.removesuffix('_us')} must be more than 0, not {getattr(self, name)}"
                )
        if self.log_bytes > MAX_PART_BYTES:
            raise UsageError(
                f"tracking: log_bytes is at most {MAX_PART_BYTES} ({MAX_PART_BYTES // MIB} MiB), not"
                f" {self.log_bytes}"
            )
        for name, least in (
            ("jitter_us", 0),
            ("cache_bytes", 0),
            ("least_capacity", 1),
            ("max_histories", 1),
        ):
            if getattr(self, name) < least:
                raise UsageError(
                    f"tracking: {name.removesuffix('_us')} must be at least {least}, not"
                    f" {getattr(self, name)}"
                )
        self.shape.check()

    @property
    def shape(self) -> Shape:
        return Shape(self.bits, self.capacity, self.hashes)
