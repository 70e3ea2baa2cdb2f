"""The release protocol in a broker: reports go up the trees, floors are found at the root (spec D7, D8).

Every report of every owner is kept at each broker on its way, the newest one, and sent on to the parent in
the tree of the pubend's origin; when that parent, or the connection to it, is another one, all are sent
again. So no report is lost with a link or a broker in between. Those of brokers that link state does not know
are neither taken nor kept: a neighbour could make up any number of them. At the origin they reach
`ReleaseRoot`, which says how far the pubend may forget, and the pubend makes its floor of it. Whoever asks
below it is told L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from postroad.durable.publisher.pubend import DurablePubend
from postroad.durable.publisher.release import (
    MAX_REPORTS,
    TABLE,
    ReleaseMerger,
    ReleaseRoot,
    Report,
    RetentionPolicy,
    read_owner,
)
from postroad.errors import PeerError, UnavailableError
from postroad.ids import is_history, is_volatile, pubend_text
from postroad.overlay.topology import Topology
from postroad.seam.peers import Peer
from postroad.seam.storage import MAX_TICK
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.streams.routing import MAX_AHEAD_US
from postroad.units import SECOND_US
from postroad.wire.frames import Release, encode

RELEASE_US: Final = SECOND_US  # floors are found this often
MAX_RELEASES: Final = 16_384  # reports in one frame, which has 43 bytes for each
_MAX_U32: Final = (1 << 32) - 1


class Releasing:
    """One broker's part in the release of every durable pubend, its own included.

    `link(broker)` is the connection of a neighbour; `mine` are the durable pubends of this broker.
    """

    def __init__(
        self,
        board: Switchboard,
        *,
        me: int,
        policy: RetentionPolicy,
        topology: Topology,
        link: Callable[[int], int | None],
        mine: Iterable[int],
        now_us: int,
    ) -> None:
        self._me = me
        self._policy = policy
        self._topology = topology
        self._link = link
        self._mine = dict.fromkeys(mine)
        self._rows = board.table(TABLE, read_owner)
        self._merger = ReleaseMerger()
        self._pubends: dict[int, tuple[DurablePubend, ReleaseRoot]] = {}  # those that are open
        self._parents: dict[int, int | None] = {}  # origin -> connection that its reports go to
        self._routed_at = -1  # topology generation for which `_parents` holds
        self._release_at = now_us + RELEASE_US
        board.from_broker(Release, self._received)
        board.status("durable_owners", lambda _now_us: self.status())

    def open(self, pubend: DurablePubend, now_us: int) -> None:
        """An own pubend of which others hear from now on."""
        root = self._root(pubend.id, now_us)
        if not root.owners:
            # Those that are not open yet are as they were found on disk.
            shut = (self._root(other, now_us) for other in self._mine if other not in self._pubends)
            root.inherit([*(sibling for _, sibling in self._pubends.values()), *shut])
        self._mine[pubend.id] = None
        self._pubends[pubend.id] = (pubend, root)

    def _root(self, pubend: int, now_us: int) -> ReleaseRoot:
        # What nobody needs of a broker's history it has stored elsewhere.
        policy = replace(self._policy, keep_us=self._policy.grace_us) if is_history(pubend) else self._policy
        root = ReleaseRoot(pubend, policy, now_us=now_us)
        root.recover(self._rows)
        return root

    def followed(self, pubend: int) -> bool:
        """Somebody has durable subscriptions on this own pubend."""
        return pubend in self._pubends and self._pubends[pubend][1].followed

    # ---- reports

    def report(self, pubend: int, report: Report) -> None:
        """What the durable subscriptions of this broker say."""
        self._merger.report(pubend, report)

    def _received(self, turn: Turn, _peer: Peer, message: Release) -> None:
        """What a neighbour further down in the tree says."""
        for pubend, owner, serial, released, delivered, ended in message.reports:
            if not (0 < owner <= _MAX_U32 and 0 <= serial <= MAX_TICK and 0 <= pubend < 1 << 64):
                raise PeerError(
                    f"a report of owner {owner} with serial {serial} on pubend {pubend:x}; they are between 1"
                    f" and {_MAX_U32}, 0 and {MAX_TICK}, and 64 bits long"
                )
            if is_volatile(pubend):
                raise PeerError(f"a report on pubend {pubend_text(pubend)}, which is plain")
            if not 0 <= released <= delivered <= MAX_TICK or ended not in (0, 1):
                raise PeerError(
                    f"a report with {released} released, {delivered} delivered and the end {ended}; ticks"
                    f" increase in that order from 0 to {MAX_TICK}, and the end is 0 or 1"
                )
            origin = pubend >> 32
            known = pubend in self._mine if origin == self._me else bool(self._topology.pubends(origin))
            known = known and owner != self._me and owner in self._topology
            known = (
                known and delivered <= turn.now_us + MAX_AHEAD_US
            )  # else what comes would count as released
            if known and self._has_room(pubend, owner):
                report = Report(
                    owner=owner,
                    serial=serial,
                    released=released,
                    latest_delivered=delivered,
                    ended=bool(ended),
                )
                self._merger.report(pubend, report)

    def _has_room(self, pubend: int, owner: int) -> bool:
        """Where there is no more, reports on pubends that nobody advertises go, and no others of these are
        taken: a neighbour may make up any number of them."""
        if self._merger.room(pubend, owner):
            return True
        topology = self._topology
        if pubend not in self._mine and pubend not in topology.pubends(pubend >> 32):
            return False
        advertised = (other for broker in topology.names() for other in topology.own_pubends(broker))
        there = {*self._mine, *advertised}
        self._merger.forget(lambda other, owner: other not in there and owner != self._me)
        if not self._merger.room(pubend, owner):
            raise PeerError(
                f"a report of broker {owner:08x} on pubend {pubend_text(pubend)} finds no room: at most"
                f" {MAX_REPORTS} reports of brokers on pubends are kept"
            )
        return True

    def forget_broker(self, gone: int) -> None:
        """It was out of reach for long: nobody takes reports on its pubends. Its own count where they have
        arrived, and should it be back, it makes them again."""
        self._merger.forget(lambda pubend, owner: gone in (pubend >> 32, owner))
        self._parents.pop(gone, None)

    def retire(self, owner: int) -> int:
        """A broker will not come back: on how many own pubends it held something."""
        self._merger.forget(lambda _, other: other == owner)
        return sum(root.retire(owner) for _, root in self._pubends.values())

    # ---- time

    def tick(self, turn: Turn) -> None:
        """The end of a turn: pass reports on, and now and then see what may be forgotten."""
        if self._routed_at != self._topology.generation:
            self._reroute()
        self._pass_on(turn)
        for pubend, reports in self._merger.take(lambda pubend: pubend in self._pubends).items():
            for report in reports:
                try:
                    self._pubends[pubend][1].report(report)
                except UnavailableError as error:
                    turn.note("warning", str(error))
        if turn.now_us >= self._release_at:
            self._release_at = turn.now_us + RELEASE_US
            for own, root in self._pubends.values():
                own.release(turn, root.floor(turn.now_us, own.last, own.floor_for_size, short=own.short))
        for _, root in self._pubends.values():
            root.flush(turn)

    def close(self, turn: Turn) -> None:
        """The process ends: reports that wait for their time to be saved are saved now."""
        for _, root in self._pubends.values():
            root.close(turn)

    def next_deadline(self) -> int | None:
        return self._release_at if self._pubends else None

    def _reroute(self) -> None:
        """A parent that is another one, or newly linked, is told everything."""
        self._routed_at = self._topology.generation
        changed: dict[int, None] = {}
        for origin in self._merger.origins():
            connection = self._parent(origin)
            if self._parents.get(origin) != connection:
                self._parents[origin] = connection
                changed[origin] = None
        if changed:
            self._merger.resend(lambda pubend: pubend >> 32 in changed)

    def _parent(self, origin: int) -> int | None:
        parent = self._topology.parent(origin)
        return None if parent is None else self._link(parent)

    def _pass_on(self, turn: Turn) -> None:
        rows: dict[int, list[tuple[int, int, int, int, int, int]]] = {}
        for origin in self._merger.origins(due=True):
            self._parents[origin] = self._parent(origin)
        due = self._merger.take(lambda pubend: self._parents[pubend >> 32] is not None)
        for pubend, reports in due.items():
            connection = self._parents[pubend >> 32]
            if connection is not None:
                rows.setdefault(connection, []).extend(
                    (
                        pubend,
                        report.owner,
                        report.serial,
                        report.released,
                        report.latest_delivered,
                        int(report.ended),
                    )
                    for report in reports
                )
        for connection, passed in rows.items():
            for first in range(0, len(passed), MAX_RELEASES):
                turn.send(connection, encode(Release(reports=tuple(passed[first : first + MAX_RELEASES]))))

    # ---- inspection

    def status(self) -> list[dict[str, object]]:
        return [root.status() for _, root in self._pubends.values()]

    def check(self) -> None:
        self._merger.check()
        for _, root in self._pubends.values():
            root.check()
