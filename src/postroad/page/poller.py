"""One poller for all viewers: it asks the network every POLL_S while somebody looks, else every REST_S.

What it asks is what the views that are open need. When its broker is gone it goes to any other that it has
heard of, so that a page outlives the broker that it was started with, also while nobody looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from postroad.client.aio import Client
from postroad.errors import PostroadError
from postroad.page.core.model import Model
from postroad.page.door import Door

POLL_S: Final = 2.0
REST_S: Final = 60.0
PATIENCE_S: Final = 5.0  # for one answer; brokers wait for each other for less


class Poller:
    def __init__(self, door: Door, model: Model) -> None:
        self._door = door
        self.model = model
        self._wanted: dict[str, frozenset[str]] = {}  # viewer -> what its view needs
        self._client: Client | None = None
        self._woken = asyncio.Event()
        self._connecting = asyncio.Lock()
        self.polls = 0
        self._wall_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        """Of the wall, but never back."""
        return self._wall_s + time.monotonic()

    # ---- who looks

    def look(self, viewer: str, wanted: frozenset[str]) -> None:
        new = wanted - self.wanted()
        self._wanted[viewer] = wanted
        if new:
            self._woken.set()

    def leave(self, viewer: str) -> None:
        self._wanted.pop(viewer, None)

    def wanted(self) -> frozenset[str]:
        return frozenset().union(*self._wanted.values())

    @property
    def viewers(self) -> int:
        return len(self._wanted)

    def hurry(self) -> None:
        """Something was changed: ask now."""
        self._woken.set()

    # ---- asking

    async def run(self) -> None:
        try:
            while True:
                await self._poll()
                await self._rest(POLL_S)
                if not self._wanted:
                    await self._rest(REST_S - POLL_S)
        finally:
            await self._hang_up()

    async def _rest(self, longest_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._woken.wait()
        self._woken.clear()

    async def _poll(self) -> None:
        self.polls += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                client = await self._connected()
            # Status first: other answers are read beside it.
            for what in ("status", *sorted(self.wanted() - {"status", "queues"})):
                async with asyncio.timeout(PATIENCE_S):
                    answer = await client.request("network", what=what)
                self.model.take(what, answer, client.broker, self.now_s())
            if "queues" in self.wanted():
                async with asyncio.timeout(PATIENCE_S):
                    self.model.take_queues(await client.request("queues"))
        except (PostroadError, TimeoutError, OSError) as error:
            self.model.fail(str(error) or "the broker does not answer", self.now_s())
            await self._hang_up()

    async def _connected(self) -> Client:
        async with self._connecting:
            if self._client is None:
                addresses = self._door.anywhere(self.model.addresses())
                self._client = await self._door.client("page", addresses=addresses)
            return self._client

    async def client(self) -> Client:
        """The page's own connection, for what is read on demand."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._connected()

    async def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(PostroadError):
                await client.close()
