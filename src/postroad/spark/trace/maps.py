"""The attachment maps that a broker told a lake, as one (spec T10, P5).

A broker forgets its map with its filters, and a whole map that it tells lacks what it has forgotten. The lake
has that in the maps before, each with the changes that were told after it. What they say are facts, and those
of all maps hold. A later map has what an earlier one has, with the end of what went on then, or joined with
others, which is more; so of times that the last one has not forgotten, all say what it says alone. What went
on in an earlier map and is not in a later one was forgotten, or the later one says of that time that it is
lost: it ended before that was told. Likewise what was lost without an end, unless the later one tells it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from postroad.spark.lake.rows import change
from postroad.tracking.attachment import AttachmentMap
from postroad.tracking.attachment_log import BY_THE_CLOCK, FOREVER_US, SNAPSHOT, Change
from postroad.tracking.moments import joined


class JoinedMaps:
    """What the last of these maps, and those before it, say; read as an `AttachmentMap` is."""

    def __init__(self, maps: Iterable[Sequence[Change]]) -> None:
        self.last = AttachmentMap()
        self.begins_us: int | None = None
        self.forgot_us: int | None = None
        self._attached: dict[tuple[str, str, int], int] = {}  # kind, who, since when -> until when
        self._late: defaultdict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)  # by kind and who
        lost: set[tuple[int, int]] = set()
        leads: set[tuple[int, int, int]] = set()
        lasting: set[tuple[str, str, int]] = set()  # of those attached
        clock_us = 0  # the latest that the broker's was seen at
        for changes in maps:
            self.last = attachments = AttachmentMap.of(changes)
            mine = self._spans_of(attachments)
            told_us = next((change.at_us for change in changes if _ends_map(change)), None)
            if told_us is not None:
                ended_us = max(clock_us, told_us)
                for place in lasting - mine.keys():
                    self._attached[place] = max(ended_us, place[2])
                reopened = {start_us for start_us, _ in attachments.lost}
                lost = {
                    (start_us, ended_us if end_us == FOREVER_US else end_us)
                    for start_us, end_us in lost
                    if end_us != FOREVER_US or start_us not in reopened
                }
            self._attached |= mine
            lasting = {place for place in {*lasting, *mine} if self._attached[place] == FOREVER_US}
            clock_us = max([clock_us, *map(_seen_us, changes)])
            lost.update(attachments.lost)
            leads.update(attachments.leads())
            self._begin(attachments)
        self.lost = sorted(lost)
        self.leads = sorted(leads)

    def _spans_of(self, attachments: AttachmentMap) -> dict[tuple[str, str, int], int]:
        """Who was attached; those of late deliveries are noted."""
        spans: dict[tuple[str, str, int], int] = {}
        for kind, who, start_us, end_us, late in attachments.spans():
            until_us = FOREVER_US if end_us is None else end_us
            if late:
                self._late[kind, who].add((start_us, until_us))
            else:
                place = (kind, who, start_us)
                spans[place] = max(until_us, spans.get(place, until_us))
        return spans

    def _begin(self, attachments: AttachmentMap) -> None:
        if attachments.forgot_us is not None:
            self.forgot_us = max(attachments.forgot_us, self.forgot_us or 0)
        if attachments.begins_us is not None:
            first_us = (
                attachments.begins_us
                if self.begins_us is None
                else min(attachments.begins_us, self.begins_us)
            )
            self.begins_us = max(first_us, self.forgot_us or 0)

    def spans(self) -> Iterator[tuple[str, str, int, int | None, bool]]:
        for (kind, who, start_us), end_us in self._attached.items():
            yield kind, who, start_us, None if end_us == FOREVER_US else end_us, False
        for (kind, who), notes in self._late.items():
            yield from ((kind, who, *note, True) for note in joined(notes, len(notes)))


def told_maps(rows: Iterable[Any]) -> tuple[list[list[Change]], list[tuple[int, int]]]:
    """From rows of `attachments` of one broker, by number and position: each whole map with what follows it;
    and (from, to] of what it may have forgotten without having told it here.

    What it forgets after it has told it concerns its own disk: such a `begin` is left out.
    """
    maps: list[list[Change]] = []
    untold: list[tuple[int, int]] = []
    known_us: int | None = None  # what happened until then was told; None before the first whole map was
    forgot_us = 0  # of the map that is being told
    number = -1  # of the row before
    sound = False  # nothing is missing since the last whole map began
    mapped = False  # that one has ended
    for row in rows:
        made = change(row.asDict(recursive=True))
        if row.whole and row.position == 0:
            sound, mapped, forgot_us = True, False, 0
            maps.append([])
        elif row.number > number + 1:
            sound = False
        number = row.number
        if not maps:
            maps.append([])
        if made.what != "begin" or known_us is None:
            maps[-1].append(made)
        if sound and mapped:
            known_us = max(known_us or 0, _seen_us(made))
        elif sound and made.what == "begin":
            forgot_us = made.at_us
        elif sound and _ends_map(made):
            # Nor does a broker tell anything, or count it, while nobody wants to hear it.
            if known_us is not None and known_us < forgot_us:
                untold.append((known_us, forgot_us))
            mapped, known_us = True, max(known_us or 0, made.at_us)
    return maps, untold


def _ends_map(change: Change) -> bool:
    """A whole map ends with this, of when it was told."""
    return change.what == "start" and change.who == SNAPSHOT


def _seen_us(change: Change) -> int:
    """The clock had shown that by then; 0 if it does not tell."""
    return change.at_us if change.what in (*BY_THE_CLOCK, "begin") else change.noted_us
