"""One subscription of the async client: a queue between the core and the application.

It holds batches as they came; they are decoded when the application asks for events. What it holds is
bounded by the client's window, because credit goes back only as it is emptied.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Generator, Mapping
from typing import TYPE_CHECKING, Any, Self

from postroad.durable.token import CheckpointToken
from postroad.errors import PostroadError, UsageError
from postroad.events import Event, EventBatch, Gap
from postroad.ids import parse_pubend

if TYPE_CHECKING:
    from postroad.client.aio import Client


class Subscription:
    """The events of one subscription, each an Event, or a Gap where some are missing.

    `async for event in events` gives them one by one; `batches()` gives all that came, as the encoded
    batches they came in. Credit goes back to the broker as they are taken, so a program that falls behind
    holds no more than the client's window; then the broker's policy acts.
    """

    def __init__(
        self,
        client: Client,
        *,
        topic: str,
        where: str,
        overflow: str,
        buffer: int,
        durable: str = "",
        token: str = "",
        ack: str = "",
        since_us: int = 0,
    ) -> None:
        self.topic = topic
        self.where = where
        self.durable = durable
        self._ack = ack
        self._since_us = since_us
        self._start = token
        self._token: dict[int, int] = dict(CheckpointToken.from_json(token)) if token else {}
        self._reading: tuple[int, int] | None = None  # pubend and end of the batch handed out last
        self._unsaid = False  # something was handed out since the last acknowledgement
        self.missing: tuple[str, ...] = ()  # brokers that had not confirmed it when it began
        self._client = client
        self._overflow = overflow
        self._buffer = buffer
        self._number: int | None = None
        self._began: asyncio.Future[None] | None = None
        self._queue: deque[tuple[EventBatch | Gap, int]] = deque()  # bounded by the client's window
        self._events: list[Event] = []  # of the batch being read
        self._position = 0
        self._waiter: asyncio.Future[None] | None = None
        self._over = False
        self._error: PostroadError | None = None

    # --- life

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __await__(self) -> Generator[Any, None, Subscription]:
        return self._open().__await__()

    async def _open(self) -> Subscription:
        """Begin, unless it has begun; returns once every broker that can be reached filters with it."""
        if self._over:
            raise self._error or UsageError("this subscription is closed")
        client = self._client
        if self._began is None:
            await client._until(lambda: client.connected)
            self._number, effects = client._core.subscribe(
                topic=self.topic,
                where=self.where,
                overflow=self._overflow,
                buffer=self._buffer,
                durable=self.durable,
                token=self._start,
                ack=self._ack,
                since_us=self._since_us,
            )
            self._began = asyncio.get_running_loop().create_future()
            client._subscriptions[self._number] = self
            client._perform(effects)
        began = self._began
        try:
            await client._until(began.done)
            began.result()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Unsubscribe. What was not read is dropped."""
        client = self._client
        if self._number is not None:
            if self._ack == "auto" and not self._over:
                self._acknowledge(self._token)
            if client._subscriptions.pop(self._number, None) is not None:
                client._perform(client._core.unsubscribe(self._number))
            for _, taken in self._queue:  # also of one that the broker ended: others share the window
                client._core.consumed(taken)
            self._queue.clear()
            client._flush()
        self._events = []
        self._end(None)

    # --- durable subscriptions

    @property
    def token(self) -> str:
        """The checkpoint token, JSON: everything handed out so far is consumed. Keep it with your own state,
        and go on after it with `subscribe(durable=..., token=...)`, at any broker."""
        return CheckpointToken(self._token).to_json()

    def ack(self, event: Event | None = None) -> None:
        """Everything up to this event of its pubend was consumed; without one, all that was handed out."""
        if not self.durable:
            raise UsageError("only a durable subscription is acknowledged")
        if event is None:
            self._acknowledge(self._token)
        elif event.pubend is not None and event.tick is not None:
            self._acknowledge({parse_pubend(event.pubend): event.tick})

    def _acknowledge(self, token: Mapping[int, int]) -> None:
        self._unsaid = False
        if self._number is not None and token:
            self._client._perform(self._client._core.acknowledge(self._number, token))

    def _finish(self) -> None:
        """The application has all of what it was handed last."""
        if self._reading is not None:
            self._advance(*self._reading)
            self._reading = None

    def _advance(self, pubend: int, tick: int) -> None:
        if self.durable and tick > self._token.get(pubend, 0):
            self._token[pubend] = tick
            self._unsaid = True

    # --- reading

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event | Gap:
        while self._position >= len(self._events):
            item = await self._next()
            if item is None:
                raise StopAsyncIteration
            if isinstance(item, Gap):
                return item
            self._events = item.events()
            self._position = 0
        event = self._events[self._position]
        self._position += 1
        if self._reading is not None:
            if self._position == len(self._events):
                self._finish()
            elif event.tick is not None:
                self._advance(self._reading[0], event.tick)
        return event

    async def batches(self) -> AsyncIterator[list[EventBatch | Gap]]:
        """All that has come, a list at a time."""
        while (item := await self._next()) is not None:
            items = [item]
            while self._queue:
                items.append(self._pop())
            self._finish()
            yield items

    async def _next(self) -> EventBatch | Gap | None:
        """Wait for something to come; None once it is over and everything was read."""
        if self._began is None or not self._began.done():
            await self._open()
        self._finish()
        if self._unsaid and self._ack == "auto":
            self._acknowledge(self._token)  # who asks for more is done with what it had
        while not self._queue:
            if self._over:
                if self._error is not None:
                    raise self._error
                return None
            if self._waiter is not None:
                raise UsageError("this subscription is being read by another task")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._pop()

    def _pop(self) -> EventBatch | Gap:
        self._finish()
        item, taken = self._queue.popleft()
        if isinstance(item, EventBatch):
            self._reading = (item.pubend, item.end)
        elif item.pubend:
            self._advance(parse_pubend(item.pubend), item.end)
        if taken:
            client = self._client
            client._core.consumed(taken)
            client._schedule_flush()
        return item

    # --- what the client tells it

    def _put(self, item: EventBatch | Gap, taken: int) -> None:
        if not taken and self._queue and isinstance(item, Gap) and not item.pubend:
            # Gaps of reconnects take nothing of the window. Two with nothing between them are told as one.
            last, held = self._queue[-1]
            if isinstance(last, Gap) and not last.pubend:
                self._queue[-1] = (Gap(pubend="", start=last.start, end=item.end), held)
                return
        self._queue.append((item, taken))
        self._notify()

    def _begin(self, missing: tuple[str, ...], token: Mapping[int, int]) -> None:
        self.missing = missing
        for pubend, tick in token.items():
            self._token.setdefault(pubend, tick)
        if self._began is not None and not self._began.done():
            self._began.set_result(None)
        self._client._wake()

    def _end(self, error: PostroadError | None) -> None:
        if self._over:
            return
        self._over = True
        self._error = error
        if self._began is not None and not self._began.done():
            self._began.set_exception(error or UsageError("this subscription is closed"))
            self._began.exception()  # looked at here: nobody may be waiting for it
        self._client._wake()
        self._notify()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
