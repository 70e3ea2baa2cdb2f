"""How the page gets to brokers: by everybody's client, with the page's own token or an operator's."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from postroad.client.aio import Client, connect
from postroad.config import parse_address
from postroad.errors import UsageError
from postroad.net.configure import is_wildcard

OUTAGE_S: Final = 3.0  # without a broker for so long, a call fails
MAX_ADDRESSES: Final = 16  # that are tried in turn when the broker is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    broker: str  # HOST:PORT, several separated by commas
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    private: bool = True  # only who is on this machine reaches the page

    def client(
        self, name: str, *, addresses: str = "", token: str | None = None, window: str = "1 MiB"
    ) -> Client:
        """Not yet connected. Without `token` it is the page's own."""
        return connect(
            addresses or self.broker,
            name=name,
            token=self.token if token is None else token,
            tls=self.tls,
            timeout=OUTAGE_S,
            window=window,
        )

    def anywhere(self, heard: Iterable[str]) -> str:
        """The brokers that the page was told of, then those that it has heard of."""
        known = [*self.broker.split(","), *filter(can_be_dialled, heard)]
        return ",".join(list(dict.fromkeys(known))[:MAX_ADDRESSES])


def can_be_dialled(address: str) -> bool:
    """What a broker says of itself may be nonsense, or mean every machine its own."""
    try:
        host, _ = parse_address(address)
    except UsageError:
        return False
    return not is_wildcard(host)
