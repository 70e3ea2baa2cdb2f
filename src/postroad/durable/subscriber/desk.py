"""What clients ask about durable subscriptions: lists, page by page, and deletion (spec D11).

`subs` lists those that this broker hosts in the order of their names, as many as a frame takes: `more` says
that there are others, which the same request with `after` gets. With `name` it is about that one only.
`subs.delete` is answered once the subscription is gone from the disk.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from postroad.durable.subscriber.consumers import DurableGroups
from postroad.durable.subscriber.hosting import Hosting
from postroad.durable.subscriber.subscriptions import Subscription
from postroad.errors import PostroadError, UsageError, shorten
from postroad.seam.effects import Effect
from postroad.wire.frames import MAX_BODY_BYTES, Reply, Request, encode, json_within_frame

PAGE_ROWS: Final = 1_000  # subscriptions in one answer; fewer if those do not fit in a frame


class Host(Protocol):
    """What the room around does."""

    def delete(self, name: str, now_us: int) -> list[Effect]: ...

    def new_number(self) -> int: ...


class DurableDesk:
    def __init__(
        self,
        *,
        hosting: Hosting,
        groups: DurableGroups,
        name_of: Callable[[int], str],
        host: Host,
        send: Callable[[int, bytes], None],
    ) -> None:
        self._hosting = hosting
        self._subscriptions = hosting.subscriptions
        self._groups = groups
        self._name_of = name_of
        self._host = host
        self._send = send
        self._deleting: dict[int, tuple[int, int]] = {}  # ticket -> who waits: connection, number

    def request(self, connection: int, message: Request, now_us: int) -> list[Effect]:
        """UsageError if it cannot be."""
        if message.what == "subs.delete":
            return self._delete(connection, message, now_us)
        body = self._list(message.arguments, now_us)
        self._send(connection, encode(Reply(number=message.number, code="", body=body)))
        return []

    # ---- lists

    def _list(self, arguments: dict[str, str], now_us: int) -> str:
        name, after = arguments.get("name"), arguments.get("after", "")
        if name is not None:
            one = self._subscriptions.get(name)
            found, more = [] if one is None else [one], False
        else:
            held = [one for one in self._subscriptions if one.name > after]
            found = heapq.nsmallest(PAGE_ROWS, held, key=lambda one: one.name)
            more = len(found) < len(held)
        rows = [self._row(one, now_us) for one in found]
        about = {} if after else self._hosting.status()
        while True:
            groups = [status for one in found if (status := self._groups.status(one.id)) is not None]
            answer = {"subscriptions": rows, "groups": groups, "more": more, **about}
            if len(rows) <= 1 or len(msgspec.json.encode(answer)) <= MAX_BODY_BYTES:
                return json_within_frame(answer)
            rows, found, more = rows[: len(rows) // 2], found[: len(rows) // 2], True

    def _row(self, one: Subscription, now_us: int) -> dict[str, object]:
        done = self._groups.done(one) if one.shared else 0
        elsewhere = self._subscriptions.owner(one.name)
        moved_to = self._name_of(elsewhere) if one.moved_at is not None and elsewhere is not None else ""
        return {**self._hosting.row(one, now_us, done), "moved_to": moved_to}

    # ---- deletion

    def _delete(self, connection: int, message: Request, now_us: int) -> list[Effect]:
        name = message.arguments.get("name", "")
        one = self._subscriptions.get(name)
        elsewhere = self._subscriptions.owner(name)
        if elsewhere is not None and (one is None or one.moved_at is not None):
            raise UsageError(
                f"the durable subscription {shorten(name, 40)!r} is at broker {self._name_of(elsewhere)!r}: "
                "delete it there"
            )
        if one is None:
            raise UsageError(f"there is no durable subscription {shorten(name, 40)!r} here")
        out = self._host.delete(name, now_us)
        self._subscriptions.claims.delete(name, one.epoch)
        ticket = self._host.new_number()
        self._deleting[ticket] = (connection, message.number)
        self._hosting.confirm(one.id, ticket)
        return out

    def confirmed(self, ticket: int, error: PostroadError | None) -> bool:
        """A deletion is on disk, or failed; False if the ticket is not of one."""
        waits = self._deleting.pop(ticket, None)
        if waits is None:
            return False
        connection, number = waits
        code, body = ("", "{}") if error is None else (error.code, str(error))
        self._send(connection, encode(Reply(number=number, code=code, body=body)))
        return True

    def closed(self, connection: int) -> None:
        """Nobody waits for the answer; what was deleted is."""
        self._deleting = {ticket: waits for ticket, waits in self._deleting.items() if waits[0] != connection}
