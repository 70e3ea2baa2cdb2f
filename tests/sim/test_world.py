"""The virtual clock, its order of things, its chance and its trace."""

from __future__ import annotations

import pytest

from postroad.errors import BugError
from postroad.sim.machine import world as world_module
from postroad.sim.machine.world import EPOCH_US, Clock, World


def test_things_happen_in_time_and_ties_in_the_order_they_were_scheduled() -> None:
    world, seen = World(1), []
    for name, delay in (("c", 20), ("a", 10), ("b", 10)):
        world.after(delay, lambda name=name: seen.append((world.elapsed_us, name)))
    world.run(EPOCH_US + 15)
    assert seen == [(10, "a"), (10, "b")]
    assert world.elapsed_us == 15
    world.run(EPOCH_US + 100)
    assert seen[-1] == (20, "c")


def test_what_an_action_schedules_for_now_happens_now() -> None:
    world, seen = World(1), []
    world.after(5, lambda: world.after(0, lambda: seen.append(world.elapsed_us)))
    world.run(EPOCH_US + 5)
    assert seen == [5]


def test_a_cancelled_timer_does_nothing() -> None:
    world, seen = World(1), []
    world.after(5, lambda: seen.append(1)).cancel()
    world.run(EPOCH_US + 10)
    assert seen == []


def test_each_concern_has_its_own_chance() -> None:
    one, two = World(7), World(7)
    two.random("other").random()
    assert one.random("links").random() == two.random("links").random()
    assert World(8).random("links").random() != World(7).random("links").random()


def test_a_world_that_runs_away_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "MAX_PENDING", 3)
    world = World(1)
    for _ in range(3):
        world.after(1, lambda: None)
    with pytest.raises(BugError, match="runs away"):
        world.after(1, lambda: None)


def test_a_clock_is_skewed_and_never_runs_back_within_a_process() -> None:
    world = World(1)
    clock = Clock(world, 500)
    assert clock.now_us() == EPOCH_US + 500
    clock.offset_us = -1_000
    assert clock.now_us() == EPOCH_US + 500
    world.run(EPOCH_US + 2_000)
    assert clock.now_us() == EPOCH_US + 1_000
    clock.offset_us = -1_500
    clock.restart()
    assert clock.now_us() == EPOCH_US + 500
    assert clock.true_us(EPOCH_US + 500) == world.now_us


def test_the_digest_depends_on_everything_recorded() -> None:
    worlds = [World(1) for _ in range(4)]
    worlds[0].note("a", "does", connection=1, frame=b"x")
    worlds[1].note("a", "does", connection=1, frame=b"x")
    worlds[2].note("a", "does", connection=2, frame=b"x")
    worlds[3].note("a", "does", connection=1, frame=b"y")
    digests = [world.trace.digest() for world in worlds]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_story_is_the_last_records_that_matter() -> None:
    world = World(1)
    for turn in range(100):
        world.note("b1" if turn % 2 else "b2", f"turn {turn}", connection=turn)
    assert [line.split()[-1] for line in world.trace.story(["b1"], limit=2)] == ["97", "99"]
    assert world.trace.story(["connection 40"])[0].endswith("turn 40")
    assert world.trace.story(["nobody"]) == ()
