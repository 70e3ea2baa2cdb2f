"""A broker is its data folder: identity is drawn once, starts are counted, one process at a time."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from postroad.errors import StorageError, UsageError
from postroad.ids import Identity
from postroad.seam.storage import Save
from postroad.storage.commit import Storage
from postroad.storage.identity import DATABASE, EPOCH_S, LAST_CLOCK, LOG_FOLDER, DataFolder
from postroad.storage.segment import segment_name
from postroad.storage.stamp import STAMP, read_stamp
from postroad.storage.twin import COPY


def test_identity_is_kept_and_starts_are_counted(tmp_path: Path) -> None:
    seen = []
    for name in ("b1", None, "renamed", None):
        folder = DataFolder(tmp_path / "data")
        seen.append(folder.start(name))
        folder.close()
    assert [one.starts for one in seen] == [1, 2, 3, 4]
    assert all(earlier.boot < later.boot for earlier, later in pairwise(seen))
    assert [one.name for one in seen] == ["b1", "b1", "renamed", "renamed"]
    assert len({(one.number, one.node) for one in seen}) == 1
    assert 0 < seen[0].number < 1 << 32
    assert len(seen[0].node) == 16


def started_at(path: Path, second: int) -> Identity:
    folder = DataFolder(path)
    try:
        return folder.start("b1", clock=lambda: EPOCH_S + second + 0.9)
    finally:
        folder.close()


def test_boot_numbers_do_not_go_back_with_a_folder(tmp_path: Path) -> None:
    """D12: One from a backup: what others have heard of the starts that it does not know must be older."""
    data, backup = tmp_path / "data", tmp_path / "backup"
    assert started_at(data, 1000).boot == 1000
    shutil.copytree(data, backup)
    lost = [started_at(data, second) for second in (1001, 1001, 1001, 1002, 2000)]
    assert [one.boot for one in lost] == [1001, 1002, 1003, 1004, 2000]
    shutil.rmtree(data)
    backup.rename(data)
    restored = started_at(data, 2001)
    assert (restored.boot, restored.starts, restored.before) == (2001, 2, 1000)


def test_boot_numbers_whatever_the_clock_says(tmp_path: Path) -> None:
    seconds = (-EPOCH_S, -5, 7, 3, LAST_CLOCK + 1_000_000_000, 8)
    boots = [started_at(tmp_path, second).boot for second in seconds]
    assert boots == [1, 2, 7, 8, LAST_CLOCK, LAST_CLOCK + 1]


def test_a_folder_whose_boot_number_was_the_count_of_its_starts(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / DATABASE)
    database.execute(
        "CREATE TABLE broker (one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER NOT NULL,"
        " node BLOB NOT NULL, name TEXT NOT NULL, boot INTEGER NOT NULL) STRICT"
    )
    database.execute("INSERT INTO broker VALUES (1, 42, ?, 'old', 17)", (bytes(16),))
    database.execute("PRAGMA user_version = 1")
    database.commit()
    database.close()
    seen = [started_at(tmp_path, second) for second in (5, 1000)]
    assert [(one.number, one.boot, one.starts) for one in seen] == [(42, 18, 18), (42, 1000, 19)]


def test_two_folders_are_two_brokers(tmp_path: Path) -> None:
    one, other = DataFolder(tmp_path / "1"), DataFolder(tmp_path / "2")
    first, second = one.start(None), other.start(None)
    assert first.number != second.number
    assert first.node != second.node
    assert first.name == f"broker-{first.number:08x}"
    one.close()
    other.close()


def test_a_folder_serves_one_broker_at_a_time(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    with pytest.raises(UsageError, match=r"in use by another broker \(process \d+\); give this one its own"):
        DataFolder(tmp_path)
    folder.close()
    DataFolder(tmp_path).close()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another with --data"):
        DataFolder(tmp_path / "file")


@pytest.mark.parametrize("harm", ["garbage", "a page", "the end"])
def test_a_damaged_database_is_said_so(tmp_path: Path, harm: str) -> None:
    commit(tmp_path, 3)
    database = tmp_path / DATABASE
    whole = snapshot(database)
    damaged = {
        "garbage": b"this is no database" * 100,
        "a page": whole[:4096] + b"\xff" * (len(whole) - 4096),
        "the end": whole[:4096],
    }[harm]
    database.write_bytes(damaged)
    (tmp_path / COPY).write_bytes(damaged)
    with pytest.raises(StorageError) as error:
        commit(tmp_path, 0)
    assert str(error.value).startswith(f"cannot read {database}: ")
    assert str(error.value).endswith(
        f"; it is damaged, or no broker's database: restore the folder {tmp_path} from a backup, or move it"
        " away and start anew, as another broker, without the durable events and subscriptions that it holds"
    )
    assert database.read_bytes() == damaged


@pytest.mark.parametrize("table", ["broker", "facts"])
def test_the_database_of_something_else_is_said_to_be_so(tmp_path: Path, table: str) -> None:
    database = sqlite3.connect(tmp_path / DATABASE)
    database.execute(f"CREATE TABLE {table} (a)")
    database.close()
    with pytest.raises(StorageError, match=r"no such column: .*; it is damaged, or no broker's database: "):
        commit(tmp_path, 1)


def test_a_newer_layout_is_left_alone(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.database.execute("PRAGMA user_version = 99")
    folder.close()
    with pytest.raises(StorageError, match="newer Postroad"):
        DataFolder(tmp_path)


def start(path: Path) -> None:
    folder = DataFolder(path)
    try:
        folder.start("b1")
    finally:
        folder.close()


@pytest.mark.parametrize("lost", ["removed", "emptied", "new"])
def test_a_lost_database_beside_a_log_is_refused_and_nothing_is_touched(tmp_path: Path, lost: str) -> None:
    """D12.

    Its log would be another broker's: nobody could read it, and new events would be appended to it.
    """
    start(tmp_path)
    (tmp_path / LOG_FOLDER).mkdir()
    file = tmp_path / LOG_FOLDER / segment_name(1, 2)
    file.write_bytes(b"records")
    database = tmp_path / DATABASE
    kept = database.read_bytes()
    database.unlink()
    if lost == "emptied":
        database.touch()
    elif lost == "new":
        DataFolder(tmp_path / "other").close()
        (tmp_path / "other" / DATABASE).rename(database)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"is lost, and .*log holds a log.* put the database back, or"):
            start(tmp_path)
    assert database.exists() == (lost != "removed")
    database.write_bytes(kept)
    folder = DataFolder(tmp_path)
    assert folder.start(None).starts == 2
    folder.close()
    database.unlink()
    file.rename(tmp_path / "aside.log")
    folder = DataFolder(tmp_path)
    assert folder.start(None).starts == 1
    folder.close()


def commit(path: Path, count: int) -> None:
    """A start of the broker that saves something so many times."""
    start(path)
    storage = Storage(path, wake=lambda: None)
    for tag in range(count):
        storage.perform([Save(table="t", rows=((b"key", str(tag).encode()),), tag=tag)])
        while not storage.take():
            time.sleep(0.001)
    storage.close()


def boot_of(path: Path) -> int:
    with closing(sqlite3.connect(path / DATABASE)) as database:
        (boot,) = database.execute("SELECT boot FROM broker").fetchone()
    return int(boot)


def snapshot(path: Path) -> bytes:
    """The database as a backup has it."""
    assert not path.with_name(path.name + "-wal").exists(), "the broker is stopped"
    return path.read_bytes()


def test_a_database_older_than_its_log_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    """D12: one that was put back alone. Names, tokens and numbers would go back without a word."""
    commit(tmp_path, 3)
    database, log = tmp_path / DATABASE, tmp_path / LOG_FOLDER
    before = snapshot(database)
    commit(tmp_path, 1)
    latest = snapshot(database)
    for old in (before, before):
        database.write_bytes(old)
        (tmp_path / COPY).unlink(missing_ok=True)
        with pytest.raises(StorageError, match=r"db is older than the log beside it: put back the one that"):
            start(tmp_path)
        assert snapshot(database) == old
    database.write_bytes(latest)
    commit(tmp_path, 0)
    database.write_bytes(latest)
    (tmp_path / COPY).unlink()
    with pytest.raises(StorageError, match="is older than the log"):
        start(tmp_path)  # only the count of starts went back
    log.rename(tmp_path / "aside")
    commit(tmp_path, 1)


@pytest.mark.parametrize("harm", ["a bit", "removed"])
def test_a_damaged_journal_is_refused(tmp_path: Path, harm: str) -> None:
    """SQLite drops what lies behind a damaged part of it without a word: commits that were answered."""
    data, killed = tmp_path / "data", tmp_path / "killed"
    start(data)
    storage = Storage(data, wake=lambda: None)
    for tag in range(5):
        storage.perform([Save(table="t", rows=((b"key", bytes([tag])),), tag=tag)])
        while not storage.take():
            time.sleep(0.001)
    shutil.copytree(data, killed)
    storage.close()
    journal = killed / f"{DATABASE}-wal"
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    if harm == "removed":
        journal.unlink()
    else:
        journal.write_bytes(content)
    (killed / COPY).unlink()
    with pytest.raises(
        StorageError, match=r"older than the log .* with its journal postroad.db-wal if there is"
    ):
        start(killed)


def test_a_database_of_another_broker_is_refused(tmp_path: Path) -> None:
    commit(tmp_path / "one", 1)
    commit(tmp_path / "other", 5)
    (tmp_path / "other" / DATABASE).replace(tmp_path / "one" / DATABASE)
    with pytest.raises(StorageError, match=r"db is not that of the log beside it: put back the one that"):
        start(tmp_path / "one")


@pytest.mark.parametrize("harm", ["removed", "emptied", "garbled", "behind"])
def test_a_stamp_that_is_behind_or_unreadable_proves_nothing(tmp_path: Path, harm: str) -> None:
    """It is not synced: a crash of the machine may leave it as it was."""
    commit(tmp_path, 1)
    stamp = tmp_path / LOG_FOLDER / STAMP
    old = stamp.read_bytes()
    commit(tmp_path, 2)
    assert read_stamp(stamp.parent) is not None
    if harm == "removed":
        stamp.unlink()
    else:
        stamp.write_bytes({"emptied": b"", "garbled": b"\0" * len(old), "behind": old}[harm])
    before = boot_of(tmp_path)
    commit(tmp_path, 1)
    found = read_stamp(stamp.parent)
    assert found is not None
    assert found.boot == boot_of(tmp_path) > before


def test_no_bit_of_the_stamp_refuses_a_database_that_is_whole(tmp_path: Path) -> None:
    """Found: a third of them did, as "older than the log beside it"."""
    commit(tmp_path / "whole", 3)
    content = (tmp_path / "whole" / LOG_FOLDER / STAMP).read_bytes()
    for at in range(len(content)):
        harmed = tmp_path / "harmed"
        shutil.copytree(tmp_path / "whole", harmed)
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        (harmed / LOG_FOLDER / STAMP).write_bytes(changed)
        start(harmed)
        shutil.rmtree(harmed)


def test_a_stamp_of_an_earlier_version_counts(tmp_path: Path) -> None:
    """It has no checksum."""
    commit(tmp_path, 3)
    database, stamp = tmp_path / DATABASE, tmp_path / LOG_FOLDER / STAMP
    before = snapshot(database)
    commit(tmp_path, 1)
    stamp.write_bytes(stamp.read_bytes()[:40] + b"\n")
    database.write_bytes(before)
    (tmp_path / COPY).unlink()
    with pytest.raises(StorageError, match="is older than the log"):
        start(tmp_path)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """A process that may not write a byte to any file stands for a disk without room."""
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from postroad.cli import main\n"
        "from postroad.net import run\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "sys.exit(main(['up', '--data', sys.argv[1], '--listen', '127.0.0.1:0', '--metrics', 'off']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"postroad: cannot write {tmp_path / 'data' / DATABASE}: ")
    assert line.endswith("make room, or choose another folder with --data")
