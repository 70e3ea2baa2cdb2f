"""The bound of every field that a peer can send in a control frame, in one table, checked on arrival.

A frame has at most MAX_CONTROL_BYTES, so nothing here is about the size of a frame. These bounds say what one
field may take of it: a name is short however large the frame, and what is kept of a frame is bounded by what
is kept of its fields. Rooms have narrower bounds where they have a reason to give, and say so to whoever
asked. What breaks one of these is the peer's fault, and ends its connection.

Whoever adds a message adds its row. A test walks all messages and names the fields that have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from postroad.errors import PeerError
from postroad.wire import discovery, frames
from postroad.wire.frames import MAX_ADDRESS_BYTES, MAX_CONTROL_BYTES, MAX_PORT, Message


@dataclass(frozen=True, slots=True)
class Number:
    """An integer from `low` to `high`; the codec carries nothing wider than these defaults."""

    low: int = -(1 << 63)
    high: int = (1 << 64) - 1

    def check(self, value: Any) -> None:
        if not self.low <= value <= self.high:
            raise PeerError(f"{value} is not between {self.low} and {self.high}")


@dataclass(frozen=True, slots=True)
class Flag:
    """Yes or no."""

    def check(self, value: Any) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Text:
    """Up to so many characters."""

    most: int

    def check(self, value: Any) -> None:
        if len(value) > self.most:
            raise PeerError(f"a text of {len(value)} characters, at most {self.most} are allowed")


@dataclass(frozen=True, slots=True)
class Bytes:
    """Up to so many bytes."""

    most: int

    def check(self, value: Any) -> None:
        if len(value) > self.most:
            raise PeerError(f"{len(value)} bytes, at most {self.most} are allowed")


@dataclass(frozen=True, slots=True)
class Items:
    """Up to so many of the same."""

    most: int
    each: Bound

    def check(self, value: Any) -> None:
        if len(value) > self.most:
            raise PeerError(f"{len(value)} items, at most {self.most} are allowed")
        if self.each is not ANY:
            check = self.each.check
            for item in value:
                check(item)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Up to so many keys with a value each."""

    most: int
    key: Bound
    value: Bound

    def check(self, value: Any) -> None:
        if len(value) > self.most:
            raise PeerError(f"{len(value)} pairs, at most {self.most} are allowed")
        if self.key is not ANY:
            for key in value:
                self.key.check(key)
        if self.value is not ANY:
            for item in value.values():
                self.value.check(item)


@dataclass(frozen=True, slots=True)
class Row:
    """So many values as the type says, each bounded alike."""

    each: Bound

    def check(self, value: Any) -> None:
        for item in value:
            self.each.check(item)


@dataclass(frozen=True, slots=True)
class Record:
    """A structure that has its own row in the table."""

    kind: type

    def check(self, value: Any) -> None:
        check_fields(value, self.kind)


Bound = Number | Flag | Text | Bytes | Items | Pairs | Row | Record

ANY: Final = Number()  # whatever eight bytes hold: it is compared and answered, and nothing grows with it
POSITION: Final = Number(0, (1 << 62) - 1)  # a tick, a time, an epoch, a count
U32: Final = Number(0, (1 << 32) - 1)
SPANS: Final = Row(ANY)  # of ticks and numbers, each judged by the stream that it is of
NAME: Final = Text(255)
CODE: Final = Text(64)
REASON: Final = Text(4_096)
WORD: Final = Text(64)
TOPIC: Final = Text(65_535)
WHERE: Final = Text(65_536)
TOKEN: Final = Text(MAX_CONTROL_BYTES)  # of a checkpoint, as JSON: as many streams as a frame holds
BODY: Final = Bytes(MAX_CONTROL_BYTES)  # judged by whoever reads it; no more than the frame
ADDRESS: Final = Text(MAX_ADDRESS_BYTES)
NODE: Final = Bytes(64)
KEY: Final = Bytes(64)
STREAMS: Final = 100_000  # pubends or brokers that one frame names
ENTRIES: Final = 262_144  # of a table of interest in one frame, which holds no more

_GREETING: Final[dict[str, Bound]] = {
    "version": ANY,
    "name": NAME,
    "limits": Record(frames.Limits),
    "window": ANY,
    "time_us": ANY,
    "broker": U32,
    "node": NODE,
    "boot": ANY,
    "life": U32,
    "cost": ANY,
    "publisher": ANY,
    "resume_key": KEY,
    "datagrams": ANY,
    "address": ADDRESS,
}
_OUTCOME: Final[dict[str, Bound]] = {"code": CODE, "reason": REASON}
_QUEUED: Final[dict[str, Bound]] = {
    "id": ANY,
    "payload": BODY,
    "attributes": Bytes(65_535),
    "priority": ANY,
}

BOUNDS: Final[Mapping[type, Mapping[str, Bound]]] = {
    frames.Limits: dict.fromkeys(frames.Limits.__struct_fields__, ANY),
    frames.Hello: {**_GREETING, "role": WORD, "token": Text(4_096)},
    frames.Welcome: {**_GREETING, "datagram_key": KEY, "principal": NAME},
    frames.Refuse: {**_OUTCOME, "go_to": Items(64, ADDRESS)},
    frames.Ping: {"time_us": ANY},
    frames.Pong: {"time_us": ANY, "at_us": ANY},
    frames.Credit: {"size": ANY},
    frames.Accepted: {"sequence": ANY},
    frames.Rejected: {"sequence": ANY, **_OUTCOME, "ids": Bytes(4_096)},
    frames.Skew: {"correction_us": ANY},
    frames.Subscribe: {
        "number": ANY,
        "topic": TOPIC,
        "where": WHERE,
        "overflow": WORD,
        "buffer": ANY,
        "durable": Text(4_096),  # a longer name than may be is refused with the reason
        "token": TOKEN,
        "ack": WORD,
        "since_us": ANY,
        "shared": Flag(),
        "key": Text(4_096),  # likewise
        "until": TOKEN,
        "epoch": ANY,
        "max_attempts": ANY,
        "dead_letters": TOPIC,
    },
    frames.Subscribed: {
        "number": ANY,
        "missing": Items(10_000, NAME),
        "token": TOKEN,
        "created": Flag(),
        "born": ANY,
        "epoch": ANY,
    },
    frames.Unsubscribe: {"number": ANY},
    frames.Ended: {"number": ANY, **_OUTCOME},
    frames.Ack: {
        "number": ANY,
        "token": TOKEN,
        "events": Pairs(STREAMS, ANY, Items(ENTRIES, ANY)),
        "ticket": ANY,
        "rejected": Pairs(STREAMS, ANY, Items(ENTRIES, ANY)),
        "delay_us": ANY,
    },
    frames.Attempts: {"number": ANY, "pubend": ANY, "attempts": Items(ENTRIES, SPANS)},
    frames.Acked: {"number": ANY, "ticket": ANY, **_OUTCOME},
    frames.Request: {"number": ANY, "what": Text(4_096), "arguments": Pairs(64, WORD, Text(65_536))},
    frames.Reply: {"number": ANY, "code": CODE, "body": Text(MAX_CONTROL_BYTES)},
    frames.Silence: {"spans": Items(STREAMS, SPANS)},
    frames.Attach: {"origin": ANY, "known": Pairs(STREAMS, ANY, ANY)},
    frames.Detach: {"origin": ANY},
    frames.Nack: {"pubend": ANY, "spans": Items(STREAMS, SPANS), "need": Pairs(STREAMS, ANY, ANY)},
    frames.Stamp: {"number": ANY, "versions": Pairs(STREAMS, ANY, ANY)},
    frames.Release: {"reports": Items(STREAMS, SPANS)},
    frames.Advertisement: {
        "broker": ANY,
        "node": NODE,
        "name": NAME,
        "boot": ANY,
        "life": ANY,
        "sequence": ANY,
        "neighbours": Items(STREAMS, SPANS),
        "pubends": Items(STREAMS, ANY),
        "address": ADDRESS,
    },
    frames.TopologyUpdate: {"advertisements": Items(STREAMS, Record(frames.Advertisement))},
    frames.Digest: {"versions": Pairs(STREAMS, ANY, ANY)},
    frames.InterestEntry: {"entry": ANY, "topic": TOPIC, "where": WHERE},
    frames.InterestClaim: {
        "entry": ANY,
        "name": NAME,
        "epoch": ANY,
        "principal": NAME,
        "born": ANY,
        "fingerprint": KEY,
    },
    frames.InterestUpdate: {
        "owner": ANY,
        "base": ANY,
        "version": ANY,
        "added": Items(ENTRIES, Record(frames.InterestEntry)),
        "removed": Items(MAX_CONTROL_BYTES, ANY),
        "part": ANY,
        "parts": ANY,
        "claims": Items(ENTRIES, Record(frames.InterestClaim)),
    },
    frames.InterestPull: {"owners": Items(STREAMS, ANY)},
    frames.Query: {
        "source": ANY,
        "target": ANY,
        "number": ANY,
        "hops": ANY,
        "what": WORD,
        "body": BODY,
    },
    frames.Answer: {"source": ANY, "target": ANY, "number": ANY, "hops": ANY, "body": BODY},
    frames.Direct: {"room": WORD, "body": BODY},
    frames.Posting: {
        **_QUEUED,
        "inbox": Text(4_096),
        "after": ANY,
        "delay_us": ANY,
        "expires_us": ANY,
        "chain": Bytes(1_024),
    },
    frames.Send: {
        "number": ANY,
        "source": Text(4_096),
        "session": KEY,
        "form": WORD,
        "messages": Items(65_536, Record(frames.Posting)),
        "reliable": Flag(),
        "together": Flag(),
        "confirm": Flag(),
    },
    frames.Sent: {
        "number": ANY,
        "places": Items(65_536, ANY),
        "state": WORD,
        **_OUTCOME,
        "last": ANY,
        "chain": Bytes(1_024),
    },
    frames.EndSession: {"source": Text(4_096), "session": KEY},
    frames.Receive: {"number": ANY, "inbox": Text(4_096), "consumer": KEY, "window": ANY},
    frames.Receiving: {"number": ANY, **_OUTCOME},
    frames.QueueMessage: {
        **_QUEUED,
        "key": Bytes(4_096),
        "source": Text(4_096),
        "session": KEY,
        "form": WORD,
        "attempt": ANY,
        "sent_us": ANY,
        "principal": NAME,
    },
    frames.Messages: {
        "number": ANY,
        "place": Bytes(4_096),
        "messages": Items(65_536, Record(frames.QueueMessage)),
    },
    frames.Settle: {
        "number": ANY,
        "ticket": ANY,
        "keys": Items(65_536, Bytes(4_096)),
        "verdict": WORD,
        "delay_us": ANY,
        "reason": REASON,
    },
    frames.Settled: {"number": ANY, "ticket": ANY, "outcomes": Items(65_536, WORD), **_OUTCOME},
    frames.Unreceive: {"number": ANY},
    frames.Repaired: {
        "number": ANY,
        "ids": Bytes(4_096),
        "received": POSITION,
        "detected": POSITION,
        "requests": POSITION,
        "recovered": POSITION,
        "given_up": POSITION,
        "duplicates": POSITION,
        "slowest_us": POSITION,
        "recovery_us": POSITION,
        "repairs": POSITION,
        "asked": POSITION,
        "hits": POSITION,
        "cached": POSITION,
    },
    frames.Discover: {
        "uuid": KEY,
        "attempt": Number(1, discovery.MAX_ATTEMPTS),
        "host": Text(discovery.MAX_HOST_BYTES),
        "port": Number(1, MAX_PORT),
        "offset_us": Number(-discovery.MAX_TIME_US, discovery.MAX_TIME_US),
        "cookie": Bytes(discovery.COOKIE_BYTES),
        "credential": Bytes(discovery.CREDENTIAL_BYTES),
        "key": Bytes(discovery.KEY_BYTES),
        "certificate": Text(discovery.MAX_NAME_BYTES),
        "hops": Number(0, discovery.MAX_HOPS),
    },
}

# What is left to look at: a number that nothing grows with costs nothing to have.
_CHECKED: Final = {
    kind: tuple((name, bound) for name, bound in fields.items() if bound is not ANY and bound != Flag())
    for kind, fields in BOUNDS.items()
}


def check(message: Message) -> None:
    """PeerError unless every field is within its bound."""
    check_fields(message, type(message))


def check_fields(value: Any, kind: type) -> None:
    for name, bound in _CHECKED[kind]:
        try:
            bound.check(getattr(value, name))
        except PeerError as error:
            raise PeerError(f"{kind.__name__}.{name}: {error}") from None
