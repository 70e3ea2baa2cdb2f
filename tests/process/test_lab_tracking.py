"""T13: latency of a row of Table 2, measured with real brokers."""

from __future__ import annotations

from pathlib import Path

from postroad.lab.tracking_table2 import LATENCY_RATE, TABLE, measured_latency


def test_a_row_is_measured_beside_a_broker_without_tracking(tmp_path: Path) -> None:
    """T13."""
    figures = measured_latency(TABLE[4], 2.0, tmp_path)
    assert figures["lost"] == 0
    assert 0 < figures["p50_us"] <= figures["p99_us"]
    assert 0 < figures["cpu_us_per_event"] < 1e6 / LATENCY_RATE
    # Of two seconds drawn again and again; the difference over both need not lie within.
    low, high = (figures[f"p99_over_null_percent_{edge}"] for edge in ("low", "high"))
    assert -100 < low <= high
    assert figures["p99_over_null_percent"] > -100
