"""What waits in the sockets of a broker, and the bound for all of it together.

A socket holds what its peer has not taken, the beginning of a frame that has not come whole, and frames that
wait for a share of a turn. A connection that holds much of it is measured every 20 ms, until it no longer
does. One that holds more than credit explains is cut off. Where all of them together hold more than their
bound, those that hold most are cut off: a peer that reads is not among them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from postroad.units import KIB, MIB

if TYPE_CHECKING:
    from postroad.net.server import Connection

BEHIND_BYTES: Final = 256 * KIB  # a connection that holds less is not measured
TOTAL_BYTES: Final = 128 * MIB  # where nothing is configured
LOOK_S: Final = 0.02
KEPT_SHARE: Final = 0.875  # of the bound, once those that hold most are cut off


class Buffers:
    """`each_bytes` is the bound of one connection, `total_bytes` of all, `cut_off` ends one."""

    def __init__(
        self, *, each_bytes: int, total_bytes: int, cut_off: Callable[[Connection, str], object]
    ) -> None:
        self._each_bytes = each_bytes
        self._total_bytes = total_bytes
        self._cut_off = cut_off
        self._behind: dict[Connection, None] = {}  # those that may hold more than BEHIND_BYTES
        self._loop = asyncio.get_running_loop()
        self._looking = False  # a look is scheduled

    def add(self, connection: Connection) -> None:
        """It may hold much."""
        self._behind[connection] = None
        if not self._looking:
            self._looking = True
            self._loop.call_later(LOOK_S, self._look)

    def forget(self, connection: Connection) -> None:
        self._behind.pop(connection, None)

    def _look(self) -> None:
        self._looking = False
        holding = {connection: connection.held_bytes for connection in self._behind}
        self._behind = {connection: None for connection, size in holding.items() if size > BEHIND_BYTES}
        total = sum(holding.values())
        kept = self._total_bytes if total <= self._total_bytes else int(self._total_bytes * KEPT_SHARE)
        for connection in sorted(self._behind, key=lambda each: -holding[each]):
            size = holding[connection]
            if size > self._each_bytes:
                self._cut_off(connection, "does not read")
            elif total > kept:
                self._cut_off(
                    connection, f"holds most of the {self._total_bytes} bytes for all that do not read"
                )
            else:
                break
            total -= size
        if self._behind and not self._looking:
            self._looking = True
            self._loop.call_later(LOOK_S, self._look)
