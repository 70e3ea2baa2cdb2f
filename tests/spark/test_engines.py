"""P10: the same work on a standalone cluster of separate processes, and on Spark Connect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.worlds.processes import KEEP, Brokers, configured
from tests.worlds.spark_engines import Cluster, ConnectServer, Driver, Engine
from tests.worlds.spark_mill import fill, once_each
from tests.worlds.spark_traces import to_trace

LINES = 500


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made: Engine = request.param(tmp_path / "engine")
    try:
        yield made
    finally:
        made.end()


ALL = ["mill", "batch", "land", "trace", "compact"]


@pytest.mark.parametrize(
    ("engine", "steps"),
    [
        (Cluster, ALL),
        (ConnectServer, ALL),
    ],
    indirect=["engine"],
)
@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_pipeline_runs_on(
    spark: SparkSession, engine: Cluster | ConnectServer, steps: list[str], brokers: Brokers, tmp_path: Path
) -> None:
    """P10: Source, sink, landing, bulk trace; `--master` and `--remote` of the commands."""
    broker = brokers.start("b1", extra=configured(tmp_path, KEEP))
    fill(tmp_path, 2, LINES)
    judge = to_trace(spark, tmp_path)
    driver = Driver(
        tmp_path / "driver.log", "tests.worlds.spark_mill", str(tmp_path), broker.address, engine.url, *steps
    )
    try:
        driver.finish()
    finally:
        driver.end()
    judge()
    once_each(spark, tmp_path, 2 * LINES)
