"""The link-state database: order of advertisements, own words from the past, expiry, limits."""

from __future__ import annotations

import msgspec
import pytest

from postroad.errors import PeerError, UsageError
from postroad.overlay import topology as module
from postroad.overlay.topology import MAX_SEQUENCE, Topology, topology_frames
from postroad.units import SECOND_US
from postroad.wire.frames import MAX_CONTROL_BYTES, Advertisement, TopologyUpdate, decode

HOUR_US = 3_600 * SECOND_US


def node(number: int) -> bytes:
    return number.to_bytes(16, "big")


def broker(number: int, boot: int = 1) -> Topology:
    return Topology(me=number, node=node(number), name=f"b{number}", boot=boot)


def ad(number: int, links: dict[int, int] | None = None, **fields: object) -> Advertisement:
    made = Advertisement(
        broker=number,
        node=node(number),
        name=f"b{number}",
        boot=1,
        sequence=1,
        neighbours=tuple(sorted((links or {}).items())),
        pubends=(),
    )
    return msgspec.structs.replace(made, **fields)


def test_a_new_broker_knows_itself_and_says_so_once() -> None:
    b = broker(7)
    assert b.reachable() == [7]
    assert b.parent(7) is None
    assert b.children(7) == {}
    own = b.take_own()
    assert own is not None
    assert (own.broker, own.boot, own.sequence) == (7, 1, 1)
    assert b.take_own() is None


def test_newest_boot_then_sequence_wins() -> None:
    b = broker(1)
    assert b.accept(ad(2, sequence=5), 0)
    assert not b.accept(ad(2, sequence=5), 0)
    assert not b.accept(ad(2, sequence=4), 0)
    assert b.accept(ad(2, sequence=6), 0)
    assert b.accept(ad(2, boot=2, sequence=1), 0)
    assert not b.accept(ad(2, boot=1, sequence=99), 0)


@pytest.mark.parametrize(
    ("boot", "sequence", "found"),
    [(3, 1, False), (4, 99, False), (5, 1, True), (8, 99, True), (9, 1, False), (9, 5, True), (12, 1, True)],
)
def test_own_words_of_a_start_that_is_not_known_here(boot: int, sequence: int, found: bool) -> None:
    """T4: The data folder was put back from a backup: it knows of boot 4, and this start is boot 9."""
    b = Topology(me=1, node=node(1), name="b1", boot=9, before=4)
    b.accept(ad(1, boot=boot, sequence=sequence), 0)
    assert b.take_set_back() == found
    b.accept(ad(1, boot=boot, sequence=sequence), 0)
    assert not b.take_set_back(), "once"


def test_generation_moves_only_when_routes_or_pubends_may_have_changed() -> None:
    b = broker(1)
    b.accept(ad(2, {1: 1}), 0)
    before = b.generation
    assert b.accept(ad(2, {1: 1}, sequence=2), 0)
    assert b.generation == before, "the same said again"
    assert b.accept(ad(2, {1: 1, 3: 1}, sequence=3), 0)
    assert b.generation == before, "broker 3 does not advertise that link"
    b.link_up(2, 1, 0)
    assert b.generation == before + 1
    assert b.reachable() == [1, 2]
    assert b.accept(ad(2, {1: 1}, sequence=4, pubends=(5,)), 0)
    assert b.generation == before + 2
    assert b.pubends(2) == (5,)
    b.link_up(2, 1, 0)
    assert b.generation == before + 2
    b.link_down(2, 0)
    b.link_down(2, 0)
    assert b.generation == before + 3
    assert b.reachable() == [1]


def test_the_larger_cost_of_both_ends_holds() -> None:
    b = broker(1)
    b.link_up(2, 1, 0)
    b.accept(ad(2, {1: 9}), 0)
    assert b.distance(2) == 9
    assert b.distance(3) is None


def test_ties_go_to_the_lowest_number() -> None:
    """A square 1-2-4, 1-3-4: both ways cost the same."""
    b = broker(4)
    b.link_up(2, 1, 0)
    b.link_up(3, 1, 0)
    for other in (ad(1, {2: 1, 3: 1}), ad(2, {1: 1, 4: 1}), ad(3, {1: 1, 4: 1})):
        b.accept(other, 0)
    assert b.parent(1) == 2
    assert b.children(2) == {}, "broker 3 gets the events of 2 from 1"
    assert b.children(4) == {2: frozenset({1, 2}), 3: frozenset({3})}
    assert b.subtree(1, 2) == frozenset(), "events never go back to the parent"


def test_own_words_of_a_later_life_are_outranked() -> None:
    """The data folder came back from an old backup: the network remembers more of us than we do."""
    b = broker(1, boot=3)
    b.take_own()
    assert not b.accept(ad(1, {5: 1}, boot=9, sequence=40), 0)
    own = b.take_own()
    assert own is not None
    assert (own.boot, own.sequence, own.neighbours) == (9, 41, ())


def test_own_words_that_differ_under_the_same_sequence_are_outranked() -> None:
    b = broker(1)
    own = b.take_own()
    assert own is not None
    assert not b.accept(own, 0)
    assert b.take_own() is None, "an echo is no news"
    b.accept(msgspec.structs.replace(own, pubends=(4,)), 0)
    again = b.take_own()
    assert again is not None
    assert again.sequence == own.sequence + 1


def test_own_sequence_carries_into_the_boot_and_ends_somewhere() -> None:
    b = broker(1)
    b.accept(ad(1, {5: 1}, sequence=MAX_SEQUENCE), 0)
    own = b.take_own()
    assert own is not None
    assert (own.boot, own.sequence) == (2, 1)
    with pytest.raises(PeerError, match="sequence 4611686018427387903: nothing is above those"):
        b.accept(ad(1, boot=2**32 - 1, sequence=MAX_SEQUENCE), 0)


def test_two_node_ids_under_one_number_end_the_same_everywhere() -> None:
    low, high = ad(2, node=node(1), sequence=1), ad(2, node=node(9), sequence=50)
    one, other = broker(5), broker(6)
    assert one.accept(low, 0)
    assert not one.accept(high, 0)
    assert other.accept(high, 0)
    assert other.accept(low, 0)
    assert one.conflict(2, node(9))
    assert not one.conflict(2, node(1))
    assert not one.conflict(3, node(9))
    assert one.conflict(5, node(1))


def test_another_node_id_under_our_own_number_is_told() -> None:
    b = broker(2)
    b.take_own()
    assert b.contested is None
    assert not b.accept(ad(2, node=node(9), sequence=50), 0)
    assert b.contested == node(9)
    assert b.take_own() is None


def test_names_and_pubends() -> None:
    b = broker(1)
    b.accept(ad(2, name="vienna", pubends=(8, 9)), 0)
    assert b.name(2) == "vienna"
    assert b.name(0xAB) == "000000ab"
    assert b.pubends(2) == (8, 9)
    assert b.pubends(3) == ()
    b.set_pubends((9, 3, 9), 0)
    assert b.pubends(1) == (3, 9)


def test_the_own_advertisement_is_said_again_and_keeps_routes() -> None:
    b = broker(1)
    assert [a.sequence for a in b.tick(1_000)] == [1]
    generation = b.generation
    assert b.tick(b.next_deadline() - 1) == []
    assert [a.sequence for a in b.tick(b.next_deadline())] == [2]
    assert b.generation == generation


def test_unreachable_brokers_are_forgotten_after_an_hour_and_reachable_ones_never() -> None:
    b = broker(1)
    b.link_up(2, 1, 0)
    b.accept(ad(2, {1: 1}), 0)
    b.accept(ad(3), 0)
    now = start = 500_000 * HOUR_US
    while now < start + HOUR_US // 2:
        b.tick(now)
        now = b.next_deadline()
    assert b.take_gone() == []
    while now < start + 2 * HOUR_US:
        b.tick(now)
        now = b.next_deadline()
    assert b.take_gone() == [3]
    assert b.take_gone() == []
    assert [a.broker for a in b.advertisements()] == [1, 2]
    b.check()


def test_a_copy_of_a_forgotten_advertisement_does_not_live_another_hour() -> None:
    b = broker(1)
    b.accept(ad(3), 0)
    b.tick(1)
    b.tick(1 + HOUR_US)
    assert b.take_gone() == [3]
    assert b.accept(ad(3), HOUR_US)
    b.tick(b.next_deadline())
    assert b.take_gone() == [3]


def test_a_forgotten_broker_that_is_reachable_again_is_kept() -> None:
    """A clock that leapt an hour while a link was down must not cost more than learning the network anew."""
    b = broker(1)
    b.accept(ad(3, {1: 1}), 0)
    b.tick(1)
    b.tick(1 + HOUR_US)
    assert b.take_gone() == [3]
    b.link_up(3, 1, HOUR_US)
    assert b.accept(ad(3, {1: 1}), HOUR_US)
    for _ in range(20):
        b.tick(b.next_deadline())
    assert b.take_gone() == []
    assert b.reachable() == [1, 3]


@pytest.mark.parametrize(
    "fields",
    [
        {"broker": 2**32},
        {"broker": -1},
        {"node": b"short"},
        {"boot": 2**32},
        {"boot": -1},
        {"sequence": -1},
        {"sequence": MAX_SEQUENCE + 1},
        {"name": ""},
        {"name": "x" * 256},
        {"name": "line\nbreak"},
        {"neighbours": ((2, 1),)},
        {"neighbours": ((4, 1), (3, 1))},
        {"neighbours": ((3, 1), (3, 1))},
        {"neighbours": ((2**32, 1),)},
        {"neighbours": ((3, 0),)},
        {"neighbours": ((3, 65_536),)},
        {"neighbours": tuple((n, 1) for n in range(10, 1_011))},
        {"pubends": (2, 1)},
        {"pubends": (2**64,)},
        {"pubends": tuple(range(4_097))},
    ],
)
def test_advertisements_out_of_bounds_are_the_peers_error(fields: dict[str, object]) -> None:
    b = broker(1)
    with pytest.raises(PeerError):
        b.accept(ad(2, **fields), 0)
    assert len(b.advertisements()) == 1


def test_no_more_brokers_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BROKERS", 3)
    b = broker(1)
    b.accept(ad(2), 0)
    b.accept(ad(3), 0)
    with pytest.raises(PeerError, match="more than 3 brokers"):
        b.accept(ad(4), 0)
    assert b.accept(ad(3, sequence=2), 0)


def test_links_that_cannot_be_are_the_callers_error() -> None:
    b = broker(1)
    for neighbour, cost in ((1, 1), (2, 0), (2, 65_536), (-1, 1), (2**32, 1)):
        with pytest.raises(UsageError):
            b.link_up(neighbour, cost, 0)
    with pytest.raises(UsageError, match="advertise itself"):
        Topology(me=1, node=b"", name="x", boot=1)


def test_a_large_database_goes_out_in_frames_within_the_limit() -> None:
    ads = [ad(n, {10_000 + k: 1 for k in range(1_000)}) for n in range(400)]
    frames = topology_frames(ads)
    assert len(frames) > 1
    back: list[Advertisement] = []
    for frame in frames:
        assert len(frame) <= MAX_CONTROL_BYTES
        update = decode(frame)
        assert isinstance(update, TopologyUpdate)
        back += update.advertisements
    assert back == ads
    assert topology_frames([]) == []
