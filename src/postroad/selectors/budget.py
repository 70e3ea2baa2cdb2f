"""How much the conditions of each principal may cost together."""

from __future__ import annotations

from typing import Final

from postroad.errors import BugError, TooLargeError
from postroad.selectors.cost import COST_PER_PRINCIPAL
from postroad.selectors.selector import Selector

_ANONYMOUS: Final = "whoever has no name"


class _Account:
    """What one principal has. Equal selectors are stored and asked once, so they cost once."""

    __slots__ = ("costs", "repeated", "spent")

    def __init__(self) -> None:
        self.spent = 0  # the sum of `costs`
        self.costs: dict[Selector, int] = {}
        self.repeated: dict[Selector, int] = {}  # subscriptions beyond the first with the same selector


class ConditionBudget:
    """Sums up what the conditions of each principal cost, and refuses what would exceed the limit."""

    __slots__ = ("_accounts", "limit")

    def __init__(self, limit: int = COST_PER_PRINCIPAL) -> None:
        self.limit = limit
        self._accounts: dict[str, _Account] = {}  # by principal, for those that have a subscription

    def spent(self, principal: str) -> int:
        account = self._accounts.get(principal)
        return 0 if account is None else account.spent

    def take(self, principal: str, selector: Selector) -> None:
        """One more subscription; TooLargeError, and nothing changes, if it would cost too much."""
        account = self._accounts.get(principal)
        if account is not None and selector in account.costs:
            account.repeated[selector] = account.repeated.get(selector, 0) + 1
            return
        cost, spent = selector.cost, 0 if account is None else account.spent
        if spent + cost > self.limit:
            raise TooLargeError(
                f"this condition costs {cost}, those of {principal or _ANONYMOUS} cost {spent} already, "
                f"the limit is {self.limit}"
            )
        self._add(principal, selector, cost)

    def restore(self, principal: str, selector: Selector) -> None:
        """One that was there before the limit was asked."""
        account = self._accounts.get(principal)
        if account is not None and selector in account.costs:
            account.repeated[selector] = account.repeated.get(selector, 0) + 1
        else:
            self._add(principal, selector, selector.cost)

    def _add(self, principal: str, selector: Selector, cost: int) -> None:
        account = self._accounts.setdefault(principal, _Account())
        account.costs[selector] = cost
        account.spent += cost

    def give_back(self, principal: str, selector: Selector) -> None:
        """One subscription less."""
        account = self._accounts.get(principal)
        if account is None or selector not in account.costs:
            raise BugError(f"{principal or _ANONYMOUS} has no subscription with {selector}")
        repeated = account.repeated.pop(selector, 0)
        if repeated > 1:
            account.repeated[selector] = repeated - 1
        if repeated:
            return
        account.spent -= account.costs.pop(selector)
        if not account.costs:
            del self._accounts[principal]

    def check(self) -> None:
        """BugError unless the comments above hold."""
        for principal, account in self._accounts.items():
            if not account.costs or account.spent != sum(account.costs.values()):
                raise BugError(f"the conditions of {principal or _ANONYMOUS} are miscounted")
            if not account.costs.keys() >= account.repeated.keys() or 0 in account.repeated.values():
                raise BugError(f"repeated subscriptions of {principal or _ANONYMOUS} are miscounted")
