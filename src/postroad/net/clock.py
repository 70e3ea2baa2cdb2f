"""The process's clock: wall time that never runs backwards and never stands still.

Cores compare times they were given earlier with the time they are given now. A wall clock that an
operator or NTP steps back would freeze every time-out for that long, so a step back is bridged by the
monotonic clock until wall time has caught up; a step forward is followed.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    __slots__ = ("_monotonic_ns", "_offset_ns", "_wall_ns")

    def __init__(
        self,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._offset_ns = wall_ns() - monotonic_ns()

    def now_us(self) -> int:
        wall = self._wall_ns()
        monotonic = self._monotonic_ns()
        if wall - monotonic > self._offset_ns:
            self._offset_ns = wall - monotonic
        return (monotonic + self._offset_ns) // 1000
