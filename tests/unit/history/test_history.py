"""P4, issue 4 item 6: brokers publish their own history as durable events, with disks in memory."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from tests.worlds.brokers import SECOND_US, Client, Net, numbers
from tests.worlds.durable_brokers import DurableClient
from tests.worlds.durable_subscribers import Reader
from tests.worlds.history_brokers import PERSIST_S, HistoryNet, events, links

from postroad.durable.publisher.pubend import RESERVE_US
from postroad.events.batch import Event, EventBatch
from postroad.history import history
from postroad.history.bulletins import (
    ATTACHMENTS,
    DELIVERIES,
    FILTERS,
    TOPICS,
    TOPOLOGY,
    Deliveries,
    decode_deliveries,
    join_parts,
)
from postroad.ids import HISTORY, MessageId, is_history, pubend_text
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.topology import EXPIRE_US
from postroad.seam.effects import Effect
from postroad.seam.inputs import Closed
from postroad.seam.storage import StorageEffect
from postroad.seam.tracking import (
    FiltersRead,
    Keep,
    ReadFilters,
)
from postroad.seam.turn import Turn
from postroad.tracking import attachment_log
from postroad.tracking.attachment import GROUP, SUBSCRIBER, AttachmentMap
from postroad.tracking.attachment_log import Change, Promise, decode_changes, encode_changes
from postroad.tracking.groups import group_members, group_name
from postroad.tracking.keys import PUBLISH, ROUTING
from postroad.tracking.query import lookup
from postroad.tracking.record import FilterMeta, decode_meta, decode_record, filter_of
from postroad.tracking.settings import TrackingConfig
from postroad.units import KIB
from postroad.wire.frames import DEFAULT_LIMITS, Rejected, Reply, Request, Subscribed, encode

ALL = "$postroad/#"


def filters(readers: Iterable[Client], broker: int) -> dict[int, tuple[FilterMeta, bytes]]:
    """The records that came, which must be whole and come once."""
    parts: dict[int, list[Event]] = {}
    for reader in readers:
        for event in events(reader, FILTERS, broker):
            parts.setdefault(int(event.attributes["sequence"]), []).append(event)
    found: dict[int, tuple[FilterMeta, bytes]] = {}
    for sequence, held in parts.items():
        assert [event.attributes["part"] for event in held] == list(range(int(held[0].attributes["parts"])))
        meta, body = decode_record(join_parts([event.payload for event in held]))
        assert meta.sequence == sequence
        assert held[0].attributes["final"] is meta.final
        assert held[0].attributes.get("replaces") == meta.replaces
        found[sequence] = meta, body
    return found


def holds(found: dict[int, tuple[FilterMeta, bytes]], kind: str, ids: bytes) -> bool:
    """Whether the filters of one kind have all of these ids."""
    held = [filter_of(meta, body) for meta, body in found.values() if meta.key.kind == kind]
    singles = [ids[at : at + 16] for at in range(0, len(ids), 16)]
    return all(any(one.contains(identity)[0] for one in held) for identity in singles)


def attachment_map(readers: Iterable[Client], broker: int, *, holes: bool = False) -> AttachmentMap:
    """The map that the bulletins tell, whose numbers have no holes unless some were dropped."""
    changes: list[Change] = []
    numbers: list[int] = []
    for reader in readers:
        for event in events(reader, ATTACHMENTS, broker):
            found, whole = decode_changes(event.payload)
            assert whole == len(event.payload)
            changes = found if event.attributes["whole"] else changes + found
            numbers.append(int(event.attributes["number"]))
    assert len(set(numbers)) == len(numbers)
    assert numbers == sorted(numbers)
    for boot in set() if holes else {number >> 32 for number in numbers}:
        of_boot = [number & 0xFFFF_FFFF for number in numbers if number >> 32 == boot]
        assert of_boot == list(range(1, len(of_boot) + 1))
    made = AttachmentMap()
    for change in changes:
        made._apply(change)
    return made


def reports(reader: Client, broker: int) -> list[Deliveries]:
    return [decode_deliveries(event.payload) for event in events(reader, DELIVERIES, broker)]


def reported(reader: Client, broker: int, name: str) -> list[tuple[int, int, bytes]]:
    """(session, tick, id) of what a subscriber is reported to have been sent."""
    found: list[tuple[int, int, bytes]] = []
    for one in reports(reader, broker):
        rows = zip(one.subscriber.tolist(), one.session.tolist(), one.tick.tolist(), one.ids, strict=True)
        found += [(s, tick, id.tobytes()) for who, s, tick, id in rows if one.names[who] == name]
    return found


def received(reader: Client) -> list[tuple[int, bytes]]:
    return [(event.tick or 0, bytes(event.id)) for event in events(reader)]


def logged(net: HistoryNet, at: int) -> list[Event]:
    """What a broker has published about itself."""
    records = net.disks[at].records.get(at + 1 << 32 | HISTORY, [])
    return [event for *_, data in records for event in EventBatch.parse(data, DEFAULT_LIMITS).events()]


def told_until(net: HistoryNet, at: int, by: int) -> int:
    """Until when another broker has all that this one published about itself."""
    asking = Client(net, by)
    asking.send(encode(Request(number=1, what="heads")))
    (reply,) = [message for message in asking.messages if isinstance(message, Reply)]
    return int(json.loads(reply.body)["heads"][pubend_text(at + 1 << 32 | HISTORY)])


def test_brokers_that_crash_again_and_again_do_not_tell_of_times_to_come() -> None:
    """P5: a lake takes the ticks of their history for times; what is owed since a start holds silence up."""
    net = HistoryNet(2, [(0, 1)])
    Reader(net, 1).begin("pipeline", topic=ALL)
    net.wait(30)
    for _ in range(10):
        net.kill(0)
        net.start(0)
        net.link(0, 1)
        net.wait(1)
    assert told_until(net, 0, by=1) < net.now_us + RESERVE_US


def history_records(net: HistoryNet, at: int) -> int:
    return len(net.disks[at].records.get(at + 1 << 32 | HISTORY, []))


@pytest.mark.parametrize("strategy", ["bloom", "exact", "none"])
def test_nobody_pays_for_history_that_nobody_reads(strategy: str) -> None:
    net = HistoryNet(2, [(0, 1)], strategy=strategy)
    publisher, reader, everything = DurableClient(net, 0), Reader(net, 1), Reader(net, 1)
    reader.begin("s")
    everything.begin("all", topic="#")
    net.wait(1)
    publisher.send(publisher.durable("t", *numbers(0, 10)))
    publisher.publish("t", "plain")
    net.wait(5)
    assert reader.got() == numbers(0, 10)
    assert everything.got() == numbers(0, 10), "what the network says about itself is not part of #"
    for at in (0, 1):
        assert history_records(net, at) == 0
        assert history.TABLE not in net.disks[at].tables
        assert net.metric(at, "history_events_total") == 0


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_subscriber_gets_the_history_of_every_broker(at: int) -> None:
    """P4."""
    net = HistoryNet(3, [(0, 1), (1, 2)])
    pipeline, reader, publisher = Reader(net, at), Reader(net, 2), DurableClient(net, 0)
    pipeline.begin("pipeline", topic=ALL)
    reader.begin("s")
    plain = Client(net, 1)
    plain.subscribe(1, "t")
    net.wait(4)
    publisher.send(publisher.durable("t", *numbers(0, 10)))
    publisher.publish("t", "plain")
    net.wait(4)
    ids = b"".join(batch.ids() for batch in plain.batches)
    assert len(ids) == 16 * 11
    assert holds(filters([pipeline], 0), PUBLISH, ids)
    assert holds(filters([pipeline], 1), ROUTING, ids)
    assert holds(filters([pipeline], 2), ROUTING, b"".join(batch.ids() for batch in reader.batches))
    assert ("neighbour", "2") in list(attachment_map([pipeline], 0))
    subscribers = {who for kind, who in attachment_map([pipeline], 1) if kind == "subscriber"}
    assert len(subscribers - {"pipeline"}) == 1, "the plain subscriber"
    assert ("pipeline" in subscribers) == (at == 1)
    assert [(link.broker, link.cost) for link in links(pipeline, 1)[-1].links] == [
        ("00000001", 1),
        ("00000003", 1),
    ]
    assert {event.attributes["name"] for event in events(pipeline, TOPOLOGY, 2)} == {"b2"}
    told = reported(pipeline, 2, "s")
    assert [(tick, id) for _, tick, id in told] == received(reader)
    assert len({session for session, _, _ in told}) == 1
    assert not any(reported(pipeline, broker, "pipeline") for broker in range(3))


def test_history_has_no_history() -> None:
    """An idle network is quiet, and nobody records or reports the events on $postroad."""
    net = HistoryNet(2, [(0, 1)])
    pipeline, publisher = Reader(net, 1), Client(net, 0)
    pipeline.begin("pipeline", topic=ALL)
    net.wait(2)
    publisher.publish("t", "x")
    net.wait(40)  # until its filter was idle for ten intervals, and is stored for the last time
    counts = [len(events(pipeline)), history_records(net, 0), history_records(net, 1)]
    net.wait(30)
    assert [len(events(pipeline)), history_records(net, 0), history_records(net, 1)] == counts
    stored = [decode_meta(record) for folder in net.folders for record in folder.records.values()]
    assert {meta.key.kind for meta in stored} == {PUBLISH}, "of the one plain event, at its origin"


def test_who_comes_later_asks_for_the_state() -> None:
    """P4: A second lake of the same network: what is to be known first was told when the first one came."""
    net = HistoryNet(2, [(0, 1)])
    Reader(net, 0).begin("one", topic=ALL)
    net.wait(3)
    other = Reader(net, 0)
    other.begin("other", topic=ALL)
    net.wait(3)
    assert TOPOLOGY not in {event.topic for event in events(other)}
    asked = []
    for _ in range(3):
        client = DurableClient(net, 0)
        client.send(encode(Request(number=1, what="history.restate", arguments={})))
        asked += [json.loads(one.body) for one in client.messages if isinstance(one, Reply)]
        net.wait(1)
    assert asked == [{"asked": ["00000001", "00000002"]}] * 3
    for broker in (0, 1):
        whole = [event for event in events(other, ATTACHMENTS, broker) if event.attributes["whole"]]
        assert (len(whole), len(events(other, TOPOLOGY, broker))) == (1, 1), "not with every question"


def test_others_are_not_asked_more_often_than_they_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request of a client is a question to every broker."""
    asked: list[int] = []
    ask = Inquiries.ask

    def counted(inquiries: Inquiries, turn: Turn, broker: int, what: str, *rest: Any) -> bool:
        asked.extend([broker] if what == history.RESTATE else [])
        return ask(inquiries, turn, broker, what, *rest)

    monkeypatch.setattr(Inquiries, "ask", counted)
    net = HistoryNet(2, [(0, 1)])
    client = DurableClient(net, 0)
    for _ in range(100):
        client.send(encode(Request(number=1, what="history.restate", arguments={})))
    replies = [json.loads(one.body) for one in client.messages if isinstance(one, Reply)]
    assert replies == [{"asked": ["00000001", "00000002"]}] * 100
    assert asked == [2]


def test_a_large_map_is_published_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: all of it was made in one turn, a quarter of a second; and where it is larger than what may wait
    for the disk, again with every turn, and never published."""
    monkeypatch.setattr(attachment_log, "PART_BYTES", 1000)
    monkeypatch.setattr(history, "MAX_PENDING_BYTES", 20_000)
    net = HistoryNet(1)
    tracking = net.recording[0]
    for number in range(1000):
        tracking.attached(f"s{number}", net.now_us)
        if number % 2:
            tracking.detached(f"s{number}", net.now_us)
    made = [0]  # parts, by turn
    tick, encoded = history.History.tick, lookup.encoded_parts

    def ticked(self: history.History, turn: Turn) -> None:
        made.append(0)
        tick(self, turn)

    def counted(changes: Iterable[Change]) -> Iterator[bytes]:
        for part in encoded(changes):
            made[-1] += 1
            yield part

    monkeypatch.setattr(history.History, "tick", ticked)
    monkeypatch.setattr(lookup, "encoded_parts", counted)
    reader = Reader(net, 0)
    reader.begin("lake", topic=ATTACHMENTS)
    for number in range(40):  # these come meanwhile
        tracking.attached(f"late{number}", net.now_us)
        net.wait(1)
    whole = [bool(event.attributes["whole"]) for event in events(reader, ATTACHMENTS)]
    assert whole == [True] + [False] * (len(whole) - 1)
    assert len(whole) > 12
    assert 0 < max(made) <= history.MAP_PARTS
    assert net.metric(0, "history_dropped_total") == 0
    told = attachment_map([reader], 0)
    now = {who for kind, who in told if kind == SUBSCRIBER}
    assert {f"s{number}" for number in range(0, 1000, 2)} | {f"late{number}" for number in range(35)} <= now
    assert not now & {f"s{number}" for number in range(1, 1000, 2)}


@pytest.mark.parametrize("event_bytes", [DEFAULT_LIMITS.event_bytes, 8 * KIB])
def test_sets_of_receivers_are_told_however_many_they_are(event_bytes: int) -> None:
    """P4.

    Found: the change that names a set was too large for an event, and dropped whenever the map was told; a
    bulk trace of what the set got was complete, with no receivers."""
    net = HistoryNet(1)
    net.limits = replace(DEFAULT_LIMITS, event_bytes=event_bytes)
    net.kill(0)
    net.start(0)
    reader = Reader(net, 0)
    reader.begin("lake", topic=ATTACHMENTS)
    tracking = net.recording[0]
    names = [f"{number:0200}" for number in range(event_bytes // 200 + 1)]
    for name in names:
        tracking.attached(name, net.now_us)
    for count in range(4):
        tracking.delivered(1, names, bytes(MessageId(5, 1, net.now_us // 1000, count)), net.now_us)
        net.wait(2)
    assert (net.notes, net.metric(0, "history_dropped_total")) == ([], 0)
    sets = [group_members(who) for kind, who in attachment_map([reader], 0) if kind == GROUP]
    assert sorted(name for members in sets for name in members) == names


def small_events() -> HistoryNet:
    net = HistoryNet(1)
    net.limits = replace(DEFAULT_LIMITS, event_bytes=8 * KIB)
    net.kill(0)
    return net


def lost_times(net: HistoryNet, reader: Reader, *times_us: int) -> list[bool]:
    """Of which of these nothing is known, by what was told, and nothing was left out."""
    assert (net.notes, net.metric(0, "history_dropped_total")) == ([], 0)
    told = attachment_map([reader], 0)
    return [told.lost_at(time_us // 1000, skew_us=0) for time_us in times_us]


MANY = tuple(f"{number:0200}" for number in range(4000))  # too many to be split for events so small


def test_a_set_of_before_that_does_not_fit_a_bulletin_is_told_as_lost() -> None:
    """P5: of an earlier version, or of larger events. Found: what was missing made bulk traces of all times
    partial for as long as the map has that set, since each whole map lacked it again."""
    net = small_events()
    first_us, second_us, end_us = (net.now_us - ago_s * SECOND_US for ago_s in (900, 600, 300))
    name = group_name(MANY)
    net.folders[0].changes = encode_changes(
        [
            Change(what="start", at_us=first_us, kind="all", promise=Promise()),
            Change(what="attach", at_us=first_us, kind=SUBSCRIBER, who="s"),
            Change(what="attach", at_us=second_us, kind=GROUP, who=name),
            Change(what="late", at_us=first_us, until_us=first_us + SECOND_US, kind=GROUP, who=name),
            Change(what="detach", at_us=end_us, kind=GROUP, who=name),
            Change(what="stop", at_us=net.now_us),
        ]
    )
    net.start(0)
    reader = Reader(net, 0)
    reader.begin("lake", topic=ATTACHMENTS)
    net.wait(3)
    times_us = (first_us, (first_us + second_us) // 2, second_us, end_us, net.now_us)
    assert lost_times(net, reader, *times_us) == [True, False, True, True, False]
    assert "s" in attachment_map([reader], 0).at(SUBSCRIBER, first_us // 1000, skew_us=0)


def test_a_set_that_does_not_fit_a_bulletin_is_told_as_lost_from_when_it_is_used() -> None:
    """P5."""
    net = small_events()
    net.start(0)
    reader = Reader(net, 0)
    reader.begin("lake", topic=ATTACHMENTS)
    tracking, began_us = net.recording[0], net.now_us
    for name in MANY:
        tracking.attached(name, net.now_us)
    net.wait(10)
    used_us = net.now_us
    for count in range(4):
        tracking.delivered(1, MANY, bytes(MessageId(5, 1, net.now_us // 1000, count)), net.now_us)
        net.wait(2)
    assert lost_times(net, reader, began_us, used_us - SECOND_US) == [False, False]
    assert lost_times(net, reader, net.now_us, net.now_us + 10**15) == [True, True]


def test_only_what_is_asked_for() -> None:
    net = HistoryNet(1)
    pipeline, publisher = Reader(net, 0), Client(net, 0)
    pipeline.begin("pipeline", topic=TOPOLOGY)
    net.wait(1)
    publisher.publish("t", "x")
    net.wait(5)
    assert {event.topic for event in events(pipeline)} == {TOPOLOGY}


def test_clients_do_not_write_history() -> None:
    net = HistoryNet(1)
    publisher = DurableClient(net, 0)
    for topic in TOPICS:
        publisher.send(publisher.durable(topic, "forged"))
        publisher.publish(topic, "forged")
    assert len(publisher.rejected()) == 2 * len(TOPICS)
    assert {code for _, code in publisher.rejected()} == {"denied"}


def test_a_broker_without_a_disk_publishes_nothing() -> None:
    net = Net(1)
    reader, publisher = Client(net, 0), Client(net, 0)
    reader.subscribe(1, ALL)
    publisher.publish("t", "x")
    net.wait(5)
    assert reader.batches == []
    assert not any(isinstance(message, Rejected) for message in publisher.messages)


def test_a_plain_subscriber_sees_it_live() -> None:
    net = HistoryNet(2, [(0, 1)])
    reader, publisher = Client(net, 1), Client(net, 0)
    reader.subscribe(1, FILTERS)
    net.wait(3)
    publisher.publish("t", "x")
    net.wait(3)
    assert [meta.key.kind for meta, _ in filters([reader], 0).values()] == [PUBLISH]


def test_part_full_states_come_with_every_interval_and_replace_each_other() -> None:
    """T8: the lake can answer for the recent past; a later state has all of the earlier one."""
    net = HistoryNet(1)
    pipeline, publisher = Reader(net, 0), Client(net, 0)
    pipeline.begin("pipeline", topic=FILTERS)
    ids: list[bytes] = []
    for number in range(4):
        frame = publisher.frame("t", str(number))
        ids.append(frame[48:64])
        publisher.send(frame)
        net.wait(1.5)
        assert holds(filters([pipeline], 0), PUBLISH, b"".join(ids))
    found = filters([pipeline], 0)
    assert any(meta.replaces in found for meta, _ in found.values())
    last, body = found[max(found)]
    assert all(filter_of(last, body).contains(identity)[0] for identity in ids)


def test_a_subscriber_whose_broker_is_cut_off_misses_nothing() -> None:
    net = HistoryNet(2, [(0, 1)])
    pipeline = Reader(net, 1)
    pipeline.begin("pipeline", topic=ALL)
    net.wait(2)
    net.cut(0, 1)
    for _ in range(3):  # brokers are forgotten, and clients that say nothing
        net.now_us += EXPIRE_US
        net.wait(1)
    assert net.metric(0, "interest_owners") == 1
    publisher = Client(net, 0)
    frame = publisher.frame("t", "x")
    publisher.send(frame)
    net.wait(3)
    net.link(0, 1)
    again = Reader(net, 1)
    again.begin("pipeline", topic=ALL, token=pipeline.token())
    net.wait(5)
    assert holds(filters([pipeline, again], 0), PUBLISH, frame[48:64])
    attachment_map([pipeline, again], 0)
    told = [*links(pipeline, 0), *links(again, 0)]
    assert [[link.broker for link in one.links] for one in told] == [["00000002"], [], ["00000002"]]


def lapse(net: HistoryNet) -> None:
    """More than a day, after which nobody is heard of any more."""
    for passed_us in (EXPIRE_US, EXPIRE_US, EXPIRE_US, history.LINGER_US):
        net.now_us += passed_us
        net.wait(1)


@pytest.mark.parametrize("kept", [True, False])
def test_who_is_cut_off_for_more_than_a_day_gets_what_is_still_stored(kept: bool) -> None:
    """P4.

    Found: it was skipped, and a lake had all of that time but for the filters. Of what is not stored any
    more the map says that it is forgotten."""
    net = HistoryNet(2, [(0, 1)])
    pipeline = Reader(net, 1)
    pipeline.begin("pipeline", topic=ALL)
    net.wait(5)
    net.cut(0, 1)
    lapse(net)
    published = history_records(net, 0)
    publisher, at_us = Client(net, 0), net.now_us
    frame = publisher.frame("t", "x")
    publisher.send(frame)
    net.wait(30)
    assert history_records(net, 0) == published, "nobody wants it"
    if not kept:
        net.now_us += net.tracking.keep_us
        net.wait(30)
    net.link(0, 1)
    again = Reader(net, 1)
    again.begin("pipeline", topic=ALL, token=pipeline.token())
    net.wait(30)
    assert holds(filters([pipeline, again], 0), PUBLISH, frame[48:64]) is kept
    assert ((attachment_map([pipeline, again], 0).forgot_us or 0) > at_us) is not kept


def owing() -> tuple[HistoryNet, Reader, bytes]:
    """A broker whose disk takes no filters to be published; who wants them, and the id of what is in one."""
    net = HistoryNet(2, [(0, 1)])
    pipeline, publisher = Reader(net, 1), Client(net, 0)
    pipeline.begin("pipeline", topic=ALL)
    net.wait(5)
    net.disks[0].short = True
    frame = publisher.frame("t", "x")
    publisher.send(frame)
    net.wait(30)
    return net, pipeline, frame[48:64]


def test_what_a_process_owed_that_died_days_ago_is_published() -> None:
    """P4."""
    net, pipeline, identity = owing()
    net.kill(0)
    lapse(net)
    net.disks[0].short = False
    net.start(0)
    net.link(0, 1)
    again = Reader(net, 1)
    again.begin("pipeline", topic=ALL, token=pipeline.token())
    net.wait(30)
    assert holds(filters([pipeline, again], 0), PUBLISH, identity)


def test_a_process_that_does_not_track_leaves_what_is_owed_to_the_next() -> None:
    """P4: It owes nothing itself, and skips nothing."""
    net, pipeline, identity = owing()
    for strategy in ("none", "bloom"):
        net.kill(0)
        net.disks[0].short = False
        net.tracking = TrackingConfig(strategy=strategy, persist_us=PERSIST_S * SECOND_US)
        net.start(0)
        net.link(0, 1)
        net.wait(30)
        assert holds(filters([pipeline], 0), PUBLISH, identity) == (strategy == "bloom")
        assert told_until(net, 0, by=1) > net.now_us - 20 * SECOND_US, "it goes on"


def test_interest_lapses() -> None:
    net = HistoryNet(1)
    reader = Client(net, 0)
    reader.subscribe(1, ALL)
    net.wait(1)
    net.ends.pop((0, reader.connection))
    net.give(0, [Closed(reader.connection)])
    Client(net, 0).publish("t", "x")
    net.wait(3)
    assert FILTERS in {event.topic for event in logged(net, 0)}, "whoever wanted it may come back"
    net.now_us += history.LINGER_US
    net.wait(1)
    lapsed = history_records(net, 0)
    Client(net, 0).publish("t", "y")
    net.wait(5)
    assert history_records(net, 0) == lapsed


def test_filters_that_nobody_wants_any_more_are_no_reason_to_wake_up() -> None:
    """Found: a broker whose disk had failed to take some went on waking up for them without a pause."""
    net = HistoryNet(1)
    reader, other = Client(net, 0), Client(net, 0)
    reader.subscribe(1, FILTERS)
    other.subscribe(1, TOPOLOGY)
    net.wait(1)
    net.ends.pop((0, reader.connection))
    net.give(0, [Closed(reader.connection)])
    net.disks[0].full = True
    Client(net, 0).publish("t", "x")
    net.wait(5)
    net.now_us += history.LINGER_US
    net.wait(1)
    broker = net.brokers[0]
    assert broker is not None
    assert broker.next_deadline() > net.now_us


def test_a_restart_begins_anew_and_says_what_is_acknowledged() -> None:
    net = HistoryNet(1)
    pipeline, reader, publisher = Reader(net, 0), Reader(net, 0), DurableClient(net, 0)
    pipeline.begin("pipeline", topic=ALL)
    reader.begin("s")
    net.wait(2)
    publisher.send(publisher.durable("t", *numbers(0, 5)))
    net.wait(1)
    reader.ack()
    net.wait(3)
    token = pipeline.token()
    net.kill(0)
    net.wait(1)
    net.start(0)
    again = Reader(net, 0)
    again.begin("pipeline", topic=ALL, token=token)
    net.wait(3)
    (acknowledged,) = [one.acknowledged for one in reports(again, 0) if len(one.acknowledged)]
    last = received(reader)[-1][0]
    assert set(acknowledged.pubend.tolist()) == {1 << 32}
    assert acknowledged.end.max() >= last
    wholes = [event.attributes["whole"] for event in events(again, ATTACHMENTS, 0)]
    assert wholes[0] is True
    changes = decode_changes(events(again, ATTACHMENTS, 0)[0].payload)[0]
    assert [change.what for change in changes if change.what in ("lost", "start")][:2] == ["start", "lost"]
    assert links(again, 0)[0].boot == 2
    assert not reported(again, 0, "s")


def test_sequences_are_not_given_out_again_after_a_backup_is_put_back() -> None:
    """P4: a state of the new line would else replace a filter of the old one, in a lake that has both."""
    net = HistoryNet(2, [(0, 1)])
    pipeline = Reader(net, 1)
    pipeline.begin("pipeline", topic=ALL)
    net.wait(2)

    def live() -> None:
        for _ in range(3):
            Client(net, 0).publish("t", "x")
            net.wait(2 * PERSIST_S)

    live()
    backup = copy.deepcopy((net.disks[0], net.folders[0]))
    live()
    before = filters([pipeline], 0)
    net.kill(0)
    net.disks[0], net.folders[0] = backup
    net.start(0)
    net.link(0, 1)
    live()
    found = filters([pipeline], 0)  # each comes once, or this says so
    assert len(before) > 4
    assert len(found) > len(before) + 2
    assert min(set(found) - set(before)) > max(before)


def test_a_failing_disk_drops_counts_says_and_makes_good() -> None:
    net = HistoryNet(2, [(0, 1)])
    pipeline, publisher = Reader(net, 1), Client(net, 0)
    pipeline.begin("pipeline", topic=ALL)
    net.wait(2)
    net.disks[0].full = True
    frame = publisher.frame("t", "x")
    publisher.send(frame)
    late = Client(net, 0)
    late.subscribe(1, "t")
    for _ in range(8):
        Client(net, 0).subscribe(1, "t")
        net.wait(8)
    assert net.metric(0, "history_dropped_total") > 0
    assert net.metric(0, "history_pending_bytes") < history.MAX_PENDING_BYTES
    assert 1 <= len(net.notes) <= 8
    assert net.notes[0].endswith("events: the disk does not take them")
    net.disks[0].full = False
    net.wait(30)
    assert holds(filters([pipeline], 0), PUBLISH, frame[48:64])
    attached = [who for kind, who in attachment_map([pipeline], 0, holes=True) if kind == "subscriber"]
    assert len(attached) == 9, "the last whole map, and what came after it"
    numbers = [int(event.attributes["number"]) for event in events(pipeline, ATTACHMENTS, 0)]
    assert numbers[-1] - numbers[0] >= len(numbers), "a hole tells that some were dropped"


def test_who_owes_history_does_not_say_that_there_is_none() -> None:
    """P5: A full disk takes rows, so silence could be reserved, and a lake would have all of that time."""
    net = HistoryNet(2, [(0, 1)])
    pipeline, publisher = Reader(net, 1), Client(net, 0)
    pipeline.begin("pipeline", topic=ALL)
    net.wait(30)
    assert net.now_us - told_until(net, 0, by=1) <= 20 * SECOND_US, "nothing to tell, and that is told"
    net.disks[0].short = True
    full_us = net.now_us
    frame = publisher.frame("t", "x")
    publisher.send(frame)
    for restarts in range(3):
        if restarts:
            net.kill(0)
            net.start(0)
            net.link(0, 1)
        for number in range(15):
            net.wait(4)
            late = Client(net, 1)
            late.subscribe(1, f"t/{restarts}/{number}")
            assert late.has(Subscribed), "nobody waits for that disk"
        assert told_until(net, 0, by=1) <= full_us + 5 * SECOND_US
    net.disks[0].short = False
    net.wait(60)
    assert holds(filters([pipeline], 0), PUBLISH, frame[48:64])
    assert net.now_us - told_until(net, 0, by=1) <= 35 * SECOND_US


class SlowReads(HistoryNet):
    """Stored filters are read as of when that is asked, and handed over so much later."""

    def __init__(self, count: int, links: list[tuple[int, int]]) -> None:
        self.read_s = 0.0
        self.asked: list[tuple[int, int, FiltersRead]] = []
        super().__init__(count, links)

    def perform(self, at: int, effects: list[Effect]) -> None:
        reads = [effect for effect in effects if isinstance(effect, ReadFilters)] if self.read_s else []
        super().perform(at, [effect for effect in effects if effect not in reads])
        for effect in reads:
            records = {sequence: self.folders[at].records.get(sequence, b"") for sequence in effect.sequences}
            self.asked.append((at, self.now_us, FiltersRead(tag=effect.tag, records=records)))

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            super().wait(0.1)
            while self.asked and self.asked[0][1] + self.read_s * SECOND_US <= self.now_us:
                at, _, read = self.asked.pop(0)
                self.give(at, [read])

    def live(self, seconds: int) -> None:
        """Messages and subscribers come to the first broker."""
        for _ in range(seconds):
            client = Client(self, 0)
            client.publish("t", "x")
            client.subscribe(1, "t")
            self.wait(1)


def slow_reads() -> tuple[SlowReads, Reader]:
    net = SlowReads(2, [(0, 1)])
    pipeline = Reader(net, 1)
    pipeline.begin("pipeline", topic=ALL)
    net.wait(5)
    return net, pipeline


def test_nor_after_a_restart() -> None:
    """P5: The state that is owed then is a few seconds old, and replaced others."""
    net, _ = slow_reads()
    net.read_s = 1000
    at_us = net.now_us
    net.live(20)
    net.kill(0)
    net.asked.clear()
    net.start(0)
    net.link(0, 1)
    net.wait(30)
    assert told_until(net, 0, by=1) <= at_us + 6 * SECOND_US, "no more than the reservation"


@pytest.mark.parametrize("busy", [False, True])
def test_bulletins_do_not_go_past_filters_that_are_late(busy: bool) -> None:
    """P5: a lake takes the ticks of history for times of which it has all there is. If the broker is busy,
    later states of its filters replace those that are owed."""
    net, pipeline = slow_reads()
    net.read_s = 40
    publisher, at_us = Client(net, 0), net.now_us
    frame = publisher.frame("t", "x")
    publisher.send(frame)
    for _ in range(15):
        net.live(1 if busy else 0)
        net.wait(1 if busy else 2)
        Client(net, 0).subscribe(1, "t")
    assert told_until(net, 0, by=1) <= at_us + 3 * PERSIST_S * SECOND_US
    broker = net.brokers[0]
    assert broker is not None
    assert broker.next_deadline() > net.now_us, "what waits is no reason to wake up"
    net.read_s = 0.1
    net.wait(15)
    assert holds(filters([pipeline], 0), PUBLISH, frame[48:64])
    subscribers = [who for kind, who in attachment_map([pipeline], 0) if kind == SUBSCRIBER]
    assert len(subscribers) == (30 if busy else 15)
    assert net.metric(0, "history_dropped_total") == 0
    assert told_until(net, 0, by=1) > at_us + 30 * SECOND_US


def test_bulletins_go_between_filters_that_are_always_late() -> None:
    """P5."""
    net, pipeline = slow_reads()
    net.read_s = 2.5 * PERSIST_S
    net.live(30)
    told = [who for kind, who in attachment_map([pipeline], 0) if kind == SUBSCRIBER]
    assert len(told) >= 20


def test_not_more_than_so_many_bulletins_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """P5."""
    net, pipeline = slow_reads()
    monkeypatch.setattr(history, "MAX_GATHERED_BYTES", 1000)
    net.read_s = 1000
    net.live(60)
    told = [who for kind, who in attachment_map([pipeline], 0) if kind == SUBSCRIBER]
    assert 30 <= len(told) < 60


class Stepped(HistoryNet):
    """Disks that sync one effect at a time, when told."""

    def perform(self, at: int, effects: list[Effect]) -> None:
        super().perform(at, effects)
        self.slow = set(range(len(self.disks)))

    def one(self, at: int) -> bool:
        disk = self.disks[at]
        if not disk.waiting:
            return False
        rest: list[StorageEffect] = disk.waiting[1:]
        disk.waiting = disk.waiting[:1]
        done = disk.sync()
        disk.waiting = rest
        self.give(at, done)
        return True

    def all(self, at: int) -> None:
        while self.one(at):
            pass


@pytest.mark.parametrize("seed", range(15))
def test_kill_9_neither_repeats_nor_loses_a_stored_filter(seed: int) -> None:
    """Whatever is on disk when the process dies: saved and not published, published and not heard of."""
    draw = random.Random(seed)
    net = Stepped(1)
    net.slow = {0}
    pipeline = Reader(net, 0)
    pipeline.begin("pipeline", topic=ALL)
    net.all(0)
    readers = [pipeline]
    token: dict[str, int] = {}
    wanted_from = net.folders[0].ever.copy()
    for _ in range(6):
        publisher = Client(net, 0)
        for _ in range(draw.randrange(1, 4)):
            publisher.publish("t", "x")
            net.wait(draw.choice([0.1, 1.1, 1.1]))
            for _ in range(draw.randrange(8)):
                net.one(0)
        token |= json.loads(readers[-1].token())
        net.kill(0)
        net.wait(0.2)
        net.start(0)
        again = Reader(net, 0)
        net.all(0)
        again.begin("pipeline", topic=ALL, token=json.dumps(token))
        net.all(0)
        readers.append(again)
    for _ in range(10):
        net.wait(1)
        net.all(0)
    found = filters(readers, 0)  # asserts that every part came once
    live = set(net.folders[0].records) - wanted_from
    assert live <= set(found), "what is stored and was not replaced is published"
    assert set(found) <= net.folders[0].ever
    attachment_map(readers, 0)


def test_large_filters_come_in_parts() -> None:
    net = HistoryNet(1)
    net.tracking = TrackingConfig(persist_us=PERSIST_S * SECOND_US, adaptive=False)  # 2 MB each
    net.kill(0)
    net.start(0)
    pipeline, publisher = Reader(net, 0), Client(net, 0)
    pipeline.begin("pipeline", topic=FILTERS)
    frame = publisher.frame("t", "x")
    publisher.send(frame)
    net.wait(3)
    found = filters([pipeline], 0)
    assert max(int(event.attributes["parts"]) for event in events(pipeline)) == 8
    assert holds(found, PUBLISH, frame[48:64])


def test_of_damaged_records_the_description_is_published_and_it_is_said() -> None:
    net = HistoryNet(1)
    pipeline, publisher = Reader(net, 0), Client(net, 0)
    pipeline.begin("pipeline", topic=FILTERS)
    folder = net.folders[0]
    keep = folder.keep

    def damage(one: Keep) -> None:
        keep(one)
        folder.records = {sequence: bytes(100) for sequence in folder.records}

    folder.keep = damage  # type: ignore[method-assign]
    publisher.publish("t", "x")
    net.wait(3)
    (event,) = events(pipeline)
    assert decode_meta(event.payload).sequence == event.attributes["sequence"]
    assert net.notes == ["the broker's own history lacks 1 events: their stored filters cannot be read"]
    folder.keep = keep  # type: ignore[method-assign]
    pipeline.batches.clear()
    publisher.publish("t", "y")
    net.wait(3)
    assert len(filters([pipeline], 0)) == 1


def test_the_pubend_of_history_is_known_by_its_number() -> None:
    assert is_history(7 << 32 | HISTORY)
    assert not is_history(7 << 32)
