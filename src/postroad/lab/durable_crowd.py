"""Publishers and durable subscribers of the paper's section 5, driven by one loop without a client library.

800 events a second leave one at a time, whatever the system does, through four publishers on four pubends;
each subscriber wants a quarter of the events of every pubend, 200 a second. A subscriber keeps its own
checkpoint token, comes back with it, and acknowledges every 50 events, a quarter of a second.

An event carries the time at which it left. A subscriber that was away has caught up when it gets an event
that left no more than `FRESH_S` before the newest one that those have who were not away; if there are none,
no more than `FRESH_S` ago.
"""

from __future__ import annotations

import heapq
import resource
import select
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from postroad.bench.durable_sessions import NativeDurable
from postroad.bench.native import WINDOW_BYTES
from postroad.bench.sessions import STAMP_BYTES, Template, payload_of
from postroad.errors import PeerError, UnavailableError
from postroad.events.token import CheckpointToken
from postroad.lab.durable_network import PUBENDS, Broker, answer
from postroad.wire import frames
from postroad.wire.frames import DEFAULT_LIMITS, Kind

RATE: Final = 800  # events a second, over all pubends
EACH: Final = 200  # of them for every subscriber
TOPICS: Final = RATE // EACH
PAYLOAD_BYTES: Final = 250
ACK_EVENTS: Final = 50
FRESH_S: Final = 0.1
FRONT_S: Final = 0.5  # without news for as long, nobody tells what is new
SETTLE_S: Final = 30.0
AGAIN_S: Final = 0.05  # between two attempts to connect to a broker that is down
Tell = Callable[[dict[str, Any]], None]
_READ_BYTES: Final = 1 << 20
_HEADER: Final = struct.Struct("<IBBHI4xQqq")  # length, kind, version, flags, count, pubend, start, end
_LOST: Final = 1


class _Session(NativeDurable):
    """A subscriber's connection; nothing in it waits, so that the loop never stops for one."""

    ack = ""

    def begin(self, topic: str, token: CheckpointToken | None) -> None:
        """What `subscribe` does, without waiting for the answer."""
        kept = "" if token is None else token.to_json()
        message = frames.Subscribe(
            number=1, topic=topic, where="", durable=self.name, ack=self.ack, token=kept
        )
        self.socket.sendall(frames.encode(message))
        self.socket.setblocking(False)

    def _greet(self) -> None:
        self.subscribed = False
        self.newest_ns = 0  # when the newest event left
        self.repeated = self.gaps = 0
        self._unsaid = 0
        hello = frames.Hello(
            version=frames.PROTOCOL_VERSION,
            role="client",
            name=self.name,
            token="",
            limits=DEFAULT_LIMITS,
            window=WINDOW_BYTES,
            time_us=time.time_ns() // 1000,
        )
        self.socket.sendall(frames.encode(hello))

    def _control(self, message: frames.Message) -> None:
        if isinstance(message, frames.Subscribed):
            self.subscribed = True
        elif not isinstance(message, frames.Welcome):
            super()._control(message)

    def feed(self, data: memoryview) -> int:
        buffered = self._carry + bytes(data)
        done, position, end = 0, 0, len(buffered)
        while end - position >= frames.FRAME_PREFIX_BYTES:
            length = int.from_bytes(buffered[position : position + 4], "little")
            if position + length > end:
                break
            if buffered[position + 4] == Kind.DELIVERY:
                done += self._delivery(buffered, position, length)
            else:
                self._control(frames.decode(buffered[position : position + length]))
            position += length
        self._carry = buffered[position:]
        self._unsaid += done
        if self._unsaid >= self.ack_events:
            self.finish()
        self._return_credit()
        return done

    def _delivery(self, buffered: bytes, position: int, length: int) -> int:
        _, _, _, flags, count, pubend, start, last = _HEADER.unpack_from(buffered, position)
        self._unreturned += length
        self.gaps += flags & _LOST
        self.repeated += start < self.consumed.get(pubend, 0)
        self.consumed[pubend] = last
        if count:
            at = position + length - PAYLOAD_BYTES
            self.newest_ns = int.from_bytes(buffered[at : at + STAMP_BYTES], "little")
        return int(count)

    ack_events = ACK_EVENTS


class Subscriber:
    """A durable subscriber through all its connections."""

    __slots__ = (
        "back_ns",
        "base",
        "broker",
        "caught_up",
        "events",
        "gaps",
        "left_ns",
        "name",
        "repeated",
        "session",
        "token",
        "topic",
    )

    def __init__(self, name: str, topic: int, broker: Broker) -> None:
        self.name = name
        self.topic = topic
        self.broker = broker
        self.session: _Session | None = None
        self.token: dict[int, int] = {}
        self.events = self.repeated = self.gaps = 0
        self.base = 0  # events of its topic that were published before it began
        self.left_ns = 0
        self.back_ns = 0  # when it came back; 0: it has caught up
        self.caught_up: list[tuple[int, float]] = []  # (when it came back, seconds until it had caught up)


class Crowd:
    """All of them on one loop. `sent[topic]`: events published to it."""

    def __init__(self, phb: Broker) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.subscribers: list[Subscriber] = []
        self.sent = [0] * TOPICS
        self.received = 0
        self._named = 0  # subscribers so far: one that was removed is another than the one added in its place
        self.publishing = False
        self._poll = select.epoll()
        self._by_descriptor: dict[int, Subscriber | NativeDurable] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_number = 0
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._front_ns = 0  # when the newest event left that those have who are not catching up
        self._front_at_ns = 0  # and when one of them got something
        self._number = 0  # of the next event
        self._due_ns = 0
        self._publishers = self._connect_publishers(phb)

    def _connect_publishers(self, phb: Broker) -> list[tuple[NativeDurable, list[Template]]]:
        """One for each pubend: a broker chooses it by the publisher's number."""
        chosen: dict[int, tuple[NativeDurable, list[Template]]] = {}
        spare: list[NativeDurable] = []
        while len(chosen) < PUBENDS:
            session = NativeDurable.connect(phb.address)
            if session.publisher % PUBENDS in chosen:
                spare.append(session)
                continue
            payload = payload_of(PAYLOAD_BYTES)
            templates = [session.template(session.topic(topic), payload, 1) for topic in range(TOPICS)]
            chosen[session.publisher % PUBENDS] = (session, templates)
            self._poll.register(session.socket, select.EPOLLIN)
            self._by_descriptor[session.socket.fileno()] = session
        for session in spare:
            session.close()
        return [chosen[number] for number in sorted(chosen)]

    @property
    def pubends(self) -> list[int]:
        return [session.broker << 32 | number for number, (session, _) in enumerate(self._publishers)]

    def close(self) -> None:
        for connection in self._by_descriptor.values():
            session = connection.session if isinstance(connection, Subscriber) else connection
            if session is not None:
                session.close()
        self._poll.close()

    # ---- subscribers

    def add(self, brokers: Sequence[Broker], count: int) -> None:
        """`count` more, in turn at these brokers; they begin with the next event."""
        publishing = self.publishing
        self.pause()
        # What is still on its way would be new to those who begin now.
        self.run(SETTLE_S, until=lambda: self.backlog() <= 0)
        new = []
        for _ in range(count):
            number = len(self.subscribers)
            self._named += 1
            subscriber = Subscriber(f"s{self._named}", number % TOPICS, brokers[number % len(brokers)])
            subscriber.base = self.sent[subscriber.topic]
            self.subscribers.append(subscriber)
            new.append(subscriber)
            self._connect(subscriber)
            if number % 16 == 15:
                self._turn(0)
        self.run(
            SETTLE_S,
            until=lambda: all(subscriber.session and subscriber.session.subscribed for subscriber in new),
        )
        if not all(subscriber.session and subscriber.session.subscribed for subscriber in new):
            raise UnavailableError(f"subscriptions were not confirmed within {SETTLE_S:.0f} s")
        if publishing:
            self.resume()

    def remove(self, count: int) -> None:
        """The last ones leave for good, and nothing is kept for them. Meanwhile nothing is published: brokers
        that have too much to do would be long in deleting."""
        publishing = self.publishing
        self.pause()
        gone = self.subscribers[len(self.subscribers) - count :]
        del self.subscribers[len(self.subscribers) - count :]
        for subscriber in gone:
            self._drop(subscriber)
        self.run(SETTLE_S, until=lambda: self.backlog() <= 0)
        for subscriber in gone:
            subscriber.broker.request("subs.delete", name=subscriber.name)  # answered when it is on disk
            self._turn(0)  # the others still have to answer their brokers in time
        if publishing:
            self.resume()

    def leave(self, subscriber: Subscriber) -> None:
        if subscriber.session is not None:
            self._drop(subscriber)
            subscriber.left_ns = time.monotonic_ns()

    def come_back(self, subscriber: Subscriber) -> None:
        """With its token; tried again while its broker is down."""
        if subscriber.session is not None:
            return
        try:
            self._connect(subscriber)
        except (OSError, UnavailableError):
            self.after(AGAIN_S, lambda: self.come_back(subscriber))
            return
        subscriber.back_ns = time.monotonic_ns()

    def _connect(self, subscriber: Subscriber) -> None:
        session = _Session.connect(subscriber.broker.address, subscriber.name)
        session.consumed = subscriber.token
        session.begin(
            session.topic(subscriber.topic), CheckpointToken(subscriber.token) if subscriber.token else None
        )
        subscriber.session = session
        self._poll.register(session.socket, select.EPOLLIN)
        self._by_descriptor[session.socket.fileno()] = subscriber

    def _drop(self, subscriber: Subscriber) -> None:
        session, subscriber.session = subscriber.session, None
        if session is None:
            return
        subscriber.token = session.consumed
        subscriber.repeated += session.repeated
        subscriber.gaps += session.gaps
        del self._by_descriptor[session.socket.fileno()]
        self._poll.unregister(session.socket)
        session.close()

    def backlog(self) -> int:
        """Events that were published to the subscribers and have not come yet."""
        return sum(
            max(0, self.sent[subscriber.topic] - subscriber.base - subscriber.events)
            for subscriber in self.subscribers
        )

    def drain(self, seconds: float = SETTLE_S) -> None:
        """Stop publishing; PeerError unless everybody has each event once within that time."""
        self.pause()
        self.run(seconds, until=lambda: self.backlog() <= 0)
        for subscriber in self.subscribers:
            repeated = subscriber.repeated + (subscriber.session.repeated if subscriber.session else 0)
            gaps = subscriber.gaps + (subscriber.session.gaps if subscriber.session else 0)
            expected = self.sent[subscriber.topic] - subscriber.base
            if subscriber.events != expected or repeated or gaps:
                raise PeerError(
                    f"subscriber {subscriber.name} got {subscriber.events} of {expected} events,"
                    f" {repeated} frames again and {gaps} gaps"
                )

    # ---- the loop

    def pause(self) -> None:
        self.publishing = False

    def resume(self) -> None:
        self.publishing = True
        self._due_ns = time.monotonic_ns()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._timer_number += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._timer_number, call))

    def watch(
        self, broker: Broker, what: str, every_s: float, tell: Callable[[dict[str, Any]], None]
    ) -> None:
        """Ask a broker again and again while the loop runs; silently while it is down."""

        def ask() -> None:
            self.after(every_s, ask)
            try:
                session = _Watcher.connect(broker.address)
            except (OSError, UnavailableError):
                return
            session.socket.sendall(frames.encode(frames.Request(number=1, what=what)))
            session.socket.setblocking(False)
            session.tell = tell
            self._by_descriptor[session.socket.fileno()] = session
            self._poll.register(session.socket, select.EPOLLIN)

        ask()

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> None:
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end and not (until is not None and until()):
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            self._turn(min(0.01, end - now))

    def _turn(self, wait_s: float) -> None:
        if self.publishing:
            wait_s = min(wait_s, self._publish())
        for descriptor, _ in self._poll.poll(wait_s):
            connection = self._by_descriptor.get(descriptor)
            if isinstance(connection, Subscriber):
                self._read(connection)
            elif connection is not None:
                self._attend(connection)

    def _publish(self) -> float:
        """Everything that is due; seconds until the next."""
        interval = 1_000_000_000 // RATE
        while (now := time.monotonic_ns()) >= self._due_ns:
            session, templates = self._publishers[self._number % PUBENDS]
            topic = self._number // PUBENDS % TOPICS
            session.prepare(templates[topic])
            templates[topic].stamp(now)
            session.socket.sendall(templates[topic].data)
            self.sent[topic] += 1
            self._number += 1
            self._due_ns += interval
        return (self._due_ns - now) / 1e9

    def _read(self, subscriber: Subscriber) -> None:
        session = subscriber.session
        assert session is not None
        try:
            size = session.socket.recv_into(self._buffer)
        except (ConnectionError, BlockingIOError):
            size = 0
        if not size:
            self.leave(subscriber)  # its broker is gone
            self.after(AGAIN_S, lambda: self.come_back(subscriber))
            return
        got = session.feed(self._view[:size])
        subscriber.events += got
        self.received += got
        if session.reply:
            session.socket.sendall(session.reply)
            session.reply.clear()
        if got:
            self._progress(subscriber, session.newest_ns)

    def _progress(self, subscriber: Subscriber, newest_ns: int) -> None:
        now = time.monotonic_ns()
        if not subscriber.back_ns:
            self._front_ns, self._front_at_ns = max(self._front_ns, newest_ns), now
            return
        front_ns = self._front_ns if now - self._front_at_ns < FRONT_S * 1e9 else now
        if front_ns - newest_ns < FRESH_S * 1e9:
            subscriber.caught_up.append((subscriber.back_ns, (now - subscriber.back_ns) / 1e9))
            subscriber.back_ns = 0

    def _attend(self, session: NativeDurable) -> None:
        try:
            size = session.socket.recv_into(self._buffer)
        except ConnectionError:
            size = 0
        if size:
            session.feed(self._view[:size])
            if session.reply:
                session.socket.sendall(session.reply)
                session.reply.clear()
        if isinstance(session, _Watcher) and (session.answered or not size):
            del self._by_descriptor[session.socket.fileno()]
            self._poll.unregister(session.socket)
            session.close()
        elif not size:
            raise UnavailableError("the publishing broker closed a connection")


class _Watcher(_Session):
    """One question to a broker."""

    tell: Tell
    answered = False

    def _control(self, message: frames.Message) -> None:
        if isinstance(message, frames.Reply):
            self.answered = True
            self.tell(answer(message))
        else:
            super()._control(message)
