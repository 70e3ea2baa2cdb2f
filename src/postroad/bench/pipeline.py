"""The pipeline on Spark: source and sink; the bulk trace against a join with the exact log (P1, P3, P5).

All in one Spark session on this machine. The sink publishes events to a broker of its own, the source reads
them back, beside a data source that has nothing to do, and landing brings them into a lake. Then traffic is
made for 1, 10 and 100 filters per id, that is, stored filters a trace must ask about one message
(`pipeline_traffic`), and all its ids are traced, from the filters and from the exact log in turn; before
that, the answers of both about some of the ids are compared. The growth row is the time of more ids over that
of fewer.

What a round gives is thrown away, but every row is made (`noop`). The first run of each is a warm-up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import pyspark

import postroad
from postroad.bench.pipeline_spark import EMPTY, EmptySource, Meter, different, discard, exact_join
from postroad.bench.pipeline_traffic import Traffic, make_traffic, shape
from postroad.bench.rounds import Row, summary
from postroad.bench.systems import own_version, serving
from postroad.bench.tracking import system
from postroad.bench.workloads import Figures
from postroad.errors import PeerError
from postroad.spark.lake.landing import land
from postroad.spark.lake.tables import Lake
from postroad.spark.session import session
from postroad.spark.trace.bulk import read_ids, trace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILTERS: Final = (1, 10, 100)  # per id
GROWTH_FILTERS: Final = 10
WARM_UPS: Final = 1  # runs of each job before the first round
LEAST_IDS: Final = 100_000  # growth is from here on
PAYLOAD_BYTES: Final = 100
TIMES: Final = 5  # that the source reads the events in one job, so that planning it hardly counts
PARTITIONS: Final = 4  # of the source, for each core: events do not come evenly
MOST_COMPARED: Final = 1_000_000  # ids that are joined with the exact log too; more are for the growth
MOST_DIFFERENT: Final = 0.001  # of the answers: what Bloom filters may have wrong at the default accuracy
PART: Final = 5  # the ids of the heaviest workload are a fifth: its log has a hundred rows for each
SOURCE_SHARE: Final = 0.5
SPEEDUP: Final = {10: 3.0, 100: 8.0}
STORAGE: Final = 10.0
LINEAR: Final = 1.1  # exponent of the growth
KEEP: Final = '[durable]\nkeep = "1 h"\n'

Job = Callable[[], None]


def run(*, rounds: int, events: int, ids: int, tell: Callable[[str], None]) -> list[Row]:
    """A row per system and workload."""
    tell("starting Spark")
    with session(name="bench") as spark, TemporaryDirectory(prefix="postroad-bench-") as folder:
        bench = Bench(spark, Path(folder), rounds, tell)
        return bench.edges(events) + bench.traces(ids)


class Bench:
    def __init__(self, spark: SparkSession, folder: Path, rounds: int, tell: Callable[[str], None]) -> None:
        self._spark = spark
        self._folder = folder
        self._rounds = rounds
        self._tell = tell
        self._meter = Meter(spark)
        self._cores = spark.sparkContext.defaultParallelism

    def _row(self, name: str, workload: str, figures: Sequence[Figures]) -> Row:
        ours = name == "postroad"
        return {
            "system": name,
            "workload": workload,
            **summary(figures),
            "version": own_version() if ours else pyspark.__version__,
            "settings": f"local[{self._cores}]",
            "syncs": "every batch" if ours else "nothing",
        }

    def _alternate(
        self, workload: str, rows: int, unit: str, jobs: dict[str, Job]
    ) -> dict[str, list[Figures]]:
        """Every job once per round, after a warm-up; rates of `rows`, named by the unit."""
        by_job: dict[str, list[Figures]] = {name: [] for name in jobs}
        for turn in range(1 - WARM_UPS, self._rounds + 1):
            for name, job in jobs.items():
                self._tell(
                    f"round {turn} of {self._rounds}: {workload}, {name}" if turn else f"{workload}: {name}"
                )
                figures = self._meter.run(job)
                if turn:
                    by_job[name].append(self._rates(figures, rows, unit))
        return by_job

    def _rates(self, figures: Figures, rows: int, unit: str) -> Figures:
        apart = figures["broker_cpu_s"] * 1e6 / rows
        return {
            f"{unit}_per_s": rows / figures["seconds"],
            f"{unit}_per_s_per_core": rows / figures["seconds"] / self._cores,
            f"cpu_us_per_{unit[:-1]}": figures["cpu_s"] * 1e6 / rows,
            **({f"broker_cpu_us_per_{unit[:-1]}": apart} if self._meter.brokers else {}),
            f"shuffled_bytes_per_{unit[:-1]}": figures["shuffled_bytes"] / rows,
            "seconds": figures["seconds"],
        }

    # ---- source and sink

    def edges(self, events: int) -> list[Row]:
        spark = self._spark
        spark.dataSource.register(EmptySource)
        rows: list[Row] = []
        with serving(system((), "durable mode", KEEP)) as running:
            host, port = running.addresses[0]
            address = f"{host}:{port}"
            table = _events(spark, events, self._cores).cache()
            table.count()
            self._meter.brokers = running.pids()
            begin = _heads(address)

            def write() -> None:
                table.write.format("postroad").option("brokers", address).mode("append").save()

            wrote = self._alternate("sink", events, "rows", {"postroad": write})
            rows.append(self._row("postroad", "sink", wrote["postroad"]))
            total = events * (self._rounds + WARM_UPS)
            # Up to here: time goes on, and the partitions are equal in time.
            span = {"startingToken": begin, "endingToken": _heads(address)}
            partitions = {"partitions": str(PARTITIONS * self._cores)}

            def read() -> None:
                options = {"brokers": address, **partitions, **span}
                _read([spark.read.format("postroad").options(**options).load()] * TIMES, total * TIMES)

            def read_empty() -> None:
                options = {"rows": str(total), **partitions}
                _read([spark.read.format(EMPTY).options(**options).load()] * TIMES, total * TIMES)

            jobs = {"postroad": read, "spark, empty rows": read_empty}
            for name, figures in self._alternate("source", total * TIMES, "rows", jobs).items():
                rows.append(self._row(name, "source", figures))
            rows.append(self._landing(address, total))
            table.unpersist()
            self._meter.brokers = []
        return rows

    def _landing(self, address: str, events: int) -> Row:
        """All events of the broker, each time into a new lake."""
        lakes: list[Lake] = []

        def land_all() -> None:
            lakes.append(Lake(self._spark, self._folder / f"landed-{len(lakes)}"))
            land(lakes[-1], address, once=True)

        figures = self._alternate("landing", events, "rows", {"postroad": land_all})
        files = lakes[-1].files("events")
        if sum(file.rows for file in files) != events:
            raise PeerError(f"{sum(file.rows for file in files):,} of {events:,} events were landed")
        stored = sum(file.size for file in files) / events
        return self._row("postroad", "landing", figures["postroad"]) | {"stored_bytes_per_row": stored}

    # ---- the bulk trace

    def traces(self, ids: int) -> list[Row]:
        rows: list[Row] = []
        for filters in FILTERS:
            compared = min(ids, MOST_COMPARED)
            count = compared if filters < FILTERS[-1] else max(1, compared // PART)
            traffic = self._traffic(filters, count, log=True)
            agreed = self._check(traffic)
            jobs: dict[str, Job] = {
                "postroad": lambda traffic=traffic: self._trace(traffic),  # type: ignore[misc]
                "exact-log join": lambda traffic=traffic: discard(  # type: ignore[misc]
                    exact_join(self._spark, traffic.ids, traffic.log)
                ),
            }
            workload = f"trace, {filters} filters per id"
            for name, figures in self._alternate(workload, count, "ids", jobs).items():
                row = self._row(name, workload, figures)
                kept = traffic.filter_bytes if name == "postroad" else traffic.log_bytes
                row |= {"ids": count, "stored_bytes_per_id": kept / count, **agreed}
                if name != "postroad":
                    row["entries_bytes_per_id"] = traffic.shape.happenings * 20
                rows.append(row)
            traffic.remove()
            if filters == GROWTH_FILTERS:
                rows += self._growth(ids, next(row for row in rows if row["workload"] == workload))
        return rows

    def _check(self, traffic: Traffic) -> Figures:
        """How many answers of trace and join about some ids were compared, and differ."""
        self._tell(f"{traffic.shape.filters} filters per id: comparing answers")
        traced = trace(Lake(self._spark, traffic.lake), read_ids(self._spark, traffic.sample))
        count, wrong = different(traced, exact_join(self._spark, traffic.sample, traffic.log))
        self._spark.catalog.clearCache()
        if wrong > MOST_DIFFERENT * count + 1:
            raise PeerError(f"trace and exact log differ about {wrong} of {count} ids")
        return {"compared_ids": count, "different_ids": wrong}

    def _growth(self, ids: int, compared: Row) -> list[Row]:
        """A row for each number of ids up to `ids`; and the exponent of the time, from fewest to most."""
        least = LEAST_IDS if ids > LEAST_IDS else max(1, ids // 10)
        sizes = [*(least * 10**power for power in range(9) if least * 10**power < ids), ids]
        rows: list[Row] = []
        for size in sizes:
            workload = f"growth, {size} ids"
            if size == compared["ids"]:
                rows.append(compared | {"workload": workload})
                continue
            traffic = self._traffic(GROWTH_FILTERS, size, log=False)
            figures = self._alternate(workload, size, "ids", {"postroad": lambda t=traffic: self._trace(t)})  # type: ignore[misc]
            rows.append(self._row("postroad", workload, figures["postroad"]) | {"ids": size})
            traffic.remove()
        if len(rows) > 1:
            times, counts = rows[-1]["seconds"] / rows[0]["seconds"], ids / sizes[0]
            workload = f"growth, {sizes[0]} to {ids} ids"
            rows.append(
                {"system": "postroad", "workload": workload, "ids_times": counts, "time_times": times}
            )
            rows[-1]["growth_exponent"] = math.log(times) / math.log(counts)
        return rows

    def _traffic(self, filters: int, count: int, *, log: bool) -> Traffic:
        self._tell(f"making {count} messages with {filters} filters each")
        place = self._folder / f"{filters}-{count}"
        place.mkdir()
        return make_traffic(place, shape(filters), count, log=log)

    def _trace(self, traffic: Traffic) -> None:
        discard(trace(Lake(self._spark, traffic.lake), read_ids(self._spark, traffic.ids)))
        self._spark.catalog.clearCache()


def _events(spark: SparkSession, rows: int, partitions: int) -> DataFrame:
    """Rows to publish: a topic of a hundred, a payload, a number and a text."""
    return spark.range(0, rows, 1, partitions).selectExpr(
        "concat('orders/', id % 100) AS topic",
        f"CAST(repeat('x', {PAYLOAD_BYTES}) AS BINARY) AS payload",
        "id AS number",
        "CAST(id % 1000 AS DOUBLE) / 10 AS price",
        "concat('customer ', id % 10000) AS customer",
    )


def _heads(address: str) -> str:
    """The checkpoint token of now; a broker opens its pubend a moment after it serves."""
    import msgspec

    with postroad.sync.connect(address) as client:
        give_up = time.monotonic() + 60
        while not (heads := client.request("heads")["heads"]):
            if time.monotonic() > give_up:
                raise PeerError("the broker has no durable pubend")
            time.sleep(0.05)
    return msgspec.json.encode(heads).decode()


def _read(tables: Sequence[DataFrame], rows: int) -> None:
    """All columns of all rows, in one job; PeerError unless they are so many."""
    from pyspark.sql import Observation
    from pyspark.sql.functions import count, lit

    seen = Observation()
    every = reduce(lambda table, other: table.unionAll(other), tables)
    discard(every.observe(seen, count(lit(1)).alias("rows")))
    if seen.get["rows"] != rows:
        raise PeerError(f"{seen.get['rows']} rows were read of {rows}")


def aims(rows: Sequence[Row]) -> list[tuple[str, float, float, bool]]:
    """(aim, measured, bound, met)."""
    by: dict[tuple[str, str], Row] = {(row["system"], row["workload"]): row for row in rows}
    results: list[tuple[str, float, float, bool]] = []
    source, empty = by["postroad", "source"], by["spark, empty rows", "source"]
    share = source["rows_per_s"] / empty["rows_per_s"]
    results.append(("source, share of empty rows, at least", share, SOURCE_SHARE, share >= SOURCE_SHARE))
    share = empty["cpu_us_per_row"] / (source["cpu_us_per_row"] - source["broker_cpu_us_per_row"])
    aim = "source, share by CPU without the broker's, at least"
    results.append((aim, share, SOURCE_SHARE, share >= SOURCE_SHARE))
    for filters in FILTERS[1:]:
        workload = f"trace, {filters} filters per id"
        ours, join = by["postroad", workload], by["exact-log join", workload]
        times = ours["ids_per_s"] / join["ids_per_s"]
        bound = SPEEDUP[filters]
        results.append(
            (f"trace of {filters} filters, times the join, at least", times, bound, times >= bound)
        )
        cpu = join["cpu_us_per_id"] / ours["cpu_us_per_id"]
        results.append((f"trace of {filters} filters, times less CPU, at least", cpu, bound, cpu >= bound))
        for log, kept in (("in Parquet", "stored_bytes_per_id"), ("of brokers", "entries_bytes_per_id")):
            less = join[kept] / ours["stored_bytes_per_id"]
            aim = f"stored, {filters} filters, times less than the log {log}"
            results.append((aim, less, STORAGE, less >= STORAGE))
    growth = [row for row in rows if "growth_exponent" in row]
    for row in growth:
        power = row["growth_exponent"]
        results.append(("time grows as ids to the power, at most", power, LINEAR, power <= LINEAR))
    return results
