"""The paper's tracking experiment (T13): its table, what is stored, the command."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from postroad.bench.tracking import (
    BESIDE,
    BESIDE_CPU,
    BESIDE_P99,
    SECOND_NS,
    aims,
    compared,
    least_bits,
    noise,
    side_by_side,
    stored,
)
from postroad.bench.workloads import Beside
from postroad.cli import main
from postroad.lab.experiments import EXPERIMENTS
from postroad.lab.tracking_table2 import RATE, TABLE, Row, measured_storage, paper_storage, toml
from postroad.net.configure import configure
from postroad.tracking.settings import TrackingConfig

_CHANCE = np.random.default_rng(7)
# Ten seconds of 400 events, of which one is slow for all.
_LEFT = np.arange(4000) * SECOND_NS // 400
LATENCIES = np.stack([_LEFT, _CHANCE.integers(100_000, 900_000, 4000)], axis=1)
LATENCIES[_LEFT // SECOND_NS == 4, 1] *= 5
NONE = Beside(LATENCIES, np.full(10, 0.05))
BY_NAME = {row.name: row for row in TABLE}


def test_the_table_is_whole_and_its_column_follows_from_the_rate() -> None:
    """T13: "stores full buffers" says whether a buffer is full at 5,000 messages a second within Tp."""
    assert len(TABLE) == len(BY_NAME) == 21
    assert all(
        row.full == (row.buffer_messages <= RATE * row.tp_s) for row in TABLE if row.strategy != "none"
    )


@pytest.mark.parametrize("name", ["async_10k_tp1", "bf_99.999_10k_tp1", "bf_99_10k_tp1", "bf_99_10k_tp2"])
def test_what_is_stored_is_what_the_parameters_say(name: str) -> None:
    """T13: bytes per message and disk forces, beside the paper's own arithmetic."""
    row = BY_NAME[name]
    ours, paper = measured_storage(row), paper_storage(row)
    assert (ours["full"] > 0.5) == bool(paper["full"])
    assert ours["forces_per_s"] == pytest.approx(paper["forces_per_s"], rel=0.1)
    if row.strategy == "bloom":
        assert ours["bytes_per_message"] == pytest.approx(paper["bytes_per_message"], rel=0.1)
        assert ours["gzip_bytes_per_message"] == pytest.approx(paper["gzip_bytes_per_message"], rel=0.1)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_row_is_a_valid_configuration(row: Row, tmp_path: Path) -> None:
    file = tmp_path / "row.toml"
    file.write_text(toml(row.config()))
    assert tomllib.loads(file.read_text())["tracking"]["strategy"] == row.strategy
    config = configure({}, file).broker.tracking
    wanted = row.config()
    assert (config.bits, config.capacity, config.hashes) == (wanted.bits, wanted.capacity, wanted.hashes)
    assert (config.persist_us, config.retain, config.adaptive) == (
        wanted.persist_us,
        wanted.retain,
        wanted.adaptive,
    )
    assert config.log_bytes == wanted.log_bytes


def test_the_default_strategy_stores_what_was_promised() -> None:
    """At most 1.44 log2(1/fpp) plus 5% bits per message and history, ten times less than the log."""
    load = {"seconds": 100, "publishers": 200, "subscribers": 500, "rate": RATE}
    bloom = stored(TrackingConfig(), **load).bits_per_key
    exact = stored(TrackingConfig(strategy="exact"), **load).bits_per_key
    assert bloom <= least_bits(TrackingConfig()) * 1.05
    assert exact >= 10 * bloom


def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in EXPERIMENTS)
    assert main(["lab", "run", "alchemy"]) == 2
    assert "unknown experiment 'alchemy'" in capsys.readouterr().err


def test_what_counts_is_the_difference_within_a_round() -> None:
    """A machine that is slow for some rounds slows all strategies; paired differences do not see it."""
    slow = [1.0, 1.0, 8.0, 1.0, 3.0]
    base = [{"p50_us": 100 * by, "p99_us": 500 * by, "cpu_us_per_event": 40.0} for by in slow]
    dear = [{"p50_us": 101 * by, "p99_us": 510 * by, "cpu_us_per_event": 42.0} for by in slow]
    row = compared(dear, base)
    assert row["p99_us"] == 510
    assert row["p99_us_over_none_percent"] == pytest.approx(2.0)
    assert row["p99_us_over_none_percent_quartiles"] == pytest.approx([2.0, 2.0])
    assert row["cpu_us_per_event_over_none_percent"] == pytest.approx(5.0)
    assert row["rounds"] == 5
    nothing = {"workload": "none again", **compared(base, base), **side_by_side([NONE], [NONE])}
    assert noise([row | {"workload": "bloom"}, nothing])["noise of p99_us, percent"].startswith("+0.0,")


def test_side_by_side_what_disturbs_all_of_them_says_nothing() -> None:
    """p99 of all events, and an interval that is narrow where seconds are alike, wide where they are not."""
    same = side_by_side([NONE], [NONE])
    assert same["beside_cpu_us_per_event"] == pytest.approx(125.0)
    dear = side_by_side([Beside(LATENCIES * (1, 1.02), NONE.cpu * 1.02)], [NONE])
    for name in BESIDE:
        assert same[name] == 0
        assert same[f"{name}_interval"] == [0, 0]
        assert dear[name] == pytest.approx(2.0)
        assert dear[f"{name}_interval"] == pytest.approx([2.0, 2.0])
    alone = LATENCIES.copy()
    alone[alone[:, 0] < SECOND_NS, 1] *= 20  # one second of one broker only
    cpu = NONE.cpu.copy()
    cpu[0] *= 3
    row = side_by_side([Beside(alone, cpu)], [NONE])
    low, high = row[f"{BESIDE_P99}_interval"]
    assert low <= 0 < 100 < high
    low, high = row[f"{BESIDE_CPU}_interval"]
    assert low <= 0 < 40 < high


def test_processes_that_differ_for_as_long_as_they_run_make_the_interval_wide() -> None:
    """Each sitting has its own; one that is dear by itself is not what the code costs."""
    dear = Beside(LATENCIES * (1, 1.1), NONE.cpu * 1.1)
    row = side_by_side([dear, NONE, NONE, NONE], [NONE] * 4)
    assert row[BESIDE_CPU] == pytest.approx(2.5)
    low, high = row[f"{BESIDE_CPU}_interval"]
    assert low == pytest.approx(0.0)
    assert 5.0 <= high < 10.0


@pytest.mark.parametrize(
    ("interval", "said"), [((-1.0, 2.0), "met"), ((6.0, 9.0), "missed"), ((-5.0, 9.0), "not shown")]
)
def test_an_aim_is_met_only_where_the_figures_are_sure(interval: tuple[float, float], said: str) -> None:
    common = {name: value for one in BESIDE for name, value in ((one, 1.0), (f"{one}_interval", interval))}
    rows = [
        {"workload": name, "stored_bits_per_key": bits, **common}
        for name, bits in (("exact", 172.0), ("bloom", 15.9))
    ]
    p99, cpu, *others = aims(rows)
    assert p99[3].startswith(said)
    assert cpu[3].startswith(said)
    assert [one[3] for one in others] == ["met"] * 2
