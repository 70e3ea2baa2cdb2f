"""What `postroad pub` and `postroad send` send: one payload a number of times, or lines of standard input."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from typing import Final

from postroad.errors import UsageError

ROUND: Final = 1024  # of them are sent before their ids are printed
READ_BYTES: Final = 1 << 16
MAX_LINE_BYTES: Final = 16 << 20  # far above what brokers accept; one endless line must not fill the memory


async def repeat(payload: bytes, count: int) -> AsyncIterator[list[bytes]]:
    for first in range(0, count, ROUND):
        yield [payload] * min(ROUND, count - first)


async def lines() -> AsyncIterator[list[bytes]]:
    """Lines of standard input, as many as there are at a time.

    Nothing can interrupt a thread that waits for a terminal or a pipe, and an executor is waited for at the
    end; a daemon thread is not, so Ctrl-C and a lost broker end the command at once.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[list[bytes] | UsageError | None] = asyncio.Queue()
    room = threading.Semaphore(2)  # one item being sent and one read ahead

    def put(item: list[bytes] | UsageError | None) -> None:
        room.acquire()
        loop.call_soon_threadsafe(queue.put_nowait, item)

    def read() -> None:
        rest = b""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            while chunk := os.read(0, READ_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                if lines:
                    put(lines)
                if len(rest) > MAX_LINE_BYTES:
                    put(UsageError(f"a line of standard input is longer than {MAX_LINE_BYTES} bytes"))
                    return
            if rest:
                put([rest])
            put(None)

    threading.Thread(target=read, daemon=True).start()
    while (item := await queue.get()) is not None:
        if isinstance(item, UsageError):
            raise item
        yield [line.rstrip(b"\r") for line in item]
        room.release()
