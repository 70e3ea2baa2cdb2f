"""The network of the durable experiments: a publisher hosting broker (PHB), subscriber hosting ones (SHBs).

Real broker processes on this machine, in a temporary folder, with the paper's four pubends at the PHB.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

import msgspec

from postroad.bench.native import Native
from postroad.bench.processes import cpu_seconds, free_port
from postroad.errors import UnavailableError
from postroad.wire import frames

PUBENDS: Final = 4
START_S: Final = 60.0
LINK_S: Final = 30.0
_END_S: Final = 10.0


class Broker:
    """One broker process, which can be killed and started again on its data."""

    def __init__(
        self, name: str, folder: Path, link: tuple[str, int] | None, settings_text: str | None = None
    ) -> None:
        self.name = name
        self.address = ("127.0.0.1", free_port())
        self._folder = folder
        self._log = folder / f"{name}.log"
        settings = folder / f"{name}.toml"
        if settings_text is None:
            settings_text = "" if link else f"[durable]\npubends = {PUBENDS}\n"
        settings.write_text(settings_text)
        listen = f"{self.address[0]}:{self.address[1]}"
        self._command = [sys.executable, "-m", "postroad", "up", "--name", name, "--listen", listen]
        self._command += ["--data", str(folder / name), "--metrics", "off", "--config", str(settings)]
        if link is not None:
            self._command += ["--link", f"{link[0]}:{link[1]}"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def ready(self) -> bool:
        """Whether it has said so; UnavailableError with its last words if it has ended."""
        said = self._log.read_text(errors="replace")
        if re.search(r"^ready ", said, re.MULTILINE):
            return True
        if self._process is None or self._process.poll() is not None:
            last = [line for line in said.splitlines() if line.strip()][-3:]
            raise UnavailableError(f"broker {self.name} ended; its last words: {' | '.join(last) or 'none'}")
        return False

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.ready:
            if time.monotonic() > deadline:
                raise UnavailableError(f"broker {self.name} is not ready after {START_S:.0f} s")
            time.sleep(0.02)

    def kill(self) -> None:
        """As a crash would: no goodbye."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def cpu_s(self) -> float:
        """Of the running process."""
        return cpu_seconds([self.pid])

    def request(self, what: str, **arguments: str) -> dict[str, Any]:
        session = Native.connect(self.address)
        try:
            session.socket.sendall(frames.encode(frames.Request(number=1, what=what, arguments=arguments)))
            return answer(session.wait(frames.Reply))
        finally:
            session.close()


def answer(reply: frames.Reply) -> dict[str, Any]:
    if reply.code:
        raise UnavailableError(f"a broker could not answer: {reply.body}")
    return cast("dict[str, Any]", msgspec.json.decode(reply.body))


class Network:
    """A PHB and `shbs` SHBs linked to it; with none, the PHB hosts subscribers too."""

    def __init__(self, folder: Path, shbs: int) -> None:
        self.phb = Broker("phb", folder, None)
        self.shbs = [Broker(f"shb{number + 1}", folder, self.phb.address) for number in range(shbs)]

    @property
    def hosts(self) -> list[Broker]:
        """Where subscribers connect."""
        return self.shbs or [self.phb]

    def start(self) -> None:
        for broker in (self.phb, *self.shbs):
            broker.start()
        for broker in (self.phb, *self.shbs):
            broker.wait_ready()
        deadline = time.monotonic() + LINK_S
        for broker in (self.phb, *self.shbs):
            while len(broker.request("status")["brokers"]) <= len(self.shbs):
                if time.monotonic() > deadline:
                    raise UnavailableError(f"the brokers did not find each other within {LINK_S:.0f} s")
                time.sleep(0.05)

    def end(self) -> None:
        for broker in (*self.shbs, self.phb):
            broker.end()


@contextmanager
def network(shbs: int) -> Iterator[Network]:
    with TemporaryDirectory(prefix="postroad-lab-", ignore_cleanup_errors=True) as folder:
        made = Network(Path(folder), shbs)
        try:
            made.start()
            yield made
        finally:
            made.end()
