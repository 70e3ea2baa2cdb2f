"""The durable paper's experiments on real brokers (D13), each as short as it can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from postroad.lab import (
    durable_autoack,
    durable_crash,
    durable_crowd,
    durable_disconnect,
    durable_pfs,
    durable_scaling,
)
from postroad.lab.durable_crowd import Crowd
from postroad.lab.durable_disconnect import Look
from postroad.lab.durable_figures import draw_autoack, draw_rates, draw_scaling
from postroad.lab.durable_network import network
from postroad.lab.experiments import EXPERIMENTS


def silent(text: str) -> None:
    """Whoever runs an experiment is told how it goes."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few subscribers; and a machine that is busy with other tests may deliver late."""
    monkeypatch.setattr(durable_crowd, "FRESH_S", 5.0)
    monkeypatch.setattr(durable_disconnect, "SUBSCRIBERS", 6)
    monkeypatch.setattr(durable_crash, "SUBSCRIBERS", 6)
    monkeypatch.setattr(durable_crash, "NORMAL_S", 1.0)
    monkeypatch.setattr(durable_autoack, "SUBSCRIBERS", (8,))


def test_every_experiment_of_the_paper_is_there() -> None:
    """D13."""
    names = {"scaling", "disconnect", "catchup", "pfs", "autoack", "crash"}
    assert {f"durable-{name}" for name in names} <= set(EXPERIMENTS)


def test_subscribers_that_disconnect_get_everything_once(tmp_path: Path) -> None:
    """D12, D13: the experiment itself fails when an event is missing, comes again or is a gap."""
    measured, paper = durable_disconnect.run_catchup(4.0, tmp_path, silent)
    assert measured["catchups"] == 6
    assert measured["catchup_p10_s"] <= measured["catchup_p50_s"] <= measured["catchup_max_s"]
    assert {"catchup_p10_s", "catchup_p90_s"} <= set(paper)
    assert (tmp_path / "figure5.png").stat().st_size > 1_000


def test_a_crash_of_the_hosting_broker_is_survived_by_all(tmp_path: Path) -> None:
    measured, _ = durable_crash.run(1.0, tmp_path, silent)
    assert measured["crash_s"] >= 1.0
    assert measured["all_caught_up_s"] > 0
    assert {one.name for one in tmp_path.iterdir()} == {"figure7.png", "figure8.png"}


def test_what_is_acknowledged_one_by_one_is_on_disk(tmp_path: Path) -> None:
    """D11: the token that the broker keeps survives its crash."""
    measured, _ = durable_autoack.run(0.5, None, silent)
    assert measured["subscribers_8.unsaved_subscribers"] == 0
    assert measured["subscribers_8.events_per_s"] > 0
    draw_autoack(dict.fromkeys(durable_autoack.PAPER, 1.0), durable_autoack.PAPER, tmp_path)
    draw_scaling({}, durable_scaling.PAPER, tmp_path)
    draw_rates([Look(0.0, 0, 0), Look(1.0, 2, 1)], tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {"autoack.png", "figure4.png", "figure6.png"}


def test_a_rate_is_measured_with_and_without_disconnections() -> None:
    with network(2) as made:
        crowd = Crowd(made.phb)
        try:
            crowd.add(made.hosts, 8)
            crowd.resume()
            quiet = durable_scaling.measure(crowd, made, 1.0)
            crowd.remove(4)
            crowd.add(made.hosts, 4)
            away = durable_scaling.disconnecting(crowd, made, 2.0)
            crowd.run(30.0, until=lambda: all(one.session for one in crowd.subscribers))
            crowd.drain()
        finally:
            crowd.close()
    assert quiet.events_per_s > 0
    assert quiet.cpu_us_per_event > 0
    assert away.events_per_s > 0
    assert all(one.caught_up or one.back_ns for one in crowd.subscribers), "everybody was away once"


def test_filtering_records_are_far_smaller_than_the_events(tmp_path: Path) -> None:
    """D6, D13: 25 times less data is the bar; how much faster it is depends on the machine."""
    measured, paper = durable_pfs.run(2.0, tmp_path, silent)
    assert measured["batch_1.times_less_data"] > paper["batch_1.times_less_data"]
    assert measured["batch_8.times_less_data"] > paper["batch_1.times_less_data"]
    assert (tmp_path / "pfs.png").exists()


def test_rates_are_those_between_two_looks() -> None:
    answer = {
        "constreams": [{"pubend": "p", "latest_delivered": 3_000_000}],
        "subscriptions": [{"released": {"p": 1_000_000}}, {"released": {"p": 2_000_000}}, {"released": {}}],
    }
    seen = durable_disconnect.look(answer, "p", 2.0)
    assert seen == Look(2.0, 3_000_000, 1_000_000)
    assert durable_disconnect.look(answer, "q", 2.0) is None
    looks = [Look(0.0, 2_000_000, 1_000_000), Look(2.0, 3_000_000, 1_000_000)]
    assert durable_disconnect.rates(looks, "latest_delivered") == [500.0]
    assert durable_disconnect.rates(looks, "released") == [0.0]
