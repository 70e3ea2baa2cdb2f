"""The client for programs without an event loop, against real brokers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import postroad

if TYPE_CHECKING:
    from tests.worlds.processes import Brokers


def test_publish_and_subscribe(brokers: Brokers) -> None:
    address = brokers.start("b1").address
    with postroad.sync.connect(address) as client:
        assert client.broker == "b1"
        with client.subscribe("orders/#", where="price > 100", timeout=60) as events:
            receipt = client.publish("orders/eu", "dear", attributes={"price": 120})
            client.publish("orders/eu", "cheap", attributes={"price": 20})
            event = events.get(timeout=60)
            assert isinstance(event, postroad.Event)
            assert (event.id, event.payload) == (receipt.id, b"dear")
            with pytest.raises(TimeoutError):
                events.get(timeout=0.1)
            assert (
                client.publish_many(("orders/us", str(n), {"price": 1000 + n}) for n in range(3000)) == 3000
            )
            client.flush()
            found = [event.payload for event in islice(events, 3000) if isinstance(event, postroad.Event)]
            assert found == [str(n).encode() for n in range(3000)]
        with client.subscribe("whole") as events:
            client.publish_many(("whole", str(n)) for n in range(10))
            batches = (one for some in events.batches() for one in some)
            rows = (row for one in batches if isinstance(one, postroad.EventBatch) for row in one.events())
            assert [event.payload for event in islice(rows, 10)] == [str(n).encode() for n in range(10)]
        with client.subscribe("quiet", timeout=0.1) as events:
            assert list(events) == []  # a loop ends after so long without an event
        assert client.request("status")["name"] == "b1"
        with pytest.raises(postroad.SelectorError):
            client.subscribe(where="price >")
    with pytest.raises(postroad.UsageError):
        client.publish("a", b"closed")


def test_closing_twice_and_in_any_order_is_no_error(brokers: Brokers) -> None:
    address = brokers.start("b1").address
    with postroad.sync.connect(address) as client:
        with client.subscribe("a") as events:
            client.close()
            with pytest.raises(postroad.UsageError, match="closed"):
                events.get(timeout=60)
            assert list(events) == list(events.batches()) == []
            events.close()
        client.close()


def test_a_reader_in_another_thread_ends_when_the_client_is_closed(brokers: Brokers) -> None:
    address = brokers.start("b1").address
    client = postroad.sync.connect(address)
    events = client.subscribe("a")
    seen: list[object] = []
    reader = threading.Thread(target=lambda: seen.append(list(events)), daemon=True)
    reader.start()
    client.close()
    reader.join(60)
    assert seen == [[]]


def test_any_thread_may_use_it(brokers: Brokers) -> None:
    address = brokers.start("b1").address
    with postroad.sync.connect(address) as client, client.subscribe("n", timeout=60) as events:
        threads = [
            threading.Thread(target=lambda: [client.publish("n", b"x") for _ in range(50)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.flush()
        assert sum(1 for _ in islice(events, 200)) == 200
        with pytest.raises(TimeoutError):
            events.get(timeout=0.1)


def test_no_broker_is_a_clear_error_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(postroad.UnavailableError, match="postroad up"):
        postroad.sync.connect("127.0.0.1:1")
    assert threading.active_count() == before


def test_ctrl_c_ends_a_waiting_reader(brokers: Brokers) -> None:
    address = brokers.start("b1").address
    program = (
        "import postroad, sys\n"
        f"with postroad.sync.connect({address!r}) as client:\n"
        "    with client.subscribe('a') as events:\n"
        "        print('ready', flush=True)\n"
        "        for event in events: pass\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(postroad.__path__[0]).parent), "PYTHONWARNINGS": "error"},
        # A shell's background job ignores SIGINT, and would hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.strip().endswith("KeyboardInterrupt")
