"""D12: the copy of `postroad.db` takes the place of a database that changed on disk, and nothing is lost."""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from postroad.errors import StorageError
from postroad.seam.storage import Save
from postroad.storage.commit import Storage
from postroad.storage.identity import DATABASE, LOG_FOLDER, DataFolder
from postroad.storage.metadata import Metadata
from postroad.storage.stamp import read_stamp
from postroad.storage.twin import COPY, DAMAGED

ROWS = {
    "durable.delivered": {bytes([n, 0, 7]): b"tick %04d" % n for n in range(12)},
    "durable.subscriptions": {b"billing": b"orders/#", b"audit": b"#"},
    "history": {b"only": b"one row"},
}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """The folder of a broker that stopped after it had saved these rows."""
    folder = tmp_path / "whole"
    data = DataFolder(folder)
    data.start("b1")
    data.close()
    storage = Storage(folder, wake=lambda: None)
    for tag, (table, rows) in enumerate(ROWS.items()):
        storage.perform([Save(table=table, rows=tuple(rows.items()), tag=tag)])
        while not storage.take():
            time.sleep(0.001)
    storage.close()
    return folder


def rows_after_a_start(folder: Path) -> dict[str, dict[bytes, bytes]]:
    data = DataFolder(folder)
    data.start(None)
    data.close()
    with closing(Metadata(folder / DATABASE, log=folder / LOG_FOLDER)) as metadata:
        assert not any(metadata.damaged(table) for table in ROWS)
        metadata.stamp()
        return {table: metadata.load(table) for table in ROWS}


@pytest.mark.parametrize("harm", ["removed", "emptied", "garbage", "a page", "the end", "older"])
def test_a_database_that_is_lost_or_damaged_is_replaced_and_the_next_start_has_a_copy_again(
    whole: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    database = whole / DATABASE
    for round_ in range(2):
        content = database.read_bytes()
        rows_after_a_start(whole)
        caplog.clear()
        database.unlink()
        if harm != "removed":
            changed = {
                "emptied": b"",
                "garbage": b"this is no database" * 100,
                "a page": content[:4096] + b"\xff" * (len(content) - 4096),
                "the end": content[:4096],
                "older": content,
            }
            database.write_bytes(changed[harm])
        assert rows_after_a_start(whole) == ROWS, round_
        (line,) = [one.getMessage() for one in caplog.records]
        assert line.endswith(f": its copy {COPY} has taken its place; nothing is lost")
        assert (whole / f"{DATABASE}{DAMAGED}").exists() == (harm != "removed")
        assert database.stat().st_mode & 0o777 == 0o600
        assert (whole / COPY).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "step"),
    [(DATABASE, 37), (COPY, 101), pytest.param(DATABASE, 1, marks=pytest.mark.soak)],
)
def test_no_bit_of_either_loses_anything(whole: Path, tmp_path: Path, name: str, step: int) -> None:
    content, chance = (whole / name).read_bytes(), Random(5)
    places = [at for at in range(len(content)) if any(content[max(0, at - 2) : at + 3])]
    harmed = tmp_path / "harmed"
    for at in places[::step]:
        shutil.rmtree(harmed, ignore_errors=True)
        shutil.copytree(whole, harmed)
        changed = bytearray(content)
        changed[at] ^= 1 << chance.randrange(8)
        (harmed / name).write_bytes(changed)
        assert rows_after_a_start(harmed) == ROWS, at


def test_where_both_are_damaged_the_start_is_refused_and_nothing_is_touched(whole: Path) -> None:
    for name in (DATABASE, COPY):
        content = (whole / name).read_bytes()
        (whole / name).write_bytes(content.replace(b"orders/#", b"orders/+"))
    before = (whole / DATABASE).read_bytes()
    data = DataFolder(whole)
    data.close()
    with (
        closing(Metadata(whole / DATABASE, log=whole / LOG_FOLDER)) as metadata,
        pytest.raises(StorageError, match=r"row 'billing' of table durable.subscriptions is damaged"),
    ):
        metadata.refuse_damaged("durable.subscriptions")
    assert (whole / DATABASE).read_bytes() == before


def test_a_copy_that_is_behind_takes_nobodys_place(whole: Path) -> None:
    behind = (whole / COPY).read_bytes()
    rows_after_a_start(whole)
    (whole / COPY).write_bytes(behind)
    (whole / DATABASE).write_bytes(b"garbage" * 1000)
    with pytest.raises(StorageError, match="it is damaged, or no broker's database"):
        DataFolder(whole)


def test_a_copy_that_cannot_be_written_is_given_up_and_said(
    whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (whole / COPY).unlink()
    (whole / COPY).mkdir()
    assert rows_after_a_start(whole) == ROWS
    assert "cannot be written, and is not kept until the next start" in caplog.text
    assert read_stamp(whole / LOG_FOLDER) is not None
