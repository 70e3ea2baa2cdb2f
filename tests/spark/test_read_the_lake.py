"""P4: engines that others made read what landing wrote, as docs/how-to/read-the-lake.md has it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from postroad.ids import MessageId, pubend_id
from postroad.spark.java import java_home
from postroad.spark.lake import rows
from postroad.spark.lake.tables import Tables

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "read-the-lake.md"
ALL_BLOCKS = re.findall(r"## ([^\n]*)\n(?:(?!\n## ).)*?```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
APART = "Spark with delta-spark"  # which wants another Spark
BLOCKS = [(name, block) for name, block in ALL_BLOCKS if name != APART]
DAY_MS = 1_763_164_800_000
SPARK, DELTA = "4.2.0", "4.4.0"
JARS = ("delta-spark_2.13", "delta-storage", "delta-kernel-api", "delta-kernel-defaults")
MAVEN = "https://repo1.maven.org/maven2/io/delta"


def fill() -> None:
    """A lake of two commits, 30 events of one topic and 12 of another."""
    tables = Tables("lake")
    for topic, numbers in (("orders/eu", range(30)), ("orders/us", range(30, 42))):
        made = ((MessageId(5, 7, DAY_MS + n, n), topic, {"n": n}, b"p", pubend_id(7, 0), n) for n in numbers)
        tables.append("events", rows.events(made))


def test_each_engine_has_its_block() -> None:
    names = [name for name, _ in ALL_BLOCKS]
    assert names == ["DuckDB", "Polars", "pandas", "Spark without more jars", APART, "As it was"]


@pytest.mark.filterwarnings("default")  # of those engines
@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_an_engine_reads_it(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    block: str,
) -> None:
    """P4."""
    del spark  # the one session there is
    monkeypatch.chdir(tmp_path)
    fill()
    exec(compile(block, name, "exec"), {})
    text = capsys.readouterr().out
    assert re.search(r"\b30\b", text), text
    assert re.search(r"\b12\b" if "orders/us" in text else r"\b42\b", text), text


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_delta_spark_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: in an environment of its own, with the Spark that delta-spark is made for."""
    monkeypatch.chdir(tmp_path)
    fill()
    python = tmp_path / "other" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "other")], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", f"pyspark=={SPARK}"], check=True)
    jars: list[str] = []
    for name in JARS:
        jars.append(str(tmp_path / f"{name}.jar"))
        urllib.request.urlretrieve(f"{MAVEN}/{name}/{DELTA}/{name}-{DELTA}.jar", jars[-1])
    (tmp_path / "spark-defaults.conf").write_text(
        f"spark.jars {','.join(jars)}\nspark.master local[1]\nspark.ui.enabled false\n"
    )
    path = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = subprocess.run(
        [str(python), "-c", dict(ALL_BLOCKS)[APART]],
        env=path | {"SPARK_CONF_DIR": str(tmp_path), "JAVA_HOME": str(java_home())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    topics, some, earlier = answer.stdout.splitlines()
    assert "'orders/eu', count=30" in topics.replace("topic=", "")
    assert "'orders/us', count=12" in topics.replace("topic=", "")
    assert (some, earlier) == ("30", "30")


def variant_table(place: Path) -> None:
    """A Delta table with {"price": 5} as VARIANT, written by hand: metadata with the one name, an object of
    one field, an integer of a byte."""
    variant = pa.struct(
        [pa.field("metadata", pa.binary(), nullable=False), pa.field("value", pa.binary(), nullable=False)]
    )
    row = {"metadata": b"\x01\x01\x00\x05price", "value": b"\x02\x01\x00\x00\x02\x0c\x05"}
    (place / "_delta_log").mkdir(parents=True)
    pq.write_table(pa.table({"attributes": pa.array([row], variant)}), place / "part.parquet")
    fields = [{"name": "attributes", "type": "variant", "nullable": True, "metadata": {}}]
    features = {"readerFeatures": ["variantType"], "writerFeatures": ["variantType"]}
    actions: list[dict[str, Any]] = [
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {
            "metaData": {
                "id": "x",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": fields}),
                "partitionColumns": [],
                "configuration": {},
            }
        },
        {
            "add": {
                "path": "part.parquet",
                "partitionValues": {},
                "size": (place / "part.parquet").stat().st_size,
                "modificationTime": 0,
                "dataChange": True,
            }
        },
    ]
    (place / "_delta_log" / f"{0:020}.json").write_text("\n".join(map(json.dumps, actions)))


@pytest.mark.filterwarnings("default")  # of those engines
def test_why_attributes_are_no_variant(spark: SparkSession, tmp_path: Path) -> None:
    """P4: Spark reads a value, and DuckDB, Polars and pandas read two fields of bytes. Once one of them does
    otherwise, docs/reference/pipeline.md is to be thought over."""
    variant_table(tmp_path / "variant")
    file = spark.read.schema("attributes variant").parquet(str(tmp_path / "variant"))
    assert file.selectExpr("attributes:price::int AS price").collect()[0].price == 5
    opaque = {"metadata": b"\x01\x01\x00\x05price", "value": b"\x02\x01\x00\x00\x02\x0c\x05"}
    table = DeltaTable(str(tmp_path / "variant"))
    dataset = table.to_pyarrow_dataset()
    assert duckdb.from_arrow(dataset).fetchall() == [(opaque,)]
    assert polars.scan_delta(str(tmp_path / "variant")).collect().to_dicts() == [{"attributes": opaque}]
    assert table.to_pandas()["attributes"].tolist() == [opaque]
