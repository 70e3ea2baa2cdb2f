"""docs/how-to/secure-a-network.md does what it says: its commands are typed here, one after the other."""

from __future__ import annotations

from tests.worlds.pages import Desk, blocks
from tests.worlds.processes import wait_until

BLOCKS = [block for block in blocks("docs/how-to/secure-a-network.md") if block.language == "sh"]
COMMANDS = [line for block in BLOCKS for line in block.text.splitlines()]


def test_from_nothing_to_brokers_and_a_client_that_know_each_other(desk: Desk) -> None:
    assert len([line for line in COMMANDS[:10] if line]) == 10
    printed = {line: desk.command(line) for line in COMMANDS}
    read = next(said for line, said in printed.items() if line.startswith("postroad sub"))
    assert "for our eyes only" in read
    log = desk.brokers.all[0].log
    wait_until(lambda: "SIGHUP: certificates are read again" in log.read_text(), "b1 has its new certificate")
    desk.configuration = desk.folder / "other"
    stranger = desk.run("postroad status --broker 127.0.0.1:7420 --tls-ca certs/authority.pem")
    assert stranger.returncode == 1
