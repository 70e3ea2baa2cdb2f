"""Subscribers that get the same messages: one key for all of them instead of one each.

Subscriptions that match the same rows are told together, again and again, so most deliveries of a high
fan-out have a set of receivers that was seen before. Such a set gets a name of its own, the attachment map
keeps when it was in use, and a delivery adds the one key (id, set): the bits and the time of one delivery
instead of twenty-five. A set is worth that from its second delivery on; sets that content-based selectors
make up anew for each message stay single keys. (Beyond the paper; it is the routing set of 3.3, for
subscribers.)
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from postroad.tracking.keys import group_tag

MIN_MEMBERS: Final = 4
MAX_GROUPS: Final = 512  # in use
MAX_SEEN: Final = 4096  # sets seen once
_NAMES: Final = msgspec.json.Decoder(tuple[str, ...])

Members = tuple[str, ...]


def group_name(members: Members) -> str:
    return msgspec.json.encode(members).decode()


def group_members(name: str) -> Members:
    return _NAMES.decode(name)


class Groups:
    __slots__ = ("_seen", "_tags")

    def __init__(self) -> None:
        self._tags: OrderedDict[Members, bytes] = OrderedDict()  # in use, least recently used first
        self._seen: OrderedDict[Members, None] = OrderedDict()  # seen once, oldest first

    def __len__(self) -> int:
        return len(self._tags)

    def tag(self, members: Members) -> bytes | None:
        """The tag of a set in use."""
        tag = self._tags.get(members)
        if tag is not None:
            self._tags.move_to_end(members)
        return tag

    def meet(self, members: Members) -> tuple[bool, Members | None]:
        """A set without a tag gets a delivery: whether it has one from now on, and which set loses its."""
        if members not in self._seen:
            self._seen[members] = None
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
            return False, None
        del self._seen[members]
        self._tags[members] = group_tag(group_name(members))
        return True, self._tags.popitem(last=False)[0] if len(self._tags) > MAX_GROUPS else None

    def members(self) -> list[Members]:
        return list(self._tags)
