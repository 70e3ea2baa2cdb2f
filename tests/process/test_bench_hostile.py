"""`postroad bench hostile`: the honest ones lose nothing beside an attack, and the figures are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.worlds.processes import SOURCE


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "postroad", "bench", "hostile", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        check=False,
    )


def test_nothing_is_lost_beside_attacks() -> None:
    done = bench("--attacks", "do not read, sends garbage", "--seconds", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["name"] == "hostile"
    assert len(printed["rows"]) == 2
    for row in printed["rows"]:
        assert row["lost"] == 0
        for phase in ("before", "during", "after"):
            assert row[f"plain_p99_us_{phase}"] > 0
            assert row[f"durable_p99_us_{phase}"] > 0
            assert row[f"memory_{phase}"] > 0


def test_attacks_on_queues_are_no_breach_of_the_protocol() -> None:
    """Found: the broker refused their first frame, so they showed nothing."""
    done = bench("--attacks", "inboxes", "--seconds", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    assert [row["begun"] for row in json.loads(done.stdout)["rows"]] == [1, 1]


def test_an_attack_that_is_none_is_one_line() -> None:
    done = bench("--attacks", "kindness")
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert "no attack is called 'kindness'" in line
