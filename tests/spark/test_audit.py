"""P7: the audit finds every fault that was planted in a simulated network, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.worlds.spark_traffic import START_MS, SUBSCRIBED, Traffic, lake_of

from postroad.errors import StorageError, UsageError
from postroad.history.bulletins import DeliveryReport, decode_deliveries
from postroad.ids import pubend_id, pubend_text
from postroad.spark.audit import LANDING, LOSSES, as_rows, audit, read_subscriptions
from postroad.spark.lake import rows
from postroad.spark.report import Findings, render, unseen_text, write_report
from postroad.spark.trace.topology import Place, link_loads


def test_every_planted_fault_is_found_and_nothing_else(spark: SparkSession, tmp_path: Path) -> None:
    """P7, issue 5: lost, duplicated, reordered and late deliveries."""
    traffic = Traffic(3)
    traffic.plant()
    traffic.expected_reordered()
    assert {kind for kind, _, _ in traffic.planted} == {
        *("missing", "duplicated", "reordered", "late", "unwanted")
    }
    lake = lake_of(spark, tmp_path / "lake", traffic)
    found = audit(lake, SUBSCRIBED)
    assert {(row["kind"], row["subscriber"], row["id"]) for row in as_rows(found.faults)} == traffic.planted
    summary = {row["subscriber"]: row for row in as_rows(found.summary)}
    assert summary["never"]["due"] == summary["never"]["delivered"] == 0
    assert summary["dear"]["pending"] > 0
    assert summary["also-dear"]["redelivered"] == 1
    for kind in ("missing", "duplicated", "reordered", "late", "unwanted"):
        for name, row in summary.items():
            assert row[kind] == sum(one[:2] == (kind, name) for one in traffic.planted)
    everything = summary["all"]
    assert everything["due"] == everything["delivered"] + everything["missing"] + 1  # the gap
    assert 0 < everything["latency_us"][0] <= everything["latency_us"][2] <= everything["latency_max_us"]
    steps = as_rows(found.timeline)
    assert sum(step["deliveries"] for step in steps) == sum(row["delivered"] for row in summary.values())
    losses = as_rows(found.losses)
    for kind in LOSSES:
        assert sum(step[kind] for step in losses) == sum(row[kind] for row in summary.values())
    assert {(step["at"] - steps[0]["at"]) % steps[0]["step_us"] for step in losses} == {0}
    assert as_rows(found.unseen) == []
    flows = {(row["origin"], row["broker"]): row["count"] for row in as_rows(found.flows)}
    assert set(flows) == {(f"{origin:08x}", "00000004") for origin in (1, 2, 3)}


def test_without_faults_nothing_is_found(spark: SparkSession, tmp_path: Path) -> None:
    """P7."""
    traffic = Traffic(9)
    traffic.expected_reordered()
    lake = lake_of(spark, tmp_path, traffic)
    found = audit(lake, SUBSCRIBED)
    natural = {(row["kind"], row["subscriber"], row["id"]) for row in as_rows(found.faults)}
    assert natural == traffic.planted == set()

    # Reports 2 and 3 of broker 4 could not be written, and landing was too late for 5 s of broker 2.
    report = DeliveryReport(1 << 16)
    report.acknowledged([("all", 1)], pubend_id(1, 0), 7, START_MS * 1000)
    (payload,) = report.take()
    lake.append("deliveries", rows.deliveries(4, 4, decode_deliveries(payload)))
    report.gap([(f"{LANDING}-x", 0)], pubend_id(2, 0), START_MS, START_MS + 5_000_000, START_MS * 1000)
    (payload,) = report.take()
    lake.append("deliveries", rows.deliveries(2, 0, decode_deliveries(payload)))
    unseen = as_rows(audit(lake, SUBSCRIBED).unseen)
    assert unseen == [
        {"broker": "00000002", "reports": 0, "spans": 1, "seconds": 5.0},
        {"broker": "00000004", "reports": 2, "spans": 0, "seconds": 0.0},
    ]
    text = unseen_text(unseen, {"00000004": Place(name="b4", links={})})
    assert "2 delivery reports and 1 spans of time of brokers 00000002, b4" in text


def test_subscriptions_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "subs"
    path.write_text('{"name": "a", "topic": "x/#", "where": "n > 1", "lag_s": 0.5}\n\n{"name": "b"}\n')
    assert [one.name for one in read_subscriptions(path)] == ["a", "b"]
    path.write_text('{"name": "a"}\n{"name": "b", "where": "n >"}\n')
    with pytest.raises(UsageError, match=r"line 2 of .* is no subscription"):
        read_subscriptions(path)
    path.write_text("")
    with pytest.raises(UsageError, match="0 subscriptions"):
        read_subscriptions(path)
    with pytest.raises(UsageError, match="subs --json"):
        read_subscriptions(tmp_path / "none")


def test_a_page_with_little_to_show(tmp_path: Path) -> None:
    """P7: nothing delivered yet, no links told; what is nearly whole is not called whole."""
    row = dict.fromkeys(("due", "delivered", "pending", *LOSSES), 0)
    nothing: dict[str, Any] = {"latency_us": None, "latency_max_us": None}
    summary = [{"subscriber": "<b>", "topic": "#", "where": "n < 3", **row, **nothing}]
    found = Findings(
        summary=summary,
        timeline=[],
        losses=[],
        faults=[],
        unseen=[],
        places={},
        flows={},
        storage=[("events", 0, 0, 0)],
        late_us=1,
    )
    page = render(found)
    for text in (
        "No deliveries were reported",
        "No broker has told",
        "Nothing was lost",
        "None found",
        "100 %",
    ):
        assert text in page
    assert "&lt;b&gt;" in page
    summary[0] |= {"due": 10**8, "missing": 1, "delivered": 10**8 - 1, "latency_us": [1, 2, 3]}
    page = render(found)
    assert "99.9999 %" in page
    assert ">100 %<" not in page
    target = tmp_path / "page.html"
    target.mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        write_report(target, found)
    assert list(tmp_path.iterdir()) == [target]


def test_pubends_are_named_as_in_the_events() -> None:
    (row,) = rows.events([Traffic(1).events[0]]).to_pylist()
    assert row["pubend"] == pubend_text(Traffic(1).events[0][4])


def test_loads_follow_the_cheapest_paths() -> None:
    topology = {
        "1": Place("one", {"2": 1, "3": 5}),
        "2": Place("two", {"1": 1, "3": 1}),
        "3": Place("three", {"1": 5, "2": 1}),
    }
    flows = {("1", "3"): 10, ("2", "2"): 7, ("9", "3"): 1}
    assert link_loads(topology, flows) == {("1", "2"): 10, ("2", "3"): 10}
