"""What clients ask about durable subscriptions: lists, page by page, and deletion (spec D11).

`subs` lists those that this broker hosts in the order of their names, as many as a frame takes: `more` says
that there are others, which the same request with `after` gets. With `name` it is about that one only. A
client sees those that are its principal's own or on topics that it may read, an administrator all of them.
`subs.delete` is for the principal that a subscription belongs to, and for administrators. It is answered once
the subscription is gone from the disk.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import islice, zip_longest
from typing import Final, Protocol

import msgspec

from postroad.durable.subscriber.consumers import DurableGroups
from postroad.durable.subscriber.hosting import Hosting
from postroad.durable.subscriber.subscriptions import Subscription
from postroad.errors import DeniedError, PostroadError, UsageError, shorten
from postroad.links.access import owning
from postroad.links.links import Links
from postroad.seam.levels import Level
from postroad.seam.peers import Peer
from postroad.seam.replies import reply, reply_error
from postroad.seam.switchboard import Asking, Switchboard
from postroad.seam.turn import Turn
from postroad.wire.frames import Request

PAGE_ROWS: Final = 1_000  # subscriptions in one answer; fewer if those do not fit in a frame

MAX_LABELS: Final = 100  # subscriptions in the metrics
LAG_EVENTS: Final = (
    "Events that the durable subscription has not acknowledged. Alarm: it grows for longer than its"
    " consumers are ever away."
)
LAG_SECONDS: Final = (
    "Age of the oldest event that the durable subscription has not acknowledged; 0 without one."
    " Alarm: above what your consumers promise."
)


class Host(Protocol):
    """What the room around does."""

    def delete(self, turn: Turn, name: str) -> None: ...

    def new_number(self) -> int: ...


class DurableDesk:
    def __init__(
        self,
        board: Switchboard,
        *,
        hosting: Hosting,
        groups: DurableGroups,
        links: Links,
        name_of: Callable[[int], str],
        host: Host,
    ) -> None:
        self._hosting = hosting
        self._subscriptions = hosting.subscriptions
        self._groups = groups
        self._links = links
        self._name_of = name_of
        self._host = host
        self._deleting: dict[int, tuple[int, int]] = {}  # ticket -> who waits: connection, number
        board.report("subs", self._page)
        board.request("subs.delete", self._delete)
        board.levels(self._lags)

    # ---- lists

    def _visible(self, principal: str) -> Callable[[Subscription], bool]:
        """Whether a principal may know of a subscription."""
        access, owner, read = self._links.access, owning(principal), dict[str, bool]()
        if access.may_admin(principal):
            return lambda _subscription: True

        def visible(subscription: Subscription) -> bool:
            topic = subscription.selector.topic
            if topic not in read:
                read[topic] = access.may_subscribe(principal, topic)
            return read[topic] or (owner != "" and subscription.principal == owner)

        return visible

    def _page(self, asking: Asking) -> dict[str, object]:
        name, after = asking.arguments.get("name"), asking.arguments.get("after", "")
        visible = self._visible(asking.principal)
        if name is not None:
            subscription = self._subscriptions.get(name)
            page, more = [] if subscription is None or not visible(subscription) else [subscription], False
        else:
            behind = [
                subscription
                for subscription in self._subscriptions
                if subscription.name > after and visible(subscription)
            ]
            page = heapq.nsmallest(PAGE_ROWS, behind, key=lambda subscription: subscription.name)
            more = len(page) < len(behind)
        rows = [self._row(subscription, asking.now_us) for subscription in page]
        about = {} if after or not self._links.access.may_admin(asking.principal) else self._hosting.status()
        while True:
            groups = [
                status
                for subscription in page
                if (status := self._groups.status(subscription.id)) is not None
            ]
            answer = {"subscriptions": rows, "groups": groups, "more": more, **about}
            if len(rows) <= 1 or len(msgspec.json.encode(answer)) <= asking.most_bytes:
                return answer
            rows, page, more = rows[: len(rows) // 2], page[: len(rows) // 2], True

    def _lags(self, now_us: int) -> Iterator[Level]:
        """How far each subscription is behind: of MAX_LABELS, each principal's first by name in turn, so that
        the many names of one do not hide those of others."""
        by_principal: dict[str, list[Subscription]] = {}
        for subscription in self._subscriptions:
            by_principal.setdefault(subscription.principal, []).append(subscription)
        firsts = (
            heapq.nsmallest(MAX_LABELS, names, key=lambda subscription: subscription.name)
            for _, names in sorted(by_principal.items())
        )
        in_turn = (each for row in zip_longest(*firsts) for each in row if each is not None)
        for subscription in islice(in_turn, MAX_LABELS):
            row = self._row(subscription, now_us)
            if row["moved"]:
                continue
            labels = {"subscription": subscription.name}
            yield Level("durable_lag_events", LAG_EVENTS, labels, float(str(row["lag_events"])))
            yield Level("durable_lag_seconds", LAG_SECONDS, labels, float(str(row["lag_s"])))

    def _row(self, subscription: Subscription, now_us: int) -> dict[str, object]:
        done = self._groups.done(subscription) if subscription.shared else 0
        elsewhere = self._subscriptions.owner(subscription.name)
        moved_to = (
            self._name_of(elsewhere) if subscription.moved_at is not None and elsewhere is not None else ""
        )
        return {**self._hosting.row(subscription, now_us, done), "moved_to": moved_to}

    # ---- deletion

    def _delete(self, turn: Turn, peer: Peer, request: Request) -> None:
        name = request.arguments.get("name", "")
        title = self._subscriptions.title(name)
        own = title is not None and title.principal == self._links.owner(peer.connection)
        if not own and not self._links.may_admin(peer.connection):
            raise DeniedError(f"{request.what} needs the right `admin` at this broker, or a name of your own")
        subscription = self._subscriptions.get(name)
        elsewhere = self._subscriptions.owner(name)
        if elsewhere is not None and (subscription is None or subscription.moved_at is not None):
            raise UsageError(
                f"the durable subscription {shorten(name, 40)!r} is at broker {self._name_of(elsewhere)!r}: "
                "delete it there"
            )
        if subscription is None:
            raise UsageError(f"there is no durable subscription {shorten(name, 40)!r} here")
        self._host.delete(turn, name)
        self._subscriptions.claims.delete(name, subscription.epoch)
        ticket = self._host.new_number()
        self._deleting[ticket] = (peer.connection, request.number)
        self._hosting.confirm(subscription.id, ticket)

    def confirmed(self, turn: Turn, ticket: int, error: PostroadError | None) -> bool:
        """A deletion is on disk, or failed; False if the ticket is not of one."""
        waits = self._deleting.pop(ticket, None)
        if waits is None:
            return False
        connection, number = waits
        if error is None:
            reply(turn, connection, number, {})
        else:
            reply_error(turn, connection, number, error)
        return True

    def closed(self, connection: int) -> None:
        """Nobody waits for the answer; what was deleted is."""
        self._deleting = {ticket: waits for ticket, waits in self._deleting.items() if waits[0] != connection}
