"""Datagrams between nodes: how they begin and how long they are.

Every datagram begins with the same four bytes: the letters "pr", the version u8 and the kind u8. What begins
otherwise is not ours: scanners and strays reach every open port, and a driver drops them before any core is
run.
"""

from __future__ import annotations

from typing import Final

# Every IPv6 link carries packets of 1,280 bytes, 48 of which are the headers of IPv6 and UDP. More would pass
# on most links, but tunnels and clouds take 20 to 100 bytes off Ethernet's 1,500; a datagram in fragments is
# lost with any of them, and many firewalls drop fragments. Nothing that keeps to this is ever cut.
MAX_DATAGRAM_BYTES: Final = 1_232
DATAGRAM_VERSION: Final = 1
DATAGRAM_MARK: Final = b"pr" + bytes((DATAGRAM_VERSION,))  # what a kind and a body follow
DATAGRAM_PREFIX_BYTES: Final = len(DATAGRAM_MARK) + 1


def pack(kind: int, body: bytes) -> bytes:
    """One whole datagram. Who makes the body keeps it within MAX_DATAGRAM_BYTES with the prefix."""
    return DATAGRAM_MARK + bytes((kind,)) + body


def datagram_kind(data: bytes) -> int:
    """Of a datagram that a driver let pass."""
    return data[len(DATAGRAM_MARK)]


def is_ours(data: bytes) -> bool:
    """Whether these bytes are a datagram of ours, of a version that this side speaks."""
    return DATAGRAM_PREFIX_BYTES <= len(data) <= MAX_DATAGRAM_BYTES and data.startswith(DATAGRAM_MARK)
