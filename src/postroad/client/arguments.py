"""What programs hand to a client, checked before anything is done with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from postroad.errors import UsageError
from postroad.ids import ID_BYTES


def check_mode(mode: str) -> None:
    if mode in ("plain", "durable"):
        return
    if mode == "best-effort":
        raise UsageError(f"this broker has no {mode} publishing yet")
    raise UsageError(f"mode {mode!r} is not one of plain, durable, best-effort")


def encode_payload(payload: object) -> bytes:
    if isinstance(payload, str):
        return payload.encode()
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise UsageError(f"a payload is bytes or text, not {type(payload).__name__}")


def increasing(ids: Iterable[bytes]) -> Iterator[bytes]:
    """Ids of a program's own, as a broker takes them."""
    last = b""
    for one in ids:
        if len(one) != ID_BYTES or (last and one[:8] != last[:8]) or one <= last:
            raise UsageError("ids are of 16 bytes, the first 8 the same in all of them, and increase")
        last = one
        yield one
    raise UsageError("there are fewer ids than events")


def check_subscription(
    *,
    durable: str | None,
    token: str | None,
    ack: str,
    since: datetime | None,
    shared: bool,
    key: str,
    overflow: str,
) -> None:
    if durable == "":
        raise UsageError("a durable subscription has a name")
    if durable is None and (token is not None or since is not None):
        raise UsageError("only a durable subscription has a token or begins in the past")
    if (shared and (durable is None or token is not None)) or (key and not shared):
        raise UsageError("`shared` needs a durable name and no token, and `key` needs `shared`")
    if not isinstance(token, str | None) or not isinstance(since, datetime | None):
        raise UsageError("`token` is the text of a checkpoint token, `since` a datetime")
    if ack not in ("auto", "batch", "manual"):
        raise UsageError(f"ack {ack!r} is not one of auto, batch, manual")
    if overflow not in ("drop", "disconnect"):
        raise UsageError(f"overflow {overflow!r} is not one of drop, disconnect")
