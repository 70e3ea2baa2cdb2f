"""Best effort and repair by the commands that people type: brokers, a cache, a publisher and a subscriber are
processes in network namespaces, between which packets are lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.namespaces import Hub, need_namespaces
from tests.worlds.processes import SOURCE

READY_S = 60
EVENTS = 200
LOSS = 0.03  # of the packets between two namespaces
EVERY_S = 0.003  # between two events
SITES = ("first", "second", "reader")


class Site:
    """Runs commands in the namespaces of a hub; all of them end with it."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub = hub
        self.folder = folder
        self._environment = os.environ | {"PYTHONPATH": str(SOURCE), "POSTROAD_TOKEN": "users"}
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, site: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.hub.sites[site].command([sys.executable, "-m", "postroad", *arguments]),
            text=True,
            env=self._environment,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )
        self._processes.append(process)
        return process

    def broker(self, site: str, *arguments: str) -> str:
        with (self.folder / f"{site}.log").open("w") as log:
            process = self.start(
                site,
                *("up", "--name", site, "--listen", f"{self.hub.hosts[site]}:7420", "--metrics", "off"),
                *("--data", str(self.folder / site), "--token", "users", "--link-token", "brokers"),
                *arguments,
                stderr=log,
            )
        assert process.stdout is not None
        return process.stdout.readline().split()[2]

    def ask(self, site: str, *arguments: str) -> Any:
        done = subprocess.run(
            self.hub.sites[site].command([sys.executable, "-m", "postroad", *arguments, "--json"]),
            capture_output=True,
            text=True,
            env=self._environment,
            timeout=READY_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(READY_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Site]:
    need_namespaces()
    hub = Hub(SITES)
    running = Site(hub, tmp_path)
    try:
        yield running
    finally:
        running.end()
        hub.close()


@pytest.mark.soak
def test_what_is_lost_between_processes_is_repaired(sites: Site, until: Callable[..., None]) -> None:
    """B1, B7: by way of two brokers; the publisher lives on until all has come."""
    sites.hub.connect(lambda _one, _other: 0.2, LOSS)
    first = sites.broker("first")
    second = sites.broker("second", "--link", first)
    until(lambda: len(sites.ask("second", "status", "--broker", second)["brokers"]) == 2, "they are linked")
    cache = sites.start("first", "cache", "--topic", "orders/#", "--broker", first)
    reading = ("--repair", "--order", "20", "--count", str(EVENTS), "--timeout", "60", "--json")
    with (sites.folder / "events").open("w") as file:
        reader = sites.start(
            "reader", "sub", "orders/#", "--where", "kind = 'x'", *reading, "--broker", second, stdout=file
        )
    for process, word in ((cache, "caching"), (reader, "subscribed")):
        assert process.stderr is not None
        assert process.stderr.readline().startswith(word)
    said = ("--stdin", "--best-effort", "--attr", "kind=x", "--broker", first)
    publisher = sites.start(
        "first", "pub", "orders/eu", *said, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert publisher.stdin is not None
    for number in range(EVENTS):
        publisher.stdin.write(f"{number}\n")
        publisher.stdin.flush()
        time.sleep(EVERY_S)
    assert reader.wait(READY_S) == 0
    assert reader.stderr is not None
    repair = json.loads(reader.stderr.readline())["repair"]
    assert repair["recovered"] == repair["losses_detected"] > 0
    assert repair["given_up"] == 0
    events = [json.loads(line) for line in (sites.folder / "events").read_text().splitlines()]
    assert [int(event["payload"]) for event in events] == list(range(EVENTS))
