"""Durable subscriptions that other brokers host: name -> epoch and broker (spec D10).

Every broker claims the names it hosts, and claims are known everywhere (`overlay.interest`). The highest
epoch has a name; equal epochs go to the higher broker number. Heard claims are kept on disk, and stay
although their broker is gone: a subscriber that comes here must not begin anew while its token lies
elsewhere. A claim goes when its broker withdraws it, when the name is hosted here, or when an administrator
retires the broker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec

from postroad.storage.effects import Save, StorageEffect

TABLE: Final = "durable.claims"
MAX_CLAIMS: Final = 1_000_000


class _Row(msgspec.Struct, frozen=True, order=True):
    epoch: int
    broker: int


class Claims:
    """What is hosted elsewhere, as far as is known."""

    __slots__ = ("_dirty", "_new_tag", "_rows", "_saving")

    def __init__(self, *, new_tag: Callable[[], int]) -> None:
        self._new_tag = new_tag
        self._rows: dict[str, _Row] = {}  # by name: the highest claim of another broker
        self._dirty: dict[str, None] = {}  # names whose row is to be saved
        self._saving: dict[int, tuple[str, ...]] = {}  # tag -> names whose rows are on their way

    def __len__(self) -> int:
        return len(self._rows)

    def broker(self, name: str) -> int | None:
        found = self._rows.get(name)
        return None if found is None else found.broker

    def epoch(self, name: str) -> int:
        """0 if nobody else claims the name."""
        found = self._rows.get(name)
        return 0 if found is None else found.epoch

    def hear(self, name: str, epoch: int, broker: int) -> None:
        held, new = self._rows.get(name), _Row(epoch, broker)
        if (held is None and len(self._rows) >= MAX_CLAIMS) or (held is not None and held >= new):
            return
        self._rows[name] = new
        if held is None or held.broker != broker:  # a later epoch alone is heard again after a restart
            self._dirty[name] = None

    def drop(self, name: str) -> None:
        """The name is hosted here, or nowhere."""
        if self._rows.pop(name, None) is not None:
            self._dirty[name] = None

    def of(self, broker: int, but: Collection[str] = ()) -> list[str]:
        """The names that this broker claims, without those in `but`."""
        return [name for name, row in self._rows.items() if row.broker == broker and name not in but]

    # ---- saving

    @property
    def dirty(self) -> bool:
        return bool(self._dirty)

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
            held, row = read_claim(name, value)
            self._rows[held] = row


def read_claim(name: bytes, value: bytes) -> tuple[str, _Row]:
    return name.decode(), msgspec.msgpack.decode(value, type=_Row)
