"""D9: who catches up with large events never waits for a timer. What could not be held is asked for at once
when there is room for it."""

from __future__ import annotations

import numpy as np
import pytest

from postroad.durable.subscriber.catchup import HELD_BYTES, CatchupStream
from postroad.durable.subscriber.filtering import ReadBuffer
from postroad.durable.subscriber.outputs import Deliver, Message
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.ids import IdSource
from postroad.selectors import Selector
from postroad.streams.knowledge import NOTHING, Segment
from postroad.wire.frames import DEFAULT_LIMITS, Kind

PUBEND, NOW_US, EVENTS, APART = 1 << 32, 10**12, 200, 1_000


def segment(tick: int, size: int) -> Segment:
    builder = BatchBuilder()
    builder.add(IdSource(1, 1).next(1), "t", {}, bytes(size), DEFAULT_LIMITS)
    published = EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)
    batch = published.with_ticks(tick, kind=Kind.KNOWLEDGE, pubend=PUBEND, start=tick - 1, channel=0)
    return Segment(tick - 1, tick, NOTHING, batch)


@pytest.mark.parametrize("remembered", [True, False])
@pytest.mark.parametrize("size", [100, 100_000, 1_000_000])
def test_catching_up_takes_no_time(size: int, remembered: bool) -> None:
    """Time stands still, and every answer brings all that was asked for, at once."""
    ticks = [(number + 1) * APART for number in range(EVENTS)]
    catchup = CatchupStream(subscriber=1, pubend=PUBEND, position=0, selector=Selector.parse("t"))
    if remembered:
        catchup.reading = True
        numbers = np.array(ticks, np.int64)
        catchup.plan(ReadBuffer(subscriber=1, start=0, end=ticks[-1], ticks=numbers, unknown=()))
    else:
        catchup.refilter(ticks[-1])
    got: list[int] = []
    answered = 0

    def send(message: Message) -> None:
        assert isinstance(message, Deliver)
        got.extend(message.ticks().tolist())

    while not catchup.idle:
        spans = catchup.wants(NOW_US)
        assert spans, f"it waits for a timer after {len(got)} events"
        for start, end in spans:
            inside = [tick for tick in ticks if start < tick <= end]
            answered += len(inside)
            for before, tick in zip([start, *inside], [*inside, end], strict=True):
                if before < tick - 1 or tick not in inside:
                    silence_end = tick if tick not in inside else tick - 1
                    catchup.learn(Segment(before, silence_end, NOTHING), {})
                if tick in inside:
                    catchup.learn(segment(tick, size), {})
            catchup.check()
        catchup.advance(lambda: True, send)
        catchup.check()
    assert got == ticks
    assert answered <= 4 * EVENTS, "what cannot be held is not asked for over and over"
    assert size * EVENTS > HELD_BYTES or answered == EVENTS
