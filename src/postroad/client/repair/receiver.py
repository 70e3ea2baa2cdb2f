"""A receiver's part in repair: it finds out what it missed, and asks for it (spec B4, paper 3.1).

Of each publisher it knows up to which number it has looked at what was published (`covered`), and ranges
below that of which no summary has come. A number that a summary or a record covers, that was not received
and whose bits match one of the masks is a loss. Nothing is marked as looked at that no summary covered.

Losses of one publisher are asked for together, and one request is under way at a time. It goes to the
publisher, which has every message; if that says nothing, to others by content (`neighbours`). After `tries`
requests a loss is given up, and is a Gap, once.

With `order_us` messages of a publisher are handed out in their order. One that waited for that long for
earlier ones waits no longer: these are given up, and are a Gap before it.

A summary says how old each of its messages is, and only what is younger than the subscription is missed. No
two clocks are compared: the time that a summary took makes its messages seem younger, so nothing that was
published since seems older. What is before the first summary that is heard is asked for from its end, back to
what is older than the subscription.

What was delivered is remembered within a window; what is older than the window is dropped, since it may have
been delivered. A publisher is known by the first 8 bytes of its ids, so one that starts anew is another one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from postroad.client.repair.messages import MAX_ENTRIES, MAX_RANGES, MAX_WANTED, Gone, Request, Summary
from postroad.client.repair.publisher import REFUSED
from postroad.client.repair.settings import RepairSettings
from postroad.errors import BugError
from postroad.selectors.tags import Mask, matched
from postroad.units import MILLISECOND_US

MAX_SOURCES: Final = 4_096  # publishers remembered
MAX_LOST: Final = 4_096  # losses of one publisher that are being repaired
MAX_SEEN: Final = 16_384  # messages of one publisher remembered as received
MAX_WAITING: Final = 16_384  # messages of one publisher that wait for earlier ones
MAX_AHEAD: Final = 1_024  # a repair by records may be so far ahead of what came
MAX_FALSE: Final = 64  # repairs that were not wanted, before masks that cause them are doubted
_BACKOFF: Final = (5, 4)  # a request that failed waits this much longer


@dataclass(slots=True)
class Loss:
    bits: int
    found_us: int
    tries: int = 0
    silent: int = 0  # requests in a row without a word of the publisher
    content: bool = False  # others are being asked


@dataclass(frozen=True, slots=True)
class Lost:
    """Messages of a publisher in (start, end] that could not be repaired."""

    publisher: bytes
    start: int
    end: int


@dataclass(slots=True)
class _Source:
    """What is known of one publisher."""

    covered: int = -1  # looked at up to here, but for `unknown`; -1 before the first summary or record
    told_from: int = 0  # where the first summary began
    begun: int = -1  # the first message that came; records do not say whether what is before it is missed
    low: int = 0  # what is not above this may have been delivered: it is dropped
    unknown: list[tuple[int, int]] = field(default_factory=list)  # ranges below `covered`, not looked at
    unknown_tries: int = 0
    seen: set[int] = field(default_factory=set)  # received, above `low`
    lost: dict[int, Loss] = field(default_factory=dict)  # in the order in which they were found
    asked: set[int] = field(default_factory=set)  # of `lost`, in the request under way
    asked_us: int = 0
    due_us: int | None = None  # when the next request goes out, or the one under way has failed
    backoff_us: int = 0
    answer_us: int = 0  # how long a publisher takes to answer, averaged; 0: not known yet
    waiting: dict[int, tuple[Any, int]] = field(default_factory=dict)  # ordered: items, and until when
    released: int = 0  # ordered: the last one handed out; what is before it comes too late


class Receiver:
    """All publishers as one subscriber sees them. `masks` are those of its subscription."""

    def __init__(self, me: bytes, masks: tuple[Mask, ...], settings: RepairSettings, started_us: int) -> None:
        self.me = me
        self.masks = masks
        self._settings = settings
        self._started_us = started_us
        self._sources: OrderedDict[bytes, _Source] = OrderedDict()  # heard of last comes last
        self._pending: dict[bytes, _Source] = {}  # those of them that `tick` may have something to do for
        self.false_repairs = 0
        self.unsolicited = 0  # repairs of what was not missing
        self.detected = self.recovered = self.requests = self.duplicates = self.given_up = 0
        self.recovery_us: list[int] = []  # of the latest recoveries, from the detection on
        self.all_recovery_us = 0  # of all of them together
        self._content: list[tuple[bytes, int, int]] = []  # to be asked of others: publisher, number, bits
        self._out: list[Any] = []  # what the application gets at the next tick

    # --- what comes

    def message(
        self, publisher: bytes, sequence: int, item: Any, now_us: int, *, repair: bool = False
    ) -> list[Any]:
        """A message, or the repair of one, perhaps by others: what the application gets now. Whoever may
        send repairs can make one up, so those are taken for what may be missing alone."""
        if repair and not self.may_miss(publisher, sequence) and not self._had(publisher, sequence):
            self.unsolicited += 1
            return []
        source = self._source(publisher, speaks=not repair)
        if source.begun < 0 and not repair:
            source.begun = sequence
        if sequence <= source.low or sequence in source.seen:
            self.duplicates += 1
            return []
        if sequence <= source.released:
            return [*self._lose(publisher, source, [sequence])]
        self._remember(publisher, source, sequence)
        loss = source.lost.pop(sequence, None)
        if loss is not None:
            self._recovered(source, sequence, loss, now_us)
        if not self._settings.order_us:
            return [item]
        if len(source.waiting) >= MAX_WAITING:
            oldest = min(source.waiting)
            source.waiting[oldest] = (source.waiting[oldest][0], 0)
        source.waiting[sequence] = (item, now_us + self._settings.order_us)
        return self._release(publisher, source, now_us)

    def _recovered(self, source: _Source, sequence: int, loss: Loss, now_us: int) -> None:
        if loss.tries == 1 and sequence in source.asked:
            self._measure(source, now_us - source.asked_us)
        self.recovered += 1
        self.recovery_us.append(now_us - loss.found_us)
        self.all_recovery_us += now_us - loss.found_us
        del self.recovery_us[:-1_000]
        if sequence in source.asked and source.due_us is not None:
            # A publisher answers all of a request at once: what does not come with it was lost once more.
            source.due_us = min(source.due_us, now_us + 2 * self._settings.settle_us)
            source.backoff_us = 0
        source.asked.discard(sequence)
        if not source.asked and not source.unknown:
            source.due_us = now_us if source.lost else None

    def _measure(self, source: _Source, answer_us: int) -> None:
        source.answer_us += (answer_us - source.answer_us) // (4 if source.answer_us else 1)

    def summary(self, publisher: bytes, summary: Summary, now_us: int, *, answer: bool = False) -> list[Any]:
        """What the application gets now: what waited for its order to be known. An `answer` to a request
        tells of nothing beyond what was asked for, so that none can end the search for losses."""
        if answer:
            known = self._sources.get(publisher)
            if known is None or summary.last > known.covered:
                self.unsolicited += 1
                return []
        source = self._source(publisher)
        lived_ms = -((self._started_us - now_us) // MILLISECOND_US)
        earlier = summary.ages_ms[0] > lived_ms  # it begins before this subscription
        if source.covered < 0:
            source.covered = summary.first - 1 if earlier else 0
            source.told_from = summary.first
        if summary.first > source.covered + 1:
            if self._settings.publisher_first:  # nobody else can say what was in between
                self._add_unknown(source, source.covered + 1, summary.first - 1, now_us)
            source.covered = summary.first - 1
        for sequence, (bits, age_ms) in enumerate(
            zip(summary.entries, summary.ages_ms, strict=False), summary.first
        ):
            if bits == REFUSED:
                self._withdraw(source, sequence, now_us)
            elif age_ms <= lived_ms and (sequence > source.covered or self._is_unknown(source, sequence)):
                self._look_at(publisher, source, sequence, bits, now_us)
        left = _without(source.unknown, 0 if earlier else summary.first, summary.last)
        if left != source.unknown:
            # The publisher answers, so it is asked for the rest, and soon.
            source.unknown, source.unknown_tries, source.backoff_us = left, 0, 0
            if left and source.due_us is not None:
                source.due_us = min(source.due_us, now_us + 2 * self._settings.settle_us)
        source.covered = max(source.covered, summary.last)
        return self._release(publisher, source, now_us) if self._settings.order_us else []

    def record(self, publisher: bytes, sequence: int, record: tuple[int, ...], now_us: int) -> None:
        """The paper's way (3.1): the bits of the messages before this one, the latest first. Messages
        overtake each other, so a record may tell of what is before one that came already."""
        source = self._source(publisher)
        if source.begun < 0:
            source.begun = sequence
        for back, bits in enumerate(record, 1):
            if sequence - back > source.begun:
                self._look_at(publisher, source, sequence - back, bits, now_us)
        # What lies between `covered` and the record is looked at by nobody: there is no way to know of it.
        source.covered = max(source.covered, sequence)

    def gone(self, gone: Gone, now_us: int) -> None:
        """The publisher no longer has them: others may."""
        source = self._sources.get(gone.publisher)
        if source is None:
            return
        for sequence in gone.sequences:
            loss = source.lost.get(sequence)
            if loss is not None and not loss.content:
                loss.silent = self._settings.publisher_tries
                source.due_us = now_us

    def false_repair(self, publisher: bytes, sequence: int, now_us: int) -> list[Any]:
        """It did not match after all: what the application gets now, which may have waited for it. Masks that
        do not tell well enough what matches are given up."""
        items = self.message(publisher, sequence, None, now_us, repair=True)
        self.false_repairs += 1
        self.recovered -= 1
        if self.false_repairs > MAX_FALSE and self.false_repairs > self.recovered:
            self.masks = tuple(mask for mask in self.masks if mask.exact)
        return items

    # --- what is known of a publisher

    def _source(self, publisher: bytes, *, speaks: bool = True) -> _Source:
        source = self._sources.get(publisher)
        if source is None:
            source = self._sources[publisher] = _Source()
            if len(self._sources) > MAX_SOURCES:
                self._forget(*self._sources.popitem(last=False))
        else:
            self._sources.move_to_end(publisher)
        self._pending[publisher] = source
        if speaks:
            for loss in source.lost.values():
                if not loss.silent:
                    break
                loss.silent = 0
        return source

    def _forget(self, publisher: bytes, source: _Source) -> None:
        """Nothing more is expected of this publisher."""
        self._pending.pop(publisher, None)
        self._out += self._lose(publisher, source, list(source.lost))
        for first, last in source.unknown:
            self._out += self._unheard(publisher, source, first, last)
        self._out += [source.waiting[sequence][0] for sequence in sorted(source.waiting)]

    def _remember(self, publisher: bytes, source: _Source, sequence: int) -> None:
        if sequence <= source.low:
            return
        source.seen.add(sequence)
        if len(source.seen) > MAX_SEEN:
            kept = sorted(source.seen)[MAX_SEEN // 2 :]
            low = max(source.low, kept[0] - 1)
            for first, last in source.unknown:  # below the window it will not be known what came
                self._out += self._unheard(publisher, source, first, min(last, low))
            source.unknown = _without(source.unknown, 0, low)
            source.low, source.seen = low, set(kept)
            for lost in [lost for lost in source.lost if lost <= source.low]:
                source.lost[lost].tries = self._settings.tries

    def _unheard(self, publisher: bytes, source: _Source, first: int, last: int) -> list[Lost]:
        """A gap for each run of numbers in first..last that did not come and are not asked for. How many of
        them this subscription misses is not known: a run counts as one."""
        first = max(first, source.low + 1)
        known = (at for at in source.seen | source.lost.keys() if first <= at <= last)
        edges = [first - 1, *sorted(known), last + 1]
        gaps = [Lost(publisher, low, high - 1) for low, high in pairwise(edges) if low < high - 1]
        self.given_up += len(gaps)
        return gaps

    def _look_at(self, publisher: bytes, source: _Source, sequence: int, bits: int, now_us: int) -> None:
        if sequence in source.seen or sequence in source.lost or sequence <= source.low:
            return
        if bits == REFUSED or not matched(bits, self.masks):
            return
        self.detected += 1
        if sequence <= source.released:
            self._out += self._lose(publisher, source, [sequence])
            return
        if len(source.lost) >= MAX_LOST:
            self._out += self._lose(publisher, source, [next(iter(source.lost))])
        source.lost[sequence] = Loss(bits, now_us)
        self._soon(source, now_us)

    def _withdraw(self, source: _Source, sequence: int, now_us: int) -> None:
        """No broker took it, so nobody misses it."""
        if source.lost.pop(sequence, None) is not None:
            source.asked.discard(sequence)
            source.due_us = now_us  # it asks for the rest, if there is any

    def _add_unknown(self, source: _Source, first: int, last: int, now_us: int) -> None:
        source.unknown.append((first, last))
        if len(source.unknown) > MAX_RANGES:
            (first, _), (_, last) = source.unknown[0], source.unknown[1]
            source.unknown[:2] = [(first, last)]
        source.unknown_tries = 0
        self._soon(source, now_us)

    def _soon(self, source: _Source, now_us: int) -> None:
        if source.due_us is None:
            source.due_us = now_us + self._settings.settle_us

    def _is_unknown(self, source: _Source, sequence: int) -> bool:
        return any(first <= sequence <= last for first, last in source.unknown)

    # --- asking

    def tick(self, now_us: int) -> tuple[list[tuple[bytes, Request]], list[Any]]:
        """Requests to publishers; Losts, and what waited for its order."""
        requests: list[tuple[bytes, Request]] = []
        out, self._out = self._out, []
        for publisher, source in list(self._pending.items()):
            if source.due_us is not None and now_us >= source.due_us:
                request = self._ask(publisher, source, now_us, out)
                if request is not None:
                    requests.append((publisher, request))
            if source.waiting:
                out += self._release(publisher, source, now_us)
            if source.due_us is None and not source.waiting:
                del self._pending[publisher]
        return requests, out

    def _ask(self, publisher: bytes, source: _Source, now_us: int, out: list[Any]) -> Request | None:
        settings = self._settings
        out += self._give_up(publisher, source)
        source.asked.clear()
        if not source.lost and not source.unknown:
            source.due_us, source.backoff_us = None, 0
            return None
        wanted: list[int] = []
        for sequence, loss in source.lost.items():
            if len(wanted) == MAX_WANTED:
                break
            loss.tries += 1
            loss.silent += 1
            source.asked.add(sequence)
            if not loss.content and (loss.silent > settings.publisher_tries or not settings.publisher_first):
                loss.content = True
                self._content.append((publisher, sequence, loss.bits))
            wanted.append(sequence)
        source.asked_us = now_us
        usual = max(settings.gather_us, source.answer_us * 9 // 8) if source.answer_us else settings.retry_us
        wait = source.backoff_us or usual + settings.settle_us
        source.due_us = now_us + wait
        source.backoff_us = min(wait * _BACKOFF[0] // _BACKOFF[1], settings.max_retry_us)
        if source.unknown:
            source.unknown_tries += 1
        if not settings.publisher_first:
            return None
        self.requests += 1
        ranges = tuple(_asked_of(span, source.told_from) for span in source.unknown)
        return Request(receiver=self.me, wanted=tuple(sorted(wanted)), ranges=ranges)

    def _give_up(self, publisher: bytes, source: _Source) -> list[Lost]:
        """What was asked for often enough."""
        tries = self._settings.tries
        gaps = self._lose(publisher, source, [at for at, loss in source.lost.items() if loss.tries >= tries])
        if source.unknown_tries >= tries:
            for first, last in source.unknown:
                recent = max(first, last - MAX_SEEN // 2 + 1)
                gaps += self._unheard(publisher, source, first, recent - 1)
                missed = (at for at in range(recent, last + 1) if at > source.low and at not in source.seen)
                gaps += self._lose(publisher, source, list(missed))
            source.unknown.clear()
        return gaps

    def _lose(self, publisher: bytes, source: _Source, sequences: list[int]) -> list[Lost]:
        """These are given up: one gap for each run of them. What comes of them now is too late."""
        gaps: list[Lost] = []
        for sequence in sorted(sequences):
            source.lost.pop(sequence, None)
            source.asked.discard(sequence)
            self._remember(publisher, source, sequence)
            if gaps and gaps[-1].end == sequence - 1:
                gaps[-1] = Lost(publisher, gaps[-1].start, sequence)
            else:
                gaps.append(Lost(publisher, sequence - 1, sequence))
        self.given_up += len(sequences)
        return gaps

    def take_content(self) -> list[tuple[bytes, int, int]]:
        """What is to be asked of others: publisher, number and bits."""
        taken, self._content = self._content, []
        return taken

    # --- order

    def _release(self, publisher: bytes, source: _Source, now_us: int) -> list[Any]:
        """What waits up to the first number that may still come, and what has waited for long enough."""
        out: list[Any] = []
        barrier = min([source.covered + 1, *source.lost, *(first for first, _ in source.unknown)])
        expired = (sequence for sequence, (_, until_us) in source.waiting.items() if until_us <= now_us)
        last = max([barrier, *expired])
        for sequence in sorted(sequence for sequence in source.waiting if sequence <= last):
            if sequence > barrier:
                out += self._lose(publisher, source, [lost for lost in source.lost if lost < sequence])
            out.append(source.waiting.pop(sequence)[0])
            source.released = sequence
        return out

    # --- inspection

    def next_deadline(self) -> int | None:
        if self._out:
            return 0
        due = [source.due_us for source in self._pending.values() if source.due_us is not None]
        for source in self._pending.values():
            due += [until_us for _, until_us in source.waiting.values()]
        return min(due, default=None)

    def bits_of(self, publisher: bytes, sequence: int) -> int | None:
        """Of what is missing; None if this is not."""
        source = self._sources.get(publisher)
        loss = None if source is None else source.lost.get(sequence)
        return None if loss is None else loss.bits

    def may_miss(self, publisher: bytes, sequence: int) -> bool:
        """Whether this is missing, or in a range that nothing has told of. Records (spec B3) leave such
        ranges between the numbers that came, and after the last: who shares a loss is repaired, too, before
        a record tells it of that (3.5)."""
        source = self._sources.get(publisher)
        if source is None or sequence <= source.low or sequence in source.seen:
            return False
        if sequence in source.lost or self._is_unknown(source, sequence):
            return True
        by_records = not self._settings.publisher_first
        return by_records and 0 <= source.begun < sequence < source.covered + MAX_AHEAD

    def _had(self, publisher: bytes, sequence: int) -> bool:
        source = self._sources.get(publisher)
        return source is not None and (sequence <= source.low or sequence in source.seen)

    @property
    def missing(self) -> int:
        return sum(len(source.lost) for source in self._sources.values())

    def check(self) -> None:
        for publisher, source in self._sources.items():
            if (source.due_us is not None or source.waiting) and self._pending.get(publisher) is not source:
                raise BugError("a publisher that nobody will ask")
            bounds = ((source.lost, MAX_LOST), (source.seen, MAX_SEEN), (source.waiting, MAX_WAITING))
            if any(len(numbers) > most for numbers, most in bounds):
                raise BugError("what a receiver remembers of a publisher is out of bounds")
            if source.lost.keys() & source.seen or not source.asked <= source.lost.keys():
                raise BugError("a message is both lost and received")
            if (source.lost or source.unknown) and source.due_us is None:
                raise BugError("a loss that nobody will ask for")
            if len(source.unknown) > MAX_RANGES:
                raise BugError("too many ranges are unknown")


def _asked_of(span: tuple[int, int], told_from: int) -> tuple[int, int]:
    """A publisher describes the first MAX_ENTRIES of a range; of what is before the first summary, the last
    ones are asked for."""
    first, last = span
    return (max(first, last - MAX_ENTRIES + 1) if last < told_from else first, last)


def _without(ranges: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    left: list[tuple[int, int]] = []
    for low, high in ranges:
        if low < first:
            left.append((low, min(high, first - 1)))
        if high > last:
            left.append((max(low, last + 1), high))
    return [span for span in left if span[0] <= span[1]][-MAX_RANGES:]
