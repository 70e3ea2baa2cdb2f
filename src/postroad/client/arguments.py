"""What programs hand to a client, checked before anything is done with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from datetime import datetime
from numbers import Real
from typing import Final

from postroad.client.settings import check_texts
from postroad.errors import UsageError, shorten
from postroad.events import TTL, Value
from postroad.ids import ID_BYTES
from postroad.kernel.layout import MAX_NAME_BYTES
from postroad.units import SECOND_US

MAX_ORDER_S: Final = 60
MAX_TIMEOUT_S: Final = 1_000_000_000
MAX_TTL_S: Final = 10_000_000_000  # some 300 years
FEWER_IDS: Final = "there are fewer ids than events"
MORE_IDS: Final = "there are more ids than events"
_SHOWN: Final = 40  # characters of a value in an error


def check_timeout(timeout: object) -> None:
    """Of a connection."""
    if not isinstance(timeout, Real) or timeout < 0 or not timeout <= MAX_TIMEOUT_S:
        raise UsageError(f"a timeout is between 0 and {MAX_TIMEOUT_S:,} seconds, not {timeout}")


def check_patience(timeout: object) -> None:
    """Of one who waits for an event: one that has passed already is none, and None is for ever."""
    if timeout is not None and not (isinstance(timeout, Real) and timeout == timeout):
        raise UsageError(f"a timeout is a number of seconds, or None, not {timeout!r}")


def check_mode(mode: str, durable: object = False) -> str:
    """The mode that both arguments of a publish say."""
    if mode not in ("plain", "durable", "best-effort"):
        raise UsageError(f"mode {mode!r} is not one of plain, durable, best-effort")
    if not isinstance(durable, bool):
        raise UsageError(f"`durable` of an event is True or False, not {durable!r}")
    if durable and mode == "best-effort":
        raise UsageError("an event is durable or best-effort, not both")
    return "durable" if durable else mode


def with_ttl(attributes: Mapping[str, Value] | None, ttl: object) -> dict[str, Value]:
    """The attributes of an event that expires after so many seconds."""
    given = dict(attributes or {})
    if isinstance(ttl, bool) or not isinstance(ttl, Real) or ttl <= 0 or not ttl <= MAX_TTL_S:
        raise UsageError(f"`ttl` is more than 0 and at most {MAX_TTL_S:,} seconds, not {ttl!r}")
    if TTL in given:
        raise UsageError(f"the attribute {TTL!r} is what `ttl` sets: give one of them")
    given[TTL] = max(1, round(float(ttl) * 1_000))
    return given


def encode_payload(payload: object) -> bytes:
    if isinstance(payload, str):
        try:
            return payload.encode()
        except UnicodeEncodeError:
            raise UsageError("a payload that is text is UTF-8, this one cannot be sent") from None
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise UsageError(f"a payload is bytes or text, not {type(payload).__name__}")


def check_many(events: object, mode: str, ids: object) -> None:
    """What can be told of many events before the first is published."""
    check_mode(mode)
    _check_iterable("events", events)
    if ids is None:
        return
    _check_iterable("ids", ids)
    if mode != "durable":
        raise UsageError("`ids` are for mode 'durable': no other events are recognised by them")
    if isinstance(events, Sized) and isinstance(ids, Sized) and len(events) != len(ids):
        raise UsageError(FEWER_IDS if len(ids) < len(events) else MORE_IDS)


def _check_iterable(name: str, given: object) -> None:
    if not isinstance(given, Iterable):
        raise UsageError(f"`{name}` can be iterated over, which {type(given).__name__} cannot")


def check_event(event: object) -> None:
    if not isinstance(event, tuple | list) or not 2 <= len(event) <= 3:
        shown = shorten(repr(event), _SHOWN)
        raise UsageError(f"an event is (topic, payload) or (topic, payload, attributes), not {shown}")


def increasing(ids: Iterable[bytes]) -> Iterator[bytes]:
    """Ids of a program's own, as a broker takes them."""
    last = b""
    for id in ids:
        if not isinstance(id, bytes) or len(id) != ID_BYTES or (last and id[:8] != last[:8]) or id <= last:
            raise UsageError("ids are of 16 bytes, the first 8 the same in all of them, and increase")
        last = id
        yield id
    raise UsageError(FEWER_IDS)


def check_spent(ids: Iterator[bytes]) -> None:
    """All events have theirs."""
    if next(ids, None) is not None:
        raise UsageError(MORE_IDS)


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
    check_texts("subscription", key, "" if durable is None else durable)
    if durable == "":
        raise UsageError("a durable subscription has a name")
    if durable is None and (token is not None or since is not None):
        raise UsageError("only a durable subscription has a token or begins in the past")
    if not isinstance(shared, bool):
        raise UsageError(f"`shared` is True or False, not {shared!r}")
    if (shared and (durable is None or token is not None)) or (key and not shared):
        raise UsageError("`shared` needs a durable name and no token, and `key` needs `shared`")
    if len(key.encode()) > MAX_NAME_BYTES:
        raise UsageError(f"`key`, the name of an attribute, has at most {MAX_NAME_BYTES} bytes")
    if not isinstance(token, str | None) or not isinstance(since, datetime | None):
        raise UsageError("`token` is the text of a checkpoint token, `since` a datetime")
    if ack not in ("auto", "batch", "manual"):
        raise UsageError(f"ack {ack!r} is not one of auto, batch, manual")
    if overflow not in ("drop", "disconnect"):
        raise UsageError(f"overflow {overflow!r} is not one of drop, disconnect")


def check_dead_letters(shared: bool, max_attempts: int | None, dead_letters: str | None) -> None:
    if max_attempts is None and dead_letters is None:
        return
    if (
        isinstance(max_attempts, bool)
        or not isinstance(max_attempts, int)
        or max_attempts < 1
        or not dead_letters
    ):
        raise UsageError("`max_attempts`, at least 1, and `dead_letters`, a topic, are given together")
    check_texts("dead letters", dead_letters)
    if not shared:
        raise UsageError("`max_attempts` and `dead_letters` are of a shared durable subscription")


def check_repair(repair: object, order: object, durable: str | None) -> None:
    if not isinstance(repair, bool) or not isinstance(order, int | float):
        raise UsageError("`repair` is True or False, and `order` a number of seconds")
    if not 0 <= order <= MAX_ORDER_S:
        raise UsageError(f"`order` is between 0 and {MAX_ORDER_S} seconds, not {order}")
    if repair and durable is not None:
        raise UsageError("a durable subscription loses nothing: `repair` is for one that is not durable")
    if order and not repair:
        raise UsageError("`order` needs `repair`: without it nothing is known of what is missing")


def since_us(since: datetime | None) -> int:
    """Microseconds since 1970, 0 for None."""
    if since is None:
        return 0
    try:
        return max(1, round(since.timestamp() * SECOND_US))
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"`since` is too far away: {since}") from None
