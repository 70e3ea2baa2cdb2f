"""Broker processes that begin as a fork of one that has imported everything, and done nothing else.

Importing takes `postroad up` more than half a second of CPU, and the tests start hundreds of brokers. What a
fork runs is the same program: arguments, environment and folder are its own, and so are its descriptors,
sockets, disk and end. Tests of other programs than `postroad up` start Python anew, as users do.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

WHAT_A_BROKER_IMPORTS = (
    "postroad.cli",
    "postroad.net.configure",
    "postroad.net.run",
    "postroad.selectors.parse",
    "typer._adapters",
)
MAX_REQUEST = 1 << 18  # arguments and environment


class ForkedProcess:
    """As much of a Popen as tests use. Its parent is the server, which tells how it ended."""

    def __init__(
        self, arguments: Sequence[str], *, stdout: int, stderr: int, environment: dict[str, str]
    ) -> None:
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"arguments": arguments, "environment": environment, "folder": str(Path.cwd())}
        with theirs:
            fds = [stdout, stderr, theirs.fileno()]
            socket.send_fds(_server(environment["PYTHONPATH"]), [json.dumps(request).encode()], fds)
        self.pid = int(self._status.recv(64))
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                told = self._status.recv(64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            self.returncode = int(told)
            self._status.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(64))
            except TimeoutError:
                raise subprocess.TimeoutExpired("postroad", timeout or 0) from None
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(arguments: Sequence[str], log: IO[bytes], environment: dict[str, str]) -> ForkedProcess:
    """`postroad` with these arguments; its standard output is `stdout`, its standard error goes to `log`."""
    read, write = os.pipe()
    try:
        process = ForkedProcess(arguments, stdout=write, stderr=log.fileno(), environment=environment)
    finally:
        os.close(write)
    process.stdout = os.fdopen(read)
    return process


@functools.cache
def _server(sources: str) -> socket.socket:
    """One for each test process; it ends when that one does."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        fd = theirs.fileno()
        environment = os.environ | {"PYTHONPATH": sources, "PYTHONWARNINGS": "error"}
        server = subprocess.Popen([sys.executable, __file__, str(fd)], pass_fds=(fd,), env=environment)
    atexit.register(server.wait)
    atexit.register(mine.close)  # first
    return mine


# ---- in the server


def serve(control: socket.socket) -> None:
    """Returns in each process that is to be a broker, and at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for brokers
    while True:
        request, fds, _, _ = socket.recv_fds(control, MAX_REQUEST, 3)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become(json.loads(request), *fds)
            return
        for fd in fds:
            os.close(fd)


def _become(request: dict[str, object], stdout: int, stderr: int, status: int) -> None:
    """Forks once more: the parent waits and tells how it ended, the child is the broker."""
    pid = os.fork()
    if pid:
        os.write(status, str(pid).encode())
        os.close(stdout)
        _, ended = os.waitpid(pid, 0)
        try:
            os.write(status, str(os.waitstatus_to_exitcode(ended)).encode())
        finally:
            os._exit(0)
    os.close(status)
    for fd, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    arguments, environment = request["arguments"], request["environment"]
    assert isinstance(arguments, list)
    assert isinstance(environment, dict)
    sys.argv = ["postroad", *arguments]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(str(request["folder"]))


if __name__ == "__main__":
    for name in WHAT_A_BROKER_IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
    from postroad.__main__ import main

    sys.exit(main())
