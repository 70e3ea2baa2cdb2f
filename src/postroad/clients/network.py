"""The request `network`: what all brokers answer to one report, asked of any of them.

The broker that a client asks puts the question to every broker it can reach, and answers when all have
answered, or after WAIT_US with the names of those that did not. A question bears the principal of the client,
and each broker applies its own rules to that, as if the client had asked there. Each answer has an equal
share of the bytes of the reply: what has more than fits says so, and with `broker` a client asks one broker
alone, which then has all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from postroad.errors import (
    BugError,
    DeniedError,
    PeerError,
    PostroadError,
    UnavailableError,
    UsageError,
    shorten,
)
from postroad.links.links import Links
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.topology import Topology
from postroad.seam.peers import Peer
from postroad.seam.replies import reply, reply_error
from postroad.seam.switchboard import Asking, Switchboard
from postroad.seam.turn import Turn
from postroad.units import SECOND_US
from postroad.wire.fields import Text, Whole, Word
from postroad.wire.frames import MAX_BODY_BYTES, Request, decode_body

QUESTION: Final = "network"
WAIT_US: Final = 2 * SECOND_US  # for all brokers to answer
MAX_OPEN: Final = 64  # requests that wait for other brokers
MAX_OF_PRINCIPAL: Final = 16  # of those
MAX_ARGUMENTS: Final = 8
_ENVELOPE_BYTES: Final = 64 << 10  # of the reply around the answers: names
_LEAST_BYTES: Final = 1 << 10  # for an answer, however many there are


class _Question(msgspec.Struct, frozen=True, array_like=True):
    what: Word
    principal: Text
    arguments: Annotated[tuple[tuple[Word, Text], ...], Meta(max_length=MAX_ARGUMENTS)]
    most_bytes: Annotated[int, Meta(ge=0, le=MAX_BODY_BYTES)]


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """`body` is JSON, or with a code the text of an error."""

    code: Word
    body: Whole


_QUESTIONS: Final = msgspec.msgpack.Decoder(_Question)
_ANSWERS: Final = msgspec.msgpack.Decoder(_Answer)


@dataclass(slots=True)
class _Survey:
    """A request that brokers are still answering."""

    connection: int
    number: int
    principal: str
    until_us: int
    waiting: dict[int, None]
    answers: dict[int, Any] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)


class Network:
    def __init__(
        self, board: Switchboard, *, me: int, links: Links, topology: Topology, inquiries: Inquiries
    ) -> None:
        self._reports = board.reports
        self._me, self._links, self._topology, self._inquiries = me, links, topology, inquiries
        self._surveys: list[_Survey] = []  # each waits for at least one broker
        board.request("network", self._request)
        board.query(QUESTION, self._asked)
        board.peers("client", down=self._client_down)

    # ---- the broker that a client asks

    def _request(self, turn: Turn, peer: Peer, request: Request) -> None:
        arguments = dict(request.arguments)
        what, name = arguments.pop("what", ""), arguments.pop("broker", None)
        if what not in self._reports:
            raise UsageError(f"what? One of {', '.join(sorted(self._reports))}, not {shorten(what, 40)!r}")
        if len(arguments) > MAX_ARGUMENTS or any(len(value) > 4_096 for value in arguments.values()):
            raise UsageError(f"up to {MAX_ARGUMENTS} arguments of 4,096 characters go to all brokers")
        of_principal = sum(survey.principal == peer.principal for survey in self._surveys)
        if len(self._surveys) >= MAX_OPEN or of_principal >= MAX_OF_PRINCIPAL:
            raise UnavailableError(
                f"{len(self._surveys)} requests to the whole network are under way: try again"
            )
        brokers = self._topology.reachable() if name is None else self._named(name)
        share = max(_LEAST_BYTES, (MAX_BODY_BYTES - _ENVELOPE_BYTES) // len(brokers))
        question = _Question(what, peer.principal, tuple(arguments.items()), share)
        survey = _Survey(
            peer.connection, request.number, peer.principal, turn.now_us + WAIT_US, dict.fromkeys(brokers)
        )
        self._surveys.append(survey)
        body = msgspec.msgpack.encode(question)
        for broker in brokers:
            if broker == self._me:
                self._take(survey, broker, self._answer(turn, question))
            else:
                self._inquiries.ask(turn, broker, QUESTION, body, self._answered(survey, broker))
        self._settle(turn)

    def _named(self, name: str) -> list[int]:
        named = [broker for broker in self._topology.reachable() if self._title(broker) == name]
        if not named:
            raise UsageError(f"no broker {shorten(name, 40)!r} is in reach")
        return named

    def _title(self, broker: int) -> str:
        """A broker's name, with its number where another has the same."""
        name = self._topology.name(broker)
        alike = sum(self._topology.name(other) == name for other in self._topology.reachable())
        return name if alike < 2 else f"{name} ({broker:08x})"

    def _answered(self, survey: _Survey, broker: int) -> Callable[[Turn, bytes], None]:
        def answered(turn: Turn, body: bytes) -> None:
            try:
                answer = decode_body(body, _ANSWERS)
            except PeerError as error:
                answer = _Answer(error.code, f"it answered what cannot be read: {error}")
            if broker in survey.waiting:
                self._take(survey, broker, answer)
                self._settle(turn)

        return answered

    def _take(self, survey: _Survey, broker: int, answer: _Answer) -> None:
        del survey.waiting[broker]
        try:
            if answer.code:
                survey.refused[broker] = answer.body
            else:
                survey.answers[broker] = msgspec.json.decode(answer.body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            survey.refused[broker] = f"it answered what cannot be read: {error}"

    def _settle(self, turn: Turn) -> None:
        done = [each for each in self._surveys if not each.waiting or each.until_us <= turn.now_us]
        for survey in done:
            self._surveys.remove(survey)
            body = {
                "answers": {self._title(broker): answer for broker, answer in sorted(survey.answers.items())},
                "silent": sorted(self._title(broker) for broker in survey.waiting),
                "refused": {self._title(broker): text for broker, text in sorted(survey.refused.items())},
            }
            try:
                reply(turn, survey.connection, survey.number, body)
            except UnavailableError as error:
                reply_error(turn, survey.connection, survey.number, error)

    def _client_down(self, _turn: Turn, peer: Peer) -> None:
        self._surveys = [survey for survey in self._surveys if survey.connection != peer.connection]

    # ---- every broker

    def _asked(self, turn: Turn, broker: int, number: int, body: bytes) -> None:
        try:
            question = decode_body(body, _QUESTIONS)
        except PeerError:
            return
        answer = self._answer(turn, question)
        self._inquiries.respond(turn, broker, number, msgspec.msgpack.encode(answer))

    def _answer(self, turn: Turn, question: _Question) -> _Answer:
        asking = Asking(
            principal=question.principal,
            arguments=dict(question.arguments),
            now_us=turn.now_us,
            most_bytes=question.most_bytes,
        )
        try:
            if not self._links.access.serves(question.principal):
                raise DeniedError(f"it serves nobody who is {question.principal}")
            report = self._reports.get(question.what)
            if report is None:
                raise UsageError(f"it cannot answer {question.what!r}")
            body = msgspec.json.encode(report(asking))
            if len(body) > question.most_bytes:
                raise UnavailableError(f"its answer has {len(body)} bytes, more than fit: ask it alone")
            return _Answer("", body.decode())
        except PostroadError as error:
            return _Answer(error.code, shorten(str(error), 1_000))

    # ---- time and inspection

    def tick(self, turn: Turn) -> None:
        self._settle(turn)

    def next_deadline(self) -> int | None:
        return min((survey.until_us for survey in self._surveys), default=None)

    def check(self) -> None:
        if len(self._surveys) > MAX_OPEN or not all(survey.waiting for survey in self._surveys):
            raise BugError("network: more questions than may be are open, or one that all have answered")
