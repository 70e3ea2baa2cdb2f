"""Pages about the lake do what they say: their blocks are typed here, with the tests' session of Spark.

docs/tutorial/first-lake.md; in `make soak` docs/reference/pipeline.md, at the broker and lake of the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyspark.sql import SparkSession
from tests.worlds.pages import Desk
from tests.worlds.processes import Brokers

from postroad.cli import pipeline
from postroad.spark import session as sessions
from postroad.spark.progress import watched


@pytest.fixture
def desk(brokers: Brokers, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """Commands and programs make a session and stop it; here they share the one there is."""

    @contextmanager
    def shared(doing: str, master: str, remote: str) -> Iterator[SparkSession]:
        del master, remote
        with watched(spark, doing):
            yield spark

    @contextmanager
    def session() -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(pipeline, "_spark", shared)
    monkeypatch.setattr(sessions, "make_session", lambda: spark)
    monkeypatch.setattr(sessions, "session", session)
    started = Desk(brokers, inside=frozenset({"pipeline"}))
    try:
        yield started
    finally:
        started.close()


@pytest.mark.filterwarnings("default")  # of DuckDB
def test_the_first_lake(desk: Desk) -> None:
    desk.type_page("docs/tutorial/first-lake.md")
    page = (desk.folder / "audit.html").read_text()
    assert "of what was due arrived" in page
    assert "billing" in page


@pytest.mark.soak
@pytest.mark.filterwarnings("default")  # of DuckDB
def test_the_reference(desk: Desk) -> None:
    """Its SQL is in tests/spark/test_documents.py."""
    desk.type_page("docs/tutorial/first-lake.md")
    desk.type_page("docs/reference/pipeline.md")
    assert "orders/eu" in desk.printed  # of the last block, which counts topics
    assert "copies/eu" in desk.command("postroad sub 'copies/#' --durable look --since 1h --count 1")
