"""An event loop in a thread of its own, for the client of programs that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

import uvloop

from postroad.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


class ClosedError(UsageError):
    def __init__(self, message: str = "this client is closed") -> None:
        super().__init__(message)


class LoopThread:
    """An event loop in a daemon thread. Every call of it is answered, also those that come as it stops."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._lock = threading.Lock()  # for the next one: nothing is handed to a loop that is told to stop
        self.over = False
        self._thread = threading.Thread(target=self._run, name="postroad-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            if tasks := asyncio.all_tasks(self._loop):  # other threads wait for these
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            # Work that ended in the very turn that stopped has its result, and nobody told the caller yet.
            self._loop.run_until_complete(asyncio.sleep(0))
        finally:
            self._loop.close()

    def call(self, work: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run it there and wait for its result. An interrupt (Ctrl-C) ends the wait and the work.

        The coroutine is made there too: an interrupt could leave one made here with nobody to await it.
        """
        answer: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            try:
                tasks.append(self._loop.create_task(work(*args, **kwargs)))
            except Exception as error:  # the arguments are not those of the work
                answer.set_exception(error)
            else:
                tasks[0].add_done_callback(partial(_tell, answer))

        try:
            with self._lock:
                if self.over:
                    raise ClosedError
                self._loop.call_soon_threadsafe(begin)
            return answer.result()
        except CancelledError:
            raise ClosedError from None
        except BaseException:
            self.call_soon(lambda: [task.cancel() for task in tasks])
            raise

    def call_soon(self, work: Callable[[], object]) -> None:
        with self._lock:
            if not self.over:  # else nobody can be told any more
                self._loop.call_soon_threadsafe(work)

    def stop(self) -> None:
        with self._lock:
            if not self.over:
                self.over = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _tell(answer: Future[T], done: asyncio.Task[T]) -> None:
    """What became of the work, to the thread that waits for it."""
    if done.cancelled():
        answer.cancel()
    elif (error := done.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())
