"""Queues under faults in the simulated world (spec Q3, Q5 to Q9, Q11); and its judge sees what is wrong."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from msgspec.structs import replace
from tests.worlds.queue_networks import QueueNetwork, address_of

from postroad.ids import queue_message_id
from postroad.queues import inbox, serving, views
from postroad.queues.arcs import Arcs
from postroad.queues.bodies import Bodies
from postroad.queues.inbox import Accept, Answer, Inboxes, Message
from postroad.queues.settings import QueueConfig
from postroad.seam.storage import LogStream, ReadDone, StreamKind
from postroad.seam.turn import Turn
from postroad.sim.judge.queues import QueueLedger
from postroad.sim.people.queue_users import QueueSource
from postroad.sim.queue_scenario import QueueOutcome, QueueScenario
from postroad.tracking.query.trace import Trace
from postroad.units import KIB, SECOND_US

SEEDS = (2, 4, 5, 7, 8)

# (seed, seconds): what it found
FOUND = (
    (6, 30),  # entry brokers that are no electors did not hear that a consumer's inbox had moved
    (9, 30),  # a reader that waits for a replica for good asked for turn after turn
    (11, 40),  # the simulated disk forgot a save that came while a chop was committed
    (3, 25),  # two networks met: a message sent before its source knew the chain had no place any more
    (10, 25),  # two networks met: a chain was left before every replica of the other had its state
    (52, 25),  # two networks met: a broker that is no elector stayed in the chain that was taken in
    (125, 35),  # answers to two consumers of one inbox crossed: the judge took that for a wrong order
    (135, 35),  # after a cut that links survived, the ring stayed two
    (22, 35),  # a consumer that came back while it was given up was never served again
)


# The same of users that have the product's client core.
FOUND_WITH_CLIENTS = (
    (8, 15),  # what waited in the client behind a rejected message that expired was never handed out
    (13, 15),  # the same, and brokers that die
    (111, 18),  # a consumer that was given up and came back was handed messages in the wrong order
)


def run(seed: int, seconds: int, *, faults: bool = True, product: bool | None = False) -> QueueOutcome:
    return QueueScenario(seed=seed, seconds=seconds, faults=faults, product=product).run()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rule_holds(seed: int) -> None:
    """Q5."""
    outcome = run(seed, 25)
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))
    assert outcome.kept == outcome.accepted > 0


@pytest.mark.parametrize(("seed", "seconds"), FOUND)
def test_what_was_found_stays_repaired(seed: int, seconds: int) -> None:
    """Q7."""
    outcome = QueueScenario(seed=seed, seconds=seconds, wandering=False, product=False).run()
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))


@pytest.mark.parametrize(("seed", "seconds"), FOUND_WITH_CLIENTS)
def test_every_rule_holds_for_applications_that_reject_and_messages_that_expire(
    seed: int, seconds: int
) -> None:
    outcome = run(seed, seconds, product=True)
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))
    assert outcome.kept >= outcome.accepted > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1_000, 1_200))
def test_every_rule_holds_in_many_worlds(seed: int) -> None:
    outcome = run(seed, 60, product=None)
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))


def test_bodies_that_memory_has_no_room_for_are_on_disk_and_come_back() -> None:
    """Q5."""
    scenario = QueueScenario(seed=4, seconds=25, product=False)
    assert scenario.config.memory_bytes < KIB
    outcome = scenario.run()
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))
    assert outcome.kept == outcome.accepted > 0
    assert outcome.spilled > 0


@pytest.mark.parametrize("seed", [4, 21])
def test_a_broker_that_cannot_read_a_body_hands_its_arc_over(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first read of bodies at each broker fails; those replicas are not read while others are whole."""
    read, doubt = Bodies._was_read, Arcs.doubt
    failed: set[Bodies] = set()
    doubted: list[int] = []

    def fail_once(self: Bodies, arc: int, tick: int, turn: Turn, done: ReadDone) -> None:
        if self not in failed:
            failed.add(self)
            done = dataclasses.replace(done, records=())
        read(self, arc, tick, turn, done)

    def note(self: Arcs, turn: Turn, arc: int) -> None:
        doubted.append(arc)
        doubt(self, turn, arc)

    monkeypatch.setattr(Bodies, "_was_read", fail_once)
    monkeypatch.setattr(Arcs, "doubt", note)
    monkeypatch.setattr(QueueScenario, "_memory_bytes", lambda _self: KIB)
    outcome = run(seed, 20, faults=False)
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))
    assert doubted


def test_a_start_that_misses_bodies_begins_its_replica_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Arcs._bodies_checked
    replicas: list[int] = []

    def damaged(self: Arcs, index: int, turn: Turn, done: ReadDone) -> None:
        loading = self._loading[index]
        if not replicas:
            done = dataclasses.replace(done, records=done.records[1:])
        checked(self, index, turn, done)
        assert loading.arc is not None
        replicas.append(len(loading.arc.machine.snapshot()))

    monkeypatch.setattr(Arcs, "_bodies_checked", damaged)
    outcome = run(22, 35)
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))
    assert replicas[0] < min(replicas[1:]), "the first one began anew, without a message"


# A judge that sees nothing would find every world in order: break the core, and it must say so.


def test_the_judge_sees_a_message_that_is_kept_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Inboxes._outcome

    def forgetful(
        self: Inboxes, box: inbox.Inbox | None, message: Message, last: int | None = None
    ) -> Answer:
        answer = real(self, box, message, last)
        return Answer("kept") if answer.outcome == "known" else answer

    monkeypatch.setattr(Inboxes, "_outcome", forgetful)
    assert {run(seed, 25).rule for seed in (2, 4, 5)} & {"once", "order", "sound"}


def backwards(
    self: Inboxes, name: str, _consumer: str, _now_us: int, limit: int, **_: object
) -> list[Message]:
    box = self.inboxes.get(name)
    return [] if box is None or len(box.messages) < 2 else list(reversed(box.messages.values()))[:limit]


def test_the_judge_sees_a_message_that_passes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(self: Inboxes, operation: Accept) -> Answer:
        box = self.inboxes[operation.inbox]
        source = box.sources.get(operation.key[:2])
        number = box.numbers.get(operation.key)
        if number is None or source is None:
            return Answer("taken")
        self._settle(box, source, operation.key, operation.consumer, operation.now_us)
        return Answer("accepted")

    monkeypatch.setattr(Inboxes, "_accept", hasty)
    monkeypatch.setattr(Inboxes, "ready", backwards)
    assert run(4, 20, faults=False).rule == "order"


def test_the_judge_sees_a_body_that_is_not_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(message: Message, record: bytes) -> Message:
        return real(message, record[1:])

    real = inbox.with_body
    monkeypatch.setattr(serving, "with_body", careless)
    assert run(4, 25).rule == "answer"


def test_the_judge_sees_bodies_that_are_chopped_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(self: Bodies, turn: Turn, arc: int, _oldest: int) -> None:
        turn.chop(LogStream(StreamKind.BODIES, arc), self._tails.get(arc, 0))

    monkeypatch.setattr(Bodies, "chop", hasty)
    assert {run(seed, 35).rule for seed in (4, 22)} & {"lost", "order", "kept"}


def test_the_judge_sees_a_message_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Inboxes._put

    def lossy(self: Inboxes, put: inbox.Put) -> inbox.Answer:
        answer = real(self, put)
        for message in put.messages:
            key = (message.chain, message.source, message.id)
            if (message.id >> 16) % 7 == 0 and key in self.inboxes[message.inbox].numbers:
                self._remove(self.inboxes[message.inbox], key)
        return answer

    monkeypatch.setattr(Inboxes, "_put", lossy)
    assert run(4, 20, faults=False).rule in ("lost", "order")


def test_the_judge_sees_a_message_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is behind a rejected message is not brought again, though its consumer has forgotten it."""
    monkeypatch.setattr(Inboxes, "behind", lambda _self, _name, _key: [])
    assert run(8, 15, product=True).rule in ("lost", "stuck", "early")


def test_the_judge_sees_two_responsible_brokers_in_one_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = views.Arc._adopt

    def eager(self: views.Arc, view: views.View) -> None:
        real(self, view)
        if view.stage == views.STARTED and not self.serving and self.me in view.replicas:
            self.serving = True
            self.acks = dict.fromkeys(view.replicas, 0)

    monkeypatch.setattr(views.Arc, "_adopt", eager)
    monkeypatch.setattr(views.Arc, "check", lambda _self: None)
    assert run(4, 20, faults=False).rule == "responsible"


def test_the_judge_sees_that_a_replica_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = QueueConfig.views
    monkeypatch.setattr(QueueConfig, "views", lambda self: replace(real(self), replicas=2))
    assert run(11, 20, faults=False).rule == "replicas"


def test_the_judge_sees_that_replicas_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    real = views.Arc._on_write

    def deaf(self: views.Arc, sender: bytes, message: views.Write) -> None:
        real(self, sender, replace(message, payload=inbox.encode(inbox.Sweep(0))))

    monkeypatch.setitem(views._HANDLERS, views.Write, deaf)
    assert run(11, 20, faults=False).rule in ("equal", "sound")


def test_the_judge_sees_that_a_broker_which_left_the_replicas_still_holds_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hoard(self: views.Arc) -> None:
        self.drop_at = None  # else it would be asked to again and again

    monkeypatch.setattr(views.Arc, "_drop", hoard)
    assert {run(seed, 20).rule for seed in (6, 9)} == {"deleted"}


def test_every_accepted_message_has_a_way_from_its_sender_to_its_consumer() -> None:
    """T4: Spec T6 for queues: the entry, the responsible broker and the consumer's entry, each once."""
    scenario = QueueScenario(seed=4, seconds=20, faults=False, product=False)
    assert scenario.run().rule == ""
    brokers = {broker.identity.number: broker for broker in scenario.brokers().values()}
    names = {number: broker.identity.name for number, broker in brokers.items()}
    lengths = set()
    for source in scenario.sources:
        numbers = scenario.ledger.sent_by(source.name)
        assert numbers
        for number in numbers:
            trace = Trace([queue_message_id(source.session, number)], reachable=brokers, now_us=0)
            asks = trace.start(0)
            while asks:
                ask = asks.pop()
                tracking = brokers[ask.broker].tracking
                assert tracking is not None
                answer, unread = tracking.answer(ask.question, {})
                assert unread == ()
                asks += trace.answered(ask.broker, answer, 0)
            (result,) = trace.results(names)
            assert result.verdict == "complete", result
            (receiver,) = result.receivers
            steps = [(step.broker, step.source) for step in result.route]
            assert steps[0] == (result.origin, None)
            assert steps == [(steps[0][0], None), *((to, before) for (before, _), (to, _) in pairwise(steps))]
            assert steps[-1][0] == receiver.broker
            assert receiver.subscriber.startswith("inbox")
            lengths.add(len(steps))
    assert max(lengths) == 3


def test_metrics_say_since_when_the_oldest_message_waits() -> None:
    network = QueueNetwork({"a": ()}, arcs=1)
    network.start("a")
    source = QueueSource(
        network.world,
        network.network,
        "shop",
        [address_of("a")],
        inboxes=["stock"],
        pause_us=3_600 * SECOND_US,
        ledger=QueueLedger(),
    )
    network.run(SECOND_US)
    assert network.broker("a").metrics()["queue_oldest_timestamp_seconds"] == 0
    sent_us = network.world.now_us
    for _ in range(2):
        source.send()
        network.run(5 * SECOND_US)
    assert network.broker("a").metrics()["queue_depth"] == 2
    assert network.broker("a").metrics()["queue_oldest_timestamp_seconds"] == sent_us // SECOND_US
