"""The product's storage on a virtual disk: the log, group commit and recovery that `net/` runs on threads.

Virtual time passes while a commit is written, synced and its metadata saved, and while a read is under way;
the core hears of it as it would from the real one: woken, it takes the outcomes and handles them in a turn.
Metadata is one file that is replaced whole, which is what a transaction of a database amounts to.

`strike` names a step of the next commit at which the process dies, the moments at which a crash is worst; or
"failing", and then the sync of that commit fails.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from postroad.errors import PostroadError, StorageError
from postroad.seam.storage import Append, Chop, NoRoom, Read, Reader, Save, StorageEffect, StorageInput
from postroad.sim.machine.disk import SYNC_US, Disk, DiskFailed, DiskInput, Remove, Replace, Sync, Synced
from postroad.sim.machine.disk import Append as DiskAppend
from postroad.storage.commit import Commit, GroupCommit, commit_once
from postroad.storage.database import row_checksum
from postroad.storage.files import BALLAST, NOTE
from postroad.storage.log import LogVolume
from postroad.storage.metadata import Rows
from postroad.units import KIB, MILLISECOND_US

FACTS: Final = "facts"
BALLAST_BYTES: Final = 64 * KIB
READ_US: Final = (30, 3 * MILLISECOND_US)  # a read takes from .. to
TIDY_US: Final = (100, 20 * MILLISECOND_US)  # reclaiming space begins after
STEPS: Final = ("written", "synced", "saved", "tidy", "failing")

Tables = dict[str, dict[bytes, bytes]]


class DiskFiles:
    """Files on the virtual disk. Whoever commits asks for the sync itself: virtual time passes in it."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def list(self) -> list[tuple[str, int]]:
        return [(name, self.disk.size(name) or 0) for name in self.disk.files() if name.endswith(".log")]

    def create(self, name: str) -> None:
        self.disk.save(name, b"")

    def write(self, name: str, at: int, parts: Sequence[bytes]) -> None:
        del at
        data, room = b"".join(parts), self.disk.room
        self.disk.perform(DiskAppend(file=name, data=data[:room]), _nobody)
        if len(data) > room:
            raise OSError(errno.ENOSPC, "the virtual disk is full")

    def sync(self, name: str) -> None:
        self.disk.save(name, self.disk.read(name) or b"")  # only while no time passes: at a start, or an end

    def cut(self, name: str, size: int) -> None:
        self.disk.save(name, self.disk.read_at(name, 0, size))

    def read(self, name: str, offset: int, size: int) -> bytes:
        if self.disk.size(name) is None:
            raise FileNotFoundError(name)
        return self.disk.read_at(name, offset, size)

    def install(self, name: str, parts: Sequence[bytes]) -> None:
        data = b"".join(parts)
        if len(data) > self.disk.room:
            raise OSError(errno.ENOSPC, "the virtual disk is full")
        self.disk.save(name, data)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.disk.perform(Remove(file=name), _nobody)

    def hold(self, size: int, spare: int) -> None:
        if self.disk.size(BALLAST) == size:
            return
        if self.disk.room < size + spare:
            raise OSError(errno.ENOSPC, "the virtual disk is full")
        self.disk.save(BALLAST, bytes(size))

    def let_go(self) -> None:
        self.disk.perform(Remove(file=BALLAST), _nobody)

    def note(self, data: bytes) -> None:
        if len(data) > self.disk.room + (self.disk.size(NOTE) or 0):
            raise OSError(errno.ENOSPC, "the virtual disk is full")
        self.disk.perform(Replace(file=NOTE, data=data), _nobody)

    def noted(self) -> bytes:
        return self.disk.read(NOTE) or b""


def _nobody(_outcome: DiskInput) -> None:
    pass


class DiskFacts:
    """Metadata in one virtual file, each row with its checksum, as in the real one."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        stored = disk.read(FACTS)
        self._rows: Tables = {} if stored is None else msgspec.msgpack.decode(stored, type=Tables)

    @property
    def tables(self) -> Tables:
        return {table: self.load(table) for table in self._rows}

    def load(self, table: str, reader: Reader | None = None) -> dict[bytes, bytes]:
        rows = {key: row[:-4] for key, row in self._rows.get(table, {}).items() if _is_sound(table, key, row)}
        if reader is not None:
            for key, value in rows.items():
                reader(key, value)  # a row that its room cannot read ends a real start
        return rows

    def damaged(self, table: str) -> tuple[bytes, ...]:
        rows = self._rows.get(table, {})
        return tuple(sorted(key for key, row in rows.items() if not _is_sound(table, key, row)))

    def commit(self, changes: Iterable[tuple[str, Rows]]) -> None:
        """At once, for a process that ends."""
        self.stage(changes)
        self.disk.save(FACTS, self.disk.read(FACTS) or b"")

    def stage(self, changes: Iterable[tuple[str, Rows]]) -> None:
        """What is durable after the next sync. StorageError: there is no room, and nothing has changed."""
        new = {table: dict(rows) for table, rows in self._rows.items()}
        for table, rows in changes:
            kept = new.setdefault(table, {})
            for key, value in rows:
                if value is None:
                    kept.pop(key, None)
                else:
                    kept[key] = value + _checksum(table, key, value)
        data = msgspec.msgpack.encode(new)
        if len(data) > self.disk.room + (self.disk.size(FACTS) or 0):
            raise NoRoom("cannot write metadata: the virtual disk is full")
        self.disk.perform(Replace(file=FACTS, data=data), _nobody)
        self._rows = new


def _checksum(table: str, key: bytes, value: bytes) -> bytes:
    return row_checksum(table, key, value).to_bytes(4, "little")


def _is_sound(table: str, key: bytes, row: bytes) -> bool:
    return _checksum(table, key, row[:-4]) == row[-4:]


class VirtualStorage:
    """One process's storage, from its start to its end."""

    def __init__(
        self,
        disk: Disk,
        *,
        wake: Callable[[], None],
        crash: Callable[[], None],
        segment_bytes: int,
        commit_bytes: int,
    ) -> None:
        self.disk = disk
        self.strike = ""  # a step of STEPS
        self._wake = wake
        self._crash = crash
        self._chance = disk.world.random(f"storage/{disk.name}")
        self._files = DiskFiles(disk)
        self._facts = DiskFacts(disk)
        self.volume = LogVolume(
            self._files,
            self._facts,
            draw_marker=lambda: self._chance.getrandbits(32),
            segment_bytes=segment_bytes,
            ballast_bytes=BALLAST_BYTES,
        )
        self.group = GroupCommit(self.volume, commit_bytes=commit_bytes)
        self._running: Commit | None = None
        self._logged = False  # the log's part of the running commit is over
        self._over = False
        self._tidy_later()
        self._commit()  # there may be something to note of what was found

    # ---- what the process does

    def load(self, table: str, reader: Reader) -> dict[bytes, bytes]:
        """A table of metadata, as a start finds it, without damaged rows."""
        return self._facts.load(table, reader)

    def damaged(self, table: str) -> tuple[bytes, ...]:
        return self._facts.damaged(table)

    def perform(self, effects: Iterable[StorageEffect]) -> None:
        writes: list[Append | Save | Chop] = []
        for effect in effects:
            if isinstance(effect, Read):
                self._later(READ_US, lambda read=effect: self._read(read))  # type: ignore[misc]
            else:
                writes.append(effect)
        if writes:
            self.group.submit(writes)
            self._commit()

    def take(self) -> list[StorageInput]:
        return self.group.take()

    def die(self) -> None:
        self._over = True

    def close(self) -> None:
        """Everything asked for is done, in no time."""
        self.disk.settle()
        commit = self._running
        if commit is not None:
            if not self._logged:
                self.group.logged(commit, None)
            self.group.finish(commit, self.group.save(commit.changes, self._facts.commit))
        while commit_once(self.group, self._files, self._facts) is not None:
            pass
        if self.group.broken is None:
            with suppress(StorageError):
                self._facts.commit(self.volume.marks())
        self._over = True
        self.disk.settle()

    # ---- commits: written, synced, saved

    def _commit(self) -> None:
        if self._running is not None or self._over:
            return
        commit = self._running = self.group.begin()
        self._logged = False
        if commit is None or self._strikes("written"):
            return
        if commit.block is None:
            self._synced(Synced(token=0))
        elif self.strike == "failing":
            self.strike = ""
            self._later(SYNC_US, lambda: self._synced(DiskFailed(token=0, reason="the virtual disk failed")))
        else:
            self.disk.perform(Sync(token=0), self._synced)

    def _synced(self, outcome: DiskInput) -> None:
        commit = self._running
        if self._over or commit is None or self._strikes("synced"):
            return
        self._logged = True
        self.group.logged(commit, None if isinstance(outcome, Synced) else OSError(errno.EIO, outcome.reason))
        if not commit.changes:
            self._finish(commit, None)
            return
        error = self.group.save(commit.changes, self._facts.stage)
        if error is not None:
            self._finish(commit, error)
        else:
            self.disk.perform(Sync(token=0), self._saved)

    def _saved(self, _outcome: DiskInput) -> None:
        commit = self._running
        if self._over or commit is None or self._strikes("saved"):
            return
        self._finish(commit, None)

    def _finish(self, commit: Commit, error: PostroadError | None) -> None:
        self._running = None
        self.group.finish(commit, error)
        if commit.chops:
            self._tidy_later()
        if commit.items or commit.stale:
            self._wake()
        if commit.items or commit.stale or self.group.waiting:
            self._commit()  # chops that could not be saved wait for somebody else's commit

    def _strikes(self, step: str) -> bool:
        if self.strike != step:
            return False
        self._crash()
        return True

    # ---- reading and reclaiming

    def _read(self, read: Read) -> None:
        self.group.answer(self.volume.read(read))
        self._wake()

    def _tidy_later(self) -> None:
        self._later(TIDY_US, self._tidy)

    def _tidy(self) -> None:
        if self.volume.tidy() and not self._strikes("tidy"):
            self._tidy_later()
            self._commit()  # rows of streams that are over

    def _later(self, after_us: tuple[int, int], action: Callable[[], None]) -> None:
        def act() -> None:
            if not self._over:
                action()

        self.disk.world.after(self._chance.randint(*after_us), lambda: self.disk.once_it_works(act))
