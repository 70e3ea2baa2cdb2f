"""Upkeep of a process's memory: when it looks for cycles, and what it gives back. The process itself is in
tests/process/test_shares.py."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest

from postroad.net.upkeep import CALM_INPUTS, COLLECT_S, FREE_BYTES, LATEST_S, Allocator, Upkeep


@dataclass
class Machine(Allocator):
    free: int = 0
    given_back: int = 0
    inputs: int = 0
    collections: int = 0

    def collect(self) -> int:
        self.collections += 1
        return 0

    def free_bytes(self) -> int:
        return self.free

    def give_back(self) -> None:
        self.given_back += 1

    def seconds(self, made: Upkeep, count: int, *, inputs: int = 0) -> int:
        """How many full collections there were."""
        before = self.collections
        for _ in range(count):
            self.inputs += inputs
            made.look()
        return self.collections - before


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(gc, "collect", made.collect)
    return made


def test_cycles_are_looked_for_in_calm_moments(machine: Machine) -> None:
    made = Upkeep(lambda: machine.inputs, machine)
    assert machine.seconds(made, COLLECT_S - 1) == 0
    assert machine.seconds(made, 100, inputs=CALM_INPUTS) == 0, "somebody would wait"
    assert machine.seconds(made, 1) == 1, "it is calm again"
    assert machine.seconds(made, 3 * COLLECT_S) == 3
    assert machine.seconds(made, LATEST_S, inputs=CALM_INPUTS) == 1, "never calm"


def test_what_came_free_is_given_back_once(machine: Machine) -> None:
    machine.free = 3 * FREE_BYTES
    made = Upkeep(lambda: machine.inputs, machine)
    machine.seconds(made, 10)
    assert machine.given_back == 0, "it was free before"
    machine.free = 5 * FREE_BYTES
    machine.seconds(made, 10)
    assert machine.given_back == 1
    machine.free = FREE_BYTES  # in use again
    machine.seconds(made, 1)
    machine.free = 3 * FREE_BYTES
    machine.seconds(made, 10)
    assert machine.given_back == 2


def test_the_real_allocator_says_what_is_free() -> None:
    allocator = Allocator()
    blocks = [bytes(60_000) for _ in range(1_000)]
    full = allocator.free_bytes()
    del blocks[::2]  # between those that stay
    gc.collect()
    assert allocator.free_bytes() > full + 20_000_000
    allocator.give_back()
