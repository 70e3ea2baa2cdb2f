"""What waits in the sockets of a broker, and the bound for all of it together.

A socket holds what its peer has not taken, the beginning of a frame that has not come whole, and frames that
wait for a share of a turn. A connection that holds more than a little is measured every 20 ms, until it no
longer does; a little is so much that all connections together cannot hold much of the bound with it. One that
holds more than credit explains is cut off. Where all of them together hold more than their bound, those that
hold most are cut off: a peer that reads is not among them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from postroad.units import KIB, MIB

if TYPE_CHECKING:
    from postroad.net.server import Connection

LEAST_BEHIND_BYTES: Final = KIB  # a connection that holds less is never measured
MOST_BEHIND_BYTES: Final = 256 * KIB
# A connection is not measured below this part of the bound, divided by how many there are when it comes. The
# sum over ten thousand of them is two fifths of the bound.
UNMEASURED_SHARE: Final = 16
TOTAL_BYTES: Final = 128 * MIB  # where nothing is configured
LOOK_S: Final = 0.02
LOOKING_SHARE: Final = 50  # of all time goes at most this part into looking
KEPT_SHARE: Final = 0.875  # of the bound, once those that hold most are cut off


class Buffers:
    """`each_bytes` is the bound of one connection, `total_bytes` of all, `cut_off` ends one."""

    def __init__(
        self,
        *,
        each_bytes: int,
        total_bytes: int,
        cut_off: Callable[[Connection, str], object],
    ) -> None:
        self._each_bytes = each_bytes
        self._total_bytes = total_bytes
        self.behind_bytes = MOST_BEHIND_BYTES  # who holds more is measured
        self._cut_off = cut_off
        self._behind: dict[Connection, None] = {}  # those that may hold more than `behind_bytes`
        self._loop = asyncio.get_running_loop()
        self._looking = False  # a look is scheduled
        self._took_s = 0.0  # the last look

    def expect(self, connections: int) -> int:
        """So many are here: what each may hold without being measured. Few may hold more, so that a busy one
        is not measured at every write."""
        unmeasured_bytes = self._total_bytes // (UNMEASURED_SHARE * max(1, connections))
        self.behind_bytes = min(max(LEAST_BEHIND_BYTES, unmeasured_bytes), MOST_BEHIND_BYTES)
        return self.behind_bytes

    def add(self, connection: Connection) -> None:
        """It may hold much."""
        self._behind[connection] = None
        self._look_later()

    def forget(self, connection: Connection) -> None:
        self._behind.pop(connection, None)

    def _look_later(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_later(max(LOOK_S, LOOKING_SHARE * self._took_s), self._look)

    def _look(self) -> None:
        began_s = time.perf_counter()
        self._looking = False
        holding = {connection: connection.held_bytes for connection in self._behind}
        self._behind = {connection: None for connection, size in holding.items() if size > self.behind_bytes}
        total = sum(holding.values())
        if total > self._total_bytes or max(holding.values(), default=0) > self._each_bytes:
            self._cut_off_some(holding, total)
        self._took_s = time.perf_counter() - began_s
        if self._behind:
            self._look_later()

    def _cut_off_some(self, holding: dict[Connection, int], total: int) -> None:
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
