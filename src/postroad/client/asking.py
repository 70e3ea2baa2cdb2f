"""Request and reply over events: `client.ask` and `event.reply`.

A request is an event with two attributes: `reply_to`, a topic of the asking client alone, and `request`, a
number. Whoever gets it may answer with an event on that topic that bears the number; the first answer counts.
Brokers let nobody but the client's principal read the topic. The number is drawn, so that nobody answers who
was not asked.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from postroad.errors import PostroadError, UnavailableError, UsageError
from postroad.events import Event, Value
from postroad.links.access import REPLIES, replies_to

if TYPE_CHECKING:
    from postroad.client.aio import Client
    from postroad.client.subscription import Subscription

REPLY_TO: Final = "reply_to"
REQUEST: Final = "request"
MAX_ASKED: Final = 100_000  # requests of one client that wait for their answers
_TOPIC_BYTES: Final = 16
_NUMBER_BITS: Final = 62


class Asking:
    """The requests of one client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._topic = ""  # of the answers, while they are read
        self._waiting: dict[int, asyncio.Future[Event]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._lock: asyncio.Lock | None = None  # while the subscription begins

    async def ask(
        self,
        topic: str,
        payload: bytes | str,
        attributes: Mapping[str, Value] | None,
        mode: str,
        patience_s: float,
    ) -> Event:
        if len(self._waiting) >= MAX_ASKED:
            raise UsageError(f"{MAX_ASKED:,} requests of this client wait for their answers already")
        given = dict(attributes or {})
        if {REPLY_TO, REQUEST} & given.keys():
            raise UsageError(f"a request has the attributes {REPLY_TO!r} and {REQUEST!r} of its own")
        number = secrets.randbits(_NUMBER_BITS)
        answer: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(patience_s):
                await self._listen()
                await self._client.publish(
                    topic, payload, given | {REPLY_TO: self._topic, REQUEST: number}, mode=mode
                )
                return await answer
        except TimeoutError:
            raise TimeoutError(f"nobody answered on {topic!r} within {patience_s:g} s") from None
        finally:
            del self._waiting[number]

    async def _listen(self) -> None:
        """Answers are heard from the first request on."""
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self._reading is None or self._reading.done():
                place = replies_to(self._client._core.principal)
                self._topic = f"{place}/{secrets.token_hex(_TOPIC_BYTES)}"
                events = await self._client.subscribe(self._topic)
                self._reading = asyncio.create_task(self._read(events))

    async def _read(self, events: Subscription) -> None:
        error: PostroadError = UnavailableError("the client was closed")
        try:
            async for event in events:
                number = event.attributes.get(REQUEST) if isinstance(event, Event) else None
                waiting = self._waiting.get(number) if isinstance(number, int) else None
                if isinstance(event, Event) and waiting is not None and not waiting.done():
                    waiting.set_result(event)
        except PostroadError as ended:
            error = ended
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])


def answer_to(event: Event) -> tuple[str, dict[str, Value]]:
    """The topic and the attributes of an answer."""
    topic, number = event.attributes.get(REPLY_TO), event.attributes.get(REQUEST)
    if not isinstance(topic, str) or not isinstance(number, int) or not topic.startswith(f"{REPLIES}/"):
        raise UsageError("nobody waits for an answer to this event: `client.ask` did not publish it")
    return topic, {REQUEST: number}
