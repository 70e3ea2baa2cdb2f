"""The client for programs without an event loop: `postroad.sync.connect`, `postroad.sync.discover`."""

from __future__ import annotations

from postroad.client.blocking import Client, Subscription, connect, discover
from postroad.client.blocking_application import Application, ApplicationInbox, Message

__all__ = ["Application", "ApplicationInbox", "Client", "Message", "Subscription", "connect", "discover"]
