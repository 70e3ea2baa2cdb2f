"""What repair did, told to the broker: traces name who got a repair, the pipeline audits losses (spec P7)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Final

from postroad.client.repair.receiver import Receiver
from postroad.units import SECOND_US
from postroad.wire.frames import Repaired

REPORT_US: Final = SECOND_US
MAX_IDS: Final = 256  # in one report
MAX_WAITING: Final = 4_096  # ids of one subscription; then the oldest are not told


class Reporting:
    def __init__(self) -> None:
        self._ids: dict[int, deque[bytes]] = {}  # by subscription: what came as repairs, not told yet
        self._received: Counter[int] = Counter()
        self._reported: dict[int, tuple[int, ...]] = {}
        self._due_us = 0
        self._changed = False

    def came(self, number: int, count: int) -> None:
        self._received[number] += count
        self._changed = True

    def repaired(self, number: int, identity: bytes) -> None:
        self._ids.setdefault(number, deque(maxlen=MAX_WAITING)).append(identity)
        self._changed = True

    def end(self, number: int) -> None:
        self._ids.pop(number, None)
        self._reported.pop(number, None)
        del self._received[number]

    def next_deadline(self) -> int | None:
        return self._due_us if self._changed else None

    def take(self, receivers: Iterable[tuple[int, Receiver]], now_us: int) -> list[Repaired]:
        """What is to be told now of these subscriptions."""
        if not self._changed or now_us < self._due_us:
            return []
        self._changed, self._due_us = False, now_us + REPORT_US
        reports: list[Repaired] = []
        for number, receiver in receivers:
            waiting = self._ids.get(number, deque())
            ids = [waiting.popleft() for _ in range(min(len(waiting), MAX_IDS))]
            self._changed = self._changed or bool(waiting)
            report = Repaired(
                number=number,
                ids=b"".join(ids),
                received=self._received[number],
                detected=receiver.detected,
                requests=receiver.requests,
                recovered=receiver.recovered,
                given_up=receiver.given_up,
                duplicates=receiver.duplicates,
                slowest_us=max(receiver.recovery_us, default=0),
            )
            figures = (report.received, report.detected, report.requests, report.given_up, report.duplicates)
            if ids or figures != self._reported.get(number):
                self._reported[number] = figures
                reports.append(report)
        return reports
