"""Durable subscriptions that other brokers host: name -> epochs and brokers (spec D10).

Every broker claims the names it hosts, and claims are known everywhere (`overlay.interest`). The highest
epoch has a name; equal epochs go to the higher broker number. Lower ones are of brokers that had it before
and still hold what it has not acknowledged: should the highest be retired, the next one has it. Heard claims
are kept on disk, and stay although their broker is gone: a subscriber that comes here must not begin anew
while its token lies elsewhere. A claim goes when its broker withdraws it, or when an administrator retires
the broker. A table of that broker that is older than the claim withdraws nothing: after a restart, whoever
was cut off may have such a table, and be the only one to have any.

A name belongs to the principal that made it. Where two principals made the same one at brokers that did not
know of each other, it belongs to the one that made it first; the claims of the other count for nothing,
whatever their epochs, until those of the first are gone.

A name that is deleted has a row of nobody, above the claim with which it was, for as long as lower claims are
known: their brokers were away, and hold what is to be deleted (`durable.subscriber.moving` tells them).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from postroad.durable.subscriber.backlog import Backlog
from postroad.errors import BugError, PostroadError
from postroad.overlay.interest_entries import Claim
from postroad.seam.turn import Turn

TABLE: Final = "durable.claims"
MAX_CLAIMS: Final = 1_000_000
NOBODY: Final = 0  # no broker has this number


class Row(msgspec.Struct, frozen=True, order=True):
    epoch: int
    broker: int  # NOBODY: what is lower was deleted
    version: int  # of that broker's table, in which it was heard
    principal: str = ""  # that it belongs to; "": nobody in particular
    born: int = 0
    fingerprint: bytes = b""


class Title(NamedTuple):
    """To whom a name belongs, and since when: of two the lesser is the elder."""

    born: int
    principal: str


def title(rows: Iterable[Row]) -> Title | None:
    """The eldest one among claims that are not below a deletion; None if they are nobody's."""
    rows = tuple(rows)
    deletion = max((row.epoch for row in rows if row.broker == NOBODY), default=0)
    titles = [Title(row.born, row.principal) for row in rows if row.principal and row.epoch >= deletion]
    return min(titles, default=None)


def ranked(rows: Iterable[Row]) -> list[Row]:
    """The highest claim first; claims of principals to whom the name does not belong come last."""
    rows = tuple(rows)
    eldest = title(rows)
    deletion = max((row.epoch for row in rows if row.broker == NOBODY), default=0)

    def counts(row: Row) -> bool:
        return row.epoch < deletion or eldest is None or row.principal in ("", eldest.principal)

    return sorted(rows, key=lambda row: (counts(row), row), reverse=True)


class Claims:
    """What is hosted elsewhere, as far as is known. `lost`: some claim had no room."""

    __slots__ = ("_backlog", "_deleted", "_dirty", "_rows", "lost")

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        # By name: the claims of other brokers, `ranked`; at most one row of nobody, never the last.
        self._rows: dict[str, tuple[Row, ...]] = {}
        self._deleted: dict[int, dict[str, None]] = {}  # broker -> names that it claims below a deletion
        self._dirty: dict[str, None] = {}  # names whose row is to be saved
        self.lost = False

    def __len__(self) -> int:
        return len(self._rows)

    def highest(self, name: str) -> Row | None:
        claims = self._rows.get(name)
        return None if claims is None else claims[0]

    def rows(self, name: str) -> tuple[Row, ...]:
        return self._rows.get(name, ())

    def hear(self, claim: Claim, broker: int, version: int) -> None:
        name, epoch = claim.name, claim.epoch
        claims = self._rows.get(name, ())
        if not claims and len(self._rows) >= MAX_CLAIMS:
            self.lost = True
            return
        if any(row.broker == broker and row.epoch >= epoch for row in claims):
            return
        heard = Row(epoch, broker, version, claim.principal, claim.born, claim.fingerprint)
        self._set(name, [heard, *(row for row in claims if row.broker != broker)])
        if [_lasting(row) for row in self._rows[name]] != [_lasting(row) for row in claims]:
            self.save(name)  # a later epoch alone is heard again after a restart

    def version(self, name: str, broker: int) -> int:
        """Of the table in which this broker claimed the name; 0 if it does not."""
        return next((row.version for row in self._rows.get(name, ()) if row.broker == broker), 0)

    def remove(self, name: str, broker: int) -> None:
        """That broker does not claim it any more."""
        claims = self._rows.get(name, ())
        left = [row for row in claims if row.broker != broker]
        if len(left) != len(claims):
            self._set(name, left)
            self.save(name)

    def delete(self, name: str, epoch: int) -> None:
        """The name was deleted by whoever had it with this epoch."""
        claims = self._rows.get(name)
        if claims is not None and all(row.broker != NOBODY or row.epoch <= epoch for row in claims):
            self._set(name, [Row(epoch + 1, NOBODY, 0), *(row for row in claims if row.broker != NOBODY)])
            self.save(name)

    def deleted(self, reachable: Callable[[int], bool]) -> dict[int, list[tuple[str, int]]]:
        """Brokers in reach -> names that they claim although they were deleted, and the epochs of that."""
        return {
            broker: [(name, self._deletion(name)) for name in names]
            for broker, names in self._deleted.items()
            if reachable(broker)
        }

    def _deletion(self, name: str) -> int:
        """Below this epoch the name was deleted; 0 if it was not."""
        return next((row.epoch for row in self._rows.get(name, ()) if row.broker == NOBODY), 0)

    def _set(self, name: str, rows: list[Row]) -> None:
        for row in self._rows.pop(name, ()):
            names = self._deleted.get(row.broker, {})
            if names.pop(name, name) is None and not names:
                del self._deleted[row.broker]
        rows = ranked(rows)
        if rows and rows[-1].broker == NOBODY:
            rows.pop()
        if rows:
            self._rows[name] = tuple(rows)
        for row in rows:
            if row.epoch < self._deletion(name):
                self._deleted.setdefault(row.broker, {})[name] = None

    def of(self, broker: int, but: Collection[str] = ()) -> dict[str, int]:
        """The names that this broker claims, without those in `but` -> their epochs."""
        return {
            name: row.epoch
            for name, rows in self._rows.items()
            for row in rows
            if row.broker == broker and name not in but
        }

    # ---- saving

    @property
    def dirty(self) -> bool:
        return bool(self._dirty)

    def save(self, name: str) -> None:
        self._dirty[name] = None

    def flush(self, turn: Turn) -> None:
        if not self._dirty:
            return
        names = tuple(self._dirty)
        self._dirty.clear()
        rows = [
            (name.encode(), msgspec.msgpack.encode(self._rows[name]) if name in self._rows else None)
            for name in names
        ]
        turn.save(TABLE, rows, then=self._backlog.counted(partial(self._saved, names)))

    def _saved(self, names: Sequence[str], _turn: Turn, error: PostroadError | None) -> None:
        if error is not None:
            self._dirty.update(dict.fromkeys(names))

    def recover(self, rows: Mapping[bytes, bytes]) -> None:
        for name, value in sorted(rows.items()):
            claimed, claims = read_claims(name, value)
            self._set(claimed, list(claims))

    def check(self) -> None:
        deleted: dict[int, set[str]] = {}
        for name, rows in self._rows.items():
            if not rows or rows[-1].broker == NOBODY or list(rows) != ranked(rows):
                raise BugError(f"claims: those on {name!r} are not in order")
            if len({row.broker for row in rows}) != len(rows):
                raise BugError(f"claims: two of one broker on {name!r}")
            for row in rows:
                if row.epoch < self._deletion(name):
                    deleted.setdefault(row.broker, set()).add(name)
        if deleted != {broker: set(names) for broker, names in self._deleted.items()}:
            raise BugError("claims: those below deletions are other ones")


def _lasting(row: Row) -> tuple[int, str, int]:
    return row.broker, row.principal, row.born


def read_claims(name: bytes, value: bytes) -> tuple[str, tuple[Row, ...]]:
    return name.decode(), msgspec.msgpack.decode(value, type=tuple[Row, ...])
