"""The SQL in docs/reference/pipeline.md runs, on a lake that has rows in every table."""

from __future__ import annotations

import re
from pathlib import Path

from pyspark.sql import SparkSession
from tests.worlds.spark_networks import World
from tests.worlds.spark_traces import FINE
from tests.worlds.spark_traffic import Traffic
from tests.worlds.spark_traffic import lake_of as audit_lake

from postroad.spark.lake.tables import SCHEMAS
from postroad.tracking.settings import TrackingConfig

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "pipeline.md"


def test_the_examples_run(spark: SparkSession, tmp_path: Path) -> None:
    """P4."""
    traffic = Traffic(3)
    traffic.plant()
    lake = audit_lake(spark, tmp_path, traffic)
    world = World(3, TrackingConfig(**FINE), 2, extra=0)
    world.happen(5, faults=False)
    world.stop()
    lake.append("filters", world.filter_rows())
    lake.append("attachments", world.attachment_rows())
    for table in SCHEMAS:
        lake.read(table).createOrReplaceTempView(table)
    examples = re.findall(r"```sql\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(examples) == 6
    for example in examples:
        assert spark.sql(example).collect(), example


def test_every_column_is_described() -> None:
    """P4: the lake's schema is a promise."""
    text = DOCUMENT.read_text()
    lake = text[text.index("## The lake") : text.index("## SQL")]
    words = set(re.findall(r"\w+", lake))
    for table, schema in SCHEMAS.items():
        columns = re.findall(
            r"`?(\w+)`?:? (?:string|bigint|int|boolean|binary|date|map|array|double)", schema
        )
        assert set(columns) <= words, (table, set(columns) - words)
