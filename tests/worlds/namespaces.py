"""Network namespaces: processes that reach one another and nobody else, at a distance if need be."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest

Result = TypeVar("Result")

COUNTER = itertools.count()
SECONDS = 30
LIBC = ctypes.CDLL(None, use_errno=True)
NETWORK = 0x40000000  # CLONE_NEWNET
WIRES = Path(__file__).with_name("wires.py")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=SECONDS)


class Namespace:
    """One namespace, with a loopback interface of its own."""

    def __init__(self) -> None:
        self.name = f"postroad-{os.getpid()}-{next(COUNTER)}"
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "set", "lo", "up")

    def command(self, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def close(self) -> None:
        ip("netns", "delete", self.name)


class Hub:
    """A namespace for each site, joined by a switch that delays and loses as it is told (`wires.py`)."""

    def __init__(self, sites: Sequence[str]) -> None:
        self._centre = Namespace()
        self.sites: dict[str, Namespace] = {}
        self.hosts: dict[str, str] = {}
        self._switch: subprocess.Popen[str] | None = None
        for number, site in enumerate(sites, 1):
            self._join(site, number)

    def _join(self, site: str, number: int) -> None:
        space = self.sites[site] = Namespace()
        self.hosts[site] = f"10.74.20.{number}"
        wire, end = f"w{number}", f"e{number}"
        ip("-n", space.name, "link", "add", end, "type", "veth", "peer", "name", wire)
        ip("-n", space.name, "link", "set", wire, "netns", self._centre.name)
        ip("-n", self._centre.name, "link", "set", wire, "promisc", "on", "up")
        ip("-n", space.name, "link", "set", end, "address", f"02:00:00:00:00:{number:02x}")
        ip("-n", space.name, "address", "add", f"{self.hosts[site]}/24", "dev", end)
        ip("-n", space.name, "link", "set", end, "up")
        ip("-n", space.name, "route", "add", "default", "dev", end)
        # The switch copies packets as they are, so their checksums must be whole.
        subprocess.run(space.command([sys.executable, str(WIRES), "whole", end]), check=True, timeout=SECONDS)

    def connect(self, milliseconds: Callable[[str, str], float], loss: float = 0.0) -> None:
        """One way, from site to site."""
        names = list(self.sites)
        delays = [[milliseconds(one, other) for other in names] for one in names]
        self._switch = subprocess.Popen(
            self._centre.command([sys.executable, str(WIRES), "switch", json.dumps([delays, loss])]),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == "ready\n"

    def close(self) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait(SECONDS)
            assert self._switch.stdout is not None
            self._switch.stdout.close()
        for space in self.sites.values():
            space.close()
        self._centre.close()


class Cable:
    """Two namespaces, `left` and `right`, and a cable between them that can be pulled: nobody is told."""

    hosts: ClassVar = {"left": "10.74.21.1", "right": "10.74.21.2"}

    def __init__(self) -> None:
        self.sides = {side: Namespace() for side in self.hosts}
        left, right = (self.sides[side].name for side in ("left", "right"))
        ip("-n", left, "link", "add", "left", "type", "veth", "peer", "name", "right")
        ip("-n", left, "link", "set", "right", "netns", right)
        for side, host in self.hosts.items():
            ip("-n", self.sides[side].name, "address", "add", f"{host}/24", "dev", side)
            ip("-n", self.sides[side].name, "link", "set", side, "up")

    def pull(self) -> None:
        ip("-n", self.sides["left"].name, "link", "set", "left", "down")

    def plug_in(self) -> None:
        ip("-n", self.sides["left"].name, "link", "set", "left", "up")

    def at(self, side: str, act: Callable[[], Result]) -> Result:
        """Do this on one side, in a thread of its own: its sockets are there, and what it starts."""

        def enter() -> Result:
            with Path("/var/run/netns", self.sides[side].name).open() as file:
                if LIBC.setns(file.fileno(), NETWORK) != 0:
                    raise OSError(ctypes.get_errno(), "this thread cannot enter a network namespace")
            return act()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(enter).result()

    def close(self) -> None:
        for space in self.sides.values():
            space.close()


def need_namespaces() -> None:
    """Skips the test where they cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        Namespace().close()
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
