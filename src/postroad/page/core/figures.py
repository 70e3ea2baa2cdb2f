"""Figures over time: rates from counters, lines of bounded length, and how people read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from postroad.units import GIB, KIB, MIB

MAX_POINTS: Final = 450  # of a line: 15 minutes at one point in two seconds
WINDOW_S: Final = 10.0  # shares of two counters are over this time
LEAST_S: Final = 1.0  # a rate is over this time or longer: two quick looks see nothing, or a burst
BREAK_S: Final = 8.0  # a line is broken where nothing was heard for longer

Point = tuple[float, float | None]


class Line:
    """Points in time, the oldest forgotten."""

    __slots__ = ("points",)

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=MAX_POINTS)

    def add(self, now_s: float, value: float | None) -> None:
        if self.points and self.points[-1][1] is not None and now_s - self.points[-1][0] > BREAK_S:
            self.points.append((self.points[-1][0] + BREAK_S / 2, None))
        self.points.append((now_s, value))

    @property
    def last(self) -> float | None:
        return self.points[-1][1] if self.points else None


class Counters:
    """The counters of one source, and what they grew by. One that went back began anew: it has no rate."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._now: Mapping[str, float] = {}
        self._before_s = 0.0
        self._before: Mapping[str, float] = {}

    def take(self, now_s: float, counters: Mapping[str, float]) -> None:
        if now_s - self._now_s >= LEAST_S:
            self._before_s, self._before = self._now_s, self._now
        self._now_s, self._now = now_s, dict(counters)

    def rate(self, name: str) -> float | None:
        """A second; None until there are two answers."""
        passed_s = self._now_s - self._before_s
        if passed_s <= 0 or name not in self._now or name not in self._before:
            return None
        grown = self._now[name] - self._before[name]
        return grown / passed_s if grown >= 0 else None


class Share:
    """How much of what one end sent never came to the other, over the last seconds."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float, float]] = deque(maxlen=64)

    def take(self, now_s: float, sent: float, received: float) -> None:
        if self._pairs and (sent < self._pairs[-1][1] or received < self._pairs[-1][2]):
            self._pairs.clear()
        self._pairs.append((now_s, sent, received))
        while len(self._pairs) > 2 and self._pairs[1][0] <= now_s - WINDOW_S:
            self._pairs.popleft()

    @property
    def lost(self) -> float | None:
        """A share of what was sent; None where nothing was."""
        if len(self._pairs) < 2:
            return None
        sent, received = (self._pairs[-1][at] - self._pairs[0][at] for at in (1, 2))
        return None if sent <= 0 else min(1.0, max(0.0, 1 - received / sent))


def quantity(value: float | None) -> str:
    """Short enough for a cell: 950, 1.2k, 3.4M."""
    if value is None:
        return "-"
    for least, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= least:
            return f"{value / (1e3 if unit == 'k' else least):.1f}{unit}"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 0.1 else f"{value:.2g}"


def per_second(value: float | None) -> str:
    return "-" if value is None else f"{quantity(value)}/s"


def volume(value: float | None) -> str:
    """Bytes."""
    if value is None:
        return "-"
    for least, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if value >= least:
            return f"{value / least:.1f} {unit}"
    return f"{value:.0f} B"


def share(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0%}" if value >= 0.1 or not value else f"{value:.1%}" if value >= 1e-3 else "<0.1%"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3_600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


def doubt(value: float) -> str:
    """The probability that a claim is wrong, as people can tell two apart."""
    if value <= 0:
        return "certain"
    if value < 1e-9:
        return "doubt < 1e-9"
    return f"doubt {value:.1e}" if value < 1e-3 else f"doubt {value:.1%}"
