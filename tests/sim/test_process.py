"""A process of the simulated world, around a small core: turns, crashes, clocks, disk."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from postroad.errors import BugError, PeerError
from postroad.seam.effects import Close, Dial, Effect, Note, Send
from postroad.seam.inputs import Closed, DialFailed, Input, Opened, Received
from postroad.seam.storage import (
    Append,
    Appended,
    AppendFailed,
    LogStream,
    Read,
    ReadDone,
    Save,
    Saved,
    StreamKind,
)
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.disk import CrashStyle
from postroad.sim.machine.network import Network
from postroad.sim.machine.process import SWITCHOVER, Core, Process
from postroad.sim.machine.world import EPOCH_US, Clock, World
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.frames import Ping, encode

STREAM = LogStream(StreamKind.EVENTS, 1)


def append(tick: int) -> Append:
    return Append(stream=STREAM, first=tick - 1, last=tick, data=b"x" * 100, tag=tick)


class Echo:
    """Dials its peers at its first turn, sends back what it gets, and writes down every input."""

    def __init__(self, process: Process, dial: tuple[str, ...] = ()) -> None:
        self.seen: list[object] = []
        self.turns: list[int] = []
        self.deadline: int | None = None
        self.switchovers = 0
        self.effects: list[Effect] = [Dial(address) for address in dial]
        process.disk.save("boot", bytes(len(process.boots) + 1))

    def record(self) -> None:
        pass

    def handle(self, inputs: Sequence[Input], now_us: int) -> Sequence[Effect]:
        self.turns.append(now_us)
        self.seen += inputs
        self.deadline = None
        out, self.effects = self.effects, []
        out += [Send(item.connection, item.frame) for item in inputs if isinstance(item, Received)]
        return out

    def next_deadline(self) -> int | None:
        return self.deadline

    def check(self) -> None:
        if None in self.seen:
            raise BugError("nothing was handed in")

    def shutdown(self, now_us: int) -> Sequence[Effect]:
        return [Note("info", f"goodbye at {now_us}")]

    def status(self, now_us: int) -> dict[str, object]:
        return {"now": now_us}

    def metrics(self) -> dict[str, int | float]:
        return {"durable_switchovers_total": self.switchovers + 1}


class Stage:
    def __init__(self) -> None:
        self.world = World(1)
        self.network = Network(self.world)
        self.a = self.process("a", ("b:1",))
        self.b = self.process("b")

    def process(self, name: str, dial: tuple[str, ...] = ()) -> Process:
        def build(process: Process) -> tuple[Core, int]:
            return Echo(process, dial), len(process.boots) + 1

        clock = Clock(self.world)
        return Process(
            self.world, self.network, name=name, address=f"{name}:1", build=build, clock=clock, check_every=1
        )

    def run(self, us: int = SECOND_US) -> None:
        self.world.run(self.world.now_us + us)


def echo(process: Process) -> Echo:
    assert isinstance(process.core, Echo)
    return process.core


def started() -> Stage:
    stage = Stage()
    stage.b.start()
    stage.a.start()
    stage.run()
    return stage


def test_a_dial_opens_both_ends() -> None:
    stage = started()
    assert echo(stage.a).seen == [Opened(connection=2, dialled="b:1", loopback=True, host="b")]
    assert echo(stage.b).seen == [Opened(connection=3, dialled=None, loopback=True, host="a")]


def test_what_comes_while_it_is_busy_is_one_turn() -> None:
    stage = started()
    frames = b"".join(encode(Ping(time_us=time)) for time in range(10))
    current = stage.a.current
    assert current is not None
    before = len(echo(stage.b).turns)
    stage.network.send(current, 2, frames)
    stage.run(2 * MILLISECOND_US)
    assert sum(isinstance(item, Received) for item in echo(stage.b).seen) == 10
    assert len(echo(stage.b).turns) - before <= 4


def test_a_crash_loses_waiting_inputs_and_the_next_start_reads_the_disk() -> None:
    stage = started()
    stage.a.crash(silently=False, style=CrashStyle())
    assert not stage.a.running
    with pytest.raises(BugError):
        stage.a.core.check()
    stage.run()
    assert echo(stage.b).seen[-1] == Closed(connection=3)
    stage.a.start()
    assert stage.a.disk.read("boot") == bytes(2)
    assert [boot for boot, _, _ in stage.a.boots] == [1, 2]
    with pytest.raises(BugError, match="runs already"):
        stage.a.start()


def test_a_crash_within_a_turn_performs_only_the_first_effects() -> None:
    stage = started()
    echo(stage.a).effects = [Send(2, encode(Ping(time_us=time))) for time in range(5)]
    current = stage.a.current
    assert current is not None
    stage.a.crash(silently=False, style=CrashStyle(), within_turn=2)
    assert stage.a.running
    current.schedule()
    stage.run()
    assert not stage.a.running
    assert sum(isinstance(item, Received) for item in echo(stage.b).seen) == 2


def test_a_spared_process_goes_on() -> None:
    stage = started()
    stage.a.crash(silently=False, style=CrashStyle(), within_turn=0)
    stage.a.spare()
    current = stage.a.current
    assert current is not None
    current.schedule()
    stage.run()
    assert stage.a.running


def test_deadlines_come_by_the_clock_of_the_node() -> None:
    stage = started()
    core, current = echo(stage.b), stage.b.current
    assert current is not None
    stage.b.step_clock(500)
    core.deadline = stage.b.clock.now_us() + 10_000
    current.wake()
    stage.run()
    assert core.deadline is None
    assert 0 <= core.turns[-1] - (EPOCH_US + SECOND_US + 500 + 10_000) < 200
    stage.b.clock.now_us()
    stage.b.step_clock(-20_000)  # stands still for 20 ms of true time
    core.deadline = stage.b.clock.now_us() + 10_000
    current.wake()
    turns = len(core.turns)
    stage.run(25 * MILLISECOND_US)
    assert len(core.turns) == turns
    stage.run()
    assert len(core.turns) == turns + 1


def test_a_failed_dial_is_an_input() -> None:
    stage = Stage()
    stage.a.start()
    stage.run()
    assert echo(stage.a).seen == [DialFailed(address="b:1")]


def test_a_core_that_raises_or_never_rests_is_a_violation() -> None:
    stage = started()
    echo(stage.a).seen.append(None)
    current = stage.a.current
    assert current is not None
    current.schedule()
    with pytest.raises(Violation, match="nothing was handed in"):
        stage.run()


def test_a_complaint_about_a_peer_is_a_violation() -> None:
    stage = started()
    current = stage.a.current
    assert current is not None
    with pytest.raises(Violation, match="protocol: a closed 2: nonsense"):
        stage.a.perform(current, [Close(2, PeerError("nonsense"))])


def test_the_storage_answers_as_an_input() -> None:
    stage = started()
    current = stage.a.current
    assert current is not None
    stage.a.open_storage()
    stage.a.perform(current, [append(1), Read(stream=STREAM, start=0, end=1, limit_bytes=9, tag=2)])
    stage.run()
    outcomes = [item for item in echo(stage.a).seen if isinstance(item, Appended | ReadDone)]
    assert [item.tag for item in outcomes] in ([1, 2], [2, 1])


@pytest.mark.parametrize(("step", "survives"), [("written", None), ("synced", True), ("saved", True)])
def test_a_process_dies_at_the_step_of_a_commit_that_is_named(step: str, survives: bool | None) -> None:
    """D12: before the sync, after it, and after what depends on it; nothing of it was answered."""
    stage = started()
    core, current = echo(stage.a), stage.a.current
    assert current is not None
    stage.a.open_storage()
    assert stage.a.crash_at(step, silently=False, style=CrashStyle())
    stage.a.perform(current, [append(1), Save(table="t", rows=((b"k", b"v"),), tag=2)])
    stage.run()
    assert not stage.a.running
    assert not any(isinstance(item, Appended | Saved) for item in core.seen)
    storage = stage.a.open_storage()
    found = STREAM in storage.volume.recovered.streams
    assert survives is None or found
    assert storage.load("t", _row) == ({b"k": b"v"} if step == "saved" else {})


def test_a_process_dies_in_the_turn_of_a_switchover() -> None:
    """D5, D12: whatever part of that turn was done, the process is gone after it, and not before."""
    stage = started()
    core, current = echo(stage.a), stage.a.current
    assert current is not None
    stage.a.open_storage()
    assert stage.a.crash_at(SWITCHOVER, silently=False, style=CrashStyle())
    current.schedule()
    stage.run()
    assert stage.a.running
    handle = core.handle

    def switches(inputs: Sequence[Input], now_us: int) -> Sequence[Effect]:
        core.switchovers += 1
        return handle(inputs, now_us)

    core.handle = switches  # type: ignore[method-assign]
    current.schedule()
    stage.run()
    assert not stage.a.running


def test_a_sync_that_fails_is_final_until_a_restart() -> None:
    stage = started()
    core, current = echo(stage.a), stage.a.current
    assert current is not None
    stage.a.open_storage()
    assert stage.a.crash_at("failing", silently=False, style=CrashStyle())
    stage.a.perform(current, [append(1)])
    stage.run()
    stage.a.perform(current, [append(2)])
    stage.run()
    assert [item.tag for item in core.seen if isinstance(item, AppendFailed)] == [1, 2]
    stage.a.stop()
    storage = stage.a.open_storage()
    assert STREAM not in storage.volume.recovered.streams
    storage.perform([append(1)])
    stage.run()
    assert storage.take() == [Appended(tag=1)]


def test_nothing_is_written_or_read_while_the_disk_hangs() -> None:
    stage = started()
    core, current = echo(stage.a), stage.a.current
    assert current is not None
    stage.a.open_storage()
    stage.a.disk.hang(stage.world.now_us + 5 * SECOND_US)
    stage.a.perform(current, [append(1), Read(stream=STREAM, start=0, end=1, limit_bytes=9, tag=2)])
    stage.run(4 * SECOND_US)
    assert not any(isinstance(item, Appended | ReadDone) for item in core.seen)
    stage.run(2 * SECOND_US)
    assert sum(isinstance(item, Appended | ReadDone) for item in core.seen) == 2


def test_who_is_to_stop_while_its_disk_hangs_is_killed() -> None:
    stage = started()
    current = stage.a.current
    assert current is not None
    stage.a.open_storage()
    stage.a.disk.hang(stage.world.now_us + 5 * SECOND_US)
    stage.a.perform(current, [Save(table="t", rows=((b"k", b"v"),), tag=1)])
    stage.a.stop()
    assert "goodbye" in "".join(stage.world.trace.story(["a"]))
    assert stage.a.crashes == [stage.world.now_us]


def test_a_process_that_ends_in_good_order_leaves_nothing_undone() -> None:
    stage = started()
    current = stage.a.current
    assert current is not None
    stage.a.open_storage()
    stage.a.perform(current, [append(1), Save(table="t", rows=((b"k", b"v"),), tag=2), append(3)])
    stage.a.stop()
    storage = stage.a.open_storage()
    assert storage.volume.recovered.streams[STREAM].last == 3
    assert storage.load("t", _row) == {b"k": b"v"}
    assert storage.volume.recovered.damage == ()


def test_a_stop_is_in_good_order() -> None:
    stage = started()
    stage.a.stop()
    stage.run()
    assert not stage.a.running
    assert "goodbye" in "".join(stage.world.trace.story(["a"]))
    assert echo(stage.b).seen[-1] == Closed(connection=3)


def test_a_process_may_die_while_it_stops() -> None:
    stage = started()
    core = echo(stage.a)
    stage.a.open_storage()
    assert stage.a.crash_at("written", silently=False, style=CrashStyle())
    core.shutdown = lambda _: [append(1)]  # type: ignore[method-assign]
    stage.a.stop()
    assert not stage.a.running
    assert stage.a.crashes == [stage.world.now_us]
    stage.a.start()


def _row(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Reads a row of any table."""
    return key, value
