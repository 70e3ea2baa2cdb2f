"""The requests that were seen last, so that a repetition costs nothing (paper 4: the last 1,000).

A crowd has more than 1,000 requests under way: one that is forgotten while it still travels is answered and
spread once more by everybody it comes to. So by default all of a busy second are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

REMEMBERED: Final = 10_000


class Memory:
    def __init__(self, size: int) -> None:
        self._size = size
        self._seen: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # UUID -> latest attempt, how many

    def __len__(self) -> int:
        return len(self._seen)

    def attempts(self, uuid: bytes, attempt: int) -> int:
        """How many attempts of it were seen, with this one; 0 if this one is not later than those."""
        latest, count = self._seen.get(uuid, (0, 0))
        if attempt <= latest:
            return 0
        self._seen[uuid] = (attempt, count + 1)
        self._seen.move_to_end(uuid)
        if len(self._seen) > self._size:
            self._seen.popitem(last=False)
        return count + 1
