"""Where brokers of last time are asked: what cannot be read is left out."""

from __future__ import annotations

import asyncio
import socket

import pytest

from postroad.discovery.settings import SearchSettings
from postroad.errors import UnavailableError, UsageError
from postroad.net.finding import OFF, Where, find, recall, remember, resolve
from postroad.units import MILLISECOND_US
from postroad.wire.discovery import Request, decode

UNREADABLE = ["a/b:80", "::1:80", "1234", "[]:80", "x:99999", ""]


def test_a_remembered_address_that_cannot_be_read_is_left_out(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    remember([*UNREADABLE, "127.0.0.1:7420"])
    assert asyncio.run(resolve(recall(), must=False)) == [("127.0.0.1", 7420)]


@pytest.mark.parametrize("address", UNREADABLE)
def test_an_address_that_somebody_named_must_be_one(address: str) -> None:
    with pytest.raises(UsageError):
        asyncio.run(resolve([address]))


@pytest.mark.parametrize("interface", ["", OFF])
def test_a_discovery_node_with_an_ipv6_address_is_asked_although_no_interface_is_named(
    interface: str,
) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as node:
        node.bind(("::1", 0))
        node.settimeout(5)
        where = Where(
            nodes=(f"[::1]:{node.getsockname()[1]}",),
            interface=interface,
            group=("239.255.74.20", 1),
            remember=False,
            search=SearchSettings(timeout_us=200 * MILLISECOND_US),
        )
        with pytest.raises(UnavailableError):
            asyncio.run(find(where))
        assert isinstance(decode(node.recv(2_000)), Request)
