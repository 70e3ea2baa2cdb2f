"""The workloads, each one function: start a system, load it, give its figures back."""

from __future__ import annotations

import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from postroad.bench.load import Task
from postroad.bench.processes import Running, cpu_seconds, resident_bytes
from postroad.bench.sessions import SUBSCRIBE_CHUNK, Session
from postroad.bench.systems import System, serving
from postroad.errors import PeerError, UnavailableError

Figures = dict[str, float]

PAYLOAD_BYTES: Final = 250
BURST_EVENTS: Final = 64  # events a busy publisher hands over in one send
MISSED_EVENTS: Final = 20_480  # by those who catch up
WARM_S: Final = 1.0
LINE_WARM_S: Final = 3.0  # several brokers first find each other
RATE: Final = 5_000
IDLE_CONNECTIONS: Final = 1_000
FILL_CONNECTIONS: Final = 3_000  # opened first: they use up what a server freed after its start
SUBSCRIPTIONS: Final = 100_000
SUBSCRIPTIONS_PER_CONNECTION: Final = 10_000


@contextmanager
def _loading(task: Task, module: str = "load") -> Iterator[subprocess.Popen[str]]:
    """A load process that has been told its task."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"postroad.bench.{module}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _tell(process, msgspec.json.encode(task).decode())
        yield process
    finally:
        process.kill()
        process.communicate()


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> Figures:
    """The next figures a load process prints; none when it only says that it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise UnavailableError("a load process ended without an answer; what it printed says why")
    answer = msgspec.json.decode(line, type=dict[str, float | str])
    if "error" in answer:
        raise PeerError(str(answer["error"]))
    return {name: float(value) for name, value in answer.items()}


def _fanout(system: System, seconds: float, running: Running) -> Task:
    return Task(
        what="fanout",
        system=system.name,
        address=running.addresses[0],
        publishers=4,
        subscribers=100,
        topics=4,
        payload=PAYLOAD_BYTES,
        burst=BURST_EVENTS,
        in_flight=system.in_flight,
        warm_s=WARM_S,
        seconds=seconds,
        pids=tuple(running.pids()),
    )


def fanout(system: System, seconds: float, brokers: int = 1) -> Figures:
    """4 publishers, 4 topics, 100 subscribers, as fast as nothing is dropped."""
    with serving(system, brokers) as running, _loading(_fanout(system, seconds, running)) as process:
        return _hear(process)


def durable(system: System, seconds: float, brokers: int = 1) -> Figures:
    """The same with durable subscriptions; then 1 and 25 of them catch up with what they missed."""
    with serving(system, brokers) as running:
        task = msgspec.structs.replace(
            _fanout(system, seconds, running), missed=MISSED_EVENTS, folder=str(running.logs[0].parent)
        )
        with _loading(task, "durable_load") as process:
            return _hear(process)


def _open_loop(system: System, seconds: float, task: Task, brokers: int) -> Figures:
    with serving(system, brokers) as running:
        if brokers > 1:
            time.sleep(LINE_WARM_S)  # a subscription is in force at the brokers that are linked by then
        return _loaded(running, seconds, task)


def _loaded(
    running: Running, seconds: float, task: Task, each_second: Callable[[], None] = lambda: None
) -> Figures:
    first = msgspec.structs.replace(task, what="publish", address=running.addresses[0])
    last = msgspec.structs.replace(task, what="subscribe", address=running.addresses[-1])
    with _loading(last) as receiver, _loading(first) as sender:
        for process in (receiver, sender):
            _hear(process)
        begin = time.monotonic() + WARM_S
        end = begin + seconds
        for process in (receiver, sender):
            _tell(process, f"{int(begin * 1e9)} {int(end * 1e9)}")
        pids = running.pids()
        time.sleep(max(0.0, begin - time.monotonic()))
        before, load_before = cpu_seconds(pids), cpu_seconds((receiver.pid, sender.pid))
        while (left := end - time.monotonic()) > 0:
            each_second()
            time.sleep(min(1.0, left))
        each_second()
        used = cpu_seconds(pids) - before
        load_used = cpu_seconds((receiver.pid, sender.pid)) - load_before
        got, sent = _hear(receiver), _hear(sender)
    return {
        "p50_us": got["p50_us"],
        "p99_us": got["p99_us"],
        "max_us": got["max_us"],
        "events_per_s": sent["sent"] / seconds,
        "cpu_us_per_event": used * 1e6 / sent["sent"],
        "broker_cores": used / seconds,
        "load_cores": load_used / seconds,
        "sender_late_p99_us": sent["late_p99_us"],
        "lost": sent["sent"] - got["received"],
    }


def _paced(system: System) -> Task:
    return Task(
        what="publish",
        system=system.name,
        address=("", 0),
        publishers=1,
        subscribers=1,
        topics=1,
        payload=PAYLOAD_BYTES,
        rate=RATE,
    )


def latency(system: System, seconds: float, brokers: int = 1) -> Figures:
    """5,000 events a second, one at a time, through a line of brokers to one subscriber at its end."""
    return _open_loop(system, seconds, _paced(system), brokers)


def latency_at(system: System, running: Running, seconds: float) -> Figures:
    """The same, of brokers that run already."""
    return _loaded(running, seconds, _paced(system))


class Beside(NamedTuple):
    """What one of several servers did that were loaded at once."""

    latencies: npt.NDArray[np.int64]  # per event (when it left, how long it took) in ns
    cpu: npt.NDArray[np.float64]  # seconds it used in each second, about


def beside(
    system: System, running: Sequence[Running], seconds: float, rate: int
) -> tuple[list[Beside], float]:
    """Servers loaded at once, each at that rate; and how many events were lost.

    An event goes to one of them, the next to another, in an order that changes with each time around.
    """
    task = msgspec.structs.replace(
        _paced(system), beside=tuple(peer.addresses[0] for peer in running), rate=rate * len(running)
    )
    pids = [peer.pids() for peer in running]
    used: list[list[float]] = []
    with TemporaryDirectory(prefix="postroad-bench-") as folder:
        task = msgspec.structs.replace(task, folder=folder)
        figures = _loaded(running[0], seconds, task, lambda: used.append([cpu_seconds(own) for own in pids]))
        latencies = [np.load(Path(folder) / f"latency-{number}.npy") for number in range(len(running))]
    cpu = np.diff(np.array(used), axis=0)
    return [Beside(taken, cpu[:, number]) for number, taken in enumerate(latencies)], figures["lost"]


def topics(system: System, seconds: float, brokers: int = 1) -> Figures:
    """200 publishers that go round 500 topics, a subscriber on each, 5,000 events a second in all."""
    task = Task(
        what="publish",
        system=system.name,
        address=("", 0),
        publishers=200,
        subscribers=500,
        topics=500,
        payload=PAYLOAD_BYTES,
        rate=RATE,
    )
    return _open_loop(system, seconds, task, brokers)


def memory(system: System, seconds: float, brokers: int = 1) -> Figures:
    """Resident memory that idle connections and then subscriptions add; `seconds` to settle in between."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sessions: list[Session] = []
    try:
        with serving(system, brokers) as running:
            address = running.addresses[0]
            start = resident_bytes(running.pids())
            sessions += [system.session.connect(address) for _ in range(FILL_CONNECTIONS)]
            _attend(sessions, seconds)
            filled = resident_bytes(running.pids())
            sessions += [system.session.connect(address) for _ in range(IDLE_CONNECTIONS)]
            _attend(sessions, seconds)
            connected = resident_bytes(running.pids())
            # Connections that were idle take the subscriptions, so that only those add memory.
            for base in range(0, SUBSCRIPTIONS, SUBSCRIBE_CHUNK):
                session = sessions[base // SUBSCRIPTIONS_PER_CONNECTION]
                session.subscribe([session.topic(topic) for topic in range(base, base + SUBSCRIBE_CHUNK)])
                _attend(sessions, 0)
            _attend(sessions, seconds)
            subscribed = resident_bytes(running.pids())
    finally:
        for session in sessions:
            session.close()
    return {
        "bytes_per_connection": (connected - filled) / IDLE_CONNECTIONS,
        "bytes_per_subscription": (subscribed - connected) / SUBSCRIPTIONS,
        "start_bytes": float(start),
    }


def _attend(sessions: Sequence[Session], seconds: float) -> None:
    """Keeps idle connections alive for that long, and reads at least once what has come on them."""
    poll = select.poll()
    by_descriptor = {session.socket.fileno(): session for session in sessions}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    end = time.monotonic() + seconds
    while True:
        for descriptor, _ in poll.poll(min(100, seconds * 1000)):
            by_descriptor[descriptor].attend()
        if time.monotonic() >= end:
            return
