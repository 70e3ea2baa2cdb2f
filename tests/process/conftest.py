"""Fixtures: brokers as processes, proxies that break the network between them, certificates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.worlds.certificates import Certificates
from tests.worlds.fault_proxies import FaultProxy
from tests.worlds.pages import Desk
from tests.worlds.processes import Brokers, wait_until


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    started = Brokers(tmp_path)
    try:
        yield started
    finally:
        started.end()


@pytest.fixture
def proxied() -> Iterator[Callable[[str], FaultProxy]]:
    """`proxied(address)` puts a FaultProxy in front of it."""
    with contextlib.ExitStack() as stack:

        def make(target: str) -> FaultProxy:
            proxy = FaultProxy(target)
            stack.callback(proxy.close)
            return proxy

        yield make


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    folder = tmp_path / "certificates"
    folder.mkdir()
    return Certificates(folder)


@pytest.fixture
def until() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def desk(brokers: Brokers) -> Iterator[Desk]:
    started = Desk(brokers)
    try:
        yield started
    finally:
        started.close()
