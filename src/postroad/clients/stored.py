"""How many bytes of durable events each principal has stored at this broker.

What a principal has on a pubend is counted in pieces, each of a sixty-fourth of its quota, with the last tick
of each. A piece is forgotten when the log is chopped beyond that tick: so a principal is told to have up to
one piece of each pubend more than it has, never less. The pieces are saved every ten seconds, and where a
process ends in good order: what was published in the last seconds before a crash is not counted.
"""

from __future__ import annotations

from typing import Final

import msgspec

from postroad.errors import BugError, TooLargeError
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.units import GIB, SECOND_US

TABLE: Final = "quotas.stored"
PIECES: Final = 64  # of a quota
UNLIMITED_PIECE: Final = GIB  # where there is no quota
SAVE_US: Final = 10 * SECOND_US
_PUBEND_BYTES: Final = 8

Pieces = list[tuple[int, int]]  # the last tick and the bytes of each, oldest first


class StoredBytes:
    """`limit_bytes` of each principal; 0: there is none."""

    def __init__(self, board: Switchboard, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._piece_bytes = max(1, limit_bytes // PIECES) if limit_bytes else UNLIMITED_PIECE
        self._pieces: dict[tuple[int, str], Pieces] = {}  # by pubend and principal, none is empty
        self._stored: dict[str, int] = {}  # by principal, the sum of its pieces
        self._changed: dict[tuple[int, str], None] = {}  # whose pieces are to be saved
        self._save_us = 0
        for key, value in board.table(TABLE, read_pieces).items():
            pubend, principal, pieces = read_pieces(key, value)
            self._pieces[pubend, principal] = pieces
            self._count(principal, sum(size for _, size in pieces))

    def of(self, principal: str) -> int:
        return self._stored.get(principal, 0)

    def check_room(self, principal: str, size: int) -> None:
        """TooLargeError if this principal may not store so much more. Anonymous ones ("") are told apart from
        nobody: where all are, each may fill the disk, and half of it for all of them would be no help."""
        stored = self.of(principal)
        if principal and self._limit_bytes and stored + size > self._limit_bytes:
            raise TooLargeError(
                f"{principal} has {stored} bytes of durable events at this broker, at most"
                f" {self._limit_bytes} are allowed: those go that subscribers have acknowledged and that are"
                " old enough"
            )

    def add(self, principal: str, pubend: int, tick: int, size: int) -> None:
        """Events up to this tick are on disk."""
        pieces = self._pieces.setdefault((pubend, principal), [])
        if pieces and pieces[-1][1] < self._piece_bytes:
            pieces[-1] = (tick, pieces[-1][1] + size)
        else:
            pieces.append((tick, size))
        self._count(principal, size)
        self._changed[pubend, principal] = None

    def released(self, floors: dict[int, int]) -> None:
        """What each pubend's log has up to its floor is gone; it has no pubend but these."""
        for (pubend, principal), pieces in list(self._pieces.items()):
            floor = floors.get(pubend)
            kept = [] if floor is None else [piece for piece in pieces if piece[0] > floor]
            if len(kept) == len(pieces):
                continue
            self._count(principal, sum(size for _, size in kept) - sum(size for _, size in pieces))
            self._changed[pubend, principal] = None
            if kept:
                self._pieces[pubend, principal] = kept
            else:
                del self._pieces[pubend, principal]

    def _count(self, principal: str, size: int) -> None:
        stored = self._stored.pop(principal, 0) + size
        if stored:
            self._stored[principal] = stored

    # ---- saving

    def save(self, turn: Turn, *, now: bool = False) -> None:
        """What changed, every ten seconds. What could not be saved is saved with the next change."""
        if not self._changed or (turn.now_us < self._save_us and not now):
            return
        self._save_us = turn.now_us + SAVE_US
        rows = []
        for pubend, principal in self._changed:
            pieces = self._pieces.get((pubend, principal))
            value = None if pieces is None else msgspec.msgpack.encode(pieces)
            rows.append((pubend.to_bytes(_PUBEND_BYTES, "big") + principal.encode(), value))
        self._changed.clear()
        turn.save(TABLE, rows, then=None)

    # ---- inspection

    def metrics(self) -> dict[str, int]:
        return {
            "quota_stored_bytes": sum(self._stored.values()),
            "quota_stored_bytes_most": max(self._stored.values(), default=0),
        }

    def status(self) -> dict[str, int]:
        most = max(self._stored.values(), default=0)
        return {"stored_bytes_allowed": self._limit_bytes, "stored_bytes_most": most}

    def check(self) -> None:
        sums: dict[str, int] = {}
        for (_, principal), pieces in self._pieces.items():
            sums[principal] = sums.get(principal, 0) + sum(size for _, size in pieces)
            if not pieces or pieces != sorted(pieces):
                raise BugError(f"stored bytes of {principal!r} are not in order")
        if sums != self._stored:
            raise BugError("stored bytes are miscounted")


def read_pieces(key: bytes, value: bytes) -> tuple[int, str, Pieces]:
    pieces = msgspec.msgpack.decode(value, type=Pieces)
    return int.from_bytes(key[:_PUBEND_BYTES], "big"), key[_PUBEND_BYTES:].decode(), pieces
