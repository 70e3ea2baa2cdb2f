"""What one client asks for does not keep others waiting: shares of a turn, and replies that nobody reads."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import pytest
from tests.worlds.process_clients import run

import postroad
from postroad.wire.frames import (
    DEFAULT_LIMITS,
    Hello,
    Reply,
    Request,
    Splitter,
    Subscribe,
    Subscribed,
    decode,
    encode,
)

REQUESTS = 100_000
ROUNDS = 50


def flood(address: str, frame: bytes, count: int) -> tuple[socket.socket, threading.Thread]:
    """A client that sends these as fast as they are taken, and reads nothing."""
    host, port = address.rsplit(":", 1)
    connected = socket.create_connection((host, int(port)))
    hello = Hello(
        version=1, role="client", name="flood", token="", limits=DEFAULT_LIMITS, window=1 << 20, time_us=0
    )
    connected.sendall(encode(hello))

    def send() -> None:
        with contextlib.suppress(OSError):  # it is closed at the end
            connected.sendall(frame * count)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return connected, thread


@pytest.mark.parametrize("what", ["subs", "status", "heads", "no such thing"])
def test_requests_whose_replies_nobody_reads_stop_and_others_are_served(brokers: Any, what: str) -> None:
    """100,000 of them: an honest client goes on, and the broker keeps neither requests nor replies."""

    async def test() -> None:
        b1 = brokers.start("b1")
        async with (
            postroad.connect(b1.address) as honest,
            postroad.connect(b1.address) as watcher,
            honest.subscribe("orders/#") as events,
        ):
            before = b1.resident_bytes
            connected, thread = flood(b1.address, encode(Request(number=1, what=what)), REQUESTS)
            for number in range(ROUNDS):
                await honest.publish("orders/eu", str(number).encode())
                event = await anext(aiter(events))
                assert isinstance(event, postroad.Event)
                assert event.payload == str(number).encode()
            status = await watcher.request("status")
            assert status["metrics"]["frames_in_total"] < REQUESTS
            assert b1.resident_bytes - before < 64 << 20
            connected.close()
            thread.join(10)

    run(test())


def test_those_that_are_read_are_all_answered_in_order(brokers: Any) -> None:
    """Waiting in line loses nothing and changes no order, also across kinds of frames."""

    async def test() -> None:
        b1 = brokers.start("b1")
        host, port = b1.address.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as connected:
            hello = Hello(
                version=1, role="client", name="c", token="", limits=DEFAULT_LIMITS, window=1 << 20, time_us=0
            )
            frames = [encode(hello)]
            for number in range(1, 1_001):
                frames.append(encode(Subscribe(number=number, topic=f"t/{number}", where="")))
                frames.append(encode(Request(number=number, what="no such thing")))
            sender = threading.Thread(target=connected.sendall, args=(b"".join(frames),))
            sender.start()
            connected.settimeout(60)
            replies: list[int] = []
            subscribed: list[int] = []
            splitter = Splitter(1 << 20)
            while len(replies) < 1_000 or len(subscribed) < 1_000:
                for frame in splitter.feed(connected.recv(65_536)):
                    message = decode(frame)
                    if isinstance(message, Reply):
                        replies.append(message.number)
                    elif isinstance(message, Subscribed):
                        subscribed.append(message.number)
            sender.join(10)
        assert replies == subscribed == list(range(1, 1_001))

    run(test())
