"""Entries of interest tables, selectors and claims, and the updates that carry them within frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from postroad.errors import PeerError, UsageError
from postroad.ids import MAX_PRINCIPAL, principal_fits
from postroad.selectors import Selector
from postroad.wire.frames import (
    MAX_CONTROL_BYTES,
    InterestClaim,
    InterestEntry,
    InterestUpdate,
    Limits,
)

TOPIC_BYTES: Final = (1 << 16) - 1  # whatever the limits say
WHERE_BYTES: Final = 16 << 10
NAME_BYTES: Final = 255  # of a durable subscription
MAX_EPOCH: Final = (1 << 62) - 1
FINGERPRINT_BYTES: Final = 8

_PART_BYTES: Final = MAX_CONTROL_BYTES - (4 << 10)  # what entries may take of one frame
_ENTRY_BYTES: Final = 48  # MessagePack around an entry's texts, at most
_REMOVED_BYTES: Final = 9


class Claim(NamedTuple):
    """A broker hosts a durable subscription, which belongs to `principal` ("": to nobody in particular)."""

    name: str
    epoch: int
    principal: str = ""
    born: int = 0
    fingerprint: bytes = b""


Entry = Selector | Claim


def text_bytes_of(topic: str, where: str) -> int:
    return len(topic.encode()) + len(where.encode())


def entry_bytes(selector: Entry) -> int:
    if isinstance(selector, Claim):
        return text_bytes_of(selector.name, selector.principal)
    return text_bytes_of(selector.topic, selector.where)


def claims_in(entries: Iterable[Entry]) -> dict[str, Claim | None]:
    return {entry.name: entry for entry in entries if isinstance(entry, Claim)}


def check_claim(claim: Claim) -> None:
    """PeerError unless every field is within its bounds."""
    name_bytes = len(claim.name.encode())
    if not 0 < name_bytes <= NAME_BYTES or not 0 < claim.epoch <= MAX_EPOCH:
        raise PeerError(
            f"a claim on a name of {name_bytes} bytes with epoch {claim.epoch}; a name has 1 to {NAME_BYTES} "
            f"bytes, an epoch is between 1 and {MAX_EPOCH}"
        )
    if not principal_fits(claim.principal) or not 0 <= claim.born <= MAX_EPOCH:
        raise PeerError(
            f"a claim for a principal of {len(claim.principal.encode())} bytes born at {claim.born}; a "
            f"principal has up to {MAX_PRINCIPAL} bytes and is printable, and it is born before {MAX_EPOCH}"
        )
    if len(claim.fingerprint) not in (0, FINGERPRINT_BYTES):
        raise PeerError(
            f"a claim with a fingerprint of {len(claim.fingerprint)} bytes, it has {FINGERPRINT_BYTES}"
        )


def wire_entry(entry: int, selector: Entry) -> InterestEntry | InterestClaim:
    if isinstance(selector, Claim):
        return InterestClaim(
            entry=entry,
            name=selector.name,
            epoch=selector.epoch,
            principal=selector.principal,
            born=selector.born,
            fingerprint=selector.fingerprint,
        )
    return InterestEntry(entry=entry, topic=selector.topic, where=selector.where)


def make_update(
    owner: int,
    base: int,
    version: int,
    added: Iterable[InterestEntry | InterestClaim],
    removed: tuple[int, ...],
    part: int = 0,
    parts: int = 1,
) -> InterestUpdate:
    entries, claims = [], []
    for entry in added:
        if isinstance(entry, InterestClaim):
            claims.append(entry)
        else:
            entries.append(entry)
    return InterestUpdate(
        owner=owner,
        base=base,
        version=version,
        added=tuple(entries),
        removed=removed,
        part=part,
        parts=parts,
        claims=tuple(claims),
    )


def pack(
    added: Iterable[InterestEntry | InterestClaim], removed: Iterable[int]
) -> Iterator[tuple[tuple[InterestEntry | InterestClaim, ...], tuple[int, ...]]]:
    """Cut a change into pieces that fit a frame each, additions before removals."""
    entries: list[InterestEntry | InterestClaim] = []
    gone: list[int] = []
    size = 0
    for entry in added:
        texts = (
            (entry.name, entry.principal) if isinstance(entry, InterestClaim) else (entry.topic, entry.where)
        )
        need = _ENTRY_BYTES + text_bytes_of(*texts)
        if size + need > _PART_BYTES:
            yield tuple(entries), ()
            entries, size = [], 0
        entries.append(entry)
        size += need
    for number in removed:
        if size + _REMOVED_BYTES > _PART_BYTES:
            yield tuple(entries), tuple(gone)
            entries, gone, size = [], [], 0
        gone.append(number)
        size += _REMOVED_BYTES
    if entries or gone:
        yield tuple(entries), tuple(gone)


def parse_entries(update: InterestUpdate, limits: Limits) -> tuple[dict[int, Entry], int]:
    """The selectors and claims an update adds, and the bytes of their texts."""
    parsed: dict[int, Entry] = {}
    text_bytes = 0
    for entry in update.added:
        size = (len(entry.topic.encode()), len(entry.where.encode()))
        if size[0] > TOPIC_BYTES or size[1] > WHERE_BYTES:
            raise PeerError(
                f"entry {entry.entry} of broker {update.owner}'s interest has a topic of {size[0]} bytes and"
                f" a condition of {size[1]}; at most {TOPIC_BYTES} and {WHERE_BYTES} are allowed"
            )
        try:
            selector = Selector.parse(entry.topic, entry.where, limits)
        except UsageError as error:
            raise PeerError(f"entry {entry.entry} of broker {update.owner}'s interest: {error}") from None
        parsed[entry.entry] = selector
        text_bytes += entry_bytes(selector)
    for claim in update.claims:
        parsed_claim = Claim(claim.name, claim.epoch, claim.principal, claim.born, claim.fingerprint)
        try:
            check_claim(parsed_claim)
        except PeerError as error:
            raise PeerError(f"entry {claim.entry} of broker {update.owner}'s interest: {error}") from None
        parsed[claim.entry] = parsed_claim
        text_bytes += entry_bytes(parsed_claim)
    if len(parsed) != len(update.added) + len(update.claims):
        given = len(update.added) + len(update.claims)
        raise PeerError(f"interest of broker {update.owner} adds {given} entries under {len(parsed)} numbers")
    return parsed, text_bytes
