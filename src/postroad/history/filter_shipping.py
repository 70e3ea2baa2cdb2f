"""Stored filters on their way to `$postroad/tracking/filters` (issue 4; spec P4).

They are not queued: there is a cursor over their sequences, and what lies beyond it is read back from where
it was stored. So a slow or failing disk costs little memory, a restart goes on where the last process was,
and a state that was replaced meanwhile is left out. It goes on there, too, when nobody wanted them for a
while: whoever comes may be who left, and has no other way to get what it lacks. That may be all that is kept,
but it goes a group at a time, the oldest first.

A group of filters is published under ids that were saved before. Whoever is not sure that it was published,
after a crash or a failure, does so again under the same ids, and the pubend takes only what it has not. So
each is published once.

Of a record that is too large, or cannot be read, the description alone is published: whoever reads the
history then knows what it lacks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from postroad.errors import BugError, PostroadError, StorageError
from postroad.history.bulletin_writer import BulletinWriter
from postroad.history.bulletins import Author, Bulletin, filter_bulletins, running_number
from postroad.ids import IdSource
from postroad.seam.tracking import FiltersRead
from postroad.seam.turn import Turn
from postroad.tracking.record import FilterMeta, decode_meta, encode_description
from postroad.tracking.strategies import Tracking
from postroad.units import MIB, MILLISECOND_US, SECOND_US

ROW: Final = b"filters"
READ_BYTES: Final = 4 * MIB  # of stored filters, at a time
MAX_FILTER_BYTES: Final = 64 * MIB  # of a larger one only the description is published
RETRY_US: Final = 10 * SECOND_US  # after the disk failed
UNREADABLE: Final = "their stored filters cannot be read"
_COUNTERS: Final = 1 << 16  # ids in one millisecond


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What is saved before the group is published."""

    cursor: int = 0  # of filters up to this sequence all is published that ever will be
    group: tuple[tuple[int, int], ...] = ()  # those that follow and may be published: sequence, parts
    part_bytes: int = 0  # of those parts
    time_ms: int = 0  # of the group's first id


class FilterShipping:
    """A group at a time: read, saved, published. `_mark.group` is empty once it is published."""

    def __init__(
        self,
        *,
        table: str,
        author: Author,
        boot: int,
        publisher: int,
        writer: BulletinWriter,
        tracking: Tracking,
        rows: Mapping[bytes, bytes],
    ) -> None:
        self._table = table
        self._author = author
        self._publisher = publisher
        self._writer = writer
        self._tracking = tracking
        self._mark = _Mark()
        self._ahead: deque[int] = deque()  # sequences beyond the cursor, as of when they were last looked for
        self._reading = False  # what is wanted is being read
        self._wanted: tuple[int, ...] = ()  # the sequences of the group
        self._wanted_us: int | None = None  # when they were all that is owed; None if they were not
        self._owed_us: int | None = None  # since when something is
        self._saving = False  # the mark is on its way to disk
        self._records: dict[int, bytes] = {}  # those of the group, while its mark is saved
        self._frames = 0  # of the group that wait for the disk
        self._failed = False  # the disk failed since the last step
        self._retry_us = 0
        if ROW in rows:
            self._mark = read_mark(rows[ROW])
        # What was published before a backup was put back is not known here: each start has its own sequences.
        tracking.resume_after(max(self._last, running_number(boot, 0)))
        if self.owing:
            self._owed_us = 0  # it may be a state that replaced others: nobody knows since when

    @property
    def _last(self) -> int:
        """The last sequence that was ever published, or may have been."""
        return self._mark.group[-1][0] if self._mark.group else self._mark.cursor

    def begin(self) -> None:
        """Filters are wanted: for the first time, from now on. `row` is then to be saved."""
        if not self._last:
            self._mark = msgspec.structs.replace(self._mark, cursor=self._tracking.last_sequence)

    @property
    def row(self) -> tuple[bytes, bytes]:
        return ROW, msgspec.msgpack.encode(self._mark)

    @property
    def owing(self) -> bool:
        """Whether something is stored and not published."""
        return bool(self._mark.group) or self._first() is not None

    @property
    def last_sequence(self) -> int:
        """Of what was ever stored."""
        return self._tracking.last_sequence

    def owed_us(self, now_us: int) -> int | None:
        """Since when something is, be it in a state that was replaced since; None if nothing is."""
        if not self.owing:
            self._owed_us = None
        elif self._owed_us is None:
            first = self._first()
            self._owed_us = now_us if first is None else min(first.stored_us, now_us)
        return self._owed_us

    def owes(self, sequence: int) -> bool:
        """Whether something is owed of what was stored up to that one."""
        return self.owing and self._mark.cursor < sequence

    def _first(self) -> FilterMeta | None:
        """The first of what is stored and not published."""
        while True:
            while self._ahead:
                stored = self._tracking.stored_at(self._ahead[0])
                if stored is not None and self._ahead[0] > self._mark.cursor:
                    return stored[0]
                self._ahead.popleft()
            self._ahead.extend(self._tracking.stored_after(self._mark.cursor))
            if not self._ahead:
                return None

    @property
    def _busy(self) -> bool:
        return self._reading or self._saving or self._frames > 0

    # ---- a group, step by step

    def tick(self, turn: Turn) -> None:
        """Begin with the next group, if there is one and none is under way."""
        if self._busy:
            return
        if self._failed:
            self._failed = False
            self._retry_us = turn.now_us + RETRY_US
        if turn.now_us < self._retry_us:
            return
        self._retry_us = 0
        self._wanted = tuple(sequence for sequence, _ in self._mark.group) or self._next_group()
        if not self._wanted:
            return
        self._wanted_us = turn.now_us if self._wanted[-1] == self._tracking.last_sequence else None
        small = [sequence for sequence in self._wanted if self._size(sequence) <= MAX_FILTER_BYTES]
        if small:
            self._reading = True
            turn.read_filters(small, then=self._were_read)
        else:
            self._take(turn, {})

    def _size(self, sequence: int) -> int:
        """0 if it is not stored any more."""
        stored = self._tracking.stored_at(sequence)
        return 0 if stored is None else stored[1]

    def _next_group(self) -> tuple[int, ...]:
        """As many as are read at a time; a large one alone."""
        group: list[int] = []
        total = 0
        for sequence in self._ahead if self._first() is not None else ():
            size = self._size(sequence)
            if group and total + size > READ_BYTES:
                break
            if size:
                group.append(sequence)
                total += size
        return tuple(group)

    def _were_read(self, turn: Turn, item: FiltersRead) -> None:
        self._reading = False
        self._take(turn, item.records)

    def _take(self, turn: Turn, records: Mapping[int, bytes]) -> None:
        """The records of a group; the mark of a new one is saved before they are published."""
        self._records = {}
        for sequence in self._wanted:
            record = records.get(sequence, b"")
            stored = self._tracking.stored_at(sequence)
            if _sound(sequence, record):
                self._records[sequence] = record
            elif stored is not None:  # else it was replaced, or retention dropped it
                meta, size = stored
                large = size > MAX_FILTER_BYTES
                self._writer.dropped(1, f"a filter of {size} bytes is too large" if large else UNREADABLE)
                self._records[sequence] = encode_description(meta)
        if self._mark.group:
            self._publish(turn)
            return
        if not self._records:
            self._mark = msgspec.structs.replace(self._mark, cursor=self._wanted[-1])
            return
        part_bytes = self._writer.part_bytes
        parts = {sequence: -(-len(record) // part_bytes) for sequence, record in self._records.items()}
        self._mark = _Mark(
            cursor=self._mark.cursor,
            group=tuple(parts.items()),
            part_bytes=part_bytes,
            time_ms=max(self._mark.time_ms + 1, turn.now_us // MILLISECOND_US),
        )
        self._saving = True
        turn.save(self._table, [self.row], then=self._saved)

    def _saved(self, turn: Turn, error: PostroadError | None) -> None:
        self._saving = False
        if error is None:
            self._publish(turn)
        else:
            self._mark = msgspec.structs.replace(self._mark, group=())
            self._records = {}
            self._failed = True

    def _publish(self, turn: Turn) -> None:
        records, self._records = self._records, {}
        self._frames = self._writer.publish(turn, self._identified(records), self._settled)
        if not self._frames:
            self._done()

    def _identified(self, records: Mapping[int, bytes]) -> list[tuple[bytes, Bulletin]]:
        """Every part of the group has its id, whether or not its record is still there. One that could be
        read only before the mark was saved, or only after, has its parts of then: some may be published."""
        ids = IdSource(self._publisher, self._author.broker)
        part_bytes = self._mark.part_bytes
        out: list[tuple[bytes, Bulletin]] = []
        for sequence, parts in self._mark.group:
            own = [ids.next(self._mark.time_ms) for _ in range(parts)]
            if sequence in records:
                record = records[sequence][: parts * part_bytes].ljust((parts - 1) * part_bytes + 1, b"\0")
                made = filter_bulletins(self._author, sequence, record, part_bytes)
                out += zip(own, made, strict=True)
        return out

    def _settled(self, _turn: Turn, accepted: bool, _count: int) -> None:
        self._frames -= 1
        self._failed |= not accepted
        if not self._frames and not self._failed:
            self._done()

    def _done(self) -> None:
        # The mark on disk still has the group: a restart publishes it again, and the pubend knows it.
        more_ms = sum(parts for _, parts in self._mark.group) // _COUNTERS
        self._mark = msgspec.structs.replace(
            self._mark, cursor=self._last, group=(), time_ms=self._mark.time_ms + more_ms
        )
        if self._wanted_us is not None:
            self._owed_us = self._wanted_us

    def next_deadline(self) -> int | None:
        return self._retry_us or None

    def check(self) -> None:
        if self._frames < 0 or (self._frames and not self._mark.group):
            raise BugError("filters are being published that belong to no group")
        if any(sequence <= self._mark.cursor for sequence, _ in self._mark.group):
            raise BugError("filters are published again")


def _sound(sequence: int, record: bytes) -> bool:
    """Whether its description is. One whose bits are damaged is published: else nobody who reads the history
    would know that something of its times is missing."""
    try:
        return decode_meta(record).sequence == sequence
    except StorageError:
        return False


def read_mark(value: bytes) -> _Mark:
    return msgspec.msgpack.decode(value, type=_Mark)
