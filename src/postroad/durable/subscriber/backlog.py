"""Saves that time asked for and the disk has not answered.

A disk that hangs has enough to do: beyond a limit (`hosting`), what changes is saved when it has answered.
"""

from __future__ import annotations

from postroad.errors import PostroadError
from postroad.seam.turn import Turn, Written


class Backlog:
    __slots__ = ("saves",)

    def __init__(self) -> None:
        self.saves = 0  # on their way

    def counted(self, then: Written) -> Written:
        """One more is on its way, until `then` is called."""
        self.saves += 1

        def answered(turn: Turn, error: PostroadError | None) -> None:
            self.saves -= 1
            then(turn, error)

        return answered
