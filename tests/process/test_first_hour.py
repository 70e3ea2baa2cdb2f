"""What a new user does in the first hour: mistakes that are named, promises that are kept."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from typing import Any

import pytest
from tests.worlds.processes import BrokerProcess, wait_until

import postroad
from postroad.cli import main
from postroad.durable.settings import DurableConfig


def warnings(broker: BrokerProcess) -> list[str]:
    return [line for line in broker.log.read_text().splitlines() if " warning " in line]


def test_durable_events_are_kept_for_a_week_although_nobody_subscribes(
    brokers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert DurableConfig().keep_us == 7 * 86_400 * 1_000_000
    b1 = brokers.start("b1")
    at = ("--broker", b1.address)
    assert main(["pub", "orders/eu", "kept", "--durable", *at]) == 0
    b1.kill()
    b1.start()
    capsys.readouterr()
    assert main(["sub", "orders/#", "--durable", "late", "--since", "5m", "--count", "1", *at]) == 0
    assert capsys.readouterr().out == "orders/eu  kept\n"


def test_a_clients_token_is_not_the_brokers_secret(brokers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTROAD_TOKEN", "of some other broker")
    b1 = brokers.start("b1")
    monkeypatch.delenv("POSTROAD_TOKEN")
    with postroad.sync.connect(b1.address, timeout=10) as client:
        assert client.request("status")["name"] == "b1"


def test_a_link_to_oneself_and_a_copied_folder_are_warnings_with_the_reason(brokers: Any) -> None:
    b1 = brokers.start("b1")
    b1.stop()
    copy = b1.data.parent / "copy"
    shutil.copytree(b1.data, copy)
    b1.links = (b1.address,)
    b1.start()
    wait_until(lambda: any("the broker itself" in line for line in warnings(b1)), "it links to itself")
    twin = BrokerProcess("twin", copy, links=(b1.address,))
    try:
        twin.start()
        wait_until(lambda: any("copied" in line or "copy" in line for line in warnings(twin)), "a copy")
    finally:
        twin.kill()


def test_a_link_to_what_is_no_broker_is_a_warning_and_not_connected(brokers: Any) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()

    threading.Thread(target=answer, daemon=True).start()
    place = f"127.0.0.1:{listener.getsockname()[1]}"
    try:
        b1 = brokers.start("b1", place)
        wait_until(lambda: any(place in line for line in warnings(b1)), "it says so")
        with postroad.sync.connect(b1.address) as client:
            status = client.request("status")
        assert status["links"] == []
        assert all(row.get("state") != "connected" for row in status["addresses"])
    finally:
        listener.close()


def test_what_is_typed_first(
    brokers: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("postroad ")
    assert main(["up", "--listen", "21001", "--data", str(tmp_path / "d")]) == 2
    assert "'21001' is a port without a host: write 127.0.0.1:21001" in capsys.readouterr().err
    b1 = brokers.start("b1")
    monkeypatch.setenv("POSTROAD_BROKER", b1.address)
    assert main(["pub", "orders/eu", "x", "--attr", "zip=01234"]) == 0
    assert main(["status"]) == 0
    assert f"at {b1.address}" in capsys.readouterr().out
