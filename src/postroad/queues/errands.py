"""What this broker wants done by whoever is responsible for an arc.

Spec Q4: the source broker keeps a copy in memory until it is answered; nobody on the way stores anything.

Tasks of an arc go to its responsible broker in their order, over one connection, several at a time. Whoever
is asked and is not responsible says whom it takes for it. After a change of the view everything that is not
answered goes to the new responsible broker, in its order, under the same ids. A task that came before one
which it has to follow (`gap`) is said again once all before it are answered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from postroad.errors import FullError, UnavailableError
from postroad.queues.arcs import Arcs
from postroad.queues.messages import STARTED, Ask, Node, View
from postroad.queues.talk import (
    MAX_HOPS,
    NO_CHAIN,
    About,
    Done,
    Elsewhere,
    Locate,
    PutTask,
    Said,
    Task,
    Work,
)
from postroad.ring.ring import Ring
from postroad.seam.turn import Turn
from postroad.units import MILLISECOND_US, SECOND_US

MAX_ERRANDS: Final = 65_536
RESEND_US: Final = SECOND_US  # without an answer, a task is said again
LOCATE_FIRST_US: Final = 50 * MILLISECOND_US
LOCATE_LAST_US: Final = SECOND_US
ERRAND_BYTES: Final = 512  # what a task takes beside its messages

Answered = Callable[[Turn, Done, Task | None], None]  # the task as it was said: with its chain
Say = Callable[[Turn, Node, Said], bool]


@dataclass(slots=True)
class _Errand:
    number: int
    task: Task | None  # None: all that is wanted is a view of the arc
    size: int
    done: Answered
    until_us: int
    sent_us: int | None = None  # None: not since the last change
    stamped: bool = False  # its messages have their chain
    gapped: bool = False  # it came too early


@dataclass(slots=True)
class _Route:
    """To the broker that is responsible for one arc."""

    errands: dict[int, _Errand] = field(default_factory=dict)  # by number, in their order
    locate_us: int | None = None  # when to ask again who is responsible; None: it is known
    pause_us: int = LOCATE_FIRST_US


class Errands:
    """`say` sends to a broker, this one included; False if there is no way to it now."""

    def __init__(self, *, me: Node, arcs: Arcs, ring: Ring, say: Say, max_bytes: int, answer_us: int) -> None:
        self._me, self._arcs, self._ring, self._say = me, arcs, ring, say
        self._max_bytes, self._answer_us = max_bytes, answer_us
        self._routes: dict[int, _Route] = {}  # by arc: those with something that is not answered
        self._arc_of: dict[int, int] = {}  # number of a task -> its arc
        self._bytes = 0
        self._last_number = 0
        self.counters = {"queue_errands_total": 0, "queue_errands_repeated_total": 0}

    # ---- asking

    def find(self, turn: Turn, arc: int, done: Answered) -> None:
        """`done` is told once a view of the arc is known here, or that none is found in time. FullError."""
        self.ask(turn, arc, None, done)

    def ask(self, turn: Turn, arc: int, task: Task | None, done: Answered, size: int = 0) -> int:
        """`done` is told the answer, in time or never found. FullError if too much waits for answers."""
        size += ERRAND_BYTES
        if len(self._arc_of) >= MAX_ERRANDS or self._bytes + size > self._max_bytes:
            raise FullError(f"{self._bytes} bytes wait for answers here, at most {self._max_bytes} may")
        self._last_number += 1
        number = self._last_number
        route = self._routes.setdefault(arc, _Route())
        errand = _Errand(number, task, size, done, turn.now_us + self._answer_us)
        route.errands[number] = errand
        self._arc_of[number] = arc
        self._bytes += size
        self.counters["queue_errands_total"] += 1
        self._send(turn, arc, route, errand)
        return number

    def _send(self, turn: Turn, arc: int, route: _Route, errand: _Errand) -> None:
        view, task = self._arcs.view(arc), errand.task
        if view is not None and task is None:
            self._forget(arc, errand)
            errand.done(turn, Done(errand.number, ()), None)
            return
        if view is None or task is None or view.stage != STARTED:
            errand.sent_us = None
            self._search(turn, arc, route)
            return
        if not errand.stamped:
            errand.stamped = True
            if isinstance(task, PutTask) and any(message.chain is NO_CHAIN for message in task.messages):
                stamped = tuple(
                    replace(message, chain=view.chain) if message.chain is NO_CHAIN else message
                    for message in task.messages
                )
                task = errand.task = replace(task, messages=stamped)
        if errand.sent_us is not None:
            self.counters["queue_errands_repeated_total"] += 1
        errand.sent_us = turn.now_us
        if not self._say(turn, view.responsible, Work(errand.number, arc, task)):
            errand.sent_us = None
            self._search(turn, arc, route)

    # ---- finding the responsible broker

    def _search(self, turn: Turn, arc: int, route: _Route) -> None:
        if route.locate_us is None:
            route.pause_us = LOCATE_FIRST_US
            self._locate(turn, arc, route)

    def _locate(self, turn: Turn, arc: int, route: _Route) -> None:
        route.locate_us = turn.now_us + route.pause_us
        route.pause_us = min(2 * route.pause_us, LOCATE_LAST_US)
        key = self._arcs.key(arc)
        view = self._arcs.view(arc)
        known = set() if view is None else {*view.electors, *view.replicas}
        for node in sorted({*self._ring.closest(key, 3), *known} - {self._me}):
            self._say(turn, node, About(arc, Ask()))
        following = self._ring.route(key)
        if following is not None:
            self._say(turn, following, Locate(arc, self._me, 0))

    def pass_on(self, turn: Turn, message: Locate) -> bool:
        """False: this broker is the closest one to the arc, or there is no such arc."""
        if message.arc >= self._arcs.count:
            return False
        following = self._ring.route(self._arcs.key(message.arc))
        if following is None or not 0 <= message.hops < MAX_HOPS:
            return False
        return self._say(turn, following, replace(message, hops=message.hops + 1))

    # ---- answers

    def answered(self, turn: Turn, message: Done) -> None:
        arc = self._arc_of.get(message.number)
        if arc is None:
            return
        route = self._routes[arc]
        errand = route.errands[message.number]
        if self._came_early(message) and self._has_earlier(route, errand):
            errand.gapped = True
            return
        if message.code == UnavailableError.code:
            errand.sent_us = None  # said again when it is known to whom, or in a while
            self._search(turn, arc, route)
            return
        route.locate_us = None
        self._forget(arc, errand)
        errand.done(turn, message, errand.task)
        self._send_gapped(turn, arc)

    @staticmethod
    def _came_early(message: Done) -> bool:
        return any(
            answer.outcome == "gap" or any(each.outcome == "gap" for each in answer.each)
            for answer in message.answers
        )

    @staticmethod
    def _has_earlier(route: _Route, errand: _Errand) -> bool:
        return next(iter(route.errands)) != errand.number

    def _send_gapped(self, turn: Turn, arc: int) -> None:
        """Those that came too early, as far as nothing before them is unanswered."""
        route = self._routes.get(arc)
        if route is None:
            return
        for errand in list(route.errands.values()):
            if not errand.gapped:
                return
            errand.gapped = False
            self._send(turn, arc, route, errand)

    def _forget(self, arc: int, errand: _Errand) -> None:
        route = self._routes[arc]
        del route.errands[errand.number], self._arc_of[errand.number]
        self._bytes -= errand.size
        if not route.errands:
            del self._routes[arc]

    def elsewhere(self, turn: Turn, sender: Node, message: Elsewhere) -> None:
        arc = self._arc_of.get(message.number)
        if arc is None or arc != message.arc:
            return
        route = self._routes[arc]
        route.errands[message.number].sent_us = None
        if message.view is not None:
            self._arcs.learn(turn, sender, arc, message.view)  # `moved` sends it on if that is news
        view = self._arcs.view(arc)
        if arc in self._routes and (view is None or view.responsible == sender or view.stage != STARTED):
            self._search(turn, arc, self._routes[arc])

    def moved(self, turn: Turn, arc: int, view: View) -> None:
        """Another view is known: what is not answered goes to its responsible broker."""
        route = self._routes.get(arc)
        if route is None or view.stage != STARTED:
            return
        route.locate_us = None
        for errand in list(route.errands.values()):
            if errand.number in route.errands:
                errand.gapped = False
                self._send(turn, arc, route, errand)

    def interrupted(self, turn: Turn, node: Node) -> None:
        """Something that was said to that broker may be lost."""
        for arc, route in list(self._routes.items()):
            view = self._arcs.view(arc)
            if view is not None and view.responsible == node:
                for errand in list(route.errands.values()):
                    if errand.number in route.errands:
                        self._send(turn, arc, route, errand)

    def unreached(self, turn: Turn, node: Node) -> None:
        for arc, route in list(self._routes.items()):
            view = self._arcs.view(arc)
            if view is not None and view.responsible == node:
                for errand in route.errands.values():
                    errand.sent_us = None
                self._search(turn, arc, route)

    # ---- time

    def _silence(self) -> str:
        if self._arcs.knows_chain:
            return "nobody answered in time"
        return (
            "nobody answered in time, and this broker knows of no queues: link it with others, or found them "
            "with `postroad queues found`"
        )

    def tick(self, turn: Turn) -> None:
        now_us = turn.now_us
        for arc, route in list(self._routes.items()):
            while route.errands:
                errand = next(iter(route.errands.values()))
                if errand.until_us > now_us:
                    break  # all have the same time, so the first is due first
                self._forget(arc, errand)
                late_answer = Done(errand.number, (), UnavailableError.code, self._silence())
                errand.done(turn, late_answer, errand.task)
            if arc not in self._routes:
                continue
            if route.locate_us is not None and route.locate_us <= now_us:
                self._locate(turn, arc, route)
                view = self._arcs.view(arc)
                if view is not None and view.stage == STARTED:
                    # Whoever is asked and not responsible says so; it may be the same broker as before.
                    self._send_again(turn, arc, route, now_us)
            first = next(iter(route.errands.values()), None)
            if first is not None and first.sent_us is not None and first.sent_us + RESEND_US <= now_us:
                self._send_again(turn, arc, route, now_us)
                self._search(turn, arc, route)

    def _send_again(self, turn: Turn, arc: int, route: _Route, now_us: int) -> None:
        for errand in list(route.errands.values()):
            if errand.number not in route.errands:
                continue
            if errand.sent_us is None or errand.sent_us + RESEND_US <= now_us:
                self._send(turn, arc, route, errand)

    def next_deadline(self) -> int | None:
        times: list[int] = []
        for route in self._routes.values():
            first = next(iter(route.errands.values()))
            times.append(first.until_us)  # all have the same time, so the first is due first
            if route.locate_us is not None:
                times.append(route.locate_us)
            if first.sent_us is not None:
                times.append(first.sent_us + RESEND_US)
        return min(times, default=None)

    def metrics(self) -> dict[str, int]:
        return {**self.counters, "queue_errands": len(self._arc_of), "queue_errand_bytes": self._bytes}
