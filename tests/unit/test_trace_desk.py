"""T6: the desk runs traces and answers other brokers' questions; all that can pile up there is bounded."""

from __future__ import annotations

import msgspec
import pytest

from postroad.errors import UnavailableError
from postroad.ids import MessageId
from postroad.tracking import desk
from postroad.tracking.desk import WORK_A_TURN, WORK_AN_ID, Inquire, Output, Report, Respond, TraceDesk
from postroad.tracking.effects import ReadFilters, StoreFilter
from postroad.tracking.messages import Finding, Receiver, Sighting, TraceAnswer, TraceItem, TraceQuestion
from postroad.tracking.record import decode_record
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import NoTracking, Tracking, make_tracking
from postroad.tracking.trace import NO_ANSWER, NOT_REACHABLE
from postroad.units import SECOND_US
from postroad.wire.frames import MAX_BODY_BYTES

ME, OTHER = 7, 8
NOW_US = 1_700_000_000 * SECOND_US
NAMES = {ME: "here", OTHER: "there"}


def identity(number: int, *, origin: int = ME) -> bytes:
    return bytes(MessageId(number, origin, NOW_US // 1000, 0))


def desk_of(tracking: Tracking | None = None, *reachable: int) -> TraceDesk:
    return TraceDesk(
        tracking or NoTracking(), me=ME, reachable=lambda: reachable or (ME, OTHER), names=lambda: NAMES
    )


def question(*ids: bytes) -> bytes:
    return msgspec.msgpack.encode(TraceQuestion(items=tuple(TraceItem(id=one, origin=0) for one in ids)))


def the(kind: type[Output], outputs: list[Output]) -> list[Output]:
    return [one for one in outputs if isinstance(one, kind)]


def stored(count: int = 1) -> tuple[Tracking, dict[int, bytes]]:
    """Tracking that has its filters on disk only, and that disk."""
    config = TrackingConfig(retain=False, cache_bytes=0)
    first = make_tracking(config, me=ME, stored=(), changes=(), now_us=NOW_US)
    for number in range(count):
        first.published(identity(number), NOW_US)
    effects = [*first.tick(NOW_US + SECOND_US), *first.close(NOW_US + 60 * SECOND_US)]
    kept = [one for one in effects if isinstance(one, StoreFilter)]
    metas = [decode_record(one.record)[0] for one in kept]
    after_us = NOW_US + 100 * SECOND_US
    again = make_tracking(config, me=ME, stored=metas, changes=(), now_us=after_us)
    return again, {one.sequence: one.record for one in kept}


def test_a_trace_asks_its_own_broker_and_others_and_reports() -> None:
    made = desk_of()
    ticket, out = made.begin([identity(1, origin=OTHER)], NOW_US)
    (ask,) = the(Inquire, out)
    assert isinstance(ask, Inquire)
    assert ask.broker == OTHER
    finding = Finding(published=0.001)
    body = msgspec.msgpack.encode(TraceAnswer(findings=(finding,)))
    out = made.answered(ask.number, body, NOW_US)
    (report,) = the(Report, out)
    assert isinstance(report, Report)
    assert report.ticket == ticket
    assert [one.origin for one in report.results] == ["there"]
    assert made.traces == {}
    assert made.next_deadline() is None
    assert made.answered(ask.number, body, NOW_US) == []  # nobody waits for it any more


def test_an_answer_that_cannot_be_read_is_none() -> None:
    """The trace goes on without that broker and says so."""
    two = msgspec.msgpack.encode(TraceAnswer(findings=(Finding(), Finding())))
    absurd = msgspec.msgpack.encode(
        TraceAnswer(findings=(Finding(routed=(Sighting(origin=1, neighbour=2, fpp=7.0),)),))
    )
    forged = Receiver(subscriber="x\x1b[2J\x1b[1;1Hmessage ok\nfake line", fpp=0.0)
    texts = [
        msgspec.msgpack.encode(TraceAnswer(findings=(finding,)))
        for finding in (
            Finding(published=0.0, delivered=(forged,), candidates=1),
            Finding(published=0.0, lost="gone\rcomplete"),
        )
    ]
    no_text = msgspec.msgpack.encode(TraceAnswer(findings=(Finding(lost="?"),))).replace(b"?", b"\xff")
    deep = b"\x92\x91\x90" + b"\x91" * 5_000
    for body in (b"nonsense", no_text, deep, two, absurd, *texts):
        made = desk_of()
        _, out = made.begin([identity(1, origin=OTHER)], NOW_US)
        (ask,) = the(Inquire, out)
        assert isinstance(ask, Inquire)
        (report,) = the(Report, made.answered(ask.number, body, NOW_US))
        assert isinstance(report, Report)
        ((broker, why),) = [row for row in report.results[0].missing if row[0] == "there"]
        assert "cannot be read" in why, broker


def test_silence_and_failures_end_a_trace_too() -> None:
    made = desk_of()
    made.begin([identity(1, origin=OTHER)], NOW_US)
    deadline = made.next_deadline()
    assert deadline is not None
    assert made.tick(deadline - 1) == []
    (late,) = the(Report, made.tick(deadline))
    assert isinstance(late, Report)
    assert ("there", NO_ANSWER) in late.results[0].missing
    _, out = made.begin([identity(1, origin=OTHER)], NOW_US)
    (ask,) = the(Inquire, out)
    assert isinstance(ask, Inquire)
    (gone,) = the(Report, made.failed(ask.number, "went away", NOW_US))
    assert isinstance(gone, Report)
    assert ("there", "went away") in gone.results[0].missing
    assert made.failed(ask.number, "went away", NOW_US) == []


def test_a_broker_known_and_away_may_have_what_nobody_knows() -> None:
    made = desk_of(make_tracking(TrackingConfig(), me=ME, stored=(), changes=(), now_us=NOW_US), ME)
    later_us = NOW_US + 60 * SECOND_US
    _, out = made.begin([bytes(MessageId(1, ME, later_us // 1000, 0))], later_us)
    (report,) = the(Report, out)
    assert isinstance(report, Report)
    assert (report.results[0].verdict, report.results[0].missing) == ("partial", (("there", NOT_REACHABLE),))


def test_traces_under_way_are_bounded_and_can_be_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "MAX_TRACES", 2)
    made = desk_of()
    tickets = [made.begin([identity(n, origin=OTHER)], NOW_US) for n in (1, 2)]
    with pytest.raises(UnavailableError, match="try again"):
        made.begin([identity(3, origin=OTHER)], NOW_US)
    ticket, out = tickets[0]
    made.abandon(ticket)
    assert made.metrics()["traces"] == 1
    (ask,) = the(Inquire, out)
    assert isinstance(ask, Inquire)
    assert made.answered(ask.number, b"", NOW_US) == []
    made.begin([identity(3, origin=OTHER)], NOW_US)


def test_a_question_of_another_broker_is_answered_once_its_records_are_read() -> None:
    tracking, disk = stored()
    made = desk_of(tracking)
    out = made.asked(OTHER, 99, question(identity(0)), NOW_US + 200 * SECOND_US)
    for _ in range(10):
        if not isinstance(out[0], ReadFilters):
            break
        records = {sequence: disk[sequence] for sequence in out[0].sequences}
        tag = out[0].tag
        out = made.read(tag, records, NOW_US + 200 * SECOND_US)
        assert made.read(tag, records, NOW_US) == []
    (respond,) = out
    assert isinstance(respond, Respond)
    assert (respond.broker, respond.number) == (OTHER, 99)
    (finding,) = msgspec.msgpack.decode(respond.body, type=TraceAnswer).findings
    assert finding.published is not None
    assert made.metrics()["trace_questions_waiting"] == 0


def test_questions_that_wait_for_the_disk_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks beyond that is told at once, so that its trace need not wait for us."""
    monkeypatch.setattr(desk, "MAX_QUESTIONS", 1)
    tracking, _ = stored()
    made = desk_of(tracking, ME)
    later_us = NOW_US + 200 * SECOND_US
    (first,) = made.asked(OTHER, 1, question(identity(0)), later_us)
    assert isinstance(first, ReadFilters)
    (refused,) = made.asked(OTHER, 2, question(identity(0), identity(1)), later_us)
    assert isinstance(refused, Respond)
    said = msgspec.msgpack.decode(refused.body, type=TraceAnswer).findings
    assert [one.lost for one in said] == ["has too many questions to answer"] * 2
    _, out = made.begin([identity(0)], later_us)
    (report,) = out
    assert isinstance(report, Report)
    assert ("here", "has too many questions to answer") in report.results[0].missing


def test_a_question_that_makes_no_sense_has_no_answer() -> None:
    """Nor does it end the link to whoever passed it on, nor a process that tracks nothing."""
    tracking, _ = stored()
    many = question(*[identity(0)] * 257)
    no_text, deep = b"\x91\x91\x92\xa1\xff\x00", b"\x92\x90" + b"\x91" * 5_000
    absurd_ones = (b"", b"nonsense", no_text, deep, question(), question(b"short"), many)
    for absurd in (*absurd_ones, question(*[b""] * 200_000)):
        for made in (desk_of(tracking), desk_of(NoTracking())):
            assert made.asked(OTHER, 1, absurd, NOW_US) == []


def test_an_answer_that_is_too_long_names_fewer_receivers() -> None:
    """4096 names of 250 bytes: who got it is cut, that it was here is not. So it is for other brokers."""
    tracking = make_tracking(TrackingConfig(), me=ME, stored=(), changes=(), now_us=NOW_US)
    names = [f"client-{number:05d}".ljust(250, "x") for number in range(4096)]
    for name in names:
        tracking.attached(name, NOW_US)
    tracking.published(identity(1), NOW_US)
    tracking.delivered(ME, names, identity(1), NOW_US)
    made = desk_of(tracking, ME)
    _, out = made.begin([identity(1)], NOW_US)
    (report,) = the(Report, out)
    assert isinstance(report, Report)
    (result,) = report.results
    assert (result.verdict, [step.broker for step in result.route]) == ("partial", ["here"])
    assert len(result.receivers) == 2048
    assert result.missing == (("here", "2048 more receivers"),)
    (response,) = made.asked(OTHER, 5, question(identity(1)), NOW_US)
    assert isinstance(response, Respond)
    assert len(response.body) <= MAX_BODY_BYTES
    (finding,) = msgspec.msgpack.decode(response.body, type=TraceAnswer).findings
    assert (len(finding.delivered), finding.more, finding.candidates) == (2048, 2048, 4096)


def test_why_the_broker_in_the_id_said_nothing_is_told() -> None:
    made = desk_of()
    _, out = made.begin([identity(1, origin=OTHER)], NOW_US)
    assert the(Inquire, out)
    (report,) = the(Report, made.tick(NOW_US + 3 * SECOND_US))
    assert isinstance(report, Report)
    assert report.results[0].verdict == "unreachable"
    told = "broker there, where the message was published, did not answer in time"
    assert report.results[0].explanation == told


def crowded(messages: int) -> tuple[Tracking, list[bytes]]:
    """Tracking with so many subscribers that a turn has room for the keys of two messages."""
    tracking = make_tracking(TrackingConfig(), me=ME, stored=(), changes=(), now_us=NOW_US)
    for number in range(WORK_A_TURN // 4):
        tracking.attached(f"s{number}", NOW_US)
    ids = [identity(number) for number in range(messages)]
    for number, one in enumerate(ids):
        tracking.published(one, NOW_US)
        tracking.delivered(ME, [f"s{number}"], one, NOW_US)
    return tracking, ids


def test_a_long_question_is_worked_on_over_turns() -> None:
    """Found: 256 ids took seconds of one turn where there are ten thousand subscribers, and deliveries
    waited. Who asks little meanwhile need not wait for all of it."""
    tracking, ids = crowded(20)
    whole, _ = tracking.answer(TraceQuestion(items=tuple(TraceItem(id=one, origin=0) for one in ids)), {})
    each = (tracking.looked + len(ids) * WORK_AN_ID) // len(ids)
    made = desk_of(tracking)
    turns: list[list[Output]] = []
    before = tracking.looked
    out = made.asked(OTHER, 1, question(*ids), NOW_US)
    out += made.asked(OTHER, 2, question(ids[0]), NOW_US)
    out += made.begin([ids[1]], NOW_US)[1]
    most = 0
    while made.busy and len(turns) < 100:
        out += made.tick(NOW_US)
        most = max(most, tracking.looked - before)
        before = tracking.looked
        assert (made.next_deadline() == 0) == (made.metrics()["trace_questions_waiting"] > 0)
        turns.append(out)
        for ask in the(Inquire, out):
            assert isinstance(ask, Inquire)
            made.failed(ask.number, "away", NOW_US)
        out = []
    assert most <= WORK_A_TURN + each
    assert 10 <= len(turns) <= 20
    said = {one.number: at for at, turn in enumerate(turns) for one in turn if isinstance(one, Respond)}
    assert said[2] <= 2 < said[1]
    (last,) = [one for turn in turns for one in turn if isinstance(one, Respond) and one.number == 1]
    assert msgspec.msgpack.decode(last.body, type=TraceAnswer) == whole


def test_what_nobody_waits_for_any_more_is_not_looked_up() -> None:
    tracking, ids = crowded(2)
    made = desk_of(tracking, ME)
    made.asked(OTHER, 1, question(*ids * 20), NOW_US)
    ticket, _ = made.begin([ids[0]], NOW_US)
    made.abandon(ticket)
    done = 0
    while made.busy:
        done += len(the(Respond, made.tick(NOW_US)))
    assert done == 1
    assert made.next_deadline() is None


def test_the_records_for_all_ids_of_a_question_are_read_together() -> None:
    tracking, disk = stored(40)
    made = desk_of(tracking)
    later_us = NOW_US + 200 * SECOND_US
    ids = [identity(number) for number in range(40)]
    out = made.asked(OTHER, 1, question(*ids), later_us)
    reads = 0
    while not the(Respond, out):
        for one in the(ReadFilters, out):
            assert isinstance(one, ReadFilters)
            reads += 1
            out = made.read(one.tag, {sequence: disk[sequence] for sequence in one.sequences}, later_us)
        out += made.tick(later_us)
    assert reads == 1
    (respond,) = the(Respond, out)
    assert isinstance(respond, Respond)
    findings = msgspec.msgpack.decode(respond.body, type=TraceAnswer).findings
    assert [one.published is not None for one in findings] == [True] * 40
