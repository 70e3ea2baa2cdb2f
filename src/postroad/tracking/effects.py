"""What tracking asks of its driver. A thread may do all of it, in order; nothing waits for it."""

from __future__ import annotations

from dataclasses import dataclass

from postroad.tracking.keys import HistoryKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFilter:
    """Keep this record; then forget the one it replaces, an earlier state of the same filter."""

    key: HistoryKey
    sequence: int  # unique and increasing at this broker, over restarts
    record: bytes
    replaces: int | None = None
    final: bool = True  # nothing will replace it


@dataclass(frozen=True, slots=True, kw_only=True)
class DropFilters:
    """Retention: these records are to go."""

    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAttachments:
    """Append these changes of the attachment map, or replace all of it with them."""

    record: bytes
    replace: bool = False


TrackingEffect = StoreFilter | DropFilters | StoreAttachments
