"""How a client behaves, and what it may say: checked here, so that no broker has to refuse it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from postroad.errors import TooLargeError, UsageError
from postroad.ids import MAX_NAME, name_fits
from postroad.links.handshake import MAX_TOKEN, MAX_WINDOW, MIN_WINDOW
from postroad.units import KIB, MIB, MILLISECOND_US, SECOND_US
from postroad.wire.frames import Limits

MAX_TEXT_BYTES: Final = 128 * KIB  # of a subscription or a request: they travel in one control frame
# Wide on purpose: the smaller of both sides holds, and it is the broker that knows what it can bear.
CLIENT_LIMITS: Final = Limits(
    event_bytes=64 * MIB,
    batch_bytes=80 * MIB,
    batch_events=1 << 20,
    attributes=1024,
    topic_bytes=32 * KIB,
    topic_depth=1024,
    subscriptions=1_000_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How a client behaves. Times in microseconds, sizes in bytes."""

    addresses: tuple[str, ...]  # HOST:PORT each, tried in this order; there may be none for one that seeks
    name: str
    token: str = ""
    window: int = 4 * MIB  # of deliveries that the application has not consumed, all subscriptions together
    publish_bytes: int = 8 * MIB  # published and not accepted
    publish_events: int = 65_536
    outage_us: int = 30 * SECOND_US  # calls that need a broker fail after this long without one
    handshake_us: int = 10 * SECOND_US
    ping_us: int = 5 * SECOND_US
    dead_us: int = 15 * SECOND_US
    backoff_us: int = 200 * MILLISECOND_US
    max_backoff_us: int = 3 * SECOND_US
    seeks: bool = False  # look for brokers where none of the addresses answers
    review_us: int = 60 * SECOND_US  # and this often for a better one; 0: never

    def __post_init__(self) -> None:
        if not self.addresses and not self.seeks:
            raise UsageError("no address to connect to")
        if not MIN_WINDOW <= self.window <= MAX_WINDOW:
            raise UsageError(f"a window is between {MIN_WINDOW} and {MAX_WINDOW} bytes")
        if not isinstance(self.name, str) or not name_fits(self.name):
            raise UsageError(f"a client's name has at most {MAX_NAME} bytes and is printable")
        check_texts("token", self.token)
        if len(self.token) > MAX_TOKEN:
            raise UsageError(f"a token has at most {MAX_TOKEN} characters")


def check_texts(what: str, *texts: str) -> None:
    """UsageError unless a message can carry them."""
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"what a {what} says is text, not {type(text).__name__}")
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise UsageError(f"a {what} is UTF-8, this one cannot be sent") from None
    if size > MAX_TEXT_BYTES:
        raise TooLargeError(f"a {what} has at most {MAX_TEXT_BYTES} bytes, this one {size}")
