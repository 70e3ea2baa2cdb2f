"""A fixed set of seeds, every one a small history of a network in trouble; `make soak` runs fresh ones.

Seeds that once found something stay here.
"""

from __future__ import annotations

import pytest

from postroad.errors import UsageError
from postroad.sim.scenario import Scenario

SEEDS = (1, 2, 5, 6, 8, 10, 13, 16, 24, 30, 38, 40)

# (seed, minutes): what it found
FOUND = (
    (103, 2.0),  # L never superseded cached knowledge that was filtered too narrowly: nacked for ever
    (115, 2.0),  # the same, with the stale knowledge at an intermediate broker
    (20133, 1.6),  # a full cache forgot first what adjoined the gap: asked for again, lost again, for ever
    (50170, 1.0),  # routes led over a half-open link until its keepalive ended it: not owed until then
    (81358, 1.0),  # the simulator: who was slow has little room, also when it hurries
    (161306, 1.0),  # an attach was lost, and the next one began a stream where it was by then
    (200344, 5.0),  # the HELLO of a connection given up came last, and ended the one in use
)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rule_holds(seed: int) -> None:
    outcome = Scenario(seed=seed, minutes=1.6, durable=False).run()
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))
    assert outcome.published == outcome.accepted > 0


@pytest.mark.parametrize(("seed", "minutes"), FOUND)
def test_what_was_found_stays_repaired(seed: int, minutes: float) -> None:
    outcome = Scenario(seed=seed, minutes=minutes, durable=False).run()
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))


def test_a_calm_world_delivers_everything_without_gaps() -> None:
    outcome = Scenario(seed=1, minutes=0.3, brokers=8, faults=False, durable=False).run()
    assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))
    assert outcome.owed > 0


def test_a_world_has_a_size_and_takes_time() -> None:
    with pytest.raises(UsageError, match="brokers"):
        Scenario(seed=1, minutes=1, brokers=9)
    with pytest.raises(UsageError, match="time"):
        Scenario(seed=1, minutes=0)
