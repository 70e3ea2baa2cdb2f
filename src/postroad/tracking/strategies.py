"""The one interface behind which a broker records what happens to messages (spec T11).

Three strategies: none; exact, a log of (id, what, who); bloom, the paper's filter histories. A broker with
the strategy none, the paper's NULL, has no `Tracking` at all. The broker tells what happened, batch by batch,
as concatenated ids; nothing here loops over events. `tick` returns what to store. A trace's question is
answered in steps, since stored filters are on a disk: `answer` names the records to read until there are
none. What is in memory, as all that is recent, is not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from postroad.errors import BugError
from postroad.seam.tracking import NotKept, TrackingEffect
from postroad.tracking.attachment_log import Change
from postroad.tracking.bloom_strategy import BloomTracking
from postroad.tracking.exact_strategy import ExactTracking
from postroad.tracking.query.lookup import Reading
from postroad.tracking.query.messages import TraceAnswer, TraceQuestion
from postroad.tracking.record import FilterMeta
from postroad.tracking.recorder import MessageNote
from postroad.tracking.settings import TrackingConfig


class Tracking(Protocol):
    """What every strategy does."""

    looked: int  # keys, names and KiB gone through so far for questions: the work they were
    noted: list[MessageNote]  # to be recorded; rooms append to it where every call counts
    change_bytes: int  # that one change of the attachment map may have, to be told in one bulletin

    def record(self) -> None:
        """What is noted. Until then it waits for at most `MAX_HOLD_US`."""

    def published(self, ids: bytes, now_us: int) -> None:
        """A publisher connected here sent these."""

    def routed(self, origin: int, neighbour: int, ids: bytes, now_us: int) -> None:
        """These came from that neighbour; `origin` is the broker that published them."""

    def forwarded(self, origin: int, neighbours: Sequence[int], ids: bytes, now_us: int) -> None:
        """These went to all of these neighbours. Further ones may be told later."""

    def delivered(self, origin: int, subscribers: Sequence[str], ids: bytes, now_us: int) -> None:
        """These went to each of these subscribers, attached before."""

    def sent(self, origin: int, neighbour: int, ids: bytes, now_us: int) -> None:
        """These best-effort events were meant for that neighbour: where it has not got them, they were lost
        on the way there."""

    def repaired(self, subscriber: str, ids: bytes, now_us: int) -> None:
        """That subscriber, attached before, says that it got these best-effort events as repairs."""

    def attached(self, subscriber: str, now_us: int) -> None: ...

    def detached(self, subscriber: str, now_us: int) -> None: ...

    def linked(self, neighbour: int, now_us: int) -> None: ...

    def unlinked(self, neighbour: int, now_us: int) -> None: ...

    def tick(self, now_us: int) -> list[TrackingEffect]:
        """Once per turn: what to store or drop, in order."""

    def next_deadline(self) -> int | None: ...

    def not_kept(self, item: NotKept, now_us: int) -> None:
        """The driver could not do these: what was in them is lost, and a trace must say so."""

    def close(self, now_us: int, unrecorded_us: int | None = None) -> list[TrackingEffect]:
        """The process ends: everything that is not stored yet. Events that are synced since then may not be
        recorded; None if all are."""

    def answer(
        self, question: TraceQuestion, records: Mapping[int, bytes], reading: Reading | None = None
    ) -> tuple[TraceAnswer, tuple[int, ...]]:
        """What memory and these stored records tell, and the sequences of those to read next for the rest.

        Ask until there are none: which delivery histories matter is known only after the routing histories.
        A record that cannot be read is given as b"". With the same `reading` for all of a question, records
        that were given before need not be given again.
        """

    @property
    def last_sequence(self) -> int:
        """Of what was ever stored."""

    def resume_after(self, sequence: int) -> None:
        """Sequences up to this one were used, even if nothing is left of them."""

    def stored_after(self, sequence: int) -> list[int]:
        """The sequences of stored records beyond that one, in order."""

    def stored_at(self, sequence: int) -> tuple[FilterMeta, int] | None:
        """What that stored record is, and about how many bytes it has; None if there is none any more."""

    @property
    def unrecorded_us(self) -> int | None:
        """What happened since then, before this process began, may not be recorded; None if all is."""

    def recorded_again(self, now_us: int) -> None:
        """The broker has handed all events of that time that its log has to `published`."""

    def set_back(self, now_us: int) -> None:
        """The store comes from a backup: it knows nothing of the processes that ran after it."""

    def attachment_parts(self, now_us: int) -> Iterator[bytes]:
        """The whole attachment map of this moment as encoded changes: all that `tick` returned until now.
        They are made as they are taken."""

    def metrics(self) -> dict[str, int | float]: ...

    def check(self) -> None: ...


def make_tracking(
    config: TrackingConfig,
    *,
    me: int,
    stored: Iterable[FilterMeta],
    sizes: Mapping[int, int] | None = None,
    changes: Iterable[Change],
    now_us: int,
) -> Tracking:
    """The strategy of the configuration, which is not none, going on from what an earlier process stored.

    `sizes`: bytes of those records, by sequence.
    """
    if config.strategy == "none":
        raise BugError("the strategy none records nothing")
    if config.strategy == "exact":
        return ExactTracking(config, me=me, stored=stored, sizes=sizes, changes=changes, now_us=now_us)
    return BloomTracking(config, me=me, stored=stored, sizes=sizes, changes=changes, now_us=now_us)
