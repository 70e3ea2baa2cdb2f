"""The release protocol: who still needs which ticks, and what a pubend may forget (spec D7, D8; section 3).

A subscriber hosting broker reports per pubend released(p) and latestDelivered(p); both are on its disk when
it says so. Reports travel up the tree of the pubend's origin and are merged by owner at every hop, so the
pubend knows every broker that holds durable subscriptions by name. An owner that is unreachable holds its
ticks; it is never forgotten by itself, but an administrator can retire it. A retired owner that comes back
is an owner again, and gets gaps for what it missed. What is remembered of an owner without subscriptions is
the serial of its last report: an older one may still be on its way, by another route. So it is forgotten only
where there would be more than MAX_OWNERS; while somebody reports who cannot be remembered, nothing becomes L.

Tr is the minimum of released, Td that of latestDelivered. A tick t becomes L when
t <= Tr and it is older than `keep_us` or more than `keep_bytes` follow it, so that who comes later can read
the past; or t <= Td and it is older than `max_retain_us` or more than `max_bytes` follow it (early release);
never before it, or the process, is `grace_us` old, so that a broker with its first subscription has time to
report, and one that takes over a subscription from another. A tick is a time, and tells its age; where the
clock was ahead and was put right, ticks go on above it, and their age is when they were last (`_Aged`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from postroad.errors import BugError, PeerError, PostroadError, UnavailableError
from postroad.ids import pubend_text
from postroad.seam.turn import Turn
from postroad.units import SECOND_US

TABLE: Final = "durable.owners"
MAX_OWNERS: Final = 16_384
MAX_REPORTS: Final = 1_000_000  # held on the way, of all owners on all pubends
SAVE_US: Final = 5 * SECOND_US  # reports are saved this often; a report not saved comes again
GRACE_US: Final = 10 * SECOND_US
AGES: Final = 64  # ticks noted within an age


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one broker says of one pubend. `serial` orders the reports of an owner: the newest counts."""

    owner: int
    serial: int  # boot << 32 | n
    released: int
    latest_delivered: int
    ended: bool = False  # no durable subscription is left there


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    keep_us: int = 10 * SECOND_US  # ticks younger than this are kept although nobody needs them
    keep_bytes: int = 0  # but no more than this of them; 0: all
    max_retain_us: int = 0  # 0: no early release by age
    max_bytes: int = 0  # 0: no early release by size

    @property
    def grace_us(self) -> int:
        """Ticks younger than this are kept whatever is released."""
        return min(self.keep_us, GRACE_US)


class _Row(msgspec.Struct, frozen=True):
    serial: int
    released: int
    latest_delivered: int
    ended: bool = False


class Reporter:
    """At a subscriber hosting broker: what it reports, when that is news."""

    __slots__ = ("_owner", "_said", "_serial")

    def __init__(self, owner: int, boot: int) -> None:
        self._owner = owner
        self._serial = boot << 32
        self._said: dict[int, tuple[int, int, bool]] = {}  # pubend -> released, latestDelivered, ended

    def report(self, pubend: int, released: int, delivered: int, *, ended: bool) -> Report | None:
        before, now = self._said.get(pubend), (released, delivered, ended)
        if now == before or (ended and before is not None and before[2]):
            return None
        self._said[pubend] = now
        self._serial += 1
        return Report(
            owner=self._owner,
            serial=self._serial,
            released=released,
            latest_delivered=delivered,
            ended=ended,
        )

    def forget(self, pubend: int) -> None:
        """The last report may not have arrived: the next `report` sends it again."""
        self._said.pop(pubend, None)


class ReleaseMerger:
    """At every broker on the way: the newest report of each owner below, to be passed on to the parent.

    What was not passed on yet, or may have been lost with a link, is passed on again: `resend`.
    """

    __slots__ = ("_due", "_reports")

    def __init__(self) -> None:
        self._reports: dict[tuple[int, int], Report] = {}  # (pubend, owner) -> its newest report
        self._due: dict[tuple[int, int], None] = {}  # those that the parent was not told

    def room(self, pubend: int, owner: int) -> bool:
        """Whether such a report of another broker can be held."""
        return (pubend, owner) in self._reports or len(self._reports) < MAX_REPORTS

    def report(self, pubend: int, report: Report) -> bool:
        """True if it is news."""
        key = (pubend, report.owner)
        before = self._reports.get(key)
        if before is not None and before.serial >= report.serial:
            return False
        self._reports[key] = report
        self._due[key] = None
        return True

    def take(self, pubends: Callable[[int], bool]) -> dict[int, list[Report]]:
        """The reports on those pubends that the parent has not got; they count as passed on."""
        taken: dict[int, list[Report]] = {}
        for key in [key for key in self._due if pubends(key[0])]:
            del self._due[key]
            taken.setdefault(key[0], []).append(self._reports[key])
        return taken

    def origins(self, *, due: bool = False) -> list[int]:
        """The brokers on whose pubends there are reports; with `due`, reports that the parent has not got."""
        return sorted({pubend >> 32 for pubend, _ in (self._due if due else self._reports)})

    def resend(self, pubends: Callable[[int], bool]) -> None:
        """These pubends have another parent now: `take` gives it every report."""
        self._due.update(dict.fromkeys(key for key in self._reports if pubends(key[0])))

    def forget(self, forgotten: Callable[[int, int], bool]) -> None:
        """Drop the reports of which `forgotten(pubend, owner)` says so."""
        for key in [key for key in self._reports if forgotten(*key)]:
            del self._reports[key]
            self._due.pop(key, None)

    def check(self) -> None:
        if not set(self._due) <= set(self._reports):
            raise BugError("release: a report is due that is not held")


class _Aged:
    """Up to which tick everything has an age, or is older."""

    __slots__ = ("_age_us", "_noted", "_tick")

    def __init__(self, age_us: int) -> None:
        self._age_us = age_us
        self._noted: deque[tuple[int, int]] = deque()  # (when, the newest tick then), at most AGES and one
        self._tick = 0  # noted that long ago

    def tick(self, now_us: int, last: int) -> int:
        if not self._noted or now_us - self._noted[-1][0] > self._age_us // AGES:
            self._noted.append((now_us, last))
        while self._noted and self._noted[0][0] <= now_us - self._age_us:
            self._tick = self._noted.popleft()[1]
        return max(now_us - self._age_us, self._tick)


class ReleaseRoot:
    """At the pubend: its owners and the floor that follows from their reports and the policy."""

    __slots__ = (
        "_dirty",
        "_old",
        "_owners",
        "_policy",
        "_quiet_until",
        "_retained",
        "_save_at",
        "_saving",
        "_unheld",
        "_young",
        "pubend",
    )

    def __init__(self, pubend: int, policy: RetentionPolicy, *, now_us: int) -> None:
        self.pubend = pubend
        self._policy = policy
        self._young = _Aged(policy.grace_us)
        self._old = _Aged(policy.keep_us)
        self._retained = _Aged(policy.max_retain_us + 1)
        self._quiet_until = now_us + policy.grace_us  # a report that a crash forgot has time to come again
        self._owners: dict[int, _Row] = {}  # brokers that have, or had, durable subscriptions: last report
        self._unheld: dict[int, None] = {}  # owners for whom there is no room in `_owners`
        self._dirty: dict[int, None] = {}  # owners whose row is to be saved or removed
        self._saving = False  # rows are on their way to disk: further ones wait
        self._save_at = 0

    def recover(self, rows: Mapping[bytes, bytes]) -> None:
        """After a restart: owners hold what they held, at the latest by their last saved report."""
        prefix = self.pubend.to_bytes(8, "big")
        for key, value in sorted(rows.items()):
            if key[:8] == prefix:
                self._owners[int.from_bytes(key[8:], "big")] = read_owner(key, value)

    def inherit(self, siblings: Iterable[ReleaseRoot]) -> None:
        """A new pubend of the same broker: whoever follows a sibling follows this one too, and holds all
        of it until it reports, which it may not be able to for a while."""
        for owner in {owner: None for sibling in siblings for owner in sibling._holding()}:
            self._owners[owner] = _Row(0, 0, 0)
            self._dirty[owner] = None
            self._save_at = 0

    def report(self, report: Report) -> bool:
        """True if it is news. UnavailableError: there are too many owners, and nothing is released."""
        before = self._owners.get(report.owner)
        if before is not None and before.serial >= report.serial:
            return False
        if report.released > report.latest_delivered:
            raise PeerError(
                f"a report of broker {report.owner:08x} releases up to {report.released}, and"
                f" {report.latest_delivered} is the last that was delivered"
            )
        self._unheld.pop(report.owner, None)
        if before is None and len(self._owners) >= MAX_OWNERS:
            if report.ended:
                return False
            self._make_room(report.owner)
        self._owners[report.owner] = _Row(
            report.serial, report.released, report.latest_delivered, report.ended
        )
        # A new owner is saved at once: a restart must not forget that somebody holds ticks.
        if before is None or before.ended or report.ended:
            self._save_at = 0
        self._dirty[report.owner] = None
        return True

    def _make_room(self, owner: int) -> None:
        """Forget one that has ended."""
        ended = next((other for other, row in self._owners.items() if row.ended), None)
        if ended is None:
            self._unheld[owner] = None
            raise UnavailableError(
                f"more than {MAX_OWNERS} brokers have durable subscriptions: nothing of pubend"
                f" {pubend_text(self.pubend)} is released before some are retired (postroad subs retire)"
            )
        del self._owners[ended]
        self._dirty[ended] = None

    def retire(self, owner: int) -> bool:
        """An administrator says that this broker will not come back: it holds nothing any more.

        False if it held nothing.
        """
        self._unheld.pop(owner, None)
        row = self._owners.get(owner)
        if row is None or row.ended:
            return False
        self._owners[owner] = msgspec.structs.replace(row, ended=True)
        self._dirty[owner] = None
        self._save_at = 0
        return True

    def _holding(self) -> dict[int, _Row]:
        return {owner: row for owner, row in self._owners.items() if not row.ended}

    @property
    def owners(self) -> int:
        """Brokers that have, or had, durable subscriptions."""
        return len(self._owners)

    @property
    def followed(self) -> bool:
        """Somebody has durable subscriptions."""
        return bool(self._unheld) or any(not row.ended for row in self._owners.values())

    @property
    def released(self) -> int | None:
        """Tr; None if nobody has durable subscriptions."""
        return min((row.released for row in self._owners.values() if not row.ended), default=None)

    @property
    def latest_delivered(self) -> int | None:
        """Td."""
        return min((row.latest_delivered for row in self._owners.values() if not row.ended), default=None)

    def floor(
        self, now_us: int, last: int, floor_for_size: Callable[[int], int], *, short: bool = False
    ) -> int:
        """Up to here ticks become L. `last`: the newest tick; `floor_for_size(n)`: see DurablePubend.

        `short`: the disk is full, and what nobody needs makes room.
        """
        policy = self._policy
        grown, kept = self._young.tick(now_us, last), self._old.tick(now_us, last)
        retained = self._retained.tick(now_us, last)
        if now_us < self._quiet_until or self._unheld:
            return 0
        released, delivered = self.released, self.latest_delivered
        if released is None or delivered is None:
            released = delivered = last  # nobody needs anything
        if policy.keep_bytes:
            kept = max(kept, floor_for_size(policy.keep_bytes))
        floor = released if short else min(released, kept)
        if policy.max_retain_us:
            floor = max(floor, min(delivered, retained))
        if policy.max_bytes:
            floor = max(floor, min(delivered, floor_for_size(policy.max_bytes)))
        return max(0, min(floor, grown, last))

    def flush(self, turn: Turn) -> None:
        if not self._dirty or self._saving or turn.now_us < self._save_at:
            return
        self._save_at = turn.now_us + SAVE_US
        prefix = self.pubend.to_bytes(8, "big")
        owners = tuple(self._dirty)
        rows = [
            (
                prefix + owner.to_bytes(4, "big"),
                msgspec.msgpack.encode(self._owners[owner]) if owner in self._owners else None,
            )
            for owner in owners
        ]
        self._dirty.clear()
        self._saving = True
        turn.save(TABLE, rows, then=partial(self._saved, owners))

    def close(self, turn: Turn) -> None:
        """The process ends: save what is not, whether or not it is time."""
        self._save_at = 0
        self._saving = False
        self.flush(turn)

    def _saved(self, owners: tuple[int, ...], _turn: Turn, error: PostroadError | None) -> None:
        self._saving = False
        if error is not None:
            self._dirty.update(dict.fromkeys(owners))

    def status(self) -> dict[str, object]:
        return {
            "pubend": pubend_text(self.pubend),
            "released": self.released,
            "latest_delivered": self.latest_delivered,
            "owners": [
                {
                    "broker": f"{owner:08x}",
                    "released": row.released,
                    "latest_delivered": row.latest_delivered,
                }
                for owner, row in sorted(self._holding().items())
            ],
        }

    def check(self) -> None:
        for owner, row in self._owners.items():
            if row.released > row.latest_delivered:
                raise BugError(f"release: owner {owner:08x} released more than was delivered")


def read_owner(_key: bytes, value: bytes) -> _Row:
    return msgspec.msgpack.decode(value, type=_Row)
