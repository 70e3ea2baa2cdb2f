"""T13: figures 1, 3, 4 and 5, drawn from what the lab measured, whole or in part."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from postroad.errors import UsageError
from postroad.lab.tracking_figures import BITS_PER_MESSAGE, KEYS, PROBES, best_hashes, draw, measured_rates
from postroad.lab.tracking_table2 import TABLE, paper_storage
from postroad.tracking.bloom import false_positive_rate

OVER_NULL = ("p50_over_null_percent", "p99_over_null_percent")


def test_figure_1_uses_the_optimal_number_of_hashes() -> None:
    """Section 4.1: k near ln 2 m/n."""
    for bits in BITS_PER_MESSAGE:
        assert abs(best_hashes(bits) - bits * math.log(2)) <= 1


def test_figure_1_measures_what_equation_1_says() -> None:
    """Within six standard deviations of the binomial, at each number of bits."""
    for bits, rate in zip(BITS_PER_MESSAGE, measured_rates(), strict=True):
        expected = false_positive_rate(bits * KEYS, KEYS, best_hashes(bits))
        # The filter itself is a draw, too: its share of set bits moves the rate by about a percent.
        deviation = math.sqrt(expected * (1 - expected) / PROBES) + 0.02 * expected
        assert abs(rate - expected) <= 6 * deviation + 1 / PROBES


@pytest.mark.parametrize("whole", [True, False])
def test_four_figures_are_drawn(tmp_path: Path, whole: bool) -> None:
    """T13."""
    pytest.importorskip("matplotlib")
    rows = TABLE if whole else TABLE[:2]
    paper = {f"{row.name}.{name}": value for row in rows for name, value in paper_storage(row).items()}
    measured = paper | {f"{row.name}.{name}": 1.0 for row in rows for name in OVER_NULL}
    draw(measured, paper, tmp_path / "not" / "there yet")
    made = sorted((tmp_path / "not" / "there yet").iterdir())
    assert [path.name for path in made] == ["figure1.png", "figure3.png", "figure4.png", "figure5.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_without_matplotlib_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"install postroad\[lab\]"):
        draw({}, {}, tmp_path / "figures")
    assert not (tmp_path / "figures").exists()
