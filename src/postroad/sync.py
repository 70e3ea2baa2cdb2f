"""The client for programs without an event loop: `postroad.sync.connect`."""

from __future__ import annotations

from postroad.client.blocking import Client, Subscription, connect

__all__ = ["Client", "Subscription", "connect"]
