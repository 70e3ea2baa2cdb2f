"""P2: `postroad.spark.where` and the broker's matcher give the same answers (docs/reference/selectors.md).

Thousands of random conditions are asked of the same rows in a few Spark jobs, many conditions to a job, and
compared with the predicate, all three truth values, not only whether an event matches.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import postroad.spark
from postroad.errors import SelectorError, UsageError
from postroad.events.topics import pattern_matches
from postroad.selectors import Selector
from postroad.spark.lake.rows import SCHEMAS, typed
from postroad.spark.where import condition_sql, selector_sql, topic_sql

NAMES = ["a", "b", "c", "na-me", "d.e"]
TEXTS = ["", "x", "xy", "xyz", "y", "é", "éa", "\U0010ffff", "\U0010ffffa", "a%b", "a_b", "'", "\\", "a\nb"]
NUMBERS: list[int | float] = [0, 1, -1, 2, 5, 5.0, 5.5, -0.0, 0.1, 2**53, 2**53 + 1, float(2**53)]
NUMBERS += [2**63 - 1, -(2**63), float(2**63), -float(2**63), 1e300, 5e-324, float("inf"), float("-inf")]
TOPICS = ["a", "a/b", "a/b/c", "a//c", "b/b", "$sys/a", "a/", "/", "é/b", "a.b", "axb", "a\\b/c"]
PATTERNS = ["#", "+", "a", "a/b", "a/#", "+/b", "a/+/c", "a/b/#", "+/+", "$sys/#", "$sys/+", "+/#", "/+"]
PATTERNS += ["é/+", "a.b", "a.b/#", "a\\b/+", "+/+/+"]
ROWS = 240
PER_JOB = 150


def value(random: Random) -> Any:
    return random.choice([random.choice(NUMBERS), random.choice(TEXTS), random.random() < 0.5])


def rows(seed: int) -> list[tuple[str, dict[str, Any]]]:
    random = Random(seed)
    made: list[tuple[str, dict[str, Any]]] = [("a", {})]
    while len(made) < ROWS:
        named = random.sample(NAMES, random.randint(0, len(NAMES)))
        made.append((random.choice(TOPICS), {name: value(random) for name in named}))
    return made


class Grammar:
    """Random conditions; the language's own limits keep them finite."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def name(self) -> str:
        name = self.random.choice(NAMES)
        return name if name in ("a", "b", "c", "d.e") else f'"{name}"'

    def literal(self, kinds: str = "tnb") -> str:
        kind = self.random.choice(kinds)
        if kind == "t":
            return "'" + self.random.choice(TEXTS).replace("'", "''") + "'"
        if kind == "b":
            return self.random.choice(["TRUE", "FALSE"])
        number = self.random.choice(NUMBERS)
        return {float("inf"): "1e308", float("-inf"): "-1e308"}.get(number, repr(number))

    def arithmetic(self, depth: int) -> str:
        roll = self.random.random()
        if depth == 0 or roll < 0.35:
            return self.name() if self.random.random() < 0.75 else self.literal("n")
        if roll < 0.45:
            return f"(- {self.arithmetic(depth - 1)})"
        sign = self.random.choice("+-*/")
        return f"({self.arithmetic(depth - 1)} {sign} {self.arithmetic(depth - 1)})"

    def pattern(self) -> str:
        parts = self.random.choices(["%", "_", "x", "y", "é", "a", "\\", "!%", "!_", "!!"], k=4)
        return "".join(parts[: self.random.randint(0, 4)])

    def simple(self) -> str:
        choose = self.random.choice
        match self.random.randrange(9):
            case 0 | 1:
                return f"{self.name()} {choose(['=', '<>', '<', '<=', '>', '>='])} {self.literal()}"
            case 2:
                negated = choose(["", "NOT "])
                return f"{self.name()} {negated}BETWEEN {self.literal('nt')} AND {self.literal('nt')}"
            case 3:
                kinds = choose(["n", "t", "b", "tn", "tnb"])
                members = [self.literal(kinds) for _ in range(choose([1, 2, 3, 15]))]
                return f"{self.name()} {choose(['', 'NOT '])}IN ({', '.join(members)})"
            case 4:
                return f"{self.name()} {choose(['', 'NOT '])}LIKE '{self.pattern()}' ESCAPE '!'"
            case 5:
                return f"{self.name()} IS {choose(['', 'NOT '])}NULL"
            case 6:
                return f"{self.name()} {choose(['=', '<>', '<', '>='])} {self.name()}"
            case 7:
                return f"{self.arithmetic(2)} {choose(['=', '<', '>=', '<>'])} {self.arithmetic(1)}"
        return self.name()

    def condition(self, depth: int = 2) -> str:
        roll = self.random.random()
        if depth == 0 or roll < 0.5:
            return self.simple()
        if roll < 0.6:
            return f"NOT ({self.condition(depth - 1)})"
        joint = self.random.choice(["AND", "OR"])
        return f"({self.condition(depth - 1)} {joint} {self.condition(depth - 1)})"

    def selectors(self, wanted: int) -> list[Selector]:
        found: list[Selector] = []
        while len(found) < wanted:
            try:
                found.append(Selector.parse("", self.condition()))
            except SelectorError:  # arithmetic on a literal that is no number, and the like
                continue
        return found


@pytest.fixture(scope="module")
def table(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """The rows, from a file: Spark would answer from a local list while it plans, by another way."""
    path: Path = tmp_path_factory.mktemp("rows")
    listed = [
        {
            "tick": number,
            "topic": topic,
            "attributes": [(name, typed(one)) for name, one in attributes.items()],
        }
        for number, (topic, attributes) in enumerate(rows(1))
    ]
    pq.write_table(pa.Table.from_pylist(listed, SCHEMAS["events"]), path / "rows.parquet")
    return spark.read.parquet(str(path))


def answers(table: DataFrame, columns: list[str]) -> list[list[bool | None]]:
    """Per row in order, the value of each column."""
    packed = F.array(*(F.expr(column) for column in columns)).alias("answers")
    found = {row.tick: list(row.answers) for row in table.select("tick", packed).collect()}
    return [found[number] for number in range(ROWS)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("conditions", "codegen"),
    [
        (400, False),
        (30, True),
        pytest.param(4000, False, marks=pytest.mark.soak),
        pytest.param(200, True, marks=pytest.mark.soak),
    ],
)
def test_thousands_of_random_conditions(
    spark: SparkSession, table: DataFrame, conditions: int, codegen: bool
) -> None:
    """P2: every condition, every row, true, false and unknown; interpreted, and compiled by Spark."""
    happened = rows(1)
    selectors = Grammar(conditions + codegen).selectors(conditions)
    spark.conf.set("spark.sql.codegen.wholeStage", str(codegen).lower())
    spark.conf.set("spark.sql.codegen.factoryMode", "CODEGEN_ONLY" if codegen else "NO_CODEGEN")
    seen: set[bool | None] = set()
    try:
        for first in range(0, len(selectors), PER_JOB):
            some = selectors[first : first + PER_JOB]
            found = answers(table, [condition_sql(one.condition) for one in some])
            for (_, attributes), row in zip(happened, found, strict=True):
                for selector, answer in zip(some, row, strict=True):
                    expected = selector.predicate(attributes)
                    assert answer is expected, f"{selector.where} of {attributes}: {answer}"
                    seen.add(expected)
    finally:
        spark.conf.unset("spark.sql.codegen.wholeStage")
        spark.conf.unset("spark.sql.codegen.factoryMode")
    assert seen == {True, False, None}


def test_topics(table: DataFrame) -> None:
    """P2."""
    found = answers(table, [topic_sql(pattern) for pattern in PATTERNS])
    for (topic, _), row in zip(rows(1), found, strict=True):
        assert row == [pattern_matches(pattern, topic) for pattern in PATTERNS], topic


def test_whole_selectors(table: DataFrame) -> None:
    """P2: Topic and condition together, two truth values: what a subscription gets."""
    selectors = [
        Selector.parse(pattern, one.where)
        for pattern, one in zip(PATTERNS * 4, Grammar(3).selectors(4 * len(PATTERNS)), strict=True)
    ]
    found = answers(table, [selector_sql(one) for one in selectors])
    for (topic, attributes), row in zip(rows(1), found, strict=True):
        assert row == [one.matches(topic, attributes) for one in selectors]


def test_nested_arithmetic_stays_small(table: DataFrame) -> None:
    """Thirty levels: written out at every level it would be longer than any memory."""
    text = "a"
    for number in range(28):
        text = f"({text} {'+-*/'[number % 4]} b)"
    selector = Selector.parse("", f"{text} > 0")
    sql = condition_sql(selector.condition)
    assert len(sql) < 40_000
    (column,) = zip(*answers(table, [sql]), strict=True)
    assert list(column) == [selector.predicate(attributes) for _, attributes in rows(1)]


def test_a_hostile_pattern_takes_no_time(spark: SparkSession) -> None:
    """LIKE with many wildcards does not backtrack."""
    selector = Selector.parse("", f"a LIKE '{'%x' * 60}%y'")
    frame = spark.createDataFrame(
        [({"a": ("x" * 5000, None, None, None)},)],
        "attributes map<string, struct<text: string, integer: bigint, `float`: double, boolean: boolean>>",
    )
    assert frame.select(F.expr(condition_sql(selector.condition))).first() == (False,)


def test_the_public_function(table: DataFrame) -> None:
    expected = [
        number
        for number, (topic, attributes) in enumerate(rows(1))
        if Selector.parse("a/#", "a >= 1").matches(topic, attributes)
    ]
    assert expected
    column = postroad.spark.where("a >= 1", topic="a/#")
    assert sorted(row.tick for row in table.filter(column).collect()) == expected
    parsed = postroad.spark.where(Selector.parse("a/#", "a >= 1"))
    assert sorted(row.tick for row in table.filter(parsed).collect()) == expected
    with pytest.raises(SelectorError):
        postroad.spark.where("a >=")
    with pytest.raises(UsageError, match="text or a Selector, not None"):
        postroad.spark.where(cast(Any, None))
