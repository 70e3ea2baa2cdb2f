"""Events that bear a `traceparent` (W3C Trace Context) are told to the driver at each broker they come to.

Only where somebody asked for it: a broker without `[otel]` has no `Hops`. A frame that does not name the
attribute costs one look through its bytes. What is not sampled, or is no traceparent, is passed on and not
told.
"""

from __future__ import annotations

import re
from typing import Final

from postroad.events.batch import EventBatch
from postroad.ids import is_history
from postroad.seam.effects import Hop
from postroad.seam.peers import Peer
from postroad.seam.turn import Turn

ATTRIBUTE: Final = "traceparent"
MAX_HOPS: Final = 256  # told of one frame
SAMPLED: Final = 1
_NAME: Final = ATTRIBUTE.encode()
_TRACEPARENT: Final = re.compile(r"[0-9a-e][0-9a-f]-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Hops:
    def __init__(self) -> None:
        self.count = 0
        self.left_out = 0  # beyond MAX_HOPS

    def frame(self, turn: Turn, peer: Peer, batch: EventBatch, *, published: bool) -> None:
        """A frame of events came."""
        if _NAME not in batch.data or is_history(batch.pubend):
            return
        hops = 0
        for row in range(batch.count):
            traceparent = batch.attributes(row).get(ATTRIBUTE)
            if not isinstance(traceparent, str) or not is_sampled(traceparent):
                continue
            if hops == MAX_HOPS:
                self.left_out += 1
                continue
            hops += 1
            turn.hop(
                Hop(
                    traceparent=traceparent,
                    id=batch.id(row),
                    topic=batch.topic(row),
                    came_from=peer.name,
                    published=published,
                    at_us=turn.now_us,
                )
            )
        self.count += hops

    def metrics(self) -> dict[str, int]:
        return {"hops_told_total": self.count, "hops_left_out_total": self.left_out}


def is_sampled(traceparent: str) -> bool:
    matched = _TRACEPARENT.fullmatch(traceparent)
    return matched is not None and bool(int(traceparent[-2:], 16) & SAMPLED)
