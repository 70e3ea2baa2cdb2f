"""A publisher's part in repair: it says what it sent, and is the first cache that is asked.

Every second, or after 32 messages, it sends a summary: the numbers and bits of what is new, and once more of
what was new in the one before, so that the loss of one summary is made good by the next (spec B9). When
nothing is new it says how far it is, less and less often. It keeps its messages for 30 s. What receivers ask
for is gathered for 0.3 s and sent once, with the names of all who asked (spec B7).

With `record` its messages carry the bits of those before them (spec B3). Such a record grows by an entry for
each message that others ask for, and shrinks by one for every CALM messages of which none was: what detection
costs follows what it brings. Then summaries are for a publisher that falls quiet, since no record will name
its last messages.

However many ask, it sends at most `repairs_per_s`, summaries of ranges included, and holds at most MAX_ASKED
requests: a storm of requests costs its own bytes and nothing more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from postroad.client.repair.messages import (
    MAX_ENTRIES,
    MAX_WANTED,
    Gone,
    Message,
    Repair,
    Request,
    Summary,
)
from postroad.client.repair.settings import RepairSettings
from postroad.errors import BugError
from postroad.kernel.layout import ID_BYTES
from postroad.units import MILLISECOND_US, SECOND_US

MAX_ASKED: Final = 4_096  # messages asked for and not yet repaired
ENTRIES_OF_A_REPAIR: Final = 8  # of a summary: to encode them takes about as long as one repair
MAX_NAMES: Final = 16  # receivers that one repair is for
CALM: Final = 64  # messages of which none was asked for, after which a record is one entry shorter
MAX_HEARTBEATS: Final = 12  # a publisher that is quiet for longer than these take has told everybody


REFUSED: Final = 0  # the bits of an event that was not taken; every other event has some


@dataclass(frozen=True, slots=True)
class Kept:
    sequence: int
    bits: int  # REFUSED: no broker took it
    row: bytes
    at_us: int


@dataclass(frozen=True, slots=True)
class Named:
    """A message for these receivers alone; for everybody who listens to this publisher if there are none."""

    receivers: tuple[bytes, ...]
    message: Message
    bits: int | None = None  # of a repair by content: those who may want it
    askers: tuple[bytes, ...] = ()  # who is named where the bits do not fit beside the message


class PublisherSide:
    """`me`: the first 8 bytes of its ids. A new number from a broker is a new publisher."""

    def __init__(self, me: bytes, settings: RepairSettings) -> None:
        self.me = me
        self._settings = settings
        self.sequence = 0  # of the last message
        self._last_us = 0  # when that was published
        self._kept: deque[Kept] = deque()  # consecutive, the oldest first
        self._kept_bytes = 0
        self._summarised = 0  # the last one that a summary named
        self._repeat_from = 0  # the first of those that were new in the last summary; 0: none
        self._summary_us: int | None = None  # when the next one is due
        self._heartbeats = 0  # since the last message
        self._asked: dict[int, dict[bytes, None]] = {}  # message -> who asked
        self._ranges: dict[tuple[int, int], dict[bytes, None]] = {}  # likewise, for entries
        self._gone: dict[bytes, dict[int, None]] = {}  # who asked -> what is no longer here
        self._gathered_us: int | None = None  # when what was asked for is sent
        self.record = settings.record  # entries on a message
        self._missed = 0  # the last message that others asked for
        self._shrink_at = CALM  # the number of a message at which the record is one entry shorter
        self._allowance = float(settings.repairs_per_s)
        self._allowed_us = 0
        self.summaries = self.requests = self.repairs = self.refused = self.misses = 0

    def publish(self, bits: int, row: bytes, now_us: int) -> tuple[int, ...]:
        """The record to send with it: the bits of the `record` messages before. Its number is `sequence`."""
        self.sequence += 1
        self._last_us = now_us
        if self.sequence >= self._shrink_at:
            self._shrink_at = self.sequence + CALM
            self.record = max(self._settings.record, self.record - 1)
        size = self.record
        recent: list[int] = []
        if size:
            for kept in reversed(self._kept):
                if len(recent) == size:
                    break
                recent.append(kept.bits)
        self._kept.append(Kept(self.sequence, bits, row, now_us))
        self._kept_bytes += len(row)
        while self._kept_bytes > self._settings.keep_bytes:
            self._forget()
        if self._settings.summaries:
            self._heartbeats = 0
            if self._summary_us is None or self.sequence == self._summarised + 1:
                self._summary_us = now_us + self._settings.summary_us
            if self.sequence - self._summarised >= self._settings.summary_messages:
                self._summary_us = now_us
        elif self._settings.quiet_us:
            self._heartbeats = 0
            self._summary_us = now_us + self._settings.quiet_us
        return tuple(recent)

    def missed(self, sequence: int) -> None:
        """Others were asked for this message: a longer record lets more find out what they miss."""
        if self._missed < sequence <= self.sequence:
            self._missed = sequence
            self._shrink_at = self.sequence + CALM
            self.record = max(self.record, min(self._settings.max_record, self.record + 1))

    def _forget(self) -> None:
        self._kept_bytes -= len(self._kept.popleft().row)

    def kept(self, sequence: int) -> Kept | None:
        if not self._kept or not self._kept[0].sequence <= sequence <= self.sequence:
            return None
        return self._kept[sequence - self._kept[0].sequence]

    def refused_by_broker(self, identity: bytes) -> None:
        """It is neither summarised nor served: repair brings nobody what its publisher may not publish."""
        at = bisect_left(self._kept, identity, key=lambda kept: kept.row[:ID_BYTES])
        if at < len(self._kept) and self._kept[at].row[:ID_BYTES] == identity:
            self._kept[at] = replace(self._kept[at], bits=REFUSED)

    # --- requests

    def request(self, request: Request, now_us: int) -> None:
        self.requests += 1
        receiver = request.receiver
        ranges = list(request.ranges)
        for sequence in request.wanted:
            kept = self.kept(sequence)
            if kept is None:
                self.misses += 1
                if len(self._gone) < MAX_ASKED and sequence <= self.sequence:
                    self._gone.setdefault(receiver, {})[sequence] = None
            elif kept.bits == REFUSED:
                ranges.append((sequence, sequence))  # a summary says so
            elif sequence in self._asked or len(self._asked) < MAX_ASKED:
                self._asked.setdefault(sequence, {})[receiver] = None
            else:
                self.refused += 1
        for span in ranges:
            if span in self._ranges or len(self._ranges) < MAX_ASKED:
                self._ranges.setdefault(span, {})[receiver] = None
        if self._gathered_us is None:
            self._gathered_us = now_us + self._settings.gather_us

    def _answer(self, now_us: int) -> list[Named]:
        out: list[Named] = []
        settings = self._settings
        passed = max(0, now_us - self._allowed_us)
        self._allowance = min(
            settings.repairs_per_s, self._allowance + passed * settings.repairs_per_s / SECOND_US
        )
        self._allowed_us = now_us
        for sequence, receivers in self._asked.items():
            kept = self.kept(sequence)
            if kept is None or kept.bits == REFUSED:
                continue
            repair = Repair(publisher=self.me, sequence=sequence, row=kept.row)
            if settings.policy == "content":
                groups: list[tuple[bytes, ...]] = [()]
                askers = tuple(receivers)[:MAX_NAMES]
            else:
                size = 1 if settings.policy == "unicast" else MAX_NAMES
                names, askers = tuple(receivers), ()
                groups = [names[at : at + size] for at in range(0, len(names), size)]
            for group in groups:
                if not self._spend(1):
                    continue
                self.repairs += 1
                out.append(Named(group, repair, kept.bits if not group else None, askers))
        for (first, last), receivers in self._ranges.items():
            out += self._describe(first, last, tuple(receivers), now_us)
        for receiver, sequences in self._gone.items():
            gone = tuple(sorted(sequences)[:MAX_WANTED])
            if self._spend(1):
                out.append(Named((receiver,), Gone(publisher=self.me, sequences=gone)))
        self._asked, self._ranges, self._gone = {}, {}, {}
        return out

    def _spend(self, repairs: int) -> bool:
        """Whether an answer that costs as much as so many repairs may be sent now."""
        if self._allowance < repairs:
            self.refused += 1
            return False
        self._allowance -= repairs
        return True

    def _describe(self, first: int, last: int, receivers: tuple[bytes, ...], now_us: int) -> list[Named]:
        """Entries of a range that no summary brought to these; what is no longer kept is gone. Nothing is
        said of what is not yet published."""
        if first > self.sequence:
            return []
        first = max(first, self.oldest)
        last = max(first - 1, min(last, self.sequence, first + MAX_ENTRIES - 1))
        cost = 1 + (last - first + 1) // ENTRIES_OF_A_REPAIR
        groups = [at for at in range(0, len(receivers), MAX_NAMES) if self._spend(cost)]
        if not groups:
            return []
        summary = self._summary(first, last, now_us)
        return [Named(receivers[at : at + MAX_NAMES], summary) for at in groups]

    # --- summaries

    def _summary(self, first: int, last: int, now_us: int) -> Summary:
        first = max(first, min(self.oldest, last + 1))  # the oldest of them may no longer be here
        kept = [message for at in range(first, last + 1) if (message := self.kept(at)) is not None]
        published_us = [message.at_us for message in kept] or [self._last_us]
        return Summary(
            first=first,
            entries=tuple(message.bits for message in kept),
            ages_ms=tuple(max(0, now_us - at_us) // MILLISECOND_US for at_us in published_us),
        )

    def _summarise(self, now_us: int) -> list[Named]:
        out: list[Named] = []
        settings = self._settings
        if not settings.summaries and self._summarised < self.sequence:  # what is before, records have named
            unnamed = min(self.record, settings.summary_messages)
            self._summarised = max(self._summarised, self.sequence - unnamed)
            self._repeat_from = 0
        while self._summarised < self.sequence:
            fresh = self._summarised + 1
            last = min(self.sequence, self._summarised + settings.summary_messages)
            if last == self.sequence and last - fresh + 1 < settings.summary_messages and out:
                break  # the rest has its own second
            out.append(Named((), self._summary(self._repeat_from or fresh, last, now_us)))
            self._repeat_from, self._summarised = fresh, last
        if out:
            self._summary_us = now_us + settings.summary_us
        else:
            first = self._repeat_from or self.sequence + 1
            out.append(Named((), self._summary(first, self.sequence, now_us)))
            self._repeat_from = self.sequence + 1
            self._heartbeats += 1
            wait = min(settings.heartbeat_us, settings.summary_us << self._heartbeats)
            self._summary_us = now_us + wait if self._heartbeats < MAX_HEARTBEATS else None
        self.summaries += len(out)
        return out

    # --- time

    def finish(self, now_us: int) -> bool:
        """No more will be published: a summary of the last is due now, if they were not told twice."""
        if not (self._settings.summaries or self._settings.quiet_us) or self._repeat_from > self.sequence:
            return False
        self._summary_us = now_us
        return True

    def next_deadline(self) -> int | None:
        due = [at for at in (self._summary_us, self._gathered_us) if at is not None]
        return min(due, default=None)

    def tick(self, now_us: int) -> list[Named]:
        out: list[Named] = []
        while self._kept and now_us - self._kept[0].at_us > self._settings.keep_us:
            self._forget()
        if self._gathered_us is not None and now_us >= self._gathered_us:
            self._gathered_us = None
            out += self._answer(now_us)
        if self._summary_us is not None and now_us >= self._summary_us:
            out += self._summarise(now_us)
        return out

    @property
    def over(self) -> bool:
        """Nothing is kept, and nobody waits for an answer."""
        return not self._kept and self._gathered_us is None

    @property
    def oldest(self) -> int:
        """Of what is kept; one more than the last if nothing is."""
        return self._kept[0].sequence if self._kept else self.sequence + 1

    def check(self) -> None:
        if [kept.sequence for kept in self._kept] != list(range(self.oldest, self.sequence + 1)):
            raise BugError("what a publisher keeps has gaps")
        if len(self._asked) > MAX_ASKED or self._summarised > self.sequence:
            raise BugError("a publisher's requests or summaries are out of bounds")
