"""Datagrams between nodes: how they begin and how long they are.

Every datagram begins with the same four bytes: the letters "pr", the version u8 and the kind u8. What begins
otherwise is not ours: scanners and strays reach every open port, and a driver drops them before any core is
run.

Datagrams that go with a connection are sealed: a session of 8 bytes says which connection that is, and a
code of 8 bytes that who sent them has its key, which was said in the handshake. A number that rises with each
of them lets a repetition be known. Anything else is dropped unanswered, so nobody can make a node answer to
an address that is not his.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

# Every IPv6 link carries packets of 1,280 bytes, 48 of which are the headers of IPv6 and UDP. More would pass
# on most links, but tunnels and clouds take 20 to 100 bytes off Ethernet's 1,500; a datagram in fragments is
# lost with any of them, and many firewalls drop fragments. Nothing that keeps to this is ever cut.
MAX_DATAGRAM_BYTES: Final = 1_232
DATAGRAM_VERSION: Final = 1
DATAGRAM_MARK: Final = b"pr" + bytes((DATAGRAM_VERSION,))  # what a kind and a body follow
DATAGRAM_PREFIX_BYTES: Final = len(DATAGRAM_MARK) + 1

DATAGRAM_KEY_BYTES: Final = 24  # a session of 8 bytes and a secret of 16
SESSION_BYTES: Final = 8
CODE_BYTES: Final = 8
NUMBER_BYTES: Final = 8
SEAL_BYTES: Final = SESSION_BYTES + CODE_BYTES + NUMBER_BYTES

# Kinds.
BEST_EFFORT: Final = 16  # sealed: a BEST_EFFORT frame
GREETING: Final = 17  # sealed: one byte, whether the sender hears the other side

# A best-effort event: its topic, attributes and payload, such that it also fits a repair that carries it.
MAX_BEST_EFFORT_BYTES: Final = 960


def seal(kind: int, key: bytes, body: bytes, *, dialled: bool, number: int) -> bytes:
    """One whole datagram, the `number`th. `dialled`: the sender has dialled the connection, so that nothing
    can be sent back to its sender as if the other side had said it."""
    numbered = number.to_bytes(NUMBER_BYTES, "big") + body
    return pack(kind, key[:SESSION_BYTES] + _code(kind, key, numbered, dialled) + numbered)


def session_of(data: bytes) -> bytes:
    return data[DATAGRAM_PREFIX_BYTES : DATAGRAM_PREFIX_BYTES + SESSION_BYTES]


def unseal(data: bytes, key: bytes, *, dialled: bool) -> tuple[int, bytes] | None:
    """Number and body of a sealed datagram; None if it was not sealed with this key. `dialled`: as of its
    sender."""
    numbered_at = DATAGRAM_PREFIX_BYTES + SESSION_BYTES + CODE_BYTES
    code, numbered = data[numbered_at - CODE_BYTES : numbered_at], data[numbered_at:]
    if len(numbered) < NUMBER_BYTES:
        return None
    if not hmac.compare_digest(code, _code(datagram_kind(data), key, numbered, dialled)):
        return None
    return int.from_bytes(numbered[:NUMBER_BYTES], "big"), numbered[NUMBER_BYTES:]


def _code(kind: int, key: bytes, body: bytes, dialled: bool) -> bytes:
    secret = key[SESSION_BYTES:] + bytes((kind, dialled))
    return hashlib.blake2b(body, digest_size=CODE_BYTES, key=secret).digest()


def pack(kind: int, body: bytes) -> bytes:
    """One whole datagram. Who makes the body keeps it within MAX_DATAGRAM_BYTES with the prefix."""
    return DATAGRAM_MARK + bytes((kind,)) + body


def datagram_kind(data: bytes) -> int:
    """Of a datagram that a driver let pass."""
    return data[len(DATAGRAM_MARK)]


def is_ours(data: bytes) -> bool:
    """Whether these bytes are a datagram of ours, of a version that this side speaks."""
    return DATAGRAM_PREFIX_BYTES <= len(data) <= MAX_DATAGRAM_BYTES and data.startswith(DATAGRAM_MARK)
