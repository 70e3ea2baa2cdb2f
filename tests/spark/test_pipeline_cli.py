"""P8, P9, P11: the commands, their files and their failures, each in this process with the tests' session."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from tests.worlds.spark_networks import World
from tests.worlds.spark_traces import FINE, as_row, ids_file, lake_of
from tests.worlds.spark_traffic import SUBSCRIBED, Traffic
from tests.worlds.spark_traffic import lake_of as audit_lake

from postroad import cli
from postroad.cli import pipeline
from postroad.errors import StorageError, UsageError
from postroad.lab.sweep import grid
from postroad.sim.scenario import Scenario
from postroad.spark.plan import Observed, as_toml, propose
from postroad.spark.progress import running, translated, watched
from postroad.tracking.settings import TrackingConfig


@pytest.fixture(autouse=True)
def one_session(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands make a session and stop it; here they share the one there is."""

    @contextmanager
    def shared(doing: str, master: str, remote: str) -> Iterator[SparkSession]:
        del master, remote
        with watched(spark, doing):
            yield spark

    monkeypatch.setattr(pipeline, "_spark", shared)


@pytest.fixture(scope="module")
def world() -> World:
    made = World(4, TrackingConfig(**FINE), 3, extra=0)
    made.happen(60, faults=False)
    made.stop()
    return made


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["pipeline", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_trace_plan_and_compact(
    spark: SparkSession, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake, out = tmp_path / "lake", tmp_path / "out[1]"  # a pattern of names to Spark
    lake_of(spark, lake, world)
    ids = ids_file(tmp_path / "ids[1]", list(world.truth)[:20])
    code, text, _ = run(capsys, "trace", "--lake", lake, "--ids", ids, "--out", out, "--json")
    assert code == 0
    answer = json.loads(text)
    assert (answer["ids"], answer["verdicts"]) == (20, {"complete": 20})
    rows = {row["id"]: row for row in pq.read_table(out).to_pylist()}
    for result in world.live(*list(world.truth)[:20]):
        found = rows[result.id]
        assert [step["broker"] for step in found["route"]] == [
            step["broker"] for step in as_row(result)["route"]
        ]
    code, _, err = run(capsys, "trace", "--lake", lake, "--ids", ids, "--out", out)
    assert (code, err.count("\n")) == (2, 1)
    assert "exists already" in err

    code, text, err = run(capsys, "plan", "--lake", lake, "--out", tmp_path / "plans")
    assert (code, err) == (0, "planning ...\n")
    files = sorted(path.name for path in (tmp_path / "plans").iterdir())
    assert files == [f"{broker:08x}.toml" for broker in (1, 2, 3)]
    assert "keys a second" in text

    code, text, _ = run(capsys, "compact", "--lake", lake)
    assert code == 0
    assert re.search(r"filters: \d+ files into \d+, ", text)
    assert "events: nothing to do" in text


def test_audit(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P7: the page tells of every fault that was planted."""
    traffic = Traffic(3)
    traffic.plant()
    traffic.expected_reordered()
    lake = tmp_path / "lake"
    audit_lake(spark, lake, traffic)
    code, _, err = run(capsys, "audit", "--lake", lake)
    assert code == 2
    assert "subs --json" in err
    lines = [json.dumps({"name": one.name, "topic": one.topic, "where": one.where}) for one in SUBSCRIBED]
    (tmp_path / "subs").write_text("\n".join(lines))
    report = tmp_path / "report.html"
    words = ("--subscriptions", tmp_path / "subs", "--report", report)
    code, text, _ = run(capsys, "audit", "--lake", lake, *words, "--json")
    assert code == 0
    answer = json.loads(text)
    assert answer["totals"]["missing"] == sum(kind == "missing" for kind, _, _ in traffic.planted) > 0
    page = report.read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 2 * 6, "each figure for a screen and for a telephone"
    assert all(identity in page for _, _, identity in traffic.planted)
    names = [row["subscriber"] for row in answer["subscriptions"]]
    assert all(name in page for name in (*names, "b1", "b4", "99 %"))
    outside = re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)[^\"']+", page)
    assert outside == [], "the page needs nothing from elsewhere"


def test_sweep(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P9: what a task simulates is what the same seed gives here; a rule that breaks is told."""
    del spark
    code, text, err = run(
        capsys,
        "sweep",
        "--seeds",
        2,
        "--minutes",
        "0.05",
        "--brokers",
        "1,2",
        "--out",
        tmp_path / "out",
        "--json",
    )
    answer = json.loads(text)
    assert answer["runs"] == 4
    rows = pq.read_table(tmp_path / "out").to_pylist()
    found = {(row["brokers"], row["seed"]): (row["digest"], row["published"], row["rule"]) for row in rows}
    outcomes = [Scenario(seed=seed, minutes=0.05, brokers=count).run() for count in (1, 2) for seed in (1, 2)]
    assert found == {(one.brokers, one.seed): (one.digest, one.published, one.rule) for one in outcomes}
    broken = [one.seed for one in outcomes if one.rule]
    assert sorted(one["seed"] for one in answer["broken"]) == sorted(broken)
    assert code == (1 if broken else 0), err
    for wrong in ({"brokers": [99]}, {"minutes": [float("nan")]}, {"minutes": [float("inf")]}):
        with pytest.raises(UsageError, match="takes some time"):
            grid(seeds=[1], **wrong)


def test_failures_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P11: what to do is said, nothing is written."""
    missing = tmp_path / "nowhere"
    code, out, err = run(
        capsys, "trace", "--lake", missing, "--ids", tmp_path / "ids", "--out", tmp_path / "out"
    )
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "there is no file" in err
    code, _, err = run(capsys, "compact", "--lake", missing)
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no lake" in err
    assert list(tmp_path.iterdir()) == []
    deep = "Traceback\n  File ...\npostroad.errors.StorageError: a filter is damaged\n\n\tat org.apache..."
    assert isinstance(translated(deep), StorageError)
    assert str(translated(deep)) == "a filter is damaged"
    other = "An error occurred while calling o1.parquet.\n: org.apache.spark.SparkException: Job aborted\n"
    assert str(translated(other)) == "the job failed: Job aborted"


def test_mistakes_are_told_before_spark_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P11: what cannot come to anything does not wait for a session."""

    def never(*_: str) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(pipeline, "_spark", never)
    lake, file, strange = tmp_path / "lake", tmp_path / "file", tmp_path / "strange"
    lake.mkdir()
    (strange / "_delta_log").mkdir(parents=True)
    file.write_text("x")
    for words, said in {
        ("land", "--lake", file): "is no folder",
        ("land", "--lake", lake, "--broker", "a:b:c"): "is not an address",
        ("land", "--lake", lake, "--tls-key", "k"): "--tls-cert",
        ("trace", "--lake", lake, "--ids", file, "--out", tmp_path / "o"): "has no filters yet",
        (
            "trace",
            "--lake",
            lake,
            "--ids",
            file,
            "--out",
            tmp_path / "o",
            "--routing",
            "x",
        ): "routing is one of",
        ("compact", "--lake", lake, "--table", "x"): "has no table x",
        ("compact", "--lake", lake, "--accuracy", "2"): "accuracy is between",
        ("compact", "--lake", strange): "is a Delta table",
        ("audit", "--lake", tmp_path / "none"): "there is no lake",
        ("audit", "--lake", lake): "has no events yet",
        ("plan", "--lake", lake): "has no filters yet",
        ("sweep", "--out", lake): "exists already",
        ("sweep", "--out", file, "--master", "nonsense"): "--master is local[*]",
        ("plan", "--lake", lake, "--remote", "x"): "--remote is sc://",
    }.items():
        code, out, err = run(capsys, *words)
        assert (code, out, err.count("\n")) == (2, "", 1), words
        assert said in err


def test_without_spark_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10, P11: `pip install postroad` alone; help is there."""
    monkeypatch.setitem(sys.modules, "pyspark", None)
    code, _, err = run(capsys, "sweep", "--out", "nowhere")
    assert (code, err.count("\n")) == (1, 1)
    assert "pip install 'postroad[spark]'" in err
    assert run(capsys, "land", "--help")[0] == 0
    assert cli.main(["bench", "pipeline"]) == 1
    assert "pip install 'postroad[spark]'" in capsys.readouterr().err
    program = """
import sys
sys.modules["pyspark"] = None
import postroad.spark
from postroad.errors import UnavailableError
def source(_): import postroad.spark.source
for one in (postroad.spark.where, postroad.spark.register, source):
    try:
        one("n = 1")
    except UnavailableError as error:
        assert "pip install 'postroad[spark]'" in str(error)
    else:
        raise AssertionError(one)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_bar_has_tasks_rows_and_rates(spark: SparkSession) -> None:
    """P11: while a job runs Spark tells how far it is; a terminal sees it."""
    began, seen = threading.Event(), []

    def work() -> None:
        rows = spark.range(0, 40_000, 1, 8).repartition(8)
        rows.foreachPartition(lambda some: [time.sleep(0.2) for _ in zip(range(2), some)])  # noqa: B905
        began.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not began.wait(0.05):
        seen.append(running(spark))
    thread.join()
    assert max(total for _, total, _ in seen) >= 8
    assert max(done for done, _, _ in seen) > 0
    assert max(rows for _, _, rows in seen) > 0


def test_plans_say_why_and_are_configuration() -> None:
    """P8: settings that a broker accepts, a reason above each."""
    seen = Observed(
        broker="00000001",
        name="b1",
        filters=9,
        histories=3,
        rate=2000.0,
        fill=0.8,
        skew_us=31_000,
        jitter_us=95_000,
        wild=2,
        crashes=1,
    )
    text = as_toml(propose(seen))
    settings = tomllib.loads(text)["tracking"]
    assert (settings["strategy"], settings["skew"], settings["jitter"]) == ("bloom", "40 ms", "100 ms")
    assert settings["capacity"] > 0
    assert settings["bits"] / settings["capacity"] > 10
    assert text.count("\n# ") >= 7
    assert "it died 1 times" in text
    assert "filters were 80% full when they were done" in text
    assert "none was done yet" in as_toml(propose(replace(seen, fill=None)))
    busy = Observed(
        broker="00000001",
        name="b1",
        filters=9,
        histories=3,
        rate=1e9,
        fill=1.0,
        skew_us=0,
        jitter_us=0,
        wild=0,
        crashes=0,
    )
    text = as_toml(propose(busy, memory=1024))
    assert tomllib.loads(text)["tracking"] == {"strategy": "exact"}
    assert "No Bloom filter can meet this" in text
