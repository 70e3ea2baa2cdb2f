"""How a message becomes a datagram and back: as it is, or signed and encrypted where there are certificates.

Pings are as they are in either case: only who has read a response knows the key that they are answered for.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from postroad.errors import PeerError
from postroad.wire.datagrams import datagram_kind
from postroad.wire.discovery import (
    MIN_REQUEST_BYTES,
    Kind,
    Message,
    Ping,
    Pong,
    Sealed,
    decode,
    decode_body,
    encode,
    encode_body,
    padded,
)


class Sealer(Protocol):
    """Signs and encrypts with a certificate's key, and opens what others sealed."""

    @property
    def public_key(self) -> bytes:
        """What others encrypt for."""
        ...

    def seal(self, kind: int, body: bytes, to: bytes) -> Sealed: ...
    def open(self, sealed: Sealed, now_us: int) -> tuple[bytes, str]:
        """The body and the verified name of its sender; PeerError if either cannot be had."""
        ...

    def check_key(self, key: bytes) -> None:
        """PeerError for a key that nothing can be encrypted for."""
        ...


class Opened(msgspec.Struct, frozen=True):
    message: Message
    certificate: str = ""  # the verified name of the sender


SEALED_REQUEST_BYTES: Final = 450  # of the request within: a cookie with a larger certificate is not longer


class Envelopes:
    """`sealer` is None without certificates."""

    def __init__(self, sealer: Sealer | None) -> None:
        self._sealer = sealer

    @property
    def key(self) -> bytes:
        return b"" if self._sealer is None else self._sealer.public_key

    def pack(self, message: Message, to: bytes = b"") -> bytes:
        """`to` is the receiver's key, "" where it is not known yet."""
        if self._sealer is None or isinstance(message, Ping | Pong):
            return encode(padded(message, MIN_REQUEST_BYTES))
        kind, body = encode_body(message if to else padded(message, SEALED_REQUEST_BYTES))
        return encode(self._sealer.seal(kind, body, to))

    def unpack(self, data: bytes, now_us: int) -> Opened:
        """PeerError for what is malformed, not sealed where it must be, or not to be opened."""
        message = decode(data)
        if isinstance(message, Ping | Pong):
            return Opened(message)
        if (self._sealer is None) != (datagram_kind(data) != Kind.SEALED):
            raise PeerError("sealed, and there is no certificate here; or not sealed, and there is one")
        if self._sealer is None or not isinstance(message, Sealed):
            return Opened(message)
        body, certificate = self._sealer.open(message, now_us)
        inner = decode_body(message.kind, body)
        if isinstance(inner, Sealed):
            raise PeerError("a sealed message in a sealed one")
        key = getattr(inner, "key", b"")
        if key and not isinstance(inner, Ping | Pong):
            self._sealer.check_key(key)  # now: who answers it later need not reckon with its failure
        return Opened(inner, certificate)
