"""A live tail: a sample of what is published, for people to pick a message from.

It costs the broker little, whatever the traffic: it takes SIP messages, ends its subscription, rests, and
begins again. Where little is published it stays subscribed, and misses nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from postroad.client.aio import Client
from postroad.errors import PostroadError
from postroad.events import Event
from postroad.page.core.reading import shown
from postroad.page.operators import Operator

if TYPE_CHECKING:
    from postroad.page.site import Site

SIP: Final = 10  # messages
REST_S: Final = 2.0
KEPT: Final = 30
MAX_TAILS: Final = 8  # of all viewers
LONGEST_S: Final = 600.0  # then it stops: nobody watches for so long


class Tail:
    """Reads with the operator's connection where there is one, with the page's own where not."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.events: deque[Event] = deque(maxlen=KEPT)  # the newest first
        self.said = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, topic: str, where: str, operator: Operator | None) -> None:
        if self._site.tails >= MAX_TAILS:
            self.said = f"{MAX_TAILS} tails run already: try again when somebody has stopped theirs."
            return
        self.events.clear()
        self.said = "Waiting for a message …"
        self._task = asyncio.create_task(self._run(topic, where, operator))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, topic: str, where: str, operator: Operator | None) -> None:
        self._site.tails += 1
        try:
            async with asyncio.timeout(LONGEST_S):
                while True:
                    client = await (self._site.poller.client() if operator is None else operator.client())
                    await self._sip(client, topic, where)
                    await asyncio.sleep(REST_S)
        except TimeoutError:
            self.said = "The tail has stopped by itself."
        except asyncio.CancelledError:
            self.said = "The tail is stopped."
            raise
        except (PostroadError, OSError) as error:
            self.said = shown(str(error), 300)
        finally:
            self._site.tails -= 1

    async def _sip(self, client: Client, topic: str, where: str) -> None:
        taken = 0
        async with client.subscribe(topic, where, buffer="64 KiB") as events:
            async for event in events:
                if isinstance(event, Event):
                    self.events.appendleft(event)
                    self.said = "A sample of what is published, the newest first."
                    taken += 1
                    if taken >= SIP:
                        return
