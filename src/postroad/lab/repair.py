"""Section 4 of Malekpour et al.: how much repair recovers, and what it costs (spec B12).

Each network runs without repair, with the paper's records of 1 to 10 entries, and with our default; then
with our default while publishers die, at half of the time, with what they have not summarised. All of it
from one seed, so the tree, the subscriptions and the publications are the same. Waits and caches were tuned
on that seed, so the main runs are repeated with others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from postroad.client.repair.planning import detection, shared_detection
from postroad.client.repair.settings import RepairSettings
from postroad.errors import UsageError
from postroad.lab.repair_network import LARGE, PAPER, SMALL, Counts, Network, Shape
from postroad.units import SECOND_US

SECONDS: Final = 60.0
SEED: Final = 1
OTHER_SEEDS: Final = (2, 3, 4)
OF_OTHER_SEEDS: Final = (
    "recovered_share",
    "bytes_per_delivery",
    "crossings",
    "requests_not_repeated",
    "repairs_not_repeated",
    "duplicate_share",
    "recovery_p99_s",
)
RECORDS: Final = (1, 2, 4, 6, 8, 10)
NOTES: Final = (
    "The paper prints its figures as images: what stands beside ours is what its text says of them.",
    "Bytes are those of records, summaries, requests and repairs on links between brokers, for each delivery."
    " A recovery takes from the publication to the delivery.",
    "Brokers are a light simulation, receivers and publishers the client's cores; queues do not build up.",
)
Figures = dict[str, float]


def run_small(seconds: float, out: Path | None, tell: Callable[[str], None]) -> tuple[Figures, Figures]:
    paper = {
        "r10.false_negatives_left": 0.5,
        "r10.requests_not_repeated": 0.9,
        "r10.repairs_not_repeated": 0.8,
        "detection_0.05_r10": 0.4,
    }
    return _run(SMALL, seconds, out, tell, "repair-12"), paper


def run_large(seconds: float, out: Path | None, tell: Callable[[str], None]) -> tuple[Figures, Figures]:
    paper = {
        "r10.false_negatives_left": 1 / 3,
        "r10.requests_not_repeated": 0.8,
        "r10.repairs_not_repeated": 0.7,
        "r10_loss_0.001.false_negatives_left": 1 / 8,
        "detection_0.05_r10": 0.4,
    }
    return _run(LARGE, seconds, out, tell, "repair-46"), paper


def _run(shape: Shape, seconds: float, out: Path | None, tell: Callable[[str], None], name: str) -> Figures:
    figures: Figures = {
        "detection_0.05_r10": detection(0.05, 0.01, 10),
        "detection_0.01_r10_shared_5": shared_detection(0.01, 0.01, 10, 5, 0.5),
    }
    runs: dict[str, Counts] = {}

    def measure(label: str, run_shape: Shape, settings: RepairSettings | None, dying: int = 0) -> None:
        tell(f"{name}: {label}, {seconds:g} s of virtual time")
        runs[label] = Network(run_shape, settings, seed=SEED, dying=dying).run(seconds)
        figures.update({f"{label}.{key}": value for key, value in figures_of(runs[label]).items()})

    measure("r0", shape, None)
    for record in RECORDS:
        measure(f"r{record}", shape, dataclasses.replace(PAPER, record=record))
    rare = dataclasses.replace(shape, link_loss=0.001)
    measure("r10_loss_0.001", rare, PAPER)
    measure("ours", shape, RepairSettings())
    measure("dying", shape, RepairSettings(), dying=shape.publishers // 3)
    for seed in OTHER_SEEDS:
        for label, run_shape, settings, dying in (
            ("r10", shape, PAPER, 0),
            ("r10_loss_0.001", rare, PAPER, 0),
            ("ours", shape, RepairSettings(), 0),
            ("dying", shape, RepairSettings(), shape.publishers // 3),
        ):
            tell(f"{name}: {label} with seed {seed}, {seconds:g} s of virtual time")
            run_figures = figures_of(Network(run_shape, settings, seed=seed, dying=dying).run(seconds))
            figures.update({f"seed{seed}.{label}.{key}": run_figures[key] for key in OF_OTHER_SEEDS})
    ours, paper = runs["ours"], runs["r10"]
    figures |= {
        "recovered_share": figures["ours.recovered_share"],
        "bytes_per_delivery": figures["ours.bytes_per_delivery"],
        "crossings_of_r10": ours.crossings / max(1, paper.crossings),
        "recovery_p50_s": figures["ours.recovery_p50_s"],
        "recovery_p99_s": figures["ours.recovery_p99_s"],
        "duplicate_share": figures["ours.duplicate_share"],
    }
    if out is not None:
        tell("drawing")
        draw(runs, figures, out, name)
    return figures


def figures_of(counts: Counts) -> Figures:
    lost, deliveries = max(1, counts.lost), max(1, counts.deliveries)
    recovery, delays = sorted(counts.recovery_us) or [0], sorted(counts.delays_us) or [0]
    sizes = counts.cache_sizes or [0.0, 0.0, 0.0]
    return {
        "published": counts.published,
        "deliveries": counts.deliveries,
        "lost": counts.lost,
        "false_negatives_left": 1 - counts.recovered / lost,
        "recovered_share": counts.recovered / lost,
        "gaps": counts.gaps,
        "bytes_per_delivery": counts.overhead_bytes / deliveries,
        "crossings": counts.crossings,
        "requests": counts.requests,
        "repairs": counts.repairs,
        "requests_not_repeated": 1 - counts.repeated_requests / max(1, counts.requests),
        "repairs_not_repeated": 1 - counts.repeated_repairs / max(1, counts.repairs),
        "duplicate_share": counts.duplicates / deliveries,
        "false_repairs": counts.false_repairs,
        "delay_p50_s": delays[len(delays) // 2] / SECOND_US,
        "recovery_p50_s": recovery[len(recovery) // 2] / SECOND_US,
        "recovery_p99_s": recovery[len(recovery) * 99 // 100] / SECOND_US,
        "hit_ratio": counts.hits / max(1, counts.asked),
        "cache_mean": sum(sizes[1::3]) / len(sizes[1::3]),
        "cache_max": max(sizes[2::3]),
    }


def draw(runs: dict[str, Counts], figures: Figures, out: Path, name: str) -> None:
    """Figures 2 and 5 to 11 as one file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("figures need matplotlib: install postroad[lab]") from None
    out.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(16, 12), layout="constrained")
    axes: Any = figure.subplots(3, 3)
    _draw_detection(axes[0][0])
    _draw_effect(axes[0][1], axes[0][2], runs, figures)
    _draw_delays(axes[1][0], axes[1][2], runs)
    seconds = range(round(max(second for _, second in runs["r10"].by_second)) + 1)
    for kind in ("published", "requests", "repairs"):
        axes[1][1].plot([runs["r10"].by_second[kind, at] for at in seconds], label=kind)
    axes[1][1].set(title="Figure 8: messages a second, R = 10", xlabel="s", yscale="symlog")
    axes[1][1].legend()
    _draw_hits(axes[2][0], runs["r10"])
    sizes = runs["r10"].cache_sizes
    for at, kind in enumerate(("least", "mean", "most")):
        axes[2][1].plot(sizes[at::3], label=kind)
    axes[2][1].set(title="Figure 11: cache size, R = 10", xlabel="s", ylabel="messages")
    axes[2][1].legend()
    axes[2][2].axis("off")
    figure.savefig(out / f"{name}.png", dpi=110)


def _draw_detection(axis: Any) -> None:
    records = range(21)
    for match in (0.001, 0.01, 0.05, 0.1):
        axis.plot(records, [detection(match, 0.01, record) for record in records], label=f"{match:g}")
    axis.set(title="Figure 2a: detection", xlabel="record", ylabel="probability")
    axis.legend(title="match")


def _draw_effect(totals: Any, over_time: Any, runs: dict[str, Counts], figures: Figures) -> None:
    left = [figures[f"r{record}.lost"] - runs[f"r{record}"].recovered for record in (0, *RECORDS)]
    totals.plot((0, *RECORDS), left, marker="o", label="records")
    totals.axhline(figures["ours.lost"] - runs["ours"].recovered, label="ours", color="tab:green")
    totals.set(title="Figure 5: false negatives", xlabel="record", ylabel="messages", ylim=(0, None))
    totals.legend()
    for label, text in (("r0", "without repair"), ("r10", "R = 10"), ("ours", "ours")):
        count = runs[label].by_second
        last = max(second for kind, second in count if kind == "published")
        over_time.plot([count["lost", at] - count["recovered", at] for at in range(last + 1)], label=text)
    over_time.set(title="Figure 6: false negatives a second", xlabel="s", ylim=(0, None))
    over_time.legend()


def _draw_delays(repairs: Any, originals: Any, runs: dict[str, Counts]) -> None:
    def curve(axis: Any, values: list[int], label: str) -> None:
        ordered = sorted(values)
        shares = [at / max(1, len(ordered)) for at in range(len(ordered))]
        axis.plot([delay / SECOND_US for delay in ordered], shares, label=label)

    for label in ("r10", "ours"):
        curve(repairs, runs[label].delays_us, f"{label}, original")
        curve(repairs, runs[label].recovery_us, f"{label}, repair")
    repairs.set(title="Figure 7: delays", xlabel="s", ylabel="share", xlim=(0, 6))
    repairs.legend()
    for label, text in (("r0", "without repair"), ("r10", "R = 10"), ("ours", "ours")):
        curve(originals, runs[label].delays_us, text)
    originals.set(title="Figure 9: delays of originals (no queues here)", xlabel="s", ylabel="share")
    originals.legend()


def _draw_hits(axis: Any, counts: Counts) -> None:
    """Of the second and the four before it."""
    last = max((second for kind, second in counts.by_second if kind == "asked"), default=0)
    ratios = []
    for at in range(last + 1):
        asked, hits = (
            sum(counts.by_second[kind, second] for second in range(at - 4, at + 1))
            for kind in ("asked", "hits")
        )
        ratios.append(hits / asked if asked else 1.0)
    axis.plot(ratios)
    axis.set(title="Figure 10: hit ratio, R = 10", xlabel="s", ylim=(0, 1.05))
