"""Control messages and the splitter of the byte stream."""

from __future__ import annotations

import struct

import msgspec
import pytest

from postroad.errors import BugError, PeerError
from postroad.events.batch import empty_frame
from postroad.wire import frames
from postroad.wire.frames import (
    BATCH_KINDS,
    CHECKSUM_BYTES,
    CONTROL,
    DEFAULT_LIMITS,
    FRAME_PREFIX_BYTES,
    HANDSHAKE_BYTES,
    MAX_CONTROL_BYTES,
    PROTOCOL_VERSION,
    Kind,
    Message,
    Splitter,
    decode,
    encode,
    frame_kind,
)

NODE = bytes(range(16))
MESSAGES: list[Message] = [
    frames.Hello(
        version=1,
        role="broker",
        name="b1",
        token="t",
        limits=DEFAULT_LIMITS,
        window=1 << 20,
        time_us=1_700_000_000_000_000,
        broker=(1 << 32) - 1,
        node=NODE,
        boot=3,
        cost=2,
        publisher=42,
        resume_key=b"\0\xff",
    ),
    frames.Welcome(
        version=1,
        name="größe",
        broker=7,
        node=NODE,
        boot=3,
        cost=1,
        limits=DEFAULT_LIMITS,
        window=0,
        time_us=-1,
        publisher=42,
        resume_key=b"key",
    ),
    frames.Refuse(code="denied", reason="no"),
    frames.Ping(time_us=1),
    frames.Pong(time_us=1, at_us=2),
    frames.Credit(size=1 << 40),
    frames.Accepted(sequence=5),
    frames.Rejected(sequence=5, code="usage", reason="why"),
    frames.Skew(correction_us=-3),
    frames.Subscribe(number=1, topic="a/#", where="price > 100", overflow="disconnect", buffer=1),
    frames.Subscribed(number=1, missing=("b2", "b3")),
    frames.Unsubscribe(number=1),
    frames.Ended(number=1, code="", reason=""),
    frames.Ack(number=1, token="{}", events={7 << 32: (1, 2)}, ticket=3),
    frames.Acked(number=1, ticket=3, code="storage", reason="full"),
    frames.Request(number=1, what="status", arguments={"a": "b"}),
    frames.Reply(number=1, code="", body="{}"),
    frames.Attempts(number=1, pubend=7, attempts=((5, 2),)),
    frames.Silence(spans=((7 << 32, 1, 2, 3), (8 << 32, -1, 0, 1))),
    frames.Attach(origin=7, known={7 << 32: 5}),
    frames.Detach(origin=7),
    frames.Nack(pubend=(1 << 64) - 1, spans=((1, 2), (5, 9)), need={7: 1 << 33}),
    frames.Stamp(number=4, versions={7: 1 << 33}),
    frames.Release(reports=(((1 << 64) - 1, 7, 1 << 33, 5, 9, 0), (1 << 32, 8, 1, 5, 5, 1))),
    frames.TopologyUpdate(
        advertisements=(
            frames.Advertisement(
                broker=7, node=NODE, name="b", boot=1, sequence=2, neighbours=((8, 1),), pubends=(7 << 32,)
            ),
        )
    ),
    frames.Digest(versions={7: 8}),
    frames.InterestUpdate(
        owner=7,
        base=1,
        version=2,
        added=(frames.InterestEntry(entry=1, topic="a", where=""),),
        claims=(frames.InterestClaim(entry=2, name="s", epoch=1 << 40),),
        removed=(3,),
        part=1,
        parts=2,
    ),
    frames.InterestPull(owners=(7, 8)),
    frames.Query(source=1, target=2, number=3, hops=4, what="trace", body=b"?"),
    frames.Answer(source=2, target=1, number=3, hops=4, body=b"!"),
    frames.Direct(room="echo", body=b"?"),
    frames.Send(
        number=1,
        source="shop",
        session=b"12345678",
        form="transactional",
        messages=(frames.Posting(inbox="stock", id=2, after=1, payload=b"p", priority=9, chain=b"c"),),
        confirm=True,
    ),
    frames.Sent(number=1, places=(0, 2), state="gap", last=4, chain=b"c"),
    frames.EndSession(source="shop", session=b"12345678"),
    frames.Receive(number=1, inbox="stock", consumer=b"12345678", window=64),
    frames.Receiving(number=1, code="denied", reason="why"),
    frames.Messages(
        number=1,
        place=b"high",
        messages=(
            frames.QueueMessage(
                key=b"k",
                source="shop",
                session=b"12345678",
                id=2,
                form="express",
                attempt=1,
                sent_us=5,
                payload=b"p",
            ),
        ),
    ),
    frames.Settle(number=1, ticket=2, keys=(b"k",), verdict="again", delay_us=7, reason="why"),
    frames.Settled(number=1, ticket=2, outcomes=("again",)),
    frames.Unreceive(number=1),
    frames.Repaired(
        number=1,
        ids=bytes(32),
        received=7,
        detected=3,
        requests=2,
        recovered=2,
        given_up=1,
        duplicates=4,
        slowest_us=90,
        recovery_us=120,
        repairs=5,
        asked=6,
        hits=5,
        cached=50,
    ),
    frames.Discover(
        uuid=bytes(16),
        attempt=1,
        host="192.0.2.1",
        port=7420,
        offset_us=-5,
        cookie=b"c",
        credential=b"",
        key=b"",
        certificate="",
        hops=64,
    ),
]


def frame(kind: int, body: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    return struct.pack("<IBBH", FRAME_PREFIX_BYTES + len(body), kind, version, 0) + body


def silence() -> bytes:
    return empty_frame(kind=Kind.DELIVERY, pubend=7 << 32, start=1, end=2, channel=3)


def test_every_kind_is_here() -> None:
    assert [type(message) for message in MESSAGES] == list(CONTROL.values())
    assert set(CONTROL) | BATCH_KINDS == set(Kind)
    assert not set(CONTROL) & BATCH_KINDS


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    data = encode(message)
    assert decode(data) == message
    assert decode(memoryview(data)) == message
    assert int.from_bytes(data[:4], "little") == len(data)
    assert CONTROL[Kind(frame_kind(data))] is type(message)
    assert data[5:8] == bytes((PROTOCOL_VERSION, 0, 0x80))
    assert decode(frame(frame_kind(data), data[FRAME_PREFIX_BYTES:-CHECKSUM_BYTES])) == message, (
        "without checksum"
    )


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_truncation_is_refused(message: Message) -> None:
    data = encode(message)
    body = data[FRAME_PREFIX_BYTES:-CHECKSUM_BYTES]
    for end in range(len(body)):
        with pytest.raises(PeerError, match="malformed"):
            decode(frame(frame_kind(data), body[:end]))


def test_fields_that_have_defaults_may_be_left_out() -> None:
    """A peer of this version that leaves off the last fields is understood."""
    assert decode(frame(Kind.SUBSCRIBED, msgspec.msgpack.encode([1]))) == frames.Subscribed(number=1)


def test_unknown_kinds() -> None:
    for kind in sorted(set(range(256)) - set(CONTROL)):
        with pytest.raises(PeerError, match=f"unknown frame kind {kind}"):
            decode(frame(kind, b"\x91\x01"))


@pytest.mark.parametrize("version", [0, 2, 255])
def test_unknown_version(version: int) -> None:
    with pytest.raises(PeerError, match=f"layout version {version}"):
        decode(frame(Kind.PING, b"\x91\x01", version))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.PING, b""),
        (Kind.PING, b"\xc1"),
        (Kind.PING, b"\x01"),
        (Kind.PING, b"\x90"),
        (Kind.PING, b"\x91\xa1x"),
        (Kind.PING, b"\x91\x01trailing"),
        (Kind.PING, b"\x81\x01\x02"),
        (Kind.PING, b"\xdd\xff\xff\xff\xff\x01"),
        (Kind.REFUSE, b"\x92\xa1\xff\xa0"),
        (Kind.ATTACH, b"\x92\x07\x81\xa1x\x01"),
        (Kind.NACK, msgspec.msgpack.encode([1, [[1, 2, 3]], {}])),
        (Kind.PING, b"\x92\x01" + b"\x91" * 100_000 + b"\xc0"),
    ],
    ids=[
        "empty",
        "reserved byte",
        "no array",
        "no fields",
        "wrong type",
        "trailing",
        "map",
        "endless array",
        "not UTF-8",
        "text for a key",
        "span of three",
        "nested too deep",
    ],
)
def test_garbage(kind: Kind, body: bytes) -> None:
    with pytest.raises(PeerError, match=f"malformed {kind.name} frame"):
        decode(frame(kind, body))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_no_bit_of_a_control_frame_changes_unseen(message: Message) -> None:
    """Its length apart, which the splitter goes by: a frame cut elsewhere has another checksum."""
    data = encode(message)
    for at in range(8 * 4, 8 * len(data)):
        damaged = bytearray(data)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(PeerError):
            decode(bytes(damaged))
    for cut in range(FRAME_PREFIX_BYTES, len(data)):
        with pytest.raises(PeerError):
            decode(data[:cut])


def test_control_frames_have_no_other_flags() -> None:
    for flags in (1, 0x100, 0x7FFF):
        data = encode(frames.Ping(time_us=1))
        with pytest.raises(PeerError, match="PING frame with flags"):
            decode(data[:6] + flags.to_bytes(2, "little") + data[8:])


def test_a_frame_over_the_limit_is_never_made() -> None:
    """What the receiver's splitter would refuse is our own fault, and shows here rather than there."""
    room = MAX_CONTROL_BYTES - len(encode(frames.Reply(number=1, code="", body="x" * 70_000))) + 70_000
    whole = encode(frames.Reply(number=1, code="", body="x" * room))
    assert len(whole) == MAX_CONTROL_BYTES
    assert Splitter(0).feed(whole) == [whole]
    with pytest.raises(BugError, match="REPLY frame of 1048577 bytes"):
        encode(frames.Reply(number=1, code="", body="x" * (room + 1)))


def test_what_we_take_can_be_sent_on() -> None:
    """A frame at the limit without the fields that have defaults would grow over it when it is passed on."""
    entry = [1, "", "x" * 70_000]
    spare = MAX_CONTROL_BYTES - len(frame(Kind.INTEREST, msgspec.msgpack.encode([7, 1, 2, [entry], []])))
    entry[2] = "x" * (70_000 + spare)
    short = frame(Kind.INTEREST, msgspec.msgpack.encode([7, 1, 2, [entry], []]))
    assert len(short) == MAX_CONTROL_BYTES
    with pytest.raises(PeerError, match="no room"):
        decode(short)
    entry[2] = "x" * (70_000 + spare - 3 - CHECKSUM_BYTES)
    whole = frame(Kind.INTEREST, msgspec.msgpack.encode([7, 1, 2, [entry], []]))
    assert len(encode(decode(whole))) == MAX_CONTROL_BYTES


# ---------------------------------------------------------------- splitter


def test_split_at_every_byte() -> None:
    stream_frames = [*(encode(message) for message in MESSAGES[2:8]), silence(), encode(MESSAGES[0])]
    stream = b"".join(stream_frames)
    for cut in range(len(stream) + 1):
        splitter = Splitter(1 << 20)
        assert splitter.feed(stream[:cut]) + splitter.feed(stream[cut:]) == stream_frames
        assert splitter.pending == 0


@pytest.mark.parametrize("step", [1, 2, 3, 7, 8, 9, 50])
def test_split_in_small_steps(step: int) -> None:
    stream_frames = [encode(message) for message in MESSAGES] + [silence()]
    stream = b"".join(stream_frames)
    splitter = Splitter(1 << 20)
    found = [each for at in range(0, len(stream), step) for each in splitter.feed(stream[at : at + step])]
    assert found == stream_frames
    assert splitter.pending == 0
    assert splitter.feed(b"") == []


def test_pending_counts_what_is_held() -> None:
    splitter, data = Splitter(1 << 20), silence()
    assert splitter.feed(data + data[:20]) == [data]
    assert splitter.pending == 20
    assert splitter.feed(data[20:]) == [data]


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
@pytest.mark.parametrize(
    ("length", "kind"),
    [
        (MAX_CONTROL_BYTES + 1, Kind.PING),
        (0xFFFF_FFFF, 99),
        (4097, Kind.PUBLISH),
        (7, Kind.PING),
        (0, Kind.PING),
    ],
)
def test_oversized_and_undersized_are_refused_before_they_are_buffered(
    length: int, kind: int, cut: int
) -> None:
    splitter = Splitter(4096)
    bad = struct.pack("<IBBH", length, kind, 1, 0) + bytes(100)
    splitter.feed(encode(MESSAGES[3]))
    assert splitter.feed(bad[:cut]) == []
    with pytest.raises(PeerError, match=f"frame of {length} bytes"):
        splitter.feed(bad[cut:])


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9])
def test_only_the_first_frame_is_held_to_the_size_of_a_handshake(cut: int) -> None:
    first = struct.pack("<IBBH", HANDSHAKE_BYTES, Kind.HELLO, 1, 0) + bytes(HANDSHAKE_BYTES - 8)
    batch = struct.pack("<IBBH", 4096, Kind.PUBLISH, 1, 0) + bytes(4088)
    control = struct.pack("<IBBH", HANDSHAKE_BYTES + 1, Kind.REPLY, 1, 0) + bytes(HANDSHAKE_BYTES - 7)
    stream = first + batch + control
    splitter = Splitter(4096, handshake=True)
    assert splitter.feed(stream[:cut]) + splitter.feed(stream[cut:]) == [first, batch, control]
    for bad, why in ((control, f"the limit is {HANDSHAKE_BYTES}$"), (batch, "not with PUBLISH$")):
        splitter = Splitter(4096, handshake=True)
        with pytest.raises(PeerError, match=why):
            splitter.feed(bad[:cut] + bad[cut:])


def test_the_largest_frames_pass() -> None:
    splitter = Splitter(4096)
    batch = struct.pack("<IBBH", 4096, Kind.PUBLISH, 1, 0) + bytes(4088)
    control = struct.pack("<IBBH", MAX_CONTROL_BYTES, Kind.REPLY, 1, 0) + bytes(MAX_CONTROL_BYTES - 8)
    assert splitter.feed(batch + control) == [batch, control]
