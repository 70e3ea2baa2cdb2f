"""The attachment map finds what a scan of all that happened finds (T4, T10)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds.attachment_maps import FEW_BYTES, Plain

from postroad.tracking import attachment
from postroad.tracking.attachment import GROUP, NEIGHBOUR, SUBSCRIBER, AttachmentMap
from postroad.tracking.attachment_log import Change, decode_changes, encode_changes
from postroad.units import MILLISECOND_US, SECOND_US

MINUTE_US = 60 * SECOND_US
KINDS = (SUBSCRIBER, GROUP, NEIGHBOUR)
CHANGES = ("attach", "detach", "late")
OTHERS = ("ahead", "torn", "forget", "coarsen", "snapshot", "stop", "crash")

steps = st.tuples(
    st.sampled_from((*CHANGES, *CHANGES, *CHANGES, *OTHERS)),
    st.sampled_from(KINDS),
    st.sampled_from(["1", "2", "3é"]),
    st.sampled_from([0, 1, SECOND_US, 10 * SECOND_US, -5 * SECOND_US, -20 * SECOND_US]),
    st.integers(-20, 20),
)
questions = st.tuples(
    st.integers(-60, 30) | st.integers(-1200, 1200), st.sampled_from([0, SECOND_US, 60 * MINUTE_US])
)


@given(st.lists(steps, min_size=30, max_size=90), st.lists(questions, min_size=5, max_size=10))
@settings(max_examples=200, deadline=None)
def test_the_map_finds_what_a_scan_finds(
    steps: list[tuple[str, str, str, int, int]], questions: list[tuple[int, int]]
) -> None:
    """T10: Whatever the clock does, and through logs, snapshots and retention."""
    now_us = 1_700_000_000 * SECOND_US
    held, log = AttachmentMap.restored((), last_stored_us=0, now_us=now_us)
    plain = Plain()
    late: list[tuple[str, str, int]] = []  # of which nothing is forgotten
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attachment, "MAX_BYTES", FEW_BYTES)
        patch.setattr(attachment, "MAX_LATE_BYTES", FEW_BYTES)
        for action, kind, who, move_us, number in steps:
            now_us += move_us
            time_ms = (now_us + number * MINUTE_US) // MILLISECOND_US
            news: list[Change] = []
            match action:
                case "attach":
                    news = held.attached(kind, who, now_us)
                case "detach":
                    news = held.detached(kind, who, now_us)
                case "late":
                    news = held.late(kind, who, time_ms, time_ms, now_us)
                    late.append((kind, who, time_ms))
                case "ahead":
                    news = held.handled(time_ms, time_ms, now_us, SECOND_US)
                case "torn":  # what came between was damaged
                    what = "attach" if number > 0 else "detach"
                    news = [held._apply(Change(what=what, kind=kind, who=who, at_us=now_us))]
                case "forget" | "coarsen":
                    before_us = now_us + (number - 20) * SECOND_US if action == "forget" else 0
                    count = len(held)
                    went = held.forget(before_us, now_us)
                    assert went >= count - len(held)
                    assert went == 0 or held.forget(before_us, now_us) == 0
                    plain.forget(before_us)
                    late = late if action == "coarsen" else []
                    log = list(held.snapshot(now_us))
                case "snapshot":
                    log = decode_changes(encode_changes(held.snapshot(now_us)))[0]
                    held = AttachmentMap.of(log)
                case "stop" | "crash":
                    news = held.stopped(now_us) if action == "stop" else []
                    held, started = AttachmentMap.restored([*log, *news], last_stored_us=0, now_us=now_us)
                    news += started
            log += news
            plain.apply(news)
            held.check()
            assert held.crowded == plain.crowded
    noted = [(of, name, start, end) for of, name, start, end, is_late in held.spans() if is_late]
    spans = plain.spans
    assert len(held) == len(spans) + len(noted)
    assert list(held) == sorted((of, name) for of, name, _, end in spans if end is None)
    for later_s, skew_us in questions:
        time_ms = (now_us + later_s * SECOND_US) // MILLISECOND_US
        time_us = time_ms * MILLISECOND_US
        lead_us = max((lead for start, end, lead in held.leads() if start <= time_us <= end), default=0)
        first, last = time_us - skew_us, time_us + MILLISECOND_US - 1 + skew_us
        for kind in KINDS:
            assert held.at(kind, time_ms, skew_us=skew_us) == sorted(
                {
                    name
                    for of, name, start, end in spans + noted
                    if of == kind and start <= last and (end is None or first <= end)
                }
            )
            assert held.since(kind, time_ms, skew_us=skew_us) == plain.since(kind, first - lead_us)
    assert all(name in held.at(of, time_ms, skew_us=0) for of, name, time_ms in late)
