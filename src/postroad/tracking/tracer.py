"""Tracking at one broker: what happens to messages is recorded, and traces are asked and answered."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

import msgspec

from postroad.errors import PostroadError, UnavailableError, UsageError
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.topology import Topology
from postroad.seam.effects import Effect, Send
from postroad.seam.tracking import FiltersRead, Keep, ReadFilters, TrackingEffect
from postroad.tracking.query.desk import MAX_TRACES, Inquire, Output, Report, Respond, TraceDesk
from postroad.tracking.query.trace import NOT_REACHABLE, parse_ids
from postroad.tracking.query.verdict import within
from postroad.tracking.settings import PUT_OFF_US
from postroad.tracking.strategies import Tracking
from postroad.units import MILLISECOND_US
from postroad.wire.frames import MAX_BODY_BYTES, Reply, Request, encode

TRACE: Final = "trace"
MAX_EACH: Final = 8  # traces of one connection that are under way at once,
MAX_WAITING: Final = 64  # and further ones that wait for their turn
PACE_US: Final = 5 * MILLISECOND_US  # from one trace that begins to the next,
BURST_US: Final = MAX_EACH * PACE_US  # after a few at once;
WORK_US: Final = 1  # and for each key and the like that they looked for, a few times what that takes


class Tracer:
    def __init__(self, tracking: Tracking, *, me: int, topology: Topology, inquiries: Inquiries) -> None:
        self.tracking = tracking
        self._inquiries = inquiries
        inquiries.serve(TRACE, self._asked)
        self._desk = TraceDesk(tracking, me=me, reachable=topology.reachable, names=topology.names)
        self._askers: dict[int, tuple[int, int]] = {}  # ticket of a trace -> (connection, request number)
        # By connection, whose turn is next first: request numbers, and what is to be traced.
        self._waiting: dict[int, deque[tuple[int, list[bytes]]]] = {}
        self._paced_us = 0  # the time that all traces so far take at that pace
        self._paced_work = 0  # what they looked for, as far as it is in that

    # ---- traces asked for by clients

    def request(self, connection: int, message: Request) -> list[Effect]:
        """A client asks for the path of a message; it is told when that is found.

        Traces begin at the end of a turn, at a pace, from one connection after the other: however many are
        asked for, they do not keep deliveries waiting, nor other clients.
        """
        try:
            if set(message.arguments) != {"id"}:
                raise UsageError("a trace takes one argument, the message's id")
            ids = parse_ids([message.arguments["id"]])
            # Those that come in one turn all wait for its end, also the first few.
            asked = len(self._waiting.get(connection, ())) + self._under_way()[connection]
            if asked >= MAX_EACH + MAX_WAITING:
                raise UnavailableError(f"{asked} traces of this client are under way or wait: try again")
        except PostroadError as error:
            reply = Reply(number=message.number, code=error.code, body=str(error))
            return [Send(connection, encode(reply))]
        self._waiting.setdefault(connection, deque()).append((message.number, ids))
        return []

    def _next(self) -> int | None:
        """The connection whose turn it is, None while there is no room for its traces."""
        if len(self._desk.traces) >= MAX_TRACES:
            return None
        under_way = self._under_way()
        return next((one for one in self._waiting if under_way[one] < MAX_EACH), None)

    def _under_way(self) -> Counter[int]:
        """How many of each connection."""
        return Counter(connection for connection, _ in self._askers.values())

    def _begin(self, now_us: int) -> list[Effect]:
        connection = self._next()
        if connection is None or self._paced_us - BURST_US >= now_us:
            return []
        waiting = self._waiting.pop(connection)
        number, ids = waiting.popleft()
        if waiting:
            self._waiting[connection] = waiting
        self._paced_us = max(self._paced_us, now_us) + PACE_US
        ticket, outputs = self._desk.begin(ids, now_us)
        self._askers[ticket] = (connection, number)
        return self._perform(outputs, now_us)

    def closed(self, connection: int) -> None:
        """Nobody waits for its traces any more."""
        self._waiting.pop(connection, None)
        for ticket in [ticket for ticket, asker in self._askers.items() if asker[0] == connection]:
            del self._askers[ticket]
            self._desk.abandon(ticket)

    # ---- between brokers

    def _asked(self, broker: int, number: int, body: bytes, now_us: int) -> list[Effect]:
        return self._perform(self._desk.asked(broker, number, body, now_us), now_us)

    # ---- the driver and time

    def read(self, item: FiltersRead, now_us: int) -> list[Effect]:
        return self._perform(self._desk.read(item.tag, item.records, now_us), now_us)

    def tick(self, now_us: int, *, busy: bool = False) -> list[Effect]:
        """The end of a turn: what to keep, traces that took too long, and the next to begin. Where others
        wait for what the turn did, what is to be kept is put off to one that comes right after it."""
        effects = self._begin(now_us) if self._waiting else []
        effects += self._perform(self._desk.tick(now_us), now_us)
        self._paced_us += (self._desk.own_work - self._paced_work) * WORK_US
        self._paced_work = self._desk.own_work
        due_us = self.tracking.next_deadline()
        if due_us is None or now_us < due_us + (PUT_OFF_US if busy else 0):
            return effects
        # After all questions, which may fill filters: whoever reads those in this turn finds them kept.
        return _kept(self.tracking.tick(now_us)) + effects

    def close(self, now_us: int, unrecorded_us: int | None) -> list[Effect]:
        """The process ends: keep all that is not kept yet. The log may have more events since then."""
        return _kept(self.tracking.close(now_us, unrecorded_us))

    def next_deadline(self) -> int | None:
        if not self._desk.busy and not self._waiting:
            return self.tracking.next_deadline()
        begin_us = self._paced_us - BURST_US + 1 if self._next() is not None else None
        deadlines = (self.tracking.next_deadline(), self._desk.next_deadline(), begin_us)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _perform(self, outputs: list[Output], now_us: int) -> list[Effect]:
        effects: list[Effect] = []
        queue = list(outputs)  # a question that cannot be sent makes room for the next, and so on
        for output in queue:
            match output:
                case ReadFilters():
                    effects.append(output)
                case Inquire():
                    asked = self._inquire(output)
                    if asked is None:
                        queue += self._desk.failed(output.number, NOT_REACHABLE, now_us)
                    else:
                        effects += asked
                case Respond():
                    effects += self._inquiries.respond(output.broker, output.number, output.body)
                case Report():
                    effects += self._report(output)
        return effects

    def _inquire(self, output: Inquire) -> list[Effect] | None:
        def answered(body: bytes, then_us: int) -> list[Effect]:
            return self._perform(self._desk.answered(output.number, body, then_us), then_us)

        return self._inquiries.ask(output.broker, TRACE, output.body, answered)

    def _report(self, report: Report) -> list[Effect]:
        asker = self._askers.pop(report.ticket, None)
        if asker is None:
            return []
        connection, number = asker
        body = msgspec.json.encode(within(report.results[0], MAX_BODY_BYTES)).decode()
        return [Send(connection, encode(Reply(number=number, code="", body=body)))]

    def metrics(self) -> dict[str, int | float]:
        return {**self.tracking.metrics(), **self._desk.metrics()}

    def check(self) -> None:
        self.tracking.check()


def _kept(effects: list[TrackingEffect]) -> list[Effect]:
    return [Keep(effects=tuple(effects))] if effects else []
