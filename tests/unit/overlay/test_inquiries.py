"""T6: questions from broker to broker travel hop by hop, are answered once, and pile up nowhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from postroad.overlay import inquiries
from postroad.overlay.inquiries import MAX_HOPS, Answered, Inquiries
from postroad.overlay.topology import Topology
from postroad.seam.effects import Effect, Send
from postroad.wire.frames import Answer, Query, decode


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
        self.brokers = {
            broker: Inquiries(me=broker, topology=self.topologies[broker], link=self.link(broker))
            for broker in self.topologies
        }

    def link(self, broker: int) -> Callable[[int], int | None]:
        return lambda neighbour: None if 100 * broker + neighbour in self.cut else 100 * broker + neighbour

    def carry(self, effects: list[Effect]) -> None:
        """Everything that was sent arrives, and what is sent then, too."""
        while effects:
            effect = effects.pop(0)
            assert isinstance(effect, Send)
            target = effect.connection % 100
            message = decode(effect.data)
            assert isinstance(message, Query | Answer)
            there = self.brokers[target]
            effects += there.query(message, 0) if isinstance(message, Query) else there.answer(message, 0)


def test_a_question_goes_hop_by_hop_and_so_does_its_answer() -> None:
    line = Line(4)
    asked: list[tuple[int, int, bytes]] = []
    answers: list[bytes] = []

    def serve(broker: int, number: int, body: bytes, _now_us: int) -> list[Effect]:
        asked.append((broker, number, body))
        return line.brokers[4].respond(broker, number, b"answer")

    def answered(body: bytes, _now_us: int) -> list[Effect]:
        answers.append(body)
        return []

    line.brokers[4].serve("trace", serve)
    sent = line.brokers[1].ask(4, "trace", b"question", answered)
    assert sent is not None
    line.carry(sent)
    assert asked == [(1, 1, b"question")]
    assert answers == [b"answer"]
    line.carry(line.brokers[4].respond(1, 1, b"again"))
    assert answers == [b"answer"], "a question is answered once"


def test_nobody_is_asked_where_there_is_no_way() -> None:
    line = Line(2)
    assert line.brokers[1].ask(99, "trace", b"", lambda _body, _now: []) is None
    line.cut.add(102)
    assert line.brokers[1].ask(2, "trace", b"", lambda _body, _now: []) is None
    line.cut = {201}
    assert line.brokers[2].respond(1, 1, b"") == [], "who asked is gone"


def test_what_nobody_serves_is_not_answered() -> None:
    line = Line(2)
    sent = line.brokers[1].ask(2, "of a later version", b"", lambda _body, _now: [])
    assert sent is not None
    line.carry(sent)


def test_only_the_broker_that_was_asked_can_answer() -> None:
    """An answer under another name neither counts nor makes the true one unwanted."""
    line = Line(3)
    answers: list[bytes] = []

    def answered(body: bytes, _now_us: int) -> list[Effect]:
        answers.append(body)
        return []

    assert line.brokers[1].ask(3, "trace", b"", answered) is not None
    for source, body in ((2, b"forged"), (3, b"true"), (3, b"late")):
        message = Answer(source=source, target=1, number=1, hops=MAX_HOPS, body=body)
        assert line.brokers[1].answer(message, 0) == []
    assert answers == [b"true"]


def test_what_travels_in_circles_ends() -> None:
    line = Line(3)
    query = Query(source=1, target=3, number=1, hops=1, what="trace", body=b"")
    (passed,) = line.brokers[2].query(query, 0)
    assert isinstance(passed, Send)
    message = decode(passed.data)
    assert isinstance(message, Query)
    assert message.hops == 0
    assert line.brokers[2].query(message, 0) == []
    absurd = Query(source=1, target=3, number=1, hops=MAX_HOPS + 1, what="trace", body=b"")
    assert line.brokers[2].query(absurd, 0) == []


def test_questions_without_an_answer_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiries, "MAX_OPEN", 2)
    line = Line(2)
    answers: list[int] = []

    def answered(number: int) -> Answered:
        def note(_body: bytes, _now_us: int) -> list[Effect]:
            answers.append(number)
            return []

        return note

    for number in (1, 2, 3):
        line.brokers[1].ask(2, "trace", b"", answered(number))
    for number in (1, 2, 3):
        line.brokers[1].answer(Answer(source=2, target=1, number=number, hops=1, body=b""), 0)
    assert answers == [2, 3]
