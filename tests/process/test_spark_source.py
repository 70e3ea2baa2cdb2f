"""What the driver and the executors of a Spark query do with brokers, without Spark around it (P1, P7)."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.worlds.processes import IMPATIENT, Brokers, configured, wait_until

import postroad
from postroad.durable.subscriber.desk import PAGE_ROWS
from postroad.errors import UnavailableError, UsageError
from postroad.spark.audit import landed_subscriptions
from postroad.spark.lake import rows
from postroad.spark.lake.landing import _Feed, look_around
from postroad.spark.lake.tables import Tables
from postroad.spark.options import OLDEST, Access, read_options
from postroad.spark.source import SINCE, BatchReader, StreamReader

KEEP = '[durable]\nkeep = "1 h"\n'


def publish(address: str, numbers: range) -> None:
    with postroad.sync.connect(address) as client:
        client.publish_many([("orders/eu", b"", {"n": n}) for n in numbers], mode="durable")


def read_all(reader: StreamReader, start: dict[str, int], end: dict[str, int]) -> int:
    parts = reader.partitions(start, end)
    return sum(batch.num_rows for part in parts for batch in reader.read(part))


def test_ranges_of_time_and_of_ticks(brokers: Brokers, tmp_path: Path) -> None:
    """P1: a batch read has what lies between two times, or two tokens, and waits for nothing to come."""
    broker = brokers.start("b1", extra=configured(tmp_path, KEEP))

    def numbers(**options: str) -> int:
        reader = BatchReader(read_options({"brokers": broker.address, **options}, stream=False), {"id": ""})
        return sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))

    publish(broker.address, range(10))
    with postroad.sync.connect(broker.address) as client:
        token = json.dumps(client.request("heads")["heads"])
    middle = datetime.fromtimestamp(max(json.loads(token).values()) / 1e6 + 0.001, UTC).isoformat()
    time.sleep(0.01)
    publish(broker.address, range(10, 30))
    assert numbers() == 30
    assert (numbers(endingTime=middle), numbers(startingTime=middle)) == (10, 20)
    assert (numbers(endingToken=token), numbers(startingToken=token)) == (10, 20)
    assert numbers(startingTime=middle, endingTime=datetime.now(UTC).isoformat()) == 20
    assert numbers(startingTime="2020-01-01", endingTime="2099-01-01", partitions="5") == 30
    assert numbers(startingTime="2099-01-01") == 0
    assert numbers(startingTime="2099-01-01", endingTime="2020-01-01") == 0
    with pytest.raises(UsageError, match="in the future"):
        numbers(endingToken=json.dumps({name: tick + 10**13 for name, tick in json.loads(token).items()}))


def test_a_durable_stream_begins_where_the_option_says(brokers: Brokers, tmp_path: Path) -> None:
    """P1: at the token at first, then where the subscription is; any number of times the same."""
    broker = brokers.start("b1", extra=configured(tmp_path, KEEP))
    publish(broker.address, range(10))
    with postroad.sync.connect(broker.address) as client:
        (pubend, middle), *_ = client.request("heads")["heads"].items()
    publish(broker.address, range(10, 20))
    given = {"brokers": broker.address, "topic": "orders/#", "durable": "spark"}
    token = json.dumps({pubend: middle})
    for _ in range(2):  # as of a query that was killed in its first batch
        reader = StreamReader(read_options(given | {"startingToken": token}, stream=True), {"id": ""})
        begun = reader.initialOffset()
        assert begun == {SINCE: OLDEST, pubend: middle}
        end = reader.latestOffset(begun, ReadAllAvailable())
        assert read_all(reader, begun, end) == 10
        reader.stop()
    reader.commit(end)
    assert reader.initialOffset()[pubend] == end[pubend], "what is done is not read again"
    reader.stop()


def test_a_broker_that_is_away_does_not_hold_up_the_others(brokers: Brokers, tmp_path: Path) -> None:
    """P1, P11: a stream goes on with what can be read and has the rest later; a batch read fails."""
    extra = configured(tmp_path, KEEP)
    one = brokers.start("b1", extra=extra)
    two = brokers.start("b2", one.address, extra=extra)
    given = {"brokers": f"{one.address},{two.address}", "topic": "orders/#", "timeout": "1"}
    stream_options = read_options(given | {"durable": "spark"}, stream=True)
    with postroad.sync.connect(one.address) as client, postroad.sync.connect(two.address) as other:
        far = other.request("status")["durable_pubends"][0]["pubend"]
        wait_until(lambda: far in client.request("heads")["heads"], "they have met", 60)
        first = StreamReader(stream_options, {"id": ""})
        start = first.initialOffset()
        first.stop()
        publish(one.address, range(10))
        publish(two.address, range(10, 30))
        head = other.request("heads")["heads"][far]
        wait_until(lambda: client.request("heads")["heads"][far] >= head, "it has heard of them", 60)
        planned = StreamReader(stream_options, {"id": ""})
        planned.prepareForTriggerAvailableNow()
        both = planned.latestOffset(start, ReadAllAvailable())
        two.kill()
        wait_until(lambda: client.request("heads")["away"] == [far], "it is missed", 60)

        reader = StreamReader(stream_options, {"id": ""})
        end = reader.latestOffset(start, ReadAllAvailable())
        assert end[far] == start[far]
        assert read_all(reader, start, end) == 10
        with pytest.raises(UnavailableError, match=f"the broker of pubend {far} is away"):
            read_all(reader, start, both)
        batch = BatchReader(read_options(given, stream=False), {"id": ""})
        with pytest.raises(UnavailableError, match=two.address):
            batch.partitions()
        batch = BatchReader(read_options(given | {"brokers": one.address}, stream=False), {"id": ""})
        with pytest.raises(UnavailableError, match=f"the broker of pubend {far} is away"):
            [list(batch.read(part)) for part in batch.partitions()]
        feed = _Feed(one.address, Access(timeout_s=5), "events", "d")
        assert look_around(Tables(tmp_path / "lake"), feed).startswith(f"away: {far[:8]}; ")
        two.start()
        wait_until(lambda: client.request("heads")["away"] == [], "it is back", 60)
        assert read_all(reader, end, both) == 20
        assert look_around(Tables(tmp_path / "lake"), feed) == ""
        reader.stop()
        planned.stop()


def test_a_query_waits_longer_for_a_broker_than_others_do(brokers: Brokers, tmp_path: Path) -> None:
    """P1: a restart that takes longer than a broker waits, and less than `timeout`, is not noticed."""
    extra = configured(tmp_path, KEEP)
    one = brokers.start("b1", extra=extra)
    two = brokers.start("b2", one.address, extra=extra, program=IMPATIENT)
    with postroad.sync.connect(two.address) as client, postroad.sync.connect(one.address) as other:
        far = other.request("status")["durable_pubends"][0]["pubend"]
        wait_until(lambda: far in client.request("heads")["heads"], "they have met", 60)
        publish(one.address, range(10))
        until = json.dumps({far: other.request("heads")["heads"][far]})
    one.kill()
    given = {"brokers": two.address, "endingToken": until, "timeout": "60"}
    batch = BatchReader(read_options(given, stream=False), {"id": ""})
    back = threading.Timer(2.0, one.start)
    back.start()
    assert sum(found.num_rows for part in batch.partitions() for found in batch.read(part)) == 10
    back.join()


def test_all_subscriptions_are_noted(brokers: Brokers, tmp_path: Path) -> None:
    """P7: more than one answer of a broker has; one that is gone stays; what is known is not written anew."""
    broker = brokers.start("b1")
    names = [f"n{number:04}" for number in range(PAGE_ROWS + 1)]

    async def subscribe() -> None:
        async with postroad.connect(broker.address) as client, AsyncExitStack() as held:
            await asyncio.gather(
                *(held.enter_async_context(client.subscribe("t", durable=name)) for name in names)
            )

    asyncio.run(subscribe())
    feed = _Feed(f"{broker.address},127.0.0.1:1", Access(timeout_s=5), "events", "d")
    lake = Tables(tmp_path / "lake")
    before = [{"name": "gone", "topic": "x", "since_us": 7}, {"name": "n0001", "since_us": 9}]
    before = [{"topic": "", "where": "", "shared": False, **one} for one in before]
    lake.append("subscriptions", pa.Table.from_pylist(before, rows.SCHEMAS["subscriptions"]))
    assert look_around(lake, feed).startswith("away: 127.0.0.1:1; ")
    found = {one.name: one for one in landed_subscriptions(lake)}
    assert sorted(found) == ["gone", *names]
    assert (found["gone"].since_us, found["n0001"].since_us, found["n0001"].topic) == (7, 9, "t")
    known = lake.files("subscriptions")
    look_around(lake, feed)
    assert lake.files("subscriptions") == known
