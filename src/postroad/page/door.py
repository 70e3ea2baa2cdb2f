"""How the page gets to brokers: by everybody's client, with the page's own token or an operator's."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Final

from postroad.client.aio import Client, connect

OUTAGE_S: Final = 3.0  # without a broker for so long, a call fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    broker: str  # HOST:PORT, several separated by commas
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None

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
