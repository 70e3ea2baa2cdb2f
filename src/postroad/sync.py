"""The client for programs without an event loop: `postroad.sync.connect`, `postroad.sync.discover`."""

from __future__ import annotations

from postroad.client.blocking import Client, Subscription, connect, discover

__all__ = ["Client", "Subscription", "connect", "discover"]
