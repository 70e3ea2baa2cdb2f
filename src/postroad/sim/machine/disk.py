"""A virtual disk: what was synced survives, what was not may survive in part, torn or out of order.

A node asks by effect and learns by input, as it does of everything else: `Append`, `Replace` and `Remove`
take effect at once for the running process and are durable only when a `Sync` issued after them has been
answered with `Synced`. A crash keeps what was synced and of the rest whatever chance allows:

- a prefix of the operations, the last of them torn at any byte (a log being appended to), or
- any subset of them, each whole, torn or missing, holes read as zeros (write-back in any order);

and may flip bits in the part that was never synced. `Replace` is atomic, as a rename is.

While a disk hangs it answers nothing: syncs come back in order when it goes on, if their process lives still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from postroad.sim.machine.world import World
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
        self._durable: dict[str, bytearray] = {}
        self._view: dict[str, bytearray] = {}  # what the running process reads
        self._pending: list[tuple[int, Operation]] = []  # numbered, in order, not durable yet
        self._asked = 0  # operations so far
        self._failed: str = ""  # why the next sync fails
        self._busy_until_us = 0
        self._hung_until_us = 0
        self._waiting: list[Callable[[], None]] = []  # for a disk that hangs, in order
        self._epoch = 0  # completions of an earlier process are nobody's

    # -- what the running process sees

    def files(self) -> list[str]:
        return sorted(self._view)

    def read(self, file: str) -> bytes | None:
        content = self._view.get(file)
        return None if content is None else bytes(content)

    def read_at(self, file: str, offset: int, size: int) -> bytes:
        return bytes(self._view[file][offset : offset + size])

    def size(self, file: str) -> int | None:
        content = self._view.get(file)
        return None if content is None else len(content)

    def used(self) -> int:
        return sum(map(len, self._view.values()))

    @property
    def room(self) -> int:
        return max(0, self.capacity - self.used())

    def perform(self, effect: DiskEffect, tell: Callable[[DiskInput], None]) -> None:
        if isinstance(effect, Sync):
            self._begin_sync(effect.token, tell)
            return
        operation = self._within_capacity(effect)
        _apply(self._view, operation)
        self._asked += 1
        self._pending.append((self._asked, operation))

    def save(self, file: str, data: bytes) -> None:
        """Replace this file, durably and in no time: for what a process waits for."""
        self._pending = [pending for pending in self._pending if pending[1].file != file]
        self._view[file], self._durable[file] = bytearray(data), bytearray(data)

    def settle(self) -> None:
        """A process ends in good order: all it asked for is durable, nothing is answered any more."""
        self._commit(self._asked)
        self._failed = ""
        self._busy_until_us = 0
        self._epoch += 1

    # -- what happens to it

    def slow(self, until_us: int, factor: int) -> None:
        self.slow_until_us, self.slow_factor = until_us, factor

    def hang(self, until_us: int) -> None:
        """Nothing comes back from it before then, or before it is told to `go_on`."""
        self._hung_until_us = max(self._hung_until_us, until_us)
        self.world.at(until_us, lambda: None if self.hangs else self.go_on())

    @property
    def hangs(self) -> bool:
        return self._hung_until_us > self.world.now_us

    def go_on(self) -> None:
        self._hung_until_us = 0
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()

    def once_it_works(self, action: Callable[[], None]) -> None:
        """Now, or when it hangs no more."""
        if self.hangs:
            self._waiting.append(action)
        else:
            action()

    def fill(self) -> None:
        """The disk is full: every further byte fails."""
        self.capacity = self.used()

    def crash(self, style: CrashStyle) -> None:
        """The process and its page cache are gone; what is left is what the next process reads."""
        chance = self.world.random(f"disk/{self.name}")
        survivors = self._scattered(chance) if style.scattered else self._prefix(chance)
        for operation in survivors:
            flipped = chance.random() < style.flip_chance
            _apply(self._durable, _flipped(operation, chance) if flipped else operation)
        self._view = {file: bytearray(content) for file, content in self._durable.items()}
        self._pending = []
        self._failed = ""
        self._busy_until_us = 0
        self._epoch += 1

    def rot(self, file: str, position: int) -> None:
        """A bit of synced data changes by itself."""
        self._durable[file][position] ^= 1
        self._view[file][position] ^= 1

    def shorten(self, file: str, size: int) -> None:
        """Synced data behind this size is gone; with size 0 the whole file."""
        for image in (self._durable, self._view):
            if size:
                del image[file][size:]
            else:
                del image[file]

    # -- inside

    def _within_capacity(self, operation: Operation) -> Operation:
        """An append that does not fit is cut short, as a full disk does; the next sync says so."""
        if isinstance(operation, Remove):
            return operation
        replaced = len(self._view.get(operation.file, b"")) if isinstance(operation, Replace) else 0
        room = max(0, self.capacity - self.used() + replaced)
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
        asked, epoch = self._asked, self._epoch

        def finish() -> None:
            if epoch != self._epoch:
                return
            if failed:
                tell(DiskFailed(token=token, reason=failed))
                return
            self._commit(asked)
            tell(Synced(token=token))

        self.world.at(self._busy_until_us, lambda: self.once_it_works(finish))

    def _commit(self, asked: int) -> None:
        for number, operation in self._pending:
            if number <= asked:
                _apply(self._durable, operation)
        self._pending = [pending for pending in self._pending if pending[0] > asked]

    def _prefix(self, chance: Random) -> list[Operation]:
        pending = [operation for _, operation in self._pending]
        kept = chance.randint(0, len(pending))
        survivors = pending[:kept]
        if kept < len(pending):
            survivors += _torn(pending[kept], chance)
        return survivors

    def _scattered(self, chance: Random) -> list[Operation]:
        survivors: list[Operation] = []
        for _, operation in self._pending:
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
