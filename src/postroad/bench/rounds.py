"""Rounds that alternate between the systems, and what is made of their figures."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from postroad.bench import workloads
from postroad.bench.durable_sessions import ACK_EVENTS
from postroad.bench.durable_systems import DURABLE_SYSTEMS
from postroad.bench.systems import IN_FLIGHT_EVENTS, SYSTEMS, System, chosen
from postroad.errors import PostroadError, UsageError

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One system under one workload."""

    system: System
    workload: str
    run: Callable[[], workloads.Figures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A benchmark: what runs, on which systems unless told otherwise, with which settings."""

    workload: str
    run: Callable[[System, float, int], workloads.Figures]
    settings: Row
    known: Mapping[str, System] = field(default_factory=lambda: SYSTEMS)
    systems: tuple[str, ...] = tuple(SYSTEMS)
    lines: tuple[int, ...] = (1,)  # numbers of brokers in a line, for ours


_PACED: Final[Row] = {"payload_bytes": workloads.PAYLOAD_BYTES, "events_per_s": workloads.RATE}
PLANS: Final = {
    "fanout": Plan(
        workload="4 publishers, 4 topics, 100 subscribers",
        run=workloads.fanout,
        settings={
            "payload_bytes": workloads.PAYLOAD_BYTES,
            "burst_events": workloads.BURST_EVENTS,
            "in_flight_events": IN_FLIGHT_EVENTS,
        },
    ),
    "durable": Plan(
        workload="4 publishers, 4 topics, 100 durable subscribers",
        run=workloads.durable,
        known=DURABLE_SYSTEMS,
        systems=tuple(DURABLE_SYSTEMS),
        settings={
            "payload_bytes": workloads.PAYLOAD_BYTES,
            "burst_events": workloads.BURST_EVENTS,
            "in_flight_events": IN_FLIGHT_EVENTS,
            "missed_events": workloads.MISSED_EVENTS,
            "ack_events": ACK_EVENTS,
        },
    ),
    "latency": Plan(
        workload="1 broker",
        run=workloads.latency,
        settings=_PACED,
        systems=("postroad", "mosquitto"),
        lines=(1, 3, 5),
    ),
    "topics": Plan(
        workload="200 publishers, 500 topics, 500 subscribers",
        run=workloads.topics,
        settings=_PACED,
        systems=("postroad", "mosquitto", "nats"),
    ),
    "memory": Plan(
        workload=f"{workloads.IDLE_CONNECTIONS} connections, then {workloads.SUBSCRIPTIONS} subscriptions",
        run=workloads.memory,
        settings={
            "connections_before": workloads.FILL_CONNECTIONS,
            "subscriptions_per_connection": workloads.SUBSCRIPTIONS_PER_CONNECTION,
        },
    ),
}


def summary(figures: Sequence[workloads.Figures]) -> Row:
    """Medians, and under `spread` the smallest and largest of each."""
    names = list(figures[0])
    columns = {name: [entry[name] for entry in figures] for name in names}
    row: Row = {name: statistics.median(values) for name, values in columns.items()}
    row["spread"] = {name: [min(values), max(values)] for name, values in columns.items()}
    row["rounds"] = len(figures)
    return row


def alternate(cases: Sequence[Case], rounds: int, tell: Callable[[str], None]) -> list[Row]:
    """Every case once per round, so that whatever slows the machine for a while slows all of them.

    A case that fails gives a row with its error and is not tried again; the others go on.
    """
    figures: dict[int, list[workloads.Figures]] = {number: [] for number in range(len(cases))}
    errors: dict[int, str] = {}
    for turn in range(rounds):
        for number, case in enumerate(cases):
            if number in errors:
                continue
            tell(f"round {turn + 1} of {rounds}: {case.system.name}, {case.workload}")
            try:
                figures[number].append(case.run())
            except (PostroadError, OSError) as error:
                errors[number] = str(error)
    rows: list[Row] = []
    for number, case in enumerate(cases):
        row: Row = {"system": case.system.name, "workload": case.workload}
        row |= {"error": errors[number]} if number in errors else summary(figures[number])
        rows.append(row | described(case.system))
    return rows


def described(system: System) -> Row:
    return {"version": system.version(), "settings": system.settings, "syncs": system.syncs}


def cases(name: str, names: str, seconds: float) -> tuple[list[Case], Row]:
    """The cases of benchmark `name` for these systems (comma-separated; "": its own), and its settings."""
    plan = PLANS[name]
    wanted = []
    for system in chosen(names, plan.systems, plan.known):
        for brokers in plan.lines if system.name == "postroad" else (1,):
            workload = f"{brokers} brokers in a line" if brokers > 1 else plan.workload
            run = partial(plan.run, system, seconds, brokers)
            wanted.append(Case(system=system, workload=workload, run=run))
    if not wanted:
        raise UsageError("none of the systems is installed; `make bench-peers` installs the peers")
    return wanted, {**plan.settings, "seconds": seconds}


def machine() -> Row:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": len(models),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
