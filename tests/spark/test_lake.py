"""P4, P11: tables of the lake appear whole or not at all, once, and hold what brokers published."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from pyspark.sql import DataFrame, SparkSession

from postroad.errors import StorageError, UsageError
from postroad.history.bulletins import DeliveryReport, Link, Links, decode_deliveries
from postroad.ids import MessageId, pubend_id
from postroad.spark.lake import compact as compaction
from postroad.spark.lake import files as files_of
from postroad.spark.lake import rows
from postroad.spark.lake.compact import compact
from postroad.spark.lake.files import Added, write_rows
from postroad.spark.lake.ledger import Ledger, Progress, begin, landed_until, read_progress, settle
from postroad.spark.lake.store import Store, store_at
from postroad.spark.lake.tables import (
    COMPACTED,
    LAYOUT_PROPERTY,
    SCHEMAS,
    Batch,
    Lake,
    OvertakenError,
    Tables,
    columns,
    fitted,
    write_folder,
)
from postroad.spark.trace.bulk import current
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


def ticks(lake: Lake) -> list[int]:
    return sorted(row.tick for row in lake.read("events").collect())


def test_a_batch_is_added_once_and_replaced_whole(spark: SparkSession, tmp_path: Path) -> None:
    """P4."""
    lake = Lake(spark, tmp_path / "lake[1]{a,b}*? #ü")  # a pattern of names to Spark
    with pytest.raises(UsageError, match="there is no lake"):
        lake.check()
    for number in range(3):
        assert lake.append("events", rows.events([event(number)]), Batch("land", number))
    assert not lake.append("events", rows.events([event(0)]), Batch("land", 0))
    assert not lake.append("events", rows.events([]), Batch("land", 9))
    found = {row.tick: row for row in lake.read("events").collect()}
    assert set(found) == {0, 1, 2}
    assert found[2].id == str(event(2)[0])
    assert found[2].attributes["n"].integer == 2
    assert found[2].attributes["deep"]["float"] == 1.5
    assert (found[2].origin, str(found[2].date)) == ("00000007", "2025-11-15")

    done = compact(lake, "events")
    assert (done.files_before, done.files_after, done.rows_before, done.rows_after) == (3, 1, 3, 3)
    assert ticks(lake) == [0, 1, 2]
    assert not lake.append("events", rows.events([event(2)]), Batch("land", 2)), "it is compacted, not gone"
    assert lake.append("events", rows.events([event(3)]), Batch("other", 0)), "of somebody else"
    assert ticks(lake) == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="no filters yet"):
        lake.check("events", "filters")


def test_two_who_replace_the_same_files_exclude_each_other(spark: SparkSession, tmp_path: Path) -> None:
    """P4, P6: by the commit, with no lock; else rows would be there twice, or not at all."""
    lake = Lake(spark, tmp_path)
    for number in range(2):
        lake.append("events", rows.events([event(number)]))
    known = lake.files("events")
    written = [lake.write("events", lake.read("events").coalesce(1), COMPACTED) for _ in range(2)]
    lake.append("events", rows.events([event(2)]))  # what lands meanwhile
    assert lake.commit("events", written[0], removed=known)
    with pytest.raises(OvertakenError):
        lake.commit("events", written[1], removed=known)
    assert ticks(lake) == [0, 1, 2]
    assert sorted(file.compacted for file in lake.files("events")) == [False, True]


def test_one_of_two_processes_lands(tmp_path: Path) -> None:
    """P4: whoever commits a batch first; the other one is told, and has changed nothing."""
    first = Ledger(Tables(tmp_path))
    begin(first, "one")
    second, third = Ledger(Tables(tmp_path)), Ledger(Tables(tmp_path))
    begin(second, "two")
    assert second.rows["events"].subscription == "one"
    second.write(Progress(feed="events", subscription="one", batch=1, until="{}"))
    for late in (first, third):
        with pytest.raises(UsageError, match="another process lands in"):
            late.write(Progress(feed="events", subscription="one", batch=1, until='{"x": 1}'))
    assert Ledger(Tables(tmp_path)).rows["events"].until == "{}"
    with ThreadPoolExecutor(4) as pool:
        ledgers = [Ledger(Tables(tmp_path)) for _ in range(4)]
        tries = [pool.submit(one.write, Progress(feed="events", subscription="one")) for one in ledgers]
        assert sorted(one.exception() is None for one in tries) == [False, False, False, True]


def test_a_lake_without_its_ledger_is_not_landed_into(tmp_path: Path) -> None:
    """P4: as a copy without `landing/`: all would be landed a second time."""
    tables = Tables(tmp_path)
    begin(Ledger(tables), "one")
    tables.append("events", rows.events([event(0)]), Batch("one", 1))
    begin(Ledger(tables), "one")
    shutil.rmtree(tmp_path / "landing")
    with pytest.raises(UsageError, match="has events, but its table landing, which tells how far"):
        begin(Ledger(tables), "two")
    assert not (tmp_path / "landing").exists()


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    """P11."""
    tables = Tables(tmp_path)
    begin(Ledger(tables), "one")
    (ledger,) = (tmp_path / "landing").glob("*.parquet")
    ledger.write_bytes(b"x" * 100)
    with pytest.raises(StorageError, match=r"landing cannot be read: .*[Pp]arquet") as told:
        Ledger(tables)
    assert "\n" not in str(told.value)


def test_what_was_decided_is_carried_out_once(tmp_path: Path) -> None:
    """P5.

    P4: by the next process, where one was killed before, between or after the commits of its tables.
    """
    tables = Tables(tmp_path)
    files = {
        "events": write_rows(tables.store, "events", [rows.events([event(0), event(1)])]),
        "topology": write_rows(tables.store, "topology", [said(1, 1)]),
    }
    decided = Progress(
        feed="history",
        subscription="d",
        batch=4,
        start='{"00000001-ffffffff": 5, "since": 1}',
        until='{"00000001-ffffffff": 9, "since": 1}',
        files=msgspec.json.encode(files).decode(),
    )
    Ledger(tables).write(decided)
    assert not tables.files("events")
    assert landed_until(tables) == {"00000001": 5}, "it is not there yet"
    tables.commit("topology", files["topology"], Batch("d", 4))
    again = read_progress(tables)["history"]
    assert settle(tables, again) == {"events": 2}
    assert settle(tables, again) == {}
    assert landed_until(tables) == {"00000001": 9}
    assert sum(file.rows for file in tables.files("events")) == 2
    Ledger(tables).write(msgspec.structs.replace(decided, until="rubbish"))
    with pytest.raises(StorageError, match="does not tell how far landing is"):
        landed_until(tables)


def test_what_is_not_there_is_not_landed(tmp_path: Path) -> None:
    """P4, P10: executors on other machines have a folder of their own under the lake's name, or the lake was
    removed or put back: nothing is decided that cannot be carried out, and no lake is made in its place."""
    tables = Tables(tmp_path / "lake")
    ledger = Ledger(tables)
    begin(ledger, "d")
    files = write_rows(tables.store, "events", [rows.events([event(0)])])
    listed = msgspec.json.encode({"events": files}).decode()
    batch = Progress(feed="events", subscription="d", batch=1, files=listed)
    written = tmp_path / "lake" / "events" / files[0].path
    written.rename(tmp_path / "elsewhere")
    for act in (lambda: ledger.write(batch), lambda: tables.commit("events", files)):
        with pytest.raises(StorageError, match=r"has no date=.*the same for this process and for executors"):
            act()
    assert Ledger(tables).rows["events"].batch == 0
    assert not (tmp_path / "lake" / "events" / "_delta_log").exists()
    (tmp_path / "elsewhere").rename(written)
    shutil.copytree(tmp_path / "lake", tmp_path / "copy")
    ledger.write(batch)
    (tmp_path / "lake").rename(tmp_path / "aside")
    later = msgspec.structs.replace(batch, batch=2, files="{}")
    with pytest.raises(StorageError, match=r"the lake at .* is gone"):
        ledger.write(later)
    assert not (tmp_path / "lake").exists()
    (tmp_path / "copy").rename(tmp_path / "lake")
    with pytest.raises(StorageError, match="or an older one is in its place"):
        ledger.write(later)
    assert Ledger(tables).rows["events"].batch == 0


def test_what_killed_writers_left_is_removed_in_time(spark: SparkSession, tmp_path: Path) -> None:
    """P4: files of no version, or of one that is no longer kept; a version that is kept can be read."""
    lake = Lake(spark, tmp_path)
    for number in range(2):
        lake.append("events", rows.events([event(number)]))
    orphan = tmp_path / "events" / write_rows(lake.store, "events", [rows.events([event(7)])])[0].path
    old = [tmp_path / "events" / file.path for file in lake.files("events")]
    version = DeltaTable(str(tmp_path / "events")).version()
    assert compact(lake, "events").removed == 0
    assert DeltaTable(str(tmp_path / "events"), version=version).count() == 2
    assert orphan.exists()
    strangers = [tmp_path / "events" / name for name in ("notes.txt", "date=2025-11-15/theirs.parquet")]
    for file in strangers:
        file.write_text("x")

    def age(hours: int) -> None:
        long_ago = time.time() - hours * 3600
        for file in (orphan, *strangers, *old):
            os.utime(file, (long_ago, long_ago))

    age(23)
    compact(lake, "events", keep_hours=1)
    assert orphan.exists(), "it may be of a batch under way"
    age(25)
    assert compact(lake, "events", keep_hours=1).removed == 1
    assert not orphan.exists()
    assert all(file.exists() for file in strangers), "nobody else's files are touched"
    assert ticks(lake) == [0, 1]
    with pytest.raises(UsageError, match="an hour at least"):
        compact(lake, "events", keep_hours=0)


def test_a_later_version_adds_columns(spark: SparkSession, tmp_path: Path) -> None:
    """P4: rows of before have NULL there; whoever knows less reads what it knows."""
    url = str(tmp_path / "topology")
    lacking = rows.SCHEMAS["topology"]
    for name in ("skew_us", "jitter_us", "routing"):
        lacking = lacking.remove(lacking.get_field_index(name))
    layout = {LAYOUT_PROPERTY: "2"}
    kept = {"partition_by": ["date"], "configuration": layout, "raise_if_key_not_exists": False}
    DeltaTable.create(url, lacking, **kept)  # type: ignore[arg-type]
    write_deltalake(url, said(1, 1).select(lacking.names), mode="append")
    lake = Lake(spark, tmp_path)
    assert latest(lake)["00000001"].routing is None
    lake.append("topology", said(2, 1, routing="set", skew_us=3, jitter_us=4))
    assert {name: place.routing for name, place in latest(lake).items()} == {
        "00000001": None,
        "00000002": "set",
    }
    found = DeltaTable(url)
    assert {field.name for field in found.schema().fields} == set(columns("topology"))
    found.alter.add_columns([Field("later", "string")])
    lake.append("topology", said(3, 1, routing="all", skew_us=3, jitter_us=4))
    assert latest(lake)["00000003"].routing == "all"


@pytest.mark.parametrize(
    ("configuration", "said_of_it"),
    [({}, "is a Delta table of something else"), ({LAYOUT_PROPERTY: "3"}, "from a later Postroad")],
)
def test_what_is_not_ours_is_left_alone(
    tmp_path: Path, configuration: dict[str, str], said_of_it: str
) -> None:
    """P11."""
    url = str(tmp_path / "events")
    DeltaTable.create(url, rows.SCHEMAS["events"], configuration=configuration, raise_if_key_not_exists=False)
    for act in (
        lambda: Tables(tmp_path).files("events"),
        lambda: Tables(tmp_path).append("events", rows.events([event(0)])),
        lambda: Tables(tmp_path).check_place(),
    ):
        with pytest.raises(UsageError, match=said_of_it):
            act()
    assert DeltaTable(url).version() == 0


def test_a_column_of_another_type_is_told(tmp_path: Path) -> None:
    """P11."""
    schema = rows.SCHEMAS["events"].set(8, pa.field("tick", pa.string()))
    kept: Any = {"configuration": {LAYOUT_PROPERTY: "2"}, "raise_if_key_not_exists": False}
    DeltaTable.create(str(tmp_path / "events"), schema, **kept)
    with pytest.raises(UsageError, match="its tick is string"):
        Tables(tmp_path).files("events")


def test_a_lake_that_spark_cannot_open_itself(spark: SparkSession, tmp_path: Path) -> None:
    """P4, P10: as in an object store: all goes through the store's own reader and writer."""
    for table in SCHEMAS:
        (tmp_path / table).mkdir()  # which a store has no need of
    lake = Lake(spark, Store(str(tmp_path), None))
    for number in range(3):
        assert lake.append("events", rows.events([event(number)]), Batch("land", number))
    assert not lake.append("events", rows.events([event(2)]), Batch("land", 2))
    assert lake.read("filters").count() == 0
    found = lake.read("events").orderBy("tick").collect()
    beside = Lake(spark, tmp_path).read("events").orderBy("tick").collect()
    assert found == beside
    assert [row.attributes["n"].integer for row in found] == [0, 1, 2]
    assert compact(lake, "events").files_before == 3
    assert ticks(lake) == [0, 1, 2]
    assert fitted(pa.table({"broker": ["x"]}), "topology", {"date": "2025-11-15"}).to_pylist()[0] == {
        **dict.fromkeys(columns("topology")),
        "broker": "x",
        "date": date(2025, 11, 15),
    }


def test_places_of_lakes(tmp_path: Path) -> None:
    """P4, P11: folders and stores; settings of a store come from the environment and travel with it."""
    assert store_at(tmp_path).folder == tmp_path
    assert store_at(f"file://{tmp_path}").folder == tmp_path
    given = {"AWS_REGION": "x", "AWS_SECRET_ACCESS_KEY": "hush", "PATH": "/bin"}
    place = store_at("s3://bucket/lake/", given)
    assert (str(place), place.folder) == ("s3://bucket/lake", None)
    assert dict(place.options) == {"AWS_REGION": "x", "AWS_SECRET_ACCESS_KEY": "hush"}
    assert "hush" not in repr(place)
    for place in (
        "ftp://x/y",
        "s3://",
        "S3://bucket/lake",
        "s3:/bucket/lake",
        "file:/x",
        Path("s3://b/l"),
        "",
    ):
        with pytest.raises(UsageError, match="begins with s3"):
            store_at(place)
    assert store_at("./s3:/x").folder == Path("s3:/x").absolute()
    with pytest.raises(UsageError, match="cannot be a lake"):
        store_at(tmp_path / "50%")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is no folder"):
        Tables(tmp_path / "file").check_place()


def test_no_batch_is_decided_whose_files_are_gone_from_a_store(tmp_path: Path) -> None:
    """P4: whoever cleaned up meanwhile. But what is landed was perhaps put together with others since."""
    for table in SCHEMAS:
        (tmp_path / table).mkdir()  # which a store has no need of
    tables = Tables(Store(str(tmp_path), None))
    ledger = Ledger(tables)
    begin(ledger, "d")
    files = write_rows(tables.store, "topology", [said(1, 1)])
    listed = msgspec.json.encode({"topology": files}).decode()
    batch = Progress(feed="history", subscription="d-history", batch=1, files=listed)
    written = tmp_path / "topology" / files[0].path
    written.rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"has no date=.*it was removed"):
        ledger.write(batch)
    assert Ledger(tables).rows["history"].batch == 0
    (tmp_path / "elsewhere").rename(written)
    ledger.write(batch)
    assert settle(tables, batch) == {"topology": 1}
    written.unlink()
    assert settle(tables, batch) == {}


def test_a_compaction_reports_what_it_did_and_makes_nothing_larger(tmp_path: Path) -> None:
    """P4, P6: files are written as landing writes them; what lands meanwhile is not counted."""
    tables = Tables(tmp_path)
    for start in range(0, 20_000, 5_000):
        tables.append("events", rows.events([event(number) for number in range(start, start + 5_000)]))
    before = tables.files("events")
    opened = tables.open("events")
    assert opened is not None
    tables.append("events", rows.events([event(20_000)]))
    tables.open = lambda _: opened  # type: ignore[method-assign]
    old, new = compaction._merge_files(tables, "events")
    assert old == (4, 20_000, sum(file.size for file in before))
    assert new[:2] == (1, 20_000)
    assert new.bytes <= old.bytes
    assert sum(file.rows for file in Tables(tmp_path).files("events")) == 20_001


def test_versions_can_be_read_as_long_as_they_are_kept(tmp_path: Path) -> None:
    """P4: both their files and the log of them. The ledger's are of no use to anybody, and each look at a
    table lists its log."""
    tables = Tables(tmp_path)
    begin(Ledger(tables), "d")
    tables.append("topology", said(1, 1))
    compaction._clean_up(tables, "topology", 720)
    old = time.time() - 10 * 86_400
    for file in tmp_path.rglob("*"):
        os.utime(file, (old, old))
    for table in ("topology", "landing"):
        opened = tables.open(table)
        assert opened is not None
        opened.create_checkpoint()
        opened.cleanup_metadata()
    assert DeltaTable(str(tmp_path / "topology"), version=1).count() == 1
    ledger = Ledger(tables)
    assert len(ledger.rows) == 2
    assert len(list((tmp_path / "landing" / "_delta_log").glob("*.json"))) <= 1


@pytest.mark.parametrize("in_store", [False, True])
def test_a_lake_lies_in_no_table(tmp_path: Path, in_store: bool) -> None:
    """P4, P11: neither in somebody else's nor in one of a lake: that one's clean-up would remove it."""
    write_deltalake(str(tmp_path / "theirs"), pa.table({"a": [1]}))
    Tables(tmp_path / "lake").append("events", rows.events([event(0)]))
    there = sorted(tmp_path.rglob("*"))
    for place in ("theirs", "theirs/lake", "lake/events", "lake/events/lake"):
        tables = Tables(Store(str(tmp_path / place), None) if in_store else tmp_path / place)
        with pytest.raises(UsageError, match=r"cannot be a lake: .*(theirs|events) is a Delta table"):
            tables.check_place()
    assert sorted(tmp_path.rglob("*")) == there
    Tables(tmp_path / "lake").check_place()


NOWHERE = "http://127.0.0.1:1"
GOOGLE_KEY = {"private_key": "x", "private_key_id": "x", "client_email": "x", "disable_oauth": True}


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("s3://bucket/lake", {"AWS_ENDPOINT_URL": NOWHERE, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "r"}),
        ("s3a://bucket/lake", {"AWS_ENDPOINT_URL": NOWHERE, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "r"}),
        (
            "gs://bucket/lake",
            {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(GOOGLE_KEY | {"gcs_base_url": NOWHERE})},
        ),
        (
            "abfss://container@account.dfs.core.windows.net/lake",
            {"AZURE_STORAGE_ACCOUNT_KEY": "eA==", "AZURE_ENDPOINT": NOWHERE, "AZURE_ALLOW_HTTP": "true"},
        ),
        ("hdfs://127.0.0.1:1/lake", {}),
    ],
)
def test_a_store_that_is_away_is_one_line(url: str, environment: dict[str, str]) -> None:
    """P4, P11: each kind of store is asked with the settings of the environment; none of them is there."""
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"} if url.startswith("s3") else {}
    store = store_at(url, {**environment, **keys})
    tables = Tables(Store(store.url, None, {**store.options, "max_retries": "0"}))
    for act in (
        lambda: tables.files("events"),
        lambda: tables.append("events", rows.events([event(0)])),
    ):
        with pytest.raises(StorageError, match=f"{re.escape(url)}/events cannot be .*refused") as told:
            act()
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("in_store", [False, True])
def test_files_of_something_else_are_left_alone(tmp_path: Path, in_store: bool) -> None:
    """P11: a log over them would make them files that no version has, which compaction removes."""
    own = tmp_path / "topology" / "date=2025-11-15" / f"part-{'0' * 32}.parquet"  # of a killed writer
    other = tmp_path / "events" / "date=2025-11-15" / "part-00000-c000.snappy.parquet"
    for file in (own, other):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x")
    tables = Tables(Store(str(tmp_path), None) if in_store else tmp_path)
    for act in (
        tables.check_place,
        lambda: tables.append("events", rows.events([event(0)])),
    ):
        with pytest.raises(UsageError, match=r"has files of something else, such as date=2025-11-15"):
            act()
    assert [one for one in (tmp_path / "events").rglob("*") if one.is_file()] == [other]
    assert tables.append("topology", said(1, 1))


def test_a_place_that_cannot_be_written_is_one_line() -> None:
    """P11: whoever may not write there is told so; not even root may here."""
    tables = Tables("/proc/lake")
    with pytest.raises(StorageError, match=r"/proc/lake/events cannot be written: ") as told:
        tables.append("events", rows.events([event(0)]))
    assert "\n" not in str(told.value)


def test_files_have_bounds_of_their_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: whoever looks for something opens only files that may have it; a wild date opens no more than so
    many files at once."""
    monkeypatch.setattr(files_of, "MAX_OPEN", 2)
    tables = Tables(tmp_path)
    days = [(MessageId(5, 7, DAY_MS + n * 86_400_000, n), *event(n)[1:]) for n in (0, 1, 2, 1, 0)]
    tables.append("events", rows.events([*days, (*event(5)[:1], "x" * 100, *event(5)[2:])]))
    found = tables.files("events")
    assert sum(file.rows for file in found) == 6
    assert {file.values["date"] for file in found} == {"2025-11-15", "2025-11-16", "2025-11-17"}
    for file in found:
        table = pq.ParquetFile(tmp_path / "events" / file.path).read()
        assert file.last["tick"] == max(table["tick"].to_pylist())
        long = max(table["topic"].to_pylist())
        assert file.last.get("topic") == (long if len(long) < 65 else None)
        assert "payload" not in file.last


def said(broker: int, number: int, **settings: Any) -> pa.Table:
    state = Links(broker=f"{broker:08x}", name=f"b{broker}", boot=1, at_us=7, links=(), **settings)
    return rows.topology(number, state)


def test_a_state_that_was_replaced_does_not_return(spark: SparkSession, tmp_path: Path) -> None:
    """P6: compacted with the files of one day, and replaced by one of another day, which becomes a union."""
    lake = Lake(spark, tmp_path)

    def stored(sequence: int, day: int, **settings: Any) -> pa.Table:
        bloom = BloomFilter(4000, 100, 7)
        bloom.add(sequence.to_bytes(16, "big"))
        meta = FilterMeta(
            key=HistoryKey(ROUTING, 9, 7),
            sequence=sequence,
            m=4000,
            n=100,
            k=7,
            count=1,
            lo_ms=DAY_MS,
            hi_ms=DAY_MS + sequence,
            stored_us=(DAY_MS + day * 86_400_000) * 1000,
            **settings,
        )
        return rows.filters(8, "b8", [(meta, encode_record(meta, bloom.bits))])

    lake.append("filters", stored(1, 1, final=False))
    compact(lake, "filters")
    lake.append("filters", stored(2, 2, replaces=1))
    lake.append("filters", stored(3, 2))
    assert {row.date.day for row in lake.read("filters").collect()} == {16, 17}
    compact(lake, "filters")
    assert [row.sequence for row in current(lake).collect()] == [3]
    assert compact(lake, "filters").files_before == 0


def test_what_lands_during_a_compaction_stays(spark: SparkSession, tmp_path: Path) -> None:
    """P4, P6: also filters, which are read otherwise than the other tables."""

    def stored(sequence: int) -> pa.Table:
        one = BloomFilter(100, 10, 3)
        one.add(bytes(16))
        key = HistoryKey(ROUTING, 9, 7)
        meta = FilterMeta(key=key, sequence=sequence, m=100, n=10, k=3, count=1, lo_ms=1, hi_ms=2)
        return rows.filters(8, "b8", [(meta, encode_record(meta, one.bits))])

    class Busy(Lake):
        """Something lands while filters are joined."""

        def write(self, table: str, rows: DataFrame, kind: str) -> list[Added]:
            Lake(spark, tmp_path).append(table, stored(3))
            return super().write(table, rows, kind)

    for sequence in (1, 2):
        Lake(spark, tmp_path).append("filters", stored(sequence))
    done = compact(Busy(spark, tmp_path), "filters")
    assert (done.files_before, done.rows_before) == (2, 2)
    lake = Lake(spark, tmp_path)
    assert sorted(file.compacted for file in lake.files("filters")) == [False, True]
    assert sorted(row.sequence for row in lake.read("filters").collect()) == [2, 3]


def test_output_is_whole_or_absent(tmp_path: Path) -> None:
    """P11."""

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


def test_the_lake_knows_how_brokers_read_their_records(spark: SparkSession, tmp_path: Path) -> None:
    """P5: what each said last, so that a trace needs no flags; older brokers, and lakes, do not tell."""

    lake = Lake(spark, tmp_path)
    lake.append("topology", said(1, 1))
    assert tracking_settings(latest(lake).values()) == TrackingConfig()
    told = [
        said(1, 3, skew_us=20, jitter_us=5, routing="set"),
        said(1, 2, skew_us=90, jitter_us=90, routing="all"),
        said(2, 1, skew_us=10, jitter_us=8, routing="set"),
        said(3, 1),
    ]
    lake.append("topology", pa.concat_tables(told))
    places = latest(lake)
    assert list(places) == ["00000001", "00000002", "00000003"]
    assert tracking_settings(places.values()) == TrackingConfig(skew_us=20, jitter_us=8, routing="set")
    assert tracking_settings([]) == TrackingConfig()
    mixed = [Place("b1", {}, 1, 1, "set"), Place("b2", {}, 1, 1, "neighbours")]
    assert tracking_settings(mixed).routing == "all"


def test_rows_of_delivery_reports() -> None:
    """P4."""
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
