"""The paper's tracking experiment (T13): its table, what is stored, the command."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from postroad.bench.tracking import compared, least_bits, noise, stored
from postroad.cli import main
from postroad.lab.experiments import EXPERIMENTS
from postroad.lab.tracking_table2 import RATE, TABLE, Row, measured_storage, paper_storage, toml
from postroad.net.configure import configure
from postroad.tracking.settings import TrackingConfig

BY_NAME = {row.name: row for row in TABLE}


def test_the_table_is_whole_and_its_column_follows_from_the_rate() -> None:
    """T13: "stores full buffers" says whether a buffer is full at 5,000 messages a second within Tp."""
    assert len(TABLE) == len(BY_NAME) == 21
    assert all(row.full == (row.held <= RATE * row.tp_s) for row in TABLE if row.strategy != "none")


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
    nothing = {"workload": "none again", **compared(base, base)}
    assert noise([row | {"workload": "bloom"}, nothing])["noise of p99_us, percent"].startswith("+0.0,")
