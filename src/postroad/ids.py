"""Identity: message ids (spec T1), broker numbers, node ids, publishing ends.

A message id is exactly 16 bytes, big-endian so that the ids of one publisher sort by time as bytes:
publisher u32, broker u32, time 48 bits in milliseconds, counter u16. The client's publish call assigns
it, so publishing never waits for a broker. Publisher numbers come from the broker at connect.

A publishing end (pubend) is an ordered stream of events at one broker: a broker number and a pubend
number packed into 64 bits. Durable pubends are numbered from 0. Plain ones live in memory and die with
the broker's process, so each start of a broker (its boot) opens a new one: VOLATILE | boot. The last
durable number is the pubend of what the broker publishes about itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, NewType

import msgspec

from postroad.errors import PeerError, UsageError

BrokerNumber = NewType("BrokerNumber", int)
PublisherNumber = NewType("PublisherNumber", int)
PubendId = NewType("PubendId", int)

ID_BYTES: Final = 16
NODE_BYTES: Final = 16
MAX_NAME: Final = 255  # bytes of the name of a broker or a client
MAX_PRINCIPAL: Final = 255  # bytes of the name behind a token or a certificate
MAX_COST: Final = 65_535  # of a link between brokers
VOLATILE: Final = 0x8000_0000
HISTORY: Final = 0x7FFF_FFFF  # pubend of a broker's own history
# Broker numbers are drawn below this. In the ids that a program makes itself, a greater one says so.
OWN_IDS: Final = 0x8000_0000
# In ids of queue messages it is this or more: a session takes the place of publisher and broker.
QUEUE_IDS: Final = 0xFFFF_0000
SESSION_BYTES: Final = 8
SESSION_DRAWN_BYTES: Final = 6  # of a session; the others mark it
_SESSION_MARK: Final = b"\xff\xff"
# Of a publisher's number so many bits count those of one start of a broker; the others are the start.
COUNT_BITS: Final = 22
LAST_COUNT: Final = (1 << COUNT_BITS) - 1
DEAD_LETTERS_PUBLISHER: Final = 1 << COUNT_BITS | LAST_COUNT  # of dead letters, at every start
_MAX_COUNTER: Final = 0xFFFF
_MAX_TIME_MS: Final = (1 << 48) - 1
_TEXT: Final = re.compile(r"([0-9a-f]{8})-([0-9a-f]{8})-([0-9a-f]{12})-([0-9a-f]{4})")
_GENERATED_NAME: Final = re.compile(r".*#([0-9a-f]{8}\.[0-9]+|[0-9a-f]{16})")


class MessageId(msgspec.Struct, frozen=True, order=True):
    """The identity of one event, for ever: `0000002a-00000007-0193c1d2e3f4-0001`."""

    publisher: int
    broker: int
    time_ms: int
    counter: int

    def __post_init__(self) -> None:
        if not (
            0 <= self.publisher < 1 << 32
            and 0 <= self.broker < 1 << 32
            and 0 <= self.time_ms <= _MAX_TIME_MS
            and 0 <= self.counter <= _MAX_COUNTER
        ):
            raise UsageError(f"a field of the message id is out of range: {self!r}")

    def __bytes__(self) -> bytes:
        return (self.publisher << 96 | self.broker << 64 | self.time_ms << 16 | self.counter).to_bytes(
            ID_BYTES, "big"
        )

    def __str__(self) -> str:
        return f"{self.publisher:08x}-{self.broker:08x}-{self.time_ms:012x}-{self.counter:04x}"

    @classmethod
    def from_bytes(cls, data: bytes) -> MessageId:
        if len(data) != ID_BYTES:
            raise UsageError(f"a message id has {ID_BYTES} bytes, not {len(data)}")
        value = int.from_bytes(data, "big")
        return cls(value >> 96, value >> 64 & 0xFFFF_FFFF, value >> 16 & _MAX_TIME_MS, value & _MAX_COUNTER)

    @classmethod
    def parse(cls, text: str) -> MessageId:
        match = _TEXT.fullmatch(text.strip().lower())
        if match is None:
            raise UsageError(f"{text!r} is not a message id such as 0000002a-00000007-0193c1d2e3f4-0001")
        return cls(int(match[1], 16), int(match[2], 16), int(match[3], 16), int(match[4], 16))


def session_from(drawn: bytes) -> bytes:
    """An application's session, from random bytes. With the number of a message behind it, it is the 16 bytes
    of that message's id: numbers are times in milliseconds, shifted, as in any id."""
    if len(drawn) != SESSION_DRAWN_BYTES:
        raise UsageError(f"a session is made of {SESSION_DRAWN_BYTES} random bytes, not {len(drawn)}")
    return drawn[:4] + _SESSION_MARK + drawn[4:]


def is_session(session: bytes) -> bool:
    """Whether its messages can be told from events by their ids, and so be tracked."""
    return session[4:6] == _SESSION_MARK


def first_number(now_ms: int) -> int:
    """The first that a message of a session may have in that millisecond."""
    return now_ms << 16


def queue_message_id(session: bytes, number: int) -> bytes:
    return session + number.to_bytes(ID_BYTES - SESSION_BYTES, "big")


def of_a_broker(publisher: int) -> bool:
    """Whether brokers themselves publish with that number: no client is given the first or the last count,
    though a program may bring it."""
    return publisher & LAST_COUNT in (0, LAST_COUNT)


def plain_name(client: str, publisher: int, number: int) -> str:
    """Of a plain subscription: in traces it is named so, like a durable one by its name."""
    return f"{client}#{publisher:08x}.{number}"


def consumer_name(inbox: str, consumer: str) -> str:
    """Of a consumer of an inbox, likewise; `consumer` are its 8 random bytes as text."""
    return f"{inbox}#{consumer}"


def is_generated_name(name: str) -> bool:
    return _GENERATED_NAME.fullmatch(name) is not None


class SubscriptionKind(IntEnum):
    PLAIN = 0
    DURABLE = 1
    READER = 2  # of what is stored, between two tokens


class SubscriptionKey(NamedTuple):
    """Names a local subscription within its broker. Each kind counts its own."""

    kind: SubscriptionKind
    id: int

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} subscription {self.id}"


class IdSource:
    """Assigns strictly increasing message ids to one publisher.

    A clock that steps back, or more than 65,536 events in one millisecond, moves the id's time ahead of
    the clock instead of repeating an id; the clock catches up.
    """

    __slots__ = ("_counter", "_prefix", "_time_ms")

    def __init__(self, publisher: int, broker: int) -> None:
        self._prefix = int.from_bytes(bytes(MessageId(publisher, broker, 0, 0)), "big")
        self._time_ms = 0
        self._counter = _MAX_COUNTER

    def next(self, now_ms: int) -> bytes:
        if now_ms > self._time_ms:
            self._time_ms, self._counter = now_ms, 0
        elif self._counter < _MAX_COUNTER:
            self._counter += 1
        else:
            self._time_ms, self._counter = self._time_ms + 1, 0
        # As bytes(MessageId(...)), without the object: every publish passes here.
        return (self._prefix | self._time_ms << 16 | self._counter).to_bytes(ID_BYTES, "big")


def pubend_id(broker: int, number: int) -> PubendId:
    return PubendId(broker << 32 | number)


def volatile_pubend(broker: int, boot: int) -> PubendId:
    """The plain pubend that this start of the broker opens."""
    return pubend_id(broker, VOLATILE | boot & (VOLATILE - 1))


def pubend_broker(pubend: int) -> BrokerNumber:
    return BrokerNumber(pubend >> 32)


def is_volatile(pubend: int) -> bool:
    return bool(pubend & VOLATILE)


def is_history(pubend: int) -> bool:
    """Whether it has what a broker publishes about itself, which is neither tracked nor reported."""
    return pubend & 0xFFFF_FFFF == HISTORY


def boot_of(pubend: int) -> int:
    """The start of its broker that opened this plain pubend."""
    return pubend & (VOLATILE - 1)


def pubend_text(pubend: int) -> str:
    return f"{pubend >> 32:08x}-{pubend & 0xFFFF_FFFF:08x}"


def parse_pubend(text: str) -> PubendId:
    match = re.fullmatch(r"([0-9a-f]{8})-([0-9a-f]{8})", text)
    if match is None:
        raise UsageError(f"{text!r} is not a pubend such as 00000007-00000000")
    return pubend_id(int(match[1], 16), int(match[2], 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a broker is. All of it is kept in its data folder."""

    number: int
    node: bytes
    name: str
    boot: int  # higher at every start, also after one of a folder that was restored from a backup
    starts: int  # how many there were, with this one
    before: int | None = None  # the boot number before this one, 0 at the first start; None: not known
    # Another number each time that what it said to others before is no longer known here; 0 until then.
    life: int = 0


def check_name(name: str) -> None:
    """Names are shown in logs and tables, so nothing that could forge a line gets in."""
    if not name or not name_fits(name):
        raise PeerError(f"a name has 1 to {MAX_NAME} bytes and is printable, not {name[:40]!r}")


def name_fits(name: str) -> bool:
    return name.isprintable() and len(name.encode()) <= MAX_NAME


def principal_fits(principal: str) -> bool:
    return principal.isprintable() and len(principal.encode()) <= MAX_PRINCIPAL
