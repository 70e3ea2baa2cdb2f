"""`postroad sim`: what it prints and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.worlds.processes import SOURCE, wait_until

from postroad.cli import main
from postroad.sim import runs
from postroad.sim.queue_scenario import QueueOutcome
from postroad.sim.scenario import Outcome

HOLDS = Outcome(
    seed=7,
    minutes=1.5,
    kind="durable",
    brokers=3,
    pinned=False,
    digest="d1",
    published=10,
    accepted=9,
    deliveries=20,
    durable_deliveries=5,
    owed=18,
    gaps=1,
    subscriptions=4,
    frames=100,
    faults={"crash": 2, "cut": 1},
)
VIOLATES = replace(HOLDS, rule="once", text="s0 got it twice", story=("first", "then"))


def pretend(monkeypatch: pytest.MonkeyPatch, *outcomes: Outcome) -> list[object]:
    """Runs that end as told; the calls that were made."""
    calls: list[object] = []
    left = list(outcomes)

    def run_seed(*call: object) -> Outcome:
        calls.append(call)
        return left.pop(0)

    def run_seeds(seeds: object, **options: object) -> list[Outcome]:
        calls.append((seeds, options))
        return left

    monkeypatch.setattr(runs, "run_seed", run_seed)
    monkeypatch.setattr(runs, "run_seeds", run_seeds)
    return calls


def test_a_run_that_holds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = pretend(monkeypatch, HOLDS)
    assert main(["sim", "--seed", "7", "--minutes", "1.5"]) == 0
    assert calls == [(7, 1.5, None, False)]
    out = capsys.readouterr().out
    assert "seed 7 holds: durable, 3 brokers, 10 events published, 9 accepted, 25 deliveries (18 owed)" in out
    assert "crash 2, cut 1" in out
    assert "d1" in out


def test_a_violation_tells_its_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, VIOLATES)
    assert main(["sim", "--seed", "7"]) == 1
    out = capsys.readouterr().out
    assert "once: s0 got it twice\n  first\n  then\n" in out
    assert out.endswith("replay: postroad sim --seed 7 --minutes 1.5\n")
    pretend(monkeypatch, replace(VIOLATES, pinned=True))
    assert main(["sim", "--seed", "7", "--brokers", "3"]) == 1
    assert capsys.readouterr().out.endswith("--brokers 3\n")
    calls = pretend(monkeypatch, replace(VIOLATES, kind="shared"))
    assert main(["sim", "--seed", "7", "--shared"]) == 1
    assert calls == [(7, 5.0, None, True)]
    assert capsys.readouterr().out.endswith("--minutes 1.5 --shared\n")


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, VIOLATES)
    assert main(["sim", "--seed", "7", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["seed"], printed["rule"], printed["story"]) == (7, "once", ["first", "then"])


def test_many_seeds_stop_at_the_first_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = pretend(monkeypatch, HOLDS, VIOLATES, HOLDS)
    assert main(["sim", "--seed", "5", "--seeds", "3"]) == 1
    assert calls == [(range(5, 8), {"minutes": 5.0, "brokers": None, "shared": False, "seconds": None})]
    assert capsys.readouterr().out.count("seed 7") == 3


def test_for_a_while(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = pretend(monkeypatch, HOLDS)
    assert main(["sim", "--for", "10m"]) == 0
    assert calls[0][1]["seconds"] == 600  # type: ignore[index]
    assert main(["sim", "--for", "10m", "--seeds", "2"]) == 2
    assert main(["sim", "--for", "soon"]) == 2
    assert "such as" in capsys.readouterr().err


def test_worlds_of_queues(capsys: pytest.CaptureFixture[str]) -> None:
    """A real one; and one whose rule does not hold says how to replay it."""
    assert main(["sim", "--queues", "--seed", "2", "--minutes", "0.1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("seed 2 holds: queues, ")
    assert main(["sim", "--queues", "--seed", "2", "--shared"]) == 2
    assert "no --shared" in capsys.readouterr().err


def test_a_world_of_queues_that_violates_a_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = QueueOutcome(
        seed=3,
        minutes=0.5,
        brokers=2,
        kept=5,
        accepted=4,
        views=6,
        spilled=0,
        rule="lost",
        text="one is missing",
    )
    monkeypatch.setattr(runs, "run_queue_seed", lambda _seed, _minutes: outcome)
    assert main(["sim", "--queues", "--seed", "3", "--minutes", "0.5"]) == 1
    out = capsys.readouterr().out
    assert "seed 3 violates lost: queues, 2 brokers, 5 messages kept, 4 accepted, 6 views, 0 faults" in out
    assert out.endswith("lost: one is missing\nreplay: postroad sim --seed 3 --minutes 0.5 --queues\n")


def test_seeds_side_by_side_are_the_runs_one_by_one() -> None:
    """Real runs, in processes of their own."""
    found = list(runs.run_seeds([30, 34], minutes=1.3, brokers=2))
    assert sorted(outcome.seed for outcome in found) == [30, 34]
    alone = runs.run_seed(30, 1.3, 2)
    assert alone in found


def test_nothing_goes_on_after_it() -> None:
    """Terminated, it takes the processes that run its seeds with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "postroad", "sim", "--seed", "1", "--seeds", "9999", "--minutes", "0.1"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"seed ")
        process.terminate()
        process.wait(200)
        process.stdout.close()
        wait_until(lambda: not _group_is_there(process.pid), "all of them end", 200)
    finally:
        if _group_is_there(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def _group_is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
