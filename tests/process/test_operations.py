"""Running a broker: ready, health, metrics, signals, one data folder, clear refusals, slow consumers, hostile bytes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import postroad
from postroad.wire.frames import Kind, Refuse, decode

SOURCE = Path(postroad.__path__[0]).parent


def run(test: Coroutine[Any, Any, None], seconds: float = 60.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await test

    asyncio.run(bounded())


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "postroad", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "COLUMNS": "200"},
    )


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def status(broker: Any) -> dict[str, Any]:
    done = command("status", "--broker", broker.address, "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_metrics_health_and_ready(brokers: Any) -> None:
    b1 = brokers.start("b1", extra=("--metrics", "127.0.0.1:0"))
    metrics = status(b1)["metrics_address"]
    assert get(metrics, "/health") == (200, "alive\n")
    assert get(metrics, "/ready") == (200, "ready\n")
    assert get(metrics, "/nothing")[0] == 404
    code, text = get(metrics, "/metrics")
    assert code == 200
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["postroad_socket_connections_opened_total"]) == 1
    assert float(lines["postroad_turn_seconds_count"]) > 0
    assert "postroad_events_in_total" in lines
    assert "process_resident_memory_bytes" in lines
    assert any(line.startswith("postroad_broker_info{") and 'name="b1"' in line for line in lines)
    with socket.create_connection(metrics.split(":")) as rude:
        rude.sendall(b"POST / HTTP/1.1\r\n\r\n")
        assert rude.recv(100).startswith(b"HTTP/1.1 405 ")


def test_status_for_people(brokers: Any) -> None:
    b1 = brokers.start("b1")
    done = command("status", "--broker", b1.address)
    assert done.returncode == 0, done.stderr
    assert b1.address in done.stdout
    assert "events in total" in done.stdout


def test_sigterm_is_clean_and_clients_are_told(brokers: Any) -> None:
    async def test() -> None:
        b1 = brokers.start("b1")
        reader, writer = await asyncio.open_connection(*b1.address.split(":"))
        async with postroad.connect(b1.address) as client:
            await client.publish("a", b"x")
            await client.flush()
            assert await asyncio.to_thread(b1.stop) == 0
        assert await reader.read() == b""
        writer.close()
        log = b1.log.read_text()
        assert "SIGTERM: stopping" in log
        assert log.rstrip().endswith("stopped")

    run(test())


def test_sigint_too(brokers: Any) -> None:
    b1 = brokers.start("b1")
    b1.process.send_signal(signal.SIGINT)
    assert b1.process.wait(10) == 0


def test_two_brokers_never_share_a_data_folder(brokers: Any) -> None:
    b1 = brokers.start("b1")
    done = command("up", "--listen", "127.0.0.1:0", "--data", str(b1.data), "--metrics", "off")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"is in use by another broker (process {b1.process.pid}); give this one its own" in done.stderr
    assert done.stderr.count("\n") == 1
    b1.kill()
    b1.start()  # kill -9 leaves nothing to clean up


def test_refusals_are_one_line_that_says_what_to_do(brokers: Any, tmp_path: Path) -> None:
    b1 = brokers.start("b1")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[limit]\n")
    for arguments, expected in (
        (("--listen", "0.0.0.0:0"), "without authentication a broker serves loopback only"),
        (("--listen", b1.address), f"cannot listen on {b1.address}: Address already in use"),
        (("--listen", "127.0.0.1:0", "--metrics", b1.address), "choose another address with --metrics"),
        (("--listen", "nowhere"), "cannot listen on nowhere:7420"),
        (("--config", str(wrong)), "unknown setting 'limit'; did you mean 'limits'?"),
        (("--tls-cert", "/nonexistent"), "no such file: --tls-cert /nonexistent"),
        (("--link", "127.0.0.1:x"), "'127.0.0.1:x' is not an address"),
        (("--nonsense",), "No such option: --nonsense"),
    ):
        done = command("up", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert expected in done.stderr
        assert done.stderr.count("\n") == 1


def test_no_broker_to_ask() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = "127.0.0.1:" + str(closed.getsockname()[1])
    done = command("status", "--broker", address)
    assert done.returncode == 1
    assert f"no broker at {address}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_hostile_bytes_hurt_nobody_else(brokers: Any) -> None:
    """Whatever a stranger sends, its connection ends and everybody else is served."""

    async def attack(address: str, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        try:
            writer.write(data)
            return await asyncio.wait_for(reader.read(), 15)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async def test() -> None:
        b1 = brokers.start("b1")
        draw = random.Random(7)
        head = [kind for kind in range(256)]
        attacks = [
            b"\0" * 8,
            b"\xff" * 64,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),  # a TLS client hello
            *(draw.randbytes(draw.randrange(8, 400)) for _ in range(40)),
            *(
                (8).to_bytes(4, "little") + bytes((kind, 1, 0, 0)) for kind in head
            ),  # empty frames, every kind
            *(
                (40).to_bytes(4, "little") + bytes((kind, 1, 0, 0)) + draw.randbytes(32)
                for kind in (Kind.HELLO, Kind.WELCOME, Kind.TOPOLOGY, Kind.INTEREST, Kind.SUBSCRIBE)
            ),
        ]
        async with postroad.connect(b1.address) as client, client.subscribe("a") as events:
            answers = await asyncio.gather(*(attack(b1.address, data) for data in attacks))
            told = [decode(answer) for answer in answers if answer]
            assert len(told) > len(attacks) // 2
            assert all(isinstance(one, Refuse) for one in told)
            await client.publish("a", b"still here")
            event = await anext(aiter(events))
            assert isinstance(event, postroad.Event)
            assert event.payload == b"still here"
        assert b1.running

    run(test())


def test_a_slow_consumer_slows_nobody_and_is_told_its_gap(brokers: Any) -> None:
    async def test() -> None:
        b1 = brokers.start("b1")
        payload = bytes(50_000)
        count = 1200  # 60 MB, far more than every buffer on the way
        async with (
            postroad.connect(b1.address) as publisher,
            postroad.connect(b1.address) as quick,
            postroad.connect(b1.address, window="256 KiB") as slow,
            quick.subscribe("flood") as all_of_it,
            slow.subscribe("flood", buffer="1 MiB") as some_of_it,
        ):

            async def read_all() -> int:
                got = 0
                async for event in all_of_it:
                    assert isinstance(event, postroad.Event)
                    got += 1
                    if got == count:
                        break
                return got

            reading = asyncio.create_task(read_all())
            before = b1.resident_bytes
            for _ in range(count):
                await publisher.publish("flood", payload)
                await asyncio.sleep(0)
            await publisher.flush()
            assert await reading == count
            # The plain stream keeps 64 MiB for downstream by default; the slow one adds little to it.
            assert b1.resident_bytes - before < 160 << 20
            ticks: list[int] = []
            gaps: list[postroad.Gap] = []
            async for event in some_of_it:
                if isinstance(event, postroad.Gap):
                    gaps.append(event)
                    break
                assert event.tick is not None
                ticks.append(event.tick)
            assert 0 < len(ticks) < count
            assert ticks == sorted(set(ticks))
            assert gaps[0].start >= ticks[-1]
            await publisher.publish("flood", b"after")
            while True:
                event = await anext(aiter(some_of_it))
                if isinstance(event, postroad.Event):
                    break
            assert event.payload == b"after"
            metrics = (await publisher.request("status"))["metrics"]
            assert metrics["dropped_deliveries_total"] == count - len(ticks)

    run(test())


def test_a_broker_that_was_stopped_comes_back(brokers: Any, until: Callable[..., None]) -> None:
    """SIGSTOP for a while is not death: links and clients go on."""
    b1, b2 = brokers.line(2)
    until(lambda: len(status(b1)["links"]) == 1, "linked")
    b2.pause()
    with postroad.sync.connect(b1.address) as client:
        client.publish("a", b"x")
    b2.unpause()
    until(lambda: len(status(b2)["links"]) == 1, "linked again")
