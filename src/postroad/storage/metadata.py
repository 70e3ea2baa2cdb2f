"""Small facts that change in place: key/value tables in `postroad.db`, beside the broker's identity.

WAL with synchronous FULL: a commit is on disk when it returns. The log's commit thread is the only writer;
it commits after the log is synced, so a row never speaks of a record that a crash could take back. Commits
are counted, and the count is noted beside the log (`stamp`).
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from postroad.errors import PostroadError, StorageError
from postroad.seam.storage import Reader
from postroad.storage.files import NoRoom
from postroad.storage.stamp import Stamp, StampFile

BUSY_S: Final = 5.0
COMMITS: Final = ("metadata", b"commits")  # how many there were: table and key

Rows = Iterable[tuple[bytes, bytes | None]]
_DAMAGED: Final = (msgspec.MsgspecError, struct.error, ValueError, PostroadError)  # what a reader raises


class Facts(Protocol):
    """What the log needs of a metadata store: SQLite here, a virtual file in the simulator."""

    def load(self, table: str, reader: Reader, /) -> dict[bytes, bytes]: ...

    def commit(self, changes: Iterable[tuple[str, Rows]]) -> None:
        """All of the changes in order, durable, or none and a StorageError: NoRoom if the disk is full."""


class Metadata:
    """Used from one thread at a time. `log`: the folder of the log that this belongs to."""

    def __init__(self, path: Path, *, log: Path | None = None) -> None:
        self.path = path
        self._stamp = None if log is None else StampFile(log)
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS facts (name TEXT NOT NULL, key BLOB NOT NULL,"
                " value BLOB NOT NULL, PRIMARY KEY (name, key)) STRICT, WITHOUT ROWID"
            )
            self._commits = commits_of(self._database)
            self._broker = _broker_of(self._database)
        except sqlite3.Error as error:
            self._database.close()
            raise unreadable(path, error) from None

    def stamp(self) -> None:
        """Note beside the log that this is the database that belongs to it."""
        if self._stamp is not None and self._broker is not None:
            number, boot = self._broker
            self._stamp.write(Stamp(broker=number, boot=boot, commits=self._commits))

    def load(self, table: str, reader: Reader | None = None) -> dict[bytes, bytes]:
        """The rows of a table; StorageError if there is one that the reader cannot decode."""
        try:
            rows = self._database.execute(
                "SELECT key, value FROM facts WHERE name = ? ORDER BY key", (table,)
            )
            found = dict(rows.fetchall())
        except sqlite3.Error as error:
            raise unreadable(self.path, error) from None
        if reader is not None:
            for key, value in found.items():
                self._check(table, key, value, reader)
        return found

    def _check(self, table: str, key: bytes, value: bytes, reader: Reader) -> None:
        try:
            reader(key, value)
        except _DAMAGED as error:
            row = repr(key.decode()) if key.isascii() and key.decode().isprintable() else key.hex()
            what = f"row {row} of table {table} is damaged ({error})"
            raise StorageError(f"cannot read {self.path}: {what}; {_advice(self.path)}") from None

    def commit(self, changes: Iterable[tuple[str, Rows]]) -> None:
        database = self._database
        try:
            with database:
                database.execute("BEGIN IMMEDIATE")
                for table, rows in changes:
                    for key, value in rows:
                        if value is None:
                            database.execute("DELETE FROM facts WHERE name = ? AND key = ?", (table, key))
                        else:
                            database.execute(
                                "INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (table, key, value)
                            )
                count = (self._commits + 1).to_bytes(8, "big")
                database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (*COMMITS, count))
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            raise (NoRoom if full else StorageError)(f"cannot write {self.path}: {error}") from None
        self._commits += 1
        self.stamp()

    def close(self) -> None:
        if self._stamp is not None:
            self._stamp.close()
        self._database.close()


def unreadable(path: Path, error: sqlite3.Error) -> StorageError:
    """What SQLite says of this file; where it is damaged, also what to do."""
    advice = f"; it is damaged, or no broker's database: {_advice(path)}" if is_alien(error) else ""
    return StorageError(f"cannot read {path}: {error}{advice}")


def is_alien(error: sqlite3.Error) -> bool:
    """The file is no database, a damaged one, or has other tables (SQLITE_ERROR)."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR)


def _advice(path: Path) -> str:
    return (
        f"restore the folder {path.parent} from a backup, or move it away and start anew, as another broker,"
        " without the durable events and subscriptions that it holds"
    )


def commits_of(database: sqlite3.Connection) -> int:
    """How many commits of metadata there were."""
    if not _has_table(database, "facts"):
        return 0
    row = database.execute("SELECT value FROM facts WHERE name = ? AND key = ?", COMMITS).fetchone()
    return 0 if row is None else int.from_bytes(row[0], "big")


def _broker_of(database: sqlite3.Connection) -> tuple[int, int] | None:
    """Number and boot of the broker whose data folder this is."""
    if not _has_table(database, "broker"):
        return None
    row: tuple[int, int] | None = database.execute("SELECT number, boot FROM broker").fetchone()
    return row


def _has_table(database: sqlite3.Connection, name: str) -> bool:
    return database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone() is not None
