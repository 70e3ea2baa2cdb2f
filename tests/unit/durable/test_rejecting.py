"""Rejecting events of shared durable subscriptions: again at once or later, attempts, dead letters once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import Consumer, Reader

from postroad.events import TTL, Event
from postroad.ids import DEAD_LETTERS_PUBLISHER, IdSource
from postroad.wire.frames import Ack, Attempts, Refuse, Reply, Request, Subscribe, encode


class Worker(Consumer):
    """A consumer that fails."""

    def start(
        self, key: str = "", topic: str = "t", attempts: int = 0, dead: str = "", name: str = "g"
    ) -> Worker:
        wanted = Subscribe(
            number=1,
            topic=topic,
            where="",
            durable=name,
            ack="manual",
            shared=True,
            key=key,
            max_attempts=attempts,
            dead_letters=dead,
        )
        self.send(encode(wanted))
        return self

    def places(self, *payloads: str) -> dict[int, tuple[int, ...]]:
        found: dict[int, dict[int, None]] = {}
        for batch in self.batches:
            for row, event in enumerate(batch.events()):
                if event.payload.decode() in payloads:
                    found.setdefault(batch.pubend, {})[int(batch.headers["tick"][row])] = None
        return {pubend: tuple(sorted(ticks)) for pubend, ticks in found.items()}

    def reject(self, *payloads: str, delay_s: float = 0.0, ticket: int = 0) -> None:
        delay_us = round(delay_s * 1e6)
        self.send(
            encode(Ack(number=1, token="", rejected=self.places(*payloads), delay_us=delay_us, ticket=ticket))
        )

    def attempts(self) -> list[int]:
        """Those that it was told of, in order."""
        return [
            attempt
            for message in self.messages
            if isinstance(message, Attempts)
            for _, attempt in message.attempts
        ]


def started(count: int = 1, **options: Any) -> tuple[DurableNet, DurableClient, Worker]:
    net = DurableNet(count)
    publisher, worker = DurableClient(net, 0), Worker(net, 0).start(**options)
    net.wait(1)
    return net, publisher, worker


def letters(net: DurableNet) -> list[Event]:
    """All dead letters that were ever published."""
    reader = Reader(net, 0)
    reader.begin(f"look{net.now_us}", topic="dead", ack="manual", since_us=1)
    net.wait(2)
    return [event for batch in reader.batches if not batch.lost for event in batch.events()]


def row(net: DurableNet) -> dict[str, Any]:
    client = DurableClient(net, 0)
    client.send(encode(Request(number=1, what="subs", arguments={"name": "g"})))
    body = json.loads(next(m for m in client.messages if isinstance(m, Reply)).body)
    return {**body["subscriptions"][0], **body["groups"][0]}


def test_a_rejected_event_comes_again_at_once_and_says_which_attempt_it_is() -> None:
    net, publisher, worker = started()
    publisher.send(publisher.durable("t", "a", "b"))
    worker.reject("a", ticket=5)
    assert worker.got() == ["a", "b", "a"]
    assert worker.acked() == [(5, "")]
    worker.reject("a")
    assert worker.got() == ["a", "b", "a", "a"]
    assert worker.attempts() == [2, 3]
    worker.ack("a", "b")
    assert row(net)["lag_events"] == 0
    assert row(net)["rejected"] == 2


def test_after_a_delay() -> None:
    net, publisher, worker = started()
    publisher.send(publisher.durable("t", "a", "b"))
    worker.reject("a", delay_s=3)
    net.wait(2)
    assert worker.got() == ["a", "b"]
    net.wait(1.5)
    assert worker.got() == ["a", "b", "a"]


def test_a_key_rests_with_its_first_event() -> None:
    net, publisher, worker = started(key="k")
    publisher.send(publisher.durable("t", "a1", k=1))
    publisher.send(publisher.durable("t", "b1", k=2))
    worker.reject("a1", delay_s=3)
    publisher.send(publisher.durable("t", "a2", k=1))
    publisher.send(publisher.durable("t", "b2", k=2))
    net.wait(2)
    assert worker.got() == ["a1", "b1", "b2"]
    net.wait(2)
    assert worker.got() == ["a1", "b1", "b2", "a1", "a2"]


def test_another_consumer_may_get_it_and_what_one_does_not_have_cannot_be_rejected() -> None:
    net, publisher, worker = started()
    publisher.send(publisher.durable("t", "a"))
    other = Worker(net, 0).start()
    other.messages.clear()
    other.send(encode(Ack(number=1, token="", rejected=worker.places("a"))))
    assert other.got() == []
    assert row(net)["rejected"] == 0
    worker.send(encode(Ack(number=1, token="", rejected={77: (5,), 0: (1,)})))
    assert row(net)["rejected"] == 0


def test_after_its_last_attempt_it_is_a_dead_letter_and_done() -> None:
    net, publisher, worker = started(attempts=2, dead="dead")
    publisher.send(publisher.durable("t", "poison", "good", price=3))
    worker.reject("poison")
    worker.reject("poison")
    worker.ack("good")
    net.wait(1)
    (letter,) = letters(net)
    assert letter.payload == b"poison"
    assert letter.attributes["price"] == 3
    assert (letter.attributes["dead_topic"], letter.attributes["dead_attempts"]) == ("t", 2)
    assert letter.attributes["dead_subscription"] == "g"
    assert str(letter.attributes["dead_id"]).count("-") == 3
    assert worker.got() == ["poison", "good", "poison"]
    found = row(net)
    assert (found["lag_events"], found["dead_letters"], found["waiting"]) == (0, 1, 0)


def test_a_dead_letter_does_not_expire_with_its_event() -> None:
    net, publisher, worker = started(attempts=1, dead="dead")
    publisher.send(publisher.durable("t", "late", **{TTL: 3_000, "price": 3}))
    worker.reject("late")
    net.wait(1)
    (letter,) = letters(net)
    assert letter.attributes["price"] == 3
    assert letter.expires_at is None


def test_a_lost_consumer_has_tried_the_oldest_that_it_had_and_one_that_leaves_nothing() -> None:
    net, publisher, worker = started(attempts=2, dead="dead")
    publisher.send(publisher.durable("t", "a", "b"))
    second = Worker(net, 0).start()
    worker.gone()
    assert second.got() == ["a", "b"]
    assert second.attempts() == [2]
    second.gone()
    third = Worker(net, 0).start()
    net.wait(1)
    assert third.got() == ["b"]
    assert [letter.payload for letter in letters(net)] == [b"a"]


def test_attempts_survive_a_restart_of_the_broker() -> None:
    net, publisher, worker = started(attempts=3, dead="dead")
    publisher.send(publisher.durable("t", "a"))
    worker.reject("a", ticket=1)
    assert worker.acked() == [(1, "")]
    net.kill(0)
    net.start(0)
    net.wait(1)
    worker = Worker(net, 0).start()
    net.wait(1)
    assert worker.attempts() == [2]
    worker.reject("a")
    worker.reject("a")
    net.wait(1)
    assert [letter.payload for letter in letters(net)] == [b"a"]
    assert row(net)["lag_events"] == 0


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "not answered"])
@pytest.mark.parametrize("steps", range(1, 5))
def test_a_dead_letter_is_published_once_wherever_the_broker_dies(steps: int, answered: bool) -> None:
    """The disk syncs `steps` more times after the last attempt failed; then the broker is killed, perhaps
    before it hears of the last one."""
    net, publisher, worker = started(attempts=1, dead="dead")
    publisher.send(publisher.durable("t", "a", "b", "c"))
    net.slow.add(0)
    worker.reject("a", "c")
    for _ in range(steps - 1):
        net.sync(0)
    net.sync(0) if answered else net.disks[0].sync()
    broker = net.brokers[0]
    assert broker is not None
    published = broker.metrics()["durable_events_total"]
    net.kill(0)
    net.slow.discard(0)
    net.start(0)
    net.wait(1)
    worker = Worker(net, 0).start()
    net.wait(1)
    worker.ack("b")
    net.wait(3)
    assert sorted(letter.payload for letter in letters(net)) == [b"a", b"c"]
    assert (published == 5) == (steps >= 2 + (not answered))
    assert row(net)["lag_events"] == 0


def test_consumers_that_leave_while_it_is_buried_do_not_double_it() -> None:
    net, publisher, worker = started(attempts=1, dead="dead")
    publisher.send(publisher.durable("t", "a"))
    net.slow.add(0)
    worker.reject("a")
    worker.gone()
    for _ in range(8):
        net.sync(0)
    net.slow.discard(0)
    again = Worker(net, 0).start()
    net.wait(3)
    assert again.got() == []
    assert [letter.payload for letter in letters(net)] == [b"a"]


def of_groups(net: DurableNet) -> list[object]:
    """The groups of all dead letters."""
    return sorted(str(letter.attributes["dead_subscription"]) for letter in letters(net))


@pytest.mark.parametrize("steps", range(1, 5))
def test_a_dead_letter_of_another_group_hides_none_that_a_crash_kept_back(steps: int) -> None:
    """The group whose dead letter was given its id comes back after another group had its own published."""
    net, publisher, worker = started(attempts=1, dead="dead")
    other = Worker(net, 0).start(attempts=1, dead="dead", name="h")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.slow.add(0)
    worker.reject("a")
    for _ in range(steps):
        net.sync(0)
    net.kill(0)
    net.slow.discard(0)
    net.start(0)
    other = Worker(net, 0).start(name="h")
    net.wait(1)
    other.reject("a")
    net.wait(2)
    assert "h" in of_groups(net)
    net.kill(0)
    net.start(0)
    Worker(net, 0).start()
    net.wait(3)
    assert of_groups(net) == ["g", "h"]
    assert row(net)["lag_events"] == 0


@pytest.mark.parametrize("again", ["full", "short", ""])
def test_a_dead_letter_of_another_group_hides_none_that_the_disk_refused(again: str) -> None:
    net, publisher, worker = started(attempts=1, dead="dead")
    other = Worker(net, 0).start(attempts=1, dead="dead", name="h")
    net.wait(1)
    publisher.send(publisher.durable("t", "a"))
    net.disks[0].short = True
    worker.reject("a")
    net.wait(0.1)
    worker.gone()
    net.disks[0].short = again == "short"
    net.disks[0].full = again == "full"
    other.reject("a")
    net.wait(3)
    net.disks[0].short = net.disks[0].full = False
    net.wait(3)
    assert of_groups(net) == ["h"]
    net.kill(0)
    net.start(0)
    Worker(net, 0).start()
    net.wait(3)
    assert of_groups(net) == ["g", "h"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attempts": 2}, "a shared subscription has dead letters: a topic"),
        ({"dead": "dead"}, "a shared subscription has dead letters: a topic"),
        ({"attempts": -1, "dead": "dead"}, "1 to 1,000,000"),
        ({"attempts": 1, "dead": "t"}, "would come to the subscription"),
        ({"attempts": 1, "dead": "x/#"}, "x/#"),
    ],
)
def test_where_dead_letters_cannot_go(options: dict[str, Any], reason: str) -> None:
    _, _, worker = started(**options)
    (told,) = worker.ended()
    assert reason in told


def test_whoever_says_how_often_says_it_for_all() -> None:
    net, publisher, worker = started()
    publisher.send(publisher.durable("t", "a"))
    Worker(net, 0).start(attempts=1, dead="dead")
    worker.reject("a")
    net.wait(1)
    assert [letter.payload for letter in letters(net)] == [b"a"]
    net.kill(0)
    net.start(0)
    net.wait(1)
    worker = Worker(net, 0).start()
    net.wait(1)
    publisher = DurableClient(net, 0)
    publisher.send(publisher.durable("t", "b"))
    worker.reject("b")
    net.wait(1)
    assert [letter.payload for letter in letters(net)] == [b"a", b"b"]


def test_nobody_publishes_with_the_ids_of_dead_letters() -> None:
    """Ids far ahead would make dead letters repetitions."""
    net = DurableNet(1)
    client = DurableClient(net, 0)
    client.ids = IdSource(DEAD_LETTERS_PUBLISHER, 1)
    client.send(client.durable("t", "x"))
    assert client.has(Refuse)


def test_what_does_not_fit_beside_what_is_said_of_it_is_left_out() -> None:
    net, publisher, worker = started(attempts=1, dead="dead")
    publisher.send(publisher.durable("t", "many", **{f"a{n}": n for n in range(63)}))
    worker.reject("many")
    net.wait(1)
    (letter,) = letters(net)
    assert letter.payload == b"many"
    assert set(letter.attributes) == {"dead_topic", "dead_id", "dead_attempts", "dead_subscription"}
