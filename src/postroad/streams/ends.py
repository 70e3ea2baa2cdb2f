"""The ends of this broker's earlier processes: what they held in memory only is lost with them.

A process answers for the plain pubends of those before it: L from wherever the asker stands, then the stream
is over, which L up to the last tick there is says. A process that stopped in good order left its last tick
on disk. Of one that died nobody knows how far it had come: up to when this one began, or a little more, as
the clock may have stepped back since.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

from postroad.streams.knowledge import MAX_TICK
from postroad.streams.plain_pubend import PlainPubend
from postroad.streams.spans import Span
from postroad.units import SECOND_US

TABLE: Final = "plain.ends"  # plain pubend -> its last tick, of processes that stopped in good order
MAX_ENDS: Final = 16
_U64: Final = struct.Struct(">Q")
STEP_US: Final = 10 * SECOND_US  # no clock steps back further between two processes


class Ends:
    """`rows`: of `TABLE`; `own`: the plain pubend of this process."""

    def __init__(self, rows: Mapping[bytes, bytes], own: PlainPubend) -> None:
        self._own = own
        # Plain pubends of earlier processes -> their last tick, as far as known.
        self._last = dict(read_end(key, tick) for key, tick in rows.items())

    def lost(self, pubend: int, tick: int) -> list[Span]:
        """What a neighbour that knows a pubend up to `tick` has lost of it."""
        if tick >= MAX_TICK:
            return []
        end = self._last.get(pubend, max(self._own.start, tick) + STEP_US)
        return [(tick, end), (end, MAX_TICK)] if tick < end else [(tick, MAX_TICK)]

    def rows(self) -> tuple[tuple[bytes, bytes | None], ...]:
        """What the next process is to know of this one, when it is closed."""
        forgotten = sorted(self._last)[: 1 - MAX_ENDS]
        return (
            (self._own.id.to_bytes(8, "big"), self._own.last.to_bytes(8, "big")),
            *((pubend.to_bytes(8, "big"), None) for pubend in forgotten),
        )


def read_end(key: bytes, tick: bytes) -> tuple[int, int]:
    return _U64.unpack(key)[0], _U64.unpack(tick)[0]
