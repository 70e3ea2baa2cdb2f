"""P4: engines that others made read what landing wrote, as docs/how-to/read-the-lake.md has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postroad.ids import MessageId, pubend_id
from postroad.spark.lake import rows
from postroad.spark.lake.tables import Tables

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "read-the-lake.md"
BLOCKS = re.findall(r"## ([^\n]*)\n(?:(?!\n## ).)*?```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
DAY_MS = 1_763_164_800_000


def test_each_engine_has_its_block() -> None:
    names = [name for name, _ in BLOCKS]
    assert names == ["DuckDB", "Polars", "pandas", "Spark without more jars", "As it was"]


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
    del spark  # the one session there is
    monkeypatch.chdir(tmp_path)
    tables = Tables("lake")
    for topic, numbers in (("orders/eu", range(30)), ("orders/us", range(30, 42))):
        made = ((MessageId(5, 7, DAY_MS + n, n), topic, {"n": n}, b"p", pubend_id(7, 0), n) for n in numbers)
        tables.append("events", rows.events(made))
    exec(compile(block, name, "exec"), {})
    text = capsys.readouterr().out
    assert re.search(r"\b30\b", text), text
    assert re.search(r"\b12\b" if "orders/us" in text else r"\b42\b", text), text
