"""Brokers, discovery nodes and clients as real processes, in network namespaces of their own."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.certificates import Certificates
from tests.worlds.namespaces import Hub, Namespace, need_namespaces
from tests.worlds.processes import SOURCE, wait_until

READY_S = 60.0
SITES = ("indiana", "minnesota", "illinois", "florida", "cardiff")
# One way, in milliseconds, from the client's site.
DISTANT = {"indiana": 5.0, "minnesota": 15.0, "illinois": 8.0, "florida": 25.0, "cardiff": 60.0}


class Run:
    """Processes of one test; `end` ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def environment(self) -> dict[str, str]:
        own = {
            "PYTHONPATH": str(SOURCE),
            "PYTHONWARNINGS": "error",
            "XDG_STATE_HOME": str(self.folder / "state"),
        }
        return {key: value for key, value in os.environ.items() if key != "POSTROAD_INTERFACE"} | own

    def start(self, space: Namespace, name: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        """A command that prints `ready NAME ADDRESS`; the process and the address."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                space.command([sys.executable, "-m", "postroad", *arguments]),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment,
                cwd=self.folder,
            )
        self._processes.append(process)
        assert process.stdout is not None
        watchdog = threading.Timer(READY_S, process.kill)
        watchdog.start()
        line = process.stdout.readline()
        watchdog.cancel()
        assert line.split()[:2] == ["ready", name], (self.folder / f"{name}.log").read_text()
        return process, line.split()[2]

    def broker(self, space: Namespace, name: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        own = ["--name", name, "--data", str(self.folder / name), "--metrics", "off"]
        if "--listen" not in arguments:
            own += ["--listen", "127.0.0.1:0"]
        return self.start(space, name, "up", *own, *arguments)

    def ask(self, space: Namespace, *arguments: str) -> Any:
        """What a command prints as JSON."""
        done = self.command(space, *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def command(self, space: Namespace, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            space.command([sys.executable, "-m", "postroad", *arguments]),
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.folder,
            timeout=READY_S,
        )

    def program(self, space: Namespace, text: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            space.command([sys.executable, "-c", text, *arguments]),
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self.folder,
        )
        self._processes.append(process)
        return process

    def end(self) -> None:
        died = []
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(READY_S)
            if process.returncode == 70:
                died.append(process.args)
            assert process.stdout is not None
            process.stdout.close()
        assert not died, "\n".join(file.read_text()[-3000:] for file in self.folder.glob("*.log"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    one = Run(tmp_path)
    try:
        yield one
    finally:
        one.end()


@pytest.fixture
def space() -> Iterator[Namespace]:
    need_namespaces()
    one = Namespace()
    try:
        yield one
    finally:
        one.close()


def names(answer: Any) -> list[str]:
    return sorted(row["broker"] for row in answer["responses"])


def test_a_discovery_node_knows_a_broker_and_the_network_spreads_requests(run: Run, space: Namespace) -> None:
    """Spec V1, V2, V4 to V7; paper 9, linear topology: one broker is registered, all are found."""
    _, bdn = run.start(space, "bdn", "bdn", "--listen", "127.0.0.1:0")
    _, first = run.broker(space, "b1", "--bdn", bdn)
    _, second = run.broker(space, "b2", "--link", first)
    run.broker(space, "b3", "--link", second)
    off = ("--interface", "off")
    wait_until(
        lambda: names(run.ask(space, "discover", "--bdn", bdn, "--json", *off)) == ["b1", "b2", "b3"],
        "all three",
    )
    answer = run.ask(space, "discover", "--bdn", bdn, "--json", *off)
    assert answer["chosen"] in names(answer)
    for row in answer["responses"]:
        assert {"broker", "address", "delay_ms", "weight", "ping_ms"} <= row.keys()
        assert row["ping_ms"] is None or 0 < row["ping_ms"] < 1000
    assert any(row["ping_ms"] for row in answer["responses"])
    assert {"request", "responses", "ping", "total"} <= answer["phases_ms"].keys()
    # People get the same, and the reason of the choice.
    text = run.command(space, "discover", "--bdn", bdn, *off).stdout
    assert "chosen: " in text
    assert "phases in ms: " in text


def test_brokers_find_each_other_with_nothing_but_discover(run: Run, space: Namespace) -> None:
    """Spec V8, V11: no discovery node, multicast on the loopback interface; two links where there can be."""
    for name in ("b1", "b2", "b3"):
        run.broker(space, name, "--discover")

    def links() -> list[int]:
        return sorted(row["links"] for row in run.ask(space, "discover", "--json")["responses"])

    wait_until(lambda: links() == [2, 2, 2], "each has two links")
    # Whoever looks for others founds no queues of its own (spec queues, responsibility 9).
    sent = run.command(space, "send", "inventory", "reserve A1", "--from", "shop")
    assert sent.returncode == 0, sent.stderr
    logs = [(run.folder / f"{name}.log").read_text() for name in ("b1", "b2", "b3")]
    assert sum("founds the queues" in log for log in logs) == 1
    # A command that is given no address finds one, too, and says so.
    done = run.command(space, "status", "--json")
    assert done.returncode == 0, done.stderr
    assert "looking for one" in done.stderr
    assert json.loads(done.stdout)["name"] in ("b1", "b2", "b3")


def test_where_there_is_nobody_a_search_ends_in_time_and_says_what_to_do(run: Run, space: Namespace) -> None:
    done = run.command(space, "discover", "--timeout", "1")
    assert done.returncode == 1
    assert "no broker answered within 1 s" in done.stderr
    assert "postroad up" in done.stderr
    done = run.command(space, "discover", "--timeout", "1", "--bdn", "127.0.0.1:1", "--interface", "off")
    assert done.returncode == 1
    assert "asked: 127.0.0.1:1" in done.stderr


def test_the_brokers_of_last_time_are_asked_where_nobody_else_is(run: Run, space: Namespace) -> None:
    """Paper 7: every node keeps its last target set."""
    process, bdn = run.start(space, "bdn", "bdn", "--listen", "127.0.0.1:0")
    run.broker(space, "b1", "--bdn", bdn)
    asked = ("discover", "--json", "--interface", "off", "--bdn", bdn)
    wait_until(lambda: run.command(space, *asked).returncode == 0, "it is found")
    process.kill()
    process.wait(READY_S)
    assert run.ask(space, *asked)["chosen"] == "b1"
    (run.folder / "state" / "postroad" / "brokers.json").unlink()
    assert run.command(space, *asked, "--timeout", "1").returncode == 1


CLIENT = """
import asyncio, sys
import postroad

async def main():
    async with postroad.discover(bdn=sys.argv[1], interface="off", timeout=60) as client:
        print("broker", client.broker, flush=True)
        async with client.subscribe("t/#", durable="reader", token="") as events:
            print("subscribed", flush=True)
            async for event in events:
                print("event", event.payload.decode(), client.broker, flush=True)
                await events.ack(event)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_client_moves_when_its_broker_dies_or_drains_and_its_subscription_goes_on(
    run: Run, space: Namespace, how: signal.Signals
) -> None:
    _, bdn = run.start(space, "bdn", "bdn", "--listen", "127.0.0.1:0")
    processes, addresses = {}, {}
    for name in ("b1", "b2", "b3"):
        links = [word for address in addresses.values() for word in ("--link", address)]
        processes[name], addresses[name] = run.broker(space, name, "--bdn", bdn, *links)
    asked = ("discover", "--json", "--interface", "off", "--bdn", bdn)
    wait_until(
        lambda: run.command(space, *asked).returncode == 0 and len(names(run.ask(space, *asked))) == 3, "all"
    )
    client = run.program(space, CLIENT, bdn)
    assert client.stdout is not None
    word, first = client.stdout.readline().split()
    assert word == "broker"
    assert client.stdout.readline() == "subscribed\n"
    other = next(name for name in processes if name != first)

    def publish(text: str) -> None:
        done = run.command(space, "pub", "t/x", text, "--durable", "--broker", addresses[other])
        assert done.returncode == 0, done.stderr

    publish("one")
    assert client.stdout.readline().split() == ["event", "one", first]
    processes[first].send_signal(how)
    processes[first].wait(READY_S)
    publish("two")
    word, text, now = client.stdout.readline().split()
    assert (word, text) == ("event", "two")
    assert now != first


def test_only_who_has_the_token_is_answered(run: Run, space: Namespace) -> None:
    """Spec V6: credentials; an unauthorised requester learns nothing."""
    secret = run.folder / "token"
    secret.write_text("s3cret\n")
    _, bdn = run.start(space, "bdn", "bdn", "--listen", "127.0.0.1:0", "--token-file", str(secret))
    run.broker(space, "b1", "--bdn", bdn, "--token-file", str(secret))
    asked = ("discover", "--json", "--interface", "off", "--bdn", bdn, "--timeout", "1")
    wait_until(lambda: run.command(space, *asked, "--token", "s3cret").returncode == 0, "it is found")
    for wrong in ((), ("--token", "guess")):
        assert run.command(space, *asked, *wrong).returncode == 1
    # By multicast neither.
    assert run.command(space, "discover", "--json", "--timeout", "1").returncode == 1
    assert names(run.ask(space, "discover", "--json", "--token", "s3cret")) == ["b1"]


def test_a_private_node_announces_itself_and_answers_who_has_its_token(run: Run, space: Namespace) -> None:
    """Spec V3: the broker names no discovery node; it advertises to the one that shows the token."""
    config = run.folder / "broker.toml"
    config.write_text('auth.token = "s3cret"\n[discovery]\nprivate_nodes = true\nmulticast = false\n')
    _, address = run.broker(space, "b1", "--config", str(config))
    token = ("--token", "s3cret")
    _, node = run.start(space, "bdn", "bdn", "--listen", "127.0.0.1:0", "--private", address, *token)
    asked = ("discover", "--json", "--interface", "off", "--bdn", node, "--timeout", "1")
    wait_until(lambda: run.command(space, *asked, *token).returncode == 0, "it is found")
    assert run.command(space, *asked).returncode == 1


def test_with_certificates_only_who_has_one_finds_anybody(run: Run, space: Namespace) -> None:
    """Spec V10: all is signed and encrypted; who has no certificate of the authority is not answered."""
    certificates = Certificates(run.folder)

    def files(name: str) -> tuple[str, ...]:
        certificate, key = certificates.issue(name)
        return "--tls-cert", certificate, "--tls-key", key, "--tls-ca", str(certificates.ca)

    _, node = run.start(space, "bdn", "bdn", "--listen", "127.0.0.1:0", *files("bdn"))
    run.broker(space, "b1", "--mutual", *files("b1"), "--bdn", node)
    asked = ("discover", "--json", "--bdn", node, "--timeout", "1")
    own = files("alice")
    wait_until(lambda: run.command(space, *asked, *own).returncode == 0, "it is found")
    assert names(run.ask(space, "discover", "--json", *own)) == ["b1"]  # by multicast, too
    assert run.command(space, *asked).returncode == 1
    assert run.command(space, *asked, "--token", "guess").returncode == 1


def test_a_broker_that_is_announced_by_mdns_is_found_where_nobody_else_answers(
    run: Run, space: Namespace
) -> None:
    """DNS-SD: `_postroad._tcp.local.`; the broker takes no part in our own multicast group."""
    config = run.folder / "broker.toml"
    config.write_text("[discovery]\nmulticast = false\nmdns = true\n")
    run.broker(space, "b1", "--config", str(config))
    answer = run.ask(space, "discover", "--json", "--interface", "127.0.0.1", "--timeout", "20")
    assert names(answer) == ["b1"]


def topologies() -> dict[str, list[tuple[str, str]]]:
    pairs = list(itertools.pairwise(SITES))
    return {"unconnected": [], "star": [(SITES[0], one) for one in SITES[1:]], "linear": pairs}


SLOW = pytest.mark.soak  # six processes each


@pytest.mark.parametrize(
    "shape", [pytest.param("unconnected", marks=SLOW), "star", pytest.param("linear", marks=SLOW)]
)
def test_the_nearest_of_five_brokers_is_chosen_over_wide_area_delays(run: Run, shape: str) -> None:
    """Paper 9: five sites; in the linear topology one broker is registered."""
    need_namespaces()
    token = ("--token", "s3cret")
    hub = Hub([*SITES, "bdn", "client"])
    try:
        hub.connect(lambda one, other: max(DISTANT.get(one, 0.0), DISTANT.get(other, 0.0)) or 10.0)
        node = f"{hub.hosts['bdn']}:7419"
        run.start(hub.sites["bdn"], "bdn", "bdn", "--listen", node, *token)
        for site in SITES:
            links = [f"{hub.hosts[one]}:7420" for one, other in topologies()[shape] if other == site]
            words = [word for address in links for word in ("--link", address)]
            if shape != "linear" or site == SITES[0]:
                words += ["--bdn", node]
            words += [*token, "--link-token", "l1nk"]
            run.broker(hub.sites[site], site, "--listen", f"{hub.hosts[site]}:7420", *words)
        asked = ("discover", "--json", "--interface", hub.hosts["client"], "--bdn", node, *token)
        wait_until(lambda: names(run.ask(hub.sites["client"], *asked)) == sorted(SITES), "all five", 30)
        answer = run.ask(hub.sites["client"], *asked)
        assert answer["chosen"] == "indiana"
        pings = {row["broker"]: row["ping_ms"] for row in answer["responses"] if row["ping_ms"] is not None}
        assert pings["indiana"] >= 10.0
        delays = {row["broker"]: row["delay_ms"] for row in answer["responses"]}
        assert delays["cardiff"] > delays["indiana"]
    finally:
        run.end()
        hub.close()
