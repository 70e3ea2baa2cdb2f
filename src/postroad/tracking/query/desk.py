"""The desk of a broker where traces are asked for, and where questions of other brokers are answered.

A trace asked for here is run here (`trace.Trace`): its questions go to other brokers or to this one. To
answer a question, stored filters may have to be read first; the desk keeps the question until they are here,
a portion of them at a time, looked into and let go before the next. In one turn it looks for so much and no
more, a message of each question after the other: deliveries go on.
All that can pile up is bounded: whoever asks beyond that is told to come again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from postroad.errors import PeerError, UnavailableError
from postroad.seam.tracking import ReadFilters
from postroad.tracking.query.lookup import Reading
from postroad.tracking.query.messages import Finding, TraceAnswer, TraceItem, TraceQuestion
from postroad.tracking.query.trace import Ask, Trace
from postroad.tracking.query.verdict import TraceResult
from postroad.tracking.strategies import Tracking
from postroad.units import MIB
from postroad.wire.frames import MAX_BODY_BYTES, decode_body

MAX_TRACES: Final = 64  # under way at once
MAX_QUESTIONS: Final = 256  # under way, or waiting for stored filters
MAX_HELD_BYTES: Final = 64 * MIB  # of stored filters, being read or looked into; or one portion of them
WORK_A_TURN: Final = 1 << 14  # keys and the like that are looked for in one turn, some milliseconds
WORK_AN_ID: Final = 64  # however little is known of it
HERE: Final = -1  # the asker of a question that this broker put to itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquire:
    """Send this question to that broker; then call `answered` or `failed` with the number."""

    broker: int
    number: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Respond:
    """Send this answer to the broker that asked under that number."""

    broker: int
    number: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A trace is done."""

    ticket: int
    results: tuple[TraceResult, ...]


Output = ReadFilters | Inquire | Respond | Report


@dataclass(slots=True)
class _Question:
    asker: int  # broker, or HERE
    number: int  # the asker's own
    items: tuple[TraceItem, ...]
    receivers: int  # that a finding may name
    left: deque[int]  # places in `items` to look up, with the records that are here
    records: Mapping[int, bytes] = field(default_factory=dict)  # of the last portion
    held: int = 0  # bytes in that, or in the one that is being read
    reading: Reading = field(default_factory=Reading)
    findings: dict[int, Finding] = field(default_factory=dict)  # by place in `items`
    wanted: set[int] = field(default_factory=set)  # records to read for those without a finding


class TraceDesk:
    def __init__(
        self,
        tracking: Tracking,
        *,
        me: int,
        reachable: Callable[[], Sequence[int]],
        names: Callable[[], Mapping[int, str]],
    ) -> None:
        self._tracking = tracking
        self._me = me
        self._reachable = reachable
        self._names = names
        self.traces: dict[int, Trace] = {}  # by ticket; under way
        self._asked: dict[int, tuple[int, int]] = {}  # number of our question -> (ticket, broker asked)
        self._questions: dict[int, _Question] = {}  # by tag; waiting for records
        self._working: deque[_Question] = deque()  # to be looked up; the next first
        self._wanting: deque[_Question] = deque()  # records, once others have let go of theirs; likewise
        self._held = 0  # bytes of records that questions hold
        self._room = WORK_A_TURN  # what may still be looked for in this turn
        self.own_work = 0  # what was looked for so far for traces that were asked for here
        self._last = 0  # tickets, numbers and tags come from one counter

    def begin(self, ids: Sequence[bytes], now_us: int) -> tuple[int, list[Output]]:
        """Trace these messages; a Report with the ticket comes in the end."""
        if len(self.traces) >= MAX_TRACES:
            raise UnavailableError(f"{MAX_TRACES} traces are under way at this broker: try again")
        trace = Trace(ids, reachable=self._reachable(), known=self._names(), now_us=now_us)
        ticket = self._next()
        self.traces[ticket] = trace
        out = self._go_on(ticket, trace.start(now_us), now_us)
        return ticket, out + self._work(now_us)

    def abandon(self, ticket: int) -> None:
        """Nobody waits for it any more."""
        self.traces.pop(ticket, None)
        self._asked = {number: held for number, held in self._asked.items() if held[0] != ticket}

    def asked(self, broker: int, number: int, body: bytes, now_us: int) -> list[Output]:
        """Another broker's question. One that makes no sense has no answer: its bearer is not to blame."""
        try:
            question = decode_body(body, TraceQuestion)
        except PeerError:
            return []
        if not question.makes_sense:
            return []
        return self._take(broker, number, question, now_us) + self._work(now_us)

    def answered(self, number: int, body: bytes, now_us: int) -> list[Output]:
        """An answer from the network; one that nobody waits for says nothing."""
        return self._answered(number, body, now_us) + self._work(now_us)

    def _answered(self, number: int, body: bytes, now_us: int) -> list[Output]:
        held = self._asked.pop(number, None)
        if held is None:
            return []
        ticket, broker = held
        trace = self.traces[ticket]
        try:
            asks = trace.answered(broker, decode_body(body, TraceAnswer), now_us)
        except PeerError as error:
            asks = trace.failed(broker, f"answered what cannot be read: {error}", now_us)
        return self._go_on(ticket, asks, now_us)

    def failed(self, number: int, why: str, now_us: int) -> list[Output]:
        return self._failed(number, why, now_us) + self._work(now_us)

    def _failed(self, number: int, why: str, now_us: int) -> list[Output]:
        held = self._asked.pop(number, None)
        if held is None:
            return []
        ticket, broker = held
        return self._go_on(ticket, self.traces[ticket].failed(broker, why, now_us), now_us)

    def read(self, tag: int, records: Mapping[int, bytes], now_us: int) -> list[Output]:
        """The stored records that ReadFilters asked for."""
        question = self._questions.pop(tag, None)
        if question is None:
            return []
        question.records = records
        self._working.append(question)
        return self._work(now_us)

    def tick(self, now_us: int) -> list[Output]:
        """The end of a turn."""
        out: list[Output] = []
        for ticket, trace in list(self.traces.items()):
            out += self._go_on(ticket, trace.tick(now_us), now_us)
        out += self._work(now_us)
        self._room = WORK_A_TURN
        return out

    def next_deadline(self) -> int | None:
        if self._working:
            return 0  # at once, after what came meanwhile
        deadlines = [trace.next_deadline() for trace in self.traces.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def busy(self) -> bool:
        return bool(self.traces or self._working)

    @property
    def _waiting(self) -> int:
        return len(self._questions) + len(self._working) + len(self._wanting)

    def _next(self) -> int:
        self._last += 1
        return self._last

    def _go_on(self, ticket: int, asks: Sequence[Ask], now_us: int) -> list[Output]:
        out: list[Output] = []
        for ask in asks:
            number = self._next()
            self._asked[number] = (ticket, ask.broker)
            if ask.broker == self._me:
                out += self._take(HERE, number, ask.question, now_us)
            else:
                body = msgspec.msgpack.encode(ask.question)
                out.append(Inquire(broker=ask.broker, number=number, body=body))
        trace = self.traces.get(ticket)
        if trace is not None and trace.done:
            self.abandon(ticket)
            out.append(Report(ticket=ticket, results=tuple(trace.results(self._names()))))
        return out

    # ---- questions to this broker

    def _take(self, asker: int, number: int, question: TraceQuestion, now_us: int) -> list[Output]:
        places = deque(range(len(question.items)))
        taken = _Question(asker, number, question.items, max(0, question.receivers), places)
        if self._waiting >= MAX_QUESTIONS:
            return self._refuse(taken, "has too many questions to answer", now_us)
        self._working.append(taken)
        return []

    def _work(self, now_us: int) -> list[Output]:
        """Looks up what there is room for in this turn."""
        out: list[Output] = []
        while self._working and self._room > 0:
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
                out += self._answer(question, now_us)
        return out + self._read()

    def _in_vain(self, question: _Question) -> bool:
        """Nobody waits for it any more."""
        return question.asker == HERE and question.number not in self._asked

    def _look_up(self, question: _Question, place: int) -> None:
        before = self._tracking.looked
        asked = TraceQuestion(items=(question.items[place],))
        answer, wanted = self._tracking.answer(asked, question.records, question.reading)
        work = self._tracking.looked - before + WORK_AN_ID
        self._room -= work
        if question.asker == HERE:
            self.own_work += work
        if wanted:
            question.wanted.update(wanted)
        else:
            (question.findings[place],) = answer.findings

    def _let_go(self, question: _Question) -> None:
        self._held -= question.held
        question.held = 0
        question.records = {}

    def _read(self) -> list[Output]:
        """For as many as there is room for; what is not known is looked up then."""
        out: list[Output] = []
        while self._wanting:
            question = self._wanting[0]
            if self._in_vain(question):
                self._wanting.popleft()
                continue
            portion = question.reading.portion(question.wanted)
            size = sum(question.reading.sizes[sequence] for sequence in portion)
            if self._held and self._held + size > MAX_HELD_BYTES:
                break
            self._wanting.popleft()
            self._held += size
            question.held = size
            question.wanted.clear()
            places = range(len(question.items))
            question.left.extend(place for place in places if place not in question.findings)
            tag = self._next()
            self._questions[tag] = question
            out.append(ReadFilters(tag=tag, sequences=portion))
        return out

    def _answer(self, question: _Question, now_us: int) -> list[Output]:
        found = TraceAnswer(findings=tuple(question.findings[place] for place in range(len(question.items))))
        body = _within(_naming(found, question.receivers), MAX_BODY_BYTES)
        if body is None:
            return self._refuse(question, "has an answer that is too large", now_us)
        if question.asker == HERE:
            return self._answered(question.number, body, now_us)
        return [Respond(broker=question.asker, number=question.number, body=body)]

    def _refuse(self, question: _Question, why: str, now_us: int) -> list[Output]:
        """Whoever asks is told why there is no answer."""
        if question.asker == HERE:
            return self._failed(question.number, why, now_us)
        answer = TraceAnswer(findings=(Finding(lost=why),) * len(question.items))
        return [Respond(broker=question.asker, number=question.number, body=msgspec.msgpack.encode(answer))]

    def metrics(self) -> dict[str, int | float]:
        return {"traces": len(self.traces), "trace_questions_waiting": self._waiting}


def _within(answer: TraceAnswer, most_bytes: int) -> bytes | None:
    """The answer with as many receivers as there is room for; the others are counted. None: not even so."""
    body = msgspec.msgpack.encode(answer)
    bare = len(msgspec.msgpack.encode(_naming(answer, 0))) if len(body) > most_bytes else 0
    named = max(len(finding.delivered) for finding in answer.findings)
    while named and bare < most_bytes < len(body):
        named = min(named - 1, named * (most_bytes - bare) // (len(body) - bare))
        body = msgspec.msgpack.encode(_naming(answer, named))
    return body if len(body) <= most_bytes else None


def _naming(answer: TraceAnswer, most: int) -> TraceAnswer:
    return TraceAnswer(findings=tuple(finding.naming(most) for finding in answer.findings))
