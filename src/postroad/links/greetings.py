"""Whether datagrams pass between the two ends of a connection (spec B1).

Who dialled the connection greets: soon at first, then every few seconds. Who was dialled answers each
greeting. Both say whether they hear the other one, and both send datagrams only while they hear it and are
heard. The address of a peer is the one that the newest of its sealed datagrams came from, so it may be behind
a NAT. Datagrams are numbered: one that comes again, from wherever, is dropped.
"""

from __future__ import annotations

from typing import Final

from postroad.seam.datagrams import Datagram, Endpoint
from postroad.units import SECOND_US
from postroad.wire.datagrams import GREETING, seal, unseal

FIRST_GREET_US: Final = SECOND_US // 2
GREET_US: Final = 5 * SECOND_US
SILENT_US: Final = 3 * GREET_US  # after this long without a datagram of it, a peer is not heard
HEARD: Final = b"\x01"
UNHEARD: Final = b"\x00"
WINDOW: Final = 1_024  # numbers below the newest of which it is known whether they came


class DatagramPath:
    """`key`: of the connection, b"" where there are no datagrams. `endpoint`: of the peer, as far as it is
    known."""

    __slots__ = (
        "_came",
        "_greet_us",
        "_heard_us",
        "_key",
        "_newest",
        "_number",
        "_said_heard",
        "_wait_us",
        "dialled",
        "endpoint",
        "heard",
    )

    def __init__(self, key: bytes, endpoint: Endpoint | None, *, dialled: bool, now_us: int) -> None:
        self._key = key
        self._number = 0  # of the last datagram that was sealed
        self._newest = 0  # of those that came
        self._came = 0  # bit n: the one n below the newest did
        self.endpoint = endpoint
        self.dialled = dialled
        self.heard = False  # the peer says that our datagrams arrive
        self._heard_us: int | None = None  # its last datagram
        self._said_heard = False  # by our last greeting
        self._greet_us = now_us  # when the next one is due
        self._wait_us = FIRST_GREET_US  # from that to the one after it

    def hears(self, now_us: int) -> bool:
        """Whether its datagrams arrive here."""
        return self._heard_us is not None and now_us - self._heard_us < SILENT_US

    def passes(self, now_us: int) -> bool:
        """Whether datagrams do, in both directions."""
        return self.heard and self.endpoint is not None and self.hears(now_us)

    def seal(self, kind: int, body: bytes) -> bytes:
        self._number += 1
        return seal(kind, self._key, body, dialled=self.dialled, number=self._number)

    def unseal(self, datagram: Datagram, now_us: int) -> bytes | None:
        """The body of a datagram of the peer; None if it is not its own, or came before."""
        opened = unseal(datagram.data, self._key, dialled=not self.dialled) if self._key else None
        if opened is None:
            return None
        number, body = opened
        behind = self._newest - number
        if behind >= WINDOW or (behind >= 0 and self._came >> behind & 1):
            return None
        if behind < 0:
            self._came = (self._came << min(-behind, WINDOW) | 1) & (1 << WINDOW) - 1
            self._newest, self.endpoint = number, datagram.source
        else:
            self._came |= 1 << behind
        self._heard_us = now_us
        return body

    def greeted(self, body: bytes) -> bool:
        """The peer greeted: whether it is greeted now."""
        self.heard = body == HEARD
        return not self.dialled or not self._said_heard

    def greeting(self, now_us: int) -> bytes:
        """The datagram to send to the endpoint."""
        self._said_heard = self.hears(now_us)
        self._greet_us = now_us + self._wait_us
        self._wait_us = min(2 * self._wait_us, GREET_US)
        return self.seal(GREETING, HEARD if self._said_heard else UNHEARD)

    def next_deadline(self) -> int | None:
        """When to greet next although nothing comes; None: never."""
        return self._greet_us if self.dialled and self._key and self.endpoint is not None else None
