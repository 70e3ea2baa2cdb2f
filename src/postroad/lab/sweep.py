"""Experiments: sweeps of the simulator as Spark jobs, one simulated network a task (spec P9)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from postroad.errors import UsageError
from postroad.sim.judge.tracking import QUICK
from postroad.sim.scenario import MAX_BROKERS, Scenario

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_RUNS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulated network."""

    seed: int
    minutes: float
    brokers: int
    faults: bool
    tracking: str  # a strategy; "none": paths are not recorded


_OUTCOME: Final = pa.schema(
    [
        *(("seed", pa.int64()), ("minutes", pa.float64()), ("brokers", pa.int32()), ("faults", pa.bool_())),
        *(("tracking", pa.string()), ("published", pa.int64()), ("accepted", pa.int64())),
        *(("deliveries", pa.int64()), ("owed", pa.int64()), ("gaps", pa.int64()), ("frames", pa.int64())),
        *(("harms", pa.int64()), ("digest", pa.string()), ("rule", pa.string()), ("text", pa.string())),
    ]
)
_COLUMNS: Final = (
    "seed bigint, minutes double, brokers int, faults boolean, tracking string, published bigint,"
    " accepted bigint, deliveries bigint, owed bigint, gaps bigint, frames bigint, harms bigint,"
    " digest string, rule string, text string"
)


def grid(
    *,
    seeds: Iterable[int],
    minutes: Iterable[float] = (1.0,),
    brokers: Iterable[int] = (3,),
    faults: Iterable[bool] = (True,),
    tracking: Iterable[str] = ("none",),
) -> list[Run]:
    """Every combination."""
    runs = [
        Run(seed=seed, minutes=length, brokers=count, faults=harmed, tracking=strategy)
        for length, count, harmed, strategy, seed in product(minutes, brokers, faults, tracking, seeds)
    ]
    if not 1 <= len(runs) <= MAX_RUNS:
        raise UsageError(f"a sweep of {len(runs)} runs, 1 to {MAX_RUNS} can be made")
    for run in runs:
        if not 1 <= run.brokers <= MAX_BROKERS or not 0 < run.minutes < inf:
            raise UsageError(f"a run has 1 to {MAX_BROKERS} brokers and takes some time, not {run}")
        if run.tracking not in ("none", "exact", "bloom"):
            raise UsageError(f"tracking is none, exact or bloom, not {run.tracking!r}")
    return runs


def sweep(spark: SparkSession, runs: list[Run]) -> DataFrame:
    """A row per run: what was simulated and what came of it; `rule` names one that did not hold."""
    # A partition is one run: runs differ in length by far more than a task costs to start.
    numbers = spark.range(0, len(runs), 1, len(runs))

    def simulate(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            outcomes = [_outcome(runs[number]) for number in batch["id"].to_pylist()]
            yield from pa.Table.from_pylist(outcomes, _OUTCOME).to_batches()

    return numbers.mapInArrow(simulate, _COLUMNS)


def _outcome(run: Run) -> dict[str, Any]:
    tracking = None if run.tracking == "none" else replace(QUICK, strategy=run.tracking)
    outcome = Scenario(
        seed=run.seed, minutes=run.minutes, brokers=run.brokers, faults=run.faults, tracking=tracking
    ).run()
    return {
        **asdict(run),
        "published": outcome.published,
        "accepted": outcome.accepted,
        "deliveries": outcome.deliveries,
        "owed": outcome.owed,
        "gaps": outcome.gaps,
        "frames": outcome.frames,
        "harms": sum(outcome.faults.values()),
        "digest": outcome.digest,
        "rule": outcome.rule,
        "text": outcome.text,
    }
