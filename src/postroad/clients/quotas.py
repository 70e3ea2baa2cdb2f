"""How much of this broker each principal may have: connections, subscriptions, names, conditions, requests,
bytes of durable events.

Anonymous clients are one principal together. What a principal has is counted where it begins and given back
where it ends; durable subscriptions count for the principal that they belong to, connected or not, also after
a restart. What would be too much is refused with the figure, and costs nobody else anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from postroad.clients.stored import StoredBytes
from postroad.errors import BugError, TooLargeError, UnavailableError
from postroad.ids import SubscriptionKind
from postroad.links.access import ANONYMOUS, QuotaConfig
from postroad.links.links import Links
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.selectors import ConditionBudget, Selector
from postroad.units import SECOND_US


@dataclass(slots=True)
class _Account:
    """What one principal has."""

    connections: int = 0
    subscriptions: dict[SubscriptionKind, int] = field(
        default_factory=lambda: dict.fromkeys(SubscriptionKind, 0)
    )
    requests: float = 0.0  # that it may make at `since_us`
    since_us: int = 0

    @property
    def idle(self) -> bool:
        return not self.connections and not any(self.subscriptions.values())


class Quotas:
    def __init__(self, board: Switchboard, *, config: QuotaConfig, links: Links) -> None:
        self._config = config
        self._links = links
        self._accounts: dict[str, _Account] = {}  # by principal, of those that have something
        self._budget = ConditionBudget(config.condition_cost)
        self.stored = StoredBytes(board, limit_bytes=config.stored_bytes)
        self._refused = 0
        self._most = {
            SubscriptionKind.PLAIN: (config.subscriptions, "subscriptions"),
            SubscriptionKind.DURABLE: (config.names, "durable subscriptions"),
            SubscriptionKind.READER: (config.readers, "readers"),
        }
        board.peers("client", up=self._up, down=self._down)
        board.metrics(self._metrics)
        board.status("quotas", lambda _now_us: self.stored.status())

    def _account(self, principal: str) -> _Account:
        account = self._accounts.get(principal)
        if account is None:
            account = self._accounts[principal] = _Account(requests=self._config.requests)
        return account

    def _release(self, principal: str, account: _Account) -> None:
        if account.idle:
            del self._accounts[principal]

    # ---- connections and requests

    def _up(self, turn: Turn, peer: Peer) -> None:
        account = self._account(peer.principal)
        account.connections += 1
        if account.connections > self._config.connections:
            self._refused += 1
            error = UnavailableError(
                f"{peer.principal} has {account.connections} connections, at most {self._config.connections}"
                " are allowed"
            )
            self._links.refuse(turn, peer.connection, error)

    def _down(self, _turn: Turn, peer: Peer) -> None:
        account = self._account(peer.principal)
        account.connections -= 1
        self._release(peer.principal, account)

    def request(self, principal: str, now_us: int) -> None:
        """One more request; UnavailableError if there were too many within a second. Anonymous clients have
        their shares of turns only: one that floods must not use up what the others may ask."""
        if principal == ANONYMOUS:
            return
        account, most = self._account(principal), self._config.requests
        passed_us = max(0, now_us - account.since_us)
        account.requests = min(float(most), account.requests + most * passed_us / SECOND_US)
        account.since_us = now_us
        if account.requests < 1:
            self._refused += 1
            raise UnavailableError(f"{principal} makes more than {most} requests a second: ask less often")
        account.requests -= 1

    def store(self, principal: str, size: int) -> None:
        """TooLargeError if this principal, "" for anonymous ones, may not store a frame of this size."""
        try:
            self.stored.check_room(principal, size)
        except TooLargeError:
            self._refused += 1
            raise

    # ---- subscriptions

    def take(self, principal: str, kind: SubscriptionKind, selector: Selector) -> Callable[[], None]:
        """One more subscription; what is to be called when it ends. TooLargeError, and nothing changes, if it
        would be too much."""
        most, what = self._most[kind]
        account = self._accounts.get(principal)
        has = 0 if account is None else account.subscriptions[kind]
        try:
            if has >= most:
                raise TooLargeError(f"{principal} has {has} {what}, at most {most} are allowed")
            self._budget.take(principal, selector)
        except TooLargeError:
            self._refused += 1
            raise
        return self._counted(principal, kind, selector)

    def restore(self, principal: str, kind: SubscriptionKind, selector: Selector) -> Callable[[], None]:
        """One that was here before the start: it counts, whatever the quota is by now."""
        self._budget.restore(principal, selector)
        return self._counted(principal, kind, selector)

    def _counted(self, principal: str, kind: SubscriptionKind, selector: Selector) -> Callable[[], None]:
        self._account(principal).subscriptions[kind] += 1

        def give_back() -> None:
            account = self._accounts[principal]
            account.subscriptions[kind] -= 1
            self._budget.give_back(principal, selector)
            self._release(principal, account)

        return give_back

    # ---- inspection

    def _metrics(self) -> dict[str, int | float]:
        return {
            "principals": len(self._accounts),
            "quota_refusals_total": self._refused,
            **self.stored.metrics(),
        }

    def check(self) -> None:
        self._budget.check()
        self.stored.check()
        for principal, account in self._accounts.items():
            if account.idle or account.connections < 0 or min(account.subscriptions.values()) < 0:
                raise BugError(f"quotas: what {principal} has is miscounted")
