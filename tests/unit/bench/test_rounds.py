"""Rounds, figures, and the loop that makes them."""

from __future__ import annotations

import io
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from postroad.bench import load, processes, rounds, table
from postroad.bench.sessions import Mqtt
from postroad.bench.systems import SYSTEMS, chosen
from postroad.cli import main
from postroad.errors import PeerError, UnavailableError, UsageError


def test_summary_has_medians_and_spread() -> None:
    row = rounds.summary([{"p50_us": 3.0}, {"p50_us": 1.0}, {"p50_us": 8.0}])
    assert row == {"p50_us": 3.0, "spread": {"p50_us": [1.0, 8.0]}, "rounds": 3}
    assert table.cells(row, "p50_us") == ["3", "1", "8"]
    assert table.cells({"p50_us": 3.0}, "p50_us") == ["3"]


def test_rounds_alternate_and_a_failure_stops_only_its_own_case() -> None:
    calls: list[str] = []

    def good() -> dict[str, float]:
        calls.append("good")
        return {"p50_us": float(len(calls))}

    def bad() -> dict[str, float]:
        calls.append("bad")
        raise PeerError("it broke")

    cases = [
        rounds.Case(system=SYSTEMS["postroad"], workload="w", run=bad),
        rounds.Case(system=SYSTEMS["postroad"], workload="w", run=good),
        rounds.Case(system=SYSTEMS["postroad"], workload="v", run=good),
    ]
    told: list[str] = []
    rows = rounds.alternate(cases, 3, told.append)
    assert calls == ["bad", "good", "good", "good", "good", "good", "good"]
    assert len(told) == 7
    assert rows[0]["error"] == "it broke"
    assert rows[1]["spread"]["p50_us"] == [2.0, 6.0]
    assert {"version", "settings", "syncs"} <= set(rows[2])


def test_unknown_systems_are_named() -> None:
    with pytest.raises(UsageError, match="carrier-pigeon"):
        chosen("postroad,carrier-pigeon", ())


def test_the_command_line_refuses_unknown_systems_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fanout", "--systems", "carrier-pigeon"]) == 2
    said = capsys.readouterr().err
    assert "carrier-pigeon" in said
    assert said.count("\n") == 1


def test_every_plan_gives_cases_for_what_is_installed() -> None:
    for name in rounds.PLANS:
        cases, settings = rounds.cases(name, "postroad", 1.0)
        assert [case.system.name for case in cases] == ["postroad"] * len(cases)
        assert settings["seconds"] == 1.0
    assert [case.workload for case in rounds.cases("latency", "postroad", 1.0)[0]] == [
        "1 broker",
        "3 brokers in a line",
        "5 brokers in a line",
    ]


def test_rows_are_shown_with_versions_settings_and_errors() -> None:
    row = {"system": "nats", "workload": "w", "version": "2", "settings": "defaults", "syncs": "nothing"}
    good = {**row, **rounds.summary([{"deliveries_per_s": 2e6}, {"deliveries_per_s": 4e6}])}
    bad = {**row, "workload": "v", "error": "7 of 9 deliveries never came"}
    output = io.StringIO()
    table.show("fanout", [good, bad], {"rounds": 2}, Console(file=output, width=80))
    text = output.getvalue()
    for expected in ("thousand deliveries/s", "never came", "nats 2: defaults", "rounds: 2"):
        assert expected in text
    (line,) = (line for line in text.splitlines() if "nats, w" in line)
    assert line.replace("│", " ").split() == ["nats,", "w", "3,000", "2,000", "4,000"]


def test_processes_are_measured_and_ended(tmp_path: Path) -> None:
    running = processes.Running()
    script = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c',"
        " 'import time; time.sleep(60)']); print('ready x 127.0.0.1:99', flush=True)\n"
        "while True: pass"
    )
    try:
        running.wait_ready(running.spawn([sys.executable, "-c", script], tmp_path))
        assert running.addresses == [("127.0.0.1", 99)]
        pids = running.pids()
        assert len(pids) == 2
        before = processes.cpu_seconds(pids)
        time.sleep(0.3)
        assert processes.cpu_seconds(pids) - before > 0.01
        assert processes.cpu_seconds([1 << 22]) == 0  # no process has that number
        assert processes.resident_bytes(pids) > 1 << 20
    finally:
        running.stop()
    assert running.processes[0].returncode is not None
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    """Whether it still runs; who reaps an orphan, and when, is not ours to say."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_server_that_ends_at_once_says_its_last_words(tmp_path: Path) -> None:
    running = processes.Running()
    log = running.spawn([sys.executable, "-c", "print('no such option')"], tmp_path)
    with pytest.raises(UnavailableError, match="no such option"):
        running.wait_ready(log)
    running.stop()


class Relay(threading.Thread):
    """The smallest MQTT broker: hands every published packet to every subscriber, or loses some."""

    def __init__(self, *, lose_from: int | None = None) -> None:
        super().__init__(daemon=True)
        self.lose_from = lose_from
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()
        self.done = threading.Event()

    def run(self) -> None:
        poll = selectors.DefaultSelector()
        poll.register(self.listener, selectors.EVENT_READ)
        subscribers: list[socket.socket] = []
        connections: list[socket.socket] = []
        passed = 0
        while not self.done.is_set():
            for key, _ in poll.select(0.05):
                if key.fileobj is self.listener:
                    connection, _address = self.listener.accept()
                    connection.recv(14)
                    connection.sendall(b"\x20\x02\x00\x00")
                    poll.register(connection, selectors.EVENT_READ)
                    connections.append(connection)
                    continue
                source = key.fileobj
                assert isinstance(source, socket.socket)
                data = source.recv(65536)
                if not data:
                    poll.unregister(source)
                elif data[0] == 0x82:
                    source.sendall(b"\x90\x03\x00\x01\x00")
                    subscribers.append(source)
                else:
                    passed += len(data)
                    for number, target in enumerate(subscribers):
                        if number or self.lose_from is None or passed < self.lose_from:
                            target.sendall(data)
        for one in [*connections, self.listener]:
            one.close()
        poll.close()


@pytest.fixture
def relays() -> Iterator[list[Relay]]:
    started: list[Relay] = []
    yield started
    for relay in started:
        relay.done.set()
        relay.join()


def _task(relay: Relay) -> load.Task:
    return load.Task(
        what="fanout",
        system="mosquitto",
        address=relay.address,
        publishers=1,
        subscribers=3,
        topics=1,
        payload=100,
        burst=8,
        in_flight=64,
        warm_s=0.1,
        seconds=0.2,
        pids=(os.getpid(),),
    )


def _close(fanout: load.Fanout) -> None:
    for connection in fanout.subscribers + fanout.publishers:
        connection.session.close()
    fanout.poll.close()


def test_fanout_counts_every_delivery_and_keeps_its_window(relays: list[Relay]) -> None:
    relays.append(Relay())
    relays[0].start()
    fanout = load.Fanout(_task(relays[0]), Mqtt)
    figures = fanout.run()
    assert figures["deliveries"] == 3 * fanout.sent[0] > 0
    assert figures["deliveries_per_s"] > 0
    assert [c.events for c in fanout.subscribers] == [fanout.sent[0]] * 3
    fanout.sent[0] += 64  # as if a whole window were on its way
    fanout.pump()
    assert fanout.sent[0] == fanout.subscribers[0].events + 64
    _close(fanout)


def test_fanout_says_when_deliveries_are_lost(relays: list[Relay], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "STALL_S", 0.3)
    packet = len(struct.pack(">BBH", 0, 0, 0)) + len("bench/t000000") + 100
    relays.append(Relay(lose_from=20 * packet))
    relays[0].start()
    fanout = load.Fanout(_task(relays[0]), Mqtt)
    with pytest.raises(PeerError, match="never came"):
        fanout.run()
    _close(fanout)
