"""T6: traces that clients ask for begin in turn, however many one of them asks for."""

from __future__ import annotations

import pytest

from postroad.ids import MessageId
from postroad.overlay.effects import Effect, Send
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.topology import Topology
from postroad.tracking import tracer
from postroad.tracking.strategies import NoTracking
from postroad.tracking.tracer import MAX_EACH, MAX_WAITING, PACE_US, Tracer
from postroad.wire.frames import Reply, Request, decode

NOW_US = 1_700_000_000_000_000
GREEDY, MODEST = 1, 2


def make() -> Tracer:
    topology = Topology(me=7, node=b"n" * 16, name="here", boot=1)
    inquiries = Inquiries(me=7, topology=topology, link=lambda _: None)
    return Tracer(NoTracking(), me=7, topology=topology, inquiries=inquiries)


def ask(made: Tracer, connection: int) -> list[Effect]:
    arguments = {"id": str(MessageId(1, 7, NOW_US // 1000, 0))}
    return made.request(connection, Request(number=1, what="trace", arguments=arguments))


def replied(effects: list[Effect]) -> list[tuple[int, str]]:
    out = []
    for effect in effects:
        assert isinstance(effect, Send)
        reply = decode(effect.data)
        assert isinstance(reply, Reply)
        out.append((effect.connection, reply.code))
    return out


def test_one_client_does_not_keep_the_others_waiting() -> None:
    made = make()
    for _ in range(MAX_WAITING):
        assert ask(made, GREEDY) == []
    assert replied(ask(made, GREEDY)) == [(GREEDY, "unavailable")]
    assert ask(made, MODEST) == []
    first = [one for _ in range(MAX_EACH) for one in replied(made.tick(NOW_US))]
    assert first == [(GREEDY, ""), (MODEST, "")] + [(GREEDY, "")] * (MAX_EACH - 2)
    assert made.tick(NOW_US) == [], "a few at once, then at a pace"
    deadline_us = made.next_deadline()
    assert deadline_us is not None
    assert NOW_US < deadline_us <= NOW_US + PACE_US
    assert replied(made.tick(deadline_us)) == [(GREEDY, "")]
    assert made.tick(deadline_us) == []
    made.closed(GREEDY)
    assert made.next_deadline() is None
    assert made.tick(NOW_US + 10 * PACE_US) == []


def test_what_is_under_way_is_bounded_for_each_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    monkeypatch.setattr(tracer, "MAX_EACH", 0)
    ask(made, GREEDY)
    assert made.tick(NOW_US) == []
    assert made.next_deadline() is None
    monkeypatch.undo()
    monkeypatch.setattr(tracer, "MAX_TRACES", 0)
    assert made.tick(NOW_US) == []
    monkeypatch.undo()
    assert replied(made.tick(NOW_US)) == [(GREEDY, "")]
