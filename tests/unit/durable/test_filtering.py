"""What the persistent filtering subsystem keeps in memory."""

from __future__ import annotations

import numpy as np
from tests.worlds.turns import Turns

from postroad.durable.subscriber.backlog import Backlog
from postroad.durable.subscriber.filtering import PARSED_BYTES, PersistentFiltering
from postroad.seam.storage import Append
from postroad.selectors import Group


def test_records_kept_parsed_are_bounded_by_their_bytes() -> None:
    turns = Turns()
    pfs = PersistentFiltering(
        7 << 32, backlog=Backlog(), opened=lambda _: None, ready=lambda _turn, _buffers: None
    )
    rows = np.arange(0, 1000, 2, dtype=np.uint32)
    largest = 0
    for end in range(1000, 200_000, 1000):
        ticks = np.arange(end - 999, end + 1, dtype=np.int64)
        groups = [Group(rows, [*range(one, one + 100)]) for one in range(1, 61)]
        turn = turns.turn()
        assert pfs.write(turn, end - 1000, end, ticks, groups, then=lambda _turn, _error: None)
        (append,) = turn.effects
        assert isinstance(append, Append)
        assert pfs.find(append.first, append.data, 1) is not None
        held = sum(one.ticks.nbytes for groups in pfs._parsed.values() for one in groups)
        largest = max(largest, held)
    assert PARSED_BYTES // 2 < largest <= PARSED_BYTES
