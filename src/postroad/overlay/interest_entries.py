"""Entries of interest tables, selectors and claims, and the updates that carry them within frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from postroad.errors import PeerError, UsageError
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

_PART_BYTES: Final = MAX_CONTROL_BYTES - (4 << 10)  # what entries may take of one frame
_ENTRY_BYTES: Final = 24  # MessagePack around an entry's texts, at most
_REMOVED_BYTES: Final = 9


class Claim(NamedTuple):
    name: str
    epoch: int


Entry = Selector | Claim


def text_bytes_of(topic: str, where: str) -> int:
    return len(topic.encode()) + len(where.encode())


def entry_bytes(selector: Entry) -> int:
    if isinstance(selector, Claim):
        return len(selector.name.encode())
    return text_bytes_of(selector.topic, selector.where)


def claims_in(entries: Iterable[Entry]) -> dict[str, int | None]:
    return {entry.name: entry.epoch for entry in entries if isinstance(entry, Claim)}


def wire_entry(entry: int, selector: Entry) -> InterestEntry | InterestClaim:
    if isinstance(selector, Claim):
        return InterestClaim(entry=entry, name=selector.name, epoch=selector.epoch)
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
    for one in added:
        if isinstance(one, InterestClaim):
            claims.append(one)
        else:
            entries.append(one)
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
        texts = (entry.name, "") if isinstance(entry, InterestClaim) else (entry.topic, entry.where)
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
        if not 0 < len(claim.name.encode()) <= NAME_BYTES or not 0 < claim.epoch <= MAX_EPOCH:
            raise PeerError(
                f"broker {update.owner} claims a name of {len(claim.name.encode())} bytes with epoch"
                f" {claim.epoch}; a name has 1 to {NAME_BYTES} bytes, an epoch is between 1 and {MAX_EPOCH}"
            )
        parsed[claim.entry] = Claim(claim.name, claim.epoch)
        text_bytes += len(claim.name.encode())
    if len(parsed) != len(update.added) + len(update.claims):
        given = len(update.added) + len(update.claims)
        raise PeerError(f"interest of broker {update.owner} adds {given} entries under {len(parsed)} numbers")
    return parsed, text_bytes
