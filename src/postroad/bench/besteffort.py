"""Best effort beside plain mode and beside peers that keep nothing: latency and broker CPU at one steady
rate, then how much arrives when one program publishes as fast as it can.

Ours is driven by its own client, publisher and subscriber in one process, since records and repair are the
client's work; each mode has the same driver, so these rows compare with each other. The peers, and ours in
plain mode once more, are driven by raw sockets as in `latency`: those rows compare with each other.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from postroad.bench import workloads
from postroad.bench.processes import cpu_seconds
from postroad.bench.rounds import Case
from postroad.bench.systems import SYSTEMS, chosen, serving
from postroad.client.aio import Client, connect
from postroad.client.subscription import Subscription
from postroad.events import Gap

RATE: Final = 2_000  # events a second, with the load in one process of Python
STEP_S: Final = 0.005  # events leave in groups of this long
FULL_S: Final = 1.0  # at full speed
MODES: Final = {
    "plain, our client": ("plain", ""),
    "best effort, our client": ("best-effort", ""),
    "best effort with repair, our client": ("best-effort", "summaries"),
    "best effort with records, our client": ("best-effort", "records"),
}
BEST_EFFORT: Final = replace(
    SYSTEMS["postroad"],
    settings="best effort over UDP, defaults",
    syncs="nothing (best effort keeps nothing and is not acknowledged)",
)


def cases(names: str, seconds: float) -> list[Case]:
    wanted = chosen(names, ("postroad", "mosquitto", "nats"), SYSTEMS)
    rows = [
        Case(system=system, workload="raw sockets", run=partial(workloads.latency, system, seconds, 1))
        for system in wanted
    ]
    if any(system.name == "postroad" for system in wanted):
        for workload, (mode, way) in MODES.items():
            run = partial(_measure, mode, way, seconds)
            system = SYSTEMS["postroad"] if mode == "plain" else BEST_EFFORT
            rows.append(Case(system=system, workload=workload, run=run))
    return rows


def _measure(mode: str, way: str, seconds: float) -> workloads.Figures:
    with serving(SYSTEMS["postroad"]) as running:
        host, port = running.addresses[0]
        return asyncio.run(_loaded(f"{host}:{port}", running.pids(), mode, way, seconds))


async def _loaded(address: str, pids: list[int], mode: str, way: str, seconds: float) -> workloads.Figures:
    publisher, reader = connect(address), connect(address)
    for client in (publisher, reader):
        client.repair_by(way or "summaries")
    async with publisher, reader, reader.subscribe("bench/#", "kind = 'x'", repair=bool(way)) as events:
        warm = round(workloads.WARM_S / STEP_S)
        steps = warm + round(seconds / STEP_S)
        group = round(RATE * STEP_S)
        delays: list[float] = []
        reading = asyncio.create_task(_read(events, delays))
        filler = bytes(workloads.PAYLOAD_BYTES - 8)
        begin, before = time.monotonic(), cpu_seconds(pids)
        for step in range(steps):
            if step == warm:
                before = cpu_seconds(pids)
            for _ in range(group):
                stamp = time.monotonic_ns().to_bytes(8, "big")
                await publisher.publish("bench/a", stamp + filler, {"kind": "x"}, mode=mode)
            await asyncio.sleep(max(0.0, begin + (step + 1) * STEP_S - time.monotonic()))
        used = cpu_seconds(pids) - before
        await asyncio.sleep(3.0 if way else 1.0)
        figures, arrived = events.repair, len(delays)
        sent = await _at_full_speed(publisher, mode)
        at_once = len(delays) - arrived
        reading.cancel()
    del delays[arrived:]
    late, published = delays[group * warm :], group * (steps - warm)
    return {
        "p50_us": float(np.percentile(late, 50)),
        "p99_us": float(np.percentile(late, 99)),
        "cpu_us_per_event": used * 1e6 / published,
        "lost": float(group * steps - len(delays)),
        "recovered": float(figures.get("recovered", 0.0)),
        "full_speed_per_s": at_once / FULL_S,
        "full_speed_arrived": at_once / sent,
    }


async def _at_full_speed(publisher: Client, mode: str) -> int:
    """How many were published. What arrives by the end of the time counts, and no repair."""
    sent, end = 0, time.monotonic() + FULL_S
    payload = bytes(workloads.PAYLOAD_BYTES)
    while time.monotonic() < end:
        await publisher.publish("bench/a", payload, {"kind": "x"}, mode=mode)
        sent += 1
    return sent


async def _read(events: Subscription, delays: list[float]) -> None:
    async for batches in events.batches():
        now = time.monotonic_ns()
        for batch in batches:
            if not isinstance(batch, Gap):
                stamps = (batch.payload(row)[:8] for row in range(batch.count))
                delays += [(now - int.from_bytes(stamp, "big")) / 1_000 for stamp in stamps]
