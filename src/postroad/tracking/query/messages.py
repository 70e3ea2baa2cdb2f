"""The two messages of a trace between brokers (spec T6), carried in frames by `wire`.

One question holds everything the asker wants of one broker in one round, and is answered once, in order.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from postroad.ids import ID_BYTES
from postroad.wire.fields import Broker, Number, Rate

MAX_ITEMS: Final = 256  # ids in one question
MAX_RECEIVERS: Final = 1 << 14  # named in one finding; the answer of a trace has room for hardly more
MAX_CANDIDATES: Final = 1 << 24  # subscribers, and keys, that a broker looks for
MAX_NEIGHBOURS: Final = 1024
MAX_SIGHTINGS: Final = 256  # routing histories that claim one message
MAX_REASON: Final = 1024  # characters of `lost`
MAX_SUBSCRIBER: Final = 4_096  # characters of the name of one
ANY_ORIGIN: Final = 0


class TraceItem(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    id: Annotated[bytes, Meta(max_length=ID_BYTES)]
    origin: Broker  # the broker whose histories to look in; ANY_ORIGIN for all


class TraceQuestion(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    items: Annotated[tuple[TraceItem, ...], Meta(max_length=MAX_ITEMS)]
    receivers: Number = 4096  # that a finding may name; earlier versions do not say, and take so many

    @property
    def makes_sense(self) -> bool:
        """A peer may ask anything."""
        return 1 <= len(self.items) <= MAX_ITEMS and all(len(item.id) == ID_BYTES for item in self.items)


class Sighting(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A routing history that claims the message. `fpp`: how likely it claims one it never saw."""

    origin: Broker
    neighbour: Broker  # where it came from
    fpp: Rate


class Forwarding(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    neighbour: Broker
    fpp: Rate


class Receiver(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    subscriber: Annotated[str, Meta(max_length=MAX_SUBSCRIBER)]
    fpp: Rate  # of one key
    keys: Number = 1  # that claim it: its own, and those of sets that it is in


Forwardings: TypeAlias = Annotated[tuple[Forwarding, ...], Meta(max_length=MAX_NEIGHBOURS)]
Neighbours: TypeAlias = Annotated[tuple[Broker, ...], Meta(max_length=MAX_NEIGHBOURS)]
Lost: TypeAlias = Annotated[str, Meta(max_length=MAX_REASON)]
Wanted: TypeAlias = Annotated[float, Meta(ge=0.0, le=MAX_CANDIDATES)]
Receivers: TypeAlias = Annotated[tuple[Receiver, ...], Meta(max_length=MAX_RECEIVERS)]


class Finding(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one broker knows about one message."""

    published: Rate | None = None  # the fpp of the publisher history that claims it
    routed: Annotated[tuple[Sighting, ...], Meta(max_length=MAX_SIGHTINGS)] = ()
    forwarded: Forwardings | None = None  # None: not recorded, any neighbour may have it
    delivered: Receivers = ()
    candidates: Number = 0  # subscribers that were attached around the time
    more: Number = 0  # receivers left out of `delivered`
    neighbours: Neighbours = ()  # linked at any moment since then
    begins_ms: Number = 0  # the record begins at this time
    forgotten: bool = False  # the broker had a record of the message's time, and retention dropped it
    lost: Lost = ""  # why the record of this time is incomplete; "" when it is whole
    hits: Number = 0  # keys that claim receivers, a set being one; 0: one for each receiver
    tried: Number = 0  # keys that were looked for; 0: one for each candidate
    wanted: Wanted = 0.5  # keys of receivers here for each message of about that time
    sent: Forwardings = ()  # neighbours that a best-effort event was meant for
    repaired: Receivers = ()  # who got it as a repair, whether or not it came to this broker

    def naming(self, most: int) -> Finding:
        """With at most so many receivers."""
        left_out = max(0, len(self.delivered) - most) + max(0, len(self.repaired) - most)
        return msgspec.structs.replace(
            self,
            delivered=self.delivered[:most],
            repaired=self.repaired[:most],
            more=self.more + left_out,
            candidates=max(self.candidates, len(self.delivered[:most]) + self.more + left_out),
        )


class TraceAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    findings: Annotated[tuple[Finding, ...], Meta(max_length=MAX_ITEMS)]
