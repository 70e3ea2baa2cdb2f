"""P5: the path of each id from the records alone is the live trace's, without Spark in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds.spark_networks import World
from tests.worlds.spark_traces import COARSE, FINE, as_row, bulk, expanded, same, unknown

from postroad.ids import OWN_IDS, MessageId
from postroad.spark.trace.claims import SLICED_FROM, Bits, contained, contains
from postroad.spark.trace.group import Group, keys_from
from postroad.spark.trace.paths import NOT_YET, trace_group
from postroad.spark.trace.views import BrokerView, NetworkView
from postroad.tracking.attachment import GROUP, NEIGHBOUR, SUBSCRIBER, AttachmentMap
from postroad.tracking.attachment_log import Change, Promise
from postroad.tracking.bloom import BloomFilter
from postroad.tracking.query import lookup
from postroad.tracking.settings import TrackingConfig
from postroad.units import MILLISECOND_US, SECOND_US


@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(("coarse", "fine", "exact")),
    routing=st.sampled_from(("all", "neighbours", "set")),
    deliveries=st.sampled_from(("origin", "subscriber")),
    brokers=st.integers(1, 6),
    faults=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_bulk_is_live_is_true(
    seed: int, shape: str, routing: str, deliveries: str, brokers: int, faults: bool
) -> None:
    """P5: of random networks, random ids: what happened, the live trace and the bulk trace agree.

    Whoever has a record of the message is heard, also behind brokers that died.
    """
    config = TrackingConfig(
        strategy="exact" if shape == "exact" else "bloom",
        routing=routing,
        deliveries=deliveries,
        persist_us=2_000_000,
        **(COARSE if shape == "coarse" else FINE),
    )
    world = World(seed, config, brokers, extra=2)
    world.happen(40, faults=faults, best_effort=0.3)
    world.stop()
    ids = [*world.truth, *unknown(world)]
    live = [as_row(result) for result in world.live(*ids)]
    found = bulk(world, ids)
    assert len(found) == len(ids)
    for row in live:
        same(row, found[row["id"]])
    for identity, (origin, edges, got) in world.truth.items():
        row = found[str(MessageId.from_bytes(identity))]
        if faults and identity in world.late:
            continue
        known = whole = world.whole(identity)
        assert faults or len(whole) == len(world.brokers)
        if row["verdict"] == "complete":
            whole = set(world.brokers)
            assert row["origin"] == f"b{origin}"
        assert {(step["broker"], step["from"]) for step in row["route"]} >= {
            (f"b{broker}", f"b{source}") for broker, source in edges if broker in whole
        }
        assert {(one["subscriber"], one["broker"]) for one in row["receivers"]} >= {
            (name, f"b{broker}")
            for name, broker in got
            if broker in (known if identity in world.best_effort else whole)  # a repair is on no way
        }


def test_a_bulk_trace_shows_where_an_event_was_lost_and_who_got_a_repair() -> None:
    """T6."""
    world = World(3, TrackingConfig(**FINE), 4, extra=0)
    world.happen(150, faults=False, best_effort=1.0)
    world.stop()
    rows = agreed(world, *world.truth)
    to = [loss["to"] for row in rows for loss in row["lost"]]
    assert sum(name.startswith("b") for name in to) > 20, "on links between brokers"
    assert sum(name.startswith("s") for name in to) > 20, "on the last step"
    assert sum(one["repair"] for row in rows for one in row["receivers"]) > 40
    assert any(row["receivers"] and not row["lost"] for row in rows)


def sent(world: World, origin: int, target: int, who: Sequence[str], *, time_ms: int | None = None) -> bytes:
    """A message from a broker to some at its neighbour, or at itself."""
    world.serial += 1
    identity = bytes(MessageId(5, origin, time_ms or world.now_us // MILLISECOND_US, world.serial))
    world.tracking[origin].published(identity, world.now_us)
    if target != origin:
        world.tracking[origin].forwarded(origin, [target], identity, world.now_us)
        world.tracking[target].routed(origin, origin, identity, world.now_us)
    world.tracking[target].delivered(origin, who, identity, world.now_us)
    world.pass_time(SECOND_US)
    return identity


def agreed(world: World, *ids: bytes) -> list[dict[str, Any]]:
    """The bulk trace of each, which is the live one."""
    found = bulk(world, list(ids))
    live = [as_row(result) for result in world.live(*ids)]
    for row in live:
        same(row, found[row["id"]])
    return [found[row["id"]] for row in live]


def test_who_catches_up_makes_no_message_one_ahead_of_the_clock() -> None:
    """P5: the lake has when it was noted that a message came late.

    Found: without that all brokers that were ever linked were asked, and one that is gone was missing.
    """
    world = World(1, TrackingConfig(), 2, extra=0)
    world.pass_time(2 * SECOND_US)
    world.tracking[1].linked(77, world.now_us)
    world.pass_time(60 * SECOND_US)
    world.tracking[1].unlinked(77, world.now_us)
    world.pass_time(86_400 * SECOND_US)
    identity = sent(world, 1, 2, ["s2.0"])
    world.pass_time(90 * SECOND_US)
    sent(world, 1, 1, ["s1.0"], time_ms=MessageId.from_bytes(identity).time_ms + 5)
    world.stop()
    (row,) = agreed(world, identity)
    assert row["verdict"] == "complete"


def test_bounds_that_were_wider_once_are_those_of_messages_of_then() -> None:
    """P5, T10: skew and jitter became smaller since; who came while the message was on its way is named."""
    world = World(1, TrackingConfig(jitter_us=20_000_000, skew_us=5_000_000), 2, extra=0)
    world.pass_time(2 * SECOND_US)
    identity = bytes(MessageId(5, 1, world.now_us // MILLISECOND_US, 1))
    world.tracking[1].published(identity, world.now_us)
    world.tracking[1].forwarded(1, [2], identity, world.now_us)
    world.pass_time(8 * SECOND_US)
    world.tracking[2].attached("late", world.now_us)
    world.pass_time(SECOND_US)
    world.tracking[2].routed(1, 1, identity, world.now_us)
    world.tracking[2].delivered(1, ["late"], identity, world.now_us)
    world.pass_time(SECOND_US)
    world.begin_again(jitter_us=500_000, skew_us=250_000)
    world.stop()
    (row,) = agreed(world, identity)
    assert [one["subscriber"] for one in row["receivers"]] == ["late"]


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize(("before", "after"), [("all", "neighbours"), ("all", "set"), ("set", "neighbours")])
def test_where_a_message_went_is_taken_from_records_only_if_they_were_kept_ever_since(
    strategy: str, before: str, after: str
) -> None:
    """P5: `routing` was changed. Found: a message of before was `complete` without where it went."""
    world = World(1, TrackingConfig(strategy=strategy, routing=before), 3, extra=0)
    world.pass_time(2 * SECOND_US)
    target = min(world.links[1])
    ids = [sent(world, 1, target, [f"s{target}.0"])]
    world.begin_again(routing=after)
    world.pass_time(2 * SECOND_US)
    ids.append(sent(world, 1, target, [f"s{target}.0"]))
    world.stop()
    for row in agreed(world, *ids):
        assert (row["verdict"], len(row["route"]), len(row["receivers"])) == ("complete", 2, 1)


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_all_receivers_are_named_however_many_they_are(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: a live trace leaves out whom it has no room for and says so; the bulk trace ended with an error."""
    monkeypatch.setattr(lookup, "MAX_RECEIVERS", 4096)
    world = World(1, TrackingConfig(strategy=strategy), 2, extra=0)
    names = sorted(f"n{number}" for number in range(4100))
    for name in names:
        world.tracking[2].attached(name, world.now_us)
    world.pass_time(2 * SECOND_US)
    identity = sent(world, 1, 2, names)
    world.stop()
    (live,) = world.live(identity)
    assert (live.verdict, live.explanation) == ("partial", "b2: 4 more receivers")
    (row,) = bulk(world, [identity]).values()
    assert (row["verdict"], row["missing"]) == ("complete", [])
    assert [one["subscriber"] for one in row["receivers"]] == names


def test_ids_that_a_program_made_name_no_broker() -> None:
    """P5: as in a live trace, whose broker in the id is none."""
    world = World(1, TrackingConfig(), 3, extra=0)
    world.pass_time(2 * SECOND_US)
    ids = [world.publish(origin, [1, 3], broker_in_id=OWN_IDS | 7)[0] for origin in (1, 2, 3)]
    world.pass_time(SECOND_US)
    world.stop()
    never = bytes(MessageId(5, OWN_IDS | 7, world.now_us // MILLISECOND_US - 1500, 9))
    rows = agreed(world, *ids, never)
    assert [row["verdict"] for row in rows] == ["complete"] * 3 + ["unknown"]


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_a_broker_whose_records_are_not_in_the_lake_yet_is_missing(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: with all that brokers have stored so far, and then with nothing of one of them.

    Found: only that of the broker in the id counted, and a message was `complete` without the others.
    """
    world = World(1, TrackingConfig(strategy=strategy), 2, extra=0)
    world.pass_time(2 * SECOND_US)
    ids: dict[bytes, int] = {}
    for number in range(100):
        target = 1 if number % 7 else 2
        ids[sent(world, 1, target, [f"s{target}.0"])] = target
    live = {result.id: as_row(result) for result in world.live(*ids)}
    for landed in ({1, 2}, {1}):
        records = {broker: held if broker in landed else {} for broker, held in world.records.items()}
        monkeypatch.setattr(world, "records", records)
        view = world.view(landed={broker: world.last_stored_us(broker) for broker in world.brokers})
        monkeypatch.setattr(world, "view", lambda view=view: view)
        found = bulk(world, list(ids))
        for row in found.values():
            if row["verdict"] == "complete":
                same(live[row["id"]], row)
            else:
                assert {one["why"] for one in row["missing"]} == {NOT_YET}
        complete = sum(row["verdict"] == "complete" for row in found.values())
        assert 70 < complete < 100 if 2 in landed else not complete
        monkeypatch.undo()


def test_a_broker_that_has_nothing_to_store_is_whole_as_far_as_it_is_landed() -> None:
    """P5: by how far landing is with it; and one that fell silent said so, after the last that it stored."""
    start = Change(what="start", at_us=0, promise=Promise(persist_us=10, lag_us=10, skew_us=1, jitter_us=2))
    settled = Change(what="settled", at_us=5_000_000)

    def until(*changes: Change, **known: int) -> int:
        view = BrokerView.of(1, "b", [changes], config=TrackingConfig(skew_us=1, jitter_us=2), **known)
        return view.stored_ms

    assert until(start, stored_us=0, told_us=9_000_023) == 9_000
    assert until(start, stored_us=0, told_us=9_000_022) == 8_999
    assert until(start, stored_us=4_000_013) == 4_000
    assert until(start, settled, stored_us=4_000_000) == 4_999
    assert until(start, settled, stored_us=3_999_000) == 3_998, "what was stored since is not here"


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_a_crash_costs_no_more_than_its_interval(strategy: str) -> None:
    """T4, T11: brokers that are held up and die; what is whole says so, and lacks nothing.

    Found: whatever was added to filters later than it was noted counted as late, and whole minutes as lost.
    """
    complete = 0
    for seed in range(11, 17):
        world = World(seed, TrackingConfig(strategy=strategy, persist_us=2_000_000), 5, extra=2)
        world.happen(60)
        world.stop()
        for identity, (_, edges, got) in world.truth.items():
            result = world.live(identity)[0]
            if result.verdict != "complete" or identity in world.late:
                continue
            complete += 1
            steps = {(step.broker, step.source) for step in result.route}
            assert steps >= {(f"b{broker}", f"b{source}") for broker, source in edges}
            receivers = {(one.subscriber, one.broker) for one in result.receivers}
            assert receivers >= {(name, f"b{broker}") for name, broker in got}
    assert complete > 200  # of 360


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_filters_on_their_side_answer_as_one_by_one(seed: int) -> None:
    """P5: bit-sliced matrices of several shapes, with rows left out."""
    random = Random(seed)
    keys = np.frombuffer(random.randbytes(16 * 300), np.uint8).reshape(-1, 16)
    filters, rows = [], []
    for _ in range(random.choice((3, 40, 130))):
        m, k = random.choice(((64, 2), (1001, 5)))
        one = BloomFilter(m, 50, k)
        one.add(keys[random.sample(range(300), 20)].tobytes())
        filters.append(Bits(m, k, one.bits))
        rows.append(np.array(sorted(random.sample(range(300), random.choice((300, 200, 5)))), np.intp))
    found = contained(filters, keys, rows)
    for one, mine, hits in zip(filters, rows, found, strict=True):
        assert hits.tolist() == mine[contains(one, keys[mine])].tolist()
    assert SLICED_FROM < 40


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_views_answer_as_the_map(seed: int) -> None:
    """P5, T10: who was there, for every millisecond around every change."""
    random = Random(seed)
    config = TrackingConfig(skew_us=random.choice((1, 999, 2500)), jitter_us=random.choice((0, 1500)))
    changes: list[Change] = []
    at_us = 50_000
    for _ in range(25):
        at_us += random.randrange(0, 4000)
        what = random.choice(
            ("attach", "detach", "attach", "detach", "late", "lost", "start", "begin", "handled")
        )
        kind = random.choice((SUBSCRIBER, GROUP, NEIGHBOUR))
        who = random.choice("12")
        until = at_us + random.randrange(1, 3000)
        if what in ("attach", "detach") or (what == "late" and kind != NEIGHBOUR):
            changes.append(Change(what=what, at_us=at_us, kind=kind, who=who, until_us=until))
        elif what == "handled":
            noted = at_us - random.randrange(0, 5000)
            changes.append(Change(what=what, at_us=at_us, until_us=until, noted_us=noted))
        elif what == "start":
            changes.append(Change(what=what, at_us=at_us, kind=random.choice(("", "all", "set"))))
        elif what != "late":
            changes.append(Change(what=what, at_us=at_us, until_us=until))
    held = AttachmentMap()
    for change in changes:  # a name attached twice at once cannot be: the map's own mutators see to it
        if change.what == "attach" and (change.kind, change.who) in list(held):
            continue
        held._apply(change)
    kept: list[Change] = []
    seen: set[tuple[str, str]] = set()
    for change in changes:
        name = (change.kind, change.who)
        if change.what == "attach":
            if name in seen:
                continue
            seen.add(name)
        if change.what == "detach":
            seen.discard(name)
        kept.append(change)
    view = BrokerView.of(1, "b", [kept], config=config, stored_us=0)
    times = np.arange(40, at_us // MILLISECOND_US + 20)
    slack = {"skew_us": config.skew_us, "delay_us": config.jitter_us}
    for kind, spans in ((SUBSCRIBER, view.subscribers), (GROUP, view.groups)):
        for time_ms, row in zip(times.tolist(), spans.within(40, int(times[-1])).at(times), strict=True):
            named = [
                name for name, there in zip(spans.within(40, int(times[-1])).names, row, strict=True) if there
            ]
            assert named == held.at(kind, time_ms, **slack)
    for time_ms, row in zip(times.tolist(), view.neighbours.at(times), strict=True):
        named = [name for name, there in zip(view.neighbours.names, row, strict=True) if there]
        assert named == held.since(NEIGHBOUR, time_ms, skew_us=config.skew_us)
    for time_ms, row in zip(times.tolist(), view.routings.at(times), strict=True):
        named = [name for name, there in zip(view.routings.names, row, strict=True) if there]
        assert set(named) == held.routings_since(time_ms, skew_us=config.skew_us)
    for time_ms, row in zip(times.tolist(), view.lost.at(times), strict=True):
        assert bool(row.any()) == held.lost_at(time_ms, **slack)
        assert (time_ms < view.forgot_ms) == (time_ms * MILLISECOND_US < (held.forgot_us or 0))


def test_brokers_of_the_same_name_are_not_mixed_up() -> None:
    """T12."""
    world = World(2, TrackingConfig(strategy="exact"), 4, extra=1)
    world.happen(30, faults=False)
    world.stop()
    ids, network = keys_from(world.truth), world.view()
    alike = NetworkView({at: replace(one, name="b") for at, one in network.brokers.items()}, network.config)
    found, _ = trace_group(Group(ids, world.stored(), network), complete=True)
    same_names, _ = trace_group(Group(ids, world.stored(), alike), complete=True)
    names = {
        identity: [one["subscriber"] for one in row["receivers"]] for identity, row in expanded(found).items()
    }
    assert sum(map(len, names.values())) > 30
    for identity, row in expanded(same_names).items():
        assert [one["subscriber"] for one in row["receivers"]] == names[identity]
        for one in row["receivers"]:
            number = int(one["subscriber"][1:].split(".")[0])  # its broker's
            assert one["broker"] == f"b ({number:08x})"
    live = {one.id: as_row(one) for one in world.live(*world.truth, names=alike.names)}
    for identity, row in expanded(same_names).items():
        same(live[identity], row)
