"""P5, P11: ids to trace are packed by home and time, each in one place; what is no id is named."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.errors import UsageError
from postroad.ids import ID_BYTES, MessageId
from postroad.spark.trace import packed_ids as trace_ids
from postroad.spark.trace.packed_ids import packer, parsed, salter


def column(texts: list[str | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": pa.array(texts, pa.string())})


def held(row: dict[str, object]) -> list[bytes]:
    data = row["keys"]
    assert isinstance(data, bytes)
    assert row["ids"] == len(data) // ID_BYTES
    return [data[at : at + ID_BYTES] for at in range(0, len(data), ID_BYTES)]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_id_is_in_the_row_of_its_home_and_bucket(seed: int) -> None:
    """P5."""
    random = Random(seed)
    ids = [
        MessageId(random.getrandbits(32), random.choice((1, 7, 2**32 - 1)), random.randrange(2**48), number)
        for number in range(random.choice((1, 40)))
    ]
    texts = [str(one) for one in ids]
    cut = random.randrange(len(texts) + 1)
    batches = [column(texts[:cut]), column(texts).slice(cut)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_ids, "_AT_ONCE", 10)
        rows = [row for batch in packer(2**40)(iter(batches)) for row in batch.to_pylist()]
    assert sorted(one for row in rows for one in held(row)) == sorted(bytes(one) for one in ids)
    for row in rows:
        assert (row["salt"], row["wrong"]) == (0, None)
        for one in map(MessageId.from_bytes, held(row)):
            assert row["home"] == one.broker
            assert row["bucket"] == one.time_ms >> 40
    assert len(rows) == len({(row["home"], row["bucket"]) for row in rows}) or len(ids) > 10


RIGHT = "0000002a-00000007-0193c1d2e3f4-0001"


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, "", "rubbish", RIGHT[:-1], RIGHT + "0", RIGHT.upper(), RIGHT.replace("a", "g")),
        *("0000002a00000007--0193c1d2e3f4-0001", "0000002a-00000007-0193c1d2e3f4 0001", "é" + RIGHT[2:]),
        *("                                   ", "0-00002a-00000007-0193c1d2e3f4000-1"),
    ],
)
def test_what_is_no_id_is_named(wrong: str | None) -> None:
    """P11: among ids that are; in order, so that the same input always gets the same answer."""
    keys, named = parsed(column([RIGHT, wrong, RIGHT])["id"])
    assert (len(keys), named) == (0, [wrong or ""])
    (row,) = [row for batch in packer(1000)(iter([column([wrong])])) for row in batch.to_pylist()]
    assert row["wrong"] == (wrong or "")
    assert parsed(column(["zz", wrong, "zzz"])["id"])[1] == sorted(["zz", wrong or "", "zzz"])
    if wrong != RIGHT.upper():  # which `read_ids` writes in small letters
        with pytest.raises(UsageError):
            MessageId.parse(row["wrong"])


def test_of_many_that_are_no_ids_a_few_are_named() -> None:
    """P11: and all are counted, also in later batches."""
    batches = [column(["e", RIGHT, "b", "b"]), column([RIGHT]), column(["d", "c", "a", "f"])]
    rows = [row for batch in packer(1000)(iter(batches)) for row in batch.to_pylist()]
    wrong = [row for row in rows if row["wrong"] is not None]
    assert [row["wrong"] for row in wrong] == ["b", "e", "a", "c", "d"]
    assert sum(row["ids"] for row in wrong) == 7


def test_hot_groups_are_split_and_each_id_has_one_part() -> None:
    """P5: an id that is asked for twice, in two tasks, comes to the same part."""
    ids = [str(MessageId(number, 1, 5_000 + number % 2, 0)) for number in range(3000)]
    more = [str(MessageId(number, 2, 5_000, 0)) for number in range(100)]
    packed = list(packer(10_000)(iter([column(ids + more + ids[:50])])))
    rows = [row for batch in salter({(1, 0): 3})(iter(packed)) for row in batch.to_pylist()]
    parts: dict[bytes, set[tuple[int, int]]] = {}
    for row in rows:
        for one in held(row):
            parts.setdefault(one, set()).add((row["home"], row["salt"]))
    assert len(parts) == 3100
    assert all(len(places) == 1 for places in parts.values())
    sizes = [sum(places == {(1, salt)} for places in parts.values()) for salt in range(3)]
    assert sum(sizes) == 3000
    assert min(sizes) > 800
    assert sum(places == {(2, 0)} for places in parts.values()) == 100
