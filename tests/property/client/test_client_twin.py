"""The client's streams and outbox against naive twins."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from postroad.client import effects as fx
from postroad.client.core import ClientCore
from postroad.client.outbox import Outbox
from postroad.client.settings import ClientSettings
from postroad.client.streams import Streams
from postroad.errors import PeerError
from postroad.events import BatchBuilder, EventBatch, empty_frame
from postroad.ids import MessageId
from postroad.kernel import sealed
from postroad.seam.effects import Send
from postroad.units import KIB, MIB, SECOND_US
from postroad.wire import frames as wire
from postroad.wire.frames import DEFAULT_LIMITS, Kind


def delivery(start: int, end: int, ticks: list[int]) -> EventBatch:
    """A delivery of pubend 5 whose rows have these ticks."""
    if not ticks:
        frame = empty_frame(kind=Kind.DELIVERY, pubend=5, start=start, end=end, channel=1)
        return EventBatch.parse(frame, DEFAULT_LIMITS)
    builder = BatchBuilder()
    for tick in ticks:
        builder.add(bytes(MessageId(1, 2, tick, 0)), "t", {}, str(tick).encode(), DEFAULT_LIMITS)
    batch = EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)
    data = bytearray(batch.select(None, kind=Kind.DELIVERY, pubend=5, start=start, end=end, channel=1))
    for at, tick in enumerate(ticks):
        data[48 + 48 * at + 16 : 48 + 48 * at + 24] = tick.to_bytes(8, "little")
    return EventBatch.parse(sealed(bytes(data)), DEFAULT_LIMITS)


@st.composite
def histories(draw: st.DrawFn) -> tuple[set[int], list[tuple[int, list[tuple[int, int, bool]]]]]:
    """The ticks with events, and per connection: where the broker begins, and its deliveries, maybe lost.

    A connection may begin behind what the last one had delivered (another broker) or ahead of it.
    """
    events = draw(st.sets(st.integers(1, 60), max_size=40))
    connections = []
    for _ in range(draw(st.integers(1, 4))):
        position = begin = draw(st.integers(0, 60))
        frames = []
        for _ in range(draw(st.integers(0, 5))):
            end = position + draw(st.integers(1, 12))
            frames.append((position, end, draw(st.integers(0, 5)) == 0))
            position = end
        connections.append((begin, frames))
    return events, connections


@given(histories())
@settings(max_examples=200, deadline=None)
def test_never_twice_never_out_of_order_never_lost_in_silence(
    history: tuple[set[int], list[tuple[int, list[tuple[int, int, bool]]]]],
) -> None:
    events, connections = history
    streams = Streams()
    seen: list[int] = []
    missing: set[int] = set()
    first: int | None = None
    for number, (_, frames) in enumerate(connections):
        if number:
            streams.tear()
        for start, end, lost in frames:
            if lost:
                frame = empty_frame(kind=Kind.DELIVERY, pubend=5, start=start, end=end, channel=1, lost=True)
                batch = EventBatch.parse(frame, DEFAULT_LIMITS)
            else:
                ticks = [tick for tick in sorted(events) if start < tick <= end]
                if not ticks and start % 2:
                    continue  # the broker need not say silence
                batch = delivery(start, end, ticks)
            first = start if first is None else first
            gap, rows = streams.take(batch, DEFAULT_LIMITS)
            streams.check()
            if gap is not None:
                span = set(range(gap.start + 1, gap.end + 1))
                assert not span & set(seen)
                missing |= span
            if rows is not None:
                seen += [int(tick) for tick in rows.headers["tick"]]
                assert [rows.payload(row) for row in range(rows.count)] == [
                    str(tick).encode() for tick in rows.headers["tick"]
                ]
    assert seen == sorted(set(seen))
    if seen and first is not None:
        # Up to the last event seen, every one since the stream was first heard of was given or is in a Gap.
        assert {tick for tick in events if first < tick <= seen[-1]} <= set(seen) | missing


actions = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 40)),
        st.tuples(st.just("send"), st.just(0)),
        st.tuples(st.just("accept"), st.integers(0, 5)),
        st.tuples(st.just("reject"), st.integers(0, 5)),
        st.tuples(st.just("reconnect"), st.integers(0, 2)),
        st.tuples(st.just("outage"), st.integers(0, 2)),
        st.tuples(st.just("credit"), st.integers(1, 4000)),
        st.tuples(st.just("clock"), st.integers(-900, 900)),
    ),
    max_size=60,
)
WINDOW = 4000  # of the twin's broker


@given(actions)
@example([("publish", 2), ("reconnect", 1), ("clock", -900), ("reconnect", 0), ("publish", 2)])
@settings(max_examples=200, deadline=None)
def test_everything_published_is_accepted_rejected_or_withdrawn_in_order(
    script: list[tuple[str, int]],
) -> None:
    """The twin is a broker that keeps a list; what is not above the last id of its publisher is a retry."""
    outbox = Outbox(max_bytes=MIB, max_events=500)
    published: list[bytes] = []
    pubend: list[bytes] = []  # what the broker took, without repeats
    last: dict[bytes, bytes] = {}  # publisher -> the last id of it that the broker took
    rejected: set[bytes] = set()
    sent: set[bytes] = set()  # once or more
    durable: dict[int, list[bytes]] = {}  # by the ordinals of their frames
    withdrawn: set[bytes] = set()
    in_flight: list[EventBatch] = []  # sent on this connection, not answered
    owed = 0  # bytes sent on this connection and not given back as credit

    def connect(publisher: int) -> None:
        nonlocal owed
        owed = 0
        in_flight.clear()
        assert outbox.opened(publisher=publisher, broker=7, limits=DEFAULT_LIMITS, credit=WINDOW) is None

    def give_back(size: int) -> None:
        nonlocal owed
        if size > 0:
            outbox.credit(size)
            owed -= size
        for wrong in (0, -1, owed + 1):
            with pytest.raises(PeerError):
                outbox.credit(wrong)

    def arrive(batch: EventBatch) -> None:
        for identity in (batch.id(row) for row in range(batch.count)):
            if identity > last.get(identity[:8], b""):
                last[identity[:8]] = identity
                pubend.append(identity)

    def send() -> None:
        nonlocal owed
        for frame in outbox.take():
            assert owed < WINDOW
            owed += len(frame)
            batch = EventBatch.parse(frame, DEFAULT_LIMITS, expect=Kind.PUBLISH)
            assert batch.channel == (in_flight[-1].channel + 1 if in_flight else batch.channel)
            in_flight.append(batch)
            ids = {batch.id(row) for row in range(batch.count)}
            assert not ids & withdrawn
            sent.update(ids)

    connect(1)
    now_ms = 1_000
    for action, amount in script:
        now_ms += 1
        if action == "publish":
            room = outbox.max_events - outbox.unsettled if outbox.room else 0
            for _ in range(min(amount, room)):
                kept = amount % 2 == 0
                published.append(outbox.add("t", None, b"payload", now_ms, durable=kept))
                if kept:
                    durable.setdefault(outbox.ordinal, []).append(published[-1])
        elif action == "send":
            send()
        elif action == "accept" and in_flight[:amount]:
            for batch in in_flight[:amount]:
                arrive(batch)
            outbox.accepted(in_flight[:amount][-1].channel)
            del in_flight[:amount]
        elif action == "reject" and in_flight:
            batch = in_flight.pop(0)
            rejected |= {batch.id(row) for row in range(batch.count)}
            assert outbox.rejected(batch.channel) == batch.count
        elif action in ("reconnect", "outage"):
            for batch in in_flight[:amount]:  # these arrived, but the answer was lost
                arrive(batch)
            outbox.closed()
            if action == "outage":
                unsent, tried = outbox.expire()
                assert not any(sent & set(durable[ordinal]) for ordinal in unsent)
                assert all(sent >= set(durable[ordinal]) for ordinal in tried)
                withdrawn |= {identity for ordinal in (*unsent, *tried) for identity in durable[ordinal]}
                outbox.check()
            connect(1 + amount % 2)
        elif action == "credit":
            give_back(min(amount, owed))
        elif action == "clock":
            now_ms = max(0, now_ms + amount)
        outbox.check()
        assert outbox.unsettled <= 500
    mark = outbox.mark()
    while not outbox.settled(mark):
        give_back(owed)
        send()
        for batch in in_flight:
            arrive(batch)
        outbox.accepted(in_flight[-1].channel)
        in_flight.clear()
    assert outbox.unsettled == 0
    # A rejected event may have arrived before, on a connection that broke before its answer came.
    assert [identity for identity in published if identity in pubend] == pubend
    assert set(published) == set(pubend) | rejected | withdrawn
    assert not withdrawn & rejected


class CountingBroker:
    """The broker's side of credit as docs/reference/protocol.md has it, one connection after another."""

    window = 64 * KIB
    frame_bytes = 17_000

    def __init__(self) -> None:
        settings = ClientSettings(addresses=("a:1",), name="test", window=self.window)
        self.core = ClientCore(settings, draw=lambda n: n - 1)
        self.now = 1_700_000_000 * SECOND_US
        self.core.start(self.now)
        self.connection = 0
        self.tick = 0
        self.held: list[int] = []  # sizes of what the application has and did not consume
        self.connect()
        self.act(self.core.subscribe(wire.Subscribe(number=0, topic="t", where=""))[1])

    def connect(self) -> None:
        self.connection += 1
        self.subscribed = False
        self.balance = self.owed = 0
        self.act(self.core.handle([fx.Opened(connection=self.connection)], self.now))
        self.say(
            wire.encode(
                wire.Welcome(
                    version=1,
                    name="b",
                    broker=7,
                    node=bytes(16),
                    boot=1,
                    cost=1,
                    limits=DEFAULT_LIMITS,
                    window=self.window,
                    time_us=self.now,
                )
            )
        )

    def reconnect(self) -> None:
        self.act(self.core.handle([fx.Closed(connection=self.connection)], self.now))
        self.now += 4 * SECOND_US
        self.act(self.core.handle([], self.now))
        self.connect()

    def say(self, frame: bytes) -> None:
        self.act(self.core.handle([fx.Received(connection=self.connection, frame=frame)], self.now))

    def act(self, effects: list[fx.Effect]) -> None:
        self.core.check()
        for effect in effects:
            if isinstance(effect, fx.Delivered) or (isinstance(effect, fx.Missed) and effect.size):
                self.held.append(effect.size)
            elif isinstance(effect, Send):
                self.heard(wire.decode(effect.data))

    def heard(self, message: wire.Message) -> None:
        if isinstance(message, wire.Hello):
            assert message.window == self.window
            self.balance = message.window
        elif isinstance(message, wire.Subscribe):
            assert not self.subscribed, "twice on one connection"
            self.subscribed = True
            self.say(wire.encode(wire.Subscribed(number=message.number)))
        elif isinstance(message, wire.Credit):
            assert 1 <= message.size <= self.owed, "credit for what was not sent"
            self.balance += message.size
            self.owed -= message.size

    def deliver(self) -> None:
        if not self.subscribed or self.balance <= 0:
            return
        self.tick += 1
        builder = BatchBuilder()
        payload = bytes(self.frame_bytes - 200)
        builder.add(bytes(MessageId(1, 2, self.tick, 0)), "t", {}, payload, DEFAULT_LIMITS)
        batch = EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS).with_ticks(
            self.tick, kind=Kind.DELIVERY, pubend=5, start=self.tick - 1, channel=1
        )
        self.pay(batch.data)

    def lose(self) -> None:
        if not self.subscribed or self.balance <= 0:
            return
        self.tick += 1
        start, end = self.tick - 1, self.tick
        self.pay(empty_frame(kind=Kind.DELIVERY, pubend=5, start=start, end=end, channel=1, lost=True))

    def pay(self, frame: bytes) -> None:
        self.balance -= len(frame)
        self.owed += len(frame)
        self.say(frame)

    def consume(self, at: int) -> None:
        if self.held:
            self.core.consumed(self.held.pop(at % len(self.held)))
            self.act(self.core.flush())


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("deliver"), st.integers(1, 5)),
            st.tuples(st.just("lose"), st.integers(1, 5)),
            st.tuples(st.just("consume"), st.integers(0, 9)),
            st.tuples(st.just("reconnect"), st.just(0)),
        ),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_credit_is_exact_on_every_connection_and_memory_is_bounded(script: list[tuple[str, int]]) -> None:
    broker = CountingBroker()
    for action, amount in script:
        if action == "deliver":
            for _ in range(amount):
                broker.deliver()
        elif action == "lose":
            for _ in range(amount):
                broker.lose()
        elif action == "consume":
            broker.consume(amount)
        else:
            broker.reconnect()
        assert sum(broker.held) < 2 * broker.window + broker.frame_bytes
    while broker.held:
        broker.consume(0)
    assert broker.subscribed
    assert broker.owed < broker.window // 4, "all but the last quarter came back"
