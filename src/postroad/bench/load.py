"""The load processes: `python -m postroad.bench.load`, one task as JSON on the first line of its input.

*fanout* is closed loop, one process for both sides so that flow control is exact: a publisher stops while
the slowest subscriber of its topic is more than `in_flight` events behind. *publish* and *subscribe* are
the two halves of an open loop: events leave one at a time at a steady rate whatever the system does, each
carrying the monotonic time it left at, which both processes share.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np

from postroad.bench.processes import cpu_seconds
from postroad.bench.sessions import Session, Template, payload_of
from postroad.bench.systems import SYSTEMS
from postroad.errors import PeerError, PostroadError
from postroad.units import MIB

READ_BYTES: Final = MIB
STALL_S: Final = 5.0
DRAIN_S: Final = 1.0
_REPLY_EVERY: Final = 32  # publishes between two looks at what the system answered
_EPOLLIN, _EPOLLOUT = select.EPOLLIN, select.EPOLLOUT


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What one load process does."""

    what: Literal["fanout", "publish", "subscribe"]
    system: str
    address: tuple[str, int]
    beside: tuple[tuple[str, int], ...] = ()  # open loop: servers loaded at once, by whoever's turn it is
    publishers: int
    subscribers: int
    topics: int
    payload: int
    burst: int = 1
    in_flight: int = 0
    rate: int = 0
    warm_s: float = 0.5
    seconds: float = 1.0
    pids: tuple[int, ...] = ()
    folder: str = ""  # durable: where the system keeps its data; beside: where latencies are left
    missed: int = 0  # durable: events that those who catch up have missed


class Connection:
    """A session driven without blocking. `events` counts what it sent or received."""

    __slots__ = ("_left", "_poll", "events", "session", "socket", "template", "topic")

    def __init__(self, session: Session, topic: int, poll: select.epoll) -> None:
        self.session = session
        self.socket: socket.socket = session.socket
        self.topic = topic
        self.events = 0
        self.template: Template | None = None
        self._left = b""  # the rest of a send that the socket did not take whole
        self._poll = poll
        self.socket.setblocking(False)
        poll.register(self.socket, _EPOLLIN)

    @property
    def blocked(self) -> bool:
        return bool(self._left)

    def send(self, data: bytes | bytearray | memoryview) -> None:
        if self._left:
            self._left += bytes(data)
            return
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._left = bytes(memoryview(data)[sent:])
            self._poll.modify(self.socket, _EPOLLIN | _EPOLLOUT)

    def writable(self) -> None:
        data, self._left = self._left, b""
        self.send(data)
        if not self._left:
            self._poll.modify(self.socket, _EPOLLIN)

    def readable(self, buffer: bytearray, view: memoryview) -> int:
        """Deliveries in what has arrived."""
        size = self.socket.recv_into(buffer)
        if not size:
            raise PeerError(f"{type(self.session).__name__} closed a connection under load")
        done = self.session.feed(view[:size])
        self.answer()
        return done

    def answer(self) -> None:
        reply = self.session.reply
        if reply:
            self.send(bytes(reply))
            reply.clear()


class Fanout:
    """The closed loop."""

    def __init__(self, task: Task, kind: type[Session]) -> None:
        self.task = task
        self.kind = kind
        self.poll = select.epoll()
        self.subscribers: list[Connection] = []
        self.by_topic: list[list[Connection]] = [[] for _ in range(task.topics)]
        self.sent = [0] * task.topics
        for number in range(task.subscribers):
            connection = self.subscriber(f"s{number}", number % task.topics)
            self.subscribers.append(connection)
            self.by_topic[connection.topic].append(connection)
        self.publishers: list[Connection] = []
        for number in range(task.publishers):
            session = kind.connect(task.address, f"p{number}")
            connection = Connection(session, number % task.topics, self.poll)
            name = connection.session.topic(connection.topic)
            connection.template = connection.session.template(name, payload_of(task.payload), task.burst)
            self.publishers.append(connection)
        self.by_descriptor = {c.socket.fileno(): c for c in self.subscribers + self.publishers}
        self.buffer = bytearray(READ_BYTES)
        self.view = memoryview(self.buffer)

    def subscriber(self, name: str, topic: int) -> Connection:
        session = self.kind.connect(self.task.address, name)
        subject = session.topic(topic)
        session.expect(subject, self.task.payload)
        session.subscribe([subject])
        return Connection(session, topic, self.poll)

    def pump(self) -> None:
        """Every publisher sends while it may."""
        burst, limit = self.task.burst, self.task.in_flight
        lowest = [min([c.events for c in group]) for group in self.by_topic]
        for publisher in self.publishers:
            topic, session, template = publisher.topic, publisher.session, publisher.template
            assert template is not None
            while (
                self.sent[topic] + burst - lowest[topic] <= limit
                and not publisher.blocked
                and session.may_send()
            ):
                session.prepare(template)
                publisher.send(template.data)
                self.sent[topic] += burst

    def turn(self) -> int:
        """One turn of the loop; the deliveries it saw."""
        done = 0
        for descriptor, mask in self.poll.poll(0.1):
            connection = self.by_descriptor[descriptor]
            if mask & _EPOLLOUT:
                connection.writable()
            if mask & ~_EPOLLOUT:
                got = connection.readable(self.buffer, self.view)
                connection.events += got
                done += got
        return done

    def missing(self) -> int:
        return sum(self.sent[c.topic] - c.events for c in self.subscribers)

    def run(self) -> dict[str, float]:
        task = self.task
        marks: list[tuple[float, int, float, float]] = []
        started = progress = time.monotonic()
        due = started + task.warm_s
        total = 0
        while len(marks) < 2 or self.missing() > 0:
            now = time.monotonic()
            if len(marks) < 2:
                # A system that first stores all that it is sent begins late; it is measured all the same.
                if now >= due and total:
                    marks.append((now, total, cpu_seconds(task.pids), time.process_time()))
                    due = now + task.seconds
                self.pump()
            done = self.turn()
            total += done
            if done:
                progress = now
            elif now - progress > STALL_S:
                raise PeerError(f"{self.missing()} of {total + self.missing()} deliveries never came")
        if any(self.sent[c.topic] != c.events for c in self.subscribers):
            raise PeerError("a subscriber counted more deliveries than were published to it")
        (t0, n0, broker0, own0), (t1, n1, broker1, own1) = marks
        deliveries, elapsed = n1 - n0, t1 - t0
        if not deliveries:
            raise PeerError(f"nothing was delivered within {elapsed:.1f} s")
        return {
            "deliveries_per_s": deliveries / elapsed,
            "cpu_us_per_delivery": (broker1 - broker0) * 1e6 / deliveries,
            "broker_cores": (broker1 - broker0) / elapsed,
            "load_cores": (own1 - own0) / elapsed,
            "deliveries": float(total),
        }


def _window() -> tuple[int, int]:
    """Says that this process is ready and learns when the measured time begins and ends."""
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    begin, end = sys.stdin.readline().split()
    return int(begin), int(end)


def publish(task: Task) -> dict[str, float]:
    """The open loop's first half."""
    kind = SYSTEMS[task.system].session
    sessions = [kind.connect(address) for address in task.beside or [task.address] * task.publishers]
    payload = payload_of(task.payload)
    for session in sessions:
        session.socket.settimeout(None)  # with a time-out set, Python waits even for MSG_DONTWAIT
    first = sessions[0]
    templates = [first.template(first.topic(number), payload, 1) for number in range(task.topics)]
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    begin, end = _window()
    interval = 1_000_000_000 // task.rate
    due = time.monotonic_ns()
    sent, number, late = 0, 0, []
    turns = list(range(len(sessions)))
    chance = random.Random(1) if task.beside else None
    while due < end:
        now = time.monotonic_ns()
        if now < due:
            time.sleep((due - now) / 1e9)
            continue
        turn = number % len(sessions)
        if chance is not None and turn == 0:
            chance.shuffle(turns)  # so that nobody always comes after the same one
        session = sessions[turns[turn]]
        template = templates[number % task.topics]
        while not session.may_send():
            _hear(session, buffer, view, 0)
        session.prepare(template)
        now = time.monotonic_ns()
        template.stamp(now)
        session.socket.sendall(template.data)
        if begin <= now < end:
            sent += 1
            late.append(now - due)
        due += interval
        number += 1
        if number % _REPLY_EVERY == 0:
            _hear(sessions[number // _REPLY_EVERY % len(sessions)], buffer, view, socket.MSG_DONTWAIT)
    time.sleep(DRAIN_S)  # the subscribers drain before these connections go
    return {"sent": float(sent), "late_p99_us": float(np.percentile(late, 99)) / 1000 if late else 0.0}


def _hear(session: Session, buffer: bytearray, view: memoryview, flags: int) -> None:
    try:
        size = session.socket.recv_into(buffer, READ_BYTES, flags)
    except BlockingIOError:
        return
    session.feed(view[:size])
    if session.reply:
        session.socket.sendall(session.reply)
        session.reply.clear()


def subscribe(task: Task) -> dict[str, float]:
    """The open loop's second half: how long each event took."""
    kind = SYSTEMS[task.system].session
    poll = select.epoll()
    sessions: dict[int, Session] = {}
    for number, address in enumerate(task.beside or [task.address] * task.subscribers):
        session = kind.connect(address)
        name = session.topic(number % task.topics)
        session.expect(name, task.payload)
        session.subscribe([name])
        poll.register(session.socket, _EPOLLIN)
        sessions[session.socket.fileno()] = session
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    begin, end = _window()
    last = end + int(DRAIN_S * 1e9)
    taken: list[int] = []
    each: dict[int, list[tuple[int, int]]] = {descriptor: [] for descriptor in sessions}  # when, how long
    while time.monotonic_ns() < last:
        for descriptor, _ in poll.poll(0.05):
            session = sessions[descriptor]
            size = session.socket.recv_into(buffer)
            now = time.monotonic_ns()
            if not size:
                raise PeerError(f"{task.system} closed a connection under load")
            stamps: list[int] = []
            session.feed_stamps(view[:size], stamps)
            taken += [now - stamp for stamp in stamps if begin <= stamp < end]
            if task.beside:
                each[descriptor] += [(stamp - begin, now - stamp) for stamp in stamps if begin <= stamp < end]
            if session.reply:
                session.socket.sendall(session.reply)
                session.reply.clear()
    if not taken:
        raise PeerError("no event arrived")
    if task.beside:
        for number, pairs in enumerate(each.values()):
            np.save(Path(task.folder) / f"latency-{number}.npy", np.array(pairs, np.int64).reshape(-1, 2))
    p50, p99 = np.percentile(taken, (50, 99)) / 1000
    return {
        "received": float(len(taken)),
        "p50_us": float(p50),
        "p99_us": float(p99),
        "max_us": max(taken) / 1000,
    }


def serve(run: Callable[[Task], dict[str, float]]) -> int:
    """Carries out the task on the first line of the input and prints its figures, or its error."""
    task = msgspec.json.decode(sys.stdin.readline(), type=Task)
    try:
        figures = run(task)
    except (PostroadError, OSError) as error:
        sys.stdout.write(msgspec.json.encode({"error": str(error)}).decode() + "\n")
        return 1
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
    return 0


def _run(task: Task) -> dict[str, float]:
    if task.what == "fanout":
        return Fanout(task, SYSTEMS[task.system].session).run()
    return publish(task) if task.what == "publish" else subscribe(task)


if __name__ == "__main__":
    sys.exit(serve(_run))
