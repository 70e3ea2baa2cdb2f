"""Operators: people who signed in with a token of the broker's.

The page holds no rights and decides nothing: an action goes out on the operator's own connection, and the
broker says whether its principal may. A session ends SESSION_S after it began, with its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from postroad.client.aio import Client
from postroad.errors import DeniedError, PostroadError, UnavailableError
from postroad.page.door import Door

SESSION_S: Final = 3_600.0
MAX_OPERATORS: Final = 64  # then the one whose page was looked at longest ago is signed out
MAX_CONNECTIONS: Final = 16  # of one operator, to as many brokers
EXPIRE_S: Final = 30.0  # between two looks
REFUSED_S: Final = 1.0  # after a refusal the next sign-in waits, whoever it is by
PATIENCE_S: Final = 15.0


class Operator:
    """Somebody who is signed in: a connection to each broker where it did something."""

    def __init__(self, door: Door, token: str, until_s: float) -> None:
        self._door = door
        self._token = token
        self.until_s = until_s
        self.principal = ""
        self._connecting = asyncio.Lock()
        self._clients: dict[str, Client] = {}  # by address; "" is wherever the page was told to connect

    async def client(self, address: str = "") -> Client:
        if time.monotonic() > self.until_s:
            raise DeniedError("the session has expired: sign in again")
        async with self._connecting:
            client = self._clients.get(address)
            if client is None:
                if len(self._clients) >= MAX_CONNECTIONS:
                    await self._drop(next(iter(self._clients)))
                name = f"page-operator-{secrets.token_hex(4)}"
                client = await self._door.client(name, addresses=address, token=self._token)
                self._clients[address] = client
            return client

    async def act(self, work: Callable[[Client], Awaitable[Any]], address: str = "") -> Any:
        """Do something with the connection to that broker."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await work(await self.client(address))
        except (UnavailableError, TimeoutError):
            await self._drop(address)
            raise

    async def request(self, what: str, address: str = "", **arguments: str) -> dict[str, Any]:
        async def ask(client: Client) -> dict[str, Any]:
            return await client.request(what, **arguments)

        answer: dict[str, Any] = await self.act(ask, address)
        return answer

    async def _drop(self, address: str) -> None:
        client = self._clients.pop(address, None)
        if client is not None:
            with contextlib.suppress(PostroadError):
                await client.close()

    async def close(self) -> None:
        for address in list(self._clients):
            await self._drop(address)


class Operators:
    """Who is signed in, by the cookie of the browser. Nothing of it is on disk."""

    def __init__(self, door: Door) -> None:
        self._door = door
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
            operator = Operator(self._door, token, time.monotonic() + SESSION_S)
            try:
                operator.principal = await operator.act(_principal)
            except PostroadError:
                await operator.close()
                await asyncio.sleep(REFUSED_S)
                raise
            await self.sign_out(visitor)
            while len(self._operators) >= MAX_OPERATORS:
                await self.sign_out(next(iter(self._operators)))
            self._operators[visitor] = operator
            return operator

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
    rows = (await client.request("clients"))["clients"]
    own = [row["principal"] for row in rows if row["name"] == client._core.settings.name]
    return str(own[0]) if own else "somebody"
