"""Delivery: sharing of frames, activation, slow consumers."""

from __future__ import annotations

import pytest
from tests.worlds.turns import Turns

from postroad.errors import BugError, PeerError, SlowConsumerError, UsageError
from postroad.events import BatchBuilder, EventBatch, Value
from postroad.ids import HISTORY, MessageId
from postroad.seam.effects import Close, Effect, Note, Send
from postroad.selectors import Selector
from postroad.streams import delivery as delivery_module
from postroad.streams.delivery import CONNECTION_BUFFERS, Delivery
from postroad.streams.settings import DeliveryConfig
from postroad.wire.frames import DEFAULT_LIMITS, Ended, Kind, Subscribe, decode

PUBEND, OTHER = 7 << 32, 8 << 32
PLENTY = 1 << 30

# What one frame says: (connection, subscription number, pubend, start, end, ticks of its events or "lost")
Said = tuple[int, int, int, int, int, "list[int] | str"]


class World:
    """A delivery core whose credit is a dictionary."""

    def __init__(self, buffer_bytes: int = 1 << 20) -> None:
        self.credit: dict[int, int] = {}
        self.turns = Turns()
        self.core = Delivery(
            self.turns.board,
            config=DeliveryConfig(buffer_bytes=buffer_bytes),
            available=lambda connection: self.credit.get(connection, PLENTY),
            spend=self._spend,
        )

    def _spend(self, connection: int, size: int) -> None:
        self.credit[connection] = self.credit.get(connection, PLENTY) - size

    def subscribe(
        self,
        connection: int,
        topic: str,
        *,
        where: str = "",
        number: int = 1,
        overflow: str = "drop",
        buffer: int = 0,
        at: int | None = 0,
    ) -> int:
        asked = Subscribe(number=number, topic=topic, where=where, overflow=overflow, buffer=buffer)
        key = self.core.subscribe(connection, asked, Selector.parse(topic, where), "")
        if at is not None:
            for pubend in (PUBEND, OTHER):
                self.core.activate(key, pubend, at)
        return key

    def deliver(self, start: int, end: int, *events: tuple[int, str], pubend: int = PUBEND) -> list[Said]:
        batch = stream_batch(pubend, start, end, [(tick, topic, {}) for tick, topic in events])
        return self.said(self.turns.effects(self.core.deliver, pubend, start, end, batch))

    def lose(self, start: int, end: int, pubend: int = PUBEND) -> list[Said]:
        return self.said(self.turns.effects(self.core.lost, pubend, start, end))

    def more(self, connection: int, size: int = PLENTY) -> list[Said]:
        self.credit[connection] = size
        return self.said(self.turns.effects(self.core.credit, connection))

    def said(self, effects: list[Effect]) -> list[Said]:
        self.core.check()
        return [said(effect) for effect in effects if isinstance(effect, Send)]

    def row(self, key: int) -> dict[str, int | str]:
        return dict(zip(self.core._subscriptions, self.core.status(), strict=True))[key]


def stream_batch(
    pubend: int, start: int, end: int, events: list[tuple[int, str, dict[str, Value]]]
) -> EventBatch:
    """Rows with the given ticks, as one piece of a stream."""
    pieces: list[EventBatch] = []
    last = start
    for tick, topic, attributes in events:
        builder = BatchBuilder()
        builder.add(bytes(MessageId(1, 1, tick, 0)), topic, attributes, b"payload", DEFAULT_LIMITS)
        published = EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)
        pieces.append(published.with_ticks(tick, kind=Kind.KNOWLEDGE, pubend=pubend, start=last, channel=0))
        last = tick
    assert last <= end
    return EventBatch.concatenate(pieces)


def said(effect: Send) -> Said:
    batch = EventBatch.parse(effect.data, DEFAULT_LIMITS, expect=Kind.DELIVERY)
    ticks = "lost" if batch.lost else batch.headers["tick"].tolist()
    return effect.connection, batch.channel, batch.pubend, batch.start, batch.end, ticks


class TestSharing:
    def test_subscribers_of_the_same_rows_get_the_same_bytes_object(self) -> None:
        world = World()
        for connection in (1, 2, 3):
            world.subscribe(connection, "a/#")
        world.subscribe(4, "a/#", number=9)
        batch = stream_batch(PUBEND, 0, 20, [(5, "a/x", {}), (6, "b", {}), (7, "a", {})])
        sent = world.turns.effects(world.core.deliver, PUBEND, 0, 20, batch)
        effects = [effect for effect in sent if isinstance(effect, Send)]
        assert [said(effect) for effect in effects] == [
            (1, 1, PUBEND, 0, 20, [5, 7]),
            (2, 1, PUBEND, 0, 20, [5, 7]),
            (3, 1, PUBEND, 0, 20, [5, 7]),
            (4, 9, PUBEND, 0, 20, [5, 7]),
        ]
        assert effects[0].data is effects[1].data is effects[2].data
        assert effects[3].data is not effects[0].data

    def test_each_gets_its_own_rows_and_nobody_an_empty_frame(self) -> None:
        world = World()
        world.subscribe(1, "a")
        world.subscribe(2, "b")
        world.subscribe(3, "c")
        assert sorted(world.deliver(0, 9, (1, "a"), (2, "b"), (3, "a"))) == [
            (1, 1, PUBEND, 0, 9, [1, 3]),
            (2, 1, PUBEND, 0, 9, [2]),
        ]

    def test_two_subscriptions_of_one_connection_both_get_it(self) -> None:
        world = World()
        world.subscribe(1, "a", number=1)
        world.subscribe(1, "#", number=2)
        assert sorted(world.deliver(0, 9, (1, "a"))) == [(1, 1, PUBEND, 0, 9, [1]), (1, 2, PUBEND, 0, 9, [1])]

    def test_credit_is_spent(self) -> None:
        world = World()
        world.subscribe(1, "a")
        world.credit[1] = 1
        batch = stream_batch(PUBEND, 0, 1, [(1, "a", {})])
        (frame,) = world.turns.effects(world.core.deliver, PUBEND, 0, 1, batch)
        assert isinstance(frame, Send)
        assert world.credit[1] == 1 - len(frame.data)

    def test_silence_sends_nothing(self) -> None:
        world = World()
        world.subscribe(1, "a")
        assert world.turns.effects(world.core.deliver, PUBEND, 0, 100, None) == []
        assert world.deliver(100, 110, (105, "a")) == [(1, 1, PUBEND, 100, 110, [105])]


class TestActivation:
    """Silence is relative to a filter (spec durable.md, traps), so nothing comes before its first tick."""

    def test_nothing_before_activation(self) -> None:
        world = World()
        world.subscribe(1, "a")
        key = world.subscribe(2, "a", at=None)
        assert world.deliver(0, 10, (5, "a")) == [(1, 1, PUBEND, 0, 10, [5])]
        world.core.activate(key, OTHER, 0)
        assert world.deliver(10, 20, (15, "a")) == [(1, 1, PUBEND, 10, 20, [15])]
        world.core.activate(key, PUBEND, 20)
        assert world.deliver(20, 30, (25, "a")) == [
            (1, 1, PUBEND, 20, 30, [25]),
            (2, 1, PUBEND, 20, 30, [25]),
        ]

    def test_beginning_inside_a_batch(self) -> None:
        world = World()
        world.subscribe(1, "a")
        world.subscribe(2, "a", at=6)
        assert sorted(world.deliver(0, 10, (5, "a"), (6, "a"), (7, "a"))) == [
            (1, 1, PUBEND, 0, 10, [5, 6, 7]),
            (2, 1, PUBEND, 6, 10, [7]),
        ]
        assert len(world.deliver(10, 20, (15, "a"))) == 2

    def test_beginning_after_or_at_the_end_of_a_batch(self) -> None:
        world = World()
        world.subscribe(1, "a", at=10)
        world.subscribe(2, "a", at=15)
        assert world.deliver(0, 10, (5, "a")) == []
        assert world.deliver(10, 20, (12, "a")) == [(1, 1, PUBEND, 10, 20, [12])]
        assert len(world.deliver(20, 30, (25, "a"))) == 2

    def test_beginning_in_the_past_means_now(self) -> None:
        world = World()
        world.subscribe(1, "a")
        world.deliver(0, 10, (5, "a"))
        world.subscribe(2, "a", at=3)
        assert len(world.deliver(10, 20, (15, "a"))) == 2

    def test_activating_again_changes_nothing(self) -> None:
        world = World()
        key = world.subscribe(1, "a", at=5)
        world.core.activate(key, PUBEND, 50)
        assert len(world.deliver(0, 10, (7, "a"))) == 1
        world.core.activate(key, PUBEND, 50)
        assert len(world.deliver(10, 20, (17, "a"))) == 1
        world.core.activate(999, PUBEND, 0)

    def test_overlapping_knowledge_is_a_bug(self) -> None:
        world = World()
        world.subscribe(1, "a")
        world.deliver(0, 10, (5, "a"))
        with pytest.raises(BugError):
            world.turns.effects(world.core.deliver, PUBEND, 9, 20, None)

    def test_retired_pubends_make_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(delivery_module, "MAX_PUBENDS", 2)
        world = World()
        key = world.subscribe(1, "a")
        with pytest.raises(PeerError):
            world.core.activate(key, 99 << 32, 0)
        world.core.retire(PUBEND)
        world.core.retire(PUBEND)
        world.core.check()
        world.core.activate(key, 99 << 32, 0)
        world.core.check()
        assert world.deliver(0, 10, (5, "a")) == []
        assert len(world.deliver(0, 10, (5, "a"), pubend=99 << 32)) == 1


class TestSubscriptions:
    def test_numbers_are_unique_on_a_connection(self) -> None:
        world = World()
        first = world.subscribe(1, "a")
        with pytest.raises(PeerError):
            world.subscribe(1, "b")
        assert world.core.unsubscribe(1, 1) == first
        assert world.core.unsubscribe(1, 1) is None
        assert world.subscribe(1, "b") > first

    @pytest.mark.parametrize("wrong", [{"overflow": "explode"}, {"buffer": -1}])
    def test_bad_arguments(self, wrong: dict[str, object]) -> None:
        world = World()
        with pytest.raises(UsageError):
            world.subscribe(1, "a", **wrong)  # type: ignore[arg-type]
        world.core.check()
        assert world.core.count(1) == 0

    def test_closed(self) -> None:
        world = World()
        keys = [world.subscribe(1, "a", number=number) for number in (1, 2)]
        world.subscribe(2, "a", at=100)
        assert world.core.count(1) == 2
        assert world.core.closed(1) == [1, 2]
        assert world.core.closed(2) == [1]
        assert world.core.closed(3) == []
        world.core.check()
        assert world.deliver(0, 10, (5, "a")) == [], "they are there still, and get nothing"
        assert [world.core.unsubscribe(1, number) for number in (1, 2)] == keys
        assert world.core.closed(1) == []
        world.core.check()
        assert world.core.metrics()["subscriptions"] == 1

    def test_unsubscribe_frees_what_waits(self) -> None:
        world = World()
        world.subscribe(1, "a", number=1)
        world.subscribe(1, "a", number=2)
        world.subscribe(1, "a", number=3, buffer=1)
        world.credit[1] = 0
        world.deliver(0, 10, (5, "a"))
        world.core.unsubscribe(1, 1)
        world.core.check()
        world.core.unsubscribe(1, 3)
        world.core.check()
        assert world.more(1) == [(1, 2, PUBEND, 0, 10, [5])]
        world.core.unsubscribe(1, 2)
        assert world.core.metrics()["delivery_buffered_bytes"] == 0


class TestSlowConsumers:
    def test_frames_wait_in_order_across_subscriptions(self) -> None:
        world = World()
        world.subscribe(1, "a", number=1)
        world.subscribe(1, "b", number=2)
        world.credit[1] = 0
        assert world.deliver(0, 1, (1, "a")) == []
        assert world.deliver(1, 2, (2, "b")) == []
        assert world.deliver(2, 3, (3, "a")) == []
        assert world.more(1, 1) == [(1, 1, PUBEND, 0, 1, [1])]
        # A stalled connection with new credit still sends what waits before what is new.
        world.credit[1] = PLENTY
        assert world.deliver(3, 4, (4, "b")) == []
        assert world.more(1) == [
            (1, 2, PUBEND, 1, 2, [2]),
            (1, 1, PUBEND, 2, 3, [3]),
            (1, 2, PUBEND, 3, 4, [4]),
        ]
        assert world.deliver(4, 5, (5, "a")) == [(1, 1, PUBEND, 4, 5, [5])]
        assert world.more(1) == []

    def test_others_do_not_suffer(self) -> None:
        world = World()
        world.subscribe(1, "a")
        world.subscribe(2, "a")
        world.credit[1] = 0
        assert world.deliver(0, 1, (1, "a")) == [(2, 1, PUBEND, 0, 1, [1])]

    def test_drop_reports_exact_spans_before_anything_later(self) -> None:
        world = World()
        size = len(stream_batch(PUBEND, 0, 1, [(1, "a", {})]).data)
        key = world.subscribe(1, "a", buffer=size)
        world.credit[1] = 0
        world.deliver(0, 1, (1, "a"))
        world.deliver(1, 2, (2, "a"))
        world.deliver(0, 5, (4, "a"), pubend=OTHER)
        world.deliver(2, 3, (3, "b"))
        world.deliver(3, 4, (4, "a"))
        assert world.row(key)["dropped"] == 3
        assert world.more(1, size) == [(1, 1, PUBEND, 0, 1, [1])]
        assert world.deliver(4, 5, (5, "a")) == []
        assert world.more(1, 1) == [(1, 1, PUBEND, 1, 5, "lost")]
        # The gap of the other pubend is still due, so this one is dropped again, in a span of its own.
        assert world.deliver(5, 6, (6, "a")) == []
        assert world.more(1) == [(1, 1, OTHER, 0, 5, "lost"), (1, 1, PUBEND, 5, 6, "lost")]
        assert world.deliver(6, 7, (7, "a")) == [(1, 1, PUBEND, 6, 7, [7])]
        row = world.row(key)
        assert (row["delivered"], row["dropped"], row["gaps"], row["buffered_bytes"]) == (2, 5, 3, 0)

    def test_a_subscription_recovers_while_another_still_waits(self) -> None:
        world = World()
        size = len(stream_batch(PUBEND, 0, 1, [(1, "a", {})]).data)
        world.subscribe(1, "a", number=1, buffer=1)
        world.subscribe(1, "b", number=2)
        world.credit[1] = 0
        world.deliver(0, 1, (1, "b"))
        world.deliver(1, 2, (2, "a"))
        world.deliver(2, 3, (3, "b"))
        assert world.more(1, 1) == [(1, 1, PUBEND, 1, 2, "lost")]
        assert world.more(1, size + 1) == [(1, 2, PUBEND, 0, 1, [1]), (1, 2, PUBEND, 2, 3, [3])]

    def test_a_gap_from_upstream_goes_to_all_that_are_active(self) -> None:
        world = World()
        world.subscribe(1, "a")
        world.subscribe(2, "never/matched")
        world.subscribe(3, "a", at=5)
        world.subscribe(4, "a", at=10)
        world.subscribe(5, "a", at=None)
        world.credit[2] = 0
        assert world.lose(0, 10) == [
            (1, 1, PUBEND, 0, 10, "lost"),
            (3, 1, PUBEND, 5, 10, "lost"),
        ]
        assert world.more(2) == [(2, 1, PUBEND, 0, 10, "lost")]
        assert world.core.metrics()["delivery_gaps_total"] == 3

    def test_a_gap_in_what_a_broker_said_about_itself_is_for_who_asked_for_that(self) -> None:
        world = World()
        history = 7 << 32 | HISTORY
        for connection, topic in enumerate(("a", "#", "", "$postroad/links"), 1):
            key = world.subscribe(connection, topic)
            world.core.activate(key, history, 0)
        assert [said[0] for said in world.lose(0, 10, history)] == [3, 4]
        assert [said[0] for said in world.lose(0, 10)] == [1, 2, 3]

    def test_connection_limit(self) -> None:
        size = len(stream_batch(PUBEND, 0, 1, [(1, "a", {})]).data)
        world = World(buffer_bytes=size)
        for number in range(CONNECTION_BUFFERS + 2):
            world.subscribe(1, "a", number=number, buffer=PLENTY)
        world.credit[1] = 0
        world.deliver(0, 1, (1, "a"))
        assert world.core.metrics()["delivery_buffered_bytes"] == CONNECTION_BUFFERS * size
        assert [
            (number, ticks) for _, number, _, _, _, ticks in sorted(world.more(1), key=lambda it: it[1])
        ] == [
            (number, [1] if number < CONNECTION_BUFFERS else "lost")
            for number in range(CONNECTION_BUFFERS + 2)
        ]

    def test_disconnect(self) -> None:
        world = World()
        world.subscribe(1, "a", number=3, overflow="disconnect", buffer=1)
        world.subscribe(1, "b", number=4)
        world.credit[1] = 0
        world.deliver(0, 1, (1, "b"))
        batch = stream_batch(PUBEND, 1, 2, [(2, "a", {})])
        told, close, note = world.turns.effects(world.core.deliver, PUBEND, 1, 2, batch)
        world.core.check()
        assert isinstance(told, Send)
        ended = decode(told.data)
        assert isinstance(ended, Ended)
        assert (ended.number, ended.code) == (3, "slow-consumer")
        assert isinstance(close, Close)
        assert isinstance(close.error, SlowConsumerError)
        assert isinstance(note, Note)
        assert "slow consumer" in note.text  # the log says why, not only who
        # Until the driver says that it is closed, nothing more is sent there, whatever comes.
        assert world.more(1) == []
        assert world.deliver(2, 3, (3, "a")) == []
        world.core.unsubscribe(1, 3)
        world.core.unsubscribe(1, 4)
        world.subscribe(1, "a", number=5)
        assert world.deliver(3, 4, (4, "a")) == []
        assert len(world.core.closed(1)) == 1
        assert world.core.metrics()["slow_consumer_disconnects_total"] == 1
