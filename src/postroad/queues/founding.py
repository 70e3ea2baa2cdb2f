"""Who founds the chains of a network's arcs (spec, responsibility 9).

A broker that was told of nobody founds. One that was told of others never founds because they are silent: it
asks all that the overlay knows, once every address that it was told leads somewhere; where all answer and
none knows a chain, the one with the lowest id founds. Two that found all the same are two networks that meet.
"""

from __future__ import annotations

from typing import Final

from postroad.links.links import Links
from postroad.overlay.topology import Topology
from postroad.queues.arcs import Arcs
from postroad.queues.errands import Say
from postroad.queues.messages import Node
from postroad.queues.talk import AskChains, Chains
from postroad.ring.ring import Ring
from postroad.seam.turn import Turn
from postroad.units import MILLISECOND_US, SECOND_US

ASK_US: Final = 300 * MILLISECOND_US  # between two rounds of questions, while nobody knows a chain
REST_US: Final = 2 * SECOND_US  # once somebody does: its views come by themselves


class Founding:
    def __init__(
        self,
        *,
        me: Node,
        arcs: Arcs,
        ring: Ring,
        topology: Topology,
        links: Links,
        told_of_others: bool,
        say: Say,
    ) -> None:
        self._me, self._arcs, self._ring, self._topology = me, arcs, ring, topology
        self._links, self._told_of_others, self._say = links, told_of_others, say
        self._strangers: set[Node] = set()  # who answered that it knows no chain
        self._asked: frozenset[Node] = frozenset()
        self._ask_us = 0
        self._over = False

    def answered(self, turn: Turn, sender: Node, message: Chains) -> None:
        if message.known:
            self._strangers.clear()
            self._ask_us = turn.now_us + REST_US
        else:
            self._strangers.add(sender)

    def tick(self, turn: Turn) -> None:
        if self._over or not self._arcs.loaded:
            return
        if self._arcs.founder:
            self._arcs.found(turn)  # what a crash left undone
            self._over = True
        elif self._arcs.knows_chain:
            self._over = True
        elif not self._told_of_others:
            self._found(turn)
        elif turn.now_us >= self._ask_us:
            self._ask(turn)

    def _ask(self, turn: Turn) -> None:
        self._ask_us = turn.now_us + ASK_US
        if not self._links.all_led_somewhere:
            return
        others = frozenset(
            node
            for broker in self._topology.reachable()
            if (node := self._ring.node(broker)) is not None and node != self._me
        )
        # The same brokers in two rounds, all of whom answered: links are not just coming up.
        if others and others == self._asked and others <= self._strangers and self._me < min(others):
            self._found(turn)
            return
        if others != self._asked:
            self._strangers.clear()
        self._asked = others
        for node in sorted(others):
            self._say(turn, node, AskChains())

    def _found(self, turn: Turn) -> None:
        self._over = True
        count = self._arcs.found(turn)
        turn.note("info", f"this broker founds the queues of a network: {count} arcs")

    def next_deadline(self) -> int | None:
        if self._over or not self._arcs.loaded:
            return None
        return self._ask_us
