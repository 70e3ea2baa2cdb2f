"""P4: a lake of the earlier layout, folders of Parquet, becomes Delta tables with the same rows."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from postroad.errors import StorageError, UsageError
from postroad.ids import MessageId, pubend_id
from postroad.spark.audit import landed_subscriptions
from postroad.spark.lake import rows
from postroad.spark.lake.compact import compact
from postroad.spark.lake.history import Part
from postroad.spark.lake.ledger import landed_until, read_progress
from postroad.spark.lake.migrate import migrate
from postroad.spark.lake.tables import Lake, Tables

DAY_MS = 1_763_164_800_000
NAME = "postroad-landing-00112233"
UNTIL = {"00000007-ffffffff": 42, "since": 1}
WAITING = Part(broker="00000007", name="b7", sequence=1, part=0, parts=2, payload=b"x")


def events(*numbers: int) -> pa.Table:
    return rows.events(
        (MessageId(5, 7, DAY_MS + n, n), "a", {"n": n}, b"p", pubend_id(7, 0), n) for n in numbers
    )


@pytest.fixture
def old(spark: SparkSession, tmp_path: Path) -> Path:
    """As Spark wrote it: batches 0 to 2, of which the first two were compacted, and 3, which was not done."""
    place = tmp_path / "lake"
    for name, numbers in {
        "q-000000000": [0],
        "compact-1": [0, 1],
        "q-000000002": [2],
        "q-000000003": [3],
    }.items():
        writer = spark.createDataFrame(events(*numbers)).coalesce(1).write.partitionBy("date", "origin")
        writer.parquet(str(place / "events" / f"segment={name}"))
    (place / "events" / "_replaced").mkdir()
    replaced = {"segments": ["q-000000000", "q-000000001"], "landed": []}
    (place / "events" / "_replaced" / "compact-1.json").write_text(json.dumps(replaced))
    for kind, query in (("events", "q"), ("history", "r")):
        checkpoint = place / "_landing" / kind / "checkpoint"
        for folder, last in (("commits", 2), ("offsets", 3)):
            (checkpoint / folder).mkdir(parents=True)
            for number in range(last + 1):
                told = json.dumps({**UNTIL, "00000007-ffffffff": 40 + number})
                (checkpoint / folder / str(number)).write_text(f"v1\n{{}}\n{told}")
        (checkpoint / "metadata").write_text(json.dumps({"id": query}))
    (place / "_landing" / "name").write_text(NAME)
    (place / "_landing" / "lock").touch()
    (place / "_landing" / "history" / "parts-2.msgpack").write_bytes(msgspec.msgpack.encode([WAITING]))
    (place / "subscriptions.jsonl").write_text('{"name": "billing", "topic": "a", "since_us": 3}\n')
    return place


def test_a_lake_is_brought_over(spark: SparkSession, old: Path) -> None:
    """P4."""
    lake = Lake(spark, old)
    with pytest.raises(UsageError, match="`postroad pipeline migrate`"):
        lake.files("events")
    with (old / "_landing" / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="stop it first"):
            migrate(lake)
    assert migrate(lake) == {"events": 3}
    found = lake.read("events").collect()
    assert sorted(row.tick for row in found) == [0, 1, 2], "what was not done is landed again"
    assert {row.attributes["n"].integer for row in found} == {0, 1, 2}
    assert {(row.origin, str(row.date)) for row in found} == {("00000007", "2025-11-15")}
    progress = read_progress(lake)
    assert {one.subscription for one in progress.values()} == {NAME, f"{NAME}-history"}
    assert json.loads(progress["events"].until) == UNTIL
    assert progress["history"].parts() == [WAITING]
    assert landed_until(lake) == {"00000007": 42}
    assert [(one.name, one.since_us) for one in landed_subscriptions(lake)] == [("billing", 3)]
    assert not (old / "_landing").exists()
    with pytest.raises(UsageError, match="nothing of an earlier layout"):
        migrate(lake)
    lake.append("events", events(3))
    assert compact(lake, "events").files_after == 1
    assert sorted(row.tick for row in lake.read("events").collect()) == [0, 1, 2, 3]


def test_a_migration_that_was_interrupted_is_finished(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: Rows come over once, whenever it was killed."""
    tables = Tables(old)
    with monkeypatch.context() as patch:
        patch.setattr("postroad.spark.lake.migrate._note_subscriptions", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            migrate(tables)
    migrate(tables)
    assert sum(file.rows for file in tables.files("events")) == 3
    assert read_progress(tables)["events"].subscription == NAME


def test_what_does_not_tell_how_far_it_was_is_left_alone(old: Path) -> None:
    """P4: P11."""
    file = old / "_landing" / "events" / "checkpoint" / "offsets" / "2"
    file.write_text("v1\n{}\nrubbish")
    with pytest.raises(StorageError, match="does not tell how far landing was"):
        migrate(Tables(old))
    assert not (old / "events" / "_delta_log").exists()
    with pytest.raises(UsageError, match="those were folders"):
        migrate(Tables("s3://bucket/lake"))
