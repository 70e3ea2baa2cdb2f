"""The data source against real brokers: batch, streaming, limits, loss (P1, P2)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    In,
    IsNotNull,
    IsNull,
    Not,
    StringStartsWith,
)
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)
from tests.worlds.processes import KEEP, Brokers, configured
from tests.worlds.spark_streams import publish, source

import postroad
import postroad.spark
from postroad.errors import UsageError
from postroad.spark.columns import VALUE
from postroad.spark.options import Access, read_options, write_options
from postroad.spark.pushdown import Pushed, pushed
from postroad.spark.source import PostroadSource


def stream(spark: SparkSession, address: str, **options: str) -> DataFrame:
    return spark.readStream.format("postroad").options(brokers=address, **options).load()


def drain(rows: DataFrame, folder: Path) -> list[list[int]]:
    """The attribute n of all there is now, a list for each batch."""
    found: list[list[int]] = []

    def take(batch: DataFrame, _number: int) -> None:
        values = [row[0] for row in batch.select("attributes.n.integer").collect()]
        if values:
            found.append(sorted(values))

    query = rows.writeStream.foreachBatch(take).option("checkpointLocation", str(folder))
    ready(lambda: query.trigger(availableNow=True).start().awaitTermination())
    return found


def ready(start: Callable[[], Any]) -> Any:
    """Spark gives the Python of a source ten seconds to start, which a busy machine may not keep."""
    for _ in range(5):
        try:
            return start()
        except StreamingQueryException as error:
            if "connect back" not in str(error):
                raise
    raise AssertionError("Python did not start")


def test_batch_reads_what_was_published(spark: SparkSession, brokers: Brokers, tmp_path: Path) -> None:
    """P1: every durable event of a range, at the brokers that have it; P2: filters go to the brokers."""
    extra = configured(tmp_path, KEEP)
    one = brokers.start("b1", extra=extra)
    two = brokers.start("b2", one.address, extra=extra)
    with postroad.sync.connect(one.address) as client:
        while len(client.request("heads")["heads"]) < 2:
            time.sleep(0.05)
    publish(one.address, range(100))
    with postroad.sync.connect(one.address) as client:
        middle = json.dumps(client.request("heads")["heads"])
    publish(two.address, range(100, 150), "orders/us")
    publish(one.address, range(150, 200), "invoices")
    postroad.spark.register(spark)
    rows = source(spark, one.address, two.address).load()
    found = {row.attributes["n"].integer: row for row in rows.collect()}
    assert sorted(found) == list(range(200))
    assert (found[120].topic, bytes(found[120].payload)) == ("orders/us", b"payload 120")
    assert found[7].id.startswith(found[7].publisher)
    later = source(spark, one.address, two.address, startingToken=middle, topic="orders/#", where="n < 140")
    assert sorted(row.n for row in later.schema("n bigint").load().collect()) == list(range(100, 140))
    # Without an end it would end with what b1 has heard so far; up to one that is named nothing is left out.
    with postroad.sync.connect(one.address) as here, postroad.sync.connect(two.address) as there:
        known, own = here.request("heads")["heads"], there.request("heads")["heads"]
    ending = json.dumps({pubend: max(tick, own.get(pubend, 0)) for pubend, tick in known.items()})
    split = source(spark, one.address, startingTime="2020-01-01", endingToken=ending, partitions="3").load()
    assert split.rdd.getNumPartitions() >= 3
    assert split.count() == 200
    typed = (
        source(spark, one.address, two.address)
        .schema("topic string, n bigint, even boolean, id string")
        .load()
    )
    chosen = typed.filter("n >= 140 AND n < 160 AND even AND topic = 'invoices'")
    assert sorted(row.n for row in chosen.collect()) == [150, 152, 154, 156, 158]
    with pytest.raises(Exception, match="onLoss is fail or gap"):
        source(spark, one.address, onLoss="perhaps").load().collect()


def test_options_that_cannot_be_are_refused() -> None:
    """P1, P11: misspelt, of the other kind of query, contradictory, not of their type; each in one line."""

    def refused(text: str, *, stream: bool = False, **options: str) -> None:
        with pytest.raises(UsageError, match=text) as raised:
            read_options(options, stream=stream)
        assert "\n" not in str(raised.value)

    refused("a batch read .* has no option 'topik': topic[?]", topik="x")
    refused("has no option 'startingtimes': startingTime[?]", startingtimes="x")
    refused("a batch read .* has no option 'durable'", durable="x")
    refused("a batch read .* has no option 'maxRowsPerTrigger'", maxRowsPerTrigger="1")
    refused("a stream .* has no option 'endingTime'", stream=True, endingTime="2026-01-31")
    refused("a stream .* has no option 'endingToken'", stream=True, endingToken="{}")
    refused("startingToken and startingTime exclude", startingToken="{}", startingTime="2026-01-31")
    refused("endingToken and endingTime exclude", endingToken="{}", endingTime="2026-01-31")
    refused("startingTime is a time such as", startingTime="yesterday")
    refused("a checkpoint token is a JSON object", startingToken="[1]")
    refused("onLoss is fail or gap, not 'perhaps'", onLoss="perhaps")
    refused("partitions is a whole number", partitions="0")
    refused("timeout is a whole number", timeout="soon")
    refused("maxRowsPerTrigger is a whole number", stream=True, maxRowsPerTrigger="-1")
    refused("tlsKey needs its certificate", tlsKey="key.pem")
    refused("is not an address", brokers="a:b:c")
    with pytest.raises(UsageError, match=r"a write .* has no option 'where'"):
        write_options({"where": "n > 1"})
    access = Access(token="secret", tls_ca="a", tls_cert="b", tls_key="c", timeout_s=7)
    assert read_options(access.options(), stream=True).access == access
    assert "secret" not in repr(access)
    assert read_options({}, stream=False).topic == "#", "not what brokers publish about themselves"
    assert read_options({"topic": ""}, stream=True).topic == ""


def test_columns_that_cannot_be_are_refused() -> None:
    """P1: one of the event's own has its type and its name, whatever Spark makes of capitals."""

    def refused(text: str, **columns: DataType) -> None:
        with pytest.raises(UsageError, match=text):
            PostroadSource({}).reader(StructType([StructField(*one) for one in columns.items()]))

    refused("column tick is bigint, not string", id=StringType(), tick=StringType())
    refused("column Tick: an event's own is written tick", Tick=LongType())
    refused("column n: an attribute is string, bigint", n=BinaryType())
    value = StructType(
        [
            StructField(name, kind())
            for name, kind in zip(VALUE.names, (StringType, LongType, DoubleType, BooleanType), strict=True)
        ]
    )
    chosen = [("attributes", MapType(StringType(), value)), ("payload", BinaryType()), ("N", LongType())]
    PostroadSource({}).reader(StructType([StructField(*one) for one in chosen]))


def test_filters_become_a_selector() -> None:
    """P2: what brokers can decide goes to them; what means something else there does not."""
    columns = {"topic": "", "pubend": "", "n": "integer", "name": "text", "x": "float", "on": "boolean"}

    def where(*filters: Filter) -> str:
        return pushed(Pushed("", ""), filters, columns).where

    assert where(GreaterThan(("n",), 5), IsNotNull(("n",))) == '("n" > 5) AND ("n" IS NOT NULL)'
    assert where(Not(In(("name",), ("a'b", "c")))) == """NOT ("name" IN ('a''b', 'c'))"""
    assert where(StringStartsWith(("name",), "5%")) == """"name" LIKE '5!%%' ESCAPE '!'"""
    assert where(EqualTo(("on",), True)) == '"on" = TRUE'
    nothing = (IsNull(("n",)), EqualTo(("x",), 0.0), EqualTo(("attributes", "n"), 1), EqualTo(("tick",), 1))
    assert where(*nothing, Not(IsNotNull(("n",))), GreaterThan(("x",), float("nan"))) == ""
    assert where(Not(EqualNullSafe(("name",), "a"))) == ""
    assert pushed(Pushed("a/#", ""), [EqualTo(("topic",), "a/b")], columns).topic == "a/b"
    assert pushed(Pushed("a/#", ""), [EqualTo(("topic",), "b")], columns).topic == "a/#"
    assert pushed(Pushed("", ""), [EqualTo(("topic",), "$postroad/gap")], columns).topic == ""
    assert not pushed(Pushed("", ""), [EqualTo(("pubend",), "x")], columns).wants("y")


def test_a_stream_goes_on_where_it_was(spark: SparkSession, brokers: Brokers, tmp_path: Path) -> None:
    """P1: batches of at most the limit; a restart from the checkpoint reads what is new, each event once."""
    broker = brokers.start("b1")
    options = {"topic": "orders/#", "durable": "spark"}
    drain(stream(spark, broker.address, **options), tmp_path / "c")
    publish(broker.address, range(50))
    publish(broker.address, range(50, 60), "elsewhere")
    limited = stream(spark, broker.address, **options, maxRowsPerTrigger="20")
    found = drain(limited, tmp_path / "c")
    assert [len(one) for one in found] == [20, 20, 10]
    assert [n for one in found for n in one] == list(range(50))
    publish(broker.address, range(60, 70))
    assert drain(stream(spark, broker.address, **options), tmp_path / "c") == [list(range(60, 70))]
    assert drain(stream(spark, broker.address, **options), tmp_path / "c") == []
    with postroad.sync.connect(broker.address) as client:
        (held,) = client.request("subs")["subscriptions"]
        assert held["name"] == "spark"


def test_a_continuous_query(spark: SparkSession, brokers: Brokers) -> None:
    """P1: what is published while the query runs arrives."""
    broker = brokers.start("b1")
    rows = stream(spark, broker.address, durable="live")

    def start() -> Any:
        begun = rows.writeStream.format("memory").queryName("live").start()
        while begun.status["message"].startswith("Initializing"):
            begun.awaitTermination(0.2)
        return begun

    query = ready(start)
    try:
        for first in range(0, 30, 10):
            publish(broker.address, range(first, first + 10))
            until = time.monotonic() + 120
            while spark.table("live").count() < first + 10:
                assert time.monotonic() < until
                assert query.exception() is None
                time.sleep(0.2)
        values = [row[0] for row in spark.table("live").select("attributes.n.integer").collect()]
        assert sorted(values) == list(range(30))
    finally:
        query.stop()


def test_a_released_range(spark: SparkSession, brokers: Brokers, tmp_path: Path) -> None:
    """P1: a range lost to early release fails the query, or is a row, as the option says."""
    text = '[durable]\nkeep = "2 s"\n'
    broker = brokers.start("b1", extra=configured(tmp_path, text))
    with postroad.sync.connect(broker.address) as client:
        while not (heads := client.request("heads")["heads"]):  # it opens a moment after the start
            time.sleep(0.05)
        start = json.dumps(heads)
    publish(broker.address, range(10))
    with postroad.sync.connect(broker.address) as client:
        until = time.monotonic() + 120
        while client.request("status")["durable_pubends"][0]["floor"] <= max(json.loads(start).values()):
            assert time.monotonic() < until
            client.publish("other", b"x", mode="durable")
            time.sleep(0.5)
        client.subscribe("orders/#", durable="holder", ack="manual").close()
    publish(broker.address, range(10, 20))
    with pytest.raises(Exception, match="were released before they were read"):
        source(spark, broker.address, startingToken=start, topic="orders/#").load().collect()
    rows = source(spark, broker.address, startingToken=start, topic="orders/#", onLoss="gap").load().collect()
    gaps = [row for row in rows if row.id is None]
    assert gaps
    assert all(row.topic == "$postroad/gap" for row in gaps)
    assert gaps[0].attributes["start"].integer < gaps[0].attributes["end"].integer
    assert {row.attributes["n"].integer for row in rows if row.id is not None} == set(range(10, 20))
    assert source(spark, broker.address, topic="orders/#").load().count() == 10
