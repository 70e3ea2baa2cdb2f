"""`bench pipeline` at a size that says nothing but that it works (P1, P3, P5)."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postroad.bench import pipeline
from postroad.bench.pipeline import Bench, aims
from postroad.bench.pipeline_spark import different, exact_join
from postroad.bench.pipeline_traffic import make_traffic, shape
from postroad.spark.lake.tables import Lake
from postroad.spark.trace.bulk import read_ids, trace


def test_the_shapes_have_as_many_filters_as_asked() -> None:
    for filters in (1, 10, 100):
        assert shape(filters).filters == filters
    assert shape(100).happenings == 97


def test_the_bulk_trace_and_the_exact_log_join_agree(spark: SparkSession, tmp_path: Path) -> None:
    """P5: what is compared answers the same question."""
    traffic = make_traffic(tmp_path, shape(10), 300)
    lake = Lake(spark, traffic.lake)
    traced = trace(lake, read_ids(spark, traffic.ids)).collect()
    exact = exact_join(spark, traffic.ids, traffic.log)
    joined = {row.id: row for row in exact.collect()}
    assert len(traced) == len(joined) == 300
    assert different(trace(lake, read_ids(spark, traffic.ids)), exact) == (300, 0)
    less = exact.selectExpr("id", "origin", "slice(route, 2, 9) AS route", "receivers")
    assert different(less.limit(200), exact) == (300, 300), "what is missing counts"
    for row in traced:
        log = joined[row.id]
        assert (row.verdict, row.origin) == ("complete", log.origin)
        steps = {(one.broker, one["from"]) for one in row.route if one["from"]}
        assert steps == {(one.broker, one["from"]) for one in log.route}
        got = {(one.subscriber, one.broker) for one in row.receivers}
        assert got == {(one.subscriber, one.broker) for one in log.receivers}
    assert traffic.filter_bytes > 0
    assert traffic.log_bytes > 0


@pytest.mark.soak
def test_every_figure_is_there(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "FILTERS", (1, 10))
    monkeypatch.setattr(pipeline, "WARM_UPS", 0)
    said: list[str] = []
    bench = Bench(spark, tmp_path, rounds=1, tell=said.append)
    rows = bench.edges(500) + bench.traces(500)
    assert [(row["system"], row["workload"]) for row in rows] == [
        ("postroad", "sink"),
        ("postroad", "source"),
        ("spark, empty rows", "source"),
        ("postroad", "landing"),
        ("postroad", "trace, 1 filters per id"),
        ("exact-log join", "trace, 1 filters per id"),
        ("postroad", "trace, 10 filters per id"),
        ("exact-log join", "trace, 10 filters per id"),
        ("postroad", "growth, 50 ids"),
        ("postroad", "growth, 500 ids"),
        ("postroad", "growth, 50 to 500 ids"),
    ]
    for row in rows[:4]:
        assert row["rows_per_s"] > 0
        assert row["cpu_us_per_row"] > 0
    for row in rows[4:8]:
        assert row["cpu_us_per_id"] > 0
        assert row["ids_per_s_per_core"] > 0
        assert row["shuffled_bytes_per_id"] > 0
        assert row["stored_bytes_per_id"] > 0
    assert rows[3]["stored_bytes_per_row"] > 0
    assert rows[-1]["ids_times"] == 10
    assert len(aims(rows)) == 7
