"""The client's clock: wall time at the start, and monotonic from then on.

An operator who steps the machine's clock must neither freeze a time-out nor declare a broker dead. The
broker's clock is the reference for ids anyway: the core measures how far ours is from it (spec T5).
"""

from __future__ import annotations

from time import monotonic_ns, time_ns

_START_NS = time_ns() - monotonic_ns()


def now_us() -> int:
    return (_START_NS + monotonic_ns()) // 1000
