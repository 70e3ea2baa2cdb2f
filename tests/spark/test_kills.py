"""Kill -9 in mid-batch of the driver, of executors, of a broker: each row arrives once (P1, P3, P4)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.worlds.processes import KEEP, Brokers, configured, wait_until
from tests.worlds.spark_engines import Cluster, Driver
from tests.worlds.spark_mill import fill, landing, mill, once_each, published, sink, written
from tests.worlds.spark_streams import publish as publish_some
from tests.worlds.spark_traces import to_trace

from postroad.spark.lake.landing import land
from postroad.spark.lake.tables import Lake

LINES = 20_000
WAIT_S = 300.0


def half_published(broker: str, before: int = 0) -> Callable[[], bool]:
    """Whether the sink is in the middle of its batch after `before` rows."""
    return lambda: published(broker) > before + LINES // 4


def persist(work: Callable[[], None]) -> None:
    """As who starts a query again when it has failed."""
    for left in reversed(range(5)):
        try:
            work()
            return
        except Exception:
            if not left:
                raise


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        pytest.param(2, ("publishing",), marks=pytest.mark.soak),
        pytest.param(2, ("publishing", "landing", "publishing", "landing"), marks=pytest.mark.soak),
    ],
)
@pytest.mark.timeout(1800)
def test_a_driver_killed_in_mid_batch(
    spark: SparkSession, brokers: Brokers, tmp_path: Path, files: int, kills: tuple[str, ...]
) -> None:
    """P1, P3, P4: also while the lake is written; whoever is started after it finishes its work."""
    broker = brokers.start("b1", extra=configured(tmp_path, KEEP))
    for number, what in enumerate(kills):
        fill(tmp_path, files, LINES, before=number * files)
        there = written(tmp_path)
        before = published(broker.address)
        driver = Driver(
            tmp_path / f"driver-{number}.log",
            "tests.worlds.spark_mill",
            *(str(tmp_path), broker.address),
            "local[2]",
        )
        try:
            middle = half_published(broker.address, before)
            wait_until(
                lambda: not driver.running or (landing(tmp_path, there) if what == "landing" else middle()),  # noqa: B023
                what,
                WAIT_S,
            )
            assert driver.running, driver.log.read_text()
            driver.kill()
        finally:
            driver.end()
    persist(lambda: mill(spark, tmp_path, broker.address))
    once_each(spark, tmp_path, len(kills) * files * LINES)


@pytest.mark.timeout(900)
@pytest.mark.soak
def test_a_driver_and_a_broker_killed_in_mid_batch(
    spark: SparkSession, brokers: Brokers, tmp_path: Path
) -> None:
    """P1, P3, P4: what the driver began another finishes; the broker comes back with what it acknowledged."""
    files, others = 3, 10
    broker = brokers.start("b1", extra=configured(tmp_path, KEEP))
    fill(tmp_path, files, LINES)
    lake = Lake(spark, tmp_path / "lake")
    publish_some(broker.address, range(others))
    words = (str(tmp_path), broker.address, "local[2]", "find", "sink")
    driver = Driver(tmp_path / "driver.log", "tests.worlds.spark_mill", *words)
    try:
        middle = half_published(broker.address, others)
        wait_until(lambda: middle() or not driver.running, "rows are published", WAIT_S)
        assert driver.running, driver.log.read_text()
        driver.kill()
    finally:
        driver.end()
    assert f"found {others}" in driver.log.read_text(), "Spark finds the format by itself"
    assert published(broker.address) < others + files * LINES, "something is left to do"

    def publish() -> None:
        sink(spark, tmp_path, broker.address).awaitTermination()

    def arrive() -> None:
        land(lake, broker.address, once=True)

    def killed_while(work: Callable[[], None], middle: Callable[[], bool]) -> None:
        done, hit = threading.Event(), threading.Event()

        def kill() -> None:
            wait_until(lambda: done.is_set() or middle(), "the middle of a batch", WAIT_S)
            if not done.is_set():
                broker.kill()
                broker.start()
                hit.set()

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            persist(work)
        finally:
            done.set()
            thread.join()
        assert hit.is_set(), "it was done before the broker could be killed"

    killed_while(publish, half_published(broker.address, others + LINES))
    there = written(tmp_path)
    killed_while(arrive, lambda: landing(tmp_path, there))
    persist(arrive)
    once_each(spark, tmp_path, files * LINES)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "cluster")
    try:
        yield made
    finally:
        made.end()


@pytest.mark.soak
@pytest.mark.parametrize("files", [1, 4])
@pytest.mark.timeout(1800)
def test_executors_killed_in_mid_batch(
    spark: SparkSession, cluster: Cluster, brokers: Brokers, tmp_path: Path, files: int
) -> None:
    """P1, P3, P4, P10: on a standalone cluster; source, sink, landing, then a bulk trace, come to an end."""
    broker = brokers.start("b1", extra=configured(tmp_path, KEEP))
    fill(tmp_path, files, LINES)
    judge = to_trace(spark, tmp_path)
    words = (str(tmp_path), broker.address, cluster.url, "mill", "trace")
    driver = Driver(tmp_path / "driver.log", "tests.worlds.spark_mill", *words)
    try:
        for file in range(files):
            middle = half_published(broker.address, file * LINES)
            wait_until(lambda: middle() or not driver.running, "rows are published", WAIT_S)  # noqa: B023
            assert driver.running, driver.log.read_text()
            doomed = cluster.executors()
            assert doomed
            for pid in doomed:
                os.kill(pid, signal.SIGKILL)
        driver.finish()
    finally:
        driver.end()
    judge()
    once_each(spark, tmp_path, files * LINES)
