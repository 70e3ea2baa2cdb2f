"""A proxy that breaks the network between processes.

As a program, `python -m tests.worlds.fault_proxies HOST:PORT`, for clients that keep this process busy while
they wait: it prints its address, and obeys lines `cut_at PATTERN`, `cut_unheard_at PATTERN` and `heal`.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable

PROXY_S = 30.0


class FaultProxy:
    """A TCP proxy in a thread of its own: cut, stall, delay, throttle, flip bits, cut at a request, heal."""

    CHUNK = 16_384

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusing = False
        self._delay_s = 0.0
        self._bytes_per_s = 0.0
        self._draw: random.Random | None = None
        self._flip_every = 0
        self.flipped = 0
        self._trap: re.Pattern[bytes] | None = None
        self._unheard = False  # what is in the trap is passed on, and its answer is not
        self._trapped: object = None  # the connection that is
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.address = ""
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(PROXY_S)

    def cut(self) -> None:
        """Drop every connection and refuse new ones until `heal`."""
        self._call(self._cut)

    def blip(self) -> None:
        """Drop every connection once; new ones are welcome."""
        self._call(self._drop)

    def stall(self) -> None:
        """Connections stay, no byte passes: the half-open link."""
        self._call(self._flowing.clear)

    def delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def throttle(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s

    def flip(self, seed: int, every: int) -> None:
        """One bit of so many bytes, on average, arrives changed."""
        self._draw, self._flip_every = random.Random(seed), every

    def cut_at(self, pattern: bytes, *, unheard: bool = False) -> None:
        """Cut when a client sends this: before it is passed on, or `unheard`, when it has been answered."""
        self._trapped, self._unheard, self._trap = None, unheard, re.compile(pattern)

    def heal(self) -> None:
        self._delay_s = self._bytes_per_s = 0.0
        self._draw = self._trap = self._trapped = None
        self._refusing = False
        self._call(self._flowing.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PROXY_S)

    def _call(self, action: Callable[[], object]) -> None:
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._loop.call_soon_threadsafe(act)
        assert done.wait(PROXY_S)

    def _cut(self) -> None:
        self._refusing = True
        self._drop()

    def _drop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(self._end_all())
        self._loop.close()

    async def _end_all(self) -> None:
        """However busy the machine is: what is left open fails whichever test runs when that is found."""
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports that were aborted close their sockets in the next turn

    def _damaged(self, data: bytes) -> bytes:
        if self._draw is None:
            return data
        damaged = bytearray(data)
        for at in range(len(data)):
            if self._draw.randrange(self._flip_every) == 0:
                damaged[at] ^= 1 << self._draw.randrange(8)
                self.flipped += 1
        return bytes(damaged)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far: asyncio.StreamWriter | None = None
        try:
            if not self._refusing:
                far_reader, far = await asyncio.open_connection(*self._target)
                pumps = [
                    asyncio.ensure_future(self._pump(reader, far, task, sent=True)),
                    asyncio.ensure_future(self._pump(far_reader, writer, task, sent=False)),
                ]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for one in (writer, far):
                if one is not None:
                    one.transport.abort()

    def _springs(self, data: bytes, connection: object, *, sent: bool) -> bool:
        """Whether the trap closes before this is passed on."""
        if self._trap is None or (self._trapped is None and not sent):
            return False
        if self._trapped is None and self._trap.search(data):
            self._trapped = connection
            return not self._unheard
        return self._trapped is connection and not sent

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: object, *, sent: bool
    ) -> None:
        while data := await reader.read(self.CHUNK):
            await self._flowing.wait()
            if self._springs(data, connection, sent=sent):
                self._cut()
                return
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            if self._bytes_per_s:
                await asyncio.sleep(len(data) / self._bytes_per_s)
            writer.write(self._damaged(data))
            await writer.drain()


class ProxyProcess:
    """The proxy as a process of its own."""

    def __init__(self, target: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.address = self._answer()

    def cut_at(self, pattern: str, *, unheard: bool = False) -> None:
        self._obey(f"{'cut_unheard_at' if unheard else 'cut_at'} {pattern}")

    def heal(self) -> None:
        self._obey("heal")

    def _obey(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        assert self._answer() == line

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main(target: str) -> None:
    proxy = FaultProxy(target)
    sys.stdout.write(f"{proxy.address}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        command, _, pattern = line.rstrip("\n").partition(" ")
        if command == "heal":
            proxy.heal()
        else:
            proxy.cut_at(pattern.encode(), unheard=command == "cut_unheard_at")
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
