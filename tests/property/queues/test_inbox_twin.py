"""Inboxes against a naive twin, and against themselves on a replica that was installed halfway."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from postroad.queues.inbox import (
    MIN_BODY_BYTES,
    Accept,
    AcceptEach,
    Extent,
    Inboxes,
    Join,
    Leave,
    Limits,
    Message,
    Operation,
    Put,
    Refuse,
    Reject,
    Revive,
    Sweep,
    encode,
    extent_of,
    oldest_of,
    with_body,
)
from postroad.queues.messages import Chain

CHAINS = (Chain(0, b"A", b"A"), Chain(0, b"C", b"C"))
SOURCES = ("s", "t")
CONSUMERS = ("x", "y")
LIMITS = Limits(inbox_messages=6, dead_letters=2, attempts=2)


@dataclass
class Twin:
    """One inbox as plain lists. It knows the order of arrival, who settled what, and nothing about speed."""

    messages: list[Message] = field(default_factory=list)
    dead: list[Message] = field(default_factory=list)
    last: dict[tuple[Chain, str], int] = field(default_factory=dict)
    refused: set[tuple[Chain, str, int]] = field(default_factory=set)
    accepted: dict[tuple[Chain, str, int], str] = field(default_factory=dict)
    consumers: list[str] = field(default_factory=list)
    stuck: dict[tuple[Chain, str], str] = field(default_factory=dict)
    known: list[tuple[Chain, str]] = field(default_factory=list)  # sources in the order they came

    def stick(self) -> None:
        for source in self.known:
            if (
                source in self.stuck
                or not self.consumers
                or not any(owner(m) == source for m in self.messages)
            ):
                continue
            load = {name: sum(1 for each in self.stuck.values() if each == name) for name in self.consumers}
            self.stuck[source] = min(self.consumers, key=lambda name: (load[name], name))

    def find(self, key: tuple[Chain, str, int]) -> Message | None:
        return next((m for m in self.messages if (m.chain, m.source, m.id) == key), None)

    def put(self, op: Put) -> str:
        (message,) = op.messages
        source, key = owner(message), (message.chain, message.source, message.id)
        last = self.last.get(source, 0)
        if message.ordered and message.id <= last:
            return "rejected" if key in self.refused else "known"
        if message.ordered and message.after > last:
            return "gap"
        if not message.ordered and self.find(key):
            return "known"
        if len(self.messages) >= LIMITS.inbox_messages:
            return "full"
        self.note(source)
        if message.ordered:
            self.last[source] = message.id
        self.messages.append(message)
        return "kept"

    def note(self, source: tuple[Chain, str]) -> None:
        if source not in self.known:
            self.known.append(source)

    def accept(self, op: Accept) -> str:
        message = self.find(op.key)
        if message is None:
            return "accepted" if self.accepted.get(op.key) == op.consumer else "taken"
        if self.stuck.get(owner(message)) != op.consumer:
            return "taken" if op.consumer in self.consumers else "absent"
        ordered = [m for m in self.messages if m.ordered and owner(m) == owner(message)]
        if message.ordered and ordered[0] is not message:
            return "early"
        self.messages.remove(message)
        self.accepted[op.key] = op.consumer
        return "accepted"

    def reject(self, op: Reject) -> str:
        message = self.find(op.key)
        if message is None:
            return "taken"
        if self.stuck.get(owner(message)) != op.consumer:
            return "taken" if op.consumer in self.consumers else "absent"
        tried = replace(message, attempts=message.attempts + 1, not_before_us=op.not_before_us)
        if not op.dead and tried.attempts < LIMITS.attempts:
            self.messages[self.messages.index(message)] = tried
            return "again"
        if len(self.dead) >= LIMITS.dead_letters:
            return "full"
        self.messages.remove(message)
        self.accepted[op.key] = ""
        self.dead.append(replace(tried, reason=op.reason))
        return "dead"

    def refuse(self, op: Refuse) -> str:
        chain, source, number = op.key
        self.note((chain, source))
        if number <= self.last.get((chain, source), 0):
            return "rejected" if op.key in self.refused else "known"
        self.last[chain, source] = number
        self.refused.add(op.key)
        return "rejected"

    def leave(self, op: Leave) -> str:
        if op.consumer in self.consumers:
            self.consumers.remove(op.consumer)
            self.stuck = {source: name for source, name in self.stuck.items() if name != op.consumer}
        return "left"

    def sweep(self, op: Sweep) -> str:
        for message in [m for m in self.messages if 0 < m.expires_us <= op.now_us]:
            self.messages.remove(message)
            self.accepted[message.chain, message.source, message.id] = ""
            if len(self.dead) < LIMITS.dead_letters:
                self.dead.append(replace(message, reason="expired"))
        return "done"

    def revive(self, op: Revive) -> str:
        chosen = self.dead[: op.count]
        if len(self.messages) + (0 if op.drop else len(chosen)) > LIMITS.inbox_messages:
            return "full"
        self.dead = self.dead[op.count :]
        for message in () if op.drop else chosen:
            if self.find((message.chain, message.source, message.id)) is None:
                fresh = replace(message, ordered=False, attempts=0, expires_us=0, not_before_us=0, reason="")
                self.messages.append(fresh)
        return "revived"

    def ready(self, consumer: str, now_us: int) -> list[Message]:
        chosen: list[Message] = []
        for message in sorted(self.messages, key=lambda m: -m.priority):
            if self.stuck.get(owner(message)) != consumer:
                continue
            if message.not_before_us > now_us or 0 < message.expires_us <= now_us:
                continue
            earlier = self.messages[: self.messages.index(message)]
            if message.ordered and any(
                m.ordered and owner(m) == owner(message) and m not in chosen for m in earlier
            ):
                continue
            chosen.append(message)
        return chosen

    def perform(self, op: Operation) -> str:
        match op:
            case Put():
                outcome = self.put(op)
            case Accept():
                outcome = self.accept(op)
            case Reject():
                outcome = self.reject(op)
            case Refuse():
                outcome = self.refuse(op)
            case Leave():
                outcome = self.leave(op)
            case Sweep():
                outcome = self.sweep(op)
            case Revive():
                outcome = self.revive(op)
            case Join():
                if op.consumer not in self.consumers:
                    self.consumers.append(op.consumer)
                outcome = "joined"
            case _:
                raise AssertionError(op)
        self.stick()
        return outcome


def aimed(operation: Operation, index: int, twin: Twin) -> Operation:
    """Most accepts and rejects are about a message that is there, most puts about the next of its source."""
    if isinstance(operation, Accept | Reject) and index < 7 and twin.messages:
        message = twin.messages[index % len(twin.messages)]
        return replace(operation, key=(message.chain, message.source, message.id))
    if isinstance(operation, Put) and index < 7 and operation.messages[0].ordered:
        last = twin.last.get(owner(operation.messages[0]), 0)
        return replace(operation, messages=(replace(operation.messages[0], id=last + 1 + index % 2),))
    return operation


def owner(message: Message) -> tuple[Chain, str]:
    return (message.chain, message.source)


# Few names and mostly plain messages, so that operations meet.
chains = st.sampled_from((*CHAINS[:1] * 4, *CHAINS))
keys = st.tuples(chains, st.sampled_from(SOURCES), st.integers(1, 4))
times = st.integers(0, 5)
mostly_never = st.just(0) | st.just(0) | st.just(0) | times


@st.composite
def puts(draw: st.DrawFn) -> Put:
    chain, source, number = draw(keys)
    ordered = draw(st.integers(0, 3)) > 0
    # Transactional and recoverable ids of a source are of one sequence.
    number = number if ordered else number + 10
    message = Message(
        *("inbox", chain, source, number, ordered, b"."),
        after=draw(st.just(0) | st.just(0) | st.integers(0, number - 1)) if ordered else 0,
        priority=draw(st.sampled_from((2, 4))),
        not_before_us=draw(mostly_never),
        expires_us=draw(mostly_never),
    )
    return Put((message,), 0)


any_keys = keys | keys.map(lambda key: (key[0], key[1], key[2] + 10))
consumers = st.sampled_from(CONSUMERS)
accepts = st.builds(Accept, st.just("inbox"), any_keys, consumers, st.just(0))
rejects = st.builds(
    *(Reject, st.just("inbox"), any_keys, consumers, st.just("no"), st.booleans(), mostly_never, st.just(0))
)
rare = st.one_of(
    st.builds(Refuse, st.just("inbox"), keys, st.just(0)),
    st.builds(Join, st.just("inbox"), consumers, st.just("alice"), st.just(False), st.just(0)),
    st.builds(Leave, st.just("inbox"), consumers, st.just(()), st.just(0)),
    st.builds(Sweep, times),
    st.builds(Revive, st.just("inbox"), st.integers(0, 3), st.booleans(), st.just(0)),
)
# Which of the messages that are there is meant is found when it is known: (operation, its index).
operations = st.tuples(st.one_of(puts(), puts(), accepts, accepts, rejects, rare), st.integers(0, 9))
FIRST = Join("inbox", "x", "alice", False, 0)


@settings(max_examples=300)
@given(st.lists(operations, min_size=10, max_size=40), st.integers(0, 20), times)
def test_inboxes_do_what_plain_lists_do_and_an_installed_replica_goes_on_alike(
    history: list[tuple[Operation, int]], middle: int, now_us: int
) -> None:
    inboxes, replica, twin = Inboxes(LIMITS), Inboxes(LIMITS), Twin()
    for at, (drawn, index) in enumerate([(FIRST, 0), *history]):
        operation = aimed(drawn, index, twin)
        if at == middle:
            replica.install(inboxes.snapshot())
        (answer,) = inboxes.apply(encode(operation))
        assert answer.outcome == twin.perform(operation), operation
        if at >= middle:
            assert replica.apply(encode(operation)) == (answer,)
            assert replica.snapshot() == inboxes.snapshot()
            replica.check()
        inboxes.check()
        for consumer in CONSUMERS:
            assert inboxes.ready("inbox", consumer, now_us, 100) == twin.ready(consumer, now_us)


@st.composite
def batches(draw: st.DrawFn) -> list[Operation]:
    """Messages of few sources in mostly rising order, and accepts of what came in."""
    made: list[Operation] = [FIRST]
    lasts = dict.fromkeys([(chain, source) for chain in CHAINS for source in SOURCES], 0)
    for _ in range(draw(st.integers(1, 6))):
        messages: list[Message] = []
        chain, source = draw(chains), draw(st.sampled_from(SOURCES))
        for _ in range(draw(st.integers(1, 6))):
            if draw(st.integers(0, 4)) == 0:
                chain, source = draw(chains), draw(st.sampled_from(SOURCES))
            before = lasts[chain, source]
            number = max(1, before + draw(st.sampled_from((1, 1, 1, 1, 2, 0))))
            after = draw(st.sampled_from((0, before, before, number - 1)))
            ordered, priority = draw(st.integers(0, 5)) > 0, draw(st.sampled_from((4, 4, 4, 2)))
            lasts[chain, source] = max(before, number)
            number = number if ordered else number + 1_000
            messages.append(
                Message(*("inbox", chain, source, number, ordered, b"."), min(after, number - 1), priority)
            )
        made.append(Put(tuple(messages), 0, together=False))
        chosen = draw(st.lists(st.sampled_from(messages), max_size=4)) + messages[: draw(st.integers(0, 5))]
        accepted = tuple((each.chain, each.source, each.id) for each in chosen)
        if accepted:
            made.append(AcceptEach("inbox", accepted, draw(consumers), 0))
    return made


@settings(max_examples=300)
@given(batches())
def test_a_batch_does_what_its_messages_do_one_by_one(history: list[Operation]) -> None:
    together, alone = Inboxes(LIMITS), Inboxes(LIMITS)
    for operation in history:
        (answer,) = together.apply(encode(operation))
        if isinstance(operation, Put):
            singles: list[Operation] = [replace(operation, messages=(each,)) for each in operation.messages]
        elif isinstance(operation, AcceptEach):
            singles = [Accept("inbox", key, operation.consumer, 0) for key in operation.keys]
        else:
            singles = [operation]
        outcomes = [each.each[0] if each.each else each for each in alone.apply(encode(*singles))]
        assert list(answer.each or (answer,) * len(singles)) == outcomes
        assert together.snapshot() == alone.snapshot()
        together.check()


class Disk:
    """Where a replica's bodies are while they are not in its memory."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}

    def move_out(self, replica: Inboxes, wanted: int) -> None:
        chosen = replica.newest(wanted)
        tick, record, moved = len(self.records) + 1, b"", []
        for name, message in chosen:
            moved.append((name, message, Extent(tick, len(record), len(message.payload), 0)))
            record += message.payload
        self.records[tick] = record
        replica.move_out(moved)

    def bring_back(self, replica: Inboxes) -> None:
        if replica.live:
            tick = min(replica.live)
            replica.bring_back(tick, self.records[tick])

    def read(self, message: Message) -> Message:
        extent = extent_of(message)
        return message if extent is None else with_body(message, self.records[extent.tick])


@settings(max_examples=150)
@given(st.lists(operations, min_size=10, max_size=40), st.lists(st.integers(0, 5), min_size=50, max_size=50))
def test_where_bodies_are_changes_nothing(history: list[tuple[Operation, int]], moves: list[int]) -> None:
    """Q5: Answers, deliveries and sizes are those of a replica that has every body in memory."""
    limits = replace(LIMITS, inbox_bytes=1 << 20)
    plain, spilling, twin, disk = Inboxes(limits), Inboxes(limits), Twin(), Disk()
    for (drawn, index), move in zip([(FIRST, 0), *history], moves, strict=False):
        operation = aimed(drawn, index, twin)
        if isinstance(operation, Put):
            large = [replace(each, payload=b"%d" % each.id * MIN_BODY_BYTES) for each in operation.messages]
            operation = replace(operation, messages=tuple(large))
        (answer,) = plain.apply(encode(operation))
        assert spilling.apply(encode(operation)) == (answer,)
        twin.perform(operation)
        if move < 3:
            disk.move_out(spilling, move * 1_000)
        elif move == 3:
            disk.bring_back(spilling)
        elif move == 4:
            spilling.install(spilling.snapshot())  # a mark, and a start from it
        plain.check()
        spilling.check()
        assert spilling.bytes == plain.bytes
        for consumer in CONSUMERS:
            ready = spilling.ready("inbox", consumer, 3, 100)
            assert [disk.read(message) for message in ready] == plain.ready("inbox", consumer, 3, 100)
        if "inbox" in plain.inboxes:
            assert list(map(disk.read, spilling.inboxes["inbox"].dead)) == plain.inboxes["inbox"].dead
    oldest = min(spilling.live, default=0)
    assert oldest_of(spilling.snapshot()) == oldest
