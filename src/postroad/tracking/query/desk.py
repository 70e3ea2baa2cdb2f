"""The desk of a broker where traces are asked for, and where questions of other brokers are answered.

A trace asked for here is run here (`trace.Trace`): its questions go to other brokers or to this one. To
answer a question, stored filters may have to be read first; the desk keeps the question until they are here,
a portion of them at a time, looked into and let go before the next. In one turn it looks for so much and no
more, a message of each question after the other: deliveries go on.
All that can pile up is bounded: the desk refuses what is beyond that, with the reason.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import msgspec

from postroad.errors import PeerError, UnavailableError
from postroad.overlay.inquiries import Inquiries
from postroad.seam.tracking import FiltersRead
from postroad.seam.turn import Turn
from postroad.tracking.query.lookup import Reading
from postroad.tracking.query.messages import Finding, TraceAnswer, TraceItem, TraceQuestion
from postroad.tracking.query.trace import NOT_REACHABLE, Ask, Trace
from postroad.tracking.query.verdict import TraceResult
from postroad.units import MIB
from postroad.wire.frames import MAX_BODY_BYTES, decode_body

TRACE: Final = "trace"  # the question, between brokers
MAX_TRACES: Final = 64  # under way at once
MAX_QUESTIONS: Final = 256  # under way, or waiting for stored filters
MAX_HELD_BYTES: Final = 64 * MIB  # of stored filters, being read or looked into; or one portion of them
WORK_A_TURN: Final = 1 << 14  # keys and the like that are looked for in one turn, some milliseconds
WORK_AN_ID: Final = 64  # however little is known of it
HERE: Final = -1  # the asker of a question that this broker put to itself
_QUESTIONS: Final = msgspec.msgpack.Decoder(TraceQuestion)
_ANSWERS: Final = msgspec.msgpack.Decoder(TraceAnswer)


class Answers(Protocol):
    """What this broker knows of messages; `strategies.Tracking` says more of it."""

    looked: int

    def answer(
        self, question: TraceQuestion, records: Mapping[int, bytes], reading: Reading | None = None
    ) -> tuple[TraceAnswer, tuple[int, ...]]: ...


@dataclass(frozen=True, slots=True)
class Asker:
    """The client that waits for a trace, and its number of the request."""

    connection: int
    request: int


Report = Callable[[Turn, Asker, Sequence[TraceResult]], None]  # a trace is done


@dataclass(slots=True)
class _Question:
    asker: int  # broker, or HERE
    number: int  # the asker's own
    items: tuple[TraceItem, ...]
    receivers: int  # that a finding may name
    left: deque[int]  # places in `items` to look up, with the records that are here
    records: Mapping[int, bytes] = field(default_factory=dict)  # of the last portion
    record_bytes: int = 0  # in that, or in the one that is being read
    reading: Reading = field(default_factory=Reading)
    findings: dict[int, Finding] = field(default_factory=dict)  # by place in `items`
    wanted: set[int] = field(default_factory=set)  # records to read for those without a finding


class TraceDesk:
    def __init__(
        self,
        answers: Answers,
        *,
        me: int,
        reachable: Callable[[], Sequence[int]],
        names: Callable[[], Mapping[int, str]],
        inquiries: Inquiries,
        report: Report,
    ) -> None:
        self._answers = answers
        self._me = me
        self._reachable = reachable
        self._names = names
        self._inquiries = inquiries
        self._report = report
        self._traces: dict[int, tuple[Asker, Trace]] = {}  # by ticket; under way
        self._asked: dict[int, tuple[int, int]] = {}  # number of our question -> (ticket, broker asked)
        self._unsent: deque[int] = deque()  # numbers of those that could not be sent
        self._reading = 0  # questions that wait for records from the disk
        self._working: deque[_Question] = deque()  # to be looked up; the next first
        self._wanting: deque[_Question] = deque()  # records, once others have let go of theirs; likewise
        self._record_bytes = 0  # of records that questions have, or wait for
        self._room = WORK_A_TURN  # what may still be looked for in this turn
        self.own_work = 0  # what was looked for so far for traces that were asked for here
        self._last = 0  # tickets and numbers come from one counter

    # ---- traces asked for here

    def begin(self, turn: Turn, ids: Sequence[bytes], asker: Asker) -> None:
        """Trace these messages; the asker gets a report in the end."""
        if self.full:
            raise UnavailableError(f"{MAX_TRACES} traces are under way at this broker: try again")
        trace = Trace(ids, reachable=self._reachable(), known=self._names(), now_us=turn.now_us)
        ticket = self._next()
        self._traces[ticket] = (asker, trace)
        self._go_on(turn, ticket, trace.start(turn.now_us))
        self._work(turn)

    @property
    def full(self) -> bool:
        return len(self._traces) >= MAX_TRACES

    def under_way(self) -> Counter[int]:
        """How many traces of each connection are."""
        return Counter(asker.connection for asker, _ in self._traces.values())

    def abandon(self, connection: int) -> None:
        """Nobody there waits for its traces any more."""
        for ticket, (asker, _) in list(self._traces.items()):
            if asker.connection == connection:
                self._end(ticket)

    def _end(self, ticket: int) -> None:
        del self._traces[ticket]
        self._asked = {number: asked for number, asked in self._asked.items() if asked[0] != ticket}

    def _go_on(self, turn: Turn, ticket: int, asks: Sequence[Ask]) -> None:
        asker, trace = self._traces[ticket]
        for ask in asks:
            number = self._next()
            self._asked[number] = (ticket, ask.broker)
            if ask.broker == self._me:
                self._take(turn, HERE, number, ask.question)
                continue
            body = msgspec.msgpack.encode(ask.question)
            if not self._inquiries.ask(turn, ask.broker, TRACE, body, partial(self._answered, number)):
                self._unsent.append(number)
        if trace.done and ticket in self._traces:  # a question that was refused here may have ended it
            self._end(ticket)
            self._report(turn, asker, trace.results(self._names()))

    def _answered(self, number: int, turn: Turn, body: bytes) -> None:
        """An answer from the network; one that nobody waits for says nothing."""
        self._answer_trace(turn, number, body)
        self._work(turn)

    def _answer_trace(self, turn: Turn, number: int, body: bytes) -> None:
        ticket, broker = self._asked.pop(number, (None, 0))
        if ticket is None:
            return
        _, trace = self._traces[ticket]
        try:
            asks = trace.answered(broker, decode_body(body, _ANSWERS), turn.now_us)
        except PeerError as error:
            asks = trace.failed(broker, f"answered what cannot be read: {error}", turn.now_us)
        self._go_on(turn, ticket, asks)

    def _fail(self, turn: Turn, number: int, why: str) -> None:
        """There will be no answer."""
        ticket, broker = self._asked.pop(number, (None, 0))
        if ticket is not None:
            _, trace = self._traces[ticket]
            self._go_on(turn, ticket, trace.failed(broker, why, turn.now_us))

    # ---- time

    def tick(self, turn: Turn) -> None:
        """The end of a turn."""
        for ticket, (_, trace) in list(self._traces.items()):
            self._go_on(turn, ticket, trace.tick(turn.now_us))
        self._work(turn)
        self._room = WORK_A_TURN

    def next_deadline(self) -> int | None:
        if self._working:
            return 0  # at once, after what came meanwhile
        deadlines = [trace.next_deadline() for _, trace in self._traces.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def busy(self) -> bool:
        return bool(self._traces or self._working)

    @property
    def _waiting(self) -> int:
        return self._reading + len(self._working) + len(self._wanting)

    def _next(self) -> int:
        self._last += 1
        return self._last

    # ---- questions to this broker

    def asked(self, turn: Turn, broker: int, number: int, body: bytes) -> None:
        """Another broker's question. One that makes no sense has no answer: its bearer is not to blame."""
        try:
            question = decode_body(body, _QUESTIONS)
        except PeerError:
            return
        if question.makes_sense:
            self._take(turn, broker, number, question)
            self._work(turn)

    def _take(self, turn: Turn, asker: int, number: int, question: TraceQuestion) -> None:
        places = deque(range(len(question.items)))
        taken = _Question(asker, number, question.items, question.receivers, places)
        if self._waiting >= MAX_QUESTIONS:
            self._refuse(turn, taken, "has too many questions to answer")
        else:
            self._working.append(taken)

    def _work(self, turn: Turn) -> None:
        """Looks up what there is room for in this turn."""
        while self._unsent or (self._working and self._room > 0):
            if self._unsent:  # which may make a trace ask others
                self._fail(turn, self._unsent.popleft(), NOT_REACHABLE)
                continue
            question = self._working.popleft()
            if self._in_vain(question):
                self._let_go(question)
                continue
            if question.left:
                self._look_up(question, question.left.popleft())
            if question.left:
                self._working.append(question)
                continue
            self._let_go(question)
            if question.wanted:
                self._wanting.append(question)
            else:
                self._answer(turn, question)
        self._read(turn)

    def _in_vain(self, question: _Question) -> bool:
        """Nobody waits for it any more."""
        return question.asker == HERE and question.number not in self._asked

    def _look_up(self, question: _Question, place: int) -> None:
        before = self._answers.looked
        asked = TraceQuestion(items=(question.items[place],))
        answer, wanted = self._answers.answer(asked, question.records, question.reading)
        work = self._answers.looked - before + WORK_AN_ID
        self._room -= work
        if question.asker == HERE:
            self.own_work += work
        if wanted:
            question.wanted.update(wanted)
        else:
            (question.findings[place],) = answer.findings

    def _let_go(self, question: _Question) -> None:
        self._record_bytes -= question.record_bytes
        question.record_bytes = 0
        question.records = {}

    def _read(self, turn: Turn) -> None:
        """For as many as there is room for; what is not known is looked up then."""
        while self._wanting:
            question = self._wanting[0]
            if self._in_vain(question):
                self._wanting.popleft()
                continue
            portion = question.reading.portion(question.wanted)
            size = sum(question.reading.sizes[sequence] for sequence in portion)
            if self._record_bytes and self._record_bytes + size > MAX_HELD_BYTES:
                break
            self._wanting.popleft()
            self._record_bytes += size
            question.record_bytes = size
            question.wanted.clear()
            places = range(len(question.items))
            question.left.extend(place for place in places if place not in question.findings)
            self._reading += 1
            turn.read_filters(portion, then=partial(self._were_read, question))

    def _were_read(self, question: _Question, turn: Turn, item: FiltersRead) -> None:
        self._reading -= 1
        question.records = item.records
        self._working.append(question)
        self._work(turn)

    def _answer(self, turn: Turn, question: _Question) -> None:
        places = range(len(question.items))
        answer = TraceAnswer(findings=tuple(question.findings[place] for place in places))
        body = _within(_naming(answer, question.receivers), MAX_BODY_BYTES)
        if body is None:
            self._refuse(turn, question, "has an answer that is too large")
        elif question.asker == HERE:
            self._answer_trace(turn, question.number, body)
        else:
            self._inquiries.respond(turn, question.asker, question.number, body)

    def _refuse(self, turn: Turn, question: _Question, why: str) -> None:
        """The broker answers with the reason why it has no answer."""
        if question.asker == HERE:
            self._fail(turn, question.number, why)
            return
        answer = TraceAnswer(findings=(Finding(lost=why),) * len(question.items))
        self._inquiries.respond(turn, question.asker, question.number, msgspec.msgpack.encode(answer))

    def metrics(self) -> dict[str, int | float]:
        return {"traces": len(self._traces), "trace_questions_waiting": self._waiting}


def _within(answer: TraceAnswer, most_bytes: int) -> bytes | None:
    """The answer with as many receivers as there is room for; the others are counted. None: not even so."""
    body = msgspec.msgpack.encode(answer)
    bare = len(msgspec.msgpack.encode(_naming(answer, 0))) if len(body) > most_bytes else 0
    named = max(max(len(finding.delivered), len(finding.repaired)) for finding in answer.findings)
    while named and bare < most_bytes < len(body):
        named = min(named - 1, named * (most_bytes - bare) // (len(body) - bare))
        body = msgspec.msgpack.encode(_naming(answer, named))
    return body if len(body) <= most_bytes else None


def _naming(answer: TraceAnswer, most: int) -> TraceAnswer:
    return TraceAnswer(findings=tuple(finding.naming(most) for finding in answer.findings))
