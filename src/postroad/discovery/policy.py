"""Who is answered (spec V6): by credentials, by network realm, by certificate.

A token never travels in a datagram. Its SHA-256, which brokers keep, is the key of a digest over the
request's UUID and cookie: a copy of a request is of no use at another address, since the cookie there is
another one.

With the same key a response shows that its broker knows the token, too, and which address it has: who has a
token shows it to nobody else. The UUID is drawn for each search, so no earlier response serves.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from typing import Final

import msgspec

from postroad.links.access import hash_token
from postroad.wire.discovery import CREDENTIAL_BYTES, PROOF_BYTES, Response

_HINT_BYTES: Final = 8


def credential(token: str, uuid: bytes, cookie: bytes) -> bytes:
    """What shows that the sender of a request has this token; "" without one."""
    return _make_credential(_key(token), uuid, cookie) if token else b""


def _key(token: str) -> bytes:
    return bytes.fromhex(hash_token(token))


def _hint(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=_HINT_BYTES, person=b"postroad hint").digest()


def _make_credential(key: bytes, uuid: bytes, cookie: bytes) -> bytes:
    size = CREDENTIAL_BYTES - _HINT_BYTES
    return _hint(key) + hashlib.blake2b(uuid + cookie, key=key, digest_size=size).digest()


def prove(response: Response, key: bytes, link_token: str) -> Response:
    """The response with what shows that its broker has the key of a credential, and this token of brokers:
    they have one that clients do not know. As it is without a key."""
    if not key:
        return response
    link_proof = _make_proof(_key(link_token), response) if link_token else b""
    return msgspec.structs.replace(response, proof=_make_proof(key, response), link_proof=link_proof)


def is_proven(token: str, response: Response) -> bool:
    """Whether who sent it knows this token."""
    proof = _make_proof(_key(token), response)
    return hmac.compare_digest(response.proof, proof) or hmac.compare_digest(response.link_proof, proof)


def _make_proof(key: bytes, response: Response) -> bytes:
    # All but the name and the address have one length each, and names are printable.
    identity = f"{response.name}\0{response.address}".encode()
    said = response.uuid + response.ping_key + response.broker.to_bytes(4, "big") + identity
    return hashlib.blake2b(said, key=key, digest_size=PROOF_BYTES, person=b"postroad proof").digest()


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
            return bool(self.key(uuid=uuid, cookie=cookie, credential=credential))
        return self._anonymous and _is_loopback(host)

    def key(self, *, uuid: bytes, cookie: bytes, credential: bytes) -> bytes:
        """What this credential was made with; "" if that is not of a token here."""
        key = self._keys.get(credential[:_HINT_BYTES], b"")
        good = bool(key) and hmac.compare_digest(credential, _make_credential(key, uuid, cookie))
        return key if good else b""

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
