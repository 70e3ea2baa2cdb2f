"""Strategy exact: an asynchronous log of (id, what, who), the paper's ASYNC (section 5; spec T11).

Entries of 20 bytes collect in memory and are stored when they have grown to `log_bytes`, never to twice as
much, or the persistence interval ends: 0 id | 16 u32, the position in the part's list of happenings, such as
"delivered 7 billing": what, the origin, who. Each stored part has a range of message time like a filter, so
the same index finds the parts a message can be in. Its answers are never wrong: every rate is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

import numpy as np

from postroad.errors import BugError
from postroad.ids import ID_BYTES
from postroad.seam.tracking import TrackingEffect
from postroad.tracking.attachment_log import Change
from postroad.tracking.history import Range, Window
from postroad.tracking.keys import (
    DELIVERED,
    ENTRY,
    FORWARDED,
    LOG,
    PUBLISHED,
    REPAIRED,
    ROUTED,
    SENT,
    HistoryKey,
)
from postroad.tracking.moments import Times
from postroad.tracking.record import MAX_META_BYTES, FilterMeta
from postroad.tracking.recorder import Recorder
from postroad.tracking.settings import TrackingConfig

MAX_LISTED_BYTES: Final = MAX_META_BYTES // 4  # of happenings, beyond which a part is stored
_KEY: Final = HistoryKey(LOG)


class ExactTracking(Recorder):
    max_held = 32

    def __init__(
        self,
        config: TrackingConfig,
        *,
        me: int,
        stored: Iterable[FilterMeta],
        sizes: Mapping[int, int] | None = None,
        changes: Iterable[Change],
        now_us: int,
    ) -> None:
        super().__init__(
            config,
            me=me,
            stored=stored,
            sizes=sizes,
            changes=changes,
            lag_us=0,
            filter_us=2 * config.persist_us,
            now_us=now_us,
        )
        self._window = Window(ahead_us=config.skew_us, behind_us=config.skew_us + config.jitter_us)
        self._most = -(-config.log_bytes // ENTRY.itemsize)  # entries, with which a part is stored
        self._entries = bytearray()  # not stored yet
        self._happenings: dict[tuple[str, int, str], int] = {}  # (what, origin, who) -> position
        self._listed_bytes = 0  # of those, at most
        self._range = Range()
        self._opened_us: int | None = None  # when the first entry came that is not stored
        self._logged = 0

    # ---- recording

    def record(self) -> None:
        noted = self.noted[:]
        self.noted.clear()
        for now_us, ids, pubend, subscribers in noted:
            origin = pubend >> 32
            received = [(DELIVERED, origin, subscriber) for subscriber in subscribers]
            self._log(received or [(PUBLISHED, self._me, "")], ids, now_us)

    def routed(self, origin: int, neighbour: int, ids: bytes, now_us: int) -> None:
        self._log([(ROUTED, origin, str(neighbour))], ids, now_us)

    def forwarded(self, origin: int, neighbours: Sequence[int], ids: bytes, now_us: int) -> None:
        if self._config.routing != "all":
            self._log([(FORWARDED, origin, str(neighbour)) for neighbour in neighbours], ids, now_us)

    def sent(self, origin: int, neighbour: int, ids: bytes, now_us: int) -> None:
        self._log([(SENT, origin, str(neighbour))], ids, now_us)

    def repaired(self, subscriber: str, ids: bytes, now_us: int) -> None:
        self._log([(REPAIRED, 0, subscriber)], ids, now_us)

    def _log(self, happenings: list[tuple[str, int, str]], ids: bytes, now_us: int) -> None:
        if self.noted:
            self.record()  # what came before comes first
        times = Times(ids)
        covers = Range()  # every part has the range of all
        covers.include(times, self._window, now_us)
        step = self._most * ID_BYTES
        for at in range(0, len(ids), step):
            self._split(happenings, ids[at : at + step], covers, now_us)
        self._note_handled(times, now_us, now_us)

    def _split(self, happenings: list[tuple[str, int, str]], ids: bytes, covers: Range, now_us: int) -> None:
        """No more ids than a part takes; of what happened to them, as much at a time as there is room for."""
        count = len(ids) // ID_BYTES
        first = size = 0
        for at, happening in enumerate(happenings):
            size += _size(happening)
            entries = len(self._entries) // ENTRY.itemsize + (at + 1 - first) * count
            if size > MAX_LISTED_BYTES or entries >= self._most:
                self._append(happenings[first : at + 1], ids, covers, now_us)
                first, size = at + 1, 0
        if first < len(happenings):
            self._append(happenings[first:], ids, covers, now_us)

    def _append(self, happenings: list[tuple[str, int, str]], ids: bytes, covers: Range, now_us: int) -> None:
        if self._opened_us is None:
            self._opened_us = now_us
            self._wake_us = min(self._wake_us, now_us + self._config.persist_us)
        known = self._happenings
        count = len(known)
        numbers = [known.setdefault(happening, len(known)) for happening in happenings]
        self._listed_bytes += sum(map(_size, islice(known, count, None)))
        if len(ids) == ID_BYTES:
            for number in numbers:
                self._entries += ids
                self._entries += number.to_bytes(4, "little")
        else:
            rows = np.empty((len(numbers), len(ids) // ID_BYTES), ENTRY)
            rows["id"] = np.frombuffer(ids, "V16")
            rows["what"] = np.array(numbers, np.uint32)[:, None]
            self._entries += rows.tobytes()
        self._range.merge(covers)
        if len(self._entries) >= self._most * ENTRY.itemsize or self._listed_bytes > MAX_LISTED_BYTES:
            self._flush(now_us)

    def _flush(self, now_us: int) -> None:
        count = len(self._entries) // ENTRY.itemsize
        if not count:
            return
        meta = FilterMeta(
            key=_KEY,
            sequence=self.next_sequence(),
            m=0,
            n=0,
            k=0,
            count=count,
            lo_ms=self._range.lo_ms,
            hi_ms=self._range.hi_ms,
            singles=tuple(self._range.singles),
            opened_us=self._opened_us or now_us,
            stored_us=now_us,
            names=self._listed(),
        )
        self._store(meta, bytes(self._entries))
        self._logged += count
        self._entries = bytearray()
        self._happenings = {}
        self._listed_bytes = 0
        self._range = Range()
        self._opened_us = None

    def tick(self, now_us: int) -> list[TrackingEffect]:
        if now_us < self.next_deadline():
            return []
        self.record()
        if self._opened_us is not None and now_us >= self._opened_us + self._config.persist_us:
            self._flush(now_us)
        return self._collect(now_us)

    def _clean(self) -> bool:
        return not self.noted and not self._entries

    def _deadline_us(self) -> int:
        if self._opened_us is None:
            return self._expire_us
        return min(self._opened_us + self._config.persist_us, self._expire_us)

    def close(self, now_us: int, unrecorded_us: int | None = None) -> list[TrackingEffect]:
        self.record()
        self._flush(now_us)
        return self._stop(now_us, unrecorded_us)

    # ---- looking up

    def _current_log(self, time_ms: int) -> tuple[bytes, Sequence[str]] | None:
        if not self._range.matches(time_ms):
            return None
        return bytes(self._entries), self._listed()

    def _listed(self) -> tuple[str, ...]:
        return tuple(" ".join((happening, str(origin), who)) for happening, origin, who in self._happenings)

    # ---- inspection

    def metrics(self) -> dict[str, int | float]:
        return {
            **super().metrics(),
            "tracking_keys_total": self._logged + len(self._entries) // ENTRY.itemsize,
            "tracking_memory_bytes": len(self._entries),
        }

    def check(self) -> None:
        super().check()
        if (self._opened_us is None) != (not self._entries):
            raise BugError("the log has entries without a deadline, or a deadline without entries")


def _size(happening: tuple[str, int, str]) -> int:
    """The bytes it takes in a list, at most: a character has up to four."""
    return 32 + 4 * len(happening[2])
