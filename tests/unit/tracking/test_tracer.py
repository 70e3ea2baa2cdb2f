"""T6: traces that clients ask for begin in turn, however many one of them asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from tests.worlds.topologies import linked
from tests.worlds.turns import Turns, peer

from postroad.errors import UnavailableError, UsageError
from postroad.ids import MessageId
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.topology import Topology
from postroad.seam.effects import Effect, Send
from postroad.seam.tracking import (
    Keep,
    NotKept,
    ReplaceAttachments,
    StoreAttachments,
    StoreFilter,
    TrackingEffect,
)
from postroad.seam.turn import Turn
from postroad.tracking import tracer
from postroad.tracking.attachment_log import decode_changes
from postroad.tracking.query import desk
from postroad.tracking.query.messages import TraceAnswer, TraceItem, TraceQuestion
from postroad.tracking.query.untracked import UNTRACKED
from postroad.tracking.settings import PUT_OFF_US, TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.tracking.tracer import MAX_EACH, MAX_WAITING, PACE_US, Tracer
from postroad.units import SECOND_US
from postroad.wire.frames import Answer, Query, Reply, Request, decode

NOW_US = 1_700_000_000_000_000
GREEDY, MODEST = 1, 2
LINK = 100  # a connection to another broker


class Tracing:
    """A tracer and its turns."""

    def __init__(
        self,
        tracking: Tracking | None = None,
        topology: Topology | None = None,
        link: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        self.turns = Turns()
        self.kept: list[TrackingEffect] = []
        topology = topology or Topology(me=7, node=b"n" * 16, name="here", boot=1)
        inquiries = Inquiries(self.turns.board, me=7, topology=topology, link=link)
        self.tracer = Tracer(
            self.turns.board, tracking, me=7, topology=topology, inquiries=inquiries, kept=self._keep
        )

    def _keep(self, _turn: Turn, effects: Sequence[TrackingEffect]) -> None:
        self.kept += effects

    def ask(self, connection: int) -> list[Effect]:
        """What goes out at once; an error is raised."""
        arguments = {"id": str(MessageId(1, 7, NOW_US // 1000, 0))}
        handler, needs = self.turns.board.requests["trace"]
        assert needs == ""
        turn = self.turns.turn(NOW_US)
        handler(turn, peer(connection), Request(number=1, what="trace", arguments=arguments))
        return turn.effects

    def tick(self, now_us: int, *, busy: bool = False) -> list[Effect]:
        turn = self.turns.turn(now_us, busy=busy)
        assert self.tracer.tick(turn) == bool(turn.effects)
        return turn.effects

    def close(self, connection: int) -> None:
        for handler in self.turns.board.went_down["client"]:
            handler(self.turns.turn(NOW_US), peer(connection))

    def link_up(self, broker: int) -> None:
        for handler in self.turns.board.came_up["broker"]:
            handler(self.turns.turn(NOW_US), peer(LINK, "broker", broker=broker))

    def link_down(self, broker: int) -> None:
        for handler in self.turns.board.went_down["broker"]:
            handler(self.turns.turn(NOW_US), peer(LINK, "broker", broker=broker))

    def metric(self, name: str) -> int | float:
        (value,) = [
            figures[name] for figures in (source() for source in self.turns.board.figures) if name in figures
        ]
        return value


def replied(effects: list[Effect]) -> list[tuple[int, str]]:
    out = []
    for effect in effects:
        assert isinstance(effect, Send)
        reply = decode(effect.data)
        assert isinstance(reply, Reply)
        out.append((effect.connection, reply.code))
    return out


def test_one_client_does_not_keep_the_others_waiting() -> None:
    """T6."""
    made = Tracing()
    for _ in range(MAX_EACH + MAX_WAITING):
        assert made.ask(GREEDY) == []
    with pytest.raises(UnavailableError, match="72 traces of this client"):
        made.ask(GREEDY)
    assert made.ask(MODEST) == []
    first = [one for _ in range(MAX_EACH) for one in replied(made.tick(NOW_US))]
    assert first == [(GREEDY, ""), (MODEST, "")] + [(GREEDY, "")] * (MAX_EACH - 2)
    assert made.tick(NOW_US) == [], "a few at once, then at a pace"
    deadline_us = made.tracer.next_deadline()
    assert deadline_us is not None
    assert NOW_US < deadline_us <= NOW_US + PACE_US
    assert replied(made.tick(deadline_us)) == [(GREEDY, "")]
    assert made.tick(deadline_us) == []
    made.close(GREEDY)
    assert made.tracer.next_deadline() is None
    assert made.tick(NOW_US + 10 * PACE_US) == []


def test_as_many_wait_however_many_are_under_way() -> None:
    """T6: Those that a client asks for in one turn are no fewer than those it may ask for over many."""
    tracking = make_tracking(TrackingConfig(cache_bytes=0), me=7, stored=(), changes=(), now_us=NOW_US)
    tracking.published(bytes(MessageId(1, 7, NOW_US // 1000, 0)), NOW_US)
    tracking.close(NOW_US + SECOND_US)  # on a disk that does not answer
    made = Tracing(tracking)
    for _ in range(MAX_WAITING):
        assert made.ask(GREEDY) == []
    for _ in range(2 * MAX_EACH):
        made.tick(NOW_US + 2 * SECOND_US)
    assert made.metric("traces") == MAX_EACH
    for _ in range(MAX_EACH):
        assert made.ask(GREEDY) == []
    with pytest.raises(UnavailableError):
        made.ask(GREEDY)


def test_traces_that_are_much_work_begin_further_apart() -> None:
    """T6: Found: with ten thousand subscribers a few clients that trace took all of a broker's time."""
    tracking = make_tracking(TrackingConfig(), me=7, stored=(), changes=(), now_us=NOW_US - SECOND_US)
    for number in range(10_000):
        tracking.attached(f"s{number}", NOW_US)
    identity = bytes(MessageId(1, 7, NOW_US // 1000, 0))
    tracking.published(identity, NOW_US)
    tracking.delivered(7, ["s1"], identity, NOW_US)
    made = Tracing(tracking)
    for _ in range(50):
        made.ask(GREEDY)
    now_us, begun = NOW_US, 0
    while now_us < NOW_US + SECOND_US // 2:
        begun += sum(isinstance(one, Send) for one in made.tick(now_us))
        now_us = max(now_us + 1, made.tracer.next_deadline() or now_us)
    assert 15 <= begun <= 25


def test_what_is_under_way_is_bounded_for_each_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Tracing()
    monkeypatch.setattr(tracer, "MAX_EACH", 0)
    made.ask(GREEDY)
    assert made.tick(NOW_US) == []
    assert made.tracer.next_deadline() is None
    monkeypatch.undo()
    monkeypatch.setattr(desk, "MAX_TRACES", 0)
    assert made.tick(NOW_US) == []
    monkeypatch.undo()
    assert replied(made.tick(NOW_US)) == [(GREEDY, "")]


def test_what_a_question_fills_is_kept_in_the_same_turn() -> None:
    """History reads stored filters at the end of a turn. Found: one that was not written yet."""
    config = TrackingConfig(bits=200, capacity=10, hashes=3, adaptive=False)
    tracking = make_tracking(config, me=7, stored=(), changes=(), now_us=NOW_US)
    made = Tracing(tracking)
    made.tick(NOW_US)
    tracking.published(b"".join(bytes(MessageId(1, 7, NOW_US // 1000, n)) for n in range(11)), NOW_US)
    made.ask(MODEST)
    made.kept.clear()
    kept = [one for effect in made.tick(NOW_US) if isinstance(effect, Keep) for one in effect.effects]
    assert [one.sequence for one in kept if isinstance(one, StoreFilter)] == [1]
    assert made.kept == kept, "whoever is to hear of it has"
    assert tracking.stored_after(0) == [1]


def test_links_that_go_while_a_large_network_is_asked() -> None:
    """T6: Each question that cannot be sent makes room for the next: a thousand of them are no stack."""
    size, cut = 1000, False

    class Wide(Topology):
        def reachable(self) -> list[int]:
            return list(range(1, size + 1))

        def parent(self, origin: int) -> int | None:  # noqa: ARG002
            return None if cut else 1

    topology = Wide(me=7, node=b"n" * 16, name="here", boot=1)
    made = Tracing(None, topology, link=lambda _: LINK)
    made.ask(MODEST)
    assert len(made.tick(NOW_US)) == 64
    cut = True
    out: list[Effect] = []
    for second in range(1, 12):
        out += made.tick(NOW_US + second * SECOND_US)
    assert replied(out) == [(MODEST, "")]


def test_a_trace_takes_the_id_of_a_message() -> None:
    made = Tracing()
    handler, _ = made.turns.board.requests["trace"]
    for arguments in ({}, {"id": "nonsense"}, {"id": "00000001-00000007-0193c1d2e3f4-0001", "more": ""}):
        with pytest.raises(UsageError):
            handler(
                made.turns.turn(NOW_US), peer(MODEST), Request(number=1, what="trace", arguments=arguments)
            )
    assert made.tick(NOW_US) == []


@pytest.mark.parametrize("busy", [False, True])
def test_what_is_to_be_kept_waits_for_a_turn_without_messages_but_not_for_long(busy: bool) -> None:
    config = TrackingConfig(strategy="exact", persist_us=SECOND_US)
    tracking = make_tracking(config, me=7, stored=(), changes=(), now_us=NOW_US)
    made = Tracing(tracking)
    made.tick(NOW_US)
    tracking.published(bytes(MessageId(1, 7, NOW_US // 1000, 0)), NOW_US)
    assert made.tracer.next_deadline() == NOW_US + SECOND_US
    due_us = NOW_US + SECOND_US + (PUT_OFF_US if busy else 0)
    assert made.tick(due_us - 1, busy=busy) == []
    (keep,) = made.tick(due_us, busy=busy)
    assert isinstance(keep, Keep)


def test_links_and_what_could_not_be_kept_are_recorded() -> None:
    tracking = make_tracking(TrackingConfig(), me=7, stored=(), changes=(), now_us=NOW_US)
    made = Tracing(tracking)
    made.tick(NOW_US)
    made.link_up(8)
    made.link_down(8)
    (keep,) = made.tick(NOW_US)
    assert isinstance(keep, Keep)
    (stored,) = keep.effects
    assert isinstance(stored, StoreAttachments)
    assert [(one.what, one.who) for one in decode_changes(stored.record)[0]] == [
        ("attach", "8"),
        ("detach", "8"),
    ]
    for handler in made.turns.board.losing:
        handler(made.turns.turn(NOW_US), NotKept(effects=keep.effects))
    (again,) = made.tick(NOW_US)
    assert isinstance(again, Keep)
    assert [type(effect) for effect in again.effects] == [ReplaceAttachments], "the whole map, at once"


def test_where_nothing_is_tracked_a_trace_goes_on_at_the_neighbours_of_this_start() -> None:
    """T11: also at one that is away by now, since what it took with it nobody recorded."""
    made = Tracing(None, linked(7, 8), link=lambda _: LINK)
    for neighbour in (9, 8):
        made.link_up(neighbour)
    made.link_down(9)
    assert made.turns.board.losing == []
    items = tuple(TraceItem(id=bytes(MessageId(1, 7, NOW_US // 1000, n)), origin=0) for n in range(2))
    body = msgspec.msgpack.encode(TraceQuestion(items=items))
    turn = made.turns.turn(NOW_US)
    query = Query(source=8, target=7, number=5, hops=1, what="trace", body=body)
    made.turns.board.brokers[Query](turn, peer(LINK, "broker", broker=8), query)
    (sent,) = turn.effects
    assert isinstance(sent, Send)
    answer = decode(sent.data)
    assert isinstance(answer, Answer)
    for finding in msgspec.msgpack.decode(answer.body, type=TraceAnswer).findings:
        assert (finding.lost, finding.neighbours) == (UNTRACKED, (8, 9))
    assert made.tracer.next_deadline() is None
    made.tracer.close(turn, None)
    made.tracer.check()
    assert turn.effects == [sent], "and nothing is kept"
