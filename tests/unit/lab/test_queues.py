"""The queues paper's experiments (Q12): the ways, the formulas of section 3, the commands."""

from __future__ import annotations

import itertools
import json
from math import ceil, log
from pathlib import Path

import pytest

from postroad.cli import main
from postroad.lab import queues_delivery
from postroad.lab.experiments import EXPERIMENTS
from postroad.lab.queues_delivery import (
    SIZES,
    crossing,
    formulas_of_msmq,
    formulas_of_ring,
    run_distance,
    run_many,
    run_traffic,
    transmission_ms,
)
from postroad.lab.queues_network import LINKS, Distances, LeastCostPaths, Ring, path


def silent(text: str) -> None:
    """Whoever runs an experiment is told how it goes."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues_delivery, "SIZES", (16, 64))
    monkeypatch.setattr(queues_delivery, "PAIRS", 400)
    monkeypatch.setattr(queues_delivery, "AREA_SIZE", 32)
    monkeypatch.setattr(queues_delivery, "AREAS_MS", (10, 60))
    monkeypatch.setattr(queues_delivery, "MANY", 48)


def test_distances_are_whole_milliseconds_and_the_same_both_ways() -> None:
    """Section 4: from 1 ms to the longest, without a plane behind it."""
    distances = Distances(40)
    shares = [distances.shares(site) for site in range(40)]
    for one in range(40):
        for other in range(40):
            assert shares[one][other] == distances.share(one, other) == distances.share(other, one)
            assert distances.delay_ms(one, other, 15) in (range(1) if one == other else range(1, 16))
    seen = {distances.delay_ms(one, other, 15) for one in range(40) for other in range(one)}
    assert seen == set(range(1, 16))


def test_the_ring_routes_every_pair_within_the_hops_of_the_paper() -> None:
    """Q1: ceil(log16 N) hops; the nearest ids are the replicas."""
    count = 64
    ring = Ring(Distances(count), silent)
    for start in range(0, count, 3):
        for goal in range(count):
            way = ring.way(start, goal)
            assert (way[0], way[-1]) == (start, goal)
            assert len(way) - 1 <= ceil(log(count, 16))
    assert len(set(ring.replicas(5, 2)) - {5}) == 2


def test_msmq_takes_least_cost_paths_over_the_five_nearest() -> None:
    """Q12: Against Floyd and Warshall on the same links."""
    count, longest_ms = 30, 15
    distances = Distances(count)
    paths = LeastCostPaths(distances, longest_ms)
    assert all(len(links) >= LINKS for links in paths._links)
    costs = [[0 if one == other else 1 << 30 for other in range(count)] for one in range(count)]
    for one, links in enumerate(paths._links):
        for other, delay_ms in links.items():
            costs[one][other] = delay_ms
    for between in range(count):
        for one in range(count):
            for other in range(count):
                costs[one][other] = min(costs[one][other], costs[one][between] + costs[between][other])
    for start in range(count):
        before = paths.tree(start)
        for goal in range(count):
            way = path(before, start, goal)
            steps = itertools.pairwise(way)
            assert sum(paths._links[one][other] for one, other in steps) == costs[start][goal]
    assert path([-1, -1], 0, 1) == []


def test_the_formulas_are_those_of_section_3() -> None:
    """Q12: Worked by hand for 3 hops, 10 ms a link and K = 3."""
    message, ack = transmission_ms(8 * 1024) + 10, transmission_ms(8 * 64) + 10
    ring = formulas_of_ring(3, 10)
    assert ring["online_ms"] == pytest.approx(5 * message)
    assert ring["offline_ms"] == pytest.approx(4 * message)
    assert ring["offline_rtt_ms"] == ring["online_rtt_ms"] == pytest.approx(5 * message + 5 * ack)
    assert ring["offline_express_rtt_ms"] == pytest.approx(4 * message + 4 * ack)
    assert (ring["online_messages"], ring["offline_messages"]) == (10, 20)
    assert (ring["offline_express_messages"], ring["offline_unreliable_messages"]) == (14, 11)
    msmq = formulas_of_msmq(3, 10)
    assert msmq["recoverable_ms"] == pytest.approx(3 * message + 4 * 7.5)
    assert msmq["recoverable_rtt_ms"] == pytest.approx(3 * message + 3 * ack + 8 * 7.5)
    assert (msmq["messages"], msmq["unreliable_messages"]) == (12, 6)


def test_curves_cross_between_two_places_or_nowhere() -> None:
    assert crossing((10, 20), (1, 3), (2, 2)) == 15
    assert crossing((10, 20), (1, 2), (3, 4)) is None


def test_messages_on_the_wire_are_as_the_formulas_say(tmp_path: Path) -> None:
    """Q12: Figure 7. An application may by chance live where a broker is: a message less."""
    measured, paper = run_traffic(1.0, tmp_path, silent)
    for name, value in measured.items():
        if name.endswith("_messages"):
            assert value == pytest.approx(paper[name], rel=0.05), name
    assert measured["64.msmq_messages"] > measured["16.msmq_messages"]
    assert {file.name for file in tmp_path.iterdir()} == {"figure7a.png", "figure7b.png"}
    assert all(size >= 16 for size in SIZES)


def test_the_delay_grows_with_the_area_for_the_ring_and_hardly_for_msmq(tmp_path: Path) -> None:
    """Figure 8, and section 4.3's reason for it."""
    measured, paper = run_distance(1.0, tmp_path, silent)
    assert measured["60.pbm_online_ms"] > 2 * measured["10.pbm_online_ms"]
    assert measured["60.msmq_recoverable_ms"] < 2 * measured["10.msmq_recoverable_ms"]
    for name in ("pbm_online_ms", "pbm_online_rtt_ms", "msmq_recoverable_ms"):
        assert measured[f"60.{name}"] == pytest.approx(paper[f"60.{name}"], rel=0.2)
    assert {file.name for file in tmp_path.iterdir()} == {"figure8a.png", "figure8b.png"}


def test_the_command_prints_flat_figures_and_table_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Figure 6 and Table 2."""
    assert main(["lab", "run", "queues-scale", "--json", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["name"] == "queues-scale"
    assert {"64.pbm_online_ms", "16.msmq_recoverable_rtt_ms"} <= set(printed["measured"]) & set(
        printed["paper"]
    )
    assert printed["measured"]["usd_per_site.msmq_clustered"] == 11_000
    assert {file.name for file in tmp_path.iterdir()} == {"figure6a.png", "figure6b.png"}


def test_a_further_run_has_its_own_name() -> None:
    assert {"queues-scale", "queues-traffic", "queues-distance", "queues-10000"} <= set(EXPERIMENTS)
    measured, paper = run_many(1.0, None, silent)
    assert measured["48.pbm_hops"] <= ceil(log(48, 16))
    assert set(paper) <= set(measured)
