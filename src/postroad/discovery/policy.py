"""Who is answered (spec V6): by credentials, by network realm, by certificate.

A token never travels in a datagram. Its SHA-256, which brokers keep, is the key of a digest over the
request's UUID and cookie: a copy of a request is of no use at another address, since the cookie there is
another one.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from typing import Final

from postroad.links.access import hash_token
from postroad.wire.discovery import CREDENTIAL_BYTES

_HINT_BYTES: Final = 8


def credential(token: str, uuid: bytes, cookie: bytes) -> bytes:
    """What shows that the sender of a request has this token; "" without one."""
    return _make_credential(bytes.fromhex(hash_token(token)), uuid, cookie) if token else b""


def _hint(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=_HINT_BYTES, person=b"postroad hint").digest()


def _make_credential(key: bytes, uuid: bytes, cookie: bytes) -> bytes:
    size = CREDENTIAL_BYTES - _HINT_BYTES
    return _hint(key) + hashlib.blake2b(uuid + cookie, key=key, digest_size=size).digest()


class Policy:
    """Of one node. `tokens`: SHA-256 in hexadecimal -> principal. Without tokens or certificates everybody is
    answered whose address is in a realm, or all are where no realm is named."""

    def __init__(
        self, tokens: Mapping[str, str], *, certificates: bool, anonymous: bool, realms: tuple[str, ...]
    ) -> None:
        self._keys = {_hint(bytes.fromhex(digest)): bytes.fromhex(digest) for digest in tokens}
        self._certificates = certificates
        self._anonymous = anonymous  # on loopback
        self._realms = [ipaddress.ip_network(realm) for realm in realms]

    def admits(self, host: str, *, uuid: bytes, cookie: bytes, credential: bytes, certificate: str) -> bool:
        """`certificate`: the verified name of who signed the request, or ""."""
        if self._realms and not self._within(host):
            return False
        if not self._keys and not self._certificates:
            return True
        if certificate and self._certificates:
            return True
        if credential:
            key = self._keys.get(credential[:_HINT_BYTES])
            return key is not None and hmac.compare_digest(credential, _make_credential(key, uuid, cookie))
        return self._anonymous and _is_loopback(host)

    def _within(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in realm for realm in self._realms)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
