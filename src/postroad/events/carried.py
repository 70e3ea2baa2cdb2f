"""The event that a repair message carries (spec B7): all that a broker reads of one.

It is read where the sender is connected, so that nobody publishes by repair what he may not publish.
"""

from __future__ import annotations

from typing import Final

from postroad.kernel.layout import EVENT_HEADER, EVENT_HEADER_BYTES

REPAIR_TOPICS: Final = "$repair/"  # of clients' repair messages
REPAIR: Final = 4  # the first byte of one that carries an event; 8 bytes, a number and the event follow
_PUBLISHER_BYTES: Final = 8


def carried_topic(message: bytes) -> str | None:
    """Of the event in a repair message; None if there is none, or none that receivers could read."""
    if message[:1] != bytes((REPAIR,)):
        return None
    at = 1 + _PUBLISHER_BYTES
    while at < len(message) and message[at] & 0x80:
        at += 1
    at += 1
    if len(message) < at + EVENT_HEADER_BYTES:
        return None
    _, _, _, length, *_ = EVENT_HEADER.unpack_from(message, at)
    at += EVENT_HEADER_BYTES
    try:
        return message[at : at + length].decode()
    except UnicodeDecodeError:
        return None
