"""T6: traces that clients ask for begin in turn, however many one of them asks for."""

from __future__ import annotations

import pytest

from postroad.ids import MessageId
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.topology import Topology
from postroad.seam.effects import Effect, Send
from postroad.seam.tracking import Keep, StoreFilter
from postroad.tracking import tracer
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import NoTracking, Tracking, make_tracking
from postroad.tracking.tracer import MAX_EACH, MAX_WAITING, PACE_US, Tracer
from postroad.units import SECOND_US
from postroad.wire.frames import Reply, Request, decode

NOW_US = 1_700_000_000_000_000
GREEDY, MODEST = 1, 2


def make(tracking: Tracking | None = None) -> Tracer:
    topology = Topology(me=7, node=b"n" * 16, name="here", boot=1)
    inquiries = Inquiries(me=7, topology=topology, link=lambda _: None)
    return Tracer(tracking or NoTracking(), me=7, topology=topology, inquiries=inquiries)


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
    for _ in range(MAX_EACH + MAX_WAITING):
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


def test_as_many_wait_however_many_are_under_way() -> None:
    """Those that a client asks for in one turn are no fewer than those it may ask for over many."""
    tracking = make_tracking(TrackingConfig(cache_bytes=0), me=7, stored=(), changes=(), now_us=NOW_US)
    tracking.published(bytes(MessageId(1, 7, NOW_US // 1000, 0)), NOW_US)
    tracking.close(NOW_US + SECOND_US)  # on a disk that does not answer
    made = make(tracking)
    for _ in range(MAX_WAITING):
        assert ask(made, GREEDY) == []
    for _ in range(2 * MAX_EACH):
        made.tick(NOW_US + 2 * SECOND_US)
    assert made.metrics()["traces"] == MAX_EACH
    for _ in range(MAX_EACH):
        assert ask(made, GREEDY) == []
    assert replied(ask(made, GREEDY)) == [(GREEDY, "unavailable")]


def test_traces_that_are_much_work_begin_further_apart() -> None:
    """Found: with ten thousand subscribers a few clients that trace took all of a broker's time."""
    tracking = make_tracking(TrackingConfig(), me=7, stored=(), changes=(), now_us=NOW_US - SECOND_US)
    for number in range(10_000):
        tracking.attached(f"s{number}", NOW_US)
    identity = bytes(MessageId(1, 7, NOW_US // 1000, 0))
    tracking.published(identity, NOW_US)
    tracking.delivered(7, ["s1"], identity, NOW_US)
    made = make(tracking)
    for _ in range(50):
        ask(made, GREEDY)
    now_us, begun = NOW_US, 0
    while now_us < NOW_US + SECOND_US // 2:
        begun += sum(isinstance(one, Send) for one in made.tick(now_us))
        now_us = max(now_us + 1, made.next_deadline() or now_us)
    assert 15 <= begun <= 25


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


def test_what_a_question_fills_is_kept_in_the_same_turn() -> None:
    """History reads stored filters at the end of a turn. Found: one that was not written yet."""
    config = TrackingConfig(bits=200, capacity=10, hashes=3, adaptive=False)
    tracking = make_tracking(config, me=7, stored=(), changes=(), now_us=NOW_US)
    made = make(tracking)
    made.tick(NOW_US)
    tracking.published(b"".join(bytes(MessageId(1, 7, NOW_US // 1000, n)) for n in range(11)), NOW_US)
    ask(made, MODEST)
    kept = [one for effect in made.tick(NOW_US) if isinstance(effect, Keep) for one in effect.effects]
    assert [one.sequence for one in kept if isinstance(one, StoreFilter)] == [1]
    assert tracking.stored_after(0) == [1]


def test_links_that_go_while_a_large_network_is_asked() -> None:
    """Each question that cannot be sent makes room for the next: a thousand of them are no stack."""
    size, cut = 1000, False

    class Wide(Topology):
        def reachable(self) -> list[int]:
            return list(range(1, size + 1))

        def parent(self, origin: int) -> int | None:  # noqa: ARG002
            return None if cut else 1

    topology = Wide(me=7, node=b"n" * 16, name="here", boot=1)
    inquiries = Inquiries(me=7, topology=topology, link=lambda _: 1)
    made = Tracer(NoTracking(), me=7, topology=topology, inquiries=inquiries)
    ask(made, MODEST)
    assert len(made.tick(NOW_US)) == 64
    cut = True
    out: list[Effect] = []
    for second in range(1, 12):
        out += made.tick(NOW_US + second * SECOND_US)
    assert replied(out) == [(MODEST, "")]
