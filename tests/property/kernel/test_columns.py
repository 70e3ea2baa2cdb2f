"""Rows as columns: the compiled function against its reference and against the rows themselves (P1)."""

from __future__ import annotations

import random
import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from tests.worlds.batches import Raw, batches, build
from tests.worlds.hostile_frames import mutate, some_frame

from postroad.errors import BugError
from postroad.kernel import columns_reference, wanted
from postroad.kernel.columns_reference import Columns

if wanted("columns"):
    from postroad.kernel.columns import columns
else:
    pytest.skip("the kernel was not compiled, there is only the reference", allow_module_level=True)


def cut(offsets: bytes, data: bytes) -> list[bytes]:
    at = struct.unpack(f"<{len(offsets) // 4}i", offsets)
    return [data[one:two] for one, two in pairwise(at)]


def outcome(function: object, data: bytes) -> Columns | str:
    try:
        return function(data)  # type: ignore[operator,no-any-return]
    except BugError as error:
        return str(error)


@settings(max_examples=100, deadline=None)
@given(batches)
def test_columns_hold_the_rows(rows: list[Raw]) -> None:
    found = columns(build(rows).data)
    assert found == columns_reference.columns(build(rows).data)
    topics, payloads = cut(found[0], found[1]), cut(found[2], found[3])
    assert [(topic.decode(), payload) for topic, payload in zip(topics, payloads, strict=True)] == [
        (topic, payload) for _, topic, _, payload in rows
    ]
    names, texts = cut(found[5], found[6]), cut(found[8], found[9])
    held = struct.unpack(f"<{len(rows) + 1}i", found[4])
    for row, (_, _, attributes, _) in enumerate(rows):
        mine = range(held[row], held[row + 1])
        assert [names[at].decode() for at in mine] == sorted(attributes, key=str.encode)
        for at in mine:
            number = found[10][8 * at : 8 * at + 8]
            kinds = {
                0: texts[at].decode(),
                1: struct.unpack("<q", number)[0],
                2: struct.unpack("<d", number)[0],
                3: bool(number[0]),
            }
            value = attributes[names[at].decode()]
            assert kinds[found[7][at]] == value
            assert type(kinds[found[7][at]]) is type(value)


def test_frames_that_nobody_checked_are_refused_alike() -> None:
    chance = random.Random(7)
    whole = 0
    for _ in range(6_000):
        frame = some_frame(chance)
        data = mutate(frame, chance) if chance.random() < 0.9 else frame
        found = outcome(columns, data)
        assert found == outcome(columns_reference.columns, data)
        whole += not isinstance(found, str)
    assert 600 < whole < 6_000
    for size in range(97):
        assert outcome(columns, bytes(size)) == outcome(columns_reference.columns, bytes(size))
