"""The load process of `bench durable`: `python -m postroad.bench.durable_load`.

First the closed loop of fanout, with durable subscriptions and confirmed publishing. Then some subscribers
of one topic go away, events are published to it, and the time is taken from the moment they begin to
connect again until the last of them has everything. Nothing else happens meanwhile.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

from postroad.bench.durable_systems import DURABLE_SYSTEMS
from postroad.bench.load import STALL_S, Connection, Fanout, serve
from postroad.errors import PeerError

GONE_S: Final = 0.5  # until a system has surely noticed that connections are closed
CATCHUPS: Final = (1, 25)  # how many catch up at a time
_BLOCK_BYTES: Final = 512


def disk_bytes(folder: Path) -> int:
    """What the files below a folder take on disk."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(parent, name).stat().st_blocks * _BLOCK_BYTES
            except FileNotFoundError:
                continue  # removed meanwhile
    return total


class DurableFanout(Fanout):
    """The closed loop, and what follows it."""

    def missing(self) -> int:
        """Deliveries, and confirmations of publishes."""
        return super().missing() + self._unconfirmed()

    def _unconfirmed(self) -> int:
        return sum(self.sent) - sum(publisher.session.acknowledged for publisher in self.publishers)

    def run(self) -> dict[str, float]:
        figures = super().run()
        for count in CATCHUPS:
            figures |= self._catch_up(count)
        return figures

    def _catch_up(self, count: int) -> dict[str, float]:
        task = self.task
        gone = self.by_topic[0][:count]
        for connection in gone:
            self._leave(connection)
        time.sleep(GONE_S)
        before = disk_bytes(Path(task.folder))
        self._publish(task.missed)
        disk = disk_bytes(Path(task.folder)) - before
        began = time.monotonic()
        for connection in gone:
            self._come_back(connection)
        self._until_all_have_it()
        elapsed = time.monotonic() - began
        return {
            f"catchup_{count}_s": elapsed,
            f"catchup_{count}_events_per_s": len(gone) * task.missed / elapsed,
            "disk_bytes_per_event": disk / task.missed,
        }

    def _leave(self, connection: Connection) -> None:
        self.poll.unregister(connection.socket)
        del self.by_descriptor[connection.socket.fileno()]
        self.subscribers.remove(connection)
        self.by_topic[connection.topic].remove(connection)
        connection.session.leave()

    def _publish(self, count: int) -> None:
        """To the first topic, from its publisher, with as much in flight as in the closed loop."""
        task, publisher = self.task, self.publishers[0]
        template, session = publisher.template, publisher.session
        assert template is not None
        target = self.sent[0] + count
        progress = time.monotonic()
        while self.sent[0] < target or self.missing():
            lowest = min([c.events for c in self.by_topic[0]], default=session.acknowledged)
            floor = min(lowest, session.acknowledged)
            while (
                self.sent[0] < target
                and self.sent[0] + task.burst - floor <= task.in_flight
                and not publisher.blocked
                and session.may_send()
            ):
                session.prepare(template)
                publisher.send(template.data)
                self.sent[0] += task.burst
            before = session.acknowledged
            now = time.monotonic()
            if self.turn() or session.acknowledged > before:
                progress = now
            elif now - progress > STALL_S:
                missing = self.missing()
                raise PeerError(
                    f"{missing} deliveries or confirmations never came"
                    if missing > 0
                    else f"{-missing} deliveries came again"
                )

    def _come_back(self, connection: Connection) -> None:
        session = self.kind.connect(self.task.address, connection.session.name)
        subject = session.topic(connection.topic)
        session.expect(subject, self.task.payload)
        session.resume([subject])
        back = Connection(session, connection.topic, self.poll)
        back.events = connection.events
        self.subscribers.append(back)
        self.by_topic[back.topic].append(back)
        self.by_descriptor[back.socket.fileno()] = back

    def _until_all_have_it(self) -> None:
        progress = time.monotonic()
        while self.missing() > 0:
            now = time.monotonic()
            if self.turn():
                progress = now
            elif now - progress > STALL_S:
                raise PeerError(f"{self.missing()} deliveries never came to those who were gone")
        if self.missing() < 0:
            raise PeerError("those who were gone got more than was published to them")


if __name__ == "__main__":
    sys.exit(serve(lambda task: DurableFanout(task, DURABLE_SYSTEMS[task.system].session).run()))
