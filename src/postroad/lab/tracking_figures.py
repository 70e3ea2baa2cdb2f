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
        held = BloomFilter(bits * KEYS, KEYS, best_hashes(bits))
        held.add(chance.bytes(16 * KEYS))
        rates.append(sum(held.contains(chance.bytes(16 * PROBES))) / PROBES)
    return rates


def draw(measured: Mapping[str, float], paper: Mapping[str, float], out: Path) -> None:
    """Four files in that folder."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("figures need matplotlib: install postroad[lab]") from None
    out.mkdir(parents=True, exist_ok=True)
    formula = [false_positive_rate(bits * KEYS, KEYS, best_hashes(bits)) for bits in BITS_PER_MESSAGE]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.semilogy(BITS_PER_MESSAGE, formula, label="paper, equation 1")
    axes.semilogy(BITS_PER_MESSAGE, [rate or np.nan for rate in measured_rates()], "o", label="measured")
    axes.set(xlabel="bits per message (m/n)", ylabel="false positive rate", title="Figure 1")
    axes.legend()
    figure.savefig(out / "figure1.png")
    latency = {"p50": "p50_us", "p99": "p99_us"}
    _bars(Figure(figsize=(11, 5), layout="constrained"), "Figure 3. Latency, us", out / "figure3.png").draw(
        {label: [measured.get(f"{row.name}.{name}") for row in TABLE] for label, name in latency.items()}
    )
    for number, title, name in (
        (4, "Figure 4. Uncompressed bytes per message", "bytes_per_message"),
        (5, "Figure 5. Compressed bytes per message", "gzip_bytes_per_message"),
    ):
        _bars(Figure(figsize=(11, 5), layout="constrained"), title, out / f"figure{number}.png").draw(
            {
                "measured": [measured.get(f"{row.name}.{name}") for row in TABLE],
                "from the paper's parameters": [paper.get(f"{row.name}.{name}") for row in TABLE],
            }
        )


class _bars:
    """Groups of bars, one group per row of the table."""

    def __init__(self, figure: Any, title: str, file: Path) -> None:
        self._figure = figure
        self._title = title
        self._file = file

    def draw(self, series: Mapping[str, list[float | None]]) -> None:
        axes = self._figure.add_subplot()
        width = 0.8 / len(series)
        for number, (label, values) in enumerate(series.items()):
            at = [row + number * width for row in range(len(TABLE))]
            axes.bar(at, [np.nan if value is None else value for value in values], width, label=label)
        axes.set_title(self._title)
        axes.set_xticks(range(len(TABLE)), [row.name for row in TABLE], rotation=60, ha="right", fontsize=8)
        axes.legend()
        self._figure.savefig(self._file)
