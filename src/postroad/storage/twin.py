"""The copy of `postroad.db`, and how it takes its place.

A row that cannot be believed may have said what anybody acknowledged, so going on without it would lose
something, and refusing to start would lose all. Therefore what is saved is saved twice, in two files. A start
proves both: every page, every row, and against the log's stamp that it is the latest. Where the database is
damaged, lost or behind, and its copy is not, the copy takes its place, which is said; the damaged one is kept
beside it. Where neither is whole, the start is refused in one line, as it would be without a copy.

The copy is written after the database, in the same commit, and is not synced by itself. A machine that stops
may leave it behind: then the stamp tells, and it takes nobody's place. Each start makes it anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from postroad.errors import StorageError
from postroad.storage.database import (
    COMMITS,
    OWN_TABLE,
    TABLES,
    Saved,
    all_rows,
    commits_of,
    get,
    get_broker,
    open_database,
    present,
    put,
    put_all,
    row_checksum,
)
from postroad.storage.stamp import read_stamp

COPY: Final = "postroad-copy.db"
DAMAGED: Final = ".damaged"  # what becomes of the name of a database that its copy replaced
_NEW: Final = ".new"
_JOURNALS: Final = ("-wal", "-shm")
_log: Final = logging.getLogger(__name__)

Version = tuple[int, int, int]  # broker, boot, commits


def heal(database: Path, log: Path) -> None:
    """Have the copy take the place of a database that is damaged, lost or older than its log."""
    copy, stamp = database.with_name(COPY), read_stamp(log)
    if stamp is None or not copy.exists():
        return
    latest = (stamp.broker, stamp.boot, stamp.commits)
    here = _version(database)
    if here is not None and (here[0] != stamp.broker or here >= latest):
        return  # it is another's, or whole
    twin = _version(copy)
    if twin is None or twin[0] != stamp.broker or twin < latest:
        return
    why = "is lost" if not database.exists() else "is damaged" if here is None else "is not its latest"
    _replace(database, copy)
    _log.warning("%s %s: its copy %s has taken its place; nothing is lost", database, why, copy.name)


def _version(path: Path) -> Version | None:
    """Of which broker, start and commit a database is; None: it is not there, or not whole."""
    if not path.exists():
        return None
    try:
        with closing(open_database(path)) as database:
            broker, commits = get_broker(database, path), commits_of(database)
            if broker is None or commits is None or get(database, OWN_TABLE, TABLES) is None:
                return None
            if any(
                row_checksum(name.decode(errors="replace"), key, value) != checksum
                for name, key, value, checksum in all_rows(database)
            ):
                return None
    except (sqlite3.Error, StorageError):  # of a later layout: its copy would be too
        return None
    return broker[0], broker[3], commits


def _replace(database: Path, copy: Path) -> None:
    new = database.with_name(database.name + _NEW)
    try:
        new.unlink(missing_ok=True)
        _duplicate(copy, new)
        for suffix in ("", *_JOURNALS):
            beside = database.with_name(database.name + suffix)
            if beside.exists():
                beside.replace(database.with_name(database.name + DAMAGED + suffix))
        new.replace(database)
        _sync(database.parent)
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"cannot put {copy} in the place of {database}: {error}") from None


def _duplicate(source: Path, target: Path) -> None:
    os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)
    _sync(target)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class Twin:
    """Keeps the copy of an open database. Used from one thread at a time, that of the database.

    A copy that cannot be written is given up until the next start, which is said.
    """

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self._path = path.with_name(COPY)
        self._copy: sqlite3.Connection | None = None
        with self._giving_up():
            for suffix in ("", *_JOURNALS):
                self._path.with_name(COPY + suffix).unlink(missing_ok=True)
            self._copy = open_database(self._path)
            database.backup(self._copy)
            # Without a journal on disk: on a full one that would take the room that is left for the database.
            # A process that is killed in the middle may leave a copy that is not whole, beside a database
            # that is: nobody uses it then.
            self._copy.execute("PRAGMA journal_mode = MEMORY")
            self._copy.execute("PRAGMA synchronous = OFF")

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, StorageError) as error:
            _log.warning("%s cannot be written, and is not kept until the next start: %s", self._path, error)
            self.close()

    def commit(self, saved: Saved, tables: bytes, commits: bytes) -> None:
        """What was committed to the database, with what it notes of itself."""
        copy = self._copy
        if copy is None:
            return
        with self._giving_up(), copy:
            copy.execute("BEGIN IMMEDIATE")
            for (table, key), value in saved.items():
                if value is None:
                    copy.execute("DELETE FROM facts WHERE name = ? AND key = ?", (table, key))
            put_all(copy, present(saved))
            put(copy, OWN_TABLE, TABLES, tables)
            put(copy, OWN_TABLE, COMMITS, commits)

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()
            self._copy = None
