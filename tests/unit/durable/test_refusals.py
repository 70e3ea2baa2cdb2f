"""A refusal that its client did not hear, and what came after it (D1: a receipt only for what is synced)."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from tests.worlds.brokers import Net
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.turns import Turns

from postroad.durable.publisher.refusals import Refusals
from postroad.events.batch import EventBatch
from postroad.ids import IdSource
from postroad.links.access import AuthConfig, Rule
from postroad.seam.effects import Send
from postroad.seam.inputs import Closed
from postroad.wire.frames import DEFAULT_LIMITS, Hello, Kind, Ping, Pong, Welcome, decode, encode


class Publisher(DurableClient):
    """A client whose line may fail in one direction: what the broker says waits in `unheard`."""

    def __init__(self, net: Net, at: int, token: str = "") -> None:
        self.deaf = False
        self.unheard: list[bytes] = []
        self.token = token
        super().__init__(net, at, token)

    def take(self, frame: bytes) -> None:
        if self.deaf:
            self.unheard.append(frame)
        else:
            super().take(frame)

    def hear(self) -> None:
        while self.unheard:
            super().take(self.unheard.pop(0))
        self.deaf = False

    def reconnect(self) -> None:
        """What was on its way to it is lost."""
        welcome = next(message for message in self.messages if isinstance(message, Welcome))
        self.net.give(self.at, [Closed(self.connection)])
        self.connection = self.net.open(self.at, self)
        self.messages, self.unheard, self.deaf, self.sequence = [], [], False, 0
        hello = Hello(
            version=1,
            role="client",
            name="c",
            token=self.token,
            limits=DEFAULT_LIMITS,
            window=1 << 22,
            time_us=0,
            publisher=welcome.publisher,
            resume_key=welcome.resume_key,
        )
        self.send(encode(hello))

    def again(self, *frames: bytes) -> None:
        for frame in frames:
            self.sequence += 1
            batch = EventBatch.parse(frame, DEFAULT_LIMITS)
            self.send(batch.restamped(kind=Kind.PUBLISH, channel=self.sequence))


def logged(net: DurableNet, pubend: int = 1 << 32) -> list[str]:
    """What is in the log of the first broker, in its order."""
    batches = [EventBatch.parse(data, DEFAULT_LIMITS) for _, _, data in net.disks[0].records.get(pubend, [])]
    return [event.payload.decode() for batch in batches for event in batch.events()]


def test_what_was_refused_unheard_is_taken_when_it_comes_again() -> None:
    """D1: Not for a repetition of what was logged after it: that would be a receipt for what is in no log."""
    net = DurableNet(1)
    publisher = Publisher(net, 0)
    publisher.send(publisher.durable("t", "zero"))
    publisher.deaf = True
    net.disks[0].full = True
    first = publisher.durable("t", "one")
    publisher.send(first)
    net.disks[0].full = False
    second = publisher.durable("t", "two")
    publisher.send(second)
    net.wait(1)
    assert logged(net) == ["zero"]
    publisher.reconnect()
    publisher.again(first, second)
    assert (publisher.accepted(), publisher.rejected()) == ([1, 2], [])
    assert logged(net) == ["zero", "one", "two"]


def test_who_has_heard_of_a_refusal_goes_on_at_once() -> None:
    """Nothing else is refused: what came meanwhile waits for the answer to the ping, and no longer."""
    net = DurableNet(1)
    publisher = Publisher(net, 0)
    publisher.deaf = net.disks[0].full = True
    publisher.send(publisher.durable("t", "one"))
    net.disks[0].full = False
    publisher.send(publisher.durable("t", "two"), publisher.frame("t", "plain"))
    publisher.send(publisher.durable("t", "three"))
    assert net.brokers[0].metrics()["durable_frames_waiting"] == 2
    assert [type(decode(frame)).__name__ for frame in publisher.unheard] == ["Rejected", "Ping"]
    publisher.hear()
    assert publisher.rejected() == [(1, "storage")]
    assert publisher.accepted()[-1] == 4
    publisher.send(publisher.durable("t", "four"))
    assert publisher.accepted()[-1] == 5
    assert logged(net) == ["two", "three", "four"]
    assert net.brokers[0].metrics()["durable_frames_waiting"] == 0


def test_the_answer_to_another_ping_proves_nothing() -> None:
    net = DurableNet(1)
    publisher = Publisher(net, 0)
    publisher.deaf = net.disks[0].full = True
    publisher.send(publisher.durable("t", "one"))
    net.disks[0].full = False
    publisher.send(publisher.durable("t", "two"))
    for time_us in (0, net.now_us, 1 << 60):
        publisher.send(encode(Pong(time_us=time_us, at_us=0)))
    assert logged(net) == []
    publisher.hear()
    assert logged(net) == ["two"]


def test_a_repetition_is_accepted_with_its_original_though_a_later_record_fails() -> None:
    """It was refused with that, and was in the log; and what came behind the refused one waits."""
    net = DurableNet(1)
    publisher, other = Publisher(net, 0), Publisher(net, 0)
    net.slow.add(0)
    first, second = publisher.durable("t", "one"), publisher.durable("t", "two")
    publisher.send(first)
    other.send(other.durable("t", "other"))
    publisher.send(second)
    publisher.reconnect()
    publisher.deaf = True
    publisher.again(first, second)
    disk = net.disks[0]
    waiting = disk.waiting
    disk.waiting = waiting[:1]
    net.sync(0)
    disk.waiting, disk.full = waiting[1:], True
    net.sync(0)
    disk.full = False
    net.slow.clear()
    publisher.send(publisher.durable("t", "three"))
    assert logged(net) == ["one"]
    publisher.hear()
    assert (publisher.accepted(), publisher.rejected()) == ([1, 3], [(2, "storage")])
    assert other.rejected() == [(1, "storage")]
    assert logged(net) == ["one", "three"]


def test_frames_that_wait_are_refused_if_the_disk_is_still_full() -> None:
    """And then those behind them wait for that to be heard."""
    net = DurableNet(1)
    publisher = Publisher(net, 0)
    publisher.deaf = net.disks[0].full = True
    frames = [publisher.durable("t", str(number)) for number in range(4)]
    for frame in frames[:2]:
        publisher.send(frame)
    net.slow.add(0)
    publisher.hear()  # the second one is on its way to the disk
    publisher.deaf = True
    publisher.send(frames[2])
    net.sync(0)
    net.disks[0].full = False
    publisher.send(frames[3])
    net.slow.clear()
    net.wait(1)
    assert logged(net) == []
    publisher.reconnect()
    publisher.again(*frames[1:])
    assert publisher.accepted()[-1] == 3
    assert logged(net) == ["1", "2", "3"]


def test_a_frame_that_is_not_staged_yet_when_an_earlier_one_fails_waits_too() -> None:
    """It found no room among what is on its way to the disk."""
    net = DurableNet(1)
    publisher = Publisher(net, 0)
    net.slow.add(0)
    publisher.send(publisher.durable("t", "zero"))
    net.sync(0)
    publisher.deaf = True
    first, second = publisher.durable("t", "one"), publisher.durable("t", "two")
    publisher.send(first)
    room = net.brokers[0]._rooms.durable._pubends[0]
    room.has_room = lambda _size: False  # type: ignore[method-assign]
    publisher.send(second)
    del room.has_room
    net.disks[0].full = True
    failed = net.disks[0].sync()
    net.disks[0].full = False
    net.slow.clear()
    net.give(0, failed)
    net.wait(1)
    assert logged(net) == ["zero"]
    publisher.reconnect()
    publisher.again(first, second)
    assert logged(net) == ["zero", "one", "two"]


def test_frames_refused_before_the_pubend_is_open_are_waited_for_as_well() -> None:
    net = DurableNet(1)
    net.kill(0)
    net.disks[0] = replace(net.disks[0], tables={}, records={}, full=True)
    net.slow.add(0)
    net.start(0)
    publisher = Publisher(net, 0)
    publisher.deaf = True
    first, second = publisher.durable("t", "one"), publisher.durable("t", "two")
    publisher.send(first)
    net.sync(0)
    net.disks[0].full = False
    net.slow.clear()
    publisher.send(second)
    net.wait(2)
    assert logged(net) == []
    publisher.reconnect()
    publisher.again(first, second)
    assert logged(net) == ["one", "two"]


@pytest.mark.parametrize("by", ["rule", "owner"])
def test_a_denial_is_to_be_heard_too(by: str) -> None:
    """The rules may be others after a restart, and what is in the log still is then."""
    net = DurableNet(1)
    tokens = {hashlib.sha256(name.encode()).hexdigest(): name for name in ("alice", "bob")}
    denied = Rule(principal="alice", allow=False, action="publish", topic="secret")
    allowed = Rule(principal="*", allow=True, action="publish", topic="#")
    net.config = replace(net.config, auth=AuthConfig(tokens=tokens, rules=(denied, allowed)))
    net.kill(0)
    net.start(0)
    alice, bob = Publisher(net, 0, "alice"), Publisher(net, 0, "bob")
    bob.ids = IdSource(77, 99)
    bob.send(bob.durable("t", "bob's"))
    alice.deaf = True
    before, own = alice.durable("t", "before"), alice.ids
    if by == "owner":
        alice.ids = IdSource(77, 99)
    refused = alice.durable("t" if by == "owner" else "secret", "refused")
    alice.ids = own
    alice.send(before, refused, alice.durable("t", "after"))  # in one turn
    alice.send(alice.durable("t", "later"))
    assert logged(net) == ["bob's", "before"]
    alice.hear()
    assert [code for _, code in alice.rejected()] == ["denied"]
    assert logged(net) == ["bob's", "before", "after", "later"]
    assert alice.accepted()[-1] == 4


def test_who_is_denied_again_and_again_does_not_hold_up_the_rest_for_ever() -> None:
    """A frame waits for the refusals before it, not for those of frames that came later."""
    refusals: Refusals[str] = Refusals()
    refusals.refused(1)
    assert refusals.hold(1, "a")
    (first,) = pings(refusals)
    refusals.refused(1)
    assert refusals.hold(1, "b")
    (second,) = pings(refusals)
    assert refusals.heard(1, first) == ["a"]
    refusals.refused(1)
    refusals.refused(1)  # in the same turn
    (third,) = pings(refusals)
    assert refusals.heard(1, second) == ["b"]
    assert refusals.hold(1, "c")
    assert refusals.heard(1, third) == ["c"]
    assert not refusals.hold(1, "d")


def test_what_came_after_a_refused_frame_waits_for_its_ping_whatever_it_waited_for() -> None:
    refusals: Refusals[str] = Refusals()
    refusals.refused(1)
    assert refusals.hold(1, "b")
    (first,) = pings(refusals)
    refusals.refused(1)
    refusals.hold_back(1, ["a"])
    (second,) = pings(refusals)
    refusals.check()
    assert len(refusals) == 2
    assert refusals.heard(1, first) == []
    assert refusals.heard(1, second) == ["a", "b"]
    refusals.hold_back(1, ["of a connection that is about to close"])
    assert len(refusals) == 0


def test_a_connection_that_closes_leaves_nothing_behind() -> None:
    refusals: Refusals[str] = Refusals()
    refusals.refused(1)
    assert refusals.hold(1, "a")
    refusals.closed(1)
    assert pings(refusals) == []
    assert refusals.heard(1, 1) == []
    assert not refusals.hold(1, "b")
    refusals.check()


def pings(refusals: Refusals[str]) -> list[int]:
    found = []
    for effect in Turns().effects(refusals.flush):
        assert isinstance(effect, Send)
        message = decode(effect.data)
        assert isinstance(message, Ping)
        found.append(message.time_us)
    return found
