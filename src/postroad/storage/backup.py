"""Backups of a data folder, of a broker that runs or not, and what puts one back.

A broker may go on writing while its folder is copied, since everything in it is ordered. The log only
grows, a row of `postroad.db` never speaks of a record that is not in the log, and the notes beside the log
(`stamp`, `synced`) are never ahead of either. So the notes are read first, then the database as of one
commit, then the log: what comes out is a folder as a kill -9 could have left it, and a start reads it as
that. Only a file of the log that goes away meanwhile would be missed: all of them are open before the
database is read, and if they are others by then, it begins again.

A manifest is written last. It has the size and the SHA-256 of each file, so a backup without it is not
whole, and what changed since is found before anything is put back.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from postroad.errors import StorageError, UsageError
from postroad.storage.database import LIFE, OWN_TABLE, get_broker, put
from postroad.storage.files import NOTE
from postroad.storage.identity import DATABASE, LOCK, LOG_FOLDER
from postroad.storage.recovery import encode_mark
from postroad.storage.segment import parse_name
from postroad.storage.stamp import STAMP
from postroad.storage.tracking_store import FOLDER as TRACKING
from postroad.units import MIB

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
UNFINISHED: Final = f"{DATABASE}.unfinished"
MAX_LIFE: Final = (1 << 32) - 1
TRIES: Final = 20  # until no file of the log went away meanwhile
PIECE_BYTES: Final = 4 * MIB
MAX_MANIFEST_BYTES: Final = 64 * MIB
_ATTACHMENTS: Final = PurePosixPath(TRACKING, "attachments.log")

Progress = Callable[[int, int], None]  # bytes done, of how many


class FileEntry(msgspec.Struct, frozen=True):
    path: Annotated[str, Meta(max_length=200)]
    size: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Manifest(msgspec.Struct, frozen=True):
    """What a backup is of, and what is in it."""

    format: int
    broker: str
    number: str
    boot: int
    taken_us: int
    files: list[FileEntry]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files)


def back_up(data: Path, target: Path, progress: Progress) -> Manifest:
    """Copy a broker's folder to a new or empty one."""
    try:
        known = (data / DATABASE).is_file()
    except PermissionError:
        raise UsageError(f"{data} cannot be read: be the user that its broker runs as") from None
    if not known:
        raise UsageError(f"{data} is not the data folder of a broker: it has no {DATABASE}")
    _make_empty(target)
    try:
        return _back_up(data, target, progress)
    except OSError as error:
        raise StorageError(f"the backup in {target} is not whole: {error}; remove it") from None
    except sqlite3.Error as error:
        raise StorageError(f"cannot read {data / DATABASE}: {error}; nothing was backed up") from None


def _back_up(data: Path, target: Path, progress: Progress) -> Manifest:
    taken_us = time.time_ns() // 1000
    (target / LOG_FOLDER).mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        segments = _consistent(data, target, stack)
        entries = [_entry(target, PurePosixPath(DATABASE))]
        entries += [
            _entry(target, PurePosixPath(LOG_FOLDER, name)) for name in os.listdir(target / LOG_FOLDER)
        ]
        tracking = _opened(data, TRACKING, stack, lambda name: not name.endswith(".tmp"))
        opened = segments | tracking
        total = sum(os.fstat(file).st_size for file in opened.values())
        done = 0
        for path, file in sorted(opened.items()):
            (target / path).parent.mkdir(mode=0o700, exist_ok=True)
            with open(file, "rb", closefd=False) as source:
                entries.append(_copy(source.read, target / path, path))
            done += entries[-1].size
            progress(min(done, total), total)
    with closing(sqlite3.connect(target / DATABASE)) as database:
        row = get_broker(database, target / DATABASE)
    if row is None:
        raise StorageError(f"{data / DATABASE} knows no broker; nothing was backed up")
    manifest = Manifest(
        format=FORMAT,
        broker=row[2],
        number=f"{row[0]:08x}",
        boot=row[3],
        taken_us=taken_us,
        files=sorted(entries, key=lambda entry: entry.path),
    )
    _write(target / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    _sync_folders(target)
    return manifest


def _consistent(data: Path, target: Path, stack: contextlib.ExitStack) -> dict[PurePosixPath, int]:
    """The database and the notes in the target, and the log's files open, all of one time."""
    for _ in range(TRIES):
        with contextlib.ExitStack() as attempt:
            segments = _opened(data, LOG_FOLDER, attempt, lambda name: parse_name(name) is not None)
            for name in (STAMP, NOTE):
                with contextlib.suppress(FileNotFoundError):
                    _write(target / LOG_FOLDER / name, (data / LOG_FOLDER / name).read_bytes())
            (target / DATABASE).unlink(missing_ok=True)
            with (
                closing(sqlite3.connect(data / DATABASE, timeout=30)) as source,
                closing(sqlite3.connect(target / DATABASE)) as copy,
            ):
                source.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")
            os.chmod(target / DATABASE, 0o600)
            later = _opened(data, LOG_FOLDER, attempt, lambda name: parse_name(name) is not None)
            if segments.keys() <= later.keys():
                stack.push(attempt.pop_all())
                return later
    raise StorageError(f"files of {data / LOG_FOLDER} go away faster than they are copied: try again")


def _opened(
    data: Path, folder: str, stack: contextlib.ExitStack, wanted: Callable[[str], bool]
) -> dict[PurePosixPath, int]:
    """Files of a folder, open: what removes them meanwhile takes nothing from us."""
    opened: dict[PurePosixPath, int] = {}
    for name in sorted(os.listdir(data / folder)) if (data / folder).is_dir() else ():
        if wanted(name):
            with contextlib.suppress(FileNotFoundError):
                file = os.open(data / folder / name, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, file)
                opened[PurePosixPath(folder, name)] = file
    return opened


def verify(backup: Path, progress: Progress) -> Manifest:
    """What a backup holds; StorageError if it is not as it was made."""
    try:
        text = (backup / MANIFEST).read_bytes()
        if len(text) > MAX_MANIFEST_BYTES:
            raise UsageError(f"{backup / MANIFEST} is larger than a manifest can be")
        manifest = msgspec.json.decode(text, type=Manifest)
    except FileNotFoundError:
        raise UsageError(f"{backup} is no whole backup: it has no {MANIFEST}") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"{backup / MANIFEST} cannot be read: {error}; take another backup") from None
    if manifest.format != FORMAT:
        raise UsageError(f"{backup} has format {manifest.format}; this version reads {FORMAT}")
    done = 0
    for entry in manifest.files:
        path = PurePosixPath(entry.path)
        if path.is_absolute() or ".." in path.parts:
            raise StorageError(f"{backup / MANIFEST} names {entry.path!r}, which is not within a data folder")
        try:
            actual = _entry(backup, path)
        except OSError as error:
            raise StorageError(
                f"{backup / path} cannot be read: {error.strerror}; take another backup"
            ) from None
        if actual != entry:
            raise StorageError(
                f"{backup / path} is damaged: {actual.size} bytes with another checksum than when it was"
                f" made of {entry.size}; take another backup"
            )
        done += entry.size
        progress(done, manifest.size)
    return manifest


def restore(backup: Path, data: Path, progress: Progress) -> Manifest:
    """Make a data folder of a backup that proves itself. The database comes last, and whole: a folder without
    one does not start."""
    manifest = verify(backup, lambda done, total: progress(done // 2, total))
    _make_empty(data)
    try:
        done = 0
        for entry in sorted(manifest.files, key=lambda entry: (entry.path == DATABASE, entry.path)):
            to = data / (UNFINISHED if entry.path == DATABASE else entry.path)
            to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (backup / entry.path).open("rb") as source:
                copied = _copy(source.read, to, PurePosixPath(entry.path))
            if copied != entry:
                raise StorageError(
                    f"{backup / entry.path} changed while it was read; remove {data}, try again"
                )
            done += entry.size
            progress((manifest.size + done) // 2, manifest.size)
        _note_what_is_missing(data)
        _begin_life(data / UNFINISHED)
        _sync_folders(data)
        (data / UNFINISHED).rename(data / DATABASE)
        _sync_folders(data)
    except OSError as error:
        raise StorageError(f"{data} is not whole: {error}; remove it, make room, and try again") from None
    return manifest


def _begin_life(database: Path) -> None:
    """Others may remember what this broker promised after the backup: it is another node of the ring now."""
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("PRAGMA synchronous = FULL")
        put(connection, OWN_TABLE, LIFE, (1 + secrets.randbelow(MAX_LIFE)).to_bytes(4, "big"))


def _note_what_is_missing(data: Path) -> None:
    """The broker went on after the backup, and the next start must not take that for silence.

    The log is noted to have gone on, so its streams may have had later ticks: the start makes a Gap of them.
    The record of paths gets a line that says nothing: from the backup until the start nothing is known of
    them.
    """
    log = data / LOG_FOLDER
    newest = max((path for path in log.iterdir() if parse_name(path.name)), default=None)
    if newest is not None:
        _write(log / NOTE, encode_mark((newest.name, newest.stat().st_size + 1)))
    if (data / _ATTACHMENTS).exists():
        with (data / _ATTACHMENTS).open("ab") as record:
            record.write(b"\n")


def is_in_use(data: Path) -> bool:
    """Whether a broker runs there, as far as one may look."""
    try:
        lock = os.open(data / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _make_empty(folder: Path) -> None:
    """UsageError unless it is new or empty."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            busy = " and in use by a broker" if is_in_use(folder) else ""
            raise UsageError(f"{folder} is not empty{busy}: name a new folder")
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from None


def _pieces(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while piece := read(PIECE_BYTES):
        yield piece


def _copy(read: Callable[[int], bytes], to: Path, path: PurePosixPath) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    with open(to, "xb", opener=_private) as target:
        for piece in _pieces(read):
            target.write(piece)
            digest.update(piece)
            size += len(piece)
        target.flush()
        os.fsync(target.fileno())
    return FileEntry(str(path), size, digest.hexdigest())


def _entry(folder: Path, path: PurePosixPath) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    with (folder / path).open("rb") as file:
        for piece in _pieces(file.read):
            digest.update(piece)
            size += len(piece)
    return FileEntry(str(path), size, digest.hexdigest())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb", opener=_private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folders(top: Path) -> None:
    for folder in (*(path for path in top.rglob("*") if path.is_dir()), top):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
