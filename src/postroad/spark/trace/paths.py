"""From the claims of a group to the path of each of its ids: the live trace's answer (spec P5, T6, T12).

The live code decides: `query.trace.Trace` asks, `query.verdict.judge` weighs. They work on one message
at a time, so they are run once per *pattern*: ids for which every broker would answer the same, apart from
the names of the receivers, have the same route, the same doubts and the same verdict. There are few patterns
among many messages, because messages of one origin take few different ways. Receivers are then put in; the
doubt of each is again the live code's, once for each different (rate, keys, and so on).

Ids with the same pattern and the same receivers have the same *answer*, and an answer is given once, with a
list of its ids: a path through fifty brokers has thousands of bytes, and Spark copies them to each id far
quicker than anything here could make them.

A best-effort event that somebody got as a repair has its receivers in its pattern, by name: where it was lost
depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from postroad.spark.lake.rows import id_texts
from postroad.spark.trace.claims import Keys
from postroad.spark.trace.group import Group, Numbers, Rates, Received
from postroad.spark.trace.views import Flags
from postroad.tracking.query.messages import ANY_ORIGIN, Finding, Forwarding, Receiver, Sighting, TraceAnswer
from postroad.tracking.query.trace import Ask, Trace, TraceLimits
from postroad.tracking.query.verdict import TraceResult, passed_on, share, told_apart

NOT_YET: Final = "the lake does not have all of that time from this broker yet"
_MOST: Final = 1 << 40
_WIDEST: Final = 1 << 62
LIMITS: Final = TraceLimits(fan_out=_MOST, brokers=_MOST, rounds=_MOST)

_STEP = pa.struct([("broker", pa.string()), ("from", pa.string()), ("doubt", pa.float64())])
_RECEIVER = pa.struct(
    [("subscriber", pa.string()), ("broker", pa.string()), ("doubt", pa.float64()), ("repair", pa.bool_())]
)
_LOSS = pa.struct([("from", pa.string()), ("to", pa.string()), ("doubt", pa.float64())])
_MISSING = pa.struct([("broker", pa.string()), ("why", pa.string())])
ANSWERS: Final = pa.schema(
    [
        *(("ids", pa.list_(pa.string())), ("origin", pa.string()), ("origin_doubt", pa.float64())),
        *(("verdict", pa.string()), ("explanation", pa.string())),
        *(("route", pa.list_(_STEP)), ("receivers", pa.list_(_RECEIVER)), ("missing", pa.list_(_MISSING))),
        ("lost", pa.list_(_LOSS)),
    ]
)
ANSWER_COLUMNS: Final = (
    "ids array<string>, origin string, origin_doubt double, verdict string, explanation string,"
    " route array<struct<broker: string, `from`: string, doubt: double>>,"
    " receivers array<struct<subscriber: string, broker: string, doubt: double, repair: boolean>>,"
    " missing array<struct<broker: string, why: string>>,"
    " lost array<struct<`from`: string, `to`: string, doubt: double>>"
)
MOST_IDS: Final = 20_000  # of one row


@dataclass(slots=True)
class _Said:
    """What one broker says about each id of the group."""

    published: Flags
    published_rate: Rates
    sightings: list[tuple[int, int, Flags, Rates]]
    claimed: Flags  # that it was here at all
    recorded: Flags  # where it went on to
    forwardings: dict[int, tuple[Flags, Rates]]
    received: Received
    starts: npt.NDArray[np.intp]  # rows of `received` of each id: from starts[i] to before starts[i + 1]
    worst: Rates  # the rate of an id's receivers that counts: 0 if any is certain, else the largest
    meant_for: dict[int, tuple[Flags, Rates]]  # best effort: by neighbour it was to go to
    repaired: Received  # who got it as a repair
    candidates: Numbers  # per class
    neighbours: list[tuple[int, ...]]  # per class
    lost: list[str]  # per class: why not all of it is known, or ""
    late: Flags  # per class: too late for all of it to be in the lake
    forgotten: Flags  # per class
    begins_ms: int

    @property
    def count(self) -> Numbers:
        return np.diff(self.starts)


def trace_group(group: Group, *, complete: bool) -> tuple[pa.Table, Keys]:
    """The answers about the ids, and those ids that need all records of their time to be judged.

    A group that is not `complete` has records of the origin in the ids only. That is all it takes, unless
    another broker claims to have published the message, or the one in the id does not.
    """
    limited = _Judged(group, limited=True)
    if not complete:
        return limited.table(~limited.everywhere), group.keys[limited.everywhere]
    if not limited.everywhere.any():
        return limited.table(~limited.everywhere), group.keys[:0]
    anywhere = _Judged(group, limited=False)
    tables = [limited.table(~limited.everywhere), anywhere.table(limited.everywhere)]
    return pa.concat_tables(tables), group.keys[:0]


class _Judged:
    def __init__(self, group: Group, *, limited: bool) -> None:
        self._group = group
        self._limited = limited
        self._names = told_apart(group.network.names)
        self._said = {broker: self._listen(broker) for broker in group.views}
        self._repaired: Flags = np.zeros(len(group), np.bool_)  # ids that somebody got as a repair
        for said in self._said.values():
            self._repaired[said.repaired.row] = True
        self.pattern, first = self._patterns()
        self._results: list[TraceResult] = []
        self._numbers: list[TraceResult] = []  # the same with numbers in place of names, which may recur
        went: list[bool] = []
        for at in first.tolist():
            trace, everywhere = self._trace(at)
            self._results += trace.results(self._names)
            self._numbers += trace.results({})
            went.append(everywhere)
        self.everywhere: Flags = np.array(went, np.bool_)[self.pattern]

    # ---- what brokers say

    def _listen(self, broker: int) -> _Said:
        group = self._group
        view, moments = group.views[broker], group.moments
        published, published_rate = group.published(broker)
        sightings = group.sightings(broker, limited=self._limited)
        origins: dict[int, Flags] = {broker: published} if published.any() else {}
        for origin, _, flags, _ in sightings:
            origins[origin] = origins[origin] | flags if origin in origins else flags
        linked = view.neighbours.at(moments)
        numbers = [int(name) for name in view.neighbours.names]
        by_number = np.argsort(np.array(numbers, np.int64), kind="stable")
        recorded, forwardings = group.forwardings(
            broker, origins, linked[:, by_number], [numbers[at] for at in by_number]
        )
        claimed = np.zeros(len(group), np.bool_)
        for flags in origins.values():
            claimed |= flags
        received = group.deliveries(broker, origins)
        starts = np.zeros(len(group) + 1, np.intp)
        np.cumsum(np.bincount(received.row, minlength=len(group)), out=starts[1:])
        worst = np.zeros(len(group), np.float64)
        some = np.flatnonzero(np.diff(starts))
        if len(some):
            certain = np.minimum.reduceat(received.rate, starts[some]) == 0
            worst[some] = np.where(certain, 0.0, np.maximum.reduceat(received.rate, starts[some]))
        return _Said(
            published=published,
            published_rate=published_rate,
            sightings=sightings,
            recorded=recorded & claimed,
            claimed=claimed,
            forwardings=forwardings,
            received=received,
            starts=starts,
            worst=worst,
            meant_for=group.meant_for(broker, origins),
            repaired=group.repairs(broker),
            candidates=view.subscribers.at(moments).sum(axis=1).astype(np.int64),
            neighbours=[tuple(sorted(numbers[at] for at in np.flatnonzero(row))) for row in linked],
            lost=[next(compress(view.lost.names, row), "") for row in view.lost.at(moments).tolist()],
            late=moments > view.stored_ms,
            forgotten=moments < view.forgot_ms,
            begins_ms=view.begins_ms,
        )

    # ---- patterns

    def _patterns(self) -> tuple[Numbers, Numbers]:
        """The number of each id's pattern, and the first id of each pattern."""
        group = self._group
        code = self._code()
        if len(np.unique(group.homes)) > 1:
            code.add(group.homes)
        for said in self._said.values():
            early = group.moments < said.begins_ms
            circumstances: dict[object, int] = {}
            by_class = np.array(
                [
                    circumstances.setdefault(circumstance, len(circumstances))
                    for circumstance in zip(
                        said.neighbours,
                        said.lost,
                        said.late.tolist(),
                        said.forgotten.tolist(),
                        early.tolist(),
                        strict=True,
                    )
                ],
                np.int64,
            )
            code.add(by_class[group.classes])
            _add_receivers(code, said.repaired, self._repaired)
            if not said.claimed.any():
                continue
            _add_receivers(code, said.received, self._repaired)
            for flags, rates in said.meant_for.values():
                code.add(np.where(flags, rates, -1.0))
            code.add(np.where(said.published, said.published_rate, -1.0))
            for _, _, flags, rates in said.sightings:
                code.add(np.where(flags, rates, -1.0))
            code.add(said.recorded.astype(np.int64))
            for flags, rates in said.forwardings.values():
                code.add(np.where(flags, rates, -1.0))
            code.add(np.where(said.claimed, said.candidates[group.classes], -1))
            code.add(said.count)
            code.add(np.where(said.count > 0, said.worst, -1.0))
            code.add(said.received.hits)
            code.add(np.where(said.claimed, said.received.tried, -1))
            code.add(np.where(said.count > 0, said.received.wanted, -1.0))
        _, first, pattern = np.unique(code.value, return_index=True, return_inverse=True)
        return pattern.astype(np.int64), first.astype(np.int64)

    def _code(self) -> _Code:
        return _Code(self._group.classes, self._group.firsts)

    def _finding(self, broker: int, at: int, origin: int) -> Finding:
        """What a broker answers about one id, as `Recorder._find` would, asked for that origin."""
        said, group = self._said[broker], self._group
        of_class = int(group.classes[at])
        lost = said.lost[of_class]
        if not lost and said.late[of_class]:
            lost = NOT_YET
        repaired = tuple(
            Receiver(
                subscriber=said.repaired.names[said.repaired.who[row]], fpp=float(said.repaired.rate[row])
            )
            for row in np.flatnonzero(said.repaired.row == at).tolist()
        )
        circumstances = Finding(
            candidates=len(repaired),
            neighbours=said.neighbours[of_class],
            begins_ms=said.begins_ms,
            forgotten=bool(said.forgotten[of_class]),
            lost=lost,
            repaired=repaired,
        )
        if origin == broker != group.homes[at] and not said.published[at]:
            return circumstances  # asked only whether it published it, it says nothing of another origin
        received = said.received
        rows = range(int(said.starts[at]), int(said.starts[at + 1]))
        delivered = tuple(
            Receiver(
                subscriber=received.names[received.who[row]],
                fpp=float(received.rate[row]),
                keys=int(received.keys[row]),
            )
            for row in rows
        )
        forwarded = tuple(
            Forwarding(neighbour=neighbour, fpp=float(rates[at]))
            for neighbour, (flags, rates) in sorted(said.forwardings.items())
            if flags[at]
        )
        meant_for = tuple(
            Forwarding(neighbour=neighbour, fpp=float(rates[at]))
            for neighbour, (flags, rates) in sorted(said.meant_for.items())
            if flags[at]
        )
        candidates = int(said.candidates[of_class]) if said.claimed[at] else 0
        return msgspec.structs.replace(
            circumstances,
            published=float(said.published_rate[at]) if said.published[at] else None,
            routed=tuple(
                Sighting(origin=origin, neighbour=neighbour, fpp=float(rates[at]))
                for origin, neighbour, flags, rates in said.sightings
                if flags[at]
            ),
            forwarded=forwarded if said.recorded[at] else None,
            delivered=delivered,
            candidates=max(candidates, len(delivered), len(repaired)),
            hits=int(received.hits[at]),
            tried=int(received.tried[at]),
            wanted=float(received.wanted[at]),
            sent=meant_for,
        )

    def _trace(self, at: int) -> tuple[Trace, bool]:
        """The live trace of one id; and whether it had to ask everywhere, for any origin."""
        group = self._group
        identity = group.keys[at].tobytes()
        trace = Trace([identity], reachable=group.views, limits=LIMITS, trusted=True, now_us=0)
        asks: list[Ask] = trace.start(0)
        everywhere = False
        while asks:
            ask = asks.pop()
            origin = ask.question.items[0].origin
            everywhere = everywhere or origin == ANY_ORIGIN
            answer = TraceAnswer(findings=(self._finding(ask.broker, at, origin),))
            asks += trace.answered(ask.broker, answer, 0)
        return trace, everywhere

    # ---- the answer

    def table(self, wanted: Flags) -> pa.Table:
        """The answers about these ids."""
        rows = np.flatnonzero(wanted)
        first, numbers = self._answers(rows)
        ids, which = listed_ids(self._group.keys[rows], numbers, len(first))
        asked = rows[first][which]
        pattern = pa.array(self.pattern[asked])
        results = self._results
        columns = {
            "ids": ids,
            "origin": pa.array([result.origin for result in results], pa.string()).take(pattern),
            "origin_doubt": pa.array([result.origin_doubt for result in results], pa.float64()).take(pattern),
            "verdict": pa.array([result.verdict for result in results], pa.string()).take(pattern),
            "explanation": pa.array([result.explanation for result in results], pa.string()).take(pattern),
            "route": pa.array([_route(result) for result in results], pa.list_(_STEP)).take(pattern),
            "receivers": self._receivers(asked),
            "missing": pa.array(
                [[{"broker": name, "why": why} for name, why in result.missing] for result in results],
                pa.list_(_MISSING),
            ).take(pattern),
            "lost": pa.array([_losses(result) for result in results], pa.list_(_LOSS)).take(pattern),
        }
        return pa.table(columns, ANSWERS)

    def _answers(self, rows: npt.NDArray[np.intp]) -> tuple[Numbers, Numbers]:
        """The first of these ids of each answer, and the number of each id's answer."""
        code = self._code()
        code.add(self.pattern)
        for said in self._said.values():
            _add_receivers(code, said.received)
        _, first, numbers = np.unique(code.value[rows], return_index=True, return_inverse=True)
        return first.astype(np.int64), numbers.astype(np.int64)

    def _receivers(self, rows: npt.NDArray[np.intp]) -> pa.Array:
        """The receivers of each id."""
        receivers = self._delivered(rows)
        repaired = np.flatnonzero(self._repaired[rows])
        if not len(repaired):
            return receivers
        named = [_receivers(self._results[pattern]) for pattern in self.pattern[rows[repaired]].tolist()]
        which = np.arange(len(rows))
        which[repaired] = len(rows) + np.arange(len(repaired))
        return pa.concat_arrays([receivers, pa.array(named, pa.list_(_RECEIVER))]).take(pa.array(which))

    def _delivered(self, rows: npt.NDArray[np.intp]) -> pa.Array:
        """Who got each id as it was first sent, broker after broker along the route, by name."""
        places, doubtful, last = self._places()
        parts: list[tuple[Numbers, Numbers, pa.Array, pa.Array, Rates]] = []
        for number, (broker, said) in enumerate(self._said.items()):
            received = said.received
            position, taken = _ranges(said.starts[rows], said.starts[rows + 1])
            pattern = self.pattern[rows[position]]
            kept = np.flatnonzero(places[pattern, number] >= 0)
            if not len(kept):
                continue
            position, taken, pattern = position[kept], taken[kept], pattern[kept]
            row = received.row[taken]
            doubt = _shares(received, taken, pattern, last[:, number])
            doubt[doubtful[pattern, number]] = 1.0
            names = pa.array(received.names, pa.string()).take(pa.array(received.who[taken]))
            here = pa.repeat(self._names.get(broker) or f"{broker:08x}", len(kept))
            parts.append((position, places[pattern, number], names, here, doubt))
        if not parts:
            return pa.array([[]] * len(rows), pa.list_(_RECEIVER))
        row = np.concatenate([part[0] for part in parts])
        # Within a broker they are sorted by name already, and the sort is stable.
        order = np.lexsort((np.concatenate([part[1] for part in parts]), row))
        indices = pa.array(order)
        structs = pa.StructArray.from_arrays(
            [
                pa.concat_arrays([part[2] for part in parts]).take(indices),
                pa.concat_arrays([part[3] for part in parts]).take(indices),
                pa.array(np.concatenate([part[4] for part in parts])[order]),
                pa.repeat(False, len(order)),
            ],
            fields=list(_RECEIVER),
        )
        offsets = np.searchsorted(row[order], np.arange(len(rows) + 1)).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), structs)

    def _places(self) -> tuple[Numbers, Flags, Flags]:
        """Per pattern and broker: its place along the route, or -1; whether all claims there are void; and
        whether the way ends there."""
        at = {broker: number for number, broker in enumerate(self._said)}
        places = np.full((len(self._results), len(at)), -1, np.int64)
        doubtful = np.ones((len(self._results), len(at)), np.bool_)
        last = np.ones((len(self._results), len(at)), np.bool_)
        for pattern, result in enumerate(self._numbers):
            for place, step in enumerate(result.route):
                number = at[int(step.broker, 16)]
                if places[pattern, number] < 0:
                    places[pattern, number] = place
                doubtful[pattern, number] &= step.doubt >= 1.0
            passing = {
                int(broker, 16) for broker in passed_on((step.broker, step.source) for step in result.route)
            }
            last[pattern, [at[broker] for broker in passing if broker in at]] = False
        return places, doubtful, last


class _Code:
    """A number per id, equal for two ids exactly if everything added is equal.

    Most of what is said about ids depends on their class alone. So the value of a class's first id is taken
    for all of the class, and only those that differ are looked at one by one.
    """

    def __init__(self, classes: Numbers, first: Numbers) -> None:
        self.ids = len(classes)
        self._classes = classes
        self._first = first  # id of each class
        self.value: Numbers = np.zeros(len(classes), np.int64)
        self._width = 1  # values are below

    def add(self, column: npt.NDArray[np.generic]) -> None:
        heads = column[self._first]
        odd = np.flatnonzero(column != heads[self._classes])
        different, at = np.unique(np.concatenate((heads, column[odd])), return_inverse=True)
        if len(different) == 1:
            return
        number = at[: len(heads)][self._classes]
        number[odd] = at[len(heads) :]
        if self._width * len(different) >= _WIDEST:
            values, self.value = np.unique(self.value, return_inverse=True)
            self._width = len(values)
        self.value = self.value * len(different) + number
        self._width *= len(different)


def listed_ids(keys: Keys, numbers: Numbers, count: int) -> tuple[pa.Array, Numbers]:
    """The ids of each number below `count` as lists of text, long ones cut; and the number of each list."""
    order = np.argsort(numbers, kind="stable")
    sizes = np.bincount(numbers, minlength=count)
    pieces = -(-sizes // MOST_IDS)
    which = np.repeat(np.arange(count), pieces)
    within = np.arange(len(which)) - (np.cumsum(pieces) - pieces)[which]
    offsets = np.append((np.cumsum(sizes) - sizes)[which] + within * MOST_IDS, len(keys)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), id_texts(keys[order])), which


def _ranges(
    starts: npt.NDArray[np.intp], ends: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Everything from starts[i] to before ends[i], with its i."""
    sizes = ends - starts
    which = np.repeat(np.arange(len(starts)), sizes)
    return which, np.arange(len(which)) + (starts - np.cumsum(sizes) + sizes)[which]


def _route(result: TraceResult) -> list[dict[str, object]]:
    return [{"broker": step.broker, "from": step.source, "doubt": step.doubt} for step in result.route]


def _losses(result: TraceResult) -> list[dict[str, object]]:
    return [{"from": loss.source, "to": loss.target, "doubt": loss.doubt} for loss in result.lost]


def _receivers(result: TraceResult) -> list[dict[str, object]]:
    return [msgspec.structs.asdict(receiver) for receiver in result.receivers]


def _add_receivers(code: _Code, received: Received, only: Flags | None = None) -> None:
    """Who got each id and how sure that is, `only` of some ids."""
    for who in range(len(received.names)):
        mine = received.who == who
        if only is not None:
            mine &= only[received.row]
        if not mine.any():
            continue
        column = np.full(code.ids, -1.0)
        column[received.row[mine]] = received.rate[mine]
        code.add(column)
        if (received.keys[mine] > 1).any():
            column[received.row[mine]] = received.keys[mine]
            code.add(column)


def _shares(received: Received, taken: npt.NDArray[np.intp], pattern: Numbers, last: Flags) -> Rates:
    """`verdict.share` of each of these rows, worked out once for equal ones.

    Ids of one pattern have the same number of keys tried and claimed; `last` says, per pattern, whether the
    way ends here.
    """
    if not len(taken):
        return np.zeros(0, np.float64)
    columns = np.stack((received.rate[taken], received.keys[taken], pattern), axis=1)
    _, first, number = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    shares = [
        share(
            float(received.rate[taken[at]]),
            int(received.hits[received.row[taken[at]]]),
            int(received.tried[received.row[taken[at]]]),
            wanted=float(received.wanted[received.row[taken[at]]]),
            last=bool(last[pattern[at]]),
            keys=int(received.keys[taken[at]]),
        )
        for at in first.tolist()
    ]
    return np.array(shares, np.float64)[number]
