"""Small facts that change in place: key/value tables in `postroad.db`, beside the broker's identity.

WAL with synchronous FULL: a commit is on disk when it returns. The log's commit thread is the only writer;
it commits after the log is synced, so a row never speaks of a record that a crash could take back. Commits
are counted, and the count is noted beside the log (`stamp`).

Opening it proves every row by its checksum. A damaged row is said in the log and is not in what `load` gives;
`damaged` names its key. One of which not even the table can be told is refused, since nobody could act on it.
"""

from __future__ import annotations

import logging
import sqlite3
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Final, Protocol

import msgspec

from postroad.errors import PostroadError, StorageError
from postroad.seam.storage import NoRoom, Reader
from postroad.storage.database import (
    COMMITS,
    OWN_TABLE,
    TABLES,
    advice,
    all_rows,
    commits_of,
    decode_names,
    encode_names,
    get,
    get_broker,
    open_database,
    present,
    put,
    put_all,
    row_checksum,
    sort_rows,
    unreadable,
)
from postroad.storage.stamp import Stamp, StampFile
from postroad.storage.twin import Twin

MAX_DAMAGE_LINES: Final = 100  # damaged rows that are said one by one

Rows = Iterable[tuple[bytes, bytes | None]]
_UNDECODABLE: Final = (msgspec.MsgspecError, struct.error, ValueError, PostroadError)  # what a reader raises
_log: Final = logging.getLogger(__name__)


class Facts(Protocol):
    """What the log needs of a metadata store: SQLite here, a virtual file in the simulator."""

    def load(self, table: str, reader: Reader, /) -> dict[bytes, bytes]: ...

    def damaged(self, table: str, /) -> tuple[bytes, ...]: ...

    def commit(self, changes: Iterable[tuple[str, Rows]]) -> None:
        """All of the changes in order, durable, or none and a StorageError: NoRoom if the disk is full."""


class Metadata:
    """Used from one thread at a time. `log`: the folder of the log that this belongs to."""

    def __init__(self, path: Path, *, log: Path | None = None) -> None:
        self.path = path
        self._stamp = None if log is None else StampFile(log)
        self._twin: Twin | None = None
        self._damaged: dict[str, dict[bytes, str]] = {}  # table -> key -> what is wrong with its row
        self._strays: dict[
            tuple[str, bytes], bytes
        ] = {}  # damaged rows under another table's name: that name
        try:
            self._database = open_database(path)
        except sqlite3.Error as error:
            raise unreadable(path, error) from None
        try:
            names = get(self._database, OWN_TABLE, TABLES)
            self._saved_tables = set() if names is None else decode_names(names)
            self._tables = self._saved_tables | {OWN_TABLE}
            self._prove()
            self._commits = commits_of(self._database) or 0
            self._broker = get_broker(self._database, path)
            if log is not None and not self._damaged:  # else its copy is no worse
                self._twin = Twin(self._database, path)
        except sqlite3.Error as error:
            self._database.close()
            raise unreadable(path, error) from None
        except StorageError:
            self._database.close()
            raise

    def _prove(self) -> None:
        """Find the rows that are not what was written, and whose they are."""
        rows = all_rows(self._database)
        if any(before[:2] >= after[:2] for before, after in pairwise(rows)):
            sort_rows(self._database, rows)  # a name or a key has changed: searches would miss others too
        wrong = []
        for name, key, value, checksum in rows:
            table = name.decode(errors="replace")
            if row_checksum(table, key, value) != checksum:
                wrong.append((name, key, value, checksum))
            else:
                self._tables.add(table)
        for name, key, value, checksum in wrong:
            table = name.decode(errors="replace")
            if table not in self._tables:
                owners = [
                    owner for owner in sorted(self._tables) if row_checksum(owner, key, value) == checksum
                ]
                if not owners:
                    raise self._refusal(f"row {_shown(key)} of table {_shown(name)}, which no table knows,")
                table = owners[0]
                self._strays[table, key] = name
            self._note_damage(table, key, "its checksum is wrong")

    def _note_damage(self, table: str, key: bytes, why: str) -> None:
        self._damaged.setdefault(table, {})[key] = why
        count = sum(map(len, self._damaged.values()))
        if count <= MAX_DAMAGE_LINES:
            _log.warning("%s: row %s of table %s is damaged (%s)", self.path, _shown(key), table, why)
        elif count == MAX_DAMAGE_LINES + 1:
            _log.warning("%s: more rows are damaged, which are not said one by one", self.path)

    def stamp(self) -> None:
        """Note beside the log that this is the database that belongs to it."""
        if self._stamp is not None and self._broker is not None:
            number, boot = self._broker[0], self._broker[3]
            self._stamp.write(Stamp(broker=number, boot=boot, commits=self._commits))

    def load(self, table: str, reader: Reader | None = None) -> dict[bytes, bytes]:
        """The rows of a table that are as they were written and that the reader can decode.

        Whatever is not is said in the log, and `damaged` names its key from then on.
        """
        try:
            rows = self._database.execute(
                "SELECT key, value FROM facts WHERE name = ? ORDER BY key", (table,)
            ).fetchall()
        except sqlite3.Error as error:
            raise unreadable(self.path, error) from None
        sound = {}
        for key, value in rows:
            if key in self._damaged.get(table, {}):
                continue
            try:
                if reader is not None:
                    reader(key, value)
            except _UNDECODABLE as error:
                self._note_damage(table, key, str(error))
                continue
            sound[key] = value
        return sound

    def damaged(self, table: str) -> tuple[bytes, ...]:
        """The keys of the table's rows that are damaged, in order; for who has loaded the table.

        What a caller gets, and what it may conclude:
        - The keys are those of rows as they are on disk now. `load` has none of them.
        - Nothing of such a row can be believed, not even that it was of this key: where a bit of the key
          changed, the key named here is one that never was, and the row of the true one is simply not there.
          So as soon as one is named, any row that is not in the table may be one that was lost.
        - A row stays damaged, and is named and said at every start, until something is saved under its key,
          or the key is deleted (None). Whoever acts on it (a Gap, say) deletes or replaces it in the Save
          that makes what it did durable: then a crash before that tells it again, and none after it does.
        - Who cannot go on without the row calls `refuse_damaged`.
        """
        return tuple(sorted(self._damaged.get(table, {})))

    def refuse_damaged(self, table: str) -> None:
        """StorageError, in one line with what to do, if a row of the table is damaged."""
        for key, why in sorted(self._damaged.get(table, {}).items()):
            raise self._refusal(f"row {_shown(key)} of table {table}", why)

    def _refusal(self, what: str, why: str = "its checksum is wrong") -> StorageError:
        return StorageError(f"cannot read {self.path}: {what} is damaged ({why}); {advice(self.path)}")

    def commit(self, changes: Iterable[tuple[str, Rows]]) -> None:
        database = self._database
        settled = [(OWN_TABLE, key) for key in self.damaged(OWN_TABLE)]
        tables = set(self._tables)
        # The last value of each row; None: there is none.
        saved = {(table, key): value for table, rows in changes for key, value in rows}
        try:
            with database:
                database.execute("BEGIN IMMEDIATE")
                for table, key in settled:
                    self._delete(table, key)
                for (table, key), value in saved.items():
                    if key in self._damaged.get(table, ()):
                        settled.append((table, key))
                        self._delete(table, key)
                    elif value is None:
                        self._delete(table, key)
                kept = present(saved)
                put_all(database, kept)
                tables.update(table for table, _, _ in kept)
                if tables != self._saved_tables:
                    put(database, OWN_TABLE, TABLES, encode_names(tables))
                put(database, OWN_TABLE, COMMITS, (self._commits + 1).to_bytes(8, "big"))
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            raise (NoRoom if full else StorageError)(f"cannot write {self.path}: {error}") from None
        self._commits += 1
        if self._twin is not None:
            self._twin.commit(saved, encode_names(tables), self._commits.to_bytes(8, "big"))
        self._tables, self._saved_tables = tables, tables
        for table, key in settled:
            self._damaged[table].pop(key, None)
            self._strays.pop((table, key), None)
        self.stamp()

    def _delete(self, table: str, key: bytes) -> None:
        name = self._strays.get((table, key), table.encode())
        self._database.execute("DELETE FROM facts WHERE name = CAST(? AS TEXT) AND key = ?", (name, key))

    def close(self) -> None:
        if self._stamp is not None:
            self._stamp.close()
        if self._twin is not None:
            self._twin.close()
        self._database.close()


def _shown(key: bytes) -> str:
    return repr(key.decode()) if key.isascii() and key.decode().isprintable() else key.hex()
