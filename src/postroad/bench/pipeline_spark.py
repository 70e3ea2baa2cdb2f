"""What `bench pipeline` measures of Spark: time, processor time, bytes shuffled; and the peers of ours.

The peer of the bulk trace is a join with the exact log: the plan a person would write who has each happening
as a row. The peer of the source is a data source that has nothing to do: it yields one prebuilt record batch
of empty rows again and again, so its rate is what Spark's side of the Python data source API can take.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from postroad.bench.processes import cpu_seconds, descendants
from postroad.bench.workloads import Figures
from postroad.spark.columns import EVENTS
from postroad.spark.lake.tables import SCHEMAS
from postroad.spark.trace.bulk import read_ids
from postroad.tracking.keys import DELIVERED, PUBLISHED, ROUTED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

BATCH_ROWS: Final = 10_000
PR_SET_CHILD_SUBREAPER: Final = 36  # of Linux's prctl
EMPTY: Final = "postroad-bench-empty"


class Meter:
    """Figures of what a session runs."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._context: Any = spark.sparkContext._jsc.sc()
        self.brokers: list[int] = []  # processes whose share of the CPU is told apart
        # Workers whose parent is gone become ours, and not of the system: what they used is not lost.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(self, job: Callable[[], None]) -> Figures:
        before = self._shuffled()
        me = [os.getpid()]
        apart = cpu_seconds(self.brokers)
        cpu, began = cpu_seconds(descendants(me), ended=True), time.monotonic()
        job()
        elapsed = time.monotonic() - began
        used = cpu_seconds(descendants(me), ended=True) - cpu
        return {
            "seconds": elapsed,
            "cpu_s": used,
            "broker_cpu_s": cpu_seconds(self.brokers) - apart,
            "shuffled_bytes": float(self._shuffled() - before),
        }

    def _shuffled(self) -> int:
        """Bytes written for shuffles so far."""
        self._context.listenerBus().waitUntilEmpty()
        executors = self._context.statusStore().executorList(False)
        return sum(executors.apply(at).totalShuffleWrite() for at in range(executors.size()))


def discard(table: DataFrame) -> None:
    """Make every row, keep none."""
    table.write.format("noop").mode("append").save()


def exact_join(spark: SparkSession, ids: Path, log: Path) -> DataFrame:
    """Origin, route and receivers of each id, from the exact log."""
    from pyspark.sql.functions import expr

    wanted = read_ids(spark, ids).selectExpr("id AS text", "unhex(replace(id, '-', '')) AS id")
    happened = spark.read.parquet(str(log))
    joined = (
        wanted.join(happened, "id")
        .groupBy("id", "text")  # both, so that the rows need not be shuffled again after the join
        .agg(
            expr(f"max(CASE WHEN what = '{PUBLISHED}' THEN broker END) AS origin"),
            expr(
                f"collect_list(CASE WHEN what = '{ROUTED}' THEN struct(broker, who AS `from`) END) AS route"
            ),
            expr(
                f"collect_list(CASE WHEN what = '{DELIVERED}' THEN struct(who AS subscriber, broker) END)"
                " AS receivers"
            ),
        )
    )
    return joined.drop("id").withColumnRenamed("text", "id")


def different(traced: DataFrame, joined: DataFrame) -> tuple[int, int]:
    """How many ids either answers, and for how many of them origin, route or receivers are not the same."""
    from pyspark.sql.functions import expr

    def plain(table: DataFrame, name: str) -> DataFrame:
        # The route of a trace begins at the origin, with nobody before it; the log has that as `published`.
        steps = "filter(route, s -> coalesce(s.`from`, '') <> '')"
        sides = {"route": f"transform({steps}, s -> struct(s.broker, s.`from`))"}
        sides["receivers"] = "transform(receivers, r -> struct(r.subscriber, r.broker))"
        columns = (f"array_sort({text}) AS {side}" for side, text in sides.items())
        return table.selectExpr("id", "origin", *columns).selectExpr(
            "id", f"struct(origin, route, receivers) AS {name}"
        )

    both = plain(traced, "one").join(plain(joined, "two"), "id", "full_outer")
    row = both.agg(expr("count(1) AS ids"), expr("count_if(NOT one <=> two) AS differ")).first()
    return (0, 0) if row is None else (row.ids, row.differ)


class EmptySource(DataSource):
    """Options: rows, partitions."""

    @classmethod
    def name(cls) -> str:
        return EMPTY

    def schema(self) -> str:
        return SCHEMAS["events"]

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return EmptyReader(int(self.options["rows"]), int(self.options["partitions"]))


class EmptyReader(DataSourceReader):
    def __init__(self, rows: int, partitions: int) -> None:
        self._rows = rows
        self._partitions = partitions

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        before, until = (self._rows * (partition.value + more) // self._partitions for more in (0, 1))
        rows = until - before
        batch = pa.RecordBatch.from_arrays(
            [pa.nulls(BATCH_ROWS, field.type) for field in EVENTS], names=EVENTS.names
        )
        for _ in range(rows // BATCH_ROWS):
            yield batch
        if rows % BATCH_ROWS:
            yield batch.slice(0, rows % BATCH_ROWS)
