"""What tracking asks of its driver. A thread may do all of it, in order; nothing waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFilter:
    """Keep this record; then forget the one it replaces, an earlier state of the same filter."""

    sequence: int  # unique and increasing at this broker, over restarts
    record: bytes
    replaces: int | None = None
    final: bool = True  # nothing will replace it


@dataclass(frozen=True, slots=True, kw_only=True)
class DropFilters:
    """Retention: append these changes of the attachment map, which say so; once that is done, these records
    are to go. What is gone without a word would count as what never was."""

    sequences: tuple[int, ...]
    record: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAttachments:
    """Append these changes of the attachment map; before the filters of the same Keep, or if `last`, once
    those are stored. If `pressing`, also to a disk that is full, as what is dropped is said."""

    record: bytes
    pressing: bool = False
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceAttachments:
    """Put these changes, the whole map, in place of its log; before the filters of the same Keep. There may
    be hundreds of thousands: each part is encoded when whoever writes it takes it, so that nothing waits."""

    parts: Iterable[bytes]  # may be gone through more than once

    @property
    def record(self) -> bytes:
        return b"".join(self.parts)


TrackingEffect = StoreFilter | DropFilters | StoreAttachments | ReplaceAttachments


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Do these, in order."""

    effects: tuple[TrackingEffect, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotKept:
    """These of a Keep could not be done."""

    effects: tuple[TrackingEffect, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFilters:
    """Read these stored records; answered by FiltersRead."""

    tag: int
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FiltersRead:
    """What ReadFilters asked for; a record that could not be read is b""."""

    tag: int
    records: Mapping[int, bytes]
