"""`postroad doctor`: a line for each check, with and without a broker, and nothing is changed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.worlds.processes import SOURCE, Brokers, configured

from postroad.errors import UsageError
from postroad.net.doctor import examine
from postroad.storage.backup import back_up

NOBODY = "127.0.0.1:1"


def doctor(*arguments: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """The exit code, and the findings by check."""
    outcome = subprocess.run(
        [sys.executable, "-m", "postroad", "doctor", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        check=False,
    )
    assert not outcome.stderr, outcome.stderr
    found: dict[str, list[dict[str, str]]] = {}
    for line in outcome.stdout.splitlines():
        finding = json.loads(line)
        assert (finding["result"] == "ok") == (not finding["advice"]), finding
        found.setdefault(finding["check"], []).append(finding)
    return outcome.returncode, found


def results(findings: list[dict[str, str]]) -> list[str]:
    return [finding["result"] for finding in findings]


def certificates(folder: Path, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "postroad", "certs", *arguments, "--folder", str(folder)],
        check=True,
        timeout=60,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )


def test_before_the_first_start_all_is_well_and_nothing_is_made(tmp_path: Path) -> None:
    config = configured(tmp_path, 'listen = "127.0.0.1:0"\nmetrics = "off"\ndata = "%s"\n' % (tmp_path / "d"))
    code, found = doctor(*config)
    assert code == 0, found
    assert {"version", "kernel", "configuration", "data folder", "disk space", "disk sync"} <= found.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["broker.toml"]


def test_what_is_wrong_is_said_with_what_to_do(tmp_path: Path) -> None:
    code, found = doctor(*configured(tmp_path, 'lisen = "127.0.0.1:0"\n'))
    assert code == 1
    assert "did you mean 'listen'" in found["configuration"][0]["text"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        text = f'listen = "127.0.0.1:{taken.getsockname()[1]}"\nmetrics = "off"\nlinks = ["{NOBODY}"]\n'
        code, found = doctor(*configured(tmp_path, text), "--data", str(tmp_path / "d"))
    assert code == 1
    assert results(found["ports"]) == results(found["link"]) == ["problem"]
    assert NOBODY in found["link"][0]["text"]
    code, found = doctor("--data", str(tmp_path / "d"), "--broker", NOBODY)
    assert code == 1
    assert results(found["broker"]) == ["problem"]


def test_a_folder_that_is_none_or_of_somebody_else_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    code, found = doctor("--data", str(file))
    assert code == 1
    assert found["data folder"][0]["text"] == f"{file} is not a folder"
    others = tmp_path / "others"
    others.mkdir()
    with closed(others):
        for folder in (others, others / "b1"):  # nobody tries the ports: that broker may have them
            assert [finding.check for finding in examine(None, folder)][-1] == "data folder"
        with pytest.raises(UsageError, match="be the user that its broker runs as"):
            back_up(others, tmp_path / "backup", lambda _done, _total: None)


@contextlib.contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Not to be looked into, by root neither."""
    root = not os.geteuid()
    folder.chmod(0)
    if root:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)
        folder.chmod(0o700)


def test_certificates_are_read_proved_and_their_names_and_days_told(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    certificates(folder, "authority")
    certificates(folder, "broker", "b1", "--host", "127.0.0.1", "--days", "10")

    def examined(host: str, ca: Path) -> tuple[int, list[dict[str, str]]]:
        text = f'listen = "{host}:0"\nmetrics = "off"\n[tls]\ncertificate = "{folder / "b1.pem"}"\n'
        text += f'key = "{folder / "b1.key"}"\nca = "{ca}"\n'
        code, found = doctor(*configured(tmp_path, text), "--data", str(tmp_path / "d"))
        return code, found["certificate"]

    code, found = examined("127.0.0.1", folder / "authority.pem")
    assert code == 0
    assert results(found) == ["warning", "ok", "ok", "ok"]  # ten days; the authority; signed; named
    assert "for 9 days more" in found[0]["text"] or "for 10 days more" in found[0]["text"]
    code, found = examined("127.0.0.2", folder / "authority.pem")
    assert code == 1
    assert "does not name 127.0.0.2" in found[-1]["text"]
    other = tmp_path / "other"
    certificates(other, "authority")
    code, found = examined("127.0.0.1", other / "authority.pem")
    assert code == 1
    assert any("is not signed by" in finding["text"] for finding in found)


def test_a_broker_that_runs_is_asked_and_left_as_it_is(brokers: Brokers) -> None:
    first = brokers.start("b1")
    second = brokers.start("b2", first.address)
    before = {path: path.stat().st_mtime_ns for path in first.data.rglob("*") if path.name == "postroad.db"}
    code, found = doctor("--data", str(first.data), "--broker", second.address)
    assert code == 0, found
    assert "in use by a broker" in found["data folder"][0]["text"]
    assert found["broker"][0]["text"] == f"b2 at {second.address} answers"
    assert len(found["clock"]) == 2  # its own, and that of the one it is linked with
    assert before == {path: path.stat().st_mtime_ns for path in before}
    first.kill()
    code, found = doctor("--data", str(first.data), "--broker", second.address)
    assert code == 1
    assert first.address in found["link"][0]["text"]
