"""D12: rows of `postroad.db` at rest: whatever of them changes is said, and never believed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from postroad.errors import StorageError
from postroad.storage.database import LAYOUT, TABLES, encode_names
from postroad.storage.identity import DATABASE, DataFolder
from postroad.storage.metadata import MAX_DAMAGE_LINES, Metadata

ROWS = {
    "durable.delivered": {bytes([n, 0, 7]): b"tick %04d" % n for n in range(12)},
    "durable.subscriptions": {b"billing": b"orders/#", b"audit": b"#"},
    "history": {b"only": b"one row"},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = DataFolder(tmp_path)
    folder.start("b1")
    folder.close()
    path = tmp_path / DATABASE
    metadata = Metadata(path)
    for table, rows in ROWS.items():
        metadata.commit([(table, rows.items())])
    metadata.close()
    return path


def change(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        assert database.execute(statement, values).rowcount == 1


def loaded(metadata: Metadata) -> dict[str, dict[bytes, bytes]]:
    return {table: metadata.load(table) for table in ROWS}


@pytest.mark.parametrize("column", ["value", "checksum"])
def test_a_row_that_changed_is_not_loaded_but_named(
    path: Path, caplog: pytest.LogCaptureFixture, column: str
) -> None:
    new = b"#/orders" if column == "value" else 17
    change(path, f"UPDATE facts SET {column} = ? WHERE key = ?", new, b"billing")
    for _ in range(2):  # it stays so until somebody saves it
        with closing(Metadata(path)) as metadata:
            assert loaded(metadata) == ROWS | {"durable.subscriptions": {b"audit": b"#"}}
            assert metadata.damaged("durable.subscriptions") == (b"billing",)
            assert metadata.damaged("history") == ()
            metadata.refuse_damaged("history")
            with pytest.raises(
                StorageError, match=r"postroad.db: row 'billing' of table durable.subscriptions is damaged \("
            ):
                metadata.refuse_damaged("durable.subscriptions")
        (line,) = [one.getMessage() for one in caplog.records]
        assert (
            line == f"{path}: row 'billing' of table durable.subscriptions is damaged (its checksum is wrong)"
        )
        caplog.clear()


@pytest.mark.parametrize("value", [None, b"orders/#"])
def test_a_damaged_row_is_forgotten_with_the_save_of_its_key(path: Path, value: bytes | None) -> None:
    change(path, "UPDATE facts SET value = x'00' WHERE key = ?", b"billing")
    change(path, "UPDATE facts SET name = 'durable.subscriptionr' WHERE key = ?", b"audit")
    with closing(Metadata(path)) as metadata:
        assert metadata.load("durable.subscriptions") == {}
        assert metadata.damaged("durable.subscriptions") == (b"audit", b"billing")
        metadata.commit([("durable.subscriptions", [(b"billing", value), (b"audit", value)])])
        assert metadata.damaged("durable.subscriptions") == ()
    expected = {} if value is None else dict.fromkeys((b"billing", b"audit"), value)
    with closing(Metadata(path)) as metadata:
        assert metadata.damaged("durable.subscriptions") == ()
        assert metadata.load("durable.subscriptions") == expected
        assert metadata.load("durable.subscriptionr") == {}


def test_the_only_row_of_a_table_is_still_known_for_its_own_under_another_name(path: Path) -> None:
    change(path, "UPDATE facts SET name = CAST(x'686973746fF279' AS TEXT) WHERE name = 'history'")
    with closing(Metadata(path)) as metadata:
        assert (metadata.load("history"), metadata.damaged("history")) == ({}, (b"only",))


def test_a_row_of_no_table_is_refused(path: Path) -> None:
    change(path, "UPDATE facts SET name = 'histori', value = x'00' WHERE name = 'history'")
    with pytest.raises(
        StorageError, match=r"row 'only' of table 'histori', which no table knows, is damaged"
    ):
        Metadata(path)


def test_what_the_database_notes_of_itself_is_made_good(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(path, "UPDATE facts SET value = x'00' WHERE key = ?", b"tables")
    change(path, "UPDATE facts SET value = x'00' WHERE key = ?", b"commits")
    with closing(Metadata(path)) as metadata:
        assert loaded(metadata) == ROWS
        assert [one.getMessage().split(": ")[1] for one in caplog.records] == [
            "row 'commits' of table metadata is damaged (its checksum is wrong)",
            "row 'tables' of table metadata is damaged (its checksum is wrong)",
        ]
        metadata.commit([("new", [(b"k", b"v")])])
    with closing(Metadata(path)) as metadata:
        assert metadata.damaged("metadata") == ()
        assert metadata.load("metadata")[TABLES] == encode_names([*ROWS, "metadata", "new"])


def test_what_a_reader_cannot_decode_is_damaged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Metadata(path)) as metadata:
        metadata.commit([("numbers", [(b"a", b"1"), (b"b", b"two")])])
        assert metadata.load("numbers", lambda _, value: int(value)) == {b"a": b"1"}
        assert metadata.damaged("numbers") == (b"b",)
    assert "row 'b' of table numbers is damaged (invalid literal" in caplog.text


def test_many_damaged_rows_are_not_said_one_by_one(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    count = MAX_DAMAGE_LINES + 50
    with closing(Metadata(path)) as metadata:
        metadata.commit([("many", [(b"%d" % n, b"x") for n in range(count)])])
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE facts SET value = x'00' WHERE name = 'many'")
    with closing(Metadata(path)) as metadata:
        assert len(metadata.damaged("many")) == count
    assert len(caplog.records) == MAX_DAMAGE_LINES + 1
    assert "not said one by one" in caplog.records[-1].getMessage()


def test_a_damaged_identity_is_one_line_that_says_what_to_do(path: Path) -> None:
    change(path, "UPDATE broker SET number = number + 1")
    with pytest.raises(StorageError) as error:
        DataFolder(path.parent)
    assert str(error.value).startswith(
        f"cannot read {path}: the row that says who this broker is is damaged;"
    )
    assert "restore the folder" in str(error.value)
    with pytest.raises(StorageError, match="who this broker is"):
        Metadata(path)


def bits(whole: bytes, chance: Random) -> Iterator[tuple[int, int]]:
    """A bit of every byte that is not the free middle of a page."""
    for at in range(len(whole)):
        if any(whole[max(0, at - 2) : at + 3]):
            yield at, 1 << chance.randrange(8)


def test_no_bit_of_the_database_changes_in_silence(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Refused, or each row that is not as it was is named in its table, or nothing was changed by it."""
    whole = path.read_bytes()
    outcomes = {"refused": 0, "unprintable": 0, "named": 0, "nothing": 0}
    for at, bit in bits(whole, Random(11)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        caplog.clear()
        try:
            DataFolder(path.parent).close()
            with closing(Metadata(path)) as metadata:
                found, damaged = loaded(metadata), {one: metadata.damaged(one) for one in ROWS}
        except StorageError as error:
            outcomes["refused" if str(error).isprintable() else "unprintable"] += 1
            continue
        finally:
            for file in path.parent.glob(f"{DATABASE}-*"):
                file.unlink()
        for table, rows in ROWS.items():
            assert found[table].items() <= rows.items(), at
            assert found[table] == rows or damaged[table], at
        if caplog.records:
            outcomes["named"] += 1
        else:
            assert found == ROWS, at
            outcomes["nothing"] += 1
    assert outcomes["unprintable"] == 0
    assert outcomes["named"] > 300
    assert outcomes["refused"] > 300


# -- the layout before


OLD = (
    "CREATE TABLE broker (one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER NOT NULL,"
    " node BLOB NOT NULL, name TEXT NOT NULL, boot INTEGER NOT NULL, starts INTEGER NOT NULL DEFAULT 0)"
    " STRICT",
    "CREATE TABLE facts (name TEXT NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL,"
    " PRIMARY KEY (name, key)) STRICT, WITHOUT ROWID",
    "INSERT INTO broker VALUES (1, 42, x'00112233445566778899aabbccddeeff', 'old', 17, 5)",
    "INSERT INTO facts VALUES ('metadata', x'636f6d6d697473', x'0000000000000009')",
)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder as the version before left it, killed: its last commits are in the journal."""
    path = tmp_path / DATABASE
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        for statement in OLD:
            database.execute(statement)
        for table, rows in ROWS.items():
            for key, value in rows.items():
                database.execute("INSERT INTO facts VALUES (?, ?, ?)", (table, key, value))
        database.execute("PRAGMA user_version = 1")
    return path


def test_a_folder_of_the_layout_before_is_taken_over(old: Path) -> None:
    folder = DataFolder(old.parent)
    identity = folder.start(None, clock=lambda: 0.0)
    assert (identity.number, identity.name, identity.before, identity.starts) == (42, "old", 17, 6)
    folder.close()
    with closing(Metadata(old)) as metadata:
        assert loaded(metadata) == ROWS
        assert int.from_bytes(metadata.load("metadata")[b"commits"], "big") == 9
    change(old, "UPDATE facts SET value = x'00' WHERE name = 'history'")
    with closing(Metadata(old)) as metadata:
        assert metadata.damaged("history") == (b"only",)


def test_taking_over_is_all_or_nothing(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_row: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("postroad.storage.database.encode_names", crash)
        with pytest.raises(KeyboardInterrupt):
            DataFolder(old.parent)
    with closing(sqlite3.connect(old)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (1,)
        columns = [row[1] for row in database.execute("PRAGMA table_info(facts)")]
    assert columns == ["name", "key", "value"]
    with closing(Metadata(old)) as metadata:
        assert loaded(metadata) == ROWS
    with closing(sqlite3.connect(old)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (LAYOUT,)
