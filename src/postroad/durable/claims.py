"""Durable subscriptions that other brokers host: name -> epochs and brokers (spec D10).

Every broker claims the names it hosts, and claims are known everywhere (`overlay.interest`). The highest
epoch has a name; equal epochs go to the higher broker number. Lower ones are of brokers that had it before
and still hold what it has not acknowledged: should the highest be retired, the next one has it. Heard claims
are kept on disk, and stay although their broker is gone: a subscriber that comes here must not begin anew
while its token lies elsewhere. A claim goes when its broker withdraws it, when the name is deleted, or when
an administrator retires the broker. A table of that broker that is older than the claim withdraws nothing:
after a restart, whoever was cut off may have such a table, and be the only one to have any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec

from postroad.storage.effects import Save, StorageEffect

TABLE: Final = "durable.claims"
MAX_CLAIMS: Final = 1_000_000


class Row(msgspec.Struct, frozen=True, order=True):
    epoch: int
    broker: int
    version: int  # of that broker's table, in which it was heard


class Claims:
    """What is hosted elsewhere, as far as is known. `lost`: some claim had no room."""

    __slots__ = ("_dirty", "_new_tag", "_rows", "_saving", "lost")

    def __init__(self, *, new_tag: Callable[[], int]) -> None:
        self._new_tag = new_tag
        self._rows: dict[str, tuple[Row, ...]] = {}  # by name: the claims of other brokers, the highest first
        self._dirty: dict[str, None] = {}  # names whose row is to be saved
        self._saving: dict[int, tuple[str, ...]] = {}  # tag -> names whose rows are on their way
        self.lost = False

    def __len__(self) -> int:
        return len(self._rows)

    def highest(self, name: str) -> Row | None:
        found = self._rows.get(name)
        return None if found is None else found[0]

    def hear(self, name: str, epoch: int, broker: int, version: int) -> None:
        held = self._rows.get(name, ())
        if not held and len(self._rows) >= MAX_CLAIMS:
            self.lost = True
            return
        if any(row.broker == broker and row.epoch >= epoch for row in held):
            return
        rows = [Row(epoch, broker, version), *(row for row in held if row.broker != broker)]
        self._rows[name] = tuple(sorted(rows, reverse=True))
        if [row.broker for row in self._rows[name]] != [row.broker for row in held]:
            self.save(name)  # a later epoch alone is heard again after a restart

    def version(self, name: str, broker: int) -> int:
        """Of the table in which this broker claimed the name; 0 if it does not."""
        return next((row.version for row in self._rows.get(name, ()) if row.broker == broker), 0)

    def remove(self, name: str, broker: int) -> None:
        """That broker does not claim it any more."""
        held = self._rows.get(name, ())
        left = tuple(row for row in held if row.broker != broker)
        if left:
            self._rows[name] = left
        else:
            self._rows.pop(name, None)
        if len(left) != len(held):
            self.save(name)

    def drop(self, name: str) -> None:
        """The name is deleted."""
        if self._rows.pop(name, None) is not None:
            self.save(name)

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

    def flush(self) -> list[StorageEffect]:
        if not self._dirty:
            return []
        tag = self._new_tag()
        self._saving[tag] = tuple(self._dirty)
        rows = tuple(
            (name.encode(), msgspec.msgpack.encode(self._rows[name]) if name in self._rows else None)
            for name in self._dirty
        )
        self._dirty.clear()
        return [Save(table=TABLE, rows=rows, tag=tag)]

    def saved(self, tag: int) -> None:
        self._saving.pop(tag, None)

    def save_failed(self, tag: int) -> None:
        self._dirty.update(dict.fromkeys(self._saving.pop(tag, ())))

    def recover(self, rows: Mapping[bytes, bytes]) -> None:
        for name, value in sorted(rows.items()):
            held, claims = read_claims(name, value)
            self._rows[held] = claims


def read_claims(name: bytes, value: bytes) -> tuple[str, tuple[Row, ...]]:
    return name.decode(), msgspec.msgpack.decode(value, type=tuple[Row, ...])
