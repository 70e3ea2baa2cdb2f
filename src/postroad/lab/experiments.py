"""Which experiments there are. Each gives figures of ours and of the paper under the same flat names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from postroad.errors import UsageError
from postroad.lab import tracking_table2


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    name: str
    about: str
    seconds: float  # default, of each measurement
    run: Callable[[float, Path | None, Callable[[str], None]], tuple[dict[str, float], dict[str, float]]]
    notes: tuple[str, ...] = field(default=())  # what to know when comparing


EXPERIMENTS: Final = {
    one.name: one
    for one in (
        Experiment(
            name="tracking-table2",
            about="Jun and Astley, section 5: latency and storage of the 21 rows of Table 2; figures 1, 3-5",
            seconds=tracking_table2.SECONDS,
            run=tracking_table2.run,
            notes=tracking_table2.NOTES,
        ),
    )
}


def experiment(name: str) -> Experiment:
    found = EXPERIMENTS.get(name)
    if found is None:
        raise UsageError(f"unknown experiment {name!r}; known are {', '.join(EXPERIMENTS)}")
    return found
