"""What a process does for its memory besides serving: cycles are looked for when nobody waits, and what is
free goes back to the system.

The collector walks all that lives, a million objects in 0.2 s, whenever a quarter more lives than the last
time: whoever subscribes makes everybody wait for it. The cores make no cycles, so a full collection has
little to find, and can wait for a calm moment. The young generations are collected as always: they are small.

What many large buffers leave behind is free, but stays with the process: the allocator gives back only what
lies at the end of its heap, unless it is asked to.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from typing import Final

from postroad.net.log import LOGGER
from postroad.units import MIB

LOOK_S: Final = 1.0
CALM_INPUTS: Final = 50  # in a second: fewer, and nobody is kept waiting
COLLECT_S: Final = 60  # between full collections in calm moments
LATEST_S: Final = 300  # a process that is never calm has one this often
FREE_BYTES: Final = 8 * MIB  # more than that came free since the last time: it is given back
_NEVER: Final = 1 << 30  # collections of the young generations before a full one


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    ] + [("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


class Allocator:
    """That of glibc; elsewhere nothing is free, and nothing is given back."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = ctypes.CDLL(None)
        try:
            self._library.mallinfo2.restype = _Mallinfo2
            self._library.malloc_trim.restype = ctypes.c_int
        except AttributeError:
            self._library = None

    def free_bytes(self) -> int:
        return 0 if self._library is None else int(self._library.mallinfo2().fordblks)

    def give_back(self) -> None:
        if self._library is not None:
            self._library.malloc_trim(0)


class Upkeep:
    """`inputs` counts what the process was given to do so far."""

    def __init__(self, inputs: Callable[[], int], allocator: Allocator) -> None:
        self._inputs = inputs
        self._allocator = allocator
        self._seen = inputs()
        self._looks = 0  # since the last full collection
        self._floor = allocator.free_bytes()  # what was free already, and is given back or in use again
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Modules and what was made so far stay: no collection need walk them."""
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._wait()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_and_wait)

    def _look_and_wait(self) -> None:
        self._wait()
        self.look()

    def look(self) -> None:
        """Once a second."""
        inputs, self._looks = self._inputs(), self._looks + 1
        is_calm, self._seen = inputs - self._seen < CALM_INPUTS, inputs
        if self._looks >= (COLLECT_S if is_calm else LATEST_S):
            self._looks = 0
            freed = gc.collect()
            LOGGER.debug("a full collection found %d objects", freed)
        free_bytes = self._allocator.free_bytes()
        self._floor = min(self._floor, free_bytes)
        if free_bytes > self._floor + FREE_BYTES:
            self._allocator.give_back()
            self._floor = free_bytes
