"""How repair behaves. Times in microseconds. The defaults are what the spec measured beforehand."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Literal

from postroad.errors import UsageError
from postroad.units import MILLISECOND_US, SECOND_US

MAX_RECORD_ENTRIES: Final = 64
Policy = Literal["named", "unicast", "content"]  # who is sent a repair: all who asked, each by itself, all
WAYS: Final = ("summaries", "records")
_SCOPE: Final = re.compile(r"[A-Za-z0-9._-]{1,32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairSettings:
    # Detection: a record of so many entries on every message (the paper's way), or summaries (ours).
    record: int = 0
    max_record: int = 0  # to which it grows while messages are asked for; below `record` it does not grow
    summaries: bool = True
    quiet_us: int = 0  # > 0: who sends no summaries says what its last record had once it is quiet (B9)
    summary_us: int = SECOND_US  # at most this long after a message, a summary names it
    summary_messages: int = 32  # or after so many
    heartbeat_us: int = 30 * SECOND_US  # a quiet publisher says so at least this often
    # Publishers as caches.
    publisher_first: bool = True
    keep_us: int = 30 * SECOND_US
    keep_bytes: int = 64 << 20
    gather_us: int = 300 * MILLISECOND_US  # requests, before a publisher repairs
    repairs_per_s: int = 1_000  # of one publisher; what is above is asked for again
    policy: Policy = "named"
    # Receivers.
    settle_us: int = 100 * MILLISECOND_US  # messages overtake each other: a loss is asked for after this
    retry_us: int = 1_000 * MILLISECOND_US
    max_retry_us: int = 4 * SECOND_US
    tries: int = 8
    publisher_tries: int = 3  # in a row without a word of it; then others are asked, too
    order_us: int = 0  # > 0: order per publisher is restored within this window
    # Requests, asks and repairs stay among those of one scope (B10); "": those without one.
    scope: str = ""
    # Caches. It takes some seconds to find a publisher silent: until then receivers keep what it sent.
    cache_min: int = 64
    cache_max: int = 300
    hit_ratio: float = 1.0
    cache: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.record <= MAX_RECORD_ENTRIES or not 0 <= self.max_record <= MAX_RECORD_ENTRIES:
            raise UsageError(
                f"a record of {self.record} to {self.max_record} entries; it has between 0 and"
                f" {MAX_RECORD_ENTRIES}"
            )
        if self.scope and not _SCOPE.fullmatch(self.scope):
            raise UsageError(f"a scope has up to 32 letters, digits, '.', '_' and '-', unlike {self.scope!r}")
        if not 1 <= self.cache_min <= self.cache_max:
            raise UsageError(
                f"a cache of {self.cache_min} to {self.cache_max} messages: the least is 1, at most the other"
            )
        times = (self.summary_us, self.heartbeat_us, self.keep_us, self.gather_us, self.retry_us)
        if min(times) <= 0 or self.tries < 1 or self.order_us < 0 or self.quiet_us < 0:
            raise UsageError("times of repair are positive, and there is at least one try")


DEFAULTS: Final = RepairSettings()
# The paper's own way (3.1 to 3.3): losses are found by records and asked of other receivers. A record has
# the ten entries of section 4, and grows from there; a cache has the five to 300 messages of 4.4.
RECORDS: Final = RepairSettings(
    record=10,
    max_record=32,
    summaries=False,
    quiet_us=SECOND_US,
    publisher_first=False,
    policy="content",
    retry_us=4 * SECOND_US,
    cache_min=5,
)


def settings_for(way: str, scope: str) -> RepairSettings:
    """What a program chooses."""
    if way not in WAYS:
        raise UsageError(f"repair by {way!r} is not one of {', '.join(WAYS)}")
    if not isinstance(scope, str):
        raise UsageError(f"a scope is text, not {type(scope).__name__}")
    return replace(RECORDS if way == "records" else DEFAULTS, scope=scope)
