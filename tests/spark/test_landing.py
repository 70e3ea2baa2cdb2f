"""Landing from real brokers: what arrives, what is lost, how one asks for it, its audit (P4, P7, P11)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.worlds.processes import KEEP, Brokers, configured, wait_until
from tests.worlds.spark_engines import Driver
from tests.worlds.spark_streams import publish
from tests.worlds.spark_traces import rows_of

import postroad
from postroad.errors import UsageError
from postroad.ids import HISTORY, pubend_id, pubend_text
from postroad.spark.audit import LANDING, Audit, as_rows, audit, landed_subscriptions
from postroad.spark.audit_modes import QUEUE_KINDS
from postroad.spark.lake import landing, rows
from postroad.spark.lake.compact import compact
from postroad.spark.lake.landing import _Feed, _mapped, _Maps, land, unlanded_history
from postroad.spark.lake.ledger import Ledger, Progress
from postroad.spark.lake.tables import Lake
from postroad.spark.plan_repair import observe_losses
from postroad.spark.report import collect, write_report
from postroad.spark.trace.topology import latest, tracking_settings
from postroad.tracking.attachment_log import SNAPSHOT, Change

QUICK = '[tracking]\npersist = "1 s"\n'
HASTY = '[durable]\nkeep = "2 s"\nmax_age = "3 s"\n'
WAIT_S = 300.0


def landed(lake: Lake) -> list[int]:
    found = lake.read("events").select("attributes.n.integer").collect()
    return sorted(row[0] for row in found if row[0] is not None)


def published(address: str) -> str:
    """An event that is in a stored filter soon."""
    with postroad.sync.connect(address) as client:
        made = client.publish("orders/eu", b"x", mode="durable")
    time.sleep(3)
    return str(made.id)


def queued(sender: str, receiver: str) -> None:
    """Twenty messages through two brokers, accepted in turn."""
    with (
        postroad.sync.connect(sender) as seller,
        seller.application("shop") as shop,
        postroad.sync.connect(receiver) as taker,
        taker.application("stock") as stock,
        stock.inbox() as messages,
    ):
        for number in range(20):
            shop.send("stock", str(number))
        for number in range(20):
            message = messages.get(60)
            assert message.payload == str(number).encode()
            message.accept()


def best_effort(sender: str, receiver: str) -> None:
    with (
        postroad.sync.connect(receiver) as reader,
        reader.subscribe("prices/#", repair=True) as events,
        postroad.sync.connect(sender) as publisher,
    ):
        for number in range(60):
            publisher.publish("prices/eu", str(number), mode="best-effort")
            time.sleep(0.005)
        assert len({events.get(60).payload for _ in range(60)}) == 60
        time.sleep(2.5)  # subscribers say once a second what they got


def check_other_modes(found: Audit, names: set[str], lake: Lake) -> None:
    (inbox,) = as_rows(found.queues.inboxes)
    assert (inbox["inbox"], inbox["kept"], inbox["accepted"], inbox["pending"]) == ("stock", 20, 20, 0)
    assert [inbox[kind] for kind in QUEUE_KINDS] == [0, 0, 0, 0]
    assert 0 < inbox["latency_us"][0] <= inbox["latency_us"][2] <= inbox["latency_max_us"]
    assert as_rows(found.queues.faults) == []
    called = {row.broker: row.name for row in lake.read("topology").select("broker", "name").collect()}
    assert set(called.values()) == names
    links = {(called[row["source"]], called[row["target"]]): row for row in as_rows(found.best_effort.links)}
    assert links["b1", "b2"]["sent"] >= 60
    # Summaries go on while both report, each at a time of its own.
    unaccounted = links["b1", "b2"]["sent"] - links["b1", "b2"]["received"] - links["b1", "b2"]["lost"]
    assert abs(unaccounted) <= 4
    (published,) = as_rows(found.best_effort.published)
    assert (called[published["broker"]], published["published"]) == ("b1", 60)
    (repaired,) = as_rows(found.best_effort.receivers)
    assert repaired["received"] + repaired["recovered"] >= 60
    losses = observe_losses(lake)
    assert losses is not None
    assert (losses.published, losses.receivers, losses.match) == (60, 1, 1.0)


def test_everything_lands_once(spark: SparkSession, brokers: Brokers, tmp_path: Path) -> None:
    """P4, P7: events and what brokers say about themselves, incrementally; the audit has all it needs."""
    extra = configured(tmp_path, QUICK)
    one = brokers.start("b1", extra=extra)
    two = brokers.start("b2", one.address, extra=extra)
    lake = Lake(spark, tmp_path / "lake")
    network = f"{one.address},{two.address}"
    land(lake, network, once=True)
    with (
        postroad.sync.connect(two.address) as client,
        client.subscribe("orders/#", durable="billing") as events,
    ):
        publish(one.address, range(100))
        seen = [events.get(60) for _ in range(100)]
        events.ack()
    assert len(seen) == 100
    publish(two.address, range(100, 130), "elsewhere")
    queued(one.address, two.address)
    best_effort(one.address, two.address)
    until = time.monotonic() + WAIT_S
    tables = ("events", "filters", "attachments", "topology", "best_effort_links", "repairs")
    while not all(lake.files(table) for table in tables) or (
        lake.read("deliveries").filter("what = 'event' AND subscriber = 'billing'").count() < 100
        or lake.read("queue_events").filter("what = 'accepted'").count() < 20
        or lake.read("repairs").agg({"received": "max"}).collect()[0][0] < 50
    ):
        assert time.monotonic() < until
        land(lake, network, once=True)
    assert landed(lake) == list(range(130))
    assert {row.name for row in lake.read("topology").select("name").distinct().collect()} == {"b1", "b2"}
    delivered = lake.read("deliveries").filter("what = 'event' AND subscriber = 'billing'")
    assert delivered.select("id").distinct().count() == 100

    subscribed = landed_subscriptions(lake)
    assert [(one.name, one.topic) for one in subscribed] == [("billing", "orders/#")]
    found = audit(lake, subscribed)
    (row,) = as_rows(found.summary)
    assert (row["due"], row["delivered"], row["missing"]) == (100, 100, 0)
    assert as_rows(found.faults) == []
    check_other_modes(found, {one.name for one in (one, two)}, lake)
    write_report(tmp_path / "good.html", collect(lake, found, late_us=10_000_000))
    good = (tmp_path / "good.html").read_text()
    assert "None found" in good
    assert "1 inboxes, no fault found" in good
    assert "b1 → b2" in good


def test_what_was_released_too_early_is_told(spark: SparkSession, brokers: Brokers, tmp_path: Path) -> None:
    """P1, P4: each event is in the lake, or a gap of landing's own subscription covers it; where that is in
    what a broker tells about itself, its map is told anew."""
    broker = brokers.start("b1", extra=configured(tmp_path, QUICK + HASTY))
    lake = Lake(spark, tmp_path / "lake")
    until = time.monotonic() + WAIT_S
    while not _mapped(lake):
        assert time.monotonic() < until
        land(lake, broker.address, once=True)
    publish(broker.address, range(10))
    with postroad.sync.connect(broker.address) as client:
        pubend = client.request("status")["durable_pubends"][0]["pubend"]
        heads = client.request("heads")["heads"]
        head = heads[pubend]
        until = time.monotonic() + WAIT_S
        while any(one["floor"] < heads[one["pubend"]] for one in client.request("status")["durable_pubends"]):
            assert time.monotonic() < until
            client.publish("other", b"x", mode="durable")
            time.sleep(0.3)
    land(lake, broker.address, once=True)
    gaps = lake.read("deliveries").filter(f"what = 'gap' AND startswith(subscriber, '{LANDING}')").collect()
    assert any(row.pubend == pubend and row.start_tick < head <= row.tick for row in gaps)
    assert landed(lake) == []
    ((number, history),) = unlanded_history(lake).items()
    while _mapped(lake).get(number, -1) <= history[-1][1]:
        assert time.monotonic() < until
        land(lake, broker.address, once=True)


@pytest.mark.soak
def test_a_second_lake_of_a_network_has_its_maps(
    spark: SparkSession, brokers: Brokers, tmp_path: Path
) -> None:
    """P4, P5: brokers told them when the first one came. Messages of before are not called unknown."""
    extra = configured(
        tmp_path, QUICK + '[durable]\nkeep = "2 s"\n'
    )  # the second has none of what came before
    one = brokers.start("b1", extra=extra)
    two = brokers.start("b2", one.address, extra=extra)
    first = Lake(spark, tmp_path / "first")
    for _ in range(2):
        land(first, one.address, once=True)
    early = published(two.address)
    second = Lake(spark, tmp_path / "second")
    until = time.monotonic() + WAIT_S
    while {row.name for row in second.read("attachments").filter("whole").collect()} != {"b1", "b2"}:
        assert time.monotonic() < until
        land(second, one.address, once=True)
    late = published(two.address)
    land(second, one.address, once=True)
    file = tmp_path / "ids"
    file.write_text(f"{early}\n{late}\n")
    found = rows_of(second, file, tracking_settings(latest(second).values()))
    assert (found[early]["verdict"], found[late]["verdict"]) == ("partial", "complete")


@pytest.mark.soak
def test_the_command_goes_on_whatever_happens(spark: SparkSession, brokers: Brokers, tmp_path: Path) -> None:
    """P4, P11: batches are told, a broker that is away is waited for, one lake has one landing; Ctrl-C."""
    broker = brokers.start("b1")
    folder = tmp_path / "lake"
    words = ("pipeline", "land", "--lake", str(folder), "--broker", broker.address)
    driver = Driver(tmp_path / "land.log", "postroad", *words)
    lake = Lake(spark, folder)

    def says(text: str) -> None:
        wait_until(lambda: text in driver.log.read_text() or not driver.running, text, WAIT_S)
        assert driver.running, driver.log.read_text()
        assert text in driver.log.read_text()

    try:
        # It is ready for events once its subscription is there.
        with postroad.sync.connect(broker.address) as client:
            wait_until(
                lambda: not driver.running or len(client.request("subs")["subscriptions"]) == 2,
                "landing has subscribed",
                WAIT_S,
            )
        publish(broker.address, range(50))
        says("events: batch ")
        broker.kill()
        says("; trying again in ")
        broker.start()
        publish(broker.address, range(50, 80))
        wait_until(lambda: not driver.running or landed(lake) == list(range(80)), "all has landed", WAIT_S)
        assert driver.running, driver.log.read_text()
        driver.interrupt()
        text = driver.finish()
        assert "rows added: " in text
        assert "80 of events" in text
        assert "Traceback" not in text
        assert "\tat " not in text, "no stacks of Java's"
    finally:
        driver.end()
    assert landed(lake) == list(range(80))
    driver = Driver(tmp_path / "once.log", "postroad", *words, "--once")
    try:
        says("landing ...")
        driver.interrupt()
        with pytest.raises(AssertionError, match="exit code 130"):
            driver.finish()
        assert "Traceback" not in driver.log.read_text()
    finally:
        driver.end()


def test_a_feed_that_fails_leaves_the_other_to_it(
    spark: SparkSession, brokers: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P4: events are landed though what brokers say about themselves cannot be; then it is told. Of two that
    land in one lake, one is told and ends; each event is there once."""
    broker = brokers.start("b1", extra=configured(tmp_path, KEEP))
    lake = Lake(spark, tmp_path / "lake")
    publish(broker.address, range(10))
    plan = landing._Reader.plan

    def fails(self: landing._Reader, until: str) -> Any:
        if self.options.topic != "#":
            raise postroad.UnavailableError("no history")
        return plan(self, until)

    with monkeypatch.context() as patch:
        patch.setattr(landing._Reader, "plan", fails)
        with pytest.raises(postroad.UnavailableError, match="no history"):
            land(lake, broker.address, once=True)
    assert landed(lake) == list(range(10))
    publish(broker.address, range(10, 20))
    stop, lines = threading.Event(), list[str]()

    def heard(line: str) -> None:
        """When it has landed a batch, another process comes; and goes on, unlike it."""
        if not lines:
            lines.append(line)
            land(lake, broker.address, once=True)
            publish(broker.address, range(20, 30))

    with pytest.raises(UsageError, match="another process lands in"):
        land(lake, broker.address, tell=heard, stop=stop, interval_s=0.0)
    assert len(lines) == 1
    land(lake, broker.address, once=True)
    assert landed(lake) == list(range(30))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that every user of the machine can reach, unlike pytest's own."""
    with TemporaryDirectory(prefix="postroad-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


class Broken:
    """A lake whose folder is taken from under a landing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._aside = folder.with_name("aside")
        self._user = os.geteuid()

    def forbid(self) -> None:
        """Nobody may write there; and the process is not root's any more, who may."""
        for place in (self._folder, *self._folder.rglob("*/")):
            place.chmod(0o555)
        if self._user == 0:
            os.seteuid(65534)

    def remove(self) -> None:
        self._folder.rename(self._aside)

    def unmount(self) -> None:
        """The disk it is on: an empty folder stays."""
        self.remove()
        self._folder.mkdir()

    def mend(self) -> None:
        """As it was; nothing may have been put in its place."""
        os.seteuid(self._user)
        if self._aside.exists():
            if self._folder.exists():
                self._folder.rmdir()
            self._aside.rename(self._folder)
        for place in (self._folder, *self._folder.rglob("*/")):
            place.chmod(0o755)


def test_a_folder_that_goes_away_in_mid_commit(
    spark: SparkSession, brokers: Brokers, tmp_path: Path, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P4, P11: between the files of a batch and its decision, or between that and its commits. One line, no
    second lake where the first was, and brokers are not told that anything was landed; when the folder is
    back the next landing has each event once."""
    broker = brokers.start("b1", extra=configured(tmp_path, KEEP))
    folder = open_folder / "lake"
    lake, broken = Lake(spark, folder), Broken(folder)
    land(lake, broker.address, once=True)
    write = Ledger.write
    # What is done, whether the batch is decided by then, what is said of it; and what was landed before it.
    faults: list[tuple[Callable[[], None], bool, str, int]] = [
        (broken.forbid, False, "Permission denied", 0),
        (broken.forbid, True, "Permission denied", 0),
        (broken.unmount, False, "is gone", 20),
        (broken.remove, True, "it was removed", 20),
    ]
    for number, (harm, decided, reason, before) in enumerate(faults):
        publish(broker.address, range(10 * number, 10 * number + 10))

        def harmed(
            ledger: Ledger, *changed: Progress, harm: Callable[[], None] = harm, decided: bool = decided
        ) -> None:
            events = any(progress.feed == "events" and progress.pending() for progress in changed)
            if events and not decided:
                harm()
            write(ledger, *changed)
            if events and decided:
                harm()

        monkeypatch.setattr(Ledger, "write", harmed)
        try:
            with pytest.raises(postroad.StorageError, match=reason) as told:
                land(lake, broker.address, once=True)
        finally:
            broken.mend()
        assert "\n" not in str(told.value)
        assert landed(lake) == list(range(before))
    monkeypatch.setattr(Ledger, "write", write)
    land(lake, broker.address, once=True)
    assert landed(lake) == list(range(40))


def test_no_broker_is_one_line(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P11: what cannot be reached is named, and the lake stays as it is."""
    monkeypatch.setattr(landing, "KNOCK_S", 2)
    with pytest.raises(postroad.UnavailableError, match=r"127\.0\.0\.1:1"):
        land(Lake(spark, tmp_path), "127.0.0.1:1", once=True)
    assert not list(tmp_path.iterdir()), "nothing is begun where nobody answers"


class Told(Lake):
    """A lake that is told what a broker tells."""

    def map(self, number: int, told_us: int, *, whole: bool = True) -> None:
        """Broker 1 tells its map, or what follows of it."""
        changes = [
            Change(what="start", at_us=1, kind="all"),
            Change(what="start", at_us=told_us, who=SNAPSHOT),
        ]
        told = rows.attachments(1, "a", number, changes if whole else changes[1:], whole=whole)
        self.append("attachments", told)

    def gap(self, end_us: int) -> None:
        """In what broker 1 told."""
        row = {"what": "gap", "subscriber": f"{LANDING}-x-history", "number": 0, "position": 0, "session": 0}
        row |= {"pubend": pubend_text(pubend_id(1, HISTORY)), "origin": "00000001", "broker": "00000001"}
        row |= {"start_tick": end_us - 5, "tick": end_us, "at_us": end_us, "date": rows.day(0)}
        self.append("deliveries", pa.Table.from_pylist([row], rows.SCHEMAS["deliveries"]))


class Restating:
    """A network that is asked for its maps."""

    def __init__(self) -> None:
        self.asked = 0
        self.away = False
        self.there, self.gone = [1], list[int]()

    def connect(self, _brokers: str) -> Restating:
        return self

    def __enter__(self) -> Restating:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def request(self, what: str) -> dict[str, Any]:
        if what == "heads":
            heads = {pubend_text(pubend_id(number, HISTORY)): 1 for number in self.there}
            return {"heads": heads, "away": [pubend_text(pubend_id(number, HISTORY)) for number in self.gone]}
        assert what == "history.restate"
        if self.away:
            raise postroad.UnavailableError("it is away")
        self.asked += 1
        return {}


def test_a_map_that_a_gap_cut_is_none(spark: SparkSession, tmp_path: Path) -> None:
    """P4, P5: its end is here, and bulletins before it are missing."""
    lake = Told(spark, tmp_path)
    lake.map(1, 50)
    assert _mapped(lake) == {"00000001": 50}
    lake.map(4, 100, whole=False)
    assert _mapped(lake) == {}
    lake.map(5, 200)
    lake.map(6, 201, whole=False)
    assert _mapped(lake) == {"00000001": 201}


def test_who_is_away_is_asked_for_its_map_when_it_is_back(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P4."""
    monkeypatch.setattr(landing, "LOOK_AROUND_S", 0.0)
    lake, network = Told(spark, tmp_path), Restating()
    lake.map(1, 50)
    network.there, network.gone = [1, 2], [2]
    maps = _Maps(lake, _Feed("", cast(Any, network), "history", "d"))
    assert not maps.ask()
    network.gone = []
    assert [maps.ask(), maps.ask()] == [True, False]


def test_where_gaps_go_on_maps_are_asked_for_less_and_less_often(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P11: of a broker that always tells something unreadable; all brokers tell all they know each time."""
    now_s = 1000.0
    monkeypatch.setattr(landing.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(landing, "_mapped", lambda _: {})
    lake, network = Told(spark, tmp_path), Restating()
    end_us = iter(range(1, 1000))
    monkeypatch.setattr(_Maps, "_look", lambda self: self._gaps.update({"00000001": next(end_us)}))
    maps = _Maps(lake, _Feed("", cast(Any, network), "history", "d"))
    asked: list[float] = []
    while now_s < 1000 + 4 * 3600:
        if maps.ask():
            asked.append(now_s)
        now_s += landing.LOOK_AROUND_S
    pauses = [later - before for before, later in pairwise(asked)]
    assert pauses[:3] == [30.0, 60.0, 120.0]
    assert pauses[-1] == landing.MAX_REST_S


def test_maps_are_asked_for_after_a_gap_whatever_a_compaction_does(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P4, P5: also where it has the gap already; until they are asked for."""
    monkeypatch.setattr(landing, "LOOK_AROUND_S", 0.0)
    lake, network = Told(spark, tmp_path), Restating()
    feed = _Feed("", cast(Any, network), "history", "d")
    lake.map(1, 50)
    maps = _Maps(lake, feed)
    assert not maps.ask()
    lake.gap(60)
    network.away = True
    with pytest.raises(postroad.UnavailableError):
        maps.ask()
    network.away = False
    assert [maps.ask(), maps.ask()] == [True, False]
    lake.gap(70)
    compact(lake, "deliveries")
    assert [maps.ask(), maps.ask()] == [True, False]
    assert network.asked == 2
    assert _Maps(lake, feed).ask(), "by the next process, too"
