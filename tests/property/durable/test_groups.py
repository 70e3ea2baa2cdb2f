"""Shared durable subscriptions: each event to one consumer, keys in order, none lost."""

from __future__ import annotations

import tracemalloc
from itertools import count
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds.turns import Turns

from postroad.durable.subscriber import dividing
from postroad.durable.subscriber.groups import TABLE, Assign, AssignGap, SharedSubscription, read_done
from postroad.durable.subscriber.outputs import Deliver, DeliverGap
from postroad.errors import BugError, PostroadError
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.ids import IdSource
from postroad.kernel.layout import EVENT_HEADER_BYTES, FRAME_HEADER_BYTES
from postroad.seam.storage import Save
from postroad.wire.frames import DEFAULT_LIMITS, Kind

P = 7 << 32


def batch(start: int, keys: list[str]) -> EventBatch:
    builder, ids = BatchBuilder(), IdSource(1, 9)
    for key in keys:
        payload = bytes(200 * (key == "x"))
        builder.add(ids.next(1), "t", {"k": key} if key else {}, payload, DEFAULT_LIMITS)
    made = EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)
    return made.with_ticks(start + 1, kind=Kind.KNOWLEDGE, pubend=P, start=start, channel=0)


def group_turns() -> Turns:
    turns = Turns()
    turns.board.table(TABLE, read_done)
    return turns


def flushed(group: SharedSubscription, turns: Turns) -> Save | None:
    """What the group saves, and the disk has then."""
    answers: list[PostroadError | None] = []
    turn = turns.turn()
    saving = group.flush(turn, lambda _turn, error: answers.append(error))
    assert saving == bool(turn.effects)
    for save in turn.effects:
        assert isinstance(save, Save)
        assert save.table == TABLE
        assert group.dirty
        turns.written(save)
        assert answers == [None]
        return save
    return None


class World:
    def __init__(self, random: Random, key: str) -> None:
        self.random, self.key = random, key
        self.turns = group_turns()
        self.events: list[tuple[int, str]] = []  # (tick, key), as published
        self.held: dict[int, list[int]] = {}  # consumer -> ticks it has and did not acknowledge
        self.done: list[int] = []  # acknowledged, and saved, in order
        self.lost = 0  # events up to this tick are not there any more: who asks for them gets a gap
        self.told: dict[int, list[tuple[int, int]]] = {}  # consumer -> gaps that it did not acknowledge
        self.passed: set[int] = set()  # ticks in gaps that were acknowledged
        self.rows: dict[bytes, bytes] = {}
        self.token: dict[int, int] = {P: 0}
        self.failing: set[int] = set()  # ticks that were tried too often
        self.max_attempts = 0
        self.given = 0  # the last id of a dead letter
        self.newest = bytes(16)  # the last one that was published
        self.now_us = 0
        self.consumers = count(1)
        self.room: dict[int, int] = {}  # bytes of credit, by consumer
        self.start()

    def start(self) -> None:
        """The broker starts, at first or after a crash: what was saved is all it knows."""
        self.group = SharedSubscription(
            5,
            key=self.key,
            available=lambda consumer: self.room[consumer],
            saved=lambda pubend: self.token[pubend],
            matched=lambda pubend: self.group.token().get(pubend, self.token[pubend]),
        )
        self.group.max_attempts = self.max_attempts
        self.group.recover(self.rows, self.token)
        self.held, self.told = {}, {}
        self.position = self.token[P]

    def take(self, given: list[Assign | AssignGap]) -> None:
        for one in given:
            assert self.room[one.consumer] > 0, "it has no credit"
            if isinstance(one, AssignGap):
                inside = range(one.start + 1, one.end + 1)
                assert self.passed.isdisjoint(inside), "somebody had it"
                assert not set(self.done).intersection(inside), "told of what was acknowledged"
                assert (one.start, one.end) not in self.told[one.consumer]
                self.told[one.consumer].append((one.start, one.end))
                self.room[one.consumer] -= FRAME_HEADER_BYTES
                continue
            ticks = one.batch.headers["tick"][one.rows].tolist()
            self.room[one.consumer] -= len(
                one.batch.select(one.rows, kind=Kind.DELIVERY, pubend=P, start=0, end=ticks[-1], channel=1)
            )
            for tick in ticks:
                assert tick not in self.done, "given out again after it was acknowledged"
                assert all(tick not in held for held in self.held.values()), "at two consumers"
                key = dict(self.events)[tick]
                if self.key and key:
                    before = [t for t, k in self.events if k == key and self.lost < t < tick]
                    earlier = [t for t in before if t not in self.done and t not in self.failing]
                    assert all(t in self.held[one.consumer] for t in earlier), "a key out of order"
                self.held[one.consumer].append(tick)

    def offer(self) -> None:
        """The next events, old ones again after a restart."""
        if not self.group.has_room():
            return
        if self.position == len(self.events):
            size = self.random.randint(1, 6)
            self.events += [
                (self.position + at + 1, self.random.choice(["", "x", "y"])) for at in range(size)
            ]
        if self.position < self.lost:
            start, self.position = self.position, self.lost
            gap = DeliverGap(subscribers=(5,), pubend=P, start=start, end=self.lost, events=self.lost - start)
            self.take(self.group.offer(gap))
            return
        keys = [key for tick, key in self.events if tick > self.position]
        made = batch(self.position, keys)
        message = Deliver(
            subscribers=(5,),
            pubend=P,
            start=self.position,
            end=made.end,
            batch=made,
            rows=np.arange(made.count, dtype=np.uint32),
        )
        self.position = made.end
        self.take(self.group.offer(message))

    def lose(self) -> None:
        self.lost = max(self.lost, self.random.randint(0, len(self.events)))

    def ack(self) -> None:
        consumer = self.random.choice(sorted(self.held)) if self.held else 0
        held, told = self.held.get(consumer, []), self.told.get(consumer, [])
        if told and (not held or self.random.random() < 0.5):
            start, end = told.pop(self.random.randrange(len(told)))
            self.passed.update(range(start + 1, end + 1))
            tick = start + 1
        elif held:
            tick = held.pop(0) if self.key else held.pop(self.random.randrange(len(held)))
            self.done.append(tick)
        else:
            return
        self.group.ack(consumer, P, [tick])
        self.take(self.group.assign())
        self.save()
        if self.random.random() < 0.3:
            self.token.update(self.group.token())

    def save(self) -> None:
        """An acknowledgement counts when it is saved; the token is saved later."""
        save = flushed(self.group, self.turns)
        if save is not None:
            for key, value in save.rows:
                self.rows.pop(key, None)
                if value is not None:
                    self.rows[key] = value

    def reject(self) -> None:
        consumer = self.random.choice(sorted(self.held)) if self.held else 0
        held = self.held.get(consumer, [])
        if held:
            tick = held.pop(self.random.randrange(len(held)))
            self.failed(tick)
            until_us = self.now_us + self.random.choice([0, 0, 5])
            self.group.reject(consumer, P, [tick], until_us=until_us, now_us=self.now_us)
            self.take(self.group.assign())
            self.save()

    def failed(self, tick: int) -> None:
        if self.group._progress[P].attempts.get(tick, 0) + 1 == self.max_attempts:
            self.failing.add(tick)

    def wait(self) -> None:
        self.now_us += self.random.randint(1, 6)
        self.take(self.group.wake(self.now_us))

    def bury(self) -> None:
        """What was tried too often becomes a dead letter. The disk keeps some back, and of some that are
        published nobody hears in time; there may be restarts before it is tried again."""
        given = dict(self.group._progress[P].dead) if P in self.group._progress else {}
        assert self.group.resolve(self.newest) == bool(given)
        self.done += [tick for tick, identity in given.items() if identity <= self.newest]
        self.save()
        for event in self.group.aside:
            assert event.tick in self.failing
            self.given += 1
            identity = self.given.to_bytes(16, "big")
            self.group.give_id(event, identity)
            self.save()
            if self.random.random() < 0.3:
                return
            self.newest = identity
            if self.random.random() < 0.3:
                return
            self.group.bury(P, event.tick)
            self.done.append(event.tick)
            self.save()

    def lost_consumer(self) -> None:
        if self.held:
            consumer = self.random.choice(sorted(self.held))
            held = self.held.pop(consumer)
            del self.told[consumer]
            oldest = self.group._division.oldest(consumer)
            assert (oldest is None) == (not held)
            if oldest is not None:
                self.failed(oldest.tick)
            self.take(self.group.leave(consumer, lost=True))
            self.save()

    def credit(self) -> None:
        if self.held:
            self.room[self.random.choice(sorted(self.held))] = self.random.choice([0, 1, 100, 150, 500])
            self.take(self.group.assign())

    def reset(self) -> None:
        """All consumers are gone for a while: the stream begins again at the token."""
        for consumer in sorted(self.held):
            self.group.leave(consumer)
        self.held, self.told = {}, {}
        self.group.reset()
        self.position = self.group.token()[P]

    def join(self) -> None:
        consumer = next(self.consumers)
        self.held[consumer], self.told[consumer] = [], []
        self.room[consumer] = 500
        self.take(self.group.join(consumer))

    def leave(self) -> None:
        if self.held:
            consumer = self.random.choice(sorted(self.held))
            del self.held[consumer], self.told[consumer]
            self.take(self.group.leave(consumer))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["", "k"]))
def test_each_event_to_one_consumer_and_none_lost(seed: int, key: str) -> None:
    random = Random(seed)
    with (
        patch.object(dividing, "MAX_WINDOW", random.randint(1, 4)),
        patch.object(dividing, "SLACK_BYTES", random.choice([0, 500])),
    ):
        divide(World(random, key), random)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["", "k"]))
def test_what_is_rejected_is_tried_again_or_dead_and_never_lost(seed: int, key: str) -> None:
    """Across delays, lost consumers, restarts and gaps; every event is done once."""
    random = Random(seed)
    world = World(random, key)
    world.max_attempts = world.group.max_attempts = random.choice([0, 1, 2, 3])
    for _ in range(120):
        steps = [
            world.offer,
            world.ack,
            world.reject,
            world.wait,
            world.bury,
            world.join,
            world.lost_consumer,
        ]
        more = [world.leave, world.start, world.reset, world.lose, world.credit]
        random.choices([*steps, *more], [8, 8, 6, 3, 3, 2, 0.5, 0.5, 0.3, 0.3, 0.2, 2])[0]()
        world.group.check()
    if not world.held:
        world.join()
    for _ in range(2_000):
        if world.group.token() == {P: len(world.events)}:
            break
        world.room = dict.fromkeys(world.room, 500)
        world.wait()
        world.take(world.group.assign())
        if world.position < len(world.events):
            world.offer()
        world.ack()
        world.bury()
        world.group.check()
    assert len(set(world.done)) == len(world.done), "each once"
    assert world.passed.union(world.done) == {tick for tick, _ in world.events}, "each, or in a gap"
    assert world.group.token() == {P: world.position}
    attempts = world.group._progress[P].attempts if world.events else {}
    assert attempts == {}, "nothing is remembered of what is done"


def divide(world: World, random: Random) -> None:
    for _ in range(80):
        lives = [world.join, world.leave, world.start, world.reset]
        steps = [world.offer, world.ack, world.credit, *lives, world.lose]
        random.choices(steps, [8, 12, 2, 2, 1, 0.3, 0.3, 0.3])[0]()
        world.group.check()
        token = world.group.token().get(P, 0)
        if not world.lost:
            assert world.group.finished(P) == sum(tick > token for tick in world.done)
    if not world.held:
        world.join()
    for _ in range(2_000):
        if world.group.token() == {P: len(world.events)}:
            break
        world.room = dict.fromkeys(world.room, 500)
        world.take(world.group.assign())
        if world.position < len(world.events):
            world.offer()
        world.ack()
        world.group.check()
    assert len(set(world.done)) == len(world.done), "each once"
    assert world.passed.union(world.done) == {tick for tick, _ in world.events}, "each, or in a gap"
    assert world.group.token() == {P: world.position}
    assert world.group.status()["in_flight"] == 0


def test_who_joins_during_a_backlog_gets_its_share_of_the_keys() -> None:
    """Though the consumer that was there first has all keys in flight, and its window is filled again."""
    room: dict[int, int] = dict.fromkeys(range(1, 5), 1 << 20)
    group = group_with(room, key="k")
    made = batch(0, [f"k{number % 50}" for number in range(3_000)])
    held: dict[int, list[int]] = {consumer: [] for consumer in room}
    done: dict[int, list[int]] = {consumer: [] for consumer in room}

    def take(given: list[Assign | AssignGap]) -> None:
        for one in given:
            assert isinstance(one, Assign)
            held[one.consumer] += one.batch.headers["tick"][one.rows].tolist()

    take(group.join(1))
    take(group.offer(Deliver(subscribers=(5,), pubend=P, start=0, end=made.end, batch=made)))
    for turn in range(3_000):
        if turn in (10, 20, 30):
            take(group.join(turn // 10 + 1))
        for consumer, ticks in held.items():
            if ticks:
                done[consumer].append(ticks.pop(0))
                group.ack(consumer, P, [done[consumer][-1]])
        take(group.assign())
        if turn % 100 == 0:
            group.check()
    assert sum(map(len, done.values())) == 3_000
    assert min(map(len, done.values())) > 600, {consumer: len(ticks) for consumer, ticks in done.items()}


def group_with(room: dict[int, int], key: str = "", matched: int | None = None) -> SharedSubscription:
    return SharedSubscription(
        5,
        key=key,
        available=room.__getitem__,
        saved=lambda _: 0,
        matched=lambda _: matched,
    )


def test_an_event_that_stays_open_does_not_hold_its_batch_in_memory() -> None:
    """D9: Of each batch the event with the key "x" is not acknowledged."""
    group = group_with({1: 1 << 40, 2: 1 << 40}, "k")
    group.join(1)
    position = 0

    def offer(*keys: str) -> list[Assign | AssignGap]:
        nonlocal position
        builder, ids = BatchBuilder(), IdSource(1, 9)
        for key in keys:
            payload = b"x" if key == "x" else bytes(200_000)
            builder.add(ids.next(1), "t", {"k": key}, payload, DEFAULT_LIMITS)
        made = EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)
        made = made.with_ticks(position + 1, kind=Kind.KNOWLEDGE, pubend=P, start=position, channel=0)
        message = Deliver(subscribers=(5,), pubend=P, start=position, end=made.end, batch=made)
        position = made.end
        return group.offer(message)

    offer("x")
    group.join(2)
    tracemalloc.start()
    for number in range(200):
        for one in offer("x", f"a{number}", f"b{number}"):
            assert isinstance(one, Assign)
            assert one.batch.count == 3, "what goes out at once is not copied"
            group.ack(one.consumer, P, [tick for tick in ticks_of(one) if tick % 3 != 2])
        assert group.has_room()
        group.check()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert group.open_count == 201
    assert held < 3 << 20, "there were 80 MB"
    given = group.leave(1)
    ticks = [tick for one in given if isinstance(one, Assign) for tick in ticks_of(one)]
    assert ticks == [1, *range(2, 600, 3)]


def ticks_of(one: Assign) -> list[int]:
    ticks: list[int] = one.batch.headers["tick"][one.rows].tolist()
    return ticks


def test_gaps_wait_for_credit_and_are_told_to_who_joins_until_one_is_done_with_them() -> None:
    """D9.

    Each is a frame, which may be begun only while there is credit; one before it may have used it up.
    """
    room = {1: 1, 2: 0, 3: 1_000, 4: 1_000}
    group = group_with(room)
    group.join(1)
    group.join(2)

    def told(given: list[Assign | AssignGap]) -> list[tuple[int, int]]:
        gaps = [one for one in given if isinstance(one, AssignGap)]
        for one in gaps:
            room[one.consumer] -= FRAME_HEADER_BYTES
        return [(one.consumer, one.end) for one in gaps]

    assert told(group.offer(DeliverGap(subscribers=(5,), pubend=P, start=0, end=9))) == [(1, 9)]
    assert told(group.offer(DeliverGap(subscribers=(5,), pubend=P, start=9, end=12))) == []
    made = batch(12, ["", ""])
    assert group.offer(Deliver(subscribers=(5,), pubend=P, start=12, end=14, batch=made)) == []
    room[1] = 1
    assert told(group.assign()) == [(1, 12)]
    group.ack(2, P, [1])
    assert group.token() == {P: 0}, "it was not told"
    assert group.leave(1) == []
    assert group.leave(2) == []
    given = group.join(3)
    assert told(given) == [(3, 9), (3, 12)]
    assert isinstance(given[-1], Assign)
    group.ack(3, P, [1])
    assert group.token() == {P: 9}
    assert told(group.join(4)) == [(4, 12)]
    group.ack(4, P, [10])
    group.ack(3, P, [10])
    assert group.token() == {P: 12}
    group.check()


def test_a_gap_is_told_in_the_parts_that_nobody_was_done_with() -> None:
    """D8: of ten events the second, and the fourth to the seventh, were acknowledged and saved."""
    rows: dict[bytes, bytes] = {}

    def start() -> SharedSubscription:
        group = group_with({1: 1_000, 2: 1_000}, matched=0)
        group.recover(rows, {P: 0})
        assert group.join(1) == []
        return group

    def lose(group: SharedSubscription) -> list[tuple[int, int]]:
        gap = DeliverGap(subscribers=(5,), pubend=P, start=0, end=10, events=10)
        return [(one.start, one.end) for one in group.offer(gap) if isinstance(one, AssignGap)]

    def save(group: SharedSubscription) -> None:
        save = flushed(group, group_turns())
        assert save is not None
        rows.update({key: value for key, value in save.rows if value is not None})

    group = start()
    group.offer(Deliver(subscribers=(5,), pubend=P, start=0, end=10, batch=batch(0, [""] * 10)))
    group.ack(1, P, [2, 4, 5, 6, 7])
    save(group)
    group = start()
    assert lose(group) == [(0, 1), (2, 3), (7, 10)]
    assert group.open_count == 3
    assert group.finished(P) == 5
    group.check()
    group.ack(1, P, [3])
    save(group)
    assert group.token() == {P: 0}
    group = start()
    assert lose(group) == [(0, 1), (7, 10)]
    group.ack(1, P, [1])
    assert group.token() == {P: 7}
    assert [one for one in group.join(2) if isinstance(one, AssignGap)] == [
        AssignGap(consumer=2, pubend=P, start=7, end=10)
    ]
    group.ack(2, P, [8])
    assert group.token() == {P: 10}
    assert (group.open_count, group.finished(P)) == (0, 0)
    group.check()


def test_a_frame_begins_with_credit_however_large_the_one_before() -> None:
    """D9: Events of two batches in turn: what overdraws the credit of a consumer comes last."""
    room = {1: 0, 2: 0}
    group = group_with(room, key="k")
    group.join(1)
    first, second = batch(0, ["a", "b", "x"]), batch(3, ["c", "d"])
    assert group.offer(Deliver(subscribers=(5,), pubend=P, start=0, end=3, batch=first)) == []
    assert group.offer(Deliver(subscribers=(5,), pubend=P, start=3, end=5, batch=second)) == []
    room[1] = 2 * FRAME_HEADER_BYTES + 5 * EVENT_HEADER_BYTES
    for one in group.assign():
        assert isinstance(one, Assign)
        assert room[1] > 0
        room[1] -= len(one.batch.select(one.rows, kind=Kind.DELIVERY, pubend=P, start=0, end=9, channel=1))


def test_a_consumer_joins_once() -> None:
    group = group_with({1: 1})
    group.join(1)
    with pytest.raises(BugError):
        group.join(1)


def test_what_is_saved_of_a_backlog_is_as_small_as_what_was_acknowledged() -> None:
    """Open events with nothing but silence between them are no spans."""
    rows: dict[bytes, bytes] = {}

    def start() -> tuple[SharedSubscription, dict[int, list[int]]]:
        group = group_with({1: 1 << 20, 2: 1 << 20})
        group.recover(rows, {P: 0})
        group.join(1)
        group.join(2)
        held: dict[int, list[int]] = {1: [], 2: []}
        for tick in range(0, 10_000, 10):
            made = batch(tick, [""])
            message = Deliver(subscribers=(5,), pubend=P, start=tick, end=tick + 5, batch=made)
            for one in group.offer(message):
                assert isinstance(one, Assign)
                held[one.consumer].append(tick + 1)
        return group, held

    def save() -> int:
        save = flushed(group, group_turns())
        assert save is not None
        rows.update({key: value for key, value in save.rows if value is not None})
        return sum(map(len, rows.values()))

    group, held = start()
    group.ack(1, P, held[1][:100])
    assert held[1][:100] == list(range(1, 2_000, 20))
    assert save() < 100 * 8
    group, again = start()
    assert again[1][0] == 11
    group.ack(1, P, again[1][:50])
    group.ack(2, P, again[2][:50])
    assert save() < 30
    group.check()
    assert group.finished(P) == 0
    group, again = start()
    assert again[1][0] == held[1][100]
