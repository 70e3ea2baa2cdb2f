"""D12's ground: what a crash leaves of synced and unsynced writes."""

from __future__ import annotations

import pytest

from postroad.sim.machine.disk import (
    Append,
    CrashStyle,
    Disk,
    DiskFailed,
    DiskInput,
    Remove,
    Replace,
    Sync,
    Synced,
)
from postroad.sim.machine.world import EPOCH_US, World
from postroad.units import SECOND_US


class Machine:
    def __init__(self, seed: int = 1, **options: int) -> None:
        self.world = World(seed)
        self.disk = Disk(self.world, "d", **options)
        self.told: list[DiskInput] = []

    def do(self, *effects: Append | Replace | Remove | Sync) -> None:
        for effect in effects:
            self.disk.perform(effect, self.told.append)

    def wait(self, us: int = SECOND_US) -> None:
        self.world.run(self.world.now_us + us)


def log(data: bytes) -> Append:
    return Append(file="log", data=data)


def test_a_sync_covers_what_was_asked_before_it_and_takes_time() -> None:
    machine = Machine()
    machine.do(log(b"one"), Sync(token=1), log(b"two"))
    assert machine.told == []
    assert machine.disk.read("log") == b"onetwo"
    machine.wait()
    assert machine.told == [Synced(token=1)]
    machine.disk.crash(CrashStyle())
    survived = machine.disk.read("log")
    assert survived is not None
    assert survived.startswith(b"one")
    assert b"onetwo".startswith(survived)


def test_syncs_finish_in_order() -> None:
    machine = Machine()
    for token in range(20):
        machine.do(log(b"x"), Sync(token=token))
    machine.wait()
    assert machine.told == [Synced(token=token) for token in range(20)]


def test_a_crash_answers_nothing_of_an_earlier_process() -> None:
    machine = Machine()
    machine.do(log(b"one"), Sync(token=1))
    machine.disk.crash(CrashStyle())
    machine.wait()
    assert machine.told == []


@pytest.mark.parametrize("seed", range(60))
def test_a_friendly_crash_keeps_a_torn_prefix(seed: int) -> None:
    machine = Machine(seed)
    machine.do(log(b"synced"), Sync(token=1))
    machine.wait()
    machine.do(log(b"abcd"), log(b"efgh"), log(b"ijkl"))
    machine.disk.crash(CrashStyle())
    survived = machine.disk.read("log")
    assert survived is not None
    assert survived.startswith(b"synced")
    assert b"syncedabcdefghijkl".startswith(survived)


def test_every_torn_length_occurs() -> None:
    lengths = set()
    for seed in range(200):
        machine = Machine(seed)
        machine.do(log(b"abcdefgh"))
        machine.disk.crash(CrashStyle())
        lengths.add(len(machine.disk.read("log") or b""))
    assert lengths == set(range(9))


def test_a_scattered_crash_leaves_holes_but_never_touches_what_was_synced() -> None:
    holes = 0
    for seed in range(100):
        machine = Machine(seed)
        machine.do(log(b"synced"), Sync(token=1))
        machine.wait()
        machine.do(log(b"abcd"), log(b"efgh"), log(b"ijkl"))
        machine.disk.crash(CrashStyle(scattered=True))
        survived = machine.disk.read("log")
        assert survived is not None
        assert survived.startswith(b"synced")
        for at, byte in enumerate(survived):
            assert byte in (0, b"syncedabcdefghijkl"[at])
        holes += b"\0" in survived.rstrip(b"\0")
    assert holes > 10


def test_bits_flip_only_in_what_was_never_synced() -> None:
    flipped = 0
    for seed in range(100):
        machine = Machine(seed)
        machine.do(log(b"synced"), Sync(token=1))
        machine.wait()
        machine.do(log(b"abcd"))
        machine.disk.crash(CrashStyle(flip_chance=1.0))
        survived = machine.disk.read("log")
        assert survived is not None
        assert survived.startswith(b"synced")
        flipped += not b"syncedabcd".startswith(survived)
    assert flipped > 10


def test_replace_is_all_or_nothing() -> None:
    seen = set()
    for seed in range(40):
        machine = Machine(seed)
        machine.disk.save("meta", b"old")
        machine.do(Replace(file="meta", data=b"newer"))
        machine.disk.crash(CrashStyle(scattered=seed % 2 == 0, flip_chance=0.5))
        seen.add(machine.disk.read("meta"))
    assert seen == {b"old", b"newer"}


def test_removed_files_may_come_back_after_a_crash() -> None:
    seen = set()
    for seed in range(40):
        machine = Machine(seed)
        machine.disk.save("segment", b"data")
        machine.do(Remove(file="segment"))
        assert machine.disk.files() == []
        machine.disk.crash(CrashStyle())
        seen.add(machine.disk.read("segment"))
    assert seen == {None, b"data"}


def test_a_full_disk_cuts_short_and_says_so() -> None:
    machine = Machine(capacity=10)
    machine.do(log(b"12345678"), Sync(token=1))
    machine.wait()
    machine.do(log(b"abcd"), Sync(token=2))
    machine.wait()
    assert machine.told == [Synced(token=1), DiskFailed(token=2, reason="disk d is full")]
    assert machine.disk.read("log") == b"12345678ab"
    machine.do(Remove(file="log"), log(b"again"), Sync(token=3))
    machine.wait()
    assert machine.told[-1] == Synced(token=3)
    machine.disk.fill()
    machine.do(Replace(file="meta", data=b"x"), Sync(token=4))
    machine.wait()
    assert isinstance(machine.told[-1], DiskFailed)


def test_a_slow_disk_takes_longer() -> None:
    machine = Machine()
    machine.disk.slow(EPOCH_US + SECOND_US, 1_000)
    machine.do(Sync(token=1))
    machine.wait(100_000)
    assert machine.told == []
    machine.wait(2 * SECOND_US)
    assert machine.told == [Synced(token=1)]


def test_a_disk_that_hangs_answers_in_order_when_it_goes_on() -> None:
    machine = Machine()
    machine.do(log(b"one"), Sync(token=1))
    machine.disk.hang(EPOCH_US + 5 * SECOND_US)
    machine.disk.hang(EPOCH_US + 2 * SECOND_US)
    machine.wait()
    machine.do(log(b"two"), Sync(token=2))
    machine.wait(3 * SECOND_US)
    assert machine.disk.hangs
    assert machine.told == []
    machine.wait()
    assert machine.told == [Synced(token=1), Synced(token=2)]
    machine.disk.hang(machine.world.now_us + 5 * SECOND_US)
    machine.do(log(b"three"), Sync(token=3))
    machine.wait()
    machine.disk.go_on()
    assert machine.told[-1] == Synced(token=3)
    machine.disk.crash(CrashStyle())
    assert machine.disk.read("log") == b"onetwothree"


def test_who_is_killed_while_its_disk_hangs_hears_nothing_of_it_later() -> None:
    machine = Machine()
    machine.do(log(b"synced"), Sync(token=1))
    machine.wait()
    machine.disk.hang(machine.world.now_us + 5 * SECOND_US)
    machine.do(log(b"abcd"), Sync(token=2))
    machine.wait()
    machine.disk.crash(CrashStyle())
    assert b"syncedabcd".startswith(machine.disk.read("log") or b"")
    machine.wait(9 * SECOND_US)
    assert machine.told == [Synced(token=1)]


def test_synced_data_can_rot() -> None:
    machine = Machine()
    machine.disk.save("log", b"data")
    machine.disk.rot("log", 2)
    assert machine.disk.read("log") != b"data"
    machine.disk.crash(CrashStyle())
    assert machine.disk.read("log") == b"da" + bytes([b"t"[0] ^ 1]) + b"a"


def test_synced_data_can_be_gone() -> None:
    machine = Machine()
    for file in ("log", "other"):
        machine.disk.save(file, b"data")
    machine.disk.shorten("log", 3)
    machine.disk.shorten("other", 0)
    machine.disk.crash(CrashStyle())
    assert (machine.disk.files(), machine.disk.read("log")) == (["log"], b"dat")
