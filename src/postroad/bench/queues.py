"""`bench queues`: three brokers, three copies of each message, 250 bytes, confirmed when they are kept.

Postroad's transactional messages beside RabbitMQ's quorum queues and JetStream's streams of three replicas,
by default and with `sync_interval: always`. A closed loop: each queue has a connection of its own, on the
brokers in turn, and so many messages on their way. Nobody receives: afterwards each queue must have exactly
what was confirmed. Then the broker that answers for a queue is killed (kill -9), with the sender connected
there, and once more with the sender connected elsewhere: how long until a message is confirmed again. At last
it is only stopped (SIGSTOP), as if its machine had fallen silent: no connection says so.
"""

from __future__ import annotations

import select
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

from postroad.bench.amqp import Amqp
from postroad.bench.durable_sessions import JetStream
from postroad.bench.native import Native
from postroad.bench.processes import Running, cpu_seconds, free_port
from postroad.bench.queue_senders import (
    ANSWER_S,
    READY_S,
    JetStreamSender,
    PostroadSender,
    RabbitSender,
    Sender,
)
from postroad.bench.rounds import Row, described, summary
from postroad.bench.systems import (
    System,
    chosen,
    own_version,
    program,
    rabbit_version,
    serving,
    start_postroad,
    start_rabbit,
    version,
)
from postroad.errors import PeerError, PostroadError, UnavailableError

BROKERS: Final = 3
MAX_MESSAGES: Final = 60_000  # per queue and workload: an inbox has a limit, and nobody receives
MADE_AT: Final = 1  # the broker, by its place, where the queue is made whose broker is killed
STALL_S: Final = 30.0
GONE_S: Final = 60.0  # without service, at most


class Workload(NamedTuple):
    name: str
    queues: int
    outstanding: int  # messages of each queue on their way


WORKLOADS: Final = (
    Workload("1 queue, one at a time", 1, 1),
    Workload("1 queue, 256 outstanding", 1, 256),
    Workload("20 queues, 1 outstanding each", 20, 1),
    Workload("20 queues, 16 outstanding each", 20, 16),
)
KILLED_THERE: Final = "kill -9 of the broker in charge, client there"
KILLED_ELSEWHERE: Final = "kill -9 of the broker in charge, client elsewhere"
SILENT: Final = "SIGSTOP of the broker in charge, client elsewhere"


def _start_jetstream(sync: str) -> Callable[[Running, Path, int], None]:
    def start(running: Running, folder: Path, brokers: int) -> None:
        ports = [free_port() for _ in range(brokers)]
        routes = [free_port() for _ in range(brokers)]
        urls = ", ".join(f"nats://127.0.0.1:{port}" for port in routes)
        started = []
        for number, (port, route) in enumerate(zip(ports, routes, strict=True), 1):
            config = folder / f"nats{number}.conf"
            config.write_text(
                f'server_name: n{number}\nhost: "127.0.0.1"\nport: {port}\nping_interval: "1h"\n'
                f'jetstream {{ store_dir: "{folder}/store{number}", max_buffered_msgs: 100000{sync} }}\n'
                f'cluster {{ name: bench, listen: "127.0.0.1:{route}", routes: [{urls}] }}\n'
            )
            started.append((port, running.spawn([program("nats-server"), "-c", str(config)], folder)))
        for port, log in started:
            running.wait_port(port, log)

    return start


_nats_version: Final = version("nats-server", "--version", r"v(\d\S*)")
QUEUE_SYSTEMS: Final = {
    system.name: system
    for system in (
        System(
            name="postroad",
            session=Native,
            start=start_postroad,
            version=own_version,
            settings="transactional messages, defaults, K = 3",
            syncs="the message, synced on all three",
        ),
        System(
            name="jetstream",
            session=JetStream,
            start=_start_jetstream(""),
            version=_nats_version,
            settings="a file stream per queue, R3, sync_interval 2m (the default)",
            syncs="nothing for sure: written by a majority, synced every two minutes",
        ),
        System(
            name="jetstream-always",
            session=JetStream,
            start=_start_jetstream(", sync_interval: always"),
            version=_nats_version,
            settings="a file stream per queue, R3, sync_interval always",
            syncs="the message, synced by a majority",
        ),
        System(
            name="rabbitmq",
            session=Amqp,
            start=start_rabbit,
            version=rabbit_version,
            settings="quorum queues, persistent messages, publisher confirms",
            syncs="the message, synced by a majority",
        ),
    )
}


class Cluster:
    """The brokers of one system."""

    def __init__(self, system: System, running: Running) -> None:
        self._system, self.running = system, running

    def sender(self, queue: str, broker: int) -> Sender:
        address = self.running.addresses[broker % BROKERS]
        if self._system.name == "postroad":
            return PostroadSender(address, queue)
        if self._system.name == "rabbitmq":
            return RabbitSender(address, queue, declared_at=broker % BROKERS)
        return JetStreamSender(address, queue)

    def create(self, queue: str, broker: int) -> None:
        """Until the queue has three replicas."""
        made = self.sender(queue, broker)
        if isinstance(made, JetStreamSender):
            made.create()
        elif isinstance(made, RabbitSender):
            made.declare()
        elif isinstance(made, PostroadSender):
            _until_confirmed(made, made.packet(1))
            deadline = time.monotonic() + READY_S
            while len(made.ask()["replicas"]) < BROKERS:
                if time.monotonic() > deadline:
                    raise UnavailableError(f"{queue} has {made.ask()['replicas']} and no third replica")
                time.sleep(0.1)
        made.close()


def _until_confirmed(sender: Sender, packet: bytes, seconds: float = READY_S) -> None:
    """One message; sent again, under its id where there is one, while nobody answers."""
    deadline = time.monotonic() + seconds
    sender.socket.settimeout(ANSWER_S)
    sender.socket.sendall(packet)
    while True:
        try:
            data = sender.socket.recv(65536)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise UnavailableError(f"nothing was confirmed for {seconds:g} s") from None
            sender.socket.sendall(sender.repeat())
            continue
        if not data:
            raise UnavailableError("the broker closed the connection")
        if sender.feed(data):
            return


class _Loop:
    """One workload: as many messages on their way as it says, until the time is over."""

    def __init__(self, senders: list[Sender], outstanding: int) -> None:
        self._outstanding = outstanding
        self._by_descriptor = {sender.socket.fileno(): sender for sender in senders}
        self._left: dict[int, deque[int]] = {number: deque() for number in self._by_descriptor}  # when, ns
        self.sent = dict.fromkeys(self._by_descriptor, 0)
        self.latencies_ns: list[int] = []
        self._poll = select.poll()
        for number, sender in self._by_descriptor.items():
            sender.socket.settimeout(STALL_S)
            self._poll.register(number, select.POLLIN)

    def run(self, seconds: float) -> float:
        """Seconds that it took until everything was confirmed."""
        began = time.monotonic()
        for number in self._by_descriptor:
            self._send(number, self._outstanding)
        while any(self._left.values()):
            ready = self._poll.poll(STALL_S * 1000)
            if not ready:
                raise PeerError(f"{sum(map(len, self._left.values()))} messages were never confirmed")
            going_on = time.monotonic() - began < seconds
            for number, _ in ready:
                done = self._receive(number)
                if done and going_on:
                    self._send(number, min(done, MAX_MESSAGES - self.sent[number]))
        return time.monotonic() - began

    def _send(self, number: int, count: int) -> None:
        if count <= 0:
            return
        sender = self._by_descriptor[number]
        packet = sender.packet(count)
        self._left[number].extend([time.monotonic_ns()] * count)
        self.sent[number] += count
        sender.socket.sendall(packet)

    def _receive(self, number: int) -> int:
        sender, left = self._by_descriptor[number], self._left[number]
        data = sender.socket.recv(1 << 18)
        if not data:
            raise PeerError("a connection was closed")
        done = sender.feed(data)
        if done > len(left):
            raise PeerError(f"{done} messages are confirmed, {len(left)} were sent")
        now = time.monotonic_ns()
        self.latencies_ns += [now - left.popleft() for _ in range(done)]
        return done


def measure(cluster: Cluster, workload: Workload, seconds: float) -> dict[str, float]:
    names = [f"w{WORKLOADS.index(workload)}q{number}" for number in range(workload.queues)]
    for number, name in enumerate(names):
        cluster.create(name, number)
    senders = [cluster.sender(name, number) for number, name in enumerate(names)]
    before = [sender.depth() for sender in senders]
    loop = _Loop(senders, workload.outstanding)
    pids = cluster.running.pids()
    cpu = cpu_seconds(pids)
    elapsed = loop.run(seconds)
    cpu = cpu_seconds(pids) - cpu
    for sender, depth, sent in zip(senders, before, loop.sent.values(), strict=True):
        _check_depth(sender, depth + sent)
        sender.close()
    count = len(loop.latencies_ns)
    ranks = (
        statistics.quantiles(loop.latencies_ns, n=100) if count > 1 else [float(loop.latencies_ns[0])] * 99
    )
    return {
        "messages_per_s": count / elapsed,
        "p50_us": ranks[49] / 1000,
        "p99_us": ranks[98] / 1000,
        "cpu_us_per_message": cpu * 1e6 / count,
    }


def _check_depth(sender: Sender, expected: int) -> None:
    """Nothing lost, nothing twice. A quorum queue counts a little later than it confirms."""
    deadline = time.monotonic() + READY_S
    while (depth := sender.depth()) != expected:
        if depth > expected or time.monotonic() > deadline:
            raise PeerError(f"{depth} messages are in the queue, {expected} were confirmed")
        time.sleep(0.1)


def kill_and_wait(cluster: Cluster, *, there: bool) -> float:
    """Seconds from the kill until a message is confirmed."""
    return _harm_and_wait(cluster, cluster.running.kill, there=there)


def freeze_and_wait(cluster: Cluster) -> float:
    """Seconds from the moment at which the broker falls silent until a message is confirmed."""
    frozen: list[int] = []

    def freeze(broker: int) -> None:
        cluster.running.freeze(broker)
        frozen.append(broker)

    try:
        return _harm_and_wait(cluster, freeze, there=False)
    finally:
        for broker in frozen:
            cluster.running.kill(broker)


def _harm_and_wait(cluster: Cluster, harm: Callable[[int], None], *, there: bool) -> float:
    name = "there" if there else "elsewhere"
    cluster.create(name, MADE_AT)
    scout = cluster.sender(name, MADE_AT)  # RabbitMQ's leader is where the queue was declared
    leader = scout.leader()
    scout.close()
    at = leader if there else (leader + 1) % BROKERS
    sender = cluster.sender(name, at)
    _until_confirmed(sender, sender.packet(1))
    harm(leader)
    began = time.monotonic()
    while time.monotonic() - began < GONE_S:
        try:
            _until_confirmed(sender, sender.packet(1), GONE_S)
            return time.monotonic() - began
        except (OSError, UnavailableError):
            at = (at + 1) % BROKERS if (at + 1) % BROKERS != leader else (at + 2) % BROKERS
        finally:
            sender.close()
        sender = cluster.sender(name, at)
    raise UnavailableError(f"no message was confirmed for {GONE_S:g} s")


def _killed(there: bool) -> Callable[[Cluster], dict[str, float]]:
    name = "down_there_s" if there else "down_elsewhere_s"
    return lambda cluster: {name: kill_and_wait(cluster, there=there)}


def run(rounds: int, seconds: float, names: str, tell: Callable[[str], None]) -> list[Row]:
    """Rounds that alternate between the systems. A workload that fails is not tried again; others go on."""
    systems = chosen(names, tuple(QUEUE_SYSTEMS), QUEUE_SYSTEMS)
    figures: dict[tuple[str, str], list[dict[str, float]]] = {}
    errors: dict[tuple[str, str], str] = {}
    loops = [(each.name, partial(measure, workload=each, seconds=seconds)) for each in WORKLOADS]
    # What is measured together shares a cluster; a broker that was killed is in none after that.
    together: list[list[tuple[str, Callable[[Cluster], dict[str, float]]]]] = [
        [*loops],
        [(KILLED_THERE, _killed(there=True))],
        [(KILLED_ELSEWHERE, _killed(there=False))],
        [(SILENT, lambda cluster: {"down_silent_s": freeze_and_wait(cluster)})],
    ]
    for turn, system, works in product(range(rounds), systems, together):
        left = [(name, work) for name, work in works if (system.name, name) not in errors]
        try:
            with serving(system, BROKERS) as running:
                cluster = Cluster(system, running)
                for name, work in left:
                    tell(f"round {turn + 1} of {rounds}: {system.name}, {name}")
                    try:
                        figures.setdefault((system.name, name), []).append(work(cluster))
                    except (PostroadError, OSError) as error:
                        errors[system.name, name] = str(error) or type(error).__name__
        except (PostroadError, OSError) as error:
            errors |= {(system.name, name): str(error) or type(error).__name__ for name, _ in left}
    rows: list[Row] = []
    for system, name in product(systems, [name for works in together for name, _ in works]):
        key = (system.name, name)
        row: Row = {"system": system.name, "workload": name}
        row |= {"error": errors[key]} if key in errors else summary(figures[key])
        rows.append(row | described(system))
    return rows
