"""Clients that come back go on with the publisher number they had, if they show the key that came with it.

With a new number, what a client has in flight would look like the events of another publisher.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Final

from postroad.errors import BugError
from postroad.seam.peers import Peer
from postroad.wire.frames import Hello

MAX_PUBLISHERS: Final = 100_000  # numbers and keys remembered for clients that come back


class Resuming:
    """The publisher numbers that clients have, or had. `new_number` gives each of many in turn.

    A publisher's durable events go to the pubend that is its number modulo `pubends`. One that had a number
    at an earlier start gets a new one that leads to the same pubend, so that its events stay in order.
    """

    __slots__ = ("_live", "_new_key", "_new_number", "_pubends", "_publishers")

    def __init__(self, *, new_number: Callable[[], int], new_key: Callable[[], bytes], pubends: int) -> None:
        self._new_number, self._new_key = new_number, new_key
        self._pubends = max(1, pubends)
        # publisher number -> key and principal, the longest unused first, at most MAX_PUBLISHERS
        self._publishers: dict[int, tuple[bytes, str]] = {}
        self._live: dict[int, int] = {}  # publisher number -> its connection, while there is one

    def number(self, hello: Hello, principal: str) -> tuple[int, bool]:
        """The number of a client, and whether it is one that it had."""
        known = self._publishers.get(hello.publisher)
        if known is not None and known[1] == principal and hmac.compare_digest(known[0], hello.resume_key):
            self._publishers[hello.publisher] = self._publishers.pop(hello.publisher)
            return hello.publisher, True
        lane = hello.publisher % self._pubends if hello.publisher else None
        tries = self._pubends * (len(self._publishers) + len(self._live) + 2)
        for _ in range(tries):  # one of so many is free
            number = self._new_number()
            fits = lane is None or number % self._pubends == lane
            if fits and number not in self._publishers and number not in self._live:
                break
        else:
            raise BugError("no new publisher number is to be had")
        if len(self._publishers) >= MAX_PUBLISHERS:
            self._forget()
        self._publishers[number] = (self._new_key(), principal)
        return number, False

    def _forget(self) -> None:
        """The longest unused; one that is connected only where all are."""
        for _ in self._live:
            oldest = next(iter(self._publishers))
            if oldest not in self._live:
                break
            self._publishers[oldest] = self._publishers.pop(oldest)
        del self._publishers[next(iter(self._publishers))]

    def key(self, number: int) -> bytes:
        return self._publishers[number][0]

    def connection(self, number: int) -> int | None:
        """That which uses it now."""
        return self._live.get(number)

    def opened(self, number: int, connection: int) -> int | None:
        """It is used by this connection; the one that it was used by until now."""
        replaces = self._live.get(number)
        self._live[number] = connection
        return replaces

    def closed(self, number: int, connection: int) -> None:
        if self._live.get(number) == connection:
            del self._live[number]
            if number in self._publishers:
                self._publishers[number] = self._publishers.pop(number)

    def check(self, peer: Callable[[int], Peer | None]) -> None:
        """`peer` of a connection."""
        for publisher, connection in self._live.items():
            known = peer(connection)
            if known is None or known.publisher != publisher:
                raise BugError(f"connection {connection} is not that of publisher {publisher}")
        if len(self._publishers) > MAX_PUBLISHERS:
            raise BugError("more publishers remembered than allowed")
