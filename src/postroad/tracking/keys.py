"""What a filter is about, and the 16-byte keys that go into it (spec T4; paper 3.2 and 3.3).

| kind | keys | the paper's |
|---|---|---|
| publish | id | publisher history Hp |
| routing, per origin and neighbour it came from | id | routing history Hb |
| forwarding, per origin and neighbour it went to | id | Hb,d, the first optimisation of 3.3 |
| forwarding, per origin | id with the set of neighbours | the D-bit routing set, the second |
| delivery, per origin | id with the subscriber, or with a set of them (`groups`) | all Hb,s in one |
| delivery, per origin and subscriber | id with the subscriber | subscriber history Hb,s |
| datagram, per origin and neighbour it was meant for | id | none: best-effort events, which may be lost |
| repair | id with the subscriber | none: who got a best-effort event as a repair |
| log | none: the exact strategy's records | |

A broker has one parent for an origin at a time, so routing histories with the neighbour in their name are as
few and as full as without it, and tell where the message came from.

"id with X" is the id XOR a 128-bit tag of X (BLAKE2b), as long as an id, so the kernel's filters take it as
it is. A set's tag is the XOR of its members' tags: no neighbour needs a number that must last for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import msgspec
import numpy as np

from postroad.ids import ID_BYTES

PUBLISH: Final = "publish"
ROUTING: Final = "routing"
FORWARDING: Final = "forwarding"
DELIVERY: Final = "delivery"
DATAGRAM: Final = "datagram"
REPAIR: Final = "repair"
LOG: Final = "log"
ENTRY: Final = np.dtype([("id", "V16"), ("what", "<u4")])  # of the log; `what` numbers its happenings:
PUBLISHED: Final = "published"
ROUTED: Final = "routed"
FORWARDED: Final = "forwarded"
DELIVERED: Final = "delivered"
SENT: Final = "sent"
REPAIRED: Final = "repaired"
_FEW: Final = 16 * ID_BYTES  # up to this, one long integer is quicker than numpy
NO_TAG: Final = bytes(ID_BYTES)


class HistoryKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The name of one history of one broker."""

    kind: str
    origin: int = 0
    neighbour: int = 0  # routing: where it came from; forwarding: where it went to, 0 for the set
    subscriber: str = ""  # delivery: "" for all


def subscriber_tag(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=ID_BYTES, person=b"subscriber").digest()


def group_tag(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=ID_BYTES, person=b"group").digest()


def neighbour_tag(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "little"), digest_size=ID_BYTES, person=b"neighbour").digest()


def set_tag(neighbours: Sequence[int]) -> bytes:
    value = 0
    for number in neighbours:
        value ^= int.from_bytes(neighbour_tag(number), "big")
    return value.to_bytes(ID_BYTES, "big")


def paired(ids: bytes, tags: bytes | bytearray) -> bytes:
    """Every id with the tag beside it."""
    if len(ids) <= _FEW:
        size = len(ids)
        return (int.from_bytes(ids, "big") ^ int.from_bytes(tags, "big")).to_bytes(size, "big")
    return (np.frombuffer(ids, np.uint64) ^ np.frombuffer(tags, np.uint64)).tobytes()


def tagged(ids: bytes, tags: bytes) -> bytes:
    """Every id with every tag: keys, tag by tag."""
    if len(ids) == len(tags) == ID_BYTES:
        return (int.from_bytes(ids, "big") ^ int.from_bytes(tags, "big")).to_bytes(ID_BYTES, "big")
    rows = np.frombuffer(ids, np.uint64).reshape(1, -1, 2)
    return (np.frombuffer(tags, np.uint64).reshape(-1, 1, 2) ^ rows).tobytes()
