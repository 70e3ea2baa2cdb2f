"""What rooms tell for the network's own history, and what the pipeline reads of it."""

from __future__ import annotations

from typing import Final

import msgspec

KEPT: Final = "kept"  # by the responsible broker; `who` is the application that sent them
ACCEPTED: Final = "accepted"  # by a consumer, which is `who`
REJECTED: Final = "again"  # likewise: to be given to somebody once more,
DEAD: Final = "dead"  # or to nobody


class QueueEvents(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to messages of one inbox, at one moment."""

    what: str
    inbox: str
    who: str
    form: str  # of messages that are kept; else ""
    at_us: int
    ids: bytes  # 16 each
    expires_us: int = 0  # of messages that are kept: dead letters after that; 0: never
