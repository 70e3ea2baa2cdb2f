"""The whole way of a row, to be interrupted anywhere: files -> sink -> broker -> landing -> lake.

As a program: `python -m tests.worlds.spark_mill FOLDER BROKER MASTER-OR-REMOTE [STEP ...]`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import postroad
from postroad.cli import main
from postroad.spark import register
from postroad.spark.lake.landing import land
from postroad.spark.lake.tables import Lake
from postroad.spark.session import make_session

SETTINGS = {"spark.sql.shuffle.partitions": "2", "spark.driver.memory": "600m"}


def place(folder: Path, name: str) -> str:
    """Where a lake is: in the folder, or in the store that the environment names."""
    return f"{os.environ.get('MILL_STORE', folder)}/{name}"


def fill(folder: Path, files: int, lines: int, *, before: int = 0) -> None:
    """So many more files, after those that were there `before`."""
    (folder / "in").mkdir(exist_ok=True)
    for file in range(before, before + files):
        text = "\n".join(str(file * lines + line) for line in range(lines))
        (folder / "in" / f"{file}.txt").write_text(text)


def sink(spark: SparkSession, folder: Path, broker: str) -> Any:
    """A file is a batch."""
    register(spark)
    rows = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(folder / "in"))
    rows = rows.selectExpr("'numbers' AS topic", "value AS payload", "CAST(value AS BIGINT) AS n")
    query = rows.writeStream.format("postroad").option("brokers", broker)
    return query.option("checkpointLocation", str(folder / "sink")).trigger(availableNow=True).start()


def mill(spark: SparkSession, folder: Path, broker: str) -> None:
    query = sink(spark, folder, broker)
    lake = Lake(spark, place(folder, "lake"))
    try:
        land(lake, broker, once=True)
    finally:
        query.awaitTermination()
    land(lake, broker, once=True)


def landing(folder: Path, before: frozenset[Path] = frozenset()) -> bool:
    """Whether a batch of events is being written now: there are files, beside those of `before`, that are not
    of the table yet."""
    return bool(written(folder) - before - {folder / "lake" / "events" / path for path in committed(folder)})


def written(folder: Path) -> frozenset[Path]:
    """Files of events, of the table or not."""
    return frozenset((folder / "lake" / "events").rglob("*.parquet"))


def committed(folder: Path) -> set[str]:
    log = sorted((folder / "lake" / "events" / "_delta_log").glob("*.json"))
    lines = [json.loads(line) for file in log for line in file.read_text().splitlines()]
    return {line["add"]["path"] for line in lines if "add" in line}


def published(broker: str) -> int:
    """Events of the mill, and a few of the broker about itself."""
    with postroad.sync.connect(broker) as client:
        return int(client.request("status")["metrics"]["durable_events_total"])


def once_each(spark: SparkSession, folder: Path, wanted: int) -> None:
    """Every row is in the lake, once: neither edge has lost one or made it twice."""
    rows = Lake(spark, place(folder, "lake")).read("events").filter("topic = 'numbers'")
    found = rows.selectExpr("attributes['n'].integer AS n", "id", "CAST(payload AS STRING) AS p").collect()
    assert sorted(row.n for row in found) == list(range(wanted))
    assert len({row.id for row in found}) == wanted
    assert all(row.p == str(row.n) for row in found)


def command(*words: str) -> None:
    assert main(["pipeline", *words]) == 0, words


def step(name: str, folder: Path, broker: str, engine: dict[str, str]) -> None:
    where = [word for key, value in engine.items() for word in (f"--{key}", value)]
    lake, traces = place(folder, "lake"), place(folder, "traces")
    match name:
        case "land":
            command("land", "--once", "--lake", lake, "--broker", broker, *where)
        case "trace":
            out = str(folder / "traced")
            command("trace", "--lake", traces, "--ids", str(folder / "ids"), "--out", out, *where)
        case "compact":
            command("compact", "--lake", lake, *where)
        case _:
            spark = make_session(**engine, settings=SETTINGS if "master" in engine else None)  # type: ignore[arg-type]
            if name == "mill":
                mill(spark, folder, broker)
            elif name == "sink":
                sink(spark, folder, broker).awaitTermination()
            elif name == "find":
                found = spark.read.format("postroad").option("brokers", broker).load()
                print(f"found {found.count()}", flush=True)  # noqa: T201
            elif name == "batch":
                register(spark)
                some = spark.range(100).selectExpr("'batch' AS topic", "id AS m")
                some.write.format("postroad").option("brokers", broker).mode("append").save()
                source = spark.read.format("postroad").option("brokers", broker).option("topic", "batch")
                typed = source.schema("m bigint").load().filter("m < 50")
                assert sorted(row.m for row in typed.collect()) == list(range(50))
            spark.stop()


if __name__ == "__main__":
    _, where, address, url, *steps = sys.argv
    for one in steps or ["mill"]:
        step(one, Path(where), address, {"remote" if url.startswith("sc:") else "master": url})
        sys.stdout.write(f"done {one}\n")
