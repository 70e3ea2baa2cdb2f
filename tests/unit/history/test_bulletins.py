"""P4, issue 4 item 6: what brokers publish about themselves, as bytes."""

from __future__ import annotations

import contextlib
import struct

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.errors import BugError, PeerError, StorageError
from postroad.history.bulletins import (
    ATTACHMENTS,
    DELIVERIES,
    FILTERS,
    MAX_PART_BYTES,
    MAX_ROWS,
    MIN_PART_BYTES,
    SENDING_DTYPE,
    TOPOLOGY,
    Author,
    DeliveryReport,
    attachment_bulletins,
    decode_deliveries,
    decode_topology,
    deliveries_bulletin,
    filter_bulletins,
    join_parts,
    running_number,
    topology_bulletin,
)
from postroad.ids import MessageId
from postroad.tracking.attachment_log import Change, decode_changes, encode_changes
from postroad.tracking.keys import DELIVERY, HistoryKey
from postroad.tracking.record import FilterMeta, decode_record, encode_record
from postroad.tracking.settings import TrackingConfig

AUTHOR = Author(broker=0x2A, name="b1")


def stored(sequence: int, size: int, replaces: int | None = None, *, final: bool = True) -> bytes:
    meta = FilterMeta(
        key=HistoryKey(DELIVERY, 7),
        sequence=sequence,
        m=size * 8,
        n=10,
        k=3,
        count=1,
        lo_ms=1,
        hi_ms=2,
        replaces=replaces,
        final=final,
    )
    return encode_record(meta, bytes(range(256)) * (size // 256))


@pytest.mark.parametrize("part_bytes", [1 << 20, 1000, 77])
def test_a_stored_filter_in_parts(part_bytes: int) -> None:
    record = stored(9, 2048, replaces=8, final=False)
    bulletins = filter_bulletins(AUTHOR, 9, record, part_bytes)
    assert {bulletin.topic for bulletin in bulletins} == {FILTERS}
    assert all(len(bulletin.payload) <= part_bytes for bulletin in bulletins)
    for part, bulletin in enumerate(bulletins):
        assert bulletin.attributes == {
            "broker": "0000002a",
            "name": "b1",
            "sequence": 9,
            "part": part,
            "parts": len(bulletins),
            "final": False,
            "replaces": 8,
        }
    meta, body = decode_record(join_parts([bulletin.payload for bulletin in bulletins]))
    assert (meta.sequence, meta.replaces, len(body)) == (9, 8, 2048)


def test_a_filter_that_replaces_nothing_says_nothing() -> None:
    (bulletin,) = filter_bulletins(AUTHOR, 3, stored(3, 256), 1 << 20)
    assert "replaces" not in bulletin.attributes
    assert bulletin.attributes["final"] is True


def test_what_is_no_record_is_not_published() -> None:
    with pytest.raises(StorageError, match="not a filter record"):
        filter_bulletins(AUTHOR, 1, bytes(100), 1000)
    with pytest.raises(BugError, match="in place of"):
        filter_bulletins(AUTHOR, 1, stored(2, 256), 1000)


@given(st.lists(st.text(max_size=40), max_size=30), st.integers(1, 300))
@settings(max_examples=100)
def test_attachments_are_split_between_changes(who: list[str], part_bytes: int) -> None:
    changes = [Change(what="attach", at_us=at, kind="subscriber", who=name) for at, name in enumerate(who)]
    bulletins = attachment_bulletins(AUTHOR, 5, encode_changes(changes), part_bytes, whole=True)
    found = [change for bulletin in bulletins for change in decode_changes(bulletin.payload)[0]]
    assert found == changes
    assert [bulletin.attributes["number"] for bulletin in bulletins] == list(range(5, 5 + len(bulletins)))
    assert [bulletin.attributes["whole"] for bulletin in bulletins] == [True, *[False] * 30][: len(bulletins)]
    assert {bulletin.topic for bulletin in bulletins} <= {ATTACHMENTS}
    single = max((len(encode_changes([change])) for change in changes), default=0)
    assert all(len(bulletin.payload) <= max(part_bytes, single) for bulletin in bulletins)


def test_topology() -> None:
    config = TrackingConfig(skew_us=5, jitter_us=6, routing="set")
    bulletin = topology_bulletin(AUTHOR, 4, boot=3, links=[(7, 1), (0x10, 20)], config=config, at_us=99)
    assert bulletin.topic == TOPOLOGY
    assert bulletin.attributes == {"broker": "0000002a", "name": "b1", "number": 4}
    assert bulletin.payload == (
        b'{"broker":"0000002a","name":"b1","boot":3,"at_us":99,'
        b'"links":[{"broker":"00000007","cost":1},{"broker":"00000010","cost":20}],'
        b'"skew_us":5,"jitter_us":6,"routing":"set"}'
    )
    found = decode_topology(bulletin.payload)
    assert [(link.broker, link.cost) for link in found.links] == [("00000007", 1), ("00000010", 20)]
    older = decode_topology(b'{"broker":"0000002a","name":"b1","boot":3,"at_us":99,"links":[]}')
    assert (older.skew_us, older.jitter_us, older.routing) == (None, None, None)
    for unreadable in (b'{"broker":1}', b'{"broker":"\xff"}', b'{"else":' + b"[" * 5_000):
        with pytest.raises(PeerError, match="cannot be read"):
            decode_topology(unreadable)


def test_a_change_that_cannot_be_read_ends_what_is_read() -> None:
    before = encode_changes([Change(what="attach", at_us=1)])
    for body in (b"\x92\xa1\xff\x01", b"\x99\xa4stop\x01\xa0\xa0\x00\x00\xc0\x00" + b"\x91" * 5_000):
        whole = before + struct.pack("<II", len(body), google_crc32c.value(body)) + body
        assert decode_changes(whole) == ([Change(what="attach", at_us=1)], len(before))


def test_numbers_go_on_over_starts() -> None:
    assert running_number(3, 7) < running_number(3, 8) < running_number(4, 1) < 1 << 63
    with pytest.raises(BugError):
        running_number(3, 1 << 32)


def ids_of(ticks: list[int]) -> bytes:
    return b"".join(bytes(MessageId(1, 2, tick, 0)) for tick in ticks)


def test_a_report_of_deliveries_has_this_layout() -> None:
    report = DeliveryReport(MIN_PART_BYTES)
    report.events([("a", 1), ("b", 2)], 0x2A << 32, ids_of([5, 6]), np.array([5, 6]), 100)
    report.gap([("b", 2)], 0x2A << 32, 7, 9, 101)
    (payload,) = report.take()
    # docs/explanation/tracking.md, byte by byte.
    assert payload[:24] == b"PRdr\x01\0\0\0" + b"".join(n.to_bytes(4, "little") for n in (5, 2, 3, 2))
    assert payload[24:29] == b"\x92\xa1a\xa1b"
    first = [0x2A << 32, 100, 4, 6]
    assert payload[29:61] == b"".join(n.to_bytes(8, "little") for n in first)
    assert payload[61:77] == b"".join(n.to_bytes(4, "little") for n in (2, 2, 0, 0))
    assert payload[109:125] == b"".join(n.to_bytes(4, "little") for n in (1, 0, 1, 0))
    assert payload[125:149] == b"".join(n.to_bytes(4, "little") for n in (0, 1, 1, 2, 1, 2))
    assert payload[149:181] == ids_of([5, 6])
    assert payload[181:] == b"".join(n.to_bytes(8, "little") for n in (5, 6))
    assert deliveries_bulletin(AUTHOR, 1, payload).topic == DELIVERIES


sendings = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9), min_size=1).map(
            lambda found: sorted(found.items())
        ),
        st.integers(0, (1 << 64) - 1),
        st.sampled_from([0, 1, 7, 60]),
        st.integers(0, 1 << 40),
        st.sampled_from(["events", "gap", "acknowledged"]),
    ),
    max_size=10,
)


@given(sendings)
@settings(max_examples=100)
def test_a_report_says_what_was_sent(steps: list[tuple[list[tuple[str, int]], int, int, int, str]]) -> None:
    """P4."""
    report = DeliveryReport(MIN_PART_BYTES)
    told: list[tuple[str, int, int, int, int, bytes]] = []
    gaps: list[tuple[str, int, int, int, int, int]] = []
    acknowledged: list[tuple[str, int, int, int]] = []
    for receivers, pubend, count, at_us, what in steps:
        ticks = list(range(at_us + 1, at_us + 1 + count))
        if what == "events":
            report.events(receivers, pubend, ids_of(ticks), np.array(ticks, np.int64), at_us)
            told += [
                (name, session, pubend, tick, at_us, ids_of([tick]))
                for name, session in receivers
                for tick in ticks
            ]
        elif what == "gap":
            report.gap(receivers, pubend, count, at_us, at_us)
            gaps += [(name, session, pubend, count, at_us, at_us) for name, session in receivers]
        else:
            report.acknowledged(receivers, pubend, at_us, at_us)
            acknowledged += [(name, session, pubend, at_us) for name, session in receivers]
    payloads = report.take()
    assert report.take() == []
    assert all(len(payload) <= MIN_PART_BYTES for payload in payloads)
    found: list[tuple[str, int, int, int, int, bytes]] = []
    found_gaps: list[tuple[str, int, int, int, int, int]] = []
    found_acknowledged: list[tuple[str, int, int, int]] = []
    for one in map(decode_deliveries, payloads):
        columns = (one.subscriber, one.session, one.pubend, one.tick, one.at_us)
        rows = zip(*(column.tolist() for column in columns), one.ids, strict=True)
        found += [(one.names[who], *rest, id.tobytes()) for who, *rest, id in rows]
        spans = one.gaps
        columns = (spans.subscriber, spans.session, spans.pubend, spans.start, spans.end, spans.at_us)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        found_gaps += [(one.names[who], *rest) for who, *rest in rows]
        spans = one.acknowledged
        columns = (spans.subscriber, spans.session, spans.pubend, spans.end)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        found_acknowledged += [(one.names[who], *rest) for who, *rest in rows]
    # A long list of receivers is split, and then the rows of some come before those of others.
    for name in "abcdef":
        assert [row for row in found if row[0] == name] == [row for row in told if row[0] == name]
    assert found_gaps == gaps
    assert found_acknowledged == acknowledged


def test_longest_names_fit() -> None:
    report = DeliveryReport(MIN_PART_BYTES)
    receivers = [(f"{number:03}" + "n" * 252, number) for number in range(100)]
    report.events(receivers, 1, ids_of(list(range(1, 500))), np.arange(1, 500), 5)
    payloads = report.take()
    assert max(map(len, payloads)) <= MIN_PART_BYTES
    assert sum(len(decode_deliveries(payload)) for payload in payloads) == 100 * 499


@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda rest: b"PRdr\x01\0\0\0" + rest))
def test_any_bytes_are_a_report_or_refused(data: bytes) -> None:
    with contextlib.suppress(PeerError):
        decode_deliveries(data)


@given(st.data())
@settings(max_examples=200)
def test_a_damaged_report_is_refused_or_read(data: st.DataObject) -> None:
    report = DeliveryReport(MIN_PART_BYTES)
    report.events([("a", 1), ("b", 2)], 7, ids_of([5, 6]), np.array([5, 6]), 100)
    report.gap([("b", 2)], 7, 7, 9, 101)
    (payload,) = report.take()
    at = data.draw(st.integers(0, len(payload) - 1))
    damaged = payload[:at] + bytes([data.draw(st.integers(0, 255))]) + payload[at + 1 :]
    try:
        found = decode_deliveries(damaged)
    except PeerError:
        return
    assert len(found.ids) == len(found) == len(found.subscriber)


def test_a_report_is_not_much_larger_than_its_bytes() -> None:
    """P11: each of many receivers got each of many events; the fullest that a broker makes is read."""
    receivers = [(f"{number:x}", number) for number in range(244)]
    report = DeliveryReport(MAX_PART_BYTES)
    for _ in range(2):
        report.events(receivers, 1, ids_of(list(range(1, 2731))), np.arange(1, 2731), 5)
    (fullest,) = report.take()
    assert len(decode_deliveries(fullest)) == 2 * 244 * 2730 <= MAX_ROWS
    sending = np.zeros(1, SENDING_DTYPE)
    sending["receivers"], sending["events"] = 2_000, MAX_ROWS // 2_000 + 1
    head = b"PRdr\x01\0\0\0" + struct.pack("<IIII", 2, 1, 2_000, MAX_ROWS // 2_000 + 1)
    payload = head + b"\x91\xa0" + sending.tobytes() + bytes(2_000 * 8 + (MAX_ROWS // 2_000 + 1) * 24)
    with pytest.raises(PeerError, match=rf"2098000 rows; at most {MAX_ROWS} are read"):
        decode_deliveries(payload)
