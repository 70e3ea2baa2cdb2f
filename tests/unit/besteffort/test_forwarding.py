"""The datagram path of one broker (spec B1): who is believed, where events go, what is dropped."""

from __future__ import annotations

import itertools
import random

import pytest

from postroad.besteffort.settings import BestEffortConfig
from postroad.broker.core import Broker
from postroad.client.repair.messages import Repair
from postroad.client.repair.messages import encode as encode_repair
from postroad.client.repair.rows import with_record
from postroad.config import BrokerConfig
from postroad.errors import UsageError
from postroad.events.batch import MAX_ROWS_BYTES, EventBatch, best_effort_frame, encode_row
from postroad.ids import Identity, IdSource
from postroad.kernel.layout import EVENT_HEADER_BYTES
from postroad.links.access import AuthConfig, Rule
from postroad.links.connection import LinkSettings
from postroad.links.greetings import GREET_US, SILENT_US
from postroad.seam.datagrams import Datagram, SendTo
from postroad.seam.effects import Effect, Note, Send
from postroad.seam.inputs import Closed, Opened, Received
from postroad.wire import datagrams
from postroad.wire.datagrams import BEST_EFFORT, GREETING, datagram_kind
from postroad.wire.frames import (
    DEFAULT_LIMITS,
    Hello,
    Kind,
    Refuse,
    Rejected,
    Repaired,
    Subscribe,
    Unsubscribe,
    Welcome,
    decode,
    encode,
    frame_kind,
)

NOW = 1_700_000_000_000_000
HOME = ("127.0.0.1", 40_000)
RIGHTS = [Rule(principal="*", allow=True, action="publish", topic=topic) for topic in ("a/#", "$repair/#")]


NUMBERS = itertools.count(1)


def seal(kind: int, key: bytes, body: bytes, *, dialled: bool) -> bytes:
    return datagrams.seal(kind, key, body, dialled=dialled, number=next(NUMBERS))


def unseal(data: bytes, key: bytes, *, dialled: bool) -> bytes | None:
    opened = datagrams.unseal(data, key, dialled=dialled)
    return None if opened is None else opened[1]


class World:
    """One broker and one client, which speaks by hand."""

    def __init__(self, config: BestEffortConfig | None = None, *rules: Rule) -> None:
        self.broker = Broker(
            BrokerConfig(
                links=LinkSettings(datagrams=7420),
                besteffort=config or BestEffortConfig(),
                auth=AuthConfig(rules=rules),
            ),
            Identity(number=7, node=bytes(16), name="b", boot=1, starts=1),
            draw=random.Random(1).randrange,
            now_us=NOW,
        )
        self.now_us = NOW
        self.broker.handle([Opened(1, host="127.0.0.1")], NOW)
        hello = Hello(
            version=1,
            role="client",
            name="c",
            token="",
            limits=DEFAULT_LIMITS,
            window=1 << 20,
            time_us=NOW,
        )
        answers = self.give(Received(1, encode(hello)))
        welcome = decode(next(one.data for one in answers if isinstance(one, Send)))
        assert isinstance(welcome, Welcome)
        self.key = welcome.datagram_key
        self.ids = IdSource(welcome.publisher, 7)
        self.give(Received(1, encode(Subscribe(number=3, topic="a/#", where=""))))

    def give(self, item: Received | Datagram) -> list[Effect]:
        effects = self.broker.handle([item], self.now_us)
        self.broker.check()
        return effects

    def datagram(self, data: bytes) -> list[Effect]:
        return self.give(Datagram(HOME, data))

    def frame(self, *payloads: bytes, topic: str = "a/b") -> bytes:
        rows = [
            encode_row(self.ids.next(NOW // 1000), topic, {}, payload, DEFAULT_LIMITS, tick=at)
            for at, payload in enumerate(payloads, 1)
        ]
        return best_effort_frame(rows, channel=0)

    def greet(self) -> list[Effect]:
        return self.datagram(seal(GREETING, self.key, b"\x01", dialled=True))

    def delivered(self, effects: list[Effect]) -> tuple[list[bytes], list[bytes]]:
        """Payloads by datagram, and over the connection."""
        by_datagram: list[bytes] = []
        by_frame: list[bytes] = []
        for effect in effects:
            if isinstance(effect, SendTo) and datagram_kind(effect.data) == BEST_EFFORT:
                assert effect.endpoint == HOME
                body = unseal(effect.data, self.key, dialled=False)
                assert body is not None
                batch = EventBatch.parse(body, DEFAULT_LIMITS, expect=Kind.BEST_EFFORT)
                assert batch.channel == 3
                by_datagram += [batch.payload(row) for row in range(batch.count)]
            elif isinstance(effect, Send) and frame_kind(effect.data) == Kind.BEST_EFFORT:
                batch = EventBatch.parse(effect.data, DEFAULT_LIMITS)
                by_frame += [batch.payload(row) for row in range(batch.count)]
        return by_datagram, by_frame


def test_events_come_by_datagram_to_who_greeted_and_over_the_connection_to_others() -> None:
    world = World()
    published = seal(BEST_EFFORT, world.key, world.frame(b"one", b"two"), dialled=True)
    assert world.delivered(world.datagram(published)) == ([], [b"one", b"two"])
    (answer,) = [one for one in world.greet() if isinstance(one, SendTo)]
    assert unseal(answer.data, world.key, dialled=False) == b"\x01"
    published = seal(BEST_EFFORT, world.key, world.frame(b"three"), dialled=True)
    assert world.delivered(world.datagram(published)) == ([b"three"], [])
    world.now_us += SILENT_US
    over_tcp = world.give(Received(1, world.frame(b"four")))
    assert world.delivered(over_tcp) == ([], [b"four"]), "nothing was heard of it for too long"


def test_a_large_frame_is_cut_into_datagrams() -> None:
    world = World()
    world.greet()
    payloads = [bytes((at,)) * 400 for at in range(10)]
    effects = world.give(Received(1, world.frame(*payloads)))
    assert world.delivered(effects)[0] == payloads
    assert sum(isinstance(one, SendTo) for one in effects) == 5


def test_what_is_not_sealed_with_the_key_is_dropped_unanswered() -> None:
    """B1."""
    world = World()
    good = seal(BEST_EFFORT, world.key, world.frame(b"x"), dialled=True)
    other = bytes(24)
    for data in (
        good[:-1] + b"y",
        seal(BEST_EFFORT, world.key, world.frame(b"x"), dialled=False),  # sent back to its sender
        seal(GREETING, other, b"\x01", dialled=True),
        seal(BEST_EFFORT, world.key[:8] + other[:16], world.frame(b"x"), dialled=True),
        good[:6],
    ):
        assert world.datagram(data) == []
    assert world.broker.metrics()["best_effort_refused_total"] == 5


def test_a_client_has_nothing_sent_to_another_host() -> None:
    """It has the key, and says that it hears: from a forged address events would go there."""
    world = World()
    greeting = seal(GREETING, world.key, b"\x01", dialled=True)
    assert world.give(Datagram(("192.0.2.1", 53), greeting)) == []
    assert world.delivered(world.give(Received(1, world.frame(b"x")))) == ([], [b"x"])
    moved = seal(GREETING, world.key, b"\x01", dialled=True)  # to another port, as behind a NAT
    (answer,) = [one for one in world.give(Datagram((HOME[0], 53), moved)) if isinstance(one, SendTo)]
    assert answer.endpoint == (HOME[0], 53)


def test_what_cannot_be_read_is_dropped_and_hurts_nobody() -> None:
    world = World()
    frame = world.frame(b"x")
    for body in (b"", frame[:-1], frame[:40], bytes(100), world.frame(b"x", topic="$postroad/x")):
        assert world.delivered(world.datagram(seal(BEST_EFFORT, world.key, body, dialled=True))) == ([], [])
    assert world.broker.metrics()["best_effort_published_total"] == 0
    assert world.broker.metrics()["clients"] == 1, "UDP may damage a datagram: its connection stays"


def test_an_event_that_may_not_be_published_is_refused_alone_and_its_publisher_told() -> None:
    """B1: Found: its whole datagram was dropped, nobody was told, and repair brought what was refused."""
    world = World(None, *RIGHTS)
    rows = [
        encode_row(world.ids.next(NOW // 1000), topic, {}, topic.encode(), DEFAULT_LIMITS, tick=at)
        for at, topic in enumerate(("a/b", "secret/x", "a/c"), 1)
    ]
    effects = world.give(Received(1, best_effort_frame(rows, channel=0)))
    assert world.delivered(effects) == ([], [b"a/b", b"a/c"])
    frames = [one.data for one in effects if isinstance(one, Send)]
    (rejected,) = [decode(frame) for frame in frames if frame_kind(frame) == Kind.REJECTED]
    assert isinstance(rejected, Rejected)
    assert (rejected.code, rejected.ids) == ("denied", rows[1][0][:16])
    assert [one.text for one in effects if isinstance(one, Note)] == [
        "denied: anonymous may not publish to secret/x"
    ]


@pytest.mark.parametrize(("topic", "passes"), [("a/b", True), ("secret/x", False), ("$postroad/x", False)])
def test_a_repair_passes_only_with_an_event_that_its_sender_may_publish(topic: str, passes: bool) -> None:
    """B1."""
    world = World(None, *RIGHTS)
    world.give(Received(1, encode(Subscribe(number=4, topic="$repair/again", where=""))))
    row = encode_row(b"p" * 16, topic, {"n": 1}, b"x", DEFAULT_LIMITS, tick=300)
    repair = encode_repair(Repair(publisher=b"p" * 8, sequence=300, row=b"".join(row)))
    effects = world.give(Received(1, world.frame(repair, topic="$repair/again")))
    assert world.delivered(effects) == ([], [repair] if passes else [])


def test_an_event_over_the_bound_is_refused_with_it() -> None:
    world = World()
    refuse = next(
        decode(one.data) for one in world.give(Received(1, world.frame(bytes(958)))) if isinstance(one, Send)
    )
    assert isinstance(refuse, Refuse)
    assert "a best-effort event of 961 bytes, the most is 960" in refuse.reason


def test_a_repair_may_be_as_long_as_a_datagram_carries() -> None:
    """Found: the bound of events held for the repairs that carry them, so that large ones were refused."""
    world = World()
    world.give(Received(1, encode(Subscribe(number=4, topic="$repair/for", where=""))))
    topic = "$repair/for"
    longest = bytes(MAX_ROWS_BYTES - EVENT_HEADER_BYTES - len(topic))
    assert world.delivered(world.give(Received(1, world.frame(longest, topic=topic)))) == ([], [longest])
    effects = world.give(Received(1, world.frame(longest + b"x", topic=topic)))
    assert isinstance(decode(next(one.data for one in effects if isinstance(one, Send))), Refuse)


def test_what_one_client_may_send_is_limited() -> None:
    world = World(BestEffortConfig(client_bytes_per_s=1_000, client_burst_bytes=4_096))
    for _ in range(20):
        world.give(Received(1, world.frame(bytes(400))))
    metrics = world.broker.metrics()
    assert (metrics["best_effort_published_total"], metrics["best_effort_limited_total"]) == (8, 12)
    world.now_us += 1_000_000
    world.give(Received(1, world.frame(bytes(400))))
    assert world.broker.metrics()["best_effort_published_total"] == 9
    own = {"number": "00000007", "sent": 9, "received": 0}  # what clients published here
    assert world.broker.status(NOW)["best_effort_links"] == [own]
    with pytest.raises(UsageError):
        BestEffortConfig(client_burst_bytes=1)


def test_who_has_no_credit_and_no_datagrams_misses_events() -> None:
    """B1."""
    world = World()
    for _ in range(2_000):
        world.give(Received(1, world.frame(bytes(900))))
    assert world.broker.metrics()["best_effort_dropped_total"] > 0


def test_brokers_greet_each_other() -> None:
    world = World()
    broker = world.broker
    broker.handle([Opened(2, dialled="x:1", host="127.0.0.9")], NOW)
    welcome = Welcome(
        version=1,
        name="n",
        broker=9,
        node=b"n" * 16,
        boot=1,
        cost=1,
        limits=DEFAULT_LIMITS,
        window=1 << 20,
        time_us=NOW,
        datagrams=7000,
        datagram_key=bytes(range(24)),
    )
    effects = broker.handle([Received(2, encode(welcome))], NOW)
    (greeting,) = [one for one in effects if isinstance(one, SendTo)]
    assert greeting.endpoint == ("127.0.0.9", 7000)
    assert unseal(greeting.data, bytes(range(24)), dialled=True) == b"\x00"
    answer = Datagram(("127.0.0.9", 7001), seal(GREETING, bytes(range(24)), b"\x01", dialled=False))
    (again,) = [one for one in broker.handle([answer], NOW + 1) if isinstance(one, SendTo)]
    assert again.endpoint == ("127.0.0.9", 7001), "where its datagrams come from"
    assert unseal(again.data, bytes(range(24)), dialled=True) == b"\x01"
    assert broker.status(NOW + 1)["best_effort"] != {}
    assert broker.next_deadline() <= NOW + GREET_US


def test_a_record_is_carried_beside_the_bound_of_events_and_fits_a_datagram() -> None:
    """Spec B3: to brokers it is part of the payload."""
    world = World()
    world.greet()
    row = encode_row(world.ids.next(NOW // 1000), "a/b", {}, bytes(900), DEFAULT_LIMITS, tick=1)
    header, heap = with_record(row, (7,) * 8, 200)
    effects = world.give(Received(1, best_effort_frame([(header, heap)], channel=0)))
    assert [len(payload) for payload in world.delivered(effects)[0]] == [len(heap) - 3]
    long = header[:36] + (1_200).to_bytes(4, "little") + header[40:44] + (300).to_bytes(4, "little")
    frame = best_effort_frame([(long, heap[:3] + bytes(1_200))], channel=0)
    refuse = next(decode(one.data) for one in world.give(Received(1, frame)) if isinstance(one, Send))
    assert isinstance(refuse, Refuse)
    assert "1251 bytes with its record, the most is 1156" in refuse.reason


def _report(number: int, **figures: int) -> Received:
    usual = dict.fromkeys(("received", "requests", "given_up", "duplicates", "slowest_us"), 1)
    report = Repaired(number=number, ids=b"", **{**usual, "detected": 4, "recovered": 2, **figures})
    return Received(1, encode(report))


def test_what_clients_report_of_repair_is_shown_while_they_are_here() -> None:
    world = World()
    assert world.broker.metrics()["repair_subscriptions"] == 0
    world.give(_report(3))
    world.give(_report(3, recovered=4, recovery_us=2_000_000, asked=4, hits=3, cached=9, repairs=3))
    metrics = world.broker.metrics()
    assert (metrics["repair_subscriptions"], metrics["repair_losses_detected"]) == (1, 4), "not 8"
    assert (metrics["repair_recovered"], metrics["repair_recovery_seconds"]) == (4, 2.0)
    assert (metrics["repair_cache_hits"], metrics["repair_cache_messages"]) == (3, 9)
    (row,) = world.broker.status(NOW)["repair"]  # type: ignore[misc]
    assert (row["recovery_ms"], row["hit_ratio"], row["repairs_sent"]) == (500.0, 0.75, 3)
    world.give(_report(99))
    assert world.broker.metrics()["repair_subscriptions"] == 1, "there is no such subscription"
    world.give(Received(1, encode(Unsubscribe(number=3))))
    assert world.broker.metrics()["repair_subscriptions"] == 0
    for number in range(10, 40):  # each ends before the next begins
        world.give(Received(1, encode(Subscribe(number=number, topic="a/#", where=""))))
        world.give(_report(number))
        world.give(Received(1, encode(Unsubscribe(number=number))))
    assert len(world.broker._rooms.best_effort_ledger._reports[1]) == 1, "what has ended is forgotten"
    world.broker.handle([Closed(1)], NOW)
    assert world.broker._rooms.best_effort_ledger._reports == {}


def test_a_report_that_cannot_be_is_refused() -> None:
    world = World()
    refuse = next(decode(one.data) for one in world.give(_report(3, detected=-1)) if isinstance(one, Send))
    assert isinstance(refuse, Refuse)
