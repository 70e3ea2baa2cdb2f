"""Figures 4 to 8 of Bhola, Zhao and Auerbach as PNG, ours beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postroad.errors import UsageError

if TYPE_CHECKING:
    from postroad.lab.durable_crash import Story
    from postroad.lab.durable_disconnect import Look

Figures = Mapping[str, float]


def _figure(rows: int = 1) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("figures need matplotlib: install postroad[lab]") from None
    figure = Figure(figsize=(8, 2.5 + 2.5 * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]


def _save(figure: Any, out: Path, name: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{name}.png")


def _bars(axes: Any, labels: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        axes.bar([at + number * width for at in range(len(labels))], values, width, label=label)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(labels))], labels)
    axes.legend()


def draw_scaling(measured: Figures, paper: Figures, out: Path) -> None:
    figure, (axes,) = _figure()
    names = ("1_broker", "1_shb", "2_shb", "4_shb")
    series = {
        f"{who}{', disconnecting' if kind else ''}": [
            figures.get(f"{name}.{'disconnecting_' if kind else ''}events_per_s", 0.0) / 1000
            for name in names
        ]
        for who, figures in (("measured", measured), ("paper", paper))
        for kind in (False, True)
    }
    _bars(axes, [name.replace("_", " ") for name in names], series)
    axes.set(title="Figure 4. Peak event rate", ylabel="thousand events/s")
    _save(figure, out, "figure4")


def draw_catchup(caught_up: Sequence[tuple[float, float]], out: Path) -> None:
    figure, (axes,) = _figure()
    axes.plot([at for at, _ in caught_up], [took for _, took in caught_up], "o", label="measured")
    axes.axhspan(5, 6, alpha=0.3, color="tab:orange", label="paper, usually")
    axes.set(title="Figure 5. Catchup duration", xlabel="reconnected at, s", ylabel="s", ylim=(0, None))
    axes.legend()
    _save(figure, out, "figure5")


def _rates(axes: Any, looks: Sequence[Look], name: str) -> None:
    rates = [
        (getattr(after, name) - getattr(before, name)) / 1000 / (after.at_s - before.at_s)
        for before, after in pairwise(looks)
    ]
    axes.plot([look.at_s for look in looks[1:]], rates)
    axes.axhline(1000, color="tab:orange", linewidth=0.8)
    axes.set(ylabel="tick ms/s", title=name)


def draw_rates(looks: Sequence[Look], out: Path) -> None:
    figure, (above, below) = _figure(2)
    _rates(above, looks, "latest_delivered")
    _rates(below, looks, "released")
    figure.suptitle("Figure 6. Rate of latestDelivered(p) and released(p)")
    below.set_xlabel("s")
    _save(figure, out, "figure6")


def draw_crash(story: Story, out: Path) -> None:
    marks = (story.crashed_s, story.ready_s, story.caught_up_s)
    figure, (above, below) = _figure(2)
    for axes, name in ((above, "latest_delivered"), (below, "released")):
        base = getattr(story.looks[0], name)
        axes.plot(
            [glance.at_s for glance in story.looks],
            [(getattr(glance, name) - base) / 1e6 for glance in story.looks],
        )
        axes.set(ylabel="tick s", title=name)
        for mark in marks:
            axes.axvline(mark, color="tab:gray", linewidth=0.8)
    figure.suptitle("Figure 7. latestDelivered(p) and released(p); lines: crash, service, all caught up")
    below.set_xlabel("s")
    _save(figure, out, "figure7")
    figure, (above, below) = _figure(2)
    moments = [at for at, _ in story.received[1:]]
    above.plot(moments, [(b[1] - a[1]) / (b[0] - a[0]) / 1000 for a, b in pairwise(story.received)])
    above.set(ylabel="thousand events/s", title="all subscribers")
    for column, label in ((1, "PHB"), (2, "SHB")):
        below.plot(
            [sample[0] for sample in story.idle], [sample[column] * 100 for sample in story.idle], label=label
        )
    below.set(xlabel="s", ylabel="idle, % of a core", ylim=(0, 105))
    below.legend()
    figure.suptitle("Figure 8. Event rate and processor use")
    _save(figure, out, "figure8")


def draw_pfs(measured: Figures, paper: Figures, out: Path) -> None:
    figure, (axes,) = _figure()
    names = (
        "batch_1.times_faster",
        "batch_1.times_less_data",
        "batch_8.times_faster",
        "batch_8.times_less_data",
    )
    _bars(
        axes,
        [name.replace(".", "\n").replace("_", " ") for name in names],
        {
            "measured": [measured[name] for name in names],
            "paper": [paper.get(name, 0.0) for name in names],
        },
    )
    axes.set(title="The PFS against a log per subscriber (5.1.2)", yscale="log", ylabel="times")
    _save(figure, out, "pfs")


def draw_autoack(measured: Figures, paper: Figures, out: Path) -> None:
    figure, (axes,) = _figure()
    names = list(paper)
    _bars(
        axes,
        [name.partition(".")[0].replace("_", " ") for name in names],
        {
            "measured": [measured[name] / 1000 for name in names],
            "paper": [paper[name] / 1000 for name in names],
        },
    )
    axes.set(title="Auto-acknowledge (5.2)", ylabel="thousand events/s")
    _save(figure, out, "autoack")
