"""The stream protocol at its edges: odd orders, hostile peers, full links, forgotten caches, odd clocks.

Frames are carried by hand, by tests/worlds/brokers.py. A `Fake` is a broker played by the test: it shakes
hands, advertises itself and says whatever the test wants.
"""

from __future__ import annotations

import pytest
from tests.worlds.brokers import Client, Net
from tests.worlds.neighbours import Fake, wants

from postroad.broker.core import Broker
from postroad.config import BrokerConfig
from postroad.events.batch import BatchBuilder, empty_frame
from postroad.ids import Identity, IdSource, volatile_pubend
from postroad.overlay.topology import MAX_SEQUENCE
from postroad.seam.inputs import Closed, Opened, Received
from postroad.streams.ends import STEP_US
from postroad.streams.knowledge import MAX_TICK, Segment
from postroad.streams.routing import MAX_AHEAD_US
from postroad.streams.settings import StreamConfig
from postroad.units import KIB, SECOND_US
from postroad.wire.frames import (
    DEFAULT_LIMITS,
    MAX_CONTROL_BYTES,
    Advertisement,
    Attach,
    Credit,
    Detach,
    InterestPull,
    InterestUpdate,
    Kind,
    Message,
    Nack,
    Pong,
    Refuse,
    Silence,
    Stamp,
    Subscribed,
    TopologyUpdate,
    encode,
    frame_kind,
)

MAX_I64 = (1 << 63) - 1
MAX_U64 = (1 << 64) - 1


class Patient(Client):
    """A client that stays for hours: it answers pings."""

    def take(self, frame: bytes) -> None:
        if frame_kind(frame) == Kind.PING:
            self.send(encode(Pong(time_us=0, at_us=0)))
        else:
            super().take(frame)


def knowledge(pubend: int, start: int, end: int, ticks: list[int], *, stamp: int = 0) -> bytes:
    """A KNOWLEDGE frame with an event at each of these ticks; the payload is the tick."""
    builder, source = BatchBuilder(), IdSource(1, pubend >> 32)
    for tick in ticks:
        builder.add(source.next(tick), "t", {}, str(tick).encode(), DEFAULT_LIMITS)
    frame = bytearray(builder.finish(kind=Kind.KNOWLEDGE, channel=stamp))
    frame[12:24] = bytes(4) + pubend.to_bytes(8, "little")  # without a checksum
    frame[24:32] = start.to_bytes(8, "little", signed=True)
    frame[32:40] = end.to_bytes(8, "little", signed=True)
    for row, tick in enumerate(ticks):
        at = 48 + 48 * row + 16
        frame[at : at + 8] = tick.to_bytes(8, "little", signed=True)
    return bytes(frame)


def restart(net: Net, at: int, **streams: int) -> None:
    """A broker with other limits of its streams."""
    net.boots[at] += 1
    identity = Identity(
        number=at + 1, node=bytes([at + 1]) * 16, name=f"b{at}", boot=net.boots[at], starts=net.boots[at]
    )
    config = BrokerConfig(streams=StreamConfig(**streams))
    net.brokers[at] = Broker(config, identity, draw=lambda n: n // 2, now_us=net.now_us)


def core(net: Net, at: int) -> Broker:
    broker = net.brokers[at]
    assert broker is not None
    return broker


def served(net: Net, at: int = 0) -> bool:
    """Whether an honest client of that broker still gets what another one publishes."""
    subscriber, publisher = Client(net, at), Client(net, at)
    subscriber.subscribe(1, "here")
    publisher.publish("here", "x")
    return bool(subscriber.got() == ["x"])


# ---- what a peer may not say


DEAD = volatile_pubend(1, 0)
ODD: list[Message] = [
    Silence(spans=((volatile_pubend(2, 1), 0, MAX_U64, 0),)),
    Silence(spans=((volatile_pubend(2, 1), -5, 7, 0),)),
    Silence(spans=((volatile_pubend(2, 1), MAX_I64, MAX_I64, 0),)),
    Attach(origin=1, known={DEAD: MAX_I64}),
    Attach(origin=1, known={DEAD: MAX_U64}),
    Attach(origin=1, known={DEAD: -1}),
    Attach(origin=2, known={volatile_pubend(2, 5): MAX_U64}),
    Attach(origin=-1, known={-1: 5}),
    Attach(origin=MAX_U64, known={}),
    Nack(pubend=DEAD, spans=((MAX_U64 - 1, MAX_U64),), need={}),
    Nack(pubend=DEAD, spans=((-(1 << 63), 5),), need={}),
    Nack(pubend=volatile_pubend(1, 1), spans=((-1, MAX_U64),), need={}),
    Nack(pubend=volatile_pubend(1, 1), spans=((0, MAX_U64),), need={}),
    Stamp(number=-1, versions={}),
]


@pytest.mark.parametrize("message", ODD, ids=str)
def test_ticks_and_numbers_out_of_range_cost_only_their_sender(message: Message) -> None:
    net = Net(1)
    subscriber, publisher = Client(net, 0), Client(net, 0)
    subscriber.subscribe(1, "t")
    fake = Fake(net, 0, 2)
    fake.advertise()
    fake.say(wants(2), Attach(origin=1, known={}))
    fake.send(knowledge(fake.pubend, 5, 9, [7]))
    publisher.publish("t", "a")
    fake.say(message)
    assert fake.has(Refuse)
    assert served(net)
    net.wait(2)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("span", [(0, MAX_I64), (-MAX_I64, 5), (MAX_I64 - 1, MAX_I64)])
def test_knowledge_about_ticks_that_cannot_be_is_refused(span: tuple[int, int], lost: bool) -> None:
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise()
    fake.send(knowledge(fake.pubend, 5, 9, [7]))
    fake.send(
        empty_frame(kind=Kind.KNOWLEDGE, pubend=fake.pubend, start=span[0], end=span[1], channel=0, lost=lost)
    )
    assert fake.has(Refuse)
    assert served(net)


@pytest.mark.parametrize(
    ("form", "ahead", "durable"),
    [
        (form, ahead, durable)
        for form in ("silence", "knowledge", "lost", "event")
        for ahead in (2 * MAX_AHEAD_US, MAX_TICK - (1 << 60), MAX_TICK)
        for durable in (False, True)
        if durable or (form, ahead) != ("lost", MAX_TICK)  # which is how the end of a plain stream is said
    ],
)
def test_ticks_far_ahead_stop_no_stream(form: str, ahead: int, durable: bool) -> None:
    """One flipped bit of a span's end did that, for good and across restarts: all that came was taken for
    known. It is not believed, and what comes is delivered."""
    net = Net(1)
    subscriber = Client(net, 0)
    subscriber.subscribe(1, "t")
    fake = Fake(net, 0, 2)
    pubend = 2 << 32 if durable else fake.pubend
    fake.advertise(pubends=(pubend,))
    now = net.now_us
    stamp = Stamp(number=1, versions={1: 1 << 40})
    fake.say(stamp)
    fake.send(knowledge(pubend, now, now + 2, [now + 1], stamp=1))
    end = min(now + ahead, MAX_TICK)
    match form:
        case "silence":
            fake.say(Silence(spans=((pubend, now + 2, end, 1),)))
        case "event":
            fake.send(knowledge(pubend, now + 2, end, [end], stamp=1))
        case _:
            fake.send(
                empty_frame(
                    kind=Kind.KNOWLEDGE, pubend=pubend, start=now + 2, end=end, channel=1, lost=form == "lost"
                )
            )
    before = subscriber.got()
    fake.send(knowledge(pubend, now + 2, now + 9, [now + 7], stamp=1))
    assert subscriber.got() == [*before, str(now + 7)]
    assert core(net, 0).metrics()["ticks_ahead_total"] == 1
    assert served(net)


def test_two_brokers_with_one_number_cannot_both_be_linked() -> None:
    """Neither has advertised itself when the other comes, so link state knows of no conflict yet."""
    net = Net(1)
    first = Fake(net, 0, 2, node=b"a" * 16)
    second = Fake(net, 0, 2, node=b"b" * 16)
    assert second.has(Refuse)
    assert not first.has(Refuse)
    net.give(0, [Closed(second.connection)])
    net.give(0, [Closed(first.connection)])
    assert served(net)


def test_one_broker_more_than_can_be_linked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postroad.broker.core.MAX_NEIGHBOURS", 5)
    monkeypatch.setattr("postroad.overlay.topology.MAX_NEIGHBOURS", 5)
    net = Net(1)
    fakes = [Fake(net, 0, number) for number in range(2, 7)]
    assert not any(fake.has(Refuse) for fake in fakes)
    assert Fake(net, 0, 7).has(Refuse)
    assert served(net)
    net.give(0, [Closed(fakes[0].connection)])
    assert not Fake(net, 0, 8).has(Refuse)


@pytest.mark.parametrize("boot", [(1 << 32) - 1, (1 << 31) - 1])
@pytest.mark.parametrize("sequence", [MAX_SEQUENCE - 1, MAX_SEQUENCE])
def test_an_advertisement_in_our_name_cannot_use_up_our_sequence(boot: int, sequence: int) -> None:
    net = Net(1)
    fake, other = Fake(net, 0, 2), Fake(net, 0, 3)
    forged = Advertisement(
        broker=1,
        node=bytes([1]) * 16,
        name="b0",
        boot=boot,
        sequence=sequence,
        neighbours=(),
        pubends=(),
    )
    fake.say(TopologyUpdate(advertisements=(forged,)))
    net.give(0, [Closed(other.connection)])
    net.give(0, [Closed(fake.connection)])
    net.wait(1)
    net.now_us += 3_600 * SECOND_US
    net.wait(1)
    assert served(net)


def test_advertisements_before_one_that_is_refused_are_passed_on() -> None:
    net = Net(1)
    fake, witness = Fake(net, 0, 2), Fake(net, 0, 3)
    good = Advertisement(broker=9, node=b"9" * 16, name="nine", boot=1, sequence=1, neighbours=(), pubends=())
    bad = Advertisement(
        broker=8, node=b"8" * 16, name="eight", boot=-1, sequence=1, neighbours=(), pubends=()
    )
    fake.say(TopologyUpdate(advertisements=(good, bad)))
    assert fake.has(Refuse)
    assert good in [ad for update in witness.of(TopologyUpdate) for ad in update.advertisements]


def test_more_pubends_than_streams_are_followed_do_not_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("postroad.streams.streams.MAX_STREAMS", 50)
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise()
    fake.advertise(pubends=tuple(volatile_pubend(2, boot) for boot in range(1, 100)))
    assert served(net)
    assert core(net, 0).metrics()["streams"] <= 50


def test_pubends_that_are_not_its_own_are_not_taken_from_a_broker() -> None:
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise(pubends=(volatile_pubend(1, 7), volatile_pubend(2, 1), volatile_pubend(3, 7)))
    fake.say(Silence(spans=((fake.pubend, 5, 9, 0),)))
    subscriber = Client(net, 0)
    subscriber.subscribe(1, "t")
    version = core(net, 0)._rooms.interest.own_version
    fake.say(Stamp(number=1, versions={1: version}), Silence(spans=((fake.pubend, 9, 12, 1),)))
    assert [message.missing for message in subscriber.messages if isinstance(message, Subscribed)] == [()]


def test_a_table_pulled_many_times_in_one_message_is_sent_once() -> None:
    net = Net(1)
    Client(net, 0).subscribe(1, "t")
    fake = Fake(net, 0, 2)
    before = len(fake.of(InterestUpdate))
    fake.say(InterestPull(owners=(1,) * 10_000))
    assert len(fake.of(InterestUpdate)) == before + 1


def test_a_nack_names_only_owners_that_matter() -> None:
    """What it names is kept and sent on, so a nack full of owners that ask for nothing costs nothing."""
    net = Net(1)
    fake, asker = Fake(net, 0, 2), Fake(net, 0, 3)
    fake.advertise()
    fake.say(Silence(spans=((fake.pubend, 5, 9, 0), (fake.pubend, 20, 30, 0))))
    asker.say(Attach(origin=2, known={fake.pubend: 5}))
    asker.say(Nack(pubend=fake.pubend, spans=((1, 5),), need=dict.fromkeys(range(10_000), 0)))
    assert [nack.need for nack in fake.of(Nack) if nack.spans == ((1, 5),)] == [{}]
    assert not fake.has(Refuse)


def test_stamps_and_attaches_have_limits() -> None:
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.say(Stamp(number=1, versions=dict.fromkeys(range(20_000), 1)))
    assert fake.has(Refuse)
    fake = Fake(net, 0, 3)
    for origin in range(100, 12_000):
        fake.say(Attach(origin=origin, known={}))
        if fake.has(Refuse):
            break
    assert fake.has(Refuse)
    assert served(net)


# ---- what neighbours are told


def test_rows_are_chosen_from_what_is_passed_on() -> None:
    """A frame may straddle the newest tick heard of; only its later part is news for those further down."""
    net = Net(1)
    fake, below = Fake(net, 0, 2), Fake(net, 0, 3)
    fake.advertise()
    below.advertise()
    below.say(wants(3), Attach(origin=2, known={fake.pubend: 100}))
    fake.send(knowledge(fake.pubend, 90, 110, [92, 95, 105, 107]))
    got = [event.payload for batch in below.batches for event in batch.events()]
    assert got == [b"105", b"107"]


def test_the_end_of_a_pubend_is_passed_on_by_a_broker_that_had_to_ask_for_it() -> None:
    """It had heard how far the stream goes before it knew what is there; those below had not."""
    net = Net(1)
    fake, below = Fake(net, 0, 2), Fake(net, 0, 3)
    fake.advertise()
    below.advertise()
    fake.say(Silence(spans=((fake.pubend, 90, 100, 0),)))
    below.say(wants(3), Attach(origin=2, known={fake.pubend: 100}))
    fake.say(Silence(spans=((fake.pubend, 120, 120, 0),)))
    assert [nack.spans for nack in fake.of(Nack)] == [((100, 120),)]
    fake.send(empty_frame(kind=Kind.KNOWLEDGE, pubend=fake.pubend, start=100, end=120, channel=0, lost=True))
    assert [(batch.start, batch.end, batch.lost) for batch in below.batches] == [(100, 120, True)]


def test_a_stream_met_after_the_link_came_up_is_told_from_its_beginning_whoever_attaches_when() -> None:
    """An attach may be lost and come again seconds later; what came meanwhile is for the neighbour too."""
    net = Net(1)
    fake, early, late = Fake(net, 0, 2), Fake(net, 0, 3), Fake(net, 0, 4)
    for one in (fake, early, late):
        one.advertise()
    early.say(wants(3), Attach(origin=2, known={}))
    late.say(wants(4))
    fake.send(knowledge(fake.pubend, 90, 100, [95]))
    fake.send(knowledge(fake.pubend, 100, 110, [105]))
    late.say(Attach(origin=2, known={}))
    for below in (early, late):
        assert below.of(Silence)[0].spans == ((fake.pubend, 90, 90, 0),)
        assert [event.payload for batch in below.batches for event in batch.events()] == [b"95", b"105"]


def test_a_late_attach_hears_where_the_stream_was_when_routes_made_it_due() -> None:
    """Subscriptions made before begin there: the attach may have been lost, what came meanwhile is theirs."""
    net = Net(1)
    fake, publisher = Fake(net, 0, 2), Client(net, 0)
    own = volatile_pubend(1, 1)
    fake.advertise()
    fake.say(wants(2))
    net.wait(1)
    then = net.now_us
    net.wait(4)
    publisher.publish("t", "a")
    net.wait(5)
    fake.say(Attach(origin=1, known={own: 100}))
    assert [event.payload for batch in fake.batches for event in batch.events()] == [b"a"]
    assert fake.of(Silence)[0].spans[0] == (own, then, then, 0)
    heard = len(fake.of(Silence))
    fake.say(Attach(origin=1, known={own: 100}))  # nothing was lost that it could have missed
    assert fake.of(Silence)[heard].spans[0][2] > then + SECOND_US


def test_silences_wait_for_no_more_stamps_than_are_remembered() -> None:
    """A silence names a stamp; it must be said before so many more are defined that its own is forgotten."""
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise()
    below = Fake(net, 0, 3)
    below.advertise()
    fake.say(Silence(spans=((fake.pubend, 0, 1, 0),)))
    for number in range(1, 1_200):
        fake.say(
            Stamp(number=number, versions={3: number}),
            Silence(spans=((fake.pubend, number, number + 1, number),)),
        )
    below.say(wants(3, version=1 << 20), Attach(origin=2, known={fake.pubend: 1}))
    known: dict[int, None] = {0: None}
    for message in below.messages:
        if isinstance(message, Stamp):
            known[message.number] = None
            if len(known) > 1_025:
                del known[next(number for number in known if number)]
        elif isinstance(message, Silence):
            assert all(span[3] in known for span in message.spans)


def test_a_silence_frame_is_never_too_long() -> None:
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise()
    below = Fake(net, 0, 3)
    below.advertise()
    fake.say(Stamp(number=1, versions={3: 1}), Stamp(number=2, versions={3: 2}))
    base = 1 << 50
    for first in range(0, 60_000, 10_000):
        fake.say(
            Silence(
                spans=tuple(
                    (fake.pubend, base + at, base + at + 1, 1 + at % 2) for at in range(first, first + 10_000)
                )
            )
        )
    below.say(wants(3), Attach(origin=2, known={fake.pubend: base}))
    assert max(below.sizes) <= MAX_CONTROL_BYTES
    assert sum(len(message.spans) for message in below.of(Silence)) >= 60_000


def test_a_neighbour_that_is_fed_nothing_because_all_is_forgotten_learns_how_far_the_stream_is() -> None:
    net = Net(1)
    restart(net, 0, cache_bytes=100)
    fake = Fake(net, 0, 2)
    fake.advertise()
    for tick in range(10, 2_000, 10):
        fake.send(knowledge(fake.pubend, tick - 10, tick, [tick]))
    below = Fake(net, 0, 3)
    below.advertise()
    below.say(wants(3), Attach(origin=2, known={fake.pubend: 50}))
    heard = [span[2] for message in below.of(Silence) for span in message.spans]
    heard += [batch.end for batch in below.batches]
    assert max(heard, default=0) == 1_990


def test_the_end_of_a_pubend_reaches_a_neighbour_that_was_out_of_credit() -> None:
    net = Net(1)
    publisher = Client(net, 0)
    fake = Fake(net, 0, 2, window=64 * KIB, gives=False)
    fake.advertise()
    fake.say(wants(2), Attach(origin=1, known={}))
    for _ in range(9):
        publisher.publish("t", "x" * 8 * KIB)
    dead = volatile_pubend(1, 0)
    fake.say(Attach(origin=1, known={dead: 77, volatile_pubend(1, 1): net.now_us}))
    assert not any(batch.lost for batch in fake.batches)
    spans = [span for message in fake.of(Silence) for span in message.spans if span[0] == dead]
    assert len(spans) == 1
    assert spans[0][1] == spans[0][2] > 77  # from this it knows that something is missing, and asks
    fake.say(Credit(size=sum(len(batch.data) for batch in fake.batches)))
    fake.say(Nack(pubend=dead, spans=((77, spans[0][1]),), need={}))
    lost = [(batch.start, batch.end) for batch in fake.batches if batch.lost]
    assert lost == [(77, lost[0][1]), (lost[0][1], spans[0][1])]
    assert 77 < lost[0][1] <= net.now_us + STEP_US, "lost until this process began"


def test_all_that_is_asked_of_a_dead_pubend_is_answered_at_once() -> None:
    """Also when the clock of the next process is behind that of the last one."""
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise()
    fake.say(Attach(origin=1, known={}))
    late = net.now_us + 50 * SECOND_US
    fake.say(Nack(pubend=volatile_pubend(1, 0), spans=((late, late + 10), (late + 20, late + 500)), need={}))
    assert [(one.start, one.end) for one in fake.batches] == [
        (late, late + STEP_US),
        (late + STEP_US, MAX_TICK),
    ]


def test_a_nack_about_a_stream_that_was_dropped_here_is_taken_up() -> None:
    net = Net(1)
    fake, below = Fake(net, 0, 2), Fake(net, 0, 3)
    fake.advertise()
    below.advertise()
    old = volatile_pubend(2, 0)
    below.say(Attach(origin=2, known={}))
    below.say(Nack(pubend=old, spans=((50, 60),), need={}))
    assert any(old in attach.known for attach in fake.of(Attach))
    fake.send(empty_frame(kind=Kind.KNOWLEDGE, pubend=old, start=50, end=60, channel=0, lost=True))
    assert [(batch.start, batch.end) for batch in below.batches if batch.lost] == [(50, 60)]


def test_a_link_that_goes_and_comes_in_one_turn() -> None:
    net = Net(2, [(0, 1)])
    subscriber, publisher = Client(net, 1), Client(net, 0)
    subscriber.subscribe(1, "t")
    publisher.publish("t", "a")
    for end, far in list(net.ends.items()):
        if end[0] == 0 and not isinstance(far, Client):
            del net.ends[end], net.ends[far]
            near, new = net.last_connection + 1, net.last_connection + 2
            net.last_connection += 2
            net.ends[0, near], net.ends[1, new] = (1, new), (0, near)
            net.give(1, [Opened(new), Closed(far[1])])
            net.give(0, [Closed(end[1]), Opened(near, dialled="b1")])
    publisher.publish("t", "b")
    net.wait(2)
    assert subscriber.got() == ["a", "b"]


def test_an_attach_is_said_again_until_something_is_heard_of_the_origin() -> None:
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise()
    assert len(fake.of(Attach)) == 1
    net.wait(7)
    assert len(fake.of(Attach)) == 2
    fake.say(Silence(spans=((fake.pubend, 5, 5, 0),)))
    net.wait(7)
    assert len(fake.of(Attach)) == 2


def test_a_pubend_that_ended_is_asked_about_until_its_end_is_known() -> None:
    net = Net(1)
    subscriber = Client(net, 0)
    subscriber.subscribe(1, "t")
    version = core(net, 0)._rooms.interest.own_version
    fake = Fake(net, 0, 2)
    fake.advertise()
    then = net.now_us
    fake.say(Stamp(number=1, versions={1: version}), Silence(spans=((fake.pubend, then - 9, then, 1),)))
    fake.advertise(pubends=(volatile_pubend(2, 2),))
    fake.say(Silence(spans=((volatile_pubend(2, 2), then, then + 1, 1),)))
    net.wait(8)
    spans = [nack.spans for nack in fake.of(Nack) if nack.pubend == fake.pubend]
    assert spans
    assert all(one[0][0] == then and one[0][1] > then + SECOND_US for one in spans)
    fake.send(
        empty_frame(kind=Kind.KNOWLEDGE, pubend=fake.pubend, start=then, end=net.now_us, channel=0, lost=True)
    )
    assert subscriber.got() == ["GAP"]
    net.wait(1)
    before = len(fake.of(Nack))
    net.wait(3)
    assert [nack for nack in fake.of(Nack)[before:] if nack.pubend == fake.pubend] == []


def leap(net: Net, seconds: int) -> None:
    for _ in range(seconds // 10):
        net.now_us += 10 * SECOND_US
        for at in range(len(net.brokers)):
            net.give(at, [])


def test_a_broker_that_one_has_forgotten_and_another_has_not_comes_back() -> None:
    """The first hears of it by way of the second, which sees no reason to send it tables again."""
    net = Net(1)
    leap(net, 200)  # so that the brokers do not forget at the same time
    net.brokers += [None, None]
    net.boots += [0, 0]
    net.start(1)
    net.start(2)
    net.link(1, 2)
    Client(net, 2).publish("t", "early")
    net.link(0, 1)
    net.wait(1)
    near, far = Patient(net, 0), Patient(net, 2)
    near.subscribe(1, "t")
    far.subscribe(1, "t")
    near_publisher, far_publisher = Patient(net, 0), Patient(net, 2)
    near_publisher.publish("t", "a")
    far_publisher.publish("t", "b")
    net.cut(1, 2)
    while len(core(net, 0)._rooms.topology.advertisements()) == 3:
        leap(net, 10)
    assert len(core(net, 1)._rooms.topology.advertisements()) == 3
    net.link(1, 2)
    net.wait(3)
    near_publisher.publish("t", "c")
    far_publisher.publish("t", "d")
    net.wait(3)
    assert [one for one in near.got() if one != "GAP"] == ["a", "b", "c", "d"]
    assert far.got() == ["a", "b", "c", "d"]


def test_a_table_that_a_nack_shows_to_be_missing_is_pulled_once() -> None:
    net = Net(1)
    fake, asker = Fake(net, 0, 2), Fake(net, 0, 3)
    fake.advertise()
    asker.say(Attach(origin=1, known={}))
    before = len(asker.of(InterestPull))
    for _ in range(3):
        asker.say(Nack(pubend=volatile_pubend(1, 1), spans=((0, net.now_us),), need={3: 7}))
    assert [pull.owners for pull in asker.of(InterestPull)[before:]] == [(3,)]


def test_we_do_not_vouch_for_a_filter_of_our_own_subscribers() -> None:
    """What only they want is not among the rows for others, so nobody may take it for silence."""
    net = Net(1)
    Client(net, 0).subscribe(1, "here")
    version = core(net, 0)._rooms.interest.own_version
    asker = Fake(net, 0, 3)
    asker.advertise()
    asker.say(wants(3), Attach(origin=1, known={}))
    Client(net, 0).publish("here", "x")
    asker.say(Nack(pubend=volatile_pubend(1, 1), spans=((0, net.now_us),), need={1: version}))
    assert all(1 not in stamp.versions for stamp in asker.of(Stamp))


def test_a_gap_that_stays_open_costs_no_more_with_every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    original = Segment.meets

    def counted(self: Segment, need: dict[int, int]) -> bool:
        nonlocal looks
        looks += 1
        return original(self, need)

    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise()
    fake.send(knowledge(fake.pubend, 1, 5, [5]))
    monkeypatch.setattr(Segment, "meets", counted)
    frames = [knowledge(fake.pubend, tick, tick + 1, [tick + 1]) for tick in range(10, 1_010)]
    for frame in frames:
        fake.send(frame)
    assert looks < 10 * len(frames)
    assert [nack.spans for nack in fake.of(Nack)] == [((5, 10),)]
    net.wait(1)
    assert len(fake.of(Nack)) in (2, 3)  # it asks again now and then


def test_gaps_are_looked_for_once_a_turn() -> None:
    """All that came in one turn is taken in first: one nack asks for what is missing then, and no more."""
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise()
    fake.send(knowledge(fake.pubend, 1, 5, [5]))
    fake.send(*(knowledge(fake.pubend, tick, tick + 5, [tick + 1]) for tick in range(10, 100, 10)))
    assert [nack.spans for nack in fake.of(Nack)] == [tuple((tick - 5, tick) for tick in range(10, 100, 10))]
    # What one frame leaves open and a later one of the same turn fills is never asked for.
    fake.send(knowledge(fake.pubend, 200, 210, [205]), knowledge(fake.pubend, 95, 200, [150]))
    assert len(fake.of(Nack)) == 1


def test_messages_in_odd_order_are_taken() -> None:
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.say(Detach(origin=77), Nack(pubend=77 << 32, spans=((0, 5),), need={}), Attach(origin=77, known={}))
    fake.say(Attach(origin=77, known={77 << 32: 4}), Detach(origin=77), Detach(origin=77))
    fake.send(knowledge(77 << 32, 0, 9, [4]))
    net.give(0, [Closed(fake.connection), Received(fake.connection, encode(Detach(origin=77)))])
    assert served(net)


def test_the_end_of_a_dead_pubend_does_not_answer_for_the_living_ones() -> None:
    """An attach that was lost is said again, though a new process answered for the old one meanwhile."""
    net = Net(1)
    fake = Fake(net, 0, 2)
    fake.advertise()
    old = volatile_pubend(2, 0)
    before = len(fake.of(Attach))
    fake.send(empty_frame(kind=Kind.KNOWLEDGE, pubend=old, start=50, end=MAX_TICK, channel=0, lost=True))
    net.wait(8)
    assert len(fake.of(Attach)) > before
    fake.say(Silence(spans=((fake.pubend, 50, 60, 0),)))
    before = len(fake.of(Attach))
    net.wait(8)
    assert len(fake.of(Attach)) == before
