"""P4, P10: a lake in an object store, from executors that share no folder with the driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.worlds.processes import KEEP, Brokers, configured, wait_until
from tests.worlds.s3_server import S3Server
from tests.worlds.spark_engines import Cluster, Driver
from tests.worlds.spark_mill import fill, landing, once_each
from tests.worlds.spark_traces import to_trace

from postroad.errors import StorageError
from postroad.history.bulletins import Links
from postroad.spark.lake import rows
from postroad.spark.lake.files import write_rows
from postroad.spark.lake.store import Store, store_at
from postroad.spark.lake.tables import Batch, Tables

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
    """Landed, killed in mid-batch, landed, compacted, traced; each row is there once."""
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


@pytest.mark.soak
def test_a_store_that_goes_away(store: S3Server) -> None:
    """P11: one line; when it is back nothing is half there, and the batch is landed once."""
    lake = store_at(store.url, {**store.environment, "AWS_MAX_RETRIES": "1"})
    tables = Tables(Store(f"{lake.url}/lake", None, {**lake.options, "max_retries": "1"}))
    batches = [
        rows.topology(n, Links(broker="00000001", name="b", boot=1, at_us=7, links=())) for n in (1, 2)
    ]
    tables.append("topology", batches[0], Batch("d", 1))
    written = write_rows(tables.store, "topology", [batches[1]])
    store.end()
    for act in (
        lambda: tables.commit("topology", written, Batch("d", 2)),
        lambda: tables.append("topology", batches[1]),
        lambda: tables.files("topology"),
    ):
        with pytest.raises(StorageError, match="cannot be") as told:
            act()
        assert "\n" not in str(told.value)
    store.start()
    assert [file.rows for file in tables.files("topology")] == [1]
    assert [tables.commit("topology", written, Batch("d", 2)) for _ in range(2)] == [True, False]
    assert sum(file.rows for file in tables.files("topology")) == 2
