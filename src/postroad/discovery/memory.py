"""The requests that were seen last, so that a repetition costs nothing (paper 4: the last 1,000)."""

from __future__ import annotations

from collections import OrderedDict


class Memory:
    def __init__(self, size: int) -> None:
        self._size = size
        self._attempts: OrderedDict[bytes, int] = OrderedDict()  # UUID -> the latest attempt, oldest first

    def __len__(self) -> int:
        return len(self._attempts)

    def is_new(self, uuid: bytes, attempt: int) -> bool:
        """Whether this attempt is later than those that were seen; it is seen now."""
        if attempt <= self._attempts.get(uuid, 0):
            return False
        self._attempts[uuid] = attempt
        self._attempts.move_to_end(uuid)
        if len(self._attempts) > self._size:
            self._attempts.popitem(last=False)
        return True
