"""Operators: people who signed in with a token of the broker's.

The page holds no rights and decides nothing: an action goes out on the operator's own connection, and the
broker says whether its principal may. A session ends SESSION_S after it began, with its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from postroad.client.aio import Client
from postroad.errors import DeniedError, PostroadError, UnavailableError
from postroad.links.access import ANONYMOUS
from postroad.page.door import Door

SESSION_S: Final = 3_600.0
MAX_OPERATORS: Final = 64  # then the one whose page was looked at longest ago is signed out
MAX_CONNECTIONS: Final = 16  # of one operator, to as many brokers
EXPIRE_S: Final = 30.0  # between two looks
REFUSED_S: Final = 1.0  # after a refusal the next sign-in waits, whoever it is by
PATIENCE_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Spot:
    """One broker, where something is to be done that only it can do."""

    name: str
    number: str
    address: str  # "" is wherever the page can connect


class Operator:
    """Somebody who is signed in: a connection to each broker where it did something."""

    def __init__(self, door: Door, token: str, until_s: float, heard: Callable[[], list[str]] = list) -> None:
        self._door = door
        self._token = token
        self._heard = heard
        self.until_s = until_s
        self.principal = ""
        self._connecting = asyncio.Lock()
        self._clients: dict[str, Client] = {}  # by address; "" is wherever the page was told to connect

    async def client(self, address: str = "") -> Client:
        async with self._connecting:
            if time.monotonic() > self.until_s:
                raise DeniedError("the session is over: sign in again")
            client = self._clients.get(address)
            if client is None:
                if len(self._clients) >= MAX_CONNECTIONS:
                    await self._drop(next(iter(self._clients)))
                name = f"page-operator-{secrets.token_hex(4)}"
                addresses = address or self._door.anywhere(self._heard())
                client = await self._door.client(name, addresses=addresses, token=self._token)
                self._clients[address] = client
            return client

    async def act(self, work: Callable[[Client], Awaitable[Any]], at: Spot | None = None) -> Any:
        """Do something with the connection to that broker, or to any."""
        address = "" if at is None else at.address
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await work(await (self.client() if at is None else self._client_at(at)))
        except (UnavailableError, TimeoutError):
            await self._drop(address)
            raise

    async def _client_at(self, at: Spot) -> Client:
        """Where the page can connect anyway, or at its address. That may be another's by now, and a client
        goes on elsewhere when its broker stops: then a new one goes there."""
        for address in ("", at.address, at.address):
            client = await self.client(address)
            if (await client.request("status"))["number"] == at.number:
                return client
            if address:
                await self._drop(address)
        where = f"at {at.address}" if at.address else "from here"
        raise UnavailableError(f"{at.name} is not reached {where}: set `advertise` at it, or use --broker")

    async def request(self, what: str, at: Spot | None = None, /, **arguments: str) -> dict[str, Any]:
        async def ask(client: Client) -> dict[str, Any]:
            return await client.request(what, **arguments)

        answer: dict[str, Any] = await self.act(ask, at)
        return answer

    async def _drop(self, address: str) -> None:
        client = self._clients.pop(address, None)
        if client is not None:
            with contextlib.suppress(PostroadError):
                await client.close()

    async def close(self) -> None:
        """For good: whoever still holds it gets no connection any more."""
        self.until_s = -math.inf
        async with self._connecting:
            for address in list(self._clients):
                await self._drop(address)


class Operators:
    """Who is signed in, by the cookie of the browser. Nothing of it is on disk. `heard` says where brokers
    are that the page was not told of."""

    def __init__(self, door: Door, heard: Callable[[], list[str]] = list) -> None:
        self._door = door
        self._heard = heard
        self._operators: dict[str, Operator] = {}
        self._one_at_a_time = asyncio.Lock()

    def get(self, visitor: str) -> Operator | None:
        operator = self._operators.pop(visitor, None)
        if operator is not None:
            self._operators[visitor] = operator  # whoever looks is the last to make room
        return operator if operator is not None and time.monotonic() <= operator.until_s else None

    async def sign_in(self, visitor: str, token: str) -> Operator:
        """Raises what the broker says of the token."""
        async with self._one_at_a_time:
            await self.expire()
            operator = self._operator(token)
            try:
                operator.principal = await operator.act(_principal)
                await self._refuse_nobody(operator.principal, token)
            except PostroadError:
                await operator.close()
                await asyncio.sleep(REFUSED_S)
                raise
            await self.sign_out(visitor)
            while len(self._operators) >= MAX_OPERATORS:
                await self.sign_out(next(iter(self._operators)))
            self._operators[visitor] = operator
            return operator

    def _operator(self, token: str) -> Operator:
        return Operator(self._door, token, time.monotonic() + SESSION_S, self._heard)

    async def _refuse_nobody(self, principal: str, token: str) -> None:
        """What a broker grants without a token it grants to the page: to its certificate, or to whoever is on
        this machine. Visitors have the latter only where they are here themselves."""
        without = principal if not token or principal == ANONYMOUS else await self._without_token()
        if principal == without and not (principal == ANONYMOUS and self._door.private):
            raise DeniedError(
                f"the broker takes all who come through this page for {principal}: operators need tokens"
            )

    async def _without_token(self) -> str:
        """As whom the broker knows the page's own certificate; "" if that is nobody."""
        if self._door.tls is None:
            return ""
        page = self._operator("")
        try:
            return str(await page.act(_principal))
        except DeniedError:
            return ""
        finally:
            await page.close()

    async def sign_out(self, visitor: str) -> None:
        operator = self._operators.pop(visitor, None)
        if operator is not None:
            await operator.close()

    async def keep_expiring(self) -> None:
        """Connections of sessions that are over are closed, whether or not anybody comes."""
        while True:
            await asyncio.sleep(EXPIRE_S)
            await self.expire()

    async def expire(self) -> None:
        for visitor, operator in list(self._operators.items()):
            if time.monotonic() > operator.until_s:
                await self.sign_out(visitor)

    async def close(self) -> None:
        for visitor in list(self._operators):
            await self.sign_out(visitor)


async def _principal(client: Client) -> str:
    """As whom the broker knows this connection."""
    return client._core.principal
