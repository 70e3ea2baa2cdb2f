"""What conditions cost, what a principal may have of them, and taking them in slice by slice."""

from __future__ import annotations

import pytest

from postroad.errors import BugError, PeerError, TooLargeError, UsageError
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.overlay.interest import Interest
from postroad.overlay.interest_entries import Claim, make_update
from postroad.selectors import ConditionBudget, MatchIndex, Selector
from postroad.selectors.cost import COST_PER_PRINCIPAL, LONGEST_TEXT
from postroad.wire.frames import DEFAULT_LIMITS, InterestClaim, InterestEntry, InterestUpdate

OWNER = 2


def cost(where: str) -> int:
    return Selector.parse("", where).cost


class TestCost:
    def test_the_usual_kind_costs_little(self) -> None:
        assert Selector.parse("orders/#").cost < 5
        assert cost("symbol = 'A' AND price BETWEEN 1 AND 9") < 12
        assert 1_000_000 * cost("symbol = 'A' AND price BETWEEN 1 AND 9") < COST_PER_PRINCIPAL

    def test_searching_a_text_costs_the_longest_text_for_every_64_signs(self) -> None:
        short, long = cost("a LIKE '%b%'"), cost("a LIKE '%" + "_" * 130 + "b%'")
        assert short > LONGEST_TEXT // 10
        assert 2.9 * short < long < 3.1 * short
        assert cost("a LIKE 'b%'") < 10
        assert cost("a LIKE 'b_%_c'") < 20

    @pytest.mark.parametrize(
        ("less", "more"),
        [
            ("a + b > 1", "a + b + c > 1"),
            ("a = 1", "a = 1 OR b = 1"),
            ("a * 2 IN (1)", "a * 2 IN (1, 2, 3, 4, 5)"),
            ("a + 0 > 1", "a > b"),  # two attributes may be long texts
            ("NOT a LIKE '%b_'", "NOT a LIKE '%b_c%'"),
            ("a = 1", "a = 1 AND (b = 1 OR c = 2) AND (d = 1 OR e = 2) AND (f = 1 OR g = 2)"),
            ("a IN (1)", "a IN (" + ",".join(str(n) for n in range(700)) + ")"),
        ],
    )
    def test_what_takes_more_costs_more(self, less: str, more: str) -> None:
        assert cost(less) < cost(more)

    def test_equal_parts_of_the_alternatives_are_asked_and_paid_once(self) -> None:
        single = cost("a LIKE '%b_c%' AND x = 1")
        assert cost("a LIKE '%b_c%' AND (x = 1 OR y = 2)") < single + 20


class TestBudget:
    def test_what_exceeds_the_limit_is_refused_with_the_figures(self) -> None:
        first, second = Selector.parse("", "a LIKE '%b%'"), Selector.parse("", "a LIKE '%c%'")
        budget = ConditionBudget(first.cost + second.cost - 1)
        budget.take("alice", first)
        figures = (
            rf"costs {second.cost}, those of alice cost {first.cost} already, the limit is {budget.limit}"
        )
        with pytest.raises(TooLargeError, match=figures):
            budget.take("alice", second)
        assert budget.spent("alice") == first.cost
        budget.take("bob", second)
        budget.check()

    def test_equal_selectors_cost_once_until_the_last_is_gone(self) -> None:
        selector = Selector.parse("t", "a + b > 1")
        budget = ConditionBudget(selector.cost)
        for _ in range(3):
            budget.take("alice", selector)
            budget.check()
        for left in (2, 1, 0):
            assert budget.spent("alice") == selector.cost
            budget.give_back("alice", selector)
            budget.check()
            assert bool(left) is bool(budget.spent("alice"))
        with pytest.raises(BugError):
            budget.give_back("alice", selector)
        budget.take("alice", Selector.parse("u", "a + b > 1"))

    def test_those_without_a_name_share_one_budget(self) -> None:
        budget = ConditionBudget(1)
        with pytest.raises(TooLargeError, match="those of whoever has no name cost 0 already"):
            budget.take("", Selector.parse("t"))


def matched(index: MatchIndex) -> list[int]:
    builder = BatchBuilder()
    builder.add(bytes(16), "t", {"a": 1, "b": 1}, b"", DEFAULT_LIMITS)
    groups = index.match(EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS))
    return [target for group in groups for target in group.targets]


class TestHolding:
    @pytest.mark.parametrize("where", ["", "a = 1", "a + b > 1", "a = 1 AND a = 2"])
    def test_what_is_held_matches_for_nobody(self, where: str) -> None:
        index, selector = MatchIndex(), Selector.parse("", where)
        index.hold(selector)
        index.hold(selector)
        index.check()
        assert matched(index) == []
        index.add(1, selector, 7)
        index.release(selector)
        index.remove(1)
        index.check()
        assert index.stats()["selectors"] == 1
        index.release(selector)
        index.check()
        assert index.stats()["selectors"] == 0
        with pytest.raises(UsageError):
            index.release(selector)

    def test_a_key_keeps_what_is_no_longer_held(self) -> None:
        index, selector = MatchIndex(), Selector.parse("", "a + b > 1")
        index.hold(selector)
        index.add(1, selector, 7)
        index.release(selector)
        index.check()
        assert matched(index) == [7]


def whole(
    *entries: InterestEntry, version: int = 5, claims: tuple[InterestClaim, ...] = ()
) -> InterestUpdate:
    return make_update(OWNER, 0, version, (*entries, *claims), ())


def entry(number: int, where: str) -> InterestEntry:
    return InterestEntry(entry=number, topic="", where=where)


class TestSlices:
    def test_a_step_looks_at_a_bounded_number_and_changes_nothing(self) -> None:
        interest = Interest(1, 1)
        update = whole(
            *(entry(n, f"a + b > {n} - 100") for n in range(50)),
            claims=(InterestClaim(entry=99, name="n", epoch=1),),
        )
        intake = interest.begin(update)
        steps = 1
        assert intake.step(10) <= 11
        while not intake.complete:
            intake.step(10)
            steps += 1
            assert matched(interest._index) == []
            assert interest.version(OWNER) == 0
        assert steps >= 50 * 2 // 10
        assert intake.finish() == (True, False)
        assert matched(interest._index) == [OWNER]
        assert interest.version(OWNER) == 5
        assert [heard.claims for heard in interest.take_heard()] == [{"n": Claim("n", 1)}]
        interest.check()

    def test_a_long_condition_fills_a_step_alone(self) -> None:
        long = " AND ".join(f"name{n} <> {n}" for n in range(100))
        intake = Interest(1, 1).begin(whole(entry(1, long), entry(2, "a = 1"), entry(3, "b = 1")))
        assert intake.step(10) > 10
        assert not intake.complete
        intake.step(10)
        assert intake.complete

    @pytest.mark.parametrize("wrong", [entry(4, "a = ="), entry(1, "b = 1")])
    def test_what_is_wrong_with_one_entry_leaves_everything_as_it_was(self, wrong: InterestEntry) -> None:
        interest = Interest(1, 1)
        intake = interest.begin(whole(entry(1, "a = 1"), entry(2, "a + b > 1"), wrong))
        intake.step(1)
        intake.step(1)
        assert not intake.complete
        with pytest.raises(PeerError):
            intake.step(1)
        assert interest.version(OWNER) == 0
        assert interest._index.stats()["selectors"] == 0
        interest.check()

    def test_what_became_old_on_its_way_is_no_news(self) -> None:
        interest = Interest(1, 1)
        intake = interest.begin(whole(entry(1, "a = 1"), version=5))
        intake.step(100)
        assert interest.accept(whole(entry(1, "a + b > 1"), version=6)) == (True, False)
        assert intake.finish() == (False, False)
        assert interest.version(OWNER) == 6
        assert interest._index.stats()["selectors"] == 1
        interest.check()

    def test_a_change_whose_base_is_not_there_is_pulled_without_a_look_at_its_entries(self) -> None:
        interest = Interest(1, 1)
        intake = interest.begin(make_update(OWNER, 4, 5, (entry(1, "not a condition ("),), ()))
        assert intake.complete
        assert intake.finish() == (False, True)

    def test_finishing_too_early_is_a_bug(self) -> None:
        with pytest.raises(BugError):
            Interest(1, 1).begin(whole(entry(1, "a = 1"))).finish()
