"""P10: the same work on a standalone cluster of separate processes, and on Spark Connect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.process.conftest import Brokers
from tests.process.test_durable_release import configured
from tests.spark.engines import Cluster, ConnectServer, Driver, Engine
from tests.spark.mill import KEEP, fill, once_each
from tests.spark.networks import World
from tests.spark.test_paths import FINE, as_row, same
from tests.spark.test_trace import ids_file, lake_of

from postroad.tracking.settings import TrackingConfig

LINES = 500


def to_trace(spark: SparkSession, folder: Path) -> Callable[[], None]:
    """Make what the step `trace` of the mill needs; call the answer to judge what came of it."""
    world = World(4, TrackingConfig(**FINE), 3, extra=0)
    world.happen(30, faults=False)
    world.stop()
    lake_of(spark, folder / "traces", world)
    ids = list(world.truth)
    ids_file(folder / "ids", ids)

    def judge() -> None:
        rows = {row.id: row for row in spark.read.parquet(str(folder / "traced")).collect()}
        assert len(rows) == len(ids)
        for result in world.live(*ids):
            same(as_row(result), rows[result.id].asDict(recursive=True))

    return judge


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
    """Source, sink, landing, bulk trace; `--master` and `--remote` of the commands."""
    broker = brokers.start("b1", extra=configured(tmp_path, KEEP))
    fill(tmp_path, 2, LINES)
    judge = to_trace(spark, tmp_path)
    driver = Driver(
        tmp_path / "driver.log", "tests.spark.mill", str(tmp_path), broker.address, engine.url, *steps
    )
    try:
        driver.finish()
    finally:
        driver.end()
    judge()
    once_each(spark, tmp_path, 2 * LINES)
