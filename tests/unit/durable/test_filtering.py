"""What the persistent filtering subsystem keeps in memory."""

from __future__ import annotations

from itertools import count

import numpy as np

from postroad.durable.subscriber.filtering import PARSED_BYTES, PersistentFiltering
from postroad.selectors import Group


def test_records_kept_parsed_are_bounded_by_their_bytes() -> None:
    tags = count(1)
    pfs = PersistentFiltering(7 << 32, new_tag=lambda: next(tags), start=0)
    rows = np.arange(0, 1000, 2, dtype=np.uint32)
    largest = 0
    for end in range(1000, 200_000, 1000):
        ticks = np.arange(end - 999, end + 1, dtype=np.int64)
        groups = [Group(rows, [*range(one, one + 100)]) for one in range(1, 61)]
        append = pfs.write(end - 1000, end, ticks, groups)
        assert append is not None
        assert pfs.find(append.first, append.data, 1) is not None
        held = sum(one.ticks.nbytes for groups in pfs._parsed.values() for one in groups)
        largest = max(largest, held)
    assert PARSED_BYTES // 2 < largest <= PARSED_BYTES
