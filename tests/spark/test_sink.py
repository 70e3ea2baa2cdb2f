"""The sink against real brokers: what is written (P3); test_kills has what is killed in mid-batch."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType
from tests.worlds.certificates import Certificates
from tests.worlds.processes import KEEP, Brokers, configured
from tests.worlds.spark_streams import source

import postroad.spark
from postroad.errors import UsageError
from postroad.spark.sink import _events, _job, batch_writer


def test_rows_become_events(
    spark: SparkSession, brokers: Brokers, certificates: Certificates, tmp_path: Path
) -> None:
    """P3: topic, payload, attributes by column and by map, of their types; what cannot be is refused.

    To and from a broker that asks for TLS and a token.
    """
    certificate, key = certificates.issue("b1")
    ca = str(certificates.ca)
    extra = ("--tls-cert", certificate, "--tls-key", key, "--tls-ca", ca, "--token", "t")
    broker = brokers.start("b1", extra=(*extra, *configured(tmp_path, KEEP)))
    access = {"brokers": broker.address, "tlsCa": ca, "token": "t"}
    postroad.spark.register(spark)
    rows = spark.range(1000).selectExpr(
        "concat('t/', id % 3) AS topic",
        "concat('p', id) AS payload",
        "id AS n",
        "id % 2 = 0 AS even",
        "id / 2 AS x",
    )
    rows.repartition(3).write.format("postroad").options(**access).mode("append").save()
    found = source(spark, **access).load().collect()
    assert len({row.id for row in found}) == 1000
    by_number = {row.attributes["n"].integer: row for row in found}
    assert sorted(by_number) == list(range(1000))
    one = by_number[7]
    assert (one.topic, bytes(one.payload), one.attributes["x"]["float"]) == ("t/1", b"p7", 3.5)
    assert one.attributes["even"].boolean is False
    again = source(spark, **access, topic="t/0").load()
    again.withColumn("topic", again.topic.substr(1, 1)).write.format("postroad").mode("append").options(
        **access
    ).save()
    copied = source(spark, **access, topic="t").load().collect()
    assert sorted(row.attributes["n"].integer for row in copied) == list(range(0, 1000, 3))
    assert copied[0].attributes["x"]["float"] is not None
    with pytest.raises(UsageError, match="column `topic`"):
        batch_writer({}, spark.range(1).schema, overwrite=False)
    with pytest.raises(UsageError, match="overwritten"):
        batch_writer({"topic": "t"}, spark.range(1).schema, overwrite=True)


def test_what_only_brokers_publish_is_not_written() -> None:
    """P3: gaps that were read are left out; other topics of theirs are refused."""
    schema = StructType([StructField("topic", StringType())])

    def topics(*given: str) -> list[str]:
        batch = pa.RecordBatch.from_pydict({"topic": list(given)})
        return [topic for topic, _, _ in _events(batch, _job({}, schema, "", overwrite=False))]

    assert topics("a", "$postroad/gap", "b", "$postroads") == ["a", "b", "$postroads"]
    with pytest.raises(UsageError, match=r"only brokers publish to \$postroad/filters"):
        topics("a", "$postroad/filters")
    for topic in ("$postroad/gap", "$postroad"):
        with pytest.raises(UsageError, match="only brokers publish to"):
            _job({"topic": topic}, schema, "", overwrite=False)
