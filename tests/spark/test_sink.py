"""The sink against real brokers: what is written, once, also by a driver that is killed in mid-batch (P3)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.process.conftest import SOURCE, Brokers, wait_until
from tests.process.test_durable_release import configured
from tests.spark.test_source import KEEP, source

import postroad
import postroad.spark
from postroad.errors import UsageError
from postroad.spark.sink import STRETCH, batch_writer

DRIVER = """
import sys
from postroad.spark.session import make_session
from postroad.spark import register
folder, broker = sys.argv[1:]
settings = {"spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
spark = make_session(master="local[2]", settings={**settings, "spark.driver.memory": "512m"})
register(spark)
rows = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(f"{folder}/in")
rows = rows.selectExpr("'numbers' AS topic", "value AS payload", "CAST(value AS BIGINT) AS n")
query = rows.writeStream.format("postroad").option("brokers", broker)
query = query.option("checkpointLocation", f"{folder}/checkpoint")
query.trigger(availableNow=True).start().awaitTermination()
print("done", flush=True)
"""
FILES, LINES = 4, 20_000


def test_rows_become_events(spark: SparkSession, brokers: Brokers, tmp_path: Path) -> None:
    """P3: topic, payload, attributes by column and by map, of their types; what cannot be is refused."""
    broker = brokers.start("b1", extra=configured(tmp_path, KEEP))
    postroad.spark.register(spark)
    rows = spark.range(1000).selectExpr(
        "concat('t/', id % 3) AS topic",
        "concat('p', id) AS payload",
        "id AS n",
        "id % 2 = 0 AS even",
        "id / 2 AS x",
    )
    rows.repartition(3).write.format("postroad").option("brokers", broker.address).mode("append").save()
    found = source(spark, broker.address).load().collect()
    assert len({row.id for row in found}) == 1000
    by_number = {row.attributes["n"].integer: row for row in found}
    assert sorted(by_number) == list(range(1000))
    one = by_number[7]
    assert (one.topic, bytes(one.payload), one.attributes["x"]["float"]) == ("t/1", b"p7", 3.5)
    assert one.attributes["even"].boolean is False
    again = source(spark, broker.address, topic="t/0").load()
    again.withColumn("topic", again.topic.substr(1, 1)).write.format("postroad").mode("append").options(
        brokers=broker.address
    ).save()
    copied = source(spark, broker.address, topic="t").load().collect()
    assert sorted(row.attributes["n"].integer for row in copied) == list(range(0, 1000, 3))
    assert copied[0].attributes["x"]["float"] is not None
    with pytest.raises(UsageError, match="column `topic`"):
        batch_writer({}, spark.range(1).schema, overwrite=False)
    with pytest.raises(UsageError, match="overwritten"):
        batch_writer({"topic": "t"}, spark.range(1).schema, overwrite=True)


def test_a_driver_killed_in_mid_batch(spark: SparkSession, brokers: Brokers, tmp_path: Path) -> None:
    """P3: kill -9 of the driver while a batch is half published; run again, every row is there once."""
    broker = brokers.start("b1", extra=configured(tmp_path, KEEP))
    (tmp_path / "in").mkdir()
    for file in range(FILES):
        lines = "\n".join(str(file * LINES + line) for line in range(LINES))
        (tmp_path / "in" / f"{file}.txt").write_text(lines)
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)

    def published() -> int:
        with postroad.sync.connect(broker.address) as client:
            return int(client.request("status")["metrics"]["durable_events_total"])

    def run(kill_at: int | None) -> None:
        driver = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), broker.address],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
            start_new_session=True,
        )
        watchdog = threading.Timer(240, os.killpg, (driver.pid, signal.SIGKILL))
        watchdog.start()
        try:
            if kill_at is None:
                output, _ = driver.communicate()
                assert "done" in output
            else:
                wait_until(lambda: published() > kill_at, "rows are published", 200)
                os.killpg(driver.pid, signal.SIGKILL)
        finally:
            watchdog.cancel()
            driver.wait()
            if driver.stdout is not None:
                driver.stdout.close()

    run(0)
    first = published()
    run(first + LINES // 4)
    assert published() <= FILES * LINES
    run(None)
    postroad.spark.register(spark)
    rows = source(spark, broker.address).schema("id string, n bigint").load().collect()
    assert sorted(row.n for row in rows) == list(range(FILES * LINES))
    assert len({row.id for row in rows}) == FILES * LINES
    assert STRETCH > LINES
