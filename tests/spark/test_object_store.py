"""P4, P10: a lake in an object store, from executors that share no folder with the driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.worlds.fault_proxies import ProxyProcess
from tests.worlds.processes import KEEP, Brokers, configured, wait_until
from tests.worlds.s3_server import S3Server
from tests.worlds.spark_engines import Cluster, Driver
from tests.worlds.spark_mill import fill, landing, once_each
from tests.worlds.spark_streams import publish
from tests.worlds.spark_traces import to_trace

from postroad.errors import StorageError
from postroad.history.bulletins import Links
from postroad.spark.lake import rows
from postroad.spark.lake.compact import compact
from postroad.spark.lake.landing import land
from postroad.spark.lake.store import Store, store_at
from postroad.spark.lake.tables import Batch, Lake, Tables

LINES = 5_000
WAIT_S = 300.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "cluster")
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[S3Server]:
    made = S3Server(tmp_path / "s3")
    try:
        yield made
    finally:
        made.end()


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_a_lake_in_an_object_store(
    spark: SparkSession,
    cluster: Cluster,  # before the environment has what the store asks for: it goes there with the tasks
    store: S3Server,
    brokers: Brokers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P4: Landed, killed in mid-batch, landed, compacted, traced; each row is there once."""
    for name, value in {**store.environment, "MILL_STORE": store.url}.items():
        monkeypatch.setenv(name, value)
    broker = brokers.start("b1", extra=configured(tmp_path, KEEP))
    fill(tmp_path, 2, LINES)
    judge = to_trace(spark, tmp_path, f"{store.url}/traces")
    words = (str(tmp_path), broker.address, cluster.url)
    driver = Driver(tmp_path / "killed.log", "tests.worlds.spark_mill", *words)
    try:
        wait_until(lambda: landing(store.folder / "bucket") or not driver.running, "it lands", WAIT_S)
        assert driver.running, driver.log.read_text()
        driver.kill()
    finally:
        driver.end()
    driver = Driver(tmp_path / "driver.log", "tests.worlds.spark_mill", *words, "mill", "compact", "trace")
    try:
        driver.finish()
    finally:
        driver.end()
    judge()
    once_each(spark, tmp_path, 2 * LINES)


def impatient(url: str, environment: dict[str, str]) -> Store:
    """One that is not tried again for minutes."""
    return Store(url, None, {**store_at(url, environment).options, "max_retries": "1"})


@pytest.fixture
def proxy(store: S3Server) -> Iterator[ProxyProcess]:
    made = ProxyProcess(store.address)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.soak
def test_a_store_that_goes_away_in_mid_commit(
    spark: SparkSession, store: S3Server, proxy: ProxyProcess, brokers: Brokers, tmp_path: Path
) -> None:
    """P4, P11: while files are written, before and after the batch is decided, before and after its files are
    of the table. One line; whoever reads sees the batch whole or not at all; the next landing has each event
    once, also where a request did its work and its answer was lost."""
    broker = brokers.start("b1", extra=configured(tmp_path, KEEP))
    url = f"{store.url}/lake"
    lake = Lake(spark, impatient(url, store.environment_through(proxy.address)))
    beside = Tables(impatient(url, store.environment))  # by the short way
    land(lake, broker.address, once=True)
    decision, commit = (
        rf"PUT /bucket/lake/{table}/_delta_log/[0-9]+\.json" for table in ("landing", "events")
    )
    points = [
        (r"(PUT|POST) /bucket/lake/events/date", False, False),
        *((decision, unheard, False) for unheard in (False, True)),
        *((commit, unheard, unheard) for unheard in (False, True)),
    ]
    for number, (request, unheard, there) in enumerate(points):
        publish(broker.address, range(10 * number, 10 * number + 10))
        proxy.cut_at(request, unheard=unheard)
        with pytest.raises(StorageError, match="cannot be") as told:
            land(lake, broker.address, once=True)
        assert "\n" not in str(told.value)
        assert sum(file.rows for file in beside.files("events")) == 10 * (number + there)
        proxy.heal()
        land(lake, broker.address, once=True)
        landed = lake.read("events").select("attributes.n.integer").collect()
        assert sorted(row.integer for row in landed) == list(range(10 * number + 10))
    assert compact(lake, "events").rows_after == 10 * len(points)


@pytest.mark.soak
def test_who_may_not_is_told(store: S3Server, tmp_path: Path) -> None:
    """P11: a wrong secret, and one who may only read: one line, before anything is written; `land` says so
    before it starts Spark."""
    rows_of = [
        rows.topology(n, Links(broker="00000001", name="b", boot=1, at_us=7, links=())) for n in (1, 2)
    ]
    url = f"{store.url}/lake"
    tables = Tables(impatient(url, store.environment))
    tables.append("topology", rows_of[0], Batch("d", 1))
    stranger = store.environment | {"AWS_SECRET_ACCESS_KEY": "another"}
    before = sorted(store.folder.rglob("*"))
    for act in (
        lambda: Tables(impatient(url, stranger)).files("topology"),
        lambda: Tables(impatient(url, stranger)).append("topology", rows_of[1]),
        lambda: Tables(impatient(f"{store.url}/other", stranger)).check_place(),
    ):
        with pytest.raises(StorageError, match=r"cannot be read: SignatureDoesNotMatch: The") as told:
            act()
        assert "\n" not in str(told.value)
    driver = Driver(
        tmp_path / "land.log",
        "postroad",
        *("pipeline", "land", "--once", "--lake", url, "--broker", "127.0.0.1:1"),
        settings=stranger,
    )
    with pytest.raises(AssertionError, match="exit code 1"):
        driver.finish()
    (line,) = driver.log.read_text().splitlines()
    assert "cannot be read: SignatureDoesNotMatch: " in line
    store.end()
    store.start("--readonly")
    assert [file.rows for file in tables.files("topology")] == [1]
    with pytest.raises(StorageError, match=r"topology cannot be written: AccessDenied: ") as told:
        tables.append("topology", rows_of[1], Batch("d", 2))
    assert "\n" not in str(told.value)
    assert sorted(store.folder.rglob("*")) == before
    store.end()
    store.start()
    assert [tables.append("topology", rows_of[1], Batch("d", 2)) for _ in range(2)] == [True, False]
    assert sum(file.rows for file in tables.files("topology")) == 2
