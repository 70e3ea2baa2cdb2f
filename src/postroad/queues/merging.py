"""Two chains of one arc become one (`views`: "Rescue and merging"; spec, responsibility 8 and 9)."""

from __future__ import annotations

from collections.abc import Sequence

from postroad.errors import UsageError
from postroad.queues.arc_state import Importing, Reading, check_view
from postroad.queues.messages import (
    CLOSED,
    MAX_CHAINS,
    MAX_REACHED,
    NEW,
    Base,
    Chain,
    Ended,
    Know,
    Node,
    Part,
    Seal,
    View,
)
from postroad.queues.takeover import TakeOver


class Merging(TakeOver):
    __slots__ = ()

    def knows(self, chain: Chain) -> bool:
        """Whether ids of that chain can be compared here. If not, its state is still to be taken in."""
        return self.view is not None and (chain == self.view.chain or chain in self.absorbed)

    def rescue(self, reached: Sequence[Node], now_us: int) -> None:
        """Begin the next generation with what the reached brokers hold, closest to the arc first.

        For an administrator, when a majority of the electors is gone for good. What only others hold is lost.
        """
        if self.view is None:
            raise UsageError("no view of the arc is known: there is nothing to rescue")
        if not 1 <= len(reached) <= MAX_REACHED:
            raise UsageError(f"a rescue needs 1 to {MAX_REACHED} brokers, not {len(reached)}")
        start = self._begin(now_us)
        old = self.view
        view = View(
            chain=Chain(old.chain.generation + 1, self.me, old.chain.origin),
            epoch=old.epoch + 1,
            stage=NEW,
            replicas=tuple(reached[: self.settings.replicas]),
            electors=tuple(reached[: self.settings.electors]),
            base=Base(old.epoch, tuple(reached)),
            rescued=True,
        )
        self._adopt(view)
        self._spread(view, reached)
        self._end(start)

    def _meet(self, sender: Node, mine: View, view: View) -> None:
        """Two chains of different origin, or two rescues of one (responsibility 9)."""
        if mine.chain.outranks(view.chain):
            if self.serving and view.chain in self.absorbed:
                if self.importing is None:  # else it is here, and not yet on every replica
                    self._send(sender, Ended(view.chain, mine))
            elif self.serving and view.stage == CLOSED:
                self._take_in(view)
            else:
                self._send(sender, Know(mine))
            return
        rival = self.rival
        if view.stage == CLOSED or (
            rival is not None
            and (rival.place >= view.place if rival.chain == view.chain else rival.chain.outranks(view.chain))
        ):
            return
        self.rival, self.unsaved = view, True
        if mine.responsible != self.me:
            self._send(mine.responsible, Know(view))

    def _on_ended(self, sender: Node, message: Ended) -> None:
        del sender
        check_view(message.view)
        if self.view is None or self.view.chain != message.chain or message.view.chain == message.chain:
            return
        self.ended = (*self.ended, message.chain)[-MAX_CHAINS:]
        self._drop()
        self.rival = None
        self._adopt(message.view)

    def _take_in(self, closed: View) -> None:
        assert self.view is not None
        if self.reading is not None or self.importing is not None or len(self.absorbed) >= MAX_CHAINS:
            return
        if closed.into != self.view.chain and closed.into not in self.absorbed:
            return  # the chain that it goes into comes first: it may have it already
        self.reading = Reading(closed, (), None, None, b"", self.now_us + self.settings.answer_us)
        for node in closed.base.replicas:
            self._send(node, Seal(closed))

    def _write_import(self, closed: View, state: bytes) -> None:
        size = self.settings.piece_bytes
        number = 0
        for offset in range(0, len(state), size):
            last = offset + size >= len(state)
            number = self._write(state[offset : offset + size], True, Part(closed.chain, offset, last))
        self.importing = Importing(
            closed, number
        )  # its writes are durable, so none is kept before a later step
