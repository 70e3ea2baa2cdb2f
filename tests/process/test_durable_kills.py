"""Kill -9 of each role in turn under load: what was acknowledged is what every subscriber got (D12; issue 3).

Three brokers in a line: the publisher's, one in between, the subscribers'. A publisher numbers its events and
writes down what was acknowledged. One subscriber keeps its token and what it got in one file, replaced in one
step. For another its broker keeps the token. Both are processes, and are killed like the brokers.

POSTROAD_KILL_ROUNDS says how often each role is killed: once in `make test`, more in a soak.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.process_clients import reachable, run
from tests.worlds.processes import SOURCE, BrokerProcess, Brokers, wait_until

import postroad

ROUNDS = int(os.environ.get("POSTROAD_KILL_ROUNDS", "1"))
PATIENCE_S = 120.0  # for anything: a busy machine is slow, and a hang is what fails

# Appends what it got to a file. A crash may tear the last line: it is cut off, and its event comes again.
OWN_TOKEN = """
import json, os, sys, postroad
address, path = sys.argv[1:]
with open(path, "a+") as log:
    log.seek(0)
    lines = log.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\\n")]
    log.truncate(sum(map(len, whole)))
    token = json.loads(whole[-1])["token"] if whole else ""
    with postroad.sync.connect(address, timeout=120) as client:
        with client.subscribe("t", durable="own", token=token) as events:
            if not whole:
                log.write(json.dumps({"token": events.token}) + "\\n")
                log.flush()
            for count, event in enumerate(events):
                row = {"token": events.token}
                if isinstance(event, postroad.Gap):
                    row["gap"] = [event.pubend, event.start, event.end]
                else:
                    row["got"] = event.payload.decode()
                log.write(json.dumps(row) + "\\n")
                log.flush()
                if count % 100 == 99:
                    events.ack()
"""
# Its broker keeps the token: an event whose acknowledgement died with somebody comes again.
KEPT_TOKEN = """
import sys, postroad
address, path, name, ack = sys.argv[1:]
with open(path, "a") as log, postroad.sync.connect(address, timeout=120) as client:
    with client.subscribe("t", durable=name, ack=ack) as events:
        log.write("ready\\n")
        log.flush()
        for event in events:
            log.write("gap\\n" if isinstance(event, postroad.Gap) else event.payload.decode() + "\\n")
            log.flush()
            if ack == "manual":
                events.ack(event)
"""


class Subscriber:
    """A process that is killed and started again."""

    def __init__(self, program: str, *arguments: str) -> None:
        self._command = [sys.executable, "-c", program, *arguments]
        self.log = Path(arguments[1])
        self.process: subprocess.Popen[bytes] | None = None
        self.began = False
        self._got: list[str] = []
        self._read = 0  # bytes of the log

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, env=os.environ | {"PYTHONPATH": str(SOURCE)})

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def got(self) -> list[str]:
        assert self.process is not None
        assert self.process.poll() is None, "a subscriber ended by itself"
        data = self.log.read_bytes() if self.log.exists() else b""
        whole = data.rfind(b"\n") + 1
        for line in data[self._read : whole].decode().splitlines():
            self.began = True
            self._note(line)
        self._read = whole
        return self._got

    def _note(self, line: str) -> None:
        raise NotImplementedError


class OwnToken(Subscriber):
    def _note(self, line: str) -> None:
        row = json.loads(line)
        assert "gap" not in row
        if "got" in row:
            self._got.append(row["got"])


class KeptToken(Subscriber):
    """What comes again after a crash must be what came just before it, and is counted once."""

    repeated = 0  # events, at most, that came again after one crash

    def _note(self, line: str) -> None:
        assert line != "gap"
        if line == "ready":
            return
        found = self._got
        if found and int(line) <= int(found[-1]):
            at = len(found) - 1 - found[::-1].index(line)  # ValueError: it comes late
            self.repeated = max(self.repeated, len(found) - at)
            del found[at:]
        found.append(line)


class Publisher:
    """Publishes numbers, several at a time, whoever dies; in order of their receipts."""

    def __init__(self, address: str) -> None:
        self.acknowledged: list[int] = []
        self.stopped = False
        self._address = address

    async def run(self) -> None:
        async with postroad.connect(self._address, name="publisher", timeout=PATIENCE_S) as client:
            number = 0
            while not self.stopped:
                batch = list(range(number, number + 10))
                await client.publish_many((("t", str(n)) for n in batch), mode="durable")
                self.acknowledged += batch
                number += 10
                await asyncio.sleep(0.02)


@pytest.fixture
def subscribers() -> Iterator[list[Subscriber]]:
    made: list[Subscriber] = []
    yield made
    for one in made:
        one.kill()


async def until(holds: Any, what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up, f"{what}: not within {PATIENCE_S} s"
        await asyncio.sleep(0.05)


async def nobody_lags(address: str, names: tuple[str, ...]) -> None:
    """Everything that was consumed is acknowledged, sooner or later."""
    lags = dict.fromkeys(names, 1)
    give_up = time.monotonic() + PATIENCE_S
    async with postroad.connect(address) as client:
        while any(lags.values()):
            assert time.monotonic() < give_up, f"they lag behind: {lags}"
            await asyncio.sleep(0.1)
            rows = (await client.request("subs"))["subscriptions"]
            lags = {row["name"]: row["lag_events"] for row in rows if row["name"] in names}


@pytest.mark.timeout(60 + 600 * ROUNDS)
def test_kill_9_each_role_in_turn_under_load(
    brokers: Brokers, subscribers: list[Subscriber], tmp_path: Path
) -> None:
    """D3, D12."""
    publishing, middle, hosting = brokers.line(3)
    run(reachable(hosting.address, 3))
    own = OwnToken(OWN_TOKEN, hosting.address, str(tmp_path / "own"))
    auto = KeptToken(KEPT_TOKEN, hosting.address, str(tmp_path / "auto"), "auto", "auto")
    manual = KeptToken(KEPT_TOKEN, hosting.address, str(tmp_path / "manual"), "manual", "manual")
    subscribers += [own, auto, manual]
    for one in subscribers:
        one.start()
    for one in subscribers:
        wait_until(lambda one=one: one.got() == [] and one.began, "it begins", PATIENCE_S)

    async def work() -> None:
        publisher = Publisher(publishing.address)
        task = asyncio.ensure_future(publisher.run())

        async def progress(count: int) -> None:
            """Everybody gets this many more."""
            reach = (publisher.acknowledged or [0])[-1] + count
            await until(lambda: task.done() or (publisher.acknowledged or [0])[-1] >= reach, "publishing")
            if task.done():
                task.result()
            for one in (own, auto, manual):
                await until(lambda one=one: int((one.got() or ["0"])[-1]) >= reach, f"{one.log.name} gets")

        await progress(100)
        for _ in range(ROUNDS):
            victims: list[BrokerProcess | Subscriber] = [publishing, middle, hosting, own, auto, manual]
            for victim in victims:
                victim.kill()
                await asyncio.sleep(0.3)
                victim.start()
                await progress(100)
        publisher.stopped = True
        await task
        expected = [str(n) for n in publisher.acknowledged]
        for one in (own, auto, manual):
            await until(lambda one=one: len(one.got()) >= len(expected), f"{one.log.name} gets the last")
        await asyncio.sleep(0.5)
        for one in (own, auto, manual):
            assert one.got() == expected, one.log.name
        assert manual.repeated <= 1, "what was confirmed never comes again"
        await nobody_lags(hosting.address, ("auto", "manual"))

    run(work(), 60 + 600 * ROUNDS)
