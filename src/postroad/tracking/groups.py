"""Subscribers that get the same messages: one key for all of them instead of one each.

Subscriptions that match the same rows are told together, again and again, so most deliveries of a high
fan-out have a set of receivers that was seen before. Such a set gets a name of its own, the attachment map
keeps when it was in use, and a delivery adds the one key (id, set): the bits and the time of one delivery
instead of twenty-five. A set is worth that from its second delivery on; sets that content-based selectors
make up anew for each message stay single keys. (Beyond the paper; it is the routing set of 3.3, for
subscribers.)

Names are long, and each subscriber that comes or goes makes a new set. So the more of the attachment map is
taken by names of sets, the more deliveries must a set have had: `worth`. A change of the map is told in one
piece, so a set whose names do not fit one is several sets: `fitting`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from postroad.tracking.keys import group_tag

MIN_MEMBERS: Final = 4
MAX_GROUPS: Final = 512  # in use
MAX_NAMES_BYTES: Final = 4 << 20  # of the names of those in use, or one
MAX_SEEN: Final = 4096  # sets seen and not in use
MAX_SEEN_MEMBERS: Final = 1 << 18  # of all of them
NAMED_BYTES: Final = 512 << 10  # of names of sets, for which twice the deliveries are wanted
_NAMES: Final = msgspec.json.Decoder(tuple[str, ...])

Members = tuple[str, ...]


def group_name(members: Members) -> str:
    return msgspec.json.encode(members).decode()


def group_members(name: str) -> Members:
    return _NAMES.decode(name)


def fitting(members: Members, name_bytes: int) -> list[Members]:
    """These as sets whose names have at most so many bytes, or that are too small for one. As one if they
    were so many that they would push each other out of use."""
    size = len(msgspec.json.encode(members))
    if size > min(MAX_NAMES_BYTES // 2, name_bytes * MAX_GROUPS // 4):
        return [members]
    return _halved(members, size, name_bytes)


def _halved(members: Members, size: int, name_bytes: int) -> list[Members]:
    if size <= name_bytes or len(members) < MIN_MEMBERS:
        return [members]
    half = len(members) // 2
    parts = (members[:half], members[half:])
    return [piece for part in parts for piece in _halved(part, len(msgspec.json.encode(part)), name_bytes)]


def worth(named_bytes: int) -> int:
    """The delivery at which a set gets a name, where sets have names of so many bytes."""
    return 2 << min(30, named_bytes // NAMED_BYTES)


class Groups:
    __slots__ = ("_bytes", "_members", "_seen", "_tags")

    def __init__(self) -> None:
        self._tags: OrderedDict[Members, bytes] = OrderedDict()  # in use, least recently used first
        self._seen: OrderedDict[Members, int] = OrderedDict()  # how often, least recently seen first
        self._members = 0  # of those seen
        self._bytes = 0  # of the names of those in use

    def __len__(self) -> int:
        return len(self._tags)

    def tag(self, members: Members) -> bytes | None:
        """The tag of a set in use."""
        tag = self._tags.get(members)
        if tag is not None:
            self._tags.move_to_end(members)
        return tag

    def meet(self, members: Members, worth: int = 2) -> tuple[bool, list[Members]]:
        """A set without a tag gets a delivery: whether it has one from now on, and which sets lose theirs."""
        seen = self._seen.pop(members, 0)
        self._members -= len(members) if seen else 0
        if seen + 1 < worth:
            self._seen[members] = seen + 1
            self._members += len(members)
            while len(self._seen) > MAX_SEEN or self._members > MAX_SEEN_MEMBERS:
                self._members -= len(self._seen.popitem(last=False)[0])
            return False, []
        name = group_name(members)
        self._tags[members] = group_tag(name)
        self._bytes += len(name)
        ended: list[Members] = []
        while len(self._tags) > MAX_GROUPS or (self._bytes > MAX_NAMES_BYTES and len(self._tags) > 1):
            ended.append(self._tags.popitem(last=False)[0])
            self._bytes -= len(group_name(ended[-1]))
        return True, ended

    def members(self) -> list[Members]:
        return list(self._tags)
