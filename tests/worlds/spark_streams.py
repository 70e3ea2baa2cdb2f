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


class Query:
    """A query that is in a batch for so many looks, then in the next one if it is behind."""

    def __init__(self, looks: int, *, behind: bool = False) -> None:
        self.looks, self.behind = looks, behind
        self.stopped_at = -1
        self.recentProgress: list[dict[str, Any]] = []

    @property
    def status(self) -> dict[str, bool]:
        self.looks -= 1
        return {"isTriggerActive": self.behind or self.looks >= 0}

    @property
    def lastProgress(self) -> dict[str, str] | None:
        return {"timestamp": "now"} if self.looks < 0 else None

    def stop(self) -> None:
        self.stopped_at = self.looks
