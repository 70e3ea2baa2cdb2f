"""Proof that somebody receives at an address: a datagram's source can be forged, what is sent there cannot be
read by the forger.

A cookie is a time and a keyed digest of it and the address. Whoever brings it back from that address has read
it there. Nothing is remembered for it, so strangers cannot fill anything up. The same serves as the key to
pings, which only those who got a response can have.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Final

from postroad.seam.datagrams import Endpoint
from postroad.units import SECOND_US
from postroad.wire.discovery import COOKIE_BYTES

COOKIE_LIFE_US: Final = 60 * SECOND_US
_TIME_BYTES: Final = 8
_SECRET_BYTES: Final = 32


class Cookies:
    """Of one node. `draw(n)` gives a random number in 0..n-1."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw
        self._secret = b""  # drawn when it is first needed

    def bake(self, purpose: bytes, endpoint: Endpoint, now_us: int) -> bytes:
        time = max(0, now_us).to_bytes(_TIME_BYTES, "big")
        return time + self._digest(purpose, endpoint, time)

    def good(self, cookie: bytes, purpose: bytes, endpoint: Endpoint, now_us: int) -> bool:
        if len(cookie) != COOKIE_BYTES:
            return False
        time = cookie[:_TIME_BYTES]
        if not -SECOND_US <= now_us - int.from_bytes(time, "big") <= COOKIE_LIFE_US:
            return False
        return hmac.compare_digest(cookie[_TIME_BYTES:], self._digest(purpose, endpoint, time))

    def _digest(self, purpose: bytes, endpoint: Endpoint, time: bytes) -> bytes:
        if not self._secret:
            self._secret = self._draw(1 << 8 * _SECRET_BYTES).to_bytes(_SECRET_BYTES, "big")
        signed = b"\0".join((purpose, endpoint[0].encode(), str(endpoint[1]).encode(), time))
        return hashlib.blake2b(signed, key=self._secret, digest_size=COOKIE_BYTES - _TIME_BYTES).digest()
