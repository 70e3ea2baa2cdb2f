"""The same seed is the same world, in any process and under any hash seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SEED, MINUTES = 10, 1.4
PROGRAM = f"""
import msgspec
from postroad.sim.runs import run_seed
print(msgspec.json.encode(run_seed({SEED}, {MINUTES}, None)).decode())
"""


def run(hash_seed: str) -> dict[str, object]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    outcome = json.loads(done.stdout)
    assert isinstance(outcome, dict)
    return outcome


def test_the_same_seed_gives_the_same_trace_under_any_hash_seed() -> None:
    first, second = run("1"), run("2")
    assert first["digest"] == second["digest"]
    assert first == second
    assert first["deliveries"]
    assert first["faults"]
