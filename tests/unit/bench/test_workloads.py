"""The workloads of `postroad bench` themselves, small, against a real broker; no figure is judged."""

from __future__ import annotations

import subprocess
import sys

import pytest

from postroad.bench import workloads
from postroad.bench.processes import Running
from postroad.bench.sessions import SUBSCRIBE_CHUNK
from postroad.bench.systems import SYSTEMS
from postroad.errors import PeerError, UnavailableError

OURS = SYSTEMS["postroad"]


def saying(line: str) -> subprocess.Popen[str]:
    program = f"print({line!r})" if line else ""
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def test_what_a_load_process_says() -> None:
    with saying('{"sent": 3, "late_p99_us": 1.5}') as process:
        assert workloads._hear(process) == {"sent": 3.0, "late_p99_us": 1.5}
    with saying('{"error": "lost 3 of 5"}') as process, pytest.raises(PeerError, match="lost 3 of 5"):
        workloads._hear(process)
    with saying("") as process, pytest.raises(UnavailableError, match="ended without an answer"):
        workloads._hear(process)


def test_a_load_process_ends_with_its_workload() -> None:
    task = workloads._fanout(OURS, 1.0, Running(addresses=[("127.0.0.1", 1)]))
    with workloads._loading(task) as process:
        pass
    assert process.poll() is not None


def test_a_paced_workload_gives_all_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "RATE", 200)  # so that a busy machine keeps up
    figures = workloads.latency(OURS, 0.5)
    assert figures.keys() == {
        *("p50_us", "p99_us", "max_us", "events_per_s", "cpu_us_per_event", "broker_cores"),
        *("load_cores", "sender_late_p99_us", "lost"),
    }
    assert 0 < figures["p50_us"] <= figures["p99_us"] <= figures["max_us"]
    assert figures["events_per_s"] > 0


def test_memory_is_measured_with_all_connections_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "FILL_CONNECTIONS", 20)
    monkeypatch.setattr(workloads, "IDLE_CONNECTIONS", 20)
    monkeypatch.setattr(workloads, "SUBSCRIPTIONS", 4 * SUBSCRIBE_CHUNK)
    monkeypatch.setattr(workloads, "SUBSCRIPTIONS_PER_CONNECTION", SUBSCRIBE_CHUNK)
    figures = workloads.memory(OURS, 0.2)
    assert figures.keys() == {"bytes_per_connection", "bytes_per_subscription", "start_bytes"}
    assert figures["bytes_per_subscription"] > 0
