"""What repair did, reported to the broker: its status shows it, traces name who got a repair, the pipeline
audits losses (spec P7)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Final

import msgspec

from postroad.client.repair.neighbours import Neighbours
from postroad.client.repair.receiver import Receiver
from postroad.units import SECOND_US
from postroad.wire.frames import Repaired

REPORT_US: Final = SECOND_US
MAX_IDS: Final = 256  # in one report
MAX_WAITING: Final = 4_096  # ids of one subscription; then the oldest are not reported


class Reporting:
    def __init__(self) -> None:
        self._ids: dict[int, deque[bytes]] = {}  # by subscription: what came as repairs, not reported yet
        self._received: Counter[int] = Counter()
        self._last: dict[int, Repaired] = {}  # the last report of a subscription, without its ids
        self._due_us = 0
        self._changed = False

    def received(self, number: int, count: int) -> None:
        """Events came as they were first sent."""
        self._received[number] += count
        self._changed = True

    def repaired(self, number: int, identity: bytes) -> None:
        """An event came as a repair."""
        self._ids.setdefault(number, deque(maxlen=MAX_WAITING)).append(identity)
        self._changed = True

    def changed(self) -> None:
        """Figures of repair may be others than at the last report."""
        self._changed = True

    def end(self, number: int) -> None:
        self._ids.pop(number, None)
        self._last.pop(number, None)
        del self._received[number]

    def next_deadline(self) -> int | None:
        return self._due_us if self._changed else None

    def take(self, repaired: Iterable[tuple[int, Receiver, Neighbours]], now_us: int) -> list[Repaired]:
        """The reports that are due now of these subscriptions."""
        if not self._changed or now_us < self._due_us:
            return []
        self._changed, self._due_us = False, now_us + REPORT_US
        reports: list[Repaired] = []
        for number, receiver, neighbours in repaired:
            waiting = self._ids.get(number, deque())
            ids = b"".join(waiting.popleft() for _ in range(min(len(waiting), MAX_IDS)))
            self._changed = self._changed or bool(waiting)
            figures = self._figures(number, receiver, neighbours)
            if ids or figures != self._last.get(number):
                self._last[number] = figures
                reports.append(msgspec.structs.replace(figures, ids=ids))
        return reports

    def _figures(self, number: int, receiver: Receiver, neighbours: Neighbours) -> Repaired:
        cache = neighbours.cache
        return Repaired(
            number=number,
            ids=b"",
            received=self._received[number],
            detected=receiver.detected,
            requests=receiver.requests + neighbours.asks,
            recovered=receiver.recovered,
            given_up=receiver.given_up,
            duplicates=receiver.duplicates,
            slowest_us=max(receiver.recovery_us, default=0),
            recovery_us=receiver.all_recovery_us,
            repairs=neighbours.repairs,
            asked=cache.hits + cache.misses,
            hits=cache.hits,
            cached=len(cache),
        )
