"""D12: durable worlds under faults, and that their checkers catch what they are for."""
# ruff: noqa: ARG002

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
from tests.worlds.broken_brokers import PUBEND, Broken, is_delivery

from postroad.client import effects as fx
from postroad.errors import DeletedError, MovedError, UnavailableError, UsageError
from postroad.events import BatchBuilder, EventBatch
from postroad.ids import MessageId
from postroad.seam.effects import Effect
from postroad.seam.inputs import Input, Received
from postroad.seam.storage import Append, Appended, Chop, LogStream, StreamKind
from postroad.selectors import Selector
from postroad.sim.judge import durable as durable_rules
from postroad.sim.judge.durable import Reader, Records
from postroad.sim.judge.ledger import Ledger, Published
from postroad.sim.judge.tracking import QUICK
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.disk import CrashStyle
from postroad.sim.machine.frames import BatchView
from postroad.sim.machine.network import Network
from postroad.sim.machine.process import Core, Process
from postroad.sim.machine.world import EPOCH_US, World
from postroad.sim.people.applications import Clerk, DurableSubscriber
from postroad.sim.scenario import Outcome, Scenario
from postroad.units import SECOND_US
from postroad.wire.frames import DEFAULT_LIMITS, Kind, Request, Subscribe, Subscribed, decode, encode

SEEDS = (1, 3, 4, 7, 12, 17, 19, 1000)  # 17: disks hang; 19: names are deleted

# Worlds that found something, as they were drawn then: a subscriber that came back to what must be
# refiltered was not served (5); a lost attach that the end of a dead pubend seemed to answer (6); another
# token told than the one brought (8); segments that were matched before a subscription came, taken for
# silence (16). The causes have tests of their own in tests/unit/durable/test_subscribers.py and
# tests/unit/streams/test_stream_protocol.py. What was refused, unheard, and sent again was taken for a
# repetition of what had been logged after it (15, 57): tests/unit/durable/test_refusals.py.
FOUND = (5, 6, 8, 15, 16, 57)

LATE = (5, 22)  # some come later, and ask for a past

STREAM = LogStream(StreamKind.EVENTS, PUBEND)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rule_holds(seed: int) -> None:
    """D1, D5, D12."""
    outcome = Scenario(seed=seed, minutes=1.6, durable=True).run()
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))
    assert outcome.kind == "durable"
    assert outcome.durable_deliveries > 0
    assert seed != 17 or outcome.faults["hung"] > 0
    assert seed != 19 or outcome.faults["deletion"] > 0


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_stays_repaired(seed: int) -> None:
    """D1, D12."""
    outcome = Scenario(seed=seed, minutes=1.6, durable=True, late=False).run()
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))


@pytest.mark.parametrize("seed", LATE)
def test_who_comes_late_gets_the_past_that_it_asks_for(seed: int) -> None:
    scenario = Scenario(seed=seed, minutes=1.6, durable=True, late=True)
    outcome = scenario.run()
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))
    assert scenario.durable is not None
    assert any(
        tick <= one.comes_us
        for one in scenario.durable.subscribers
        if one.reader.since_us
        for got in one.reader.got.values()
        for tick in got.ticks
    )


def test_who_could_not_attach_in_time_may_be_told_a_gap() -> None:
    """A raw link lost the attach of a broker, and the pubend released before it heard from there."""
    tracking = replace(QUICK, strategy="exact", routing="neighbours")
    outcome = Scenario(seed=9400061, minutes=1.6, durable=True, late=False, tracking=tracking).run()
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))


def calm(wrap: Callable[[Core, str], Core] | None = None) -> Outcome:
    return Scenario(seed=3, minutes=0.3, brokers=3, faults=False, wrap=wrap, durable=True).run()


def test_a_calm_world_has_no_gaps() -> None:
    outcome = calm()
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))
    assert outcome.gaps == 0
    assert outcome.durable_deliveries > 20


# -- brokers that are broken in one way


class DropsDurable(Broken):
    """Loses what it sends to durable subscribers."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.connections: set[int] = set()

    def on_input(self, item: Input) -> Input:
        if isinstance(item, Received) and item.frame[4] == Kind.SUBSCRIBE:
            message = decode(item.frame)
            if isinstance(message, Subscribe) and message.durable:
                self.connections.add(item.connection)
        return item

    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        return [] if is_delivery(frame) and connection in self.connections else [frame]


class InventsGap(Broken):
    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        if not is_delivery(frame) or BatchView(frame).pubend & 0x8000_0000:
            return [frame]
        header = bytearray(frame[:48])
        header[0:4] = (48).to_bytes(4, "little")
        header[6] = 1
        header[8:16] = bytes(8)
        return [bytes(header)]


class LiesAboutItsDisk(Broken):
    """Believes that events are synced that never reach the disk."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.claimed: list[Input] = []

    def handle(self, inputs: Sequence[Input], now_us: int) -> Sequence[Effect]:
        claimed, self.claimed = self.claimed, []
        kept: list[Effect] = []
        for effect in super().handle([*inputs, *claimed], now_us):
            if isinstance(effect, Append) and effect.stream.kind is StreamKind.EVENTS:
                self.claimed.append(Appended(tag=effect.tag))
            else:
                kept.append(effect)
        return kept

    def next_deadline(self) -> int | None:
        return self.now_us if self.claimed else super().next_deadline()


class DoesNotWait(Broken):
    """Takes for synced what its disk has not answered yet."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.claimed: dict[int, bool] = {}  # tag -> its core was told

    def handle(self, inputs: Sequence[Input], now_us: int) -> Sequence[Effect]:
        claimed: list[Input] = [Appended(tag=tag) for tag, told in self.claimed.items() if not told]
        self.claimed = dict.fromkeys(self.claimed, True)
        answers = [one for one in inputs if not isinstance(one, Appended) or one.tag not in self.claimed]
        effects = super().handle([*answers, *claimed], now_us)
        self.claimed |= {one.tag: False for one in effects if isinstance(one, Append)}
        return effects

    def next_deadline(self) -> int | None:
        return super().next_deadline() if all(self.claimed.values()) else self.now_us


class NeverReleases(Broken):
    def handle(self, inputs: Sequence[Input], now_us: int) -> Sequence[Effect]:
        return [one for one in super().handle(inputs, now_us) if not isinstance(one, Chop)]


class NeverAnswers(Broken):
    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        return [] if frame[4] == Kind.ACCEPTED and self.now_us > EPOCH_US + 15 * SECOND_US else [frame]


@pytest.mark.parametrize(
    ("broken", "rules"),
    [
        (DropsDurable, {"missed"}),
        (InventsGap, {"gap"}),
        (LiesAboutItsDisk, {"kept"}),
        (NeverAnswers, {"accept"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_broker_is_caught(broken: type[Broken], rules: set[str]) -> None:
    outcome = calm(lambda core, _: broken(core))
    assert outcome.rule in rules, outcome.text


@pytest.mark.parametrize(("broken", "rule"), [(Broken, ""), (DoesNotWait, "kept")])
def test_who_does_not_wait_for_a_disk_that_hangs_is_caught_when_it_is_killed(
    broken: type[Broken], rule: str
) -> None:
    """Events came in while it hung, and what was not synced is gone."""
    scenario = Scenario(
        seed=4, minutes=0.3, brokers=3, faults=False, wrap=lambda core, _: broken(core), durable=True
    )
    world = scenario.world

    def harm(process: Process) -> None:
        process.disk.hang(world.now_us + 3 * SECOND_US)
        world.after(2 * SECOND_US, lambda: kill(process))

    def kill(process: Process) -> None:
        process.crash(silently=False, style=CrashStyle())
        process.disk.once_it_works(process.start)
        assert not process.running

    for process in scenario.processes.values():
        world.after(SECOND_US, lambda process=process: harm(process))  # type: ignore[misc]
    outcome = scenario.run()
    assert outcome.rule == rule, "\n".join((outcome.text, *outcome.story))


class HidesThatItBegins(Broken):
    """Says of a subscription that it made anew that it was there."""

    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        message = decode(frame) if frame[4] == Kind.SUBSCRIBED else None
        if isinstance(message, Subscribed):
            return [encode(msgspec.structs.replace(message, created=False, born=0))]
        return [frame]


@pytest.mark.parametrize(("broken", "rule"), [(Broken, ""), (HidesThatItBegins, "missed")])
def test_who_was_away_while_its_name_was_deleted_must_be_told(broken: type[Broken], rule: str) -> None:
    scenario = Scenario(
        seed=2, minutes=0.3, brokers=3, faults=False, wrap=lambda core, _: broken(core), durable=True
    )
    world, network, durable = scenario.world, scenario.network, scenario.durable
    assert durable is not None
    kept = [one for one in durable.subscribers if one.reader.ack]

    def delete(subscriber: DurableSubscriber) -> None:
        process = scenario.processes[subscriber.broker]
        network.block(process.name, subscriber.name, world.now_us + 8 * SECOND_US)
        network.cut(process.name, subscriber.name, (0, 0))
        Clerk(
            world,
            network,
            name=f"clerk-{subscriber.name}",
            addresses=(process.address,),
            durable=subscriber.reader.name,
        ).start()

    for subscriber in kept:
        world.after(2 * SECOND_US, lambda one=subscriber: delete(one))  # type: ignore[misc]
    outcome = scenario.run()
    assert outcome.rule == rule, "\n".join((outcome.text, *outcome.story))
    assert all(one.reader.absent for one in kept)


class ForgetsThePast(Broken):
    """A durable subscription begins when it is created, whatever it asks for."""

    shared = False  # whether this is so of shared ones

    def on_input(self, item: Input) -> Input:
        message = (
            decode(item.frame) if isinstance(item, Received) and item.frame[4] == Kind.SUBSCRIBE else None
        )
        if isinstance(item, Received) and isinstance(message, Subscribe) and message.shared == self.shared:
            frame = encode(msgspec.structs.replace(message, since_us=0))
            return Received(connection=item.connection, frame=frame)
        return item


class ForgetsThePastOfGroups(ForgetsThePast):
    shared = True


@pytest.mark.parametrize(
    ("broken", "rule", "text"),
    [
        (Broken, "", ""),
        (ForgetsThePast, "missed", "-durable .* never got"),
        (ForgetsThePastOfGroups, "missed", "-shared .* never got"),
    ],
)
def test_a_past_that_is_not_delivered_is_noticed(broken: type[Broken], rule: str, text: str) -> None:
    outcome = Scenario(
        seed=7,
        minutes=0.3,
        brokers=3,
        faults=False,
        wrap=lambda core, _: broken(core),
        shared=True,
        late=True,
    ).run()
    assert outcome.rule == rule, "\n".join((outcome.text, *outcome.story))
    assert re.search(text, outcome.text)


class KeepsNames(Broken):
    """Says that a name is deleted, and has it still."""

    def on_input(self, item: Input) -> Input:
        request = decode(item.frame) if isinstance(item, Received) and item.frame[4] == Kind.REQUEST else None
        if isinstance(item, Received) and isinstance(request, Request) and request.what == "subs.delete":
            frame = encode(msgspec.structs.replace(request, what="subs"))
            return Received(connection=item.connection, frame=frame)
        return item


def test_a_deleted_name_that_is_still_there_is_noticed() -> None:
    outcome = Scenario(seed=19, minutes=1.2, wrap=lambda core, _: KeepsNames(core), durable=True).run()
    assert outcome.rule == "deleted", outcome.text


def test_a_deletion_that_is_refused_explains_nothing() -> None:
    scenario = Scenario(seed=3, minutes=0.3, brokers=3, faults=False, durable=True)
    durable = scenario.durable
    assert durable is not None
    for name, process in scenario.processes.items():
        elsewhere = [one for one in durable.subscribers if process.address not in one.addresses]
        for one in elsewhere:
            clerk = Clerk(
                scenario.world,
                scenario.network,
                name=f"clerk-{name}-{one.name}",
                addresses=(process.address,),
                durable=one.reader.name,
            )
            scenario.world.after(4 * SECOND_US, clerk.start)
    assert scenario.run().rule == ""
    assert not any(one.reader.absent for one in durable.subscribers)
    assert "delete it there" in "\n".join(
        scenario.world.trace.story(["clerk-b0-ds0", "clerk-b1-ds0", "clerk-b2-ds0"])
    )


def test_storage_that_is_not_given_back_is_noticed() -> None:
    """In the first world where nothing else holds it."""
    for seed in range(1, 60):
        scenario = Scenario(
            seed=seed,
            minutes=0.3,
            brokers=2,
            faults=False,
            wrap=lambda core, _: NeverReleases(core),
            durable=True,
        )
        outcome = scenario.run()
        assert scenario.durable is not None
        if scenario.durable.reclaims:
            assert outcome.rule == "reclaimed", outcome.text
            return
    raise AssertionError("no world in which storage is given back")


# -- what subscribers are given, frame by frame


class Given:
    """A reader, and events in the log."""

    def __init__(self, ack: str = "") -> None:
        self.world = World(1)
        self.ledger = Ledger(lambda *_: False)
        self.records = Records(
            self.world,
            self.ledger,
            {},
            explains=lambda *_: False,
            unheard_of=lambda _, broker: broker == "elsewhere",
        )
        self.reader = Reader(self.records, name="r", selector=Selector.parse("t", ""), ack=ack)
        self.reader.begin(0)
        self.reader.subscribed("b0", {PUBEND: 0}, (), 1, resumed=False, opened_us=1)

    def batch(
        self, *ticks: int, topic: str = "t", logged: bool = True, start: int | None = None
    ) -> EventBatch:
        builder = BatchBuilder()
        for tick in ticks:
            id = bytes(MessageId(1, 7, tick, 0))
            builder.add(id, topic, {}, b"payload", DEFAULT_LIMITS)
            event = Published(id=id, topic=topic, attributes={}, payload=b"payload", client="p")
            event.sent[PUBEND] = 1
            self.ledger.events.setdefault(id, event)
        frame = builder.finish(channel=1)
        data = EventBatch.parse(frame, DEFAULT_LIMITS).with_ticks(
            ticks[0],
            kind=Kind.DELIVERY,
            pubend=PUBEND,
            start=ticks[0] - 1 if start is None else start,
            channel=1,
        )
        if logged:
            self.records.ask(Append(stream=STREAM, first=ticks[0] - 1, last=ticks[-1], data=data.data, tag=1))
        return data

    def again(self, token: int) -> None:
        """A new process of the application, told that it goes on after this tick."""
        self.reader.end()
        self.reader.begin(0)
        self.reader.subscribed("b0", {PUBEND: token}, (), 2, resumed=False, opened_us=1)


def test_an_application_says_again_on_a_new_connection_what_it_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `client/subscription.py` does. What comes again is dropped by the client, so nothing else would ever
    acknowledge it; a new process has nothing to say again."""
    given, said = Given(ack="auto"), []
    one = DurableSubscriber(
        given.world,
        Network(given.world),
        name="a",
        addresses=("10.0.0.1:7420",),
        reader=given.reader,
        window=1 << 20,
        consume=0,
    )
    monkeypatch.setattr(one, "_acknowledge", lambda token: said.append(dict(token)))
    began = fx.Began(number=1, missing=(), token={PUBEND: 0})
    one.start()
    for effect in (fx.Up(broker="b0"), began):
        one._hear_life(effect)
    assert not said
    one._hear_life(fx.Delivered(number=1, batch=given.batch(1, 2), size=100))
    assert said == [{PUBEND: 2}]
    for effect in (fx.Down(error=UnavailableError("cut")), fx.Up(broker="b0"), began):
        one._hear_life(effect)
    assert said == [{PUBEND: 2}, {PUBEND: 2}]
    one.restart()
    for effect in (fx.Up(broker="b0"), fx.Began(number=1, missing=(), token={PUBEND: 2})):
        one._hear_life(effect)
    assert len(said) == 2


def test_who_keeps_its_token_has_what_it_committed_exactly_once() -> None:
    given = Given()
    given.reader.events(given.batch(1, 2))
    given.reader.commit({PUBEND: 2}, 1)
    given.reader.events(given.batch(3))
    given.again(2)  # 3 was not committed
    given.reader.events(given.batch(3))
    with pytest.raises(Violation, match=r"order: r got .* at tick 3, and had everything up to 3"):
        given.reader.events(given.batch(3))
    given.again(2)
    with pytest.raises(Violation, match=r"order: r got .* at tick 2, and had everything up to 2"):
        given.reader.events(given.batch(2))


def test_a_token_kept_by_the_broker_repeats_only_what_lies_above_it() -> None:
    given = Given("auto")
    given.reader.events(given.batch(1, 2, 3))
    given.again(1)
    given.reader.events(given.batch(2))
    assert given.reader.repeats == 1
    given.again(2)
    with pytest.raises(Violation, match="order"):
        given.reader.events(given.batch(2))
    given.reader.strict = True
    with pytest.raises(Violation, match=r"repeated: r got .* again"):
        given.reader.events(given.batch(3))


def test_a_gap_above_the_token_is_told_again_or_what_some_memory_has_of_it() -> None:
    """2235, with latecomers: a past was a Gap, since its pubend had released it; its broker had a part."""
    given = Given("batch")
    given.records._explains = lambda *_: True
    given.reader.gap(PUBEND, 0, 4)
    given.reader.end()
    given.reader.begin(0)
    given.reader.events(given.batch(3))  # before it hears where it goes on
    given.reader.subscribed("b0", {PUBEND: 2}, (), 2, resumed=False, opened_us=1)
    events = given.batch(1, 2, 3, 4)
    owed = {events.id(row): row + 1 for row in range(4)}
    with pytest.raises(Violation, match=r"missed: r .* never got .*tick 4"):
        given.records._check_reader(given.reader, PUBEND, owed, 0)
    given.reader.gap(PUBEND, 3, 4)
    assert given.records._check_reader(given.reader, PUBEND, owed, 0) == 4
    with pytest.raises(Violation, match="order"):
        given.reader.events(given.batch(4))


def test_ticks_rejections_selectors_and_gaps_are_looked_at() -> None:
    given = Given()
    with pytest.raises(Violation, match=r"tick: r got .* at 5, it was logged at -1"):
        given.reader.events(given.batch(5, logged=False))
    with pytest.raises(Violation, match="match"):
        given.reader.events(given.batch(6, topic="other"))
    rejected = given.batch(7)
    given.ledger.events[rejected.id(0)].rejected = True
    with pytest.raises(Violation, match="reject"):
        given.reader.events(rejected)
    with pytest.raises(Violation, match="gap: r was told of a gap"):
        given.reader.gap(PUBEND, 7, 9)


def test_who_begins_anew_where_its_name_is_not_known_is_told_so_once() -> None:
    given = Given("auto")
    events = given.batch(1, 2, 3, 4)
    given.reader.events(given.batch(1))
    with pytest.raises(Violation, match="gap: r began anew, and nothing explains it"):
        given.reader.gap_of_others()
    given.reader.subscribed("elsewhere", {PUBEND: 3}, (), 2, resumed=True, opened_us=1)
    owed = {events.id(row): row + 1 for row in range(3)}
    with pytest.raises(Violation, match=r"missed: r .* never got .*tick 2"):
        given.records._check_reader(given.reader, PUBEND, owed, 0)
    given.reader.gap_of_others()
    given.reader.gap(PUBEND, 1, 3)
    assert given.records._check_reader(given.reader, PUBEND, owed, 0) == 3
    with pytest.raises(Violation, match="gap: r was told of a gap"):
        given.reader.gap(PUBEND, 3, 4)


def test_who_begins_anew_twice_is_told_of_what_it_heard_of_between() -> None:
    """A pubend that only a token named."""
    given = Given("auto")
    other = PUBEND + 1
    for tick, us in (5, 2), (9, 3):
        given.reader.delete(us)
        given.reader.subscribed("b0", {other: tick}, (), us + 1, resumed=True, opened_us=us)
    given.reader.gap(other, 5, 9)
    with pytest.raises(Violation, match="gap: r was told of a gap"):
        given.reader.gap(other, 9, 11)


def test_a_subscription_may_end_where_it_moved_away_and_not_for_any_other_fault_of_its_user() -> None:
    """The code of the error says which, whatever its text says."""
    reader = Given("auto").reader
    text = "'r' was taken by another connection, at broker 'b1'"
    assert reader.may_end(MovedError(text))
    assert not reader.may_end(UsageError(text))
    assert not reader.may_end(None)


def test_who_was_deleted_begins_anew() -> None:
    given = Given("auto")
    deleted = DeletedError("the durable subscription 'r' was deleted")
    assert not given.reader.may_end(deleted)
    events = given.batch(1, 2, 3, 4)
    owed = {events.id(row): row + 1 for row in range(4)}
    given.reader.events(given.batch(1))
    given.reader.delete(5)
    assert given.reader.may_end(deleted)
    # A confirmation that was on its way is no beginning since.
    given.reader.subscribed("b0", {PUBEND: 1}, (), 6, resumed=True, opened_us=4)
    assert given.reader.deleted
    given.reader.end()
    given.reader.begin(0)
    given.reader.subscribed("b0", {PUBEND: 3}, (), 9, resumed=False, opened_us=8)
    assert given.reader.absent == [(5, 9)]
    assert not given.reader.may_end(deleted)
    with pytest.raises(Violation, match=r"missed: r .* never got .*tick 4"):
        given.records._check_reader(given.reader, PUBEND, owed, 0)
    given.reader.events(given.batch(4))
    assert given.records._check_reader(given.reader, PUBEND, owed, 0) == 1


def test_who_keeps_its_token_goes_on_after_its_name_was_deleted() -> None:
    given = Given()
    events = given.batch(1, 2)
    given.reader.events(given.batch(1))
    given.reader.commit({PUBEND: 1}, 1)
    given.reader.delete(5)
    given.reader.end()
    given.reader.begin(0)
    given.reader.subscribed("b0", {PUBEND: 1}, (), 9, resumed=False, opened_us=8)
    with pytest.raises(Violation, match=r"missed: r .* never got .*tick 2"):
        given.records._check_reader(given.reader, PUBEND, {events.id(1): 2}, 0)


@pytest.mark.parametrize("ack", ["", "auto"])
def test_who_asked_for_a_past_is_owed_it_whatever_its_token_says(ack: str) -> None:
    given = Given(ack)
    given.reader.since_us = 2
    given.reader.begins = {PUBEND: 3}
    events = given.batch(1, 2, 3, 4)
    owed = {events.id(row): row + 1 for row in range(4)}
    given.reader.events(given.batch(4))
    with pytest.raises(Violation, match=r"missed: r .* never got .*tick 3"):
        given.records._check_reader(given.reader, PUBEND, owed, 0)


def test_a_past_that_was_released_before_somebody_asked_for_it_is_a_gap() -> None:
    durable = Scenario(seed=3, minutes=0.3, brokers=1, faults=False, durable=True, late=True).durable
    assert durable is not None
    reader, (pubend, *_) = durable.records.readers[0], durable.records.pubends
    reader.home, reader.since_us, reader.began_us = durable.records.pubends[pubend], 1, EPOCH_US + SECOND_US
    assert not durable._explains(reader, pubend, 1, 5)
    durable.records.chop(Chop(stream=LogStream(StreamKind.EVENTS, pubend), tick=5))
    assert durable._explains(reader, pubend, 1, 5)
    reader.began_us = EPOCH_US - 1
    assert not durable._explains(reader, pubend, 1, 5)
    reader.since_us, reader.began_us = 0, EPOCH_US + SECOND_US
    assert not durable._explains(reader, pubend, 1, 5)


def test_an_event_is_in_one_log_once() -> None:
    given = Given()
    batch = given.batch(1)
    ids = BatchView(batch.data).ids()
    given.records.logged(PUBEND, ids)
    given.records.logged(PUBEND, ids)
    given.batch(1)
    moved = batch.with_ticks(9, kind=Kind.DELIVERY, pubend=PUBEND, start=8, channel=1)
    given.records.ask(Append(stream=STREAM, first=8, last=9, data=moved.data, tag=2))
    with pytest.raises(Violation, match=r"copy: .* at 1 and at 9"):
        given.records.logged(PUBEND, ids)


def test_every_rule_of_the_theory_is_tested_here() -> None:
    text = durable_rules.__doc__ or ""
    named = {
        rule
        for line in text.splitlines()
        if line.startswith("- `")
        for rule in line[2:].split("  ")[0].replace("`", "").split(", ")
    }
    assert named == {
        *("known", "match", "once", "order", "tick", "reject", "gap"),
        *("kept", "copy", "missed", "repeated", "reclaimed", "deleted"),
    }
