"""Who gets in: one check for requests, advertisements and announcements, at brokers and discovery nodes.

First whether the sender may be answered at all (`policy`), then whether it receives at its address
(`cookies`). Who has not shown that yet is sent a cookie, no longer than what it sent, and nothing else: no
network can be had to flood a third party.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from postroad.discovery.cookies import Cookies
from postroad.discovery.envelopes import Envelopes, Opened
from postroad.discovery.policy import Policy
from postroad.seam.datagrams import Datagram, Endpoint
from postroad.wire.discovery import Advertise, Announce, Cookie, Request

Asking = Request | Advertise | Announce


class Verdict(Enum):
    REFUSED = "refused"  # it may not be answered
    UNPROVEN = "unproven"  # it gets the cookie, if there is one
    ADMITTED = "admitted"


class Entry(NamedTuple):
    verdict: Verdict
    cookie: bytes = b""  # a datagram for the sender


class Gate:
    """Of one node. `draw(n)` gives a random number in 0..n-1."""

    def __init__(self, policy: Policy, envelopes: Envelopes, draw: Callable[[int], int]) -> None:
        self.policy = policy
        self._envelopes = envelopes
        self._cookies = Cookies(draw)

    def check(self, asking: Asking, opened: Opened, datagram: Datagram, now_us: int) -> Entry:
        source, purpose = datagram.source, type(asking).__name__.encode()
        if not self.policy.admits(
            source[0],
            uuid=asking.uuid,
            cookie=asking.cookie,
            credential=asking.credential,
            certificate=opened.certificate,
        ):
            return Entry(Verdict.REFUSED)
        if self._cookies.good(asking.cookie, purpose, source, now_us):
            return Entry(Verdict.ADMITTED)
        cookie = Cookie(
            uuid=asking.uuid,
            cookie=self._cookies.bake(purpose, source, now_us),
            sent_us=asking.sent_us,
            time_us=now_us,
            key=self._envelopes.key,
        )
        data = self._envelopes.pack(cookie, asking.key)
        return Entry(Verdict.UNPROVEN, data if len(data) <= len(datagram.data) else b"")

    def ping_key(self, endpoint: Endpoint, now_us: int) -> bytes:
        """With what who got a response may ping."""
        return self._cookies.bake(b"ping", endpoint, now_us)

    def may_ping(self, key: bytes, endpoint: Endpoint, now_us: int) -> bool:
        return self._cookies.good(key, b"ping", endpoint, now_us)
