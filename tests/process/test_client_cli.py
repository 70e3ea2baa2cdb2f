"""`postroad pub`, `sub` and `demo` as processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import postroad

if TYPE_CHECKING:
    from tests.worlds.processes import Brokers

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(postroad.__path__[0]).parent), "PYTHONWARNINGS": "error"}


def cli(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "postroad", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
        check=False,
    )


def subscribe(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "postroad", "sub", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("subscribed to ")
    return process


def test_what_pub_publishes_sub_prints(brokers: Brokers) -> None:
    address = brokers.start("b1").address
    reader = subscribe(
        "orders/#",
        "--where",
        "price > 100",
        "--count",
        "2",
        "--timeout",
        "100",
        "--json",
        "--broker",
        address,
    )
    attributes = ("--attr", "price=120", "--attr", "weight=1.5", "--attr", "gift=true", "--attr-text", "n=7")
    first = cli("pub", "orders/eu", '{"n":1}', *attributes, "--broker", address)
    assert first.returncode == 0, first.stderr
    cheap = cli("pub", "orders/eu", "cheap", "--attr", "price=20", "--broker", address)
    assert cheap.returncode == 0
    second = cli(
        "pub", "orders/us", "--attr", "price=500", "--stdin", "--json", "--broker", address, stdin="zwei\n"
    )
    assert second.returncode == 0, second.stderr
    output, errors = reader.communicate(timeout=120)
    assert reader.returncode == 0, errors
    one, two = (json.loads(line) for line in output.splitlines())
    assert one["id"] == first.stdout.strip()
    assert one["attributes"] == {"price": 120, "weight": 1.5, "gift": True, "n": "7"}
    assert (one["topic"], one["payload"], one["encoding"]) == ("orders/eu", '{"n":1}', "utf-8")
    assert (one["pubend"], one["tick"]) == (None, None)
    assert one["published_at"].endswith("+00:00")
    assert two["id"] == json.loads(second.stdout)["id"]
    assert two["payload"] == "zwei"


def test_failures_are_short_and_say_what_to_do(brokers: Brokers) -> None:
    address = brokers.start("b1").address
    nobody = cli("pub", "a", "x", "--broker", "127.0.0.1:1")
    assert nobody.returncode == 1
    assert "no broker at 127.0.0.1:1" in nobody.stderr
    assert "postroad up" in nobody.stderr
    assert nobody.stderr.count("\n") == 1
    wrong = cli("sub", "a", "--where", "price >> 3", "--broker", address)
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1].strip() == "^"
    topic = cli("pub", "a/#", "x", "--broker", address)
    assert topic.returncode == 2
    late = cli("sub", "a", "--count", "1", "--timeout", "0.3", "--broker", address)
    assert late.returncode == 1
    assert "only 0 of 1 events" in late.stderr
    durable = cli("pub", "a", "x", "--durable", "--broker", address)
    assert durable.returncode == 0
    assert len(durable.stdout.split()) == 1
    none = cli("subs", "nobody", "--broker", address)
    assert none.returncode == 2
    for arguments, expected in (
        (("sub", ""), "a topic to subscribe to is such as orders/eu, orders/+ or orders/#"),
        (("sub", "a", "--where", ""), 'a condition is such as --where "price > 100"'),
        (("sub", "a", "--where", " "), 'a condition is such as --where "price > 100"'),
        (("subs", "retire"), "to retire a broker give its name: postroad subs retire BROKER"),
    ):
        asked = cli(*arguments, "--broker", address)
        assert (asked.returncode, asked.stderr.count("\n")) == (2, 1)
        assert expected in asked.stderr
    attribute = cli("pub", "a", "x", "--attr", "price", "--broker", address)
    assert attribute.returncode == 2


def test_demo_runs_a_network_and_leaves_nothing_behind(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "postroad", "demo", "--brokers", "3", "--seconds", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        env=ENVIRONMENT | {"TMPDIR": str(tmp_path)},
        check=False,
    )
    assert found.returncode == 0, found.stderr
    summary = json.loads(found.stdout)
    assert [row["broker"] for row in summary["brokers"]] == ["b1", "b2", "b3"]
    assert summary["published"] > 0
    # Every reader gets what is dear from every broker, not from its own only.
    assert all(row["received"] > 0 for row in summary["brokers"])
    assert summary["gaps"] == 0
    # And the path of a message is told; on a busy machine it may not have arrived everywhere yet.
    names = {"b1", "b2", "b3"}
    assert summary["trace"]["origin"]["broker"] in names
    assert {one["broker"] for one in summary["trace"]["route"]} <= names
    assert summary["trace"]["receivers"]
    assert list(tmp_path.iterdir()) == []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_bytes()
        except OSError:
            continue
        assert str(tmp_path).encode() not in command


def test_ctrl_c_ends_a_pub_that_waits_for_standard_input(brokers: Brokers) -> None:
    address = brokers.start("b1").address
    process = subprocess.Popen(
        [sys.executable, "-m", "postroad", "pub", "a/b", "--stdin", "--broker", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"one\n")
    process.stdin.flush()
    assert process.stdout.readline().count(b"-") == 3  # its id comes without waiting for more lines
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == b""


def test_a_payload_need_not_be_text(brokers: Brokers) -> None:
    address = brokers.start("b1").address
    reader = subscribe("a/#", "--count", "1", "--timeout", "100", "--json", "--broker", address)
    published = cli("pub", "a/b", "\udcff\udcfe", "--broker", address)  # bytes that are not UTF-8
    assert published.returncode == 0, published.stderr
    output, _ = reader.communicate(timeout=120)
    assert json.loads(output)["encoding"] == "base64"


def test_closed_descriptors_and_half_a_certificate(brokers: Brokers) -> None:
    address = brokers.start("b1").address
    command = f"{sys.executable} -m postroad pub a/b x --broker {address}"
    for closed in ("0<&-", "1>&-", "0<&- 1>&-"):
        done = subprocess.run(["sh", "-c", f"{command} {closed}"], env=ENVIRONMENT, check=False, timeout=120)
        assert done.returncode == 0, closed
    failing = f"{sys.executable} -m postroad pub a/b --attr wrong --broker {address} 2>&-"
    done = subprocess.run(
        ["sh", "-c", failing], env=ENVIRONMENT, check=False, timeout=120, stdout=subprocess.PIPE
    )
    assert (done.returncode, done.stdout) == (2, b"")  # nowhere to complain to is not standard output
    keyed = cli("pub", "a/b", "x", "--tls-key", "nowhere.pem", "--broker", address)
    assert keyed.returncode == 2  # never in the clear to someone who asked for TLS
    assert "--tls-cert" in keyed.stderr


def test_a_reader_says_when_its_broker_goes_and_comes(brokers: Brokers) -> None:
    b1 = brokers.start("b1")
    reader = subscribe("a/#", "--count", "1", "--broker", b1.address)
    b1.kill()
    assert reader.stderr is not None
    assert reader.stderr.readline().startswith("postroad: the connection to b1 is lost, dialling again: ")
    b1.start()
    assert reader.stderr.readline() == "postroad: connected again, to b1\n"
    assert "this client was not connected" in reader.stderr.readline()  # the Gap: it is in force again
    assert cli("pub", "a/b", "back", "--broker", b1.address).returncode == 0
    output, errors = reader.communicate(timeout=120)
    assert (reader.returncode, output.split(), errors) == (0, ["a/b", "back"], "")


def test_output_that_nobody_reads_ends_it_quietly(brokers: Brokers) -> None:
    """`postroad pub --stdin | head -1`, and the same of sub."""
    address = brokers.start("b1").address
    reader = subscribe("a/#", "--broker", address)
    lines = "".join(f"{n}\n" for n in range(20_000))
    command = f"{sys.executable} -m postroad pub a/b --stdin --broker {address} | head -1"
    # dash has no pipefail: the publisher's own exit code goes to a third descriptor.
    shell = f"exec 3>&1; ({command.replace(' | ', ' ; echo $? >&3) | ')} > /dev/null"
    done = subprocess.run(
        ["sh", "-c", shell],
        input=lines,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("141\n", "")
    assert reader.stdout is not None
    assert reader.stdout.readline().split() == ["a/b", "0"]
    reader.stdout.close()
    cli("pub", "a/b", "--count", "20000", "--broker", address)
    assert reader.stderr is not None
    assert reader.stderr.read() == ""
    assert reader.wait(60) == 141
    reader.stderr.close()


@pytest.mark.parametrize("module", ["typer", "asyncio"])
def test_ctrl_c_while_it_is_being_imported(module: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "postroad", "sub", "t", "--broker", address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if line.split("|")[-1].strip().startswith(module):
                break
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert (out, [line for line in error.splitlines() if not line.startswith("import time:")]) == ("", [])
    assert process.returncode == 130


def test_the_program_is_the_module() -> None:
    """So that both begin in the same place, which hears Ctrl-C before anything else is imported."""
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"postroad": "postroad.__main__:main"}
