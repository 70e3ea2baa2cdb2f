"""The attachment map, the skew check, the planner, what people see, and the seam (T4, T5, T7, T10)."""

from __future__ import annotations

import ast
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import postroad.tracking
from postroad.cli import plan as plan_command
from postroad.clocks import BOUNDS_US, SkewCheck
from postroad.errors import UsageError
from postroad.ids import IdSource, MessageId
from postroad.net.configure import configure
from postroad.seam.tracking import ReplaceAttachments, StoreAttachments
from postroad.storage.tracking_store import TrackingStore
from postroad.tracking.attachment import NEIGHBOUR, SUBSCRIBER, AttachmentMap
from postroad.tracking.attachment_log import Change, EncodedParts, decode_changes, encode_changes
from postroad.tracking.planner import (
    MAX_MATCHING,
    MAX_PERSIST_US,
    PERSIST_MARGIN,
    Impossible,
    Plan,
    Wish,
    plan,
)
from postroad.tracking.query.messages import TraceItem, TraceQuestion
from postroad.tracking.query.render import dot, tree
from postroad.tracking.query.trace import parse_ids
from postroad.tracking.query.verdict import Delivered, RouteStep, TraceResult
from postroad.tracking.settings import GATHER_US, TrackingConfig
from postroad.tracking.strategies import make_tracking
from postroad.units import MILLISECOND_US, SECOND_US

# ---- attachment map


def started(now_us: int = 0) -> tuple[AttachmentMap, list[Change]]:
    return AttachmentMap.restored((), last_stored_us=0, now_us=now_us)


def test_read_with_the_skew_on_both_sides() -> None:
    """T10."""
    held, _ = started()
    held.attached(SUBSCRIBER, "ann", 10 * SECOND_US)
    held.detached(SUBSCRIBER, "ann", 20 * SECOND_US)
    held.attached(NEIGHBOUR, "12", 10 * SECOND_US)

    def found(time_ms: int, delay_us: int = 0) -> list[str]:
        return held.at(SUBSCRIBER, time_ms, skew_us=SECOND_US, delay_us=delay_us)

    assert [bool(found(ms)) for ms in (8998, 9000, 15_000, 21_000, 21_001)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert found(8000, delay_us=2 * SECOND_US) == ["ann"]
    assert held.at(NEIGHBOUR, 10**9, skew_us=0) == ["12"]
    assert list(held) == [(NEIGHBOUR, "12")]
    held.check()


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["attach", "detach", "stop", "crash", "forget"])),
        max_size=30,
    )
)
@settings(max_examples=100)
def test_the_log_gives_the_same_map(steps: list[tuple[str, str]]) -> None:
    """T4: restored from its log, or from a snapshot, it answers the same."""
    held, log = started()
    truth: dict[int, set[str]] = {}
    attached: set[str] = set()
    begin = 0
    for number, (who, action) in enumerate(steps):
        now_us = (number + 1) * SECOND_US
        if action == "attach":
            log += held.attached(SUBSCRIBER, who, now_us)
            attached.add(who)
        elif action == "detach":
            log += held.detached(SUBSCRIBER, who, now_us)
            attached.discard(who)
        elif action == "forget":
            begin = max(begin, now_us - 5 * SECOND_US)
            held.forget(begin, now_us)
            log = list(held.snapshot(now_us))
        else:
            if action == "stop":
                log += held.stopped(now_us)
            attached.clear()
            changes, whole = decode_changes(encode_changes(log) + b"torn")
            assert (changes, whole) == (log, len(encode_changes(log)))
            held, news = AttachmentMap.restored(changes, last_stored_us=now_us, now_us=now_us)
            log = changes + news
        held.check()
        truth[now_us + SECOND_US // 2] = set(attached)
    for at_us, expected in truth.items():
        if at_us > begin:
            assert set(held.at(SUBSCRIBER, at_us // MILLISECOND_US, skew_us=0)) == expected


def test_a_crash_is_a_gap_and_a_stop_is_not() -> None:
    held, log = started(SECOND_US)
    log += held.attached(SUBSCRIBER, "ann", 2 * SECOND_US)
    died, _ = AttachmentMap.restored(log, last_stored_us=5 * SECOND_US, now_us=9 * SECOND_US)
    assert died.lost == [(5 * SECOND_US, 9 * SECOND_US)]
    assert [died.lost_at(ms, skew_us=0) for ms in (4999, 5001, 8999, 9001)] == [False, True, True, False]
    assert died.at(SUBSCRIBER, 8000, skew_us=0) == ["ann"]
    assert died.at(SUBSCRIBER, 10_000, skew_us=0) == []
    log += held.stopped(6 * SECOND_US)
    ended, _ = AttachmentMap.restored(log, last_stored_us=5 * SECOND_US, now_us=9 * SECOND_US)
    assert ended.lost == []
    assert ended.at(SUBSCRIBER, 8000, skew_us=0) == []
    assert ended.begins_us == SECOND_US


def test_what_is_recorded_again_at_a_start_is_wanted_again_if_that_process_dies_too() -> None:
    """Unless that was done, and something is stored after it: T4, what a crash costs."""
    held, log = started(SECOND_US)
    assert held.unrecorded_us is None
    assert held.recorded(2 * SECOND_US) == []
    held, news = AttachmentMap.restored(log, last_stored_us=5 * SECOND_US, now_us=9 * SECOND_US)
    assert held.unrecorded_us == 5 * SECOND_US
    log += news
    again, news = AttachmentMap.restored(log, last_stored_us=5 * SECOND_US, now_us=12 * SECOND_US)
    assert again.lost[-1] == (9 * SECOND_US, 12 * SECOND_US)
    assert again.unrecorded_us == 5 * SECOND_US
    other, _ = AttachmentMap.restored(log, last_stored_us=10 * SECOND_US, now_us=12 * SECOND_US)
    assert other.unrecorded_us == 5 * SECOND_US, "it still read its log"
    log += held.recorded(10 * SECOND_US)
    for stored_us, unrecorded_us in (
        (10 * SECOND_US, 5 * SECOND_US),
        (10 * SECOND_US + 1, 10 * SECOND_US + 1),
    ):
        stored, news = AttachmentMap.restored(log, last_stored_us=stored_us, now_us=12 * SECOND_US)
        assert stored.unrecorded_us == unrecorded_us
        # What a process before it has recorded is not what this one has to.
        again, _ = AttachmentMap.restored(log + news, last_stored_us=13 * SECOND_US, now_us=14 * SECOND_US)
        assert again.unrecorded_us == unrecorded_us
    log += held.stopped(11 * SECOND_US)
    ended, _ = AttachmentMap.restored(log, last_stored_us=5 * SECOND_US, now_us=12 * SECOND_US)
    assert ended.unrecorded_us is None


@pytest.mark.parametrize("anew", [False, True])
def test_a_stop_says_since_when_events_are_not_recorded(anew: bool) -> None:
    """T4: those on their way to the log. What the next process records of them is wanted again if it dies."""
    held, log = started(SECOND_US)
    log += held.stopped(9 * SECOND_US, 3 * SECOND_US)
    held, news = AttachmentMap.restored(log, last_stored_us=8 * SECOND_US, now_us=20 * SECOND_US)
    assert (held.unrecorded_us, held.lost) == (3 * SECOND_US, [])
    log += news
    for recorded in (False, True):
        log += held.recorded(25 * SECOND_US) if recorded else []
        log = list(held.snapshot(20 * SECOND_US)) if anew else log
        again, _ = AttachmentMap.restored(log, last_stored_us=0, now_us=40 * SECOND_US)
        assert again.unrecorded_us == 3 * SECOND_US
        stored, _ = AttachmentMap.restored(log, last_stored_us=30 * SECOND_US, now_us=40 * SECOND_US)
        assert stored.unrecorded_us == (30 if recorded else 3) * SECOND_US


def test_a_process_that_does_not_track_passes_on_what_is_not_recorded(tmp_path: Path) -> None:
    """T4."""
    held, log = started(SECOND_US)
    store = TrackingStore(tmp_path, sync=False)
    store.load()
    record = encode_changes([*log, *held.stopped(9 * SECOND_US, 3 * SECOND_US)])
    store.apply([StoreAttachments(record=record)])
    for now_us in (20 * SECOND_US, 30 * SECOND_US):
        TrackingStore(tmp_path, sync=False).untracked(now_us)
    changes = TrackingStore(tmp_path, sync=False).load().changes
    tracked, _ = AttachmentMap.restored(changes, last_stored_us=0, now_us=40 * SECOND_US)
    assert tracked.unrecorded_us == 3 * SECOND_US
    assert tracked.lost == [(20 * SECOND_US, 40 * SECOND_US)]


def test_a_long_catch_up_costs_few_changes() -> None:
    held, _ = started()
    changes = [held.late(SUBSCRIBER, "ann", ms, ms + 50, ms * 1000) for ms in range(0, 600_000, 50)]
    assert sum(map(len, changes)) <= 11
    assert held.at(SUBSCRIBER, 345_678, skew_us=0) == ["ann"]
    held.check()


# ---- skew


def test_skew_check() -> None:
    """T5: |tb - (t + delta)| <= Ts, else what to add; once a second; judged by the newest id."""
    check = SkewCheck(250 * MILLISECOND_US, me=2)
    now_us = 1_700_000_000_000_000

    def newest(ahead_ms: int, publisher: int = 1, broker: int = 2) -> bytes:
        return bytes(MessageId(publisher, broker, now_us // 1000 + ahead_ms, 0))

    assert check.correction_us(1, newest(0), now_us) is None
    assert check.correction_us(1, newest(249), now_us) is None
    assert check.correction_us(1, newest(-250), now_us) is None
    # Brought along: from another broker, or from an earlier start of this one.
    assert check.correction_us(1, newest(-90_000, broker=9), now_us) is None
    assert check.correction_us(1, newest(-90_000, publisher=3), now_us) is None
    late = check.correction_us(1, newest(-5000), now_us)
    assert late is not None
    assert abs(late - 5 * SECOND_US) <= MILLISECOND_US
    assert check.correction_us(1, newest(-5000), now_us + 900_000) is None
    assert check.correction_us(2, newest(4000, publisher=2), now_us) == -4_000_500
    assert check.correction_us(1, newest(-5000), now_us + 1_100_000) is not None
    check.forget(2)
    assert check.correction_us(2, newest(4000, publisher=2), now_us) is not None
    assert check.corrections == 4


@given(
    st.integers(1, 300_000),
    st.lists(st.tuples(st.integers(0, 30_000), st.integers(-310, 310)), min_size=1, max_size=30),
)
def test_the_skew_check_is_the_formula(tolerance_us: int, frames: list[tuple[int, int]]) -> None:
    """T5, at any moment, for any time, at the edges too."""
    check = SkewCheck(tolerance_us, me=2)
    now_us = 1_700_000_000_000_000
    for publisher, (later_us, ahead_ms) in enumerate(frames, 1):
        now_us += later_us
        time_ms = now_us // 1000 + ahead_ms
        ahead_us = time_ms * 1000 + 500 - now_us
        expected = None if abs(ahead_us) <= tolerance_us else -ahead_us
        newest = bytes(MessageId(publisher, 2, time_ms, 0))
        assert check.correction_us(publisher, newest, now_us) == expected
        if now_us >= check.until_us:
            check.bound(now_us)
        assert not check.early <= newest[8:14] < check.late or expected is None
        assert check.early <= newest[8:14] or ahead_us <= BOUNDS_US + MILLISECOND_US - tolerance_us
        assert newest[8:14] < check.late or ahead_us + BOUNDS_US + MILLISECOND_US >= tolerance_us


def test_a_corrected_publisher_stays_within_the_tolerance() -> None:
    """T5: a clock that jumps by an hour is back after one correction."""
    check = SkewCheck(250 * MILLISECOND_US, me=2)
    delta_us, corrections = 0, 0
    for step in range(100):
        now_us = 1_700_000_000_000_000 + step * 2 * SECOND_US
        clock_us = now_us + (3_600 * SECOND_US if step >= 50 else 0)
        identity = IdSource(1, 2).next((clock_us + delta_us) // MILLISECOND_US)
        change = check.correction_us(1, identity, now_us)
        if change is not None:
            corrections += 1
            delta_us += change
    assert corrections == 1


# ---- planner

wishes = st.builds(
    Wish,
    accuracy=st.sampled_from((0.5, 0.9, 0.95, 0.99, 0.999, 0.99999, 0.9999999)),
    rate=st.floats(1e-9, 2e6),
    memory=st.integers(1, 1 << 28),
    skew_us=st.integers(0, 10**8) | st.integers(0, 10**10),
    jitter_us=st.integers(0, 10**8) | st.integers(0, 10**10),
)


@given(wishes)
@settings(max_examples=200, deadline=None)
def test_plans_keep_their_promise(wish: Wish) -> None:
    """T7: a plan meets Corollary 2 and the accuracy; a refusal names wishes that are possible."""
    found = plan(wish)
    if isinstance(found, Plan):
        assert found.accuracy >= wish.accuracy - 1e-12
        assert 2 * found.skew_us + wish.jitter_us + 2 * GATHER_US <= found.w * found.lifetime_us
        assert found.lifetime_us <= found.persist_us
        assert found.lifetime_us <= found.shape.n / wish.rate * SECOND_US
        assert found.persist_us <= MAX_PERSIST_US * PERSIST_MARGIN + MILLISECOND_US
        assert found.shape.size <= wish.memory
        assert found.skew_us >= wish.skew_us
        assert found.skew_limit_us >= found.skew_us
        assert 1 <= found.w < MAX_MATCHING
        TrackingConfig(
            bits=found.shape.m,
            capacity=found.shape.n,
            hashes=found.shape.k,
            persist_us=found.persist_us,
            skew_us=found.skew_us,
            jitter_us=wish.jitter_us,
        )
    else:
        assert found.nearest
        for names, other in found.nearest:
            assert isinstance(plan(other), Plan), names
            changed = {
                field.removesuffix("_us")
                for field in ("accuracy", "rate", "memory", "skew_us", "jitter_us")
                if getattr(other, field) != getattr(wish, field)
            }
            assert changed == set(names)


def test_the_papers_configuration() -> None:
    """Section 5: 10,000 bytes, 5,000 a second, five nines: about 2521 keys, 16 hashes, w = 1."""
    found = plan(Wish(accuracy=0.99999, rate=5000, memory=8192, skew_us=150_000, jitter_us=0))
    assert isinstance(found, Plan)
    assert (found.w, found.shape.m) == (1, 65536)
    assert 2521 <= found.shape.n <= 2600
    assert found.shape.k in (16, 17, 18)


def test_wishes_that_make_no_sense() -> None:
    good = {"accuracy": 0.9, "rate": 1.0, "memory": 1, "skew_us": 0, "jitter_us": 0}
    bad: tuple[tuple[str, float], ...] = (
        *(("accuracy", value) for value in (1.0, 0.0, -1.0, 1e-17, float("nan"), 1 - 1e-17)),
        *(("rate", value) for value in (0.0, -1.0, float("nan"), float("inf"))),
        *(("memory", 0), ("skew_us", -1), ("jitter_us", -1)),
    )
    for name, value in bad:
        with pytest.raises(UsageError):
            Wish(**{**good, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "absurd",
    [
        {"rate": 5e-324},
        {"rate": 1e-300},
        {"rate": 0.01},
        {"accuracy": 1e-15},
        {"accuracy": 1 - 1e-15},
        {"memory": 10**30},
        {"memory": 1},
        {"rate": 1e300},
        {"skew_us": 10**40},
        {"jitter_us": 10**300, "memory": 1, "rate": 1e308},
    ],
)
def test_absurd_wishes_are_answered(absurd: dict[str, float]) -> None:
    """T7: whatever is asked, there is a plan, or a reason and the nearest that is possible."""
    common = {"accuracy": 0.999, "rate": 5000.0, "memory": 1 << 17, "skew_us": 250_000, "jitter_us": 500_000}
    found = plan(Wish(**{**common, **absurd}))  # type: ignore[arg-type]
    if isinstance(found, Plan):
        assert found.persist_us <= MAX_PERSIST_US * PERSIST_MARGIN + MILLISECOND_US
    else:
        assert found.reason
        assert found.nearest
        assert all(isinstance(plan(other), Plan) for _, other in found.nearest)


def test_the_nearest_wish_is_near() -> None:
    """Whatever lies between is impossible, and what is offered has at most three digits too few."""
    common = {"memory": 8192, "skew_us": 250_000, "jitter_us": 500_000}
    found = plan(Wish(accuracy=0.999, rate=1e300, **common))
    assert isinstance(found, Impossible)
    rate = dict(found.nearest)["rate",].rate
    assert isinstance(plan(Wish(accuracy=0.999, rate=rate * 1.01, **common)), Impossible)
    wish = Wish(accuracy=1 - 1e-12, rate=26_000, **common)
    found = plan(wish)
    assert isinstance(found, Impossible)
    error = 1 - dict(found.nearest)["accuracy",].accuracy
    assert error < 1e-3
    assert isinstance(plan(replace(wish, accuracy=1 - error * 0.98)), Impossible)


def test_wishes_that_one_alone_cannot_mend() -> None:
    """T7: those in the way give way together, by the same share, and the others not at all."""
    hour_us = 3_600 * SECOND_US
    wish = Wish(accuracy=0.999, rate=5000, memory=1 << 17, skew_us=hour_us, jitter_us=hour_us)
    found = plan(wish)
    assert isinstance(found, Impossible)
    ((names, near),) = found.nearest
    assert names == ("skew", "jitter")
    assert near.skew_us == near.jitter_us
    assert isinstance(plan(near), Plan)
    assert isinstance(plan(replace(near, skew_us=near.skew_us + SECOND_US)), Impossible)
    found = plan(replace(wish, jitter_us=0, memory=100))
    assert isinstance(found, Impossible)
    assert [names for names, _ in found.nearest] == [
        (name, "skew") for name in ("memory", "rate", "accuracy")
    ]


def run_plan(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    plan_command.register(app)
    result = CliRunner().invoke(app, ["plan", "tracking", *arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.stdout


def test_plan_command_prints_configuration() -> None:
    code, text = run_plan("--accuracy", "0.99999", "--rate", "5000", "--memory", "135000", "--skew", "1 s")
    assert code == 0
    assert set(tomllib.loads(text)["tracking"]) == {
        "strategy",
        "bits",
        "capacity",
        "hashes",
        "persist",
        "skew",
        "jitter",
    }
    code, text = run_plan("--accuracy", "0.99999", "--json")
    assert json.loads(text)["configuration"]["tracking"]["strategy"] == "bloom"


@given(
    accuracy=st.floats(1e-6, 1 - 1e-12),
    rate=st.floats(1e-3, 1e9),
    memory=st.integers(1, 1 << 40),
    skew_us=st.integers(0, 10**8),
    jitter_us=st.integers(0, 10**8),
)
@example(accuracy=0.999, rate=3e6, memory=1 << 29, skew_us=250_000, jitter_us=500_000)
@example(accuracy=1e-6, rate=1, memory=1 << 17, skew_us=0, jitter_us=0)
@example(accuracy=0.1, rate=1e9, memory=1 << 40, skew_us=0, jitter_us=0)
@settings(max_examples=100, deadline=None)
def test_what_is_planned_is_accepted(
    tmp_path_factory: pytest.TempPathFactory,
    accuracy: float,
    rate: float,
    memory: int,
    skew_us: int,
    jitter_us: int,
) -> None:
    """T7: a broker takes the configuration that a plan prints, whatever was wished."""
    wish = ("--accuracy", str(accuracy), "--rate", str(rate), "--memory", str(memory))
    code, text = run_plan(*wish, "--skew", f"{skew_us} us", "--jitter", f"{jitter_us} us")
    if code == 0:
        file = tmp_path_factory.getbasetemp() / "planned.toml"
        file.write_text(text)
        assert configure({}, file).broker.tracking.jitter_us == jitter_us


def test_plan_command_says_what_is_impossible() -> None:
    """T7."""
    code, text = run_plan("--accuracy", "0.99999", "--rate", "1000000", "--memory", "8 KiB", "--skew", "1 s")
    assert code == 1
    assert text.startswith("impossible: a filter of 8192 bytes holds")
    assert "--memory '" in text
    assert "--rate " in text
    code, text = run_plan("--rate", "1000000", "--memory", "8 KiB", "--json")
    assert json.loads(text)["possible"] is False
    nearest = json.loads(text)["nearest"]
    assert isinstance(
        plan(Wish(accuracy=0.999, rate=1e6, memory=nearest["memory"], skew_us=250_000, jitter_us=500_000)),
        Plan,
    )
    clocks = ("--skew", "1h", "--jitter", "1h", "--rate", "1")
    code, text = run_plan(*clocks)
    assert (code, text.splitlines()[2:]) == (1, ["  --skew '299 s' --jitter '299 s'"])
    code, text = run_plan(*clocks, "--json")
    assert (code, json.loads(text)["nearest"]) == (1, {})
    assert json.loads(text)["together"] == [{"skew": 299.0, "jitter": 299.0}]
    for option, value in (
        *(("--accuracy", value) for value in ("1", "1e-17", "nan")),
        *(("--memory", value) for value in ("nan", "\N{SUPERSCRIPT TWO}", "9" * 400, "9" * 5000, "")),
        *(("--rate", value) for value in ("0", "nan", "-1")),
        *(("--skew", value) for value in ("-1s", "nan", "9" * 400 + " s", "1")),
    ):
        with pytest.raises(UsageError):
            run_plan(option, value)
    with pytest.raises(UsageError, match="rate must be finite"):
        run_plan("--rate", "inf")
    assert isinstance(plan(Wish(accuracy=0.9, rate=1, memory=9, skew_us=10**12, jitter_us=0)), Impossible)


def test_a_filter_that_claims_everything_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "postroad.toml"
    for text in ("bits = 8", "capacity = 100000000", "hashes = 64\ncapacity = 2000000"):
        file.write_text(f"[tracking]\n{text}\n")
        with pytest.raises(
            UsageError, match="bits, capacity and hashes together, as `postroad plan tracking`"
        ):
            configure({}, file)
    file.write_text("[tracking]\nbits = 8\ncapacity = 1\nhashes = 1\ncache_bytes = 0\n")
    assert configure({}, file).broker.tracking.cache_bytes == 0
    file.write_text("[streams]\ncache_bytes = 0\n")
    with pytest.raises(UsageError, match="not a size"):
        configure({}, file)


def test_a_plan_without_skew_and_jitter_is_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "postroad.toml"
    file.write_text(run_plan("--skew", "0", "--jitter", "0")[1])
    tracking = configure({}, file).broker.tracking
    assert (tracking.skew_us, tracking.jitter_us) == (MILLISECOND_US, 0)


# ---- what people see

RESULT = TraceResult(
    id="0000002a-00000007-0193c1d2e3f4-0001",
    publisher=42,
    origin="b1",
    origin_doubt=1e-9,
    route=(
        RouteStep(broker="b1", source=None, doubt=1e-9),
        RouteStep(broker="b2", source="b1", doubt=0.0),
        RouteStep(broker="b3", source="b2", doubt=0.0123),
        RouteStep(broker="b4", source="b9", doubt=1.0),
    ),
    receivers=(
        Delivered(subscriber="billing", broker="b1", doubt=5e-4),
        Delivered(subscriber='a "quoted" one', broker="b3", doubt=0.0),
    ),
    verdict="partial",
    explanation="b5: cannot be reached",
    missing=(("b5", "cannot be reached"),),
)


def test_json_has_the_documented_shape() -> None:
    made = RESULT.to_json()
    assert list(made) == ["id", "origin", "route", "receivers", "missing"]
    assert made["origin"] == {"publisher": "0000002a", "broker": "b1"}
    assert made["route"][1] == {"broker": "b2", "from": "b1", "doubt": 0.0}
    assert made["receivers"][0] == {"subscriber": "billing", "broker": "b1", "doubt": 5e-4}
    assert made["missing"]["verdict"] == "partial"
    assert made["missing"]["brokers"] == [{"broker": "b5", "why": "cannot be reached"}]
    json.dumps(made)


def test_tree() -> None:
    assert tree(RESULT).splitlines() == [
        "message 0000002a-00000007-0193c1d2e3f4-0001",
        "published by 0000002a at b1 (doubt 1e-09)",
        "├─ → billing (doubt 5e-04)",
        "└─ b2 (certain)",
        "   └─ b3 (doubt 0.012)",
        '      └─ → a "quoted" one (certain)',
        "b4, from b9 (doubtful: nobody confirms it)",
        "partial: b5: cannot be reached",
    ]


def test_dot() -> None:
    lines = dot(RESULT).splitlines()
    assert (lines[0], lines[-1]) == ("digraph trace {", "}")
    assert '  "b2" -> "b3" [label="1.2e-02"];' in lines
    assert '  "b9" -> "b4" [label="1.0e+00", style=dashed];' in lines
    assert '  "b3" -> "subscriber a \\"quoted\\" one" [label="0.0e+00"];' in lines


def test_dot_says_the_verdict() -> None:
    def label(explanation: str) -> str:
        return dot(msgspec.structs.replace(RESULT, explanation=explanation)).splitlines()[2].strip()

    assert label("b5: cannot be reached") == f'label="{RESULT.id}\\npartial: b5: cannot be reached";'
    assert label('of "b\\n"\nno answer') == f'label="{RESULT.id}\\npartial: of \\"b\\\\n\\" no answer";'
    assert label("") == f'label="{RESULT.id}";'


def test_malformed_ids_are_named() -> None:
    assert parse_ids([RESULT.id])[0].hex() == "0000002a000000070193c1d2e3f40001"
    with pytest.raises(UsageError, match="'nonsense' is not a message id"):
        parse_ids([RESULT.id, "nonsense"])


def test_configuration_is_checked() -> None:
    for wrong in (
        {"strategy": "all"},
        {"routing": "x"},
        {"deliveries": "x"},
        {"bits": 1},
        {"hashes": 0},
        {"persist_us": 0},
        {"max_histories": 0},
        {"jitter_us": -1},
    ):
        with pytest.raises(UsageError):
            TrackingConfig(**wrong)  # type: ignore[arg-type]


def test_cores_are_pure() -> None:
    """Everything but the store, which is the driver's."""
    forbidden = {"asyncio", "socket", "time", "random", "os", "threading", "pathlib", "subprocess"}
    folder = Path(postroad.tracking.__file__).parent
    modules = sorted(path for path in folder.glob("*.py") if path.name != "store.py")
    assert len(modules) > 15
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & forbidden, path
            assert "postroad.storage.tracking_store" not in names


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("ends", ["link", "process"])
def test_a_link_lasts_as_long_as_the_messages_that_went_over_it(strategy: str, ends: str) -> None:
    """T10: by its publisher's clock, five seconds ahead, the message came after the link was down."""
    now = 1_700_000_000 * SECOND_US
    config = TrackingConfig(strategy=strategy)
    tracking = make_tracking(config, me=1, stored=[], changes=[], now_us=now)
    tracking.linked(2, now)
    ahead = bytes(MessageId(9, 1, now // 1000 + 5000, 0))
    tracking.published(ahead, now + SECOND_US)
    if ends == "link":
        tracking.unlinked(2, now + 2 * SECOND_US)
    else:
        stored = tracking.close(now + 2 * SECOND_US)
        changes = [effect for effect in stored if isinstance(effect, StoreAttachments)]
        log = b"".join(effect.record for effect in changes)
        tracking = make_tracking(
            config, me=1, stored=[], changes=decode_changes(log)[0], now_us=now + 3 * SECOND_US
        )
    question = TraceQuestion(items=(TraceItem(id=ahead, origin=1),))
    (finding,) = tracking.answer(question, {})[0].findings
    assert finding.neighbours == (2,)


def test_a_whole_map_can_be_written_more_than_once() -> None:
    """Its parts are made when they are taken: whoever takes them first leaves nothing out for the next."""
    changes = [
        Change(what="attach", at_us=number, kind="subscriber", who=f"s{number}") for number in range(5000)
    ]
    effect = ReplaceAttachments(parts=EncodedParts(changes))
    assert len(list(effect.parts)) > 1
    for _ in range(2):
        assert decode_changes(effect.record)[0] == changes
