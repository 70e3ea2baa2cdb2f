"""Sets of ticks as sorted, disjoint, half-open spans (start, end]: start exclusive, end inclusive."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter

Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same ticks as sorted spans that neither overlap nor touch."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def subtract(spans: Iterable[Span], taken: Iterable[Span]) -> list[Span]:
    """What is in `spans` and not in `taken`; both sorted and disjoint."""
    left: list[Span] = []
    holes = list(taken)
    first = 0
    for start, end in spans:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        at = first
        while at < len(holes) and holes[at][0] < end:
            if holes[at][0] > start:
                left.append((start, holes[at][0]))
            start = max(start, holes[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def intersect(spans: Iterable[Span], start: int, end: int) -> list[Span]:
    """The part of `spans` inside (start, end]."""
    return [(max(a, start), min(b, end)) for a, b in spans if max(a, start) < min(b, end)]


def overlaps(spans: Sequence[Span], start: int, end: int) -> bool:
    """Whether some of `spans`, sorted and disjoint, is inside (start, end]."""
    at = bisect_right(spans, start, key=itemgetter(1))
    return at < len(spans) and spans[at][0] < end
