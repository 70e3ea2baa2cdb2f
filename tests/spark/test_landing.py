"""Landing from real brokers, also with a driver that is killed in mid-batch (P4)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from pyspark.sql import SparkSession
from tests.process.conftest import SOURCE, Brokers
from tests.process.test_durable_release import configured
from tests.spark.test_source import publish

import postroad
from postroad.spark.lake import Lake
from postroad.spark.landing import land

QUICK = '[tracking]\npersist = "1 s"\n'
DRIVER = """
import sys
from pathlib import Path
from postroad.spark.lake import Lake
from postroad.spark.landing import land
from postroad.spark.session import make_session
folder, broker = sys.argv[1:]
settings = {"spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
spark = make_session(master="local[2]", settings={**settings, "spark.driver.memory": "512m"})
def told(table, batch):
    print(table, batch, flush=True)
land(Lake(spark, Path(folder)), broker, interval="0 seconds", told=told)
"""


def landed(lake: Lake) -> list[int]:
    return sorted(row[0] for row in lake.read("events").select("attributes.n.integer").collect())


def test_everything_lands_once(spark: SparkSession, brokers: Brokers, tmp_path: Path) -> None:
    """P4: events and what brokers say about themselves, incrementally; a run without news adds nothing."""
    extra = configured(tmp_path, QUICK)
    one = brokers.start("b1", extra=extra)
    two = brokers.start("b2", one.address, extra=extra)
    lake = Lake(spark, tmp_path / "lake")
    land(lake, one.address, once=True)
    with (
        postroad.sync.connect(two.address) as client,
        client.subscribe("orders/#", durable="billing") as events,
    ):
        publish(one.address, range(100))
        seen = [events.get(60) for _ in range(100)]
        events.ack()
    assert len(seen) == 100
    until = time.monotonic() + 180
    while not all(lake.segments(table) for table in ("events", "filters", "attachments", "topology")) or (
        lake.read("deliveries").filter("what = 'event' AND subscriber = 'billing'").count() < 100
    ):
        assert time.monotonic() < until
        land(lake, one.address, once=True)
    assert landed(lake) == list(range(100))
    assert {row.name for row in lake.read("topology").select("name").distinct().collect()} == {"b1", "b2"}
    delivered = lake.read("deliveries").filter("what = 'event' AND subscriber = 'billing'")
    assert delivered.select("id").distinct().count() == 100
    publish(two.address, range(100, 130))
    while len(landed(lake)) < 130:
        assert time.monotonic() < until
        land(lake, one.address, once=True)
    assert landed(lake) == list(range(130))


def test_a_driver_killed_in_mid_batch(spark: SparkSession, brokers: Brokers, tmp_path: Path) -> None:
    """P1, P4: kill -9 of the driver process; after a restart the lake has every event exactly once."""
    broker = brokers.start("b1")
    folder = tmp_path / "lake"
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    published = 0
    stopped = threading.Event()

    def keep_publishing() -> None:
        nonlocal published
        while not stopped.is_set():
            publish(broker.address, range(published, published + 50))
            published += 50
            time.sleep(0.2)

    lake = Lake(spark, folder)
    land(lake, broker.address, once=True)  # from here on brokers keep what is published
    thread = threading.Thread(target=keep_publishing)
    thread.start()
    try:
        driver = subprocess.Popen(
            [sys.executable, str(script), str(folder), broker.address],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
            start_new_session=True,
        )
        watchdog = threading.Timer(300, os.killpg, (driver.pid, signal.SIGKILL))
        watchdog.start()
        assert driver.stdout is not None
        batches = 0
        for line in driver.stdout:
            batches += line.startswith("events ")
            if batches == 2:
                break
        assert batches == 2
        # The next batch follows at once, so it is under way.
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        driver.stdout.close()
        watchdog.cancel()
    finally:
        stopped.set()
        thread.join()
    land(lake, broker.address, once=True)
    assert landed(lake) == list(range(published))
