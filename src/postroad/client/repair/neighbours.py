"""Repair among receivers, by content: the timers of SRM, and caches that answer (spec B5 to B8, paper 2.2,
3.2).

Who misses a message waits a while before it asks, [C1 d, (C1 + C2) d] with d the delay from the publisher,
and doubles that when it hears another ask for the same. Who has cached the message waits [D1 d, (D1 + D2)
d], d from the asker, and cancels when it hears the repair. Repairs go to all who may want the message (or,
by policy, to the asker alone), so one of each is mostly enough. Asks are lost, too: each is said again after
twice the time.

C1, C2, D1 and D2 follow the duplicates and the delays that are seen, as in SRM: more duplicates widen the
intervals, fewer narrow them. A duplicate is an ask or a repair after the first of its round; until half of
the wait that begins with a round has passed, whatever is heard belongs to that round, and doubles nothing
once more. Asks of a later round are no duplicates: the one before them was lost, or nobody had the message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from postroad.client.repair.cache import Cache
from postroad.client.repair.messages import Ask, Repair
from postroad.client.repair.publisher import Named
from postroad.client.repair.settings import RepairSettings
from postroad.errors import BugError
from postroad.units import MILLISECOND_US, SECOND_US

MAX_WANTED: Final = 4_096
MAX_OFFERED: Final = 4_096
MAX_SILENCED: Final = 8_192
MAX_ASKS: Final = 6  # of one node for one message
MAX_ASKS_PER_S: Final = 200  # of one node
MAX_REPAIRS_PER_S: Final = 200
MAX_DOUBLINGS: Final = 5
HOLD_OFF: Final = 3  # a message that was repaired is not repaired again for so many d
DEFAULT_DELAY_US: Final = 100 * MILLISECOND_US
MIN_DELAY_US: Final = 5 * MILLISECOND_US
MAX_DELAY_US: Final = 2 * SECOND_US
DUPLICATES: Final = 0.25  # for one message that are taken: SRM takes 1, the paper shows fewer (4.3)
_SMOOTH: Final = 0.25


class Tuned:
    """One pair of timer parameters and what they are tuned by."""

    __slots__ = ("delay", "duplicates", "first", "spread")

    def __init__(self, first: float, spread: float) -> None:
        self.first = first  # C1 or D1
        self.spread = spread  # C2 or D2
        self.duplicates = 0.0  # for one message, averaged
        self.delay = 1.0  # until the first ask or repair, in units of d, averaged

    def finished(self, duplicates: int, delay: float) -> None:
        """One message was asked for, or repaired, by whomever."""
        self.duplicates += _SMOOTH * (duplicates - self.duplicates)
        self.delay += _SMOOTH * (delay - self.delay)
        if self.duplicates >= DUPLICATES:
            self.first += 0.1
            self.spread += 0.5
        elif self.duplicates < 0.9 * DUPLICATES:
            if self.delay > 1:
                self.spread -= 0.1
            if self.duplicates < DUPLICATES / 4:
                self.first -= 0.05
        else:
            self.first += 0.05
        self.first = min(2.0, max(0.5, self.first))
        self.spread = min(8.0, max(1.0, self.spread))


@dataclass(slots=True)
class _Wanted:
    bits: int
    began_us: int
    due_us: int
    round_us: int = 0  # asks before this are of the round that has begun
    asked_us: int | None = None  # when somebody asked first
    doublings: int = 0
    asks: int = 0
    duplicates: int = 0  # asks of others in a round that had one


@dataclass(slots=True)
class _Offered:
    row: bytes
    bits: int
    asker: bytes
    began_us: int
    due_us: int
    delay_us: int


class Neighbours:
    """`draw(n)` gives a random number in 0..n-1."""

    def __init__(self, me: bytes, settings: RepairSettings, *, draw: Callable[[int], int]) -> None:
        self._me = me
        self._settings = settings
        self._draw = draw
        self.cache = Cache(least=settings.cache_min, most=settings.cache_max, hit_ratio=settings.hit_ratio)
        self.asking = Tuned(2.0, 2.0)
        self.repairing = Tuned(2.0, 2.0)  # the logarithm of a hundred receivers, as SRM begins
        self._delays: dict[bytes, float] = {}  # publisher -> its delay, averaged; at most MAX_WANTED
        self._wanted: dict[tuple[bytes, int], _Wanted] = {}
        self._offered: dict[tuple[bytes, int], _Offered] = {}
        self._silenced: dict[tuple[bytes, int], int] = {}  # repaired lately -> until when nobody need do so
        self._repeats = 0  # repairs since the last offer of what was repaired already
        self._repair_delay: float | None = None  # of the last repair since then, in units of d
        self._due_us: int | None = None  # of all timers the first
        self._second_us = 0
        self._sent = [0, 0]  # asks and repairs in this second
        self.asks = self.repairs = self.suppressed = 0

    # --- what comes

    def received(self, publisher: bytes, delay_us: int) -> None:
        """An original message took this long."""
        delay_us = max(0, min(delay_us, MAX_DELAY_US))
        known = self._delays.get(publisher)
        if known is None and len(self._delays) >= MAX_WANTED:
            del self._delays[next(iter(self._delays))]
        self._delays[publisher] = delay_us if known is None else known + 0.1 * (delay_us - known)

    def delay_us(self, publisher: bytes) -> int:
        known = self._delays.get(publisher, DEFAULT_DELAY_US)
        return max(MIN_DELAY_US, int(known))

    def want(self, publisher: bytes, sequence: int, bits: int, now_us: int) -> None:
        """A loss: it is asked for after a while."""
        key = (publisher, sequence)
        if key in self._wanted or len(self._wanted) >= MAX_WANTED:
            return
        wanted = self._wanted[key] = _Wanted(bits, now_us, now_us)
        self._set_timer(publisher, wanted, now_us)

    def _set_timer(self, publisher: bytes, wanted: _Wanted, now_us: int) -> None:
        wanted.due_us = now_us + (self._wait_us(self.asking, self.delay_us(publisher)) << wanted.doublings)
        self._wake(wanted.due_us)

    def _next_round(self, publisher: bytes, wanted: _Wanted, now_us: int) -> None:
        """Somebody asked: the wait for the repair is twice as long as the last."""
        if wanted.asked_us is None:
            wanted.asked_us = now_us
        wanted.doublings = min(MAX_DOUBLINGS, wanted.doublings + 1)
        self._set_timer(publisher, wanted, now_us)
        wanted.round_us = (now_us + wanted.due_us) // 2

    def _wait_us(self, tuned: Tuned, delay_us: int) -> int:
        return int(tuned.first * delay_us) + self._draw(int(tuned.spread * delay_us) + 1)

    def heard_ask(self, ask: Ask, now_us: int) -> None:
        key = (ask.publisher, ask.sequence)
        wanted = self._wanted.get(key)
        if wanted is not None:
            self.suppressed += not wanted.asks
            if now_us < wanted.round_us:
                wanted.duplicates += 1
            else:
                self._next_round(ask.publisher, wanted, now_us)
        delay_us = max(MIN_DELAY_US, min(now_us - ask.sent_us, MAX_DELAY_US))
        cached = self.cache.get(ask.publisher, ask.sequence)
        self.cache.asked(
            ask.publisher,
            hit=cached is not None,
            wait_s=min(ask.wait_us, 60 * SECOND_US) / SECOND_US,
            source_s=self.delay_us(ask.publisher) / SECOND_US,
            asker_s=delay_us / SECOND_US,
        )
        if cached is None or key in self._offered or len(self._offered) >= MAX_OFFERED:
            return
        if self._silenced.get(key, 0) > now_us:
            return
        if self._repair_delay is not None:
            self.repairing.finished(self._repeats, self._repair_delay)
        self._repeats, self._repair_delay = 0, None
        due_us = now_us + self._wait_us(self.repairing, delay_us)
        self._offered[key] = _Offered(*cached, ask.receiver, now_us, due_us, delay_us)
        self._wake(due_us)

    def heard_repair(self, publisher: bytes, sequence: int, now_us: int) -> None:
        key = (publisher, sequence)
        self.forget(publisher, sequence, now_us)
        offered = self._offered.pop(key, None)
        if offered is not None:
            self.suppressed += 1
            self.cache.provided(publisher, here=False)
            self._repair_delay = (now_us - offered.began_us) / offered.delay_us
        elif self._silenced.get(key, 0) > now_us:
            self._repeats += 1
        # Also what nobody has asked for here: the ask may be behind its repair.
        self._hold_off(key, now_us + HOLD_OFF * self.delay_us(publisher))

    def forget(self, publisher: bytes, sequence: int, now_us: int) -> None:
        """It is no longer missing."""
        wanted = self._wanted.pop((publisher, sequence), None)
        if wanted is not None:
            first_us = now_us if wanted.asked_us is None else wanted.asked_us
            waited = (first_us - wanted.began_us) / self.delay_us(publisher)
            self.asking.finished(wanted.duplicates, waited)

    def give_up(self, publisher: bytes, start: int, end: int) -> None:
        """What is missing of (start, end] is no longer wanted."""
        given_up = [key for key in self._wanted if key[0] == publisher and start < key[1] <= end]
        for key in given_up:
            del self._wanted[key]

    def _hold_off(self, key: tuple[bytes, int], until_us: int) -> None:
        if len(self._silenced) >= MAX_SILENCED:
            del self._silenced[next(iter(self._silenced))]
        self._silenced[key] = until_us

    # --- time

    def _wake(self, due_us: int) -> None:
        if self._due_us is None or due_us < self._due_us:
            self._due_us = due_us

    def next_deadline(self) -> int | None:
        return self._due_us

    def tick(self, now_us: int, now_sent_us: int) -> list[Named]:
        """Asks and repairs that are due; `now_sent_us` is the time that others can compare."""
        self.cache.adjust(now_us)
        if self._due_us is None or now_us < self._due_us:
            return []
        if now_us - self._second_us >= SECOND_US:
            self._second_us, self._sent = now_us, [0, 0]
        out: list[Named] = []
        for key, wanted in list(self._wanted.items()):
            if now_us >= wanted.due_us:
                out += self._ask(key, wanted, now_us, now_sent_us)
        for key, offered in list(self._offered.items()):
            if now_us >= offered.due_us:
                out += self._repair(key, offered, now_us)
        self._due_us = min(self._timers(), default=None)
        return out

    def _timers(self) -> list[int]:
        due = [wanted.due_us for wanted in self._wanted.values()]
        return due + [offered.due_us for offered in self._offered.values()]

    def _ask(self, key: tuple[bytes, int], wanted: _Wanted, now_us: int, now_sent_us: int) -> list[Named]:
        publisher, sequence = key
        if wanted.asks >= MAX_ASKS:
            del self._wanted[key]
            return []
        self._next_round(publisher, wanted, now_us)
        if self._sent[0] >= MAX_ASKS_PER_S:
            return []
        self._sent[0] += 1
        wanted.asks += 1
        self.asks += 1
        wait = (self.asking.first + self.asking.spread / 2) * self.delay_us(publisher)
        ask = Ask(
            receiver=self._me,
            publisher=publisher,
            sequence=sequence,
            bits=wanted.bits,
            sent_us=now_sent_us,
            wait_us=int(wait),
        )
        return [Named((), ask, wanted.bits)]

    def _repair(self, key: tuple[bytes, int], offered: _Offered, now_us: int) -> list[Named]:
        del self._offered[key]
        if self._sent[1] >= MAX_REPAIRS_PER_S:
            return []
        self._sent[1] += 1
        self.repairs += 1
        self.cache.provided(key[0], here=True)
        self._repair_delay = (now_us - offered.began_us) / offered.delay_us
        self._hold_off(key, now_us + HOLD_OFF * offered.delay_us)
        repair = Repair(publisher=key[0], sequence=key[1], row=offered.row)
        if self._settings.policy == "unicast":
            return [Named((offered.asker,), repair)]
        return [Named((), repair, offered.bits, (offered.asker,))]

    def check(self) -> None:
        self.cache.check()
        if max(len(self._wanted), len(self._offered)) > MAX_WANTED or len(self._silenced) > MAX_SILENCED:
            raise BugError("what is asked of neighbours is out of bounds")
        timers = self._timers()
        if timers and (self._due_us is None or self._due_us > min(timers)):
            raise BugError("a timer of repair that nobody will wake")
