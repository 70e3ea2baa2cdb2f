"""Real broker processes on port 0, and how they are configured and awaited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.worlds import fork_server
from tests.worlds.fork_server import ForkedProcess

import postroad

SOURCE = Path(postroad.__path__[0]).parent
# Far more than an idle machine needs: a busy one must not fail a test.
READY_S = 60.0
STOP_S = 30.0
POSTROAD = ("-m", "postroad")
KEEP = '[durable]\nkeep = "1 h"\n'  # so that what is published before the first reader comes is read too
# A broker that gives up after half a second what it gives up after thirty.
IMPATIENT = (
    "-c",
    "from postroad.durable.subscriber import reading; reading.PATIENCE_US = 500_000; "
    "from postroad.cli import main; raise SystemExit(main())",
)


@dataclass
class BrokerProcess:
    """One `postroad up`; restarts keep its data folder and its port."""

    name: str
    data: Path
    links: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    address: str = ""
    program: tuple[str, ...] = POSTROAD
    process: subprocess.Popen[str] | ForkedProcess | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        return self.data.parent / f"{self.name}.log"

    def start(self) -> BrokerProcess:
        arguments = ["--name", self.name, "--listen", self.address or "127.0.0.1:0", "--data", str(self.data)]
        if "--metrics" not in self.extra:
            arguments += ["--metrics", "off"]
        for link in self.links:
            arguments += ["--link", link]
        arguments = ["up", *arguments, *self.extra]
        environment = os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "error"}
        if self.process is not None:  # it ended by itself
            self.reap()
        with self.log.open("ab") as log:
            if self.program == POSTROAD:
                self.process = fork_server.start(arguments, log, environment)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, *self.program, *arguments],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment,
                )
        self.address = self._wait_ready()
        return self

    def _wait_ready(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        watchdog = threading.Timer(READY_S, self.process.kill)
        watchdog.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        words = line.split()
        assert words[:2] == ["ready", self.name], f"{self.name} said {line!r}; log:\n{self.log.read_text()}"
        return words[2]

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.reap()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.reap()

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def unpause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def reap(self) -> int:
        assert self.process is not None
        code = self.process.wait(STOP_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def resident_bytes(self) -> int:
        assert self.process is not None
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class Brokers:
    """Starts brokers; the fixture ends them all and fails the test if one died of a bug."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[BrokerProcess] = []

    def start(
        self, name: str, *links: str, extra: tuple[str, ...] = (), program: tuple[str, ...] = POSTROAD
    ) -> BrokerProcess:
        broker = BrokerProcess(name=name, data=self.folder / name, links=links, extra=extra, program=program)
        self.all.append(broker)
        return broker.start()

    def line(self, count: int) -> list[BrokerProcess]:
        found: list[BrokerProcess] = []
        for number in range(1, count + 1):
            found.append(self.start(f"b{number}", *(one.address for one in found[-1:])))
        return found

    def ring(self, count: int) -> list[BrokerProcess]:
        found = self.line(count - 1)
        found.append(self.start(f"b{count}", found[0].address, found[-1].address))
        return found

    def end(self) -> None:
        died: list[str] = []
        for broker in self.all:
            if broker.running:
                broker.unpause()
                broker.kill()
            elif broker.process is not None:
                broker.reap()
                if broker.process.returncode == 70:
                    died.append(f"{broker.name}:\n{broker.log.read_text()[-4000:]}")
        assert not died, "a broker died of a bug\n" + "\n".join(died)


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Polls, since processes have no other way to tell."""
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up, f"{what}: not within {seconds} s"
        time.sleep(0.05)


def configured(folder: Path, text: str) -> tuple[str, str]:
    file = folder / "broker.toml"
    file.write_text(text)
    return "--config", str(file)
