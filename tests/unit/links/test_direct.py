"""Direct peers alone, over the links of one broker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.worlds.turns import Turns, peer

from postroad.errors import RedundantError
from postroad.links import direct
from postroad.links.direct import MAX_WAITING_BYTES, RETRY_US, DirectPeers
from postroad.seam.effects import Send
from postroad.seam.peers import Peer
from postroad.seam.turn import Turn
from postroad.wire.frames import Direct, decode

ROOM = "room"


class Windows:
    """Stands for `Links`: dials go nowhere, and each connection has a window of its own."""

    def __init__(self) -> None:
        self.credit: dict[int, int] = {}
        self.refused: list[int] = []
        self.dialled: list[int] = []
        self.failed: list[Callable[[Turn, int], None]] = []  # of each dial

    def dial_directly(
        self, _turn: Turn, broker: int, _address: str, failed: Callable[[Turn, int], None]
    ) -> None:
        self.dialled.append(broker)
        self.failed.append(failed)

    def available(self, connection: int) -> int:
        return self.credit.get(connection, 1 << 20)

    def spend(self, connection: int, size: int) -> bool:
        if self.available(connection) <= 0:
            return False
        self.credit[connection] = self.available(connection) - size
        return True

    def refuse(self, _turn: Turn, connection: int, error: Exception) -> None:
        assert isinstance(error, RedundantError)
        self.refused.append(connection)


class World:
    def __init__(self) -> None:
        self.turns = Turns()
        self.links = Windows()
        self.unreached: list[int] = []
        self.interrupted: list[int] = []
        self.heard: list[bytes] = []
        self.direct = DirectPeers(
            self.turns.board,
            links=self.links,  # type: ignore[arg-type]
            address_of=lambda broker: f"127.0.0.1:{broker}",
        )
        self.turns.board.from_direct(
            ROOM,
            lambda _turn, _peer, body: self.heard.append(body),
            lambda _turn, broker: self.unreached.append(broker),
            lambda _turn, broker: self.interrupted.append(broker),
        )

    def up(self, arrived: Peer) -> list[tuple[int, bytes]]:
        return self._sent(self.turns.board.came_up["direct"][0], arrived)

    def down(self, gone: Peer) -> list[tuple[int, bytes]]:
        return self._sent(self.turns.board.went_down["direct"][0], gone)

    def say(self, broker: int, body: bytes) -> list[tuple[int, bytes]]:
        return self._sent(self.direct.send, broker, ROOM, body)

    def _sent(self, act: object, *arguments: object) -> list[tuple[int, bytes]]:
        effects = self.turns.effects(act, *arguments)  # type: ignore[arg-type]
        self.direct.check()
        sends = [effect for effect in effects if isinstance(effect, Send)]
        messages = [(effect.connection, decode(effect.data)) for effect in sends]
        return [(connection, message.body) for connection, message in messages if isinstance(message, Direct)]


def test_a_broker_speaks_over_the_newest_connection_and_closes_those_of_an_earlier_start() -> None:
    """A peer that died in silence and came back would else be spoken to over its dead connection."""
    world = World()
    world.up(peer(5, "direct", broker=2))
    world.up(peer(6, "direct", broker=2))
    assert world.say(2, b"a") == [(6, b"a")]
    assert world.links.refused == []
    world.up(replace(peer(7, "direct", broker=2), boot=2))
    assert world.links.refused == [5, 6]
    assert world.unreached == [2], "what was said to the process before is lost, and what it had is gone"
    assert world.say(2, b"b") == [(7, b"b")]


def test_the_loss_of_the_connection_in_use_is_told_and_that_of_another_is_not() -> None:
    world = World()
    older, newer = peer(5, "direct", broker=2), peer(6, "direct", broker=2)
    world.up(older)
    world.up(newer)
    world.down(older)
    assert (world.interrupted, world.unreached) == ([], [])
    world.up(older)
    world.down(older)
    assert (world.interrupted, world.unreached) == ([2], [])
    world.down(newer)
    assert (world.interrupted, world.unreached) == ([2], [2])


def test_a_peer_without_credit_is_waited_for_within_a_bound() -> None:
    world = World()
    world.up(peer(5, "direct", broker=2))
    world.links.credit[5] = 1
    assert world.say(2, b"a") == [(5, b"a")]  # a frame may overdraw the window once
    assert world.say(2, b"b") == world.say(2, b"c") == []
    refused = world.turns.turn()
    assert not world.direct.send(refused, 2, ROOM, bytes(MAX_WAITING_BYTES - 40))
    world.links.credit[5] = 100
    assert world._sent(world.direct.credit, 2) == [(5, b"b"), (5, b"c")]


def test_those_who_dialled_us_take_no_place_of_those_we_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MAX_PEERS", 2)
    world = World()
    for broker in range(10, 15):
        world.up(peer(broker, "direct", broker=broker))
    turn = world.turns.turn()
    assert [world.direct.send(turn, broker, ROOM, b"x") for broker in (2, 3, 4)] == [True, True, False]
    assert world.links.dialled == [2, 3]


def test_a_dial_that_fails_is_told_at_once_and_not_repeated_without_pause() -> None:
    world = World()
    assert world.direct.send(world.turns.turn(), 2, ROOM, b"x")
    world.links.failed[0](world.turns.turn(), 2)
    assert world.unreached == [2]
    assert not world.direct.send(world.turns.turn(RETRY_US - 1), 2, ROOM, b"x")
    later = world.turns.turn(RETRY_US)
    world.direct.tick(later)
    assert world.direct.send(later, 2, ROOM, b"x")
    assert world.links.dialled == [2, 2]


def test_a_dial_that_fails_while_the_other_dialled_us_is_told_to_nobody() -> None:
    world = World()
    world.direct.send(world.turns.turn(), 2, ROOM, b"x")
    assert world.up(peer(5, "direct", broker=2)) == [(5, b"x")]
    world.links.failed[0](world.turns.turn(), 2)
    assert world.unreached == []
    assert world.say(2, b"y") == [(5, b"y")]


def test_a_room_that_is_not_here_closes_nothing() -> None:
    """A broker of a later version may have it; the rooms that both have go on."""
    world = World()
    other = peer(5, "direct", broker=2)
    world.up(other)
    turn = world.turns.turn()
    world.turns.board.direct[Direct](turn, other, Direct(room="later", body=b""))
    world.turns.board.direct[Direct](turn, other, Direct(room=ROOM, body=b"hello"))
    assert (world.heard, turn.effects) == ([b"hello"], [])
    assert world.turns.board.figures[0]()["direct_unknown_rooms_total"] == 1
