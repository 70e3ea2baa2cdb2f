"""Many runs: one after the other in this process, or side by side in several."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from itertools import islice
from typing import TypeVar

from postroad.sim.queue_scenario import QueueOutcome, QueueScenario
from postroad.sim.scenario import Outcome, Scenario

Ending = TypeVar("Ending", Outcome, QueueOutcome)


def run_seed(seed: int, minutes: float, brokers: int | None, shared: bool = False) -> Outcome:
    return Scenario(seed=seed, minutes=minutes, brokers=brokers, shared=shared).run()


def run_queue_seed(seed: int, minutes: float) -> QueueOutcome:
    return QueueScenario(seed=seed, seconds=round(60 * minutes)).run()


def run_seeds(
    seeds: Iterable[int],
    *,
    minutes: float,
    brokers: int | None,
    shared: bool = False,
    seconds: float | None = None,
) -> Iterator[Outcome]:
    run = partial(run_seed, minutes=minutes, brokers=brokers, shared=shared)
    yield from _side_by_side(run, seeds, seconds)


def run_queue_seeds(
    seeds: Iterable[int], *, minutes: float, seconds: float | None = None
) -> Iterator[QueueOutcome]:
    yield from _side_by_side(partial(run_queue_seed, minutes=minutes), seeds, seconds)


def _side_by_side(
    run: Callable[[int], Ending], seeds: Iterable[int], seconds: float | None
) -> Iterator[Ending]:
    """Outcomes as they come, a process per core; no new run begins after `seconds`, and whoever wants no more
    waits for those that have begun."""
    left = iter(seeds)
    until = None if seconds is None else time.monotonic() + seconds
    workers = os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")  # the caller may have threads, which a fork would break
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running: set[Future[Ending]] = set()
        while True:
            room = workers - len(running)
            if until is None or time.monotonic() < until:
                running |= {pool.submit(run, seed) for seed in islice(left, room)}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from sorted((future.result() for future in done), key=lambda outcome: outcome.seed)
