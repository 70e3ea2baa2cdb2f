"""Turns for rooms that are tested without a broker, and a disk that answers what they ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from postroad.errors import PostroadError
from postroad.seam.effects import Effect
from postroad.seam.peers import Peer, Role
from postroad.seam.storage import (
    Append,
    Appended,
    AppendFailed,
    LogStream,
    ReadDone,
    Reader,
    Save,
    Saved,
    SaveFailed,
    Stored,
    StreamEnd,
)
from postroad.seam.switchboard import Switchboard
from postroad.seam.tracking import FiltersRead, ReadFilters
from postroad.seam.turn import Turn, Unanswered
from postroad.wire.frames import DEFAULT_LIMITS

Tables = Mapping[str, Mapping[bytes, bytes]]


class Turns:
    """Makes the turns of one room; what it asks of the disk is answered with `answer`."""

    def __init__(
        self, tables: Tables | None = None, streams: Mapping[LogStream, StreamEnd] | None = None
    ) -> None:
        self.tables: Tables = tables or {}
        self.board = Switchboard(Stored(load=self._load, streams=streams or {}))
        self.unanswered = Unanswered()
        self.unanswered.tables = self.board.named_tables

    def _load(self, table: str, reader: Reader) -> Mapping[bytes, bytes]:
        rows = dict(self.tables.get(table, {}))
        for key, value in rows.items():
            reader(key, value)
        return rows

    def turn(self, now_us: int = 0, *, busy: bool = False) -> Turn:
        return Turn(now_us, self.unanswered, busy=busy)

    def effects(self, act: Callable[..., object], *arguments: object, now_us: int = 0) -> list[Effect]:
        """What a room asks for when it does this, in a turn of its own."""
        turn = self.turn(now_us)
        act(turn, *arguments)
        return turn.effects

    def written(self, effect: Append | Save, now_us: int = 0, error: PostroadError | None = None) -> Turn:
        """The turn in which the disk says that it is there, or that it failed."""
        turn = self.turn(now_us)
        if isinstance(effect, Append):
            done = Appended(tag=effect.tag) if error is None else AppendFailed(tag=effect.tag, error=error)
            self.unanswered.answer(turn, done)
        else:
            saved = Saved(tag=effect.tag) if error is None else SaveFailed(tag=effect.tag, error=error)
            self.unanswered.answer(turn, saved)
        return turn

    def read(self, done: ReadDone, now_us: int = 0) -> Turn:
        """The turn in which the disk answers a read."""
        turn = self.turn(now_us)
        self.unanswered.answer(turn, done)
        return turn

    def filters_read(self, effect: ReadFilters, records: Mapping[int, bytes], now_us: int = 0) -> Turn:
        """The turn in which the tracking store answers; what is not among the records cannot be read."""
        turn = self.turn(now_us)
        found = {sequence: records.get(sequence, b"") for sequence in effect.sequences}
        self.unanswered.answer(turn, FiltersRead(tag=effect.tag, records=found))
        return turn

    def all_written(self, effects: list[Effect], now_us: int = 0) -> list[Effect]:
        """The disk does all of these; what that leads to is done as well, and all of it is returned."""
        out: list[Effect] = []
        waiting = list(effects)
        while waiting:
            effect = waiting.pop(0)
            out.append(effect)
            if isinstance(effect, Append | Save):
                waiting += self.written(effect, now_us).effects
        return out


def peer(connection: int, role: Role = "client", *, broker: int = 0, publisher: int = 0) -> Peer:
    """The other end of a connection that is up."""
    return Peer(
        connection=connection,
        role=role,
        name=f"{role}{connection}",
        broker=broker,
        node=broker.to_bytes(16, "big"),
        boot=1,
        cost=1,
        publisher=publisher,
        principal="",
        limits=DEFAULT_LIMITS,
        dialled=None,
    )
