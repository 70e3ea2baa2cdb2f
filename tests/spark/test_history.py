"""P4, P11: what brokers tell about themselves becomes rows; nonsense is left out, and known to be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from tests.worlds.spark_traces import Telling

from postroad.history.bulletins import (
    FILTERS,
    MIN_PART_BYTES,
    TOPOLOGY,
    Author,
    BestEffort,
    Bulletin,
    DeliveryReport,
    LinkCount,
    QueueReport,
    RepairCount,
    attachment_bulletins,
    best_effort_bulletin,
    deliveries_bulletin,
    filter_bulletins,
    queues_bulletin,
    topology_bulletin,
)
from postroad.ids import HISTORY, MessageId, pubend_id
from postroad.seam.reports import QueueEvents
from postroad.spark.audit import LANDING
from postroad.spark.lake import history, rows
from postroad.spark.lake.history import (
    NONSENSE,
    TABLES,
    Part,
    Unread,
    bulletin_rows,
    complaints,
    part_of,
    whole_filters,
)
from postroad.spark.lake.intake import Intake
from postroad.spark.lake.tables import Batch
from postroad.spark.trace.tasks import decoded as decoded_record
from postroad.spark.trace.views import NOT_LANDED
from postroad.tracking.attachment_log import Change, encode_changes
from postroad.tracking.keys import LOG, PUBLISH, HistoryKey
from postroad.tracking.record import FilterMeta, encode_record
from postroad.tracking.settings import TrackingConfig
from postroad.units import SECOND_US

AUTHOR = Author(broker=7, name="b7")
AT_US = 1_763_164_800_000_000  # 2025-11-15
HUGE = (1 << 64) - 1


def events(*bulletins: Bulletin, origin: int = 7, tick: int = AT_US) -> pa.Table:
    """As they come to landing."""
    return rows.events(
        (
            MessageId(5, origin, 1, number),
            one.topic,
            one.attributes,
            one.payload,
            pubend_id(origin, HISTORY),
            tick + number,
        )
        for number, one in enumerate(bulletins)
    )


def changed(bulletin: Bulletin, **attributes: Any) -> Bulletin:
    found = {**bulletin.attributes, **attributes}
    kept = {name: value for name, value in found.items() if value is not None}
    return Bulletin(topic=bulletin.topic, attributes=kept, payload=bulletin.payload)


def attachments(*changes: Change) -> Bulletin:
    return attachment_bulletins(AUTHOR, 5, encode_changes(changes), 1 << 20, whole=True)[0]


def links(**told: Any) -> Bulletin:
    sound = topology_bulletin(AUTHOR, 4, boot=3, links=[(8, 1)], config=TrackingConfig(), at_us=AT_US)
    payload = msgspec.json.encode(msgspec.json.decode(sound.payload) | told)
    return Bulletin(topic=sound.topic, attributes=sound.attributes, payload=payload)


def report(at_us: int = AT_US, broker: int = 7) -> Bulletin:
    made = DeliveryReport(MIN_PART_BYTES)
    made.events([("billing", 1)], 7 << 32, bytes(MessageId(1, 7, 2, 0)), np.array([9]), at_us)
    return deliveries_bulletin(Author(broker=broker, name=f"b{broker}"), 6, made.take()[0])


def queue_report() -> Bulletin:
    made = QueueReport(MIN_PART_BYTES)
    made.add([QueueEvents("kept", "stock", "shop", "transactional", AT_US, bytes(32))])
    return queues_bulletin(AUTHOR, 5, made.take()[0])


def best_effort() -> Bulletin:
    link = LinkCount(neighbour="00000008", sent=5, received=4)
    count = RepairCount(
        subscriber="s",
        **dict.fromkeys(("received", "detected", "requests", "recovered", "given_up", "duplicates"), 1),
        slowest_us=1,
    )
    return best_effort_bulletin(AUTHOR, 5, BestEffort(boot=1, at_us=AT_US, links=(link,), receivers=(count,)))


SOUND = {
    "attachments": attachments(Change(what="attach", at_us=AT_US, kind="neighbour", who="8")),
    "topology": links(),
    "deliveries": report(),
    "queue_events": queue_report(),
    "best_effort_links": best_effort(),
    "repairs": best_effort(),
}


def landed(table: str, *bulletins: Bulletin) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows, and what is left out."""
    found, unread = bulletin_rows(table, events(*bulletins))
    return [row for one in found for row in one.to_pylist()], [msgspec.structs.asdict(one) for one in unread]


@pytest.mark.parametrize(
    ("table", "nonsense", "why"),
    [
        ("attachments", changed(SOUND["attachments"], number="five"), "Expected `int`, got `str`"),
        ("attachments", changed(SOUND["attachments"], number=-1), "Expected `int` >= 0"),
        ("attachments", changed(SOUND["attachments"], broker=None), "missing required field `broker`"),
        ("attachments", changed(SOUND["attachments"], broker="00000008"), "of broker '00000008'"),
        ("attachments", attachments(Change(what="attach", at_us=HUGE)), "are none"),
        ("attachments", attachments(Change(what="late", at_us=1, noted_us=(1 << 63) - 1)), "are none"),
        ("attachments", attachments(Change(what="attach", at_us=1, kind="neighbour", who="x")), "are none"),
        ("topology", links(boot=10**30), "too large|out of bounds|overflow|range"),
        ("topology", links(broker="00000008"), "of broker '00000008'"),
        ("topology", links(links=[{"broker": "zz", "cost": 1}]), "invalid literal"),
        ("topology", links(links=[{"broker": "00000008"}]), "missing required field `cost`"),
        ("topology", links(routing="everywhere"), "routing is one of"),
        ("topology", links(links=[{"broker": "f" * 9, "cost": 1}]), "a broker that cannot be"),
        (
            "attachments",
            attachments(Change(what="attach", at_us=1, kind="neighbour", who="9" * 30)),
            "are none",
        ),
        (
            "attachments",
            attachments(Change(what="attach", at_us=1, kind="group", who="no list")),
            "malformed",
        ),
        (
            "deliveries",
            Bulletin(topic="", attributes=SOUND["deliveries"].attributes, payload=b""),
            "not a report",
        ),
    ],
)
def test_nonsense_is_left_out_and_named(table: str, nonsense: Bulletin, why: str) -> None:
    """P11: and what is sound beside it is landed."""
    sound, unread = landed(table, nonsense, SOUND[table])
    assert [row["broker"] for row in sound] == ["00000007"]
    (one,) = unread
    assert (one["pubend"], one["tick"]) == (f"00000007-{HISTORY:08x}", AT_US)
    assert re.search(why, one["why"])


@pytest.mark.parametrize("at_us", [-(1 << 63), (1 << 63) - 1])
def test_a_report_of_a_time_that_cannot_be_has_a_date(at_us: int) -> None:
    """P4: tables are in folders by date, which must be one to read them again."""
    ((row,), _) = landed("deliveries", report(at_us))
    assert 1970 <= row["date"].year <= 9999


ABOUT: dict[str, Any] = {"m": 0, "n": 20, "k": 7, "count": 1, "lo_ms": 1, "hi_ms": 2}


def stored(sequence: int, **told: Any) -> bytes:
    about = {**ABOUT, "key": HistoryKey(PUBLISH), "m": 8_000}
    return encode_record(FilterMeta(sequence=sequence, **(about | told)), bytes(1_000))


def parts_of(sequence: int, record: bytes, tick: int = AT_US) -> list[Part]:
    made = filter_bulletins(AUTHOR, sequence, record, 400)
    return [part_of("00000007", one.attributes, one.payload, tick + at) for at, one in enumerate(made)]


@pytest.mark.parametrize(
    "record",
    [
        stored(3)[:-1_010],
        b"x" * 1_100,
        stored(4),
        stored(3, hi_ms=1 << 62),
        stored(3, n=HUGE),
        stored(3, key=HistoryKey(LOG), m=0, count=1 << 60),
        stored(3, key=HistoryKey(LOG), m=-9),
        stored(3, key=HistoryKey(PUBLISH, origin=1 << 40)),
    ],
)
def test_a_filter_that_is_none_is_left_out(record: bytes) -> None:
    """P4, P11: the others come to the lake."""
    sound = parts_of(3, stored(3))
    wrong = [
        msgspec.structs.replace(one, payload=record[at * 400 : at * 400 + 400])
        for at, one in enumerate(sound)
    ]
    tables, rest, unread = whole_filters([*wrong, *parts_of(5, stored(5))])
    assert [table["sequence"].to_pylist() for table in tables] == [[5]]
    assert rest == []
    assert [(one.origin, one.tick, one.topic) for one in unread] == [("00000007", AT_US + 2, FILTERS)]


@pytest.mark.parametrize(
    "attributes", [{"part": 3}, {"parts": 0}, {"sequence": "3"}, {"sequence": -1}, {"broker": "0000000g"}]
)
def test_a_part_that_is_none(attributes: dict[str, Any]) -> None:
    one = filter_bulletins(AUTHOR, 3, stored(3), 400)[0]
    with pytest.raises(NONSENSE):
        part_of("00000007", {**one.attributes, **attributes}, one.payload)


def cut(sequence: int, *lacking: int, group: int = 1) -> list[Part]:
    """Its parts but for these."""
    made = filter_bulletins(AUTHOR, sequence, stored(sequence), 400)
    sound = (part_of("00000007", one.attributes, one.payload, AT_US, group) for one in made)
    return [one for one in sound if one.part not in lacking]


def test_parts_wait_for_the_rest_of_their_group_alone() -> None:
    """P4: what a gap cut is not kept for ever; what a disk refused at first comes behind what it took."""
    tables, rest, unread = whole_filters([*cut(3, 0), *cut(4, 2)])
    assert (tables, {one.sequence for one in rest}, unread) == ([], {3, 4}, [])
    tables, rest, unread = whole_filters([*rest, *cut(5), *cut(3, 1, 2)])
    assert [table["sequence"].to_pylist() for table in tables] == [[3], [5]]
    assert ({one.sequence for one in rest}, unread) == ({4}, [])
    tables, rest, unread = whole_filters([*rest, *cut(6, group=2), *cut(7, 1, group=2)])
    assert [table["sequence"].to_pylist() for table in tables] == [[4], [6]]
    assert {one.sequence for one in rest} == {7}
    assert [(one.origin, one.why) for one in unread] == [("00000007", "2 of 3 parts of a stored filter")]


@pytest.mark.parametrize(
    "parts",
    [
        cut(3, 2),
        parts_of(3, stored(3, key=HistoryKey(LOG), m=0, names=("nonsense",))),
        parts_of(3, stored(3, key=HistoryKey(LOG), m=0, names=("routed 7 x",))),
        parts_of(3, encode_record(FilterMeta(sequence=3, key=HistoryKey(LOG), **ABOUT), bytes(1_001))),
    ],
    ids=["a part is missing", "nonsense in it", "no such broker", "no whole number of entries"],
)
def test_of_a_filter_that_is_not_whole_its_times_are_known(parts: list[Part]) -> None:
    """P5: it may have been published long after them, so a gap of that moment does not tell them."""
    tables, rest, unread = whole_filters([*parts, *cut(4, group=2)])
    assert ([len(table) for table in tables], rest, len(unread)) == ([1, 1], [], 1)
    (row,) = tables[0].to_pylist()
    assert (row["sequence"], row["lo_ms"], row["hi_ms"], row["replaces"]) == (3, 1, 2, None)
    assert decoded_record(row["record"])[1] is None


def test_parts_that_an_older_version_saved_are_completed() -> None:
    older = [msgspec.structs.replace(one, tick=0, group=0) for one in cut(3, 2)]
    tables, rest, unread = whole_filters([*older, *cut(3, 0, 1, group=8), *cut(4, group=9)])
    assert [len(table) for table in tables] == [1, 1]
    assert (rest, unread) == ([], [])


def test_what_waits_of_one_broker_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """P11: filters that are never whole cost no more than this, and nothing of other brokers."""
    monkeypatch.setattr(history, "MAX_WAITING_BYTES", 20_000)
    other = [msgspec.structs.replace(one, broker="00000008") for one in cut(3, 0)]
    _, rest, unread = whole_filters([*other, *(one for sequence in range(9) for one in cut(sequence, 0))])
    assert [one for one in rest if one.broker == "00000008"] == other
    assert 0 < len([one for one in rest if one.broker == "00000007"]) < 18
    assert {one.origin for one in unread} == {"00000007"}


VALUES = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1), st.text(max_size=5), st.floats(), st.booleans(), st.just(None)
)
NAMES = st.sampled_from(["broker", "name", "number", "whole", "sequence", "part", "parts"])


@given(st.sampled_from(sorted(TABLES)), st.dictionaries(NAMES, VALUES, max_size=3), st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_a_broker_says_is_landed_or_named(
    table: str, attributes: dict[str, Any], data: st.DataObject
) -> None:
    """P11: nothing ends landing."""
    sound = changed(SOUND[table], **attributes)
    at = data.draw(st.integers(0, len(sound.payload)))
    payload = sound.payload[:at] + data.draw(st.binary(max_size=4)) + sound.payload[at + 1 :]
    wrong = Bulletin(topic=sound.topic, attributes=sound.attributes, payload=payload)
    found, unread = landed(table, wrong)
    # A bulletin of best effort need not have rows for both of its tables, nor one of queues for any.
    assert found or unread or table in ("queue_events", "best_effort_links", "repairs")


def test_sound_bulletins_are_rows_of_their_tables() -> None:
    for table, bulletin in SOUND.items():
        found, unread = landed(table, bulletin)
        assert found, table
        assert not unread


def test_brokers_are_named_in_one_line_each() -> None:
    """P11."""
    wrong = Bulletin(topic=TOPOLOGY, attributes={"broker": "\n\x1b" * 500}, payload=b"")
    _, unread = landed("topology", wrong, wrong)
    (line,) = complaints(Unread(**one) for one in unread)
    assert line.startswith("broker 00000007: 2 of its bulletins cannot be read and are left out")
    assert line.isprintable()
    assert len(line) < 500


def test_what_cannot_be_read_costs_its_own_broker_alone(spark: SparkSession, tmp_path: Path) -> None:
    """P4, P5, P11: it is told in a line, traces of then are not complete, and others' history is landed."""
    broker = Telling(spark, tmp_path / "lake", TrackingConfig(retain=False))
    broker.now_us += 300 * SECOND_US
    before = broker.minute("s1")
    within = broker.minute("s2", landed=False)
    after = broker.minute("s3")
    author = Author(broker=1, name="a")
    (filter_,) = filter_bulletins(author, 3, stored(3), 1 << 20)
    wrong = [
        Bulletin(topic=filter_.topic, attributes=filter_.attributes, payload=b"nonsense"),
        Bulletin(topic=TOPOLOGY, attributes={"number": 1.5}, payload=b"nonsense"),
    ]
    tick = broker.now_us - 110 * SECOND_US  # ten seconds after the message
    batch = pa.concat_tables([events(*wrong, origin=1, tick=tick), events(report(broker=2), origin=2)])
    intake = Intake(broker.lake.store, f"{LANDING}-x-history")
    done = intake.history(batch.to_batches(), [])
    for _ in range(2):  # done again after a crash, it changes nothing
        for table, files in done.files.items():
            broker.lake.commit(table, files, Batch("query", 0))
    (line,) = complaints(done.unread)
    assert line.startswith("broker 00000001: 2 of its bulletins cannot be read")
    found = broker.lake.read("deliveries").groupBy("what", "broker").count().collect()
    assert sorted(map(tuple, found)) == [("event", "00000002", 1), ("gap", "00000001", 2)]
    gone = ("partial", [], [NOT_LANDED])
    assert broker.traced(before, within, after) == [
        ("complete", ["s1"], []),
        gone,
        ("partial", ["s3"], [NOT_LANDED]),
    ]
