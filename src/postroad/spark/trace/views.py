"""What the lake knows of each broker, in a form that answers for all times at once.

`AttachmentMap` answers for one time. Here its spans are arrays over the times of messages, with the clock
skew and the jitter already added (spec T10), so that a whole group of ids is looked up by a few comparisons.
The answers are the map's: a property test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from postroad.spark.trace.maps import JoinedMaps
from postroad.tracking.attachment import GROUP, LOST, NEIGHBOUR, SUBSCRIBER, AttachmentMap, read_bounds
from postroad.tracking.attachment_log import Change
from postroad.tracking.record import FilterMeta
from postroad.tracking.recorder import SETTLE_US
from postroad.tracking.settings import TrackingConfig
from postroad.units import MILLISECOND_US

Times = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
FOREVER: Final = 1 << 60
NOT_LANDED: Final = "the lake does not have all of that time from this broker"
UNREAD: Final = "a stored filter of that time cannot be read"


@dataclass(frozen=True, slots=True)
class Spans:
    """Who may have been handed messages of which times: names[who[i]] those from first[i] to last[i]."""

    names: tuple[str, ...]  # sorted
    who: npt.NDArray[np.int64]
    first: Times
    last: Times

    @classmethod
    def of(cls, spans: Sequence[tuple[str, int, int]]) -> Spans:
        names = tuple(sorted({name for name, _, _ in spans}))
        number = {name: at for at, name in enumerate(names)}
        return cls(
            names,
            np.array([number[name] for name, _, _ in spans], np.int64),
            np.array([first for _, first, _ in spans], np.int64),
            np.array([last for _, _, last in spans], np.int64),
        )

    def plus(self, name: str, spans: Iterable[tuple[int, int]]) -> Spans:
        columns = zip(self.who.tolist(), self.first.tolist(), self.last.tolist(), strict=True)
        own = [(self.names[who], first, last) for who, first, last in columns]
        return Spans.of([*own, *((name, first, last) for first, last in spans)])

    def within(self, first_ms: int, last_ms: int) -> Spans:
        """Only what concerns these times."""
        kept = (self.first <= last_ms) & (self.last >= first_ms)
        who = self.who[kept]
        present, number = np.unique(who, return_inverse=True)
        names = tuple(self.names[at] for at in present)
        return Spans(names, number.astype(np.int64), self.first[kept], self.last[kept])

    def at(self, times: Times) -> Flags:
        """For each time, whether each name was there: an array of (times, names)."""
        out = np.zeros((len(times), len(self.names)), np.bool_)
        for who, first, last in zip(self.who.tolist(), self.first, self.last, strict=True):
            out[:, who] |= (first <= times) & (times <= last)
        return out


@dataclass(frozen=True, slots=True)
class BrokerView:
    """One broker's attachment maps, read with its settings."""

    number: int
    name: str
    begins_ms: int
    forgot_ms: int  # messages of earlier times may be forgotten; -FOREVER if none are
    stored_ms: int  # of later times the lake may not have everything yet
    subscribers: Spans
    groups: Spans
    neighbours: Spans  # from for ever to the last time a message can have gone there
    routings: Spans  # what `routing` was set to; likewise
    lost: Spans  # under the name of the reason

    @classmethod
    def of(
        cls,
        number: int,
        name: str,
        maps: Sequence[Sequence[Change]],
        *,
        config: TrackingConfig,
        stored_us: int,
        landed_us: int = 0,
        told_us: int = 0,
        unlanded: Iterable[tuple[int, int]] = (),
    ) -> BrokerView:
        """`maps`: each that it told whole, with the changes after it; `stored_us`: when the last of its
        records was stored that the lake has; `told_us`: all that it published until then is here;
        `landed_us`: what it stored earlier may not be, nor what it recorded (from, to] those that are
        `unlanded`."""
        joined_maps = JoinedMaps(maps)
        skew, jitter = read_bounds(config, joined_maps.last)
        slack = skew + jitter
        attached: dict[str, list[tuple[str, int, int]]] = {SUBSCRIBER: [], GROUP: []}
        linked: list[tuple[str, int | None]] = []
        for kind, who, start_us, end_us, late in joined_maps.spans():
            last = FOREVER if end_us is None else (end_us + skew) // MILLISECOND_US
            if kind == NEIGHBOUR and not late:
                linked.append((who, end_us))
            elif kind in attached:
                # From the first millisecond whose end, plus the slack, reaches the start.
                first = -((slack + MILLISECOND_US - 1 - start_us) // MILLISECOND_US)
                attached[kind].append((who, first, last))
        leads = [(-FOREVER * MILLISECOND_US, FOREVER * MILLISECOND_US, 0), *joined_maps.leads]
        lost = [
            (LOST, (start - slack) // MILLISECOND_US + 1, (end + skew) // MILLISECOND_US)
            for start, end in joined_maps.lost
        ]
        begun = joined_maps.begins_us or 0
        lost += [
            (NOT_LANDED, (start - slack) // MILLISECOND_US + 1, (end + skew) // MILLISECOND_US)
            for start, end in ((begun, landed_us), *unlanded)
            if end > start
        ]
        forgot = joined_maps.forgot_us
        whole_us = _whole_until(joined_maps.last, stored_us, told_us) - slack
        if any(change.what == "stop" for change in maps[-1][-1:]):
            whole_us = FOREVER * MILLISECOND_US
        return cls(
            number=number,
            name=name,
            begins_ms=begun // MILLISECOND_US,
            forgot_ms=-FOREVER if forgot is None else -(-forgot // MILLISECOND_US),
            stored_ms=whole_us // MILLISECOND_US,
            subscribers=Spans.of(attached[SUBSCRIBER]),
            groups=Spans.of(attached[GROUP]),
            neighbours=_until(linked, leads, skew),
            routings=_until(joined_maps.last.routings(), leads, skew),
            lost=Spans.of(lost),
        )

    def within(self, first_ms: int, last_ms: int) -> BrokerView:
        return BrokerView(
            self.number,
            self.name,
            self.begins_ms,
            self.forgot_ms,
            self.stored_ms,
            self.subscribers.within(first_ms, last_ms),
            self.groups.within(first_ms, last_ms),
            self.neighbours.within(first_ms, last_ms),
            self.routings.within(first_ms, last_ms),
            self.lost.within(first_ms, last_ms),
        )

    def without(self, record: FilterMeta) -> BrokerView:
        """What it knows if that cannot be read."""
        return replace(self, lost=self.lost.plus(UNREAD, record.spans))

    def edges(self) -> Times:
        """The times at which any answer of this broker can change."""
        spans = (self.subscribers, self.groups, self.neighbours, self.routings, self.lost)
        parts = [part for span in spans for part in (span.first, span.last + 1)]
        parts.append(np.array([self.begins_ms, self.forgot_ms, self.stored_ms + 1], np.int64))
        return np.concatenate(parts)


def _whole_until(attachments: AttachmentMap, stored_us: int, told_us: int) -> int:
    """What was recorded until then is in the lake: records land in the order in which they were stored."""
    promise = attachments.widest
    # It takes an interval until something is stored, and is published soon after that.
    known_us = max(stored_us - promise.lag_us, told_us - 2 * promise.persist_us)
    # A broker that fell silent says so after its last record.
    last = attachments.settled_us <= stored_us + promise.persist_us + SETTLE_US
    return max(known_us, attachments.settled_us) if last else known_us


def _until(
    ends: Iterable[tuple[str, int | None]], leads: Sequence[tuple[int, int, int]], skew_us: int
) -> Spans:
    """From (who, the last moment that it was there), to messages of which times it was since they were made:
    those of `leads` were made earlier than their time says."""
    last: dict[str, int] = {}
    for who, end_us in ends:
        ended_us = FOREVER * MILLISECOND_US if end_us is None else end_us
        last[who] = max(ended_us, last.get(who, ended_us))
    return Spans.of(
        [
            (who, -(-start // MILLISECOND_US), min(end, ended + skew_us + lead) // MILLISECOND_US)
            for start, end, lead in leads
            for who, ended in sorted(last.items())
        ]
    )


@dataclass(frozen=True, slots=True)
class NetworkView:
    """All brokers the lake knows of."""

    brokers: Mapping[int, BrokerView]
    config: TrackingConfig

    def within(self, first_ms: int, last_ms: int) -> NetworkView:
        brokers = {number: view.within(first_ms, last_ms) for number, view in self.brokers.items()}
        return NetworkView(brokers, self.config)

    @property
    def names(self) -> dict[int, str]:
        return {number: view.name for number, view in self.brokers.items()}
