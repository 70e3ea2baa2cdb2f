"""Bodies that memory has no room for: when they leave, how they come back, what may be chopped (spec Q5)."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.worlds.turns import Turns

from postroad.errors import StorageError
from postroad.queues.bodies import RETRY_US, Bodies
from postroad.queues.inbox import (
    Accept,
    Inboxes,
    Join,
    Limits,
    Message,
    Put,
    encode,
    extent_of,
    oldest_of,
    with_body,
)
from postroad.queues.messages import Chain
from postroad.seam.effects import Effect
from postroad.seam.storage import Append, Chop, LogStream, Read, ReadDone, StreamEnd, StreamKind
from postroad.seam.turn import Turn

CHAIN = Chain(0, b"A", b"A")
ARC = 3
BODY = 1_000


def body(number: int) -> bytes:
    return b"%04d" % number * (BODY // 4)


@dataclass
class Desk:
    """The inboxes of one arc, the bodies of a broker, and a disk that answers when it is told to."""

    limit: int = 5_000
    pinned: int = 1 << 20
    turns: Turns = field(default_factory=Turns)
    records: dict[int, bytes] = field(default_factory=dict)  # on disk
    now_us: int = 0

    def __post_init__(self) -> None:
        self.machine = Inboxes(Limits())
        self.bodies = Bodies(limit=self.limit, pinned_bytes=self.pinned, streams={}, woken=lambda _turn: None)
        self.machine.apply(encode(Join("stock", "c", "alice", False, 0)))

    def tick(self) -> list[Append]:
        self.bodies.note(ARC, self.machine)
        turn = self.turns.turn(self.now_us)
        self.bodies.tick(turn)
        return [effect for effect in turn.effects if isinstance(effect, Append)]

    def put(self, *numbers: int) -> None:
        for number in numbers:
            message = Message("stock", CHAIN, "shop", number, True, body(number))
            self.machine.apply(encode(Put((message,), 0)))

    def accept(self, *numbers: int) -> None:
        for number in numbers:
            self.machine.apply(encode(Accept("stock", (CHAIN, "shop", number), "c", 0)))

    def write(self, *appends: Append) -> None:
        for append in appends:
            self.records[append.last] = append.data
            self.turns.written(append, self.now_us)
        self.machine.check()

    def answer(self, effects: list[Effect]) -> list[Effect]:
        """The disk reads what is asked for."""
        out: list[Effect] = []
        for read in [effect for effect in effects if isinstance(effect, Read)]:
            found = [(tick - 1, tick, self.records[tick]) for tick in (read.end,) if tick in self.records]
            done = ReadDone(tag=read.tag, records=tuple(found), missing=(), more=False)
            out += self.turns.read(done).effects
        return out

    def chop(self, oldest: int) -> list[Effect]:
        turn = self.turns.turn()
        self.bodies.chop(turn, ARC, oldest)
        return turn.effects

    def in_memory(self) -> list[int]:
        return [
            each.id for each in self.machine.inboxes["stock"].messages.values() if extent_of(each) is None
        ]


def chopped(effects: list[Effect]) -> list[int]:
    return [effect.tick for effect in effects if isinstance(effect, Chop)]


def test_the_newest_bodies_leave_memory_once_they_are_durable_and_not_before() -> None:
    desk = Desk()
    desk.put(1, 2, 3)
    assert not desk.tick()
    desk.put(4, 5, 6, 7, 8)
    (append,) = desk.tick()
    assert desk.in_memory() == list(range(1, 9))
    assert not desk.tick(), "one spill is on its way"
    desk.write(append)
    assert desk.in_memory() == [1, 2]
    assert desk.bodies.metrics()["queue_memory_bytes"] <= desk.limit
    assert desk.bodies.metrics()["queue_spilled_bytes"] == 6 * BODY
    ready = desk.machine.ready("stock", "c", 0, 10)
    assert [message.id for message in ready] == list(range(1, 9))
    restored = [with_body(message, append.data) for message in ready]
    assert [message.payload for message in restored] == [body(number) for number in range(1, 9)]


def test_a_body_of_a_message_that_was_accepted_meanwhile_is_forgotten() -> None:
    desk = Desk()
    desk.put(*range(1, 9))
    appends = desk.tick()
    desk.accept(*range(1, 9))
    desk.write(*appends)
    assert desk.machine.live == {}
    assert desk.machine.bytes == 0


def test_what_the_disk_refuses_stays_in_memory_and_is_tried_again() -> None:
    desk = Desk()
    desk.put(*range(1, 9))
    (append,) = desk.tick()
    desk.turns.written(append, 0, StorageError("the disk is full"))
    assert desk.in_memory() == list(range(1, 9))
    assert not desk.tick()
    assert desk.bodies.next_deadline() == RETRY_US
    desk.now_us = RETRY_US
    (append,) = desk.tick()
    desk.write(append)
    assert desk.in_memory() == [1, 2]


def test_nobody_looks_again_and_again_where_there_is_nothing_to_move() -> None:
    """Rows stay in memory: many small messages are over the limit for good."""
    desk = Desk(limit=1_000)
    small = [Message("stock", CHAIN, "shop", number, True, b".") for number in range(1, 9)]
    desk.machine.apply(encode(Put(tuple(small), 0)))
    looks = 0

    def newest(wanted: int) -> list[tuple[str, Message]]:
        nonlocal looks
        looks += 1
        return Inboxes.newest(desk.machine, wanted)

    desk.machine.newest = newest  # type: ignore[method-assign]
    for _ in range(5):
        assert not desk.tick()
    assert looks == 1


def test_a_record_is_read_once_for_all_who_wait_and_stays_for_the_next() -> None:
    desk = Desk()
    desk.put(*range(1, 9))
    desk.write(*desk.tick())
    got: list[bytes | None] = []

    def then(_turn: Turn, record: bytes | None) -> None:
        got.append(record)

    turn = desk.turns.turn()
    assert desk.bodies.get(ARC, 1) is None
    desk.bodies.load(turn, ARC, 1, then)
    desk.bodies.load(turn, ARC, 1, then)
    assert len(turn.effects) == 1
    desk.answer(turn.effects)
    assert got == [desk.records[1]] * 2
    assert desk.bodies.get(ARC, 1) == desk.records[1]
    turn = desk.turns.turn()
    desk.bodies.load(turn, ARC, 9, then)
    desk.answer(turn.effects)
    assert got[-1] is None, "there is no such record"


def test_nothing_is_chopped_that_a_mark_a_message_or_a_write_under_way_needs() -> None:
    """Q5."""
    desk = Desk()
    desk.put(*range(1, 9))
    desk.write(*desk.tick())
    desk.put(*range(9, 15))
    desk.write(*desk.tick())
    assert list(desk.machine.live) == [1, 2]
    marked = oldest_of(desk.machine.snapshot())
    assert marked == 1
    desk.accept(*range(1, 9))
    assert list(desk.machine.live) == [2]
    assert not chopped(desk.chop(marked)), "a start goes back to that mark, and to its first record"
    assert chopped(desk.chop(oldest_of(desk.machine.snapshot()))) == [1]
    desk.put(*range(15, 21))
    (append,) = desk.tick()
    desk.accept(*range(9, 15))
    assert not desk.machine.live
    assert chopped(desk.chop(0)) == [append.last - 1], "the write under way becomes needed"
    desk.write(append)
    desk.accept(*range(15, 21))
    assert chopped(desk.chop(0)) == [append.last]


def test_a_body_that_pins_much_that_is_dead_comes_back_to_memory() -> None:
    desk = Desk(limit=2_000, pinned=1_000)
    blocked = Message("late", CHAIN, "other", 1, True, body(0))
    desk.machine.apply(encode(Put((blocked,), 0)))
    for first in range(1, 41, 4):
        desk.put(*range(first, first + 4))
        desk.write(*desk.tick())
        desk.accept(*range(first, first + 4))
    late = desk.machine.inboxes["late"]
    (message,) = late.messages.values()
    extent = extent_of(message)
    assert extent is not None
    effects = desk.chop(extent.tick)
    desk.answer(effects)
    (message,) = late.messages.values()
    assert message == blocked, "it is in memory again, as it was"
    assert not desk.machine.live
    assert chopped(desk.chop(0)) == [max(desk.records)]


def test_records_go_on_behind_those_of_the_last_start() -> None:
    streams = {LogStream(StreamKind.BODIES, ARC): StreamEnd(last=41, chopped=7, suspect=False)}
    bodies = Bodies(limit=1, pinned_bytes=1, streams=streams, woken=lambda _turn: None)
    turn = Turns().turn()
    bodies.write(turn, ARC, b"...", lambda _turn, _tick: None)
    (append,) = turn.effects
    assert isinstance(append, Append)
    assert (append.stream, append.first, append.last) == (LogStream(StreamKind.BODIES, ARC), 41, 42)
