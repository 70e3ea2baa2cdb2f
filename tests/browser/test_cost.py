"""What ten viewers cost the brokers, from /proc."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from tests.worlds.page_network import PageNetwork

VIEWERS = 10
MEASURED_S = 15.0
ROUNDS = 3
MOST = 0.01  # of a core, for each broker


def cpu_s(process: int) -> float:
    columns = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(columns[11]) + int(columns[12])) / os.sysconf("SC_CLK_TCK")


def shares(network: PageNetwork) -> dict[str, float]:
    """Of a core, that each broker takes."""

    def now() -> dict[str, float]:
        pids = {name: broker.process.pid for name, broker in network.by_name.items() if broker.process}
        return {name: cpu_s(pid) for name, pid in pids.items()}

    before, began_s = now(), time.monotonic()
    time.sleep(MEASURED_S)
    passed_s = time.monotonic() - began_s
    return {name: (used - before[name]) / passed_s for name, used in now().items()}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ten_viewers_cost_a_broker_less_than_a_hundredth_of_a_core(
    window: Callable[..., Page], network: PageNetwork
) -> None:
    """In turns without and with viewers. All clients stay, and nobody publishes: ten windows take the CPU
    from who does, and less traffic would look as if the page cost nothing."""
    network.publishing = False
    costs: dict[str, list[float]] = {name: [] for name in network.by_name}
    for _ in range(ROUNDS):
        idle = shares(network)
        pages = [window("/") for _ in range(VIEWERS)]
        for page in pages:
            expect(page.get_by_role("table", name="Brokers").locator("tbody tr")).to_have_count(5)
        watched = shares(network)
        for page in pages:
            page.close()
        for name, cost in costs.items():
            cost.append(watched[name] - idle[name])
    medians = {name: sorted(cost)[len(cost) // 2] for name, cost in costs.items()}
    for name, cost in costs.items():
        rounds = ", ".join(f"{each:+.2%}" for each in cost)
        sys.stdout.write(f"{name}: median {medians[name]:+.2%} of a core ({rounds})\n")
    assert max(medians.values()) < MOST
