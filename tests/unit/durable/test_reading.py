"""Readers of a range of ticks, through whole brokers with disks in memory (P1)."""

from __future__ import annotations

import json
import random

import pytest
from tests.worlds.brokers import Client, Net, numbers
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import retire
from tests.worlds.history_brokers import HistoryNet

from postroad.durable.publisher import pubend as durable_pubend
from postroad.durable.subscriber.catchup import ASK_AGAIN_US
from postroad.durable.subscriber.reading import PATIENCE_US
from postroad.events.batch import EventBatch
from postroad.ids import HISTORY, pubend_text
from postroad.seam.inputs import Closed
from postroad.units import SECOND_US
from postroad.wire.frames import (
    DEFAULT_LIMITS,
    Credit,
    Ended,
    Kind,
    Reply,
    Request,
    Subscribe,
    Subscribed,
    Unsubscribe,
    encode,
    frame_kind,
)

PUBEND = pubend_text(1 << 32)


class Reader(DurableClient):
    def read(self, start: int, end: int, *, topic: str = "t", pubend: str = PUBEND, where: str = "") -> None:
        token = json.dumps({pubend: start}) if start else ""
        until = json.dumps({pubend: end})
        self.send(encode(Subscribe(number=1, topic=topic, where=where, token=token, until=until)))

    def heads(self) -> dict[str, int]:
        self.send(encode(Request(number=1, what="heads")))
        replies = [message for message in self.messages if isinstance(message, Reply)]
        return dict(json.loads(replies[-1].body)["heads"])

    def ended(self) -> list[str]:
        return [message.code for message in self.messages if isinstance(message, Ended)]


def history(net: DurableNet) -> tuple[DurableClient, list[int]]:
    """Forty events, and the ticks of the head after every ten."""
    publisher, watch = DurableClient(net, 0), Reader(net, 0)
    net.wait(1)
    marks = [watch.heads()[PUBEND]]
    for first in range(0, 40, 10):
        publisher.send(publisher.durable("t", *numbers(first, first + 10)), publisher.durable("u", "no"))
        net.wait(1)
        marks.append(watch.heads()[PUBEND])
    return publisher, marks


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_range_is_read_at_any_broker_and_then_over(at: int) -> None:
    net = DurableNet(3, [(0, 1), (1, 2)])
    _, marks = history(net)
    reader = Reader(net, at)
    assert reader.heads()[PUBEND] >= marks[-1]
    reader.read(marks[1], marks[3])
    net.wait(3)
    assert reader.got() == numbers(10, 30)
    assert reader.ended() == [""]
    for broker in net.brokers:
        broker.check()


@pytest.mark.parametrize("at", [0, 2])
def test_everything_is_read_when_the_start_is_not_named(at: int) -> None:
    net = DurableNet(3, [(0, 1), (1, 2)])
    _, marks = history(net)
    reader = Reader(net, at)
    reader.read(0, marks[-1])
    net.wait(5)
    assert reader.got() == numbers(0, 40)
    assert reader.ended() == [""]


@pytest.mark.parametrize("at", [0, 2])
def test_a_range_that_ends_in_the_future_is_followed(at: int) -> None:
    net = DurableNet(3, [(0, 1), (1, 2)])
    publisher, marks = history(net)
    reader = Reader(net, at)
    reader.read(marks[3], net.now_us + 5_000_000)
    net.wait(2)
    assert reader.ended() == []
    publisher.send(publisher.durable("t", *numbers(40, 45)))
    net.wait(6)
    publisher.send(publisher.durable("t", "late"))
    net.wait(2)
    assert reader.got() == numbers(30, 45)
    assert reader.ended() == [""]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_range_that_ends_in_the_future_is_over_then_though_nothing_comes(at: int) -> None:
    """Nobody has durable subscriptions, so the pubend says that it is silent because it is asked."""
    net = DurableNet(3, [(0, 1), (1, 2)])
    _, marks = history(net)
    reader = Reader(net, at)
    reader.read(marks[-1], net.now_us + 2_000_000)
    net.wait(1)
    assert reader.ended() == []
    net.wait(5)
    assert (reader.got(), reader.ended()) == ([], [""])


@pytest.mark.parametrize("seed", range(6))
def test_a_range_is_read_whole_whatever_its_broker_has_heard_of_it(seed: int) -> None:
    """Readers of other parts, and other topics, come and go at that broker, so that its interest changes."""
    net = DurableNet(3, [(0, 1), (1, 2)])
    chance = random.Random(seed)
    publisher, watch = DurableClient(net, 0), Reader(net, 0)
    net.wait(1)
    marks, readers, unheard = [watch.heads()[PUBEND]], [], 0
    for count in range(10):
        publisher.send(
            publisher.durable("t", *numbers(10 * count, 10 * count + 10)), publisher.durable("u", "no")
        )
        marks.append(watch.heads()[PUBEND])
        first, last = sorted(chance.sample(range(len(marks)), 2))
        reader, passer = Reader(net, 2), Reader(net, 2)
        unheard += reader.heads()[PUBEND] < marks[last]
        passer.read(marks[0], marks[-1], topic=chance.choice(["t", "u", "#"]))
        reader.read(marks[first], marks[last])
        readers.append((reader, numbers(10 * first, 10 * last)))
        if chance.random() < 0.5:
            passer.send(encode(Unsubscribe(number=1)))
        net.wait(chance.choice([0.1, 0.2, 0.5, 1.2]))
    net.wait(3)
    assert unheard
    assert [(reader.got(), reader.ended()) for reader, _ in readers] == [(part, [""]) for _, part in readers]


def test_what_was_released_is_a_gap() -> None:
    net = DurableNet(1)
    _, marks = history(net)
    net.disks[0].chopped[1 << 32] = marks[2]
    net.kill(0)
    net.start(0)
    net.wait(1)
    reader = Reader(net, 0)
    reader.read(marks[1], marks[4])
    net.wait(2)
    assert [(batch.start, batch.end) for batch in reader.batches if batch.lost] == [(marks[1], marks[2])]
    assert reader.got() == ["GAP", *numbers(20, 40)]


class SlowReader(Reader):
    """Gives credit back when told."""

    def take(self, frame: bytes) -> None:
        if frame_kind(frame) == Kind.DELIVERY:
            self.batches.append(EventBatch.parse(frame, DEFAULT_LIMITS))
        else:
            super().take(frame)


def test_a_reader_without_credit_waits() -> None:
    net = DurableNet(1)
    publisher = DurableClient(net, 0)
    for number in range(100):
        publisher.send(publisher.durable("t", f"{number}" + "x" * 100_000))
    net.wait(1)
    reader = SlowReader(net, 0)
    reader.read(0, reader.heads()[PUBEND])
    consumed, rounds = 0, 0
    while not reader.ended():
        net.wait(1)
        received = sum(len(batch.data) for batch in reader.batches)
        assert received > consumed
        reader.send(encode(Credit(size=received - consumed)))
        consumed = received
        rounds += 1
    assert rounds > 1
    assert [text.rstrip("x") for text in reader.got()] == numbers(0, 100)


def test_a_pubend_nobody_knows_and_a_name_are_refused() -> None:
    net = DurableNet(1)
    net.wait(1)
    reader = Reader(net, 0)
    reader.read(0, 10, pubend=pubend_text(99 << 32))
    assert reader.ended() == ["unavailable"]
    reader.send(encode(Subscribe(number=2, topic="t", where="", durable="s", until=json.dumps({PUBEND: 9}))))
    assert reader.ended() == ["unavailable", "usage"]


def test_a_range_in_a_future_that_nobody_waits_for_is_refused() -> None:
    """As a token of the future is: it is a mistake, and would be a reader that never ends."""
    net = DurableNet(1)
    _, marks = history(net)
    reader = Reader(net, 0)
    reader.read(marks[0], net.now_us + 86_400_000_000)
    assert reader.ended() == ["usage"]
    net.brokers[0].check()  # type: ignore[union-attr]


def test_a_reader_that_goes_leaves_nothing_behind() -> None:
    net = DurableNet(2, [(0, 1)])
    history(net)
    reader = Reader(net, 1)
    version = net.brokers[1].status(net.now_us)["metrics"]
    reader.read(0, net.now_us + 60_000_000)
    net.wait(1)
    assert [m.number for m in reader.messages if isinstance(m, Subscribed)] == [1]
    reader.send(encode(Unsubscribe(number=1)))
    assert reader.ended() == [""]
    again = Reader(net, 1)
    again.read(0, net.now_us + 60_000_000)
    net.wait(1)
    net.give(1, [Closed(again.connection)])
    net.wait(1)
    after = net.brokers[1].status(net.now_us)["metrics"]
    assert isinstance(version, dict)
    assert isinstance(after, dict)
    for name in [name for name in version if name.startswith("interest")]:
        assert after[name] == version[name]
    for broker in net.brokers:
        broker.check()


def test_a_long_range_does_not_wait_between_reads_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: a read of the log ends when it is enough; the next follows at once, not half a second later."""
    monkeypatch.setattr(durable_pubend, "READ_BYTES", 1)
    net = DurableNet(1, [])
    _, marks = history(net)
    net.kill(0)
    net.start(0)
    net.wait(1)
    reader = Reader(net, 0)
    reader.read(marks[0], marks[-1])
    net.wait(ASK_AGAIN_US / SECOND_US / 2)
    assert reader.got() == numbers(0, 40)
    assert reader.ended() == [""]


class Away:
    """A reader at one of two brokers, whose range goes on at the other, which is killed."""

    def __init__(self) -> None:
        self.net = DurableNet(2, [(0, 1)])
        _, self.marks = history(self.net)
        self.reader = Reader(self.net, 1)
        self.net.kill(0)
        self.reader.read(self.marks[0], self.marks[-1])

    def reason(self) -> str:
        (ended,) = [message for message in self.reader.messages if isinstance(message, Ended)]
        return ended.reason


def test_a_reader_gives_up_on_a_broker_that_stays_away() -> None:
    one = Away()
    one.net.wait(PATIENCE_US / SECOND_US - 1)
    assert one.reader.ended() == []
    one.net.wait(2)
    assert one.reader.ended() == ["unavailable"]
    assert one.reason() == (
        f"broker 'b0' has been out of reach for 30 s: what is missing of its pubend {PUBEND} can be read "
        "when it is back"
    )
    one.net.brokers[1].check()  # type: ignore[union-attr]


def test_a_reader_waits_for_a_broker_that_restarts() -> None:
    one = Away()
    one.net.wait(PATIENCE_US / SECOND_US - 1)
    one.net.start(0)
    one.net.link(0, 1)
    one.net.wait(5)
    assert (one.reader.got(), one.reader.ended()) == (numbers(0, 40), [""])


def test_patience_begins_anew_when_a_broker_was_back() -> None:
    one = Away()
    one.net.wait(PATIENCE_US / SECOND_US - 1)
    one.net.slow.add(0)  # it is there, and its disk takes for ever
    one.net.start(0)
    one.net.link(0, 1)
    one.net.wait(3 * PATIENCE_US / SECOND_US)
    assert one.reader.ended() == [], "slow is not away"
    one.net.kill(0)
    one.net.wait(PATIENCE_US / SECOND_US - 1)
    assert one.reader.ended() == []
    one.net.wait(2)
    assert one.reader.ended() == ["unavailable"]


def test_a_reader_waits_for_its_client_before_it_waits_for_a_broker() -> None:
    """Who takes nothing is not kept waiting: all that is missing may be here."""
    net = DurableNet(2, [(0, 1)])
    publisher = DurableClient(net, 0)
    for number in range(100):
        publisher.send(publisher.durable("t", f"{number}" + "x" * 100_000))
    net.wait(1)
    reader = SlowReader(net, 1)
    reader.read(0, reader.heads()[PUBEND])
    net.wait(1)
    net.kill(0)
    net.wait(2 * PATIENCE_US / SECOND_US)
    assert reader.ended() == []
    consumed, received = 0, sum(len(batch.data) for batch in reader.batches)
    while received > consumed:
        reader.send(encode(Credit(size=received - consumed)))
        consumed, received = received, sum(len(batch.data) for batch in reader.batches)
    assert [text.rstrip("x") for text in reader.got()] == numbers(0, 100)
    assert reader.ended() == [""]


def test_a_pubend_that_is_unknown_is_no_matter_where_nothing_is_read_of_it() -> None:
    """As in the token of a program that heard of a broker which is long gone."""
    net = DurableNet(1)
    _, marks = history(net)
    reader = Reader(net, 0)
    gone = {pubend_text(99 << 32): 7}
    token, until = json.dumps({PUBEND: marks[0]} | gone), json.dumps({PUBEND: marks[-1]} | gone)
    reader.send(encode(Subscribe(number=1, topic="t", where="", token=token, until=until)))
    net.wait(1)
    assert (reader.got(), reader.ended()) == (numbers(0, 40), [""])


def test_a_retired_broker_is_no_longer_among_the_heads() -> None:
    """At every broker that was asked, also after it restarted; until that one comes back after all."""
    net = DurableNet(3, [(0, 1), (1, 2)])
    far = pubend_text(3 << 32)

    def known(at: int) -> tuple[bool, bool]:
        client = Reader(net, at)
        heads = client.heads()
        (reply,) = [message for message in client.messages if isinstance(message, Reply)]
        return far in heads, far in json.loads(reply.body)["away"]

    DurableClient(net, 0).send(encode(Subscribe(number=1, topic="t", where="", durable="s", ack="auto")))
    net.wait(2)
    net.kill(2)
    net.wait(1)
    assert (known(0), known(1)) == ((True, True), (True, True))
    assert retire(net, 1, "b2")[0] == ""
    assert (known(0), known(1)) == ((False, False), (False, False))
    net.kill(0)
    net.start(0)
    net.link(0, 1)
    net.wait(2)
    assert known(0) == (False, False)
    net.start(2)
    net.link(1, 2)
    net.wait(2)
    assert (known(0), known(1)) == ((True, False), (True, False))
    net.kill(2)
    for at in (0, 1):
        net.kill(at)
        net.start(at)
    net.link(0, 1)
    net.wait(2)
    assert known(0) == (True, True), "it came back, so it may come back again"


def test_who_retires_without_a_disk_is_not_asked_to_save() -> None:
    net = Net(2, [(0, 1)])
    net.kill(1)
    client = Client(net, 0)
    client.send(encode(Request(number=1, what="subs.retire", arguments={"broker": "b1"})))
    assert [message.code for message in client.messages if isinstance(message, Reply)] == [""]


def test_what_a_broker_said_about_itself_is_no_gap_where_it_is_not_asked_for() -> None:
    """Its history has a pubend of its own, which a topic outside `$postroad` has nothing of."""
    net = HistoryNet(2, [(0, 1)])
    watch = DurableClient(net, 0)
    watch.subscribe(1, "$postroad/#")
    net.wait(30)
    watch.send(encode(Unsubscribe(number=1)))
    net.wait(30)
    start = net.now_us - 70 * SECOND_US
    assert net.disks[0].chopped[1 << 32 | HISTORY] > start, "some of it was released"

    def gaps(topic: str) -> list[str]:
        reader = Reader(net, 1)
        heads = reader.heads()
        token, until = json.dumps(dict.fromkeys(heads, start)), json.dumps(heads)
        reader.send(encode(Subscribe(number=1, topic=topic, where="", token=token, until=until)))
        net.wait(5)
        assert reader.ended() == [""]
        return [pubend_text(batch.pubend) for batch in reader.batches if batch.lost]

    history = [pubend_text(number << 32 | HISTORY) for number in (1, 2)]
    assert (gaps("t"), gaps("#")) == ([], [])
    assert sorted(gaps("$postroad/#")) == sorted(gaps("")) == history
