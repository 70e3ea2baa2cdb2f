"""Server processes of a benchmark: started on loopback in a folder of their own, measured, always ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from postroad.errors import UnavailableError
from postroad.units import KIB

START_S: Final = 60.0
END_S: Final = 10.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; the second, the command, may hold anything."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2 :].split()


def descendants(roots: Iterable[int]) -> list[int]:
    """These processes and all below them, as of now."""
    children: dict[int, list[int]] = {}
    for entry in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            children.setdefault(int(_stat(entry)[1]), []).append(entry)
        except (OSError, ValueError):
            continue  # it ended while we looked
    pids: list[int] = []
    waiting = list(roots)
    while waiting:
        pid = waiting.pop(0)
        pids.append(pid)
        waiting += children.get(pid, [])
    return pids


def cpu_seconds(pids: Iterable[int], *, ended: bool = False) -> float:
    """User and system time of all threads of these processes; if asked, also of their `ended` children."""
    used = 0.0
    for pid in pids:
        try:
            # Linux's number for the CPU clock of a process; what /proc/PID/stat says has ticks of 10 ms.
            used += time.clock_gettime(~pid << 3 | 2)
            if ended:
                used += sum(map(int, _stat(pid)[13:15])) / _TICKS_PER_S
        except OSError:
            continue
    return used


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes, exactly; what /proc/PID/stat says of it lags."""
    kib = 0
    for pid in pids:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        resident = re.search(r"^Rss:\s+(\d+) kB", rollup, re.MULTILINE)
        kib += int(resident[1]) if resident else 0
    return kib * KIB


@dataclass(slots=True)
class Running:
    """Started servers. `addresses` has one entry per broker, in the order of the line they form."""

    addresses: list[tuple[str, int]] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)  # what each process printed
    measured: list[subprocess.Popen[bytes]] = field(default_factory=list)  # those whose cost counts

    def spawn(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        measured: bool = True,
    ) -> Path:
        """Starts a process in its own group; the file with its output is returned."""
        log = folder / f"{len(self.processes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        self.logs.append(log)
        if measured:
            self.measured.append(process)
        return log

    def wait_port(self, port: int, log: Path) -> None:
        """Until something accepts connections there."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                time.sleep(0.05)
            else:
                self.addresses.append(("127.0.0.1", port))
                return
        raise UnavailableError(f"nothing listens on port {port} after {START_S:.0f} s; {_tail(log)}")

    def wait_ready(self, log: Path) -> None:
        """Until the process printed `ready NAME HOST:PORT`."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            ready = re.search(r"^ready \S+ (\S+):(\d+)$", log.read_text(errors="replace"), re.MULTILINE)
            if ready is not None:
                self.addresses.append((ready[1], int(ready[2])))
                return
            self.check_alive()
            time.sleep(0.05)
        raise UnavailableError(f"not ready after {START_S:.0f} s; {_tail(log)}")

    def check_alive(self) -> None:
        """UnavailableError with its last words if a server has ended."""
        for process, log in zip(self.processes, self.logs, strict=True):
            code = process.poll()
            if code is not None:
                raise UnavailableError(f"the server ended with code {code}; {_tail(log)}")

    def pids(self) -> list[int]:
        return descendants(process.pid for process in self.measured)

    def kill(self, broker: int) -> None:
        """kill -9 of one of those that are measured, by its place; it is not looked after any more."""
        process = self.measured.pop(broker)
        _signal_group(process, signal.SIGKILL)
        process.wait()
        place = self.processes.index(process)
        del self.processes[place], self.logs[place]

    def freeze(self, broker: int) -> None:
        """As if its machine had fallen silent: its connections stay. To be killed before the end."""
        _signal_group(self.measured[broker], signal.SIGSTOP)

    def stop(self) -> None:
        """Each group is asked to end, later ones first, and made to when it does not."""
        for process in reversed(self.processes):
            _signal_group(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            _signal_group(process, signal.SIGKILL)
            process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "its last words: " + (" | ".join(lines[-3:]) or "none")
