"""Strangers that connect and say nothing, more of them than the broker has files: they keep nobody out, and
take no file that the disk needs."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from typing import Any

import pytest
from tests.worlds.certificates import Certificates
from tests.worlds.process_clients import run

import postroad

FILES = 400
STRANGERS = 500
FEW_FILES = (
    "-c",
    f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES})); "
    "from postroad.cli import main; raise SystemExit(main())",
)
SEGMENT_BYTES = 64 << 20  # of the log: one more file after so much
EVENT_BYTES = 900_000


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "TLS"])
def test_who_says_nothing_keeps_nobody_out(brokers: Any, certificates: Certificates, secured: bool) -> None:
    """Before a TLS handshake nobody is a connection yet, but a file all the same."""
    certificate, key = certificates.issue("b1")
    flags = ("--tls-cert", certificate, "--tls-key", key) if secured else ()
    how = {"tls": ssl.create_default_context(cafile=str(certificates.ca))} if secured else {}

    async def test() -> None:
        broker = brokers.start("b1", extra=flags, program=FEW_FILES)
        host, port = broker.address.rsplit(":", 1)
        async with postroad.connect(broker.address, **how) as before:
            await before.publish("a", b"", mode="durable")
            with contextlib.ExitStack() as stack:
                for _ in range(STRANGERS):
                    stranger = stack.enter_context(socket.socket())
                    stranger.setblocking(False)
                    assert stranger.connect_ex((host, int(port))) in (0, errno.EINPROGRESS)
                async with postroad.connect(broker.address, **how) as newcomer:
                    for _ in range(SEGMENT_BYTES // EVENT_BYTES + 5 if secured else 1):
                        await newcomer.publish("a", bytes(EVENT_BYTES), mode="durable")
                    await before.publish("a", b"", mode="durable")
        log = broker.log.read_text()
        assert "Too many open files" not in log
        assert "connections is the limit" in log

    run(test())
