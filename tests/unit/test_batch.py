"""The event batch: codec, limits, new frames from old. Every test runs on both kernels."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest

from postroad import kernel
from postroad.config import DEFAULT_LIMITS
from postroad.errors import BugError, PeerError, TooLargeError, UsageError
from postroad.events import BatchBuilder, Event, EventBatch, Gap, empty_frame, topic_number
from postroad.events.batch import HEADER_DTYPE, checksum
from postroad.ids import MessageId, pubend_id, volatile_pubend
from postroad.kernel import layout, reference
from postroad.kernel.layout import RULE_TEXT, Rule
from postroad.wire.frames import BATCH_KINDS, Kind, Limits

PUBEND = pubend_id(7, 3)
FUNCTIONS = [name for name in kernel.__all__ if hasattr(reference, name)]


@pytest.fixture(autouse=True, params=["chosen", "reference"])
def both_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "reference":
        for name in FUNCTIONS:
            monkeypatch.setattr(kernel, name, getattr(reference, name))
    yield


def identity(number: int) -> bytes:
    return bytes(MessageId(42, 7, 1_700_000_000_000 + number, number))


def limits(**changes: int) -> Limits:
    return msgspec.structs.replace(DEFAULT_LIMITS, **changes)


def published(count: int, channel: int = 1) -> bytes:
    builder = BatchBuilder()
    for number in range(count):
        builder.add(
            identity(number),
            f"orders/{number % 3}",
            {"price": number, "region": "eü", "weight": number / 2, "rush": number % 2 == 0},
            bytes([number % 256]) * number,
            DEFAULT_LIMITS,
        )
    return builder.finish(channel=channel)


def streamed(count: int, start: int = 10, first: int = 100) -> EventBatch:
    return EventBatch.parse(published(count), DEFAULT_LIMITS).with_ticks(
        first, kind=Kind.KNOWLEDGE, pubend=PUBEND, start=start, channel=5
    )


GOLDEN = bytes.fromhex(
    "84000000 10 01 0000 01000000 00000000"  # length 132, PUBLISH, version 1, no flags, one event, no checksum
    "0000000000000000 0000000000000000 0000000000000000"  # pubend, start, end
    "09000000 00000000"  # channel: the ninth publish of this connection
    "0000002a 00000007 0193c1d2e3f4 0001"  # id
    "0000000000000000 53b4cc190e5f32da"  # tick, topic number
    "0300 1e00 03000000 0000 0300 00000000"  # lengths of topic, attributes, payload; flags, attributes, reserved
    "612f62"  # a/b
    "01 66 02 000000000000f83f"  # f = 1.5
    "01 6e 01 feffffffffffffff"  # n = -2
    "01 74 00 0300 6f6bc2"  # replaced below: t = text
)
