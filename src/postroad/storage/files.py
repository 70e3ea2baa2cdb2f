"""The few things the log asks of a file system, and the real one.

There are two implementations: `OsFiles` here, and the simulator's on its virtual disk, which crashes.
Files are named, flat in one folder, and only ever appended to, cut at the end, installed whole or removed.

One file is there for the room it takes: the ballast. On a full disk it is let go, and what gets a broker out
of that (acknowledgements, deletions, chops) can still be written.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from postroad.delays import Delays

MAX_OPEN_FILES: Final = 64  # a long log has more segments than a process may have open files
MAX_PARTS: Final = 1024  # IOV_MAX of Linux
ASIDE: Final = ".aside"  # a file being installed; worthless after a crash
BALLAST: Final = "ballast"
NOTE: Final = "synced"
FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Files(Protocol):
    """Errors are OSError. `sync` is the only call that makes appended bytes durable."""

    def list(self) -> list[tuple[str, int]]:
        """Names and sizes, sorted by name."""

    def create(self, name: str) -> None:
        """A new empty file, its name durable; or no file and an error."""

    def write(self, name: str, at: int, parts: Sequence[bytes]) -> None:
        """Append at the end, which the caller knows to be `at`. After an error a part may be there."""

    def sync(self, name: str) -> None: ...

    def cut(self, name: str, size: int) -> None:
        """Drop what is behind `size`, durably."""

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Fewer bytes only at the end of the file. A file removed meanwhile is FileNotFoundError."""

    def install(self, name: str, parts: Sequence[bytes]) -> None:
        """A new file with this content: all of it, durably, or no file at all."""

    def remove(self, names: Sequence[str]) -> None:
        """Gone, durably; reads under way still end well. What is gone already is no error."""

    def hold(self, size: int, spare: int) -> None:
        """Take that much room as ballast, unless it is held; an error if less than `spare` would be left."""

    def let_go(self) -> None:
        """The ballast's room is free for others."""

    def note(self, data: bytes) -> None:
        """Write a few bytes over those noted before, as many as these. They are not synced: a process that is
        killed leaves them, a machine that stops may leave earlier ones."""

    def noted(self) -> bytes:
        """What was noted, b"" if nothing was."""


class _Handle:
    """An open file; closed when it is dropped and nobody reads it."""

    __slots__ = ("dropped", "fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.dropped = False


class OsFiles:
    """Real files in one folder. Safe for one writing and any number of reading threads."""

    def __init__(self, folder: Path, *, sync: bool = True) -> None:
        self.folder = folder
        self._sync = sync
        self.syncs = Delays(
            "log_sync_seconds", "One sync of the log to disk. Alarm: often above 0.1; the disk is slow."
        )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._note: int | None = None  # opened with the first note
        self._lock = threading.Lock()
        self._handles: dict[str, _Handle] = {}  # least recently used first
        for path in folder.glob(f"*{ASIDE}"):
            path.unlink()

    def list(self) -> list[tuple[str, int]]:
        with os.scandir(self.folder) as entries:
            return sorted((entry.name, entry.stat().st_size) for entry in entries if entry.is_file())

    def create(self, name: str) -> None:
        os.close(os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            self._sync_folder()
        except OSError:
            with suppress(OSError):
                (self.folder / name).unlink()
            raise

    def write(self, name: str, at: int, parts: Sequence[bytes]) -> None:
        handle = self._take(name)
        try:
            _write_all(handle.fd, at, parts)
        finally:
            self._give(handle)

    def sync(self, name: str) -> None:
        if not self._sync:
            return
        handle = self._take(name)
        began_ns = time.perf_counter_ns()
        try:
            os.fdatasync(handle.fd)
        finally:
            self._give(handle)
            self.syncs.observe((time.perf_counter_ns() - began_ns) // 1000)

    def cut(self, name: str, size: int) -> None:
        handle = self._take(name)
        try:
            os.ftruncate(handle.fd, size)
            if self._sync:
                os.fdatasync(handle.fd)
        finally:
            self._give(handle)

    def read(self, name: str, offset: int, size: int) -> bytes:
        handle = self._take(name)
        try:
            data = os.pread(handle.fd, size, offset)
            while len(data) < size and (rest := os.pread(handle.fd, size - len(data), offset + len(data))):
                data += rest
            return data
        finally:
            self._give(handle)

    def install(self, name: str, parts: Sequence[bytes]) -> None:
        aside = self.folder / (name + ASIDE)
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            try:
                _write_all(fd, 0, parts)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(aside, self.folder / name)
        except OSError:
            with suppress(OSError):
                aside.unlink()
            raise
        self._sync_folder()

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._drop(name)
            (self.folder / name).unlink(missing_ok=True)
        self._sync_folder()

    def hold(self, size: int, spare: int) -> None:
        path = self.folder / BALLAST
        if path.exists() and path.stat().st_size == size:
            return
        path.unlink(missing_ok=True)
        disk = os.statvfs(self.folder)
        if disk.f_bavail * disk.f_frsize < size + spare:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def let_go(self) -> None:
        (self.folder / BALLAST).unlink(missing_ok=True)

    def note(self, data: bytes) -> None:
        if self._note is None:
            self._note = os.open(self.folder / NOTE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(self._note, data, 0)

    def noted(self) -> bytes:
        try:
            return (self.folder / NOTE).read_bytes()
        except FileNotFoundError:
            return b""

    def close(self) -> None:
        for name in list(self._handles):
            self._drop(name)
        if self._note is not None:
            os.close(self._note)
        os.close(self._directory)

    # -- open files

    def _take(self, name: str) -> _Handle:
        with self._lock:
            handle = self._handles.pop(name, None)
            if handle is None:
                handle = _Handle(os.open(self.folder / name, os.O_RDWR | os.O_CLOEXEC))
            self._handles[name] = handle
            handle.users += 1
            while len(self._handles) > MAX_OPEN_FILES:
                self._let_go(self._handles.pop(next(iter(self._handles))))
            return handle

    def _give(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            if handle.dropped and not handle.users:
                os.close(handle.fd)

    def _drop(self, name: str) -> None:
        with self._lock:
            handle = self._handles.pop(name, None)
            if handle is not None:
                self._let_go(handle)

    def _let_go(self, handle: _Handle) -> None:
        handle.dropped = True
        if not handle.users:
            os.close(handle.fd)

    def _sync_folder(self) -> None:
        if self._sync:
            os.fsync(self._directory)


def _write_all(fd: int, at: int, parts: Sequence[bytes]) -> None:
    """A short write (a signal, a full disk, a size limit) goes on until it is done or an error says why."""
    for start in range(0, len(parts), MAX_PARTS):
        some = parts[start : start + MAX_PARTS]
        size = sum(map(len, some))
        done = os.pwritev(fd, some, at)
        while done < size:
            done += os.pwrite(fd, b"".join(some)[done:], at + done)
        at += size
