"""Durable subscriptions through whole brokers with disks in memory (D3, D4, D10, D11, D12)."""

from __future__ import annotations

import json

import pytest
from tests.worlds.brokers import Client, Net, numbers
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Reader

from postroad.durable.subscriber import filtering, hosting
from postroad.durable.subscriber import following as durable_following
from postroad.durable.subscriber import subscribers as durable_hosting
from postroad.durable.subscriber.following import Following
from postroad.events.batch import EventBatch
from postroad.events.token import CheckpointToken
from postroad.seam.effects import Effect, Send
from postroad.seam.inputs import Input, Received
from postroad.seam.storage import Save, StorageEffect
from postroad.seam.turn import Turn
from postroad.units import SECOND_US
from postroad.wire.frames import (
    DEFAULT_LIMITS,
    Ack,
    Acked,
    Credit,
    Kind,
    Nack,
    Ping,
    Pong,
    Refuse,
    Reply,
    Request,
    Subscribe,
    Unsubscribe,
    decode,
    encode,
    frame_kind,
)


def test_who_asks_again_while_it_is_created_is_told_as_late_as_the_first() -> None:
    """D3: SUBSCRIBED says that every event counts from now on, but of those who are named as missing."""
    net = DurableNet(2, [(0, 1)])
    for end in [end for end, far in net.ends.items() if isinstance(far, tuple)]:
        del net.ends[end]  # what is sent is lost, and nobody knows it yet
    first = Reader(net, 1)
    first.begin("s", ack="manual")
    tries: list[Reader] = []
    while not (tries and tries[-1].begun):
        if tries:
            tries[-1].gone()
        tries.append(Reader(net, 1))
        tries[-1].begin("s", ack="manual")
        net.wait(0.5)
        assert len(tries) < 60
    assert len(tries) > 1, "the other broker was not waited for"
    assert [message.missing for message in tries[-1].begun] == [("b0",)]


@pytest.mark.parametrize("since_us", [0, 1])
def test_who_asks_again_before_it_is_on_disk_is_told_when_it_is(since_us: int) -> None:
    """D3."""
    net = DurableNet(1)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "before"))
    net.slow.add(0)
    first, again = Reader(net, 0), Reader(net, 0)
    first.begin("s", ack="manual", since_us=since_us)
    first.gone()
    again.begin("s", ack="manual")
    net.wait(1)
    assert not again.begun
    net.sync(0)
    net.wait(1)
    net.sync(0)
    assert len(again.begun) == 1


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_new_durable_subscription_gets_what_comes_after_it(at: int) -> None:
    net = DurableNet(3, [(0, 1), (1, 2)])
    publisher, reader = DurableClient(net, 0), Reader(net, at)
    publisher.send(publisher.durable("t", "before"))
    reader.begin("s")
    net.wait(1)
    assert reader.start, "it began, and its token names the pubends"
    publisher.send(publisher.durable("t", "a"), publisher.durable("u", "no"), publisher.durable("t", "b"))
    net.wait(1)
    assert reader.got() == ["a", "b"]


@pytest.mark.parametrize("number", [-1, 1 << 32])
@pytest.mark.parametrize("kind", [{}, {"durable": "s"}, {"until": "{}"}], ids=["plain", "durable", "read"])
def test_a_number_that_no_frame_has_room_for_is_refused(number: int, kind: dict[str, str]) -> None:
    """Found: the first event for a durable subscription so numbered ended the broker."""
    net = DurableNet(1)
    publisher, reader = DurableClient(net, 0), Reader(net, 0)
    reader.send(encode(Subscribe(number=number, topic="t", where="", **kind)))  # type: ignore[arg-type]
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.wait(1)
    assert (reader.ended(), reader.batches) == (["usage"], [])


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("ack", ["", "auto"])
def test_a_subscriber_that_was_away_goes_on_where_it_was(at: int, ack: str) -> None:
    """D4."""
    net = DurableNet(3, [(0, 1), (1, 2)])
    publisher, reader = DurableClient(net, 0), Reader(net, at)
    reader.begin("s", ack=ack)
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    reader.ack()
    token = "" if ack else reader.token()
    reader.gone()
    for number in range(5, 40):
        publisher.send(publisher.durable("t", str(number)))
    again = Reader(net, at)
    again.begin("s", token=token, ack=ack)
    net.wait(2)
    publisher.send(publisher.durable("t", *numbers(40, 45)))
    net.wait(1)
    assert reader.got() == numbers(0, 5)
    assert again.got() == numbers(5, 45)


@pytest.mark.parametrize("at", [0, 1])
def test_who_comes_back_is_served_at_once(at: int) -> None:
    """D9: not when the next event or silence of the pubend comes, which may take seconds."""
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, at)
    reader.begin("s")
    net.wait(1)
    token = reader.token()
    reader.gone()
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    again = Reader(net, at)
    again.begin("s", token=token)
    assert again.got() == numbers(0, 5)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_crash_of_its_broker_loses_and_repeats_nothing(at: int) -> None:
    """D4."""
    net = DurableNet(3, [(0, 1), (1, 2)])
    publisher, reader = DurableClient(net, 0), Reader(net, at)
    reader.begin("s")
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    token = reader.token()
    net.kill(at)
    if at:
        for number in range(5, 30):
            publisher.send(publisher.durable("t", str(number)))
    net.wait(1)
    net.start(at)
    for one, other in ((0, 1), (1, 2)):
        if at in (one, other):
            net.link(one, other)
    if not at:
        publisher = DurableClient(net, 0)
        for number in range(5, 30):
            publisher.send(publisher.durable("t", str(number)))
    net.wait(2)
    again = Reader(net, at)
    again.begin("s", token=token)
    net.wait(3)
    publisher.send(publisher.durable("t", *numbers(30, 35)))
    net.wait(1)
    assert again.got() == numbers(5, 35)


def test_a_token_is_good_at_any_broker() -> None:
    """D10: what its new broker never filtered for it is refiltered from the log."""
    net = DurableNet(3, [(0, 1), (1, 2)])
    publisher, reader = DurableClient(net, 0), Reader(net, 2)
    reader.begin("s")
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    token = reader.token()
    net.kill(2)
    publisher.send(publisher.durable("t", *numbers(5, 20)))
    again = Reader(net, 1)
    again.begin("s", token=token)
    net.wait(3)
    publisher.send(publisher.durable("t", *numbers(20, 25)))
    net.wait(1)
    assert again.got() == numbers(5, 25)


def test_the_crash_of_the_publishing_broker() -> None:
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.cut(0, 1)
    publisher.send(publisher.durable("t", *numbers(5, 10)))
    net.kill(0)
    net.wait(1)
    net.start(0)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", *numbers(10, 15)))
    net.link(0, 1)
    net.wait(3)
    assert reader.got() == numbers(0, 15)


def test_replay_since_a_time() -> None:
    net = DurableNet(2, [(0, 1)])
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "old"))
    net.wait(1)
    since = net.now_us
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    reader = Reader(net, 1)
    reader.begin("s", since_us=since)
    net.wait(3)
    assert reader.got() == numbers(0, 5)


@pytest.mark.parametrize("how", ["since", "token"])
def test_a_broker_that_follows_pubends_already_takes_a_subscription_from_elsewhere(how: str) -> None:
    """It asks for what the subscription has not got at once: nothing else may ever make it."""
    net = DurableNet(2, [(0, 1)])
    publisher, before = DurableClient(net, 0), Reader(net, 1)
    before.begin("before", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    past = net.now_us - 3_600_000_000
    reader = Reader(net, 1)
    if how == "since":
        reader.begin("s", since_us=past, ack="auto")
    else:
        reader.begin("s", token=json.dumps({"00000001-00000000": past}))
    net.wait(2)
    assert reader.got() == numbers(0, 5)


def test_memory_that_does_not_know_a_subscription_is_not_taken_for_silence() -> None:
    """What was matched before it came is refiltered, also if it is recent and its record not yet on disk."""
    net = DurableNet(2, [(0, 1)])
    publisher, before = DurableClient(net, 0), Reader(net, 1)
    before.begin("before", ack="auto")
    net.wait(1)
    since = net.now_us
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    net.slow.add(1)
    publisher.send(publisher.durable("t", *numbers(5, 10)))
    reader = Reader(net, 1)
    reader.begin("s", since_us=since, ack="auto")
    net.wait(1)
    for _ in range(5):
        net.sync(1)
        net.wait(1)
    assert reader.got() == numbers(0, 10)


def test_the_newer_connection_has_the_name_and_another_selector_is_refused() -> None:
    net = DurableNet(1)
    first, second, third = Reader(net, 0), Reader(net, 0), Reader(net, 0)
    first.begin("s")
    second.begin("s")
    third.begin("s", topic="other")
    net.wait(1)
    assert [first.ended(), second.ended(), third.ended()] == [["usage"], [], ["usage"]]


def test_a_subscription_that_could_not_be_saved_is_not_there() -> None:
    """Whoever was told so does not acknowledge anything, and it would hold events for ever."""
    net = DurableNet(1)
    net.disks[0].full = True
    subscriber = Reader(net, 0)
    subscriber.begin("s")
    net.wait(1)
    assert subscriber.ended() == ["storage"]
    host = net.brokers[0]._rooms.subscribers
    assert host is not None
    assert list(host.hosting.subscriptions) == []
    net.disks[0].full = False
    net.wait(1)
    again, publisher = Reader(net, 0), DurableClient(net, 0)
    again.begin("s")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    assert (again.got(), again.ended()) == (["a"], [])
    net.disks[0].full = True  # what was there before stays
    later = Reader(net, 0)
    later.begin("s")
    net.wait(1)
    assert [one.name for one in host.hosting.subscriptions] == ["s"]
    net.brokers[0].check()


def test_listed_and_deleted() -> None:
    net = DurableNet(2, [(0, 1)])
    reader, publisher = Reader(net, 1), DurableClient(net, 0)
    reader.begin("s", ack="manual")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.wait(1)
    reader.send(encode(Unsubscribe(number=1)))
    assert reader.ended() == [""], "the subscriber goes, the subscription stays"
    reader.send(encode(Request(number=1, what="subs")))
    reply = next(message for message in reader.messages if isinstance(message, Reply))
    (row,) = json.loads(reply.body)["subscriptions"]
    assert (row["name"], row["connected"], row["lag_events"]) == ("s", False, 1)
    reader.send(encode(Request(number=2, what="subs.delete", arguments={"name": "s"})))
    reader.send(encode(Request(number=3, what="subs")))
    replies = [message for message in reader.messages if isinstance(message, Reply)]
    assert json.loads(replies[-1].body)["subscriptions"] == []
    net.wait(1)


def test_a_time_before_1970_is_refused() -> None:
    """Tokens and reports have no tick below 0: neighbours would end the link for one."""
    net = DurableNet(1)
    reader = Reader(net, 0)
    reader.begin("s", ack="auto", since_us=-5)
    net.wait(1)
    assert reader.ended() == ["usage"]
    host = net.brokers[0]._rooms.subscribers
    assert host is not None
    assert list(host.hosting.subscriptions) == []


@pytest.mark.parametrize("harm", ["killed", "full"])
def test_no_filtering_row_is_kept_of_what_was_deleted(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D6: records of the tail still name it after a restart, and a full disk does not let go of its row."""
    net = DurableNet(1)
    publisher, keeper, reader = DurableClient(net, 0), Reader(net, 0), Reader(net, 0)
    keeper.begin("keeper", ack="auto")
    reader.begin("s", ack="auto")
    net.wait(1)
    if harm == "full":
        monkeypatch.setattr(filtering, "CHECKPOINT_BYTES", 0)
    publisher.send(publisher.durable("t", "a"))
    net.wait(1)
    net.disks[0].full = harm == "full"
    reader.send(encode(Request(number=2, what="subs.delete", arguments={"name": "s"})))
    net.wait(1)
    net.disks[0].full = False
    if harm == "killed":
        net.kill(0)
        net.start(0)
        monkeypatch.setattr(filtering, "CHECKPOINT_BYTES", 0)
        publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "b"))
    net.wait(1)
    table = net.disks[0].tables[filtering.TABLE]
    assert sorted(map(len, table)) == [8, 12], "of the pubend, and of the keeper there"
    net.brokers[0].check()


def test_a_new_subscription_costs_the_same_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its broker does not walk through all of them for every pubend."""
    net = DurableNet(1, pubends=4)
    first = Reader(net, 0)
    first.begin("first", ack="auto")
    net.wait(1)
    walks: list[int] = []
    monkeypatch.setattr(Following, "_begin_late", lambda _self, _turn, stream: walks.append(stream.id))
    readers = [Reader(net, 0) for _ in range(20)]
    for number, reader in enumerate(readers):
        reader.begin(f"s{number}", ack="auto")
    net.wait(1)
    assert all(reader.start for reader in readers)
    assert walks == []


def test_tokens_of_those_who_match_nothing_are_rarely_written() -> None:
    """A token kept here advances over silence, which is a row on disk for each subscription and pubend."""
    net = DurableNet(1)
    publisher, readers = DurableClient(net, 0), [Reader(net, 0) for _ in range(10)]
    for number, reader in enumerate(readers):
        reader.begin(f"s{number}", ack="auto")
    net.wait(10)
    rows: list[bytes] = []
    save = net.disks[0]._do

    def count(effect: StorageEffect) -> list[Input]:
        if isinstance(effect, Save) and effect.table == "durable.released":
            rows.extend(key for key, _ in effect.rows)
        return save(effect)

    net.disks[0]._do = count  # type: ignore[method-assign]
    for _ in range(20):
        publisher.send(publisher.durable("other", "x"))
        net.wait(1)
    assert 3 <= len(rows) / 10 <= 5, "each of them every 5 s"


def test_many_tokens_that_advance_over_silence_are_written_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So many rows a second and no more, however many subscribers match nothing."""
    monkeypatch.setattr(hosting, "KEPT_ROW_US", SECOND_US)
    net = DurableNet(1)
    publisher, readers = DurableClient(net, 0), [Reader(net, 0) for _ in range(10)]
    for number, reader in enumerate(readers):
        reader.begin(f"s{number}", ack="auto")
    net.wait(20)
    before = net.disks[0].tables["durable.released"].copy()
    changed = 0
    for _ in range(40):
        publisher.send(publisher.durable("other", "x"))
        net.wait(1)
        after = net.disks[0].tables["durable.released"].copy()
        changed += before != after
        before = after
    assert 3 <= changed <= 5, "every 10 s"


@pytest.mark.parametrize("killed", [False, True])
def test_who_is_away_and_matches_nothing_holds_no_storage(killed: bool) -> None:
    """D7: its token, kept here, advances over silence as if it were there."""
    net = DurableNet(2, [(0, 1)], keep_us=2 * SECOND_US)
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s", ack="auto")
    net.wait(12)
    publisher.send(publisher.durable("t", "first"))
    net.wait(1)
    reader.gone()
    for _ in range(20):
        publisher.send(publisher.durable("other", "x" * 1_000))
        net.wait(1)
    assert net.disks[0].kept(1 << 32) == 21, "what it has not acknowledged is held, and all behind it"
    reader = Reader(net, 1)
    reader.begin("s", ack="auto")
    net.wait(1)
    assert reader.got() == ["first"]
    reader.ack()
    net.wait(1)
    reader.gone()
    for _ in range(20):
        publisher.send(publisher.durable("other", "x" * 1_000))
        net.wait(1)
    net.wait(10)
    assert net.disks[0].kept(1 << 32) < 5
    publisher.send(publisher.durable("t", "last"))
    net.wait(5)
    if killed:
        net.kill(1)
        net.start(1)
        net.link(0, 1)
        net.wait(2)
    for _ in range(20):
        publisher.send(publisher.durable("other", "x" * 1_000))
        net.wait(1)
    reader = Reader(net, 1)
    reader.begin("s", ack="auto")
    net.wait(2)
    assert reader.got() == ["last"], "and no gap"
    for one in net.brokers:
        assert one is not None
        one.check()


def test_a_subscriber_without_credit_catches_up_when_it_has_some() -> None:
    """D9: nothing is buffered for it, nothing is lost."""
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s")
    net.wait(1)
    held: list[int] = []
    take = reader.take

    def hold(frame: bytes) -> None:
        """Takes frames and gives no credit back."""
        if frame_kind(frame) == Kind.DELIVERY:
            held.append(len(frame))
            reader.batches.append(EventBatch.parse(frame, DEFAULT_LIMITS))
        else:
            reader.messages.append(decode(frame))

    reader.take = hold  # type: ignore[method-assign]
    for number in range(60):
        publisher.send(publisher.durable("t", str(number) + " " * 100_000))
    net.wait(1)
    assert len(reader.batches) < 60
    reader.take = take  # type: ignore[method-assign]
    net.give(1, [Received(reader.connection, encode(Credit(size=sum(held))))])
    net.wait(2)
    assert [one.strip() for one in reader.got()] == numbers(0, 60)


def test_hostile_tokens_cost_only_their_sender() -> None:
    """D3."""
    net = DurableNet(1)
    for number, token in enumerate(["[]", "{", '{"x": 1}', '{"00000001-00000000": -1}']):
        reader = Reader(net, 0)
        reader.begin(f"s{number}", token=token)
        assert reader.ended() == ["usage"]
    reader = Reader(net, 0)
    reader.begin("s", since_us=1 << 63)
    reader.send(encode(Ack(number=7, token="nonsense")))
    assert not reader.has(Refuse)
    other = Reader(net, 0)
    other.begin("fine")
    other.send(encode(Ack(number=1, token="nonsense")))
    assert other.has(Refuse)
    net.wait(1)


def test_a_subscriber_that_comes_back_to_what_must_be_refiltered_is_served() -> None:
    """D10: nobody but its own arrival would set it going."""
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    reader.begin("s", token="{}")
    net.wait(2)
    assert reader.got() == numbers(0, 5)
    reader.gone()
    again = Reader(net, 1)
    again.begin("s", token="{}")
    net.wait(5)
    assert again.got() == numbers(0, 5)


def test_an_old_token_is_where_it_goes_on() -> None:
    """D3: the token belongs to the subscriber. One told to go on later would drop what comes again."""
    net = DurableNet(2, [(0, 1)])
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s")
    net.wait(1)
    start = reader.start
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    reader.ack()
    net.wait(1)
    reader.gone()
    again = Reader(net, 1)
    again.begin("s", token=json.dumps(start))
    net.wait(3)
    assert again.start == start
    assert again.got() == numbers(0, 5)


@pytest.mark.parametrize("at", [0, 1])
def test_what_a_broker_keeps_for_switchover_was_not_filtered_for_those_who_come_later(at: int) -> None:
    """D5, D10: silence is relative to a filter. Before a subscription is known here it is refiltered."""
    net = DurableNet(2, [(0, 1)])
    publisher, other = DurableClient(net, 0), Reader(net, at)
    other.begin("other", topic="u")
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    reader = Reader(net, at)
    reader.begin("s", token=json.dumps(other.start))
    net.wait(3)
    publisher.send(publisher.durable("t", *numbers(5, 7)))
    net.wait(1)
    assert reader.got() == numbers(0, 7)


def test_a_new_subscription_begins_also_on_pubends_that_cannot_be_reached() -> None:
    """D12: what it begins after is in its token and on disk, whatever restarts before they are back."""
    net = DurableNet(2, [(0, 1)])
    publisher, other = DurableClient(net, 0), Reader(net, 1)
    other.begin("other", topic="u", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    net.cut(0, 1)
    net.wait(1)
    reader = Reader(net, 1)
    reader.begin("s", ack="auto")
    net.wait(8)
    assert reader.start.keys() == other.start.keys(), "every pubend that is known"
    publisher.send(publisher.durable("t", *numbers(5, 8)))
    net.kill(1)
    net.start(1)
    net.link(0, 1)
    net.wait(2)
    again = Reader(net, 1)
    again.begin("s", ack="auto")
    net.wait(3)
    assert again.got() == numbers(5, 8)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_plain_subscription_gets_nothing_older_though_its_broker_is_catching_up(
    restarted: bool,
) -> None:
    """It begins at the first tick filtered with it, and never before it was made: what its broker missed
    while it was down, or cut off, is read again with the interest of now, and is not for it."""
    net = DurableNet(3, [(0, 1), (1, 2)])
    publisher, other = DurableClient(net, 0), Reader(net, 2)
    other.begin("other", ack="auto")
    net.wait(2)
    if restarted:
        net.kill(2)
    else:
        net.cut(1, 2)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    publisher.send(publisher.durable("u", *numbers(0, 5)))
    net.wait(1)
    if restarted:
        net.start(2)
    new = Reader(net, 2)
    new.subscribe(1, "u")
    net.link(1, 2)
    net.wait(3)
    publisher.send(publisher.durable("u", *numbers(5, 8)))
    net.wait(2)
    assert [one for one in new.got() if one != "GAP"] == numbers(5, 8)


def test_a_pubend_that_was_not_known_yet_begins_when_the_subscription_was_created() -> None:
    """D10: not with the history of a network that its broker had not heard of."""
    net = DurableNet(2)
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    publisher.send(publisher.durable("t", "history"))
    net.wait(30)
    reader.begin("s", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", "after"))
    net.kill(1)
    net.start(1)
    net.link(0, 1)
    again = Reader(net, 1)
    again.begin("s", ack="auto")
    net.wait(3)
    assert again.got() == ["after"]
    assert not any(batch.lost for batch in again.batches)


def test_what_is_acknowledged_of_a_pubend_that_is_not_met_yet_does_not_come_again() -> None:
    """D11: where it began was not on disk when the broker died. The client says again what it acknowledged as
    soon as it is back, and drops what comes again: a new process must not get that."""
    net = DurableNet(2)
    publisher, reader = DurableClient(net, 0), Reader(net, 1)
    reader.begin("s", ack="auto")
    net.wait(1)
    net.disks[1].full = True
    net.link(0, 1)
    net.wait(2)
    publisher.send(publisher.durable("t", "once"))
    net.wait(2)
    assert reader.got() == ["once"]
    said = encode(Ack(number=1, token=reader.token()))
    reader.send(said)
    net.kill(1)
    net.disks[1].full = False
    net.start(1)
    again = Reader(net, 1)
    again.begin("s", ack="auto")
    net.wait(1)
    again.send(said)
    net.link(0, 1)
    net.wait(3)
    again.gone()
    new = Reader(net, 1)
    new.begin("s", ack="auto")
    net.wait(3)
    publisher.send(publisher.durable("t", "next"))
    net.wait(1)
    assert new.got() == ["next"]


def test_what_a_newer_connection_is_sent_takes_its_own_credit() -> None:
    """D9: the older one has room, but it is not the one that is served."""
    net = DurableNet(1)
    publisher, first, second = DurableClient(net, 0), Reader(net, 0), Reader(net, 0)
    first.begin("s", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    second.begin("s", ack="auto")
    net.wait(1)
    assert first.ended() == ["usage"]
    assert second.got() == numbers(0, 5)
    assert not second.has(Refuse)


class Slow(DurableNet):
    """A network in which the publishing broker 0 hears the nacks of broker 1 late."""

    def __init__(self, *args: object, **options: object) -> None:
        self.late: list[bytes] | None = None
        self.nacks: list[Nack] = []  # of broker 1 to broker 0
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def perform(self, at: int, effects: list[Effect]) -> None:
        passed: list[Effect] = []
        for effect in effects:
            if at == 1 and isinstance(effect, Send) and effect.data[4] == Kind.NACK:
                end = self.ends.get((at, effect.connection))
                if isinstance(end, tuple) and end[0] == 0:
                    message = decode(effect.data)
                    assert isinstance(message, Nack)
                    self.nacks.append(message)
                    if self.late is not None:
                        self.late.append(effect.data)
                        continue
            passed.append(effect)
        super().perform(at, passed)

    def hear(self) -> None:
        """Broker 0 hears what it was asked meanwhile."""
        late, self.late = self.late or [], None
        for end, other in list(self.ends.items()):
            if end[0] == 0 and isinstance(other, tuple) and other[0] == 1:
                self.give(0, [Received(end[1], frame) for frame in late])


@pytest.mark.parametrize("late", [False, True])
def test_what_many_ask_for_is_asked_for_once_upstream(late: bool) -> None:
    """D2: nacks are consolidated while the answer is on its way, and answered from the cache later."""
    links = [(0, 1), (1, 2), (1, 3), (1, 4)]
    net = Slow(5, links)
    publisher = DurableClient(net, 0)
    for at in (2, 3, 4):
        reader = Reader(net, at)
        reader.begin(f"s{at}", ack="auto")
        net.wait(1)
        reader.gone()
    publisher.send(publisher.durable("t", *numbers(0, 50)))
    net.wait(2)
    for at in (4, 3, 2, 1):
        net.kill(at)  # and what they remembered of it
    for at in (1, 2, 3, 4):
        net.start(at)
    for link in links:
        net.link(*link)
    net.wait(3)
    net.nacks.clear()
    net.late = [] if late else None
    readers = [Reader(net, at) for at in (2, 3, 4)]
    for at, reader in zip((2, 3, 4), readers, strict=True):
        reader.begin(f"s{at}", ack="auto")
    net.wait(0.2)
    if late:
        assert [reader.got() for reader in readers] == [[]] * 3
        net.hear()
    net.wait(1)
    assert [reader.got() for reader in readers] == [numbers(0, 50)] * 3
    assert [nack.pubend for nack in net.nacks] == [1 << 32], "one nack serves all three"


def tokens(first: int, last: int) -> str:
    return json.dumps(
        {f"{7:08x}-{number:08x}": 1 for number in range(first, last)} | {"00000001-00000000": 1}
    )


@pytest.mark.parametrize("ack", ["", "manual"])
def test_tokens_of_more_streams_than_can_be_said_back_are_refused(ack: str) -> None:
    """D3.

    Also those that add up: else the answer does not fit a frame, or the subscription's token is none.
    """
    net = DurableNet(1)
    net.wait(1)
    for first, last in (0, 4000), (4000, 4090), (0, 4090):
        reader = Reader(net, 0)
        reader.begin("s", token=tokens(first, last), ack=ack)
        net.wait(2)
        (begun,) = reader.begun
        assert len(CheckpointToken.from_json(begun.token)) == 1 + last
        reader.gone()
    reader = Reader(net, 0)
    reader.begin("s", token=tokens(4090, 4100), ack=ack)
    net.wait(2)
    assert not reader.begun
    assert reader.ended() == ["unavailable"]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("ack", ["", "manual"])
def test_a_token_of_what_was_followed_before_a_restart_is_taken_at_once(
    at: int, ack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D3: also while the disk is slow to say what was remembered of these pubends."""
    net = DurableNet(2, [(0, 1)], pubends=3)
    reader, publishers = Reader(net, at), [DurableClient(net, 0) for _ in range(3)]
    reader.begin("s", ack=ack)
    net.wait(1)
    for publisher in publishers:
        publisher.send(publisher.durable("t", "a"))
    net.wait(2)
    token = reader.token()
    assert len(json.loads(token)) == 6
    reader.ack()
    net.wait(2)
    monkeypatch.setattr(durable_hosting, "MAX_UNFOLLOWED", 1)
    net.kill(at)
    net.slow.add(at)
    net.start(at)
    again = Reader(net, at)
    again.begin("s", ack=ack, token="" if ack else token)
    assert again.ended() == []
    net.slow.clear()
    net.sync(at)
    net.link(0, 1)
    net.wait(2)
    assert again.got() == []
    publishers = [DurableClient(net, 0) for _ in range(3)]
    for publisher in publishers:
        publisher.send(publisher.durable("t", "b"))
    net.wait(2)
    assert again.got() == ["b"] * 3


@pytest.mark.parametrize("how", ["since", "token", "kept"])
def test_the_first_durable_subscription_of_a_broker_may_name_all_that_is_known_there(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D3, D10: nothing is followed there before, and all of it is then."""
    net = DurableNet(2, [(0, 1)], pubends=3)
    publishers, ack = [DurableClient(net, 0) for _ in range(3)], "" if how == "token" else "auto"
    before = Reader(net, 0)
    if how != "since":
        before.begin("s", ack=ack)
        net.wait(1)
    for publisher in publishers:
        publisher.send(publisher.durable("t", "a"))
    net.wait(2)
    token = before.token() if how == "token" else ""
    before.ack()
    net.wait(1)
    before.gone()
    for publisher in publishers:
        publisher.send(publisher.durable("t", "b"))
    net.wait(1)
    monkeypatch.setattr(durable_hosting, "MAX_UNFOLLOWED", 1)
    reader = Reader(net, 1)
    reader.begin("s", ack=ack, token=token, since_us=1 if how == "since" else 0)
    net.wait(3)
    assert reader.ended() == []
    assert sorted(reader.got()) == (["a"] * 3 if how == "since" else []) + ["b"] * 3


def test_a_token_of_much_that_is_not_heard_of_yet_is_not_refused_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D3, D10: a subscriber comes to a broker that has just started, and knows only its own pubends."""
    net = DurableNet(2, [(0, 1)], pubends=3)
    before = Reader(net, 0)
    before.begin("s")
    net.wait(8)
    token = before.token()
    assert len(json.loads(token)) == 6
    before.gone()
    net.kill(1)
    monkeypatch.setattr(durable_hosting, "MAX_UNFOLLOWED", 1)
    net.start(1)
    net.wait(1)
    reader = Reader(net, 1)
    reader.begin("s", token=token)
    net.wait(1)
    assert reader.ended() == ["unavailable"]
    net.link(0, 1)
    net.wait(1)
    reader = Reader(net, 1)
    reader.begin("s", token=token)
    net.wait(1)
    assert reader.ended() == []
    assert reader.begun


@pytest.mark.parametrize("first", [True, False])
def test_since_where_more_is_known_than_can_be_followed(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """D3: It begins on what is followed, and the others are none of a token that anybody sent."""
    for module in hosting, durable_following:
        monkeypatch.setattr(module, "MAX_FOLLOWED", 4)
    monkeypatch.setattr(durable_hosting, "MAX_UNFOLLOWED", 1)
    net = DurableNet(2, [(0, 1)], pubends=3)
    publisher = DurableClient(net, 1)
    publisher.send(publisher.durable("t", "a"))
    net.wait(1)
    if not first:
        Reader(net, 1).begin("other", ack="auto")
        net.wait(1)
    reader = Reader(net, 1)
    reader.begin("s", ack="auto", since_us=1)
    net.wait(3)
    assert reader.ended() == []
    assert reader.got() == ["a"]


def test_a_pubend_that_is_met_again_before_its_records_are_read_is_followed_once() -> None:
    """D3: Its broker was out of reach for so long that it was forgotten, while the disk hung."""
    net = DurableNet(2, [(0, 1)])
    reader, publisher = Reader(net, 1), DurableClient(net, 0)
    reader.begin("s", ack="auto")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.wait(2)
    net.kill(1)
    net.slow.add(1)
    net.start(1)
    broker = net.brokers[1]
    assert broker is not None
    turn = Turn(net.now_us, broker._unanswered)
    broker._rooms.routing.forget_origin(turn, 1)
    net.perform(1, turn.effects)
    net.link(0, 1)
    net.wait(1)
    net.slow.clear()
    net.sync(1)
    net.wait(1)
    publisher.send(publisher.durable("t", "b"))
    again = Reader(net, 1)
    again.begin("s", ack="auto")
    net.wait(2)
    assert again.got() == ["a", "b"]


def test_a_reader_with_a_large_token_is_answered() -> None:
    net = DurableNet(1)
    reader = Reader(net, 0)
    reader.send(encode(Subscribe(number=1, topic="t", where="", token=tokens(0, 20_479), until="{}")))
    net.wait(1)
    assert len(reader.begun) == 1


def test_an_acknowledgement_at_a_broker_without_a_disk_is_ignored() -> None:
    """As one of a subscription that ended meanwhile is."""
    net = Net(1)
    client = Client(net, 0)
    client.send(encode(Ack(number=1, token="{}", ticket=1)), encode(Ping(time_us=7)))
    assert [message for message in client.messages if isinstance(message, Acked | Refuse)] == []
    assert [message.time_us for message in client.messages if isinstance(message, Pong)] == [7]
