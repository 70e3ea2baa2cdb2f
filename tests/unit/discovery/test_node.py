"""The discovery node alone: what it keeps, and where it passes requests on (spec V2, V5)."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from postroad.discovery import node
from postroad.discovery.node import DiscoveryNode, NodeSettings
from postroad.seam.datagrams import Datagram, Endpoint, SendTo
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.discovery import (
    MAX_TIME_US,
    MIN_REQUEST_BYTES,
    Acknowledge,
    Advertise,
    Cookie,
    Inject,
    Message,
    Ping,
    Pong,
    Request,
    decode,
    encode,
    padded,
)

START_US = 1_700_000_000_000_000


class Stage:
    """A node, and brokers at known distances that answer its pings."""

    def __init__(self, **settings: object) -> None:
        self.now_us = START_US
        self.node = DiscoveryNode(NodeSettings(name="n", **settings), draw=Random(1).randrange)  # type: ignore[arg-type]
        self.distances: dict[Endpoint, int] = {}
        self.sent: list[tuple[Endpoint, Message]] = []

    def say(self, source: Endpoint, message: Message) -> list[Message]:
        data = encode(padded(message, MIN_REQUEST_BYTES))
        self.handle([Datagram(source, data)])
        return [one for endpoint, one in self.sent if endpoint == source]

    def handle(self, inputs: list[Datagram]) -> None:
        self.sent = []
        effects = self.node.handle(inputs, self.now_us)
        for one in effects:
            assert isinstance(one, SendTo)
            self.sent.append((one.endpoint, decode(one.data)))
        for endpoint, message in list(self.sent):
            if isinstance(message, Ping) and endpoint in self.distances:
                began_us, answered = self.now_us, self.sent
                self.now_us += self.distances[endpoint]
                pong = Pong(key=message.key, sent_us=message.sent_us, time_us=self.now_us)
                self.node.handle([Datagram(endpoint, encode(pong))], self.now_us)
                self.now_us, self.sent = began_us, answered

    def advertise(
        self,
        number: int,
        *,
        network: int = 1,
        members: int = 1,
        geography: str = "eu",
        lifetime_s: int = 60,
        secret: bytes = b"",
    ) -> bool:
        """Whether the node took it."""
        source = (f"192.0.2.{number}", 7420)
        self.distances.setdefault(source, number * 10 * MILLISECOND_US)
        message = Advertise(
            uuid=bytes(16),
            broker=number,
            name=f"b{number}",
            address="",
            transports=("tcp",),
            geography=geography,
            institution="",
            secret=secret or bytes([number]) * 16,
            network=network,
            members=members,
            lifetime_s=lifetime_s,
            sent_us=self.now_us,
        )
        for answer in self.say(source, message):
            if isinstance(answer, Cookie):
                from msgspec.structs import replace

                return bool(self.say(source, replace(message, cookie=answer.cookie)))
        return False

    def request(self, attempt: int = 1, uuid: bytes = bytes(16)) -> tuple[set[int], int]:
        """The brokers it is passed on to, and how many should answer."""
        source = ("198.51.100.1", 4000)
        request = Request(uuid=uuid, attempt=attempt, sent_us=self.now_us)
        (cookie,) = self.say(source, request)
        assert isinstance(cookie, Cookie)
        answers = self.say(
            source, Request(uuid=uuid, attempt=attempt, sent_us=self.now_us, cookie=cookie.cookie)
        )
        (acknowledge,) = answers
        assert isinstance(acknowledge, Acknowledge)
        entries = {
            int(endpoint[0].rsplit(".", 1)[1]) for endpoint, one in self.sent if isinstance(one, Inject)
        }
        return entries, acknowledge.brokers


def test_a_request_enters_at_the_closest_and_the_farthest_of_each_network() -> None:
    """V5: Paper 4: by measured distance. An unconnected broker is a network of its own."""
    stage = Stage()
    for number in (3, 1, 5, 2, 4):
        assert stage.advertise(number, network=1, members=9)
    assert stage.advertise(7, network=7)
    assert stage.request() == ({1, 5, 7}, 10)
    # A later attempt enters at more, since the first ones may be dead; the same one is only acknowledged.
    assert stage.request(2) == ({1, 2, 3, 5, 7}, 10)
    assert stage.request(2) == (set(), 10)


def test_brokers_are_sorted_when_the_networks_change_and_not_for_every_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V5."""
    stage = Stage()
    for number in range(1, 101):
        assert stage.advertise(number)
    sorted_by = node._distance
    compared: list[object] = []
    monkeypatch.setattr(node, "_distance", lambda broker: (compared.append(broker), sorted_by(broker))[1])
    for number in range(200):
        assert stage.request(uuid=number.to_bytes(16, "big")) == ({1, 100}, 100)
    assert len(compared) <= 102
    # Who comes, goes or tells of another network counts at once, a changed distance within a second.
    assert stage.advertise(101)
    assert stage.advertise(100, lifetime_s=0)
    assert stage.request(uuid=b"1" * 16) == ({1, 101}, 100)
    assert stage.advertise(50, network=50, members=3)
    assert stage.request(uuid=b"2" * 16) == ({1, 50, 101}, 102)
    stage.distances["192.0.2.2", 7420] = MILLISECOND_US
    stage.now_us += 12 * SECOND_US
    stage.handle([])
    stage.now_us += SECOND_US
    assert stage.request(uuid=b"3" * 16) == ({2, 50, 101}, 102)
    stage.node.check()


def test_a_broker_that_shares_a_secret_harms_nobody_else() -> None:
    stage = Stage()
    assert stage.advertise(1)
    assert stage.advertise(2, secret=bytes([1]) * 16)
    assert stage.advertise(3)
    stage.node.check()
    assert stage.advertise(2, lifetime_s=0, secret=bytes([1]) * 16)
    stage.node.check()
    assert stage.request() == ({1, 3}, 2)


def test_an_advertisement_expires_unless_it_is_renewed() -> None:
    """V2."""
    stage = Stage()
    assert stage.advertise(1)
    assert stage.advertise(2)
    for _ in range(5):
        stage.now_us += 15 * SECOND_US
        assert stage.advertise(2)
        stage.handle([])
    assert stage.request(uuid=b"1" * 16) == ({2}, 1)
    assert stage.node.metrics()["discovery_brokers"] == 1


def test_an_advertisement_is_taken_back_when_the_broker_stops() -> None:
    """V2."""
    stage = Stage()
    assert stage.advertise(1)
    assert stage.advertise(1, lifetime_s=0)
    assert stage.request() == (set(), 0)


def test_a_node_takes_the_regions_of_its_interest_only() -> None:
    """V2."""
    stage = Stage(regions=("eu",))
    assert stage.advertise(1, geography="eu/de")
    assert not stage.advertise(2, geography="us")
    assert stage.request() == ({1}, 1)


def moved(stage: Stage) -> bool:
    """Whether the node takes an advertisement of broker 1 from elsewhere, with another secret."""
    message = Advertise(
        uuid=bytes(16),
        broker=1,
        name="moved",
        address="",
        transports=(),
        geography="",
        institution="",
        secret=bytes(16),
        network=1,
        members=1,
        lifetime_s=60,
        sent_us=0,
    )
    source = ("192.0.2.99", 1)
    for answer in stage.say(source, message):
        if isinstance(answer, Cookie):
            return bool(stage.say(source, msgspec.structs.replace(message, cookie=answer.cookie)))
    return False


def test_a_stranger_cannot_take_a_brokers_number_over() -> None:
    stage = Stage()
    assert stage.advertise(1)
    for _ in range(20):
        assert not moved(stage)
        stage.now_us += SECOND_US
    assert stage.request() == ({1}, 1)


def test_a_broker_that_restarted_at_another_port_is_taken_once_the_old_one_is_silent() -> None:
    stage = Stage()
    assert stage.advertise(1)
    stage.distances.clear()
    taken = []
    for _ in range(5):
        stage.now_us += SECOND_US
        taken.append(moved(stage))
    assert taken[0] is False
    assert taken[-1] is True
    stage.node.check()
    assert stage.request() == ({99}, 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_clocks_as_far_off_as_they_can_be_said_end_no_node(sign: int) -> None:
    """Of a broker that was admitted, and of a requester."""
    stage = Stage()
    assert stage.advertise(1)
    broker, requester = ("192.0.2.1", 7420), ("198.51.100.1", 4000)
    for time_us in (MAX_TIME_US, 1 << 62):
        stage.say(broker, Pong(key=bytes([1]) * 16, sent_us=sign * time_us, time_us=-sign * time_us))
        request = Request(uuid=time_us.to_bytes(16, "big"), attempt=1, sent_us=0, offset_us=-sign * time_us)
        for answer in stage.say(requester, request):
            assert isinstance(answer, Cookie)
            request = msgspec.structs.replace(request, cookie=answer.cookie)
            sent = stage.node.handle([Datagram(requester, encode(request))], stage.now_us)
            assert [one.endpoint for one in sent if isinstance(one, SendTo)] == [broker, requester]
