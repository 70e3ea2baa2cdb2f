"""Figures 6 to 8 of the queues paper as PNG: what was measured as lines, section 3's formulas dashed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from postroad.errors import UsageError

Figures = Mapping[str, float]
_DELAYS: Final = ("pbm_online", "pbm_offline", "msmq_recoverable", "msmq_express")
_ROUND_TRIPS: Final = ("pbm_online", "pbm_offline", "pbm_offline_express", "msmq_recoverable", "msmq_express")


def _draw(
    title: str,
    label: str,
    names: Sequence[str],
    measured: Figures,
    formulas: Figures,
    places: Sequence[int],
    out: Path,
    file: str,
    *,
    brokers: bool,
) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("figures need matplotlib: install postroad[lab]") from None
    figure: Any = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name in names:
        values = [measured[f"{place}.{name}"] for place in places]
        (line,) = axes.plot(places, values, "o-", label=name.replace("_", " "))
        expected = [formulas[f"{place}.{name}"] for place in places]
        axes.plot(places, expected, "--", color=line.get_color(), linewidth=0.8)
    axes.set(title=f"{title}; dashed: section 3", ylabel=label, ylim=(0, None))
    if brokers:
        axes.set_xscale("log", base=16)
    axes.set_xticks(list(places), [str(place) for place in places])
    axes.set_xlabel("brokers" if brokers else "one-way delay between the farthest brokers, ms")
    axes.legend()
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{file}.png")


def draw_scale(measured: Figures, formulas: Figures, sizes: Sequence[int], out: Path) -> None:
    for file, title, names, what in (
        ("figure6a", "Figure 6a. Delivery delay", _DELAYS, "ms"),
        ("figure6b", "Figure 6b. Round trip", _ROUND_TRIPS, "rtt_ms"),
    ):
        chosen = [f"{name}_{what}" for name in names]
        _draw(title, "ms", chosen, measured, formulas, sizes, out, file, brokers=True)


def draw_traffic(measured: Figures, formulas: Figures, sizes: Sequence[int], out: Path) -> None:
    reliable = (
        "pbm_online_messages",
        "pbm_offline_messages",
        "pbm_offline_express_messages",
        "msmq_messages",
    )
    unreliable = (
        "pbm_online_unreliable_messages",
        "pbm_offline_unreliable_messages",
        "msmq_unreliable_messages",
    )
    for file, title, names in (
        ("figure7a", "Figure 7a. Messages on the wire for a reliable one", reliable),
        ("figure7b", "Figure 7b. Messages on the wire for an unreliable one", unreliable),
    ):
        _draw(title, "messages", names, measured, formulas, sizes, out, file, brokers=True)


def draw_distance(measured: Figures, formulas: Figures, areas_ms: Sequence[int], out: Path) -> None:
    for file, title, names, what in (
        ("figure8a", "Figure 8a. Delivery delay and distance", _DELAYS, "ms"),
        ("figure8b", "Figure 8b. Round trip and distance", _ROUND_TRIPS, "rtt_ms"),
    ):
        chosen = [f"{name}_{what}" for name in names]
        _draw(title, "ms", chosen, measured, formulas, areas_ms, out, file, brokers=False)
