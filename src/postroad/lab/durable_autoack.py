"""JMS auto-acknowledge: the broker keeps the tokens, and every event is acknowledged by itself (5.2).

One PHB, one SHB, 25 and 200 subscribers that send an acknowledgement for each event. Publishers send as fast
as the slowest subscriber takes events. Then the SHB is killed: what it says after its restart shows whether
all that was acknowledged had reached the disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from postroad.bench.durable_sessions import NativeDurable
from postroad.bench.load import Connection, Fanout, Task
from postroad.events.batch import frame_pubend
from postroad.ids import pubend_text
from postroad.kernel.layout import EVENT_HEADER_BYTES, FRAME_HEADER_BYTES, ID_BYTES
from postroad.lab.durable_network import Broker, Network, network
from postroad.wire import frames
from postroad.wire.frames import Kind

SECONDS: Final = 10.0
SUBSCRIBERS: Final = (25, 200)
PUBLISHERS = TOPICS = 4
IN_FLIGHT: Final = 64
HEARD_S: Final = 30.0
SAVED_S: Final = 1.0  # after which every acknowledgement is on disk
PAPER: Final = {"subscribers_25.events_per_s": 4_000.0, "subscribers_200.events_per_s": 7_600.0}
NOTES: Final = (
    "The paper commits to DB2 with a disk cache that survives a power failure; here acknowledgements that"
    " come while a sync is running share the next one. unsaved_subscribers have acknowledged more than was on"
    f" disk when the broker was killed, {SAVED_S:.0f} s after the last acknowledgement.",
)

Figures = dict[str, float]


class AutoAck(NativeDurable):
    """Acknowledges every event by itself: a frame that holds several is answered by as many."""

    ack = "auto"

    def feed(self, data: memoryview) -> int:
        buffered = self._carry + bytes(data)
        done, position, end = 0, 0, len(buffered)
        while end - position >= frames.FRAME_PREFIX_BYTES:
            length = int.from_bytes(buffered[position : position + 4], "little")
            if position + length > end:
                break
            frame = buffered[position : position + length]
            if frame[4] == Kind.DELIVERY:
                done += self._delivery(frame)
            else:
                self._control(frames.decode(frame))
            position += length
        self._carry = buffered[position:]
        self._return_credit()
        return done

    def _delivery(self, frame: bytes) -> int:
        self._unreturned += len(frame)
        count = int.from_bytes(frame[8:12], "little")
        pubend = pubend_text(frame_pubend(frame))
        for row in range(count):
            at = FRAME_HEADER_BYTES + row * EVENT_HEADER_BYTES + ID_BYTES
            tick = int.from_bytes(frame[at : at + 8], "little")
            token = json.dumps({pubend: tick})
            self.reply += frames.encode(frames.Ack(number=1, token=token))
            self.acked[pubend] = tick
        return count

    def _greet(self) -> None:
        super()._greet()
        self.acked: dict[str, int] = {}


class _Load(Fanout):
    """The closed loop, with publishers at one broker and subscribers at another."""

    def __init__(self, task: Task, host: Broker) -> None:
        self._host = host
        super().__init__(task, AutoAck)

    def subscriber(self, name: str, topic: int) -> Connection:
        session = AutoAck.connect(self._host.address, name)
        subject = session.topic(topic)
        session.expect(subject, self.task.payload)
        session.subscribe([subject])
        return Connection(session, topic, self.poll)

    def close(self) -> None:
        for connection in self.subscribers + self.publishers:
            connection.session.close()
        self.poll.close()


def _unsaved(host: Broker, acked: dict[str, dict[str, int]]) -> int:
    """Subscribers whose token at the broker is not what they acknowledged."""
    rows = {row["name"]: row for row in host.request("subs")["subscriptions"]}
    return sum(
        any(rows[name]["released"].get(pubend, 0) < tick for pubend, tick in token.items())
        for name, token in acked.items()
    )


def measure(made: Network, subscribers: int, seconds: float) -> Figures:
    host = made.shbs[0]
    task = Task(
        what="fanout",
        system="postroad",
        address=made.phb.address,
        publishers=PUBLISHERS,
        subscribers=subscribers,
        topics=TOPICS,
        payload=250,
        burst=1,
        in_flight=IN_FLIGHT,
        warm_s=1.0,
        seconds=seconds,
        pids=tuple(broker.pid for broker in (made.phb, host)),
    )
    load = _Load(task, host)
    try:
        figures = load.run()
        for connection in load.subscribers:
            connection.answer()
        sessions = [subscriber.session for subscriber in load.subscribers]
        acked = {session.name: session.acked for session in sessions if isinstance(session, AutoAck)}
        deadline = time.monotonic() + HEARD_S
        while _unsaved(host, acked) and time.monotonic() < deadline:
            time.sleep(0.1)  # the last acknowledgements are on their way to the broker
        time.sleep(SAVED_S)
    finally:
        load.close()
    host.kill()
    host.start()
    host.wait_ready()
    return {
        f"subscribers_{subscribers}.events_per_s": figures["deliveries_per_s"],
        f"subscribers_{subscribers}.broker_cpu_us_per_event": figures["cpu_us_per_delivery"],
        f"subscribers_{subscribers}.unsaved_subscribers": float(_unsaved(host, acked)),
    }


def run(seconds: float, out: Path | None, tell: Callable[[str], None]) -> tuple[Figures, Figures]:
    measured: Figures = {}
    for count in SUBSCRIBERS:
        tell(f"{count} subscribers that acknowledge every event")
        with network(1) as made:
            measured |= measure(made, count, seconds)
    if out is not None:
        from postroad.lab.durable_figures import draw_autoack

        draw_autoack(measured, PAPER, out)
    return measured, PAPER
