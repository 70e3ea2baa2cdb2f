"""The turn and the switchboard: who is answered, who handles what, what the next start loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.worlds.turns import Turns

from postroad.errors import BugError, PostroadError, StorageError
from postroad.seam.effects import Note
from postroad.seam.storage import Append, Read, ReadDone, Save, Stored
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn, Unanswered
from postroad.storage.commit import Storage
from postroad.wire.frames import Ack, Query


def read_row(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    return key, value


class Asked:
    """Hears what the disk says."""

    def __init__(self) -> None:
        self.answers: list[PostroadError | ReadDone | None] = []

    def written(self, _turn: Turn, error: PostroadError | None) -> None:
        self.answers.append(error)

    def read(self, _turn: Turn, done: ReadDone) -> None:
        self.answers.append(done)


def test_each_who_asked_the_disk_is_answered_and_nobody_else() -> None:
    turns, one, other = Turns(), Asked(), Asked()
    turns.board.table("t", read_row)
    turn = turns.turn()
    turn.append(1, 0, 5, b"x", then=one.written)
    turn.save("t", ((b"k", b"v"),), then=other.written)
    turn.read(1, 0, 5, 100, then=other.read)
    append, save, read = turn.effects
    assert isinstance(append, Append)
    assert isinstance(save, Save)
    assert isinstance(read, Read)
    turns.written(save)
    assert (one.answers, other.answers) == ([], [None])
    done = ReadDone(tag=read.tag, records=(), missing=(), more=False)
    turns.read(done)
    turns.written(append)
    assert (one.answers, other.answers) == ([None], [None, done])
    assert len(turns.unanswered) == 0


def test_what_failed_is_told_to_who_asked_and_in_the_log() -> None:
    turns, asked = Turns(), Asked()
    turn = turns.turn()
    turn.append(1, 0, 5, b"x", then=asked.written)
    error = StorageError("no room")
    (effect,) = turn.effects
    assert isinstance(effect, Append)
    answered = turns.written(effect, error=error)
    assert asked.answers == [error]
    assert answered.effects == [Note("warning", "nothing is stored: no room")]


def test_nothing_is_saved_that_the_next_start_would_not_load() -> None:
    turns = Turns()
    with pytest.raises(BugError, match="would not load the table 'forgotten'"):
        turns.turn().save("forgotten", ((b"k", b"v"),), then=None)


def test_a_real_start_loads_what_a_room_saved(tmp_path: Path) -> None:
    """The only way to a table's rows is to name it, for real disks and simulated ones."""
    storage = Storage(tmp_path, wake=lambda: None)
    unanswered = Unanswered()
    board = Switchboard(Stored(load=storage.load, streams={}))
    assert board.table("new.table", read_row) == {}
    unanswered.tables = board.named_tables
    turn = Turn(0, unanswered)
    turn.save("new.table", ((b"k", b"v"),), then=None)
    storage.perform([effect for effect in turn.effects if isinstance(effect, Save)])
    storage.close()
    again = Storage(tmp_path, wake=lambda: None)
    assert Switchboard(Stored(load=again.load, streams={})).table("new.table", read_row) == {b"k": b"v"}
    again.close()


def test_nobody_claims_what_another_room_has() -> None:
    board = Switchboard(None)
    board.from_client(Ack, lambda _turn, _peer, _message: None)
    board.from_broker(Query, lambda _turn, _peer, _message: None)
    board.request("echo", lambda _turn, _peer, _request: None)
    board.query("echo", lambda _turn, _broker, _number, _body: None)
    board.datagram(7, lambda _turn, _datagram: None)
    board.table("t", read_row)
    board.status("s", lambda _now_us: 0)
    for claim in (
        lambda: board.from_client(Ack, lambda _turn, _peer, _message: None),
        lambda: board.from_broker(Query, lambda _turn, _peer, _message: None),
        lambda: board.request("echo", lambda _turn, _peer, _request: None),
        lambda: board.query("echo", lambda _turn, _broker, _number, _body: None),
        lambda: board.datagram(7, lambda _turn, _datagram: None),
        lambda: board.table("t", read_row),
        lambda: board.status("s", lambda _now_us: 0),
    ):
        with pytest.raises(BugError):
            claim()


def test_a_request_needs_no_right_that_nobody_checks() -> None:
    board = Turns().board
    with pytest.raises(BugError, match="'operator', which nobody checks"):
        board.request("stop", lambda _turn, _peer, _request: None, needs="operator")
