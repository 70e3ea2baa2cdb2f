"""Retiring a broker that never comes back, so that nothing is kept for it any more.

An administrator asks any broker; that one asks every other broker it can reach, and says who has done it.
Each forgets what the retired one reported on its pubends, and the durable names it claimed, which are those
of whoever had them before, and remembers that nobody is to wait for its own pubends. Brokers that are away
are named: for them it is to be asked again when they are back. A retired broker that comes back after all is
an owner again as soon as it reports, its subscribers get gaps for what was released meanwhile, and its
pubends and claims count again.

A broker says that it has done it when that is on its disk: else a crash would undo what an administrator
was told. It is saved with the end of a turn, behind what other rooms save of what they forgot. One of them
may hold that back until an earlier save of its own is answered; so once all that was asked for by then is on
disk, it is saved a second time, and then it is done. A broker whose disk refuses is named with those that
are away.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from postroad.errors import BugError, PostroadError, UnavailableError, UsageError
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.topology import MAX_BROKERS, Topology
from postroad.seam.peers import Peer
from postroad.seam.replies import reply
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.units import SECOND_US
from postroad.wire.frames import Request

_U32: Final = struct.Struct(">I")
TABLE: Final = "retired"  # number of a retired broker -> nothing
RETIRE: Final = "retire"
RETIRE_US: Final = 5 * SECOND_US  # others have this long to answer
MAX_UNDER_WAY: Final = 64
MAX_RETIRED: Final = MAX_BROKERS
_DONE: Final = b"\x01"

Done = Callable[[Turn, bool], None]  # whether it is on disk


@dataclass(frozen=True, slots=True)
class _Unsaved:
    broker: int
    done: Done


@dataclass(slots=True)
class _Retirement:
    connection: int
    number: int
    broker: int
    deadline: int
    waiting: dict[int, None]  # brokers that have not answered
    done: list[int] = field(default_factory=list)


class Retiring:
    """`forget(broker)` drops what is kept here for it, `restored(broker)`: it is back.

    To be made after the rooms that these concern, since it is to save behind them.
    """

    def __init__(
        self,
        board: Switchboard,
        *,
        me: int,
        topology: Topology,
        inquiries: Inquiries,
        forget: Callable[[Turn, int], None],
        restored: Callable[[Turn, int], None],
    ) -> None:
        self._me = me
        self._topology = topology
        self._inquiries = inquiries
        self._forget = forget
        self._restored = restored
        self._has_disk = board.has_disk
        rows = board.table(TABLE, read_retired)
        self._retired = dict.fromkeys(read_retired(key, value) for key, value in rows.items())
        self._seen = 0  # generation of the topology in which the retired ones were looked for
        self._under_way: list[_Retirement] = []
        self._unsaved: list[_Unsaved] = []  # retired in this turn
        self._saved_once: list[_Unsaved] = []  # to be saved a second time
        self._unrestored: list[int] = []  # back again, which the disk refused to note
        self._restore_us = 0  # when that is tried again
        board.request("subs.retire", self._request, needs="admin")
        board.query(RETIRE, self._asked)
        board.peers("client", down=self._closed)

    def _request(self, turn: Turn, peer: Peer, request: Request) -> None:
        """UsageError or UnavailableError if it cannot be; else it is answered when all have done it."""
        broker = self._find(request.arguments.get("broker", ""))
        if len(self._under_way) >= MAX_UNDER_WAY:
            raise UnavailableError(f"{MAX_UNDER_WAY} brokers are being retired: try again")
        retirement = _Retirement(
            peer.connection, request.number, broker, turn.now_us + RETIRE_US, {self._me: None}
        )

        def answered(other: int, turn: Turn, body: bytes) -> None:
            self._answered(turn, retirement, other, body == _DONE)

        for other in self._topology.reachable():
            if other != self._me:
                retirement.waiting[other] = None
                question = broker.to_bytes(4, "big")
                self._inquiries.ask(turn, other, RETIRE, question, partial(answered, other))
        self._under_way.append(retirement)
        self._retire(turn, broker, lambda turn, done: self._answered(turn, retirement, self._me, done))

    def _answered(self, turn: Turn, retirement: _Retirement, broker: int, done: bool) -> None:
        if retirement.waiting.pop(broker, broker) is None and done:
            retirement.done.append(broker)
        self._settle(turn)

    def _find(self, text: str) -> int:
        """A broker by its name, or by its number if the name is not known any more."""
        named = [number for number, name in self._topology.names().items() if name == text]
        if len(named) > 1:
            numbers = ", ".join(f"{number:08x}" for number in sorted(named))
            raise UsageError(f"several brokers are called {text!r}: give a number, {numbers}")
        if named:
            broker = named[0]
        elif len(text) == 8 and all(digit in "0123456789abcdef" for digit in text):
            broker = int(text, 16)
        else:
            raise UsageError(
                f"no broker {text!r} is known: give its name, or its number from `postroad status --json`"
            )
        if broker in self._topology.reachable():
            raise UsageError(f"broker {text!r} is there: delete its durable subscriptions instead")
        return broker

    def _asked(self, turn: Turn, broker: int, number: int, body: bytes) -> None:
        retired = int.from_bytes(body[:4], "big")
        if len(body) != 4 or retired in self._topology.reachable():
            return

        def respond(turn: Turn, done: bool) -> None:
            if done:
                self._inquiries.respond(turn, broker, number, _DONE)

        self._retire(turn, retired, respond)

    def _retire(self, turn: Turn, broker: int, done: Done) -> None:
        self._forget(turn, broker)
        self._retired[broker] = None
        if len(self._retired) > MAX_RETIRED:
            self._restore(turn, [next(iter(self._retired))])
        self._unsaved.append(_Unsaved(broker, done))

    def _restore(self, turn: Turn, brokers: list[int]) -> None:
        """These brokers do not count as retired any more. A restart that finds the row of one would ignore
        its claims until it speaks, so this broker repeats a save that fails."""
        for broker in brokers:
            self._retired.pop(broker, None)
        if brokers and self._has_disk:
            rows = [(_U32.pack(broker), None) for broker in brokers]
            turn.save(TABLE, rows, then=partial(self._on_restore, brokers))

    def _on_restore(self, brokers: list[int], turn: Turn, error: PostroadError | None) -> None:
        if error is not None:
            self._unrestored += brokers
            self._restore_us = turn.now_us + SECOND_US

    def _save(self, turn: Turn) -> None:
        """Save the retired brokers that are not on disk yet, without those that came back meanwhile."""
        unsaved, self._unsaved = self._unsaved, []
        saved_once, self._saved_once = self._saved_once, []
        rows = [(_U32.pack(row.broker), b"") for row in unsaved + saved_once if row.broker in self._retired]
        if self._has_disk and rows:
            turn.save(TABLE, rows, then=partial(self._on_save, unsaved, saved_once))
        else:
            for row in unsaved + saved_once:
                row.done(turn, row.broker in self._retired)

    def _on_save(
        self, unsaved: list[_Unsaved], saved_once: list[_Unsaved], turn: Turn, error: PostroadError | None
    ) -> None:
        if error is None:
            self._saved_once += unsaved
        for row in saved_once if error is None else unsaved + saved_once:
            row.done(turn, error is None)

    def gone(self, broker: int) -> bool:
        """Nobody is to wait for this one."""
        return broker in self._retired and self._topology.distance(broker) is None

    def _closed(self, _turn: Turn, peer: Peer) -> None:
        """Nobody waits for the answer; it is done all the same."""
        self._under_way = [
            retirement for retirement in self._under_way if retirement.connection != peer.connection
        ]

    def tick(self, turn: Turn) -> None:
        self._save(turn)
        if self._unrestored and self._restore_us <= turn.now_us:
            unrestored, self._unrestored = self._unrestored, []
            self._restore(turn, [broker for broker in unrestored if broker not in self._retired])
        for retirement in self._under_way:
            if retirement.deadline <= turn.now_us:
                retirement.waiting.clear()
        self._settle(turn)
        self._look_for_retired(turn)

    def _look_for_retired(self, turn: Turn) -> None:
        if self._seen == self._topology.generation:
            return
        self._seen = self._topology.generation
        back = [broker for broker in self._retired if self._topology.distance(broker) is not None]
        self._restore(turn, back)
        for broker in back:
            self._restored(turn, broker)

    def _settle(self, turn: Turn) -> None:
        for retirement in [retirement for retirement in self._under_way if not retirement.waiting]:
            self._under_way.remove(retirement)
            names = self._topology.names()
            missing = sorted(
                name for number, name in names.items() if number not in (*retirement.done, retirement.broker)
            )
            body = {
                "retired": self._topology.name(retirement.broker),
                "done": sorted(self._topology.name(number) for number in retirement.done),
                "missing": missing,
            }
            reply(turn, retirement.connection, retirement.number, body)

    def next_deadline(self) -> int | None:
        deadlines = [retirement.deadline for retirement in self._under_way]
        return min([*deadlines, self._restore_us] if self._unrestored else deadlines, default=None)

    def check(self) -> None:
        if len(self._under_way) > MAX_UNDER_WAY:
            raise BugError("retiring: more than may be are under way")
        if self._unsaved or self._saved_once or not all(retirement.waiting for retirement in self._under_way):
            raise BugError("retiring: a turn ended before what was retired in it was saved or answered")


def read_retired(key: bytes, _value: bytes) -> int:
    (broker,) = _U32.unpack(key)
    return int(broker)
