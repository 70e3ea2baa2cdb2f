"""Interest: covering, versions, and taking in what neighbours send."""

from __future__ import annotations

import pytest

from postroad.errors import PeerError, UsageError
from postroad.events import BatchBuilder, EventBatch, Value
from postroad.ids import MessageId, SubscriptionKey, SubscriptionKind
from postroad.overlay import interest
from postroad.overlay.interest import Interest
from postroad.overlay.interest_entries import Claim
from postroad.selectors import Selector
from postroad.selectors import cover_index as covering
from postroad.selectors.covering import Effort
from postroad.wire.frames import (
    DEFAULT_LIMITS,
    MAX_CONTROL_BYTES,
    InterestClaim,
    InterestEntry,
    InterestUpdate,
    encode,
)

ME, OTHER = 1, 2
BOOT = 3


def selector(topic: str, where: str = "") -> Selector:
    return Selector.parse(topic, where)


def key(number: int) -> SubscriptionKey:
    return SubscriptionKey(SubscriptionKind.PLAIN, number)


def advertised(broker: Interest) -> set[tuple[str, str]]:
    return {(entry.topic, entry.where) for update in broker.full(ME) for entry in update.added}


def texts(update: InterestUpdate) -> list[str]:
    return [entry.topic for entry in update.added]


def batch_of(*events: tuple[str, dict[str, Value]]) -> EventBatch:
    builder = BatchBuilder()
    for row, (topic, attributes) in enumerate(events):
        builder.add(bytes(MessageId(1, 1, 1, row)), topic, attributes, b"", DEFAULT_LIMITS)
    return EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)


def wanted_by(broker: Interest, *events: tuple[str, dict[str, Value]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for rows, targets in broker.match(batch_of(*events)):
        for target in targets:
            found[target] = rows.tolist()
    return found


def whole(version: int, *topics: str, owner: int = OTHER, part: int = 0, parts: int = 1) -> InterestUpdate:
    entries = tuple(
        InterestEntry(entry=part * 100 + n, topic=topic, where="") for n, topic in enumerate(topics)
    )
    return InterestUpdate(
        owner=owner, base=0, version=version, added=entries, removed=(), part=part, parts=parts
    )


def change(base: int, *added: tuple[int, str], removed: tuple[int, ...] = ()) -> InterestUpdate:
    entries = tuple(InterestEntry(entry=entry, topic=topic, where="") for entry, topic in added)
    return InterestUpdate(owner=OTHER, base=base, version=base + 1, added=entries, removed=removed)


class TestCovering:
    def test_first_subscription_is_advertised_as_the_next_version(self) -> None:
        broker = Interest(ME, BOOT)
        (update,) = broker.subscribe(key(1), selector("a/b", "x > 1"))
        assert (update.owner, update.base, update.version) == (ME, BOOT << 32, BOOT << 32 | 1)
        assert [(entry.topic, entry.where) for entry in update.added] == [("a/b", "x > 1")]
        assert broker.own_version == update.version

    def test_identical_selectors_are_counted(self) -> None:
        broker = Interest(ME, BOOT)
        broker.subscribe(key(1), selector("a"))
        assert broker.subscribe(key(2), selector("a")) == []
        assert broker.unsubscribe(key(1)) == []
        (update,) = broker.unsubscribe(key(2))
        assert (texts(update), len(update.removed)) == ([], 1)
        broker.check()

    def test_covered_selector_is_not_advertised(self) -> None:
        broker = Interest(ME, BOOT)
        broker.subscribe(key(1), selector("a/#"))
        version = broker.own_version
        assert broker.subscribe(key(2), selector("a/b", "price > 3")) == []
        assert broker.unsubscribe(key(2)) == []
        assert broker.own_version == version
        broker.check()

    def test_wider_selector_replaces_what_it_covers_in_one_update(self) -> None:
        broker = Interest(ME, BOOT)
        broker.subscribe(key(1), selector("a/b"))
        broker.subscribe(key(2), selector("a/c", "x = 1"))
        broker.subscribe(key(3), selector("z"))
        (update,) = broker.subscribe(key(4), selector("a/+"))
        assert texts(update) == ["a/+"]
        assert update.removed == (1, 2)
        assert advertised(broker) == {("a/+", ""), ("z", "")}
        broker.check()

    def test_removing_a_coverer_advertises_what_it_alone_covered_in_the_same_update(self) -> None:
        broker = Interest(ME, BOOT)
        broker.subscribe(key(1), selector("#"))
        for number, topic in enumerate(("a/b", "a/#", "c"), start=2):
            assert broker.subscribe(key(number), selector(topic)) == []
        (update,) = broker.unsubscribe(key(1))
        # "a/b" was advertised and covered again within this change: nobody hears of it.
        assert texts(update) == ["a/#", "c"]
        assert update.removed == (1,)
        broker.check()

    def test_coverers_stand_one_deep(self) -> None:
        broker = Interest(ME, BOOT)
        broker.subscribe(key(1), selector("a/b/c"))
        broker.subscribe(key(2), selector("a/b/#"))
        broker.subscribe(key(3), selector("a/#"))
        broker.check()
        assert advertised(broker) == {("a/#", "")}
        broker.unsubscribe(key(2))
        broker.unsubscribe(key(3))
        assert advertised(broker) == {("a/b/c", "")}
        broker.check()

    def test_conditions_are_compared_within_their_equalities(self) -> None:
        broker = Interest(ME, BOOT)
        broker.subscribe(key(1), selector("t", "symbol = 'A' AND price > 10"))
        broker.subscribe(key(2), selector("t", "symbol = 'B' AND price > 10"))
        assert broker.subscribe(key(3), selector("t", "symbol = 'A' AND price > 20 AND n = 5")) == []
        (update,) = broker.subscribe(key(4), selector("t", "symbol = 'B'"))
        assert update.removed == (2,)
        assert advertised(broker) == {("t", "symbol = 'A' AND price > 10"), ("t", "symbol = 'B'")}
        broker.check()

    def test_equalities_shared_by_all_alternatives_count(self) -> None:
        broker = Interest(ME, BOOT)
        broker.subscribe(key(1), selector("t", "symbol = 'A'"))
        assert (
            broker.subscribe(key(2), selector("t", "symbol = 'A' AND n = 1 OR symbol = 'A' AND m = 2.0"))
            == []
        )
        assert broker.subscribe(key(3), selector("t", "symbol = 'A' AND flag")) == []
        broker.check()

    def test_some_of_several_equalities_cover(self) -> None:
        broker = Interest(ME, BOOT)
        broker.subscribe(key(1), selector("t", "a = 1 AND c = 3"))
        assert broker.subscribe(key(2), selector("t", "a = 1 AND b = 2 AND c = 3")) == []
        assert broker.subscribe(key(3), selector("t", "a = 1 AND b = 2 AND c = 4")) != []
        broker.check()

    def test_two_ways_to_write_any_topic(self) -> None:
        for first, second in (("#", "+/#"), ("+/#", "#")):
            broker = Interest(ME, BOOT)
            broker.subscribe(key(1), selector(first))
            assert broker.subscribe(key(2), selector(second, "x = 1")) == []
            broker.check()

    def test_many_equalities_look_only_at_the_smallest_and_largest_subsets(self) -> None:
        where = " AND ".join(f"a{n} = {n}" for n in range(8))
        broker = Interest(ME, BOOT)
        broker.subscribe(key(1), selector("t", "a3 = 3"))
        broker.subscribe(key(2), selector("#", where))
        assert broker.subscribe(key(3), selector("t", where)) == []
        assert broker.subscribe(key(4), selector("t/u", where + " AND z > 1")) == []
        broker.check()

    def test_no_topic_is_wider_than_every_pattern(self) -> None:
        broker = Interest(ME, BOOT)
        broker.subscribe(key(1), selector("#"))
        broker.subscribe(key(2), selector("$postroad/x"))
        assert len(advertised(broker)) == 2
        (update,) = broker.subscribe(key(3), selector(""))
        assert update.removed == (1, 2)
        assert broker.subscribe(key(4), selector("a/+/b")) == []
        broker.check()

    def test_search_is_cut_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(covering, "COMPARISONS", 2)
        broker = Interest(ME, BOOT)
        for number in range(5):
            broker.subscribe(key(number), selector("t", f"price BETWEEN {number * 10} AND {number * 10 + 5}"))
        assert len(broker.subscribe(key(9), selector("t", "price BETWEEN 41 AND 42"))) == 1
        broker.check()

    def test_a_search_among_long_lists_is_cut_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A subscription costs its broker about as much whatever is advertised already."""
        spent: list[int] = []
        ask = covering.covers

        def counted(wide: Selector, narrow: Selector, effort: Effort) -> bool:
            before = effort.left
            answer = ask(wide, narrow, effort)
            spent.append(before - effort.left)
            return answer

        monkeypatch.setattr(covering, "covers", counted)
        broker = Interest(ME, BOOT)
        for number in range(40):
            where = "a IN (" + ",".join(str(1000 + 2 * n + number) for n in range(780)) + ")"
            spent.clear()
            broker.subscribe(key(number), selector("t", where))
            assert sum(spent) <= 2 * (covering.STEPS_PER_SEARCH + 4 * 780)
        broker.check()

    def test_a_change_with_many_orphans_is_cut_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever is overlooked, each subscription is either advertised or covered."""
        monkeypatch.setattr(covering, "STEPS_PER_CHANGE", 12)
        broker = Interest(ME, BOOT)
        broker.subscribe(key(0), selector("t"))
        for number in range(1, 9):
            assert (
                broker.subscribe(key(number), selector("t", f"price BETWEEN {number} AND {number + 10}"))
                == []
            )
        assert broker.subscribe(key(9), selector("t", "price BETWEEN 17 AND 18")) == []
        (update,) = broker.unsubscribe(key(0))
        assert len(update.added) == 9
        broker.check()

    def test_a_wide_selector_that_comes_and_goes_moves_only_so_many(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody who looks at "#" for a moment must not make every broker take in all tables anew."""
        monkeypatch.setattr(covering, "COVERED", 10)
        broker = Interest(ME, BOOT)
        before = [f"a/{number}" for number in range(50)]
        for number, topic in enumerate(before):
            broker.subscribe(key(number), selector(topic))
        (update,) = broker.subscribe(key(100), selector("#"))
        assert (texts(update), len(update.removed)) == (["#"], 10)
        after = [f"b/{number}" for number in range(50)]
        told = [broker.subscribe(key(200 + number), selector(topic)) for number, topic in enumerate(after)]
        assert all(told)  # it covers as many as it may
        broker.check()
        (update,) = broker.unsubscribe(key(100))
        assert (len(update.added), len(update.removed)) == (10, 1)
        assert {topic for topic, _ in advertised(broker)} == {*before, *after}
        broker.check()

    def test_what_a_narrower_one_covers_counts_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(covering, "COVERED", 3)
        broker = Interest(ME, BOOT)
        for number, topic in enumerate(("a/#", "a/1", "a/2", "b/#", "b/1", "c")):
            broker.subscribe(key(number), selector(topic))
        broker.subscribe(key(10), selector("#"))
        broker.check()
        assert {topic for topic, _ in advertised(broker)} in ({"#", "b/#", "c"}, {"#", "a/#"})

    def test_a_key_is_added_once_and_removed_only_if_it_is_there(self) -> None:
        broker = Interest(ME, BOOT)
        broker.subscribe(key(1), selector("a"))
        with pytest.raises(UsageError, match="the plain subscription 1 is in the interest already"):
            broker.subscribe(key(1), selector("b"))
        with pytest.raises(UsageError, match="the plain subscription 2 is not in the interest"):
            broker.unsubscribe(key(2))

    def test_equal_ids_of_different_kinds_are_different_subscriptions(self) -> None:
        broker = Interest(ME, BOOT)
        keys = [SubscriptionKey(kind, 1) for kind in SubscriptionKind]
        for subscription, topic in zip(keys, "abc", strict=True):
            broker.subscribe(subscription, selector(topic))
        assert advertised(broker) == {("a", ""), ("b", ""), ("c", "")}
        broker.unsubscribe(keys[1])
        assert advertised(broker) == {("a", ""), ("c", "")}
        broker.check()

    def test_own_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        broker = Interest(ME, BOOT)
        broker.subscribe(key(1), selector("a"))
        monkeypatch.setattr(interest, "TEXT_BYTES_PER_OWNER", 4)
        with pytest.raises(UsageError, match="bytes of selectors"):
            broker.subscribe(key(2), selector("long"))
        monkeypatch.setattr(interest, "ENTRIES_PER_OWNER", 1)
        with pytest.raises(UsageError, match="different selectors"):
            broker.subscribe(key(2), selector("b"))
        assert broker.subscribe(key(3), selector("a")) == []
        broker.check()


class TestLargeTables:
    def test_updates_and_tables_fit_frames(self) -> None:
        broker, reader, second = Interest(ME, BOOT), Interest(OTHER, 1), Interest(3, 1)
        broker.subscribe(key(0), selector("#"))
        for update in broker.full(ME):
            reader.accept(update)
        count = 1600
        for number in range(1, count + 1):
            assert broker.subscribe(key(number), selector(f"t/{number}/" + "x" * 900)) == []
        updates = broker.unsubscribe(key(0))
        assert len(updates) > 1
        assert updates[-1].removed == (1,)
        for update in updates:
            assert len(encode(update)) <= MAX_CONTROL_BYTES
            # Until the last one the wide entry stands: what is wanted meanwhile is never too little.
            assert wanted_by(reader, ("anything", {})) == {ME: [0]}
            assert reader.accept(update) == (True, False)
        assert wanted_by(reader, ("anything", {})) == {}
        parts = reader.full(ME)
        assert len(parts) > 1
        assert parts == broker.full(ME)
        assert all(len(encode(part)) <= MAX_CONTROL_BYTES for part in parts)
        for part in (parts[1], parts[1], parts[0]):
            second.accept(part)
        assert second.version(ME) == broker.own_version
        assert second.stats()["interest_entries_held"] == count
        second.check()


class TestAccept:
    def test_whole_table_then_changes(self) -> None:
        broker = Interest(ME, BOOT)
        assert broker.accept(whole(10, "a", "b")) == (True, False)
        assert wanted_by(broker, ("a", {}), ("b", {}), ("c", {})) == {OTHER: [0, 1]}
        assert broker.accept(change(10, (7, "c"), removed=(0,))) == (True, False)
        assert wanted_by(broker, ("a", {}), ("b", {}), ("c", {})) == {OTHER: [1, 2]}
        assert broker.versions() == {ME: BOOT << 32, OTHER: 11}
        broker.check()

    def test_what_is_old_or_known_is_no_news(self) -> None:
        broker = Interest(ME, BOOT)
        broker.accept(whole(10, "a"))
        assert broker.accept(whole(10, "a")) == (False, False)
        assert broker.accept(whole(9, "z")) == (False, False)
        assert broker.accept(change(9, (5, "z"))) == (False, False)
        assert wanted_by(broker, ("z", {})) == {}

    def test_a_change_from_a_version_not_held_asks_for_the_table(self) -> None:
        broker = Interest(ME, BOOT)
        assert broker.accept(change(10, (1, "a"))) == (False, True)
        broker.accept(whole(10, "a"))
        assert broker.accept(change(11, (7, "b"))) == (False, True)
        assert broker.accept(whole(12, "a", "b")) == (True, False)
        broker.check()

    def test_own_table_from_outside_is_ignored(self) -> None:
        broker = Interest(ME, BOOT)
        assert broker.accept(whole(99 << 32, "a", owner=ME)) == (False, False)
        assert broker.wanted({ME: 99 << 32}) == ()

    def test_a_new_start_replaces_the_table_of_the_old_one(self) -> None:
        reader = Interest(OTHER, 1)
        before, after = Interest(ME, 1), Interest(ME, 2)
        before.subscribe(key(1), selector("old"))
        for update in before.full(ME):
            reader.accept(update)
        assert reader.wanted(after.digest()) == (ME,)
        (table,) = after.full(ME)
        assert reader.accept(table) == (True, False)
        assert wanted_by(reader, ("old", {})) == {}
        (update,) = after.subscribe(key(1), selector("new"))
        assert reader.accept(update) == (True, False)
        assert wanted_by(reader, ("new", {})) == {ME: [0]}

    def test_parts_come_in_any_order_and_count_once(self) -> None:
        broker = Interest(ME, BOOT)
        assert broker.accept(whole(10, "c", part=2, parts=3)) == (True, False)
        assert broker.accept(whole(10, "a", part=0, parts=3)) == (True, False)
        assert broker.accept(whole(10, "a", part=0, parts=3)) == (False, False)
        assert wanted_by(broker, ("a", {})) == {}
        assert broker.version(OTHER) == 0
        assert broker.accept(whole(10, "b", part=1, parts=3)) == (True, False)
        assert wanted_by(broker, ("a", {}), ("b", {}), ("c", {})) == {OTHER: [0, 1, 2]}
        broker.check()

    def test_parts_of_a_newer_version_replace_older_ones(self) -> None:
        broker = Interest(ME, BOOT)
        broker.accept(whole(10, "a", part=0, parts=2))
        assert broker.accept(whole(11, "b", part=0, parts=2)) == (True, False)
        assert broker.accept(whole(10, "c", part=1, parts=2)) == (False, False)
        assert broker.accept(whole(11, "d", part=1, parts=2)) == (True, False)
        assert wanted_by(broker, ("a", {}), ("b", {}), ("c", {}), ("d", {})) == {OTHER: [1, 3]}
        broker.check()

    def test_a_change_makes_parts_stale(self) -> None:
        broker = Interest(ME, BOOT)
        broker.accept(whole(10, "a"))
        broker.accept(whole(11, "a", part=0, parts=2))
        assert broker.accept(change(10, (7, "b"))) == (True, False)
        broker.check()
        assert broker.accept(whole(11, "c", part=1, parts=2)) == (False, False)

    def test_forget(self) -> None:
        broker = Interest(ME, BOOT)
        broker.accept(whole(10, "a"))
        broker.forget(OTHER)
        broker.forget(OTHER)
        assert wanted_by(broker, ("a", {})) == {}
        assert broker.digest() == {ME: BOOT << 32}
        assert broker.full(OTHER) == []
        broker.check()

    def test_wanted_names_those_the_other_side_holds_newer(self) -> None:
        broker = Interest(ME, BOOT)
        broker.accept(whole(10, "a"))
        assert broker.wanted({OTHER: 10, 5: 1, 4: 1}) == (4, 5)
        assert broker.wanted({OTHER: 11, 5: 0}) == (OTHER,)


class TestHostileUpdates:
    """A refused update leaves the table as it was."""

    @pytest.mark.parametrize(
        "update",
        [
            pytest.param(change(10, (0, "b")), id="adds what is there"),
            pytest.param(change(10, (7, "b"), (7, "c")), id="adds twice"),
            pytest.param(change(10, removed=(5,)), id="removes what is not there"),
            pytest.param(change(10, removed=(0, 0)), id="removes twice"),
            pytest.param(change(10, (7, "a/#/b")), id="unparsable topic"),
            pytest.param(change(10, (7, "a" * 2000)), id="long topic"),
            pytest.param(whole(11, "b", part=2, parts=2), id="part beyond parts"),
            pytest.param(whole(11, "b", part=0, parts=1 << 30), id="too many parts"),
            pytest.param(
                InterestUpdate(
                    owner=OTHER,
                    base=10,
                    version=11,
                    added=(InterestEntry(entry=7, topic="a", where="price >"),),
                    removed=(),
                ),
                id="unparsable condition",
            ),
            pytest.param(
                InterestUpdate(owner=OTHER, base=12, version=11, added=(), removed=()), id="from later"
            ),
            pytest.param(
                InterestUpdate(owner=OTHER, base=10, version=11, added=(), removed=(), part=0, parts=2),
                id="change in parts",
            ),
        ],
    )
    def test_refused(self, update: InterestUpdate) -> None:
        broker = Interest(ME, BOOT)
        broker.accept(whole(10, "a"))
        with pytest.raises(PeerError):
            broker.accept(update)
        broker.check()
        assert wanted_by(broker, ("a", {}), ("b", {}), ("c", {})) == {OTHER: [0]}
        assert broker.version(OTHER) == 10

    def test_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(interest, "ENTRIES_PER_OWNER", 2)
        broker = Interest(ME, BOOT)
        broker.accept(whole(10, "a", "b"))
        with pytest.raises(PeerError, match="limit"):
            broker.accept(change(10, (7, "c")))
        assert broker.accept(change(10, (7, "c"), removed=(0,))) == (True, False)
        broker.accept(whole(20, "a", "b", part=0, parts=2))
        with pytest.raises(PeerError, match="limit"):
            broker.accept(whole(20, "c", part=1, parts=2))
        monkeypatch.setattr(interest, "TEXT_BYTES_PER_OWNER", 4)
        with pytest.raises(PeerError, match="limit"):
            broker.accept(whole(30, "long", "x"))
        broker.check()

    def test_tables_and_beginnings_of_tables_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(interest, "MAX_BROKERS", 3)
        broker = Interest(ME, BOOT)
        assert broker.accept(whole(10, "a", owner=2)) == (True, False)
        for owner in range(10, 20):
            assert broker.accept(whole(10, "a", owner=owner, parts=2)) == (True, False)
            broker.check()
        # One that was crowded out begins again; one that is still there is completed.
        assert broker.accept(whole(10, "a", owner=10, parts=2)) == (True, False)
        for owner in (10, 19):
            broker.accept(whole(10, "b", owner=owner, part=1, parts=2))
            assert broker.version(owner) == 10
        with pytest.raises(PeerError, match="interest of more than 3 brokers"):
            broker.accept(whole(10, "a", owner=30))
        assert broker.accept(whole(11, "b", owner=2)) == (True, False)
        broker.check()

    def test_two_parts_with_one_entry(self) -> None:
        broker = Interest(ME, BOOT)
        broker.accept(whole(10, "a", part=0, parts=2))
        entry = InterestEntry(entry=0, topic="b", where="")
        with pytest.raises(PeerError, match="same entry"):
            broker.accept(
                InterestUpdate(owner=OTHER, base=0, version=10, added=(entry,), removed=(), part=1, parts=2)
            )


def heard(broker: Interest) -> dict[str, int | None]:
    """What others claim, as it is after all that was heard."""
    found: dict[str, int | None] = {}
    for one in broker.take_heard():
        found |= {name: None if claim is None else claim.epoch for name, claim in one.claims.items()}
    return found


def test_names_claimed_anew_by_a_change_of_several_versions_stay_claimed() -> None:
    """The later claim comes with an earlier version than the one that takes the old one away."""
    owner, broker = Interest(OTHER, BOOT), Interest(ME, BOOT)
    names = [f"{number:0250}" for number in range(5_000)]
    for update in owner.full(OTHER):
        broker.accept(update)
    for update in owner.claim({name: Claim(name, 7) for name in names}):
        assert broker.accept(update) == (True, False)
    assert heard(broker) == dict.fromkeys(names, 7)
    updates = owner.claim({name: Claim(name, 8) for name in names})
    assert len(updates) > 1
    for update in updates:
        assert broker.accept(update) == (True, False)
    assert heard(broker) == dict.fromkeys(names, 8)
    assert broker.claims_of(OTHER).claims == {name: Claim(name, 8) for name in names}
    for update in owner.claim({names[0]: None}):
        broker.accept(update)
    assert heard(broker) == {names[0]: None}
    broker.check()


def test_of_two_claims_on_a_name_in_a_whole_table_the_later_entry_counts() -> None:
    """Between two versions of one change a table holds both; its parts may come in any order."""
    broker = Interest(ME, BOOT)
    for part, (entry, epoch) in reversed(list(enumerate([(1, 7), (2, 8)]))):
        claims = (InterestClaim(entry=entry, name="s", epoch=epoch),)
        broker.accept(
            InterestUpdate(
                owner=OTHER, base=0, version=9, added=(), removed=(), part=part, parts=2, claims=claims
            )
        )
    assert heard(broker) == {"s": 8}
    broker.accept(InterestUpdate(owner=OTHER, base=9, version=10, added=(), removed=(1,)))
    assert heard(broker) == {}
    broker.accept(InterestUpdate(owner=OTHER, base=10, version=11, added=(), removed=(2,)))
    assert heard(broker) == {"s": None}
