"""Addresses to be linked with, dialled again and again for ever.

Each address is waiting (until a time), being dialled, or connected. After a failure the wait doubles
from `first_us` to `last_us`, half of it drawn, so that brokers that lost the same peer do not return in
step. A link that held for `last_us` starts again from `first_us`; one that falls at once does not.

An address that leads to ourselves, or to a broker we are linked with otherwise, rests: it is tried
again when a link to a broker goes down, or after `rest_us`, whichever is first, but never while the
broker it is known to lead to is linked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from postroad.errors import BugError, UsageError

MAX_ADDRESSES: Final = 1_000
_MAX_DOUBLINGS: Final = 20


@dataclass(slots=True)
class _Address:
    wait_us: int | None  # dial at this time; None while being dialled or connected
    connection: int | None = None  # set while connected
    failures: int = 0
    resting: bool = False
    node: bytes | None = None  # the broker it led to when last seen


class Dialler:
    __slots__ = ("_addresses", "_draw", "_first_us", "_last_us", "_next_us", "_rest_us")

    def __init__(self, *, first_us: int, last_us: int, rest_us: int, draw: Callable[[int], int]) -> None:
        self._first_us, self._last_us, self._rest_us = first_us, last_us, rest_us
        self._draw = draw
        self._addresses: dict[str, _Address] = {}  # every address to be kept linked
        self._next_us: int | None = None  # the least wait_us of all

    def add(self, address: str, now_us: int) -> bool:
        """Whether it was not kept already."""
        if address in self._addresses:
            return False
        if len(self._addresses) >= MAX_ADDRESSES:
            raise UsageError(
                f"{address} is one address too many: a broker links with at most {MAX_ADDRESSES}"
            )
        self._addresses[address] = _Address(now_us)
        self._recount()
        return True

    def remove(self, address: str) -> None:
        """Never dial it again."""
        self._addresses.pop(address, None)
        self._recount()

    def is_connected(self, address: str) -> bool:
        target = self._addresses.get(address)
        return target is not None and target.connection is not None

    def next_deadline(self) -> int | None:
        return self._next_us

    def due(self, now_us: int, linked: Callable[[bytes], bool]) -> list[str]:
        """Addresses to dial now, in the order they were added; `linked` tells nodes we have a link with."""
        if self._next_us is None or now_us < self._next_us:
            return []
        addresses: list[str] = []
        for name, address in self._addresses.items():
            if address.wait_us is None or address.wait_us > now_us:
                continue
            if address.node is not None and linked(address.node):
                address.resting, address.wait_us = True, now_us + self._rest_us
            else:
                address.resting, address.wait_us = False, None
                addresses.append(name)
        self._recount()
        return addresses

    def opened(self, name: str, connection: int) -> None:
        address = self._addresses.get(name)
        if address is not None and address.connection is None:
            address.connection, address.wait_us = connection, None
            self._recount()

    def led_to(self, name: str, node: bytes) -> None:
        address = self._addresses.get(name)
        if address is not None:
            address.node = node

    def failed(self, name: str, now_us: int) -> None:
        """It could not be dialled."""
        address = self._addresses.get(name)
        if address is not None and address.connection is None and address.wait_us is None:
            self._wait(address, now_us)

    def closed(self, name: str, connection: int, now_us: int, *, redundant: bool, held_us: int) -> None:
        """Its connection closed, having been up for `held_us`."""
        address = self._addresses.get(name)
        if address is None or address.connection != connection:
            return
        address.connection = None
        if redundant:
            address.resting, address.wait_us = True, now_us + self._rest_us
            self._recount()
            return
        if held_us >= self._last_us:
            address.failures = 0
        self._wait(address, now_us)

    def wake(self, now_us: int) -> None:
        """A link to a broker went down: what rested because of it may be wanted now."""
        for address in self._addresses.values():
            if address.resting and address.wait_us is not None:
                address.resting, address.failures = False, 0
                self._wait(address, now_us)

    def _wait(self, address: _Address, now_us: int) -> None:
        longest = min(self._last_us, self._first_us << min(address.failures, _MAX_DOUBLINGS))
        address.failures += 1
        address.wait_us = now_us + longest // 2 + self._draw(longest // 2 + 1)
        self._recount()

    def _recount(self) -> None:
        self._next_us = min(
            (address.wait_us for address in self._addresses.values() if address.wait_us is not None),
            default=None,
        )

    @property
    def all_led_somewhere(self) -> bool:
        """Whether every address is connected, or leads to a broker that is linked otherwise."""
        return all(address.connection is not None or address.resting for address in self._addresses.values())

    def status(self) -> list[dict[str, object]]:
        return [
            {
                "address": name,
                "state": "connected"
                if address.connection is not None
                else "dialling"
                if address.wait_us is None
                else "resting"
                if address.resting
                else "waiting",
                "failures": address.failures,
            }
            for name, address in self._addresses.items()
        ]

    def check(self) -> None:
        for name, address in self._addresses.items():
            if address.connection is not None and address.wait_us is not None:
                raise BugError(f"{name} is connected and waiting to be dialled")
