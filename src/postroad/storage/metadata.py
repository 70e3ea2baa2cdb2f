"""Small facts that change in place: key/value tables in `postroad.db`, beside the broker's identity.

WAL with synchronous FULL: a commit is on disk when it returns. The log's commit thread is the only writer;
it commits after the log is synced, so a row never speaks of a record that a crash could take back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

from postroad.errors import StorageError
from postroad.storage.files import NoRoom

BUSY_S: Final = 5.0

Rows = Iterable[tuple[bytes, bytes | None]]


class Facts(Protocol):
    """What the log needs of a metadata store: SQLite here, a virtual file in the simulator."""

    def load(self, table: str) -> dict[bytes, bytes]: ...

    def commit(self, changes: Iterable[tuple[str, Rows]]) -> None:
        """All of the changes in order, durable, or none and a StorageError: NoRoom if the disk is full."""


class Metadata:
    """Used from one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS facts (name TEXT NOT NULL, key BLOB NOT NULL,"
                " value BLOB NOT NULL, PRIMARY KEY (name, key)) STRICT, WITHOUT ROWID"
            )
        except sqlite3.Error as error:
            self._database.close()
            raise StorageError(f"cannot read {path}: {error}") from None

    def load(self, table: str) -> dict[bytes, bytes]:
        try:
            rows = self._database.execute(
                "SELECT key, value FROM facts WHERE name = ? ORDER BY key", (table,)
            )
            return dict(rows.fetchall())
        except sqlite3.Error as error:
            raise StorageError(f"cannot read {self.path}: {error}") from None

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
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            raise (NoRoom if full else StorageError)(f"cannot write {self.path}: {error}") from None

    def close(self) -> None:
        self._database.close()
