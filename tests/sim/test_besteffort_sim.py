"""Best effort in the simulated world: datagrams are lost in bursts, repeated and overtaken, links are cut,
publishers start anew; receivers get each event once (spec B1, B4, B7 and the traps)."""

from __future__ import annotations

import pytest
from tests.worlds.best_effort import LOSSY, Campaign, Stage

from postroad.client.repair.settings import settings_for
from postroad.sim.machine.network import Quality
from postroad.units import MILLISECOND_US

SEEDS = range(1, 5)
MORE_SEEDS = range(5, 205)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_event_comes_once_whatever_the_network_does(seed: int) -> None:
    stage = Stage(seed)
    stage.subscribe("near", "b2", "kind = 'x'")
    stage.subscribe("far", "b3", "")
    publisher = stage.client("publisher", "b1")
    stage.run(6)
    stage.publish(publisher, 0, 150)
    stage.network.default = Quality(latency_us=20 * MILLISECOND_US, lose=0.5)  # a burst
    stage.publish(publisher, 150, 50)
    stage.network.default = LOSSY
    stage.publish(publisher, 200, 100)
    stage.run(20)
    stage.check()
    assert stage.numbers("far") == list(range(300))
    assert stage.numbers("near") == list(range(1, 300, 2))
    assert stage.gaps == []
    assert stage.network.datagrams_lost > 20
    received = [process.core.metrics()["best_effort_received_total"] for process in stage.processes]
    assert min(received) > 0, "events downwards, requests upwards"


def test_a_publisher_that_starts_anew_is_not_a_million_losses() -> None:
    stage = Stage(4)
    reader = stage.subscribe("far", "b3", "")
    publisher = stage.client("publisher", "b1")
    stage.run(6)
    stage.publish(publisher, 0, 60)
    stage.run(5)
    publisher.end(silently=False)
    again = stage.client("publisher2", "b1")
    stage.publish(again, 60, 60)
    stage.run(20)
    stage.check()
    assert stage.numbers("far") == list(range(120))
    assert stage.gaps == []
    figures = reader.core.effort.figures(1)
    assert figures["losses_detected"] < 40


def test_a_storm_under_a_partition_is_bounded() -> None:
    """Trap: by design, not by luck. What was lost for good is a Gap, once."""
    stage = Stage(5)
    reader = stage.subscribe("far", "b3", "")
    publisher = stage.client("publisher", "b1")
    stage.run(6)
    stage.publish(publisher, 0, 100)
    stage.run(1.2)
    before = stage.network.datagrams
    stage.network.default = Quality(
        lose=1.0
    )  # no datagram passes: what was not repaired yet is asked for in vain
    stage.run(14)
    assert stage.network.datagrams - before < 400
    publisher.end(silently=False)
    stage.network.default = LOSSY
    stage.run(60)
    stage.check()
    got = stage.numbers("far")
    assert got == sorted(set(got))
    missing = 100 - len(got)
    figures = reader.core.effort.figures(1)
    assert figures["missing"] == 0
    assert missing <= sum(gap.end - gap.start for gap in stage.gaps) <= missing + 64


@pytest.mark.parametrize("seed", [6])
def test_caches_come_and_go(seed: int) -> None:
    """B10.

    The paper's way (B3 to B8): whoever is there repairs. A publisher that starts anew, caches that end and
    others that begin: nothing comes twice, and what is missing is at most not found out."""
    stage = Stage(seed)
    settings = settings_for("records", "eu")
    far = stage.subscribe("far", "b3", "", settings)
    caches = [stage.subscribe("cache0", "b1", "", settings)]
    publishers = [stage.client("publisher0", "b1")]
    publishers[0].core.effort.choose(settings)
    stage.run(6)
    for at in range(1, 5):
        stage.publish(publishers[-1], 100 * (at - 1), 60)
        caches.append(stage.subscribe(f"cache{at}", f"b{1 + at % 2}", "", settings))
        caches.pop(0).end(silently=at % 2 == 0)
        stage.publish(publishers[-1], 100 * (at - 1) + 60, 40)
        if at == 2:
            publishers[-1].end(silently=False)
            publishers.append(stage.client("publisher1", "b1"))
            publishers[-1].core.effort.choose(settings)
    stage.run(90)
    stage.check()
    got = stage.numbers("far")
    assert got == sorted(set(got))
    figures = far.core.effort.figures(1)
    assert figures["recovered"] > 0
    assert figures["missing"] == figures["requests_sent"] == 0
    told = sum(gap.end - gap.start for gap in stage.gaps_of.get("far", []))
    assert len(got) + told >= 400 - 8, "what neither came nor is a Gap was lost with all that told of it"


def _hold(seed: int) -> None:
    campaign = Campaign(seed)
    faults = campaign.run()
    assert not faults, "\n".join([*faults[:10], f"{len(faults)} in all", *campaign.story])
    assert campaign.sent


@pytest.mark.parametrize("seed", SEEDS)
def test_what_must_hold_holds_in_random_worlds(seed: int) -> None:
    """B4, B7.

    Bursts of loss, cut links, caches that come and go, publishers that start anew, subscriptions that
    begin anywhere: nothing comes twice or unasked, order is kept where it is asked for, and what was lost
    after `subscribed` and not repaired is in exactly one Gap."""
    _hold(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_what_must_hold_holds_in_many_random_worlds(seed: int) -> None:
    _hold(seed)
