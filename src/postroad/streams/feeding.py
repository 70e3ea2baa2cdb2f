"""Feeding neighbours: what a broker tells each neighbour about each stream, filtered for those behind it.

A neighbour is told a stream in order, from where it stood when it attached. What holds nothing for it is
merged into silence and told with the next event, or once a second, or as soon as the coverage changes,
because a subscription may be waiting for that. A neighbour out of credit is left behind, not buffered for:
when its credit comes back it goes on from the cache, and nacks what the cache has forgotten.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from postroad.events.batch import EventBatch, empty_frame, frame_ids
from postroad.ids import is_history
from postroad.links.links import Links
from postroad.overlay.interest import Interest
from postroad.overlay.topology import Topology
from postroad.seam.turn import Turn
from postroad.selectors import Group
from postroad.streams.knowledge import NOTHING, Coverage, Segment
from postroad.streams.spans import Span, intersect, subtract, union
from postroad.streams.streams import Feed, LoggedPubend, Neighbour, Stream
from postroad.tracking.strategies import Tracking
from postroad.wire.frames import Kind, Silence, encode

MAX_COVERAGES: Final = 4_096
REPLAY_SEGMENTS: Final = 256
MAX_SILENCES: Final = 16_384  # in one frame, which has 37 bytes for each and stays below MAX_CONTROL_BYTES


class Feeder:
    """Tells neighbours. `tracking` records what went where; None if that is not recorded."""

    def __init__(
        self,
        *,
        me: int,
        topology: Topology,
        interest: Interest,
        links: Links,
        tracking: Tracking | None,
    ) -> None:
        self._me = me
        self._topology = topology
        self._interest = interest
        self._links = links
        self._tracking = tracking
        self._coverages: dict[tuple[Coverage, frozenset[int]], Coverage] = {}  # what _covered found
        self.events_forwarded = 0

    def interest_changed(self) -> None:
        """Interest or routes are other ones: coverages must be found anew."""
        self._coverages.clear()

    def owners(self, stream: Stream, neighbour: Neighbour) -> frozenset[int]:
        return self._topology.subtree(stream.origin, neighbour.number)

    def _covered(self, coverage: Coverage, owners: frozenset[int]) -> Coverage:
        """`coverage` as far as these owners go, after our own filtering with what we know they want."""
        key = (coverage, owners)
        covered = self._coverages.get(key)
        if covered is None:
            owners = owners - {self._me}  # matching leaves out what only our own subscribers want
            applied = self._interest.versions()
            if coverage.everything:
                versions = {owner: applied[owner] for owner in owners if owner in applied}
            else:
                before = coverage.versions
                versions = {o: min(before[o], applied[o]) for o in owners if o in before and o in applied}
            covered = Coverage(versions)
            if len(self._coverages) >= MAX_COVERAGES:
                self._coverages.clear()
            self._coverages[key] = covered
        return covered

    def begin(
        self, turn: Turn, neighbour: Neighbour, stream: Stream, tick: int, *, announce: int | None = None
    ) -> None:
        """Send the neighbour everything after `tick`. The first thing it gets is an empty silence at
        `announce`: a neighbour that knew the stream learns how far it is, another that there is one."""
        feed = neighbour.feeds[stream.id] = Feed(sent_to=tick, quiet=tick)
        at = tick if announce is None else announce
        self._queue_silence(turn, neighbour, stream, at, at, NOTHING)
        self.replay(turn, neighbour, feed, stream)

    def replay(self, turn: Turn, neighbour: Neighbour, feed: Feed, stream: Stream) -> None:
        """From where the neighbour stands to the newest we have, as far as credit goes."""
        feed.blocked = False
        while feed.quiet < stream.top and not feed.blocked:
            segments, _ = stream.find(feed.quiet, stream.top, {}, REPLAY_SEGMENTS)
            for segment in segments:
                groups = None if segment.batch is None else self._interest.match(segment.batch)
                self.feed(turn, neighbour, feed, stream, segment, groups)
            if not segments:  # the cache forgot it: the neighbour hears how far the stream is, and asks
                self._queue_silence(turn, neighbour, stream, stream.top, stream.top, NOTHING)
                return

    def feed(
        self,
        turn: Turn,
        neighbour: Neighbour,
        feed: Feed,
        stream: Stream,
        segment: Segment,
        groups: list[Group] | None,
    ) -> None:
        """The next segment of a stream, in order, to one neighbour."""
        if feed.blocked:
            return
        if segment.end <= feed.quiet:
            return
        if segment.start < feed.quiet:
            segment = segment.cut(feed.quiet, segment.end)
            groups = None if segment.batch is None else self._interest.match(segment.batch)
        if self._links.available(neighbour.connection) <= 0:
            feed.blocked, feed.quiet = True, feed.sent_to
            return
        owners = self.owners(stream, neighbour)
        coverage = self._covered(segment.coverage, owners)
        rows = None if groups is None else rows_for(groups, owners)
        joins = feed.quiet == segment.start and (coverage == feed.coverage or feed.sent_to == feed.quiet)
        if not joins:
            self.tell_quiet(turn, neighbour, feed, stream)
            feed.sent_to = feed.quiet = segment.start
        if rows is not None and segment.batch is not None:
            self._send_rows(
                turn, neighbour, segment.batch, rows, stream.id, feed.sent_to, segment.end, coverage
            )
            feed.sent_to = segment.end
        elif segment.lost:
            self.tell_quiet(turn, neighbour, feed, stream)
            self._send_lost(turn, neighbour, stream.id, segment)
            feed.sent_to = segment.end
        feed.quiet = segment.end
        if coverage != feed.coverage and not segment.lost:
            feed.coverage = coverage
            self.tell_quiet(turn, neighbour, feed, stream)

    def tell_quiet(self, turn: Turn, neighbour: Neighbour, feed: Feed, stream: Stream) -> None:
        if feed.quiet > feed.sent_to:
            self._queue_silence(turn, neighbour, stream, feed.sent_to, feed.quiet, feed.coverage)
            feed.sent_to = feed.quiet

    def satisfy(self, turn: Turn, neighbour: Neighbour, feed: Feed, stream: Stream, part: Segment) -> None:
        """Recovered knowledge goes to the neighbours that asked for it."""
        for want in feed.wants:
            if not part.meets(want.need):
                continue
            owners = self.owners(stream, neighbour).union(want.need)
            done: list[Span] = []
            for start, end in intersect(want.spans, part.start, part.end):
                if self._links.available(neighbour.connection) > 0:
                    # Silence and L are sent whole, so that the neighbour need not ask for the rest of them.
                    answer = part if part.batch is None else part.cut(start, end)
                    self.send_segment(turn, neighbour, stream, answer.served(want.need), owners)
                    done.append((answer.start, answer.end))
                    if part.batch is None:
                        break
            # What an own pubend has is offered again when there is credit; else the neighbour asks again.
            want.spans = subtract(want.spans, [(part.start, part.end)] if stream.pubend is None else done)
        feed.wants = [want for want in feed.wants if want.spans]

    def answer(
        self,
        turn: Turn,
        neighbour: Neighbour,
        feed: Feed,
        stream: Stream,
        spans: Sequence[Span],
        need: Mapping[int, int],
    ) -> list[Span]:
        """A nack: what is known here goes out now, the rest when it is known. What of it is to be asked for
        upstream is returned."""
        if stream.log is not None:
            feed.want(intersect(union(spans), 0, stream.log.last), need)
            self.serve(turn, neighbour, feed, stream, stream.log)
            return []
        owners = self.owners(stream, neighbour).union(need)
        missing: list[Span] = []
        for start, end in union(spans):
            segments, unknown = stream.find(start, end, need, beyond=True)
            missing += unknown
            for segment in segments:
                if self._links.available(neighbour.connection) > 0:
                    self.send_segment(turn, neighbour, stream, segment, owners)
        if missing and stream.pubend is None:
            feed.want(missing, need)
            return missing
        return []

    def serve(
        self, turn: Turn, neighbour: Neighbour, feed: Feed, stream: Stream, pubend: LoggedPubend
    ) -> None:
        """What a neighbour wants of an own durable pubend: from memory now, else from the log, as far as
        credit goes."""
        missing: list[Span] = []
        for want in feed.wants:
            owners = self.owners(stream, neighbour).union(want.need)
            left: list[Span] = []
            sent_to = 0
            for start, end in want.spans:
                if end <= sent_to:
                    continue
                segments, unknown = pubend.answer(max(start, sent_to), end, sys.maxsize)
                missing += unknown
                left += unknown
                for segment in segments:
                    if self._links.available(neighbour.connection) > 0:
                        self.send_segment(turn, neighbour, stream, segment, owners)
                        sent_to = max(sent_to, segment.end)
                    else:
                        left.append((segment.start, segment.end))
            want.spans = union(left)
        feed.wants = [want for want in feed.wants if want.spans]
        if self._links.available(neighbour.connection) > 0:
            pubend.read(turn, missing)

    def send_segment(
        self, turn: Turn, neighbour: Neighbour, stream: Stream, segment: Segment, owners: frozenset[int]
    ) -> None:
        """An answer to a nack: one segment out of the usual order."""
        if segment.lost:
            self._send_lost(turn, neighbour, stream.id, segment)
            return
        coverage = self._covered(segment.coverage, owners)
        rows = None if segment.batch is None else rows_for(self._interest.match(segment.batch), owners)
        if rows is None or segment.batch is None:
            self._queue_silence(turn, neighbour, stream, segment.start, segment.end, coverage)
        else:
            self._send_rows(
                turn, neighbour, segment.batch, rows, stream.id, segment.start, segment.end, coverage
            )

    def _send_rows(
        self,
        turn: Turn,
        neighbour: Neighbour,
        batch: EventBatch,
        rows: npt.NDArray[np.uint32],
        pubend: int,
        start: int,
        end: int,
        coverage: Coverage,
    ) -> None:
        stamp = self._stamp(turn, neighbour, coverage)
        self.flush_silences(turn, neighbour)
        frame = batch.select(rows, kind=Kind.KNOWLEDGE, pubend=pubend, start=start, end=end, channel=stamp)
        self.events_forwarded += len(rows)
        if self._tracking is not None and not is_history(pubend):
            ids = frame_ids(frame, len(rows))
            self._tracking.forwarded(pubend >> 32, (neighbour.number,), ids, turn.now_us)
        self._links.spend(neighbour.connection, len(frame))
        turn.send(neighbour.connection, frame)

    def _send_lost(self, turn: Turn, neighbour: Neighbour, pubend: int, segment: Segment) -> None:
        self.flush_silences(turn, neighbour)
        frame = empty_frame(
            kind=Kind.KNOWLEDGE, pubend=pubend, start=segment.start, end=segment.end, channel=0, lost=True
        )
        self._links.spend(neighbour.connection, len(frame))
        turn.send(neighbour.connection, frame)

    def _queue_silence(
        self, turn: Turn, neighbour: Neighbour, stream: Stream, start: int, end: int, coverage: Coverage
    ) -> None:
        neighbour.silences.append((stream.id, start, end, self._stamp(turn, neighbour, coverage)))

    def _stamp(self, turn: Turn, neighbour: Neighbour, coverage: Coverage) -> int:
        full = neighbour.stamps_full
        number, definition = neighbour.stamp(coverage)
        if definition is not None:
            if full:
                self.flush_silences(turn, neighbour)  # a silence may name the stamp that the new one replaces
            turn.send(neighbour.connection, encode(definition))
        return number

    def flush_silences(self, turn: Turn, neighbour: Neighbour) -> None:
        spans, neighbour.silences = neighbour.silences, []
        for first in range(0, len(spans), MAX_SILENCES):
            part = Silence(spans=tuple(spans[first : first + MAX_SILENCES]))
            turn.send(neighbour.connection, encode(part))


def rows_for(groups: list[Group], owners: frozenset[int]) -> npt.NDArray[np.uint32] | None:
    """The rows that at least one of these owners wants; None if none."""
    wanted = [group.rows for group in groups if not owners.isdisjoint(group.targets)]
    if not wanted:
        return None
    if len(wanted) == 1:
        return wanted[0]
    # Not np.unique: its first call imports numpy.ma, which stops a broker for a tenth of a second or more.
    rows = np.sort(np.concatenate(wanted))
    return rows[np.concatenate(([True], rows[1:] != rows[:-1]))]
