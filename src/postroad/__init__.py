"""Messaging that knows where every message went.

    async with postroad.connect("localhost:7420") as client:
        await client.publish("orders/eu", b"...", attributes={"price": 120})
        async with client.subscribe("orders/#", where="price > 100") as events:
            async for event in events: ...

`postroad.sync.connect` is the same for people without an event loop. The rest of the package is imported
when it is first used, so that `import postroad` costs nothing to those who need one module of it.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as of `typing`, which takes half the time of starting Python to import
if TYPE_CHECKING:
    from typing import Any

    import postroad.otel as otel
    import postroad.sync as sync
    from postroad.client.addresses import tls
    from postroad.client.aio import Client, connect, discover
    from postroad.client.application import Application, Message, SendReceipt
    from postroad.client.receipt import Receipt
    from postroad.client.subscription import Subscription
    from postroad.errors import (
        BugError,
        DeniedError,
        FullError,
        PeerError,
        PostroadError,
        SelectorError,
        SlowConsumerError,
        StorageError,
        TakenError,
        TooLargeError,
        UnavailableError,
        UndeliveredError,
        UsageError,
    )
    from postroad.events import Event, EventBatch, Gap, GapError
    from postroad.ids import MessageId

__version__ = "0.1.0"

__all__ = [
    "Application",
    "BugError",
    "Client",
    "DeniedError",
    "Event",
    "EventBatch",
    "FullError",
    "Gap",
    "GapError",
    "Message",
    "MessageId",
    "PeerError",
    "PostroadError",
    "Receipt",
    "SelectorError",
    "SendReceipt",
    "SlowConsumerError",
    "StorageError",
    "Subscription",
    "TakenError",
    "TooLargeError",
    "UnavailableError",
    "UndeliveredError",
    "UsageError",
    "connect",
    "discover",
    "otel",
    "sync",
    "tls",
]

_HOME = {
    "Application": "postroad.client.application",
    "Message": "postroad.client.application",
    "SendReceipt": "postroad.client.application",
    "Client": "postroad.client.aio",
    "Subscription": "postroad.client.subscription",
    "connect": "postroad.client.aio",
    "discover": "postroad.client.aio",
    "Receipt": "postroad.client.receipt",
    "tls": "postroad.client.addresses",
    "Event": "postroad.events",
    "EventBatch": "postroad.events",
    "Gap": "postroad.events",
    "GapError": "postroad.events",
    "MessageId": "postroad.ids",
}


def __getattr__(name: str) -> Any:
    if name in ("otel", "sync"):
        return importlib.import_module(f"postroad.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'postroad' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME.get(name, "postroad.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
