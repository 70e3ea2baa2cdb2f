"""Whether what a broker is called, where and whose it is fits into a datagram beside its certificate."""

from __future__ import annotations

from typing import Final

from postroad.discovery.envelopes import Sealer
from postroad.errors import UsageError
from postroad.wire.datagrams import DATAGRAM_PREFIX_BYTES, MAX_DATAGRAM_BYTES
from postroad.wire.discovery import (
    COOKIE_BYTES,
    CREDENTIAL_BYTES,
    KEY_BYTES,
    MAX_ATTEMPTS,
    MAX_BYTES,
    MAX_COUNT,
    MAX_LIFETIME_S,
    MAX_MEMBERS,
    MAX_NAME_BYTES,
    MAX_TIME_US,
    PROOF_BYTES,
    SECRET_BYTES,
    TRANSPORTS,
    UUID_BYTES,
    Advertise,
    Message,
    Response,
    Usage,
    encode_body,
)

_SIGNATURE_SLACK: Final = 8  # bytes by which a signature of the same key may be longer another time


def check_lengths(
    sealer: Sealer | None, *, name: str, address: str, geography: str, institution: str
) -> None:
    """UsageError unless the largest advertisement and the largest response of this broker fit."""
    if len(name.encode()) > MAX_NAME_BYTES:
        raise UsageError(f"a broker that is discovered has a name of at most {MAX_NAME_BYTES} bytes")
    advertise = Advertise(
        uuid=bytes(UUID_BYTES),
        broker=MAX_COUNT - 1,
        name=name,
        address=address,
        transports=TRANSPORTS,
        geography=geography,
        institution=institution,
        secret=bytes(SECRET_BYTES),
        network=MAX_COUNT - 1,
        members=MAX_MEMBERS,
        lifetime_s=MAX_LIFETIME_S,
        sent_us=MAX_TIME_US,
        cookie=bytes(COOKIE_BYTES),
        credential=bytes(CREDENTIAL_BYTES),
        key=bytes(KEY_BYTES),
    )
    response = Response(
        uuid=bytes(UUID_BYTES),
        attempt=MAX_ATTEMPTS,
        sent_us=MAX_TIME_US,
        broker=MAX_COUNT - 1,
        name=name,
        address=address,
        transports=TRANSPORTS,
        ping_key=bytes(COOKIE_BYTES),
        usage=Usage(
            connections=MAX_COUNT - 1,
            links=MAX_COUNT - 1,
            cpu_share=0.5,
            memory_total_bytes=MAX_BYTES,
            memory_free_bytes=MAX_BYTES,
        ),
        network=MAX_COUNT - 1,
        members=MAX_MEMBERS,
        proof=bytes(PROOF_BYTES),
        link_proof=bytes(PROOF_BYTES),
    )
    excess = max(_length(message, sealer) for message in (advertise, response)) - MAX_DATAGRAM_BYTES
    if excess > 0:
        raise UsageError(
            "the broker's name, address, geography and institution do not fit into a datagram beside its"
            f" certificate: shorten them, or the certificate, by {excess} bytes"
        )


def _length(message: Message, sealer: Sealer | None) -> int:
    kind, body = encode_body(message)
    if sealer is not None:
        _, body = encode_body(sealer.seal(kind, body, sealer.public_key))
        return DATAGRAM_PREFIX_BYTES + len(body) + _SIGNATURE_SLACK
    return DATAGRAM_PREFIX_BYTES + len(body)
