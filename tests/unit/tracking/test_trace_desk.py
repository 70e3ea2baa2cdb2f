"""T6: the desk runs traces and answers other brokers' questions; all that can pile up there is bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pytest
from tests.worlds.topologies import linked
from tests.worlds.turns import Turns, peer

from postroad.errors import UnavailableError
from postroad.ids import MessageId
from postroad.overlay.inquiries import Inquiries
from postroad.seam.effects import Send
from postroad.seam.tracking import ReadFilters, StoreAttachments, StoreFilter
from postroad.seam.turn import Turn
from postroad.tracking.attachment_log import decode_changes
from postroad.tracking.bloom import BloomFilter
from postroad.tracking.keys import DELIVERY, ROUTING, HistoryKey
from postroad.tracking.query import desk, lookup
from postroad.tracking.query.desk import TRACE, WORK_A_TURN, WORK_AN_ID, Asker, TraceDesk
from postroad.tracking.query.lookup import Reading
from postroad.tracking.query.messages import (
    MAX_RECEIVERS,
    Finding,
    Receiver,
    Sighting,
    TraceAnswer,
    TraceItem,
    TraceQuestion,
)
from postroad.tracking.query.trace import NO_ANSWER, NOT_REACHABLE
from postroad.tracking.query.untracked import Untracked
from postroad.tracking.query.verdict import TraceResult
from postroad.tracking.record import FilterMeta, decode_record, encode_record
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import KIB, SECOND_US
from postroad.wire.frames import MAX_BODY_BYTES, Answer, Query, decode

ME, OTHER = 7, 8
LINK = 100  # the connection to the other one
NOW_US = 1_700_000_000 * SECOND_US
NAMES = {ME: "here", OTHER: "there"}


@dataclass
class Report:
    asker: Asker
    results: Sequence[TraceResult]


Output = ReadFilters | Query | Answer | Report  # asked of the disk or of the other, answered, or done


class Desk:
    """A desk and its turns. The two brokers know each other; once `cut`, there is no way between them."""

    def __init__(self, tracking: Tracking | None, reachable: Sequence[int]) -> None:
        self.turns = Turns()
        self.cut = False
        self._asked = 0
        self._reports: list[Output] = []
        inquiries = Inquiries(
            self.turns.board, me=ME, topology=linked(ME, OTHER), link=lambda _: None if self.cut else LINK
        )
        self.desk = TraceDesk(
            tracking or Untracked(),
            me=ME,
            reachable=lambda: reachable,
            names=lambda: NAMES,
            inquiries=inquiries,
            report=self._report,
        )
        self.turns.board.query(TRACE, self.desk.asked)

    def _report(self, _turn: Turn, asker: Asker, results: Sequence[TraceResult]) -> None:
        self._reports.append(Report(asker, results))

    def _outputs(self, turn: Turn) -> list[Output]:
        out, self._reports = self._reports, []
        for effect in turn.effects:
            if isinstance(effect, Send):
                assert effect.connection == LINK
                message = decode(effect.data)
                assert isinstance(message, Query | Answer)
                assert message.target == OTHER
                out.append(message)
            else:
                assert isinstance(effect, ReadFilters)
                out.append(effect)
        return out

    def begin(self, ids: Sequence[bytes], now_us: int) -> list[Output]:
        """A client asks, each time another."""
        self._asked += 1
        turn = self.turns.turn(now_us)
        self.desk.begin(turn, ids, Asker(self._asked, 1))
        return self._outputs(turn)

    def asked(self, number: int, body: bytes, now_us: int) -> list[Output]:
        """The other broker asks."""
        turn = self.turns.turn(now_us)
        query = Query(source=OTHER, target=ME, number=number, hops=1, what=TRACE, body=body)
        self.turns.board.brokers[Query](turn, peer(LINK, "broker", broker=OTHER), query)
        return self._outputs(turn)

    def answered(self, query: Query, body: bytes, now_us: int) -> list[Output]:
        """The other broker answers."""
        turn = self.turns.turn(now_us)
        answer = Answer(source=OTHER, target=ME, number=query.number, hops=1, body=body)
        self.turns.board.brokers[Answer](turn, peer(LINK, "broker", broker=OTHER), answer)
        return self._outputs(turn)

    def read(self, wanted: ReadFilters, records: Mapping[int, bytes], now_us: int) -> list[Output]:
        return self._outputs(self.turns.filters_read(wanted, records, now_us))

    def tick(self, now_us: int) -> list[Output]:
        turn = self.turns.turn(now_us)
        self.desk.tick(turn)
        return self._outputs(turn)


def identity(number: int, *, origin: int = ME) -> bytes:
    return bytes(MessageId(number, origin, NOW_US // 1000, 0))


def desk_of(tracking: Tracking | None = None, *reachable: int) -> Desk:
    return Desk(tracking, reachable or (ME, OTHER))


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
    out = made.begin([identity(1, origin=OTHER)], NOW_US)
    (ask,) = the(Query, out)
    assert isinstance(ask, Query)
    finding = Finding(published=0.001)
    body = msgspec.msgpack.encode(TraceAnswer(findings=(finding,)))
    out = made.answered(ask, body, NOW_US)
    (report,) = the(Report, out)
    assert isinstance(report, Report)
    assert report.asker == Asker(1, 1)
    assert [one.origin for one in report.results] == ["there"]
    assert made.desk.metrics()["traces"] == 0
    assert made.desk.next_deadline() is None
    assert made.answered(ask, body, NOW_US) == []  # nobody waits for it any more


def test_an_answer_that_cannot_be_read_is_none() -> None:
    """T12: The trace goes on without that broker and says so."""
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
        (ask,) = the(Query, made.begin([identity(1, origin=OTHER)], NOW_US))
        assert isinstance(ask, Query)
        (report,) = the(Report, made.answered(ask, body, NOW_US))
        assert isinstance(report, Report)
        ((broker, why),) = [row for row in report.results[0].missing if row[0] == "there"]
        assert "cannot be read" in why, broker


def test_silence_and_failures_end_a_trace_too() -> None:
    made = desk_of()
    made.begin([identity(1, origin=OTHER)], NOW_US)
    deadline = made.desk.next_deadline()
    assert deadline is not None
    assert made.tick(deadline - 1) == []
    (late,) = the(Report, made.tick(deadline))
    assert isinstance(late, Report)
    assert ("there", NO_ANSWER) in late.results[0].missing
    made.cut = True
    (gone,) = made.begin([identity(1, origin=OTHER)], NOW_US)
    assert isinstance(gone, Report)
    assert ("there", NOT_REACHABLE) in gone.results[0].missing
    assert made.desk.next_deadline() is None


def test_a_broker_known_and_away_may_have_what_nobody_knows() -> None:
    made = desk_of(make_tracking(TrackingConfig(), me=ME, stored=(), changes=(), now_us=NOW_US), ME)
    later_us = NOW_US + 60 * SECOND_US
    (report,) = the(Report, made.begin([bytes(MessageId(1, ME, later_us // 1000, 0))], later_us))
    assert isinstance(report, Report)
    assert (report.results[0].verdict, report.results[0].missing) == ("partial", (("there", NOT_REACHABLE),))


def test_traces_under_way_are_bounded_and_can_be_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "MAX_TRACES", 2)
    made = desk_of()
    asked = [made.begin([identity(n, origin=OTHER)], NOW_US) for n in (1, 2)]
    with pytest.raises(UnavailableError, match="try again"):
        made.begin([identity(3, origin=OTHER)], NOW_US)
    assert made.desk.under_way() == {1: 1, 2: 1}
    made.desk.abandon(1)
    assert made.desk.metrics()["traces"] == 1
    (ask,) = the(Query, asked[0])
    assert isinstance(ask, Query)
    assert made.answered(ask, b"", NOW_US) == []
    made.begin([identity(3, origin=OTHER)], NOW_US)


def test_a_question_of_another_broker_is_answered_once_its_records_are_read() -> None:
    tracking, disk = stored()
    made = desk_of(tracking)
    out = made.asked(99, question(identity(0)), NOW_US + 200 * SECOND_US)
    for _ in range(10):
        if not isinstance(out[0], ReadFilters):
            break
        out = made.read(out[0], disk, NOW_US + 200 * SECOND_US)
    (respond,) = out
    assert isinstance(respond, Answer)
    assert respond.number == 99
    (finding,) = msgspec.msgpack.decode(respond.body, type=TraceAnswer).findings
    assert finding.published is not None
    assert made.desk.metrics()["trace_questions_waiting"] == 0


def test_questions_that_wait_for_the_disk_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks beyond that is told at once, so that its trace need not wait for us."""
    monkeypatch.setattr(desk, "MAX_QUESTIONS", 1)
    tracking, _ = stored()
    made = desk_of(tracking, ME)
    later_us = NOW_US + 200 * SECOND_US
    (first,) = made.asked(1, question(identity(0)), later_us)
    assert isinstance(first, ReadFilters)
    (refused,) = made.asked(2, question(identity(0), identity(1)), later_us)
    assert isinstance(refused, Answer)
    said = msgspec.msgpack.decode(refused.body, type=TraceAnswer).findings
    assert [one.lost for one in said] == ["has too many questions to answer"] * 2
    (report,) = made.begin([identity(0)], later_us)
    assert isinstance(report, Report)
    assert ("here", "has too many questions to answer") in report.results[0].missing


def test_a_question_that_makes_no_sense_has_no_answer() -> None:
    """Nor does it end the link to whoever passed it on, nor a process that tracks nothing."""
    tracking, _ = stored()
    many = question(*[identity(0)] * 257)
    no_text, deep = b"\x91\x91\x92\xa1\xff\x00", b"\x92\x90" + b"\x91" * 5_000
    absurd_ones = (b"", b"nonsense", no_text, deep, question(), question(b"short"), many)
    for absurd in (*absurd_ones, question(*[b""] * 200_000)):
        for made in (desk_of(tracking), desk_of()):
            assert made.asked(1, absurd, NOW_US) == []


def test_who_asks_is_named_as_many_receivers_as_it_takes() -> None:
    """T6: A broker of an earlier version takes 4096, and does not say so."""
    tracking = make_tracking(TrackingConfig(), me=ME, stored=(), changes=(), now_us=NOW_US)
    names = [f"client-{number:05d}" for number in range(5000)]
    for name in names:
        tracking.attached(name, NOW_US)
    tracking.published(identity(1), NOW_US)
    tracking.delivered(ME, names, identity(1), NOW_US)
    item = TraceItem(id=identity(1), origin=0)
    for takes, named in ((None, 4096), (MAX_RECEIVERS, 5000), (7, 7), (0, 0)):
        made = desk_of(tracking, ME)
        said = [[[item.id, 0]]] if takes is None else [[[item.id, 0]], takes]
        (response,) = made.asked(5, msgspec.msgpack.encode(said), NOW_US)
        assert isinstance(response, Answer)
        (finding,) = msgspec.msgpack.decode(response.body, type=TraceAnswer).findings
        assert (len(finding.delivered), finding.more) == (named, 5000 - named)


def test_an_answer_that_is_too_long_names_fewer_receivers() -> None:
    """T6: 5000 names of 250 bytes: who got it is cut, that it was here is not. So it is for other brokers."""
    tracking = make_tracking(TrackingConfig(), me=ME, stored=(), changes=(), now_us=NOW_US)
    names = [f"client-{number:05d}".ljust(250, "x") for number in range(5000)]
    for name in names:
        tracking.attached(name, NOW_US)
    tracking.published(identity(1), NOW_US)
    tracking.delivered(ME, names, identity(1), NOW_US)
    made = desk_of(tracking, ME)
    (report,) = the(Report, made.begin([identity(1)], NOW_US))
    assert isinstance(report, Report)
    (result,) = report.results
    assert (result.verdict, [step.broker for step in result.route]) == ("partial", ["here"])
    named = len(result.receivers)
    assert 3000 < named < 4096
    assert result.missing == (("here", f"{len(names) - named} more receivers"),)
    (response,) = made.asked(5, question(identity(1)), NOW_US)
    assert isinstance(response, Answer)
    assert len(response.body) <= MAX_BODY_BYTES
    (finding,) = msgspec.msgpack.decode(response.body, type=TraceAnswer).findings
    told = len(finding.delivered)
    assert 3000 < told < 4096
    assert (finding.more, finding.candidates) == (len(names) - told, len(names))


def test_why_the_broker_in_the_id_said_nothing_is_told() -> None:
    """T6."""
    made = desk_of()
    assert the(Query, made.begin([identity(1, origin=OTHER)], NOW_US))
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
    """T6: Found: 256 ids took seconds of one turn where there are ten thousand subscribers, and deliveries
    waited. Who asks little meanwhile need not wait for all of it."""
    tracking, ids = crowded(20)
    whole, _ = tracking.answer(TraceQuestion(items=tuple(TraceItem(id=one, origin=0) for one in ids)), {})
    each = (tracking.looked + len(ids) * WORK_AN_ID) // len(ids)
    made = desk_of(tracking)
    turns: list[list[Output]] = []
    before = tracking.looked
    out = made.asked(1, question(*ids), NOW_US)
    out += made.asked(2, question(ids[0]), NOW_US)
    out += made.begin([ids[1]], NOW_US)
    most = 0
    while made.desk.busy and len(turns) < 100:
        out += made.tick(NOW_US)
        most = max(most, tracking.looked - before)
        before = tracking.looked
        assert (made.desk.next_deadline() == 0) == (made.desk.metrics()["trace_questions_waiting"] > 0)
        turns.append(out)
        for ask in the(Query, out):
            assert isinstance(ask, Query)
            made.answered(ask, NOTHING, NOW_US)
        out = []
    assert most <= WORK_A_TURN + each
    assert 10 <= len(turns) <= 20
    said = {one.number: at for at, turn in enumerate(turns) for one in turn if isinstance(one, Answer)}
    assert said[2] <= 2 < said[1]
    (last,) = [one for turn in turns for one in turn if isinstance(one, Answer) and one.number == 1]
    assert msgspec.msgpack.decode(last.body, type=TraceAnswer) == whole


def test_what_nobody_waits_for_any_more_is_not_looked_up() -> None:
    tracking, ids = crowded(2)
    made = desk_of(tracking, ME)
    made.asked(1, question(*ids * 20), NOW_US)
    made.begin([ids[0]], NOW_US)
    made.desk.abandon(1)
    done = 0
    while made.desk.busy:
        done += len(the(Answer, made.tick(NOW_US)))
    assert done == 1
    assert made.desk.next_deadline() is None


def test_the_records_for_all_ids_of_a_question_are_read_together() -> None:
    tracking, disk = stored(40)
    made = desk_of(tracking)
    later_us = NOW_US + 200 * SECOND_US
    ids = [identity(number) for number in range(40)]
    out = made.asked(1, question(*ids), later_us)
    reads = 0
    while not the(Answer, out):
        for one in the(ReadFilters, out):
            assert isinstance(one, ReadFilters)
            reads += 1
            out = made.read(one, disk, later_us)
        out += made.tick(later_us)
    assert reads == 1
    (respond,) = the(Answer, out)
    assert isinstance(respond, Answer)
    findings = msgspec.msgpack.decode(respond.body, type=TraceAnswer).findings
    assert [one.published is not None for one in findings] == [True] * 40


NOTHING = msgspec.msgpack.encode(TraceAnswer(findings=(Finding(),)))
SIZE = 10_000  # bytes of each of the filters below


def routed(origins: int) -> tuple[Tracking, dict[int, bytes]]:
    """Tracking with a stored filter of each of these origins; the last has the message of that number."""
    metas: list[FilterMeta] = []
    disk: dict[int, bytes] = {}
    for number in range(1, origins + 1):
        one = BloomFilter(8 * SIZE, 1000, 11)
        one.add(identity(number))
        meta = FilterMeta(
            key=HistoryKey(ROUTING, 100 + number, OTHER),
            sequence=number,
            m=one.m,
            n=one.n,
            k=one.k,
            count=1,
            lo_ms=NOW_US // 1000,
            hi_ms=NOW_US // 1000,
            stored_us=NOW_US,
        )
        metas.append(meta)
        disk[number] = encode_record(meta, one.bits)
    return make_tracking(TrackingConfig(), me=ME, stored=metas, changes=(), now_us=NOW_US), disk


def test_stored_filters_are_read_and_looked_into_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """T6. Found: a hundred filters of 2 MB were read at once and looked into in one turn, of a second; so it
    was with every question that came, and a few took all memory."""
    monkeypatch.setattr(lookup, "PORTION_BYTES", 3 * SIZE)
    monkeypatch.setattr(desk, "MAX_HELD_BYTES", 7 * SIZE)
    monkeypatch.setattr(desk, "WORK_A_TURN", 1)
    tracking, disk = routed(50)
    made = desk_of(tracking)
    out: list[Output] = []
    for number in range(1, 6):
        out += made.asked(number, question(identity(10 * number)), NOW_US)
    reads: list[ReadFilters] = []
    answers: dict[int, Finding] = {}
    while len(answers) < 5:
        before = tracking.looked
        out += made.tick(NOW_US)
        assert tracking.looked - before <= 2 * 3 * SIZE // KIB
        reads += [one for one in out if isinstance(one, ReadFilters)]
        for one in out:
            if isinstance(one, Answer):
                (answers[one.number],) = msgspec.msgpack.decode(one.body, type=TraceAnswer).findings
        assert max((len(one.sequences) for one in reads), default=0) <= 3
        assert sum(len(one.sequences) for one in reads) <= 7
        if reads:
            done = reads.pop(0)
            out = made.read(done, disk, NOW_US)
        else:
            out = []
    for number, finding in answers.items():
        assert [one.origin for one in finding.routed] == [100 + 10 * number]
        assert "read" not in finding.lost
    assert made.desk.metrics()["trace_questions_waiting"] == 0


@pytest.mark.parametrize(("few", "read"), [(1, 20), (30, 30)])
def test_what_a_question_does_not_read_is_said(monkeypatch: pytest.MonkeyPatch, few: int, read: int) -> None:
    """T6: So many bytes, or a few records if those are large."""
    monkeypatch.setattr(lookup, "MAX_READ_BYTES", 20 * SIZE)
    monkeypatch.setattr(lookup, "FEW_READS", few)
    tracking, disk = routed(50)
    made = desk_of(tracking)
    out = made.asked(1, question(identity(1)), NOW_US)
    while not the(Answer, out):
        (wanted,) = out
        assert isinstance(wanted, ReadFilters)
        out = made.read(wanted, disk, NOW_US)
    (respond,) = out
    assert isinstance(respond, Answer)
    (finding,) = msgspec.msgpack.decode(respond.body, type=TraceAnswer).findings
    assert [one.origin for one in finding.routed] == [101]
    assert finding.lost == f"stored filters that could not be read: {50 - read}"


def test_who_gives_up_makes_room_for_others_who_want_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "MAX_HELD_BYTES", SIZE)
    tracking, disk = routed(1)
    made = desk_of(tracking, ME)
    (first,) = [*made.begin([identity(1)], NOW_US), *made.begin([identity(1)], NOW_US)]
    assert isinstance(first, ReadFilters)
    assert made.asked(1, question(identity(1)), NOW_US) == []
    for connection in (1, 2):
        made.desk.abandon(connection)
    (second,) = made.read(first, disk, NOW_US)
    assert isinstance(second, ReadFilters)
    (respond,) = made.read(second, disk, NOW_US)
    assert isinstance(respond, Answer)
    assert made.desk.metrics()["trace_questions_waiting"] == 0


def delivered() -> tuple[Tracking, dict[int, bytes]]:
    """Two messages went to ann, and only then the second is known to be published; all is on disk."""
    config = TrackingConfig(cache_bytes=0, retain=False)
    first = make_tracking(config, me=ME, stored=(), changes=(), now_us=NOW_US)
    first.attached("ann", NOW_US)
    first.published(identity(1), NOW_US)
    first.delivered(ME, ["ann"], identity(1) + identity(2), NOW_US)
    kept = first.tick(NOW_US + 20 * SECOND_US)
    first.published(identity(2), NOW_US + SECOND_US // 10)
    kept += first.tick(NOW_US + 40 * SECOND_US)
    disk = {one.sequence: one.record for one in kept if isinstance(one, StoreFilter)}
    metas = [decode_record(one)[0] for one in disk.values()]
    log = b"".join(one.record for one in kept if isinstance(one, StoreAttachments))
    changes = decode_changes(log)[0]
    return make_tracking(config, me=ME, stored=metas, changes=changes, now_us=NOW_US + 1000), disk


def test_a_record_is_read_again_for_another_message_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the second was here is known when the record of deliveries was let go."""
    monkeypatch.setattr(lookup, "PORTION_BYTES", 1)
    tracking, disk = delivered()
    made = desk_of(tracking)
    out = made.asked(1, question(identity(1), identity(2)), NOW_US)
    reads: list[int] = []
    while not the(Answer, out):
        (wanted,) = out
        assert isinstance(wanted, ReadFilters)
        reads += wanted.sequences
        out = made.read(wanted, disk, NOW_US)
    assert len(reads) == len(disk) + 1
    (respond,) = out
    assert isinstance(respond, Answer)
    for finding in msgspec.msgpack.decode(respond.body, type=TraceAnswer).findings:
        assert [one.subscriber for one in finding.delivered] == ["ann"]
        assert "read" not in finding.lost


def test_who_may_have_got_it_may_change_while_records_are_read() -> None:
    """The record of deliveries is then looked into again."""
    again, disk = delivered()
    asked = TraceQuestion(items=(TraceItem(id=identity(1), origin=ME),))
    reading = Reading()
    answer, wanted = again.answer(asked, {}, reading)
    reads: list[FilterMeta] = []
    while wanted:
        record = disk[wanted[0]]
        reads.append(decode_record(record)[0])
        answer, wanted = again.answer(asked, {wanted[0]: record}, reading)
        if [one.key.kind for one in reads].count(DELIVERY) == 1:
            again.attached("bob", NOW_US + 1000)
            answer, wanted = again.answer(asked, {}, reading)
    assert [one.key.kind for one in reads if reads.count(one) == 2] == [DELIVERY, DELIVERY]
    assert {one.sequence for one in reads} == set(disk)
    assert [one.subscriber for one in answer.findings[0].delivered] == ["ann"]
    assert "read" not in answer.findings[0].lost
