"""Running a broker: health, metrics, signals, its data folder, clear refusals, hostile and slow peers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tools import reference

import postroad
from postroad.cli import main
from postroad.net.metric_texts import ABOUT
from postroad.wire.frames import Kind, Refuse, decode

SOURCE = Path(postroad.__path__[0]).parent


def run(test: Coroutine[Any, Any, None], seconds: float = 60.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await test

    asyncio.run(bounded())


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "postroad", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "COLUMNS": "200"},
    )


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def status(broker: Any) -> dict[str, Any]:
    with postroad.sync.connect(broker.address, name="status") as client:
        return client.request("status")


def test_delays_are_counted(brokers: Any, until: Callable[..., None]) -> None:
    """Of plain and durable deliveries and of commits."""
    b1 = brokers.start("b1", extra=("--metrics", "127.0.0.1:0"))
    b2 = brokers.start("b2", b1.address, extra=("--metrics", "127.0.0.1:0"))

    def count(broker: Any, name: str) -> float:
        text = get(metrics[broker.name], "/metrics")[1]
        found = re.search(rf"^postroad_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    metrics = {broker.name: status(broker)["metrics_address"] for broker in (b1, b2)}
    until(lambda: len(status(b2)["brokers"]) == 2, "linked")
    with (
        postroad.sync.connect(b1.address) as here,
        postroad.sync.connect(b2.address) as there,
        there.subscribe("a") as events,
    ):
        here.publish("a", b"x")
        here.publish("a", b"y", mode="durable")
        here.flush()
        assert {event.payload for _, event in zip(range(2), events, strict=False)} == {b"x", b"y"}
    for mode in ("plain", "durable"):
        assert count(b2, f'delivery_delay_seconds_count{{mode="{mode}"}}') >= 1
    assert count(b1, "log_commit_seconds_count") >= 1
    assert count(b1, "log_sync_seconds_count") >= 1


def test_slow_sockets_do_not_keep_health_from_answering(brokers: Any) -> None:
    """They send no request, or do not read what they asked for; each makes room for the next."""
    b1 = brokers.start("b1", extra=("--metrics", "127.0.0.1:0"))
    host, _, port = status(b1)["metrics_address"].rpartition(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(200)]
    for number, one in enumerate(slow):
        one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" if number % 2 else b"GET /hea")
    assert get(f"{host}:{port}", "/health") == (200, "alive\n")
    assert get(f"{host}:{port}", "/ready")[0] == 200
    for one in slow:
        one.close()


def test_metrics_health_and_ready(brokers: Any) -> None:
    b1 = brokers.start("b1", extra=("--metrics", "127.0.0.1:0"))
    metrics = status(b1)["metrics_address"]
    assert get(metrics, "/health") == (200, "alive\n")
    assert get(metrics, "/ready") == (200, "ready\n")
    assert get(metrics, "/nothing")[0] == 404
    with postroad.sync.connect(b1.address) as client, client.subscribe("a", durable="d"):
        client.application("shop").send("inventory", b"x")  # its lag, and the inbox's, are among the metrics
    code, text = get(metrics, "/metrics")
    assert code == 200
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["postroad_socket_connections_opened_total"]) == 2
    assert float(lines["postroad_turn_seconds_count"]) > 0
    assert "postroad_events_in_total" in lines
    assert float(lines["postroad_log_short"]) == 0
    assert "process_resident_memory_bytes" in lines
    assert any(line.startswith("postroad_broker_info{") and 'name="b1"' in line for line in lines)
    page = SOURCE.parent / "docs" / "reference" / "metrics.md"
    assert page.read_text() == reference.metrics(text), "run `make reference`"
    texts = dict(line.split(" ", 3)[2:] for line in text.splitlines() if line.startswith("# HELP postroad_"))
    del texts["postroad_broker_info"]  # labels, no figure
    assert [name for name, about in texts.items() if not re.search(r"\. (Alarm|No alarm): ", about)] == []
    assert {name.removeprefix("postroad_") for name in texts} >= ABOUT.keys(), "a text of no metric"
    with socket.create_connection(metrics.split(":")) as rude:
        rude.sendall(b"POST / HTTP/1.1\r\n\r\n")
        assert rude.recv(100).startswith(b"HTTP/1.1 405 ")


def test_status_for_people_and_programs(brokers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    b1 = brokers.start("b1")
    assert main(["status", "--broker", b1.address]) == 0
    text = capsys.readouterr().out
    assert text.startswith("b1 is well: up ")
    assert f"at {b1.address}" in text
    assert "events in total" not in text
    assert main(["status", "--broker", b1.address, "--details"]) == 0
    assert "events in total" in capsys.readouterr().out
    assert main(["status", "--broker", b1.address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "b1"


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
    assert b1.process.wait(60) == 0


def test_two_brokers_never_share_a_data_folder(brokers: Any) -> None:
    b1 = brokers.start("b1")
    done = command("up", "--listen", "127.0.0.1:0", "--data", str(b1.data), "--metrics", "off")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"is in use by another broker (process {b1.process.pid}); give this one its own" in done.stderr
    assert done.stderr.count("\n") == 1
    b1.kill()
    b1.start()  # kill -9 leaves nothing to clean up


def test_refusals_are_one_line_that_says_what_to_do(
    brokers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    b1 = brokers.start("b1")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[limit]\n")
    for arguments, expected in (
        (("--listen", "0.0.0.0:0"), "without authentication a broker serves loopback only"),
        (("--listen", b1.address), f"cannot listen on {b1.address}: Address already in use"),
        (("--listen", "127.0.0.1:0", "--metrics", b1.address), "choose another address with --metrics"),
        (("--listen", "no.such.host.invalid", "--token", "t"), "cannot listen on no.such.host.invalid:7420"),
        (("--config", str(wrong)), "unknown setting 'limit'; did you mean 'limits'?"),
        (("--tls-cert", "/nonexistent"), "no such file: --tls-cert /nonexistent"),
        (("--link", "127.0.0.1:x"), "'127.0.0.1:x' is not an address"),
        (("--nonsense",), "No such option: --nonsense"),
        (("--name", "x" * 100_000), "a name has up to 255 bytes, printable, without blanks, not 'xxx"),
        (("--listen", "x" * 100_000 + ":y"), "is not an address such as 127.0.0.1:7420"),
        (("--log", "x" * 100_000), "is not one of debug, info, warning, error"),
    ):
        assert main(["up", *arguments]) == 2, arguments
        out, err = capsys.readouterr()
        assert expected in err
        assert (out, err.count("\n")) == ("", 1)
        assert len(err) < 300
    assert sorted(one.name for one in tmp_path.iterdir()) == ["b1", "b1.log", "wrong.toml"], "no new folder"


def test_no_broker_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = "127.0.0.1:" + str(closed.getsockname()[1])
    assert main(["status", "--broker", address]) == 1
    err = capsys.readouterr().err
    assert f"no broker at {address}" in err
    assert err.count("\n") == 1


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
        attacks = [
            b"\0" * 8,
            b"\xff" * 64,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),  # a TLS client hello
            *(draw.randbytes(draw.randrange(8, 400)) for _ in range(40)),
            *(
                (8).to_bytes(4, "little") + bytes((kind, 1, 0, 0)) for kind in range(256)
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
    """D9."""

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
            before = b1.resident_bytes
            for _ in range(0, count, 40):  # 2 MB at a time, which the quick one reads before the next
                for _ in range(40):
                    await publisher.publish("flood", payload)
                for _ in range(40):
                    assert isinstance(await anext(aiter(all_of_it)), postroad.Event)
            # The plain stream keeps 64 MiB for downstream by default; the slow one adds little to it.
            assert b1.resident_bytes - before < 160 << 20
            ids: list[postroad.MessageId] = []
            async for event in some_of_it:
                if isinstance(event, postroad.Gap):
                    break
                ids.append(event.id)
            assert 0 < len(ids) < count
            assert ids == sorted(set(ids))
            await publisher.publish("flood", b"after")
            while True:
                event = await anext(aiter(some_of_it))
                if isinstance(event, postroad.Event):
                    break
            assert event.payload == b"after"
            metrics = (await publisher.request("status"))["metrics"]
            assert metrics["dropped_deliveries_total"] == count - len(ids)

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


def test_a_neighbour_that_is_lost_is_a_warning(brokers: Any, until: Callable[..., None]) -> None:
    b1 = brokers.start("b1")
    b2 = brokers.start("b2", b1.address)
    until(lambda: len(status(b2)["links"]) == 1, "linked")
    b1.kill()
    until(lambda: " warning b2 the link with broker 'b1' is lost" in b2.log.read_text(), "it is said")


def test_a_neighbour_that_stops_is_no_cause_for_alarm(brokers: Any, until: Callable[..., None]) -> None:
    b1 = brokers.start("b1")
    b2 = brokers.start("b2", b1.address)
    until(lambda: len(status(b2)["links"]) == 1, "linked")
    assert b1.stop() == 0
    until(lambda: status(b2)["addresses"][0]["failures"] >= 5, "dialled again and again")
    for log in (b1.log.read_text(), b2.log.read_text()):
        assert "the broker is shutting down" in log
        assert " warning " not in log
        assert "TLS" not in log.replace("tls=no", "")
    # Once, and once more after ten seconds should five attempts take that long.
    assert b2.log.read_text().count(f"no connection to {b1.address}") <= 3
