"""The async client's shell against a scripted broker on a real socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.worlds.scripted_brokers import FakeBroker

import postroad
from postroad.events import BatchBuilder, EventBatch
from postroad.events.batch import empty_frame
from postroad.ids import MessageId
from postroad.wire import frames as wire
from postroad.wire.frames import DEFAULT_LIMITS, Kind


def delivery(count: int = 1, *, start: int = 0) -> bytes:
    """Events for the first subscription."""
    builder = BatchBuilder()
    for number in range(count):
        builder.add(bytes(MessageId(1, 2, 3, number)), "a", {}, b"x", DEFAULT_LIMITS)
    batch = EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)
    return batch.with_ticks(start + 1, kind=Kind.DELIVERY, pubend=5, start=start, channel=1).data


def run(test: Callable[[FakeBroker], Awaitable[Any]]) -> None:
    async def work() -> None:
        async with asyncio.timeout(20), FakeBroker() as broker:
            await test(broker)
            # Nothing of a closed client may still be running.
            left = [task for task in asyncio.all_tasks() if "_dial" in repr(task)]
            assert left == []

    asyncio.run(work())


def test_events_of_one_turn_leave_in_one_frame() -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client:
            for number in range(10):
                await client.publish("a", str(number))
            await client.flush()
            assert [batch.count for batch in broker.published] == [10]

    run(test)


def test_a_loop_that_never_waits_still_sends_early() -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client:
            for _ in range(5000):
                await client.publish("a", b"x" * 100)
            await client.flush()
            assert sum(batch.count for batch in broker.published) == 5000
            assert len(broker.published) >= 3  # it did not wait for the end of the loop to send all as one

    run(test)


def test_a_rejection_surfaces_once_at_the_next_call() -> None:
    async def test(broker: FakeBroker) -> None:
        broker.rejecting = "secret"
        async with postroad.connect(broker.address) as client:
            await client.publish("secret", b"")
            with pytest.raises(postroad.DeniedError, match="an event was not taken: no"):
                await client.flush()
            await client.publish("open", b"")
            await client.flush()
            await client.publish("secret", b"")
            await asyncio.sleep(0.2)
            with pytest.raises(postroad.DeniedError):
                await client.publish("open", b"")
        client = await postroad.connect(broker.address)
        await client.publish("secret", b"")
        with pytest.raises(postroad.DeniedError):
            await client.close()

    run(test)


def test_an_exception_in_the_block_does_not_wait_for_acceptance() -> None:
    async def test(broker: FakeBroker) -> None:
        broker.accepting = False

        async def fail() -> None:
            async with postroad.connect(broker.address) as client:
                await client.publish("a", b"")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()

    run(test)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), 10**400])
def test_a_timeout_that_cannot_be_is_refused(timeout: float) -> None:
    with pytest.raises(postroad.UsageError, match="a timeout is between 0 and"):
        postroad.connect("127.0.0.1:1", timeout=timeout)


def test_publish_waits_for_room_and_can_be_cancelled() -> None:
    async def test(broker: FakeBroker) -> None:
        broker.accepting = False
        client = await postroad.connect(broker.address)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await client.publish_many(("a", b"x" * 1000) for _ in range(100_000))
        assert client._outbox.held_bytes < 9 << 20
        assert not client._waiters
        await client._shut()

    run(test)


def test_a_wait_that_is_cancelled_as_something_changes_is_cancelled() -> None:
    async def test(broker: FakeBroker) -> None:
        client = await postroad.connect(broker.address)
        events = await client.subscribe("a")
        broker.accepting = False
        publishing = asyncio.ensure_future(client.publish("a", b"x", mode="durable"))
        await asyncio.sleep(0.05)
        publishing.cancel()
        await events.close()  # wakes who waits, in the same turn
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert not client._waiters
        await client._shut()

    run(test)


def test_what_was_in_flight_is_sent_again_after_a_reconnect() -> None:
    async def test(broker: FakeBroker) -> None:
        broker.accepting = False
        async with postroad.connect(broker.address) as client:
            receipt = await client.publish("a", b"x")
            await asyncio.sleep(0.1)
            broker.accepting = True
            broker.drop()
            await client.flush()
            assert broker.connections == 2
            assert [batch.event(0).id for batch in broker.published] == [receipt.id, receipt.id]

    run(test)


def test_what_was_acknowledged_is_said_again_after_a_reconnect() -> None:
    """D11: the broker may have died before it was on disk, and nobody waits for a confirmation. What comes
    again is dropped here, so nothing else would acknowledge it."""

    async def test(broker: FakeBroker) -> None:
        async with (
            postroad.connect(broker.address) as client,
            client.subscribe("a", durable="s", ack="auto") as events,
        ):
            broker.say(delivery(2))
            await anext(events)
            await anext(events)
            reading = asyncio.create_task(anext(aiter(events)))
            while not broker.acks or broker.acks[-1].token != '{"00000000-00000005": 2}':  # noqa: ASYNC110 -- it is another task
                await asyncio.sleep(0.01)
            broker.acks.clear()
            broker.drop()
            while not broker.acks:  # noqa: ASYNC110 -- it is another task
                await asyncio.sleep(0.01)
            broker.say(delivery(2))
            broker.say(delivery(1, start=2))
            third = await reading
            assert isinstance(third, postroad.Event)
            assert third.tick == 3
            assert [ack.token for ack in broker.acks] == ['{"00000000-00000005": 2}']

    run(test)


def test_silence_acknowledges_nothing_after_an_acknowledgement_that_was_refused() -> None:
    """D11: what was refused is not acknowledged, so the event before the silence is not either."""

    async def test(broker: FakeBroker) -> None:
        async with (
            postroad.connect(broker.address) as client,
            client.subscribe("a", durable="s", ack="manual") as events,
        ):
            broker.say(delivery(1))
            first = await anext(events)
            assert isinstance(first, postroad.Event)
            broker.refusing_acks = "storage"
            with pytest.raises(postroad.StorageError):
                await events.ack(first)
            broker.refusing_acks = ""
            broker.acks.clear()
            broker.say(empty_frame(kind=Kind.DELIVERY, pubend=5, start=1, end=9, channel=1))
            broker.say(delivery(1, start=9))
            second = await anext(events)
            assert isinstance(second, postroad.Event)
            await events.ack(second)
            assert [ack.token for ack in broker.acks] == ['{"00000000-00000005": 10}']

    run(test)


def test_a_durable_publish_that_raised_is_not_sent_later() -> None:
    async def test(broker: FakeBroker) -> None:
        broker.accepting = False
        async with postroad.connect(broker.address, timeout=0.5) as client:
            publishing = asyncio.ensure_future(client.publish("a", b"1", mode="durable"))
            await asyncio.sleep(0.1)
            await broker.stop()
            with pytest.raises(
                postroad.UnavailableError, match="sent, perhaps published, and not sent again"
            ):
                await publishing
            with pytest.raises(postroad.UnavailableError, match="no broker at"):
                await client.publish("a", b"2", mode="durable")
            broker.accepting = True
            await broker.start()
            while not client.connected:  # noqa: ASYNC110 -- it dials by itself
                await asyncio.sleep(0.01)
            await client.publish("a", b"3", mode="durable")
            assert [batch.payload(0) for batch in broker.published] == [b"1", b"3"]

    run(test)


def test_closing_ends_readers_and_requests() -> None:
    async def test(broker: FakeBroker) -> None:
        client = await postroad.connect(broker.address)
        events = await client.subscribe("a")

        async def read() -> list[object]:
            return [event async for event in events]

        reading = asyncio.ensure_future(read())
        asking = asyncio.ensure_future(client.request("status"))
        await asyncio.sleep(0.05)
        with pytest.raises(postroad.UsageError, match="another task"):
            await anext(events)
        await client.close()
        assert await reading == []
        with pytest.raises(postroad.UnavailableError):
            await asking
        with pytest.raises(postroad.UsageError):
            await client._open()

    run(test)


def test_a_subscription_that_is_not_confirmed_can_be_given_up() -> None:
    async def test(broker: FakeBroker) -> None:
        broker.accepting = False
        async with postroad.connect(broker.address) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.subscribe("a")
            assert client._subscriptions == {}

    run(test)


@pytest.mark.parametrize(
    ("frames", "busy_s", "at_least"), [(1, 0.0005, 20), (200, 0.0005, 20), (1, 0.003, 195)]
)
def test_who_reads_without_waiting_lets_the_loop_run(frames: int, busy_s: float, at_least: int) -> None:
    async def test(broker: FakeBroker) -> None:
        turns = 0

        async def beat() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with postroad.connect(broker.address) as client, client.subscribe("a") as events:
            for frame in range(frames):
                broker.say(delivery(200 // frames, start=frame * 200 // frames))
            while len(events._queue) < frames:  # noqa: ASYNC110 -- the broker's word is awaited
                await asyncio.sleep(0.01)
            beating = asyncio.ensure_future(beat())
            for _ in range(200):
                await anext(events)
                time.sleep(busy_s)  # noqa: ASYNC251 -- a handler that holds the loop
            assert turns >= at_least
            beating.cancel()

    run(test)


def test_what_has_come_can_be_asked_for_without_patience() -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client, client.subscribe("a") as events:
            broker.say(delivery(5))
            for _ in range(5):
                await asyncio.sleep(0.05)
                async with asyncio.timeout(0):
                    await anext(events)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await anext(events)

    run(test)


def test_what_nobody_read_of_a_subscription_that_ended_is_given_back() -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client:
            events = await client.subscribe("a")
            broker.say(delivery())
            broker.say(wire.Ended(number=1, code="slow-consumer", reason="fell behind"))
            while client._subscriptions:  # noqa: ASYNC110 -- the broker's word is awaited
                await asyncio.sleep(0.01)
            assert client._core.inbox.outstanding > 0
            await events.close()
            assert client._core.inbox.outstanding == 0

    run(test)


def test_reconnects_that_nobody_reads_about_are_one_gap() -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client, client.subscribe("a") as events:
            for _ in range(3):
                before = broker.subscribed
                broker.drop()
                while broker.subscribed == before:  # noqa: ASYNC110 -- it is another task
                    await asyncio.sleep(0.01)
                await client.publish("b")
                await client.flush()  # it comes after SUBSCRIBED, so that was heard
            broker.say(delivery())
            first, second = [await anext(events), await anext(events)]
            assert isinstance(first, postroad.Gap)
            assert first.pubend == ""
            assert first.start < first.end
            assert isinstance(second, postroad.Event)

    run(test)


def test_a_subscription_that_cannot_be_sent_raises_every_time() -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client:
            events = client.subscribe("a", where="x" * (1 << 20))
            for _ in range(2):
                with pytest.raises(postroad.TooLargeError):
                    await events
            await client.publish("a", b"x")
            await client.flush()
            assert broker.connections == 1

    run(test)


def test_one_bad_frame_does_not_end_a_client() -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client:
            broker.say(wire.Refuse(code="protocol", reason="a bad frame"))
            await asyncio.sleep(0.1)
            await client.publish("a", b"x")
            await client.flush()
            assert broker.connections == 2
            broker.say(wire.Refuse(code="protocol", reason="a bad frame"))
            await asyncio.sleep(0.1)
            with pytest.raises(postroad.PeerError, match="a bad frame"):
                await client.publish("a", b"x")

    run(test)


def test_a_broker_that_talks_nonsense_is_left_and_tried_again() -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client:
            broker.say(b"\xff" * 64)
            await asyncio.sleep(0.1)
            await client.publish("a", b"x")
            await client.flush()
            assert broker.connections == 2

    run(test)


@pytest.mark.parametrize("body", ["no JSON", "[" * 100_000, "[]"])
def test_an_answer_that_cannot_be_read_is_the_brokers_fault(body: str) -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client:
            asking = asyncio.ensure_future(client.request("status"))
            await asyncio.sleep(0.05)
            broker.say(wire.Reply(number=1, code="", body=body))
            with pytest.raises(postroad.PeerError, match="the broker's answer to 'status' is not"):
                await asking

    run(test)


def test_a_final_refusal_fails_everything_with_its_reason() -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client:
            events = await client.subscribe("a")
            broker.say(wire.Refuse(code="denied", reason="your token was withdrawn"))
            with pytest.raises(postroad.DeniedError, match="withdrawn"):
                await anext(events)
            with pytest.raises(postroad.DeniedError, match="withdrawn"):
                await client.publish("a", b"x")

    run(test)


def test_payloads_are_bytes_or_text() -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client:
            await client.publish("a", "grüße")
            await client.publish("a", bytearray(b"raw"))  # type: ignore[arg-type]
            with pytest.raises(postroad.UsageError, match="not int"):
                await client.publish("a", 5)  # type: ignore[arg-type]
            await client.flush()
            payloads = [event.payload for batch in broker.published for event in batch.events()]
            assert payloads == ["grüße".encode(), b"raw"]

    run(test)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shared": 1}, "`shared` is True or False, not 1"),
        ({"shared": "no"}, "`shared` is True or False, not 'no'"),
        ({"durable": []}, "what a subscription says is text, not list"),
        ({"topic": 5}, "what a subscription says is text, not int"),
        ({"where": 1}, "what a subscription says is text, not int"),
        ({"shared": True, "key": 5}, "what a subscription says is text, not int"),
        ({"shared": True, "key": "k" * 256}, "the name of an attribute, has at most 255 bytes"),
        ({"token": 5}, "`token` is the text"),
        ({"since": 5}, "`since` a datetime"),
        (
            {"since": datetime(1, 1, 1)},  # noqa: DTZ001
            "`since` is too far away",
        ),
        ({"ack": None}, "ack None is not one of"),
        ({"overflow": []}, "overflow \\[] is not one of"),
        ({"buffer": True}, "a size is a number of bytes or a text such as '64 KiB', not bool"),
        ({"buffer": 1.5}, "not float"),
        ({"buffer": None}, "not NoneType"),
    ],
)
def test_a_subscription_that_cannot_be_is_refused_before_it_is_sent(wrong: dict[str, Any], said: str) -> None:
    """A broker takes what it cannot read for a breach of the protocol, and ends the whole client."""

    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client:
            with pytest.raises(postroad.UsageError, match=said):
                await client.subscribe(**{"topic": "t", "durable": "d"} | wrong)
            since = datetime.now(UTC)
            async with client.subscribe("t", durable="d", token="", since=since, buffer="1 MiB"):
                assert broker.connections == 1

    run(test)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"timeout": "5"}, "a timeout is between 0 and 1,000,000,000 seconds, not 5"),
        ({"timeout": None}, "not None"),
        ({"window": None}, "a size is a number of bytes or a text such as '64 KiB', not NoneType"),
        ({"name": 5}, "a client's name has"),
        ({"name": b"x"}, "a client's name has"),
        ({"token": 5}, "what a token says is text, not int"),
        ({"address": 5}, "an address is a text such as 127.0.0.1:7420, not int"),
        ({"tls": True}, "`tls` is what postroad.tls"),
    ],
)
def test_a_connection_that_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(postroad.UsageError, match=said):
        postroad.connect(**{"address": "127.0.0.1:1"} | wrong)


def test_questions_of_another_type_are_refused() -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client:
            with pytest.raises(postroad.UsageError, match="by its id, not int"):
                await client.trace(5)  # type: ignore[arg-type]
            with pytest.raises(postroad.UsageError, match="`until` is a checkpoint token"):
                client.read(5)  # type: ignore[arg-type]
            with pytest.raises(postroad.UsageError, match="what a range says is text, not int"):
                client.read("{}", after=5)  # type: ignore[arg-type]
            async with client.subscribe("t", durable="d") as events:
                with pytest.raises(postroad.UsageError, match="what a token says is text, not int"):
                    await events.ack(upto=5)  # type: ignore[arg-type]

    run(test)


EVENT = ("t", b"x")
FOREIGN = [b"elsewher" + number.to_bytes(8, "big") for number in (1, 2, 3)]
OWN = [bytes(MessageId(42, 7, number, 0)) for number in (1, 2)]  # of the publisher in `welcome`


def test_events_of_another_shape_are_refused() -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client:
            for attributes in ([1], 5, "x"):
                with pytest.raises(postroad.UsageError, match="attributes are a mapping of names to values"):
                    await client.publish("t", b"x", attributes)  # type: ignore[arg-type]
            with pytest.raises(postroad.UsageError, match="a topic is a text, not list"):
                await client.publish([], b"x")  # type: ignore[arg-type]
            for wrong in (["x"], ["xy"], [("x",)], [5], [("t", "x", {}, 1)], "ab", {"t": "x"}):
                with pytest.raises(postroad.UsageError, match="an event is \\(topic, payload\\) or"):
                    await client.publish_many(wrong)  # type: ignore[arg-type]
            for none in (5, None):
                with pytest.raises(postroad.UsageError, match="`events` can be iterated over"):
                    await client.publish_many(none)  # type: ignore[arg-type]
            assert await client.publish_many([["t", "x"], ("t", "x", None)]) == 2  # type: ignore[list-item]
            await client.flush()
            assert sum(batch.count for batch in broker.published) == 2

    run(test)


@pytest.mark.parametrize(
    ("ids", "mode", "said"),
    [
        (FOREIGN[:2], "plain", "`ids` are for mode 'durable'"),
        (FOREIGN, "durable", "there are more ids than events"),
        (iter(FOREIGN), "durable", "there are more ids than events"),
        (FOREIGN[:1], "durable", "there are fewer ids than events"),
        (FOREIGN[1::-1], "durable", "ids are of 16 bytes"),
        (["a" * 16, "b" * 16], "durable", "ids are of 16 bytes"),
        (b"ab", "durable", "ids are of 16 bytes"),
        (5, "durable", "`ids` can be iterated over"),
        (OWN, "durable", "ids of this client's own publisher"),
    ],
)
def test_ids_that_cannot_be_are_refused(ids: Any, mode: str, said: str) -> None:
    async def test(broker: FakeBroker) -> None:
        async with postroad.connect(broker.address) as client:
            with pytest.raises(postroad.UsageError, match=said):
                await client.publish_many([EVENT, EVENT], mode=mode, ids=ids)
            assert await client.publish_many([EVENT, EVENT], mode="durable", ids=FOREIGN[:2]) == 2

    run(test)


def test_nothing_is_sent_after_a_refused_event_with_an_id_of_ones_own() -> None:
    """Else it would be in the log, and what was refused, published again, be taken for a repetition."""

    async def test(broker: FakeBroker) -> None:
        broker.rejecting = "no"
        numbers = range(3000)
        ids = [bytes(MessageId(9, 9, 1 + number, 0)) for number in numbers]
        async with postroad.connect(broker.address) as client:
            with pytest.raises(postroad.DeniedError):
                await client.publish_many(
                    [("no" if number == 1500 else "t", b"x") for number in numbers], mode="durable", ids=ids
                )
            count = sum(batch.count for batch in broker.published)
            assert 1500 < count < 3000
            assert len(broker.published) == 2
            assert await client.publish_many([EVENT] * 3000, mode="durable", ids=ids) == 3000
            assert sum(batch.count for batch in broker.published) == count + 3000

    run(test)


def test_the_public_names_are_there() -> None:
    for name in postroad.__all__:
        assert getattr(postroad, name) is not None
    assert set(postroad.__all__) <= set(dir(postroad))
    with pytest.raises(AttributeError):
        _ = postroad.nonsense


@pytest.mark.parametrize("host", ["a..b", "a" * 300])
def test_what_is_no_name_of_a_host_is_said_at_once(host: str) -> None:
    """Such a name fails before anybody is asked for it, as a UnicodeError."""

    async def test(broker: FakeBroker) -> None:
        with pytest.raises(postroad.UnavailableError, match="not a name that a host can have"):
            await postroad.connect(f"{host}:7420")
        async with postroad.connect(f"{host}:7420,{broker.address}") as client:
            assert client.broker == "fake"

    run(test)
