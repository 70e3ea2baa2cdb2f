"""T6: questions from broker to broker travel hop by hop, are answered once, and pile up nowhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.worlds.turns import Turns

from postroad.overlay import inquiries
from postroad.overlay.inquiries import MAX_HOPS, Answered, Inquiries
from postroad.overlay.topology import Topology
from postroad.seam.effects import Effect, Send
from postroad.seam.peers import Peer
from postroad.seam.turn import Turn
from postroad.wire.frames import DEFAULT_LIMITS, Answer, Query, decode

PEER = Peer(
    connection=1,
    role="broker",
    name="a neighbour",
    broker=9,
    node=bytes(16),
    boot=1,
    cost=1,
    publisher=0,
    principal="",
    limits=DEFAULT_LIMITS,
    dialled=None,
)


def ignore(_turn: Turn, _body: bytes) -> None:
    pass


def topologies(count: int) -> dict[int, Topology]:
    """Those of brokers 1 to n in a line, which know all of each other."""
    made = {
        number: Topology(me=number, node=number.to_bytes(16, "big"), name=f"b{number}", boot=1)
        for number in range(1, count + 1)
    }
    for number, one in made.items():
        for neighbour in {number - 1, number + 1} & made.keys():
            one.link_up(neighbour, 1, 0)
    said = [own for one in made.values() if (own := one.take_own()) is not None]
    for one in made.values():
        for own in said:
            one.accept(own, 0)
    return made


class Line:
    """Brokers 1 to n in a line; broker b reaches its neighbours over connections 100 b + neighbour."""

    def __init__(self, count: int) -> None:
        self.topologies = topologies(count)
        self.cut: set[int] = set()  # connections that are gone
        self.turns = {broker: Turns() for broker in self.topologies}
        self.brokers = {
            broker: Inquiries(self.turns[broker].board, me=broker, topology=topology, link=self.link(broker))
            for broker, topology in self.topologies.items()
        }

    def link(self, broker: int) -> Callable[[int], int | None]:
        return lambda neighbour: None if 100 * broker + neighbour in self.cut else 100 * broker + neighbour

    def carry(self, effects: list[Effect]) -> None:
        """Everything that was sent arrives, and what is sent then, too."""
        while effects:
            effect = effects.pop(0)
            assert isinstance(effect, Send)
            message = decode(effect.data)
            assert isinstance(message, Query | Answer)
            effects += self.receive(effect.connection % 100, message)

    def receive(self, broker: int, message: Query | Answer) -> list[Effect]:
        """A neighbour sends it."""
        turn = self.turns[broker].turn()
        self.turns[broker].board.brokers[type(message)](turn, PEER, message)
        return turn.effects

    def ask(self, broker: int, other: int, what: str, body: bytes, answered: Answered) -> list[Effect]:
        """Nothing is sent where there is no way, and only there."""
        turn = self.turns[broker].turn()
        assert self.brokers[broker].ask(turn, other, what, body, answered) == bool(turn.effects)
        return turn.effects

    def respond(self, broker: int, other: int, number: int, body: bytes) -> list[Effect]:
        turn = self.turns[broker].turn()
        self.brokers[broker].respond(turn, other, number, body)
        return turn.effects


def test_a_question_goes_hop_by_hop_and_so_does_its_answer() -> None:
    """T6."""
    line = Line(4)
    asked: list[tuple[int, int, bytes]] = []
    answers: list[bytes] = []

    def serve(turn: Turn, broker: int, number: int, body: bytes) -> None:
        asked.append((broker, number, body))
        line.brokers[4].respond(turn, broker, number, b"answer")

    def answered(_turn: Turn, body: bytes) -> None:
        answers.append(body)

    line.turns[4].board.query("trace", serve)
    line.carry(line.ask(1, 4, "trace", b"question", answered))
    assert asked == [(1, 1, b"question")]
    assert answers == [b"answer"]
    line.carry(line.respond(4, 1, 1, b"again"))
    assert answers == [b"answer"], "a question is answered once"


def test_nobody_is_asked_where_there_is_no_way() -> None:
    line = Line(2)
    assert line.ask(1, 99, "trace", b"", ignore) == []
    line.cut.add(102)
    assert line.ask(1, 2, "trace", b"", ignore) == []
    line.cut = {201}
    assert line.respond(2, 1, 1, b"") == [], "who asked is gone"


def test_what_nobody_serves_is_not_answered() -> None:
    line = Line(2)
    sent = line.ask(1, 2, "of a later version", b"", ignore)
    assert len(sent) == 1
    assert line.receive(2, decode(sent[0].data)) == []


def test_only_the_broker_that_was_asked_can_answer() -> None:
    """An answer under another name neither counts nor makes the true one unwanted."""
    line = Line(3)
    answers: list[bytes] = []

    def answered(_turn: Turn, body: bytes) -> None:
        answers.append(body)

    assert line.ask(1, 3, "trace", b"", answered)
    for source, body in ((2, b"forged"), (3, b"true"), (3, b"late")):
        message = Answer(source=source, target=1, number=1, hops=MAX_HOPS, body=body)
        assert line.receive(1, message) == []
    assert answers == [b"true"]


def test_what_travels_in_circles_ends() -> None:
    line = Line(3)
    query = Query(source=1, target=3, number=1, hops=1, what="trace", body=b"")
    (passed,) = line.receive(2, query)
    assert isinstance(passed, Send)
    message = decode(passed.data)
    assert isinstance(message, Query)
    assert message.hops == 0
    assert line.receive(2, message) == []
    absurd = Query(source=1, target=3, number=1, hops=MAX_HOPS + 1, what="trace", body=b"")
    assert line.receive(2, absurd) == []


def test_questions_without_an_answer_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiries, "MAX_OPEN", 2)
    line = Line(2)
    answers: list[int] = []

    def answered(number: int) -> Answered:
        return lambda _turn, _body: answers.append(number)

    for number in (1, 2, 3):
        line.ask(1, 2, "trace", b"", answered(number))
    for number in (1, 2, 3):
        line.receive(1, Answer(source=2, target=1, number=number, hops=1, body=b""))
    assert answers == [2, 3]
