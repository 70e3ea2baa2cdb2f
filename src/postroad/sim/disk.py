"""A virtual disk: what was synced survives, what was not may survive in part, torn or out of order.

A node asks by effect and learns by input, as it does of everything else: `Append`, `Replace` and `Remove`
take effect at once for the running process and are durable only when a `Sync` issued after them has been
answered with `Synced`. A crash keeps what was synced and of the rest whatever chance allows:

- a prefix of the operations, the last of them torn at any byte (a log being appended to), or
- any subset of them, each whole, torn or missing, holes read as zeros (write-back in any order);

and may flip bits in the part that was never synced. `Replace` is atomic, as a rename is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from postroad.sim.world import World
from postroad.units import GIB, MILLISECOND_US

SYNC_US: Final = (150, 400)  # from .. to, as measured on the machine this was designed on
HICCUP_US: Final = 70 * MILLISECOND_US
HICCUP_CHANCE: Final = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    file: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """The file has this content, all of it or none (written aside and renamed)."""

    file: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """Make everything asked before this durable, then say so."""

    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFailed:
    """The sync of this token did not happen. What the disk holds of it is unknown."""

    token: int
    reason: str


Operation = Append | Replace | Remove
DiskEffect = Append | Replace | Remove | Sync
DiskInput = Synced | DiskFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashStyle:
    """How unfriendly a crash is to what was not synced."""

    scattered: bool = False
    flip_chance: float = 0.0  # per surviving unsynced operation


class Disk:
    """One node's disk. It outlives the node's processes."""

    def __init__(self, world: World, name: str, *, capacity: int = GIB) -> None:
        self.world = world
        self.name = name
        self.capacity = capacity
        self.slow_until_us = 0
        self.slow_factor = 1
        self._durable: dict[str, bytes] = {}
        self._view: dict[str, bytearray] = {}  # what the running process reads
        self._pending: list[Operation] = []  # in order, not durable yet
        self._committed = 0  # operations made durable so far
        self._failed: str = ""  # why the next sync fails
        self._busy_until_us = 0
        self._epoch = 0  # completions of an earlier process are nobody's

    # -- what the running process sees

    def files(self) -> list[str]:
        return sorted(self._view)

    def read(self, file: str) -> bytes | None:
        found = self._view.get(file)
        return None if found is None else bytes(found)

    def used(self) -> int:
        return sum(len(content) for content in self._view.values())

    def perform(self, effect: DiskEffect, tell: Callable[[DiskInput], None]) -> None:
        if isinstance(effect, Sync):
            self._begin_sync(effect.token, tell)
            return
        operation = self._within_capacity(effect)
        _apply(self._view, operation)
        self._pending.append(operation)

    def save(self, file: str, data: bytes) -> None:
        """Replace and sync in no time: for what a process does before it starts to serve."""
        self._pending.append(Replace(file=file, data=data))
        _apply(self._view, self._pending[-1])
        self._commit(len(self._pending))

    # -- what happens to it

    def slow(self, until_us: int, factor: int) -> None:
        self.slow_until_us, self.slow_factor = until_us, factor

    def fill(self) -> None:
        """The disk is full: every further byte fails."""
        self.capacity = self.used()

    def crash(self, style: CrashStyle) -> None:
        """The process and its page cache are gone; what is left is what the next process reads."""
        chance = self.world.random(f"disk/{self.name}")
        survivors = self._scattered(chance) if style.scattered else self._prefix(chance)
        image = {file: bytearray(content) for file, content in self._durable.items()}
        for operation in survivors:
            _apply(image, _flipped(operation, chance) if chance.random() < style.flip_chance else operation)
        self._durable = {file: bytes(content) for file, content in image.items()}
        self._view = image
        self._pending = []
        self._failed = ""
        self._busy_until_us = 0
        self._epoch += 1

    def rot(self, file: str, position: int) -> None:
        """A bit of synced data changes by itself."""
        content = bytearray(self._durable[file])
        content[position] ^= 1
        self._durable[file] = bytes(content)
        self._view[file][position] ^= 1

    # -- inside

    def _within_capacity(self, operation: Operation) -> Operation:
        """An append that does not fit is cut short, as a full disk does; the next sync says so."""
        if isinstance(operation, Remove):
            return operation
        held = len(self._view.get(operation.file, b"")) if isinstance(operation, Replace) else 0
        room = max(0, self.capacity - self.used() + held)
        if len(operation.data) <= room:
            return operation
        self._failed = f"disk {self.name} is full"
        if isinstance(operation, Append):
            return Append(file=operation.file, data=operation.data[:room])
        return Append(file=operation.file, data=b"")

    def _begin_sync(self, token: int, tell: Callable[[DiskInput], None]) -> None:
        chance = self.world.random(f"disk/{self.name}")
        delay = HICCUP_US if chance.random() < HICCUP_CHANCE else chance.randint(*SYNC_US)
        if self.slow_until_us > self.world.now_us:
            delay *= self.slow_factor
        self._busy_until_us = max(self._busy_until_us, self.world.now_us) + delay
        failed, self._failed = self._failed, ""
        asked, epoch = self._committed + len(self._pending), self._epoch

        def finish() -> None:
            if epoch != self._epoch:
                return
            if failed:
                tell(DiskFailed(token=token, reason=failed))
                return
            self._commit(max(0, asked - self._committed))
            tell(Synced(token=token))

        self.world.at(self._busy_until_us, finish)

    def _commit(self, count: int) -> None:
        image = {file: bytearray(content) for file, content in self._durable.items()}
        for operation in self._pending[:count]:
            _apply(image, operation)
        self._durable = {file: bytes(content) for file, content in image.items()}
        del self._pending[:count]
        self._committed += count

    def _prefix(self, chance: Random) -> list[Operation]:
        kept = chance.randint(0, len(self._pending))
        survivors = self._pending[:kept]
        if kept < len(self._pending):
            survivors += _torn(self._pending[kept], chance)
        return survivors

    def _scattered(self, chance: Random) -> list[Operation]:
        survivors: list[Operation] = []
        for operation in self._pending:
            fate = chance.randrange(3)
            if fate == 0:
                survivors.append(operation)
            elif fate == 1:
                torn = _torn(operation, chance)
                survivors += torn
                if isinstance(operation, Append):
                    rest = len(operation.data) - sum(len(t.data) for t in torn if isinstance(t, Append))
                    survivors.append(Append(file=operation.file, data=bytes(rest)))
            elif isinstance(operation, Append):
                survivors.append(Append(file=operation.file, data=bytes(len(operation.data))))
        return survivors


def _apply(image: dict[str, bytearray], operation: Operation) -> None:
    match operation:
        case Append(file=file, data=data):
            image.setdefault(file, bytearray()).extend(data)
        case Replace(file=file, data=data):
            image[file] = bytearray(data)
        case Remove(file=file):
            image.pop(file, None)


def _torn(operation: Operation, chance: Random) -> list[Operation]:
    """A part of an append; of anything else nothing."""
    if not isinstance(operation, Append) or not operation.data:
        return []
    return [Append(file=operation.file, data=operation.data[: chance.randrange(len(operation.data))])]


def _flipped(operation: Operation, chance: Random) -> Operation:
    if not isinstance(operation, Append) or not operation.data:
        return operation
    data = bytearray(operation.data)
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return Append(file=operation.file, data=bytes(data))
