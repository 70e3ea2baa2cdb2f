"""Retiring a broker that never comes back, so that nothing is kept for it any more.

An administrator asks any broker; that one asks every other broker it can reach, and says who has done it.
Each forgets what the retired one reported on its pubends, and the durable names it claimed, which are those
of whoever had them before, and remembers that nobody is to wait for its own pubends. Brokers that are away
are named: for them it is to be asked again when they are back. A retired broker that comes back after all is
an owner again as soon as it reports, its subscribers get gaps for what was released meanwhile, and its
pubends and claims count again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from postroad.errors import UnavailableError, UsageError
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.topology import MAX_BROKERS, Topology
from postroad.seam.effects import Effect, Send
from postroad.seam.storage import Save
from postroad.units import SECOND_US
from postroad.wire.frames import Reply, Request, encode, json_within_frame

_U32: Final = struct.Struct(">I")
TABLE: Final = "retired"  # number of a retired broker -> nothing
RETIRE: Final = "retire"
RETIRE_US: Final = 5 * SECOND_US  # others have this long to answer
MAX_UNDER_WAY: Final = 64
MAX_RETIRED: Final = MAX_BROKERS
_DONE: Final = b"\x01"


@dataclass(slots=True)
class _Retirement:
    connection: int
    number: int
    broker: int
    deadline: int
    waiting: dict[int, None]  # brokers that have not answered
    done: list[int] = field(default_factory=list)


class Retiring:
    """`forget(broker)` drops what is kept here for it, `restored(broker)`: it is back. `rows`: of `TABLE`;
    `new_tag`: None without a disk."""

    def __init__(
        self,
        *,
        me: int,
        topology: Topology,
        inquiries: Inquiries,
        forget: Callable[[int], None],
        restored: Callable[[int], list[Effect]],
        rows: Mapping[bytes, bytes],
        new_tag: Callable[[], int] | None,
    ) -> None:
        self._me = me
        self._topology = topology
        self._inquiries = inquiries
        self._forget = forget
        self._restored = restored
        self._new_tag = new_tag
        self._retired = dict.fromkeys(read_retired(key, value) for key, value in rows.items())
        self._seen = 0  # generation of the topology in which the retired ones were looked for
        self._under_way: list[_Retirement] = []
        inquiries.serve(RETIRE, self._asked)

    def request(self, connection: int, message: Request, now_us: int) -> list[Effect]:
        """UsageError or UnavailableError if it cannot be; else it is answered when all have done it."""
        broker = self._find(message.arguments.get("broker", ""))
        if len(self._under_way) >= MAX_UNDER_WAY:
            raise UnavailableError(f"{MAX_UNDER_WAY} brokers are being retired: try again")
        out = self._retire(broker)
        one = _Retirement(connection, message.number, broker, now_us + RETIRE_US, {}, [self._me])

        def asked(other: int) -> list[Effect]:
            def answered(body: bytes, _now_us: int) -> list[Effect]:
                if one.waiting.pop(other, other) is None and body == _DONE:
                    one.done.append(other)
                return self._settle()

            return self._inquiries.ask(other, RETIRE, broker.to_bytes(4, "big"), answered) or []

        for other in self._topology.reachable():
            if other != self._me:
                one.waiting[other] = None
                out += asked(other)
        self._under_way.append(one)
        return out + self._settle()

    def _find(self, text: str) -> int:
        """A broker by its name, or by its number if the name is not known any more."""
        named = [number for number, name in self._topology.names().items() if name == text]
        if len(named) > 1:
            numbers = ", ".join(f"{number:08x}" for number in sorted(named))
            raise UsageError(f"several brokers are called {text!r}: give a number, {numbers}")
        if named:
            broker = named[0]
        elif len(text) == 8 and all(one in "0123456789abcdef" for one in text):
            broker = int(text, 16)
        else:
            raise UsageError(
                f"no broker {text!r} is known: give its name, or its number from `postroad status --json`"
            )
        if broker in self._topology.reachable():
            raise UsageError(f"broker {text!r} is there: delete its durable subscriptions instead")
        return broker

    def _asked(self, broker: int, number: int, body: bytes, _now_us: int) -> list[Effect]:
        retired = int.from_bytes(body[:4], "big")
        if len(body) != 4 or retired in self._topology.reachable():
            return []
        return self._retire(retired) + self._inquiries.respond(broker, number, _DONE)

    def _retire(self, broker: int) -> list[Effect]:
        self._forget(broker)
        self._retired[broker] = None
        oldest = [next(iter(self._retired))] if len(self._retired) > MAX_RETIRED else []
        return [*self._restore(oldest), *self._save(broker, b"")]

    def _restore(self, brokers: list[int]) -> list[Effect]:
        """These do not count as retired any more."""
        out: list[Effect] = []
        for one in brokers:
            del self._retired[one]
            out += self._save(one, None)
        return out

    def _save(self, broker: int, value: bytes | None) -> list[Effect]:
        if self._new_tag is None:
            return []
        return [Save(table=TABLE, rows=((broker.to_bytes(4, "big"), value),), tag=self._new_tag())]

    def gone(self, broker: int) -> bool:
        """Nobody is to wait for this one."""
        return broker in self._retired and self._topology.distance(broker) is None

    def closed(self, connection: int) -> None:
        """Nobody waits for the answer; it is done all the same."""
        self._under_way = [one for one in self._under_way if one.connection != connection]

    def tick(self, now_us: int) -> list[Effect]:
        for one in self._under_way:
            if one.deadline <= now_us:
                one.waiting.clear()
        return self._settle() + self._look_for_retired()

    def _look_for_retired(self) -> list[Effect]:
        if self._seen == self._topology.generation:
            return []
        self._seen = self._topology.generation
        back = [one for one in self._retired if self._topology.distance(one) is not None]
        out = self._restore(back)
        for one in back:
            out += self._restored(one)
        return out

    def _settle(self) -> list[Effect]:
        out: list[Effect] = []
        for one in [one for one in self._under_way if not one.waiting]:
            self._under_way.remove(one)
            names = self._topology.names()
            missing = sorted(name for number, name in names.items() if number not in (*one.done, one.broker))
            body = json_within_frame(
                {
                    "retired": self._topology.name(one.broker),
                    "done": sorted(self._topology.name(number) for number in one.done),
                    "missing": missing,
                }
            )
            out.append(Send(one.connection, encode(Reply(number=one.number, code="", body=body))))
        return out

    def next_deadline(self) -> int | None:
        return min((one.deadline for one in self._under_way), default=None)


def read_retired(key: bytes, _value: bytes) -> int:
    (broker,) = _U32.unpack(key)
    return int(broker)
