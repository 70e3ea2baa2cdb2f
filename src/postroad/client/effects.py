"""What a client's core is told by its driver, and what it tells the driver and the application.

Send, Close, Dial and Note are those of `seam.effects`, SendTo and Datagram those of `seam.datagrams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from postroad.client.places import Choice
from postroad.errors import PostroadError
from postroad.events import EventBatch, Gap
from postroad.seam.datagrams import Datagram, SendTo
from postroad.seam.effects import Close, Dial, Send

# --- what the driver reports


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The connection asked for by Dial is there; `connection` numbers are never reused."""

    connection: int
    host: str = ""  # of the broker, as an Endpoint writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class DialFailed:
    address: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One whole frame."""

    connection: int
    frame: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    connection: int
    error: PostroadError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of a Seek: brokers, the best first; none, and the reason."""

    choices: tuple[Choice, ...] = ()
    reason: str = ""


Input = Opened | DialFailed | Received | Closed | Datagram | Found


@dataclass(frozen=True, slots=True, kw_only=True)
class Seek:
    """Look for brokers; Found follows."""


# --- what the application is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """A broker welcomed us."""

    broker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Down:
    """There is no broker now; the core dials on by itself."""

    error: PostroadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """There has been no broker for `outage_us`: calls that wait for one should fail with this."""

    error: PostroadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """No broker was reachable at the start, or one refused us for good. The core has stopped."""

    error: PostroadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Publishes were accepted or rejected: there may be room, and a flush may be over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Durable frames, by the ordinals of the outbox, are in the broker's log; with an error: they are not."""

    ordinals: tuple[int, ...]
    error: PostroadError | None = None
    perhaps: bool = False  # with an error: a broker may have them nevertheless


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Published events that no broker took."""

    error: PostroadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """A subscription is in force at every broker but `missing`; a durable one goes on after `token`."""

    number: int
    missing: tuple[str, ...]
    token: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """Rows for a subscription; `size` is to be given back through `consumed`."""

    number: int
    batch: EventBatch
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """A Gap for a subscription; `size` is to be given back through `consumed`, as for Delivered."""

    number: int
    gap: Gap
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A pubend has nothing for a durable subscription up to `tick`: its token may say so."""

    number: int
    pubend: int
    tick: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A subscription is over; nothing more comes for it."""

    number: int
    error: PostroadError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """What was acknowledged under this ticket is on the broker's disk; with an error: perhaps not."""

    ticket: int
    error: PostroadError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """These events of a shared subscription, which come next, were tried before: (tick, attempt)."""

    number: int
    pubend: int
    attempts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The broker has read everything that was sent before the ping of this time."""

    pinged_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """`body` is JSON text, unless there is an error."""

    number: int
    error: PostroadError | None
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Parcels of the sender, by their ordinals, are kept by the brokers that answer for their inboxes."""

    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Parcels that are not sent any more; the error says what is known of them."""

    ordinals: tuple[int, ...]
    error: PostroadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """Parcels whose messages are all accepted by consumers; with an error, one of them never will be."""

    ordinals: tuple[int, ...]
    error: PostroadError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """An inbox is received from; also after each reconnect."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """There may be messages for an inbox, to be asked for one by one (`receiver.next`)."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxEnded:
    """An inbox is not received from any more."""

    number: int
    error: PostroadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a message that was settled under this ticket; with an error that is not known."""

    ticket: int
    outcome: str
    error: PostroadError | None


Effect = (
    Send
    | SendTo
    | Close
    | Dial
    | Seek
    | Up
    | Down
    | Outage
    | Failed
    | Progress
    | Stored
    | Lost
    | Began
    | Delivered
    | Missed
    | Passed
    | Ended
    | Acknowledged
    | Tried
    | Heard
    | Answered
    | Kept
    | Refused
    | Confirmed
    | Joined
    | Arrived
    | InboxEnded
    | Verdict
)
