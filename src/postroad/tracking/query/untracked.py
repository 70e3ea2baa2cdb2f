"""What a broker answers that tracks nothing, so that traces still go on behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from postroad.tracking.query.lookup import Reading
from postroad.tracking.query.messages import MAX_NEIGHBOURS, Finding, TraceAnswer, TraceQuestion

UNTRACKED: Final = "this broker does not track messages"


class Untracked:
    """Traces go on at the neighbours there were since the start."""

    def __init__(self) -> None:
        self._neighbours: set[int] = set()
        self.looked = 0

    def linked(self, neighbour: int) -> None:
        self._neighbours.add(neighbour)

    def answer(
        self,
        question: TraceQuestion,
        records: Mapping[int, bytes],  # noqa: ARG002
        reading: Reading | None = None,  # noqa: ARG002
    ) -> tuple[TraceAnswer, tuple[int, ...]]:
        neighbours = tuple(sorted(self._neighbours)[:MAX_NEIGHBOURS])
        nothing = Finding(lost=UNTRACKED, neighbours=neighbours)
        return TraceAnswer(findings=(nothing,) * len(question.items)), ()
