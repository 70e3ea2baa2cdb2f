"""The thread behind the client for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading

import postroad
from postroad.client.loop_thread import LoopThread

WAIT_S = 60.0  # far more than a busy machine needs; what hangs, hangs for ever


def test_who_waits_while_another_thread_closes_is_told_so() -> None:
    """A loop that is stopped answers nobody any more: whatever is under way has to end first."""
    thread = LoopThread()
    begun = threading.Barrier(5)
    told: list[BaseException] = []

    async def wait() -> None:
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, WAIT_S)
        await asyncio.Event().wait()

    def call() -> None:
        try:
            thread.call(wait)
        except postroad.PostroadError as error:
            told.append(error)

    callers = [threading.Thread(target=call, daemon=True) for _ in range(4)]
    for caller in callers:
        caller.start()
    begun.wait(WAIT_S)
    thread.stop()
    for caller in callers:
        caller.join(WAIT_S)
    assert [str(error) for error in told] == ["this client is closed"] * 4


def test_calls_that_come_while_it_stops_are_answered() -> None:
    for _ in range(20):
        thread = LoopThread()
        ended: list[object] = []

        def call(thread: LoopThread = thread, ended: list[object] = ended) -> None:
            try:
                while True:
                    thread.call(asyncio.sleep, 0)
            except postroad.UsageError as error:
                ended.append(error)

        callers = [threading.Thread(target=call, daemon=True) for _ in range(3)]
        for caller in callers:
            caller.start()
        thread.stop()
        thread.stop()
        for caller in callers:
            caller.join(WAIT_S)
        assert len(ended) == 3
