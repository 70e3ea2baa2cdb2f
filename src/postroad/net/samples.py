"""How busy the machine and this process are, for cores that weigh one broker against another.

From /proc where there is one; elsewhere from what Python knows, which is the load of the last minute.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from postroad.seam.inputs import Sample
from postroad.units import KIB

_STAT: Final = Path("/proc/stat")
_MEMORY: Final = Path("/proc/meminfo")
_HEAD_BYTES: Final = 512  # of either file: what is looked for stands in its first lines
_IDLE: Final = (3, 4)  # among the columns of /proc/stat: idle, and idle while a disk works


class Sampler:
    """Shares of CPU are those since the sample before."""

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self._wall_ns, self._process_ns = time.monotonic_ns(), time.process_time_ns()
        self._machine = self._ticks()

    def sample(self, connections: int) -> Sample:
        wall_ns, process_ns = time.monotonic_ns(), time.process_time_ns()
        machine = self._ticks()
        elapsed_ns = max(1, wall_ns - self._wall_ns)
        process_share = (process_ns - self._process_ns) / elapsed_ns
        share = self._machine_share(machine)
        total, free = _memory_bytes()
        self._wall_ns, self._process_ns, self._machine = wall_ns, process_ns, machine
        return Sample(
            cpu_share=share,
            process_cpu_share=process_share,
            memory_total_bytes=total,
            memory_free_bytes=free,
            connections=connections,
        )

    @staticmethod
    def _ticks() -> tuple[int, int] | None:
        """(idle, all) of all cores so far."""
        head = _read(_STAT)
        if head is None:
            return None
        columns = [int(column) for column in head.split(b"\n", 1)[0].split()[1:9]]
        return sum(columns[at] for at in _IDLE), sum(columns)

    def _machine_share(self, ticks: tuple[int, int] | None) -> float:
        if ticks is None or self._machine is None:
            return min(1.0, os.getloadavg()[0] / self._cores)
        idle, total = ticks[0] - self._machine[0], ticks[1] - self._machine[1]
        return min(1.0, max(0.0, 1 - idle / total)) if total > 0 else 0.0


def _memory_bytes() -> tuple[int, int]:
    """(total, what can be had without swapping) of the machine."""
    head = _read(_MEMORY)
    if head is not None:
        rows = {
            words[0]: words[1] for words in (line.split() for line in head.split(b"\n")) if len(words) > 2
        }
        if b"MemTotal:" in rows and b"MemAvailable:" in rows:
            return int(rows[b"MemTotal:"]) * KIB, int(rows[b"MemAvailable:"]) * KIB
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return None  # this system does not have it
