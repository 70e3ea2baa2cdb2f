"""Publisher numbers: who comes back after a restart of its broker stays on the pubend that has its events."""

from __future__ import annotations

from itertools import count

import pytest

from postroad.links.resuming import Resuming
from postroad.wire.frames import DEFAULT_LIMITS, Hello


def hello(publisher: int = 0, key: bytes = b"") -> Hello:
    return Hello(
        version=1,
        role="client",
        name="c",
        token="",
        limits=DEFAULT_LIMITS,
        window=1 << 20,
        time_us=0,
        publisher=publisher,
        resume_key=key,
    )


@pytest.mark.parametrize("pubends", [1, 4, 7])
def test_a_new_number_leads_to_the_pubend_of_the_earlier_one(pubends: int) -> None:
    """docs/reference/client.md: a publisher's events at one broker come in order, with `pubends = 4` too."""
    numbers, later = count(1), count(1 << 22)
    before = Resuming(new_number=lambda: next(numbers), new_key=lambda: b"k", pubends=pubends)
    after = Resuming(new_number=lambda: next(later), new_key=lambda: b"l", pubends=pubends)
    for _ in range(20):
        old, resumed = before.number(hello(), "alice")
        assert not resumed
        new, resumed = after.number(hello(old, before.key(old)), "alice")
        assert not resumed
        assert new % pubends == old % pubends
        assert after.number(hello(new, after.key(new)), "alice") == (new, True)
    assert before.number(hello(), "alice")[0] == 21, "numbers are given out in turn where none was had"
