"""P5, P6: the bulk trace on Spark against the live trace and the truth; before and after compaction."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from tests.worlds.spark_networks import World
from tests.worlds.spark_traces import (
    COARSE,
    FINE,
    Telling,
    as_row,
    ids_file,
    lake_of,
    landed_to,
    rows_of,
    same,
    unknown,
)
from tests.worlds.tracking import NOW_US, Disk
from tests.worlds.tracking import identity as identity_of

from postroad.errors import UsageError
from postroad.history.bulletins import (
    DeliveryReport,
    Link,
    Links,
    broker_text,
    decode_deliveries,
    running_number,
)
from postroad.ids import HISTORY, MessageId, pubend_text
from postroad.spark.lake import rows
from postroad.spark.lake.compact import compact
from postroad.spark.lake.landing import unlanded_history
from postroad.spark.lake.tables import Lake
from postroad.spark.trace import bulk as bulk_trace
from postroad.spark.trace.bulk import read_ids, trace
from postroad.spark.trace.views import NOT_LANDED, UNREAD
from postroad.tracking.attachment_log import Change, decode_changes
from postroad.tracking.record import decode_meta, encode_description
from postroad.tracking.settings import TrackingConfig
from postroad.units import SECOND_US


def passes_silence(row: dict[str, Any]) -> bool:
    """The broker in the id confirms it, and another has it from one that does not know of it any more."""
    steps = {None, *(step["broker"] for step in row["route"])}
    home = f"b{MessageId.parse(row['id']).broker}"
    confirmed = any(step["broker"] == home and step["from"] is None for step in row["route"])
    return confirmed and any(step["from"] not in steps for step in row["route"])


@pytest.mark.parametrize(
    ("strategy", "shape", "whole"),
    [("bloom", COARSE, False), ("bloom", COARSE, True), ("exact", FINE, False), ("exact", FINE, True)],
)
def test_bulk_trace_is_the_live_trace(
    spark: SparkSession,
    tmp_path: Path,
    strategy: str,
    shape: dict[str, int],
    whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P5: every message of a network in trouble, and ids nobody sent; `whole`: groups of all origins."""
    monkeypatch.setattr(bulk_trace, "WHOLE_BYTES", 1 << 30 if whole else 0)
    monkeypatch.setattr(bulk_trace, "LEAST_BUCKET_MS", 12_000)
    monkeypatch.setattr(bulk_trace, "MOST_BUCKET_MS", 12_000)
    monkeypatch.setattr(bulk_trace, "HOT_IDS", 12)  # so that groups are split
    config = TrackingConfig(strategy=strategy, persist_us=2_000_000, **shape)
    world = World(11, config, 5, extra=2)
    world.happen(120)
    world.happen(30, faults=False, best_effort=1.0)
    world.stop()
    ids = [*world.truth, *unknown(world)]
    lake = lake_of(spark, tmp_path / "lake", world)
    found = rows_of(lake, ids_file(tmp_path / "ids", ids), config)
    live = [as_row(result) for at in range(0, len(ids), 100) for result in world.live(*ids[at : at + 100])]
    assert set(found) == {row["id"] for row in live}
    for row in live:
        same(row, found[row["id"]])
    assert any(map(passes_silence, live))
    assert sum(bool(row["route"]) for row in live) > 50  # else there was little to compare
    assert sum(row["verdict"] == "complete" for row in live) > 50
    assert any(row["lost"] for row in live)
    assert any(one["repair"] for row in live for one in row["receivers"])


def test_ids_from_parquet_and_bad_input(spark: SparkSession, tmp_path: Path) -> None:
    """P11: one clear line for what cannot be."""
    lines = tmp_path / "ids"
    lines.write_text("0000002A-00000007-0193c1d2e3f4-0001\n\n  00000001-00000007-0193c1d2e3f4-0002\n")
    expected = ["00000001-00000007-0193c1d2e3f4-0002", "0000002a-00000007-0193c1d2e3f4-0001"]
    assert sorted(row.id for row in read_ids(spark, lines).collect()) == expected
    pq.write_table(pa.table({"id": [None, *expected, " "]}), tmp_path / "ids.parquet")
    assert sorted(row.id for row in read_ids(spark, tmp_path / "ids.parquet").collect()) == expected
    pq.write_table(pa.table({"key": expected}), tmp_path / "other.parquet")
    with pytest.raises(UsageError, match="no column `id`; it has key"):
        read_ids(spark, tmp_path / "other.parquet")
    with pytest.raises(UsageError, match="there is no file"):
        read_ids(spark, tmp_path / "nothing")
    world = World(3, TrackingConfig(**FINE), 2, extra=0)
    world.happen(5, faults=False)
    world.stop()
    lake = lake_of(spark, tmp_path / "lake", world)
    lines.write_text("0000002a-00000007-0193c1d2e3f4-0001\nrubbish\n\nmore\nrubbish\n")
    with pytest.raises(UsageError, match=r"^3 lines with no message id such as .*: 'more', 'rubbish'$"):
        trace(lake, read_ids(spark, lines))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no filters yet"):
        trace(Lake(spark, tmp_path / "empty"), read_ids(spark, tmp_path / "ids.parquet"))


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_what_is_damaged_is_missing_at_its_broker(spark: SparkSession, tmp_path: Path, strategy: str) -> None:
    """P5, P11: never an answer from bits that do not check, and an answer from all others; compacted, too."""
    config = TrackingConfig(strategy=strategy, **FINE)
    world = World(3, config, 2, extra=0)
    world.happen(5, faults=False)
    world.stop()
    damaged = world.records[2]
    for sequence, record in damaged.items():
        described = encode_description(decode_meta(record))  # all that its broker could tell of it
        damaged[sequence] = described if sequence % 2 else record[:-1] + bytes([record[-1] ^ 1])
    lake = lake_of(spark, tmp_path / "lake", world)
    ids = ids_file(tmp_path / "ids", list(world.truth))
    for _ in range(2):
        rows = rows_of(lake, ids, config)
        assert len(rows) == len(world.truth)
        for row in rows.values():
            assert row["verdict"] == "partial"
            assert row["missing"] == [{"broker": "b2", "why": UNREAD}]
        assert any(row["origin"] == "b1" for row in rows.values())
        compact(lake, "filters")


def test_what_a_broker_did_before_a_backup_was_put_back(spark: SparkSession, tmp_path: Path) -> None:
    """P5: the lake has filters of a time of which the broker knows nothing any more, nor who was there."""
    config, disk = TrackingConfig(), Disk()
    disk.keep(disk.start(NOW_US, config).close(NOW_US + SECOND_US))
    backup = copy.deepcopy(disk)
    told: list[pa.Table] = []

    def life(disk: Disk, boot: int, who: str) -> tuple[bytes, bytes]:
        began_us = NOW_US + 100 * boot * SECOND_US
        tracking = disk.start(began_us, config)
        tracking.resume_after(running_number(boot, 0))
        whole = decode_changes(b"".join(tracking.attachment_parts(began_us)))[0]
        told.append(rows.attachments(1, "a", running_number(boot, 1), whole, whole=True))
        said = len(disk.log)
        tracking.attached(who, began_us + SECOND_US)
        ids = identity_of(began_us + 2 * SECOND_US), identity_of(began_us + 40 * SECOND_US)
        for one, at_us in zip(ids, (began_us + 2 * SECOND_US, began_us + 40 * SECOND_US), strict=True):
            tracking.published(one, at_us)
            tracking.delivered(1, (who,), one, at_us)
            disk.keep(tracking.tick(at_us + 15 * SECOND_US))
        disk.keep(tracking.close(began_us + 60 * SECOND_US))
        changes = decode_changes(disk.log[said:])[0]
        told.append(rows.attachments(1, "a", running_number(boot, 2), changes, whole=False))
        return ids

    gone, since = life(disk, 5, "s"), life(backup, 6, "s2")
    later = life(backup, 7, "s3")
    records = [(decode_meta(one), one) for one in [*disk.records.values(), *backup.records.values()]]
    lake = Lake(spark, tmp_path / "lake")
    lake.append("filters", rows.filters(1, "a", records))
    lake.append("attachments", pa.concat_tables(told))
    found = rows_of(lake, ids_file(tmp_path / "ids", [*gone, *since, *later]), config)
    verdicts = [found[str(MessageId.from_bytes(one))]["verdict"] for one in (*gone, *since, *later)]
    assert verdicts == ["partial"] * 2 + ["complete"] * 4
    for one in gone:
        assert found[str(MessageId.from_bytes(one))]["route"], "what the lake still has"


def test_what_a_missing_bulletin_told_is_not_taken_for_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """P5: a hole in the numbers of one start counts until the map is told whole again."""
    config = TrackingConfig(**FINE)
    world = World(3, config, 2, extra=0)
    world.happen(5, faults=False)
    world.stop()
    ids = ids_file(tmp_path / "ids", list(world.truth))

    def told(broker: int, number: int, some: list[Change], *, whole: bool = False) -> pa.Table:
        return rows.attachments(broker, f"b{broker}", number, some, whole=whole)

    changes = world.changes[2]
    came = next(at for at, one in enumerate(changes) if one.kind == "subscriber")
    went = next(at for at, one in enumerate(changes) if one.what == "detach")
    lacking = [told(1, 1, world.changes[1][:1], whole=True), told(1, 2, world.changes[1][1:])]
    lacking += [told(2, 1, changes[:1], whole=True), told(2, 2, changes[1:came]), told(2, 4, changes[went:])]
    lake = Lake(spark, tmp_path / "lake")
    lake.append("filters", world.filter_rows())
    lake.append("attachments", pa.concat_tables(lacking))
    for row in rows_of(lake, ids, config).values():
        assert (row["verdict"], row["missing"]) == ("partial", [{"broker": "b2", "why": NOT_LANDED}])
    lake.append("attachments", told(2, 5, changes, whole=True))
    assert {row["verdict"] for row in rows_of(lake, ids, config).values()} == {"complete"}


def test_what_was_released_before_it_was_landed_is_not_taken_for_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """P5: a gap in what a broker tells costs what it stored then, and who came until its map is told anew."""
    broker = Telling(spark, tmp_path / "lake", TrackingConfig(retain=False))
    broker.now_us += 300 * SECOND_US
    before = [broker.minute("s1"), broker.minute("s2")]
    start_us = broker.now_us
    within = broker.minute("s3", landed=False)
    late = broker.minute("s4", landed=False, late_us=300 * SECOND_US)
    broker.gap(start_us, broker.now_us)
    after = broker.minute("s5")
    known = [("complete", ["s1"], []), ("complete", ["s2"], [])]
    gone = ("partial", [], [NOT_LANDED])
    assert broker.traced(*before, within, after) == [*known, gone, ("partial", ["s5"], [NOT_LANDED])]
    broker.map()
    broker.stop()
    untimely = ("partial", ["s4"], [NOT_LANDED])
    whole = ("complete", ["s5"], [])
    assert broker.traced(*before, within, late, after) == [*known, gone, untimely, whole]


def test_what_brokers_forgot_is_still_known_in_a_lake(spark: SparkSession, tmp_path: Path) -> None:
    """P5: beyond `keep`, over maps that are told whole and over restarts; compacted, too.

    Found: `partial`, though the lake lacked nothing, and the receivers were gone with the next whole map.
    """
    config = TrackingConfig(retain=False, renew_us=10 * SECOND_US, keep_us=60 * SECOND_US)
    broker = Telling(spark, tmp_path / "lake", config)
    broker.now_us += 300 * SECOND_US
    ids: list[str] = []
    for who in ("s1", "s2", "s3"):
        ids.append(broker.minute(who))
        broker.tracking.detached(who, broker.now_us)
    broker.minute("s4")
    broker.now_us += 240 * SECOND_US
    broker.minute("s5")
    for text in ids:
        assert broker.disk.find(broker.tracking, bytes(MessageId.parse(text))).forgotten
    known = [("complete", [who], []) for who in ("s1", "s2", "s3")]
    assert broker.traced(*ids) == known
    broker.stop()
    broker.now_us += 60 * SECOND_US
    broker.start()
    broker.minute("s6")
    broker.map()
    whole = decode_changes(b"".join(broker.tracking.attachment_parts(broker.now_us)))[0]
    assert not any(change.who == "s1" for change in whole)
    assert broker.traced(*ids) == known
    for table in ("attachments", "filters"):
        compact(broker.lake, table)
    assert broker.traced(*ids) == known


def test_only_files_that_can_have_gaps_are_read_for_them(spark: SparkSession, tmp_path: Path) -> None:
    """P5: not all of the largest table, with every bulk trace; but what compaction made of them is."""
    broker = Telling(spark, tmp_path / "lake", TrackingConfig())
    broker.gap(1_000, 2_000)
    report = DeliveryReport(1 << 16)
    report.acknowledged([("all", 1)], 1 << 32, 7, NOW_US)
    (payload,) = report.take()
    known = {file.path for file in broker.lake.files("deliveries")}
    broker.lake.append("deliveries", rows.deliveries(1, 4, decode_deliveries(payload)))
    (other,) = {file.path for file in broker.lake.files("deliveries")} - known
    place = tmp_path / "lake" / "deliveries" / other
    sound = place.read_bytes()
    place.write_bytes(b"what cannot be read")
    assert unlanded_history(broker.lake) == {"00000001": [(1_000, 2_000)]}
    place.write_bytes(sound)
    broker.map()
    broker.gap(3_000, 4_000)
    compact(broker.lake, "deliveries")
    assert sorted(unlanded_history(broker.lake)["00000001"]) == [(1_000, 2_000), (3_000, 4_000)]


@pytest.mark.parametrize("ending", ["stopped", "killed", "never"])
def test_a_broker_that_tracks_no_more_is_not_taken_for_one_that_has_nothing(
    spark: SparkSession, tmp_path: Path, ending: str
) -> None:
    """P5, T11: it tells links and no map; traces go on behind it as in the live network. `never`: nor did it
    before."""
    config = TrackingConfig(persist_us=2_000_000, **FINE)
    world, broker = World(11, config, 5, extra=0), 2
    world.happen(40, faults=False)
    early = next(iter(world.truth))
    if ending == "stopped":
        world._keep(broker, world.tracking[broker].close(world.now_us))
    world.pass_time(60 * SECOND_US)
    world.track_no_more(broker)
    told = world.links[broker]
    state = Links(
        broker=broker_text(broker),
        name=f"b{broker}",
        boot=1,
        at_us=world.now_us,
        links=tuple(Link(broker=broker_text(other), cost=1) for other in sorted(told)),
    )
    before = set(world.truth)
    world.happen(40, faults=False)
    world.stop()
    lake = Lake(spark, tmp_path / "lake")
    attached, filters = world.attachment_rows(), world.filter_rows()
    if ending == "never":  # in one piece: Spark takes an empty batch of an Arrow table for the table's end
        others = pc.field("broker") != broker_text(broker)
        attached, filters = (one.filter(others).combine_chunks() for one in (attached, filters))
    lake.append("filters", filters)
    lake.append("attachments", attached)
    lake.append("topology", rows.topology(running_number(1, 1), state))
    until_us = world.now_us + 60 * SECOND_US
    landed_to(lake, {pubend_text(one << 32 | HISTORY): until_us for one in world.brokers})
    since = [one for one in world.truth if one not in before]
    found = rows_of(lake, ids_file(tmp_path / "ids", [early, *since]), config)
    live = [as_row(result) for result in world.live(*since)]
    for row in live:
        bulk = found[row["id"]]
        assert bulk["verdict"] == row["verdict"]
        for part, who in (("route", "from"), ("receivers", "subscriber")):
            named, wanted = ({(one["broker"], one[who]) for one in of[part]} for of in (bulk, row))
            assert named == wanted
    assert any(map(passes_silence, live))
    assert (found[str(MessageId.from_bytes(early))]["verdict"] == "complete") is (ending != "never")


@pytest.mark.parametrize(("brokers", "messages"), [(3, 50), pytest.param(4, 150, marks=pytest.mark.soak)])
def test_compaction_keeps_every_answer(
    spark: SparkSession, tmp_path: Path, brokers: int, messages: int
) -> None:
    """P6, T8: fewer filters, the same origin, route, receivers and verdict of every message.

    Also of those that went through a broker that died before it stored anything of them.
    """
    config = TrackingConfig(persist_us=500_000, retain=False, **FINE)
    world = World(5, config, brokers, extra=0)
    world.happen(messages, faults=False)
    for _ in range(10):
        world._send()
    world._restart(2)
    world.stop()
    lake = lake_of(spark, tmp_path / "lake", world)
    told = world.attachment_rows()
    lake.overwrite("attachments", told.slice(0, 1))
    lake.append("attachments", told.slice(1))
    ids = ids_file(tmp_path / "ids", list(world.truth))
    before = rows_of(lake, ids, config)
    assert any(map(passes_silence, before.values()))
    done = compact(lake, "filters", accuracy=0.999)
    assert done.rows_after < done.rows_before / 3
    assert compact(lake, "filters").files_before == 0, "once is enough"
    assert compact(lake, "attachments").files_before == 2
    assert len(lake.files("attachments")) == 1
    after = rows_of(lake, ids, config)
    assert before.keys() == after.keys()
    for identity, row in before.items():
        bare = [
            {
                **one,
                "origin_doubt": 0.0,
                "route": [{**step, "doubt": 0.0} for step in one["route"]],
                "receivers": [{**step, "doubt": 0.0} for step in one["receivers"]],
            }
            for one in (row, after[identity])
        ]
        assert bare[0] == bare[1]
        assert all(one["doubt"] <= 0.001 for one in after[identity]["receivers"])
