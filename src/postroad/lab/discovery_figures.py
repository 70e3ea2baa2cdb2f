"""Figures 2 to 14 of Pallickara, Gadgil and Fox as PNG, ours beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from postroad.errors import UsageError

Figures = Mapping[str, float]


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("figures need matplotlib: install postroad[lab]") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    return figure, figure.add_subplot(1, 1, 1)


def _bars(
    title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]], out: Path, name: str
) -> None:
    figure, axes = _figure()
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        axes.bar([at + number * width for at in range(len(labels))], values, width, label=label)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(labels))], labels)
    axes.legend()
    axes.set(title=title, ylabel="ms")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{name}.png")


def draw_topologies(measured: Figures, paper: Figures, out: Path) -> None:
    clients = [key.split(".")[1] for key in measured if key.startswith("star.") and key.endswith(".total_ms")]
    for name, shape in (("figure3-7", "unconnected"), ("figure9", "star"), ("figure11", "linear")):
        series = {
            "measured": [measured[f"{shape}.{client}.total_ms"] for client in clients],
            "physical limit": [measured[f"{shape}.{client}.limit_ms"] for client in clients],
        }
        if shape == "unconnected":
            series["paper"] = [paper[f"{shape}.{client}.total_ms"] for client in clients]
        _bars(f"Time of discovery, {shape}", clients, series, out, name)


def draw_pairs(
    measured: Figures, paper: Figures, names: Sequence[str], title: str, out: Path, file: str
) -> None:
    series = {
        "measured": [measured[name] for name in names],
        "paper": [paper.get(name, 0.0) for name in names],
    }
    _bars(title, list(names), series, out, file)
