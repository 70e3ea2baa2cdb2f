"""One Spark session for the whole run: starting one takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.worlds.certificates import Certificates
from tests.worlds.processes import Brokers
from tests.worlds.spark_engines import LIGHT

from postroad.spark.session import make_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    made = make_session(
        master="local[2]",
        name="tests",
        settings={
            "spark.sql.shuffle.partitions": "2",
            "spark.default.parallelism": "2",
            "spark.driver.memory": "1g",
            "spark.driver.defaultJavaOptions": LIGHT,
        },
    )
    yield made
    made.stop()


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    started = Brokers(tmp_path)
    try:
        yield started
    finally:
        started.end()


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    folder = tmp_path / "certificates"
    folder.mkdir()
    return Certificates(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first jobs of a session are slow, and slower on a busy machine."""
    for item in items:
        if "tests/spark/" in item.nodeid and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))
