"""The client's core against a scripted broker made of frames."""

from __future__ import annotations

from typing import Any

import pytest
from tests.worlds.client_scripts import START, Script, delivery, ticks

from postroad.client import effects as fx
from postroad.client.core import State
from postroad.client.settings import CLIENT_LIMITS, ClientSettings, check_texts
from postroad.errors import (
    BugError,
    DeniedError,
    PeerError,
    SelectorError,
    SlowConsumerError,
    TooLargeError,
    UnavailableError,
    UsageError,
)
from postroad.events import EventBatch, empty_frame
from postroad.events.token import CheckpointToken
from postroad.ids import pubend_text
from postroad.seam.effects import Close, Dial
from postroad.units import KIB, MIB, SECOND_US
from postroad.wire import frames as wire
from postroad.wire.frames import DEFAULT_LIMITS, Kind

# --- connecting


def test_handshake_says_who_we_are() -> None:
    script = Script(token="secret")
    assert script.take(Dial) == [Dial("a:1")]
    hello = script.open()
    assert (hello.role, hello.name, hello.token, hello.publisher) == ("client", "test", "secret", 0)
    assert hello.limits == CLIENT_LIMITS
    script.welcome()
    assert [up.broker for up in script.take(fx.Up)] == ["b1"]
    assert script.core.limits == DEFAULT_LIMITS


def test_no_broker_at_the_start_is_one_clear_error() -> None:
    script = Script("a:1", "b:2")
    script.handle(fx.DialFailed(address="a:1", reason="connection refused"))
    assert script.take(Dial) == [Dial("a:1"), Dial("b:2")]
    script.handle(fx.DialFailed(address="b:2", reason="connection refused"))
    (failed,) = script.take(fx.Failed)
    assert isinstance(failed.error, UnavailableError)
    assert str(failed.error) == (
        "no broker at a:1 or b:2 (connection refused): "
        "start one with `postroad up`, or name another HOST:PORT"
    )
    assert script.core.next_deadline() is None


def test_a_silent_handshake_times_out_and_the_next_address_is_tried() -> None:
    script = Script("a:1", "b:2")
    script.open()
    deadline = script.core.next_deadline()
    assert deadline is not None
    script.now = deadline
    script.handle()
    assert [close.connection for close in script.take(Close)] == [1]
    assert script.take(Dial)[-1] == Dial("b:2")
    script.up()


def test_being_denied_is_final() -> None:
    script = Script("a:1", "b:2")
    script.open()
    script.say(wire.Refuse(code="denied", reason="wrong token"))
    (failed,) = script.take(fx.Failed)
    assert isinstance(failed.error, DeniedError)
    assert script.core.state is State.OVER
    script.handle(fx.Opened(connection=9))  # a dial that was under way
    assert script.take(Close)[-1] == Close(9)


def test_a_lost_connection_is_dialled_again_at_the_same_broker_first_then_elsewhere() -> None:
    script = Script("a:1", "b:2")
    script.up()
    script.take(Dial)
    script.now += 60 * SECOND_US
    script.lose()
    assert script.take(Dial) == [Dial("a:1")]
    script.handle(fx.DialFailed(address="a:1", reason="connection refused"))
    assert script.take(Dial) == [Dial("b:2")]
    hello = script.open()
    assert (hello.publisher, hello.resume_key) == (42, b"key")
    script.welcome(name="b2", broker=8, publisher=43)
    assert [up.broker for up in script.take(fx.Up)] == ["b1", "b2"]


def test_who_comes_back_to_a_broker_from_another_has_the_number_it_had_there() -> None:
    """What it sent there and has no answer to would else be refused, as that of another publisher."""
    script = Script("a:1", "b:2")
    script.up()
    for address, given, offered in (("b:2", 43, 42), ("a:1", 42, 42), ("b:2", 43, 43)):
        script.now += 60 * SECOND_US
        script.lose()
        script.handle(fx.DialFailed(address=script.take(Dial)[-1].address, reason="connection refused"))
        assert script.take(Dial) == [Dial(address)]
        hello = script.open()
        assert (hello.publisher, hello.resume_key) == (
            offered,
            b"key of %d" % offered if offered > 42 else b"key",
        )
        script.welcome(publisher=given, resume_key=b"key of %d" % given if given > 42 else b"key")


def test_backoff_doubles_up_to_its_bound_and_calls_fail_after_the_outage() -> None:
    script = Script(outage_us=10 * SECOND_US)
    script.up()
    script.now += 60 * SECOND_US
    script.lose()
    lost_at = script.now
    waits = []
    for _ in range(9):
        script.handle(fx.DialFailed(address="a:1", reason="connection refused"))
        before = script.now
        while not script.take(Dial):
            deadline = script.core.next_deadline()
            assert deadline is not None
            script.now = max(script.now, deadline)
            script.handle()
        waits.append(script.now - before)
        for outage in script.take(fx.Outage):
            assert script.now >= lost_at + 10 * SECOND_US
            assert "no broker at a:1" in str(outage.error)
            waits.append(-1)
    # The first dial was already under way when it was lost, so its Dial is taken at once.
    assert waits.count(-1) == 1
    pauses = [wait for wait in waits if wait > 0]
    assert pauses == sorted(pauses)
    assert max(pauses) <= 3 * SECOND_US


def test_a_broker_that_takes_us_and_drops_us_is_not_dialled_in_a_tight_loop() -> None:
    script = Script()
    for _ in range(3):
        script.take(Dial)
        script.up()
        script.take(Dial)
        script.lose()
        assert script.take(Dial) == []
        deadline = script.core.next_deadline()
        assert deadline is not None
        assert deadline > script.now
        script.now = deadline
        script.handle()


def test_a_broker_that_breaks_the_protocol_is_told_and_left() -> None:
    script = Script()
    script.up()
    script.say(wire.Reply(number=5, code="", body="{}"))
    (refuse,) = script.sent()
    assert isinstance(refuse, wire.Refuse)
    assert refuse.code == "protocol"
    (close,) = script.take(Close)
    assert isinstance(close.error, PeerError)
    assert script.core.state is not State.UP


@pytest.mark.parametrize(
    "frame",
    [
        wire.encode(
            wire.Hello(
                version=1, role="broker", name="", token="", limits=DEFAULT_LIMITS, window=1, time_us=0
            )
        ),
        wire.encode(wire.Accepted(sequence=3)),
        wire.encode(wire.Rejected(sequence=1, code="denied", reason="")),
        wire.encode(wire.Credit(size=-1)),
        delivery(1, 5, 0, [1])[:-1] + b"",
        b"\x08\0\0\0\xff\x01\0\0",
        b"\x09\0\0\0\x15\x01\0\0\xc1",
    ],
)
def test_nonsense_from_a_broker_never_escapes_the_core(frame: bytes) -> None:
    script = Script()
    script.up()
    script.say(frame)
    assert script.take(Close)
    script.core.check()


def test_late_input_of_a_connection_given_up_is_ignored() -> None:
    script = Script()
    script.up()
    script.lose()
    script.handle(fx.Closed(connection=1), fx.Received(connection=1, frame=wire.encode(wire.Ping(time_us=1))))
    assert not script.sent()


def test_keepalive_pings_a_silent_broker_and_leaves_a_dead_one() -> None:
    script = Script()
    script.up()
    script.now += 5 * SECOND_US
    script.handle()
    assert script.sent() == [wire.Ping(time_us=script.now)]
    script.say(wire.Pong(time_us=script.now, at_us=script.now))
    script.now += 5 * SECOND_US
    script.handle()
    assert len(script.sent()) == 1
    script.now += 10 * SECOND_US
    script.handle()
    (close,) = script.take(Close)
    assert "silent" in str(close.error)


def test_a_ping_that_is_asked_for_tells_when_it_is_heard() -> None:
    script = Script()
    script.up()
    pinged_us = script.now
    script.do(script.core.ping(pinged_us))
    assert script.sent() == [wire.Ping(time_us=pinged_us)]
    script.say(wire.Pong(time_us=pinged_us - 1, at_us=script.now), wire.Pong(time_us=pinged_us, at_us=1))
    assert script.take(fx.Heard) == [fx.Heard(pinged_us=pinged_us - 1), fx.Heard(pinged_us=pinged_us)]


def test_pings_are_answered() -> None:
    script = Script()
    script.up()
    script.say(wire.Ping(time_us=5))
    assert script.sent() == [wire.Pong(time_us=5, at_us=script.now)]


def test_one_bad_frame_does_not_end_a_session_that_was_up() -> None:
    """Refused for `protocol` once: back to the same broker after a pause. Again at once: no accident."""
    script = Script("a:1", "b:2")
    script.up()
    number = script.subscribe()
    script.say(wire.Subscribed(number=number))
    script.take(Dial)
    for _ in range(2):
        script.now += 60 * SECOND_US
        script.say(wire.Refuse(code="protocol", reason="a bad frame"))
        (down,) = script.take(fx.Down)
        assert isinstance(down.error, PeerError)
        assert script.take(Close)
        assert script.take(Dial) == []
        deadline = script.core.next_deadline()
        assert deadline is not None
        assert script.now < deadline <= script.now + SECOND_US
        script.now = deadline
        script.handle()
        assert script.take(Dial) == [Dial("a:1")]
        script.up()
    script.now += SECOND_US
    script.lose()  # for another reason, and soon
    script.now += 4 * SECOND_US
    script.handle()
    script.up()
    assert script.take(fx.Failed) == []
    script.now += SECOND_US
    script.say(wire.Refuse(code="protocol", reason="a bad frame"))
    (failed,) = script.take(fx.Failed)
    assert isinstance(failed.error, PeerError)
    assert script.core.state is State.OVER


def test_a_handshake_that_breaks_the_protocol_is_final() -> None:
    script = Script()
    script.up()
    script.now += 60 * SECOND_US
    script.lose()
    script.open()
    script.say(wire.Refuse(code="protocol", reason="another version"))
    assert script.take(fx.Failed)


def test_being_denied_while_up_is_final() -> None:
    script = Script()
    script.up()
    script.now += 60 * SECOND_US
    script.say(wire.Refuse(code="denied", reason="your token was withdrawn"))
    assert script.take(fx.Failed)


@pytest.mark.parametrize("size", [-1, 0, 1, 1 << 62])
def test_credit_for_what_was_not_sent_breaks_the_protocol(size: int) -> None:
    script = Script()
    script.up(window=64 * KIB)
    script.say(wire.Credit(size=size))
    (refuse,) = script.sent()
    assert isinstance(refuse, wire.Refuse)
    assert refuse.code == "protocol"
    assert script.core.state is not State.UP


# --- publishing


def test_t1_t5_ids_carry_our_numbers_and_the_brokers_clock() -> None:
    """T1, T5: publisher and broker number from the broker, time adjusted by its clock at connect."""
    script = Script()
    script.open()
    script.now += 2000  # the round trip: half of it is taken off
    script.welcome(time_us=START + 90 * SECOND_US + 1000)
    identity = script.publish()
    assert (identity.publisher, identity.broker) == (42, 7)
    assert identity.time_ms == (script.now + 90 * SECOND_US) // 1000
    script.now += 5 * SECOND_US
    script.handle()
    sent_us = script.now
    script.now += 1000
    script.say(wire.Pong(time_us=sent_us, at_us=sent_us + 500 + 80 * SECOND_US))
    assert script.core.skew_us == 80 * SECOND_US
    assert script.publish() > identity  # the clock stepped back, ids do not


def test_t5_a_correction_ahead_is_taken_and_one_behind_is_measured() -> None:
    """V9, T5: ids ahead of the broker's clock prove a skew; those behind may have waited here."""
    script = Script()
    script.up()
    script.sent()
    script.say(wire.Skew(correction_us=-3 * SECOND_US))
    assert script.core.skew_us == -3 * SECOND_US
    assert script.sent() == [wire.Ping(time_us=script.now)]
    script.say(wire.Pong(time_us=script.now, at_us=script.now - 2 * SECOND_US))
    assert script.core.skew_us == -2 * SECOND_US
    script.say(wire.Skew(correction_us=90 * SECOND_US))
    assert script.core.skew_us == -2 * SECOND_US
    script.say(wire.Skew(correction_us=90 * SECOND_US))
    assert script.sent() == [wire.Ping(time_us=script.now)] * 2  # whatever comes is an answer to a ping
    script.say(wire.Pong(time_us=script.now, at_us=script.now + 60 * SECOND_US))
    assert script.core.skew_us == 60 * SECOND_US


def test_one_flush_makes_one_frame_numbered_from_1() -> None:
    script = Script()
    script.up()
    ids = [script.publish(f"t/{number}") for number in range(3)]
    (batch,) = script.flush()
    assert (batch.channel, batch.count) == (1, 3)
    assert [event.id for event in batch.events()] == ids
    script.publish()
    assert [batch.channel for batch in script.flush()] == [2]
    assert script.flush() == []


def test_accepted_is_cumulative_and_makes_room() -> None:
    script = Script(publish_events=2)
    script.up()
    mark = 0
    for _ in range(2):
        assert script.core.outbox.room
        script.publish()
        mark = script.core.outbox.mark()
    script.flush()
    assert not script.core.outbox.room
    assert not script.core.outbox.settled(mark)
    script.say(wire.Accepted(sequence=2))
    assert script.take(fx.Progress)
    assert script.core.outbox.room
    assert script.core.outbox.settled(mark)
    assert script.core.outbox.unsettled == 0


def test_a_rejected_frame_is_told_and_does_not_block_the_others() -> None:
    script = Script()
    script.up()
    for _ in range(3):
        script.publish()
        script.flush()
    script.say(wire.Rejected(sequence=2, code="denied", reason="you may not publish to a/b"))
    (lost,) = script.take(fx.Lost)
    assert isinstance(lost.error, DeniedError)
    assert "you may not publish" in str(lost.error)
    script.say(wire.Accepted(sequence=3))
    assert script.core.outbox.unsettled == 0


def test_without_credit_frames_wait_and_the_batch_grows() -> None:
    script = Script()
    script.up(window=64 * KIB)
    script.publish(payload=b"x" * 70_000)
    assert len(script.flush()) == 1  # overdraws by one frame
    for _ in range(5):
        script.publish()
        assert script.flush() == []
    script.say(wire.Credit(size=70_000))  # within what was sent
    (batch,) = [message for message in script.sent() if isinstance(message, EventBatch)]
    assert batch.count == 5


def test_what_was_not_accepted_is_sent_again_with_the_same_ids() -> None:
    script = Script("a:1", "b:2")
    script.up()
    ids = []
    for _ in range(4):
        ids.append(script.publish())
        script.flush()
    unsent = script.publish()  # in the open batch when the connection is lost
    script.say(wire.Accepted(sequence=1))
    script.lose()
    assert not script.core.outbox.room
    script.open()
    script.welcome(broker=8, publisher=1)
    batches = [message for message in script.sent() if isinstance(message, EventBatch)]
    assert [batch.channel for batch in batches] == [1, 2, 3, 4]
    assert [batch.event(0).id for batch in batches] == [*ids[1:], unsent]
    fresh = script.publish()
    assert (fresh.publisher, fresh.broker) == (1, 8)
    (batch,) = script.flush()
    assert batch.channel == 5
    script.say(wire.Accepted(sequence=5))
    assert script.core.outbox.unsettled == 0


def test_durable_events_that_no_broker_took_in_time_are_withdrawn() -> None:
    """Who waits for them is told, and whether they were sent; what is published later is not held up."""
    script = Script(outage_us=10 * SECOND_US)
    script.up()
    sent = script.publish(durable=True)
    assert len(script.flush()) == 1
    plain = script.publish()
    script.publish(durable=True)
    script.lose()
    script.now += 10 * SECOND_US
    script.handle()
    told = script.take(fx.Stored)
    assert [(one.ordinals, one.perhaps) for one in told] == [((3,), False), ((1,), True)]
    assert [str(one.error).split(":")[0] for one in told] == [
        "not sent, and withdrawn",
        "sent, perhaps published, and not sent again",
    ]
    assert all("no broker at a:1 (the broker closed the connection)" in str(one.error) for one in told)
    assert len(script.take(fx.Outage)) == 1
    script.up()
    later = script.publish(durable=True)
    script.do(script.core.flush())
    batches = [message for message in script.sent() if isinstance(message, EventBatch)]
    assert [(batch.channel, batch.event(0).id) for batch in batches] == [(1, plain), (2, later)]
    assert later > sent
    script.say(wire.Accepted(sequence=2))
    assert [one.error for one in script.take(fx.Stored)] == [None]
    assert script.core.outbox.unsettled == 0


def test_a_resumed_publisher_goes_on_with_increasing_ids() -> None:
    script = Script()
    script.up()
    first = script.publish()
    script.lose()
    script.now += SECOND_US
    script.handle()
    script.up(time_us=START - 3600 * SECOND_US)
    assert script.publish() > first


def test_a_new_broker_with_narrower_limits_is_not_sent_what_it_would_refuse() -> None:
    import msgspec

    script = Script("a:1", "b:2")
    script.up()
    script.publish(payload=b"x" * 100_000)
    script.flush()
    script.publish()
    script.lose()
    script.open()
    narrow = msgspec.structs.replace(DEFAULT_LIMITS, event_bytes=50_000)
    script.welcome(limits=narrow)
    (batch,) = [message for message in script.sent() if isinstance(message, EventBatch)]
    assert batch.event(0).payload == b"x"
    (lost,) = script.take(fx.Lost)
    assert isinstance(lost.error, TooLargeError)


def test_bad_events_raise_at_once_and_leave_nothing_behind() -> None:
    script = Script()
    script.up()
    with pytest.raises(UsageError):
        script.publish("a/#")
    with pytest.raises(TooLargeError):
        script.publish(payload=b"x" * (MIB + 1))
    assert script.flush() == []
    with pytest.raises(BugError):
        Script().publish()


# --- subscribing


def test_subscription_begins_delivers_and_ends() -> None:
    script = Script()
    script.up()
    number = script.subscribe("a/#", "price > 1")
    assert script.sent() == [
        wire.Subscribe(number=number, topic="a/#", where="price > 1", overflow="drop", buffer=0)
    ]
    script.say(wire.Subscribed(number=number, missing=("b9",)))
    assert script.take(fx.Began) == [fx.Began(number=number, missing=("b9",))]
    script.say(delivery(number, 5, 0, [1, 2]), delivery(number, 5, 7, [9]))
    assert [ticks(found.batch) for found in script.take(fx.Delivered)] == [[1, 2], [9]]
    assert script.take(fx.Missed) == []  # (2, 7] is silence
    script.do(script.core.unsubscribe(number))
    assert script.sent() == [wire.Unsubscribe(number=number)]
    script.say(delivery(number, 5, 9, [10]), wire.Ended(number=number, code="", reason=""))
    assert script.take(fx.Delivered) == []
    assert script.take(fx.Ended) == []


def test_a_bad_condition_ends_it_with_the_position() -> None:
    script = Script()
    script.up()
    number = script.subscribe(where="price >")
    told = SelectorError("a value is missing", text="price >", position=6)
    script.say(wire.Ended(number=number, code="selector", reason=str(told)))
    (ended,) = script.take(fx.Ended)
    assert isinstance(ended.error, SelectorError)
    assert (ended.error.position, ended.error.text) == (6, "price >")
    assert str(ended.error) == str(told)


def test_a_slow_consumer_is_told_so() -> None:
    script = Script()
    script.up()
    number = script.subscribe()
    script.say(wire.Ended(number=number, code="slow-consumer", reason="fell behind"))
    (ended,) = script.take(fx.Ended)
    assert isinstance(ended.error, SlowConsumerError)


def test_a_loss_reported_by_the_broker_is_a_gap() -> None:
    script = Script()
    script.up()
    number = script.subscribe()
    script.say(
        wire.Subscribed(number=number),
        delivery(number, 5, 0, [1]),
        empty_frame(kind=Kind.DELIVERY, pubend=5, start=1, end=4, channel=number, lost=True),
    )
    (missed,) = script.take(fx.Missed)
    assert (missed.gap.pubend, missed.gap.start, missed.gap.end) == (pubend_text(5), 1, 4)


def test_after_a_reconnect_what_was_missed_is_said() -> None:
    """One Gap for the time away, then one with the exact ticks for each stream that goes on."""
    script = Script()
    script.up(time_us=START + 500)
    number = script.subscribe()
    script.say(wire.Subscribed(number=number), delivery(number, 5, 0, [1, 2]), delivery(number, 6, 0, [8]))
    script.take(fx.Delivered)
    lost_at = script.now
    script.now += SECOND_US
    script.lose()
    script.now += SECOND_US
    script.handle()
    script.open()
    script.welcome(time_us=script.now + 500)
    assert [type(message) for message in script.sent()] == [wire.Subscribe]
    script.say(wire.Subscribed(number=number))
    (away,) = script.take(fx.Missed)
    assert (away.gap.pubend, away.gap.start, away.gap.end) == ("", lost_at + 500, script.now + 500)
    script.say(delivery(number, 5, 20, [30]), delivery(number, 5, 40, [50]))
    (missed,) = script.take(fx.Missed)
    assert (missed.gap.pubend, missed.gap.start, missed.gap.end) == (pubend_text(5), 2, 20)
    # A broker that is behind what we saw repeats it: nothing is missing, and nothing comes twice.
    script.take(fx.Delivered)
    script.say(delivery(number, 6, 5, [7, 8, 9]), delivery(number, 7, 5, [6]))
    assert script.take(fx.Missed) == []
    assert [ticks(found.batch) for found in script.take(fx.Delivered)] == [[9], [6]]


def test_a_stream_that_goes_on_before_the_subscription_is_confirmed_comes_after_the_gap() -> None:
    script = Script()
    script.up()
    number = script.subscribe()
    script.say(wire.Subscribed(number=number))
    script.now += SECOND_US
    script.lose()
    script.now += SECOND_US
    script.handle()
    script.up()
    script.seen.clear()
    script.say(delivery(number, 5, 0, [1]), delivery(number, 5, 1, [2]))
    assert [type(effect) for effect in script.seen] == [fx.Missed, fx.Delivered, fx.Delivered]
    first = script.take(fx.Missed)[0].gap
    script.now += SECOND_US
    script.say(wire.Subscribed(number=number))
    (second,) = script.take(fx.Missed)
    assert (first.pubend, second.gap.pubend) == ("", "")
    assert (second.gap.start, second.gap.end) == (first.end, script.now)


def test_a_subscription_that_had_not_begun_has_missed_nothing() -> None:
    script = Script()
    script.up()
    number = script.subscribe()
    script.lose()
    script.now += SECOND_US
    script.handle()
    script.up()
    script.say(wire.Subscribed(number=number))
    assert script.take(fx.Missed) == []
    assert len(script.take(fx.Began)) == 1


def test_credit_goes_back_as_the_application_consumes() -> None:
    script = Script(window=256 * KIB)
    script.up()
    number = script.subscribe()
    script.say(wire.Subscribed(number=number))
    script.sent()
    frame = delivery(number, 5, 0, list(range(1, 601)))
    script.say(frame)
    (delivered,) = script.take(fx.Delivered)
    assert delivered.size == len(frame)
    assert script.sent() == []
    script.core.consumed(30_000)
    script.do(script.core.flush())
    assert script.sent() == []
    script.core.consumed(len(frame) - 30_000)
    script.do(script.core.flush())
    total = sum(message.size for message in script.sent() if isinstance(message, wire.Credit))
    assert total in (0, len(frame))
    assert total == (len(frame) if len(frame) >= 64 * KIB else 0)


def filling(script: Script, number: int, size: int, first: int = 1) -> int:
    """Deliveries of at least so many bytes on this connection; how many bytes they were."""
    total = 0
    while total < size:
        frame = delivery(number, 5, first - 1, list(range(first, first + 100)))
        script.say(frame)
        first += 100
        total += len(frame)
    return total


def reconnect(script: Script) -> wire.Hello:
    script.lose()
    script.now += 4 * SECOND_US
    script.handle()
    hello = script.open()
    script.welcome()
    return hello


def credit(script: Script) -> int:
    script.do(script.core.flush())
    return sum(message.size for message in script.sent() if isinstance(message, wire.Credit))


def test_gaps_take_their_part_of_the_window() -> None:
    """An application that never reads holds no more of them than of events: credit waits for both."""
    script = Script(window=256 * KIB)
    script.up()
    number = script.subscribe()
    script.say(wire.Subscribed(number=number), delivery(number, 5, 0, [1]))
    (delivered,) = script.take(fx.Delivered)
    script.core.consumed(delivered.size)
    script.sent()
    sent = 0
    for tick in range(1, 3000):
        lost = empty_frame(kind=Kind.DELIVERY, pubend=5, start=tick, end=tick + 1, channel=number, lost=True)
        script.say(lost)
        sent += len(lost)
    assert credit(script) == 0
    missed = script.take(fx.Missed)
    assert (len(missed), sum(one.size for one in missed)) == (2999, sent)
    for one in missed:
        script.core.consumed(one.size)
    assert 0 < credit(script) <= sent + delivered.size


def test_bytes_of_an_earlier_connection_give_no_credit_on_the_next() -> None:
    window = 256 * KIB
    script = Script(window=window)
    script.up()
    number = script.subscribe()
    script.say(wire.Subscribed(number=number))
    old = filling(script, number, window // 2)
    assert reconnect(script).window == window
    script.say(wire.Subscribed(number=number))
    script.sent()
    script.core.consumed(old)
    assert credit(script) == 0
    new = filling(script, number, window, first=10_000)
    script.core.consumed(new)
    assert credit(script) == new


def test_what_is_held_of_an_earlier_connection_takes_its_part_of_the_window() -> None:
    """Credit comes back once all that is held is within one window again, whichever bytes are consumed."""
    window = 256 * KIB
    script = Script(window=window)
    script.up()
    number = script.subscribe()
    script.say(wire.Subscribed(number=number))
    old = filling(script, number, window // 2)
    reconnect(script)
    script.sent()
    new = filling(script, number, window, first=10_000)
    script.core.consumed(old)
    assert credit(script) == 0
    script.core.consumed(window // 4)
    assert credit(script) == window // 4
    script.core.consumed(new - window // 4)
    assert credit(script) == new - window // 4


def test_two_windows_are_held_at_most_however_often_the_connection_breaks() -> None:
    """A subscription begins again only when what is held of earlier connections is within one window."""
    window = 256 * KIB
    script = Script(window=window)
    script.up()
    number = script.subscribe()
    script.say(wire.Subscribed(number=number))
    first = filling(script, number, window)
    script.sent()
    reconnect(script)
    assert script.sent() == []
    other = script.subscribe("other")  # a new one has nothing to wait for
    assert [message.number for message in script.sent() if isinstance(message, wire.Subscribe)] == [other]
    script.do(script.core.unsubscribe(other))
    script.sent()
    over = first - window
    script.core.consumed(over - 1)
    script.do(script.core.flush())
    assert script.sent() == []
    script.core.consumed(1)
    script.do(script.core.flush())
    (again,) = script.sent()
    assert isinstance(again, wire.Subscribe)
    script.core.consumed(1)
    script.do(script.core.flush())
    assert script.sent() == []  # begun once on this connection
    script.say(wire.Subscribed(number=number))
    (missed,) = script.take(fx.Missed)
    assert missed.gap.pubend == ""
    second = filling(script, number, window, first=10_000)
    script.sent()
    for _ in range(5):
        reconnect(script)
        assert script.sent() == []
    script.core.consumed(window - 1 + second)
    script.do(script.core.flush())
    assert [type(message) for message in script.sent()] == [wire.Subscribe]


def test_a_subscription_that_waits_to_begin_again_can_be_given_up() -> None:
    window = 256 * KIB
    script = Script(window=window)
    script.up()
    number = script.subscribe()
    script.say(wire.Subscribed(number=number))
    held = filling(script, number, window)
    reconnect(script)
    script.do(script.core.unsubscribe(number))
    script.sent()
    script.core.consumed(held)
    script.do(script.core.flush())
    assert script.sent() == []


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 64 * KIB - 1},
        {"window": 64 * MIB + 1},
        {"token": "x" * 4097},
        {"token": "\ud800"},
        {"name": "x" * 256},
        {"name": "a\nb"},
    ],
)
def test_what_no_broker_would_take_is_refused_here(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ClientSettings(**({"addresses": ("a:1",), "name": "test"} | settings))


def test_texts_that_cannot_travel_are_the_callers_error() -> None:
    script = Script()
    script.up()
    for topic, where in (("x" * MIB, ""), ("", "x" * MIB), ("\ud800", ""), ("", "\udfff")):
        with pytest.raises(UsageError):
            script.subscribe(topic, where)
    for buffer in (-1, 1 << 63):
        with pytest.raises(UsageError):
            script.core.subscribe(wire.Subscribe(number=0, topic="a", where="", buffer=buffer))
    with pytest.raises(TooLargeError):
        script.core.request("x" * MIB, {})
    with pytest.raises(TooLargeError):
        script.core.request("status", {"x": "y" * MIB})
    with pytest.raises(UsageError):
        script.core.request("status", {"\ud800": ""})
    assert script.sent() == []
    script.lose()
    script.now += SECOND_US
    script.handle()
    script.up()
    assert script.sent() == []


# --- asking


def test_requests_are_answered_or_fail_with_the_connection() -> None:
    script = Script()
    script.up()
    number, effects = script.core.request("status", {"deep": "yes"})
    script.do(effects)
    assert script.sent() == [wire.Request(number=number, what="status", arguments={"deep": "yes"})]
    script.say(wire.Reply(number=number, code="", body='{"name": "b1"}'))
    assert script.take(fx.Answered) == [fx.Answered(number=number, error=None, body='{"name": "b1"}')]
    number, effects = script.core.request("nonsense", {})
    script.say(wire.Reply(number=number, code="usage", body="no such request"))
    (answer,) = script.take(fx.Answered)
    assert isinstance(answer.error, UsageError)
    script.core.request("status", {})
    script.lose()
    (answer,) = script.take(fx.Answered)
    assert isinstance(answer.error, UnavailableError)


def test_close_ends_everything() -> None:
    script = Script()
    script.up()
    script.do(script.core.close())
    assert script.take(Close) == [Close(1)]
    assert script.core.next_deadline() is None
    script.lose()
    assert script.take(Dial) == [Dial("a:1")]


def test_a_subscriber_with_its_own_token_goes_on_after_what_it_acknowledged() -> None:
    """D3: a broker takes the token for consumed; what the application holds uncommitted must not be in it."""
    script = Script()
    script.up()
    number, effects = script.core.subscribe(wire.Subscribe(number=0, topic="t", where="", durable="s"))
    script.do(effects)
    script.say(wire.Subscribed(number=number, token=CheckpointToken({5: 3}).to_json()))
    script.say(delivery(number, 5, 3, [4, 5]))
    script.do(script.core.acknowledge(number, token={5: 4})[1])
    script.take(fx.Delivered)
    script.now += 60 * SECOND_US
    script.lose()
    script.up()
    again = script.sent()[-1]
    assert isinstance(again, wire.Subscribe)
    assert again.token == CheckpointToken({5: 4}).to_json()
    script.say(wire.Subscribed(number=number, token=again.token), delivery(number, 5, 4, [5, 6]))
    assert [ticks(found.batch) for found in script.take(fx.Delivered)] == [[6]]


def test_what_is_not_text_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="text, not NoneType"):
        check_texts("subscription", "t", None)  # type: ignore[arg-type]
