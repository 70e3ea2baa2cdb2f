"""The naive twin of the attachment map."""

from __future__ import annotations

from collections.abc import Iterable

from postroad.tracking.attachment_log import Change
from postroad.tracking.intervals import INTERVAL_BYTES

FEW_BYTES = 8 * INTERVAL_BYTES


class Plain:
    """When everybody was attached, gone through from end to end."""

    def __init__(self) -> None:
        self.intervals: dict[tuple[str, str], list[tuple[int, int | None]]] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            spans = self.intervals.get((change.kind, change.who), [])
            attached = bool(spans) and spans[-1][1] is None
            if change.what == "attach" and not attached:
                self.intervals[change.kind, change.who] = [*spans, (change.at_us, None)]
            elif change.what == "detach" and attached:
                spans[-1] = (spans[-1][0], max(change.at_us, spans[-1][0]))

    def forget(self, before_us: int) -> None:
        kept = {
            name: [(start, end) for start, end in spans if end is None or end >= before_us]
            for name, spans in self.intervals.items()
        }
        self.intervals = {name: spans for name, spans in kept.items() if spans}

    @property
    def spans(self) -> list[tuple[str, str, int, int | None]]:
        return [(*name, *span) for name, spans in self.intervals.items() for span in spans]

    @property
    def crowded(self) -> bool:
        ended = [who for _, who, _, end in self.spans if end is not None]
        return sum(INTERVAL_BYTES + len(who.encode()) for who in ended) > FEW_BYTES

    def since(self, kind: str, first: int) -> list[str]:
        return sorted({who for of, who, _, end in self.spans if of == kind and (end is None or first <= end)})
