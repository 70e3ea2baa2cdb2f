"""Who founds the queues of a network (spec, responsibility 9): whole brokers in the simulated world."""

from __future__ import annotations

import pytest
from tests.worlds.queue_networks import QueueNetwork

from postroad.units import MILLISECOND_US, SECOND_US

A, B = bytes([1] * 16), bytes([2] * 16)


def test_a_broker_that_was_told_of_nobody_founds() -> None:
    network = QueueNetwork({"a": ()}, arcs=2)
    network.start("a")
    network.run(SECOND_US)
    assert network.founders("a") == {A}


@pytest.mark.parametrize("alive", [("b",), ("b", "c")])
def test_m_a_wiped_broker_whose_seeds_are_silent_founds_nothing(alive: tuple[str, ...]) -> None:
    """Nor do two that know each other, while a third that they were told of may know a chain."""
    others = {"b": ("a", "c"), "c": ("a", "b")}
    network = QueueNetwork({"a": (), **others}, arcs=2)
    network.start(*alive)
    network.run(120 * SECOND_US)
    assert [network.founders(name) for name in alive] == [{None}] * len(alive)
    network.start("a")
    network.run(10 * SECOND_US)
    assert [network.founders(name) for name in alive] == [{A}] * len(alive), "they join what is there"


def test_of_brokers_that_name_each_other_the_one_with_the_lowest_id_founds() -> None:
    told_of = {"a": ("b", "c"), "b": ("a", "c"), "c": ("a", "b")}
    network = QueueNetwork(told_of, arcs=2)
    network.start("c", "b")
    network.run(20 * SECOND_US)
    assert network.founders("b") == network.founders("c") == {None}
    network.start("a")
    network.run(10 * SECOND_US)
    assert network.founders("a") == network.founders("b") == network.founders("c") == {A}


def test_a_network_that_was_founded_is_not_founded_again_by_a_broker_that_lost_its_disk() -> None:
    network = QueueNetwork({"a": ("b",), "b": ()}, arcs=2)
    network.start("b")
    network.run(SECOND_US)
    network.start("a")
    network.run(20 * SECOND_US)
    assert network.founders("a") == network.founders("b") == {B}, "though a has the lower id"


def test_a_broker_whose_only_link_dies_before_the_ring_knows_it_finds_the_others_all_the_same() -> None:
    """The overlay has told it of them. Else whoever sends through it would never hear an answer."""
    network = QueueNetwork({"a": (), "b": ("a",), "c": ("b",)}, arcs=2)
    network.start("a", "b")
    network.run(5 * SECOND_US)
    network.start("c")
    while len(network.broker("c")._rooms.topology.advertisements()) < 3:
        network.run(MILLISECOND_US)
    assert network.broker("c")._rooms.ring.known == []
    network.crash("b")
    network.run(10 * SECOND_US)
    assert network.broker("c")._rooms.ring.known == [A]
    assert network.founders("c") == {A}
