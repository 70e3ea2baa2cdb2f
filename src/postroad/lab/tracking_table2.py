"""Table 2 of Jun and Astley, row by row, and figures 1, 3, 4 and 5 (paper section 5; spec T13).

The paper's load is 200 publishers, 500 subscribers, 500 topics, 5,000 messages a second in and out. What is
stored comes from the strategy alone on a virtual clock under that load, over several persistence intervals,
which real time would make 21 times as long. Latency comes from two real brokers side by side, one with the
row's strategy and one with none, a message for one, the next for the other: under the whole load, one after
the other, two brokers without tracking differ by several times at p99, and both at once need more than two
cores. The row without tracking says what is noise.

The rows use the paper's strategy to the letter: filters of one size that end with Tp, not retained, not
adaptive. Its column "stores full buffers" holds for filters that see all 5,000 messages a second, so there is
one delivery history. Ts is just below Tn / 2, as in 5.1. An exact buffer holds as many messages as the
paper's, which has 16 bytes for each; ours has two entries of 20 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from postroad.bench import workloads
from postroad.bench.systems import serving
from postroad.bench.tracking import BESIDE_P99, HISTORIES, side_by_side, stored, system
from postroad.ids import ID_BYTES
from postroad.tracking.settings import TrackingConfig
from postroad.units import MILLISECOND_US, SECOND_US

SECONDS: Final = 6.0
LATENCY_RATE: Final = 1_000  # messages a second for each of the two brokers
PUBLISHERS, SUBSCRIBERS, RATE = 200, 500, workloads.RATE
ENTRY_BYTES: Final = 20
LEAST_VIRTUAL_S: Final = 20
INTERVALS: Final = 4  # persistence intervals, or fillings, on the virtual clock
KIBIT, MIBIT = 1 << 10, 1 << 20
NOTES: Final = (
    "The paper prints figures 3 to 5 as images only. Its bytes are computed from its m, n, Tp, 16-byte ids,"
    " its compressed bytes as the entropy of such filters; of latency it says in words that BF stays close to"
    " NULL and that ASYNC does so with the larger buffer only.",
    "Latency is that of a row's broker and of one without tracking, loaded in the same milliseconds; 95%"
    " of the differences found by drawing seconds again lie between low and high.",
    "A row is measured for seconds, not for 30 minutes: rows with a longer Tp store nothing meanwhile.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration. `n`, `m` and `k` are 0 without filters."""

    strategy: str
    buffer: int
    accuracy: str
    n: int
    m: int
    k: int
    tp_s: int
    full: bool  # the paper's "stores full buffers"

    @property
    def name(self) -> str:
        if self.strategy == "none":
            return "null"
        kind = f"bf_{self.accuracy}" if self.strategy == "bloom" else "async"
        return f"{kind}_{self.buffer // 1000}k_tp{self.tp_s}"

    @property
    def buffer_messages(self) -> int:
        """Messages that a buffer takes."""
        return self.n or self.buffer // ID_BYTES

    @property
    def stored_at_once(self) -> int:
        """Messages in a buffer when it is stored."""
        return min(self.buffer_messages, RATE * self.tp_s)

    def config(self) -> TrackingConfig:
        if self.strategy == "none":
            return TrackingConfig(strategy="none")
        filling_us = min(self.buffer_messages * SECOND_US // RATE, self.tp_s * SECOND_US)
        common = TrackingConfig(strategy=self.strategy)
        return TrackingConfig(
            strategy=self.strategy,
            bits=self.m or common.bits,
            capacity=self.n or common.capacity,
            hashes=self.k or common.hashes,
            persist_us=self.tp_s * SECOND_US,
            skew_us=max(MILLISECOND_US, filling_us * 49 // 100),
            jitter_us=MILLISECOND_US,
            adaptive=False,
            retain=False,
            log_bytes=self.buffer_messages * HISTORIES * ENTRY_BYTES,
        )


TABLE: Final = (
    Row("none", 0, "", 0, 0, 0, 0, False),
    Row("exact", 10_000, "", 0, 0, 0, 1, True),
    Row("exact", 135_000, "", 0, 0, 0, 1, False),
    Row("exact", 135_000, "", 0, 0, 0, 2, True),
    Row("bloom", 10_000, "99.999", 2521, 64 * KIBIT, 16, 1, True),
    Row("bloom", 10_000, "99", 5461, 64 * KIBIT, 8, 1, False),
    Row("bloom", 10_000, "95", 7281, 64 * KIBIT, 8, 1, False),
    Row("bloom", 10_000, "99", 5461, 64 * KIBIT, 8, 2, True),
    Row("bloom", 10_000, "95", 7281, 64 * KIBIT, 8, 2, True),
    Row("bloom", 135_000, "99.999", 38836, MIBIT, 12, 1, False),
    Row("bloom", 135_000, "99", 87381, MIBIT, 6, 1, False),
    Row("bloom", 135_000, "95", 131072, MIBIT, 6, 1, False),
    Row("bloom", 135_000, "99.999", 38836, MIBIT, 12, 2, False),
    Row("bloom", 135_000, "99", 87381, MIBIT, 6, 2, False),
    Row("bloom", 135_000, "95", 131072, MIBIT, 6, 2, False),
    Row("bloom", 135_000, "99.999", 38836, MIBIT, 12, 8, True),
    Row("bloom", 135_000, "99", 87381, MIBIT, 6, 8, False),
    Row("bloom", 135_000, "95", 131072, MIBIT, 6, 8, False),
    Row("bloom", 135_000, "99", 87381, MIBIT, 6, 18, True),
    Row("bloom", 135_000, "95", 131072, MIBIT, 6, 18, False),
    Row("bloom", 135_000, "95", 131072, MIBIT, 6, 27, True),
)

Figures = dict[str, float]


def paper_storage(row: Row) -> Figures:
    """What the paper's parameters come to, per message."""
    if row.strategy == "none":
        return {"bytes_per_message": 0.0, "gzip_bytes_per_message": 0.0, "forces_per_s": 0.0}
    figures = {"full": float(row.full), "forces_per_s": RATE / row.stored_at_once}
    if row.strategy == "exact":
        return {
            **figures,
            "bytes_per_message": float(HISTORIES * ID_BYTES),
        }
    bits = row.m / row.stored_at_once
    filled = -math.expm1(row.k * row.stored_at_once * math.log1p(-1 / row.m))
    return {
        **figures,
        "bytes_per_message": HISTORIES * bits / 8,
        "gzip_bytes_per_message": HISTORIES * bits * _entropy(filled) / 8,
    }


def _entropy(share: float) -> float:
    return -sum(part * math.log2(part) for part in (share, 1 - share) if part > 0)


def measured_storage(row: Row) -> Figures:
    if row.strategy == "none":
        return {"bytes_per_message": 0.0, "gzip_bytes_per_message": 0.0, "forces_per_s": 0.0}
    seconds = max(LEAST_VIRTUAL_S, INTERVALS * row.tp_s)
    kept = stored(row.config(), seconds=seconds, publishers=PUBLISHERS, subscribers=SUBSCRIBERS, rate=RATE)
    return {
        "bytes_per_message": kept.bytes / kept.messages,
        "gzip_bytes_per_message": kept.gzip_bytes / kept.messages,
        "forces_per_s": kept.forces / seconds,
        "full": kept.full,
    }


def toml(config: TrackingConfig) -> str:
    """The configuration as `postroad up --config` reads it."""
    return "\n".join(
        (
            "[tracking]",
            f'strategy = "{config.strategy}"',
            f"bits = {config.bits}",
            f"capacity = {config.capacity}",
            f"hashes = {config.hashes}",
            f'persist = "{config.persist_us // MILLISECOND_US} ms"',
            f'skew = "{config.skew_us // MILLISECOND_US} ms"',
            f'jitter = "{config.jitter_us // MILLISECOND_US} ms"',
            f"adaptive = {str(config.adaptive).lower()}",
            f"retain = {str(config.retain).lower()}",
            f"log_bytes = {config.log_bytes}",
            "",
        )
    )


def measured_latency(row: Row, seconds: float, folder: Path) -> Figures:
    files = [folder / f"{each.name}.toml" for each in (TABLE[0], row)]
    for file, each in zip(files, (TABLE[0], row), strict=True):
        file.write_text(toml(each.config()))
    tried = [system(("--config", str(file)), row.name) for file in files]
    with serving(tried[0]) as null, serving(tried[1]) as own:
        (base, taken), lost = workloads.beside(tried[0], (null, own), seconds, LATENCY_RATE)
    compared = side_by_side([taken], [base])
    low, high = compared[f"{BESIDE_P99}_interval"]
    p50_us, base_us = (float(np.percentile(each.latencies[:, 1], 50)) / 1000 for each in (taken, base))
    return {
        "p50_us": p50_us,
        "p99_us": compared["beside_p99_us"],
        "cpu_us_per_event": compared["beside_cpu_us_per_event"],
        "lost": lost,
        "p50_over_null_percent": (p50_us / base_us - 1) * 100,
        "p99_over_null_percent": compared[BESIDE_P99],
        "p99_over_null_percent_low": low,
        "p99_over_null_percent_high": high,
    }


def run(seconds: float, out: Path | None, tell: Callable[[str], None]) -> tuple[Figures, Figures]:
    """All rows."""
    measured: Figures = {}
    paper: Figures = {}
    with TemporaryDirectory(prefix="postroad-lab-") as folder:
        for number, row in enumerate(TABLE, 1):
            tell(f"row {number} of {len(TABLE)}: {row.name}")
            figures = {**measured_latency(row, seconds, Path(folder)), **measured_storage(row)}
            measured |= {f"{row.name}.{name}": value for name, value in figures.items()}
            paper |= {f"{row.name}.{name}": value for name, value in paper_storage(row).items()}
    if out is not None:
        from postroad.lab.tracking_figures import draw

        tell("drawing")
        draw(measured, paper, out)
    return measured, paper
