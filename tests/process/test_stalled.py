"""Consumers that do not read: what is kept for all of them together has a bound and goes with them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

from tests.worlds.process_clients import run
from tests.worlds.stalled import WINDOW, RawClient

import postroad
from postroad.wire.frames import DEFAULT_LIMITS, Kind

TOTAL_BYTES = 32 << 20
SLACK_BYTES = 24 << 20  # what memory may differ by for other reasons
EVENTS = 400
STALLED = 8
ROUNDS = 3
# What is freed only by the collector of cycles stays for good in this one.
WITHOUT_COLLECTOR = ("-c", "import gc; gc.disable(); from postroad.cli import main; raise SystemExit(main())")


def test_all_that_do_not_read_share_one_bound_and_leave_nothing_behind(brokers: Any, tmp_path: Path) -> None:
    """Eight of them could hold 99 MiB each. The honest one beside them loses nothing."""
    config = tmp_path / "small.toml"
    streams = f"[streams]\nplain_bytes = {1 << 20}\ncache_bytes = {1 << 20}\n"
    config.write_text(f"[delivery]\ntotal_bytes = {TOTAL_BYTES}\n{streams}")

    async def test() -> None:
        b1 = brokers.start("b1", extra=("--config", str(config)), program=WITHOUT_COLLECTOR)
        after: list[int] = []
        async with (
            postroad.connect(b1.address) as honest,
            postroad.connect(b1.address) as publisher,
            honest.subscribe("orders/#") as events,
        ):
            before = b1.resident_bytes
            for _ in range(ROUNDS):
                with contextlib.ExitStack() as stack:
                    for number in range(STALLED):  # some hold it in their sockets, some in their queues
                        window = WINDOW if number % 2 else 1 << 16
                        stack.enter_context(RawClient(b1.address, window=window)).subscribe("orders/#")
                    for number in range(EVENTS):
                        await publisher.publish("orders/eu", number.to_bytes(2, "big") * 50_000)
                        event = await anext(aiter(events))
                        assert isinstance(event, postroad.Event)
                        assert event.payload[:2] == number.to_bytes(2, "big")
                    metrics = (await honest.request("status"))["metrics"]
                    assert metrics["delivery_buffered_bytes"] <= TOTAL_BYTES // 2
                    assert b1.resident_bytes - before < TOTAL_BYTES + SLACK_BYTES
                after.append(b1.resident_bytes)
            assert metrics["delivery_shortened_total"]
        assert after[-1] - after[0] < SLACK_BYTES, after
        assert "holds most of the" in b1.log.read_text()

    run(test())


def test_the_longest_of_all_queues_become_gaps(brokers: Any, tmp_path: Path) -> None:
    """Of those without credit the one that is furthest behind gets a Gap; the others lose nothing."""
    config = tmp_path / "small.toml"
    config.write_text(f"[delivery]\ntotal_bytes = {4 << 20}\n")

    async def test() -> None:
        b1 = brokers.start("b1", extra=("--config", str(config)))
        async with (
            postroad.connect(b1.address, window=1 << 16) as greedy,
            postroad.connect(b1.address, window=1 << 16) as modest,
            postroad.connect(b1.address) as publisher,
            greedy.subscribe("orders/#") as all_orders,
            modest.subscribe("orders/0") as some_orders,
        ):
            for number in range(60):
                await publisher.publish(f"orders/{number % 6}", number.to_bytes(1, "big") * 100_000)
            async with asyncio.timeout(30):
                while not (await publisher.request("status"))["metrics"]["delivery_shortened_total"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            got = [await anext(aiter(some_orders)) for _ in range(10)]
            assert [event.payload[0] for event in got if isinstance(event, postroad.Event)] == list(
                range(0, 60, 6)
            )
            seen = 0
            async for item in all_orders:
                if isinstance(item, postroad.Gap):
                    break
                seen += 1
            assert 0 < seen < 60

    run(test())


def test_frames_that_never_come_whole_count_too(brokers: Any, tmp_path: Path) -> None:
    """Each may be 8 MiB; twelve of them say the length and send all but the last byte."""
    config = tmp_path / "small.toml"
    config.write_text(f"[delivery]\ntotal_bytes = {TOTAL_BYTES}\n")

    async def test() -> None:
        b1 = brokers.start("b1", extra=("--config", str(config)))
        size = DEFAULT_LIMITS.batch_bytes
        async with postroad.connect(b1.address) as honest, honest.subscribe("orders/#") as events:
            before = b1.resident_bytes
            with contextlib.ExitStack() as stack:
                for _ in range(12):
                    client = stack.enter_context(RawClient(b1.address))
                    beginning = size.to_bytes(4, "little") + bytes([Kind.PUBLISH]) + bytes(size - 6)
                    await asyncio.to_thread(client.send_some, beginning)
                await honest.publish("orders/eu", b"1")
                event = await anext(aiter(events))
                assert isinstance(event, postroad.Event)
                async with asyncio.timeout(30):
                    while (await honest.request("status"))["metrics"]["clients"] > 4:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                assert b1.resident_bytes - before < TOTAL_BYTES + SLACK_BYTES

    run(test())


def test_many_that_hold_a_little_are_within_the_bound(brokers: Any, tmp_path: Path) -> None:
    """Parts of frames, each far too small to be noticed alone, of clients and of strangers."""
    config = tmp_path / "small.toml"
    config.write_text(f"[delivery]\ntotal_bytes = {TOTAL_BYTES}\n")
    b1 = brokers.start("b1", extra=("--config", str(config)))
    host, port = b1.address.rsplit(":", 1)
    part = (900_000).to_bytes(4, "little") + bytes([Kind.PUBLISH]) + bytes(199_995)
    hello = (60_000).to_bytes(4, "little") + bytes([Kind.HELLO]) + bytes(59_000)
    with contextlib.ExitStack() as stack:
        stack.enter_context(RawClient(b1.address))
        before = b1.resident_bytes
        for _ in range(400):
            stack.enter_context(RawClient(b1.address)).send_some(part)
        for _ in range(400):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(OSError):
                stranger.sendall(hello)
        honest = stack.enter_context(RawClient(b1.address))
        honest.subscribe("still/here")
        assert b1.resident_bytes - before < TOTAL_BYTES + SLACK_BYTES
    assert "holds most of the" in b1.log.read_text()
