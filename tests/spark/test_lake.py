"""P4, P11: tables of the lake appear whole or not at all, once, and hold what brokers published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from postroad.errors import StorageError, UsageError
from postroad.history.bulletins import DeliveryReport, Link, Links, decode_deliveries
from postroad.ids import MessageId, pubend_id
from postroad.spark.lake import rows
from postroad.spark.lake.compact import LOCK, compact
from postroad.spark.lake.landing import landed_until
from postroad.spark.lake.tables import SCHEMAS, Lake, alone, columns, write_folder
from postroad.spark.trace.topology import Place, latest, tracking_settings
from postroad.tracking.attachment_log import Change, Promise
from postroad.tracking.bloom import BloomFilter
from postroad.tracking.keys import ROUTING, HistoryKey
from postroad.tracking.record import FilterMeta, decode_record, encode_record
from postroad.tracking.settings import TrackingConfig

DAY_MS = 1_763_164_800_000  # 2025-11-15


def event(number: int) -> tuple[MessageId, str, dict[str, str | int | float | bool], bytes, int, int]:
    identity = MessageId(5, 7, DAY_MS + number, number)
    return identity, "a/b", {"n": number, "text": "x", "deep": 1.5, "on": True}, b"p", pubend_id(7, 0), number


def frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    return spark.createDataFrame(table)


def test_the_two_descriptions_of_a_table_agree(spark: SparkSession) -> None:
    """The schema Spark reads with and the one rows are made with."""
    for table, schema in SCHEMAS.items():
        made = frame(spark, rows.SCHEMAS[table].empty_table()).schema
        parsed = spark.createDataFrame([], schema).schema
        assert [(one.name, one.dataType) for one in made] == [(one.name, one.dataType) for one in parsed]
        assert columns(table) == rows.SCHEMAS[table].names


def test_a_segment_is_added_once_and_replaced_whole(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path / "lake[1]{a,b}*?\\")  # a pattern of names to Spark
    with pytest.raises(UsageError, match="there is no lake"):
        lake.check()
    for number in range(3):
        assert lake.append("events", frame(spark, rows.events([event(number)])), f"land-{number}")
    assert not lake.append("events", frame(spark, rows.events([event(0)])), "land-0")
    found = {row.tick: row for row in lake.read("events").collect()}
    assert set(found) == {0, 1, 2}
    assert found[2].id == str(event(2)[0])
    assert found[2].attributes["n"].integer == 2
    assert found[2].attributes["deep"]["float"] == 1.5
    assert (found[2].origin, str(found[2].date)) == ("00000007", "2025-11-15")

    together = lake.read("events").coalesce(1)
    lake.replace("events", together, "compact-1", ["land-0", "land-1", "land-2"])
    assert lake.segments("events") == ["compact-1"]
    assert sorted(row.tick for row in lake.read("events").collect()) == [0, 1, 2]
    assert not lake.append("events", together, "land-1"), "what was compacted is not landed again"
    with pytest.raises(UsageError, match="no filters yet"):
        lake.check("events", "filters")


def test_a_compaction_that_was_interrupted_changes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """Before the new segment has its name the old ones count; after, they do not, deleted or not."""
    lake = Lake(spark, tmp_path)
    lake.append("events", frame(spark, rows.events([event(0), event(1)])), "land-0")
    kept = tmp_path / "events" / "segment=land-0"

    def fails(path: str) -> None:
        Path(path).mkdir()
        raise RuntimeError("killed")

    lists = tmp_path / "events" / "_replaced"
    lists.mkdir()
    (lists / "compact-1.json").write_text('{"segments": ["land-0"]}')
    with pytest.raises(RuntimeError):
        write_folder(fails, tmp_path / "events" / "segment=compact-1")
    assert lake.segments("events") == ["land-0"]
    assert lake.read("events").count() == 2
    write_folder(lake.read("events").write.parquet, tmp_path / "events" / "segment=compact-1")
    assert kept.exists()
    assert lake.segments("events") == ["compact-1"]
    lake.clean("events")
    assert not kept.exists()


def test_what_a_killed_writer_left_goes_with_the_next(spark: SparkSession, tmp_path: Path) -> None:
    """P4: the batch is landed again under the same name; nothing of the first try stays on the disk."""
    lake = Lake(spark, tmp_path)
    left = tmp_path / "events" / "_aside-segment=land-0-0123"
    other = tmp_path / "events" / "_aside-segment=land-00-0123"  # of another, which may be at work
    for folder in (left, other):
        folder.mkdir(parents=True)
        (folder / "half.parquet").write_bytes(b"PAR1")
    assert lake.append("events", frame(spark, rows.events([event(0)])), "land-0")
    assert not left.exists()
    assert other.exists()
    assert lake.read("events").count() == 1


def test_one_compaction_at_a_time(spark: SparkSession, tmp_path: Path) -> None:
    """Two would each put a segment in the place of the same ones, and rows would be there twice, or not."""
    lake = Lake(spark, tmp_path)
    for number in range(2):
        lake.append("events", frame(spark, rows.events([event(number)])), f"land-{number}")
    with alone(tmp_path / LOCK, "compacts it"), pytest.raises(UsageError, match="another process compacts"):
        compact(lake, "events")
    assert compact(lake, "events").segments == 2
    # As a process that was killed between the rename and the deletions leaves it.
    shutil.copytree(tmp_path / "events" / "segment=compact-1", tmp_path / "events" / "segment=land-0")
    assert lake.segments("events") == ["compact-1"]
    assert compact(lake, "events").segments == 0
    assert not (tmp_path / "events" / "segment=land-0").exists()
    assert lake.read("events").count() == 2


def test_what_was_landed_is_remembered_and_no_more(spark: SparkSession, tmp_path: Path) -> None:
    """P4: a query's last batch is not landed again however often it was compacted; lists do not pile up."""
    lake = Lake(spark, tmp_path)
    some = frame(spark, rows.events([event(0)])).coalesce(1)
    for number, names in enumerate([("4e-q-{}", "4e-q-{}-gaps"), ("4e-q-{}",), ("other-{}",), ()]):
        for name in names:
            assert lake.append("events", some, name.format(f"{number:09}"))
        lake.replace("events", some, f"compact-{number}", lake.segments("events"))
    (last,) = (tmp_path / "events" / "_replaced").iterdir()
    assert last.name == "compact-3.json"
    remembered = ["4e-q-000000000-gaps", "4e-q-000000001", "other-000000002"]
    assert json.loads(last.read_text()) == {"segments": ["compact-2"], "landed": remembered}
    assert not any(lake.append("events", some, name) for name in remembered)
    assert lake.segments("events") == ["compact-3"]


def test_what_lands_during_a_compaction_stays(spark: SparkSession, tmp_path: Path) -> None:
    """P4, P6: also filters, which are read otherwise than the other tables."""

    def stored(sequence: int) -> pa.Table:
        one = BloomFilter(100, 10, 3)
        one.add(bytes(16))
        key = HistoryKey(ROUTING, 9, 7)
        meta = FilterMeta(key=key, sequence=sequence, m=100, n=10, k=3, count=1, lo_ms=1, hi_ms=2)
        return rows.filters(8, "b8", [(meta, encode_record(meta, one.bits))])

    class Busy(Lake):
        """Something lands as soon as it was asked what there is."""

        def segments(self, table: str) -> list[str]:
            found = super().segments(table)
            Lake(spark, tmp_path).append(table, frame(spark, stored(3)), "land-3")
            return found

    for sequence in (1, 2):
        Lake(spark, tmp_path).append("filters", frame(spark, stored(sequence)), f"land-{sequence}")
    done = compact(Busy(spark, tmp_path), "filters")
    assert (done.segments, done.rows_before) == (2, 2)
    lake = Lake(spark, tmp_path)
    assert lake.segments("filters") == ["compact-1", "land-3"]
    assert sorted(row.sequence for row in lake.read("filters").collect()) == [2, 3]


def test_output_is_whole_or_absent(tmp_path: Path) -> None:
    def fails(path: str) -> None:
        Path(path).mkdir()
        (Path(path) / "half").write_text("x")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_folder(fails, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        write_folder(fails, tmp_path / "out")


def test_rows_of_what_brokers_publish() -> None:
    one = BloomFilter(100, 10, 3)
    one.add(bytes(range(16)))
    meta = FilterMeta(
        key=HistoryKey(ROUTING, 9, 7), sequence=4, m=100, n=10, k=3, count=1, lo_ms=1, hi_ms=2, replaces=3
    )
    (row,) = rows.filters(8, "b8", [(meta, encode_record(meta, one.bits))]).to_pylist()
    assert (row["broker"], row["origin"], row["neighbour"], row["replaces"]) == (
        *("00000008", "00000009", "00000007"),
        3,
    )
    assert decode_record(row["record"]) == (meta, one.bits)
    changes = [
        Change(what="attach", at_us=DAY_MS * 1000, kind="subscriber", who="s"),
        Change(what="late", at_us=1, until_us=2, kind="subscriber", who="s", noted_us=3),
        Change(what="start", at_us=1, kind="set", promise=Promise(persist_us=1, skew_us=2)),
    ]
    landed = rows.attachments(8, "b8", 5, changes, whole=True).to_pylist()
    assert [rows.change(one) for one in landed] == changes
    row = landed[0]
    assert (row["number"], row["what"], row["who"], str(row["date"])) == (5, "attach", "s", "2025-11-15")
    state = Links(broker="00000008", name="b8", boot=1, at_us=7, links=(Link(broker="00000009", cost=2),))
    (row,) = rows.topology(6, state).to_pylist()
    assert row["links"] == [{"broker": "00000009", "cost": 2}]


def test_a_lake_knows_how_far_its_landing_is(tmp_path: Path) -> None:
    """P5: the last batch that is done, not the one that is under way."""
    assert landed_until(tmp_path) == {}
    place = tmp_path / "_landing" / "history" / "checkpoint"
    for folder, numbers in (("commits", (8, 9, 10)), ("offsets", (8, 9, 10, 11))):
        (place / folder).mkdir(parents=True)
        for number in numbers:
            ends = {"00000007-00000001": number, "00000008-00000001": 5, "since": -1}
            (place / folder / str(number)).write_text(f"v1\n{{}}\n{json.dumps(ends)}")
            (place / folder / f".{number}.crc").write_text("x")
    assert landed_until(tmp_path) == {"00000007": 10, "00000008": 5}
    (place / "offsets" / "10").write_text("v1\n{}\nrubbish")
    with pytest.raises(StorageError, match="does not tell how far landing is"):
        landed_until(tmp_path)


def test_the_lake_knows_how_brokers_read_their_records(spark: SparkSession, tmp_path: Path) -> None:
    """P5: what each said last, so that a trace needs no flags; older brokers, and lakes, do not tell."""

    def said(broker: int, number: int, **settings: Any) -> pa.Table:
        state = Links(broker=f"{broker:08x}", name=f"b{broker}", boot=1, at_us=7, links=(), **settings)
        return rows.topology(number, state)

    lake = Lake(spark, tmp_path)
    older = frame(spark, said(1, 1).drop(["skew_us", "jitter_us", "routing"]))
    write_folder(older.write.partitionBy("date").parquet, tmp_path / "topology" / "segment=land-0")
    assert tracking_settings(latest(lake).values()) == TrackingConfig()
    told = [
        said(1, 3, skew_us=20, jitter_us=5, routing="set"),
        said(1, 2, skew_us=90, jitter_us=90, routing="all"),
        said(2, 1, skew_us=10, jitter_us=8, routing="set"),
        said(3, 1),
    ]
    lake.append("topology", frame(spark, pa.concat_tables(told)), "land-1")
    places = latest(lake)
    assert list(places) == ["00000001", "00000002", "00000003"]
    assert tracking_settings(places.values()) == TrackingConfig(skew_us=20, jitter_us=8, routing="set")
    assert tracking_settings([]) == TrackingConfig()
    mixed = [Place("b1", {}, 1, 1, "set"), Place("b2", {}, 1, 1, "neighbours")]
    assert tracking_settings(mixed).routing == "all"


def test_rows_of_delivery_reports() -> None:
    ids = [MessageId(1, 2, DAY_MS + number, number) for number in range(3)]
    report = DeliveryReport(1 << 16)
    pubend = pubend_id(7, 0)
    report.events([("s", 1), ("t", 2)], pubend, b"".join(map(bytes, ids)), np.array([5, 6, 9]), DAY_MS * 1000)
    report.gap([("s", 1)], pubend, 9, 12, DAY_MS * 1000 + 1)
    report.acknowledged([("t", 2)], pubend, 6, DAY_MS * 1000 + 2)
    (payload,) = report.take()
    table = rows.deliveries(7, 11, decode_deliveries(payload))
    assert len(table.to_batches()) == 1, "an empty batch is the end for Spark"
    found = table.to_pylist()
    sent = [(row["id"], row["subscriber"], row["session"], row["tick"]) for row in found[:6]]
    assert sent == [
        (str(identity), name, session, tick)
        for name, session in (("s", 1), ("t", 2))
        for identity, tick in zip(ids, (5, 6, 9), strict=True)
    ]
    told = [(row["what"], row["subscriber"], row["start_tick"], row["tick"]) for row in found[6:]]
    assert told == [("gap", "s", 9, 12), ("ack", "t", 0, 6)]
    assert {(row["pubend"], row["origin"], row["number"]) for row in found} == {
        ("00000007-00000000", "00000007", 11)
    }
