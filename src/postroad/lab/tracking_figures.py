"""Figures 1, 3, 4 and 5 of Jun and Astley as PNG, ours beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from postroad.errors import UsageError
from postroad.lab.tracking_table2 import TABLE
from postroad.tracking.bloom import BloomFilter, false_positive_rate

BITS_PER_MESSAGE: Final = tuple(range(2, 25, 2))  # figure 1
KEYS: Final = 20_000
PROBES: Final = 200_000


def best_hashes(bits: int) -> int:
    return min(range(1, 33), key=lambda k: false_positive_rate(bits * KEYS, KEYS, k))


def measured_rates() -> list[float]:
    """The share of keys never added that full filters claim, for figure 1."""
    chance = np.random.default_rng(1)
    rates = []
    for bits in BITS_PER_MESSAGE:
        filled = BloomFilter(bits * KEYS, KEYS, best_hashes(bits))
        filled.add(chance.bytes(16 * KEYS))
        rates.append(sum(filled.contains(chance.bytes(16 * PROBES))) / PROBES)
    return rates


def draw(measured: Mapping[str, float], paper: Mapping[str, float], out: Path) -> None:
    """Four files in that folder."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("figures need matplotlib: install postroad[lab]") from None
    out.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    _rates(figure.add_subplot())
    figure.savefig(out / "figure1.png")
    latency = {label: _column(measured, f"{label}_over_null_percent") for label in ("p50", "p99")}
    for number, title, series in (
        (3, "Latency over that without tracking, percent", latency),
        (4, "Uncompressed bytes per message", _beside(measured, paper, "bytes_per_message")),
        (5, "Compressed bytes per message", _beside(measured, paper, "gzip_bytes_per_message")),
    ):
        figure = Figure(figsize=(11, 5), layout="constrained")
        _bars(figure.add_subplot(), f"Figure {number}. {title}", series)
        figure.savefig(out / f"figure{number}.png")


def _column(figures: Mapping[str, float], name: str) -> list[float]:
    """A value for each row of the table; NaN, which draws nothing, where there is none."""
    return [figures.get(f"{row.name}.{name}", float("nan")) for row in TABLE]


def _beside(measured: Mapping[str, float], paper: Mapping[str, float], name: str) -> dict[str, list[float]]:
    return {"measured": _column(measured, name), "from the paper's parameters": _column(paper, name)}


def _rates(axes: Any) -> None:
    formula = [false_positive_rate(bits * KEYS, KEYS, best_hashes(bits)) for bits in BITS_PER_MESSAGE]
    axes.semilogy(BITS_PER_MESSAGE, formula, label="paper, equation 1")
    axes.semilogy(BITS_PER_MESSAGE, [rate or np.nan for rate in measured_rates()], "o", label="measured")
    axes.set(xlabel="bits per message (m/n)", ylabel="false positive rate", title="Figure 1")
    axes.legend()


def _bars(axes: Any, title: str, series: Mapping[str, list[float]]) -> None:
    """Groups of bars, one group per row of the table."""
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        axes.bar([row + number * width for row in range(len(TABLE))], values, width, label=label)
    axes.set_title(title)
    axes.set_xticks(range(len(TABLE)), [row.name for row in TABLE], rotation=60, ha="right", fontsize=8)
    axes.legend()
