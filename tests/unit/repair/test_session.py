"""How a client's part in repair is put together: what it subscribes to, in which scope, and what it tells."""

from __future__ import annotations

import random

import pytest

from postroad.client.repair.messages import Ask, Message, Repair, Request, Summary, decode, encode
from postroad.client.repair.publisher import MAX_NAMES
from postroad.client.repair.session import Item, Session
from postroad.client.repair.settings import RepairSettings, settings_for
from postroad.errors import UsageError
from postroad.events import Value
from postroad.events.batch import MAX_ROWS_BYTES, EventBatch, best_effort_frame, encode_row
from postroad.ids import IdSource
from postroad.kernel.layout import FRAME_HEADER_BYTES
from postroad.selectors.tags import event_bits
from postroad.units import SECOND_US
from postroad.wire.datagrams import MAX_BEST_EFFORT_BYTES
from postroad.wire.frames import DEFAULT_LIMITS

PREFIX, OTHER = b"\0\x40\0\1\0\0\0\7", b"\0\x40\0\2\0\0\0\7"


class Client:
    """Its session, and what that subscribes to."""

    def __init__(self) -> None:
        self.topics: list[str] = []
        self.session = Session(
            draw=random.Random(1).randrange, subscribe=self._subscribe, unsubscribe=lambda _: None
        )

    def _subscribe(self, topic: str, _where: str) -> int:
        self.topics.append(topic)
        return 100 + len(self.topics)

    def open(self, prefix: bytes = PREFIX) -> None:
        ids = IdSource(int.from_bytes(prefix[:4], "big"), int.from_bytes(prefix[4:], "big"))
        self.session.opened(prefix, DEFAULT_LIMITS, lambda: ids.next(1))

    def hear(self, topic: str, message: Message, now_us: int) -> list[Item]:
        """What a subscription of its own brings."""
        said_on = topic.replace("+", OTHER.hex())
        row = encode_row(OTHER + bytes(8), said_on, {}, encode(message), DEFAULT_LIMITS, tick=1)
        frame = best_effort_frame([row], channel=101 + self.topics.index(topic))
        return self.session.received(EventBatch.parse(frame, DEFAULT_LIMITS), DEFAULT_LIMITS, now_us, 0)

    def said(self, now_us: int) -> list[tuple[bytes, str, list[str], Message]]:
        """Repair messages that are due: id, topic, attributes and content of each."""
        self.session.take()
        self.session.tick(now_us, 0)
        self.session.check()
        batches = [EventBatch.parse(frame, DEFAULT_LIMITS) for frame in self.session.take()]
        assert all(len(batch.data) - FRAME_HEADER_BYTES <= MAX_ROWS_BYTES for batch in batches)
        return [
            (batch.id(row), batch.topic(row), list(batch.attributes(row)), decode(batch.payload(row)))
            for batch in batches
            for row in range(batch.count)
        ]


@pytest.mark.parametrize(
    ("topic", "where", "told_apart"),
    [
        ("orders/eu", "kind = 'x'", 1.0),
        ("orders/#", "kind = 'x' AND area IS NOT NULL", 1.0),
        ("orders/#", "", 0.0),  # three bits: one message in 500
        ("orders/#", "kind = 'x' AND price > 5", 0.0),
        ("orders/#", "kind = 'x' OR price > 5", 0.0),
        ("#", "", 0.0),
    ],
)
def test_a_subscription_whose_bits_are_weak_is_told_so(topic: str, where: str, told_apart: float) -> None:
    """Spec, "What reaches 99.9%": more than 1 in 10,000 by mistake."""
    client = Client()
    client.session.repair(1, topic, where, RepairSettings(), 0)
    figures = client.session.figures(1)
    assert figures["told_apart"] == told_apart
    assert (figures["false_match"] <= 1e-4) == bool(told_apart)


def test_all_but_summaries_stay_in_their_scope() -> None:
    """Spec B10."""
    client = Client()
    client.session.choose(settings_for("records", "eu"))
    client.session.repair(1, "orders/#", "kind = 'x'", client.session.settings, 0)
    assert client.topics == [
        "$repair/summary/+",
        "$repair/@eu/for",
        "$repair/@eu/ask/+",
        "$repair/@eu/again",
    ]
    with pytest.raises(UsageError, match="before"):
        client.session.choose(settings_for("records", "us"))


@pytest.mark.parametrize("way", ["summaries", "records"])
def test_a_repair_of_the_largest_event_names_who_asked_however_many(way: str) -> None:
    """B7: Found: by content its bits were divided, and the parts matched nobody."""
    client = Client()
    client.session.choose(settings_for(way, "s" * 32))
    client.open()
    attributes = {f"a{at}": at for at in range(8)}
    size = MAX_BEST_EFFORT_BYTES - len(
        encode_row(PREFIX * 2, "a/b", attributes, b"", DEFAULT_LIMITS, tick=1)[1]
    )
    client.session.publish("a/b", bytes(size), attributes, 0)
    names = [at.to_bytes(8, "big") for at in range(MAX_NAMES)]
    for name in names:
        client.hear(client.topics[0], Request(receiver=name, wanted=(1,)), 0)
    said = client.said(SECOND_US // 2)
    assert all(isinstance(message, Repair) for *_, message in said)
    assert {topic for _, topic, _, _ in said} == {f"$repair/@{'s' * 32}/for"}
    assert sorted(name for *_, named, _ in said for name in named) == [f"r{name.hex()}" for name in names]


def test_a_summary_is_said_in_as_many_parts_as_fit_and_none_is_left_out() -> None:
    """Found: brokers refused long ones, and what was lost then was lost in silence."""
    client, draw = Client(), random.Random(2)
    client.open()
    for _ in range(64):
        client.session.publish("a/b", b"", {f"a{at}": draw.randrange(10**6) for at in range(20)}, 0)
    summaries = [message for *_, message in client.said(SECOND_US) if isinstance(message, Summary)]
    assert len(summaries) > 2, "of 32 and of 64 events, cut"
    named = [summary.first + at for summary in summaries for at in range(len(summary.entries))]
    assert sorted(named) == sorted([*range(1, 33), *range(1, 65)])


TYPES = {"text": "é", "whole": -5, "part": 2.5, "zero": -0.0, "yes": True, "large": 1 << 62}


def _repair(payload: bytes, topic: str = "a/b", attributes: dict[str, Value] = TYPES) -> Repair:
    row = encode_row(OTHER + bytes(7) + b"\1", topic, attributes, payload, DEFAULT_LIMITS, tick=2)
    return Repair(publisher=OTHER, sequence=2, row=b"".join(row))


def test_a_repair_with_other_content_than_its_summary_tells_is_dropped() -> None:
    """B7.

    Found: who may repair could send, for an event that is missing, another one on a topic of his own.
    """
    client = Client()
    client.open()
    client.session.repair(1, "#", "", RepairSettings(), 0)
    bits = event_bits("a/b", TYPES)
    summary = Summary(first=1, entries=(bits, bits), ages_ms=(0, 0))
    client.hear("$repair/summary/+", summary, 0)
    for forged in (_repair(b"", topic="c"), _repair(b"", attributes={**TYPES, "whole": 5})):
        assert client.hear("$repair/for", forged, 0) == []
    (item,) = client.hear("$repair/for", _repair(b"true"), 0)
    assert isinstance(item.content, EventBatch)
    assert item.content.payload(0) == b"true", "equal bits, whatever types its values have"
    assert client.session.figures(1)["unsolicited_repairs"] == 2


def test_who_has_the_event_is_not_silenced_by_another_with_its_number() -> None:
    """B7: Found: a forged repair kept caches from sending the true one."""
    client = Client()
    client.open()
    client.session.repair(1, "a/#", "", RepairSettings(), 0)
    row = encode_row(OTHER + bytes(7) + b"\1", "a/b", TYPES, b"true", DEFAULT_LIMITS, tick=2)
    frame = best_effort_frame([row], channel=1)
    client.session.received(EventBatch.parse(frame, DEFAULT_LIMITS), DEFAULT_LIMITS, 0, 0)
    bits = event_bits("a/b", TYPES)
    ask = Ask(receiver=OTHER, publisher=OTHER, sequence=2, bits=bits, sent_us=0, wait_us=0)
    client.hear("$repair/ask/+", ask, 0)
    client.hear("$repair/again", _repair(b"forged"), 0)
    assert [message for *_, message in client.said(SECOND_US)] == [_repair(b"true")]
    client.hear("$repair/ask/+", ask, 60 * SECOND_US)
    client.hear("$repair/again", _repair(b"true"), 60 * SECOND_US)
    assert client.said(61 * SECOND_US) == [], "another one sent it"


def test_what_was_published_before_a_change_of_brokers_is_still_summarised_and_served() -> None:
    """Found: what no summary had named by then was lost without a Gap."""
    client = Client()
    client.open()
    client.session.publish("a/b", b"before", {}, 0)
    elsewhere = PREFIX[:4] + b"\0\0\0\x08"
    client.open(elsewhere)
    client.session.publish("a/b", b"after", {}, 0)
    said = client.said(SECOND_US)
    assert [(identity[:8], topic) for identity, topic, *_ in said] == [
        (whose, f"$repair/summary/{whose.hex()}") for whose in (PREFIX, elsewhere)
    ]
    client.hear(f"$repair/request/{PREFIX.hex()}", Request(receiver=OTHER, wanted=(1,)), SECOND_US)
    (repair,) = [one for *_, one in client.said(3 * SECOND_US // 2) if isinstance(one, Repair)]
    assert (repair.publisher, repair.row[-6:]) == (PREFIX, b"before")
    client.said(60 * SECOND_US)
    assert list(client.session._published) == [elsewhere], "its time is over"
    client.open(elsewhere[:3] + b"\xff" + elsewhere[4:])
    assert not client.session._published, "ids that this broker gave out in this start are another's"


def test_the_events_of_one_turn_that_bear_ids_of_two_brokers_share_no_frame() -> None:
    client = Client()
    for broker in (7, 8, 9, 10, 11):
        client.open(PREFIX[:4] + broker.to_bytes(4, "big"))
        client.session.publish("a/b", b"", {}, 0)
    frames = [EventBatch.parse(frame, DEFAULT_LIMITS) for frame in client.session.take()]
    assert [frame.id(0)[7] for frame in frames] == [7, 8, 9, 10, 11]
    client.session.check()
    assert [prefix[7] for prefix in client.session._published] == [8, 9, 10, 11]
