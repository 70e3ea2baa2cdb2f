"""`postroad sim`: a network in a virtual world, harmed by chance and judged by rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from postroad.errors import UsageError
from postroad.units import SECOND_US, duration_us

if TYPE_CHECKING:
    from collections.abc import Iterator

    from postroad.sim.queue_scenario import QueueOutcome
    from postroad.sim.scenario import Outcome

SEED_BITS = 32


def register(app: typer.Typer) -> None:
    app.command("sim")(sim)


def sim(
    seed: Annotated[int | None, typer.Option(help="The seed of the world; a fresh one if not given.")] = None,
    minutes: Annotated[float, typer.Option(help="Minutes of virtual time.")] = 5.0,
    brokers: Annotated[
        int | None, typer.Option(help="How many brokers; drawn from the seed if not given.")
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Durable worlds that also have shared subscriptions.")
    ] = False,
    queues: Annotated[bool, typer.Option("--queues", help="A world of queues.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Run this many seeds, counting up from --seed.")] = 1,
    for_: Annotated[str, typer.Option("--for", help="Run fresh seeds for this long, such as '10m'.")] = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON object per run.")] = False,
) -> None:
    """Simulate a network under faults and check every rule; exit 1 at the first that does not hold."""
    import secrets
    import signal

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the processes it started end with it
    first = secrets.randbits(SEED_BITS) if seed is None else seed
    if for_ and seeds > 1:
        raise UsageError("say either --seeds or --for")
    if queues and (shared or brokers is not None):
        raise UsageError("a world of queues has as many brokers as its seed says: no --shared, no --brokers")
    seconds = duration_us(for_) / SECOND_US if for_ else None
    many = bool(for_) or seeds > 1
    outcomes: Iterator[Outcome | QueueOutcome]
    if queues:
        outcomes = _queues(first, seeds, seconds, minutes, many=many)
    elif many:
        outcomes = _many(first, seeds, seconds, minutes, brokers, shared)
    else:
        outcomes = _single(first, minutes, brokers, shared)
    for outcome in _watched(outcomes, total=None if for_ else seeds) if many and not json else outcomes:
        _print(outcome, json=json, brief=many)
        if outcome.rule:
            raise typer.Exit(1)


def _single(seed: int, minutes: float, brokers: int | None, shared: bool) -> Iterator[Outcome]:
    from postroad.sim.runs import run_seed

    yield run_seed(seed, minutes, brokers, shared)


def _many(
    first: int, count: int, seconds: float | None, minutes: float, brokers: int | None, shared: bool
) -> Iterator[Outcome]:
    from itertools import count as count_from

    from postroad.sim.runs import run_seeds

    seeds = range(first, first + count) if seconds is None else count_from(first)
    yield from run_seeds(seeds, minutes=minutes, brokers=brokers, shared=shared, seconds=seconds)


def _queues(
    first: int, count: int, seconds: float | None, minutes: float, *, many: bool
) -> Iterator[QueueOutcome]:
    from itertools import count as count_from

    from postroad.sim.runs import run_queue_seed, run_queue_seeds

    if not many:
        yield run_queue_seed(first, minutes)
        return
    seeds = range(first, first + count) if seconds is None else count_from(first)
    yield from run_queue_seeds(seeds, minutes=minutes, seconds=seconds)


def _watched(
    outcomes: Iterator[Outcome | QueueOutcome], total: int | None
) -> Iterator[Outcome | QueueOutcome]:
    """The same, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("seeds", total=total)
        for outcome in outcomes:
            progress.advance(task)
            yield outcome


def _print(outcome: Outcome | QueueOutcome, *, json: bool, brief: bool) -> None:
    if json:
        import msgspec

        print(msgspec.json.encode(outcome).decode(), flush=True)
        return
    verdict = f"violates {outcome.rule}" if outcome.rule else "holds"
    faults = f"{sum(outcome.faults.values())} faults"
    print(f"seed {outcome.seed} {verdict}: {_summary(outcome)}, {faults}", flush=True)
    if not brief:
        counts = ", ".join(f"{name} {count}" for name, count in outcome.faults.items())
        print(f"faults: {counts or 'none'}" + _digest(outcome))
    if outcome.rule:
        print(f"{outcome.rule}: {outcome.text}")
        for line in outcome.story:
            print(f"  {line}")
        print(f"replay: postroad sim --seed {outcome.seed} --minutes {outcome.minutes:g}{_options(outcome)}")


def _summary(outcome: Outcome | QueueOutcome) -> str:
    from postroad.sim.scenario import Outcome

    if isinstance(outcome, Outcome):
        return (
            f"{outcome.kind}, {outcome.brokers} brokers, "
            f"{outcome.published} events published, {outcome.accepted} accepted, "
            f"{outcome.deliveries + outcome.durable_deliveries} deliveries ({outcome.owed} owed), "
            f"{outcome.gaps} gaps"
        )
    return (
        f"queues, {outcome.brokers} brokers, {outcome.kept} messages kept, {outcome.accepted} accepted, "
        f"{outcome.views} views"
    )


def _digest(outcome: Outcome | QueueOutcome) -> str:
    from postroad.sim.scenario import Outcome

    return f"\ntrace: {outcome.digest}" if isinstance(outcome, Outcome) else ""


def _options(outcome: Outcome | QueueOutcome) -> str:
    """What else replays it."""
    from postroad.sim.scenario import Outcome

    if not isinstance(outcome, Outcome):
        return " --queues"
    kind = " --shared" if outcome.kind == "shared" else ""
    return kind + (f" --brokers {outcome.brokers}" if outcome.pinned else "")
