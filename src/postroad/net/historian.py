"""Keeps what tracking asks to be kept, in a thread of its own and in order; messages never wait for it.

A disk that fails or stalls costs history, not service: what cannot be kept is dropped, counted and logged,
and tracking is told, so that traces of that time say that their record is not whole. What tracking handed
over before it was told is not kept either: whatever is stored later vouches for what came before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Final

from postroad.errors import PostroadError
from postroad.net.log import complain
from postroad.seam.tracking import DropFilters, StoreAttachments, StoreFilter, TrackingEffect
from postroad.storage.tracking_store import TrackingStore
from postroad.units import MIB

MAX_PENDING_BYTES: Final = 256 * MIB

Refuse = Callable[[tuple[TrackingEffect, ...]], None]
Deliver = Callable[[int, Mapping[int, bytes]], None]


class Historian:
    """`shortage`: why what room is left is for durable events; "" if there is enough."""

    def __init__(self, store: TrackingStore, *, shortage: Callable[[], str] = str) -> None:
        self._store = store
        self._shortage = shortage
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="postroad-history")
        self._pending_bytes = 0  # handed to the thread and not written yet
        # Handed over since the last failure that tracking was told of, and not known to be kept; in order.
        self._handed: deque[tuple[TrackingEffect, ...]] = deque()
        self._failures = 0  # that tracking has heard of: a Keep is of the time after so many
        self._failed = -1  # of the Keeps of the time after so many, nothing more is done
        self.dropped = 0

    def keep(self, effects: tuple[TrackingEffect, ...], refused: Refuse) -> None:
        """What of it cannot be kept is given to `refused`, in the loop's thread."""
        loop = asyncio.get_running_loop()
        shortage = self._shortage()
        if shortage:
            effects, lost = _parted(effects)
            if lost:
                self.dropped += len(lost)
                complain("error", f"{shortage}: the history of messages is not stored")
                refused(lost)
        size = sum(len(effect.record) for effect in effects if isinstance(effect, StoreFilter))
        if self._pending_bytes + size > MAX_PENDING_BYTES:
            self.dropped += _lost(effects)
            complain("error", "the disk is too slow for the history of messages: some of it is dropped")
            refused(effects)
            return
        self._pending_bytes += size
        self._handed.append(effects)
        failures = self._failures

        def work() -> None:
            first, rest = _parted(effects)
            left = effects
            try:
                if self._failed != failures:
                    self._store.apply(first)
                    left = rest
                    self._store.apply(rest)
                    loop.call_soon_threadsafe(self._handed.popleft)
            except (PostroadError, OSError) as error:
                complain("error", f"the history of messages could not be stored: {error}")
                self._failed = failures
                loop.call_soon_threadsafe(self._tell, refused, left)
            finally:
                loop.call_soon_threadsafe(self._written, size)

        loop.run_in_executor(self._thread, work)

    def _tell(self, refused: Refuse, left: tuple[TrackingEffect, ...]) -> None:
        """Of what failed, and of all that was handed over behind it until now: what comes next is kept."""
        self._handed.popleft()
        left = (*left, *chain.from_iterable(self._handed))
        self._handed.clear()
        self._failures += 1
        self.dropped += _lost(left)
        refused(left)

    def _written(self, size: int) -> None:
        self._pending_bytes -= size

    def read(self, tag: int, sequences: tuple[int, ...], deliver: Deliver) -> None:
        """Give the stored records to `deliver`, in the loop's thread; what cannot be read is b""."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            try:
                stored = self._store.read(sequences)
            except (PostroadError, OSError) as error:
                complain("error", f"the history of messages could not be read: {error}")
                stored = {}
            records = {sequence: stored.get(sequence, b"") for sequence in sequences}
            loop.call_soon_threadsafe(deliver, tag, records)

        loop.run_in_executor(self._thread, work)

    def close(self) -> None:
        """Wait until everything handed over is kept."""
        self._thread.shutdown(wait=True)


def _parted(
    effects: tuple[TrackingEffect, ...],
) -> tuple[tuple[TrackingEffect, ...], tuple[TrackingEffect, ...]]:
    """What makes room, or has some spared; and what takes room, which is not done without the other."""
    first = tuple(effect for effect in effects if _spared(effect))
    return first, tuple(effect for effect in effects if not _spared(effect))


def _spared(effect: TrackingEffect) -> bool:
    return isinstance(effect, DropFilters) or (isinstance(effect, StoreAttachments) and effect.pressing)


def _lost(effects: tuple[TrackingEffect, ...]) -> int:
    """How many are not made good: what else could not be done is done later."""
    return sum(not _spared(effect) for effect in effects)
