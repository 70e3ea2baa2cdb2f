"""The Splitter cuts any stream into the same frames however it is chopped, and buffers one frame at most."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.errors import PeerError
from postroad.wire.frames import FRAME_PREFIX_BYTES, MAX_CONTROL_BYTES, Kind, Splitter

MAX_BATCH = 200


def frame(kind: int, body: bytes) -> bytes:
    return (FRAME_PREFIX_BYTES + len(body)).to_bytes(4, "little") + bytes((kind, 1, 0, 0)) + body


FRAMES = st.lists(
    st.builds(
        frame, st.sampled_from([Kind.PING, Kind.PUBLISH]), st.binary(max_size=MAX_BATCH - FRAME_PREFIX_BYTES)
    ),
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(FRAMES, st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_cut_anywhere(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frames)
    splitter = Splitter(MAX_BATCH)
    found: list[bytes] = []
    position = turn = 0
    while position < len(stream):
        step = cuts[turn % len(cuts)]
        found += splitter.feed(stream[position : position + step])
        position, turn = position + step, turn + 1
        assert splitter.pending < MAX_BATCH
        assert splitter.pending == min(position, len(stream)) - sum(map(len, found))
    assert found == frames
    assert splitter.pending == 0


def test_every_single_cut() -> None:
    frames = [frame(Kind.PING, b""), frame(Kind.PUBLISH, b"x" * 30), frame(Kind.PONG, b"yz")]
    stream = b"".join(frames)
    for cut in range(len(stream) + 1):
        splitter = Splitter(MAX_BATCH)
        assert splitter.feed(stream[:cut]) + splitter.feed(stream[cut:]) == frames


def test_a_chunk_that_is_one_frame_is_not_copied() -> None:
    data = frame(Kind.PUBLISH, b"x" * 50)
    assert Splitter(MAX_BATCH).feed(data)[0] is data


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        (Kind.PUBLISH, MAX_BATCH + 1),
        (Kind.PING, MAX_CONTROL_BYTES + 1),
        (255, 0xFFFF_FFFF),
        (Kind.PING, 0),
        (Kind.PING, FRAME_PREFIX_BYTES - 1),
    ],
)
def test_a_bad_length_is_refused_before_anything_is_buffered(kind: int, length: int) -> None:
    head = length.to_bytes(4, "little") + bytes((kind, 1, 0, 0))
    with pytest.raises(PeerError, match=f"frame of {length} bytes"):
        Splitter(MAX_BATCH).feed(head)
    splitter = Splitter(MAX_BATCH)
    splitter.feed(head[:3])
    with pytest.raises(PeerError):
        splitter.feed(head[3:])


@pytest.mark.parametrize("record", ["1603010200010001fc", "150303001a0000000000"])
def test_tls_where_none_is_spoken_is_said(record: str) -> None:
    splitter = Splitter(MAX_BATCH, handshake=True)
    assert not splitter.begun
    with pytest.raises(PeerError, match="speaks TLS"):
        splitter.feed(bytes.fromhex(record))
