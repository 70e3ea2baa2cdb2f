"""Durable publishing through whole brokers, with a disk in memory that syncs when the test says so (D1)."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace

import pytest
from tests.worlds.brokers import Client, Net, numbers
from tests.worlds.durable_brokers import DurableClient, DurableNet

from postroad.config import BrokerConfig
from postroad.durable.settings import DurableConfig
from postroad.errors import StorageError
from postroad.events.batch import EventBatch
from postroad.events.token import CheckpointToken
from postroad.ids import IdSource, pubend_text, volatile_pubend
from postroad.links.access import AuthConfig
from postroad.seam.effects import Note
from postroad.seam.storage import (
    AppendFailed,
)
from postroad.streams.ends import STEP_US
from postroad.units import SECOND_US
from postroad.wire.frames import DEFAULT_LIMITS, Ack, Reply, Request, Subscribe, Subscribed, encode


def test_an_event_is_acknowledged_and_told_only_when_it_is_synced() -> None:
    """D1."""
    net = DurableNet(2, [(0, 1)])
    near, far, publisher = Client(net, 0), Client(net, 1), DurableClient(net, 0)
    near.subscribe(1, "t")
    far.subscribe(1, "t")
    assert [m.missing for m in far.messages if isinstance(m, Subscribed)] == [()]
    net.slow.add(0)
    publisher.send(publisher.durable("t", "a", "b"))
    net.wait(3)
    assert (publisher.accepted(), near.got(), far.got()) == ([], [], [])
    net.sync(0)
    assert (publisher.accepted(), near.got(), far.got()) == ([1], ["a", "b"], ["a", "b"])
    event = far.batches[0].events()[0]
    assert event.pubend is not None
    assert event.tick is not None


def test_a_durable_frame_holds_back_the_answer_to_later_plain_ones() -> None:
    net = DurableNet(1)
    subscriber, publisher = Client(net, 0), DurableClient(net, 0)
    subscriber.subscribe(1, "t")
    publisher.publish("t", "one")
    net.slow.add(0)
    publisher.send(publisher.durable("t", "two"))
    publisher.publish("t", "three")
    publisher.publish("t", "four")
    assert publisher.accepted() == [1]
    assert subscriber.got() == ["one", "three", "four"], "they are published, only the answer waits"
    net.sync(0)
    assert publisher.accepted() == [1, 4]
    assert subscriber.got() == ["one", "three", "four", "two"]


def test_a_full_disk_is_an_error_for_its_publishers_and_nothing_is_told() -> None:
    net = DurableNet(1)
    subscriber, publisher = Client(net, 0), DurableClient(net, 0)
    subscriber.subscribe(1, "t")
    publisher.send(publisher.durable("t", "kept"))
    net.disks[0].full = True
    publisher.send(publisher.durable("t", "refused"), publisher.frame("t", "plain"))
    assert publisher.rejected() == [(2, "storage")]
    assert publisher.accepted() == [1, 3]
    net.disks[0].full = False
    publisher.send(publisher.durable("t", "again"))
    assert publisher.accepted() == [1, 3, 4]
    assert subscriber.got() == ["kept", "plain", "again"]


def test_a_full_disk_is_said_to_the_operator() -> None:
    net = DurableNet(1)
    broker = net.brokers[0]
    assert broker is not None
    failed = AppendFailed(tag=1 << 40, error=StorageError("no space left"))
    assert Note("warning", "nothing is stored: no space left") in broker.handle([failed], net.now_us)


def test_a_full_disk_is_not_asked_with_every_turn() -> None:
    """Each failure is a turn; a turn that asks again at once would never end."""
    net = DurableNet(2, [(0, 1)])
    subscriber, publisher = Client(net, 1), DurableClient(net, 0)
    subscriber.send(encode(Subscribe(number=1, topic="t", where="", durable="s")))
    net.wait(1)
    publisher.send(publisher.durable("t", "kept"))
    net.disks[0].full = net.disks[1].full = True
    before = [broker.metrics()["turns_total"] for broker in net.brokers if broker is not None]
    net.wait(20)
    after = [broker.metrics()["turns_total"] for broker in net.brokers if broker is not None]
    assert all(one - other < 1000 for one, other in zip(after, before, strict=True))
    net.disks[0].full = net.disks[1].full = False
    net.wait(2)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "again"))
    assert publisher.accepted() == [1]


def test_a_broker_without_a_disk_takes_no_durable_events() -> None:
    net = Net(1)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "a"))
    assert publisher.rejected() == [(1, "storage")]
    publisher.publish("t", "b")
    assert publisher.accepted() == [2]


@pytest.mark.parametrize("hops", [1, 2])
def test_what_was_acknowledged_comes_out_of_the_log_after_a_crash(hops: int) -> None:
    """D12: the publisher hosting broker dies; a subscriber elsewhere misses nothing and sees no gap of it."""
    net = DurableNet(3, [(0, 1), (1, 2)])
    subscriber, publisher = Client(net, hops), DurableClient(net, 0)
    subscriber.subscribe(1, "t")
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.cut(0, 1)
    for number in range(5, 50):
        publisher.send(publisher.durable("t", str(number)))
    assert publisher.accepted()[-1] == 46
    net.slow.add(0)
    publisher.send(publisher.durable("t", "never synced"))
    net.slow.clear()
    net.kill(0)
    net.wait(1)
    net.start(0)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", *numbers(50, 55)))
    net.link(0, 1)
    net.wait(3)
    assert [one for one in subscriber.got() if one != "GAP"] == numbers(0, 55)
    lost = {batch.pubend for batch in subscriber.batches if batch.lost}
    assert 1 << 32 not in lost
    assert net.disks[0].reads > 0


def test_a_retry_after_a_crash_is_recognised() -> None:
    """Idempotent publishing: the record was synced, the answer was not heard."""
    net = DurableNet(2, [(0, 1)])
    subscriber, publisher = Client(net, 1), DurableClient(net, 0)
    subscriber.subscribe(1, "t")
    net.slow.add(0)
    frames = [publisher.durable("t", "a"), publisher.durable("t", "b")]
    publisher.send(frames[0])
    net.disks[0].sync()  # on disk, and the process dies before it hears of it
    net.slow.clear()
    net.kill(0)
    net.start(0)
    net.link(0, 1)
    again = DurableClient(net, 0)
    again.send(*frames)
    net.wait(2)
    assert again.accepted() == [1, 2]
    assert [one for one in subscriber.got() if one != "GAP"] == ["a", "b"]


def test_the_ids_of_another_principal_are_refused_and_not_taken_for_repetitions() -> None:
    """Whoever sees a publisher's ids could else make a broker drop what that one sends next."""
    net = DurableNet(1)
    tokens = {hashlib.sha256(name.encode()).hexdigest(): name for name in ("alice", "mallory")}
    net.config = replace(net.config, auth=AuthConfig(tokens=tokens))
    net.kill(0)
    net.start(0)
    alice, mallory, again = (DurableClient(net, 0, name) for name in ("alice", "mallory", "alice"))
    for client in (alice, mallory, again):
        client.ids = IdSource(77, 99)  # of a publisher that began at another broker
    first = alice.durable("t", "a")
    alice.send(first)
    net.now_us += 3_600_000_000
    mallory.send(mallory.durable("t", "b"))
    net.now_us -= 3_500_000_000
    again.send(first)
    again.send(alice.durable("t", "c"))
    assert (alice.accepted(), again.accepted()) == ([1], [1, 2])
    assert (mallory.accepted(), mallory.rejected()) == ([], [(1, "denied")])
    assert net.brokers[0].metrics()["durable_events_total"] == 2


def test_frames_wait_for_a_pubend_that_is_still_recovering() -> None:
    net = DurableNet(1)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "a"))
    net.kill(0)
    net.slow.add(0)
    net.start(0)
    subscriber, publisher = Client(net, 0), DurableClient(net, 0)
    subscriber.subscribe(1, "t")
    publisher.send(publisher.durable("t", "b"))
    for _ in range(5):
        assert publisher.accepted() == []
        net.sync(0)
        if publisher.accepted():
            break
    assert publisher.accepted() == [1]
    assert subscriber.got() == ["b"]


def test_a_neighbour_that_attaches_before_the_pubend_is_open_gets_everything() -> None:
    """Its tick is kept until then: no L for what is in the log."""
    net = DurableNet(2, [(0, 1)])
    subscriber, publisher = Client(net, 1), DurableClient(net, 0)
    subscriber.subscribe(1, "t")
    publisher.send(publisher.durable("t", "a"))
    net.cut(0, 1)
    publisher.send(publisher.durable("t", "b"))
    net.kill(0)
    net.slow.add(0)
    net.start(0)
    net.link(0, 1)
    net.wait(1)
    for _ in range(10):
        net.sync(0)
        net.wait(1)
    assert [one for one in subscriber.got() if one != "GAP"] == ["a", "b"]
    assert 1 << 32 not in {batch.pubend for batch in subscriber.batches if batch.lost}


def test_silence_is_asserted_and_horizons_advance_on_an_idle_durable_pubend() -> None:
    net = DurableNet(2, [(0, 1)])
    client = Client(net, 1)
    client.send(encode(Subscribe(number=1, topic="t", where="", durable="s")))
    net.wait(5)
    far = net.brokers[1]
    assert far is not None
    rows = far.status(net.now_us)["streams"]
    assert isinstance(rows, list)
    held = {row["pubend"]: row for row in rows}
    durable = held[pubend_text(1 << 32)]
    assert net.now_us - durable["horizon"] < 2_500_000
    assert durable["unknown"] == 0


def test_an_idle_broker_that_nobody_follows_durably_writes_nothing() -> None:
    net = DurableNet(2, [(0, 1)])
    Client(net, 1).subscribe(1, "t")
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "a"))
    net.wait(30)
    before = [disk.saves for disk in net.disks]
    net.wait(60)
    assert [disk.saves for disk in net.disks] == before


def test_an_idle_broker_that_is_followed_durably_hardly_writes() -> None:
    """An idle pubend is ever more rarely silent by name; what was published is released all the same (D7)."""
    net = DurableNet(2, [(0, 1)])
    reader, publisher = DurableClient(net, 1), DurableClient(net, 0)
    reader.send(encode(Subscribe(number=1, topic="t", where="", durable="s", ack="auto")))
    net.wait(2)
    publisher.send(publisher.durable("t", "a"))
    net.wait(5)
    assert reader.got() == ["a"]
    reader.send(encode(Ack(number=1, token=CheckpointToken({1 << 32: net.now_us}).to_json())))
    net.wait(130)
    broker = net.brokers[0]
    assert broker is not None
    assert broker.metrics()["durable_kept_bytes"] == 0
    before = [disk.saves for disk in net.disks]
    net.wait(600)
    written = [disk.saves - held for disk, held in zip(net.disks, before, strict=True)]
    assert max(written) <= 120, "in ten minutes"
    publisher.send(publisher.durable("t", "b"))
    assert reader.got() == ["a", "b"]


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("killed", [False, True])
def test_a_clean_restart_is_no_gap_and_a_kill_is_one_with_bounds(killed: bool, hops: int) -> None:
    """What is plain lives in memory: the next process answers for the last one, as far as it knows."""
    net = DurableNet(hops + 1, [(at, at + 1) for at in range(hops)])
    subscriber, other, publisher = Client(net, hops), Client(net, 0), Client(net, 0)
    subscriber.subscribe(1, "t")
    other.subscribe(1, "u")
    net.wait(3)
    publisher.publish("t", "a")
    publisher.publish("u", "not for the far one")
    last = net.now_us
    net.wait(0.3)
    broker = net.brokers[0]
    assert broker is not None
    if not killed:
        net.perform(0, broker.shutdown(net.now_us))
        net.give(hops, [])
    net.kill(0)
    net.wait(20)
    begun = net.now_us
    net.start(0)
    net.link(0, 1)
    net.wait(20)
    again = Client(net, 0)
    again.publish("t", "b")
    net.wait(2)
    gaps = [(batch.start, batch.end) for batch in subscriber.batches if batch.lost]
    assert [one for one in subscriber.got() if one != "GAP"] == ["a", "b"]
    if killed:
        ((start, end),) = gaps
        assert start < begun < end == begun + STEP_US
        assert last - SECOND_US <= start
    else:
        assert gaps == []
    net.wait(100)
    streams = net.brokers[hops].status(net.now_us)["streams"]  # type: ignore[union-attr]
    held = [row["pubend"] for row in streams]  # type: ignore[attr-defined]
    assert pubend_text(volatile_pubend(1, 1)) not in held, "what is over is forgotten"


def test_publishers_are_divided_among_pubends_and_keep_theirs() -> None:
    net = DurableNet(2, [(0, 1)], pubends=3)
    subscriber = Client(net, 1)
    subscriber.subscribe(1, "t")
    publishers = [DurableClient(net, 0) for _ in range(3)]
    for number in range(4):
        for at, publisher in enumerate(publishers):
            publisher.send(publisher.durable("t", f"{at}-{number}"))
    assert len({batch.pubend for batch in subscriber.batches}) == 3
    for at in range(3):
        assert [one for one in subscriber.got() if one.startswith(f"{at}-")] == [
            f"{at}-{n}" for n in range(4)
        ]


def test_fewer_pubends_than_before_still_answers_for_all() -> None:
    net = DurableNet(2, [(0, 1)], pubends=3)
    subscriber = Client(net, 1)
    subscriber.subscribe(1, "t")
    publishers = [DurableClient(net, 0) for _ in range(3)]
    net.cut(0, 1)
    for at, publisher in enumerate(publishers):
        publisher.send(publisher.durable("t", str(at)))
    net.kill(0)
    net.config = BrokerConfig(durable=DurableConfig(pubends=1))
    net.start(0)
    net.link(0, 1)
    net.wait(3)
    assert sorted(one for one in subscriber.got() if one != "GAP") == ["0", "1", "2"]


@pytest.mark.parametrize("counts", [(1, 4), (4, 1), (2, 3), (3, 2)])
def test_publishers_are_recognised_whatever_number_of_pubends_there_was(counts: tuple[int, int]) -> None:
    """P3: they go on where they are remembered, and with what is asked for before that is recovered."""
    net = DurableNet(1, pubends=counts[0])
    subscriber = Client(net, 0)
    subscriber.subscribe(1, "t")
    publishers = [DurableClient(net, 0) for _ in range(6)]
    frames = [publisher.durable("t", str(at)) for at, publisher in enumerate(publishers)]
    for publisher, frame in zip(publishers, frames, strict=True):
        publisher.send(frame)
    assert sorted(subscriber.got()) == numbers(0, 6)
    told = {batch.events()[0].payload: batch.pubend for batch in subscriber.batches}
    net.kill(0)
    net.config = BrokerConfig(durable=DurableConfig(pubends=counts[1]))
    net.slow.add(0)
    net.start(0)
    again = Client(net, 0)
    again.subscribe(1, "t")
    for at, frame in enumerate(frames):
        prefix = EventBatch.parse(frame, DEFAULT_LIMITS).id(0)[:8].hex()
        publishers[at] = DurableClient(net, 0)
        publishers[at].send(encode(Request(number=1, what="publisher.last", arguments={"prefix": prefix})))
        publishers[at].send(frame)
        assert not publishers[at].has(Reply), "nobody knows yet"
    net.slow.discard(0)
    net.sync(0)
    net.wait(1)
    for publisher, frame in zip(publishers, frames, strict=True):
        (reply,) = (one for one in publisher.messages if isinstance(one, Reply))
        assert json.loads(reply.body) == {"last": EventBatch.parse(frame, DEFAULT_LIMITS).id(0)[8:].hex()}
        assert publisher.accepted() == [1]
    for at, (publisher, frame) in enumerate(zip(publishers, frames, strict=True)):
        publisher.ids = IdSource(*struct.unpack(">II", EventBatch.parse(frame, DEFAULT_LIMITS).id(0)[:8]))
        publisher.sequence = 1
        publisher.send(publisher.durable("t", str(at)))
    assert sorted(again.got()) == numbers(0, 6), "only what is new"
    assert {batch.events()[0].payload: batch.pubend for batch in again.batches} == told
    net.brokers[0].check()  # type: ignore[union-attr]
