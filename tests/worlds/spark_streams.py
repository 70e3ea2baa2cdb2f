"""Reading, publishing and streaming queries on Spark."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

import postroad
import postroad.spark


def source(spark: SparkSession, *addresses: str, **options: str) -> Any:
    return spark.read.format("postroad").options(**({"brokers": ",".join(addresses)} | options))


def publish(address: str, numbers: range, topic: str = "orders/eu") -> None:
    with postroad.sync.connect(address) as client:
        client.publish_many(
            [(topic, f"payload {n}", {"n": n, "even": n % 2 == 0}) for n in numbers], mode="durable"
        )
