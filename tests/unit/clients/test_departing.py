"""Where clients of a broker that drains are told to go."""

from __future__ import annotations

from postroad.clients.departing import in_turn


def test_equally_near_brokers_take_turns_and_farther_ones_stay_behind() -> None:
    places = [(1, "a:1"), (1, "b:1"), (2, "c:1")]
    assert in_turn(places, 0) == ("a:1", "b:1", "c:1")
    assert in_turn(places, 1) == ("b:1", "a:1", "c:1")
    assert in_turn(places, 2) == ("a:1", "b:1", "c:1")
    assert in_turn([], 7) == ()
