"""The links of one broker without a broker: each call is a turn of its own, whose effects are returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.worlds.turns import Turns

from postroad.errors import PostroadError
from postroad.ids import Identity
from postroad.links.access import AuthConfig
from postroad.links.links import Links, LinkSettings
from postroad.seam.effects import Effect
from postroad.seam.peers import Peer
from postroad.wire.frames import DEFAULT_LIMITS, Message


class LinksAlone:
    def __init__(
        self,
        me: Identity,
        *,
        settings: LinkSettings | None = None,
        auth: AuthConfig | None = None,
        draw: Callable[[int], int],
        new_publisher: Callable[[], int] = lambda: 1,
        conflict: Callable[[int, bytes], bool] = lambda _number, _node: False,
    ) -> None:
        self._turns = Turns()
        self.links = Links(
            self._turns.board,
            me=me,
            limits=DEFAULT_LIMITS,
            settings=settings or LinkSettings(),
            auth=auth or AuthConfig(),
            new_publisher=new_publisher,
            draw=draw,
            conflict=conflict,
        )

    def __getattr__(self, name: str) -> Any:
        """What needs no turn."""
        return getattr(self.links, name)

    def status(self, now_us: int) -> dict[str, Any]:
        return {key: fact(now_us, None) for key, fact in self._turns.board.facts.items()}

    def opened(
        self,
        connection: int,
        *,
        dialled: str | None = None,
        certificate: str | None = None,
        loopback: bool = True,
        now_us: int,
    ) -> list[Effect]:
        turn = self._turns.turn(now_us)
        self.links.opened(turn, connection, dialled=dialled, certificate=certificate, loopback=loopback)
        return turn.effects

    def received(
        self, connection: int, message: Message, now_us: int
    ) -> tuple[list[Effect], Peer | None, bool]:
        turn = self._turns.turn(now_us)
        peer, own = self.links.received(turn, connection, message)
        return turn.effects, peer, own

    def closed(self, connection: int, now_us: int) -> Peer | None:
        return self.links.closed(self._turns.turn(now_us), connection)

    def dial_failed(self, address: str, now_us: int) -> None:
        self.links.dial_failed(self._turns.turn(now_us), address)

    def refuse(self, connection: int, error: PostroadError) -> list[Effect]:
        turn = self._turns.turn()
        self.links.refuse(turn, connection, error)
        return turn.effects

    def undial(self, address: str) -> bool:
        return self.links.undial(address)

    def consumed(self, connection: int, size: int) -> list[Effect]:
        turn = self._turns.turn()
        self.links.consumed(turn, connection, size)
        return turn.effects

    def tick(self, now_us: int) -> list[Effect]:
        turn = self._turns.turn(now_us)
        self.links.tick(turn)
        return turn.effects
