"""A core that is no broker behind the same server, in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.worlds.echo import ANSWER, ASK

from postroad.wire.datagrams import pack
from postroad.wire.frames import Ping, encode

ROOT = Path(__file__).parents[2]
# All that a second kind of node needs beside its core.
PROGRAM = """
import sys
import uvloop
from postroad.net import log
from postroad.net.clock import Clock
from postroad.net.listen import connection_limit
from postroad.net.server import Server
from postroad.net.serving import open_sockets, serve
from tests.worlds.echo import EchoNode

async def main(sockets):
    server = Server(
        EchoNode(),
        clock=Clock(),
        max_connections=connection_limit(0),
        max_batch_bytes=1 << 20,
        window_bytes=1 << 20,
    )
    return await serve(server, sockets, sockets.about("echo"))

with open_sockets("127.0.0.1:0", "127.0.0.1:0") as sockets:
    log.setup("echo", "info")
    sys.exit(uvloop.run(main(sockets)))
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    log = tmp_path / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONWARNINGS": "error"},
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def test_a_second_kind_of_core_has_all_that_a_broker_has(node: tuple[subprocess.Popen[str], Path]) -> None:
    process, log = node
    assert process.stdout is not None
    word, name, address = process.stdout.readline().split()
    assert (word, name) == ("ready", "echo")
    host, port = address.rsplit(":", 1)
    frame = encode(Ping(time_us=1))
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(frame)
        assert connection.recv(1000) == frame
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:
        caller.settimeout(30)
        caller.sendto(pack(ASK, b"hello"), (host, int(port)))
        assert caller.recvfrom(2000) == (pack(ANSWER, b"hello"), (host, int(port)))
    served = next(line for line in log.read_text().splitlines() if " serving " in line)
    assert f"info echo serving address={address} metrics=" in served
    metrics = served.split("metrics=")[1].split()[0]
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=30) as page:
        text = page.read().decode()
    assert "postroad_datagrams_in_total 1.0" in text
    assert "postroad_socket_connections_opened_total 1.0" in text
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert log.read_text().endswith("info echo SIGTERM: stopping\n")
