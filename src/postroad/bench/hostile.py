"""`postroad bench hostile`: an honest publisher and subscriber beside each attack, one after the other.

The honest ones have a principal of their own, as the attacker has; plain and durable events alternate at a
steady rate. Delays are taken before, during and after each attack, beside the memory of the broker. Each
attack has a broker of its own, so that none profits from what another one left behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from postroad.bench.attacks import ATTACKS, HONEST
from postroad.bench.processes import Running, free_port, resident_bytes
from postroad.client.aio import Client, connect
from postroad.client.subscription import Subscription
from postroad.errors import BugError, UsageError
from postroad.events import Event
from postroad.units import MIB

EVERY_S: Final = 0.005  # between two honest events
SETTLE_S: Final = 1.0  # after an attack, before it counts as over
DRAIN_S: Final = 20.0  # for what is still on its way at the end
TOKENS: Final = {"honest": "honest-token", "attacker": "attacker-token"}
PHASES: Final = ("before", "during", "after")
AIM_US: Final = 100_000
AIM_RATIO: Final = 10
AIM_MEMORY: Final = 1.1
MODES: Final = ("plain", "durable")


def chosen(names: str) -> list[str]:
    """The attacks whose names hold one of these words; all where there is none."""
    words = [word.strip() for word in names.split(",") if word.strip()]
    attacks = [name for name in ATTACKS if not words or any(word in name for word in words)]
    if not attacks:
        raise UsageError(f"no attack is called {names!r}; there are: {'; '.join(ATTACKS)}")
    return attacks


def run(attacks: Sequence[str], seconds: float, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for name in attacks:
        tell(name)
        with tempfile.TemporaryDirectory(prefix="postroad-hostile-") as folder:
            rows.append(_beside(name, Path(folder), seconds))
    return rows


def _beside(name: str, folder: Path, seconds: float) -> dict[str, Any]:
    running = Running()
    http = f"127.0.0.1:{free_port()}"
    tokens = "".join(
        f'{principal} = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
        for principal, token in TOKENS.items()
    )
    config = folder / "broker.toml"
    config.write_text(f"[auth.tokens]\n{tokens}")
    command = [sys.executable, "-m", "postroad", "up", "--name", "b1", "--listen", "127.0.0.1:0"]
    command += ["--data", str(folder / "data"), "--metrics", http, "--config", str(config)]
    try:
        running.wait_ready(running.spawn(command, folder))
        host, port = running.addresses[0]
        figures = asyncio.run(_measure(running, f"{host}:{port}", http, name, seconds))
    finally:
        running.stop()
    return {"system": "postroad", "workload": name, "rounds": 1, **figures}


class _Honest:
    """Publishes at a steady rate and notes how long each event takes to come back, by mode and phase."""

    def __init__(self) -> None:
        self.phase = "before"
        self.delays: dict[tuple[str, str], list[int]] = {(m, p): [] for m in MODES for p in PHASES}
        self.got: dict[str, list[int]] = {mode: [] for mode in MODES}
        self.published: dict[str, int] = dict.fromkeys(MODES, 0)
        self.stop = False

    async def publish(self, client: Client, mode: str) -> None:
        at = time.monotonic()
        while not self.stop:
            number = self.published[mode]
            self.published[mode] += 1
            said = json.dumps([number, time.monotonic_ns() // 1_000, self.phase])
            await client.publish(f"honest/{mode}", said, mode=mode)
            at = max(at + EVERY_S, time.monotonic() - 1)  # what was late is made up for, up to a second of it
            await asyncio.sleep(max(0.0, at - time.monotonic()))

    async def read(self, events: Subscription, mode: str) -> None:
        async for event in events:
            if isinstance(event, Event):
                number, said_us, phase = json.loads(event.payload)
                self.got[mode].append(number)
                self.delays[mode, phase].append(time.monotonic_ns() // 1_000 - said_us)

    def lost(self) -> int:
        """Events that did not come, came twice or out of order."""
        return sum(
            self.published[mode] - len(set(self.got[mode])) + (self.got[mode] != sorted(set(self.got[mode])))
            for mode in MODES
        )

    def p99_us(self, phase: str) -> dict[str, float]:
        figures = {}
        for mode in MODES:
            delays = self.delays[mode, phase]
            figures[f"{mode}_p99_us_{phase}"] = float(np.percentile(delays, 99)) if delays else float("nan")
        return figures


async def _measure(
    running: Running, address: str, http: str, name: str, seconds: float
) -> dict[str, float | bool]:
    honest, pids = _Honest(), running.pids()
    token = TOKENS["honest"]
    async with (
        connect(address, token=token) as publisher,
        connect(address, token=token) as durable_publisher,
        connect(address, token=token) as reader,
        reader.subscribe("honest/plain") as plain,
        reader.subscribe("honest/durable", durable=HONEST, ack="auto") as durable,
    ):
        reading = [
            asyncio.ensure_future(honest.read(plain, "plain")),
            asyncio.ensure_future(honest.read(durable, "durable")),
        ]
        publishing = [
            asyncio.ensure_future(honest.publish(publisher, "plain")),
            asyncio.ensure_future(honest.publish(durable_publisher, "durable")),
        ]
        memory = {}
        await asyncio.sleep(seconds)
        memory["before"] = resident_bytes(pids)
        honest.phase = "during"
        arguments = [name, address, http, TOKENS["attacker"], str(seconds)]
        attack = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "postroad.bench.attacks",
            *arguments,
            start_new_session=True,
            stdout=asyncio.subprocess.PIPE,
        )
        ended = asyncio.ensure_future(attack.communicate())
        try:
            memory["during"] = 0
            while not ended.done():
                memory["during"] = max(memory["during"], resident_bytes(pids))
                await asyncio.wait([ended], timeout=0.05)
        finally:
            if not ended.done():
                attack.kill()
            await ended
        said, _ = ended.result()
        if attack.returncode:
            raise BugError(f"the attack {name!r} ended with code {attack.returncode}: it shows nothing")
        await asyncio.sleep(SETTLE_S)
        honest.phase = "after"
        await asyncio.sleep(seconds)
        honest.stop = True
        await asyncio.gather(*publishing)
        deadline = time.monotonic() + DRAIN_S
        while honest.lost() and time.monotonic() < deadline:  # noqa: ASYNC110 -- it looks at what came
            await asyncio.sleep(0.05)
        memory["after"] = resident_bytes(pids)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    figures: dict[str, float | bool] = {}
    for phase in PHASES:
        figures |= honest.p99_us(phase)
    figures |= {f"memory_{phase}": float(size) for phase, size in memory.items()}
    figures["begun"] = int(said)  # often: the broker ends the attacker's connections
    figures["lost"] = honest.lost()
    figures["met"] = _meets_aims(figures)
    return figures


def _meets_aims(figures: dict[str, float | bool]) -> bool:
    """The aims: p99 under 100 ms and ten times that before, memory back within 10%, nothing lost."""
    quick = all(
        figures[f"{mode}_p99_us_during"] <= min(AIM_US, AIM_RATIO * figures[f"{mode}_p99_us_before"])
        for mode in MODES
    )
    return quick and not figures["lost"] and figures["memory_after"] <= AIM_MEMORY * figures["memory_before"]


def show(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each attack: delays in ms and memory in MiB, before, during and after it."""
    lines = []
    for row in rows:
        delays = [
            " / ".join(f"{row[f'{mode}_p99_us_{phase}'] / 1000:.1f}" for phase in PHASES) for mode in MODES
        ]
        memory = " / ".join(f"{row[f'memory_{phase}'] / MIB:.0f}" for phase in PHASES)
        lines.append((row["workload"], *delays, memory, f"{row['lost']:.0f}", "yes" if row["met"] else "no"))
    return lines
