"""`postroad.db`: what its tables look like, who may read it, and how damage in it is seen.

Every row carries a crc32c over its table, key and value (the broker's own row: over all it says), because
SQLite keeps none: a bit that changes in a page is read as if it had been written so. SQLite's own check of
its pages (`quick_check`) stands beside that: it sees what makes whole rows vanish. A page that is damaged is
an error of one line; a row that is damaged is left out and named (`metadata`).

Two rows are there from the beginning, so that one which is not there is a damaged one: how many commits there
were, and the names of all tables. The latter tells whose a row is of which the table's name has changed.

A database of the layout before has no checksums. It is taken over in one transaction, in which the rows get
the checksums of what they say at this moment; what had changed before nobody can tell.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from google_crc32c import value as crc32c

from postroad.errors import StorageError
from postroad.storage.segment import unversioned

LAYOUT: Final = 2
BUSY_S: Final = 5.0
OWN_TABLE: Final = "metadata"  # what the database notes of itself
COMMITS: Final = b"commits"  # how many commits of metadata there were, 8 bytes
TABLES: Final = b"tables"  # the names of all tables that were ever saved to
LIFE: Final = b"life"  # the broker's life (`Identity`), 4 bytes; not there until its data was restored
ROWS_PER_STATEMENT: Final = 64

_BROKER: Final = (
    "CREATE TABLE broker (one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER NOT NULL,"
    " node BLOB NOT NULL, name TEXT NOT NULL, boot INTEGER NOT NULL, starts INTEGER NOT NULL,"
    " checksum INTEGER NOT NULL) STRICT"
)
_FACTS: Final = (
    "CREATE TABLE facts (name TEXT NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL,"
    " checksum INTEGER NOT NULL, PRIMARY KEY (name, key)) STRICT, WITHOUT ROWID"
)


Fact = tuple[bytes, bytes, bytes, int]  # name, key, value, checksum
Saved = Mapping[tuple[str, bytes], bytes | None]  # table and key -> value, None to delete the row
BrokerRow = tuple[int, bytes, str, int, int]  # number, node, name, boot, starts


def open_database(path: Path) -> sqlite3.Connection:
    """Open it, make it where there is none, take it over where it is of the layout before. sqlite3.Error:
    it cannot be read or written; `unreadable` says what to do. StorageError: it is of a later layout."""
    _keep_private(path)
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
    database.text_factory = _text
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        (layout,) = database.execute("PRAGMA user_version").fetchone()
        if layout > LAYOUT:
            raise StorageError(
                f"{path} was written by a newer Postroad (layout {layout}, this one knows {LAYOUT})"
            )
        if layout < LAYOUT:
            _make_or_take_over(database)
        _check_pages(database)
    except UnicodeDecodeError:  # the name of something in the schema, as part of what SQLite says of it
        database.close()
        raise _corrupt("malformed database schema") from None
    except BaseException:
        database.close()
        raise
    return database


def _keep_private(path: Path) -> None:
    """Only the owner may read it. SQLite gives its journal the mode of the database."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for suffix in ("", "-wal", "-shm"):
            file = path.with_name(path.name + suffix)
            if file.exists() and file.stat().st_mode & 0o077:
                file.chmod(0o600)
    except OSError as error:
        raise StorageError(f"cannot use {path}: {error.strerror}") from None


def _make_or_take_over(database: sqlite3.Connection) -> None:
    with database:
        database.execute("BEGIN IMMEDIATE")
        (layout,) = database.execute("PRAGMA user_version").fetchone()
        if layout == LAYOUT:
            return
        if _has_table(database, "broker"):
            _take_over_broker(database)
        else:
            database.execute(_BROKER)
        if _has_table(database, "facts"):
            _take_over_facts(database)
        else:
            database.execute(_FACTS)
        names = {name for (name,) in database.execute("SELECT DISTINCT name FROM facts")}
        put(database, OWN_TABLE, TABLES, encode_names(names | {OWN_TABLE}))
        if get(database, OWN_TABLE, COMMITS) is None:
            put(database, OWN_TABLE, COMMITS, bytes(8))
        database.execute(f"PRAGMA user_version = {LAYOUT}")


def _take_over_broker(database: sqlite3.Connection) -> None:
    if all(row[1] != "starts" for row in database.execute("PRAGMA table_info(broker)")):
        # Where boot numbers were the count of starts, there is no other.
        database.execute("ALTER TABLE broker ADD COLUMN starts INTEGER NOT NULL DEFAULT 0")
        database.execute("UPDATE broker SET starts = boot")
    database.execute("ALTER TABLE broker ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0")
    row = database.execute("SELECT number, node, name, boot, starts FROM broker").fetchone()
    if row is not None:
        database.execute("UPDATE broker SET checksum = ?", (_broker_checksum(row),))


def _take_over_facts(database: sqlite3.Connection) -> None:
    database.execute("ALTER TABLE facts ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0")
    database.create_function("stream_key", 1, _stream_key, deterministic=True)
    database.execute(
        "UPDATE facts SET key = stream_key(key) WHERE name IN ('log.chops', 'log.lasts', 'log.suspects')"
    )
    database.create_function("row_checksum", 3, row_checksum, deterministic=True)
    database.execute("UPDATE facts SET checksum = row_checksum(name, key, value)")


def _stream_key(number: bytes) -> bytes:
    """The key of a log stream, which was a number without a kind."""
    kind, id = unversioned(int.from_bytes(number, "big"))
    return bytes([kind]) + id.to_bytes(8, "big")


def _check_pages(database: sqlite3.Connection) -> None:
    (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _corrupt(" ".join(verdict.split()))


def _corrupt(what: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(what)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _text(stored: bytes) -> str:
    """A text that a changed bit made none is found by its checksum."""
    return stored.decode(errors="replace")


def _has_table(database: sqlite3.Connection, name: str) -> bool:
    return database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone() is not None


# -- rows


def row_checksum(table: str, key: bytes, value: bytes) -> int:
    name = table.encode()
    checksum: int = crc32c(b"%d %d %s%s%s" % (len(name), len(key), name, key, value))
    return checksum


def put(database: sqlite3.Connection, table: str, key: bytes, value: bytes) -> None:
    database.execute(
        "INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?)",
        (table, key, value, row_checksum(table, key, value)),
    )


def present(saved: Saved) -> list[tuple[str, bytes, bytes]]:
    """The rows that are there afterwards."""
    return [(table, key, value) for (table, key), value in saved.items() if value is not None]


def put_all(database: sqlite3.Connection, rows: Sequence[tuple[str, bytes, bytes]]) -> None:
    """As `put` of each. Every statement lets other threads run and then waits to be let run itself, which is
    longer than the statement takes: so there are few."""
    for first in range(0, len(rows), ROWS_PER_STATEMENT):
        some = rows[first : first + ROWS_PER_STATEMENT]
        values = ", ".join(["(?, ?, ?, ?)"] * len(some))
        parameters = [
            part
            for table, key, value in some
            for part in (table, key, value, row_checksum(table, key, value))
        ]
        database.execute(f"INSERT OR REPLACE INTO facts VALUES {values}", parameters)


def get(database: sqlite3.Connection, table: str, key: bytes) -> bytes | None:
    """None: it is not there, or damaged."""
    row = database.execute(
        "SELECT value, checksum FROM facts WHERE name = ? AND key = ?", (table, key)
    ).fetchone()
    return row[0] if row is not None and row_checksum(table, key, row[0]) == row[1] else None


def all_rows(database: sqlite3.Connection) -> list[Fact]:
    """In the order in which they lie on disk, whatever they say. The name as it is: where it is no text any
    more, only its bytes find the row again."""
    return database.execute("SELECT CAST(name AS BLOB), key, value, checksum FROM facts").fetchall()


def sort_rows(database: sqlite3.Connection, rows: list[Fact]) -> None:
    """Lay the rows in order again. sqlite3.IntegrityError: two have the same name and key."""
    with database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("DROP TABLE facts")
        database.execute(_FACTS)
        database.executemany("INSERT INTO facts VALUES (CAST(? AS TEXT), ?, ?, ?)", rows)


def commits_of(database: sqlite3.Connection) -> int | None:
    """How many commits of metadata there were. None: the row that says so is damaged."""
    count = get(database, OWN_TABLE, COMMITS)
    return None if count is None else int.from_bytes(count, "big")


def encode_names(names: Collection[str]) -> bytes:
    return msgspec.msgpack.encode(sorted(names))


def decode_names(value: bytes) -> set[str]:
    return set(msgspec.msgpack.decode(value, type=list[str]))


def get_broker(database: sqlite3.Connection, path: Path) -> BrokerRow | None:
    """Who the broker is. None: nobody yet. StorageError: it cannot be trusted."""
    row = database.execute("SELECT number, node, name, boot, starts, checksum FROM broker").fetchone()
    if row is None:
        return None
    if _broker_checksum(row[:5]) != row[5]:
        raise StorageError(
            f"cannot read {path}: the row that says who this broker is is damaged; {advice(path)}"
        )
    broker: BrokerRow = row[:5]
    return broker


def get_life(database: sqlite3.Connection, path: Path) -> int:
    """StorageError: it cannot be trusted."""
    row = database.execute(
        "SELECT value, checksum FROM facts WHERE name = ? AND key = ?", (OWN_TABLE, LIFE)
    ).fetchone()
    if row is None:
        return 0
    if row_checksum(OWN_TABLE, LIFE, row[0]) != row[1]:
        raise StorageError(f"cannot read {path}: the row of this broker's life is damaged; {advice(path)}")
    return int.from_bytes(row[0], "big")


def put_broker(database: sqlite3.Connection, row: BrokerRow) -> None:
    database.execute(
        "INSERT OR REPLACE INTO broker VALUES (1, ?, ?, ?, ?, ?, ?)", (*row, _broker_checksum(row))
    )


def _broker_checksum(row: BrokerRow) -> int:
    checksum: int = crc32c(msgspec.msgpack.encode(row))
    return checksum


# -- errors


def unreadable(path: Path, error: sqlite3.Error) -> StorageError:
    """What SQLite says of this file; where it is damaged, also what to do."""
    what = f"; it is damaged, or no broker's database: {advice(path)}" if is_alien(error) else ""
    # What SQLite says may quote a page that is damaged.
    said = "".join(letter if letter.isprintable() else "?" for letter in str(error))
    return StorageError(f"cannot read {path}: {said}{what}")


def is_alien(error: sqlite3.Error) -> bool:
    """The file is no database, a damaged one (SQLITE_CONSTRAINT: two rows became one), or has other tables
    (SQLITE_ERROR)."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CONSTRAINT,
    )


def advice(path: Path) -> str:
    return (
        f"restore the folder {path.parent} from a backup, or move it away and start anew, as another broker,"
        " without the durable events and subscriptions that it holds"
    )
