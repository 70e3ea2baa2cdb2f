"""P6: what a trace of few ids reads of a lake of many commits: as landed, z-ordered, compacted.

`pytest -s -m soak tests/spark/test_clustering.py` prints the figures; see docs/explanation/benchmarks.md.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.worlds.spark_traces import rows_of

from postroad.bench import pipeline_traffic as traffic
from postroad.spark.lake import rows
from postroad.spark.lake.compact import compact
from postroad.spark.lake.tables import Lake
from postroad.tracking.record import decode_meta
from postroad.tracking.settings import TrackingConfig
from postroad.units import SECOND_US

MINUTES = int(os.environ.get("CLUSTERING_MINUTES", "20"))
RATE = 20  # messages a second
TRACED = 100
ROUNDS = 3


def landed(lake: Lake, ids: Path) -> None:
    """Brokers with ten filters per id, which are landed once a minute; ids of the minute in the middle."""
    network = traffic._Network(traffic.shape(10))
    messages = traffic._messages(network.shape.homes, RATE * 60 * MINUTES)
    sent = []
    for home, some in messages:
        network.send(home, some)
        sent.append(some)
    network.close()
    for broker in network.brokers:
        told, since = network._changes[broker][:1], network._changes[broker][1:]
        lake.append("attachments", rows.attachments(broker, traffic.name(broker), 1, told, whole=True))
        lake.append("attachments", rows.attachments(broker, traffic.name(broker), 2, since, whole=False))
    every = pa.concat_tables(
        rows.filters(
            broker,
            traffic.name(broker),
            [(decode_meta(record), record) for record in network._records[broker].values()],
        )
        for broker in network.brokers
    )
    minutes = every["stored_us"].to_numpy() // (60 * SECOND_US)
    for minute in np.unique(minutes):
        lake.append("filters", every.filter(pa.array(minutes == minute)))
    keys = np.concatenate(sent)
    times_ms = (keys.view(">u8").reshape(-1, 2)[:, 1] >> 16).astype(np.int64)
    near = keys[np.abs(times_ms - int(np.median(times_ms))) < 30_000]
    ids.write_text("".join(f"{text}\n" for text in rows.id_texts(near[:: len(near) // TRACED]).to_pylist()))


def read_bytes(spark: SparkSession) -> int:
    context: Any = spark.sparkContext._jsc.sc()
    context.listenerBus().waitUntilEmpty()
    executors = context.statusStore().executorList(False)
    return sum(executors.apply(at).totalInputBytes() for at in range(executors.size()))


@pytest.mark.soak
def test_a_z_order_gives_a_trace_nothing_that_compaction_does_not(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6: so there is none. The files that a trace opens are what it costs; compaction makes few of them."""
    monkeypatch.setattr(traffic, "RATE", RATE)
    monkeypatch.setattr(traffic, "STEP_US", SECOND_US)
    monkeypatch.setattr(traffic, "PUBLISHERS", 2)
    lakes = {name: Lake(spark, tmp_path / name) for name in ("as landed", "z-ordered", "compacted")}
    landed(lakes["as landed"], tmp_path / "ids")
    for name in ("z-ordered", "compacted"):
        shutil.copytree(tmp_path / "as landed", tmp_path / name)
    opened = lakes["z-ordered"].open("filters")
    assert opened is not None
    opened.optimize.z_order(["lo_ms", "hi_ms"])
    compact(lakes["compacted"], "filters")
    answers, volume = {}, dict.fromkeys(lakes, 0)
    seconds: dict[str, list[float]] = {name: [] for name in lakes}
    for _ in range(1 + ROUNDS):  # the first is a warm-up
        for name, lake in lakes.items():
            before, began = read_bytes(spark), time.monotonic()
            answers[name] = rows_of(lake, tmp_path / "ids", TrackingConfig())
            seconds[name].append(time.monotonic() - began)
            volume[name] = read_bytes(spark) - before
    for name, lake in lakes.items():
        took = sorted(seconds[name][1:])
        print(  # noqa: T201
            f"{name}: {len(lake.files('filters'))} files, {volume[name]:,} bytes read,"
            f" {took[ROUNDS // 2]:.2f} s [{took[0]:.2f}-{took[-1]:.2f}]"
        )
    routes = {
        name: {identity: (row["verdict"], row["origin"]) for identity, row in of.items()}
        for name, of in answers.items()
    }
    assert routes["as landed"] == routes["z-ordered"] == routes["compacted"]
    assert len(routes["as landed"]) >= TRACED
    assert len(lakes["compacted"].files("filters")) <= len(lakes["z-ordered"].files("filters"))
    assert volume["compacted"] <= volume["z-ordered"] < volume["as landed"]
